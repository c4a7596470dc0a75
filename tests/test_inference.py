"""Cached equals uncached, the cache is a value, and few programs are compiled."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_counter import count_compilations
from mixtures import mixtures, name_of
from recurrent_kinds import EVERY
from tiny_models import random_ids, random_params, tiny_model
from tiny_requests import (
    BOTH,
    CAPACITY,
    FURTHER_TOKENS,
    PROMPT_LENGTHS,
    RECURRENT,
    SOURCE,
    SOURCE_LENGTHS,
    TARGET,
    S,
    T,
    both_architectures,
    every_architecture,
    prefilled,
    prompts_with_junk,
)
from tolerances import assert_close, assert_same_bits

from tfm.config import ModelConfig
from tfm.decoding import inference
from tfm.decoding.inference import decode_step, prefill
from tfm.nn import layers
from tfm.nn.cache import cache_bytes, init_cache

pytestmark = pytest.mark.usefixtures("compile_fast")


def test_the_mixtures_hold_every_pair():
    rows = [(c.architecture, c.positions, c.kv_heads, c.norm_position) for c in mixtures()]
    for one, other in itertools.combinations(range(4), 2):
        every = itertools.product({row[one] for row in rows}, {row[other] for row in rows})
        assert set(every) == {(row[one], row[other]) for row in rows}


@functools.cache
def full_logits(config: ModelConfig, dtype: str = "float32"):
    """One forward pass over the whole target: what everything else is held against."""
    model, params = tiny_model(config, dtype), random_params(config)
    return np.asarray(jax.jit(model.apply)({"params": params}, SOURCE, SOURCE_LENGTHS, TARGET))


def stepwise_logits(config, first_logits, cache, splits, dtype="float32"):
    """The logits at every position from each row's last prompt token on; NaN before.

    Rows whose target has run out go on with other tokens, as finished rows of a batch do.
    """
    model, params = tiny_model(config, dtype), random_params(config)
    logits = np.full((T, CAPACITY, first_logits.shape[-1]), np.nan)
    rows, at = np.arange(T), PROMPT_LENGTHS.copy()
    logits[rows, at - 1] = first_logits[:, 0]
    tokens = np.concatenate([TARGET, FURTHER_TOKENS], axis=1)
    for split in splits:
        columns = at[:, None] + np.arange(split)
        step_logits, cache = decode_step(model, params, tokens[rows[:, None], columns], cache)
        logits[rows[:, None], columns] = step_logits
        at += split
        assert cache.lengths.tolist() == (at + cached_source_lengths(config)).tolist()
    return logits[:, :T]


def cached_source_lengths(config):
    return SOURCE_LENGTHS if config.architecture == "decoder-only" else 0


def assert_agrees(stepwise, full, dtype="float32", times=1.0):
    computed = ~np.isnan(stepwise)
    assert computed[np.arange(T), PROMPT_LENGTHS - 1].all()
    assert_close(stepwise[computed], full[computed], dtype=dtype, times=times)


# Contract: cached equals uncached


@pytest.mark.parametrize("config", mixtures() + EVERY, ids=name_of)
def test_prefill_and_steps_give_the_logits_of_the_full_forward(config):
    full = full_logits(config)
    first, cache = prefilled(config)
    assert first.shape == (T, 1, full.shape[-1])
    for splits in ([1, 1, 1, 1, 1], [3, 1, 1], [1, 3, 1]):
        assert_agrees(stepwise_logits(config, first, cache, splits), full)
    # what lies in the padding, of source or prompt, changes nothing
    junk_source = np.where(np.arange(S) < SOURCE_LENGTHS[:, None], SOURCE, random_ids(T, S, seed=8))
    first, cache = prefilled(config, source=junk_source, prompt=prompts_with_junk(seed=9))
    assert_agrees(stepwise_logits(config, first, cache, [1, 3, 1]), full)


def tampered(cache, kind):
    if kind == "all rows at the place of the longest":
        return cache.replace(lengths=jnp.full_like(cache.lengths, cache.lengths.max()))
    if kind == "one position too far":
        return cache.replace(lengths=cache.lengths + 1)
    if kind == "padding of the source visible":
        return cache.replace(source_lengths=jnp.full_like(cache.source_lengths, S))
    if kind == "neighbours mixed up":
        rolled = [
            layer.replace(self_attention=jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), layer.self_attention))
            for layer in cache.layers
        ]
        return cache.replace(layers=tuple(rolled))
    swapped = (cache.layers[1], *cache.layers[:1])
    return cache.replace(layers=swapped)


def tampered_recurrent(cache, kind):
    if kind == "padding of the source visible":
        return cache.replace(source_lengths=jnp.full_like(cache.source_lengths, S))
    if kind == "neighbours mixed up":
        return cache.replace(carries=jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), cache.carries))
    if kind == "layers mixed up":
        return cache.replace(carries=cache.carries[::-1])
    assert kind == "what was fed back forgotten"
    return cache.replace(attentional=jnp.zeros_like(cache.attentional))


FAULTS = ["all rows at the place of the longest", "one position too far", "neighbours mixed up", "layers mixed up"]


@pytest.mark.parametrize(
    ("config", "kind"),
    [(config, kind) for config in BOTH for kind in FAULTS]
    + [(BOTH[0], "padding of the source visible")]
    + [(config, kind) for config in RECURRENT for kind in ["padding of the source visible", *FAULTS[2:]]]
    + [(RECURRENT[1], "what was fed back forgotten")],
)
def test_a_wrong_cache_is_noticed(config, kind):
    """The control: each fault that a cache may have makes the comparison above fail."""
    first, cache = prefilled(config)
    stepwise = np.full((T, T, first.shape[-1]), np.nan)
    stepwise[np.arange(T), PROMPT_LENGTHS - 1] = first[:, 0]
    columns = np.minimum(PROMPT_LENGTHS, T - 1)
    rows = np.arange(T - 1)  # the last row's target has run out
    tamper = tampered_recurrent if config.architecture == "recurrent" else tampered
    logits, _ = decode_step(
        tiny_model(config), random_params(config), TARGET[np.arange(T), columns][:, None], tamper(cache, kind)
    )
    stepwise[rows, columns[:-1]] = logits[:-1, 0]
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_agrees(stepwise, full_logits(config), times=100)


@pytest.mark.parametrize(
    ("config", "stream"),
    [*itertools.product(BOTH, ["float32", "bfloat16"]), (RECURRENT[1], "bfloat16")],
    ids=lambda each: each if isinstance(each, str) else name_of(each),
)
def test_in_bfloat16_they_agree_too(config, stream, monkeypatch):
    """With a stream in float32, as on a CPU, and in bfloat16, as on an accelerator."""
    monkeypatch.setattr(layers, "stream_dtype", lambda dtype: stream)
    config = config.replace(norm_epsilon=2e-6 if stream == "float32" else 3e-6)  # so that each is traced anew
    full = full_logits(config, "bfloat16")
    assert full.dtype == np.float32
    first, cache = prefilled(config, "bfloat16")
    if config.architecture == "recurrent":
        assert {leaf.dtype for leaf in jax.tree.leaves(cache.carries)} == {np.dtype(np.float32)}
    else:
        assert cache.layers[0].self_attention.keys.dtype == stream
    # logits are near 3 and have been through two layers
    assert_agrees(stepwise_logits(config, first, cache, [1, 3, 1], "bfloat16"), full, dtype="bfloat16", times=2)
    # and bfloat16 is near float32
    assert_close(full, full_logits(config), dtype="bfloat16", times=8)
    assert np.abs(full - full_logits(config)).max() > 1e-3


cache_dtypes = pytest.mark.parametrize("cache_dtype", ["bfloat16", "int8"])


@every_architecture
@cache_dtypes
def test_with_a_cache_in_fewer_bits_they_agree_too(config, cache_dtype):
    full = full_logits(config)
    first, cache = prefilled(config, cache=cache_dtype)
    assert_close(first[:, 0], full[np.arange(T), PROMPT_LENGTHS - 1])  # prefill itself rounds nothing
    # logits are near 3 and have been through two layers
    stepwise = stepwise_logits(config, first, cache, [1, 3, 1])
    assert_agrees(stepwise, full, dtype=cache_dtype, times=2)
    assert np.nanmax(np.abs(stepwise - full)) > 1e-3
    # what lies in the padding changes nothing
    junk_source = np.where(np.arange(S) < SOURCE_LENGTHS[:, None], SOURCE, random_ids(T, S, seed=8))
    first, cache = prefilled(config, source=junk_source, prompt=prompts_with_junk(seed=9), cache=cache_dtype)
    assert_agrees(stepwise_logits(config, first, cache, [1, 3, 1]), stepwise, times=10)


@both_architectures
@cache_dtypes
def test_empty_places_behind_and_neighbours_change_nothing_in_fewer_bits(config, cache_dtype):
    model, params = tiny_model(config, cache=cache_dtype), random_params(config)
    _, cache = prefilled(config, cache=cache_dtype)
    following = FURTHER_TOKENS[:, :1]
    step, _ = decode_step(model, params, following, cache)
    longer = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, 7), (0, 0))), cache.layers)
    if config.architecture == "encoder-decoder":
        longer = tuple(
            new.replace(cross_attention=old.cross_attention) for new, old in zip(longer, cache.layers, strict=True)
        )
    assert_close(decode_step(model, params, following, cache.replace(layers=longer))[0], step)
    one = jax.tree.map(lambda x: x[2:3], cache)
    assert_close(decode_step(model, params, following[2:3], one)[0], step[2:3])


@every_architecture
def test_a_row_alone_and_in_wider_padding_gives_what_it_gives_in_a_batch(config):
    model, params = tiny_model(config), random_params(config)
    first, cache = prefilled(config)
    following = FURTHER_TOKENS[:, :1]
    second, _ = decode_step(model, params, following, cache)
    for row in (0, 2, 3):
        wide_source = np.zeros((1, S + 3), np.int32)
        wide_source[:, :S] = SOURCE[row]
        wide_prompt = random_ids(1, T + 2, seed=4)
        wide_prompt[0, : PROMPT_LENGTHS[row]] = TARGET[row, : PROMPT_LENGTHS[row]]
        lengths = SOURCE_LENGTHS[row : row + 1], PROMPT_LENGTHS[row : row + 1]
        alone, alone_cache = prefill(model, params, wide_source, lengths[0], wide_prompt, lengths[1], capacity=20)
        assert_close(alone[0], first[row])
        assert_close(decode_step(model, params, following[row : row + 1], alone_cache)[0][0], second[row])


@both_architectures
def test_another_kernel_gives_the_same(config):
    params = random_params(config)
    results = []
    for kernel in ("plain", "xla"):
        model = tiny_model(config, kernel=kernel)
        first, cache = prefill(model, params, SOURCE, SOURCE_LENGTHS, TARGET, PROMPT_LENGTHS, capacity=CAPACITY)
        second, cache = decode_step(model, params, FURTHER_TOKENS[:, :1], cache)
        third, _ = decode_step(model, params, FURTHER_TOKENS[:, 1:4], cache)
        results.append((first, second, third))
    for plain, xla in zip(*results, strict=True):
        assert_close(xla, plain)


def test_a_decoder_only_model_needs_no_source_and_an_encoder_does():
    empty = SOURCE[:, :0]
    alone, cache = prefill(tiny_model(BOTH[1]), random_params(BOTH[1]), empty, capacity=CAPACITY)
    assert cache.capacity == CAPACITY
    assert np.isfinite(alone).all()
    with pytest.raises(ValueError, match="expected a source of at least 1 tokens, got 0"):
        prefill(tiny_model(BOTH[0]), random_params(BOTH[0]), empty, capacity=CAPACITY)


@every_architecture
def test_lengths_and_prompt_left_out_mean_all_real_and_the_start_token(config):
    model, params = tiny_model(config), random_params(config)
    start = np.full((T, 1), config.start_id, np.int32)
    short, _ = prefill(model, params, SOURCE, capacity=CAPACITY)
    long, _ = prefill(model, params, SOURCE, np.full(T, S, np.int32), start, np.ones(T, np.int32), capacity=CAPACITY)
    assert_same_bits(short, long)
    full = jax.jit(model.apply)({"params": params}, SOURCE, np.full(T, S), start)
    assert_close(short, full)


def test_what_is_projected_once_is_not_projected_again():
    """After prefill, neither the encoder nor the projections of the source matter."""
    config = BOTH[0]
    model, params = tiny_model(config), random_params(config)
    _, cache = prefilled(config)
    without = jax.tree.map(lambda x: x, params)
    without["encoder"] = jax.tree.map(lambda x: x * jnp.nan, params["encoder"])
    without["source_embedding"] = jax.tree.map(lambda x: x * jnp.nan, params["source_embedding"])
    for i in range(config.decoder_layers):
        for part in ("key", "value"):
            layer = without["decoder"][f"layer_{i}"]["cross_attention"]
            layer[part] = jax.tree.map(lambda x: x * jnp.nan, layer[part])
    tokens = FURTHER_TOKENS[:, :1]
    assert_same_bits(decode_step(model, without, tokens, cache)[0], decode_step(model, params, tokens, cache)[0])


# The cache as a value


def bits(tree):
    return [np.array(leaf, copy=True) for leaf in jax.tree.leaves(tree)]


@every_architecture
def test_a_cache_is_unchanged_and_continuations_branch_from_it(config):
    model, params = tiny_model(config), random_params(config)
    _, cache = prefilled(config)
    before = bits(cache)
    one, one_cache = decode_step(model, params, FURTHER_TOKENS[:, :1], cache)
    other, other_cache = decode_step(model, params, FURTHER_TOKENS[:, 1:2], cache)
    # one branch goes on and gives its memory away; the other and the stem still stand
    _, gone_on = decode_step(model, params, FURTHER_TOKENS[:, 2:3], one_cache, donate_cache=True)
    assert gone_on.lengths.tolist() == (cache.lengths + 2).tolist()
    for now, was in zip(jax.tree.leaves(cache), before, strict=True):
        assert_same_bits(now, was)
    assert_same_bits(decode_step(model, params, FURTHER_TOKENS[:, :1], cache)[0], one)
    assert_same_bits(decode_step(model, params, FURTHER_TOKENS[:, 1:2], cache)[0], other)
    assert np.isfinite(decode_step(model, params, FURTHER_TOKENS[:, :1], other_cache)[0]).all()


@every_architecture
def test_a_donated_cache_is_deleted_and_gives_the_same(config):
    model, params = tiny_model(config), random_params(config)
    lengths, prompt_lengths = jnp.array(SOURCE_LENGTHS), jnp.array(PROMPT_LENGTHS)
    _, cache = prefill(model, params, SOURCE, lengths, TARGET, prompt_lengths, capacity=CAPACITY)
    kept, kept_cache = decode_step(model, params, FURTHER_TOKENS[:, :1], cache)
    given, given_cache = decode_step(model, params, FURTHER_TOKENS[:, :1], cache, donate_cache=True)
    own = cache.carries if config.architecture == "recurrent" else [layer.self_attention for layer in cache.layers]
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(own))
    assert_same_bits(given, kept)
    for one, other in zip(*map(jax.tree.leaves, (given_cache, kept_cache)), strict=True):
        assert_same_bits(one, other)
    # what the caller passed to prefill is the caller's still
    assert not lengths.is_deleted()
    assert not prompt_lengths.is_deleted()


@both_architectures
@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16", "int8"])
def test_a_donated_step_copies_no_cache(config, cache_dtype, compile_fully):
    config = config.replace(head_dim=32, num_kv_heads=4)  # so that keys are large beside scores
    model, params = tiny_model(config, cache=cache_dtype), random_params(config)
    sizes = dict(batch=T, source_length=2048, capacity=2048, dtype=cache_dtype)
    cache = init_cache(config, **sizes)
    compiled = inference._decode_step_donating.lower(model, params, FURTHER_TOKENS[:, :1], cache).compile()
    memory = compiled.memory_analysis()
    all_bytes = cache_bytes(config, **sizes)
    assert memory.alias_size_in_bytes == all_bytes
    if cache_dtype != "bfloat16" or jax.__version_info__ >= (0, 12):  # before, XLA wrote bfloat16 by way of float32
        assert memory.temp_size_in_bytes < all_bytes / 4


def test_a_loop_of_steps_makes_no_floats_of_an_int8_cache(compile_fully):
    """Not of what it writes into, and not of the source's, which stays the same in all of its steps."""
    config = BOTH[0].replace(head_dim=32, num_kv_heads=4)
    model, params = tiny_model(config, cache="int8"), random_params(config)
    sizes = dict(batch=T, source_length=2048, capacity=2048, dtype="int8")

    @functools.partial(jax.jit, donate_argnums=1)
    def steps(params, cache, tokens):
        return jax.lax.fori_loop(0, 3, lambda _, cache: decode_step(model, params, tokens, cache)[1], cache)

    compiled = steps.lower(params, init_cache(config, **sizes), FURTHER_TOKENS[:, :1]).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < cache_bytes(config, **sizes) / 4


@every_architecture
@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16", "int8"])
def test_prefill_makes_as_many_bytes_as_were_said_in_every_kind_of_cache(config, cache_dtype):
    model = tiny_model(config, cache=cache_dtype)
    cache = jax.eval_shape(lambda params: prefill(model, params, SOURCE, capacity=CAPACITY)[1], random_params(config))
    assert cache_bytes(config, batch=T, source_length=S, capacity=CAPACITY, dtype=cache_dtype) == sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)
    )


@every_architecture
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prefill_makes_as_many_bytes_as_were_said(config, dtype):
    model = tiny_model(config, dtype)
    cache = jax.eval_shape(lambda params: prefill(model, params, SOURCE, capacity=CAPACITY)[1], random_params(config))
    # a decoder-only model's source lies in the same cache as its target
    is_recurrent = config.architecture == "recurrent"
    assert is_recurrent or cache.capacity == CAPACITY + (S if config.architecture == "decoder-only" else 0)
    stored_as = "float32" if is_recurrent else layers.stream_dtype(dtype)
    assert cache_bytes(config, batch=T, source_length=S, capacity=CAPACITY, dtype=stored_as) == sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)
    )


@every_architecture
def test_an_empty_cache_can_be_decoded_from(config):
    """Without a source; for a decoder-only model that is the full forward of the target alone."""
    model, params = tiny_model(config), random_params(config)
    cache = init_cache(config, batch=T, source_length=S, capacity=CAPACITY)
    logits, cache = decode_step(model, params, TARGET[:, :3], cache)
    full = jax.jit(model.apply)({"params": params}, SOURCE, np.zeros(T, np.int32), TARGET[:, :3])
    assert_close(logits, full)
    assert cache.lengths.tolist() == [3] * T


# Compilation


@every_architecture
def test_both_work_inside_a_callers_jit(config):
    model, params = tiny_model(config), random_params(config)

    @jax.jit
    def two_steps(params, source, lengths, prompt, prompt_lengths):
        logits, cache = prefill(model, params, source, lengths, prompt, prompt_lengths, capacity=CAPACITY)
        return decode_step(model, params, logits.argmax(axis=-1).astype(jnp.int32), cache)[0]

    first, cache = prefilled(config)
    second, _ = decode_step(model, params, np.asarray(first.argmax(axis=-1), np.int32), cache)
    inside = two_steps(params, SOURCE, SOURCE_LENGTHS, prompts_with_junk(), PROMPT_LENGTHS)
    assert_close(inside, second)


@every_architecture
def test_lengths_contents_and_parameters_compile_nothing_again(config):
    model, params = tiny_model(config), random_params(config)

    def run(seed):
        lengths = np.random.default_rng(seed).integers(1, S + 1, T).astype(np.int32)
        source, prompt = random_ids(T, S, seed=seed), random_ids(T, T, seed=seed + 1)
        changed = jax.tree.map(lambda x: np.asarray(x) * (1 + seed), params)
        _, cache = prefill(model, changed, source, lengths, prompt, lengths, capacity=CAPACITY)
        for step in range(4):
            _, cache = decode_step(model, changed, prompt[:, step : step + 1], cache, donate_cache=True)

    run(0)
    with count_compilations() as compilations:
        run(1)
    assert compilations.count == 0, compilations.names
