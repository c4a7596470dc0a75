"""Requests of `generate` whose sources, prompts and ends differ from row to row."""

import functools

import jax
import numpy as np
import pytest
from recurrent_kinds import RECURRENT_ONE, one_then_slow
from tiny_models import random_ids, random_params, tiny_config, tiny_model

from tfm.decoding.generate import generate

B, S, P = 6, 5, 3
SOURCE = random_ids(B, S, seed=1)
SOURCE_LENGTHS = np.array([5, 1, 3, 4, 4, 2], np.int32)
PROMPT_LENGTHS = np.array([1, 3, 2, 1, 2, 3], np.int32)
CAPACITY = 16
MOST = CAPACITY  # with a prompt of one token: the last token is never read
CONFIGS = [
    tiny_config(positions="t5-bias", num_kv_heads=2, shared_embeddings="none", decoder_layers=1),
    tiny_config(positions="rope", architecture="decoder-only", pad_id=9, shared_embeddings="none", decoder_layers=1),
]
both_architectures = pytest.mark.parametrize("config", one_then_slow(CONFIGS), ids=lambda config: config.architecture)
every_architecture = pytest.mark.parametrize(
    "config", [*one_then_slow(CONFIGS), RECURRENT_ONE], ids=lambda config: config.architecture
)


def prompt_of(config):
    prompt = random_ids(B, P, seed=3)
    prompt[:, 0] = config.start_id
    return prompt


@functools.cache
def seeded_params(config):
    """Parameters with which some rows end early and some never do, and no two say the same."""
    for seed in range(200):
        params = random_params(config, seed)
        generation = run(config, params)
        finished = generation.finished
        if 2 <= finished.sum() <= B - 2 and len(set(map(tuple, generation.tokens.tolist()))) == B:
            return params
    raise AssertionError("no seed gives rows of both kinds")


def run(config, params=None, *, source=SOURCE, source_lengths=SOURCE_LENGTHS, **arguments):
    params = seeded_params(config) if params is None else params
    arguments = {"max_tokens": MOST, "capacity": CAPACITY, **arguments}
    result = generate(tiny_model(config), params, source, source_lengths=source_lengths, **arguments)
    return jax.tree.map(np.asarray, result)
