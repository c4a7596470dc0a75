"""Ids to ids, token by token: for someone who reads while the model writes."""

import functools
from collections.abc import Iterator, Sequence
from typing import SupportsIndex

import jax
import numpy as np

from tfm.axes import Array, Int, KeyArray
from tfm.decoding.arguments import Arguments, checked_arguments, most_new, row_keys
from tfm.decoding.constraints import Constraints
from tfm.decoding.generate import as_traced
from tfm.decoding.sampling import Greedy, Sampler
from tfm.decoding.stepping import Choosing, Generation, Progress, advance, begin, capacities_of, with_room
from tfm.nn.cache import AnyCache
from tfm.nn.models import Model
from tfm.nn.params import Params


def stream(
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
) -> Iterator[Generation]:
    """Generates as `tfm.decoding.generate.generate` does, to the same end, and hands out all states on the way.

    Each step is a call of its own, so many rows and short steps cost more than in `generate`, whose loop is on the
    device. The next step is under way while the caller looks at a state. Compiles the beginning and the step, and for
    each capacity that the cache grows to the step anew. Cannot be used inside a caller's jit.

    Args:
        model: from `tfm.nn.models.build_model`.
        params: its parameters.
        source: ids, padded on the right.
        max_tokens: as in `generate`, as the rest.
        source_lengths: real tokens of each source.
        prompt: the decoder's first tokens.
        prompt_lengths: real tokens of each prompt.
        sampler: `Greedy()` or `Sampling(…)`: picks the tokens.
        key: for a sampler that draws.
        constraints: what may and must come.
        capacity: the most target tokens that the cache can hold.

    Returns:
        An iterator of what has been generated after the first, the second, … token, all of one shape. The last one is
        what `generate` returns. Rows that ended earlier stay as they are.

    Raises:
        ValueError: as `generate`, before the first state is asked for.
    """
    arguments, room = checked_arguments(
        model, source, source_lengths, prompt, prompt_lengths, max_tokens, constraints, capacity
    )
    batch = len(arguments.limits)
    sampler, keys = as_traced(sampler, key, batch), row_keys(key, batch)
    return _states(model, params, arguments, sampler, keys, room)


def _states(
    model: Model, params: Params, arguments: Arguments, sampler: Sampler, keys: KeyArray, capacity: int
) -> Iterator[Generation]:
    prompt_length = arguments.prompt.shape[1]
    capacities = capacities_of(model, capacity, prompt_length)
    max_new = most_new(capacity, prompt_length)
    rooms = iter([most_new(each, prompt_length) for each in capacities])
    room = next(rooms)
    choosing, progress = _begin(model, params, arguments, sampler, keys, capacity=capacities[0], max_new=max_new)
    for step in range(1, max_new + 1):
        output = progress.output
        goes_on = step < max_new and bool(np.any(jax.device_get(choosing.goes_on(output))))
        if goes_on:
            if step == room:
                room = next(rooms)
                progress = progress._replace(cache=_with_room(model, progress.cache, room, arguments))
            # only the cache is given away: the caller has the output
            progress = _advance(model, params, choosing, progress.cache, progress._replace(cache=None))
        yield output
        if not goes_on:
            return


_begin = jax.jit(begin, static_argnames=("model", "capacity", "max_new"))
_with_room = jax.jit(with_room, static_argnames=("model", "max_new"))


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def _advance(model: Model, params: Params, choosing: Choosing, cache: AnyCache, progress: Progress) -> Progress:
    return advance(model, params, choosing, progress._replace(cache=cache))
