"""Measures training: target tokens a second, model FLOPs a second, peak memory, compile time; one JSON object a line.

    python -m benchmarks.train --arch small --peer transformers --peer-python PATH

All that is measured for one architecture runs in turn, a few steps each, in processes of their own that stay warm:
ours in every dtype, and the peer in the same ones. What else happens on the machine then meets all of them, and the
ratios within a round are worth more than the rates. README.md says what the lines hold.
"""

import argparse
import contextlib
import dataclasses
import itertools
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.cases import CASES, MATMUL_SIZES, TrainingCase
from benchmarks.worker import Worker, available_cores, limit_threads, missing_modules, print_records

OURS = "benchmarks.train_tfm"


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another library that can train the same model."""

    module: str
    """Its worker."""
    needs: tuple[str, ...]
    """What the worker imports."""


PEERS = {"transformers": Peer("benchmarks.train_marian", ("torch", "transformers"))}


@dataclasses.dataclass
class Entry:
    """One library in one dtype, and how long its rounds took."""

    library: str
    worker: Worker
    tokens_per_round: int
    seconds: list[float] = dataclasses.field(default_factory=list)
    loss: float = float("nan")
    peak_memory: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def dtype(self) -> str:
        return self.worker.ready["dtype"]

    @property
    def label(self) -> str:
        return f"{self.library} {self.dtype}"

    @property
    def rates(self) -> list[float]:
        """Target tokens a second of each round."""
        return [self.tokens_per_round / seconds for seconds in self.seconds]


def measure(
    arch: str, case: TrainingCase, dtypes: Sequence[str], *, peer: str | None, peer_python: str, threads: int,
    rounds: int, steps: int,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yields one record for each library and dtype, then the ratios."""
    with contextlib.ExitStack() as stack:
        entries: list[Entry] = []
        for dtype in dtypes:
            libraries = [("tfm", OURS, sys.executable)]
            if peer is not None:
                libraries.append((peer, PEERS[peer].module, peer_python))
            for library, module, python in libraries:
                say(f"{arch}: {library} {dtype} compiles and warms up")
                argument = {"case": case.to_dict(), "dtype": dtype, "threads": threads}
                worker = stack.enter_context(Worker(module, argument, python=python))
                entries.append(Entry(library, worker, steps * case.tokens_per_step))

        counts = {entry.worker.ready["parameters"] for entry in entries}
        assert len(counts) == 1, f"not the same model: {counts} parameters"
        for number in range(1, rounds + 1):
            for entry in entries:
                result = entry.worker.ask("run", steps=steps)
                entry.seconds.append(result["seconds"])
                entry.loss = result["loss"]
                say(f"{arch}: round {number} of {rounds}: {entry.label}: {entry.rates[-1]:,.0f} target tokens/s")
        for entry in entries:
            entry.peak_memory = entry.worker.ask("peak_memory")
        # after that, because the products' operands would count as memory
        for entry in entries:
            yield training_record(arch, case, entry, rounds=rounds, steps=steps)
        for ours, other in comparisons(entries):
            yield ratio_record(arch, ours, other)


def training_record(arch: str, case: TrainingCase, entry: Entry, *, rounds: int, steps: int) -> dict[str, Any]:
    ready = dict(entry.worker.ready)
    rate = statistics.median(entry.rates)
    record = {
        "record": "training",
        "library": entry.library,
        "arch": arch,
        **case.to_dict(),
        "rounds": rounds,
        "steps_per_round": steps,
        "target_tokens_per_second": round(rate, 1),
        "target_tokens_per_second_by_round": [round(rate, 1) for rate in entry.rates],
        "last_loss": round(entry.loss, 4),
        **entry.peak_memory,
    }
    if entry.library == "tfm":
        model_rate = ready["model_flops_per_step"] * rate / case.tokens_per_step
        best = entry.worker.ask("matmul_rate", sizes=MATMUL_SIZES)["matmul_flops_per_second"]
        record |= {
            "model_flops_per_second": round(model_rate),
            "matmul_flops_per_second": round(best),
            "share_of_matmul_rate": round(model_rate / best, 3),
        }
    return record | ready


def comparisons(entries: Sequence[Entry]) -> Iterator[tuple[Entry, Entry]]:
    """Ours with the peer in the same dtype, and ours in every other dtype with ours in the first."""
    ours = [entry for entry in entries if entry.library == "tfm"]
    for entry in ours:
        yield from ((entry, other) for other in entries if other.library != "tfm" and other.dtype == entry.dtype)
    yield from ((entry, ours[0]) for entry in ours[1:])


def ratio_record(arch: str, entry: Entry, other: Entry) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(entry.rates, other.rates, strict=True)]
    return {
        "record": "ratio",
        "arch": arch,
        "of": entry.label,
        "to": other.label,
        "speed_by_round": [round(ratio, 3) for ratio in ratios],
        "speed": round(statistics.median(ratios), 3),
        "peak_memory": round(entry.peak_memory["peak_memory_bytes"] / other.peak_memory["peak_memory_bytes"], 3),
    }


def resolve_dtypes(names: Sequence[str]) -> list[str]:
    """The dtypes without repetition, "auto" as what it is here; another process looks, and keeps no device."""
    if "auto" in names:
        look = "from tfm.nn.layers import compute_dtype; print(compute_dtype('auto'))"
        auto = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout.strip()
        say(f"dtype auto is {auto} here")
        names = [auto if name == "auto" else name for name in names]
    return list(dict.fromkeys(names))


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train",
        description="Measures the speed and memory of training; prints one JSON object a line.",
    )
    parser.add_argument("--arch", nargs="+", choices=CASES, default=["base", "small"], help="default: base small")
    parser.add_argument(
        "--dtype", nargs="+", choices=["float32", "bfloat16", "auto"], default=["float32", "auto"],
        help="of the operands of large products; default: float32 auto",
    )  # fmt: skip
    parser.add_argument("--rounds", type=count, default=5, help="turns of each library; medians are over them")
    parser.add_argument("--steps", type=count, default=5, help="training steps of a round")
    parser.add_argument("--threads", type=count, help="CPU cores that each library gets; default: all")
    parser.add_argument("--peer", choices=PEERS, help="a library to train the same model with, in turn with ours")
    parser.add_argument(
        "--peer-python", default=sys.executable, help="the interpreter that has the peer; default: this one"
    )
    return parser


def count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 if a worker failed; 2 for arguments that cannot be."""
    parser = build_parser()
    options = parser.parse_args(argv)
    threads = options.threads or available_cores()
    try:
        missing = missing_modules(options.peer_python, PEERS[options.peer].needs) if options.peer else []
        if missing:
            raise ValueError(
                f"--peer {options.peer} needs {' and '.join(missing)}, which {options.peer_python} does not have: "
                "pip install -e '.[peers]', or name another interpreter with --peer-python"
            )
        limit_threads(threads)
    except ValueError as error:
        parser.error(str(error))

    dtypes = resolve_dtypes(options.dtype)
    records = (
        measure(
            arch, CASES[arch], dtypes, peer=options.peer, peer_python=options.peer_python, threads=threads,
            rounds=options.rounds, steps=options.steps,
        )
        for arch in dict.fromkeys(options.arch)
    )  # fmt: skip
    return print_records(threads, itertools.chain.from_iterable(records))


if __name__ == "__main__":
    sys.exit(main())
