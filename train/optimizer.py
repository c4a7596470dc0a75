"""Schedules and the optax chain that turns gradients into updates.

One chain serves every rule, in this order:

1. clip the gradients to a global norm (Pascanu et al. 2013),
2. the rule turns them into a direction: Adam, Adafactor, Lion or momentum,
3. weight decay adds λ · p for the matrices (Loshchilov & Hutter 2019: decoupled from the rule's statistics),
4. everything is multiplied by -η(t).

So a matrix moves by  -η(t) · (direction + λ · p)  whatever the rule: λ means the same for all of them. (optax's own
`adafactor` does not multiply its decay by the learning rate, and its `sgd` has none.)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tfm.axes import Array, Float
from train.config import OptimizerConfig

Schedule = Callable[[Any], Float[Array, ""]]
"""From the number of steps done so far, 0 before the first, to the learning rate of the next one."""


def make_schedule(config: OptimizerConfig, total_steps: int) -> Schedule:
    """The learning rate as a function of the step; works inside jit.

    With t = step + 1, so that the first step already learns, w = `warmup_steps` and n = `total_steps`, the rate is the
    peak times min(t / w, 1) times

    - `inverse-sqrt`: sqrt(w / t) from t = w on: equation 3 of Vaswani et al. 2017, where the peak is (D · w)^-0.5;
    - `cosine`: half a cosine from 1 at t = w to `final_share` at t = n (Loshchilov & Hutter 2017, without restarts);
    - `linear`: a line between the same two points;
    - `constant`: 1.

    Without warmup (w = 0) the first step has the peak of `inverse-sqrt` and `constant`. Past n, `cosine` and `linear`
    stay at `final_share`, which the other two do not read.

    Raises:
        ValueError: no steps at all, or a warmup longer than a `cosine` or `linear` schedule.
    """
    if total_steps < 1:
        raise ValueError(f"expected at least 1 step, got {total_steps}")
    if config.schedule in ("cosine", "linear") and config.warmup_steps > total_steps:
        raise ValueError(
            f"expected a warmup within the {total_steps} steps of a {config.schedule} schedule, got warmup_steps = "
            f"{config.warmup_steps}"
        )
    warmup = max(config.warmup_steps, 1)  # with 0, t / 1 is never below 1: no rise
    decay_steps = max(total_steps - config.warmup_steps, 1)

    def schedule(step: Any) -> Float[Array, ""]:
        t = jnp.asarray(step, jnp.float32) + 1
        rise = jnp.minimum(t / warmup, 1)
        progress = jnp.clip((t - config.warmup_steps) / decay_steps, 0, 1)
        match config.schedule:
            case "inverse-sqrt":
                share = jnp.minimum(jnp.sqrt(warmup / t), 1)
            case "cosine":
                share = config.final_share + (1 - config.final_share) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
            case "linear":
                share = config.final_share + (1 - config.final_share) * (1 - progress)
            case "constant":
                share = jnp.ones_like(t)
        return config.learning_rate * rise * share

    return schedule


def peak_learning_rate(config: OptimizerConfig, total_steps: int) -> float:
    """The highest rate that a run of so many steps comes to: less than asked for where its warmup is longer."""
    schedule = make_schedule(config, total_steps)
    return float(schedule(min(max(config.warmup_steps, 1), total_steps) - 1))


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformationExtraArgs:
    """The chain described at the top of this module.

    The learning rate follows the run's own step, passed as `optimizer.update(gradients, opt_state, params, step=step)`,
    not a counter of updates inside the optimizer: after skipped steps a schedule still ends where the run ends. Bias
    corrections do count updates, because they belong to the moments. All moments are float32. Who knows the gradients'
    global norm may pass it too, as `gradient_norm=`, and spares a pass over them.

    The rules, and what they read:

    - `adamw` (Kingma & Ba 2015; decay of Loshchilov & Hutter 2019): `beta1`, `beta2`, `epsilon`. Two moments a
      parameter.
    - `adafactor` (Shazeer & Stern 2018, algorithm 4 and the settings of section 9: decay rate 1 - t^-0.8, update
      clipping at RMS 1, no first moment): rows and columns of matrices of 128 or more each way stand for the second
      moment. The rate is *relative*: a parameter moves by η(t) times its own RMS, or times 1e-3 if that is more. The
      paper's is min(1e-2, t^-0.5).
    - `lion` (Chen et al. 2023, algorithm 2): `beta1`, `beta2`. One moment a parameter, and each entry moves by exactly
      η(t) before decay, so rates are 3 to 10 times smaller than Adam's and λ as much larger.
    - `sgd`: `momentum` (heavy ball: m ← g + μ m); no moment at 0.

    Raises:
        ValueError: as `make_schedule`.
    """
    schedule = make_schedule(config, total_steps)
    chain: list[optax.GradientTransformation] = []
    if config.clip_norm:
        chain.append(_clip_by_global_norm(config.clip_norm))
    chain.append(_direction(config))
    if config.weight_decay:
        chain.append(optax.add_decayed_weights(config.weight_decay, mask=decay_mask))
    chain.append(_scale_by_schedule(schedule))
    return optax.chain(*chain)


def decay_mask(params: Any) -> Any:
    """Which parameters decay: True for matrices, embeddings included; False for biases, norms and relative biases.

    A path is left out when a name in it contains `bias` or `norm`, besides everything of fewer than two axes: a bias
    may have two (one a head; stacked layers), and a relative bias is a table of buckets × heads.
    """

    def decays(path: tuple[Any, ...], leaf: Any) -> bool:
        names = jax.tree_util.keystr(path).lower()
        return leaf.ndim >= 2 and "bias" not in names and "norm" not in names

    return jax.tree_util.tree_map_with_path(decays, params)


def _direction(config: OptimizerConfig) -> optax.GradientTransformation:
    """Step 2 of the chain: pointing uphill and not yet scaled by the rate."""
    match config.name:
        case "adamw":
            return optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
        case "adafactor":
            return optax.chain(
                optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms()
            )
        case "lion":
            return optax.scale_by_lion(config.beta1, config.beta2)
        case "sgd":
            return optax.trace(config.momentum) if config.momentum else optax.identity()


def _clip_by_global_norm(limit: float) -> optax.GradientTransformationExtraArgs:
    """Step 1 of the chain, as one factor for all entries: optax's, a select for each, is twice the work on a CPU."""

    def update(
        updates: Any, state: Any, params: Any = None, *, gradient_norm: Array | None = None, **others: Any
    ) -> tuple[Any, Any]:
        norm = optax.tree.norm(updates) if gradient_norm is None else gradient_norm
        factor = jnp.minimum(limit / norm, 1)  # a norm of 0 gives infinity, and so 1
        return jax.tree.map(lambda gradient: factor * gradient, updates), state

    return optax.GradientTransformationExtraArgs(_no_state, update)


def _scale_by_schedule(schedule: Schedule) -> optax.GradientTransformationExtraArgs:
    """Step 4 of the chain. Without state: the step comes from outside."""

    def update(updates: Any, state: Any, params: Any = None, *, step: Any, **others: Any) -> tuple[Any, Any]:
        rate = schedule(step)
        return jax.tree.map(lambda direction: -rate * direction, updates), state

    return optax.GradientTransformationExtraArgs(_no_state, update)


def _no_state(params: Any) -> optax.EmptyState:
    return optax.EmptyState()
