"""What `generate` refuses, before anything is compiled, and lists, which it takes."""

import functools
import inspect

import jax
import numpy as np
import pytest
from ragged_requests import (
    CAPACITY,
    CONFIGS,
    PROMPT_LENGTHS,
    SOURCE,
    SOURCE_LENGTHS,
    B,
    every_architecture,
    prompt_of,
    run,
    seeded_params,
)
from tiny_models import V, random_ids, random_params, tiny_model
from tolerances import assert_same_bits

from tfm.decoding.generate import generate
from tfm.decoding.sampling import Greedy, Sampling

pytestmark = pytest.mark.usefixtures("compile_fast")


@every_architecture
def test_what_cannot_be_is_refused(config):
    refuse = functools.partial(run, config, seeded_params(config))
    with pytest.raises(ValueError, match="expected a key for a sampler that draws"):
        refuse(sampler=Sampling())
    with pytest.raises(ValueError, match="expected temperature at least 0, got -1"):
        refuse(sampler=Sampling(temperature=-1.0), key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"expected one top_k or 6, one a row, got an array of shape \(2,\)"):
        refuse(sampler=Sampling(top_k=np.array([1, 2])), key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"expected one key or 6, one a row, got keys of shape \(2,\)"):
        refuse(sampler=Sampling(), key=jax.random.split(jax.random.key(0)))
    with pytest.raises(ValueError, match=r"expected a threefry key, .* got rbg"):
        refuse(sampler=Sampling(), key=jax.random.key(0, impl="rbg"))
    with pytest.raises(ValueError, match=r"expected a threefry key, .* got uint32 array"):
        refuse(sampler=Sampling(), key=jax.random.PRNGKey(0))
    with pytest.raises(ValueError, match="expected max_tokens of at least 0, got -1"):
        refuse(max_tokens=-1)
    with pytest.raises(ValueError, match="expected max_tokens of at least 0"):
        refuse(max_tokens=np.array([1, 2, 3, 4, 5, -1]))
    with pytest.raises(ValueError, match=r"expected at most 16 new tokens \(the capacity 16, 1 of prompt, .* 17"):
        refuse(max_tokens=17)
    with pytest.raises(ValueError, match=r"expected at most 32 new tokens \(the model's max_target_length 32, .* 40"):
        refuse(max_tokens=40, capacity=None)
    with pytest.raises(ValueError, match=r"expected a capacity from 1 \(the prompt\) to 32 .* got 33"):
        refuse(max_tokens=1, capacity=33)
    with pytest.raises(ValueError, match=r"expected a capacity from 3 \(the prompt\) .* got 2"):
        refuse(max_tokens=0, capacity=2, prompt=prompt_of(config))
    with pytest.raises(ValueError, match="expected source lengths from 0 to 5, got 5 to 6"):
        refuse(source_lengths=np.array([5, 5, 5, 5, 5, 6]))
    with pytest.raises(ValueError, match="expected prompt lengths from 1 to 3, got 0 to 0"):
        refuse(prompt=prompt_of(config), prompt_lengths=np.zeros(B, np.int32), max_tokens=1)
    with pytest.raises(ValueError, match="expected source ids from 0 to 10, got 11"):
        refuse(source=np.full_like(SOURCE, V))
    with pytest.raises(ValueError, match="expected a source of at most 16 tokens, got 17"):
        refuse(source=random_ids(B, 17))
    with pytest.raises(ValueError, match="expected a capacity: max_tokens has no value yet"):
        jax.jit(lambda limit: refuse(max_tokens=limit, capacity=None))(3)


def test_arguments_of_another_kind_are_refused():
    config = CONFIGS[0]
    refuse = functools.partial(inspect.unwrap(generate), tiny_model(config), random_params(config), SOURCE)
    for max_tokens, found in (([1, 2], r"int64 of shape \(2,\)"), (2.5, r"float64 of shape \(\)")):
        with pytest.raises(ValueError, match=f"expected one max_tokens or 6, one a row, as whole numbers, got {found}"):
            refuse(max_tokens=max_tokens, capacity=CAPACITY)
    for capacity in (4.0, "4"):
        with pytest.raises(ValueError, match=f"expected a whole number as capacity, got {capacity!r}"):
            refuse(max_tokens=1, capacity=capacity)
    for sampler in (Greedy(), Sampling()):
        with pytest.raises(ValueError, match=r"expected a threefry key, .* got 3"):
            refuse(max_tokens=1, capacity=CAPACITY, sampler=sampler, key=3)


def test_lists_are_as_good_as_arrays():
    config = CONFIGS[0]
    prompt = prompt_of(config)
    listed = run(
        config,
        source=SOURCE.tolist(),
        source_lengths=SOURCE_LENGTHS.tolist(),
        prompt=prompt.tolist(),
        prompt_lengths=PROMPT_LENGTHS.tolist(),
        max_tokens=[3] * B,
    )
    arrays = run(config, prompt=prompt, prompt_lengths=PROMPT_LENGTHS, max_tokens=3)
    assert_same_bits(listed.tokens, arrays.tokens)
    assert_same_bits(listed.scores, arrays.scores)
