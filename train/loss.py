"""The training loss as sums and weights, so that it is divided exactly once, however the batch was cut.

The mean over slices of a batch, or over devices, is not the mean over its tokens when slices hold different numbers
of them. So nothing here divides: sums of losses and of weights are added up first.
"""

import typing
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from tfm.axes import Array, Float, KeyArray
from tfm.batch import Batch
from tfm.nn.logprob import label_log_probs, smoothed_cross_entropy
from train.config import LossConfig


@typing.no_type_check  # a pytree is also built from shapes, specs and other non-arrays
@flax.struct.dataclass
class LossSums:
    """Losses summed over target tokens, in nats and float32. Added with `+`; the properties divide, at the very end."""

    loss_sum: Float[Array, ""]
    """What is minimised: smoothed cross-entropy plus z-loss, times the tokens' weights."""
    nll_sum: Float[Array, ""]
    """-log p(label) times the tokens' weights: what perplexity is made of."""
    weight: Float[Array, ""]
    """The weights' sum: the number of target tokens, end tokens included."""

    @classmethod
    def zero(cls) -> "LossSums":
        return cls(*(jnp.zeros((), jnp.float32) for _ in range(3)))

    def __add__(self, other: "LossSums") -> "LossSums":
        return jax.tree.map(jnp.add, self, other)

    @property
    def loss(self) -> Float[Array, ""]:
        """Loss per target token; 0 without any."""
        return self.loss_sum * self.reciprocal_weight

    @property
    def nll(self) -> Float[Array, ""]:
        """Negative log-likelihood per target token; 0 without any. Its exponential is the perplexity."""
        return self.nll_sum * self.reciprocal_weight

    @property
    def reciprocal_weight(self) -> Float[Array, ""]:
        """1 / weight; 0 without any target token, where the sums are 0 too."""
        return jnp.where(self.weight > 0, 1 / jnp.where(self.weight > 0, self.weight, 1), 0)


def batch_loss(
    model: nn.Module, params: Any, batch: Batch, config: LossConfig, dropout_key: KeyArray | None
) -> LossSums:
    """The loss sums of one batch.

    Args:
        model: called as `model.apply({"params": params}, source, source_lengths, target_in)`, gives logits [B, T, V].
        params: its parameters.
        batch: where `weights` is 0, the label changes nothing.
        config: the smoothing and z-loss of `loss_sum`.
        dropout_key: dropout is on exactly when it is given.
    """
    batch = jax.tree.map(jnp.asarray, batch)  # from NumPy, when called outside jit
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    logits: Any = model.apply({"params": params}, batch.source, batch.source_lengths, batch.target_in, rngs=rngs)
    nll = -label_log_probs(logits, batch.target_out)
    if config.label_smoothing or config.z_loss:
        # Shares log Z and the label's logit with the line above: the compiler computes them once.
        loss = smoothed_cross_entropy(
            logits, batch.target_out, label_smoothing=config.label_smoothing, z_loss=config.z_loss
        )
    else:
        loss = nll
    weights = batch.weights.astype(jnp.float32)
    return LossSums(jnp.sum(loss * weights), jnp.sum(nll * weights), jnp.sum(weights))
