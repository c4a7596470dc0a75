"""The peer's side of the training benchmark: MarianMT of transformers, from random weights, on torch.

Runs under whatever interpreter has torch and transformers; imports nothing of ours but plain data.
"""

import contextlib
import time
from typing import Any

import torch
import transformers

from benchmarks import cases
from benchmarks.cases import TrainingCase
from benchmarks.worker import Handlers, peak_memory_bytes, serve

WARMUP_STEPS = 2


def build(case: TrainingCase, *, max_positions: int) -> transformers.MarianMTModel:
    """Marian of the case's shape: post-norm, sinusoidal positions, one matrix for both embeddings and the output."""
    sizes = {
        f"{side}_{name}": value
        for side, layers in (("encoder", case.encoder_layers), ("decoder", case.decoder_layers))
        for name, value in (
            ("layers", layers),
            ("attention_heads", case.num_heads),
            ("ffn_dim", case.feed_forward_dim),
        )
    }
    config = transformers.MarianConfig(
        **sizes,
        vocab_size=case.vocab_size,
        decoder_vocab_size=case.vocab_size,
        d_model=case.model_dim,
        max_position_embeddings=max_positions,
        activation_function="relu",
        dropout=cases.DROPOUT_RATE,
        attention_dropout=0.0,
        activation_dropout=0.0,
        scale_embedding=True,
        share_encoder_decoder_embeddings=True,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=cases.START_ID,
        eos_token_id=cases.END_ID,
        decoder_start_token_id=cases.START_ID,
        forced_eos_token_id=None,
    )
    return transformers.MarianMTModel(config)


class Trainer:
    """A model under training, warm."""

    def __init__(self, case: TrainingCase, dtype: str):
        torch.manual_seed(0)
        self._dtype = dtype
        self._model = build(case, max_positions=max(case.source_tokens, case.target_tokens)).train()
        self.parameters = sum(p.numel() for p in self._model.parameters() if p.requires_grad)
        # fused: the fastest of torch's three
        self._optimizer = torch.optim.Adam(
            self._model.parameters(),
            lr=cases.LEARNING_RATE,
            betas=(cases.BETA1, cases.BETA2),
            eps=cases.EPSILON,
            fused=True,
        )
        self._loss = torch.nn.CrossEntropyLoss(label_smoothing=cases.LABEL_SMOOTHING)
        self._batches = [
            tuple(torch.from_numpy(ids).long() for ids in (pairs.source, pairs.target_in, pairs.target_out))
            for pairs in cases.random_pairs(case, 4)
        ]
        self._done = 0
        self.run(WARMUP_STEPS)

    def run(self, steps: int) -> dict[str, float]:
        """So many steps: their wall time in seconds, and the last loss."""
        start = time.perf_counter()
        for _ in range(steps):
            loss = self._step(*self._batches[self._done % len(self._batches)])
            self._done += 1
        return {"seconds": time.perf_counter() - start, "loss": loss.item()}

    def _step(self, source: torch.Tensor, target_in: torch.Tensor, target_out: torch.Tensor) -> torch.Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        low_precision = self._dtype == "bfloat16"
        with torch.autocast("cpu", dtype=torch.bfloat16) if low_precision else contextlib.nullcontext():
            # without attention masks: nothing is padded, and the peer is spared the work
            logits = self._model(input_ids=source, decoder_input_ids=target_in, use_cache=False).logits
        loss = self._loss(logits.float().flatten(0, 1), target_out.flatten())
        loss.backward()
        self._optimizer.step()
        return loss.detach()


def start(argument: dict[str, Any]) -> tuple[dict[str, Any], Handlers]:
    torch.set_num_threads(argument["threads"])
    trainer = Trainer(TrainingCase(**argument["case"]), argument["dtype"])
    ready = {
        "dtype": argument["dtype"],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "parameters": trainer.parameters,
    }
    return ready, {"run": trainer.run, "peak_memory": lambda: {"peak_memory_bytes": peak_memory_bytes()}}


if __name__ == "__main__":
    serve(start)
