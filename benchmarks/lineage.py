"""Trains every generation of sequence transduction on the same data and measures them; one JSON object a line.

    python -m benchmarks.lineage --quick
    python -m benchmarks.lineage --run runs/lineage --plot

Each measurement is written into the run's folder when it is made, and not made again: what was stopped goes on, within
the training of a model too. README.md says what the lines hold.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import lineage_report
from benchmarks.lineage_models import GENERATIONS, POSITIONS
from benchmarks.lineage_tasks import TASKS, write_pairs
from benchmarks.worker import available_cores, describe_machine
from train.compiled import keep_compiled

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is done."""

    budget: int
    """Parameters of each model."""
    steps: dict[str, int]
    """Updates, by task; a task that is not there is left out."""
    batch_tokens: int
    train_pairs: int
    test_pairs: int
    positions_steps: int
    seeds: tuple[int, ...]
    lengths: tuple[int, ...]
    """Of sources and answers whose decoding is timed."""
    rounds: int


QUICK = Size(150_000, {"reversal": 600}, 1024, 50_000, 280, 300, (0,), (16, 64), 3)
FULL = Size(
    150_000, {"reversal": 2500, "sorting": 1000, "cmudict": 2000}, 1024, 100_000, 1120, 1500, (0, 1, 2),
    (16, 64, 256, 1024), 5,
)  # fmt: skip
TINY = Size(5_000, {"reversal": 2}, 256, 40, 56, 2, (0,), (4, 8), 1)
"""For trying the script out."""
SIZES = {"quick": QUICK, "full": FULL, "tiny": TINY}
BEYOND = ((5, 30), (31, 40), (41, 50), (51, 60))
"""Lengths for which perplexity is measured, of models trained on the first range alone."""


class Ledger:
    """The records of a folder, one JSON object a line; nothing that is in it is measured again."""

    def __init__(self, path: Path):
        self._path = path
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # a line that was being written when the process ended
            os.truncate(path, len(whole.encode()))
        self.records: list[Record] = [json.loads(line) for line in whole.splitlines()]

    def find(self, key: Record) -> Record | None:
        return next((each for each in self.records if key.items() <= each.items()), None)

    def add(self, record: Record) -> Record:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.records.append(record)
        return record


def measure(size: Size, folder: Path, ledger: Ledger, models: Sequence[str], tasks: Sequence[str]) -> Iterator[Record]:
    """Every record, in the order of the table: one seed of everything before the next."""
    for seed in size.seeds:
        for task in tasks:
            for model in models:
                yield _errors(size, folder, ledger, task, model, seed)
        for positions in POSITIONS:
            yield _beyond_trained_length(size, folder, ledger, positions, seed)
    yield from _costs(size, folder, ledger, models)


def _errors(size: Size, folder: Path, ledger: Ledger, task: str, model: str, seed: int) -> Record:
    from benchmarks.lineage_training import errors_by_length, run_config, trained
    from tfm.nn.params import count_params
    from train.data import load_splits

    key: Record = {"record": "errors", "task": task, "model": model, "seed": seed}
    if (found := ledger.find(key)) is not None:
        return found
    data = _data(size, folder, task)
    most = TASKS[task].max_tokens
    config = run_config(
        GENERATIONS[model], data, max_tokens=most, budget=size.budget, steps=size.steps[task],
        batch_tokens=size.batch_tokens, seed=seed,
    )  # fmt: skip
    made = trained(config, folder / "runs" / f"{task}-{model}-{seed}")
    test = load_splits(config.data, ("test",)).test
    errors = errors_by_length(made, test, TASKS[task].groups, most)
    return ledger.add({**key, "parameters": count_params(made.params), "steps": config.steps, "errors": errors})


def _beyond_trained_length(size: Size, folder: Path, ledger: Ledger, positions: str, seed: int) -> Record:
    from benchmarks.lineage_training import perplexity_by_length, run_config, trained
    from train.data import load_splits

    key: Record = {"record": "perplexity", "positions": positions, "seed": seed}
    if (found := ledger.find(key)) is not None:
        return found
    data = _data(size, folder, "reversal", longest=BEYOND[0][1])
    config = run_config(
        POSITIONS[positions], data, max_tokens=64, budget=size.budget, steps=size.positions_steps,
        batch_tokens=size.batch_tokens, seed=seed,
    )  # fmt: skip
    made = trained(config, folder / "runs" / f"positions-{positions}-{seed}")
    test = load_splits(config.data, ("test",)).test
    return ledger.add({**key, "perplexity": perplexity_by_length(made, config, test, BEYOND)})


def _costs(size: Size, folder: Path, ledger: Ledger, models: Sequence[str]) -> Iterator[Record]:
    from benchmarks.lineage_speed import decoding_costs, training_speeds
    from benchmarks.lineage_training import run_config

    data = _data(size, folder, "reversal")
    configs = {
        model: run_config(
            GENERATIONS[model], data, max_tokens=64, budget=size.budget, steps=2, batch_tokens=size.batch_tokens, seed=0
        )
        for model in models
    }
    in_turn: Record = {"measured_in_turn": list(models)}  # only those are comparable
    found = [ledger.find({"record": "training speed", "model": model, **in_turn}) for model in models]
    if all(found):
        yield from (record for record in found if record)
    else:
        for record in training_speeds(configs, length=64, rounds=size.rounds):
            yield ledger.add({**record, **in_turn})
    for length in size.lengths:
        for model in models:
            key: Record = {"record": "decoding", "model": model, "length": length}
            yield ledger.find(key) or ledger.add(
                decoding_costs(model, configs[model].model, length=length, repeats=size.rounds)
            )


def _data(size: Size, folder: Path, task: str, *, longest: int = 60) -> Path:
    data = folder / "data" / (task if longest == 60 else f"{task}-{longest}")
    write_pairs(task, data, train_pairs=size.train_pairs, test_pairs=size.test_pairs, longest=longest)
    return data


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lineage", description=__doc__.split("\n")[0])
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", dest="size", action="store_const", const="quick", help="about 10 minutes on 2 cores")
    sizes.add_argument("--tiny", dest="size", action="store_const", const="tiny", help="only tries the script out")
    parser.set_defaults(size="full")
    parser.add_argument("--run", type=Path, help="the folder that all is kept in; without it nothing is kept")
    parser.add_argument("--models", nargs="+", choices=list(GENERATIONS), default=list(GENERATIONS))
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), help="by default all of the size")
    parser.add_argument("--plot", action="store_true", help="also draw PNG files into the run's folder")
    given = parser.parse_args(arguments)
    if given.plot and given.run is None:
        parser.error("--plot draws into the folder of --run, which is not given")
    size = SIZES[given.size]
    tasks = list(size.steps) if given.tasks is None else given.tasks
    if unknown := [task for task in tasks if task not in size.steps]:
        parser.error(f"expected tasks of {', '.join(size.steps)} for this size, got {', '.join(unknown)}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.run or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        made_of = {**dataclasses.asdict(size), "seeds": list(size.seeds), "lengths": list(size.lengths)}
        described, written = folder / "size.json", folder / "size.json.tmp"
        if described.exists() and described.read_text() != json.dumps(made_of) + "\n":
            parser.error(f"{folder} holds measurements of another size: {described.read_text().strip()}")
        written.write_text(json.dumps(made_of) + "\n")
        written.replace(described)
        keep_compiled()  # the seeds of a model share their programs
        print(json.dumps({"record": "machine", **describe_machine(available_cores())}), flush=True)
        ledger = Ledger(folder / "results.jsonl")
        records = []
        for record in measure(size, folder, ledger, given.models, tasks):
            print(json.dumps(record), flush=True)
            records.append(record)
        for record in lineage_report.claims(records):
            print(json.dumps(record), flush=True)
        print(lineage_report.table(records), file=sys.stderr)
        if given.plot:
            lineage_report.draw(records, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
