"""The count of floating-point operations that training is measured by, and what devices can do at most."""

from tfm.config import ModelConfig
from tfm.nn.cache import CacheDtype


def train_step_flops(config: ModelConfig, *, rows: int, source_tokens: int, target_tokens: int) -> int:
    """Floating-point operations of one training step of an encoder-decoder: what the model asks for.

    An entry of a weight matrix costs a token 6 operations: a multiplication and an addition forward, and twice that
    backward (Kaplan et al. 2020, section 2.1). Attention adds 12 · Q · M · N · H a row and layer: 4 forward for
    the scores and the weighted sum, 8 backward. Counted in full:

    - encoder matrices on every source token, decoder matrices on every target token, cross-attention's key and value
      matrices on every source token;
    - the output projection on every target token. Looking up an embedding costs nothing;
    - causal attention as if it saw everything, padding as if it were tokens, as is usual.

    Not counted: softmax, norms, activations, biases, dropout, the loss, the optimizer, and anything computed twice to
    save memory.

    Raises:
        ValueError: the config is not an encoder-decoder.
    """
    if config.architecture != "encoder-decoder":
        raise ValueError(f"expected an encoder-decoder, got {config.architecture!r}")
    heads_dim, kv_dim = config.num_heads * config.head_size, config.kv_heads * config.head_size
    query_and_output = 2 * config.model_dim * heads_dim
    keys_and_values = 2 * config.model_dim * kv_dim
    feed_forward = (3 if config.gated else 2) * config.model_dim * config.feed_forward_dim

    encoder_layer = query_and_output + keys_and_values + feed_forward
    decoder_layer = 2 * query_and_output + keys_and_values + feed_forward
    on_source = config.encoder_layers * encoder_layer + config.decoder_layers * keys_and_values
    on_target = config.decoder_layers * decoder_layer + config.model_dim * config.target_vocab_size
    products = rows * (source_tokens * on_source + target_tokens * on_target)

    pairs = config.encoder_layers * source_tokens**2
    pairs += config.decoder_layers * (target_tokens**2 + target_tokens * source_tokens)
    return 6 * products + 12 * rows * pairs * heads_dim


def decode_step_cost(
    config: ModelConfig,
    *,
    rows: int,
    beams: int,
    source_tokens: int,
    position: int,
    weight_bytes: int,
    cache_dtype: CacheDtype = "float32",
) -> tuple[int, int]:
    """The bytes that a decode step must read, and the floating-point operations that it asks for.

    Read are: each weight of the decoder and of the output projection once (not the key and value matrices of
    cross-attention, whose products are in the cache), and keys and values: `position` of each hypothesis so far, and
    the source's, which a row's hypotheses share.

    Raises:
        ValueError: the config is not an encoder-decoder.
    """
    if config.architecture != "encoder-decoder":
        raise ValueError(f"expected an encoder-decoder, got {config.architecture!r}")
    heads_dim, kv_dim = config.num_heads * config.head_size, config.kv_heads * config.head_size
    feed_forward = (3 if config.gated else 2) * config.model_dim * config.feed_forward_dim
    layer = 4 * config.model_dim * heads_dim + 2 * config.model_dim * kv_dim + feed_forward
    entries = config.decoder_layers * layer + config.model_dim * config.target_vocab_size
    hypotheses = rows * beams
    vector_bytes = {"float32": 4 * config.head_size, "bfloat16": 2 * config.head_size, "int8": config.head_size + 4}
    vectors = 2 * config.kv_heads * config.decoder_layers * (hypotheses * position + rows * source_tokens)
    attention = 4 * hypotheses * heads_dim * config.decoder_layers * (position + source_tokens)
    return entries * weight_bytes + vectors * vector_bytes[cache_dtype], 2 * hypotheses * entries + attention


PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}
"""Dense bfloat16 operations a second from the makers' data sheets, by the start of JAX's `device_kind`."""


def peak_flops(device_kind: str) -> float | None:
    """The data sheet's dense bfloat16 rate, by the longest name that the kind starts with; None for an unknown kind."""
    for name in sorted(PEAK_FLOPS, key=len, reverse=True):
        rest = device_kind.removeprefix(name)
        if rest == "" or (rest != device_kind and not rest[0].isalnum()):
            return PEAK_FLOPS[name]
    return None
