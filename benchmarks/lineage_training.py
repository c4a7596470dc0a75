"""Training one model of the lineage, through the loop that `tfm train` has, and how often it is wrong by length."""

import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.lineage_models import of_budget
from benchmarks.lineage_tasks import source_length
from tfm.pipeline import TextModel, load
from tfm.text_metrics import score_texts
from train.config import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    LossConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
    ValidationConfig,
)
from train.data import build_tokenizers, encode_examples, eval_batches, load_splits
from train.evaluate import held_out_loss
from train.loop import train
from train.prepare import with_tokenizers
from train.run_folder import RunFolder
from train.step import make_eval_step
from train.tasks import Examples


class Quiet:
    """Hears what a training loop tells, and passes on warnings alone."""

    def warn(self, text: str) -> None:
        print(f"warning: {text}", file=sys.stderr)

    def message(self, text: str) -> None: ...
    def start(self, run_dir: Path, *, step: int, total_steps: int) -> None: ...
    def step(self, step: int, row: dict[str, Any]) -> None: ...
    def record(self, row: dict[str, Any]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def run_config(
    settings: dict[str, Any], data: Path, *, max_tokens: int, budget: int, steps: int, batch_tokens: int, seed: int
) -> TrainConfig:
    """A model of the budget, and all else the same for every model."""
    config = TrainConfig(
        data=DataConfig(
            train=(str(data / "train.tsv"),), test=(str(data / "test.tsv"),), max_source_tokens=max_tokens,
            max_target_tokens=max_tokens,
        ),
        tokenizer=TokenizerConfig(source_kind="word", shared=True),
        batch=BatchConfig(tokens=batch_tokens, max_shapes=2),
        optimizer=OptimizerConfig(learning_rate=5e-3, schedule="cosine", warmup_steps=steps // 10),
        loss=LossConfig(label_smoothing=0.0),
        validation=ValidationConfig(every_steps=0),
        checkpoint=CheckpointConfig(every_steps=max(1, steps // 4), keep=1),
        steps=steps,
        seed=seed,
        dtype="float32",
    )  # fmt: skip
    tokenizers = build_tokenizers(config.tokenizer, load_splits(config.data, ("train",)).train)
    model = of_budget(settings, budget, vocab_size=tokenizers[0].vocab_size, max_length=64)
    return with_tokenizers(dataclasses.replace(config, model=model), *tokenizers)


def trained(config: TrainConfig, run: Path) -> TextModel:
    """Trains it, or goes on where it was stopped; at once where it is done."""
    train(config, run, reporter=Quiet())
    return load(RunFolder(run).last)


def errors_by_length(
    model: TextModel, examples: Examples, groups: Iterable[tuple[int, int]], max_tokens: int
) -> dict[str, dict[str, float]]:
    """Token error rate and share of wrong outputs, in percent, of greedy answers; by range of source lengths."""
    answers = [answer.text for answer in model.generate(examples.sources, max_tokens=max_tokens)]
    lengths = [source_length(source) for source in examples.sources]
    errors = {}
    for low, high in groups:
        rows = [row for row, length in enumerate(lengths) if low <= length <= high]
        errors[f"{low}-{high}"] = score_texts(
            ("ter", "wer"), [answers[row] for row in rows], [examples.references[row] for row in rows]
        )
    return errors


def perplexity_by_length(
    model: TextModel, config: TrainConfig, examples: Examples, groups: Iterable[tuple[int, int]]
) -> dict[str, float]:
    """Perplexity of the right answers, by range of source lengths."""
    eval_step = make_eval_step(model.model)
    lengths = [source_length(source) for source in examples.sources]
    perplexities = {}
    for low, high in groups:
        rows = [row for row, length in enumerate(lengths) if low <= length <= high]
        some = Examples([examples.sources[row] for row in rows], [examples.references[row] for row in rows])
        encoded, _ = encode_examples(some, model.source_tokenizer, model.target_tokenizer, 64, 64)
        batches = eval_batches(encoded, config.model, config.batch)
        perplexities[f"{low}-{high}"] = held_out_loss(eval_step, model.params, batches)["perplexity"]
    return perplexities
