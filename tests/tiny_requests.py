"""One batch of requests, with prompts of every length, and the models that answer it."""

import numpy as np
import pytest
from mixtures import name_of
from recurrent_kinds import ADDITIVE, FED
from tiny_models import random_ids, random_params, tiny_config, tiny_model

from tfm.decoding.inference import prefill

S, T = 5, 6
CAPACITY = 12
SOURCE = random_ids(T, S, seed=1)
TARGET = random_ids(T, T, seed=2)
SOURCE_LENGTHS = np.array([5, 1, 3, 0, 4, 2], np.int32)
PROMPT_LENGTHS = np.arange(1, T + 1, dtype=np.int32)
"""One batch holds prompts of every length."""

FURTHER_TOKENS = random_ids(T, CAPACITY, seed=3)

BOTH = [
    tiny_config(positions="t5-bias", num_kv_heads=2),
    tiny_config(architecture="decoder-only", positions="rope", num_kv_heads=2),
]
both_architectures = pytest.mark.parametrize("config", BOTH, ids=name_of)
RECURRENT = [ADDITIVE, FED]
every_architecture = pytest.mark.parametrize("config", [*BOTH, FED], ids=name_of)


def prompts_with_junk(seed=None):
    """The first tokens of each target; behind them zeros, or random ids."""
    junk = np.zeros_like(TARGET) if seed is None else random_ids(T, T, seed=seed)
    return np.where(np.arange(T) < PROMPT_LENGTHS[:, None], TARGET, junk)


def prefilled(config, dtype="float32", *, source=SOURCE, prompt=None, cache="auto"):
    prompt = prompts_with_junk() if prompt is None else prompt
    return prefill(
        tiny_model(config, dtype, cache=cache), random_params(config), source, SOURCE_LENGTHS, prompt, PROMPT_LENGTHS,
        capacity=CAPACITY,
    )  # fmt: skip
