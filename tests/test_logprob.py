import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tolerances import assert_close

from tfm.nn.logprob import label_log_probs, smoothed_cross_entropy

B, T, V = 2, 3, 7
LOGITS = 3 * jax.random.normal(jax.random.key(0), (B, T, V))
LABELS = jax.random.randint(jax.random.key(1), (B, T), 0, V)

# between positions: a weight for each, so that the gradient of each is looked at, not of a plain sum only
WEIGHTS = jnp.array([[0.5, 2.0, 1.0], [0.0, 3.0, 1.0]])


def by_the_formula(logits, labels, label_smoothing, z_loss):
    """With the whole log-softmax and the smoothed distribution written out."""
    target = (1 - label_smoothing) * jax.nn.one_hot(labels, V) + label_smoothing / V
    log_z = jnp.log(jnp.exp(logits).sum(axis=-1))
    return -(target * jax.nn.log_softmax(logits)).sum(axis=-1) + z_loss * log_z**2


def test_label_log_probs_are_entries_of_the_log_softmax():
    expected = np.take_along_axis(np.asarray(jax.nn.log_softmax(LOGITS)), np.asarray(LABELS)[..., None], axis=-1)
    assert_close(label_log_probs(LOGITS, LABELS), expected[..., 0])
    assert_close(label_log_probs(LOGITS[0, 0], LABELS[0, 0]), expected[0, 0, 0])


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_the_loss_and_its_gradient_are_those_of_the_formula(epsilon, z_loss):
    def ours(logits):
        return (WEIGHTS * smoothed_cross_entropy(logits, LABELS, label_smoothing=epsilon, z_loss=z_loss)).sum()

    def formula(logits):
        return (WEIGHTS * by_the_formula(logits, LABELS, epsilon, z_loss)).sum()

    assert_close(
        smoothed_cross_entropy(LOGITS, LABELS, label_smoothing=epsilon, z_loss=z_loss),
        by_the_formula(LOGITS, LABELS, epsilon, z_loss),
    )
    assert_close(jax.grad(ours)(LOGITS), jax.grad(formula)(LOGITS))


def test_the_gradient_of_a_label_log_prob_is_that_of_the_log_softmax():
    def formula(logits):
        return (WEIGHTS * (jax.nn.one_hot(LABELS, V) * jax.nn.log_softmax(logits)).sum(axis=-1)).sum()

    def ours(logits):
        return (WEIGHTS * label_log_probs(logits, LABELS)).sum()

    assert_close(jax.grad(ours)(LOGITS), jax.grad(formula)(LOGITS))


def test_smoothing_makes_an_even_distribution_the_best_for_equal_targets():
    """With ε the minimum is reached at p(label) = 1 - ε + ε / V, not at 1."""
    epsilon = 0.1
    others = epsilon / V
    best = jnp.log(jnp.where(jax.nn.one_hot(LABELS, V) == 1, 1 - epsilon + others, others))
    gradient = jax.grad(lambda x: smoothed_cross_entropy(x, LABELS, label_smoothing=epsilon).sum())(best)
    assert_close(gradient, np.zeros((B, T, V)))


@given(st.floats(-1e4, 1e4), st.floats(0, 0.99))
def test_a_shift_of_all_logits_changes_nothing_without_z_loss(shift, epsilon):
    shifted = smoothed_cross_entropy(LOGITS + shift, LABELS, label_smoothing=epsilon)
    # numbers near 1e4 have steps of 1e-3 in float32
    expected = smoothed_cross_entropy(LOGITS, LABELS, label_smoothing=epsilon)
    np.testing.assert_allclose(shifted, expected, atol=1e-5 + 4e-7 * abs(shift))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_logits_are_summed_in_float32(dtype):
    wide = 8 * jax.random.normal(jax.random.key(2), (1, 2, 4096))
    labels = jnp.array([[5, 4000]])
    low = wide.astype(dtype)
    loss = smoothed_cross_entropy(low, labels, label_smoothing=0.1, z_loss=1e-4)
    assert loss.dtype == jnp.float32
    assert_close(loss, smoothed_cross_entropy(low.astype(jnp.float32), labels, label_smoothing=0.1, z_loss=1e-4))
    assert label_log_probs(low, labels).dtype == jnp.float32
    assert jax.grad(lambda x: label_log_probs(x, labels).sum())(low).dtype == dtype


@pytest.mark.parametrize("dtype", [np.int8, np.int16])
def test_labels_of_a_narrow_type_are_the_same_labels(dtype):
    logits = jax.random.normal(jax.random.key(3), (2, 300))
    labels = np.array([100, 7])
    loss, gradient = jax.value_and_grad(lambda x: label_log_probs(x, labels.astype(dtype)).sum())(logits)
    expected = jax.nn.log_softmax(logits)[np.arange(2), labels].sum()
    assert_close(loss, expected)
    assert_close(gradient, jax.nn.one_hot(labels, 300) - jax.nn.softmax(logits))


def test_a_label_out_of_range_counts_as_the_nearest_and_a_weight_of_0_drops_it():
    logits, labels = LOGITS[0], jnp.array([-100, 3, V])
    assert_close(label_log_probs(logits, labels), label_log_probs(logits, jnp.array([0, 3, V - 1])))

    def loss(logits, weights):
        return (weights * smoothed_cross_entropy(logits[None], labels[None], label_smoothing=0.1)[0]).sum()

    weights = jnp.array([0.0, 1.0, 0.0])
    alone = smoothed_cross_entropy(logits[None], jnp.array([[0, 3, 0]]), label_smoothing=0.1)[0, 1]
    assert_close(loss(logits, weights), alone)
    gradient = jax.grad(loss)(logits, weights)
    assert np.isfinite(gradient).all()
    assert not gradient[jnp.array([0, 2])].any()


def test_logits_far_out_stay_finite():
    logits = jnp.array([[[1e38, -1e38, 0.0], [-1e38, -1e38, -1e38]]])
    labels = jnp.array([[0, 2]])
    assert label_log_probs(logits, labels)[0, 0] == 0
    assert np.isfinite(label_log_probs(logits, labels)).all()
    assert np.isfinite(jax.grad(lambda x: label_log_probs(x, labels).sum())(logits)).all()


def test_entries_that_are_ruled_out_do_not_spoil_the_others():
    logits = jnp.array([[[1.0, -jnp.inf, 2.0]]])
    labels = jnp.array([[2]])
    assert_close(label_log_probs(logits, labels)[0, 0], jax.nn.log_softmax(jnp.array([1.0, 2.0]))[1])
    gradient = jax.grad(lambda x: label_log_probs(x, labels).sum())(logits)
    assert np.isfinite(gradient).all()
    assert gradient[0, 0, 1] == 0
