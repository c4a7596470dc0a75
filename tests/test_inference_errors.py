"""What `prefill` and `decode_step` cannot do is refused by name, without waiting for the device."""

import functools
import inspect

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import V, random_ids, random_params, tiny_model
from tiny_requests import (
    BOTH,
    CAPACITY,
    FURTHER_TOKENS,
    SOURCE,
    SOURCE_LENGTHS,
    TARGET,
    S,
    T,
    both_architectures,
    prefilled,
)

from tfm.decoding import inference
from tfm.decoding.inference import complete_inputs, decode_step, prefill


@both_architectures
def test_what_cannot_be_is_refused(config):
    model, params = tiny_model(config), random_params(config)
    run = functools.partial(prefill, model, params, capacity=CAPACITY)
    lengths = np.full(T, 2, np.int32)
    with pytest.raises(ValueError, match="expected source lengths from 0 to 5, got 2 to 6"):
        run(SOURCE, np.append(lengths[1:], 6).astype(np.int32))
    with pytest.raises(ValueError, match="expected source lengths from 0 to 5, got -1 to 2"):
        run(SOURCE, jnp.append(lengths[1:], -1))
    with pytest.raises(ValueError, match="expected prompt lengths from 1 to 6, got 0 to 2"):
        run(SOURCE, lengths, TARGET, np.append(lengths[1:], 0).astype(np.int32))
    with pytest.raises(ValueError, match="expected a prompt of at least 1 tokens, got 0"):
        run(SOURCE, lengths, TARGET[:, :0])
    with pytest.raises(ValueError, match="expected at least 1 source, got 0"):
        run(SOURCE[:0])
    with pytest.raises(ValueError, match="at most 16 tokens, got 17"):
        run(random_ids(T, 17))
    with pytest.raises(ValueError, match="expected a cache capacity of at most 32 tokens, got 33"):
        prefill(model, params, SOURCE, capacity=33)
    with pytest.raises(ValueError, match="expected a prompt of at most 4 tokens, got 6"):
        prefill(model, params, SOURCE, None, TARGET, capacity=4)


def test_wrong_shapes_are_refused_by_name():
    """Also where no annotation is checked."""
    config = BOTH[0]
    model, params = tiny_model(config), random_params(config)
    check = inspect.unwrap(complete_inputs)
    with pytest.raises(ValueError, match=r"expected source lengths of shape \(6,\), got \(4,\)"):
        check(model, SOURCE, SOURCE_LENGTHS[:4], None, None)
    with pytest.raises(ValueError, match="expected a prompt for each of 6 sources, got 4"):
        check(model, SOURCE, None, TARGET[:4], None)
    _, cache = prefilled(config)
    with pytest.raises(ValueError, match="expected tokens for the cache's 6 rows, got 1"):
        decode_step(model, params, TARGET[:1, :1], cache)
    for count in (0, 13):
        with pytest.raises(ValueError, match=rf"expected 1 to 12 tokens \(the cache's capacity\), got {count}"):
            decode_step(model, params, random_ids(T, count), cache)


def test_what_is_no_array_of_whole_numbers_is_refused():
    """Also where no annotation is checked."""
    config = BOTH[0]
    model, params = tiny_model(config), random_params(config)
    run = functools.partial(inspect.unwrap(prefill), model, params, capacity=CAPACITY)
    step = functools.partial(inspect.unwrap(decode_step), model, params, cache=prefilled(config)[1])
    with pytest.raises(ValueError, match=r"expected source as whole numbers \[B, S\], got float32 of shape \(3,\)"):
        run(np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"expected source as whole numbers \[B, S\], got int32 of shape \(5,\)"):
        run(SOURCE[0])
    with pytest.raises(ValueError, match=r"expected source as whole numbers \[B, S\], got .*inhomogeneous"):
        run([[1, 2], [3]])
    with pytest.raises(ValueError, match=r"expected source lengths as whole numbers \[B\], got float64 of shape"):
        run(SOURCE, SOURCE_LENGTHS.astype(float))
    with pytest.raises(ValueError, match=r"expected prompt as whole numbers \[B, T\], got bool of shape \(6, 6\)"):
        run(SOURCE, None, TARGET > 0)
    with pytest.raises(ValueError, match=r"expected tokens as whole numbers \[B, T\], got int32 of shape \(6,\)"):
        step(TARGET[:, 0])
    for capacity in (4.0, "4", None, True):
        with pytest.raises(ValueError, match=f"expected a whole number as capacity, got {capacity!r}"):
            run(SOURCE, capacity=capacity)
    logits, _ = run(SOURCE, capacity=np.int64(CAPACITY))
    assert logits.shape == (T, 1, V)
    with pytest.raises(ValueError, match="expected the cache of a prefill or of an earlier step, got None"):
        step(TARGET[:, :1], cache=None)


@both_architectures
def test_ids_that_the_vocabulary_does_not_have_are_refused(config):
    model, params = tiny_model(config), random_params(config)
    run = functools.partial(prefill, model, params, capacity=CAPACITY)
    for wrong in (-1, V):
        for place in (np.asarray, jnp.asarray):
            ids = np.where(np.arange(S) < 4, SOURCE, wrong).astype(np.int32)
            with pytest.raises(ValueError, match=f"expected source ids from 0 to 10, got {wrong}"):
                run(place(ids))
            run(place(ids), place(np.full(T, 4)))  # in the padding it may be
            prompt = np.where(np.arange(T) < 4, TARGET, wrong).astype(np.int32)
            with pytest.raises(ValueError, match=f"expected prompt ids from 0 to 10, got {wrong}"):
                run(SOURCE, None, place(prompt))
            _, cache = run(SOURCE, None, place(prompt), place(np.full(T, 4)))
        with pytest.raises(ValueError, match=f"expected token ids from 0 to 10, got {wrong}"):
            decode_step(model, params, np.full((T, 1), wrong), cache)


def test_a_step_does_not_wait_for_its_tokens(monkeypatch):
    """They lie on the device: reading them would stall it at every step."""
    config = BOTH[0]
    model, params, (_, cache) = tiny_model(config), random_params(config), prefilled(config)
    tokens = jnp.asarray(FURTHER_TOKENS[:, :1])
    monkeypatch.setattr(inference, "_known", lambda x: pytest.fail("looked at"))
    decode_step(model, params, tokens, cache)
