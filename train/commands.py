"""What `tfm train`, `tfm evaluate` and `tfm info` do, once their arguments are understood; each returns its status."""

import argparse
import dataclasses
import json
import logging
import math
import shlex
import shutil
import textwrap
from pathlib import Path
from typing import Any

import jax

from tfm.batch import make_batch
from tfm.config import ModelConfig
from tfm.decoding.requests import Decoding
from tfm.decoding.sampling import Greedy
from tfm.nn.cache import CacheDtype, cache_bytes
from tfm.nn.layers import compute_dtype, stream_dtype
from tfm.nn.models import build_model
from tfm.nn.params import count_by_part, count_params, param_shapes
from tfm.pipeline import TextModel, load
from tfm.store import load_model
from tfm.text_metrics import HIGHER_IS_BETTER, signature
from train import loop, schema
from train.command_inputs import beam_search, data_config, find_model, is_model, read_split, read_texts
from train.config import BatchConfig, TrainConfig
from train.data import LengthReport, answerable, encode_examples, eval_batches
from train.evaluate import evaluate as evaluate_texts
from train.evaluate import held_out_loss
from train.optimizer import make_optimizer, peak_learning_rate
from train.plain_text import encode_texts
from train.prepare import prepare
from train.progress import Reporter, whole_row
from train.run_folder import RunFolder
from train.step import init_state, make_eval_step, make_train_step
from train.tasks import Examples


def train(config: TrainConfig, run_dir: Path, *, as_json: bool) -> int:
    """Trains, or goes on with the run in the folder."""
    # orbax and its event loop log whole tracebacks of what is raised as well
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    reporter = Reporter()
    folder = RunFolder(run_dir)
    try:
        outcome = loop.train(config, run_dir, reporter=reporter)
    except KeyboardInterrupt:
        if folder.config_path.is_file():
            saved = any(folder.checkpoints.glob("[0-9]*"))
            where = "to go on from the last checkpoint" if saved else "nothing was saved yet; to begin again"
            reporter.message(f"{where}: tfm train --run {shlex.quote(str(folder.path))}")
        raise
    if as_json:
        _print_json({"run": str(run_dir), **dataclasses.asdict(outcome)})
    elif outcome.exit_status == 0:
        reporter.message(f"next: tfm evaluate {shlex.quote(str(run_dir))}")
    return outcome.exit_status


def dry_run(config: TrainConfig, *, as_json: bool) -> int:
    """Says what training would do: batches, parameters, memory. Writes nothing."""
    prepared = prepare(config)
    config = prepared.config
    shape = max(prepared.train.shapes, key=lambda shape: shape.rows * (shape.source + shape.target))
    model = build_model(config.model, dtype=config.dtype)
    optimizer = make_optimizer(config.optimizer, config.steps)
    state = jax.eval_shape(lambda: init_state(model, optimizer, config))
    batch = jax.eval_shape(
        lambda: make_batch([], [], config.model, shape=(shape.source, shape.target), rows=shape.rows)
    )
    compiled = make_train_step(model, optimizer, config).lower(state, batch).compile()
    # Gradients, activations and whatever else XLA keeps besides what goes in and comes out.
    working = getattr(compiled.memory_analysis(), "temp_size_in_bytes", None)
    memory = {"parameters": _bytes(state.params), "optimizer": _bytes(state.opt_state), "step": working}
    if as_json:
        _print_json(
            {
                "shapes": [dataclasses.asdict(shape) for shape in prepared.train.shapes],
                "padding_share": prepared.train.padding_share,
                "batches_per_epoch": prepared.train.batches_per_epoch,
                "parameters": count_params(state.params),
                "parameters_by_part": count_by_part(state.params),
                "bytes": memory,
                "notes": prepared.notes,
            }
        )
        return 0
    for note in prepared.notes:
        print(note)
    epochs = config.steps / prepared.train.batches_per_epoch
    rate = peak_learning_rate(config.optimizer, config.steps)
    print(
        f"{config.steps:,} steps: {epochs:,.1f} epochs of {prepared.train.batches_per_epoch:,} batches; "
        f"learning rate up to {rate:.2e}"
    )
    _print_parameters(count_by_part(state.params))
    named = " + ".join(f"{name} {_mebibytes(size)}" for name, size in memory.items() if size is not None)
    total = _mebibytes(sum(size or 0 for size in memory.values()))
    print(f"memory: {total} = {named}; a step of {shape.rows} × ({shape.source}, {shape.target}) as compiled here")
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    """Measures a model on a split of its run, or on files."""
    folder, config = find_model(arguments.run)
    settings = TrainConfig() if config is None else config
    metrics = arguments.metrics or list(dict.fromkeys(["loss", settings.validation.metric]))
    for metric in metrics:
        if metric not in HIGHER_IS_BETTER:
            near = schema.nearest(metric, HIGHER_IS_BETTER)
            raise ValueError(f"no metric {metric!r}; the nearest is {near!r} of {', '.join(HIGHER_IS_BETTER)}")
    weights = arguments.weights or ("auto" if config is None else config.dtype)
    if load_model(folder).config.is_language_model:
        model = load(folder, weights=weights, cache=arguments.cache or "auto")
        return _evaluate_text(arguments, folder, config, model, metrics)
    examples = read_split(arguments.split, data_config(arguments, config), is_run=config is not None)
    model = load(folder, weights=weights, cache=arguments.cache or "auto")
    the_runs = model.config.max_target_length if config is None else config.max_new_tokens
    max_tokens = the_runs if arguments.max_tokens is None else arguments.max_tokens
    sampler: Decoding = Greedy() if arguments.beams is None else beam_search(arguments, model)
    if arguments.beams is not None and metrics == ["loss"]:
        raise ValueError("expected a metric of generated text with --beams, got only the loss")
    total = len(examples)
    examples = answerable(examples, model.source_tokenizer, model.config.max_source_length)
    if not len(examples):
        raise ValueError(
            f"none of {total:,} sources can be answered: each has no answer, is blank, or has more than "
            f"{model.config.max_source_length} tokens, the model's longest"
        )
    left_out = total - len(examples)

    values: dict[str, float] = {}
    pairs = None
    if "loss" in metrics:
        loss, pairs = _loss(model, examples, settings.batch)
        values |= loss
    generated = [metric for metric in metrics if metric != "loss"]
    if generated:
        values |= evaluate_texts(model, examples, generated, max_tokens=max_tokens, sampler=sampler).metrics
    signatures = {metric: text for metric in generated if (text := signature(metric, examples.references))}
    split = " ".join(arguments.split)
    if arguments.json:
        _print_json(
            {
                "model": str(folder), "split": split, "sources": len(examples), "left_out": left_out,
                "metrics": values, "signatures": signatures,
                **({} if pairs is None else {"pairs": dataclasses.asdict(pairs)}),
            }
        )  # fmt: skip
        return 0
    also = f", {left_out:,} left out as empty or too long" if left_out else ""
    print(f"{folder} on {split}: {len(examples):,} sources{also}")
    if pairs is not None and pairs.kept < pairs.total:
        print(f"  loss of {pairs}")
    for name, value in values.items():
        print(f"  {name:<12} {value:8.4f}  {signatures.get(name, '')}".rstrip())
    return 0


def _evaluate_text(
    arguments: argparse.Namespace, folder: Path, config: TrainConfig | None, model: TextModel, metrics: list[str]
) -> int:
    """Measures a language model, in blocks as the run has them."""
    if metrics != ["loss"] or arguments.beams is not None:
        raise ValueError(
            "expected only the loss, with which come perplexity and bits per byte, for a language model: there is no "
            f"generated text to compare, as with {'--beams' if metrics == ['loss'] else ', '.join(metrics)}"
        )
    block_tokens = model.config.max_target_length if config is None else config.data.max_target_tokens
    blocks = encode_texts(read_texts(arguments.split, config), model.target_tokenizer, block_tokens)
    batch = dataclasses.replace((TrainConfig() if config is None else config).batch, max_shapes=1)
    batches = eval_batches(blocks, model.config, batch)
    step = make_eval_step(model.model)
    values = held_out_loss(step, model.prepared_params, batches, text_bytes=blocks.text_bytes)
    split = " ".join(arguments.split)
    if arguments.json:
        sizes = {"tokens": len(blocks.ids), "bytes": blocks.text_bytes, "block_tokens": block_tokens}
        _print_json({"model": str(folder), "split": split, **sizes, "metrics": values})
        return 0
    print(f"{folder} on {split}: {blocks}")
    for name, value in values.items():
        print(f"  {name:<13} {value:8.4f}")
    return 0


def _loss(model: TextModel, examples: Examples, batch: BatchConfig) -> tuple[dict[str, float], LengthReport]:
    """Loss and perplexity over all right answers, and how many answers there were and were left out."""
    limits = (model.config.max_source_length, model.config.max_target_length)
    encoded, report = encode_examples(examples, model.source_tokenizer, model.target_tokenizer, *limits)
    batches = eval_batches(encoded, model.config, batch)
    return held_out_loss(make_eval_step(model.model), model.prepared_params, batches), report


def info(arguments: argparse.Namespace) -> int:
    """Says what a run or a model is."""
    path: Path = arguments.run
    is_run = not is_model(path) and (path / "config.json").is_file()
    config = RunFolder(path).read_config() if is_run else None
    model_config = load_model(find_model(path)[0]).config if config is None else config.model
    parts = count_by_part(param_shapes(model_config))
    cache_dtype = arguments.cache or stream_dtype(compute_dtype("auto" if config is None else config.dtype))
    size = _cache_size(model_config, arguments.batch, arguments.source_length, arguments.length, cache_dtype)
    metrics = _metrics_so_far(path / "metrics.jsonl")
    settings = {"model": model_config.to_dict()} if config is None else schema.encode(config)
    if arguments.json:
        _print_json(
            {
                "config": settings,
                "parameters": {"total": sum(parts.values()), "by_part": parts},
                "cache": size,
                "metrics": metrics,
            }
        )
        return 0
    width = shutil.get_terminal_size((120, 24)).columns
    sections = {name: values for name, values in settings.items() if isinstance(values, dict)}
    top = {name: value for name, value in settings.items() if name not in sections}
    for name, values in {**sections, **({"run": top} if top else {})}.items():
        text = "  ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items())
        print(textwrap.fill(f"{name}: {text}", width, subsequent_indent="    ", break_long_words=False))
    _print_parameters(parts)
    print(
        f"cache: {_mebibytes(size['bytes'])} for batch {size['batch']}, source length {size['source_length']}, "
        f"target length {size['length']}, in {size['dtype']}"
    )
    for split, row in metrics.items():
        shown = (f"{key} {value:.6g}" for key, value in row.items() if isinstance(value, int | float) and key != "step")
        print(textwrap.fill(f"{split} at step {row['step']:,}: {', '.join(shown)}", width, subsequent_indent="    "))
    if is_run and not metrics:
        print("no metrics yet")
    return 0


def _cache_size(
    config: ModelConfig, batch: int, source_length: int | None, length: int | None, dtype: CacheDtype
) -> dict[str, Any]:
    source_length = config.max_source_length if source_length is None else source_length
    length = config.max_target_length if length is None else length
    least = min(config.max_source_length, 1)  # a language model has no source
    for name, value, fewest in (
        ("--batch", batch, 1),
        ("--source-length", source_length, least),
        ("--length", length, 1),
    ):
        if value < fewest:
            raise ValueError(f"expected {name} of at least {fewest}, got {value}")
    size = cache_bytes(config, batch=batch, source_length=source_length, capacity=length, dtype=dtype)
    return {"batch": batch, "source_length": source_length, "length": length, "dtype": dtype, "bytes": size}


def _metrics_so_far(path: Path) -> dict[str, dict[str, Any]]:
    """The last row of each split, without samples."""
    rows: dict[str, dict[str, Any]] = {}
    for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else []:
        if (row := whole_row(line)) is not None:
            rows[row.pop("split")] = {key: value for key, value in row.items() if key != "samples"}
    return rows


def _print_parameters(parts: dict[str, int]) -> None:
    print(f"{sum(parts.values()):,} parameters: " + ", ".join(f"{name} {count:,}" for name, count in parts.items()))


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _print_json(value: Any) -> None:
    print(json.dumps(_finite(value), ensure_ascii=False))


def _finite(value: Any) -> Any:
    """JSON knows no infinity and no NaN: null stands for both."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
