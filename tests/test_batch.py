import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfm.batch import Batch, make_batch
from tfm.config import ModelConfig

CONFIG = ModelConfig(source_vocab_size=20, target_vocab_size=20, pad_id=9, start_id=3, end_id=4)
IDS = st.lists(st.integers(0, 19), max_size=5)  # special ids may be in the text of a pair, too
PAIRS = st.lists(st.tuples(IDS, IDS), min_size=1, max_size=4)


def unpack(pairs):
    return [source for source, _ in pairs], [target for _, target in pairs]


@given(pairs=PAIRS, wider=st.tuples(st.integers(0, 3), st.integers(0, 3)), more_rows=st.integers(0, 3))
def test_a_batch_holds_exactly_the_pairs(pairs, wider, more_rows):
    sources, targets = unpack(pairs)
    shape = (max(map(len, sources)) + wider[0], max(map(len, targets)) + 1 + wider[1])
    rows = len(pairs) + more_rows
    batch = make_batch(sources, targets, CONFIG, shape=shape, rows=rows)
    assert batch.source.shape == (rows, shape[0])
    assert batch.target_in.shape == batch.target_out.shape == batch.weights.shape == (rows, shape[1])
    assert {batch.source.dtype, batch.target_in.dtype, batch.target_out.dtype} == {np.dtype(np.int32)}
    assert batch.weights.dtype == np.float32
    for row, (source, target) in enumerate(pairs):
        assert batch.source[row, : len(source)].tolist() == source
        assert batch.source_lengths[row] == len(source)
        assert (batch.source[row, len(source) :] == CONFIG.pad_id).all()
        real = len(target) + 1
        assert batch.weights[row].tolist() == [1.0] * real + [0.0] * (shape[1] - real)
        assert batch.target_in[row, :real].tolist() == [CONFIG.start_id, *target]
        assert batch.target_out[row, :real].tolist() == [*target, CONFIG.end_id]
        assert (batch.target_in[row, real:] == CONFIG.pad_id).all()
        assert (batch.target_out[row, real:] == CONFIG.pad_id).all()
    for row in range(len(pairs), rows):
        assert batch.source_lengths[row] == 0
        assert not batch.weights[row].any()


@given(PAIRS)
def test_the_decoder_reads_what_it_had_to_say_one_position_earlier(pairs):
    batch = make_batch(*unpack(pairs), CONFIG)
    counts = batch.weights[:, 1:] == 1
    assert (batch.target_in[:, 1:][counts] == batch.target_out[:, :-1][counts]).all()
    assert batch.weights.sum() == sum(len(target) + 1 for _, target in pairs)


@given(PAIRS)
def test_without_a_shape_it_is_as_long_as_needed(pairs):
    sources, targets = unpack(pairs)
    batch = make_batch(sources, targets, CONFIG)
    assert batch.source.shape == (len(pairs), max(map(len, sources)))
    assert batch.target_in.shape == (len(pairs), max(map(len, targets)) + 1)


def test_numpy_arrays_are_taken_as_lists_are():
    pairs = [([5, 6], [7]), ([8], [])]
    arrays = make_batch(*([np.array(ids, np.int64) for ids in side] for side in unpack(pairs)), CONFIG)
    for one, other in zip(*map(jax.tree.leaves, (arrays, make_batch(*unpack(pairs), CONFIG))), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_batch_is_a_pytree_of_anything():
    """Of shapes, of named axes, of gradients: what transformations put in the place of arrays."""
    batch = make_batch([[5]], [[6]], CONFIG)
    assert isinstance(jax.tree.map(lambda leaf: leaf.shape, batch), Batch)
    assert len(jax.tree.leaves(batch)) == 5
    with pytest.raises(AttributeError):
        batch.weights = None


def test_pairs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="expected as many targets as sources, got 2 sources, 1 targets"):
        make_batch([[5], [6]], [[7]], CONFIG)
    with pytest.raises(ValueError, match=r"\(2, 2\).*do not fit shape \(1, 3\)"):
        make_batch([[5, 6]], [[7]], CONFIG, shape=(1, 3))
    with pytest.raises(ValueError, match=r"\(1, 3\).*do not fit shape \(2, 2\)"):
        make_batch([[5]], [[7, 8]], CONFIG, shape=(2, 2))
    with pytest.raises(ValueError, match="2 pairs do not fit 1 rows"):
        make_batch([[5], [6]], [[7], [8]], CONFIG, rows=1)
