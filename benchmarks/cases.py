"""What the training benchmark trains, as plain data: the same for us and for a peer. No JAX, no torch."""

import dataclasses
from typing import Any

import numpy as np

LABEL_SMOOTHING = 0.1
DROPOUT_RATE = 0.1
"""On embeddings and on each sublayer's output; none on attention weights or inside the feed-forward layer."""
LEARNING_RATE = 1e-4
BETA1, BETA2, EPSILON = 0.9, 0.98, 1e-9
START_ID, END_ID, FIRST_WORD_ID = 1, 2, 4
MATMUL_SIZES = (2048, 3072, 4096)
"""Rows and columns of the products whose best rate stands for the machine's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingCase:
    """A post-norm encoder-decoder of Vaswani et al. 2017, all three embeddings one matrix, and the shape of its batch.

    Post-norm and with biases everywhere, because then MarianMT has exactly the same parameters.
    """

    model_dim: int
    feed_forward_dim: int
    num_heads: int
    encoder_layers: int
    decoder_layers: int
    vocab_size: int
    rows: int
    source_tokens: int
    target_tokens: int

    @property
    def tokens_per_step(self) -> int:
        """Target tokens, which is what rates are counted in."""
        return self.rows * self.target_tokens

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


CASES = {
    "base": TrainingCase(
        model_dim=512, feed_forward_dim=2048, num_heads=8, encoder_layers=6, decoder_layers=6, vocab_size=32_000,
        rows=16, source_tokens=64, target_tokens=64,
    ),
    "small": TrainingCase(
        model_dim=256, feed_forward_dim=1024, num_heads=4, encoder_layers=3, decoder_layers=3, vocab_size=8_000,
        rows=64, source_tokens=64, target_tokens=64,
    ),
    "tiny": TrainingCase(
        model_dim=64, feed_forward_dim=128, num_heads=4, encoder_layers=1, decoder_layers=1, vocab_size=500,
        rows=8, source_tokens=16, target_tokens=16,
    ),
}  # fmt: skip
"""`tiny` is there to try the scripts out; its figures mean nothing."""


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Teacher-forced random ids of full length: no padding, so that no library gains by skipping it."""

    source: np.ndarray
    """[rows, source_tokens]"""
    target_in: np.ndarray
    """[rows, target_tokens], beginning with the start token"""
    target_out: np.ndarray
    """[rows, target_tokens], ending with the end token"""


def random_pairs(case: TrainingCase, count: int, *, seed: int = 0) -> list[Pairs]:
    """The batches that every library trains on, in turn; the same for the same seed."""
    random = np.random.default_rng(seed)
    batches = []
    for _ in range(count):
        source = random.integers(FIRST_WORD_ID, case.vocab_size, (case.rows, case.source_tokens), dtype=np.int32)
        target = random.integers(FIRST_WORD_ID, case.vocab_size, (case.rows, case.target_tokens), dtype=np.int32)
        target[:, -1] = END_ID
        target_in = np.roll(target, 1, axis=1)
        target_in[:, 0] = START_ID
        batches.append(Pairs(source, target_in, target))
    return batches


def random_sources(vocab_size: int, rows: int, source_tokens: int, *, seed: int = 0) -> np.ndarray:
    """Ids of full length, [rows, source_tokens], for decoding."""
    random = np.random.default_rng(seed)
    return random.integers(FIRST_WORD_ID, vocab_size, (rows, source_tokens), dtype=np.int32)
