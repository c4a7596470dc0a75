import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.config import BatchConfig
from train.shapes import MAX_LEVELS, assign_shapes, check_budget, choose_shapes, size_batches

LENGTHS = st.lists(st.tuples(st.integers(1, 600), st.integers(1, 600)), min_size=1, max_size=200)


def sides(pairs):
    return np.array([source for source, _ in pairs]), np.array([target for _, target in pairs])


def padded(sources, targets, shapes):
    return np.array(shapes)[assign_shapes(sources, targets, shapes)].sum()


@given(LENGTHS, st.integers(1, 9))
def test_every_pair_fits_one_of_a_few_shapes(pairs, max_shapes):
    sources, targets = sides(pairs)
    shapes = choose_shapes(sources, targets, max_shapes=max_shapes)
    assert len(set(shapes)) == len(shapes) <= max_shapes
    chosen = np.array(shapes)[assign_shapes(sources, targets, shapes)]
    assert (chosen[:, 0] >= sources).all()
    assert (chosen[:, 1] >= targets).all()
    for side, lengths in enumerate((sources, targets)):
        multiple = 2 if lengths.max() <= 64 else 8
        assert all(shape[side] % multiple == 0 and shape[side] < lengths.max() + multiple for shape in shapes)


@given(LENGTHS)
def test_one_shape_is_the_longest_of_each_side_and_more_never_pad_more(pairs):
    sources, targets = sides(pairs)
    ((source, target),) = choose_shapes(sources, targets, max_shapes=1)
    assert source - 8 < sources.max() <= source
    assert target - 8 < targets.max() <= target
    costs = [padded(sources, targets, choose_shapes(sources, targets, max_shapes=count)) for count in (1, 2, 3, 6)]
    assert costs[0] >= max(costs[1:]), "one shape is the worst"


@given(LENGTHS, st.randoms(use_true_random=False))
def test_the_order_of_the_pairs_changes_nothing(pairs, random):
    shapes = choose_shapes(*sides(pairs), max_shapes=4)
    random.shuffle(pairs)
    assert choose_shapes(*sides(pairs), max_shapes=4) == shapes


@pytest.mark.parametrize("max_shapes", [2, 3])
def test_the_choice_is_close_to_the_best_of_all(max_shapes):
    random = np.random.default_rng(0)
    excess = []
    for trial in range(40):
        sources = random.integers(1, 13, 40)
        targets = random.integers(1, 13, 40) if trial % 2 else np.clip(sources + random.integers(-3, 4, 40), 1, 12)
        grid = [range(2, lengths.max() + 2, 2) for lengths in (sources, targets)]
        shapes = np.array(list(itertools.product(*grid)))
        fits = (shapes[:, :1] >= sources) & (shapes[:, 1:] >= targets)
        costs = np.where(fits, shapes.sum(1)[:, None], np.inf)
        best = min(costs[list(some)].min(0).sum() for some in itertools.combinations(range(len(shapes)), max_shapes))
        excess.append(padded(sources, targets, choose_shapes(sources, targets, max_shapes=max_shapes)) / best)
    assert max(excess) < 1.1
    assert np.mean(excess) < 1.01


def test_shapes_where_source_and_target_do_not_go_together():
    sources, targets = np.array([4] * 50 + [40] * 50), np.array([40] * 50 + [4] * 50)
    assert choose_shapes(sources, targets, max_shapes=8) == ((4, 40), (40, 4)), "(40, 40) would be needed by no pair"


def test_pairs_of_one_length_have_one_shape():
    assert choose_shapes(np.full(9, 7), np.full(9, 3), max_shapes=6) == ((8, 4),)


def test_a_million_pairs_of_a_thousand_lengths_are_reduced_to_few_candidates():
    random = np.random.default_rng(0)
    sources = np.clip(random.lognormal(4, 1, 1_000_000).astype(int), 1, 4_000)
    shapes = choose_shapes(sources, sources // 2 + 1, max_shapes=8)
    assert len(np.unique(-(-sources // 8))) > 4 * MAX_LEVELS
    share = 1 - (sources + sources // 2 + 1).sum() / padded(sources, sources // 2 + 1, shapes)
    assert share < 0.31, "0.296 where twice as many lengths are considered"


@pytest.mark.parametrize(("count", "max_shapes"), [(0, 1), (3, 0)])
def test_nothing_to_choose_is_refused(count, max_shapes):
    with pytest.raises(ValueError, match="expected at least one"):
        choose_shapes(np.ones(count, int), np.ones(count, int), max_shapes=max_shapes)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 5_000), st.integers(1, 20_000), st.integers(1, 6))
def test_batches_hold_their_pairs_within_the_budget(source, target, pairs, tokens, slices):
    config = BatchConfig(tokens=tokens, accumulation_steps=slices)
    longer = max(source, target)
    if tokens < longer * slices:
        with pytest.raises(ValueError, match=f"expected at least {longer * slices}, .* got {tokens}"):
            check_budget([(1, 1), (source, target)], config)
        return
    shape = size_batches((source, target), pairs, pairs, config)
    assert shape.rows * longer <= tokens
    assert shape.rows % slices == 0
    assert shape.rows % 8 == 0 or tokens // longer < np.lcm(8, slices)
    assert (shape.batches - 1) * shape.rows < pairs <= shape.batches * shape.rows
    assert shape.padding_share == pytest.approx(1 - pairs / (shape.batches * shape.rows * (source + target)))


def test_the_last_batch_is_nearly_full_and_a_small_set_has_small_batches():
    # 4,096 tokens hold 408 rows; 409 pairs are cut in two halves rather than in 408 and 1.
    shape = size_batches((10, 8), 409, 409, BatchConfig(tokens=4096))
    assert (shape.rows, shape.batches) == (208, 2)
    shape = size_batches((10, 8), 5, 5, BatchConfig(tokens=4096))
    assert (shape.rows, shape.batches) == (8, 1)
