"""Tokenizers of each kind, and texts that are hard to give back."""

import hypothesis.strategies as st
import tokenizers
from tokenizers import models, pre_tokenizers

from tfm.tokenizer import Tokenizer
from tfm.tokenizer_training import SPECIAL_TOKENS

LOSSLESS = ("bpe", "unigram", "char")
KINDS = (*LOSSLESS, "word")
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


def word_engine(pieces: list[str], **model: object) -> tokenizers.Tokenizer:
    engine = tokenizers.Tokenizer(models.WordLevel({piece: id_ for id_, piece in enumerate(pieces)}, **model))
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return engine
