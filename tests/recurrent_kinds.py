"""Recurrent models that between them have every cell, every way to the source and everything that goes with it."""

import pytest
from tiny_models import tiny_config

from tfm.config import ModelConfig


def recurrent_config(cell: str, source_context: str, **changes) -> ModelConfig:
    """Two layers on both sides, so that they could be mixed up, unless `layers` says otherwise."""
    layers = changes.pop("layers", 2)
    return tiny_config(
        architecture="recurrent", cell=cell, source_context=source_context, encoder_layers=layers,
        decoder_layers=layers, **changes,
    )  # fmt: skip


FIXED = recurrent_config("rnn", "fixed", shared_embeddings="none")
ADDITIVE = recurrent_config("gru", "additive", bidirectional=True, shared_embeddings="all")
FED = recurrent_config(
    "lstm", "general", bidirectional=True, local_attention="predictive", attention_window=3, input_feeding=True
)
EVERY = [
    FIXED,
    recurrent_config("lstm", "fixed-each-step", bidirectional=True),
    ADDITIVE,
    recurrent_config("rnn", "dot", input_feeding=True, shared_embeddings="none"),
    FED,
    recurrent_config("gru", "concat", local_attention="monotonic", attention_window=1),
]
ONE_LAYER = recurrent_config("gru", "additive", bidirectional=True, shared_embeddings="none", layers=1)
"""For tests that compile many programs."""
RECURRENT_ONE = pytest.param(ONE_LAYER, marks=pytest.mark.slow)


def one_then_slow(configs: list[ModelConfig]) -> list:
    """What is the same code for all models is tried with the first one on every interpreter, with all on one."""
    return [configs[0], *(pytest.param(config, marks=pytest.mark.slow) for config in configs[1:])]
