import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tolerances import assert_same_bits

from tfm.config import ModelConfig
from tfm.nn.cache import (
    Int8Vectors,
    KeysValues,
    LayerCache,
    cache_bytes,
    init_cache,
    own_from_now_on,
    reorder,
    widen,
    write,
)  # fmt: skip

B, S, C = 3, 5, 7
CONFIG = ModelConfig(
    source_vocab_size=11, target_vocab_size=11, model_dim=16, feed_forward_dim=8, num_heads=4, num_kv_heads=2,
    encoder_layers=1, decoder_layers=3,
)  # fmt: skip
CONFIGS = {
    "encoder-decoder": CONFIG,
    "decoder-only": CONFIG.replace(architecture="decoder-only"),
    "multi-head": CONFIG.replace(num_kv_heads=None),
    "wide-heads": CONFIG.replace(head_dim=6),
}


def nbytes(cache) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(cache))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_cache_bytes_are_those_of_the_arrays_and_of_the_formula(name, dtype):
    config = CONFIGS[name]
    cache = init_cache(config, batch=B, source_length=S, capacity=C, dtype=dtype)
    said = cache_bytes(config, batch=B, source_length=S, capacity=C, dtype=dtype)
    assert said == nbytes(cache)
    # 2 · (B·W·C + B·S) · K · H · L · bytes, and the lengths, one int32 a row for each side
    vector_bytes = {"float32": 4 * config.head_size, "bfloat16": 2 * config.head_size, "int8": config.head_size + 4}
    assert said == 2 * (B * C + B * S) * config.kv_heads * vector_bytes[dtype] * 3 + 2 * B * 4
    assert nbytes(widen(cache, 3)) == cache_bytes(config, batch=B, source_length=S, capacity=C, beams=3, dtype=dtype)


def test_all_beams_of_a_row_share_its_source():
    one, four = (cache_bytes(CONFIG, batch=B, source_length=S, capacity=C, beams=beams) for beams in (1, 4))
    assert four - one == 3 * B * 2 * C * 2 * 4 * 3 * 4 + B * 4 * C * 4  # three more target sides a row, and ancestors


def test_without_an_encoder_each_beam_has_a_source_of_its_own():
    config = CONFIGS["decoder-only"]
    one, four = (cache_bytes(config, batch=B, source_length=S, capacity=C, beams=beams) for beams in (1, 4))
    lengths = 2 * B * 4
    assert four - lengths - B * 4 * (C + S) * 4 == 4 * (one - lengths)


def test_a_decoder_only_cache_is_the_textbooks_size():
    """2 · batch · length · heads · head size · layers · bytes."""
    config = ModelConfig(architecture="decoder-only", model_dim=512, num_heads=8, decoder_layers=6)
    lengths = 2 * 32 * 4
    said = cache_bytes(config, batch=32, source_length=100, capacity=156, dtype="bfloat16")
    assert said == 2 * 32 * 256 * 8 * 64 * 6 * 2 + lengths


def test_the_size_is_said_without_an_array():
    """A cache that no machine holds."""
    huge = cache_bytes(CONFIG, batch=2**30, source_length=2**20, capacity=2**20)
    assert huge > 2**50
    shapes = jax.eval_shape(functools.partial(init_cache, CONFIG, batch=2**30, source_length=2**20, capacity=2**20))
    assert huge == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("name", CONFIGS)
def test_an_empty_cache_lies_heads_before_positions(name):
    config = CONFIGS[name]
    cache = init_cache(config, batch=B, source_length=S, capacity=C, dtype="bfloat16")
    assert len(cache.layers) == 3
    length = S + C if config.architecture == "decoder-only" else C
    assert cache.capacity == length
    assert cache.lengths.tolist() == cache.source_lengths.tolist() == [0] * B
    for layer in cache.layers:
        for array in jax.tree.leaves(layer.self_attention):
            assert array.shape == (B, config.kv_heads, length, config.head_size)
            assert array.dtype == jnp.bfloat16
        if config.architecture == "decoder-only":
            assert layer.cross_attention is None
        else:
            for array in jax.tree.leaves(layer.cross_attention):
                assert array.shape == (B, config.kv_heads, S, config.head_size)


def random_keys_values(seed, length, dtype=np.float32):
    keys, values = np.random.default_rng(seed).standard_normal((2, B, 2, length, 4)).astype(dtype)
    return KeysValues(jnp.array(keys), jnp.array(values))


@given(starts=st.lists(st.integers(0, C - 3), min_size=B, max_size=B), num_tokens=st.integers(1, 3))
def test_write_writes_each_row_at_its_own_start_and_nothing_else(starts, num_tokens):
    old, new = random_keys_values(0, C), random_keys_values(1, num_tokens)
    before = np.array(old.keys)
    written = write(old, new, jnp.array(starts, jnp.int32))
    for was, added, now in zip(*map(jax.tree.leaves, (old, new, written)), strict=True):
        expected = np.array(was)
        for row, start in enumerate(starts):
            expected[row, :, start : start + num_tokens] = added[row]
        assert_same_bits(now, expected)
    assert_same_bits(old.keys, before)


def test_write_keeps_the_caches_dtype():
    old = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_keys_values(0, C))
    written = write(old, random_keys_values(1, 2), jnp.zeros(B, jnp.int32))
    assert written.keys.dtype == written.values.dtype == jnp.bfloat16


def in_floats(vectors):
    return np.asarray(vectors.values, np.float32) * np.asarray(vectors.scales)


def test_in_int8_each_vector_is_near_what_was_written_and_zeros_are_zeros():
    floats = random_keys_values(0, C)
    floats = floats.replace(keys=floats.keys.at[0, 1, 2].set(0).at[1].multiply(1e4))  # large neighbours harm nobody
    stored = floats.stored("int8")
    assert stored.length == C
    for was, now in ((floats.keys, stored.keys), (floats.values, stored.values)):
        assert (now.values.dtype, now.scales.dtype, now.scales.shape) == (jnp.int8, jnp.float32, (B, 2, C, 1))
        largest = np.abs(was).max(axis=-1, keepdims=True)
        assert (np.abs(in_floats(now) - was) <= 1.001 * largest / 254).all()
    assert not stored.keys.scales[0, 1, 2].any()
    assert not stored.keys.values[0, 1, 2].any()


def test_an_int8_cache_rounds_what_is_written_and_touches_nothing_else():
    old, new = random_keys_values(0, C).stored("int8"), random_keys_values(1, 2)
    written = write(old, new, jnp.array([0, 3, 5], jnp.int32))
    assert isinstance(written.keys, Int8Vectors)
    for was, added, now in zip(*map(jax.tree.leaves, (old, new.stored("int8"), written)), strict=True):
        expected = np.array(was)
        for row, start in enumerate([0, 3, 5]):
            expected[row, :, start : start + 2] = added[row]
        assert_same_bits(now, expected)


@pytest.mark.parametrize("make", [init_cache, cache_bytes])
def test_a_dtype_that_no_cache_has_is_refused(make):
    with pytest.raises(ValueError, match="expected a cache in 'float32', 'bfloat16' or 'int8', got 'int4'"):
        inspect.unwrap(make)(CONFIG, batch=B, source_length=S, capacity=C, dtype="int4")


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_donated_write_copies_nothing(dtype):
    """The whole cache is passed through; XLA needs no second one beside it."""
    old, new = random_keys_values(0, 512).stored(dtype), random_keys_values(1, 1)
    compiled = jax.jit(write, donate_argnums=0).lower(old, new, jnp.zeros(B, jnp.int32)).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == nbytes(old)
    assert memory.temp_size_in_bytes < nbytes(old) / 10


@pytest.mark.parametrize("name", ["encoder-decoder", "decoder-only"])
def test_hypotheses_change_their_order_and_nothing_moves(name):
    cache = jax.jit(widen, static_argnums=1)(init_cache(CONFIGS[name], batch=B, source_length=S, capacity=C), 3)
    assert (cache.width, cache.ancestors.shape) == (3, (B, 3, cache.capacity))
    ancestors = np.random.default_rng(0).integers(0, 3, cache.ancestors.shape).astype(np.int32)
    cache = cache.replace(ancestors=jnp.array(ancestors))
    parents = np.array([2, 0, 0, 3, 4, 5, 8, 7, 6])
    moved = jax.jit(reorder)(cache, jnp.array(parents))
    assert_same_bits(moved.ancestors.reshape(3 * B, -1), ancestors.reshape(3 * B, -1)[parents])
    for was, now in zip(*map(jax.tree.leaves, (cache.layers, moved.layers)), strict=True):
        assert_same_bits(now, was)
    assert moved.lengths.tolist() == cache.lengths.tolist()
    assert moved.source_lengths.tolist() == cache.source_lengths.tolist()


def test_a_cache_of_one_continuation_a_row_has_no_order_to_change():
    with pytest.raises(ValueError, match=r"expected a cache of several hypotheses a row, from widen\(cache, width\)"):
        reorder(init_cache(CONFIGS["encoder-decoder"], batch=B, source_length=S, capacity=C), jnp.arange(B))


def test_a_cache_is_widened_once_and_to_a_width_that_there_is():
    cache = init_cache(CONFIGS["encoder-decoder"], batch=B, source_length=S, capacity=C)
    with pytest.raises(ValueError, match="expected a width of at least 1 and a cache not widened yet, got 0"):
        widen(cache, 0)
    with pytest.raises(ValueError, match="got 2 and a cache of 3 hypotheses a row"):
        widen(widen(cache, 3), 2)


@pytest.mark.parametrize("width", [1, 3])
def test_widened_keys_are_those_of_the_first_hypothesis_which_all_see(width):
    narrow = init_cache(CONFIGS["encoder-decoder"], batch=B, source_length=S, capacity=C)
    keys_values = random_keys_values(0, C)
    narrow = narrow.replace(layers=(LayerCache(keys_values, None),), lengths=jnp.array([0, 2, C]))
    wide = widen(narrow, width)
    for was, now in zip(*map(jax.tree.leaves, (narrow.layers, wide.layers)), strict=True):
        assert now.shape == (*was.shape[:2], C * width, was.shape[3])
        assert_same_bits(now[:, :, ::width], was)
    assert not wide.ancestors.any()
    own = np.asarray(own_from_now_on(wide))
    for row, length in enumerate([0, 2, C]):
        assert not own[row, :, :length].any()
        assert (own[row, :, length:] == np.arange(width)[:, None]).all()


def test_a_cache_is_immutable():
    cache = init_cache(CONFIG, batch=B, source_length=S, capacity=C)
    with pytest.raises(AttributeError):
        cache.lengths = jnp.ones(B)
