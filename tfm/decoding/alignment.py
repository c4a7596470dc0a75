"""What a model looks at: the attention weights of finished targets, and the alignment of words that they suggest.

The pass is the model's own. At every attention that it goes through, that attention's `weights` are asked with the
arguments of the call, so there is no second forward pass that could come to differ from the first. A recurrent
decoder gives its weights back with what it made of them: one head of one layer.
"""

import functools
import operator
import typing
from collections.abc import Callable, Sequence
from typing import SupportsIndex

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tfm.axes import Array, Float, Int
from tfm.config import ModelConfig
from tfm.decoding.inference import complete_inputs, teacher_forced
from tfm.nn.attention import Attention
from tfm.nn.models import Model
from tfm.nn.params import Params
from tfm.nn.recurrent import Recurrent, RecurrentDecoder
from tfm.nn.transformer import beside_each_other


@typing.no_type_check  # a pytree is also built from shapes, specs and other non-arrays
@flax.struct.dataclass
class AttentionWeights:
    """What every head of every layer looked at; each array in float32, its layers from the first to the last.

    Row t of the decoder's is of the step that predicted target token t. It sums to 1 over what it could see: a row of
    self-attention and a row of cross-attention each, or, in a decoder-only model, both together; to less where the
    window of a recurrent model's attention is predicted. Rows and columns of padding are 0.
    """

    self_attention: Float[Array, "L B N T T"] | None
    """Of the decoder's input: column 0 is the start token, column j the target token j - 1. None in a recurrent
    model."""
    cross_attention: Float[Array, "L B N T S"]
    """Of the source; in a decoder-only model what its self-attention laid on the source."""
    encoder: Float[Array, "L B N S S"] | None
    """The encoder's self-attention, with L its own number of layers; None in a decoder-only and in a recurrent
    model."""


def attention_weights(
    model: Model,
    params: Params,
    source: Int[Array | np.ndarray, "B S"] | Sequence[Sequence[int]],
    target: Int[Array | np.ndarray, "B T"] | Sequence[Sequence[int]],
    *,
    source_lengths: Int[Array | np.ndarray, "B"] | Sequence[int] | None = None,
    target_lengths: Int[Array | np.ndarray, "B"] | Sequence[int] | None = None,
) -> AttentionWeights:
    """The attention weights of one teacher-forced pass over finished targets, by the plain path, without dropout.

    Compiles once for each model and set of array shapes; works inside a caller's jit, and there what is not used of
    the result is not computed. All of it is 4 · L · B · N · (T·T + T·S + S·S) bytes.

    Args:
        model: from `tfm.nn.models.build_model`; its attention kernel does not matter.
        params: its parameters.
        source: ids, padded on the right.
        target: ids without a start token, padded on the right; the end token is one like others.
        source_lengths: real tokens of each source; None: all are real.
        target_lengths: real tokens of each target, at least 1; None: all are real.

    Raises:
        ValueError: as `tfm.decoding.score.score`; or the model has no attention.
    """
    num_attentions(model.config)
    inputs = complete_inputs(model, source, source_lengths, target, target_lengths, prompt_name="target")
    return _attention_weights(model, params, *inputs)


@functools.partial(jax.jit, static_argnames="model")
def _attention_weights(
    model: Model, params: Params, source: Array, source_lengths: Array, target: Array, target_lengths: Array
) -> AttentionWeights:
    num_source, num_target = source.shape[1], target.shape[1]
    is_source = (jnp.arange(num_source)[None] < source_lengths[:, None])[None, :, None]
    is_target = (jnp.arange(num_target)[None] < target_lengths[:, None])[None, :, None, :, None]
    plain = model if isinstance(model, Recurrent) else model.clone(kernel="plain")
    _, by_path = watched(plain, params, source, source_lengths, teacher_forced(model, target))

    def layers(stack: str, attention: str) -> Array:
        return jnp.stack([weights for path, weights in by_path if (path[0], path[-1]) == (stack, attention)])

    if isinstance(model, Recurrent):
        return AttentionWeights(None, jnp.where(is_target, layers("decoder", "cross_attention"), 0), None)
    over_itself = layers("decoder", "self_attention")
    if model.config.has_encoder:
        encoder = jnp.where(is_source[..., None], layers("encoder", "self_attention"), 0)
        over_source = layers("decoder", "cross_attention")
    else:  # the target begins where the row's source ends
        encoder = None
        at_target = (source_lengths[:, None] + jnp.arange(num_target)[None])[None, :, None]
        of_target = jnp.take_along_axis(over_itself, at_target[..., None], axis=3)
        over_source = jnp.where(is_source[..., None, :], of_target[..., :num_source], 0)
        over_itself = jnp.take_along_axis(of_target, at_target[..., None, :], axis=4)
    return AttentionWeights(jnp.where(is_target, over_itself, 0), jnp.where(is_target, over_source, 0), encoder)


def watched(
    model: Model, params: Params, *inputs: typing.Any, method: str | None = None
) -> tuple[typing.Any, list[tuple[tuple[str, ...], Array]]]:
    """What a method of the model gives, and the path and the weights of every attention on the way, in that order."""
    found = []

    def watch(
        call: Callable[..., typing.Any],
        args: tuple[typing.Any, ...],
        kwargs: dict[str, typing.Any],
        context: nn.module.InterceptorContext,
    ) -> typing.Any:
        module = context.module
        if isinstance(module, Attention) and context.method_name == "__call__":
            found.append((module.path, module.weights(*args, **kwargs)))
        result = call(*args, **kwargs)
        if isinstance(module, RecurrentDecoder) and context.method_name == "__call__" and result[1] is not None:
            # queries of W hypotheses lie as they do in a Transformer, side by side
            _, weights, state = result
            width = len(weights) // len(state.position)
            found.append(((*module.path, "cross_attention"), beside_each_other(weights, width)[:, None]))
        return result

    with nn.intercept_methods(watch):
        result = model.apply({"params": params}, *inputs, method=method)
    return result, found


def averaged(
    weights: Float[Array | np.ndarray, "L N T S"], layer: SupportsIndex | None = None
) -> Float[np.ndarray, "T S"]:
    """The mean over heads, of one layer (-1: the last) or, by default, of all.

    Raises:
        ValueError: no such layer.
    """
    weights = np.asarray(weights, np.float32)
    if layer is None:
        return weights.mean(axis=(0, 1))
    check_layer(layer, len(weights))
    return weights[operator.index(layer)].mean(axis=0)


def num_attentions(config: ModelConfig) -> int:
    """How many layers of attention on the source a model has.

    Raises:
        ValueError: none.
    """
    if not config.attends_to_source:
        raise ValueError(
            "expected a model with attention, for alignments are made of its weights, got a recurrent one with "
            f"source_context {config.source_context!r}"
        )
    return 1 if config.architecture == "recurrent" else config.decoder_layers


def check_layer(layer: typing.Any, num_layers: int) -> None:
    """Raises ValueError for a layer that there is not."""
    try:
        is_one = layer is None or -num_layers <= operator.index(layer) < num_layers
    except TypeError:
        is_one = False
    if not is_one:
        raise ValueError(f"expected a layer from {-num_layers} to {num_layers - 1}, or None for all, got {layer!r}")


def word_alignment(
    weights: Float[Array | np.ndarray, "L N T S"],
    source_words: Sequence[int | None],
    target_words: Sequence[int | None],
    *,
    layer: SupportsIndex | None = None,
) -> list[tuple[int, int]]:
    """The source word that each target word looked at most while it was predicted.

    A target word's weights are the mean of its tokens' rows, and a source word has the sum of its tokens' columns. What
    lies on tokens of no word, as the end token, where attention rests when it has nothing to do, counts for nothing.

    Attention was not trained to align, and is no more than a hint. Averaged over heads, the layer before the last
    (`layer=-2`) came nearest to human alignments in Garg et al. 2019, and is the one to try first; the mean of all
    layers, the default, needs no knowledge of the model. Chen et al. 2020 found the step that reads a target token to
    look nearer to its source than the step that predicts it, whose weights these are.

    Args:
        weights: cross-attention of one pair, from `attention_weights`.
        source_words: the word of each source token, counted from 0, or None where it belongs to no word: see
            `Tokenizer.words`.
        target_words: the same of the target.
        layer: -1 for the last; None for the mean of all.

    Returns:
        (source word, target word), at most one pair a target word, in order of the source. A target word that looked
        at no source word has none.

    Example:
        >>> look = jnp.array([[0.5, 0.1, 0.4], [0.3, 0.4, 0.3], [0.1, 0.1, 0.8]])
        >>> word_alignment(look[None, None], [0, 1, 1], [0, 1, None])
        [(0, 0), (1, 1)]

    Raises:
        ValueError: not a word for each token, or no such layer.
    """
    table = averaged(weights, layer)
    for what, words, length in (("target", target_words, table.shape[0]), ("source", source_words, table.shape[1])):
        if len(words) != length:
            raise ValueError(f"expected a word or None for each of {length} {what} tokens, got {len(words)}")
    of_target, of_source = _belongs(target_words), _belongs(source_words)
    if not of_source.shape[1]:
        return []
    table = (of_target / np.maximum(of_target.sum(axis=0), 1)).T @ table @ of_source
    return sorted((int(row.argmax()), word) for word, row in enumerate(table) if row.any())


def _belongs(words: Sequence[int | None]) -> Float[np.ndarray, "tokens words"]:
    """1 where a token belongs to a word."""
    count = max((word for word in words if word is not None), default=-1) + 1
    numbers = np.array([-1 if word is None else word for word in words])
    return (numbers[:, None] == np.arange(count)[None]).astype(np.float32)


def pharaoh(pairs: Sequence[tuple[int, int]]) -> str:
    """Pairs of words as the Pharaoh format has them, which alignment tools read and write.

    Example:
        >>> pharaoh([(0, 0), (2, 1)])
        '0-0 2-1'
    """
    return " ".join(f"{source}-{target}" for source, target in pairs)
