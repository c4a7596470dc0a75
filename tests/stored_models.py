"""A model small enough to be saved many times, and which save it is that is stored."""

from pathlib import Path

import jax
import numpy as np

from tfm.config import ModelConfig, preset
from tfm.nn.models import build_model
from tfm.nn.params import init_params
from tfm.store import load_model, save_model
from tfm.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train(["a b c d e f g h"], kind="word", vocab_size=16)
CONFIG = preset(
    "tiny",
    model_dim=8,
    feed_forward_dim=8,
    num_heads=2,
    encoder_layers=1,
    decoder_layers=1,
    source_vocab_size=TOKENIZER.vocab_size,
    target_vocab_size=TOKENIZER.vocab_size,
)
FILES = ["config.json", "model.safetensors", "source_tokenizer.json", "target_tokenizer.json"]


def make_params(config: ModelConfig = CONFIG, seed: int = 0) -> dict:
    return init_params(build_model(config, dtype="float32"), jax.random.key(seed))


def filled(value: float) -> dict:
    """Parameters that tell which save they are from, in every entry."""
    return jax.tree.map(lambda leaf: np.full(leaf.shape, value, np.float32), make_params())


def save(folder: Path, params: dict) -> None:
    save_model(folder, CONFIG, params, TOKENIZER, TOKENIZER)


def saved_value(folder: Path) -> float:
    """The one value that all parameters of the stored model have."""
    values = {float(entry) for leaf in jax.tree.leaves(load_model(folder).params) for entry in np.unique(leaf)}
    assert len(values) == 1, f"parameters of several saves: {values}"
    return values.pop()
