"""The legend of axis letters, used in every annotation, einsum and shape suffix of tfm.

==== =============================================================================
B    batch: independent rows
S    source length in tokens, padding included
T    target length in tokens, or the number of new tokens in one decode step
C    cache capacity: the most target tokens a row can hold
L    layers
N    query heads
K    key/value heads (N = K · G; K = N is multi-head, K = 1 multi-query attention)
G    query heads that share one key/value head
H    head dimension
D    model dimension, the width of the residual stream
E    width of a recurrent encoder's states: D, or 2 · D where it reads in both directions
F    feed-forward dimension
V    vocabulary size
W    beam width: hypotheses of one source, lying row after row, so that [BW, …] has B · W rows
R    hypotheses that are returned, or texts that are drawn, for each source
==== =============================================================================

Two more appear where an array has two unrelated lengths: Q, the queries' length, and M, the keys' length (memory).
And P is a number of phrases, M then the length to which they are padded.
"""

import jax
from jaxtyping import Bool, Float, Int, Int8, Shaped

Array = jax.Array

TokenIds = Int[Array, "B T"]
Lengths = Int[Array, "B"]
KeyArray = Shaped[Array, "*key"]
"""A JAX random key, as from `jax.random.key`."""

__all__ = ["Array", "Bool", "Float", "Int", "Int8", "KeyArray", "Lengths", "Shaped", "TokenIds"]
