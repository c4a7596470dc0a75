"""Pictures: what a model looks at, how runs learned, what a search kept, how a cache grows.

Each function returns a matplotlib `Figure`, and draws on axes of yours where you pass some. None goes through pyplot,
so nothing is global, no window opens, and a figure is freed with its last name. The extra `plot` brings matplotlib.

    from tfm import plot

    plot.attention_grid(model, "transformer").savefig("heads.png")
"""

from tfm.plot.attention import TokenAttention, attention_grid, attention_map, heat_map, token_attention
from tfm.plot.beams import Hypothesis, beam_tree, search_tree
from tfm.plot.curves import learning_curves, read_metrics
from tfm.plot.growth import cache_growth, measured_cache_bytes

__all__ = [
    "Hypothesis",
    "TokenAttention",
    "attention_grid",
    "attention_map",
    "beam_tree",
    "cache_growth",
    "heat_map",
    "learning_curves",
    "measured_cache_bytes",
    "read_metrics",
    "search_tree",
    "token_attention",
]
