"""Tokenizers of others: which of their tokens are special, and that no text is read as one."""

import json
import os
import pickle
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import tokenizers
from tokenizers import decoders, models, processors
from trained_tokenizers import AWKWARD, CORPUS, TEXTS, word_engine

from tfm.tokenizer import Tokenizer
from tfm.tokenizer_training import SPECIAL_TOKENS

DATA = Path(os.environ.get("TFM_DATA", Path(__file__).parents[2] / "shared" / "data"))
T5 = DATA / "tokenizers" / "t5-small" / "tokenizer.json"


def test_special_tokens_by_their_usual_names() -> None:
    bert = Tokenizer(word_engine(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "word"], unk_token="[UNK]"))
    assert (bert.pad_id, bert.unk_id, bert.start_id, bert.end_id) == (0, 1, 2, 3)
    other = Tokenizer(word_engine(["word", "<eos>", "<bos>", "<pad>"]))
    assert (other.pad_id, other.unk_id, other.start_id, other.end_id) == (3, None, 2, 1)


def test_missing_special_tokens_say_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pad_token in the vocabulary, found none of <pad>, \[PAD\]"):
        Tokenizer(word_engine(["</s>", "word"]))
    word_engine(["<pad>", "word"]).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer\.json: .*end_token.*none of </s>, <eos>, \[SEP\]"):
        Tokenizer.load(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="end_token to be in the vocabulary, got '<END>'"):
        Tokenizer.load(tmp_path / "tokenizer.json", end_token="<END>")


def test_special_tokens_by_hand_are_kept(tmp_path: Path) -> None:
    engine = word_engine(["<|end|>", "<pad>", "<go>", "word", "<?>"], unk_token="<?>")
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
