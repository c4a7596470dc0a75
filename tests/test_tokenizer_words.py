"""The word of each token, from a text and from ids."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from tfm.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox", "the lazy dog", "a 猫 and 一只 dog", "ein Haus, ein Hund!", "नमस्ते दुनिया", "👩‍👩‍👧 ok 😀",
] * 3  # fmt: skip
LOSSLESS = {
    kind: Tokenizer.train(CORPUS, kind=kind, vocab_size=size)
    for kind, size in (("bpe", 330), ("unigram", 330), ("char", 280))
}
WORD = Tokenizer.train(CORPUS, kind="word", vocab_size=100)
TEXTS = [
    "", " ", "the dog", "  the\n\tquick  ", "don't, please!", "我爱你 猫。", "👩‍👩‍👧😀 ok", "e\u0301 \u00a0 x\u3000y",
    "a\x1fb", "</s> <pad>x", "नमस्ते", "\ufeff b",
]  # fmt: skip
texts = st.one_of(st.sampled_from(TEXTS), st.text(alphabet="ab猫é😀 \n\u3000\u0301.<>", max_size=12))


@pytest.mark.parametrize("kind", LOSSLESS)
@given(text=texts)
def test_words_of_a_text_are_words_of_its_ids_and_hold_their_tokens(kind, text):
    tokenizer = LOSSLESS[kind]
    ids, words, expected = tokenizer.encode(text), tokenizer.words(text), text.split()
    assert len(words) == len(ids)
    assert words == tokenizer.words_of(ids)
    numbers = [word for word in words if word is not None]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(len(expected)))
    for word, piece in zip(words, tokenizer.tokens(ids), strict=True):
        assert piece.startswith("<0x") or (piece.split() == [] if word is None else piece.split()[0] in expected[word])


def test_unknown_words_have_their_place_in_the_text_and_none_in_what_is_decoded():
    text = "the unknown dog"
    ids = WORD.encode(text)
    assert ids[1] == WORD.unk_id
    assert WORD.words(text) == [0, 1, 2]
    assert WORD.decode(ids) == "the dog"
    assert WORD.words_of(ids) == [0, None, 1]
    assert WORD.words_of([WORD.start_id, ids[2], WORD.end_id, WORD.pad_id, 999]) == [None, 0, None, None, None]
    assert WORD.words("") == WORD.words_of([]) == []


def test_ids_that_no_text_would_give_have_words_too():
    char = LOSSLESS["char"]
    cat = [4 + byte for byte in "猫 猫".encode()]  # as bytes, though the vocabulary has the character
    assert char.decode(cat) == "猫 猫"
    assert char.words_of(cat) == [0, 0, 0, None, 1, 1, 1]
    broken = [4 + byte for byte in b"a\xe7 b"]
    assert char.words_of(broken) == [0, 0, None, 1]


def test_a_tokenizer_that_marks_spaces_on_words():
    pieces = ["<pad>", "<s>", "</s>", "<unk>", "▁the", "▁do", "g", "▁"]
    engine = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=3))
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(engine)
    assert tokenizer.tokens(tokenizer.encode("the dog")) == ["▁the", "▁do", "g"]
    assert tokenizer.words("the dog") == [0, 1, 1]
    assert tokenizer.words_of(tokenizer.encode("the dog")) == [0, 1, 1]
