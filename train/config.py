"""What a run is: one frozen description, read from TOML, changed on the command line, saved with the run.

Every default stands here once. Batch sizes are global, over all devices; lengths are in tokens, end token included.
"""

import dataclasses
from typing import Literal

from tfm.config import ModelConfig

Format = Literal["auto", "lines", "tsv", "jsonl"]
TokenizerKind = Literal["bpe", "unigram", "char", "word"]
Metric = Literal["loss", "exact-match", "wer", "ter", "bleu", "chrf", "rouge1", "rouge2", "rougeL"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where pairs of text come from."""

    task: Literal["files", "cmudict"] = "files"
    """`files` reads `train`, `validation` and `test` below; `cmudict` is built in and reads no path."""
    train: tuple[str, ...] = ()
    """Two line-aligned files (source, target), or one TSV or JSONL file; plain or .gz, UTF-8."""
    validation: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    format: Format = "auto"
    """`auto`: two paths are line-aligned files; one path is JSONL or TSV by its ending (.jsonl, .json, else TSV)."""
    source_field: str = "source"
    """JSONL key of the source text."""
    target_field: str = "target"
    """JSONL key of the target text: a string, or a list of strings where several answers are right."""
    validation_share: float = 0.0
    """Without `validation` files: this share of the training sources is held out, chosen by a hash of the source."""
    max_source_tokens: int = 256
    """Pairs with a longer source (end token included) are left out of training, counted and reported."""
    max_target_tokens: int = 256
    """The same for the target (end token included)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How text becomes ids. A file given here is used as it is; otherwise a tokenizer is trained on the data."""

    source_kind: TokenizerKind = "bpe"
    target_kind: TokenizerKind = "bpe"
    source_vocab_size: int = 8_000
    """The most entries, special tokens included, of a trained vocabulary."""
    target_vocab_size: int = 8_000
    shared: bool = False
    """One tokenizer, trained on both sides with the source's kind and size, for source and target."""
    source_file: str = ""
    """A `tokenizer.json`, for the source side (for both, when shared)."""
    target_file: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How pairs become batches."""

    tokens: int = 4096
    """Budget of a batch: rows times the longer of (source, target) length, padding included, over all devices."""
    max_shapes: int = 6
    """The most (source, target) shapes; each is compiled once."""
    accumulation_steps: int = 1
    """Each batch is cut into this many slices whose gradients are added before one update."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optax chain: clip by global norm, then the named rule under the schedule."""

    name: Literal["adamw", "adafactor", "sgd", "lion"] = "adamw"
    learning_rate: float = 1e-3
    """The schedule's peak."""
    schedule: Literal["inverse-sqrt", "cosine", "linear", "constant"] = "inverse-sqrt"
    """After `warmup_steps` of linear rise; cosine and linear fall to `final_share` of the peak at the last step."""
    warmup_steps: int = 1_000
    final_share: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-9
    weight_decay: float = 0.0
    """Decoupled; on matrices only, never on biases, norms or relative biases."""
    momentum: float = 0.9
    """For `sgd`."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 for no clipping."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Cross-entropy per target token."""

    label_smoothing: float = 0.1
    """Szegedy et al. 2016, section 7: this share of the label's mass is spread evenly over the vocabulary."""
    z_loss: float = 0.0
    """Weight of log(Z)^2, which keeps logits from drifting (Chowdhery et al. 2022, section 5)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """What is measured during training, on held-out pairs."""

    every_steps: int = 1_000
    """0: never."""
    metric: Metric = "loss"
    """Decides which checkpoint is best. `ter` is the token error rate (edits per reference token, for phonemes the
    PER), `wer` the share of outputs that differ from every reference (for pronunciations the WER)."""
    max_examples: int = 1_000
    """Sources that text is generated for; the loss is over all of them."""
    max_tokens: int = 0
    """Limit of generated tokens; 0: the data's max_target_tokens."""
    patience: int = 0
    """Training stops after this many validations without a better metric; 0: never."""
    samples: int = 3
    """Generated texts that are logged beside their references."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept of a run."""

    every_steps: int = 1_000
    keep: int = 3
    """Most recent checkpoints that are kept; the best one is kept besides."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides a run. The vocabulary sizes and special ids of `model` come from the tokenizers."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    steps: int = 10_000
    """Updates of the parameters."""
    seed: int = 0
    """Of initial parameters, data order and dropout."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the operands of large products; parameters and optimizer stay in float32. See `tfm.nn.layers.compute_dtype`."""
    dropout_bits: Literal["rbg", "threefry"] = "rbg"
    """Generator of dropout's random bits: `rbg` is several times cheaper."""
    max_bad_steps: int = 10
    """Steps whose loss or gradient is not finite are skipped; this many in a row end the run with an error."""
    log_every_steps: int = 50
