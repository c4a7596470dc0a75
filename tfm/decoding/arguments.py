"""What generation is asked for, checked and as arrays: limits of tokens, capacity, constraints, random keys."""

import typing

import jax
import jax.numpy as jnp
import numpy as np

from tfm.axes import Array, Int
from tfm.checks import checked_whole_number
from tfm.decoding.constraints import Constraints
from tfm.decoding.inference import complete_inputs
from tfm.nn.models import Model

SMALLEST_CAPACITY = 16


class Arguments(typing.NamedTuple):
    """Complete and checked, as far as values are known. All but the capacity are traced."""

    source: Int[Array, "B S"]
    source_lengths: Int[Array, "B"]
    prompt: Int[Array, "B T"]
    prompt_lengths: Int[Array, "B"]
    limits: Int[Array, "B"]
    """The most new tokens of each row."""
    constraints: Constraints | None


def checked_arguments(
    model: Model,
    source: typing.Any,
    source_lengths: typing.Any,
    prompt: typing.Any,
    prompt_lengths: typing.Any,
    max_tokens: typing.Any,
    constraints: Constraints | None,
    capacity: typing.Any,
) -> tuple[Arguments, int]:
    """The arguments that all ways of generating share, and the capacity: see `tfm.decoding.generate.generate`.

    Raises:
        ValueError: as `generate`, for these.
    """
    config = model.config
    inputs = complete_inputs(model, source, source_lengths, prompt, prompt_lengths)
    batch, prompt_length = inputs[0].shape[0], inputs[2].shape[1]
    room = None if capacity is None else checked_whole_number("capacity", capacity)
    room, limits = _limits(max_tokens, batch, prompt_length, config.max_target_length, room)
    if constraints is not None:
        if not isinstance(constraints, Constraints):
            raise ValueError(f"expected Constraints(…) as constraints, got {constraints!r}")
        constraints = constraints.as_arrays(batch=batch, vocab_size=config.target_vocab_size, end_id=config.end_id)
    if constraints is not None:
        constraints.check_room(limits, inputs[1])
    return Arguments(*inputs, limits, constraints), room


def row_keys(key: typing.Any, batch: int) -> Array:
    """A key for each row; without one, keys that nothing will draw from.

    Raises:
        ValueError: keys that are not threefry's, or another number of them.
    """
    if key is None:
        key = jax.random.key(0, impl="threefry2x32")
    if not isinstance(key, jax.Array):
        kind = repr(key)
    else:
        is_key = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        kind = str(jax.random.key_impl(key)) if is_key else f"{key.dtype} array"
    if kind != "threefry2x32":  # with keys of another kind, what one row draws may depend on the others
        raise ValueError(f"expected a threefry key, as from jax.random.key(seed, impl='threefry2x32'), got {kind}")
    if key.ndim == 0:
        key = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(batch))
    if key.shape != (batch,):
        raise ValueError(f"expected one key or {batch}, one a row, got keys of shape {key.shape}")
    return key


def most_new(capacity: int, prompt_length: int) -> int:
    """The tokens that can follow a prompt: the last one is not read any more, so it takes no place in the cache."""
    return capacity - prompt_length + 1


def _limits(
    max_tokens: typing.Any, batch: int, prompt_length: int, most: int, capacity: int | None
) -> tuple[int, Array]:
    """The static capacity, and each row's limit of tokens."""
    if not isinstance(max_tokens, jax.Array):
        max_tokens = np.asarray(max_tokens)
    if max_tokens.shape not in ((), (batch,)) or not jnp.issubdtype(max_tokens.dtype, jnp.integer):
        raise ValueError(
            f"expected one max_tokens or {batch}, one a row, as whole numbers, "
            f"got {max_tokens.dtype} of shape {max_tokens.shape}"
        )
    capacity = _capacity(max_tokens, prompt_length, most, capacity)
    if isinstance(max_tokens, np.ndarray):  # NumPy converts without compiling
        max_tokens = max_tokens.astype(np.int32)
    return capacity, jnp.broadcast_to(jnp.asarray(max_tokens, jnp.int32), (batch,))


def _capacity(max_tokens: typing.Any, prompt_length: int, most: int, capacity: int | None) -> int:
    """The static capacity, checked against the number of tokens asked for where that is known."""
    known = not isinstance(max_tokens, jax.core.Tracer)
    if not known and capacity is None:
        raise ValueError("expected a capacity: max_tokens has no value yet inside jit")
    asked = int(np.max(np.asarray(max_tokens), initial=0)) if known else 0
    if known and np.min(np.asarray(max_tokens), initial=0) < 0:
        raise ValueError(f"expected max_tokens of at least 0, got {max_tokens}")
    room, named = (most, "the model's max_target_length") if capacity is None else (capacity, "the capacity")
    if not prompt_length <= room <= most:
        raise ValueError(
            f"expected a capacity from {prompt_length} (the prompt) to {most} (the model's max_target_length), "
            f"got {room}"
        )
    if asked > most_new(room, prompt_length):
        raise ValueError(
            f"expected at most {most_new(room, prompt_length)} new tokens ({named} {room}, {prompt_length} of prompt, "
            f"and the last token is never read), got max_tokens {asked}"
        )
    if capacity is None:
        needed = max(asked + prompt_length - 1, prompt_length, SMALLEST_CAPACITY)
        return min(1 << (needed - 1).bit_length(), most)
    return capacity
