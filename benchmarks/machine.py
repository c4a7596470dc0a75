"""What the machine can do at best, measured: the floor that stands beside every other figure.

Run as `python -m benchmarks.machine [--threads N]`.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import MATMUL_SIZES
from benchmarks.worker import available_cores, describe_machine, limit_threads

LEAST_SECONDS = 0.1
"""Calls are repeated up to about this long, so that starting them does not count on a fast device."""


def matmul_rate(dtype: str, sizes: Sequence[int] = MATMUL_SIZES, *, repeats: int = 3) -> float:
    """Floating-point operations a second of the best square product.

    The operands are in `dtype` and the product in float32, as in our layers, with JAX's default precision (on some
    accelerators that computes float32 products in a shorter format).

    Args:
        dtype: of the operands.
        sizes: rows and columns; the best size counts.
        repeats: timings of each size; the best counts.
    """
    accumulator = jnp.int32 if dtype == "int8" else jnp.float32
    product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=accumulator))
    best = 0.0
    for size in sizes:
        a, b = (jax.random.normal(jax.random.key(seed), (size, size)).astype(dtype) for seed in (0, 1))
        best = max(best, 2 * size**3 / _best_seconds(functools.partial(product, a, b), repeats))
    return best


def read_bandwidth(num_bytes: int = 256 << 20, *, repeats: int = 3) -> float:
    """Bytes a second that the device reads from an array too large for its caches.

    The better of two ways to read it once: sums of rows, and a matrix-vector product.
    """
    columns = 8192
    x = jnp.ones((max(num_bytes // 4 // columns, 1), columns), jnp.float32)
    vector = jnp.ones(columns, jnp.float32)
    sums = jax.jit(lambda x: x.reshape(min(64, x.shape[0]), -1).sum(axis=1))
    product = jax.jit(jnp.matmul)
    return x.nbytes / min(_best_seconds(lambda: sums(x), repeats), _best_seconds(lambda: product(x, vector), repeats))


def _best_seconds(run: Callable[[], Any], repeats: int) -> float:
    def seconds(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            result = run()
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls

    jax.block_until_ready(run())  # compiles
    calls = max(1, min(1000, int(LEAST_SECONDS / seconds(1))))
    return min(seconds(calls) for _ in range(repeats))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.machine", description="Measures the machine.")
    parser.add_argument("--threads", type=int, help="default: all cores that this process may use")
    options = parser.parse_args(argv)
    if options.threads is not None:
        try:
            limit_threads(options.threads)
        except ValueError as error:
            parser.error(str(error))
    device = jax.devices()[0]
    record = {
        "record": "machine",
        **describe_machine(options.threads or available_cores()),
        "device_kind": device.device_kind,
        "jax": jax.__version__,
        "matmul_flops_per_second": {dtype: matmul_rate(dtype) for dtype in ("float32", "bfloat16")},
        "read_bytes_per_second": read_bandwidth(),
    }
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
