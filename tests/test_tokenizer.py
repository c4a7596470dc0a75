"""Text to ids and back: nothing lost, nothing read as a special token, nothing left to chance."""

import concurrent.futures
import copy
import doctest
import hashlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers
from trained_tokenizers import AWKWARD, CORPUS, KINDS, LOSSLESS, TEXTS, TRAINED

import tfm.tokenizer
from tfm.tokenizer import Tokenizer
from tfm.tokenizer_training import SPECIAL_TOKENS


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_comes_back(kind: str, text: str) -> None:
    assert TRAINED[kind].decode(TRAINED[kind].encode(text)) == text


@pytest.mark.parametrize("kind", LOSSLESS)
@hypothesis.given(text=TEXTS)
def test_any_text_comes_back(kind: str, text: str) -> None:
    tokenizer = TRAINED[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {0, 1, 2, 3} & set(ids)
    assert all(id_ < tokenizer.vocab_size for id_ in ids)
    ended = [tokenizer.start_id, *ids, tokenizer.end_id, tokenizer.pad_id]
    assert tokenizer.decode(ended) == text, "special tokens are left out"


@hypothesis.given(words=st.lists(st.sampled_from(CORPUS[0].split())))
def test_known_words_come_back(words: list[str]) -> None:
    tokenizer = TRAINED["word"]
    assert tokenizer.decode(tokenizer.encode(" ".join(words))) == " ".join(words)
    assert tokenizer.encode("\n \t".join(words)) == tokenizer.encode(" ".join(words))


@hypothesis.given(
    text=st.text() | st.lists(st.sampled_from(["\x1c", "\x85", "\u3000", "\u200b", "house"])).map("".join)
)
def test_words_are_what_python_splits(text: str) -> None:
    tokenizer = TRAINED["word"]
    vocabulary = {piece: id_ for id_, piece in enumerate(tokenizer.tokens(range(tokenizer.vocab_size))) if id_ > 3}
    assert tokenizer.encode(text) == [vocabulary.get(word, tokenizer.unk_id) for word in text.split()]


def test_a_word_that_looks_special_is_unknown() -> None:
    tokenizer = TRAINED["word"]  # its training texts hold "<s>", "</s>", "<pad>" and "<unk>" as words
    assert tokenizer.encode("<s> house </s> <pad> <unk>") == [3, tokenizer.encode("house")[0], 3, 3, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_special_ids_and_pieces(kind: str) -> None:
    tokenizer = TRAINED[kind]
    assert (tokenizer.pad_id, tokenizer.start_id, tokenizer.end_id, tokenizer.unk_id) == (0, 1, 2, 3)
    pieces = tokenizer.tokens(range(tokenizer.vocab_size))
    assert tuple(pieces[:4]) == SPECIAL_TOKENS
    assert not set(SPECIAL_TOKENS) & set(pieces[4:])
    assert tokenizer.decode([0, 1, 2, 3]) == ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [260, 261, 300, 1000, 100_000])
def test_vocabulary_is_never_larger_than_asked(kind: str, vocab_size: int) -> None:
    tokenizer = Tokenizer.train([*CORPUS, "".join(map(chr, range(0x4E00, 0x4F00)))], kind=kind, vocab_size=vocab_size)
    assert tokenizer.vocab_size <= vocab_size
    assert len(set(tokenizer.tokens(range(tokenizer.vocab_size)))) == tokenizer.vocab_size
    if kind != "word":
        assert tokenizer.decode(tokenizer.encode(CORPUS[2])) == CORPUS[2]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_larger_vocabulary_gives_fewer_tokens(kind: str) -> None:
    counts = [
        sum(map(len, Tokenizer.train(CORPUS, kind=kind, vocab_size=size).encode_batch(CORPUS)))
        for size in (260, 300, 360, 420)
    ]
    assert counts[0] == sum(len(text.encode()) for text in CORPUS), "no room for more than the bytes"
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < counts[0] / 2


def test_the_most_frequent_come_first_and_stay() -> None:
    words = Tokenizer.train(["b b b a a c c d"], kind="word", vocab_size=7)
    assert words.tokens(range(7))[4:] == ["b", "a", "c"]
    assert words.encode("a b c d") == [5, 4, 6, 3]
    chars = Tokenizer.train(["ébéèüüü"], kind="char", vocab_size=262)
    assert chars.tokens([260, 261]) == ["ü", "é"]
    assert chars.tokens(chars.encode("bèé")) == ["b", "<0xC3>", "<0xA8>", "é"]


def test_a_combining_mark_stays_with_its_word() -> None:
    word = "\u0939\u093f\u0928\u094d\u0926\u0940"  # "Hindi" in Devanagari: letters and marks in turn
    assert all(
        len(Tokenizer.train([f"{word} {word}"] * 9, kind=kind, vocab_size=400).encode(word)) == 1
        for kind in ("bpe", "unigram")
    )


@pytest.mark.parametrize("kind", KINDS)
def test_training_again_gives_the_same_bytes(kind: str) -> None:
    """In other processes, because the library's hash seeds are drawn once for each."""
    code = (
        "import hashlib, sys; from tfm.tokenizer import Tokenizer; texts = sys.stdin.read().split('|');"
        f"print(hashlib.md5(Tokenizer.train(texts, kind={kind!r}, vocab_size=420).to_json().encode()).hexdigest())"
    )
    here = hashlib.md5(TRAINED[kind].to_json().encode()).hexdigest()
    for threads in ("true", "false"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            input="|".join(CORPUS),
            capture_output=True,
            text=True,
            encoding="utf-8",
            env={**os.environ, "TOKENIZERS_PARALLELISM": threads, "PYTHONUTF8": "1"},
        )
        assert done.stdout.strip() == here, done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_saved_pickled_copied(kind: str, tmp_path: Path) -> None:
    tokenizer = TRAINED[kind]
    tokenizer.save(tmp_path / "tokenizer.json")
    others = [
        Tokenizer.load(tmp_path / "tokenizer.json"),
        Tokenizer.from_json(tokenizer.to_json()),
        pickle.loads(pickle.dumps(tokenizer)),
        copy.deepcopy(tokenizer),
    ]
    for other in others:
        assert other == tokenizer
        assert hash(other) == hash(tokenizer)
        assert other.encode_batch(AWKWARD) == tokenizer.encode_batch(AWKWARD)
    assert tokenizer not in [TRAINED[other] for other in KINDS if other != kind]


def test_the_library_reads_what_is_saved(tmp_path: Path) -> None:
    TRAINED["bpe"].save(tmp_path / "tokenizer.json")
    engine = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert engine.encode(CORPUS[0]).ids == TRAINED["bpe"].encode(CORPUS[0])
    assert engine.decode([0, 1, *engine.encode(CORPUS[0]).ids, 2]) == CORPUS[0]


@pytest.mark.parametrize("kind", KINDS)
def test_one_text_or_many_on_one_thread_or_many(kind: str) -> None:
    tokenizer = TRAINED[kind]
    texts = [*CORPUS, *AWKWARD] * 20
    one_by_one = [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch(texts) == one_by_one
    decoded = [tokenizer.decode(ids) for ids in one_by_one]
    assert tokenizer.decode_batch(one_by_one) == decoded
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == one_by_one
        assert list(pool.map(tokenizer.decode, one_by_one)) == decoded
        assert all(rows == one_by_one for rows in pool.map(tokenizer.encode_batch, [texts] * 8))
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.decode_batch([]) == []


def test_more_texts_than_one_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = TRAINED["char"].encode_batch(CORPUS)
    monkeypatch.setattr(tfm.tokenizer, "_CHUNK", 4)
    assert TRAINED["char"].encode_batch(CORPUS) == whole


def test_ids_as_arrays_and_ids_beyond_the_vocabulary() -> None:
    tokenizer = TRAINED["bpe"]
    ids = tokenizer.encode("house")
    assert tokenizer.decode(np.array(ids, np.int32)) == "house"
    assert tokenizer.decode_batch(np.array([ids, ids])) == ["house", "house"]
    assert tokenizer.decode([np.int64(id_) for id_ in ids]) == "house"
    assert tokenizer.decode([*ids, tokenizer.vocab_size, 10**6]) == "house"
    assert tokenizer.tokens([tokenizer.vocab_size]) == [f"<id {tokenizer.vocab_size}>"]
    assert "".join(tokenizer.tokens(tokenizer.encode(" the wonderful house"))) == " the wonderful house"
    assert tokenizer.decode(tokenizer.encode("é")[:1] + ids) == "\ufffdhouse", "half a character"
    with pytest.raises(ValueError, match="at least 0, got -1"):
        tokenizer.decode([5, -1])


def test_a_subprocess_after_a_batch_says_nothing() -> None:
    """The library warns after a fork that follows its use of threads; starting a program is no such fork."""
    code = (
        "import subprocess, sys; from tfm.tokenizer import Tokenizer;"
        "Tokenizer.train(['a b'] * 99, kind='bpe', vocab_size=300).encode_batch(['a b'] * 99);"
        "subprocess.run([sys.executable, '-c', ''])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_jax_is_not_imported() -> None:
    code = "import sys, tfm.tokenizer; assert not {'jax', 'flax'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_docstrings() -> None:
    assert doctest.testmod(tfm.tokenizer).failed == 0
