"""Ids to ids: the whole of generation in one compiled call, its loop on the device."""

import dataclasses
import functools
import typing
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tfm.axes import Array, Bool, Float, Int, KeyArray
from tfm.decoding.beam import BeamSearch, NBest, beam_search
from tfm.decoding.constraints import Constraints, Rules
from tfm.decoding.inference import complete_inputs, decode_step, prefill
from tfm.decoding.sampling import Greedy, Sampler, Sampling
from tfm.nn.cache import Cache, reorder, widen
from tfm.nn.logprob import label_log_probs
from tfm.nn.params import Params
from tfm.nn.transformer import Model

SMALLEST_CAPACITY = 16


@typing.no_type_check  # a pytree is also built from shapes, specs and other non-arrays
@flax.struct.dataclass
class Generation:
    """What was generated, without the prompt."""

    tokens: Int[Array, "B T"]
    """The new ids, the end token included where one came; the padding id behind."""
    lengths: Int[Array, "B"]
    """New ids of each row, the end token counted."""
    scores: Float[Array, "B"]
    """Sum of the new ids' log-probabilities under the model as it is, whatever the sampler made of it."""
    finished: Bool[Array, "B"]
    """True where the row ended with the end token, False where its limit of tokens cut it off."""


def generate(
    model: Model,
    params: Params,
    source: Int[Array | np.ndarray, "B S"] | Sequence[Sequence[int]],
    *,
    max_tokens: int | Int[Array | np.ndarray, ""] | Int[Array | np.ndarray, "B"] | Sequence[int],
    source_lengths: Int[Array | np.ndarray, "B"] | Sequence[int] | None = None,
    prompt: Int[Array | np.ndarray, "B T"] | Sequence[Sequence[int]] | None = None,
    prompt_lengths: Int[Array | np.ndarray, "B"] | Sequence[int] | None = None,
    sampler: Sampler = Greedy(),  # noqa: B008 - frozen and without state
    key: KeyArray | None = None,
    constraints: Constraints | None = None,
    capacity: int | None = None,
) -> Generation:
    """Continues every row until it ends or has its `max_tokens`; stops when all rows have.

    Compiles once for each model, kind of sampler, set of constraints, capacity and set of array shapes. All else is
    traced and compiles nothing when it changes: parameters, lengths, `max_tokens`, the sampler's numbers, the key, the
    constraints' numbers and ids.

    Args:
        model: from `tfm.nn.transformer.build_model`.
        params: its parameters.
        source: ids, padded on the right.
        max_tokens: the most new tokens, for all rows or for each; a row with 0 ends at once, so padding rows cost
            nothing more.
        source_lengths: real tokens of each source; None: all are real.
        prompt: the decoder's first tokens, starting with the start token, padded on the right; None: the start token.
        prompt_lengths: real tokens of each prompt, at least 1; None: all are real.
        sampler: picks the tokens.
        key: for a sampler that draws: one key, from which each row gets its own by its index, or one key a row.
        constraints: what may and must come; the sampler picks among what they leave.
        capacity: the most target tokens that the cache can hold, prompt included; a row's last token is never read,
            so it needs no room. None: enough for `max_tokens`, rounded up to a power of two and cut to what the model
            accepts. Needed inside a caller's jit, where `max_tokens` has no value yet; what is more than
            capacity + 1 - T of the prompt is then cut off.

    Returns:
        A `Generation` whose T is capacity + 1 less the prompt's T.

    Raises:
        ValueError: as `prefill`; more tokens than the capacity allows, a sampler's or a constraint's number out of its
            range, more tokens required than a row may have, a sampler that draws without a key or with keys that are
            not threefry's.
    """
    inputs = complete_inputs(model, source, source_lengths, prompt, prompt_lengths)
    batch = inputs[0].shape[0]
    if isinstance(sampler, Sampling):
        sampler = sampler.as_arrays(batch)
        if key is None:
            raise ValueError("expected a key for a sampler that draws, got none")
    capacity, limits = _limits(max_tokens, batch, inputs[2].shape[1], model.config.max_target_length, capacity)
    constraints = _checked(constraints, model, limits, inputs[1])
    keys = _row_keys(key, batch)
    return _generate(model, params, *inputs, sampler, limits, keys, constraints, capacity=capacity)


def generate_n_best(
    model: Model,
    params: Params,
    source: Int[Array | np.ndarray, "B S"] | Sequence[Sequence[int]],
    *,
    max_tokens: int | Int[Array | np.ndarray, ""] | Int[Array | np.ndarray, "B"] | Sequence[int],
    search: BeamSearch = BeamSearch(),  # noqa: B008 - frozen and without state
    source_lengths: Int[Array | np.ndarray, "B"] | Sequence[int] | None = None,
    prompt: Int[Array | np.ndarray, "B T"] | Sequence[Sequence[int]] | None = None,
    prompt_lengths: Int[Array | np.ndarray, "B"] | Sequence[int] | None = None,
    constraints: Constraints | None = None,
    capacity: int | None = None,
) -> NBest:
    """The best continuations of every row that beam search finds.

    The source is encoded, and its keys and values projected and kept, once for all hypotheses of a row. Compiles once
    for each model, capacity, set of array shapes, of constraints and of the search's settings; α, lengths, `max_tokens`
    and the constraints' numbers and ids are traced.

    Args:
        model: from `tfm.nn.transformer.build_model`.
        params: its parameters.
        source: ids, padded on the right.
        max_tokens: the most new tokens, as in `generate`.
        search: width, penalty and rule of stopping.
        source_lengths: as in `generate`, as the rest.
        prompt: the decoder's first tokens.
        prompt_lengths: real tokens of each prompt.
        constraints: what may and must come. Every hypothesis follows them.
        capacity: the most target tokens that the cache can hold.

    Returns:
        An `NBest` whose T is capacity + 1 less the prompt's T.

    Raises:
        ValueError: as `generate`, or a setting of the search out of its range.
    """
    inputs = complete_inputs(model, source, source_lengths, prompt, prompt_lengths)
    batch = inputs[0].shape[0]
    if not isinstance(search, BeamSearch):
        raise ValueError(f"expected BeamSearch(…) as search, got {search!r}")
    search.check(batch, model.config.target_vocab_size)
    search = dataclasses.replace(search, alpha=jnp.asarray(search.alpha, jnp.float32))
    capacity, limits = _limits(max_tokens, batch, inputs[2].shape[1], model.config.max_target_length, capacity)
    constraints = _checked(constraints, model, limits, inputs[1])
    return _generate_n_best(model, params, *inputs, search, limits, constraints, capacity=capacity)


@functools.partial(jax.jit, static_argnames=("model", "capacity"))
def _generate_n_best(
    model: Model,
    params: Params,
    source: Array,
    source_lengths: Array,
    prompt: Array,
    prompt_lengths: Array,
    search: BeamSearch,
    limits: Array,
    constraints: Constraints | None = None,
    *,
    capacity: int,
) -> NBest:
    def step(tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        logits, cache = decode_step(model, params, tokens, cache)
        return logits[:, -1], cache

    logits, cache = prefill(model, params, source, source_lengths, prompt, prompt_lengths, capacity=capacity)
    num_new = _most_new(capacity, prompt.shape[1])
    limits, constrain = _bound(
        constraints,
        jnp.clip(limits, 0, num_new),
        source_lengths,
        prompt=prompt,
        prompt_lengths=prompt_lengths,
        end_id=model.config.end_id,
        width=search.width,
    )
    return beam_search(
        search,
        logits[:, -1],
        widen(cache, search.width),
        step=step,
        reorder=reorder,
        constrain=constrain,
        limits=limits,
        max_tokens=num_new,
        end_id=model.config.end_id,
        pad_id=model.config.pad_id,
    )


class _Loop(typing.NamedTuple):
    """What the loop carries."""

    step: Array
    token: Array
    cache: Cache
    output: Generation


@functools.partial(jax.jit, static_argnames=("model", "capacity"))
def _generate(
    model: Model,
    params: Params,
    source: Array,
    source_lengths: Array,
    prompt: Array,
    prompt_lengths: Array,
    sampler: Sampler,
    limits: Array,
    keys: KeyArray,
    constraints: Constraints | None = None,
    *,
    capacity: int,
) -> Generation:
    config, batch = model.config, source.shape[0]
    num_new = _most_new(capacity, prompt.shape[1])
    limits, rules = _bound(
        constraints,
        jnp.minimum(limits, num_new),
        source_lengths,
        prompt=prompt,
        prompt_lengths=prompt_lengths,
        end_id=config.end_id,
    )

    def active(output: Generation) -> Array:
        return ~output.finished & (output.lengths < limits)

    def pick(logits: Array, step: Array, output: Generation) -> tuple[Array, Generation]:
        """Chooses each row's token number `step` and notes it for the rows that are still going."""
        going = active(output)
        step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, step)
        allowed = logits if rules is None else rules(logits, output.tokens, step).logits
        token = jnp.where(going, sampler.pick(allowed, step_keys), config.pad_id)
        output = Generation(
            tokens=jax.lax.dynamic_update_slice(output.tokens, token[:, None], (jnp.zeros_like(step), step)),
            lengths=output.lengths + going,
            scores=output.scores + jnp.where(going, label_log_probs(logits, token), 0),
            finished=output.finished | (going & (token == config.end_id)),
        )
        return token, output

    def advance(loop: _Loop) -> _Loop:
        logits, cache = decode_step(model, params, loop.token[:, None], loop.cache)
        token, output = pick(logits[:, -1], loop.step, loop.output)
        return _Loop(loop.step + 1, token, cache, output)

    logits, cache = prefill(model, params, source, source_lengths, prompt, prompt_lengths, capacity=capacity)
    nothing = Generation(
        tokens=jnp.full((batch, num_new), config.pad_id, jnp.int32),
        lengths=jnp.zeros(batch, jnp.int32),
        scores=jnp.zeros(batch, jnp.float32),
        finished=jnp.zeros(batch, bool),
    )
    token, output = pick(logits[:, -1], jnp.int32(0), nothing)
    loop = _Loop(jnp.int32(1), token, cache, output)
    return jax.lax.while_loop(lambda loop: active(loop.output).any(), advance, loop).output


def _checked(constraints: Constraints | None, model: Model, limits: Array, source_lengths: Array) -> Constraints | None:
    """The constraints as arrays, with a row for each of the batch; None where there are none."""
    if constraints is None:
        return None
    if not isinstance(constraints, Constraints):
        raise ValueError(f"expected Constraints(…) as constraints, got {constraints!r}")
    config = model.config
    arrays = constraints.as_arrays(batch=len(limits), vocab_size=config.target_vocab_size, end_id=config.end_id)
    if arrays is not None:
        arrays.check_room(limits, source_lengths)
    return arrays


def _bound(
    constraints: Constraints | None, limits: Array, source_lengths: Array, **rest: typing.Any
) -> tuple[Array, Rules | None]:
    """The rows' limits as the constraints cut them, and their rules; see `Constraints.bind` for the rest."""
    if constraints is None:
        return limits, None
    limits = constraints.cut(limits, source_lengths)
    return limits, constraints.bind(source_lengths=source_lengths, limits=limits, **rest)


def _row_keys(key: KeyArray | None, batch: int) -> Array:
    """A key for each row; without one, keys that nothing will draw from."""
    if key is None:
        key = jax.random.key(0, impl="threefry2x32")
    kind = str(jax.random.key_impl(key)) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else f"{key.dtype} array"
    if kind != "threefry2x32":  # with keys of another kind, what one row draws may depend on the others
        raise ValueError(f"expected a threefry key, as from jax.random.key(seed, impl='threefry2x32'), got {kind}")
    if key.ndim == 0:
        key = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(batch))
    if key.shape != (batch,):
        raise ValueError(f"expected one key or {batch}, one a row, got keys of shape {key.shape}")
    return key


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
    if asked > _most_new(room, prompt_length):
        raise ValueError(
            f"expected at most {_most_new(room, prompt_length)} new tokens ({named} {room}, {prompt_length} of prompt, "
            f"and the last token is never read), got max_tokens {asked}"
        )
    if capacity is None:
        needed = max(asked + prompt_length - 1, prompt_length, SMALLEST_CAPACITY)
        return min(1 << (needed - 1).bit_length(), most)
    return capacity


def _most_new(capacity: int, prompt_length: int) -> int:
    """The tokens that can follow a prompt: the last one is not read any more, so it takes no place in the cache."""
    return capacity - prompt_length + 1
