"""Our side of the decoding benchmark."""

import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import cases, flops, machine
from benchmarks.cases import TrainingCase
from benchmarks.decoding import GreedyWithoutEnd
from benchmarks.train_tfm import model_config, peak_memory
from benchmarks.worker import Handlers, serve
from tfm.decoding.beam import BeamSearch
from tfm.decoding.generate import generate, generate_n_best
from tfm.nn.models import build_model
from tfm.nn.params import Weights, init_params, prepare_for_inference

_compiled: list[float] = []
"""Seconds of each compilation of this process."""


def _listen(event: str, duration: float, **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled.append(duration)


jax.monitoring.register_event_duration_secs_listener(_listen)


class Decoder:
    """A model with random weights, warm for what it has done before."""

    def __init__(self, case: TrainingCase, weights: Weights, cache: str = "auto"):
        self.config = model_config(case)
        self.weights: Weights = weights
        self.model = build_model(self.config, dtype="auto" if weights == "int8" else weights, cache_dtype=cache)
        self.params = prepare_for_inference(init_params(self.model, jax.random.key(0)), weights)

    def warm_up(self, **setting: int) -> dict[str, Any]:
        """Compiles, and says how many programs: a whole call and a call for one token share theirs."""
        before = len(_compiled)
        self.run(**setting)
        return {"compilations": len(_compiled) - before}

    def run(self, *, rows: int, source_tokens: int, new_tokens: int, beams: int) -> dict[str, float]:
        """Seconds of a whole call and of a call for one token, from ids on the host to ids on the host."""
        source = cases.random_sources(self.config.source_vocab_size, rows, source_tokens)
        return {
            "seconds": self.seconds(source, new_tokens, new_tokens, beams),
            "first_seconds": self.seconds(source, 1, new_tokens, beams),
        }

    def seconds(self, source: np.ndarray, max_tokens: int, capacity: int, beams: int) -> float:
        start = time.perf_counter()
        if beams == 1:
            made = generate(
                self.model, self.params, source, max_tokens=max_tokens, capacity=capacity,
                sampler=GreedyWithoutEnd(self.config.end_id),
            )  # fmt: skip
        else:
            # An end token is as unlikely as any other of so many; were one among the best, the lengths would tell.
            search = BeamSearch(width=beams, alpha=0.0, stop="all-finished")
            made = generate_n_best(
                self.model, self.params, source, max_tokens=max_tokens, capacity=capacity, search=search
            )
        lengths = np.asarray(made.lengths)
        elapsed = time.perf_counter() - start
        assert (lengths == max_tokens).all(), f"expected {max_tokens} tokens a row, got {lengths}"
        return elapsed

    @functools.cache  # noqa: B019 - one decoder a process
    def _machine(self, matmul_sizes: tuple[int, ...]) -> tuple[float, float]:
        return machine.read_bandwidth(), machine.matmul_rate(self.weights, matmul_sizes)

    def floor(
        self, *, rows: int, source_tokens: int, new_tokens: int, beams: int, matmul_sizes: Sequence[int]
    ) -> dict[str, Any]:
        """What a step takes at least: the bytes it must read, or its multiplications, whichever takes longer."""
        num_bytes, operations = flops.decode_step_cost(
            self.config, rows=rows, beams=beams, source_tokens=source_tokens, position=new_tokens // 2,
            weight_bytes={"float32": 4, "bfloat16": 2, "int8": 1}[self.weights], cache_dtype=self.model.cache_dtype,
        )  # fmt: skip
        bandwidth, rate = self._machine(tuple(matmul_sizes))
        return {
            "step_bytes": num_bytes,
            "step_flops": operations,
            "read_bytes_per_second": round(bandwidth),
            "matmul_flops_per_second": round(rate),
            "floor_milliseconds": round(1e3 * max(num_bytes / bandwidth, operations / rate), 6),
        }


def start(argument: dict[str, Any]) -> tuple[dict[str, Any], Handlers]:
    decoder = Decoder(TrainingCase(**argument["case"]), argument["dtype"], argument.get("cache", "auto"))
    ready = {"versions": {"jax": jax.__version__}, "device_kind": jax.devices()[0].device_kind}
    handlers = {"warm_up": decoder.warm_up, "run": decoder.run, "floor": decoder.floor, "peak_memory": peak_memory}
    return ready, handlers


if __name__ == "__main__":
    serve(start)
