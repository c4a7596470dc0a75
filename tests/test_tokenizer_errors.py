"""What a caller gets wrong with a tokenizer, and files that are none, are refused in words."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models
from trained_tokenizers import KINDS, TRAINED, word_engine

from tfm.tokenizer import Tokenizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("texts", [[], [""], ["", ""], iter(())])
def test_no_text_to_train_on(kind: str, texts: list[str]) -> None:
    with pytest.raises(ValueError, match="expected text to train"):
        Tokenizer.train(texts, kind=kind, vocab_size=300)


def test_white_space_is_text_but_no_word() -> None:
    assert Tokenizer.train([" "], kind="bpe", vocab_size=300).decode(TRAINED["bpe"].encode("")) == ""
    with pytest.raises(ValueError, match="expected text to train"):
        Tokenizer.train([" ", "\n"], kind="word", vocab_size=300)


@pytest.mark.parametrize(
    ("kind", "vocab_size"), [("bpe", 259), ("unigram", 259), ("char", 259), ("word", 4), ("bpe", -1)]
)
def test_too_small_a_vocabulary(kind: str, vocab_size: int) -> None:
    with pytest.raises(ValueError, match=rf"at least {5 if kind == 'word' else 260} for '{kind}'.*got {vocab_size}"):
        Tokenizer.train(["a"], kind=kind, vocab_size=vocab_size)


def test_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="'unigrm'; the nearest is 'unigram'"):
        Tokenizer.train(["a"], kind="unigrm", vocab_size=300)


@pytest.mark.parametrize("kind", KINDS)
def test_one_string_or_a_lone_surrogate_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="expected several texts, got one string"):
        Tokenizer.train("abc", kind=kind, vocab_size=300)
    with pytest.raises(ValueError, match="lone surrogate"):
        Tokenizer.train(["good", "b\ud800d"], kind=kind, vocab_size=300)
    with pytest.raises(ValueError, match="lone surrogate"):
        TRAINED[kind].encode("b\ud800d")
    with pytest.raises(ValueError, match="lone surrogate"):
        TRAINED[kind].encode_batch(["good", "b\ud800d"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "expected a tokenizer file, got No such file"),
        (b"no json", "expected the JSON of a tokenizer"),
        (b"\xff\xfe", "utf-8"),
        (b"{}", "expected a tokenizer as the tokenizers library writes it"),
        (b"[1, 2]", "expected a tokenizer as the tokenizers library writes it"),
    ],
)
def test_bad_files_are_named(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        Tokenizer.load(path)
    assert str(path) in str(error.value)


WRAPPED = '{"special_tokens": %s, "tokenizer": %s}'


def _with_charsmap(charsmap: str) -> str:
    """A tokenizer whose normalizer is a table that is none: the library panics over it."""
    data = json.loads(word_engine(["<pad>", "</s>", "a"]).to_str())
    return json.dumps({**data, "normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "expected the JSON of a tokenizer"),
        (WRAPPED % ("[]", "{}"), r"expected special_tokens to name some of pad_token, .*, got \[\]"),
        (WRAPPED % ('{"sep_token": "a"}', "{}"), "expected special_tokens to name some of .*'sep_token'"),
        (WRAPPED % ('{"pad_token": ["a"]}', "{}"), "expected special_tokens to name some of"),
        (WRAPPED % ('{"pad_token": "a"}', "{}"), "expected a tokenizer as the tokenizers library writes it"),
    ],
)
def test_a_file_that_was_made_to_do_harm_is_refused(content: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_json(content)


def test_a_panic_of_the_library_is_an_error_like_others() -> None:
    with pytest.raises(ValueError, match="expected a tokenizer as the tokenizers library writes it: Precompiled"):
        Tokenizer.from_json(_with_charsmap("AAAA"))
    panics_later = Tokenizer.from_json(_with_charsmap("BAAAAAAAAAA="))
    with pytest.raises(ValueError, match="expected text that the tokenizer has ids for, got 'a': index out of bounds"):
        panics_later.encode("a")
    with pytest.raises(ValueError, match="expected text that the tokenizer has ids for, got 'a': index out of bounds"):
        panics_later.encode_batch(["a"])


@pytest.mark.parametrize("model", ["word", "unigram"])
def test_a_text_that_a_tokenizer_without_an_unknown_token_cannot_read(model: str) -> None:
    pieces = ["<pad>", "</s>", "a"]
    unigram = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], None, False))
    tokenizer = Tokenizer(word_engine(pieces) if model == "word" else unigram)
    assert tokenizer.encode_batch(["a", "a"]) == [[2], [2]]
    with pytest.raises(ValueError, match=r"expected text that the tokenizer has ids for, got 'zz': .*(UNK|unk)"):
        tokenizer.encode("zz")
    with pytest.raises(ValueError, match=r"expected text that the tokenizer has ids for, got 'zz': .*(UNK|unk)"):
        tokenizer.encode_batch(["a", "zz", "yy"])
