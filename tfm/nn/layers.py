"""The parts between attentions: linear maps, norms, the feed-forward layer, embeddings, dropout.

Two dtypes are at work. Operands of large products are cast to a layer's `dtype`, and the products accumulate in
float32. What flows between layers has the dtype that the embedding gave it; norms' statistics and softmaxes are in
float32 whatever flows.
"""

import functools
import math
import typing
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from tfm.axes import Array, Float, Int, KeyArray
from tfm.config import Activation, ModelConfig
from tfm.nn.products import Dtype, InOutWeight, Int8Weight, Weight, cpu_info, project
from tfm.sharding import Placement, constrain

ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}


def compute_dtype(dtype: str) -> Dtype:
    """Resolves "auto" for the default backend: bfloat16 on accelerators; on a CPU whatever its matrix units are for.

    CPUs that multiply bfloat16 in hardware (AMX, AVX-512 BF16) run large products 2 to 4 times as fast in it; others
    emulate it, slower than float32.
    """
    if dtype not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"expected dtype 'auto', 'float32' or 'bfloat16', got {dtype!r}")
    if dtype != "auto":
        return typing.cast(Dtype, dtype)
    if jax.default_backend() != "cpu":
        return "bfloat16"
    flags = cpu_info()
    return "bfloat16" if "amx_bf16" in flags or "avx512_bf16" in flags else "float32"


def stream_dtype(dtype: Dtype) -> Dtype:
    """Of what flows between layers. A CPU has fast bfloat16 products but slow bfloat16 elementwise arithmetic."""
    return "float32" if jax.default_backend() == "cpu" else dtype


def weight_of(module: nn.Module, init: nn.initializers.Initializer, shape: tuple[int, int]) -> Weight:
    """A module's matrix: its parameter `weight`, [out, in], or what `prepare_for_inference` put in its place.

    Raises:
        ValueError: the parameters are those of another model; Flax says so of `weight` only.
    """
    if module.has_variable("params", "weight_in_out"):
        transposed: Array = module.get_variable("params", "weight_in_out")
        if transposed.shape != shape[::-1]:
            raise ValueError(
                f"expected a matrix weight_in_out of shape {shape[::-1]} in {'/'.join(module.path)}, got "
                f"{transposed.shape}: parameters of another model"
            )
        return InOutWeight(transposed)
    return typing.cast(Array, module.param("weight", init, shape, jnp.float32))


class Linear(nn.Module):
    """y = x Wᵀ + b, W lying [out, in] as in PyTorch; see `tfm.nn.products` for how it is multiplied."""

    features: int
    use_bias: bool = True
    dtype: Dtype = "float32"

    @nn.compact
    def __call__(self, x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
        # variance 1 / (mean of in and out), uniform: Glorot and Bengio 2010
        init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform", in_axis=-1, out_axis=-2)
        weight = weight_of(self, init, (self.features, x.shape[-1]))
        y = project(x, weight, self.dtype)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
            y += bias.reshape((1,) * (y.ndim - 1) + (-1,))
        return y.astype(x.dtype)


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019), over the last axis, statistics in float32."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        config = self.config
        features = (x.shape[-1],)
        scale = self.param("scale", nn.initializers.ones, features, jnp.float32)
        y = normalize(x, scale, config.norm == "layernorm", config.norm_epsilon)
        if config.norm == "layernorm" and config.use_bias:
            bias = self.param("bias", nn.initializers.zeros, features, jnp.float32)
            y += bias.reshape((1,) * (x.ndim - 1) + features)
        return y.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def normalize(x: Float[Array, "*B D"], scale: Float[Array, "D"], center: bool, epsilon: float) -> Float[Array, "*B D"]:
    """Divides each vector, less its mean if `center`, by its root mean square, and multiplies by scale: in float32.

    The gradient is written out: it keeps x and two numbers a vector, where JAX's own keeps several arrays of x's size.
    With x̂ the normalized vector and h = gradient · scale it is  (h - mean(h) - x̂ · mean(h · x̂)) / rms.
    """
    return _normalize_fwd(x, scale, center, epsilon)[0]


def _normalize_fwd(x: Array, scale: Array, center: bool, epsilon: float) -> tuple[Array, tuple[Array, ...]]:
    x32 = x.astype(jnp.float32)
    mean = x32.mean(axis=-1, keepdims=True) if center else jnp.zeros((*x.shape[:-1], 1), jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.square(x32 - mean).mean(axis=-1, keepdims=True) + epsilon)
    return (x32 - mean) * inverse_rms * _per_feature(scale, x), (x, scale, mean, inverse_rms)


def _normalize_bwd(center: bool, epsilon: float, saved: tuple[Array, ...], gradient: Array) -> tuple[Array, Array]:
    x, scale, mean, inverse_rms = saved
    normalized = (x.astype(jnp.float32) - mean) * inverse_rms
    scaled = gradient * _per_feature(scale, x)
    x_gradient = scaled - normalized * (scaled * normalized).mean(axis=-1, keepdims=True)
    if center:
        x_gradient -= scaled.mean(axis=-1, keepdims=True)
    scale_gradient = (gradient * normalized).sum(axis=tuple(range(x.ndim - 1)))
    return (x_gradient * inverse_rms).astype(x.dtype), scale_gradient.astype(scale.dtype)


normalize.defvjp(_normalize_fwd, _normalize_bwd)


def _per_feature(scale: Array, x: Array) -> Array:
    return scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))


class FeedForward(nn.Module):
    """activation(x W₁) W₂ (Vaswani et al. 2017, section 3.3), or gated: (activation(x W_gate) · x W_up) W_down."""

    config: ModelConfig
    dtype: Dtype = "float32"
    placement: Placement | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        config = self.config
        linear = functools.partial(Linear, use_bias=config.use_bias, dtype=self.dtype)
        up = self._cut(linear(config.feed_forward_dim, name="up")(x))
        gate = self._cut(linear(config.feed_forward_dim, name="gate")(x)) if config.gated else None

        def activate_and_project(self: FeedForward, up: Array, gate: Array | None) -> Array:
            activation = ACTIVATIONS[config.activation]
            hidden = activation(up) if gate is None else activation(gate) * up
            hidden = Dropout(config.feed_forward_dropout_rate)(hidden)
            return linear(config.model_dim, name="down")(hidden)

        # For the gradient, the hidden units are computed again rather than kept: they are the widest arrays of a layer,
        # and cheap to make.
        return nn.remat(activate_and_project)(self, up, gate)

    def _cut(self, hidden: Array) -> Array:
        return constrain(self.placement, hidden, "batch", *(None,) * (hidden.ndim - 2), "hidden")


class Embedding(nn.Module):
    """A row of the table for each id; and, where the output projection shares the table, a logit for each row."""

    vocab_size: int
    dim: int
    dtype: Dtype = "float32"

    def setup(self) -> None:
        # variance 1/D, so that rows scaled by sqrt(D) and the logits of a shared table both start near variance 1
        init = nn.initializers.normal(1 / math.sqrt(self.dim))
        self.weight = weight_of(self, init, (self.vocab_size, self.dim))

    def __call__(self, ids: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        weight = self.weight
        rows = weight.rows(ids) if isinstance(weight, Int8Weight | InOutWeight) else weight[ids]
        return rows.astype(stream_dtype(self.dtype))

    def logits(self, x: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        return project(x, self.weight, self.dtype)


class Dropout(nn.Module):
    """Zeroes entries with probability `rate` and scales the rest up: on exactly when a "dropout" key is passed."""

    rate: float

    @nn.compact
    def __call__(self, x: Float[Array, "*B"]) -> Float[Array, "*B"]:
        if self.rate == 0 or not self.has_rng("dropout"):
            return x
        return dropout(x, self.rate, self.make_rng("dropout"))


def dropout(x: Float[Array, "*B"], rate: float, key: KeyArray) -> Float[Array, "*B"]:
    """Dropout (Srivastava et al. 2014) from 16 random bits an entry, half of what a float32 uniform would take.

    The rate is met to 1/65,536 and the scale is that of the rate as met, so the expectation is exact.
    """
    num_dropped = min(round(rate * 65_536), 65_535)
    words = jax.random.bits(key, ((x.size + 1) // 2,), jnp.uint32)
    bits = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(-1)[: x.size].reshape(x.shape)
    return jnp.where(bits >= num_dropped, x * (65_536 / (65_536 - num_dropped)), 0).astype(x.dtype)
