"""What a run is: one frozen description, read from TOML, changed on the command line, saved with the run.

Every default stands here once. Batch sizes are global, over all devices; lengths are in tokens, end token included.
"""

import dataclasses
import importlib.resources
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from tfm.axis_rules import parse_rules, rule_problem
from tfm.config import PRESETS, ModelConfig
from train import schema
from train.schema import ConfigError

Format = Literal["auto", "lines", "tsv", "jsonl", "text"]
TokenizerKind = Literal["bpe", "unigram", "char", "word"]
Metric = Literal["loss", "exact-match", "wer", "ter", "bleu", "chrf", "rouge1", "rouge2", "rougeL"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(schema.Section, prefix="data."):
    """Where pairs of text come from, or the plain text of a language model."""

    task: Literal["files", "cmudict"] = "files"
    """`files` reads `train`, `validation` and `test` below; `cmudict` is built in and reads no path."""
    train: tuple[str, ...] = ()
    """Two line-aligned files (source, target), one TSV or JSONL file, or files of plain text; plain or .gz, UTF-8."""
    validation: tuple[str, ...] = ()
    """Held-out pairs, named as in `train`, for choosing the best checkpoint."""
    test: tuple[str, ...] = ()
    """Pairs that training never reads, for `tfm evaluate`."""
    format: Format = "auto"
    """`auto`: two paths are line-aligned files; one path is JSONL or TSV by its ending (.jsonl, .json, else TSV).
    `text` is plain text for a language model, which has no sources (`model.architecture` decoder-only,
    `model.max_source_length` 0)."""
    source_field: str = "source"
    """JSONL key of the source text."""
    target_field: str = "target"
    """JSONL key of the target text: a string, or a list of strings where several answers are right."""
    validation_share: float = 0.0
    """Without `validation` files: this share of the training sources is held out, chosen by a hash of the source; of
    plain text, the last lines."""
    max_source_tokens: int = 256
    """Pairs with a longer source (end token included) are left out of training, counted and reported."""
    max_target_tokens: int = 256
    """The same for the target (end token included). Of plain text: the tokens of a block, and so the most that a
    prediction is made from."""

    @property
    def is_plain_text(self) -> bool:
        return self.format == "text" and self.task == "files"

    def problems(self) -> Iterator[str]:
        yield from schema.at_least(self, 1, "max_source_tokens", "max_target_tokens")
        yield from schema.within(self, 0, 1, "validation_share")
        for name in ("source_field", "target_field"):
            if not getattr(self, name):
                yield f"{name} must not be empty"
        for name in ("train", "validation", "test"):
            paths = getattr(self, name)
            if paths and self.task != "files":
                yield f"{name} must be empty for the built-in task {self.task}, got {list(paths)}"
            elif self.is_plain_text:
                continue
            elif len(paths) > 2 or (len(paths) == 1 and self.format == "lines"):
                yield f"{name} must be two line-aligned files, or one TSV or JSONL file, got {list(paths)}"
            elif len(paths) == 2 and self.format in ("tsv", "jsonl"):
                yield f"{name} must be one {self.format.upper()} file, got {list(paths)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerConfig(schema.Section, prefix="tokenizer."):
    """How text becomes ids. A file given here is used as it is; otherwise a tokenizer is trained on the data."""

    source_kind: TokenizerKind = "bpe"
    """`word` splits at white space; `char` is a token a character; `bpe` and `unigram` learn pieces of words."""
    target_kind: TokenizerKind = "bpe"
    """The same for the target."""
    source_vocab_size: int = 8_000
    """The most entries of a trained vocabulary: the four special tokens, and 256 bytes where the kind is not `word`,
    included."""
    target_vocab_size: int = 8_000
    """The same for the target."""
    shared: bool = False
    """One tokenizer, trained on both sides with the source's kind and size, for source and target."""
    source_file: str = ""
    """A `tokenizer.json`, for the source side (for both, when shared)."""
    target_file: str = ""
    """A `tokenizer.json` for the target side."""

    def problems(self) -> Iterator[str]:
        for side in ("source",) if self.shared else ("source", "target"):
            # four special tokens; then one word, or the 256 bytes that spell whatever has no piece of its own
            least = 5 if getattr(self, f"{side}_kind") == "word" else 260
            if not getattr(self, f"{side}_file"):
                yield from schema.at_least(self, least, f"{side}_vocab_size")
        if self.shared and self.target_file:
            yield "target_file must be empty where shared is true: source_file serves both sides"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig(schema.Section, prefix="batch."):
    """How pairs become batches."""

    tokens: int = 4096
    """Budget of a batch: rows times the longer of (source, target) length, padding included, over all devices."""
    max_shapes: int = 6
    """The most (source, target) shapes; each is compiled once."""
    accumulation_steps: int = 1
    """Each batch is cut into this many slices whose gradients are added before one update."""

    def problems(self) -> Iterator[str]:
        yield from schema.at_least(self, 1, "tokens", "max_shapes", "accumulation_steps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(schema.Section, prefix="optimizer."):
    """The optax chain: clip by global norm, then the named rule under the schedule."""

    name: Literal["adamw", "adafactor", "sgd", "lion"] = "adamw"
    """The rule that turns gradients into updates."""
    learning_rate: float = 1e-3
    """The schedule's peak."""
    schedule: Literal["inverse-sqrt", "cosine", "linear", "constant"] = "inverse-sqrt"
    """After `warmup_steps` of linear rise; cosine and linear fall to `final_share` of the peak at the last step."""
    warmup_steps: int = 1_000
    """Steps over which the learning rate rises linearly to its peak."""
    final_share: float = 0.0
    """Where cosine and linear schedules end, as a share of the peak."""
    beta1: float = 0.9
    """Decay of the average of gradients (adamw, lion)."""
    beta2: float = 0.98
    """Decay of the average of their squares (adamw); of the average of gradients (lion)."""
    epsilon: float = 1e-9
    """Added to the denominator (adamw)."""
    weight_decay: float = 0.0
    """Decoupled; on matrices only, never on biases, norms or relative biases."""
    momentum: float = 0.9
    """For `sgd`."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 for no clipping."""

    def problems(self) -> Iterator[str]:
        yield from schema.more_than(self, 0, "learning_rate", "epsilon")
        yield from schema.at_least(self, 0, "warmup_steps", "weight_decay", "clip_norm")
        yield from schema.within(self, 0, 1, "beta1", "beta2", "momentum")
        if not 0 <= self.final_share <= 1:
            yield f"final_share must be from 0 to 1, got {self.final_share}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig(schema.Section, prefix="loss."):
    """Cross-entropy per target token."""

    label_smoothing: float = 0.1
    """Szegedy et al. 2016, section 7: this share of the label's mass is spread evenly over the vocabulary."""
    z_loss: float = 0.0
    """Weight of log(Z)^2, which keeps logits from drifting (Chowdhery et al. 2022, section 5)."""

    def problems(self) -> Iterator[str]:
        yield from schema.within(self, 0, 1, "label_smoothing")
        yield from schema.at_least(self, 0, "z_loss")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationConfig(schema.Section, prefix="validation."):
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

    def problems(self) -> Iterator[str]:
        yield from schema.at_least(self, 0, "every_steps", "max_tokens", "max_examples", "patience", "samples")
        if self.patience and not self.every_steps:
            yield f"patience ({self.patience}) counts validations, and every_steps = 0 makes none"
        if self.metric != "loss" and not self.max_examples:
            yield f"metric {self.metric} needs generated text, and max_examples = 0 generates none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(schema.Section, prefix="checkpoint."):
    """What is kept of a run."""

    every_steps: int = 1_000
    """A killed run loses at most this many steps."""
    keep: int = 3
    """Most recent checkpoints that are kept; the best one is kept besides."""

    def problems(self) -> Iterator[str]:
        yield from schema.at_least(self, 1, "every_steps", "keep")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(schema.Section, prefix="mesh."):
    """How a run is spread over devices, whose number is data × fsdp × tensor. May change when it is resumed."""

    data: int = 0
    """Copies of the model, each of which takes its part of a batch; 0: as many as there are devices for."""
    fsdp: int = 1
    """Parts of a batch, and of each parameter and its moments, which come together where they are multiplied."""
    tensor: int = 1
    """Parts of each layer: heads, hidden units, vocabulary."""
    rules: tuple[str, ...] = ()
    """Changes to what is cut over what, as in ["vocab="] for vocabularies that stay whole, or ["batch=data"]; see
    `tfm.axis_rules`."""

    def problems(self) -> Iterator[str]:
        yield from schema.at_least(self, 0, "data")
        yield from schema.at_least(self, 1, "fsdp", "tensor")
        try:
            problem = rule_problem(parse_rules(self.rules))
        except ValueError as error:
            problem = str(error)
        if problem:
            yield f"rules: {problem}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(schema.Section, prefix=""):
    """Everything that decides a run. The vocabulary sizes and special ids of `model` come from the tokenizers."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = DataConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    mesh: MeshConfig = MeshConfig()
    steps: int = 10_000
    """Updates of the parameters."""
    seed: int = 0
    """Of initial parameters, data order and dropout."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the operands of large products; parameters and optimizer stay in float32. `tfm.nn.layers.compute_dtype` says
    what `auto` is."""
    dropout_bits: Literal["rbg", "threefry"] = "rbg"
    """Generator of dropout's random bits: `rbg` is several times cheaper."""
    max_bad_steps: int = 10
    """Steps whose loss or gradient is not finite are skipped; this many in a row end the run with an error."""
    log_every_steps: int = 50
    """Interval of the lines in `metrics.jsonl` and TensorBoard."""

    def problems(self) -> Iterator[str]:
        """What the sections cannot be together."""
        yield from schema.at_least(self, 1, "steps", "max_bad_steps", "log_every_steps")
        if self.steps >= 2**31:
            yield f"steps must be less than 2^31, got {self.steps}"
        if not 0 <= self.seed < 2**32:
            yield f"seed must be from 0 to 2^32 - 1, got {self.seed}"
        values = schema.flatten(self)
        if problems := list(self._text_problems()):
            yield from problems
            return
        for tokens, limit in (
            *([] if self.data.is_plain_text else [("data.max_source_tokens", "model.max_source_length")]),
            ("data.max_target_tokens", "model.max_target_length"),
            ("validation.max_tokens", "model.max_target_length"),
        ):
            if values[tokens] > values[limit]:
                yield f"{tokens} ({values[tokens]}) must be at most {limit} ({values[limit]})"
        if self.optimizer.schedule in ("cosine", "linear") and self.optimizer.warmup_steps > self.steps:
            yield (
                f"optimizer.warmup_steps ({self.optimizer.warmup_steps}) must be at most steps ({self.steps}): the "
                f"{self.optimizer.schedule} schedule falls from there to the last step"
            )
        if not self.tokenizer.shared and self.model.architecture == "decoder-only":
            yield (
                "tokenizer.shared must be true for model.architecture = 'decoder-only', which has one vocabulary for "
                "both sides"
            )
        elif not self.tokenizer.shared and self.model.shared_embeddings == "all":
            yield "tokenizer.shared must be true for model.shared_embeddings = 'all', one matrix for both sides"

    def _text_problems(self) -> Iterator[str]:
        """Plain text is for language models, and they for nothing else."""
        model, needs = self.model, "for data.format = 'text'"
        if not self.data.is_plain_text:
            if model.is_language_model:
                yield (
                    f"data.format must be 'text' for model.max_source_length = 0, got {self.data.format!r}: the model "
                    "takes no sources"
                )
            return
        if model.architecture != "decoder-only":
            yield f"model.architecture must be 'decoder-only' {needs}, which has no sources, got {model.architecture!r}"
        elif not model.is_language_model:
            yield f"model.max_source_length must be 0 {needs}, which has no sources, got {model.max_source_length}"
        if self.validation.metric != "loss":
            metric = self.validation.metric
            yield f"validation.metric must be 'loss' {needs}, which has no right answers, got {metric!r}"

    @property
    def max_new_tokens(self) -> int:
        """Limit of tokens that are generated for a held-out source, end token included."""
        return self.validation.max_tokens or self.data.max_target_tokens


FROM_TOKENIZERS = (
    "model.source_vocab_size", "model.target_vocab_size", "model.pad_id", "model.start_id", "model.end_id",
)  # fmt: skip
"""Settings that a run takes from its tokenizers; a recipe or a command line does not give them."""

RESUME_MAY_CHANGE = frozenset({
    "steps", "log_every_steps", "max_bad_steps", "checkpoint.every_steps", "checkpoint.keep", "validation.every_steps",
    "validation.patience", "validation.samples", "mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.rules",
})  # fmt: skip
"""Settings that may differ when a run is resumed.

More `steps` under the `inverse-sqrt` or `constant` schedule train as if they had been asked for at the start; only the
validation that came with the old last step stays, where none was due, and counts for best metric and patience. `cosine`
and `linear` end at the last step, so there the learning rate of every step follows from `steps`: from the resumed step
on it is that of the new schedule, a jump at that moment, and the run differs from one with these steps from the start.
"""


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Nested tables of all settings, as JSON has them."""
    return schema.encode(config)


def from_dict(values: Mapping[str, Any]) -> TrainConfig:
    """The reverse of `to_dict`; absent settings have their defaults, and `model.preset` names one of `tfm.config`.

    Raises:
        ConfigError: a ValueError that names every unknown key with the nearest known one, every value of a wrong type,
            and every setting that cannot be.
    """
    model = values.get("model")
    if isinstance(model, Mapping) and "preset" in model:
        values = {**values, "model": with_preset(model)}
    return schema.decode(TrainConfig, values)


def with_preset(model: Mapping[str, Any]) -> dict[str, Any]:
    """The model's settings with `preset` replaced by what it stands for; settings beside it win."""
    name = model["preset"]
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError([f"model.preset: expected one of {', '.join(PRESETS)}, got {name!r}"])
    return PRESETS[name] | {key: value for key, value in model.items() if key != "preset"}


def to_json(config: TrainConfig) -> str:
    """The text of a run's `config.json`."""
    return json.dumps(to_dict(config), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def from_json(text: str) -> TrainConfig:
    """The reverse of `to_json`, exact. Raises ValueError as `from_dict` does, and for what is not JSON."""
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise ValueError("expected JSON of a few levels, got more than can be read") from error
    if not isinstance(values, dict):
        raise ConfigError([f"expected an object of settings, got {json.dumps(values)[:60]}"])
    return from_dict(values)


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    files = (importlib.resources.files("train") / "recipes").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load_recipe(name_or_path: str | Path) -> TrainConfig:
    """Reads a recipe that comes with the package, by its name, or a TOML file, by its path.

    Raises:
        ValueError: no such recipe or file, not TOML, or a `ConfigError` as from `from_dict`; each says the file.
    """
    name = str(name_or_path)
    path = Path(name_or_path)
    if name in recipe_names():
        content = (importlib.resources.files("train") / "recipes" / f"{name}.toml").read_bytes()
    elif path.is_file():
        content = path.read_bytes()
    else:
        near = schema.nearest(path.name.removesuffix(".toml"), recipe_names())
        raise ValueError(
            f"no recipe and no file {name!r}; the nearest recipe is {near!r} of {', '.join(recipe_names())}"
        )
    try:
        values = tomllib.loads(content.decode("utf-8-sig"))
        given = values["model"] if isinstance(values.get("model"), dict) else {}
        if problems := [from_tokenizers(key) for key in FROM_TOKENIZERS if key.removeprefix("model.") in given]:
            raise ConfigError(problems)
        return from_dict(values)
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"{name}: {error}"]) from error


def from_tokenizers(key: str) -> str:
    """Why a key of `FROM_TOKENIZERS` is not to be given."""
    instead = f"set {key.replace('model', 'tokenizer')}" if key.endswith("vocab_size") else "leave it out"
    return f"{key} is taken from the run's tokenizers: {instead}"


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """The same files, named so that they are found from everywhere: a run goes on wherever one happens to be."""

    def absolute(path: str) -> str:
        return str(Path(path).absolute()) if path else path

    data, tokenizer = config.data, config.tokenizer
    return dataclasses.replace(
        config,
        data=dataclasses.replace(
            data,
            train=tuple(map(absolute, data.train)),
            validation=tuple(map(absolute, data.validation)),
            test=tuple(map(absolute, data.test)),
        ),
        tokenizer=dataclasses.replace(
            tokenizer, source_file=absolute(tokenizer.source_file), target_file=absolute(tokenizer.target_file)
        ),
    )


def changed_fields(old: TrainConfig, new: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Every setting that differs, by its dotted key, as (old, new)."""
    before, after = schema.flatten(old), schema.flatten(new)
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}
