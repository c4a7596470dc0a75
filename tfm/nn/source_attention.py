"""Attention before there were heads: one distribution over the source for each step of a recurrent decoder.

Bahdanau et al. 2014 score each source state h̄ₛ against the decoder's state with a small network (additive attention);
Luong et al. 2015 with products (dot, general) or with the same network (concat), and may look at a window of the source
only. When a step looks, and what it does with what it finds, is the decoder's affair: `tfm.nn.recurrent`.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from tfm.axes import Array, Bool, Float, Int
from tfm.config import ModelConfig
from tfm.nn import layers
from tfm.nn.recurrent_cache import Source
from tfm.nn.stored_vectors import Int8Vectors


class SourceAttention(nn.Module):
    """Weights over the source, and the mean of its states that they make; in formulas h is the decoder's state.

    With W_q and W_k as the query's and the key's halves of one matrix, score(h, h̄ₛ) is

        additive, concat   v · tanh(W_q h + W_k h̄ₛ)     (Bahdanau et al. 2014, appendix A.1.2; Luong et al. 2015, eq. 8)
        dot                h · h̄ₛ
        general            h · W_k h̄ₛ

    Local attention sees only the source tokens of which |s - p| is at most `attention_window`, p being the decoder's
    own position t in the target (`monotonic`), or the last source token where the target is longer; or S · sigmoid(v_p
    · tanh(W_p h)), S being the source's length (`predictive`, equation 9). Then weights are multiplied by exp(-(s - p)²
    / 2σ²) with σ = `attention_window` / 2 (equation 10), and so sum to less than 1. Positions count from 0.
    """

    config: ModelConfig
    dtype: layers.Dtype = "float32"

    def setup(self) -> None:
        dim, context = self.config.model_dim, self.config.source_context
        linear = functools.partial(layers.Linear, use_bias=False, dtype=self.dtype)
        if context != "dot":
            self.key = linear(dim)
        if context in ("additive", "concat"):
            self.query = linear(dim)
            self.energy = linear(1)
        if self.config.local_attention == "predictive":
            self.middle_hidden = linear(dim)
            self.middle = linear(1)

    def keys(self, states: Float[Array, "B S E"]) -> Float[Array, "B S D"] | None:
        """What every step's scores have in common: W_k h̄ₛ. None for the dot product, which takes the states."""
        return None if self.config.source_context == "dot" else self.key(states)

    def __call__(
        self,
        query: Float[Array, "B W D"],
        source: Source,
        source_lengths: Int[Array, "B"],
        position: Int[Array, "B"],
    ) -> tuple[Float[Array, "B W E"], Float[Array, "B W S"]]:
        """What each of W hypotheses finds in its row's source at one step.

        Args:
            query: the decoder's states h.
            source: its states and keys.
            source_lengths: source tokens from here on are padding.
            position: t, of the token that the step reads.

        Returns:
            The mean of the states by the weights, and the weights; zeros where there is no source.
        """
        assert source.states is not None
        states = _floats(source.states)
        scores = self._scores(query, states if source.keys is None else _floats(source.keys))
        visible, nearness = self._window(query, states.shape[1], source_lengths, position)
        weights = masked_softmax(scores, visible)
        if nearness is not None:
            weights *= nearness
        mixed = jnp.einsum("bws,bse->bwe", weights, states, preferred_element_type=jnp.float32)
        return mixed, weights

    def _scores(self, query: Array, keys: Array) -> Float[Array, "B W S"]:
        if self.config.source_context in ("dot", "general"):
            operands = query.astype(self.dtype), keys.astype(self.dtype)
            return jnp.einsum("bwd,bsd->bws", *operands, preferred_element_type=jnp.float32)

        def energies(self: SourceAttention, query: Array, keys: Array) -> Array:
            return self.energy(jnp.tanh(self.query(query)[:, :, None] + keys[:, None]))[..., 0]

        # For the gradient, tanh is computed again rather than kept: of all steps it would be [B, T, S, D].
        return nn.remat(energies, prevent_cse=False)(self, query, keys)

    def _window(
        self, query: Array, num_source: int, source_lengths: Array, position: Array
    ) -> tuple[Bool[Array, "B W S"], Float[Array, "B W S"] | None]:
        """Which source tokens may be looked at, and, where the middle is predicted, how near to it they are."""
        at = jnp.arange(num_source)[None, None]
        is_real = jnp.broadcast_to(at < source_lengths[:, None, None], (*query.shape[:2], num_source))
        local, window = self.config.local_attention, self.config.attention_window
        if local == "none":
            return is_real, None
        if local == "monotonic":
            middle = jnp.minimum(position, source_lengths - 1)[:, None, None]
            return is_real & (jnp.abs(at - middle) <= window), None
        share = jax.nn.sigmoid(self.middle(jnp.tanh(self.middle_hidden(query))))
        distance = at - source_lengths[:, None, None] * share
        return is_real & (jnp.abs(distance) <= window), jnp.exp(-2 * jnp.square(distance / window))


def masked_softmax(scores: Float[Array, "*B S"], visible: Bool[Array, "*B S"]) -> Float[Array, "*B S"]:
    """In float32; zeros where nothing is visible.

    Example:
        >>> masked_softmax(jnp.zeros((2, 2)), jnp.array([[True, True], [False, False]])).tolist()
        [[0.5, 0.5], [0.0, 0.0]]
    """
    # where all is hidden, any finite scores keep the gradient finite
    weights = jax.nn.softmax(jnp.where(visible, scores.astype(jnp.float32), jnp.finfo(jnp.float32).min), axis=-1)
    return jnp.where(visible, weights, 0)


def _floats(x: Array | Int8Vectors) -> Array:
    return x.values * x.scales if isinstance(x, Int8Vectors) else x
