"""Ids to ids: the whole of generation in one compiled call, its loop on the device."""

import functools
import typing
from collections.abc import Callable, Sequence
from typing import SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np

from tfm.axes import Array, Int, KeyArray
from tfm.decoding import coverage
from tfm.decoding.arguments import Arguments, checked_arguments, most_new, row_keys
from tfm.decoding.beam import BeamSearch, NBest, beam_search
from tfm.decoding.constraints import Constraints
from tfm.decoding.coverage import Covering
from tfm.decoding.growing import loop_while_growing
from tfm.decoding.inference import decode_step, prefill
from tfm.decoding.sampling import Greedy, Sampler, Samples, Sampling
from tfm.decoding.stepping import Generation, Progress, advance, begin, bound_rules, capacities_of, with_room
from tfm.nn import cache as caches
from tfm.nn.cache import AnyCache
from tfm.nn.models import Model
from tfm.nn.params import Params


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
    capacity: SupportsIndex | None = None,
) -> Generation:
    """Continues every row until it ends or has its `max_tokens`; stops when all rows have.

    The cache begins with room for few tokens and grows while it is needed: see `tfm.decoding.growing`. Compiles once
    for each model, kind of sampler, set of constraints, capacity and set of array shapes. All else is traced and
    compiles nothing when it changes: parameters, lengths, `max_tokens`, the sampler's numbers, the key, the
    constraints' numbers and ids.

    Args:
        model: from `tfm.nn.models.build_model`.
        params: its parameters.
        source: ids, padded on the right.
        max_tokens: the most new tokens, for all rows or for each; a row with 0 ends at once, so padding rows cost
            nothing more.
        source_lengths: real tokens of each source; None: all are real, padding too.
        prompt: the decoder's first tokens, starting with the start token, padded on the right; None: the start token.
        prompt_lengths: real tokens of each prompt, at least 1; None: all are real.
        sampler: `Greedy()` or `Sampling(…)`, or made from one of them: picks the tokens.
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
    arguments, room = checked_arguments(
        model, source, source_lengths, prompt, prompt_lengths, max_tokens, constraints, capacity
    )
    batch = len(arguments.limits)
    return _generate(model, params, arguments, as_traced(sampler, key, batch), row_keys(key, batch), capacity=room)


def as_traced(sampler: typing.Any, key: typing.Any, batch: int) -> Sampler:
    """The sampler, checked, its numbers as arrays.

    Raises:
        ValueError: a number out of its range, or it draws and there is no key.
    """
    if not isinstance(sampler, Greedy | Sampling):
        raise ValueError(
            f"expected Greedy() or Sampling(…) as sampler, got {sampler!r}; a search is for generate_n_best"
        )
    if isinstance(sampler, Greedy):
        return sampler
    if key is None:
        raise ValueError("expected a key for a sampler that draws, got none")
    return sampler.as_arrays(batch)


def generate_n_best(
    model: Model,
    params: Params,
    source: Int[Array | np.ndarray, "B S"] | Sequence[Sequence[int]],
    *,
    max_tokens: int | Int[Array | np.ndarray, ""] | Int[Array | np.ndarray, "B"] | Sequence[int],
    search: BeamSearch | Samples = BeamSearch(),  # noqa: B008 - frozen and without state
    key: KeyArray | None = None,
    source_lengths: Int[Array | np.ndarray, "B"] | Sequence[int] | None = None,
    prompt: Int[Array | np.ndarray, "B T"] | Sequence[Sequence[int]] | None = None,
    prompt_lengths: Int[Array | np.ndarray, "B"] | Sequence[int] | None = None,
    constraints: Constraints | None = None,
    capacity: SupportsIndex | None = None,
) -> NBest:
    """The best continuations of every row that beam search finds, or several that were drawn.

    The source is encoded, and its keys and values projected and kept, once for all hypotheses of a row. Compiles once
    for each model, capacity, set of array shapes, of constraints and of the search's settings; α, β and λ, a sampler's
    numbers, the key, lengths, `max_tokens` and the constraints' numbers and ids are traced.

    Args:
        model: from `tfm.nn.models.build_model`.
        params: its parameters.
        source: ids, padded on the right.
        max_tokens: the most new tokens, as in `generate`.
        search: width, penalties, groups and rule of stopping; or how many samples to draw, and how.
        key: for samples, as in `generate`: what a row draws follows from its key alone.
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
    if not isinstance(search, BeamSearch | Samples):
        raise ValueError(f"expected BeamSearch(…) or Samples(…) as search, got {search!r}")
    arguments, room = checked_arguments(
        model, source, source_lengths, prompt, prompt_lengths, max_tokens, constraints, capacity
    )
    batch = len(arguments.limits)
    if isinstance(search, BeamSearch):
        search.check(batch, model.config)
        return _search(model, params, arguments, search.as_arrays(), capacity=room)
    search.check()
    sampler = as_traced(search.sampler, key, batch)
    number, num_best = search.num_samples, search.num_samples if search.num_best is None else search.num_best
    keys = row_keys(key, batch)
    return _sample(model, params, arguments, sampler, keys, number=number, num_best=num_best, capacity=room)


@functools.partial(jax.jit, static_argnames=("model", "capacity", "width"))
def _generate(
    model: Model,
    params: Params,
    arguments: Arguments,
    sampler: Sampler,
    keys: KeyArray,
    *,
    capacity: int,
    width: int = 1,
) -> Generation:
    prompt_length = arguments.prompt.shape[1]
    capacities = capacities_of(model, capacity, prompt_length)
    max_new = most_new(capacity, prompt_length)
    choosing, progress = begin(
        model, params, arguments, sampler, keys, capacity=capacities[0], max_new=max_new, width=width
    )

    def grow(progress: Progress, room: int) -> Progress:
        return progress._replace(cache=with_room(model, progress.cache, room, arguments))

    return loop_while_growing(
        progress,
        [most_new(each, prompt_length) for each in capacities],
        goes_on=lambda progress: choosing.goes_on(progress.output).any(),
        step=lambda progress: progress.step,
        advance=functools.partial(advance, model, params, choosing),
        grow=grow,
        result=lambda progress: progress.output,
    )


_MOST_SIDE_BY_SIDE = 64
"""Samples of a row that are drawn at once; more are drawn in rounds. Each meets the keys of all that are beside it, so
that the work of attention and its memory grow with their square."""


@functools.partial(jax.jit, static_argnames=("model", "capacity", "number", "num_best"))
def _sample(
    model: Model,
    params: Params,
    arguments: Arguments,
    sampler: Sampling,
    keys: KeyArray,
    *,
    number: int,
    num_best: int,
    capacity: int,
) -> NBest:
    batch, rounds = len(keys), -(-number // _MOST_SIDE_BY_SIDE)
    width = -(-number // rounds)
    places = jnp.arange(rounds * width)
    each = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(None, 0)), in_axes=(0, None))(keys, places)
    sampler = jax.tree.map(lambda x: jnp.repeat(x, width) if jnp.ndim(x) else x, sampler)

    def draw(keys: KeyArray) -> Generation:
        made = _generate(model, params, arguments, sampler, keys.reshape(-1), capacity=capacity, width=width)
        return jax.tree.map(lambda x: x.reshape(batch, width, *x.shape[1:]), made)

    def side_by_side(x: Array) -> Array:
        return jnp.swapaxes(x, 0, 1).reshape(batch, rounds * width, *x.shape[3:])[:, :number]

    made = jax.lax.map(draw, jnp.swapaxes(each.reshape(batch, rounds, width), 0, 1))
    made = jax.tree.map(side_by_side, made)
    log_probs, order = jax.lax.top_k(made.scores, num_best)
    best = jax.tree.map(lambda x: x[jnp.arange(len(x))[:, None], order], made)
    return NBest(best.tokens, best.token_log_probs, best.lengths, log_probs, log_probs, best.finished, best.unmet)


@functools.partial(jax.jit, static_argnames=("model", "capacity"))
def _search(model: Model, params: Params, arguments: Arguments, search: BeamSearch, *, capacity: int) -> NBest:
    source, source_lengths, prompt, prompt_lengths, limits, constraints = arguments
    capacities = capacities_of(model, capacity, prompt.shape[1])
    max_new = most_new(capacity, prompt.shape[1])
    limits, constrain = bound_rules(
        constraints, jnp.clip(limits, 0, max_new), source_lengths, model,
        prompt=prompt, prompt_lengths=prompt_lengths, width=search.width,
    )  # fmt: skip
    inputs = (model, params, source, source_lengths, prompt, prompt_lengths)
    state: AnyCache | Covering
    run: Callable[..., tuple[Array, typing.Any]]
    reorder: Callable[[typing.Any, Array], typing.Any]
    if search.coverage is None:
        logits, cache = prefill(*inputs, capacity=capacities[0])
        state, run, reorder, cover = caches.widen(cache, search.width), decode_step, caches.reorder, None
    else:
        logits, state = coverage.prefill(*inputs, capacity=capacities[0], width=search.width)
        run, reorder = coverage.decode_step, coverage.reorder

        def cover(state: Covering) -> Array:
            return coverage.penalty(state, source_lengths)

    def step(tokens: Array, state: typing.Any) -> tuple[Array, typing.Any]:
        logits, state = run(model, params, tokens, state)
        return logits[:, -1], state

    def grow(state: typing.Any, room: int) -> typing.Any:
        if isinstance(state, Covering):
            return state._replace(cache=with_room(model, state.cache, room, arguments))
        return with_room(model, state, room, arguments)

    return beam_search(
        search,
        logits[:, -1],
        state,
        step=step,
        reorder=reorder,
        constrain=constrain,
        cover=cover,
        grow=grow,
        rooms=[most_new(each, prompt.shape[1]) for each in capacities],
        limits=limits,
        max_tokens=max_new,
        end_id=model.config.end_id,
        pad_id=model.config.pad_id,
    )
