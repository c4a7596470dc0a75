"""What a model is: one frozen description, checked when it is made.

`ModelConfig` holds everything that decides the parameters' shapes and the function they compute. It does not hold how
to compute it (dtype, attention kernel): that is chosen when the model is built, and the same weights serve any choice.
"""

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from typing import Any, Literal

Architecture = Literal["encoder-decoder", "decoder-only", "recurrent"]
Positions = Literal["sinusoidal", "sinusoidal-halves", "learned", "rope", "rope-halves", "t5-bias", "alibi", "none"]
Norm = Literal["layernorm", "rmsnorm"]
NormPosition = Literal["pre", "post"]
Activation = Literal["relu", "gelu", "silu"]
SharedEmbeddings = Literal["none", "target-output", "all"]
Cell = Literal["rnn", "lstm", "gru"]
SourceContext = Literal["fixed", "fixed-each-step", "additive", "dot", "general", "concat"]
LocalAttention = Literal["none", "monotonic", "predictive"]
LUONG: tuple[SourceContext, ...] = ("dot", "general", "concat")
"""The scores of Luong et al. 2015."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The description of a model. Letters in brackets are those of `tfm.axes`.

    A Transformer ignores the settings from `cell` to `input_feeding`. A recurrent model, which has these, ignores those
    of heads, positions, norms, the feed-forward layer and biases, and its `dropout_rate` is the only one.
    """

    architecture: Architecture = "encoder-decoder"
    """`encoder-decoder` and `decoder-only` are Transformers, of which the second reads source and target as one
    sequence, or, with `max_source_length` 0, texts to be continued; `recurrent` is an encoder-decoder of recurrent
    cells (`tfm.nn.recurrent`)."""
    source_vocab_size: int = 32_000
    """Rows of the source embedding [V]. A decoder-only model reads source and target with the target embedding."""
    target_vocab_size: int = 32_000
    """Rows of the target embedding and of the output projection [V]."""
    pad_id: int = 0
    """Fills the right of a short row. Padding is found by lengths, never by this id, so it may also be a real token."""
    start_id: int = 1
    """The first decoder token of every target."""
    end_id: int = 2
    """Ends every target; generation of a row stops after it."""

    model_dim: int = 512
    """Width of the residual stream [D]; of a recurrent model's embeddings, states and gates."""
    feed_forward_dim: int = 2048
    """Width between the two feed-forward products [F]."""
    num_heads: int = 8
    """Query heads [N]."""
    num_kv_heads: int | None = None
    """Key/value heads [K]: 1 for multi-query, a divisor of N for grouped-query attention; `None`: N (multi-head)."""
    head_dim: int | None = None
    """Width of one head [H]; `None`: D / N."""
    encoder_layers: int = 6
    """Layers of the encoder; a decoder-only model has none, whatever stands here."""
    decoder_layers: int = 6
    """Layers of the decoder [L]; in a recurrent model as many as the encoder has, each starting from its own."""

    positions: Positions = "sinusoidal"
    """`sinusoidal` interleaves sin and cos as 2i, 2i+1; `sinusoidal-halves` has all sines first. `rope` rotates the
    pairs (2i, 2i+1); `rope-halves` the pairs (i, i + H/2)."""
    max_source_length: int = 1024
    """The longest source in tokens that the model accepts. 0, for `decoder-only`: a language model, without sources."""
    max_target_length: int = 1024
    """The longest target in tokens, end token included, that the model accepts."""
    rope_base: float = 10_000.0
    """Pair i of rotary positions turns by position · base^(-2i/H)."""
    relative_buckets: int = 32
    """Buckets of the T5 relative bias, half of them per direction in the encoder."""
    relative_max_distance: int = 128
    """Distances from here on share the last T5 bucket."""

    norm: Norm = "layernorm"
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019)."""
    norm_position: NormPosition = "pre"
    """`post` is Vaswani et al. 2017; `pre` trains without a long warmup and ends each stack with one more norm."""
    norm_epsilon: float = 1e-6
    """Added to the variance before its root is taken."""
    activation: Activation = "relu"
    """Of the feed-forward's hidden units; `gelu` is the tanh approximation."""
    gated: bool = False
    """True: feed-forward is (activation(x W_gate) * x W_up) W_down (Shazeer 2020), with three matrices."""
    use_bias: bool = True
    """Biases in every Linear but the output projection, and in LayerNorm."""
    shared_embeddings: SharedEmbeddings = "target-output"
    """`all`: source, target and output projection are one matrix (needs equal vocabularies)."""
    scale_embeddings: bool = True
    """Multiply embeddings by sqrt(D), as in section 3.4 of Vaswani et al. 2017."""
    scale_logits: bool = False
    """Multiply the decoder's output by 1/sqrt(D) before the output projection, whether that is shared, as T5 does, or
    not."""
    scale_attention: bool = True
    """Divide query · key by sqrt(H). T5 does not."""

    dropout_rate: float = 0.1
    """On each sublayer's output and on the sum of embedding and position (section 5.4 of Vaswani et al. 2017)."""
    attention_dropout_rate: float = 0.0
    """On the attention weights."""
    feed_forward_dropout_rate: float = 0.0
    """On the feed-forward's hidden units."""

    cell: Cell = "lstm"
    """`rnn` is Elman's with tanh; `lstm` Hochreiter and Schmidhuber 1997 with forget gates; `gru` Cho et al. 2014."""
    bidirectional: bool = False
    """True: each layer of the encoder reads the source in both directions, and its states are as wide as both."""
    source_context: SourceContext = "additive"
    """How the decoder gets at the source. `fixed`: it starts from the encoder's last states, and has nothing else
    (Sutskever et al. 2014). `fixed-each-step`: its steps read the encoder's last state, too (Cho et al. 2014). The rest
    is attention, which the decoder looks for `additive` before a step (Bahdanau et al. 2014), or, with `dot`, `general`
    or `concat` as the score, after it (Luong et al. 2015)."""
    local_attention: LocalAttention = "none"
    """Luong's attention may see a window of the source only, around the decoder's own position (`monotonic`) or around
    one that it predicts (`predictive`)."""
    attention_window: int = 10
    """Source tokens that local attention sees on either side of its middle: Luong's D."""
    input_feeding: bool = False
    """True: what Luong's attention made of a step is an input of the next one (section 3.3)."""

    def __post_init__(self) -> None:
        """Raises ValueError, naming every field that cannot be."""
        problems = list(_problems(self))
        if problems:
            raise ValueError("model config: " + "; ".join(problems))

    @property
    def has_encoder(self) -> bool:
        """Whether the source is encoded apart from the target."""
        return self.architecture != "decoder-only"

    @property
    def attends_to_source(self) -> bool:
        """Whether there are attention weights on the source."""
        return self.architecture != "recurrent" or self.source_context not in ("fixed", "fixed-each-step")

    @property
    def is_language_model(self) -> bool:
        """Whether it continues texts, rather than answering them: there is no source, and a text is its own target."""
        return self.max_source_length == 0

    @property
    def kv_heads(self) -> int:
        """K, with `None` resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """H, with `None` resolved."""
        return self.model_dim // self.num_heads if self.head_dim is None else self.head_dim

    def replace(self, **changes: Any) -> "ModelConfig":
        """A checked copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Every field by its name, those left at their default too, as numbers, strings, booleans and None."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """The reverse of `to_dict`. Raises ValueError for an unknown key, naming the nearest known one."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
                raise ValueError(f"model config: unknown key {key!r}; the nearest known one is {near[0]!r}")
        return cls(**values)


def _problems(config: ModelConfig):
    """Yields what is wrong, one clause each."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        options = typing.get_args(field.type)
        if typing.get_origin(field.type) is Literal and value not in options:
            yield f"{field.name} must be one of {', '.join(options)}, not {value!r}"
        elif field.type is int and (isinstance(value, bool) or not isinstance(value, int)):
            yield f"{field.name} must be a whole number, not {value!r}"
        elif field.type is float and (isinstance(value, bool) or not isinstance(value, int | float)):
            yield f"{field.name} must be a number, not {value!r}"
        elif field.type is bool and not isinstance(value, bool):
            yield f"{field.name} must be true or false, not {value!r}"
        elif field.type == int | None and value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            yield f"{field.name} must be a whole number or absent, not {value!r}"
        else:
            continue
        return  # the checks below compute with these fields
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, int | float) and not abs(value) < 2**31:  # NaN too
            yield f"{field.name} must be less than 2**31, not {value}"
            return
    for name in ("encoder_layers", "decoder_layers", "num_heads", "relative_buckets"):  # work for Python at each trace
        if getattr(config, name) > 1000:
            yield f"{name} must be at most 1000, not {getattr(config, name)}"
    for name in ("source_vocab_size", "target_vocab_size", "model_dim", "feed_forward_dim", "num_heads",
                 "decoder_layers", "max_target_length", "relative_buckets",
                 "relative_max_distance"):  # fmt: skip
        if getattr(config, name) < 1:
            yield f"{name} must be at least 1, not {getattr(config, name)}"
            return
    if config.max_source_length < (config.has_encoder):
        yield f"max_source_length must be at least 1 (decoder-only: 0), not {config.max_source_length}"
    if config.encoder_layers < 0 or (config.encoder_layers == 0 and config.has_encoder):
        yield f"encoder_layers must be at least 1, not {config.encoder_layers}"
    yield from _recurrent_problems(config) if config.architecture == "recurrent" else _transformer_problems(config)
    if not 0 <= config.dropout_rate < 1:
        yield f"dropout_rate must be at least 0 and less than 1, not {config.dropout_rate}"
    if config.shared_embeddings == "all" and config.source_vocab_size != config.target_vocab_size:
        yield (
            f"shared_embeddings = 'all' needs equal vocabularies, not {config.source_vocab_size} and "
            f"{config.target_vocab_size}"
        )
    if config.architecture == "decoder-only" and config.source_vocab_size != config.target_vocab_size:
        yield (
            "a decoder-only model has one vocabulary: source_vocab_size and target_vocab_size must be equal, not "
            f"{config.source_vocab_size} and {config.target_vocab_size}"
        )
    for name in ("pad_id", "start_id", "end_id"):
        if not 0 <= getattr(config, name) < config.target_vocab_size:
            yield f"{name} must be an id of the target vocabulary (0 to {config.target_vocab_size - 1}), not " + str(
                getattr(config, name)
            )


def _transformer_problems(config: ModelConfig):
    if config.num_kv_heads is not None and config.num_kv_heads < 1:
        yield f"num_kv_heads must be at least 1, not {config.num_kv_heads}"
    elif config.num_heads % config.kv_heads:
        yield f"num_heads ({config.num_heads}) must be a multiple of num_kv_heads ({config.kv_heads})"
    if config.head_dim is None and config.model_dim % config.num_heads:
        yield f"model_dim ({config.model_dim}) must be a multiple of num_heads ({config.num_heads})"
    if config.head_dim is not None and config.head_dim < 1:
        yield f"head_dim must be at least 1, not {config.head_dim}"
    elif config.positions in ("rope", "rope-halves") and config.head_size % 2:
        yield f"rotary positions need an even head dimension, not {config.head_size}"
    if config.positions in ("sinusoidal", "sinusoidal-halves") and config.model_dim % 2:
        yield f"sinusoidal positions need an even model_dim, not {config.model_dim}"
    if config.positions == "t5-bias" and (config.relative_buckets < 4 or config.relative_buckets % 2):
        yield f"relative_buckets must be even and at least 4, not {config.relative_buckets}"
    elif config.positions == "t5-bias" and config.relative_max_distance <= config.relative_buckets // 2:
        yield (
            f"relative_max_distance ({config.relative_max_distance}) must be more than half of relative_buckets "
            f"({config.relative_buckets})"
        )
    for name in ("attention_dropout_rate", "feed_forward_dropout_rate"):
        if not 0 <= getattr(config, name) < 1:
            yield f"{name} must be at least 0 and less than 1, not {getattr(config, name)}"
    if not config.norm_epsilon > 0:
        yield f"norm_epsilon must be more than 0, not {config.norm_epsilon}"
    if not config.rope_base > 1:
        yield f"rope_base must be more than 1, not {config.rope_base}"


def _recurrent_problems(config: ModelConfig):
    is_luong = config.source_context in LUONG
    if config.encoder_layers != config.decoder_layers:
        yield (
            "a recurrent decoder starts layer by layer from its encoder: encoder_layers and decoder_layers must be "
            f"equal, not {config.encoder_layers} and {config.decoder_layers}"
        )
    if config.source_context == "dot" and config.bidirectional:
        yield (
            "source_context = 'dot' needs states of one width on both sides, and an encoder with bidirectional = true "
            "has twice the decoder's: 'general' has a matrix between them"
        )
    if config.local_attention != "none" and not is_luong:
        yield (
            f"local_attention must be 'none' where source_context is {config.source_context!r}: it is for "
            f"{', '.join(LUONG)}"
        )
    if config.attention_window < 1:
        yield f"attention_window must be at least 1, not {config.attention_window}"
    if config.input_feeding and not is_luong:
        yield (
            f"input_feeding must be false where source_context is {config.source_context!r}: it is for "
            f"{', '.join(LUONG)}"
        )


def _vaswani(**sizes: Any) -> dict[str, Any]:
    """Vaswani et al. 2017: post-norm, sinusoidal positions, one matrix for both embeddings and the output."""
    return dict(
        source_vocab_size=37_000, target_vocab_size=37_000, norm_position="post", shared_embeddings="all",
        positions="sinusoidal", activation="relu", **sizes,
    )  # fmt: skip


def _recurrent(cell: Cell, layers: int, **settings: Any) -> dict[str, Any]:
    """Recurrent cells, as many layers on both sides."""
    return dict(
        architecture="recurrent", cell=cell, encoder_layers=layers, decoder_layers=layers, shared_embeddings="none",
        **settings,
    )  # fmt: skip


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(model_dim=64, feed_forward_dim=128, num_heads=4, encoder_layers=2, decoder_layers=2),
    "small": dict(model_dim=256, feed_forward_dim=1024, num_heads=4, encoder_layers=3, decoder_layers=3),
    "base": dict(model_dim=512, feed_forward_dim=2048, num_heads=8, encoder_layers=6, decoder_layers=6),
    "big": dict(model_dim=1024, feed_forward_dim=4096, num_heads=16, encoder_layers=6, decoder_layers=6),
    "vaswani-base": _vaswani(model_dim=512, feed_forward_dim=2048, num_heads=8),
    "vaswani-big": _vaswani(model_dim=1024, feed_forward_dim=4096, num_heads=16, dropout_rate=0.3),
    "recurrent-tiny": _recurrent("gru", 1, model_dim=64, bidirectional=True),
    "recurrent-small": _recurrent("gru", 1, model_dim=256, bidirectional=True),
    "sutskever": _recurrent(
        "lstm", 4, model_dim=1000, source_context="fixed", source_vocab_size=160_000, target_vocab_size=80_000
    ),
    "cho": _recurrent(
        "gru", 1, model_dim=1000, source_context="fixed-each-step", source_vocab_size=15_000, target_vocab_size=15_000
    ),
    "bahdanau": _recurrent(
        "gru", 1, model_dim=1000, bidirectional=True, source_vocab_size=30_000, target_vocab_size=30_000
    ),
    "luong": _recurrent(
        "lstm", 4, model_dim=1000, source_context="general", local_attention="predictive", input_feeding=True,
        dropout_rate=0.2, source_vocab_size=50_000, target_vocab_size=50_000,
    ),
}  # fmt: skip
"""Named sizes; each is keyword arguments of `ModelConfig`.

`sutskever` is Sutskever et al. 2014, section 3.4; `cho` the encoder-decoder of Cho et al. 2014, section 4.1, and
`bahdanau` the RNNsearch of Bahdanau et al. 2014, appendix A, both with embeddings as wide as states and without the
maxout before the output; `luong` Luong et al. 2015, section 4.1."""


def preset(name: str, **changes: Any) -> ModelConfig:
    """The preset `name`, with some fields changed. Raises ValueError for an unknown name."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
        raise ValueError(f"no preset {name!r}; the nearest is {near!r} of {', '.join(PRESETS)}")
    return ModelConfig(**{**PRESETS[name], **changes})
