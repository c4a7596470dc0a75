"""The state of a run on the device, and the pure functions that make the next one from a batch.

Each is one jitted function, without side effects and without a look at any value from the host: the loop decides what
to read, and when.
"""

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from tfm.axes import Array, Bool, Float, Int, KeyArray, Shaped
from tfm.batch import Batch
from tfm.nn.models import Model
from tfm.nn.param_axes import param_shardings
from tfm.nn.params import init_params
from tfm.sharding import Placement, constrain_tree
from train.config import LossConfig, TrainConfig
from train.loss import LossSums, batch_loss
from train.optimizer import make_schedule

_KEY_IMPLEMENTATIONS = {"rbg": "rbg", "threefry": "threefry2x32"}


@typing.no_type_check  # a pytree is also built from shapes, specs and other non-arrays
@flax.struct.dataclass
class TrainState:
    """All that a step changes, and the dropout key that it does not. Saved and restored, it continues bit for bit."""

    step: Int[Array, ""]
    """Batches seen, skipped ones included, so that data, schedule and dropout stay aligned with it."""
    params: Any
    """float32, whatever dtype the model computes in."""
    opt_state: Any
    dropout_key: Shaped[Array, "*key"]
    """Raw data (uint32) of the run's dropout key. Each step, and each slice of it, folds its number into it."""
    skipped_total: Int[Array, ""]
    """Steps whose loss or gradient was not finite, in the whole run."""
    skipped_in_row: Int[Array, ""]
    """The same since the last finite step."""


@typing.no_type_check
@flax.struct.dataclass
class StepMetrics:
    """What a step reports, as arrays still on the device."""

    loss: Float[Array, ""]
    """What is minimised, per target token, in nats."""
    nll: Float[Array, ""]
    """-log p(label) per target token, in nats: without smoothing and z-loss, with dropout."""
    gradient_norm: Float[Array, ""]
    """Global norm of the gradient before clipping."""
    learning_rate: Float[Array, ""]
    target_tokens: Float[Array, ""]
    """Tokens that counted in the loss, end tokens included."""
    finite: Bool[Array, ""]
    """False: the step was skipped."""


def init_state(model: Model, optimizer: optax.GradientTransformation, config: TrainConfig) -> TrainState:
    """A run's first state, made by one jitted function, and with the model's placement in pieces from the first byte.

    Parameters and dropout depend on `config.seed` alone; `config.dropout_bits` names the dropout key's kind.

    Raises:
        ValueError: a parameter that cannot be cut as the placement says.
    """
    init, keys = _initialisation(model, optimizer, config)
    # The keys are arguments: as constants they would have the compiler compute the parameters.
    if model.placement is None:
        return jax.jit(init)(*keys)
    return jax.jit(init, out_shardings=_state_shardings_of(model, optimizer, config))(*keys)


def _initialisation(
    model: Model, optimizer: optax.GradientTransformation, config: TrainConfig
) -> tuple[Callable[[KeyArray, KeyArray], TrainState], tuple[KeyArray, KeyArray]]:
    """The function that makes a first state, and its arguments."""
    dropout_key = jax.random.key(config.seed, impl=_KEY_IMPLEMENTATIONS[config.dropout_bits])

    def init(params_key: KeyArray, dropout_key: KeyArray) -> TrainState:
        params = init_params(model, params_key)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=optimizer.init(params),
            # Folded, because with threefry bits both keys would else be the same one.
            dropout_key=jax.random.key_data(jax.random.fold_in(dropout_key, 1)),
            skipped_total=jnp.zeros((), jnp.int32),
            skipped_in_row=jnp.zeros((), jnp.int32),
        )

    return init, (jax.random.key(config.seed, impl="threefry2x32"), dropout_key)


def _state_shardings_of(model: Model, optimizer: optax.GradientTransformation, config: TrainConfig) -> Any:
    """`state_shardings` of the states of a run; None without a placement."""
    if model.placement is None:
        return None
    init, keys = _initialisation(model, optimizer, config)
    return state_shardings(model.placement, jax.eval_shape(init, *keys))


def state_shardings(placement: Placement, state: TrainState) -> TrainState:
    """How a state lies: parameters by `tfm.nn.param_axes`, all that the optimizer has of a parameter like it, and the
    rest on every device.

    Adafactor's rows and columns lie as the parameter without the axis that they are a mean over.

    Args:
        placement: the mesh and its rules.
        state: arrays, or anything with their shapes.

    Raises:
        ValueError: a parameter that cannot be cut so; it says which, its axis and the sizes.
    """
    shardings = param_shardings(placement, state.params)
    known = {
        jax.tree_util.keystr(path): (leaf.shape, sharding)
        for (path, leaf), sharding in zip(
            jax.tree_util.tree_leaves_with_path(state.params), jax.tree.leaves(shardings), strict=True
        )
    }

    def like_its_parameter(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        for start in range(len(path)):
            if (found := known.get(jax.tree_util.keystr(path[start:]))) is not None:
                shape, sharding = found
                if leaf.shape == shape:
                    return sharding
                # Of a square matrix, rows are means over the last axis and columns over the first.
                axes = range(len(shape)) if "v_col" in jax.tree_util.keystr(path[:start]) else range(len(shape))[::-1]
                for axis in axes:
                    if leaf.shape == (*shape[:axis], *shape[axis + 1 :]) and len(shape) > 1:
                        cuts = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
                        return NamedSharding(placement.mesh, PartitionSpec(*cuts[:axis], *cuts[axis + 1 :]))
        return placement.whole

    rest = jax.tree_util.tree_map_with_path(like_its_parameter, dataclasses.replace(state, params=None))
    return dataclasses.replace(rest, params=shardings)


def place_batch(placement: Placement | None, batch: Batch, *, accumulation_steps: int = 1) -> Batch:
    """A batch of the host on the devices, cut by rows; without a placement as it is.

    Empty rows of weight 0 are added, so that each device has as many in every slice of `accumulation_steps`.
    """
    if placement is None:
        return batch
    missing = -batch.source.shape[0] % (placement.pieces("batch") * accumulation_steps)
    padded = jax.tree.map(lambda rows: np.pad(rows, [(0, missing)] + [(0, 0)] * (rows.ndim - 1)), batch)
    return jax.device_put(padded, placement.rows)


def make_train_step(model: Model, optimizer: optax.GradientTransformation, config: TrainConfig) -> jax.stages.Wrapped:
    """The jitted function (state, batch) → (state, `StepMetrics`). The given state is donated: it is gone afterwards.

    With `accumulation_steps` = A, the rows are cut into A slices, one after the other in memory; gradients and losses
    are *sums* over target tokens, added over the slices and divided once by the whole batch's number of tokens. So A
    changes memory and dropout, not what is learned, however unequal the slices are.

    A step whose loss or gradient norm is not finite changes nothing but the counters: parameters and optimizer state
    stay as they were, bit for bit. A batch without any target token changes nothing either, and counts as finite.

    Args:
        model: see `train.loss.batch_loss`.
        optimizer: of `make_optimizer`, or any other of optax; given `step` and `gradient_norm` where it takes them.
        config: its `loss`, `optimizer` (for the reported rate), `steps`, `batch.accumulation_steps`, `dropout_bits`.

    Raises:
        ValueError: at the first call with a shape, whose rows `accumulation_steps` does not divide.
    """
    slices = config.batch.accumulation_steps
    schedule = make_schedule(config.optimizer, config.steps)
    key_implementation = _KEY_IMPLEMENTATIONS[config.dropout_bits]
    transformation = optax.with_extra_args_support(optimizer)

    def gradient_sums(params: Any, batch: Batch, dropout_key: KeyArray) -> tuple[Any, LossSums]:
        def loss_sum(params: Any) -> tuple[Float[Array, ""], LossSums]:
            sums = batch_loss(model, params, batch, config.loss, dropout_key)
            return sums.loss_sum, sums

        gradients, sums = jax.grad(loss_sum, has_aux=True)(params)
        return constrain_tree(gradients, params_lie), sums

    state_lies = _state_shardings_of(model, optimizer, config)
    params_lie = None if state_lies is None else state_lies.params

    def accumulated_sums(params: Any, batch: Batch, dropout_key: KeyArray) -> tuple[Any, LossSums]:
        if slices == 1:
            return gradient_sums(params, batch, jax.random.fold_in(dropout_key, 0))

        def add_slice(total: tuple[Any, LossSums], numbered: tuple[Array, Batch]) -> tuple[tuple[Any, LossSums], None]:
            index, piece = numbered
            sums = gradient_sums(params, piece, jax.random.fold_in(dropout_key, index))
            return jax.tree.map(jnp.add, total, sums), None

        zero = (jax.tree.map(jnp.zeros_like, params), LossSums.zero())
        total, _ = jax.lax.scan(add_slice, zero, (jnp.arange(slices), _cut_rows(batch, slices)))
        return total

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        dropout_key = jax.random.wrap_key_data(state.dropout_key, impl=key_implementation)
        gradients, sums = accumulated_sums(state.params, batch, jax.random.fold_in(dropout_key, state.step))
        gradient_norm = optax.tree.norm(gradients) * sums.reciprocal_weight
        finite = jnp.isfinite(sums.loss_sum) & jnp.isfinite(gradient_norm)

        def update(params: Any, opt_state: Any) -> tuple[Any, Any]:
            mean_gradients = jax.tree.map(lambda gradient: gradient * sums.reciprocal_weight, gradients)
            updates, opt_state = transformation.update(
                mean_gradients, opt_state, params, step=state.step, gradient_norm=gradient_norm
            )
            return optax.apply_updates(params, updates), opt_state

        def keep(params: Any, opt_state: Any) -> tuple[Any, Any]:
            return params, opt_state

        # Not a select between old and new entries: for that the old moments must outlive the new ones, which costs a
        # copy of them, and on a CPU this part of the step takes three times as long.
        params, opt_state = jax.lax.cond(finite & (sums.weight > 0), update, keep, state.params, state.opt_state)
        new_state = dataclasses.replace(
            state,
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            skipped_total=state.skipped_total + ~finite,
            skipped_in_row=jnp.where(finite, 0, state.skipped_in_row + 1),
        )
        return new_state, StepMetrics(
            loss=sums.loss,
            nll=sums.nll,
            gradient_norm=gradient_norm,
            learning_rate=schedule(state.step),
            target_tokens=sums.weight,
            finite=finite,
        )

    if model.placement is None:
        return jax.jit(train_step, donate_argnames="state")
    return jax.jit(train_step, donate_argnames="state", out_shardings=(state_lies, model.placement.whole))


def make_eval_step(model: Model) -> jax.stages.Wrapped:
    """The jitted function (params, batch) → `LossSums`, without dropout, smoothing and z-loss: both sums are the nll's.

    Sums of several batches are added and divided once. On many devices batches come from `place_batch`.
    """
    config = LossConfig(label_smoothing=0.0, z_loss=0.0)

    def eval_step(params: Any, batch: Batch) -> LossSums:
        return batch_loss(model, params, batch, config, None)

    return jax.jit(eval_step)


def _cut_rows(batch: Batch, slices: int) -> Batch:
    """[B, …] → [slices, B / slices, …]: slice i has the rows i, i + slices, i + 2 · slices and so on.

    Strided, so that rows spread over devices stay on their device: each holds a part of every slice.
    """

    def cut(rows: Array) -> Array:
        if rows.shape[0] % slices:
            raise ValueError(f"expected rows that accumulation_steps = {slices} divides, got {rows.shape[0]}")
        return rows.reshape(rows.shape[0] // slices, slices, *rows.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(cut, batch)
