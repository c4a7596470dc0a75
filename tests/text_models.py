"""Models for tests of texts: one word a token, so that nothing hides between ids and text."""

import random

import jax
import pytest

from tfm import answering
from tfm.answering import Answer
from tfm.config import ModelConfig, preset
from tfm.nn.models import build_model
from tfm.nn.params import init_params
from tfm.pipeline import TextModel
from tfm.tokenizer import Tokenizer

WORDS = [*"abcdefghijkl"]
TOKENIZER = Tokenizer.train([" ".join(WORDS)], kind="word", vocab_size=16)
CONFIG = preset(
    "tiny",
    model_dim=16,
    feed_forward_dim=16,
    num_heads=2,
    encoder_layers=1,
    decoder_layers=1,
    source_vocab_size=TOKENIZER.vocab_size,
    target_vocab_size=TOKENIZER.vocab_size,
    shared_embeddings="none",
    max_source_length=70,
    max_target_length=150,
)
# of a score, summed over up to 100 tokens, in products of different numbers of rows: what the pipeline's docstring says
ATOL_LOG_PROB = {"float32": 1e-4, "bfloat16": 3e-2}


def make_params(config: ModelConfig = CONFIG, seed: int = 1) -> dict:
    """Random parameters, scaled so that answers differ much, and that the end token comes in about half of them."""
    params = init_params(build_model(config, dtype="float32"), jax.random.key(seed))
    return jax.tree.map(lambda leaf: leaf * 2.5 if leaf.ndim == 2 else leaf, params)


def make_model(config: ModelConfig = CONFIG, *, seed: int = 1, **options) -> TextModel:
    return TextModel(config, make_params(config, seed), TOKENIZER, TOKENIZER, **{"weights": "float32", **options})


def random_texts(count: int, *, longest: int = 69, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(0, longest))) for _ in range(count)]


def assert_equal(found: list[Answer], expected: list[Answer], dtype: str = "float32") -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.text, one.tokens, one.finished) == (other.text, other.tokens, other.finished)
        assert one.score == pytest.approx(other.score, abs=ATOL_LOG_PROB[dtype])


def shapes_of_batches(monkeypatch: pytest.MonkeyPatch) -> list:
    """The (rows, source length, capacity) of each batch that is run, in order."""
    seen = []

    def spy(model, params, source, *args, capacity):
        seen.append((*source.shape, capacity))
        return original(model, params, source, *args, capacity=capacity)

    original = answering.generate_rows
    monkeypatch.setattr(answering, "generate_rows", spy)
    return seen
