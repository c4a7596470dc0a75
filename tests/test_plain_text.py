"""Plain text to blocks: nothing is lost, nothing comes twice, and the order is that of the file."""

import gzip
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfm.config import ModelConfig
from tfm.tokenizer import Tokenizer
from train.config import BatchConfig, DataConfig
from train.data import eval_batches, train_batches
from train.plain_text import TextBlocks, encode_texts, load_texts, prompts_with_continuations, read_text
from train.reading import DataError

MODEL = ModelConfig(architecture="decoder-only", max_source_length=0, max_target_length=64)
BPE = Tokenizer.train(["the cat sat on the mat, the rat sat on the cat"] * 3, kind="bpe", vocab_size=280)
ODD = "\n\n  indented\n\tthe cat\x0c\x85  \u2028 sat </s>\n the\n\n\n mat\n"


def blocks_of(count, block_tokens):
    """Every id is a place in the text."""
    return TextBlocks(np.arange(count, dtype=np.int32), block_tokens, text_bytes=count)


def blocks_in(batches):
    """The real labels of every row, after a check of what is read before each."""
    found = []
    for batch in batches:
        assert batch.source.shape == (len(batch.target_in), 0)
        assert not batch.source_lengths.any()
        for read, said, weights in zip(batch.target_in, batch.target_out, batch.weights, strict=True):
            length = int(weights.sum())
            assert weights.tolist() == [1.0] * length + [0.0] * (len(weights) - length)
            if length:
                assert read[:length].tolist() == [MODEL.start_id, *said[: length - 1]]
                found.append(said[:length].tolist())
    return found


@settings(max_examples=30)
@given(
    count=st.integers(1, 400), block_tokens=st.integers(1, 32), tokens=st.integers(32, 200), seed=st.integers(0, 9),
    slices=st.integers(1, 3),
)  # fmt: skip
def test_an_epoch_has_every_token_once_in_blocks_in_the_order_of_the_text(count, block_tokens, tokens, seed, slices):
    config = BatchConfig(tokens=max(tokens, 34 * slices), max_shapes=1, accumulation_steps=slices)
    blocks = blocks_of(count, block_tokens)
    batches = train_batches(blocks, MODEL, config, seed=seed)
    for epoch in range(2):
        found = blocks_in(batches[epoch * batches.batches_per_epoch + i] for i in range(batches.batches_per_epoch))
        assert list(itertools.chain(*sorted(found))) == list(range(count))
        assert sorted(map(len, found))[1:] == [block_tokens] * (len(found) - 1)
    held_out = eval_batches(blocks, MODEL, config)
    assert list(itertools.chain(*blocks_in(held_out))) == list(range(count))
    assert len(batches.shapes) == len(held_out.shapes) == 1


def test_the_order_of_blocks_changes_from_epoch_to_epoch_and_follows_from_the_seed():
    def epochs(seed):
        batches = train_batches(blocks_of(640, 8), MODEL, BatchConfig(tokens=64, max_shapes=1), seed=seed)
        found = blocks_in(batches[i] for i in range(2 * batches.batches_per_epoch))
        return found[:80], found[80:]

    first, second = epochs(1)
    assert first != second
    assert sorted(first) == sorted(second) != first
    assert epochs(1) == (first, second)
    assert epochs(2) != (first, second)


def test_a_saved_position_goes_on_exactly_and_not_in_another_text():
    config = BatchConfig(tokens=64, max_shapes=1)
    batches = train_batches(blocks_of(640, 8), MODEL, config, seed=1)
    iterator = batches.iterator()
    for _ in range(7):
        next(iterator)
    state = iterator.get_state()
    expected = [next(iterator).target_out for _ in range(9)]  # into the next epoch
    other = batches.iterator()
    other.set_state(state)
    np.testing.assert_array_equal([next(other).target_out for _ in range(9)], expected)
    changed = train_batches(blocks_of(639, 8), MODEL, config, seed=1).iterator()
    with pytest.raises(ValueError, match="the saved position belongs to other training data"):
        changed.set_state(state)
    for one in (iterator, other, changed):
        one.close()


@settings(max_examples=50)
@given(st.lists(st.text(st.sampled_from(" \n\r\tacehst,\x85\u2028é"), min_size=1), min_size=1, max_size=3))
def test_blocks_spell_the_texts_with_an_end_behind_each(texts):
    blocks = encode_texts(tuple(texts), BPE, 8)
    parts = [list(part) for is_end, part in itertools.groupby(blocks.ids, lambda id_: id_ == BPE.end_id) if not is_end]
    assert [BPE.decode(part) for part in parts] == texts
    assert (blocks.ids == BPE.end_id).sum() == len(texts)
    assert blocks.ids[-1] == BPE.end_id
    assert blocks.text_bytes == len("".join(texts).encode())
    assert blocks.target_lengths.sum() == len(blocks.ids)


def test_a_line_has_the_same_ids_alone_and_in_its_text():
    indented = Tokenizer.train(["a\n  b\n  c\n  d"] * 9, kind="bpe", vocab_size=300)
    text = ODD + "a\n  b\n"
    lines = [line + "\n" for line in text.split("\n")[:-1]]
    assert indented.encode_lines(text) == [id_ for line in lines for id_ in indented.encode(line)]
    assert indented.encode_lines(text) != indented.encode(text)  # which has pieces of several lines
    assert indented.decode(indented.encode_lines(text)) == text
    assert indented.encode_lines("") == []


def test_a_file_is_read_with_a_line_feed_behind_each_line(tmp_path):
    for name, content in (
        ("a.txt", "a\r\n\r\nb\u2028c\r\n"), ("b.txt", "a\n\nb\u2028c"), ("c.txt", "\ufeffa\n\nb\u2028c\n"),
        ("d.txt", "a\r\rb\u2028c"),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content.encode())
        assert read_text(tmp_path / name) == "a\n\nb\u2028c\n"
    (tmp_path / "e.gz").write_bytes(gzip.compress(b"a\nb\n"))
    assert read_text(tmp_path / "e.gz") == "a\nb\n"


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=2, max_size=30), share=st.floats(0.01, 0.99),
)  # fmt: skip
def test_a_share_that_is_held_out_is_the_last_lines(tmp_path_factory, lengths, share):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    text = "".join("x" * length + "\n" for length in lengths)
    path.write_text(text)
    config = DataConfig(format="text", train=(str(path),), validation_share=share)
    if (
        text.find("\n", max(int(len(text) * (1 - share)) - 1, 0)) == len(text) - 1
    ):  # the last line is the only one behind it
        with pytest.raises(ValueError, match=r"holds out 0 of .* characters of .*book\.txt, in whole lines"):
            load_texts(config, "validation")
        return
    (kept,), (held_out,) = load_texts(config, "train"), load_texts(config, "validation")
    assert kept + held_out == text
    assert kept.endswith("\n")
    assert kept
    assert held_out
    assert len(held_out) <= share * len(text) + 1
    assert len(held_out) + len(held_out.split("\n")[0]) + max(lengths) + 2 >= share * len(text)
    assert load_texts(config, "train") == (kept,)


def test_files_for_validation_leave_all_of_the_training_text(tmp_path):
    for name in ("train", "val", "test"):
        (tmp_path / f"{name}.txt").write_text(f"{name}\n" * 5)
    paths = {split: (str(tmp_path / f"{name}.txt"),) for split, name in (("train", "train"), ("validation", "val"))}
    config = DataConfig(format="text", **paths, validation_share=0.5)
    assert load_texts(config, "train") == ("train\n" * 5,)
    assert load_texts(config, "validation") == ("val\n" * 5,)
    assert load_texts(config, "test") == ()


def test_the_halves_of_held_out_blocks_are_prompts_and_what_follows():
    blocks = encode_texts(("the cat sat on the mat\n" * 9,), BPE, 16)
    halves = prompts_with_continuations(blocks, BPE, 3)
    assert len(halves) == 3
    for first, second in halves:
        assert first
        assert second
        assert first + second in "the cat sat on the mat\n" * 9
    assert prompts_with_continuations(blocks, BPE, 0) == []
    assert len(prompts_with_continuations(blocks, BPE, 99)) == len(blocks)


@pytest.mark.parametrize(
    ("text", "block_tokens"), [("abc" + "😀" * 40, 16), ("the cat sat\n", 1)], ids=["emoji", "one"]
)
def test_halves_of_characters_make_no_prompt_that_is_too_long(text, block_tokens):
    blocks = encode_texts((text,), BPE, block_tokens)
    halves = prompts_with_continuations(blocks, BPE, 99)
    assert len(halves) < len(blocks)
    assert all(len(BPE.encode(first)) + 1 <= block_tokens for first, _ in halves)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "book.txt: expected text, got an empty file"),
        (b"fine\nbad \xff\n", "book.txt, line 2: not UTF-8: byte 0xff after 4 characters"),
    ],
)
def test_files_that_are_no_text_are_refused(tmp_path, content, message):
    (tmp_path / "book.txt").write_bytes(content)
    with pytest.raises(DataError) as error:
        load_texts(DataConfig(format="text", train=(str(tmp_path / "book.txt"),)), "train")
    assert message in str(error.value)


def test_text_without_tokens_and_no_text_are_refused():
    words = Tokenizer.train(["a b"], kind="word", vocab_size=10)
    with pytest.raises(ValueError, match="expected text with tokens in it, got none"):
        encode_texts(("\n \n", "\n"), words, 8)
    with pytest.raises(ValueError, match=r"data\.train names no file"):
        load_texts(DataConfig(format="text"), "train")
