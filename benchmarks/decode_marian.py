"""The peer's side of the decoding benchmark: `generate` of transformers' MarianMT, with random weights, on torch."""

import time
from typing import Any

import torch
import transformers

from benchmarks import cases
from benchmarks.cases import TrainingCase
from benchmarks.train_marian import build
from benchmarks.worker import Handlers, peak_memory_bytes, serve


def start(argument: dict[str, Any]) -> tuple[dict[str, Any], Handlers]:
    torch.set_num_threads(argument["threads"])
    torch.manual_seed(0)
    case = TrainingCase(**argument["case"])
    most = max(argument["longest_source"], argument["most_new"] + 1)
    model = build(case, max_positions=most).eval()
    model.generation_config.update(bad_words_ids=None, forced_eos_token_id=None)

    def seconds(source: torch.Tensor, new_tokens: int, beams: int) -> float:
        begun = time.perf_counter()
        with torch.inference_mode():
            made = model.generate(
                source, attention_mask=torch.ones_like(source), min_new_tokens=new_tokens, max_new_tokens=new_tokens,
                num_beams=beams, do_sample=False, use_cache=True,
            )  # fmt: skip
        elapsed = time.perf_counter() - begun
        assert made.shape[1] == new_tokens + 1, f"expected {new_tokens} tokens and the start token, got {made.shape}"
        return elapsed

    def run(*, rows: int, source_tokens: int, new_tokens: int, beams: int) -> dict[str, float]:
        source = torch.from_numpy(cases.random_sources(case.vocab_size, rows, source_tokens)).long()
        return {"seconds": seconds(source, new_tokens, beams), "first_seconds": seconds(source, 1, beams)}

    def warm_up(**setting: int) -> dict[str, Any]:
        run(**setting)
        return {}

    ready = {"versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
    peak = {"peak_memory": lambda: {"peak_memory_bytes": peak_memory_bytes()}}
    return ready, {"warm_up": warm_up, "run": run, **peak}


if __name__ == "__main__":
    serve(start)
