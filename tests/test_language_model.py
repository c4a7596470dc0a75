"""A language model: a decoder-only model without sources, which continues texts."""

import dataclasses
import functools
import json
import math
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from command_line import answers, errors, result
from compile_counter import count_compilations
from text_models import ATOL_LOG_PROB, CONFIG, TOKENIZER, make_model
from tiny_run import final_state, recorded_rows

import tfm
from tfm.batch import make_batch
from tfm.decoding.beam import BeamSearch
from tfm.decoding.mbr import MinimumBayesRisk
from tfm.decoding.sampling import Sampling
from tfm.nn.cache import cache_bytes
from tfm.text_constraints import TextConstraints
from train.cli import main
from train.config import BatchConfig, ConfigError, LossConfig, TrainConfig, load_recipe
from train.data import eval_batches
from train.evaluate import held_out_loss
from train.loop import train
from train.loss import batch_loss
from train.plain_text import TextBlocks
from train.progress import Reporter
from train.step import make_eval_step

pytestmark = pytest.mark.usefixtures("compile_fast")

LM = CONFIG.replace(
    architecture="decoder-only", max_source_length=0, max_target_length=64, positions="rope", shared_embeddings="none"
)
TEXTS = ["a b c", "", "e f g h i j k l a b c d e f g h i", "c c c"]


@pytest.fixture(scope="module")
def model():
    return make_model(LM)


@functools.partial(jax.jit, static_argnames="model")
def forward(model, params, ids):
    return model.apply({"params": params}, jnp.zeros((1, 0), jnp.int32), jnp.zeros(1, jnp.int32), ids)


def log_probs(model, ids):
    """[T, V]: of what comes after each of the ids, by NumPy from the logits of one pass."""
    padded = np.zeros((1, 40), np.int32)
    padded[0, : len(ids)] = ids
    logits = np.asarray(forward(model.model, model.params, padded)[0, : len(ids)], np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def ids_of(text):
    return [LM.start_id, *TOKENIZER.encode(text)]


def greedy(model, text, max_tokens):
    ids, score = ids_of(text), 0.0
    for _ in range(max_tokens):
        last = log_probs(model, ids)[-1]
        ids.append(int(last.argmax()))
        score += last.max()
        if ids[-1] == LM.end_id:
            break
    return ids[len(ids_of(text)) :], score


# What it computes


def test_the_loss_of_pairs_is_on_the_target_only():
    """Of a decoder-only model with sources: -log P(target and end | source), from the logits of the joined sequence."""
    model = make_model(CONFIG.replace(architecture="decoder-only", positions="rope"))
    pairs = [([4, 5, 6, 2], [7, 8]), ([9, 2], [10, 11, 12, 13])]
    batch = make_batch([source for source, _ in pairs], [target for _, target in pairs], model.config)
    found = batch_loss(model.model, model.params, batch, LossConfig(label_smoothing=0.0), None)
    expected = 0.0
    for source, target in pairs:
        said = log_probs(model, [*source, model.config.start_id, *target])[len(source) :]
        expected -= sum(said[place, id_] for place, id_ in enumerate([*target, model.config.end_id]))
    assert float(found.weight) == sum(len(target) + 1 for _, target in pairs)
    assert float(found.nll_sum) == pytest.approx(expected, rel=1e-5)


def test_perplexity_is_that_of_the_logits_whatever_the_batches(model):
    ids = np.random.default_rng(0).integers(3, 16, 75).astype(np.int32)
    blocks = TextBlocks(ids, 16, text_bytes=300)
    expected = 0.0
    for start in range(0, 75, 16):
        block = ids[start : start + 16].tolist()
        said = log_probs(model, [LM.start_id, *block[:-1]])
        expected -= sum(said[place, id_] for place, id_ in enumerate(block))
    step = make_eval_step(model.model)
    for tokens in (16, 48, 1000):
        batches = eval_batches(blocks, LM, BatchConfig(tokens=tokens, max_shapes=1))
        found = held_out_loss(step, model.params, batches, text_bytes=batches.text_bytes)
        assert found["loss"] == pytest.approx(expected / 75, rel=1e-6)
        assert found["perplexity"] == pytest.approx(math.exp(expected / 75), rel=1e-5)
        assert found["bits_per_byte"] == pytest.approx(expected / math.log(2) / 300, rel=1e-6)


def test_scores_are_those_of_the_logits_and_follow_the_chain_rule(model):
    found = model.score([""] * len(TEXTS), TEXTS)
    for text, score in zip(TEXTS, found, strict=True):
        ids = ids_of(text)
        said = log_probs(model, ids)
        expected = [said[place, id_] for place, id_ in enumerate(ids[1:])]
        np.testing.assert_allclose(score.token_scores, expected, atol=ATOL_LOG_PROB["float32"])
        assert score.tokens == ids[1:]  # without an end: the text may go on
        assert score.score == pytest.approx(sum(expected), abs=ATOL_LOG_PROB["float32"])
    (whole,), (first,), (rest,) = (model.score([a], [b]) for a, b in (("", "a b c d"), ("", "a b"), ("a b", "c d")))
    assert whole.score == pytest.approx(first.score + rest.score, abs=ATOL_LOG_PROB["float32"])
    assert rest.tokens == whole.tokens[2:]


def test_texts_are_continued_as_without_a_cache_whatever_is_beside_them(model):
    for text, answer in zip(TEXTS, model.generate(TEXTS, max_tokens=12), strict=True):
        ids, score = greedy(model, text, 12)
        assert answer.tokens + [LM.end_id] * answer.finished == ids
        assert answer.score == pytest.approx(score, abs=ATOL_LOG_PROB["float32"])
        # read on, text and answer are the text of all ids
        assert text + answer.text == TOKENIZER.decode(ids_of(text) + ids)


@pytest.mark.parametrize("sampler", [Sampling(top_k=4), BeamSearch(width=3), MinimumBayesRisk(num_samples=3)])
def test_every_way_to_choose_gives_scores_that_score_confirms(model, sampler):
    rules = TextConstraints(no_repeat_ngram=2, min_tokens=2)
    texts = ["a b c", "c c c", "e f"]
    found = model.generate(
        texts, max_tokens=8, sampler=sampler, seed=3, constraints=rules, prefixes=["d e", "d e", "d e f"]
    )
    for answer, scored in zip(found, model.score(texts, found), strict=True):
        again = scored.token_scores[len(scored.tokens) - len(answer.token_scores) :]
        assert sum(again) == pytest.approx(answer.score, abs=ATOL_LOG_PROB["float32"])
        assert len(answer.token_scores) >= 2
        assert answer.text.startswith(" d e")
        assert answer.text.split() == TOKENIZER.decode(answer.tokens).split()


def test_a_stream_comes_to_what_generate_gives(model):
    *states, last = model.stream(TEXTS, max_tokens=9)
    assert last == model.generate(TEXTS, max_tokens=9)
    assert len(states) >= 3
    assert all(one.text.startswith(other.text) for one, other in zip(last, states[2], strict=True))


def test_a_text_and_what_follows_fill_the_model_and_no_more(model):
    long = " ".join(["a"] * 60)
    (answer,) = model.generate([long], max_tokens=64)
    assert len(answer.token_scores) == 1  # 61 ids with the start token are padded to 64, and the last one is never read
    (answer,) = model.generate([" ".join(["a"] * 30)], max_tokens=64, constraints=TextConstraints(min_tokens=33))
    assert len(answer.token_scores) == 33
    with pytest.raises(
        ValueError, match=r"at most 64 tokens \(.*max_target_length\), start token included; text 1 has 65"
    ):
        model.generate(["a", " ".join(["a"] * 64)])
    with pytest.raises(ValueError, match=r"expected prefixes of at most 3 tokens .* a start token and 60 of the text"):
        model.generate([long], prefixes=["a b c d"])


def test_a_text_that_is_too_long_is_cut_to_its_end(model):
    long = " ".join(random.Random(0).choices("abcdefghijkl", k=99))
    with pytest.warns(UserWarning, match="1 of 2 texts cut to 32 tokens, half the model's max_target_length"):
        cut, short = model.generate([long, "a b"], max_tokens=5, long_texts="cut")
    assert cut == model.generate([" ".join(long.split()[-31:])], max_tokens=5)[0]
    assert short.tokens == model.generate(["a b"], max_tokens=5)[0].tokens


def test_what_needs_a_source_is_refused(model):
    with pytest.raises(ValueError, match="a language model: it has no source to be covered"):
        model.generate(["a"], sampler=BeamSearch(coverage=0.2))
    for rules in (TextConstraints(min_ratio=0.5), TextConstraints(max_ratio=2.0)):
        with pytest.raises(ValueError, match="a language model, got min_ratio or max_ratio"):
            model.generate(["a"], constraints=rules)
    with pytest.raises(ValueError, match="to align, got a language model"):
        model.align(["a"], ["b"])


def test_warmup_compiles_all_that_requests_need():
    model = make_model(LM, seed=4, max_batch=2)
    assert model.warmup(max_tokens=10, batch_sizes=[2], source_lengths=range(1, 9)) == len([1, 2, 4, 8])
    with count_compilations() as compilations:
        for words in range(8):
            model.generate([" ".join(["a"] * words)] * 2, max_tokens=10)
    assert compilations.count == 0, compilations.names


def test_shapes_of_texts_are_few_and_padded_by_little():
    config = LM.replace(max_target_length=1024)
    buckets = tfm.buckets.Buckets(config, 64, 10**6)
    padded = {length: buckets.prompt_length(length) for length in range(1, 1025)}
    assert len(set(padded.values())) == 8 + 7
    assert all(length <= room < length + max(length, 128) for length, room in padded.items())
    assert all(room - length < 128 for length, room in padded.items())


def test_the_cache_has_no_place_for_a_source(model):
    size = cache_bytes(LM, batch=1, source_length=0, capacity=64)
    assert size == pytest.approx(2 * 64 * LM.model_dim * LM.decoder_layers * 4, abs=16)
    source = np.zeros((2, 0), np.int32)
    prompt, prompt_lengths = np.array([[1, 4, 5], [1, 6, 0]]), np.array([3, 2])
    exported = jax.export.export(
        jax.jit(lambda prompt, lengths: tfm.prefill(
            model.model, model.params, source, np.zeros(2, np.int32), prompt, lengths, capacity=8
        )[0])
    )(jax.ShapeDtypeStruct((2, 3), "int32"), jax.ShapeDtypeStruct((2,), "int32"))  # fmt: skip
    logits = exported.call(prompt.astype(np.int32), prompt_lengths.astype(np.int32))
    for row, ids in enumerate(([1, 4, 5], [1, 6])):
        found = np.asarray(logits[row, 0], np.float64)
        np.testing.assert_allclose(found - np.log(np.exp(found).sum()), log_probs(model, ids)[-1], atol=1e-4)


def test_a_folder_gives_the_model_back(model, tmp_path):
    model.save(tmp_path / "model")
    loaded = tfm.load(tmp_path / "model", weights="float32")
    assert loaded.config == LM
    assert loaded.generate(TEXTS, max_tokens=5) == model.generate(TEXTS, max_tokens=5)


# What it is described by


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "encoder-decoder"}, "model config: max_source_length must be at least 1"),
        ({"max_source_length": -1}, "model config: max_source_length must be at least 1"),
    ],
)
def test_models_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        LM.replace(**changes)


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        (
            "model",
            {"architecture": "encoder-decoder", "max_source_length": 8},
            "model.architecture must be 'decoder-only'",
        ),
        ("model", {"max_source_length": 8}, "model.max_source_length must be 0 for data.format = 'text'"),
        ("data", {"format": "tsv"}, "data.format must be 'text' for model.max_source_length = 0, got 'tsv'"),
        ("data", {"task": "cmudict"}, "data.format must be 'text' for model.max_source_length = 0"),
        ("validation", {"metric": "bleu"}, "validation.metric must be 'loss' for data.format = 'text'"),
        ("data", {"max_target_tokens": 999}, r"data.max_target_tokens \(999\) must be at most model.max_target_length"),
        ("tokenizer", {"shared": False}, "tokenizer.shared must be true"),
    ],
)
def test_runs_that_cannot_be(section, changes, message):
    recipe = load_recipe("language-model")
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(recipe, **{section: dataclasses.replace(getattr(recipe, section), **changes)})


# How it is trained


def rhyme(seed=0):
    """Lines that do not repeat each other, of a few words."""
    draw = random.Random(seed)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "big", "red", "birds"]
    return "".join(" ".join(draw.sample(words, 5)) + " .\n" for _ in range(20))


def tiny_run(folder: Path, **changes) -> TrainConfig:
    book = folder / "book.txt"
    if not book.exists():
        book.write_text(rhyme() * 3)
    recipe = load_recipe("language-model")
    sections = {
        "data": {"train": (str(book),), "max_target_tokens": 32, "validation_share": 0.2},
        "tokenizer": {"source_kind": "char", "source_vocab_size": 300},
        "model": {
            "model_dim": 32, "feed_forward_dim": 64, "num_heads": 2, "decoder_layers": 1, "max_target_length": 64,
            "dropout_rate": 0.2,
        },
        "batch": {"tokens": 256},
        "optimizer": {"warmup_steps": 5, "schedule": "constant"},
        "validation": {"every_steps": 6, "samples": 1, "max_tokens": 4},
        "checkpoint": {"every_steps": 3},
    }  # fmt: skip
    replaced = {name: dataclasses.replace(getattr(recipe, name), **change) for name, change in sections.items()}
    return dataclasses.replace(recipe, **replaced, log_every_steps=3, **changes)


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path):
    quiet = rich.console.Console(quiet=True)
    train(tiny_run(tmp_path, steps=12), tmp_path / "whole", reporter=Reporter(quiet))
    train(tiny_run(tmp_path, steps=6), tmp_path / "resumed", reporter=Reporter(quiet))
    outcome = train(tiny_run(tmp_path, steps=12), tmp_path / "resumed", reporter=Reporter(quiet))
    assert outcome.steps_made == 6
    whole, resumed = final_state(tmp_path / "whole"), final_state(tmp_path / "resumed")
    assert whole.keys() == resumed.keys()
    for name in whole:
        np.testing.assert_array_equal(whole[name], resumed[name], name)
    assert recorded_rows(tmp_path / "whole") == recorded_rows(tmp_path / "resumed")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with book.txt, whose text the run `run` has learned by heart."""
    folder = tmp_path_factory.mktemp("lm")
    (folder / "book.txt").write_text(rhyme())
    (folder / "other.txt").write_text(rhyme(1))
    options = {
        "data.train": folder / "book.txt", "data.validation": folder / "other.txt", "data.test": folder / "other.txt",
        "data.max_target_tokens": 96, "tokenizer.source_kind": "word", "model.model_dim": 48, "model.num_heads": 2,
        "model.feed_forward_dim": 96, "model.decoder_layers": 2, "model.dropout_rate": 0, "batch.tokens": 96,
        "dtype": "float32", "optimizer.warmup_steps": 10, "validation.every_steps": 150, "checkpoint.every_steps": 150,
        "steps": 150,
    }  # fmt: skip
    from tiny_models import compiled_fast

    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    with compiled_fast():
        assert main(["train", "language-model", "--run", str(folder / "run"), *words]) == 0
    return folder


def test_a_text_that_was_learned_by_heart_is_continued_exactly(trained, capsys):
    words = rhyme().split()
    run = str(trained / "run" / "last")
    texts = [" ".join(words[:begun]) for begun in (5, 6, 7)]
    rests = [" " + " ".join(words[begun : begun + 30]) for begun in (5, 6, 7)]
    for options in ([], ["--stream"], ["--beams", "2", "--alpha", "0"]):
        assert answers(capsys, ["generate", run, *texts, "--max-tokens", "30", *options]) == rests


def test_what_is_evaluated_is_what_was_validated(trained, capsys):
    rows = [json.loads(line) for line in (trained / "run" / "metrics.jsonl").read_text().splitlines()]
    (validated,) = (row for row in rows if row["split"] == "validation")
    assert [sample.keys() for sample in validated["samples"]] == [{"source", "hypothesis", "references"}] * 2
    model = str(trained / "run" / "last")
    for split in (["validation"], ["test"], [str(trained / "other.txt")]):
        found = result(capsys, ["evaluate", model, "--json", "--split", *split])
        assert found["metrics"].keys() == {"loss", "perplexity", "bits_per_byte"}
        for name, value in found["metrics"].items():
            assert value == pytest.approx(validated[name], rel=1e-5)
    assert found["tokens"] == len(rhyme(1).split()) + 1
    assert found["bytes"] == len(rhyme(1))
    metrics = found["metrics"]
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    bits = metrics["loss"] * found["tokens"] / math.log(2)
    assert metrics["bits_per_byte"] == pytest.approx(bits / found["bytes"])
    capsys.readouterr()
    assert main(["evaluate", model]) == 0
    assert f"{found['tokens']} tokens of {found['bytes']} bytes" in capsys.readouterr().out


def test_lines_are_scored_as_texts(trained, capsys, monkeypatch):
    run = str(trained / "run" / "last")
    lines = rhyme(1).splitlines()
    found = [float(score) for score in answers(capsys, ["score", run, "--split", "test"])]
    model = tfm.load(run, weights="float32")
    expected = [one.score for one in model.score([""] * len(lines), lines)]
    assert found == pytest.approx(expected, abs=1e-2)
    assert answers(capsys, ["score", run, "--split", str(trained / "other.txt")]) == [f"{score:.4f}" for score in found]
    first = result(capsys, ["score", run, "--json", "--split", str(write(trained / "one.txt", lines[0]))])
    assert (first["source"], first["target"]) == ("", lines[0])
    assert first["tokens"] == lines[0].split()


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_run_says_what_it_is(trained, capsys):
    found = result(capsys, ["info", trained / "run", "--json"])
    assert found["cache"]["source_length"] == 0
    assert found["cache"]["length"] == 128
    assert "bits_per_byte" in found["metrics"]["validation"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "RUN", "--metrics", "bleu"], "expected only the loss"),
        (["evaluate", "RUN", "--beams", "2"], "expected only the loss"),
        (["evaluate", "RUN", "--split", "nowhere.txt"], "nowhere.txt: expected a file that can be read"),
        (["evaluate", "RUN/last", "--split", "LONG"], "LONG: expected text, got an empty file"),
        (["generate", "RUN", "a", "--alignments"], "to align, got a language model"),
        (["generate", "RUN", "a", "--max-ratio", "2"], "min_ratio or max_ratio"),
        (["generate", "RUN", "a", "--beams", "2", "--coverage", "0.1"], "no source to be covered"),
        (["generate", "RUN", "the " * 200], "argument 1: expected at most 128 tokens, the model's longest text"),
        (["train", "language-model"], "needs data: a file of plain text, plain or .gz"),
        (["train", "language-model", "--data.train", "LONG"], "LONG: expected text, got an empty file"),
        (["train", "language-model", "--data.train", "BINARY"], "BINARY, line 1: not UTF-8: byte 0xff"),
        (
            ["train", "language-model", "--data.train", "SHORT", "--data.validation_share", "0"],
            "at least one block of 128 tokens",
        ),
        (["train", "translation", "--data.train", "SHORT"], "plain text is for data.format = 'text'"),
        (["train", "translation", "--data.format", "text", "--data.train", "SHORT"], "model.architecture must be"),
        (["train", "language-model", "--data.train", "SHORT"], "in whole lines"),
    ],
)
def test_mistakes_are_one_line(trained, tmp_path, capsys, arguments, message):
    files = {"LONG": b"", "BINARY": b"\xff\xfe", "SHORT": b"a few\nwords\n" * 3}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    arguments = [word.replace("RUN", str(trained / "run")) for word in arguments]
    arguments = [str(tmp_path / word) if word in files else word for word in arguments]
    run = ["--run", str(tmp_path / "new")] if arguments[0] == "train" else []
    capsys.readouterr()
    assert main([*arguments, *run]) == 2
    assert message in errors(capsys).replace(f"{tmp_path}/", "")
    assert not (tmp_path / "new").exists()
