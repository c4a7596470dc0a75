"""Measures how soon an answer begins; one JSON object a line.

    python -m benchmarks.start --arch small

First, what the first tokens of a request that may become long cost, beside those of one that may not. Then how long
`tfm generate` takes from its start to its first line: once with an empty compilation cache, and then with a full one.
README.md says what the lines hold.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import cases
from benchmarks.cases import CASES, TrainingCase
from benchmarks.train import count
from benchmarks.worker import REPOSITORY, available_cores, limit_threads, print_records

FIRST_TOKENS, SHORT, LONG = 32, 64, 1024


def first_tokens(arch: str, case: TrainingCase, *, rows: int, rounds: int) -> Iterator[dict[str, Any]]:
    """The first tokens of a request with room for few tokens, and of one with room for many, in turn."""
    from benchmarks.decode_tfm import Decoder

    decoder = Decoder(case, "float32")
    source = cases.random_sources(case.vocab_size, rows, 32)
    for beams in (1, 4):
        seconds: dict[int, list[float]] = {SHORT: [], LONG: []}
        for turn in range(rounds + 1):
            for capacity, times in seconds.items():
                taken = decoder.seconds(source, FIRST_TOKENS, capacity, beams)
                times += [taken] * (turn > 0)  # the first turn compiles
        ratios = [long / short for short, long in zip(*seconds.values(), strict=True)]
        yield {
            "record": "first tokens",
            "arch": arch,
            "rows": rows,
            "beams": beams,
            "tokens": FIRST_TOKENS,
            "max_tokens": [SHORT, LONG],
            "milliseconds": [round(1e3 * statistics.median(times), 2) for times in seconds.values()],
            "ratio": round(statistics.median(ratios), 3),
            "ratio_by_round": [round(ratio, 3) for ratio in ratios],
        }


def save_random_model(folder: Path, case: TrainingCase) -> None:
    """A model folder with random weights, whose words are w0, w1, w2 and so on."""
    import jax

    from benchmarks.train_tfm import model_config
    from tfm.nn.models import build_model
    from tfm.nn.params import init_params
    from tfm.store import save_model
    from tfm.tokenizer import Tokenizer

    words = " ".join(f"w{number}" for number in range(case.vocab_size))
    tokenizer = Tokenizer.train([words], kind="word", vocab_size=case.vocab_size)
    config = model_config(case)
    params = init_params(build_model(config, dtype="float32"), jax.random.key(0))
    save_model(folder, config, params, tokenizer, tokenizer)


def starts(arch: str, case: TrainingCase, *, rounds: int) -> Iterator[dict[str, Any]]:
    """Seconds from starting `tfm generate` to its first line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_random_model(folder / "model", case)
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(REPOSITORY)}
        environment.pop("JAX_ENABLE_COMPILATION_CACHE", None)
        command = [
            sys.executable,
            "-m",
            "train.cli",
            "generate",
            str(folder / "model"),
            "w1 w2 w3",
            "--max-tokens",
            "32",
        ]

        def seconds() -> float:
            begun = time.perf_counter()
            with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
                assert process.stdout is not None
                line = process.stdout.readline()
                elapsed = time.perf_counter() - begun
                process.stdout.read()
            assert process.returncode == 0, f"tfm generate ended with {process.returncode}"
            assert line.endswith("\n"), f"expected a line, got {line!r}"
            return elapsed

        first, later = seconds(), [seconds() for _ in range(rounds)]
    yield {
        "record": "start",
        "arch": arch,
        "first_seconds": round(first, 2),
        "later_seconds": round(statistics.median(later), 2),
        "later_seconds_by_round": [round(one, 2) for one in later],
    }


def measure(arch: str, *, rows: int, rounds: int) -> Iterator[dict[str, Any]]:
    yield from first_tokens(arch, CASES[arch], rows=rows, rounds=rounds)
    yield from starts(arch, CASES[arch], rounds=rounds)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0; 2 for arguments that cannot be."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.start", description="Measures how soon an answer begins; one JSON object a line."
    )
    parser.add_argument("--arch", choices=CASES, default="small", help="default: small")
    parser.add_argument("--rows", type=count, default=8, help="of the first tokens; default: 8")
    parser.add_argument("--rounds", type=count, default=5, help="medians are over so many")
    parser.add_argument("--threads", type=count, help="CPU cores to use; default: all")
    options = parser.parse_args(argv)
    threads = options.threads or available_cores()
    try:
        limit_threads(threads)
    except ValueError as error:
        parser.error(str(error))
    return print_records(threads, measure(options.arch, rows=options.rows, rounds=options.rounds))


if __name__ == "__main__":
    sys.exit(main())
