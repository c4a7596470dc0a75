"""Log-probabilities of labels, and the cross-entropy made of them: one function for scoring and for training."""

import jax
import jax.numpy as jnp

from tfm.axes import Array, Float, Int


def label_log_probs(logits: Float[Array, "*B V"], labels: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """log softmax(logits)[label], in float32, without writing the whole softmax."""
    logits = logits.astype(jnp.float32)
    return _label_logits(logits, labels) - jax.nn.logsumexp(logits, axis=-1)


def smoothed_cross_entropy(
    logits: Float[Array, "B T V"],
    labels: Int[Array, "B T"],
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
        labels: the right ids. Positions that do not count are dropped later, by their weight.
        label_smoothing: ε, from 0 to less than 1.
        z_loss: weight of (log Z)².
    """
    logits = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    loss = log_z - (1 - label_smoothing) * _label_logits(logits, labels)
    if label_smoothing:
        loss -= label_smoothing * logits.mean(axis=-1)
    if z_loss:
        loss += z_loss * log_z**2
    return loss


def _label_logits(logits: Float[Array, "*B V"], labels: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """logits[label]. A masked sum, because the gradient of a gather is a scatter, which is slow and shards badly."""
    is_label = jnp.arange(logits.shape[-1]) == labels[..., None]
    return jnp.where(is_label, logits, 0).sum(axis=-1)
