"""Products of vectors with a weight matrix: where nearly all of a Transformer's time goes, and so written with care.

A weight is an array, [out, in], or int8 with a scale for each output, or lies [in, out] where a CPU multiplies few rows
with it faster that way; `project` multiplies with any. How rows and matrices are laid out for a backend is decided
here, and nowhere in the models.
"""

import functools
import pathlib
import typing

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from tfm.axes import Array, Float, Int, Int8

Dtype = typing.Literal["float32", "bfloat16"]

_CPU_INFO = pathlib.Path("/proc/cpuinfo")
_FEWEST_ROWS = 2
"""XLA's CPU backend multiplies a single row in low precision two to five times as slowly as two."""


@typing.no_type_check  # pytrees are also built from shapes, specs and other non-arrays
@flax.struct.dataclass
class Int8Weight:
    """A matrix in eight bits an entry: entry (o, i) is values[o, i] · scales[o], the scale being max |row| / 127."""

    values: Int8[Array, "O I"]
    scales: Float[Array, "O"]

    def rows(self, ids: Int[Array, "*B"]) -> Float[Array, "*B I"]:
        """Rows of the matrix, in float32: what an embedding looks up."""
        return self.values[ids] * self.scales[ids][..., None]


@typing.no_type_check
@flax.struct.dataclass
class InOutWeight:
    """A float32 matrix whose transpose lies in memory."""

    transposed: Float[Array, "I O"]

    def rows(self, ids: Int[Array, "*B"]) -> Float[Array, "*B I"]:
        """Rows of the matrix: what an embedding looks up."""
        return jnp.moveaxis(self.transposed[:, ids], 0, -1)


@functools.cache
def lies_best_in_out() -> bool:
    """Whether float32 matrices had better lie [in, out] while a model generates: on AMD's CPUs.

    Milliseconds for products of 8 rows with 32,000 × 512 and 512 × 2,048 matrices, two threads of an EPYC with AVX-512:
    4.9 and 0.44 [out, in], 3.4 and 0.25 [in, out]; of 64 rows there is no difference; in bfloat16 and int8 [out, in]
    is the faster. On an Intel Xeon it was in float32, too: 8.1 against 10.6 for 25 million entries.
    """
    return jax.default_backend() == "cpu" and "AuthenticAMD" in cpu_info()


def cpu_info() -> str:
    """What Linux says of the processor, its maker and flags; nothing on other systems."""
    return _CPU_INFO.read_text() if _CPU_INFO.exists() else ""


Weight = Float[Array, "O I"] | Int8Weight | InOutWeight


def quantize(x: Float[Array, "*B I"]) -> tuple[Int8[Array, "*B I"], Float[Array, "*B"]]:
    """Each vector as whole numbers from -127 to 127 and the scale that they are multiplied by; zeros have scale 0."""
    x = x.astype(jnp.float32)
    scales = jnp.abs(x).max(axis=-1) / 127
    return jnp.round(x / jnp.where(scales == 0, 1, scales)[..., None]).astype(jnp.int8), scales


def project(x: Float[Array, "*B I"], weight: Weight, dtype: Dtype) -> Float[Array, "*B O"]:
    """Multiplies x by the transposed weight, accumulated without loss and returned in float32.

    Args:
        x: of any floating dtype; its gradient has the same.
        weight: an array of any floating dtype, [O, I]; or int8: then the vectors of x are rounded to int8, too, each
            with a scale of its own, and there is no gradient; or [I, O], which stays float32 whatever the dtype.
        dtype: what x and an array are rounded to before they are multiplied, and the gradient with them when it comes
            back; in bfloat16 each term of its sums is off by up to 2⁻⁷ of itself.
    """
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(weight, InOutWeight):
        y = jnp.einsum("ri,io->ro", rows.astype(jnp.float32), weight.transposed, preferred_element_type=jnp.float32)
        return y.reshape(*x.shape[:-1], -1)
    is_low = isinstance(weight, Int8Weight) or dtype != "float32"
    missing = _FEWEST_ROWS - len(rows) if is_low and jax.default_backend() == "cpu" else 0
    if missing > 0:
        rows = jnp.pad(rows, ((0, missing), (0, 0)))
    y = _project_int8(rows, weight) if isinstance(weight, Int8Weight) else _project(rows, weight, dtype)
    return y[: len(y) - max(missing, 0)].reshape(*x.shape[:-1], -1)


def _project_int8(x: Array, weight: Int8Weight) -> Array:
    values, scales = quantize(x)
    sums = jax.lax.dot_general(values, weight.values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    return sums.astype(jnp.float32) * scales[:, None] * weight.scales[None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _project(x: Float[Array, "R I"], weight: Float[Array, "O I"], dtype: Dtype) -> Float[Array, "R O"]:
    """`project` with an array.

    The gradient is written out for two reasons. JAX's own would multiply the float32 gradient by upcast operands, so
    that low precision would serve a third of the work; and on a CPU the weight's gradient is made by transposing one
    of its two factors in memory, which had better be the narrower.
    """
    return _project_fwd(x, weight, dtype)[0]


def _project_fwd(x: Array, weight: Array, dtype: Dtype) -> tuple[Array, tuple[Array, ...]]:
    x_low, weight_low = x.astype(dtype), weight.astype(dtype)
    y = jnp.einsum("ri,oi->ro", x_low, weight_low, preferred_element_type=jnp.float32)
    # empty arrays carry the inputs' dtypes, which the gradients must have
    return y, (x_low, weight_low, jnp.zeros(0, x.dtype), jnp.zeros(0, weight.dtype))


def _project_bwd(dtype: Dtype, saved: tuple[Array, ...], gradient: Array) -> tuple[Array, Array]:
    x, weight, x_like, weight_like = saved
    gradient = gradient.astype(dtype)
    x_gradient = jnp.einsum("ro,oi->ri", gradient, weight, preferred_element_type=jnp.float32)
    weight_gradient = jax.lax.platform_dependent(
        gradient, x, cpu=_sum_of_outer_products_on_cpu, default=_sum_of_outer_products
    )
    return x_gradient.astype(x_like.dtype), weight_gradient.astype(weight_like.dtype)


def _sum_of_outer_products(left: Array, right: Array) -> Array:
    """The transposed left times the right: [rows, m] and [rows, n] give [m, n]."""
    return jax.lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _sum_of_outer_products_on_cpu(left: Array, right: Array) -> Array:
    """The same, as XLA's CPU backend makes it fastest: the narrower factor is the one that is transposed in memory.

    Low-precision products also want the summed axis last on the left; otherwise both factors are copied to float32 and
    multiplied in it. Pinned, because XLA would fold a plain transpose into the product again.
    """
    if left.shape[1] > right.shape[1]:
        return _sum_of_outer_products_on_cpu(right, left).T
    if left.dtype == jnp.float32:
        return _sum_of_outer_products(left, right)
    product = jax.lax.dot_general(
        _row_major(left.T), right, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    return _row_major(product)


def _row_major(x: Array) -> Array:
    """Has the matrix lie in memory row after row."""
    return with_layout_constraint(x, Layout((0, 1)))


_project.defvjp(_project_fwd, _project_bwd)
