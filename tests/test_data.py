import collections
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfm.config import ModelConfig
from tfm.tokenizer import Tokenizer
from train.config import BatchConfig, DataConfig, TokenizerConfig
from train.data import (
    EncodedExamples,
    build_tokenizers,
    encode_examples,
    eval_batches,
    load_splits,
    train_batches,
)
from train.tasks import Examples, load_task

DATA = Path(os.environ.get("TFM_DATA", Path(__file__).parents[2] / "shared" / "data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"needs the public corpora: no folder {DATA} (TFM_DATA)")

MODEL = ModelConfig()


def encoded_of(lengths):
    """Pairs of these (source, target) lengths; every id of pair i is i + 3."""
    ids = np.arange(3, len(lengths) + 3, dtype=np.int32)
    sources, targets = (np.array([length[side] for length in lengths], int) for side in (0, 1))
    offsets = [np.concatenate([[0], np.cumsum(side)]) for side in (sources, targets)]
    return EncodedExamples(np.repeat(ids, sources), offsets[0], np.repeat(ids, targets), offsets[1])


def some_pairs(count=500, seed=0):
    random = np.random.default_rng(seed)
    sources = random.integers(1, 30, count)
    targets = np.clip(sources + random.integers(-4, 5, count), 1, None)
    return encoded_of(list(zip(sources.tolist(), targets.tolist(), strict=True)))


def pairs_in(batch):
    """The pairs of a batch from `encoded_of`, in order, after a check of every row."""
    pairs = []
    for row, length in enumerate(batch.source_lengths.tolist()):
        weights = batch.weights[row]
        if length == 0:
            assert not weights.any()
            assert (batch.source[row] == MODEL.pad_id).all()
            continue
        pair = int(batch.source[row, 0])
        assert (batch.source[row, :length] == pair).all()
        assert (batch.source[row, length:] == MODEL.pad_id).all()
        target = int(weights.sum()) - 1
        assert (batch.target_out[row, :target] == pair).all()
        assert batch.target_out[row, target] == MODEL.end_id
        pairs.append(pair - 3)
    return pairs


def digest(batches):
    sha = hashlib.sha256()
    for batch in batches:
        for array in (batch.source, batch.source_lengths, batch.target_in, batch.target_out, batch.weights):
            sha.update(array.tobytes())
    return sha.hexdigest()


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


# Splits


def write(folder, name, text):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def tsv(count):
    return "".join(f"source {number}\ttarget {number}\nsource {number}\tother {number}\n" for number in range(count))


def test_training_without_files_says_what_to_give():
    with pytest.raises(ValueError, match=r"data\.train names no file: give two line-aligned files"):
        load_splits(DataConfig())


def test_only_what_is_wanted_is_read(tmp_path):
    test = (write(tmp_path, "test.tsv", "a\tb\na\tc\nd\te\n"),)
    config = DataConfig(train=(str(tmp_path / "absent"),), test=test, validation_share=0.5)
    splits = load_splits(config, ["test"])
    assert splits.test == Examples(["a", "d"], [["b", "c"], ["e"]])
    assert len(splits.train) == len(splits.validation) == 0
    with pytest.raises(ValueError, match="absent"):
        load_splits(config)


def test_a_share_of_the_sources_is_held_out_with_all_their_answers(tmp_path):
    splits = load_splits(DataConfig(train=(write(tmp_path, "train.tsv", tsv(1_000)),), validation_share=0.2))
    assert 150 < len(splits.validation) < 250
    assert all(len(answers) == 2 for answers in splits.validation.references)
    assert not set(splits.validation.sources) & set(splits.train.sources)
    assert len(splits.train.pairs()) + len(splits.validation.pairs()) == 2_000
    alone = load_splits(DataConfig(train=(str(tmp_path / "train.tsv"),), validation_share=0.2), ["validation"])
    assert alone.validation == splits.validation


def test_validation_files_go_before_a_share(tmp_path):
    train, validation = write(tmp_path, "train.tsv", tsv(100)), write(tmp_path, "validation.tsv", tsv(3))
    splits = load_splits(DataConfig(train=(train,), validation=(validation,), validation_share=0.2))
    assert (len(splits.train), len(splits.validation)) == (200, 3)


def test_a_share_that_holds_nothing_out_is_refused(tmp_path):
    path = write(tmp_path, "train.tsv", "a\tb\n")
    with pytest.raises(ValueError, match="holds out 0 of 1 rows"):
        load_splits(DataConfig(train=(path,), validation_share=1e-9))


def test_line_aligned_test_files_stay_line_by_line(tmp_path):
    paths = write(tmp_path, "a", "Yes.\nYes.\n"), write(tmp_path, "b", "Ja.\nDoch.\n")
    assert load_splits(DataConfig(test=paths), ["test"]).test == Examples(["Yes.", "Yes."], [["Ja."], ["Doch."]])


def test_a_built_in_task_needs_no_files():
    assert load_splits(DataConfig(task="cmudict")) == load_task("cmudict")


# Tokenizers and ids


EXAMPLES = Examples(["ab a", "ba", "abc"], [["x y", "y"], ["z"], ["x"]])


def test_tokenizers_are_trained_on_their_side():
    source, target = build_tokenizers(TokenizerConfig(source_kind="char", target_kind="word"), EXAMPLES)
    assert source.decode(source.encode("cab")) == "cab"
    assert target.encode("x y z") != target.encode("z y x")
    assert target.unk_id in target.encode("ab")
    assert target.unk_id not in target.encode("x y z")


def test_a_shared_tokenizer_knows_both_sides():
    source, target = build_tokenizers(TokenizerConfig(source_kind="char", shared=True), EXAMPLES)
    assert source is target
    assert source.unk_id not in source.encode("abc xyz")


def test_a_tokenizer_file_is_used_as_it_is(tmp_path):
    trained = Tokenizer.train(["q r s"], kind="word", vocab_size=100)
    path = str(tmp_path / "tokenizer.json")
    trained.save(path)
    source, target = build_tokenizers(TokenizerConfig(source_kind="char", target_file=path), EXAMPLES)
    assert target.to_json() == trained.to_json() != source.to_json()
    source, target = build_tokenizers(TokenizerConfig(shared=True, source_file=path), EXAMPLES)
    assert source is target
    assert source.to_json() == trained.to_json()


@pytest.fixture(scope="module")
def char_and_word():
    examples = Examples(["abcdefgh"], [["a b c d e f g h"]])
    return build_tokenizers(TokenizerConfig(source_kind="char", target_kind="word"), examples)


def test_ids_are_those_of_the_texts(char_and_word):
    source, target = char_and_word
    examples = Examples(["abc", "h", "dd"], [["a b", "c"], ["h"], ["d d d"]])
    encoded, report = encode_examples(examples, source, target, 10, 10)
    assert len(encoded) == report.kept == report.total == 4
    for pair, (text, answer) in enumerate(examples.pairs()):
        assert encoded.source(pair).tolist() == [*source.encode(text), source.end_id]
        assert encoded.target(pair).tolist() == target.encode(answer)
    assert encoded.source_lengths.tolist() == [4, 4, 2, 3]
    assert encoded.target_lengths.tolist() == [3, 2, 2, 4]
    assert encoded.source_ids.dtype == encoded.target_ids.dtype == np.int32


def test_left_out_pairs_are_counted_once_each(char_and_word):
    examples = Examples(
        ["abc", "", "a", " ", "abcd", "ab", "abcd", "a"],
        [["a b"], ["a"], ["", "a"], ["a"], ["a b"], ["a b c"], ["a b c d"], ["\t"]],
    )
    encoded, report = encode_examples(examples, *char_and_word, 4, 3)
    counts = (report.kept, report.empty, report.too_long_source, report.too_long_target)
    assert counts == (2, 4, 2, 1)
    assert report.total == len(examples.pairs()) == 9
    assert [len(encoded.source(pair)) for pair in range(2)] == [4, 2]
    assert str(report) == ("9 pairs, 2 kept; left out: 4 empty, 2 with too long a source, 1 with too long a target")


def test_pieces_that_are_encoded_apart_come_together(char_and_word, monkeypatch):
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdefgh"), random.integers(0, 7))) for _ in range(100)]
    examples = Examples(words, [[" ".join(word)] for word in words])
    whole, report = encode_examples(examples, *char_and_word, 6, 6)
    monkeypatch.setattr("train.data._ENCODED_AT_ONCE", 7)
    pieces, again = encode_examples(examples, *char_and_word, 6, 6)
    assert report == again
    assert 0 < report.empty < report.kept
    for name in ("source_ids", "source_offsets", "target_ids", "target_offsets"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(pieces, name))


def test_no_text_gives_no_pairs(char_and_word):
    encoded, report = encode_examples(Examples([], []), *char_and_word, 6, 6)
    assert len(encoded) == report.total == 0
    assert len(eval_batches(encoded, MODEL, BatchConfig())) == 0
    assert list(eval_batches(encoded, MODEL, BatchConfig())) == []
    with pytest.raises(ValueError, match="expected pairs to train on, got none"):
        train_batches(encoded, MODEL, BatchConfig(), seed=0)


# Batches


@settings(max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=120),
    tokens=st.integers(400, 3_000),
    max_shapes=st.integers(1, 8),
    slices=st.integers(1, 4),
    seed=st.integers(-(2**63), 2**63),
)
def test_every_pair_comes_once_an_epoch_within_the_budget(lengths, tokens, max_shapes, slices, seed):
    encoded = encoded_of(lengths)
    config = BatchConfig(tokens=tokens, max_shapes=max_shapes, accumulation_steps=slices)
    batches = train_batches(encoded, MODEL, config, seed=seed)
    evaluated = eval_batches(encoded, MODEL, config)
    assert len(batches.shapes) <= max_shapes
    assert len(evaluated.shapes) <= max_shapes
    if slices == 1:  # evaluation accumulates nothing, and so needs no multiple of the slices
        assert evaluated.shapes == batches.shapes
    first = [batches[index] for index in range(batches.batches_per_epoch)]
    second = [batches[index + batches.batches_per_epoch] for index in range(batches.batches_per_epoch)]
    for epoch, shapes, divisor in (
        (first, batches.shapes, slices),
        (second, batches.shapes, slices),
        (list(evaluated), evaluated.shapes, 1),
    ):
        assert len(epoch) == sum(shape.batches for shape in shapes)
        assert sorted(pair for batch in epoch for pair in pairs_in(batch)) == list(range(len(lengths)))
        seen = collections.Counter((*batch.source.shape, batch.target_in.shape[1]) for batch in epoch)
        assert seen == {(shape.rows, shape.source, shape.target): shape.batches for shape in shapes}
        assert sum(batch.weights.sum() for batch in epoch) == encoded.target_lengths.sum()
        for rows, source, target in seen:
            assert rows * max(source, target) <= tokens
            assert rows % divisor == 0
    positions = sum(batch.source.size + batch.target_in.size for batch in first)
    tokens_of_pairs = encoded.source_lengths.sum() + encoded.target_lengths.sum()
    assert batches.padding_share == pytest.approx(1 - tokens_of_pairs / positions)


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [([(5, 3)], 8), ([(5, 3)] * 3, 8), ([(1, 1)] * 100, 104), ([(5, 3)] * 1_000, 504)],
    ids=["one pair", "fewer than rows", "one batch", "one length"],
)
def test_few_or_equal_pairs(lengths, rows):
    batches = train_batches(encoded_of(lengths), MODEL, BatchConfig(tokens=4096, max_shapes=20), seed=0)
    (shape,) = batches.shapes
    assert shape.rows == rows
    pairs = [pair for index in range(batches.batches_per_epoch) for pair in pairs_in(batches[index])]
    assert sorted(pairs) == list(range(len(lengths)))


def test_order_differs_between_epochs_and_seeds_and_is_the_same_for_the_same():
    encoded = some_pairs()

    def order(seed, epoch):
        batches = train_batches(encoded, MODEL, BatchConfig(tokens=512), seed=seed)
        count = batches.batches_per_epoch
        return [pairs_in(batches[index]) for index in range(epoch * count, (epoch + 1) * count)]

    orders = [order(seed, epoch) for seed in (0, 1, 2**63, -1) for epoch in (0, 1, 1_000_000)]
    assert all(a != b for place, a in enumerate(orders) for b in orders[:place])
    assert order(1, 1) == orders[4]
    shapes = [tuple(map(len, epoch)) for epoch in orders]
    assert len(set(shapes)) > 1, "batches of different shapes are shuffled, too"


def test_batches_are_mixed_anew_each_epoch():
    encoded = encoded_of([(5, 5)] * 400)
    batches = train_batches(encoded, MODEL, BatchConfig(tokens=512), seed=0)
    epochs = [
        {frozenset(pairs_in(batches[epoch * batches.batches_per_epoch + i])) for i in range(batches.batches_per_epoch)}
        for epoch in range(3)
    ]
    assert not epochs[0] & epochs[1]
    assert not epochs[1] & epochs[2]


def test_the_order_is_the_same_everywhere():
    # Golden, to find a change of it: argsort of the first 12 outputs of PCG64 seeded with SeedSequence(7, (0,)) and
    # with SeedSequence(7, (1,)), whose streams NumPy keeps.
    batches = train_batches(encoded_of([(3, 3)] * 12), MODEL, BatchConfig(), seed=7)
    assert pairs_in(batches[0]) == [1, 8, 6, 5, 9, 10, 2, 4, 7, 0, 11, 3]
    assert pairs_in(batches[1]) == [1, 10, 4, 9, 3, 2, 11, 6, 5, 8, 0, 7]


def test_an_iterator_gives_the_batches_in_order_over_epochs():
    batches = train_batches(some_pairs(), MODEL, BatchConfig(tokens=512), seed=3)
    iterator = batches.iterator(threads=3, ahead=7)
    count = 2 * batches.batches_per_epoch + 3
    assert digest(take(iterator, count)) == digest(batches[index] for index in range(count))
    iterator.close()


@pytest.mark.parametrize("ahead", [0, 1, 16])
def test_a_saved_position_is_that_of_the_next_batch(ahead):
    def fresh():
        return train_batches(some_pairs(), MODEL, BatchConfig(tokens=512), seed=3)

    count = fresh().batches_per_epoch
    whole = take(fresh().iterator(ahead=ahead), 2 * count + 5)
    for position in (0, 1, count - 1, count, count + 1, 2 * count):
        iterator = fresh().iterator(ahead=ahead)
        take(iterator, position)
        state = json.loads(json.dumps(iterator.get_state()))
        again = fresh().iterator(ahead=ahead)
        take(again, 3)
        again.set_state(state)
        assert again.get_state() == state
        assert digest(take(again, 5)) == digest(whole[position : position + 5])
        # The position belongs to the caller: what is made ahead does not move it, and the first goes on undisturbed.
        assert digest(take(iterator, 5)) == digest(whole[position : position + 5])
        iterator.close()
        again.close()


RESUMED = """
import json, sys
from test_data import digest, some_pairs, take
from tfm.config import ModelConfig
from train.config import BatchConfig
from train.data import train_batches

iterator = train_batches(some_pairs(), ModelConfig(), BatchConfig(tokens=512), seed=3).iterator()
iterator.set_state(json.loads(sys.argv[1]))
print(digest(take(iterator, 40)))
"""


def test_another_process_goes_on_from_a_saved_position():
    iterator = train_batches(some_pairs(), MODEL, BatchConfig(tokens=512), seed=3).iterator()
    take(iterator, 11)
    state = json.dumps(iterator.get_state())
    expected = digest(take(iterator, 40))
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", RESUMED, state],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTHONHASHSEED": hash_seed},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.strip() == expected


@pytest.mark.parametrize("change", ["data", "budget", "shapes", "seed"])
def test_a_position_in_other_data_is_refused(change):
    def batches(count=500, tokens=512, max_shapes=6, seed=3):
        return train_batches(some_pairs(count), MODEL, BatchConfig(tokens=tokens, max_shapes=max_shapes), seed=seed)

    changes = {"data": {"count": 499}, "budget": {"tokens": 400}, "shapes": {"max_shapes": 2}, "seed": {"seed": 4}}
    state = batches().iterator().get_state()
    batches().iterator().set_state(state)
    with pytest.raises(ValueError, match="other training data"):
        batches(**changes[change]).iterator().set_state(state)


def test_a_model_that_is_too_short_is_refused_and_padding_stays_within_it():
    encoded = encoded_of([(101, 100), (3, 3)])
    batches = train_batches(encoded, MODEL.replace(max_source_length=101, max_target_length=101), BatchConfig(), seed=0)
    assert max(shape.source for shape in batches.shapes) == 101
    assert max(shape.target for shape in batches.shapes) == 101
    with pytest.raises(ValueError, match=r"max_target_length, \(101, 100\), got up to \(101, 101\) tokens"):
        train_batches(encoded, MODEL.replace(max_source_length=101, max_target_length=100), BatchConfig(), seed=0)


def test_a_budget_below_one_row_a_slice_is_refused():
    encoded = encoded_of([(100, 3)])
    model = MODEL.replace(max_source_length=100)
    with pytest.raises(ValueError, match="expected at least 200, a row of 100 tokens"):
        train_batches(encoded, model, BatchConfig(tokens=199, accumulation_steps=2), seed=0)
    many = encoded_of([(length, 2) for length in range(1, 40)])
    with pytest.raises(ValueError, match="expected at least 40, a row of 40 tokens"):
        train_batches(many, MODEL, BatchConfig(tokens=6, max_shapes=3), seed=0)
    assert len(train_batches(many, MODEL, BatchConfig(tokens=40, max_shapes=3), seed=0).shapes) == 3
    (shape,) = train_batches(encoded, MODEL, BatchConfig(tokens=208, accumulation_steps=2), seed=0).shapes
    assert (shape.rows, shape.source) == (2, 104)


def test_the_table_shows_every_shape_and_the_whole():
    batches = train_batches(some_pairs(), MODEL, BatchConfig(tokens=512, max_shapes=3), seed=0)
    head, *rows, whole = batches.describe()
    assert head.split() == ["source", "target", "rows", "pairs", "batches", "padding"]
    for row, shape in zip(rows, batches.shapes, strict=True):
        counts = (shape.source, shape.target, shape.rows, shape.pairs, shape.batches, f"{shape.padding_share:.1%}")
        assert row.split() == list(map(str, counts))
    assert whole.split() == ["500", str(batches.batches_per_epoch), f"{batches.padding_share:.1%}"]
    assert len({len(line) for line in (head, *rows, whole)}) == 1


# Padding on real data


def padding(encoded, max_shapes):
    config = BatchConfig(tokens=4096, max_shapes=max_shapes)
    return train_batches(encoded, MODEL, config, seed=0).padding_share


def test_padding_of_words_is_low():
    train = load_task("cmudict").train
    tokenizers = build_tokenizers(TokenizerConfig(source_kind="char", target_kind="word"), train)
    encoded, report = encode_examples(train, *tokenizers, 64, 64)
    assert report.kept == report.total
    assert padding(encoded, 6) < 0.15 < 0.6 < padding(encoded, 1)
    assert padding(encoded, 12) < padding(encoded, 6)


@needs_data
def test_padding_of_sentences_is_low():
    folder = DATA / "multi30k_en_de"
    train = load_splits(DataConfig(train=(str(folder / "train.en.gz"), str(folder / "train.de.gz")))).train
    tokenizers = build_tokenizers(TokenizerConfig(source_vocab_size=4_000, target_vocab_size=4_000), train)
    encoded, report = encode_examples(train, *tokenizers, 128, 128)
    assert report.kept == report.total
    assert padding(encoded, 6) < 0.2 < 0.6 < padding(encoded, 1)
    assert padding(encoded, 12) < padding(encoded, 6)
