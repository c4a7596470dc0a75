"""A cache that grows on the way gives what one of full size from the start gives, and no loop copies it."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_layer import both_architectures
from tiny_models import random_ids, random_params, tiny_model
from tolerances import assert_same_bits, assert_same_but_for_rounding

from tfm.decoding import generate as generate_module
from tfm.decoding import growing
from tfm.decoding.arguments import Arguments
from tfm.decoding.beam import BeamSearch
from tfm.decoding.generate import generate, generate_n_best
from tfm.decoding.sampling import Greedy, Samples, Sampling
from tfm.decoding.stream import stream
from tfm.nn.cache import grow, init_cache, widen

B, S, P = 3, 5, 3
SOURCE = random_ids(B, S, seed=1)
SOURCE_LENGTHS = np.array([5, 1, 3], np.int32)
PROMPT_LENGTHS = np.array([1, 3, 2], np.int32)


pytestmark = [pytest.mark.usefixtures("compile_fast"), pytest.mark.slow]


@pytest.mark.parametrize("capacity", [1, 16, 63, 64, 100, 127, 128, 300, 511, 512, 4096, 5000])
@pytest.mark.parametrize("prompt_length", [1, 17, 64, 65, 300])
def test_capacities_grow_to_the_one_asked_for(capacity, prompt_length):
    prompt_length = min(prompt_length, capacity)
    capacities = growing.growing_capacities(capacity, prompt_length)
    assert capacities[-1] == capacity
    assert capacities[0] >= prompt_length
    for smaller, larger in itertools.pairwise(capacities):
        assert 2 * smaller <= larger <= 2 * growing.GROWTH * smaller
    # the first tokens do not pay for those that may never come
    assert capacities[0] < 2 * max(growing.FIRST_CAPACITY, growing.GROWTH * prompt_length) or len(capacities) == 1


WAYS = {
    "sampling": Sampling(temperature=0.8),
    "groups and coverage": BeamSearch(width=4, num_best=2, groups=2, coverage=0.3),
    "samples": Samples(3, Sampling(top_p=0.9)),
}


def run(config, way, prompted):
    prompt = random_ids(B, P, seed=3)
    prompt[:, 0] = config.start_id
    arguments = dict(
        source_lengths=SOURCE_LENGTHS, max_tokens=[20, 3, 11], capacity=23, key=jax.random.key(1),
        **(dict(prompt=prompt, prompt_lengths=PROMPT_LENGTHS) if prompted else {}),
    )  # fmt: skip
    model, params = tiny_model(config), random_params(config)
    if isinstance(way, BeamSearch | Samples):
        return generate_n_best(model, params, SOURCE, search=way, **arguments)
    *_, last = stream(model, params, SOURCE, sampler=way, **arguments)
    made = generate(model, params, SOURCE, sampler=way, **arguments)
    assert_same_but_for_rounding(last, made, times=10)  # sums of up to 20 terms
    return made


@pytest.mark.parametrize("way", WAYS)
@both_architectures
@pytest.mark.slow
def test_growing_changes_nothing(config, way, monkeypatch):
    prompted = way != "samples"
    whole = run(config, WAYS[way], prompted)
    monkeypatch.setattr(growing, "FIRST_CAPACITY", 4)
    monkeypatch.setattr(growing, "GROWTH", 2)
    assert len(growing.growing_capacities(23, 1)) == 3
    # what is compiled already knows nothing of the change: another model, which differs in nothing that matters here
    grown = run(config.replace(max_target_length=config.max_target_length + 1), WAYS[way], prompted)
    assert_same_but_for_rounding(grown, whole, times=10)
    assert whole.lengths.max() > 8, "nothing grew"


@both_architectures
def test_the_input_cache_is_unchanged_and_never_shrinks(config):
    cache = widen(init_cache(config, batch=2, source_length=3, capacity=4), 2)
    before = jax.tree.map(jnp.copy, cache)
    larger = grow(cache, cache.capacity + 3)
    jax.tree.map(assert_same_bits, cache, before)
    assert (larger.capacity, larger.width) == (cache.capacity + 3, 2)
    with pytest.raises(ValueError, match=f"expected a capacity of at least {cache.capacity}, .* got 1"):
        grow(cache, 1)


def while_bodies(program: str) -> list[str]:
    """The text of every computation that is the body of a loop, from an optimised program."""
    computations = dict(re.findall(r"^(?:ENTRY )?%?([\w.-]+) \([^\n]*\{\n(.*?)^\}", program, re.M | re.S))
    return [computations[name] for name in re.findall(r"body=%?([\w.-]+)", program)]


def copied(computation: str, elements: int) -> list[str]:
    """What a computation does that copies or transposes an array of so many elements or more."""
    found = re.findall(r"^.*= \w+\[([\d,]*)\]\S* (?:copy|transpose)\(.*$", computation, re.M)
    lines = re.findall(r"^(.*= \w+\[[\d,]*\]\S* (?:copy|transpose)\(.*)$", computation, re.M)
    sizes = [int(np.prod([int(n) for n in shape.split(",") if n])) for shape in found]
    return [line for line, size in zip(lines, sizes, strict=True) if size >= elements]


@pytest.mark.parametrize("search", [None, BeamSearch(width=3), Samples(3)], ids=["greedy", "beam", "samples"])
@both_architectures
def test_no_loop_copies_a_cache(config, search, compile_fully):
    """Nor transposes one: a decode step reads each key and value once, and writes one position."""
    capacity = 512
    config = config.replace(max_target_length=capacity, head_dim=32)  # or tables of tokens would be as large
    lengths = np.full(B, S, np.int32)
    arguments = Arguments(SOURCE, lengths, np.ones((B, 1), np.int32), np.ones(B, np.int32), lengths, None)
    model, params = tiny_model(config), random_params(config)
    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), B)
    if search is None:
        lowered = generate_module._generate.lower(model, params, arguments, Greedy(), keys, capacity=capacity)
    elif isinstance(search, BeamSearch):
        lowered = generate_module._search.lower(model, params, arguments, search.as_arrays(), capacity=capacity)
    else:
        sampler = search.sampler.as_arrays(B)
        lowered = generate_module._sample.lower(
            model, params, arguments, sampler, keys, number=3, num_best=3, capacity=capacity
        )
    bodies = [body for body in while_bodies(lowered.compile().as_text()) if "dynamic-update-slice" in body]
    assert len(bodies) >= len(growing.growing_capacities(capacity, 1)) == 3
    width = 1 if search is None else 3
    smallest = B * config.kv_heads * width * growing.FIRST_CAPACITY * config.head_size
    copies = [line for body in bodies for line in copied(body, smallest)]
    assert not copies, copies
