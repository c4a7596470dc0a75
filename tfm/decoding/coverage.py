"""How much each hypothesis has looked at each source token: what the coverage penalty of beam search is made of.

Of Wu et al. 2016, whose model has one attention; here it is the mean over all heads of all layers, which sums to 1 over
the source as one does, and in a decoder-only model what its self-attention lays on the source, which sums to less. A
recurrent model has one attention, or none.
"""

import typing

import jax
import jax.numpy as jnp

from tfm.axes import Array, Float, Int
from tfm.decoding.alignment import watched
from tfm.nn import cache as caches
from tfm.nn.cache import AnyCache
from tfm.nn.models import Model
from tfm.nn.params import Params

LEAST = -20.0
"""log min(attention, 1) of a source token that nothing looked at: in float32 its attention may be 0."""


class Covering(typing.NamedTuple):
    """What W hypotheses of each row remember."""

    cache: AnyCache
    attention: Float[Array, "BW S"]
    """Laid on each source token while the tokens so far, and the next one, were predicted; summed over them."""


def prefill(
    model: Model,
    params: Params,
    source: Int[Array, "B S"],
    source_lengths: Int[Array, "B"],
    prompt: Int[Array, "B T"],
    prompt_lengths: Int[Array, "B"],
    *,
    capacity: int,
    width: int,
) -> tuple[Float[Array, "B 1 V"], Covering]:
    """As `tfm.decoding.inference.prefill`, for W equal hypotheses a row."""
    inputs = (source, source_lengths, prompt, prompt_lengths, capacity)
    (logits, cache), weights = watched(model, params, *inputs, method="prefill")
    last = prompt_lengths - 1
    if model.config.architecture == "decoder-only":
        last += source_lengths
    looked = _on_source(model, weights, source.shape[1])
    looked = jnp.take_along_axis(looked, last[:, None, None], axis=1)[:, 0]
    return logits, Covering(caches.widen(cache, width), jnp.repeat(looked, width, axis=0))


def decode_step(
    model: Model, params: Params, tokens: Int[Array, "BW 1"], state: Covering
) -> tuple[Float[Array, "BW 1 V"], Covering]:
    """As `tfm.decoding.inference.decode_step`."""
    (logits, cache), weights = watched(model, params, tokens, state.cache, method="decode_step")
    looked = _on_source(model, weights, state.attention.shape[1], state.cache.width)
    return logits, Covering(cache, state.attention + looked.reshape(state.attention.shape))


def reorder(state: Covering, parents: Int[Array, "BW"]) -> Covering:
    """As `tfm.nn.cache.reorder`."""
    return Covering(caches.reorder(state.cache, parents), state.attention[parents])


def penalty(state: Covering, source_lengths: Int[Array, "B"]) -> Float[Array, "BW"]:
    """cp = Σ over real source tokens of log min(attention, 1) (Wu et al. 2016, equation 15), at least -20 a token."""
    logs = jnp.maximum(jnp.log(jnp.minimum(state.attention, 1)), LEAST)
    lengths = jnp.repeat(source_lengths, logs.shape[0] // source_lengths.shape[0])
    is_real = jnp.arange(logs.shape[1])[None] < lengths[:, None]
    return jnp.where(is_real, logs, 0).sum(axis=1)


def _on_source(
    model: Model, weights: list[tuple[tuple[str, ...], Array]], num_source: int, width: int = 1
) -> Float[Array, "B TW S"]:
    """The mean over layers and heads of what each query of the decoder laid on the source."""
    has_encoder = model.config.has_encoder
    wanted = ("decoder", "cross_attention" if has_encoder else "self_attention")
    layers_BNQM = jnp.stack([each for path, each in weights if (path[0], path[-1]) == wanted])
    mean = layers_BNQM.mean(axis=(0, 2))
    if has_encoder:
        return mean
    # the keys of W hypotheses lie together, and the source's are those of one of them: see tfm.nn.cache
    return jax.lax.slice_in_dim(mean.reshape(*mean.shape[:2], -1, width).sum(axis=-1), 0, num_source, axis=2)
