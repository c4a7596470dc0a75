"""Models small enough to compile in a second, with parameters that leave nothing at its starting value."""

import contextlib
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import compiler

from tfm.config import ModelConfig
from tfm.nn.models import Model, build_model
from tfm.nn.params import param_shapes

V = 11


def tiny_config(**changes) -> ModelConfig:
    """D 16, N 4, one encoder layer and two decoder layers (so that layers could be mixed up), 11 tokens."""
    sizes = dict(
        source_vocab_size=V, target_vocab_size=V, model_dim=16, feed_forward_dim=24, num_heads=4, encoder_layers=1,
        decoder_layers=2, max_source_length=16, max_target_length=32, relative_buckets=6, relative_max_distance=8,
    )  # fmt: skip
    return ModelConfig(**{**sizes, **changes})


_compile_options = compiler.get_compile_options


def _fast_options(*given, **named):
    """The XLA of jax 0.10 takes half of its time to set its new emitters up, for each loop that it makes."""
    options = _compile_options(*given, **named)
    options.env_option_overrides = [*options.env_option_overrides, ("xla_cpu_use_fusion_emitters", False)]
    return options


def compiled_fast() -> contextlib.AbstractContextManager[None]:
    """For many programs that run a few times each: XLA leaves out its costly optimizations."""
    return _compiled(fast=True)


def compiled_fully() -> contextlib.AbstractContextManager[None]:
    """As users' programs are, within a block that compiles fast."""
    return _compiled(fast=False)


@contextlib.contextmanager
def _compiled(*, fast: bool) -> Iterator[None]:
    before = jax.config.values["jax_disable_most_optimizations"], compiler.get_compile_options
    jax.config.update("jax_disable_most_optimizations", fast)
    compiler.get_compile_options = _fast_options if fast and jax.__version_info__ < (0, 11) else _compile_options
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before[0])
        compiler.get_compile_options = before[1]


@functools.cache
def tiny_model(config: ModelConfig, dtype: str = "float32", kernel: str = "plain", cache: str = "auto") -> Model:
    return build_model(config, dtype=dtype, attention_kernel=kernel, cache_dtype=cache)


@functools.cache
def random_params(config: ModelConfig, seed: int = 0):
    """Biases are not 0, scales not 1, positions as strong as tokens; and the likeliest next token varies."""
    random = np.random.default_rng(seed)

    def draw(path, shape):
        name = path[-1].key
        if name == "scale":
            return 1 + 0.3 * random.standard_normal(shape.shape)
        if name == "bias":
            return 0.3 * random.standard_normal(shape.shape)
        if "relative_bias" in jax.tree_util.keystr(path):
            return 2 * random.standard_normal(shape.shape)
        if "position_embedding" in jax.tree_util.keystr(path):
            return random.standard_normal(shape.shape)
        return 1.5 * random.standard_normal(shape.shape) / np.sqrt(shape.shape[-1])

    drawn = jax.tree_util.tree_map_with_path(draw, param_shapes(config))
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), drawn)


def random_ids(*shape: int, seed: int = 0) -> np.ndarray:
    """Any ids, special ones included."""
    return np.random.default_rng(seed).integers(0, V, shape).astype(np.int32)
