"""The few padded shapes that batches come in, chosen from the lengths of the data, and the rows of each."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tfm.axes import Float, Int
from train.config import BatchConfig

MAX_LEVELS = 32
"""The most lengths a side that are considered; more than a thousand pairs of them change the padding by little."""


def choose_shapes(
    source_lengths: Int[np.ndarray, "pairs"],
    target_lengths: Int[np.ndarray, "pairs"],
    *,
    max_shapes: int,
) -> tuple[tuple[int, int], ...]:
    """Chooses shapes that every pair fits into, with as little padding as may be.

    What is made small is the sum of S + T over all pairs, each padded to the cheapest shape that holds it. The sum
    stands for the computation: where F = 4 D, a source position costs 12 D² multiplications an encoder layer and 2 D²
    for the keys and values that one decoder layer reads, a target position 14 D² a decoder layer.

    The problem is that of facility location: shapes are opened one by one where they save most, then moved while any
    single move saves. Work grows with the number of different lengths, not of pairs.

    Args:
        source_lengths: tokens of each source, end token included.
        target_lengths: tokens of each target, start token included.
        max_shapes: the most shapes; fewer are chosen where more would save nothing.

    Returns:
        (S, T) of each shape, the cheapest first. Lengths are even where a side has at most 64 tokens, multiples of 8
        where it has more.
    """
    if max_shapes < 1:
        raise ValueError(f"expected at least one shape, got max_shapes = {max_shapes}")
    if len(source_lengths) == 0:
        raise ValueError("expected at least one pair to choose shapes for, got none")
    source_levels, target_levels = _levels(source_lengths), _levels(target_lengths)
    cells = np.searchsorted(source_levels, source_lengths) * len(target_levels)
    cells += np.searchsorted(target_levels, target_lengths)
    pairs = np.bincount(cells, minlength=len(source_levels) * len(target_levels))
    used = np.flatnonzero(pairs)

    sources, targets = np.repeat(source_levels, len(target_levels)), np.tile(target_levels, len(source_levels))
    fits = (sources[:, None] >= sources[used]) & (targets[:, None] >= targets[used])
    costs = np.where(fits, (sources + targets)[:, None], np.inf)
    chosen = _open_and_move(costs, pairs[used].astype(float), max_shapes)

    # Sorted, so that the first shape that fits is the cheapest; one that is nobody's cheapest is left out.
    chosen.sort(key=lambda shape: (sources[shape] + targets[shape], sources[shape]))
    needed = np.unique(np.argmin(costs[chosen], axis=0))
    return tuple((int(sources[chosen[i]]), int(targets[chosen[i]])) for i in needed)


def assign_shapes(
    source_lengths: Int[np.ndarray, "pairs"],
    target_lengths: Int[np.ndarray, "pairs"],
    shapes: tuple[tuple[int, int], ...],
) -> Int[np.ndarray, "pairs"]:
    """The index of the first shape that holds each pair. Every pair must fit one."""
    assigned = np.full(len(source_lengths), -1, np.int16)
    for index in reversed(range(len(shapes))):
        assigned[(source_lengths <= shapes[index][0]) & (target_lengths <= shapes[index][1])] = index
    assert (assigned >= 0).all(), "a pair fits no shape"
    return assigned


def _levels(lengths: Int[np.ndarray, "pairs"]) -> Int[np.ndarray, "levels"]:
    """The lengths that padding may reach on one side: multiples, at equal shares of all tokens if they are many."""
    multiple = 2 if lengths.max() <= 64 else 8
    levels, pairs = np.unique(-(-lengths // multiple) * multiple, return_counts=True)
    if len(levels) <= MAX_LEVELS:
        return levels
    tokens = np.cumsum(levels * pairs)
    return levels[np.unique(np.searchsorted(tokens, tokens[-1] * (np.arange(1, MAX_LEVELS + 1) / MAX_LEVELS)))]


def _open_and_move(
    costs: Float[np.ndarray, "shapes cells"], weights: Float[np.ndarray, "cells"], max_shapes: int
) -> list[int]:
    """Rows of `costs` whose least cost a cell, times its weight, sums to little: greedy, then exchanges.

    Infinite cost: the shape does not hold the cell. At least one row has none.
    """

    def best_beside(others: list[int]) -> tuple[int, float]:
        least = costs[others].min(axis=0, initial=np.inf)
        totals = np.minimum(costs, least) @ weights
        shape = int(totals.argmin())
        return shape, totals[shape]

    chosen: list[int] = []
    total = np.inf
    while len(chosen) < max_shapes:
        shape, new_total = best_beside(chosen)
        if new_total >= total:
            break
        chosen.append(shape)
        total = new_total
    improved = True
    while improved:
        improved = False
        for place in range(len(chosen)):
            shape, new_total = best_beside(chosen[:place] + chosen[place + 1 :])
            if new_total < total:
                chosen[place], total, improved = shape, new_total, True
    return chosen


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchShape:
    """One of the few shapes that batches come in, compiled once."""

    source: int
    """S, in tokens."""
    target: int
    """T, in tokens, start token included."""
    rows: int
    pairs: int
    """Pairs of an epoch that come in this shape."""
    batches: int
    """Batches of an epoch that have this shape; the last is filled up with empty rows."""
    padding_share: float
    """Of the source and target positions of an epoch's batches of this shape; empty rows are padding."""


def check_budget(shapes: Sequence[tuple[int, int]], config: BatchConfig) -> None:
    """Raises ValueError where the budget does not hold a row of every shape for each accumulation step."""
    longest, slices = max((max(shape) for shape in shapes), default=0), config.accumulation_steps
    if config.tokens < longest * slices:
        raise ValueError(
            f"batch.tokens: expected at least {longest * slices}, a row of {longest} tokens for each of {slices} "
            f"accumulation steps, got {config.tokens}"
        )


def size_batches(shape: tuple[int, int], pairs: int, tokens: int, config: BatchConfig) -> BatchShape:
    """Cuts the pairs of one shape into batches within the budget.

    Rows are a multiple of 8, for few-row products are slow, and of the accumulation steps; where the budget does not
    hold that, of the accumulation steps alone.

    Args:
        shape: the padded (S, T).
        pairs: that come in this shape; at least one.
        tokens: of all those pairs on both sides, for the share of padding.
        config: the budget, checked: see `check_budget`.
    """
    longer, slices = max(shape), config.accumulation_steps
    most = config.tokens // longer
    multiple = math.lcm(8, slices) if most >= math.lcm(8, slices) else slices
    batches = -(-pairs // (most // multiple * multiple))
    # Evened out: as many batches, but the last of an epoch is nearly full, too.
    rows = -(-pairs // (batches * multiple)) * multiple
    padding_share = 1 - tokens / (rows * batches * sum(shape))
    return BatchShape(
        source=shape[0], target=shape[1], rows=rows, pairs=pairs, batches=batches, padding_share=padding_share
    )
