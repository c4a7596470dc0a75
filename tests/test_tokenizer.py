"""Text to ids and back: nothing lost, nothing read as a special token, nothing left to chance."""

import concurrent.futures
import copy
import doctest
import hashlib
import json
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
from tokenizers import decoders, models, pre_tokenizers, processors

import tfm.tokenizer
from tfm.tokenizer import Tokenizer
from tfm.tokenizer_training import SPECIAL_TOKENS

LOSSLESS = ("bpe", "unigram", "char")
KINDS = (*LOSSLESS, "word")
DATA = Path(os.environ.get("TFM_DATA", Path(__file__).parents[2] / "shared" / "data"))
T5 = DATA / "tokenizers" / "t5-small" / "tokenizer.json"

CORPUS = [
    "The house is wonderful, and the garden of the house is wonderful too.",
    "Das Haus ist wunderbar, und der Garten des Hauses ist auch wunderbar.",
    "那所房子很漂亮,花园也很漂亮。",
    "घर अद्भुत है और बगीचा भी अद्भुत है।",
    "البيت رائع والحديقة رائعة",
    "<s> </s> <pad> <unk> </s></s></s> <pad><pad>",
    "😀 👩‍👩‍👧‍👦 1234 5678 12 34",
] * 3
TRAINED = {kind: Tokenizer.train(CORPUS, kind=kind, vocab_size=420) for kind in KINDS}

AWKWARD = [
    "",
    " ",
    "  leading, double  and trailing  ",
    "line\nline\r\n\ttab\n\n",
    "nul \0 inside\0",
    "</s>",
    "a</s>b <s><pad> <unk><unk> </s",
    "那所房子",
    "汉字 unseen in training 鑫淼",
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "e\u0301 against \u00e9, \u1e9b\u0323, \ufb01, \u212b",  # NFC and NFKC would change each
    "\u200b\u200d\ufeff\u2028\u3000\x1c\x85",
    "<0x41> <0xE9> ▁ Ġ Ċ [CLS] <extra_id_0>",
    "\U0010ffff\ufffd\ufffe",
]
TEXTS = st.text() | st.lists(st.sampled_from([*AWKWARD, *SPECIAL_TOKENS, *CORPUS]) | st.text(max_size=5)).map("".join)


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


# What a caller gets wrong.


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
    data = json.loads(_engine(["<pad>", "</s>", "a"]).to_str())
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
    tokenizer = Tokenizer(_engine(pieces) if model == "word" else unigram)
    assert tokenizer.encode_batch(["a", "a"]) == [[2], [2]]
    with pytest.raises(ValueError, match=r"expected text that the tokenizer has ids for, got 'zz': .*(UNK|unk)"):
        tokenizer.encode("zz")
    with pytest.raises(ValueError, match=r"expected text that the tokenizer has ids for, got 'zz': .*(UNK|unk)"):
        tokenizer.encode_batch(["a", "zz", "yy"])


# Files of others.


def _engine(pieces: list[str], **model: object) -> tokenizers.Tokenizer:
    engine = tokenizers.Tokenizer(models.WordLevel({piece: id_ for id_, piece in enumerate(pieces)}, **model))
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return engine


def test_special_tokens_by_their_usual_names() -> None:
    bert = Tokenizer(_engine(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "word"], unk_token="[UNK]"))
    assert (bert.pad_id, bert.unk_id, bert.start_id, bert.end_id) == (0, 1, 2, 3)
    other = Tokenizer(_engine(["word", "<eos>", "<bos>", "<pad>"]))
    assert (other.pad_id, other.unk_id, other.start_id, other.end_id) == (3, None, 2, 1)


def test_missing_special_tokens_say_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pad_token in the vocabulary, found none of <pad>, \[PAD\]"):
        Tokenizer(_engine(["</s>", "word"]))
    _engine(["<pad>", "word"]).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer\.json: .*end_token.*none of </s>, <eos>, \[SEP\]"):
        Tokenizer.load(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="end_token to be in the vocabulary, got '<END>'"):
        Tokenizer.load(tmp_path / "tokenizer.json", end_token="<END>")


def test_special_tokens_by_hand_are_kept(tmp_path: Path) -> None:
    engine = _engine(["<|end|>", "<pad>", "<go>", "word", "<?>"], unk_token="<?>")
    tokenizer = Tokenizer(engine, pad_token="<|end|>", end_token="<|end|>", start_token="<go>", unk_token="<?>")
    assert (tokenizer.pad_id, tokenizer.end_id, tokenizer.start_id, tokenizer.unk_id) == (0, 0, 2, 4)
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded == tokenizer == pickle.loads(pickle.dumps(tokenizer))
    assert (loaded.pad_id, loaded.end_id, loaded.start_id, loaded.unk_id) == (0, 0, 2, 4)
    assert Tokenizer.load(tmp_path / "tokenizer.json", pad_token="<pad>").pad_id == 1
    assert loaded.encode("word <|end|> <go> else") == [3, 4, 4, 4]


def test_what_a_file_adds_cuts_or_draws_is_not_used() -> None:
    """Post-processor, truncation, padding and BPE dropout; the engine that was given keeps them."""
    bpe = models.BPE({"<pad>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4}, [("a", "b")], dropout=0.5)
    engine = tokenizers.Tokenizer(bpe)
    engine.add_special_tokens(["<pad>", "</s>"])
    engine.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    engine.enable_truncation(3)
    engine.enable_padding(length=9, pad_id=0, pad_token="<pad>")
    tokenizer = Tokenizer(engine)
    assert {tuple(tokenizer.encode("ab" * 8)) for _ in range(20)} == {(4,) * 8}
    assert len(engine.encode("ab" * 8).ids) == 9
    assert engine.truncation is not None


@pytest.mark.parametrize("special", [True, False])
def test_added_tokens_of_a_file(special: bool) -> None:
    """One that is not special is text; an end token is special even where its file forgot to say so."""
    engine = tokenizers.Tokenizer(models.BPE({"<pad>": 0, "a": 1, "<": 2, "/": 3, "s": 4, ">": 5}, []))
    engine.add_tokens([tokenizers.AddedToken("</s>", special=special, normalized=False), "aaa"])
    tokenizer = Tokenizer(engine)
    assert tokenizer.end_id == 6
    assert tokenizer.encode("aaa</s>a") == [7, 2, 3, 4, 5, 1]
    assert tokenizer.decode([7, 6, 1]).replace(" ", "") == "aaaa"


def test_special_tokens_among_the_pieces_of_a_unigram_model() -> None:
    pieces = [(name, 0.0) for name in SPECIAL_TOKENS] + [(letter, -1.0) for letter in "<>/spadunk "]
    engine = tokenizers.Tokenizer(models.Unigram(pieces, 3, False))
    engine.decoder = decoders.Fuse()
    assert engine.encode("a</s>").ids == [7 + "padunk".index("a") + 1, 2], "the model by itself reads it as the end"
    tokenizer = Tokenizer(engine)
    for text in ("</s>", "a</s><pad>", "<<s>/s></s", "<s><s><unk>"):
        ids = tokenizer.encode(text)
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text


@pytest.fixture(scope="module")
def t5() -> Tokenizer:
    if not T5.exists():
        pytest.skip(f"needs T5's tokenizer.json at {T5}; set TFM_DATA to the data folder")
    return Tokenizer.load(T5)


def test_t5_gives_the_published_ids(t5: Tokenizer) -> None:
    text = "translate English to German: The house is wonderful."
    ids = [13959, 1566, 12, 2968, 10, 37, 629, 19, 1627, 5, 1]  # as T5's own SentencePiece model gives them
    assert [*t5.encode(text), t5.end_id] == ids
    assert t5.decode([t5.pad_id, *ids, t5.pad_id]) == text
    assert t5.tokens(ids[:2]) == ["▁translate", "▁English"]
    assert (t5.vocab_size, t5.pad_id, t5.start_id, t5.end_id, t5.unk_id) == (32_100, 0, 0, 1, 2)


@hypothesis.given(
    text=TEXTS | st.lists(st.sampled_from(["</s>", "<extra_id_7>", "<pad>", "＜/s＞", " ", "a"])).map("".join)
)
def test_t5_reads_no_text_as_special(t5: Tokenizer, text: str) -> None:
    assert all(id_ == t5.unk_id or 3 <= id_ < 32_000 for id_ in t5.encode(text))


def test_t5_as_the_library_has_it_elsewhere(t5: Tokenizer) -> None:
    engine = tokenizers.Tokenizer.from_file(str(T5))
    for text in (text for text in [*CORPUS, *AWKWARD] if "<" not in text):
        assert t5.encode(text) == engine.encode(text, add_special_tokens=False).ids
    assert t5.tokens(t5.encode("a </s> b")) == ["▁", "a", "▁", "<unk>", "/", "s", ">", "▁", "b"]
    assert json.loads(t5.to_json())["post_processor"] is not None, "what is written back is the whole file"
    assert Tokenizer.from_json(t5.to_json()) == t5


def test_docstrings() -> None:
    assert doctest.testmod(tfm.tokenizer).failed == 0
