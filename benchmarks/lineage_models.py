"""The generations of sequence transduction that `benchmarks.lineage` compares, each as settings of `ModelConfig`."""

from typing import Any

from tfm.config import ModelConfig
from tfm.nn.params import count_params, param_shapes

_VASWANI: dict[str, Any] = dict(norm_position="post", encoder_layers=2, decoder_layers=2)
_TODAY: dict[str, Any] = dict(norm_position="pre", norm="rmsnorm", activation="silu", gated=True, use_bias=False)
_RECURRENT: dict[str, Any] = dict(architecture="recurrent", encoder_layers=1, decoder_layers=1)

GENERATIONS: dict[str, dict[str, Any]] = {
    "rnn": dict(_RECURRENT, cell="rnn", source_context="fixed"),
    "lstm": dict(_RECURRENT, cell="lstm", source_context="fixed"),
    "gru": dict(_RECURRENT, cell="gru", source_context="fixed-each-step"),
    "bahdanau": dict(_RECURRENT, cell="gru", bidirectional=True, source_context="additive"),
    "luong": dict(_RECURRENT, cell="lstm", source_context="general", input_feeding=True),
    "transformer": dict(_VASWANI, positions="sinusoidal"),
    "roformer": dict(_VASWANI, positions="rope"),
    "today": dict(_TODAY, positions="rope", num_kv_heads=2, encoder_layers=2, decoder_layers=2),
    "decoder-only": dict(_TODAY, positions="rope", num_kv_heads=2, architecture="decoder-only", decoder_layers=4),
}
"""From the fixed vector (`rnn`, `lstm` of Sutskever et al. 2014, `gru` of Cho et al. 2014) and attention (Bahdanau et
al. 2014, Luong et al. 2015) to the Transformer of 2017, RoFormer (Su et al. 2021) and today's parts: RMSNorm (Zhang and
Sennrich 2019), gated feed-forward (Shazeer 2020), grouped queries (Ainslie et al. 2023).

A recurrent model has one layer each side and a Transformer two: with few parameters, width serves the first and depth
the second."""

FIXED_VECTOR = ("rnn", "lstm", "gru")
RECURRENT_WITH_ATTENTION = ("bahdanau", "luong")

POSITIONS: dict[str, dict[str, Any]] = {
    name: dict(_VASWANI, norm_position="pre", positions=name)
    for name in ("sinusoidal", "learned", "rope", "t5-bias", "alibi")
}
"""One Transformer with each position encoding."""


def of_budget(settings: dict[str, Any], budget: int, *, vocab_size: int, max_length: int) -> ModelConfig:
    """The model with these settings whose number of parameters comes nearest to the budget; its width decides.

    Args:
        settings: of `GENERATIONS` or `POSITIONS`; with a `model_dim` of its own that stays.
        budget: parameters, embeddings included.
        vocab_size: of source and target.
        max_length: the most tokens of a source, and of a target.
    """

    def with_width(dim: int) -> ModelConfig:
        return ModelConfig(
            **{
                "source_vocab_size": vocab_size,
                "target_vocab_size": vocab_size,
                "max_source_length": max_length,
                "max_target_length": max_length,
                "model_dim": dim,
                "feed_forward_dim": 4 * dim if not settings.get("gated") else 8 * dim // 3 // 8 * 8,
                "num_heads": 4,
                "dropout_rate": 0.0,
                **settings,
            }
        )

    def parameters(dim: int) -> int:
        return count_params(param_shapes(with_width(dim)))

    if "model_dim" in settings:
        return with_width(settings["model_dim"])
    dim = 8  # four heads of an even size
    while parameters(dim + 8) <= budget:
        dim += 8
    return with_width(min((dim, dim + 8), key=lambda each: abs(parameters(each) - budget)))
