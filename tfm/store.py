"""A model folder: everything that a model needs to answer, and nothing else.

    config.json             {"format_version": 1, "library_version": "0.1.0", "model": {fields of ModelConfig}}
    model.safetensors       every parameter, under its path in the tree joined by "."
    source_tokenizer.json   the two files of the `tokenizers` library
    target_tokenizer.json

A save is a swap. The new model is written to the sibling `.NAME.incoming` and forced to disk, then the old folder is
renamed to `.NAME.previous`, the new one takes its place, and the old one is taken apart. Each step is one rename, so a
reader, or a process that is killed, finds a whole model at every moment: in the folder or, between the two renames, in
`.NAME.previous`, where `load_model` looks when the folder is missing or empty. The next save clears what a kill left
behind. Of both siblings only the four files above and safetensors' own temporary one are ever deleted; whatever else
lay in the old folder moves to the new one. One process may save to a folder at a time; any number may read.
"""

import dataclasses
import functools
import importlib.metadata
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from tfm.config import ModelConfig
from tfm.nn.params import Params, param_shapes
from tfm.tokenizer import Tokenizer

FORMAT_VERSION = 1
"""What this code writes, and the newest that it reads."""

_CONFIG, _PARAMS = "config.json", "model.safetensors"
_SOURCE_TOKENIZER, _TARGET_TOKENIZER = "source_tokenizer.json", "target_tokenizer.json"
_FILES = (_PARAMS, _SOURCE_TOKENIZER, _TARGET_TOKENIZER, _CONFIG)
_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class StoredModel:
    """What a model folder holds."""

    config: ModelConfig
    params: Params
    """NumPy arrays in host memory, in the dtypes they were saved in."""
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer


def save_model(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    params: Params,
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
) -> None:
    """Writes a model folder, or replaces the one that is there: see the module's docstring for what that guarantees.

    Args:
        folder: a path where nothing is yet, an empty folder, or a model folder; missing parents are made.
        config: the model.
        params: its parameters, float32 or bfloat16, all of them addressable from this process.
        source_tokenizer: turns source text into ids.
        target_tokenizer: turns generated ids into text.

    Raises:
        ValueError: parameters or tokenizers do not belong to `config`, or `folder` holds something else.
    """
    check_params(config, params)
    check_tokenizers(config, source_tokenizer, target_tokenizer)
    folder = _resolved(folder)
    incoming, previous = _sibling(folder, "incoming"), _sibling(folder, "previous")
    check_replaceable(folder)
    if previous.exists() and _is_vacant(folder):  # killed between the two renames
        if folder.exists():  # and then somebody made it anew
            folder.rmdir()
        previous.rename(folder)
    if previous.exists():  # killed after them
        _retire(previous, folder)
    if incoming.exists():  # killed before them
        _remove(incoming)

    incoming.mkdir(parents=True)
    try:
        _write(incoming, config, params, source_tokenizer, target_tokenizer)
    except Exception:
        _remove(incoming)
        raise
    if folder.exists():
        folder.rename(previous)
    incoming.rename(folder)
    _force_to_disk(folder.parent)
    if previous.exists():
        _retire(previous, folder)


def load_model(folder: str | os.PathLike[str]) -> StoredModel:
    """Reads a model folder, and checks that its parts belong together.

    Raises:
        ValueError: no folder, a file that is missing or unreadable, a newer format, or parameters or tokenizers that do
            not belong to the config; the message names them.
    """
    try:
        return _load(_resolved(folder))
    except OSError as error:
        raise ValueError(f"expected a model folder that can be read, got {error}") from error


def _resolved(folder: str | os.PathLike[str]) -> Path:
    """Raises ValueError for the root of all folders, which has no siblings to swap with."""
    path = Path(folder).resolve()
    if not path.name:
        raise ValueError(f"expected a model folder with a name of its own, got {path}")
    return path


def _load(folder: Path) -> StoredModel:
    """`_read`, again where a save came between."""
    for _ in range(100):
        place = folder
        if _sibling(folder, "previous").exists() and _is_vacant(folder):
            place = _sibling(folder, "previous")
        before = _identity(place)
        try:
            stored = _read(place)
        except Exception:
            if _identity(place) == before:
                raise
        else:
            if _identity(place) == before:
                return stored
        # A save came between two of the reads: they may be of two models.
    raise RuntimeError(f"{folder} was replaced again and again while it was read")


def check_params(config: ModelConfig, params: Any) -> None:
    """Raises ValueError, naming the arrays, if `params` are not exactly those of the model that `config` describes."""
    if not isinstance(params, Mapping):
        raise ValueError(f"expected parameters as a tree of named arrays, got {params!r:.80}")
    expected, found = _expected_shapes(config), dict(_flatten(params))
    if no_arrays := [f"{name} is {type(leaf).__name__}" for name, leaf in found.items() if not hasattr(leaf, "shape")]:
        raise ValueError(f"expected parameters as they were trained, arrays, got {_some(no_arrays)}")
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        parts = [f"{what} {_some(names)}" for what, names in (("missing", missing), ("unknown", extra)) if names]
        raise ValueError(f"parameters do not belong to the config: {'; '.join(parts)}")
    wrong_shapes = [
        f"{name}: expected shape {shape}, got {found[name].shape}"
        for name, shape in expected.items()
        if shape != found[name].shape
    ]
    if wrong_shapes:
        raise ValueError(f"parameters do not belong to the config: {_some(wrong_shapes, '; ')}")
    wrong_dtypes = [f"{name} is {array.dtype}" for name, array in found.items() if array.dtype.name not in _DTYPES]
    if wrong_dtypes:
        raise ValueError(f"expected parameters in {' or '.join(_DTYPES)}, got {_some(wrong_dtypes)}")


def check_tokenizers(config: ModelConfig, source_tokenizer: Tokenizer, target_tokenizer: Tokenizer) -> None:
    """Raises ValueError if a tokenizer has ids that the model does not, or another end token."""
    for side, tokenizer, rows in (
        ("source", source_tokenizer, config.source_vocab_size),
        ("target", target_tokenizer, config.target_vocab_size),
    ):
        if tokenizer.vocab_size > rows:
            raise ValueError(
                f"expected a {side} tokenizer of at most {rows} entries, the model's {side}_vocab_size, "
                f"got {tokenizer.vocab_size}"
            )
    if target_tokenizer.end_id != config.end_id:
        raise ValueError(
            f"expected a target tokenizer with the model's end_id {config.end_id}, got {target_tokenizer.end_id}"
        )


def _write(
    folder: Path, config: ModelConfig, params: Params, source_tokenizer: Tokenizer, target_tokenizer: Tokenizer
) -> None:
    """Writes the four files into an existing folder and forces them, and their names, to disk."""
    arrays = {name: np.asarray(array, order="C") for name, array in _flatten(params)}
    head = {"format_version": FORMAT_VERSION, "library_version": _library_version(), "model": config.to_dict()}
    (folder / _CONFIG).write_text(json.dumps(head, indent=2) + "\n", encoding="utf-8")
    source_tokenizer.save(folder / _SOURCE_TOKENIZER)
    target_tokenizer.save(folder / _TARGET_TOKENIZER)
    try:
        safetensors.numpy.save_file(arrays, folder / _PARAMS)
    except safetensors.SafetensorError as error:  # also for a full disk
        raise OSError(f"{folder / _PARAMS} cannot be written: {error}") from error
    shutil.copymode(folder / _CONFIG, folder / _PARAMS)  # safetensors lets its owner alone read the file
    for name in _FILES:
        _force_to_disk(folder / name)
    _force_to_disk(folder)


def _read(folder: Path) -> StoredModel:
    if not folder.is_dir():
        raise ValueError(f"expected a model folder at {folder}, got {'a file' if folder.exists() else 'nothing'}")
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"expected a model folder at {folder}, but it has no {', '.join(missing)}")
    config = _read_config(folder / _CONFIG)
    with (folder / _PARAMS).open("rb"):
        pass  # safetensors reports a file that may not be read as one that is not there
    try:
        arrays = safetensors.numpy.load_file(folder / _PARAMS)
    except (safetensors.SafetensorError, KeyError) as error:  # KeyError: a dtype that NumPy does not have
        raise ValueError(f"{folder / _PARAMS}: not a readable safetensors file: {error}") from error
    try:
        params = _unflatten(arrays)
        check_params(config, params)
        source_tokenizer = Tokenizer.load(folder / _SOURCE_TOKENIZER)
        target_tokenizer = Tokenizer.load(folder / _TARGET_TOKENIZER)
        check_tokenizers(config, source_tokenizer, target_tokenizer)
    except (ValueError, RecursionError) as error:  # the latter for a name of a thousand parts
        raise ValueError(f"{folder}: {error}") from error
    return StoredModel(config, params, source_tokenizer, target_tokenizer)


def _read_config(path: Path) -> ModelConfig:
    head = _read_json(path)
    if not isinstance(head, dict) or type(head.get("format_version")) is not int:
        raise ValueError(f"{path}: expected a JSON object with a whole number format_version")
    if not 1 <= head["format_version"] <= FORMAT_VERSION:
        raise ValueError(
            f"{path}: format_version {head['format_version']}, written by tfm {head.get('library_version', '?')}; "
            f"this is tfm {_library_version()}, which reads format_version 1 to {FORMAT_VERSION}"
        )
    if not isinstance(head.get("model"), dict):
        raise ValueError(f"{path}: expected the model's fields as an object under the key 'model'")
    try:
        return ModelConfig.from_dict(head["model"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deep
        raise ValueError(f"{path}: not readable as JSON: {error}") from error


@functools.lru_cache(maxsize=16)
def _expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by name, from a trace of the model's initialisation; nothing is allocated."""
    return {name: leaf.shape for name, leaf in _flatten(param_shapes(config))}


def _flatten(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields ("decoder.layer_0.norm.scale", array) pairs; a "." separates, so no key may have one."""
    for key, value in params.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _unflatten(arrays: Mapping[str, np.ndarray]) -> Params:
    params: Params = {}
    for name, array in arrays.items():
        *parents, last = name.split(".")
        node = params
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ValueError(f"the parameter names {name} and one of its beginnings exclude each other")
        if last in node:
            raise ValueError(f"the parameter names {name} and one that goes on from it exclude each other")
        node[last] = array
    return params


def _some(names: list[str], separator: str = ", ") -> str:
    """The first few of a list that may be as long as the model is deep."""
    shown = separator.join(names[:5])
    return shown if len(names) <= 5 else f"{shown}{separator}and {len(names) - 5} more"


def _sibling(folder: Path, role: str) -> Path:
    return folder.with_name(f".{folder.name}.{role}")


def _is_vacant(folder: Path) -> bool:
    """Nothing is there, or an empty folder."""
    try:
        return not any(folder.iterdir())
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        return False


def check_replaceable(folder: Path) -> None:
    """Raises ValueError where `save_model` would refuse to write: something lies there that is no model folder."""
    if not _may_replace(folder):
        raise ValueError(
            f"expected a model folder, an empty folder or nothing at {folder}; not replacing what is there"
        )


def _may_replace(folder: Path) -> bool:
    if _is_vacant(folder):
        return True
    if not folder.is_dir():
        return False
    try:
        head = _read_json(folder / _CONFIG)
    except (OSError, ValueError):
        return False
    return isinstance(head, dict) and {"format_version", "model"} <= head.keys()


def _retire(previous: Path, folder: Path) -> None:
    """Takes a replaced model folder apart: its files are deleted, anything else in it moves to the new folder."""
    for entry in sorted(previous.iterdir()):
        if entry.name not in _FILES:
            if (folder / entry.name).exists():
                raise ValueError(f"cannot move {entry} to {folder}, where that name is taken: move one of them away")
            entry.rename(folder / entry.name)
    _remove(previous)


def _remove(folder: Path) -> None:
    """Deletes the files of a model folder, then the folder, which must be empty by now.

    Among them is what a kill within safetensors leaves: it writes to `.tmpXXXXXX` beside the file, and renames that.
    """
    for path in (*(folder / name for name in _FILES), *folder.glob(".tmp*")):
        path.unlink(missing_ok=True)
    folder.rmdir()


def _identity(folder: Path) -> tuple[int, int, int] | None:
    """Changes when the folder is replaced, or a file appears in it or goes."""
    try:
        stat = folder.stat()
    except FileNotFoundError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns


def _force_to_disk(path: Path) -> None:
    """Flushes a file, or the names in a folder, so that a power cut after the rename cannot leave it empty."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _library_version() -> str:
    try:
        return importlib.metadata.version("tfm-jax")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
