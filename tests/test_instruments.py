"""What the loop measures itself with."""

import json
import math
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import tiny_config

from train.instruments import Clock, Compilations, Made, Window, count_positions
from train.prepare import prepare
from train.step import StepMetrics

number = st.floats(0.125, 16, width=32)
steps = st.lists(st.tuples(number, number, st.integers(0, 500), st.booleans()), min_size=1, max_size=8)


def metrics_of(loss: float, nll: float, tokens: int, finite: bool) -> StepMetrics:
    return StepMetrics(
        loss=np.float32(loss if finite else math.nan),
        nll=np.float32(nll if finite else math.inf),
        gradient_norm=np.float32(1.5),
        learning_rate=np.float32(0.25),
        target_tokens=np.float32(tokens),
        finite=np.bool_(finite),
    )


def row_of(made: list[tuple], *, restart_at: int | None = None) -> dict:
    window = Window({})
    for step, numbers in enumerate(made):
        if step == restart_at:
            window = Window(json.loads(json.dumps(window.sums)))
        metrics = metrics_of(*numbers)
        window.add(metrics, Made(step, metrics, positions=1000, tokens=numbers[2]))
    row = window.row(metrics, 7, seconds=2.0)
    del row["tokens_per_second"]
    return row


def test_the_rate_after_a_restart_counts_the_time_since():
    window, metrics = Window({"tokens": 5.0, "positions": 9.0}, begun=1000.0), metrics_of(1.0, 1.0, 300, True)
    window.add(metrics, Made(1, metrics, positions=400, tokens=300))
    assert window.row(metrics, 1, seconds=1010.0)["tokens_per_second"] == 30


@given(steps, st.integers(0, 7))
def test_a_row_is_the_mean_over_tokens_and_the_same_after_a_restart(made, restart_at: int):
    row = row_of(made)
    np.testing.assert_equal(row_of(made, restart_at=restart_at), row)
    finite = [numbers for numbers in made if numbers[3]]
    tokens = sum(numbers[2] for numbers in finite)
    assert row["skipped"] == len(made) - len(finite)
    assert row["padding_share"] == pytest.approx(1 - sum(numbers[2] for numbers in made) / (1000 * len(made)))
    if tokens:
        assert row["loss"] == pytest.approx(sum(numbers[0] * numbers[2] for numbers in finite) / tokens)
        assert row["nll"] == pytest.approx(sum(numbers[1] * numbers[2] for numbers in finite) / tokens)
        assert row["perplexity"] == pytest.approx(math.exp(row["nll"]))
    else:
        assert math.isnan(row["loss"])


def test_padding_counted_batch_by_batch_is_that_of_the_plan(tmp_path: Path):
    batches = prepare(tiny_config(tmp_path)).train
    counts = np.array([count_positions(batches[index]) for index in range(batches.batches_per_epoch)])
    positions, tokens = counts.sum(axis=0)
    assert 1 - tokens / positions == pytest.approx(batches.padding_share)


def test_the_clock_counts_training_only(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = Clock(10.0)
    assert clock.seconds == 10.0
    clock.go()
    now[0] += 3
    with clock.paused():
        now[0] += 50
        assert clock.seconds == 13.0
    now[0] += 2
    clock.leave_out(1.5)
    assert clock.seconds == 13.5


def test_compilations_are_those_of_the_counted_calls():
    double = jax.jit(lambda x: x * 2 + 1)
    arrays = [jnp.ones(size) for size in (3, 4, 5)]
    compilations = Compilations()
    with compilations:
        for array in arrays[:2] * 3:
            with compilations.counted():
                double(array)
        double(arrays[2])
    with compilations.counted():
        double(jnp.ones(6))
    assert compilations.count == 2
