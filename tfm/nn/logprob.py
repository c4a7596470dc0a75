"""Log-probabilities of labels, and the cross-entropy made of them: one function for scoring and for training."""

import jax
import jax.numpy as jnp
import numpy as np

from tfm.axes import Array, Float, Int


def label_log_probs(logits: Float[Array, "*B V"], labels: Int[Array | np.ndarray, "*B"]) -> Float[Array, "*B"]:
    """The log of softmax(logits)[label], in float32, without writing the whole softmax.

    Args:
        logits: unnormalised scores.
        labels: from 0 to V-1; any other counts as the nearest of these, so that a weight of 0 can still drop it.
    """
    log_z, label_logits, _ = _summarise(logits, _in_range(labels, logits.shape[-1]))
    return label_logits - log_z


def smoothed_cross_entropy(
    logits: Float[Array, "B T V"],
    labels: Int[Array | np.ndarray, "B T"],
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Float[Array, "B T"]:
    """Cross-entropy of each position against a smoothed label, in nats and float32.

    The target distribution is (1 - ε) on the label plus ε / V on every entry (Szegedy et al. 2016, section 7). With
    log Z = logsumexp(logits) that is  log Z - (1 - ε) · logit[label] - ε · mean(logits),  and `z_loss` adds
    z_loss · (log Z)² (Chowdhery et al. 2022, section 5).

    Args:
        logits: unnormalised scores.
        labels: the right ids, from 0 to V-1; any other counts as the nearest of these. Positions that do not count are
            dropped later, by their weight.
        label_smoothing: ε, from 0 to less than 1.
        z_loss: weight of (log Z)².

    Returns:
        The loss of each position, unweighted: neither summed nor averaged.
    """
    log_z, label_logits, mean_logits = _summarise(logits, _in_range(labels, logits.shape[-1]))
    loss = log_z - (1 - label_smoothing) * label_logits
    if label_smoothing:
        loss -= label_smoothing * mean_logits
    if z_loss:
        loss += z_loss * log_z**2
    return loss


def _in_range(labels: Array | np.ndarray, vocab_size: int) -> Array:
    """In a dtype that can count to V; and none that would read NaN, which no weight removes."""
    return jnp.clip(jnp.asarray(labels, jnp.int32), 0, vocab_size - 1)


@jax.custom_vjp
def _summarise(logits: Array, labels: Array) -> tuple[Array, Array, Array]:
    """log Z, the label's logit and the mean logit of each position: all that a loss needs of V numbers.

    Its gradient is written out, because it is then one pass over the logits: JAX's own scatters into a second array of
    their size for the label, and adds.
    """
    return _summarise_fwd(logits, labels)[0]


def _summarise_fwd(logits: Array, labels: Array) -> tuple[tuple[Array, Array, Array], tuple[Array, ...]]:
    logits32 = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits32, axis=-1)
    label_logits = jnp.take_along_axis(logits32, labels[..., None], axis=-1)[..., 0]
    return (log_z, label_logits, logits32.mean(axis=-1)), (logits, labels, log_z)


def _summarise_bwd(saved: tuple[Array, ...], gradients: tuple[Array, Array, Array]) -> tuple[Array, np.ndarray]:
    logits, labels, log_z = saved
    by_log_z, by_label, by_mean = (gradient[..., None] for gradient in gradients)
    softmax = jnp.exp(logits.astype(jnp.float32) - log_z[..., None])
    is_label = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]
    gradient = by_log_z * softmax + by_mean / logits.shape[-1] + jnp.where(is_label, by_label, 0)
    return gradient.astype(logits.dtype), np.zeros(labels.shape, jax.dtypes.float0)


_summarise.defvjp(_summarise_fwd, _summarise_bwd)
