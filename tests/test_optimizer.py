import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.config import OptimizerConfig
from train.optimizer import decay_mask, make_optimizer, make_schedule, peak_learning_rate

RULES = ("adamw", "adafactor", "lion", "sgd")
SCHEDULES = ("inverse-sqrt", "cosine", "linear", "constant")


def expected_rate(config: OptimizerConfig, total: int, step: int) -> float:
    """The schedules once more, in Python floats and by cases."""
    t, w = step + 1, config.warmup_steps
    if t < w:
        return config.learning_rate * t / w
    if config.schedule == "inverse-sqrt":
        return config.learning_rate * math.sqrt(max(w, 1) / t)
    if config.schedule == "constant":
        return config.learning_rate
    progress = 1.0 if t >= total and total > w else (t - w) / max(total - w, 1)
    progress = min(progress, 1.0)
    fall = (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    return config.learning_rate * (config.final_share + (1 - config.final_share) * fall)


@given(
    st.sampled_from(SCHEDULES), st.integers(0, 50), st.integers(1, 100), st.floats(0, 1), st.integers(0, 300)
)  # fmt: skip
def test_schedules_follow_their_formulas(schedule, warmup, more_steps, final_share, step):
    config = OptimizerConfig(schedule=schedule, warmup_steps=warmup, final_share=final_share, learning_rate=0.3)
    total = warmup + more_steps
    rate = make_schedule(config, total)(step)
    assert rate.dtype == jnp.float32
    assert float(rate) == pytest.approx(expected_rate(config, total, step), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_at_the_first_step_the_peak_and_the_end(schedule):
    config = OptimizerConfig(schedule=schedule, warmup_steps=10, final_share=0.1, learning_rate=2.0)
    rate = jax.jit(make_schedule(config, 40))
    assert float(rate(0)) == pytest.approx(0.2)  # not zero: the first batch is not wasted
    assert float(rate(9)) == pytest.approx(2.0)
    end = {"inverse-sqrt": 2 * math.sqrt(10 / 40), "cosine": 0.2, "linear": 0.2, "constant": 2.0}[schedule]
    assert float(rate(39)) == pytest.approx(end)
    rates = [float(rate(step)) for step in range(40)]
    assert max(rates) == pytest.approx(2.0)
    assert all(late <= early for early, late in itertools.pairwise(rates[9:]))


@settings(max_examples=20)
@given(st.sampled_from(SCHEDULES), st.integers(0, 40), st.integers(1, 60))
def test_the_peak_is_the_highest_rate_of_the_run(schedule, warmup, steps):
    if schedule in ("cosine", "linear") and warmup > steps:
        return
    config = OptimizerConfig(schedule=schedule, warmup_steps=warmup, learning_rate=0.3, final_share=0.1)
    highest = max(expected_rate(config, steps, step) for step in range(steps))
    assert peak_learning_rate(config, steps) == pytest.approx(highest, rel=1e-5)


def test_inverse_square_root_is_equation_3_of_the_paper():
    model_dim, warmup = 512, 4000
    config = OptimizerConfig(learning_rate=(model_dim * warmup) ** -0.5, warmup_steps=warmup)
    rate = make_schedule(config, 100_000)
    for t in (1, 17, 3999, 4000, 4001, 99_999):
        paper = model_dim**-0.5 * min(t**-0.5, t * warmup**-1.5)
        assert float(rate(t - 1)) == pytest.approx(paper, rel=1e-6)


def test_rate_follows_the_given_step_not_the_number_of_updates():
    config = OptimizerConfig(name="sgd", momentum=0.0, clip_norm=0.0, learning_rate=1.0, warmup_steps=10)
    optimizer = make_optimizer(config, 100)
    params = {"w": jnp.ones((2, 2))}
    opt_state = optimizer.init(params)
    for step in (0, 3, 3, 9):
        updates, opt_state = optimizer.update({"w": jnp.ones((2, 2))}, opt_state, params, step=step)
        np.testing.assert_allclose(updates["w"], -(step + 1) / 10, rtol=1e-6)
    with pytest.raises(TypeError, match="step"):
        optimizer.update(params, opt_state, params)


PARAMS = {
    "embedding": jnp.full((3, 4), 2.0),
    "layer": {"query": {"kernel": jnp.full((4, 2, 2), 2.0), "bias": jnp.full((2, 2), 2.0)}},
    "norm": {"scale": jnp.full((4,), 2.0)},
    "stacked_norms": {"scale": jnp.full((6, 4), 2.0)},
    "relative_bias": {"embedding": jnp.full((8, 2), 2.0)},
}


def test_decay_mask_takes_matrices_only():
    assert decay_mask(PARAMS) == {
        "embedding": True,
        "layer": {"query": {"kernel": True, "bias": False}},
        "norm": {"scale": False},
        "stacked_norms": {"scale": False},
        "relative_bias": {"embedding": False},
    }


@pytest.mark.parametrize("rule", RULES)
def test_weight_decay_is_decoupled_and_the_same_for_every_rule(rule):
    config = OptimizerConfig(name=rule, learning_rate=0.5, schedule="constant", warmup_steps=0, weight_decay=0.1)
    optimizer = make_optimizer(config, 10)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = optimizer.update(zeros, optimizer.init(PARAMS), PARAMS, step=0)
    for update, decays in zip(jax.tree.leaves(updates), jax.tree.leaves(decay_mask(PARAMS)), strict=True):
        np.testing.assert_allclose(update, -0.5 * 0.1 * 2.0 if decays else 0.0, rtol=1e-6)


def run(config: OptimizerConfig, params, gradients) -> list:
    """The parameters after each of the given gradients."""
    optimizer = make_optimizer(config, len(gradients))
    opt_state, history = optimizer.init(params), []
    for step, gradient in enumerate(gradients):
        updates, opt_state = optimizer.update(gradient, opt_state, params, step=step)
        params = optax.apply_updates(params, updates)
        history.append(params)
    return history


def constant(rule: str, **changes) -> OptimizerConfig:
    defaults = dict(schedule="constant", warmup_steps=0, learning_rate=0.1, clip_norm=0.0)
    return OptimizerConfig(name=rule, **{**defaults, **changes})


GRADIENTS = [np.array([[1.0, -2.0], [0.5, 3.0]], np.float32), np.array([[-4.0, 1.0], [0.25, 1.0]], np.float32)]


def test_adamw_follows_the_paper():
    config = constant("adamw", beta1=0.8, beta2=0.95, epsilon=1e-3, weight_decay=0.2)
    history = run(config, jnp.ones((2, 2)), GRADIENTS)
    p, m, v = np.ones((2, 2)), np.zeros((2, 2)), np.zeros((2, 2))
    for t, (g, got) in enumerate(zip(GRADIENTS, history, strict=True), start=1):
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
        direction = m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-3)
        p = p - 0.1 * (direction + 0.2 * p)
        np.testing.assert_allclose(got, p, rtol=1e-5)


def test_lion_follows_the_paper():
    config = constant("lion", beta1=0.8, beta2=0.95, weight_decay=0.2)
    history = run(config, jnp.ones((2, 2)), GRADIENTS)
    p, m = np.ones((2, 2)), np.zeros((2, 2))
    for g, got in zip(GRADIENTS, history, strict=True):
        p = p - 0.1 * (np.sign(0.8 * m + 0.2 * g) + 0.2 * p)
        m = 0.95 * m + 0.05 * g
        np.testing.assert_allclose(got, p, rtol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_sgd_is_heavy_ball(momentum):
    history = run(constant("sgd", momentum=momentum), jnp.ones((2, 2)), GRADIENTS)
    p, m = np.ones((2, 2)), np.zeros((2, 2))
    for g, got in zip(GRADIENTS, history, strict=True):
        m = g + momentum * m
        p = p - 0.1 * m
        np.testing.assert_allclose(got, p, rtol=1e-5)


def test_adafactor_follows_the_paper():
    """Algorithm 4 for a matrix large enough to be factored, two steps: the second moment is a rank-1 estimate."""
    random = np.random.default_rng(0)
    gradients = [random.normal(size=(128, 256)).astype(np.float32) for _ in range(2)]
    start = random.normal(size=(128, 256)).astype(np.float32)
    history = run(constant("adafactor", learning_rate=0.01), jnp.asarray(start), gradients)
    x, rows, columns = start.astype(np.float64), 0.0, 0.0
    for t, (g, got) in enumerate(zip(gradients, history, strict=True), start=1):
        decay = 1 - t**-0.8
        square = g.astype(np.float64) ** 2 + 1e-30
        rows = decay * rows + (1 - decay) * square.sum(axis=1, keepdims=True)
        columns = decay * columns + (1 - decay) * square.sum(axis=0, keepdims=True)
        u = g / np.sqrt(rows * columns / rows.sum())
        u /= max(1.0, np.sqrt(np.mean(u**2)))
        x = x - 0.01 * max(1e-3, np.sqrt(np.mean(x**2))) * u
        np.testing.assert_allclose(got, x, rtol=1e-4, atol=1e-6)


def test_adafactor_state_is_sublinear_and_adams_is_float32():
    params = {"w": jnp.zeros((256, 512))}
    size = sum(leaf.size for leaf in jax.tree.leaves(make_optimizer(constant("adafactor"), 1).init(params)))
    assert size < 1000
    for rule in RULES:
        leaves = jax.tree.leaves(make_optimizer(constant(rule), 1).init(params))
        assert {leaf.dtype for leaf in leaves if leaf.ndim} <= {jnp.dtype("float32")}


@given(st.floats(1e-3, 1e3), st.floats(1e-2, 1e2))
def test_clipping_limits_the_global_norm_and_keeps_the_direction(scale, limit):
    gradient = {"a": scale * jnp.ones((2, 2)), "b": -scale * jnp.ones(5)}  # norm 3 · scale
    optimizer = make_optimizer(constant("sgd", momentum=0.0, learning_rate=1.0, clip_norm=limit), 1)
    for known in ({}, {"gradient_norm": jnp.float32(3 * scale)}):
        updates, _ = optimizer.update(gradient, optimizer.init(gradient), gradient, step=0, **known)
        np.testing.assert_allclose(updates["a"], -min(scale, limit / 3), rtol=1e-5)
        np.testing.assert_allclose(updates["b"], min(scale, limit / 3), rtol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_reduces_a_least_squares_loss(rule):
    random = np.random.default_rng(1)
    inputs, targets = random.normal(size=(32, 4)), random.normal(size=(4, 3))
    params = {"w": jnp.asarray(random.normal(size=(4, 3)), jnp.float32)}

    def loss(params):
        return jnp.mean((inputs @ params["w"] - inputs @ targets) ** 2)

    rate = {"adamw": 0.1, "adafactor": 0.1, "lion": 0.05, "sgd": 0.1}[rule]
    optimizer = make_optimizer(constant(rule, schedule="cosine", learning_rate=rate, beta2=0.9), 60)

    @jax.jit
    def update(step, params, opt_state):
        updates, opt_state = optimizer.update(jax.grad(loss)(params), opt_state, params, step=step)
        return optax.apply_updates(params, updates), opt_state

    first, opt_state = float(loss(params)), optimizer.init(params)
    for step in range(60):
        params, opt_state = update(step, params, opt_state)
    assert float(loss(params)) < 0.05 * first


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_warmup_that_outlasts_the_run_is_refused(schedule):
    config = OptimizerConfig(schedule=schedule, warmup_steps=11)
    with pytest.raises(ValueError, match="within the 10 steps of"):
        make_optimizer(config, 10)
    assert float(make_schedule(config, 11)(10)) == pytest.approx(config.learning_rate)  # nothing but warmup


def test_no_steps_are_refused():
    with pytest.raises(ValueError, match="at least 1 step"):
        make_schedule(OptimizerConfig(), 0)
