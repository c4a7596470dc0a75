"""Our side of the training benchmark: the real train step, in this process or as a worker of `benchmarks.train`."""

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import cases, flops, machine
from benchmarks.cases import TrainingCase
from benchmarks.worker import Handlers, peak_memory_bytes, serve
from tfm.batch import Batch
from tfm.config import ModelConfig
from tfm.nn.layers import Dtype, compute_dtype
from tfm.nn.models import build_model
from tfm.nn.params import count_params
from train.config import LossConfig, OptimizerConfig, TokenizerConfig, TrainConfig
from train.optimizer import make_optimizer
from train.step import init_state, make_train_step

WARMUP_STEPS = 2


def model_config(case: TrainingCase) -> ModelConfig:
    return ModelConfig(
        source_vocab_size=case.vocab_size,
        target_vocab_size=case.vocab_size,
        shared_embeddings="all",
        norm_position="post",
        model_dim=case.model_dim,
        feed_forward_dim=case.feed_forward_dim,
        num_heads=case.num_heads,
        encoder_layers=case.encoder_layers,
        decoder_layers=case.decoder_layers,
        start_id=cases.START_ID,
        end_id=cases.END_ID,
        dropout_rate=cases.DROPOUT_RATE,
    )


def train_config(case: TrainingCase, dtype: Dtype) -> TrainConfig:
    """Plain Adam with a constant rate: nothing that a peer would not do too."""
    optimizer = OptimizerConfig(
        name="adamw", learning_rate=cases.LEARNING_RATE, schedule="constant", warmup_steps=0, clip_norm=0.0,
        beta1=cases.BETA1, beta2=cases.BETA2, epsilon=cases.EPSILON,
    )  # fmt: skip
    return TrainConfig(
        model=model_config(case),
        tokenizer=TokenizerConfig(shared=True),
        optimizer=optimizer,
        loss=LossConfig(label_smoothing=cases.LABEL_SMOOTHING),
        dtype=dtype,
    )


class Trainer:
    """A model under training, compiled and warm."""

    def __init__(self, case: TrainingCase, dtype: str):
        self.case = case
        self.dtype = compute_dtype(dtype)
        config = train_config(case, self.dtype)
        model = build_model(config.model, dtype=self.dtype)
        optimizer = make_optimizer(config.optimizer, config.steps)
        self._state = init_state(model, optimizer, config)
        self.parameters = count_params(self._state.params)
        self.flops_per_step = flops.train_step_flops(
            config.model, rows=case.rows, source_tokens=case.source_tokens, target_tokens=case.target_tokens
        )
        self._batches = [batch_of(pairs) for pairs in cases.random_pairs(case, 4)]
        self._done = 0
        step = make_train_step(model, optimizer, config)
        start = time.perf_counter()
        self._step = step.lower(self._state, self._batches[0]).compile()
        self.compile_seconds = time.perf_counter() - start
        self.run(WARMUP_STEPS)

    def run(self, steps: int) -> dict[str, float]:
        """So many steps: their wall time in seconds, until the last one's parameters are there, and the last loss."""
        jax.block_until_ready(self._state)
        start = time.perf_counter()
        for _ in range(steps):
            self._state, metrics = self._step(self._state, self._batches[self._done % len(self._batches)])
            self._done += 1
        jax.block_until_ready(self._state)
        seconds = time.perf_counter() - start
        if not bool(metrics.finite):
            raise FloatingPointError(f"the loss is {float(metrics.loss)} after {self._done} steps")
        return {"seconds": seconds, "loss": float(metrics.loss)}


def batch_of(pairs: cases.Pairs) -> Batch:
    rows, target_tokens = pairs.target_out.shape
    lengths = np.full(rows, pairs.source.shape[1], np.int32)
    weights = np.ones((rows, target_tokens), np.float32)
    return Batch(pairs.source, lengths, pairs.target_in, pairs.target_out, weights)


def peak_memory() -> dict[str, int]:
    """Of this process so far; and of the device, where it has a memory of its own."""
    peak = {"peak_memory_bytes": peak_memory_bytes()}
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        peak["device_peak_memory_bytes"] = stats["peak_bytes_in_use"]
    return peak


def start(argument: dict[str, Any]) -> tuple[dict[str, Any], Handlers]:
    trainer = Trainer(TrainingCase(**argument["case"]), argument["dtype"])

    def matmul_rate(sizes: Sequence[int]) -> dict[str, float]:
        return {"matmul_flops_per_second": machine.matmul_rate(trainer.dtype, sizes)}

    ready = {
        "dtype": trainer.dtype,
        "versions": {"jax": jax.__version__},
        "device_kind": jax.devices()[0].device_kind,
        "parameters": trainer.parameters,
        "compile_seconds": round(trainer.compile_seconds, 2),
        "model_flops_per_step": trainer.flops_per_step,
    }
    return ready, {"run": trainer.run, "peak_memory": peak_memory, "matmul_rate": matmul_rate}


if __name__ == "__main__":
    serve(start)
