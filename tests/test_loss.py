import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfm.batch import make_batch
from tfm.config import ModelConfig
from train.config import LossConfig
from train.loss import LossSums, batch_loss

V = 7
PLAIN = LossConfig(label_smoothing=0.0)


class Bigrams(nn.Module):
    """Logits of the next token from the last one and the source's first: the smallest thing that has the call."""

    dtype: str = "float32"

    @nn.compact
    def __call__(self, source, source_lengths, target_in):
        hidden = nn.Embed(V, V, name="target")(target_in) + nn.Embed(V, V, name="source")(source[:, :1])
        hidden = nn.Dropout(0.5, deterministic=not self.has_rng("dropout"))(hidden)
        return hidden.astype(self.dtype)


MODEL = Bigrams()
BATCH = make_batch([[3, 4, 2], [5, 2]], [[4, 5, 6], [3]], ModelConfig(source_vocab_size=V, target_vocab_size=V))
PARAMS = MODEL.init(jax.random.key(0), BATCH.source, BATCH.source_lengths, BATCH.target_in)["params"]


def test_sums_are_those_of_the_formula():
    epsilon, z_loss = 0.2, 0.01
    sums = batch_loss(MODEL, PARAMS, BATCH, LossConfig(label_smoothing=epsilon, z_loss=z_loss), None)
    logits = np.asarray(
        MODEL.apply({"params": PARAMS}, BATCH.source, BATCH.source_lengths, BATCH.target_in), np.float64
    )
    log_z = np.log(np.exp(logits).sum(-1))
    log_p = logits - log_z[..., None]
    loss = nll = 0.0
    for row, position in [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]:  # with the end tokens
        target = np.full(V, epsilon / V)
        target[BATCH.target_out[row, position]] += 1 - epsilon
        loss += -(target * log_p[row, position]).sum() + z_loss * log_z[row, position] ** 2
        nll -= log_p[row, position, BATCH.target_out[row, position]]
    assert float(sums.weight) == 6
    assert float(sums.loss_sum) == pytest.approx(loss, rel=1e-6)
    assert float(sums.nll_sum) == pytest.approx(nll, rel=1e-6)
    assert float(sums.loss) == pytest.approx(loss / 6, rel=1e-6)
    assert float(sums.nll) == pytest.approx(nll / 6, rel=1e-6)


def test_without_smoothing_the_loss_is_the_nll():
    sums = batch_loss(MODEL, PARAMS, BATCH, PLAIN, None)
    assert float(sums.loss_sum) == float(sums.nll_sum) > 0


@settings(max_examples=20, deadline=None)
@given(st.integers(0, V - 1), st.integers(0, V - 1))
def test_padded_labels_and_inputs_change_nothing(label, token):
    labels, inputs = BATCH.target_out.copy(), BATCH.target_in.copy()
    labels[BATCH.weights == 0] = label
    inputs[BATCH.weights == 0] = token
    changed = dataclasses.replace(BATCH, target_out=labels, target_in=inputs)
    config = LossConfig(z_loss=0.1)

    def gradients(batch):
        return jax.grad(lambda params: batch_loss(MODEL, params, batch, config, None).loss_sum)(PARAMS)

    assert batch_loss(MODEL, PARAMS, changed, config, None) == batch_loss(MODEL, PARAMS, BATCH, config, None)
    jax.tree.map(np.testing.assert_array_equal, gradients(changed), gradients(BATCH))


def test_padded_rows_change_nothing():
    model_config = ModelConfig(source_vocab_size=V, target_vocab_size=V)
    padded = make_batch([[3, 4, 2], [5, 2]], [[4, 5, 6], [3]], model_config, rows=5, shape=(6, 9))
    config = LossConfig(z_loss=0.1)
    few, many = (batch_loss(MODEL, PARAMS, batch, config, None) for batch in (BATCH, padded))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), few, many)


def test_a_batch_without_targets_has_a_loss_of_zero():
    empty = dataclasses.replace(BATCH, weights=np.zeros_like(BATCH.weights))
    sums = batch_loss(MODEL, PARAMS, empty, LossConfig(), None)
    assert (float(sums.loss), float(sums.nll), float(sums.weight)) == (0, 0, 0)


def test_sums_are_added_before_they_are_divided():
    one, two = (LossSums(*(jnp.float32(x) for x in values)) for values in [(6, 3, 1), (2, 1, 3)])
    total = LossSums.zero() + one + two
    assert (float(total.loss), float(total.nll)) == (2, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_are_float32(dtype):
    sums = batch_loss(Bigrams(dtype), PARAMS, BATCH, LossConfig(z_loss=0.1), None)
    assert {leaf.dtype for leaf in jax.tree.leaves(sums)} == {jnp.dtype("float32")}


def test_dropout_is_on_exactly_with_a_key():
    def loss(key):
        return float(batch_loss(MODEL, PARAMS, BATCH, PLAIN, key).loss)

    assert loss(None) == loss(None)
    assert loss(jax.random.key(1)) == loss(jax.random.key(1))
    assert len({loss(None), loss(jax.random.key(1)), loss(jax.random.key(2))}) == 3
