"""Looks at everything that only an accelerator can show: kernels, training, decoding, speed. `make check-accelerator`.

Exit status: 0 if all held, 1 if something did not, 3 if there is no accelerator and so nothing was run.
"""

import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence

import jax

from benchmarks import checks, machine
from benchmarks.cases import CASES, TrainingCase
from benchmarks.checks import Check
from benchmarks.decoding import measure_decoding
from benchmarks.flops import peak_flops
from benchmarks.train_tfm import Trainer, model_config, peak_memory
from tfm.config import ModelConfig
from tfm.nn.attention import Kernel

NOTHING_RUN = 3


def main(argv: Sequence[str] | None = None) -> int:
    if sys.argv[1:] if argv is None else argv:
        print("error: expected no arguments", file=sys.stderr)
        return 2
    try:
        device = jax.devices()[0]
    except (RuntimeError, AssertionError) as error:  # the latter where JAX_PLATFORMS asks for what is not installed
        print(f"nothing was run: JAX could not start a backend: {error or 'none is installed for JAX_PLATFORMS'}")
        return NOTHING_RUN
    if device.platform == "cpu":
        print("nothing was run: JAX sees no accelerator here, only the CPU. The extras cuda13, cuda12 and tpu bring")
        print("what it needs to see one: pip install -e '.[cuda13]'")
        return NOTHING_RUN

    began = time.perf_counter()
    platform = " ".join(device.client.platform_version.split())
    print(f"{device.device_kind} ({platform}), jax {jax.__version__}; one device is used")
    failed = report(checks.check_attention(checks.ATTENTION_CASES, kernels(device), dtypes(device)))
    failed += report(checks.check_training(steps=200, loss_limit=0.1, right_share=0.95))
    failed += report(benchmark(device))
    print(f"{time.perf_counter() - began:.0f} s; " + (f"{failed} checks FAILED" if failed else "all checks passed"))
    return 1 if failed else 0


def report(results: Iterator[Check]) -> int:
    """Prints each as it comes; returns how many failed."""
    failed = 0
    for check in results:
        print(check, flush=True)
        failed += not check.passed
    return failed


def kernels(device: jax.Device) -> tuple[Kernel, ...]:
    """Those that this device should serve."""
    on_nvidia = device.platform == "gpu" and "cuda" in device.client.platform_version.lower()
    return ("plain", "xla", "cudnn") if on_nvidia else ("plain", "xla")


def dtypes(device: jax.Device) -> tuple[str, ...]:
    return ("float32", "bfloat16", "float16") if device.platform == "gpu" else ("float32", "bfloat16")


def benchmark(device: jax.Device) -> Iterator[Check]:
    """Speeds, for reading; a check fails only where one could not be measured."""
    rate = None
    with checks.guarded("matmul") as guard:
        rate = machine.matmul_rate("bfloat16")
        bandwidth = machine.read_bandwidth(1 << 30)
        detail = f"{rate / 1e12:.1f} TFLOP/s in bfloat16 at best; reads {bandwidth / 1e9:.0f} GB/s"
        guard.check = Check(guard.name, True, detail)
    yield guard.check
    base = CASES["base"]
    for case in (base, dataclasses.replace(base, rows=128)):
        with checks.guarded(f"training base, {case.rows} x {case.target_tokens} tokens") as guard:
            guard.check = Check(guard.name, True, training_speed(case, rate, peak_flops(device.device_kind)))
        yield guard.check
    for rows in (1, 32, 256):
        with checks.guarded(f"decoding base, greedy, batch {rows}, source 32, 64 new tokens") as guard:
            guard.check = Check(guard.name, True, decoding_speed(model_config(base), rows=rows))
        yield guard.check


def training_speed(case: TrainingCase, matmul_rate: float | None, peak: float | None, *, steps: int = 30) -> str:
    """Trains for three rounds in the backend's own dtype, and says how fast the fastest was."""
    trainer = Trainer(case, "auto")
    seconds = min(trainer.run(steps)["seconds"] for _ in range(3)) / steps
    flops_per_second = trainer.flops_per_step / seconds
    mfu = "MFU unknown: no peak is known for this device" if peak is None else f"MFU {flops_per_second / peak:.1%}"
    share = "" if matmul_rate is None else f" ({flops_per_second / matmul_rate:.1%} of matmul)"
    memory = peak_memory()
    peak_bytes = memory.get("device_peak_memory_bytes", memory["peak_memory_bytes"])
    return (
        f"{case.tokens_per_step / seconds:,.0f} target tokens/s in {trainer.dtype}, "
        f"{flops_per_second / 1e12:.2f} model TFLOP/s{share}, {mfu}, "
        f"peak memory {peak_bytes / 2**30:.2f} GiB so far, compiled in {trainer.compile_seconds:.0f} s"
    )


def decoding_speed(config: ModelConfig, *, rows: int, source_tokens: int = 32, new_tokens: int = 64) -> str:
    speed = measure_decoding(config, rows=rows, source_tokens=source_tokens, new_tokens=new_tokens)
    return (
        f"{speed.tokens_per_second:,.0f} tokens/s, {speed.step_seconds * 1e3:.2f} ms a step, "
        f"compiled in {speed.compile_seconds:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
