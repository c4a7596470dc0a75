"""Measures decoding: tokens a second, a step, the first token, beside what the machine allows; one JSON object a line.

    python -m benchmarks.decode --arch base --rows 1 8 32 --peer ctranslate2 transformers --peer-python PATH

All that is measured for one architecture runs in turn, call by call, in processes of their own that stay warm. Every
library makes exactly as many tokens as were asked for, from random weights of the same shapes. README.md says what the
lines hold.
"""

import argparse
import contextlib
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.cases import CASES, MATMUL_SIZES, TrainingCase
from benchmarks.train import count, say
from benchmarks.worker import Worker, available_cores, limit_threads, missing_modules, print_records


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One library in one dtype."""

    library: str
    dtype: str
    module: str
    """Its worker."""
    needs: tuple[str, ...] = ()
    """What the worker imports, where it is a peer."""
    options: tuple[tuple[str, Any], ...] = ()
    """Told to the worker besides."""

    @property
    def label(self) -> str:
        return " ".join([self.library, self.dtype, *(f"{name}={value}" for name, value in self.options)])


OURS = "benchmarks.decode_tfm"
PEERS = {
    "ctranslate2": [
        Contestant("ctranslate2", "float32", "benchmarks.decode_ctranslate2", ("ctranslate2",), (("mkl", 1),)),
        Contestant("ctranslate2", "float32", "benchmarks.decode_ctranslate2", ("ctranslate2",), (("mkl", 0),)),
        Contestant("ctranslate2", "int8", "benchmarks.decode_ctranslate2", ("ctranslate2",)),
    ],
    "transformers": [
        Contestant("transformers", "float32", "benchmarks.decode_marian", ("torch", "transformers")),
    ],
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is asked for."""

    rows: int
    source_tokens: int
    new_tokens: int
    beams: int

    def to_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)


def measure(
    arch: str, case: TrainingCase, contestants: Sequence[Contestant], settings: Sequence[Setting], *, peer_python: str,
    threads: int, rounds: int,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yields, for each setting, one record for each contestant, and the ratios of ours to the others."""
    with contextlib.ExitStack() as stack:
        workers: dict[Contestant, Worker] = {}
        for contestant in contestants:
            say(f"{arch}: {contestant.label} starts")
            argument = {
                "case": case.to_dict(), "dtype": contestant.dtype, "threads": threads, **dict(contestant.options),
                "longest_source": max(setting.source_tokens for setting in settings),
                "most_new": max(setting.new_tokens for setting in settings),
            }  # fmt: skip
            python = peer_python if contestant.needs else sys.executable
            workers[contestant] = stack.enter_context(Worker(contestant.module, argument, python=python))
        for setting in settings:
            say(f"{arch}: {setting}")
            seconds: dict[Contestant, list[tuple[float, float]]] = {contestant: [] for contestant in contestants}
            warm = {contestant: worker.ask("warm_up", **setting.to_dict()) for contestant, worker in workers.items()}
            for _, (contestant, worker) in itertools.product(range(rounds), workers.items()):
                made = worker.ask("run", **setting.to_dict())
                seconds[contestant].append((made["seconds"], made["first_seconds"]))
            for contestant, worker in workers.items():
                record = decoding_record(arch, setting, contestant, worker, seconds[contestant])
                yield record | warm[contestant]
            yield from ratio_records(arch, setting, seconds)


def decoding_record(
    arch: str, setting: Setting, contestant: Contestant, worker: Worker, seconds: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    steps = [(whole - first) / (setting.new_tokens - 1) for whole, first in seconds]
    record = {
        "record": "decoding",
        "arch": arch,
        "library": contestant.library,
        "dtype": contestant.dtype,
        **dict(contestant.options),
        **setting.to_dict(),
        "tokens_per_second": round(statistics.median(tokens_per_second(setting, whole) for whole, _ in seconds), 1),
        "step_milliseconds": round(1e3 * statistics.median(steps), 2),
        "first_token_milliseconds": round(1e3 * statistics.median(first for _, first in seconds), 2),
        "rounds": len(seconds),
        **worker.ask("peak_memory"),
    }
    if contestant.module == OURS:
        record |= worker.ask("floor", **setting.to_dict(), matmul_sizes=MATMUL_SIZES)
    return record | worker.ready


def tokens_per_second(setting: Setting, seconds: float) -> float:
    """New tokens of the best hypothesis of each row."""
    return setting.rows * setting.new_tokens / seconds


def ratio_records(
    arch: str, setting: Setting, seconds: dict[Contestant, list[tuple[float, float]]]
) -> Iterator[dict[str, Any]]:
    """How many times as fast ours is as the peers, and as ours in the first dtype: medians of ratios within a round."""
    ours = [contestant for contestant in seconds if contestant.module == OURS]
    peers = [contestant for contestant in seconds if contestant.module != OURS]
    for our, other in [*itertools.product(ours, peers), *itertools.product(ours[1:], ours[:1])]:
        ratios = [theirs[0] / mine[0] for mine, theirs in zip(seconds[our], seconds[other], strict=True)]
        yield {
            "record": "ratio",
            "arch": arch,
            **setting.to_dict(),
            "of": our.label,
            "to": other.label,
            "speed": round(statistics.median(ratios), 3),
            "speed_by_round": [round(ratio, 3) for ratio in ratios],
        }


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode",
        description="Measures the speed of decoding; prints one JSON object a line.",
    )
    parser.add_argument("--arch", nargs="+", choices=CASES, default=["base", "small"], help="default: base small")
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=["float32", "bfloat16", "int8"],
        default=["float32", "bfloat16", "int8"],
        help="ours",
    )
    parser.add_argument(
        "--cache",
        nargs="+",
        choices=["auto", "float32", "bfloat16", "int8"],
        default=["auto"],
        help="what ours keeps keys and values in; default: auto, which rounds nothing",
    )
    parser.add_argument("--rows", nargs="+", type=count, default=[1, 8, 32, 64], help="default: 1 8 32 64")
    parser.add_argument("--source", nargs="+", type=count, default=[32], help="source tokens; default: 32")
    parser.add_argument("--new", nargs="+", type=count, default=[64], help="new tokens, at least 2; default: 64")
    parser.add_argument("--beams", nargs="+", type=count, default=[1, 4], help="1 is greedy; default: 1 4")
    parser.add_argument("--rounds", type=count, default=5, help="turns of each library; medians are over them")
    parser.add_argument("--threads", type=count, help="CPU cores that each library gets; default: all")
    parser.add_argument("--peer", nargs="+", choices=PEERS, default=[], help="libraries to decode beside ours")
    parser.add_argument(
        "--peer-python", default=sys.executable, help="the interpreter that has the peers; default: this one"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 if a worker failed; 2 for arguments that cannot be."""
    parser = build_parser()
    options = parser.parse_args(argv)
    threads = options.threads or available_cores()
    contestants = [
        Contestant("tfm", dtype, OURS, options=() if cache == "auto" else (("cache", cache),))
        for dtype, cache in itertools.product(dict.fromkeys(options.dtype), dict.fromkeys(options.cache))
    ]
    contestants += [contestant for peer in dict.fromkeys(options.peer) for contestant in PEERS[peer]]
    try:
        needed = sorted({name for contestant in contestants for name in contestant.needs})
        missing = missing_modules(options.peer_python, needed) if needed else []
        if missing:
            raise ValueError(f"--peer needs {' and '.join(missing)}, which {options.peer_python} does not have")
        if min(options.new) < 2:
            raise ValueError("expected at least 2 new tokens, of which a step can be timed")
        limit_threads(threads)
    except ValueError as error:
        parser.error(str(error))

    settings = [Setting(*one) for one in itertools.product(options.rows, options.source, options.new, options.beams)]
    records = (
        measure(
            arch, CASES[arch], contestants, settings, peer_python=options.peer_python, threads=threads,
            rounds=options.rounds,
        )
        for arch in dict.fromkeys(options.arch)
    )  # fmt: skip
    return print_records(threads, itertools.chain.from_iterable(records))


if __name__ == "__main__":
    sys.exit(main())
