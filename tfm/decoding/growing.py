"""Capacity that grows while it is needed: a loop with room for few tokens first, then one with room for more.

A step reads its whole cache, real tokens and free places alike. So a loop that may run for a thousand tokens would have
its first step wait for a thousand places. Here loops follow each other in one compiled program, each with four times
the room of the one before, the last with up to eight, and between two of them the state grows once, if anything goes
on.
"""

import typing
from collections.abc import Callable, Sequence

import jax

from tfm.axes import Array

FIRST_CAPACITY = 64
GROWTH = 4
"""How many times the room of one loop the next one has; the last has less than twice as many. Smaller steps would be
more loops to compile."""

Loop = typing.TypeVar("Loop")
Result = typing.TypeVar("Result")


def growing_capacities(capacity: int, prompt_length: int) -> list[int]:
    """The capacities one after another, the last being `capacity`.

    Example:
        >>> growing_capacities(1024, 1), growing_capacities(100, 1), growing_capacities(300, 64)
        ([64, 256, 1024], [100], [300])
    """
    capacities, room = [], FIRST_CAPACITY
    while 2 * room <= capacity:  # a last one of less than twice the room is not worth its compilation
        if room > prompt_length:
            capacities.append(room)
        room *= GROWTH
    return [*capacities, capacity]


def loop_while_growing(
    loop: Loop,
    rooms: Sequence[int],
    *,
    goes_on: Callable[[Loop], Array],
    step: Callable[[Loop], Array],
    advance: Callable[[Loop], Loop],
    grow: Callable[[Loop, int], Loop],
    result: Callable[[Loop], Result],
) -> Result:
    """Advances a loop's state while it goes on.

    Args:
        loop: the state, with room for the first of `rooms`.
        rooms: the number of steps that the state has room for, growing; it is not advanced beyond the last.
        goes_on: whether the state is to be advanced.
        step: how many steps were made.
        advance: one step.
        grow: from a state and a further one of `rooms`, a state that has room for so many steps.
        result: of the last state, whatever room it has: an equal shape for all.
    """
    room, *further = rooms
    loop = jax.lax.while_loop(lambda loop: goes_on(loop) & (step(loop) < room), advance, loop)
    if not further:
        return result(loop)

    def go_on(loop: Loop) -> Result:
        grown = grow(loop, further[0])
        return loop_while_growing(grown, further, goes_on=goes_on, step=step, advance=advance, grow=grow, result=result)

    return jax.lax.cond(goes_on(loop), go_on, result, loop)
