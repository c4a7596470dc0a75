import json

import pytest

from benchmarks import lineage, lineage_report, lineage_training
from benchmarks.lineage_models import GENERATIONS, POSITIONS, of_budget
from benchmarks.lineage_tasks import source_length, write_pairs
from tfm.nn.params import count_params, param_shapes


@pytest.mark.parametrize("name", [*GENERATIONS, *POSITIONS])
def test_models_have_the_budget(name):
    settings = {**GENERATIONS, **POSITIONS}[name]
    config = of_budget(settings, 300_000, vocab_size=32, max_length=64)
    parameters = count_params(param_shapes(config))
    assert parameters == pytest.approx(300_000, rel=0.1)
    for dim in (config.model_dim - 8, config.model_dim + 8):
        other = of_budget({**settings, "model_dim": dim}, 300_000, vocab_size=32, max_length=64)
        assert abs(parameters - 300_000) <= abs(count_params(param_shapes(other)) - 300_000)


@pytest.mark.parametrize(("task", "rule"), [("reversal", lambda s: s[::-1]), ("sorting", sorted)])
def test_made_pairs_follow_the_rule_and_are_the_same_each_time(task, rule, tmp_path):
    for name in ("one", "two"):
        write_pairs(task, tmp_path / name, train_pairs=300, test_pairs=112, longest=30)
    files = [(tmp_path / "one" / name).read_text() for name in ("train.tsv", "test.tsv")]
    assert files == [(tmp_path / "two" / name).read_text() for name in ("train.tsv", "test.tsv")]
    train, test = ([line.split("\t") for line in text.splitlines()] for text in files)
    assert all(list(rule(source.split())) == target.split() for source, target in train + test)
    assert {source_length(source) for source, _ in train} == set(range(5, 31))
    assert sorted(source_length(source) for source, _ in test) == sorted([*range(5, 61)] * 2)
    long = {source for source, _ in train if source_length(source) > 9}
    assert not long & {source for source, _ in test}


def errors(model, seed, short, long):
    rates = {"5-15": {"ter": short, "wer": 100.0}, "40-60": {"ter": long, "wer": 100.0}}
    return {"record": "errors", "task": "reversal", "model": model, "seed": seed, "parameters": 10, "errors": rates}


def test_claims_as_computed_by_hand():
    records = [
        errors("rnn", 0, 50.0, 90.0), errors("lstm", 0, 10.0, 40.0), errors("lstm", 1, 20.0, 80.0),
        errors("luong", 0, 5.0, 15.0), errors("luong", 1, 5.0, 9.0), errors("bahdanau", 0, 1.0, 33.0),
    ]  # fmt: skip
    (claim,) = lineage_report.claims(records)
    assert (claim["fixed_vector"], claim["attention"]) == ("lstm", "luong")
    assert claim["ratio"] == pytest.approx(60 / 15)
    assert claim["share_closed"] == pytest.approx((60 - 12) / (60 - 15))
    assert "| lstm | 15 (10 to 20) | 60 (40 to 80) |" in lineage_report.table(records)
    assert not list(lineage_report.claims(records[:3]))


@pytest.mark.parametrize(
    "written", ['{"record": "err', '{"record": "errors", "errors": {"5-15": {"ter": 1}', '{"b": 2}']
)
def test_a_line_that_is_not_whole_is_measured_again(written, tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"a": 1}\n' + written)
    lineage.Ledger(path).add({"c": 3})
    assert lineage.Ledger(path).records == [{"a": 1}, {"c": 3}]


@pytest.mark.usefixtures("compile_fast")
@pytest.mark.slow
def test_measures_and_does_not_measure_twice(tmp_path, capsys, monkeypatch):
    command = ["--tiny", "--run", str(tmp_path), "--models", "bahdanau", "--plot"]
    monkeypatch.setattr(lineage, "POSITIONS", {"alibi": POSITIONS["alibi"]})
    monkeypatch.setattr(lineage, "keep_compiled", lambda: None)
    assert lineage.main(command) == 0
    output = capsys.readouterr()
    records = [json.loads(line) for line in output.out.splitlines()]
    kinds = [record["record"] for record in records]
    assert kinds == ["machine", "errors", "perplexity", "training speed", *["decoding"] * 2]
    assert all(record["cache_bytes"] == record["formula_bytes"] for record in records if record["record"] == "decoding")
    caches = {(r["model"], r["length"]): r["cache_bytes"] for r in records if r["record"] == "decoding"}
    dim = of_budget(GENERATIONS["bahdanau"], lineage.TINY.budget, vocab_size=30, max_length=64).model_dim
    carries = 8 * dim * 4 + 64  # 8 rows, one layer; two lengths a row
    assert caches["bahdanau", 8] - carries == 2 * (caches["bahdanau", 4] - carries)
    assert "| bahdanau |" in output.err
    assert (tmp_path / "errors.png").stat().st_size > 10_000
    assert (tmp_path / "costs.png").stat().st_size > 10_000

    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"record": "err')  # a process that was killed
    monkeypatch.setattr(lineage_training, "trained", None)
    assert lineage.main(command) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()][1:] == records[1:]


@pytest.mark.parametrize(
    ("command", "message"),
    [(["--tiny", "--plot"], "--run"), (["--tiny", "--tasks", "cmudict"], "expected tasks of reversal"),
     (["--tiny", "--run", "RUN"], "another size")],
)  # fmt: skip
def test_refuses(command, message, tmp_path, capsys):
    (tmp_path / "size.json").write_text('{"budget": 1}')
    with pytest.raises(SystemExit) as stopped:
        lineage.main([str(tmp_path) if word == "RUN" else word for word in command])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
