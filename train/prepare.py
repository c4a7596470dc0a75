"""From the description of a run to what its loop needs: tokenizers, batches, held-out pairs. Trains nothing."""

import dataclasses
import itertools

from tfm.tokenizer import Tokenizer
from train.config import TrainConfig
from train.data import (
    EvalBatches,
    TrainBatches,
    answerable,
    build_shared_tokenizer,
    build_tokenizers,
    encode_examples,
    eval_batches,
    load_splits,
    train_batches,
)
from train.optimizer import peak_learning_rate
from train.plain_text import encode_texts, lines_of, load_texts, prompts_with_continuations
from train.tasks import Examples


@dataclasses.dataclass(frozen=True)
class Prepared:
    """All that a run is made of, besides parameters."""

    config: TrainConfig
    """With the vocabulary sizes and special ids of the tokenizers."""
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    train: TrainBatches
    validation: EvalBatches | None
    """`None`: there is nothing held out, or nothing is validated."""
    examples: Examples
    """Held-out sources that text can be generated for, one row a source; of plain text, beginnings and how they go on.
    """
    notes: tuple[str, ...]
    """What became of the pairs, and the table of shapes: to be shown line by line."""


def prepare(config: TrainConfig, tokenizers: tuple[Tokenizer, Tokenizer] | None = None) -> Prepared:
    """Reads the data, makes or takes the tokenizers, and plans the batches.

    Args:
        config: the run.
        tokenizers: of source and target, where the run has them already. `None`: loaded or trained as `config` says.

    Raises:
        ValueError: see `load_splits`, `build_tokenizers`, `train_batches`; and held-out pairs of which none fits.
    """
    if config.data.is_plain_text:
        return _prepare_text(config, tokenizers)
    wanted = ("train", "validation") if config.validation.every_steps else ("train",)
    splits = load_splits(config.data, wanted)
    source, target = build_tokenizers(config.tokenizer, splits.train) if tokenizers is None else tokenizers
    config = with_tokenizers(config, source, target)
    limits = (config.data.max_source_tokens, config.data.max_target_tokens)
    encoded, report = encode_examples(splits.train, source, target, *limits)
    if not len(encoded):
        raise ValueError(f"expected pairs that can be trained on, got: {report}")
    batches = train_batches(encoded, config.model, config.batch, seed=config.seed)
    notes = [f"training: {report}", *batches.describe()]

    validation, examples = None, Examples([], [])
    if config.validation.every_steps and len(splits.validation):
        held_out, report = encode_examples(splits.validation, source, target, *limits)
        if not len(held_out):
            raise ValueError(f"expected held-out pairs that can be used, got: {report}")
        validation = eval_batches(held_out, config.model, config.batch)
        examples = answerable(splits.validation, source, limits[0])
        answered = min(len(examples), config.validation.max_examples)
        notes.append(f"validation: {report}; {answered:,} of {len(splits.validation):,} sources to answer")
    elif config.validation.every_steps:
        notes.append("validation: no held-out pairs, so nothing is validated; see data.validation_share")
    notes += _warmup_note(config)
    return Prepared(config, source, target, batches, validation, examples, tuple(notes))


def _prepare_text(config: TrainConfig, tokenizers: tuple[Tokenizer, Tokenizer] | None) -> Prepared:
    """`prepare` for a language model: text in blocks, all of one shape."""
    texts, size = load_texts(config.data, "train"), config.data.max_target_tokens
    if tokenizers is None:
        tokenizer = build_shared_tokenizer(config.tokenizer, itertools.chain.from_iterable(map(lines_of, texts)))
    else:
        tokenizer, _ = tokenizers
    config = with_tokenizers(config, tokenizer, tokenizer)
    blocks = encode_texts(texts, tokenizer, size)
    if len(blocks.ids) < size:
        raise ValueError(
            f"expected training text of at least one block of {size} tokens (data.max_target_tokens), got "
            f"{len(blocks.ids)} tokens"
        )
    one_shape = dataclasses.replace(config.batch, max_shapes=1)
    batches = train_batches(blocks, config.model, one_shape, seed=config.seed)
    notes = [f"training: {blocks}", *batches.describe()]
    validation, examples = None, Examples([], [])
    if config.validation.every_steps and (held_out := load_texts(config.data, "validation")):
        held_out_blocks = encode_texts(held_out, tokenizer, size)
        validation = eval_batches(held_out_blocks, config.model, one_shape)
        halves = prompts_with_continuations(held_out_blocks, tokenizer, config.validation.samples)
        examples = Examples([prompt for prompt, _ in halves], [[rest] for _, rest in halves])
        whence = "" if config.data.validation else f", the last {config.data.validation_share:.1%} of the training text"
        notes.append(f"validation: {held_out_blocks}{whence}")
    elif config.validation.every_steps:
        notes.append("validation: no held-out text, so nothing is validated; see data.validation_share")
    notes += _warmup_note(config)
    return Prepared(config, tokenizer, tokenizer, batches, validation, examples, tuple(notes))


def _warmup_note(config: TrainConfig) -> list[str]:
    if config.optimizer.warmup_steps <= config.steps:
        return []
    peak = peak_learning_rate(config.optimizer, config.steps)
    return [
        f"the learning rate comes to {peak:.2e} only, not to {config.optimizer.learning_rate:.2e}: "
        f"optimizer.warmup_steps ({config.optimizer.warmup_steps:,}) is more than steps ({config.steps:,})"
    ]


def with_tokenizers(config: TrainConfig, source: Tokenizer, target: Tokenizer) -> TrainConfig:
    """The config with the model's vocabulary sizes and special ids taken from the tokenizers."""
    model = config.model.replace(
        source_vocab_size=source.vocab_size,
        target_vocab_size=target.vocab_size,
        pad_id=target.pad_id,
        start_id=target.start_id,
        end_id=target.end_id,
    )
    return dataclasses.replace(config, model=model)
