"""How likely given targets are: one forced pass, and the log-probabilities that the training loss is made of."""

import functools
import typing
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tfm.axes import Array, Float, Int
from tfm.decoding.inference import complete_inputs, teacher_forced
from tfm.nn.logprob import label_log_probs
from tfm.nn.models import Model
from tfm.nn.params import Params


@typing.no_type_check  # a pytree is also built from shapes, specs and other non-arrays
@flax.struct.dataclass
class Scores:
    """What the model thinks of each target."""

    token_log_probs: Float[Array, "B T"]
    """log P of each token, given the source and the tokens before it; 0 behind a target's length."""
    log_probs: Float[Array, "B"]
    """log P of each target: their sum."""


def score(
    model: Model,
    params: Params,
    source: Int[Array | np.ndarray, "B S"] | Sequence[Sequence[int]],
    target: Int[Array | np.ndarray, "B T"] | Sequence[Sequence[int]],
    *,
    source_lengths: Int[Array | np.ndarray, "B"] | Sequence[int] | None = None,
    target_lengths: Int[Array | np.ndarray, "B"] | Sequence[int] | None = None,
) -> Scores:
    """Log-probabilities of targets, as `generate` and `generate_n_best` report them of what they make.

    Compiles once for each model and set of array shapes; works inside a caller's jit.

    Args:
        model: from `tfm.nn.models.build_model`.
        params: its parameters.
        source: ids, padded on the right.
        target: ids without a start token, padded on the right. The end token counts like any other: a target without
            one is scored as the beginning of a longer one.
        source_lengths: real tokens of each source; None: all are real.
        target_lengths: real tokens of each target, at least 1; None: all are real.

    Raises:
        ValueError: not whole numbers of these shapes, lengths that are not within the arrays, more tokens than the
            model accepts, or ids that its vocabularies do not have.
    """
    inputs = complete_inputs(model, source, source_lengths, target, target_lengths, prompt_name="target")
    return _score(model, params, *inputs)


@functools.partial(jax.jit, static_argnames="model")
def _score(
    model: Model, params: Params, source: Array, source_lengths: Array, target: Array, target_lengths: Array
) -> Scores:
    logits: typing.Any = model.apply({"params": params}, source, source_lengths, teacher_forced(model, target))
    is_real = jnp.arange(target.shape[1])[None] < target_lengths[:, None]
    token_log_probs = jnp.where(is_real, label_log_probs(logits, target), 0)
    return Scores(token_log_probs, token_log_probs.sum(axis=1))
