"""Every model that there is, and the function that makes the one which a config describes."""

import typing

from tfm.config import ModelConfig
from tfm.nn import cache as caches
from tfm.nn import layers
from tfm.nn.attention import Kernel, check_kernel
from tfm.nn.cache import CacheDtype
from tfm.nn.param_axes import check_heads
from tfm.nn.recurrent import Recurrent
from tfm.nn.transformer import DecoderOnly, EncoderDecoder
from tfm.sharding import Placement

Model = EncoderDecoder | DecoderOnly | Recurrent


def build_model(
    config: ModelConfig,
    *,
    dtype: str = "auto",
    attention_kernel: Kernel = "auto",
    cache_dtype: str = "auto",
    placement: Placement | None = None,
) -> Model:
    """The model that the config describes.

    Args:
        config: what it computes.
        dtype: of the operands of large products: "float32", "bfloat16", or "auto" for the fastest here.
        attention_kernel: see `tfm.nn.attention`; a recurrent model's attention has no kernels to choose from, and
            computes the same whatever it is.
        cache_dtype: what keys and values lie in between decode steps, of the target and of the source alike:
            "float32", "bfloat16", "int8" (see `tfm.nn.cache`), or "auto" for what the model computes them in, so that
            the cache rounds nothing. Of a recurrent model it is what the encoder's states lie in. `prefill`'s own
            logits come from what is not rounded yet.
        placement: how what it computes lies on many devices: see `tfm.sharding`. None: on one.

    Raises:
        ValueError: a dtype or kernel that there is not, or a kernel that cannot read such a cache, or heads
            that cannot be spread over the devices.
    """
    check_kernel(attention_kernel)
    if placement is not None:
        check_heads(placement, config)
    compute_dtype = layers.compute_dtype(dtype)
    is_recurrent = config.architecture == "recurrent"
    if cache_dtype == "auto":
        cache_dtype = "float32" if is_recurrent else layers.stream_dtype(compute_dtype)
    caches.check_cache_dtype(cache_dtype)
    stored_as = typing.cast(CacheDtype, cache_dtype)
    if is_recurrent:
        return Recurrent(config, compute_dtype, stored_as, placement)
    if cache_dtype == "int8" and attention_kernel in ("xla", "cudnn"):
        raise ValueError(f"expected attention kernel 'auto' or 'plain' for a cache in int8, got {attention_kernel!r}")
    kind = EncoderDecoder if config.architecture == "encoder-decoder" else DecoderOnly
    return kind(config, compute_dtype, attention_kernel, stored_as, placement)
