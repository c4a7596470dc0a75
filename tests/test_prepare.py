"""From a description to batches and held-out pairs."""

import dataclasses
from pathlib import Path

import pytest
from tiny_run import tiny_config

from tfm.tokenizer import Tokenizer
from train.prepare import prepare, with_tokenizers


def test_the_model_takes_its_ids_from_the_tokenizers(tmp_path: Path):
    config = tiny_config(tmp_path)
    prepared = prepare(config)
    model = prepared.config.model
    assert (model.source_vocab_size, model.target_vocab_size) == (
        prepared.source_tokenizer.vocab_size, prepared.target_tokenizer.vocab_size,
    )  # fmt: skip
    target = prepared.target_tokenizer
    assert (model.pad_id, model.start_id, model.end_id) == (target.pad_id, target.start_id, target.end_id)
    assert dataclasses.replace(prepared.config, model=config.model) == config
    assert with_tokenizers(prepared.config, prepared.source_tokenizer, target) == prepared.config


def test_given_tokenizers_are_not_made_again(tmp_path: Path):
    source = Tokenizer.train(["abcdefxyz"], kind="char", vocab_size=300)
    target = Tokenizer.train(["A B C D E F X Y Z"], kind="word", vocab_size=300)
    prepared = prepare(tiny_config(tmp_path), (source, target))
    assert (prepared.source_tokenizer, prepared.target_tokenizer) == (source, target)
    assert prepared.config.model.source_vocab_size == source.vocab_size


def test_held_out_sources_that_are_too_long_are_counted_not_answered(tmp_path: Path):
    held_out = tmp_path / "held.tsv"
    held_out.write_text("abc\tC B A\nabcdefabc\tA B\nab\tB A\nab\tA B\nba\t" + "A " * 20 + "\n")
    prepared = prepare(tiny_config(tmp_path, data={"validation": (str(held_out),), "validation_share": 0.0}))
    # A target that is too long has no loss, but its source can be answered.
    assert prepared.examples.sources == ["abc", "ab", "ba"]
    assert prepared.examples.references[1] == ["B A", "A B"]
    assert prepared.notes[-1] == (
        "validation: 5 pairs, 3 kept; left out: 0 empty, 1 with too long a source, 1 with too long a target; "
        "3 of 4 sources to answer"
    )
    assert prepared.validation is not None
    assert sum(int((batch.weights.sum(axis=1) > 0).sum()) for batch in prepared.validation) == 3


@pytest.mark.parametrize("batch", [{"tokens": 16, "accumulation_steps": 2}, {"tokens": 8}])
def test_the_budget_of_training_does_not_limit_what_is_held_out(tmp_path: Path, batch):
    held_out = tmp_path / "held.tsv"
    held_out.write_text("a" * 29 + "\tA B\nab\tB A\n")
    changes = {"data": {"validation": (str(held_out),), "validation_share": 0.0, "max_source_tokens": 30}}
    prepared = prepare(tiny_config(tmp_path, batch=batch, **changes))
    assert prepared.validation is not None
    assert sum(int((batch.weights.sum(axis=1) > 0).sum()) for batch in prepared.validation) == 2


def test_training_pairs_of_which_none_can_be_used_are_reported(tmp_path: Path):
    file = tmp_path / "blank.tsv"
    file.write_text("ab\tA B\n" * 3)
    limits = {"train": (str(file),), "max_target_tokens": 1}
    with pytest.raises(ValueError, match=r"expected pairs that can be trained on, got: 3 pairs, 0 kept"):
        prepare(tiny_config(tmp_path, data={**limits, "validation_share": 0.0}, validation={"max_tokens": 1}))
    file.write_text("ab\t\n" * 3)
    with pytest.raises(ValueError, match=r"the tokenizer of the target: expected text to train"):
        prepare(tiny_config(tmp_path, data={"train": (str(file),), "validation_share": 0.0}))


def test_held_out_pairs_of_which_none_fits_are_an_error(tmp_path: Path):
    held_out = tmp_path / "held.tsv"
    held_out.write_text("abcdefabc\tA B\n")
    with pytest.raises(ValueError, match=r"expected held-out pairs that can be used, got: 1 pairs, 0 kept"):
        prepare(tiny_config(tmp_path, data={"validation": (str(held_out),), "validation_share": 0.0}))


def test_a_warmup_that_the_run_does_not_reach_the_end_of_is_told(tmp_path: Path):
    settings = {"schedule": "inverse-sqrt", "learning_rate": 1e-2}
    for warmup, told in ((10, False), (11, True)):
        notes = prepare(tiny_config(tmp_path, steps=10, optimizer={**settings, "warmup_steps": warmup})).notes
        assert any("comes to 9.09e-03 only, not to 1.00e-02: optimizer.warmup_steps (11)" in n for n in notes) == told


@pytest.mark.parametrize("changes", [{"data": {"validation_share": 0.0}}, {"validation": {"every_steps": 0}}])
def test_nothing_held_out_or_nothing_validated(tmp_path: Path, changes):
    prepared = prepare(tiny_config(tmp_path, **changes))
    assert prepared.validation is None
    assert len(prepared.examples) == 0
