import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfm.batch import Batch, make_batch
from tfm.config import ModelConfig
from tfm.nn import layers
from tfm.nn.params import param_shapes
from tfm.nn.transformer import EncoderDecoder
from train.config import BatchConfig, LossConfig, OptimizerConfig, TrainConfig
from train.loss import batch_loss
from train.optimizer import decay_mask, make_optimizer
from train.step import init_state, make_eval_step, make_train_step

pytestmark = pytest.mark.usefixtures("compile_fast")

POISON = 9
"""A source id that turns the gradient, and only the gradient, of `Tiny` into NaN."""

MODEL_CONFIG = ModelConfig(source_vocab_size=10, target_vocab_size=10, model_dim=8, num_heads=2, dropout_rate=0.2)
PAIRS = [([3, 4, 2], [3, 4]), ([5, 2], [5]), ([6, 7, 8, 2], [6, 7, 8]), ([2], [])]


class Tiny(EncoderDecoder):
    """The last target token and a bag of the source: called like a Transformer, compiled in a tenth of its time.

    Where a source holds `POISON`, it adds sqrt(0 · logits): a value of 0 whose slope is infinite.
    """

    def setup(self) -> None:
        pass

    @nn.compact
    def __call__(self, source, source_lengths, target_in):
        config = self.config
        bag = layers.Embedding(config.source_vocab_size, config.model_dim, name="source")(source).sum(1, keepdims=True)
        hidden = bag + layers.Embedding(config.target_vocab_size, config.model_dim, name="target")(target_in)
        hidden = layers.Norm(config, name="norm")(layers.Dropout(config.dropout_rate)(hidden))
        logits = layers.Linear(config.target_vocab_size, name="output")(hidden)
        poisoned = (source == POISON).any(axis=1)[:, None, None]
        root = jnp.sqrt(jnp.where(poisoned, 0 * logits, 1))
        return logits + jnp.where(poisoned, root, 0)


def config_of(**changes) -> TrainConfig:
    optimizer = {"name": "adamw", "learning_rate": 0.01, "schedule": "constant", "warmup_steps": 0}
    optimizer |= changes.pop("optimizer", {})
    accumulation = changes.pop("accumulation_steps", 1)
    return TrainConfig(
        model=changes.pop("model", MODEL_CONFIG),
        optimizer=OptimizerConfig(**optimizer),
        batch=BatchConfig(accumulation_steps=accumulation),
        steps=50,
        **changes,
    )


@functools.cache
def parts(config: TrainConfig):
    """The step, and a function that gives a new copy of its first state."""
    model = Tiny(config.model)
    optimizer = make_optimizer(config.optimizer, config.steps)
    first = init_state(model, optimizer, config)
    return make_train_step(model, optimizer, config), lambda: jax.tree.map(jnp.copy, first)


def batch_of(pairs, rows: int = 4) -> Batch:
    sources, targets = zip(*pairs, strict=True)
    return make_batch(sources, targets, MODEL_CONFIG, shape=(5, 4), rows=rows)


BATCH = batch_of(PAIRS)


def copy(tree):
    return jax.tree.map(lambda x: np.array(x, copy=True), tree)


def assert_same_bits(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).dtype == np.asarray(y).dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def differ(a, b) -> bool:
    return any((np.asarray(x) != np.asarray(y)).any() for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


NO_DROPOUT = MODEL_CONFIG.replace(dropout_rate=0.0)
DESCENT = dict(name="sgd", momentum=0.0, clip_norm=0.0, learning_rate=1.0)


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=4, max_size=4), min_size=8, max_size=8),
    st.integers(0, 3),
)
def test_accumulated_gradients_are_those_of_the_whole_batch(weights, empty_slice):
    weights = np.array(weights, np.float32)
    weights[empty_slice::4] = 0  # one of the four slices has no target token at all
    batch = dataclasses.replace(batch_of(PAIRS + PAIRS[::-1], rows=8), weights=weights)
    results = []
    for slices in (1, 4):
        step, init = parts(config_of(model=NO_DROPOUT, optimizer=DESCENT, accumulation_steps=slices))
        results.append(step(init(), batch))
    (whole, whole_metrics), (cut, cut_metrics) = results
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), whole.params, cut.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), whole_metrics, cut_metrics)
    assert float(cut_metrics.target_tokens) == weights.sum()


def test_gradient_is_that_of_the_mean_over_target_tokens():
    config = config_of(model=NO_DROPOUT, optimizer=DESCENT)
    step, init = parts(config)
    start = init()
    state, metrics = step(init(), BATCH)

    def mean_loss(params):
        return batch_loss(Tiny(config.model), params, BATCH, config.loss, None).loss

    loss, gradients = jax.value_and_grad(mean_loss)(start.params)
    assert float(metrics.loss) == pytest.approx(float(loss), rel=1e-6)
    assert float(metrics.gradient_norm) == pytest.approx(float(optax.tree.norm(gradients)), rel=1e-5)
    expected = jax.tree.map(lambda p, g: p - g, start.params, gradients)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), state.params, expected)


def poison_loss(batch: Batch) -> Batch:
    weights = batch.weights.copy()
    weights[0, 0] = np.inf
    return dataclasses.replace(batch, weights=weights)


def poison_gradient(batch: Batch) -> Batch:
    source = batch.source.copy()
    source[0, 0] = POISON
    return dataclasses.replace(batch, source=source)


@pytest.mark.parametrize("poison", [poison_loss, poison_gradient])
@pytest.mark.parametrize(
    ("rule", "slices"), [("adamw", 1), ("adamw", 2), ("adafactor", 1), ("lion", 1), ("sgd", 1)]
)  # fmt: skip
def test_a_step_that_is_not_finite_changes_nothing_but_the_counters(rule, slices, poison):
    config = config_of(optimizer=dict(name=rule, weight_decay=0.1), accumulation_steps=slices)
    step, init = parts(config)
    state, metrics = step(init(), BATCH)
    assert bool(metrics.finite)
    before = copy(state)
    for bad in (1, 2):
        state, metrics = step(state, poison(BATCH))
        assert not bool(metrics.finite)
        assert np.isfinite(metrics.loss) == (poison is poison_gradient)
        assert (int(state.skipped_total), int(state.skipped_in_row), int(state.step)) == (bad, bad, 1 + bad)
        assert_same_bits((before.params, before.opt_state), (state.params, state.opt_state))
    state, metrics = step(state, BATCH)
    assert bool(metrics.finite)
    assert (int(state.skipped_total), int(state.skipped_in_row), int(state.step)) == (2, 0, 4)
    assert differ(before.params, state.params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.params, state.opt_state)))


def test_a_skipped_step_uses_up_its_place_in_the_schedule():
    config = config_of(optimizer=dict(schedule="linear", warmup_steps=0, learning_rate=1.0))
    step, init = parts(config)
    state, rates = init(), []
    for batch in (BATCH, poison_loss(BATCH), BATCH):
        state, metrics = step(state, batch)
        rates.append(float(metrics.learning_rate))
    np.testing.assert_allclose(rates, [1 - 1 / 50, 1 - 2 / 50, 1 - 3 / 50], rtol=1e-6)


@pytest.mark.parametrize("slices", [1, 2])
def test_a_batch_without_target_tokens_changes_nothing_and_is_finite(slices):
    step, init = parts(config_of(optimizer=dict(weight_decay=0.1), accumulation_steps=slices))
    state, _ = step(init(), BATCH)
    before = copy(state)
    state, metrics = step(state, dataclasses.replace(BATCH, weights=np.zeros_like(BATCH.weights)))
    assert bool(metrics.finite)
    assert (float(metrics.loss), float(metrics.nll), float(metrics.target_tokens)) == (0, 0, 0)
    assert int(state.skipped_total) == 0
    assert_same_bits((before.params, before.opt_state), (state.params, state.opt_state))


@pytest.mark.parametrize("bits", ["rbg", "threefry"])
def test_a_restored_copy_continues_bit_for_bit(bits):
    step, init = parts(config_of(dropout_bits=bits, accumulation_steps=2))
    batches = [BATCH, batch_of(PAIRS[::-1]), poison_loss(BATCH), batch_of(PAIRS[2:])]
    state, saved = init(), None
    for number, batch in enumerate(batches + batches):
        if number == 3:
            saved = copy(state)
        state, _ = step(state, batch)
    resumed = saved
    for batch in (batches + batches)[3:]:
        resumed, _ = step(resumed, batch)
    assert_same_bits(resumed, state)
    assert int(state.skipped_total) == 2


def test_the_seed_decides_the_first_state():
    def first(seed: int):
        config = config_of(seed=seed, dropout_bits="threefry")
        return init_state(Tiny(config.model), make_optimizer(config.optimizer, config.steps), config)

    same, again, other = first(0), first(0), first(1)
    assert_same_bits(same, again)
    assert differ(same.params, other.params)
    assert differ(same.dropout_key, other.dropout_key)
    assert differ(same.dropout_key, jax.random.key_data(jax.random.key(0, impl="threefry2x32")))
    assert {leaf.dtype for leaf in jax.tree.leaves(same.params)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("bits", ["rbg", "threefry"])
def test_dropout_differs_by_step_and_by_slice(bits):
    step, init = parts(config_of(dropout_bits=bits))

    def loss(step_number: int) -> float:
        return float(step(dataclasses.replace(init(), step=jnp.int32(step_number)), BATCH)[1].loss)

    assert loss(0) == loss(0)
    assert len({loss(0), loss(1), loss(2)}) == 3

    halves, init_halves = parts(config_of(dropout_bits=bits, accumulation_steps=2))
    twice = jax.tree.map(lambda rows: np.repeat(rows, 2, axis=0), BATCH)  # both slices hold the rows of BATCH
    assert float(halves(init_halves(), twice)[1].loss) != pytest.approx(loss(0), rel=1e-6)


def test_the_old_state_is_donated():
    step, init = parts(config_of())
    old = init()
    state, _ = step(old, BATCH)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_one_compilation_serves_every_step_of_a_shape():
    compiled = []

    def count(event: str, seconds: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    step, init = parts(config_of(seed=5))
    state = init()
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        state, _ = step(state, BATCH)
        assert len(compiled) == 1
        for batch in (batch_of(PAIRS[:2]), poison_loss(BATCH), BATCH):
            state, _ = step(state, batch)
        assert len(compiled) == 1
        step(state, make_batch([[3, 2]] * 4, [[4]] * 4, MODEL_CONFIG, shape=(3, 2)))
        assert len(compiled) == 2
    finally:
        jax.monitoring.unregister_event_duration_listener(count)


@pytest.mark.parametrize("rule", ["adamw", "adafactor", "lion", "sgd"])
def test_every_rule_learns_to_copy(rule):
    rate = {"adamw": 0.01, "adafactor": 0.05, "lion": 0.003, "sgd": 0.3}[rule]
    config = config_of(model=NO_DROPOUT, optimizer=dict(name=rule, learning_rate=rate), loss=LossConfig())
    step, init = parts(config)
    state, first = step(init(), BATCH)
    for _ in range(79):
        state, metrics = step(state, BATCH)
    assert float(metrics.nll) < 0.5 * float(first.nll)
    assert int(state.step) == 80


def test_evaluation_has_neither_dropout_nor_smoothing():
    config = config_of()
    _, init = parts(config)
    params = init().params
    evaluate = make_eval_step(Tiny(config.model))
    sums = evaluate(params, BATCH)
    plain = Tiny(NO_DROPOUT)
    expected = batch_loss(plain, params, BATCH, LossConfig(label_smoothing=0.0), None)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), sums, expected)
    assert float(sums.loss_sum) == float(sums.nll_sum)
    assert float(sums.weight) == BATCH.weights.sum()


def test_weight_decay_of_a_model_takes_its_matrices_only():
    mask = decay_mask(param_shapes(MODEL_CONFIG.replace(positions="t5-bias", shared_embeddings="none")))
    assert set(jax.tree.leaves(mask)) == {True, False}
    for path, decays in jax.tree_util.tree_leaves_with_path(mask):
        names = jax.tree_util.keystr(path)
        assert decays == (names.endswith("['weight']") and "relative_bias" not in names), names


def test_rows_that_do_not_divide_are_refused():
    step, init = parts(config_of(accumulation_steps=3))
    with pytest.raises(ValueError, match="accumulation_steps = 3 divides, got 4"):
        step(init(), BATCH)
