"""A run that takes seconds, for tests of the loop; as a program, a process of its own that can be told to die.

    python tests/tiny_run.py FOLDER [--steps N] [--kill PATTERN COUNT] [--slow-validation]

`--kill PATTERN COUNT`: the process gets SIGKILL, from itself, at the COUNT-th time that Python opens, makes, renames or
removes a file of the run whose path contains PATTERN; `step` in place of a pattern counts steps of training instead.
`--slow-validation`: each takes a minute more, and the file `validating` says that it has begun.
"""

import argparse
import dataclasses
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from tfm.config import ModelConfig
from train.config import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
    ValidationConfig,
)


def make_data(folder: Path) -> Path:
    """Words and their letters reversed, as TSV."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "words.tsv"
    if not file.exists():
        draw = random.Random(0)
        words = ["".join(draw.choices("abcdef", k=draw.randint(2, 7))) for _ in range(120)]
        file.write_text("".join(f"{word}\t{' '.join(reversed(word.upper()))}\n" for word in words))
    return file


def tiny_config(folder: Path, **changes) -> TrainConfig:
    """A run on the data in `folder`; changes by field or section."""
    sections = {
        "model": ModelConfig(model_dim=16, feed_forward_dim=32, num_heads=2, encoder_layers=1, decoder_layers=1),
        "data": DataConfig(
            train=(str(make_data(folder)),), validation_share=0.1, max_source_tokens=8, max_target_tokens=8
        ),
        "tokenizer": TokenizerConfig(source_kind="char", target_kind="word"),
        "batch": BatchConfig(tokens=128, max_shapes=2),
        "optimizer": OptimizerConfig(learning_rate=3e-3, warmup_steps=10),
        "validation": ValidationConfig(every_steps=6, metric="ter", max_examples=4, samples=2),
        "checkpoint": CheckpointConfig(every_steps=4, keep=2),
        "steps": 30,
        "log_every_steps": 5,
    }
    for name, change in changes.items():
        sections[name] = dataclasses.replace(sections[name], **change) if isinstance(change, dict) else change
    return TrainConfig(**sections)


def final_state(run_dir: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """Everything in a checkpoint, the newest by default, by name; read by orbax alone."""
    import orbax.checkpoint as ocp

    if step is None:
        step = max(int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdigit())
    tree = ocp.StandardCheckpointer().restore(run_dir.absolute() / "checkpoints" / str(step) / "state")
    return {name: np.asarray(leaf) for name, leaf in tree.items()}


def recorded_rows(run_dir: Path) -> list[dict]:
    """The rows of the record, without what depends on how fast the machine is."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("seconds", "tokens_per_second")} for row in rows]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at_a_file(run_dir: Path, pattern: str, count: int) -> None:
    left = count

    def watch(event: str, arguments: tuple) -> None:
        nonlocal left
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir") and isinstance(arguments[0], str | Path):
            path = str(arguments[0])
            if path.startswith(str(run_dir)) and pattern in path:
                left -= 1
                if left == 0:
                    _die()

    sys.addaudithook(watch)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kill", nargs=2)
    parser.add_argument("--slow-validation", action="store_true")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()

    from train import loop
    from train.progress import Reporter

    reporter = Reporter()
    if arguments.slow_validation:
        measure = loop.held_out_loss

        def measure_for_a_minute(*given, **named):
            (folder / "validating").touch()
            for _ in range(1200):
                time.sleep(0.05)
            return measure(*given, **named)

        loop.held_out_loss = measure_for_a_minute
    if arguments.kill:
        pattern, count = arguments.kill[0], int(arguments.kill[1])
        if pattern == "step":
            step, left = reporter.step, [count]

            def count_steps(*given):
                left[0] -= 1
                if left[0] == 0:
                    _die()
                step(*given)

            reporter.step = count_steps
        else:
            _die_at_a_file(folder / "run", pattern, count)
    outcome = loop.train(tiny_config(folder, steps=arguments.steps), folder / "run", reporter=reporter)
    return outcome.exit_status


if __name__ == "__main__":
    sys.exit(main())
