"""How each kind of vocabulary is learned from texts: what `Tokenizer.train` calls."""

import json
from collections import Counter
from collections.abc import Callable, Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
"""Ids 0 to 3 of every trained tokenizer."""

# Byte-level pieces are written with one printable character a byte: the library's convention, which is GPT-2's. The
# bytes that are printable in Latin-1 stand for themselves, the others, in order, follow from U+0100 on.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_LETTERS = [chr(byte if byte in _PRINTABLE else 0x100 + _OTHERS.index(byte)) for byte in range(256)]


def _byte_level(model: models.Model, split: str) -> tokenizers.Tokenizer:
    """A tokenizer over the bytes of text that is first cut into the matches of `split`."""
    engine = tokenizers.Tokenizer(model)
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    engine.decoder = decoders.ByteLevel()
    return engine


# Runs of letters, of digits, of other signs, each with one space before it, and of the white space that is left. Unlike
# GPT-2's, which it follows, it keeps combining marks with their letters (Hindi, Thai, decomposed accents) and knows no
# English contractions. It cuts "</s>" and its like to pieces, so that no training makes an entry of them.
_RUNS = r" ?[\p{L}\p{M}]+| ?\p{N}+| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"


def train_bpe(texts: Iterator[str], vocab_size: int) -> tokenizers.Tokenizer:
    engine = _byte_level(models.BPE(), _RUNS)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # what was seen once cannot be learned
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=BYTE_LETTERS,
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    return engine


def train_unigram(texts: Iterator[str], vocab_size: int) -> tokenizers.Tokenizer:
    engine = _byte_level(models.Unigram(), _RUNS)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(run for run, _ in engine.pre_tokenizer.pre_tokenize_str(text))
    # The trainer takes its candidates from a suffix array over the distinct words, each followed by a separator, and
    # misses every one that nothing but the separator follows: most endings, most whole words. So the words that are
    # frequent enough to become entries are there twice, once with a byte behind them that UTF-8 does not have (8,000
    # entries, German captions: 17 % fewer tokens).
    behind = BYTE_LETTERS[0xFF]

    def words() -> Iterator[list[str]]:
        for rank, word in enumerate(_by_frequency(counts)):
            yield [word] * counts[word]
            if rank < vocab_size:
                yield [word + behind]

    learner = tokenizers.Tokenizer(models.Unigram())
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size,
        max_piece_length=48,  # bytes: 16 characters of any but the rarest scripts
        special_tokens=list(SPECIAL_TOKENS),
        unk_token="<unk>",
        initial_alphabet=BYTE_LETTERS,
        show_progress=False,
    )
    learner.train_from_iterator(words(), trainer)
    learned = dict(json.loads(learner.to_str())["model"]["vocab"][len(SPECIAL_TOKENS) :])
    # It walks a hash map whose order changes from process to process. That shows in two places: in the last digits of
    # the scores, which are sums over the map, and in the scores of bytes that were dropped, which are put back with the
    # lowest score + 0, + 0.0001, + 0.0002 and so on. Rounding removes the first, one score for those bytes the second.
    lowest = min(learned.values())
    learned[behind] = lowest
    scores = {p: round(lowest if len(p) == 1 and s < lowest + 256e-4 else s, 4) for p, s in learned.items()}
    by_score = sorted(scores, key=lambda p: (-scores[p], p))
    room = vocab_size - len(SPECIAL_TOKENS) - len(BYTE_LETTERS)
    best = [p for p in by_score if len(p) > 1][:room]  # it keeps too many
    kept = {*BYTE_LETTERS, *best}
    pieces = [(p, scores[p]) for p in by_score if p in kept]
    special = [(name, 0.0) for name in SPECIAL_TOKENS]
    engine.model = models.Unigram([*special, *pieces], unk_id=SPECIAL_TOKENS.index("<unk>"), byte_fallback=False)
    return engine


def train_char(texts: Iterator[str], vocab_size: int) -> tokenizers.Tokenizer:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    characters = [character for character in _by_frequency(counts) if not character.isascii()]  # ASCII: is a byte
    spelled = ["".join(BYTE_LETTERS[byte] for byte in character.encode()) for character in characters]
    pieces = [*SPECIAL_TOKENS, *BYTE_LETTERS, *spelled][:vocab_size]
    # BPE without merges, which looks a whole character up before it falls back to bytes.
    model = models.BPE({piece: id_ for id_, piece in enumerate(pieces)}, [], ignore_merges=True)
    return _byte_level(model, r"[\s\S]")


def train_word(texts: Iterator[str], vocab_size: int) -> tokenizers.Tokenizer:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.split())
    words = [word for word in _by_frequency(counts) if word not in SPECIAL_TOKENS]
    pieces = [*SPECIAL_TOKENS, *words][:vocab_size]
    engine = tokenizers.Tokenizer(models.WordLevel({piece: id_ for id_, piece in enumerate(pieces)}, "<unk>"))
    # White space as Python has it, which counts four separators (U+001C to U+001F) that Unicode does not.
    engine.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\x1c-\x1f]+"), "removed")
    return engine  # without a decoder the library joins pieces with spaces


def _by_frequency(counts: Counter[str]) -> list[str]:
    return sorted(counts, key=lambda piece: (-counts[piece], piece))


TRAINERS: dict[str, Callable[[Iterator[str], int], tokenizers.Tokenizer]] = {
    "bpe": train_bpe,
    "unigram": train_unigram,
    "char": train_char,
    "word": train_word,
}
