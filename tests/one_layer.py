"""One small model of each architecture, with one decoder layer: for tests that compile many programs."""

import pytest
from recurrent_kinds import RECURRENT_ONE, one_then_slow
from tiny_models import tiny_config

CONFIGS = [
    tiny_config(positions="t5-bias", num_kv_heads=2, shared_embeddings="none", decoder_layers=1),
    tiny_config(positions="rope", architecture="decoder-only", shared_embeddings="none", decoder_layers=1),
]
both_architectures = pytest.mark.parametrize("config", one_then_slow(CONFIGS), ids=lambda config: config.architecture)
every_architecture = pytest.mark.parametrize(
    "config", [*one_then_slow(CONFIGS), RECURRENT_ONE], ids=lambda config: config.architecture
)
