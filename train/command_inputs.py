"""What a command works on, from its arguments: a model, the pairs of a split, a beam search."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from tfm.decoding.beam import BeamSearch
from tfm.pipeline import TextModel, load
from train.config import DataConfig, TrainConfig
from train.data import load_splits, read_examples
from train.device import use_device
from train.plain_text import Texts, load_texts, read_text
from train.run_folder import RunFolder
from train.tasks import Examples


def is_model(path: Path) -> bool:
    # A folder that is being replaced is elsewhere for a moment: see tfm.store.
    folder = path.resolve()
    return (folder / "model.safetensors").is_file() or (folder.parent / f".{folder.name}.previous").exists()


def find_model(path: Path) -> tuple[Path, TrainConfig | None]:
    """The model folder that is meant, and the settings of its run; a run's best model, or else its last one."""
    if is_model(path):
        beside = path.absolute().parent / "config.json"
        inside = path.name in ("best", "last") and beside.is_file()
        return path, _config_of_run(beside.parent) if inside else None
    if not (path / "config.json").is_file():
        raise ValueError(f"expected the folder of a run or of a model, got {path}, which is neither")
    config = RunFolder(path).read_config()
    for name in ("best", "last"):
        if is_model(path / name):
            return path / name, config
    raise ValueError(f"the run in {path} has no model yet: one is written with its first validation or checkpoint")


def _config_of_run(folder: Path) -> TrainConfig | None:
    """The settings of the run around a model; None where the `config.json` there is of something else.

    A run whose settings are damaged is an error: the model would silently answer by others.
    """
    try:
        return RunFolder(folder).read_config()
    except ValueError:
        if any((folder / name).exists() for name in ("checkpoints", "metrics.jsonl", ".lock", ".saved")):
            raise
        return None


def load_requested(arguments: argparse.Namespace) -> tuple[TextModel, TrainConfig | None]:
    """The model, on the device and in the weights that were asked for, and the settings of its run."""
    if arguments.device is not None:
        use_device(arguments.device)
    folder, config = find_model(arguments.run)
    most = {} if arguments.batch_tokens is None else {"max_batch_tokens": arguments.batch_tokens}
    weights = arguments.weights or ("auto" if config is None else config.dtype)
    cache = getattr(arguments, "cache", None) or "auto"  # scoring has none
    return load(folder, weights=weights, cache=cache, **most), config


def beam_search(arguments: argparse.Namespace, model: TextModel, num_best: int = 1) -> BeamSearch:
    names = ("alpha", "length_penalty", "stop", "coverage", "groups", "diversity")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    search = BeamSearch(width=arguments.beams, num_best=num_best, **given)
    search.check(1, model.config)  # also where no text will come
    return search


SPLITS = (["test"], ["validation"])
"""What a run has; any other split is files."""


def data_config(arguments: argparse.Namespace, config: TrainConfig | None) -> DataConfig:
    """The run's, with the JSONL keys that were given."""
    fields = {"source_field": arguments.source_field, "target_field": arguments.target_field}
    given = {name: field for name, field in fields.items() if field is not None}
    return dataclasses.replace((TrainConfig() if config is None else config).data, **given)


def read_split(split: Sequence[str], data: DataConfig, *, is_run: bool) -> Examples:
    """What is measured on: in line-aligned files each line, in other files each different source."""
    examples = read_pairs(split, data, is_run=is_run)
    return examples if list(split) in SPLITS or len(split) == 2 else examples.merged()


def read_texts(split: Sequence[str], config: TrainConfig | None) -> Texts:
    """The plain texts of a split: those of the run, or files."""
    if list(split) not in SPLITS:
        return tuple(map(read_text, split))
    if config is None:
        raise ValueError(f"a model's folder has no {split[0]} data: give a file, as in --split test.txt")
    if not (texts := load_texts(config.data, split[0])):
        raise ValueError(f"the run has no {split[0]} data: give a file, as in --split test.txt")
    return texts


def read_pairs(split: Sequence[str], data: DataConfig, *, is_run: bool) -> Examples:
    """The rows of a split as they stand."""
    if list(split) not in SPLITS:
        # Files of one's own need not be of the run's kind: its format holds where neither number nor ending decides.
        decided = len(split) == 2 or split[0].removesuffix(".gz").endswith((".json", ".jsonl"))
        format = data.format if is_run and not decided and data.format != "lines" else "auto"
        return read_examples(split, format, data.source_field, data.target_field)
    if not is_run:
        raise ValueError(f"a model's folder has no {split[0]} data: give files, as in --split test.tsv")
    examples = getattr(load_splits(data, split), split[0])
    if not len(examples):
        raise ValueError(f"the run has no {split[0]} data: give files, as in --split test.tsv")
    return examples
