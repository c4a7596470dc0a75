"""The peer's side of the decoding benchmark: CTranslate2 with a Transformer of random weights."""

import os
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks import cases
from benchmarks.cases import TrainingCase
from benchmarks.worker import Handlers, peak_memory_bytes, serve


def save_random_model(folder: str, case: TrainingCase, *, max_positions: int) -> None:
    """A post-norm Transformer of the case's shape, all three embeddings one matrix, as CTranslate2 stores it."""
    import ctranslate2

    random = np.random.default_rng(0)
    spec = ctranslate2.specs.TransformerSpec.from_config(
        (case.encoder_layers, case.decoder_layers), case.num_heads, pre_norm=False,
        activation=ctranslate2.specs.Activation.RELU,
    )  # fmt: skip
    width, hidden = case.model_dim, case.feed_forward_dim

    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.normal(0, width**-0.5, (rows, columns)).astype(np.float32)

    def fill_linear(linear: Any, rows: int, columns: int) -> None:
        linear.weight, linear.bias = matrix(rows, columns), np.zeros(rows, np.float32)

    def fill_norm(norm: Any) -> None:
        norm.gamma, norm.beta = np.ones(width, np.float32), np.zeros(width, np.float32)

    def fill_feed_forward(feed_forward: Any) -> None:
        fill_linear(feed_forward.linear_0, hidden, width)
        fill_linear(feed_forward.linear_1, width, hidden)
        fill_norm(feed_forward.layer_norm)

    def fill_attention(attention: Any, *widths: int) -> None:
        for linear, rows in zip(attention.linear, widths, strict=True):
            fill_linear(linear, rows, width)
        fill_norm(attention.layer_norm)

    embeddings = matrix(case.vocab_size, width)
    positions = random.normal(0, 1, (max_positions, width)).astype(np.float32)
    for stack, table in ((spec.encoder, spec.encoder.embeddings[0]), (spec.decoder, spec.decoder.embeddings)):
        table.weight = embeddings
        stack.scale_embeddings = True
        stack.position_encodings.encodings = positions
    for layer in spec.encoder.layer:
        fill_attention(layer.self_attention, 3 * width, width)
        fill_feed_forward(layer.ffn)
    for layer in spec.decoder.layer:
        fill_attention(layer.self_attention, 3 * width, width)
        fill_attention(layer.attention, width, 2 * width, width)
        fill_feed_forward(layer.ffn)
    spec.decoder.projection.weight = embeddings
    spec.decoder.projection.bias = np.zeros(case.vocab_size, np.float32)
    words = [str(number) for number in range(case.vocab_size)]
    words[cases.START_ID], words[cases.END_ID], words[0] = "<s>", "</s>", "<unk>"
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.decoder_start_token = "<s>"
    spec.validate()
    spec.save(folder)


def start(argument: dict[str, Any]) -> tuple[dict[str, Any], Handlers]:
    os.environ["CT2_USE_MKL"] = str(argument.get("mkl", 1))  # read when the library is loaded
    import ctranslate2

    case = TrainingCase(**argument["case"])
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(folder, case, max_positions=max(argument["longest_source"], argument["most_new"]) + 1)
        translator = ctranslate2.Translator(
            folder, device="cpu", compute_type=argument["dtype"], inter_threads=1, intra_threads=argument["threads"]
        )
    # it falls back to another type without a word where it has no kernels; int8 is "int8_float32" in full
    assert translator.compute_type.split("_")[0] == argument["dtype"], translator.compute_type

    def seconds(source: list[list[str]], new_tokens: int, beams: int) -> float:
        begun = time.perf_counter()
        made = translator.translate_batch(
            source, beam_size=beams, min_decoding_length=new_tokens, max_decoding_length=new_tokens, length_penalty=0,
            max_batch_size=0,
        )  # fmt: skip
        elapsed = time.perf_counter() - begun
        lengths = {len(result.hypotheses[0]) for result in made}
        assert lengths == {new_tokens}, f"expected {new_tokens} tokens a row, got {lengths}"
        return elapsed

    def run(*, rows: int, source_tokens: int, new_tokens: int, beams: int) -> dict[str, float]:
        source = [list(map(str, row)) for row in cases.random_sources(case.vocab_size, rows, source_tokens).tolist()]
        return {"seconds": seconds(source, new_tokens, beams), "first_seconds": seconds(source, 1, beams)}

    def warm_up(**setting: int) -> dict[str, Any]:
        run(**setting)
        return {}

    ready = {"versions": {"ctranslate2": ctranslate2.__version__}}
    peak = {"peak_memory": lambda: {"peak_memory_bytes": peak_memory_bytes()}}
    return ready, {"warm_up": warm_up, "run": run, **peak}


if __name__ == "__main__":
    serve(start)
