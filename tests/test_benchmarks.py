import dataclasses
import json
import os
import re
import statistics
import sys

import jax
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from tiny_models import compiled_fast, random_params, tiny_config

from benchmarks import check_accelerator, checks, decode, decoding, machine, start, train, train_tfm, worker
from benchmarks.cases import CASES, TrainingCase, random_pairs
from benchmarks.checks import AttentionCase
from benchmarks.flops import decode_step_cost, peak_flops, train_step_flops
from tfm.batch import Batch
from tfm.nn import attention
from tfm.nn.cache import init_cache, widen
from tfm.nn.models import build_model
from tfm.nn.params import param_shapes
from train.config import LossConfig
from train.loss import batch_loss
from train.optimizer import make_optimizer
from train.step import init_state, make_train_step

UNEVEN = TrainingCase(
    model_dim=128, feed_forward_dim=384, num_heads=4, encoder_layers=1, decoder_layers=2, vocab_size=1000, rows=8,
    source_tokens=24, target_tokens=40,
)  # fmt: skip


def test_operations_of_base_as_counted_by_hand():
    # 16 rows of 64 + 64 tokens; multiplications a token, then rows · Q · M · N·H of attention
    encoder_layer = 4 * 512 * 512 + 2 * 512 * 2048
    decoder_layer = 8 * 512 * 512 + 2 * 512 * 2048
    products = 1024 * (6 * encoder_layer + 6 * decoder_layer + 512 * 32_000)
    attention_pairs = 16 * (6 + 6 + 6) * 64 * 64 * 512
    expected = 6 * products + 12 * attention_pairs
    assert expected == 378_493_992_960
    config = train_tfm.model_config(CASES["base"])
    assert train_step_flops(config, rows=16, source_tokens=64, target_tokens=64) == expected


def operations_of_products(jaxpr: Jaxpr) -> int:
    """2 · rows · columns · depth of every `dot_general`, those of inner jaxprs too; of branches only one is run."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            ((contracted, _), _) = equation.params["dimension_numbers"]
            depth = np.prod([equation.invars[0].aval.shape[axis] for axis in contracted])
            total += 2 * int(depth) * equation.outvars[0].aval.size
        inner = [operations_of_products(inner) for value in equation.params.values() for inner in jaxprs_in(value)]
        total += max(inner, default=0) if equation.primitive.name == "cond" else sum(inner)
    return total


def jaxprs_in(value) -> list[Jaxpr]:
    if isinstance(value, tuple | list):
        return [jaxpr for item in value for jaxpr in jaxprs_in(item)]
    return [value.jaxpr] if isinstance(value, ClosedJaxpr) else [value] if isinstance(value, Jaxpr) else []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_operations_are_those_of_the_train_step(dtype):
    config = train_tfm.train_config(UNEVEN, dtype)
    model = build_model(config.model, dtype=dtype)
    optimizer = make_optimizer(config.optimizer, config.steps)
    state = jax.eval_shape(lambda: init_state(model, optimizer, config))
    step = make_train_step(model, optimizer, config)
    batch = train_tfm.batch_of(random_pairs(UNEVEN, 1)[0])
    counted = train_step_flops(config.model, rows=8, source_tokens=24, target_tokens=40)
    assert operations_of_products(jax.make_jaxpr(step)(state, batch).jaxpr) == counted
    # XLA counts norms, softmaxes, dropout and the optimizer too
    assert 1 < step.lower(state, batch).cost_analysis()["flops"] / counted < 1.05


@pytest.mark.parametrize(
    "changes",
    [dict(num_kv_heads=2), dict(num_kv_heads=1), dict(head_dim=12), dict(gated=True), dict(shared_embeddings="none")],
    ids=str,
)
def test_operations_of_other_models(changes):
    config = tiny_config(**changes)
    rows, source_tokens, target_tokens = 3, 5, 7
    batch = Batch(
        *(np.ones(shape, np.int32) for shape in [(rows, source_tokens), rows] + 2 * [(rows, target_tokens)]),
        np.ones((rows, target_tokens), np.float32),
    )
    model = build_model(config, dtype="float32", attention_kernel="plain")

    def loss(params):
        return batch_loss(model, params, batch, LossConfig(), None).loss_sum

    jaxpr = jax.make_jaxpr(jax.grad(loss))(param_shapes(config)).jaxpr
    counted = train_step_flops(config, rows=rows, source_tokens=source_tokens, target_tokens=target_tokens)
    assert operations_of_products(jaxpr) == counted


@pytest.mark.parametrize("beams", [1, 3])
def test_operations_and_weights_of_a_decode_step(beams):
    """Against the step itself, at a position that fills the cache; its weights are all but what prefill uses alone."""
    config = train_tfm.model_config(UNEVEN)
    model, params = build_model(config, dtype="float32"), param_shapes(config)
    rows, source_tokens, position = 5, 7, 12
    cache = jax.eval_shape(
        lambda: widen(init_cache(config, batch=rows, source_length=source_tokens, capacity=position), beams)
    )
    tokens = jax.ShapeDtypeStruct((rows * beams, 1), np.int32)
    step = jax.make_jaxpr(lambda *given: model.apply({"params": given[0]}, *given[1:], method="decode_step"))
    num_bytes, operations = decode_step_cost(
        config, rows=rows, beams=beams, source_tokens=source_tokens, position=position, weight_bytes=4
    )
    # a hypothesis needs its own keys and values; the step multiplies it with those of its row's other ones, too
    others = 4 * rows * beams * (beams - 1) * position * config.model_dim * config.decoder_layers
    assert operations + others == operations_of_products(step(params, tokens, cache).jaxpr)
    matrices = [params["target_embedding"], params["decoder"]]
    entries = sum(leaf.size for leaf in jax.tree.leaves(matrices) if leaf.ndim == 2)
    unused = 2 * config.decoder_layers * config.model_dim**2
    keys_values = sum(leaf.size for leaf in jax.tree.leaves(cache.layers))
    assert num_bytes == 4 * (entries - unused + keys_values)


def test_operations_of_a_decoder_only_model_are_not_counted():
    with pytest.raises(ValueError, match="expected an encoder-decoder"):
        train_step_flops(tiny_config(architecture="decoder-only"), rows=1, source_tokens=1, target_tokens=1)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", None),
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("TPU v77", None),
        ("cpu", None),
    ],
)
def test_peak_of_a_device(kind, expected):
    assert peak_flops(kind) == expected


def test_every_library_gets_the_same_full_batches():
    first, again = (random_pairs(UNEVEN, 3) for _ in range(2))
    for pairs, same in zip(first, again, strict=True):
        assert all((a == b).all() for a, b in zip(*map(dataclasses.astuple, (pairs, same)), strict=True))
        assert (pairs.source.shape, pairs.target_in.shape) == ((8, 24), (8, 40))
        assert pairs.source.min() > 3
        assert (pairs.target_in[:, 0] == 1).all()
        assert (pairs.target_out[:, -1] == 2).all()
        assert (pairs.target_in[:, 1:] == pairs.target_out[:, :-1]).all()
        assert pairs.target_out[:, :-1].min() > 3
        weights = train_tfm.batch_of(pairs).weights
        assert (weights.shape, weights.min()) == ((8, 40), 1)
    assert (first[0].source != first[1].source).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "bsae"], "invalid choice: 'bsae'"),
        (["--dtype", "float8"], "invalid choice: 'float8'"),
        (["--rounds", "0"], "expected a whole number of at least 1, got '0'"),
        (["--steps", "-1"], "expected a whole number of at least 1, got '-1'"),
        (["--threads", "100000"], "cores that may be used, got 100000"),
        (["--peer", "marian"], "invalid choice: 'marian'"),
        (["--peer", "transformers", "--peer-python", "no/such/python"], "expected a Python interpreter, got 'no/such"),
    ],
)
def test_arguments_that_cannot_be(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        train.main(arguments)
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_peer_that_is_not_installed(monkeypatch, capsys):
    monkeypatch.setitem(train.PEERS, "transformers", train.Peer("nowhere", ("json", "no_such_a", "no_such_b")))
    with pytest.raises(SystemExit) as exit_:
        train.main(["--peer", "transformers"])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert f"needs no_such_a and no_such_b, which {sys.executable} does not have: pip install -e '.[peers]'" in error


@pytest.mark.slow
def test_one_run_prints_its_records(monkeypatch, capsys):
    """With ourselves as the peer: what is tested is who is asked when, and what is made of the answers."""
    for name in ("NPROC", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # to be restored: the command sets them for its workers
    monkeypatch.setattr(train, "MATMUL_SIZES", (64,))
    monkeypatch.setitem(train.PEERS, "transformers", train.Peer("benchmarks.train_tfm", ("jax",)))
    arguments = ["--arch", "tiny", "--dtype", "float32", "--rounds", "3", "--steps", "2", "--peer", "transformers"]
    assert train.main(arguments) == 0
    captured = capsys.readouterr()
    first, ours, peer, ratio = map(json.loads, captured.out.splitlines())

    assert first["record"] == "machine"
    assert first["threads"] == worker.available_cores()
    assert [(record["library"], record["dtype"]) for record in (ours, peer)] == [
        ("tfm", "float32"),
        ("transformers", "float32"),
    ]
    for record in (ours, peer):
        rates = record["target_tokens_per_second_by_round"]
        assert len(rates) == record["rounds"] == 3
        assert record["target_tokens_per_second"] == statistics.median(rates)
        assert record["peak_memory_bytes"] > 50e6
        assert record["compile_seconds"] > 0
        # 6 steps and 2 to warm up, and nearly as bad as guessing among 500
        assert record["last_loss"] == pytest.approx(np.log(500), rel=0.2)
    step_flops = train_step_flops(train_tfm.model_config(CASES["tiny"]), rows=8, source_tokens=16, target_tokens=16)
    assert ours["model_flops_per_step"] == step_flops
    assert ours["model_flops_per_second"] == pytest.approx(ours["target_tokens_per_second"] * step_flops / 128, 1e-3)
    share = ours["model_flops_per_second"] / ours["matmul_flops_per_second"]
    assert ours["share_of_matmul_rate"] == pytest.approx(share, abs=1e-3)
    assert (ratio["record"], ratio["of"], ratio["to"]) == ("ratio", "tfm float32", "transformers float32")
    assert ratio["speed_by_round"] == pytest.approx(
        [a / b for a, b in zip(*(r["target_tokens_per_second_by_round"] for r in (ours, peer)), strict=True)], abs=2e-3
    )
    assert ratio["speed"] == statistics.median(ratio["speed_by_round"])
    assert ratio["peak_memory"] == pytest.approx(ours["peak_memory_bytes"] / peer["peak_memory_bytes"], abs=1e-3)
    turns = [line.split(": ")[2].split()[0] for line in captured.err.splitlines() if "round" in line]
    assert turns == ["tfm", "transformers"] * 3


@pytest.mark.slow
def test_decoding_prints_a_record_for_each_library_and_setting(monkeypatch, capsys):
    monkeypatch.setattr(decode, "available_cores", lambda: 1)
    monkeypatch.setattr(decode, "limit_threads", lambda threads: None)
    monkeypatch.setattr(decode, "MATMUL_SIZES", (64,))
    arguments = ["--arch", "tiny", "--rows", "2", "--source", "5", "--new", "3", "--beams", "1", "2", "--rounds", "1"]
    arguments += ["--dtype", "float32", "int8"]
    assert decode.main(arguments) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    of_a_setting = ["decoding"] * 2 + ["ratio"]
    assert [record["record"] for record in records] == ["machine", *of_a_setting * 2]
    for record in records[1:]:
        assert (record["rows"], record["source_tokens"], record["new_tokens"]) == (2, 5, 3)
        if record["record"] == "decoding":
            assert record["tokens_per_second"] > 0
            assert record["floor_milliseconds"] > 0
            assert record["peak_memory_bytes"] > 0
            assert record["compilations"] > 0
    assert {record["beams"] for record in records[1:]} == {1, 2}


@pytest.mark.slow
def test_the_start_of_an_answer_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(start, "limit_threads", lambda threads: None)
    monkeypatch.setattr(start, "LONG", 128)
    assert start.main(["--arch", "tiny", "--rows", "2", "--rounds", "1"]) == 0
    _, greedy, beams, started = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (greedy["beams"], beams["beams"], greedy["max_tokens"]) == (1, 4, [64, 128])
    for record in (greedy, beams):
        short, long = record["milliseconds"]
        assert record["ratio"] == pytest.approx(long / short, rel=0.05)
    assert min(started["first_seconds"], *started["later_seconds_by_round"]) > 0


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--new", "1"], "at least 2 new tokens"), (["--rows", "0"], "at least 1, got '0'")]
)
def test_decoding_that_cannot_be_measured(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        decode.main(arguments)
    assert message in capsys.readouterr().err


def test_a_worker_that_fails_says_so(capfd):
    with pytest.raises(worker.WorkerError, match=r"benchmarks\.no_such_worker ended with exit status 1"):
        worker.Worker("benchmarks.no_such_worker", {})
    assert "No module named" in capfd.readouterr().err


def test_peak_memory_covers_what_is_held():
    before = worker.peak_memory_bytes()
    held = np.ones((before + (64 << 20)) // 8)
    assert worker.peak_memory_bytes() >= held.nbytes > before


def test_rates_of_the_machine_are_those_of_the_work_and_its_time(monkeypatch):
    monkeypatch.setattr(machine, "_best_seconds", lambda run, repeats: run().size and 0.5)
    assert machine.matmul_rate("bfloat16", (8, 32, 16)) == 2 * 32**3 / 0.5
    assert machine.read_bandwidth(1 << 20) == 2 * (1 << 20)


def test_without_an_accelerator_nothing_is_run(monkeypatch, capsys):
    if jax.default_backend() != "cpu":
        pytest.skip("there is an accelerator")
    monkeypatch.setattr(check_accelerator, "report", pytest.fail)
    assert check_accelerator.main([]) == 3
    assert capsys.readouterr().out.startswith("nothing was run: JAX sees no accelerator here")


TINY_ATTENTION = (
    AttentionCase(name="cross", rows=3, queries=5, keys=7, heads=4, kv_heads=2, head_dim=8, padded=True),
    AttentionCase(name="causal", rows=2, queries=6, keys=6, heads=2, kv_heads=2, head_dim=8, causal=True, padded=True),
)


def test_kernels_agree_here_too():
    with compiled_fast():
        results = list(checks.check_attention(TINY_ATTENTION, ("plain", "xla"), ("float32", "bfloat16")))
    assert [str(check) for check in results if not check.passed] == []
    assert len({check.name for check in results}) == 8


def test_a_kernel_that_ignores_padding_is_found(monkeypatch):
    right = attention._xla

    def wrong(query, keys_values, visible, *others):
        return right(query, keys_values, dataclasses.replace(visible, key_lengths=None), *others)

    monkeypatch.setattr(attention, "_xla", wrong)
    case = dataclasses.replace(TINY_ATTENTION[0], keys=9)
    results = list(checks.check_attention([case], ("plain", "xla"), ("float32",)))
    assert [check.passed for check in results] == [True, False]
    assert str(results[1]).startswith("FAILED attention xla, float32, cross: ")


def test_a_kernel_that_cannot_serve_is_a_failed_check_and_not_the_end():
    if jax.default_backend() != "cpu":
        pytest.skip("there is an accelerator")
    (check,) = checks.check_attention(TINY_ATTENTION[:1], ("cudnn",), ("bfloat16",))
    assert not check.passed
    assert "ValueError" in check.detail
    assert "needs an NVIDIA GPU" in check.detail


def test_not_a_number_fails_a_comparison():
    with checks.guarded("name") as guard:
        guard.compare({"a": float("nan"), "b": 0.0}, 1.0)
    assert not guard.check.passed
    assert guard.check.detail.startswith("a off by nan")
    assert checks.relative_error(np.array([np.nan, 1]), np.ones(2)) == np.inf


def test_decoding_is_checked_with_and_without_the_cache(monkeypatch):
    config = tiny_config()
    model, params = build_model(config, dtype="float32"), random_params(config)

    def passed(right_share: float) -> list[bool]:
        with compiled_fast():
            return [check.passed for check in checks.check_decoding(model, params, right_share=right_share, rows=4)]

    assert passed(0.0) == [True, True, True]

    def forgetful(model, params, tokens, cache):
        return checks_decode_step(model, params, tokens, cache)[0], cache

    checks_decode_step = checks.decode_step
    monkeypatch.setattr(checks, "decode_step", forgetful)
    assert passed(1.0) == [False, False, True]


@pytest.mark.slow
def test_training_is_checked_by_its_loss():
    config = checks.REVERSE_MODEL.replace(model_dim=16, feed_forward_dim=16, encoder_layers=1, decoder_layers=1)
    with compiled_fast():
        results = list(checks.check_training(steps=3, loss_limit=0.1, right_share=0.0, config=config, rows=8))
    assert [check.passed for check in results] == [False] + [True] * (len(results) - 1)
    assert re.fullmatch(r"[23]\.\d{4}, less than 0\.1", results[0].detail)  # guessing among 16 is 2.77
    assert len(results) in (4, 7)  # decoded in one dtype or in two


def test_decoding_speed_is_of_as_many_tokens_as_were_asked_for():
    speed = decoding.measure_decoding(tiny_config(), rows=2, source_tokens=3, new_tokens=4, dtype="float32", repeats=1)
    assert speed.tokens_per_second > 0
    assert speed.compile_seconds > 0
    with pytest.raises(ValueError, match="at least 2 new tokens, got 1"):
        decoding.measure_decoding(tiny_config(), rows=2, source_tokens=3, new_tokens=1)
