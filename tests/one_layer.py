"""One small model of each architecture, with one decoder layer: for tests that compile many programs."""

import pytest
from recurrent_kinds import ONE_LAYER
from tiny_models import tiny_config

CONFIGS = [
    tiny_config(positions="t5-bias", num_kv_heads=2, shared_embeddings="none", decoder_layers=1),
    tiny_config(positions="rope", architecture="decoder-only", shared_embeddings="none", decoder_layers=1),
]
both_architectures = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.architecture)
every_architecture = pytest.mark.parametrize("config", [*CONFIGS, ONE_LAYER], ids=lambda config: config.architecture)
