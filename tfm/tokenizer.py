"""Text to ids and back, through the `tokenizers` library.

What is trained here gives back every text as it came: nothing is normalised (no NFC, no lower case, no trimming), and
nothing a user writes becomes a special token, so that `"</s>"` in a text is four ordinary characters.

    ======= ================================================ ========================= ==========================
    kind    a piece is                                       decode(encode(text))      ids, besides 4 special ones
    ======= ================================================ ========================= ==========================
    bpe     bytes, merged by frequency (Sennrich et al.      every text                256 bytes, then merges
            2016; on bytes, Radford et al. 2019)
    unigram bytes, by likelihood (Kudo 2018)                 every text                256 bytes among the pieces
    char    a character of the training texts; a byte of     every text                256 bytes (each an ASCII
            any other                                                                  character), then the others
    word    what stands between white space                  known words joined by     the most frequent words
                                                             single spaces
    ======= ================================================ ========================= ==========================

Batches are encoded by the library's own threads, and a process that forks afterwards gets a warning from it on stderr.
The environment variable that silences it, TOKENIZERS_PARALLELISM, belongs to the caller and is not touched.
"""

import contextlib
import difflib
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import SupportsIndex

import tokenizers
from tokenizers import decoders

from tfm.special_tokens import USUAL_NAMES, checked_roles, find_name, prepared_engine, required_name
from tfm.tokenizer_training import BYTE_LETTERS, SPECIAL_TOKENS, TRAINERS

_CHUNK = 4096  # texts in one call of the library, whose encodings hold far more than the ids that are kept


class Tokenizer:
    """A vocabulary and its rules. Immutable; safe to use from several threads, to pickle and to copy.

    Equal tokenizers have equal `to_json()`.

    Example:
        >>> tokenizer = Tokenizer.train(["walk left", "run left"], kind="word", vocab_size=100)
        >>> tokenizer.encode("run left twice")
        [5, 4, 3]
        >>> tokenizer.decode([5, 4, tokenizer.end_id, tokenizer.pad_id])
        'run left'
        >>> tokenizer.vocab_size, tokenizer.pad_id, tokenizer.start_id, tokenizer.end_id, tokenizer.unk_id
        (7, 0, 1, 2, 3)
    """

    def __init__(
        self,
        engine: tokenizers.Tokenizer,
        *,
        pad_token: str | None = None,
        start_token: str | None = None,
        end_token: str | None = None,
        unk_token: str | None = None,
    ) -> None:
        """Wraps a copy of `engine`, whose padding, truncation, post-processor and BPE dropout are left out of use.

        Args:
            engine: any tokenizer of the library, one that was read from a `tokenizer.json` for example.
            pad_token: the padding token, where its name is none of "<pad>", "[PAD]".
            start_token: the first decoder token, where it is none of "<s>", "<bos>", "[CLS]". Without any the padding
                token starts, as in T5.
            end_token: the end of a text, where it is none of "</s>", "<eos>", "[SEP]".
            unk_token: what stands for the unknown, where it is none of "<unk>", "[UNK]"; there may be none.

        Raises:
            ValueError: no padding or end token in the vocabulary, or not the one that was given.
        """
        given = dict(pad_token=pad_token, start_token=start_token, end_token=end_token, unk_token=unk_token)
        self._given = {role: name for role, name in given.items() if name is not None}
        self._engine_json = engine.to_str()
        vocab = engine.get_vocab(with_added_tokens=True)
        self._pieces = {id_: piece for piece, id_ in vocab.items()}
        self.vocab_size: int = max(self._pieces, default=-1) + 1
        """One more than the highest id."""
        names = {role: find_name(vocab, role, self._given.get(role)) for role in USUAL_NAMES}
        self.pad_id: int = vocab[required_name(names, "pad_token")]
        self.end_id: int = vocab[required_name(names, "end_token")]
        self.start_id: int = self.pad_id if names["start_token"] is None else vocab[names["start_token"]]
        self.unk_id: int | None = None if names["unk_token"] is None else vocab[names["unk_token"]]
        self._engine, special = prepared_engine(
            self._engine_json, {name for name in names.values() if name is not None}
        )
        self._special_ids = frozenset(vocab[name] for name in special)
        self._unwritable_ids = self._special_ids - {self.unk_id}

    @classmethod
    def train(cls, texts: Iterable[str], *, kind: str, vocab_size: int) -> "Tokenizer":
        """Learns a vocabulary from texts. The same texts give the same tokenizer, to the byte of its JSON.

        Args:
            texts: read once; an iterator will do.
            kind: "bpe", "unigram", "char" or "word": see the table above. The time for "unigram" grows with the
                distinct text between spaces, so a large corpus without spaces (Chinese, Japanese) asks for "bpe".
            vocab_size: the most entries, the four special tokens "<pad>", "<s>", "</s>", "<unk>" (0 to 3) included.
                It is not exceeded; little text can give fewer.

        Example:
            >>> Tokenizer.train(["ein Haus"], kind="char", vocab_size=300).decode([4 + byte for byte in b"Haus"])
            'Haus'

        Raises:
            ValueError: an unknown kind, no text, or a `vocab_size` that does not hold the special tokens and the 256
                bytes (one word, for "word").
        """
        if kind not in TRAINERS:
            near = difflib.get_close_matches(kind, TRAINERS, n=1, cutoff=0.0)[0]
            raise ValueError(f"no kind of tokenizer {kind!r}; the nearest is {near!r} of {', '.join(TRAINERS)}")
        needed = len(SPECIAL_TOKENS) + (1 if kind == "word" else 256)
        if vocab_size < needed:
            alphabet = "one word" if kind == "word" else "the 256 bytes, without which some text has no ids"
            raise ValueError(
                f"expected a vocab_size of at least {needed} for {kind!r} ({len(SPECIAL_TOKENS)} special tokens and "
                f"{alphabet}), got {vocab_size}"
            )
        texts = _strings(texts)
        first = next((text for text in texts if (text.strip() if kind == "word" else text)), None)
        if first is None:
            raise ValueError(f"expected text to train a tokenizer of kind {kind!r} on, got none")
        engine = TRAINERS[kind](itertools.chain([first], texts), vocab_size)
        engine.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in SPECIAL_TOKENS])
        return cls(engine)

    @classmethod
    def load(cls, path: str | Path, **special_tokens: str) -> "Tokenizer":
        """Reads a file that `save`, or the `tokenizers` library (a model's `tokenizer.json`), wrote.

        `special_tokens` (`end_token="<|endoftext|>"` and so on) are those of `Tokenizer(...)`; `save` keeps them.

        Raises:
            ValueError: names the path: no such file, not JSON, not a tokenizer, or no padding or end token in it.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"), **special_tokens)
        except OSError as error:
            raise ValueError(f"{path}: expected a tokenizer file, got {error.strerror or error}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes `to_json()` to a file, in UTF-8."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def from_json(cls, text: str, **special_tokens: str) -> "Tokenizer":
        """The reverse of `to_json`; see `load`.

        Raises:
            ValueError: not JSON, not a tokenizer, or no padding or end token in it.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"expected the JSON of a tokenizer: {error}") from error
        if isinstance(data, dict) and data.keys() == {"special_tokens", "tokenizer"}:
            special_tokens = {**checked_roles(data["special_tokens"]), **special_tokens}
            text = json.dumps(data["tokenizer"], ensure_ascii=False)
        try:
            with _panics_as_errors():
                engine = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"expected a tokenizer as the tokenizers library writes it: {error}") from error
        return cls(engine, **special_tokens)

    def to_json(self) -> str:
        """All of it as JSON: the library's own format, which others can load.

        Only where special tokens were named by hand is that format wrapped, as {"special_tokens": ..., "tokenizer":
        ...}, because it has no place for them.
        """
        if not self._given:
            return self._engine_json
        special = json.dumps(self._given, ensure_ascii=False)
        return f'{{"special_tokens":{special},"tokenizer":{self._engine_json}}}'

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without start and end tokens.

        Nothing in the text is read as a special token: where a loaded file knows no other way to read it (a whole word
        "</s>"), the unknown token stands for it.

        Raises:
            ValueError: not a string, one that UTF-8 cannot hold (a lone surrogate), or one that a loaded tokenizer has
                no ids for: an unknown word, where there is no unknown token.
        """
        return self._without_special(self._encoding(text).ids)

    def _encoding(self, text: str) -> tokenizers.Encoding:
        try:
            with _panics_as_errors():
                return self._engine.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises nothing more special
            raise _unreadable(text, error) from error

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on several threads.

        Raises:
            ValueError: as `encode`, for the first text that it refuses.
        """
        rows: list[list[int]] = []
        for start in range(0, len(texts), _CHUNK):
            chunk = list(texts[start : start + _CHUNK])
            try:
                with _panics_as_errors():
                    encodings = self._engine.encode_batch_fast(chunk, add_special_tokens=False)
            except Exception:
                for text in chunk:
                    self.encode(text)  # says which text it is
                raise
            rows.extend(self._without_special(encoding.ids) for encoding in encodings)
        return rows

    def encode_lines(self, text: str) -> list[int]:
        """The ids of a plain text of any length, each line with its line feed encoded for itself, on several threads.

        A language model's texts are encoded so, for a book need not be encoded at once: and so a line has the same ids
        in the whole book as in a page of it.

        Raises:
            ValueError: as `encode`.
        """
        lines = list(io.StringIO(text, newline="\n"))
        return list(itertools.chain.from_iterable(self.encode_batch(lines)))

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """The text of ids: a list, or a one-dimensional NumPy or JAX array.

        Left out are special tokens, the unknown one included, and ids from `vocab_size` on, which a model has whose
        embedding was rounded up. Bytes that are no UTF-8, which a model can generate, become U+FFFD.

        Raises:
            ValueError: a negative id.
        """
        return self._engine.decode(self._textual(ids), skip_special_tokens=False)

    def decode_batch(self, rows: Iterable[Iterable[SupportsIndex]]) -> list[str]:
        """`decode` of each row."""
        return self._engine.decode_batch([self._textual(ids) for ids in rows], skip_special_tokens=False)

    def tokens(self, ids: Iterable[SupportsIndex]) -> list[str]:
        """One piece of text an id, special tokens included, to be shown beside it.

        A piece of bytes is shown as its text, or, where it holds part of a character, as "<0xC3>" and the like; an id
        without an entry as "<id 32100>".

        Example:
            >>> tokenizer = Tokenizer.train(["é"], kind="char", vocab_size=300)
            >>> tokenizer.tokens(tokenizer.encode("aéñ") + [tokenizer.end_id])
            ['a', 'é', '<0xC3>', '<0xB1>', '</s>']
        """
        pieces = [self._pieces.get(id_, f"<id {id_}>") for id_ in _integers(ids)]
        is_byte_level = isinstance(self._engine.decoder, decoders.ByteLevel)
        return [_readable(piece) for piece in pieces] if is_byte_level else pieces

    def words(self, text: str) -> list[int | None]:
        """For each id of `encode(text)` the word that it is of: a place in `text.split()`.

        An id of nothing but white space, or of no text at all, has None; one of several words is the first one's.

        Example:
            >>> tokenizer = Tokenizer.train(["a bit"], kind="char", vocab_size=260)
            >>> tokenizer.words(" ab  c")
            [None, 0, 0, None, None, 1]

        Raises:
            ValueError: as `encode`.
        """
        encoding = self._encoding(text)
        of_characters = _words_of_characters(text)
        return [
            next((word for word in of_characters[start:end] if word is not None), None)
            for id_, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if self._without_special([id_])
        ]

    def words_of(self, ids: Iterable[SupportsIndex]) -> list[int | None]:
        """The same for any ids: places in `decode(ids).split()`; None also for what `decode` leaves out.

        Ids that a model generated need not be those that its text would be encoded to.
        """
        ids = _integers(ids)
        # What an id adds to the text shows only in the text of all ids up to it: spaces are made of what stands beside
        # them, and bytes become a character when its last one is there.
        kept = [place for place, id_ in enumerate(ids) if self._textual([id_])]
        texts = self.decode_batch([[ids[place] for place in kept[: count + 1]] for count in range(len(kept))])
        whole = texts[-1] if texts else ""
        of_characters = _words_of_characters(whole)
        words: list[int | None] = [None] * len(ids)
        start = 0
        for place, text in zip(kept, texts, strict=True):
            end = start
            while end < min(len(text), len(whole)) and text[end] == whole[end]:
                end += 1
            touched = max(end + (len(text) > end), start + 1)  # a part of a character is of that character's word
            added = of_characters[start:touched]
            words[place] = next((word for word in added if word is not None), None)
            start = end
        return words

    def _without_special(self, ids: list[int]) -> list[int]:
        if self._unwritable_ids.isdisjoint(ids):
            return ids
        ids = [self.unk_id if id_ in self._unwritable_ids else id_ for id_ in ids]  # type: ignore[misc]
        return [id_ for id_ in ids if id_ is not None]

    def _textual(self, ids: Iterable[SupportsIndex]) -> list[int]:
        return [id_ for id_ in _integers(ids) if id_ < self.vocab_size and id_ not in self._special_ids]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self._engine_json)

    def __reduce__(self) -> tuple[Callable[[str], "Tokenizer"], tuple[str]]:
        return Tokenizer.from_json, (self.to_json(),)

    def __repr__(self) -> str:
        return (
            f"Tokenizer(vocab_size={self.vocab_size}, pad_id={self.pad_id}, start_id={self.start_id}, "
            f"end_id={self.end_id}, unk_id={self.unk_id})"
        )


def _strings(texts: Iterable[str]) -> Iterator[str]:
    if isinstance(texts, str):
        raise ValueError("expected several texts, got one string")
    for text in texts:
        try:
            text.encode()
        except (AttributeError, UnicodeError) as error:
            raise _unreadable(text, error) from error
        yield text


def _unreadable(text: object, error: Exception) -> ValueError:
    """What is wrong with a text that the library refuses."""
    if not isinstance(text, str):
        return ValueError(f"expected text, got {type(text).__name__}: {text!r:.80}")
    if any("\ud800" <= character <= "\udfff" for character in text):
        return ValueError(f"expected text that UTF-8 can hold, got a lone surrogate in {text!r:.80}")
    return ValueError(f"expected text that the tokenizer has ids for, got {text!r:.80}: {error}")


@contextlib.contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Turns a panic of the library's Rust code, which no `except Exception` catches, into a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(str(error)) from error


def _integers(ids: Iterable[SupportsIndex]) -> list[int]:
    """A list of ids; arrays are converted at once rather than element by element."""
    numbers: list[int] = ids.tolist() if hasattr(ids, "tolist") else [int(id_) for id_ in ids]
    if numbers and min(numbers) < 0:
        raise ValueError(f"expected ids of at least 0, got {min(numbers)}")
    return numbers


def _words_of_characters(text: str) -> list[int | None]:
    """For each character its word's place in `text.split()`; None for white space."""
    words: list[int | None] = []
    count = 0
    for before, character in zip(" " + text, text, strict=False):
        count += before.isspace() and not character.isspace()
        words.append(None if character.isspace() else count - 1)
    return words


_BYTES = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}


def _readable(piece: str) -> str:
    """The text of a byte-level piece, or its bytes where they are none."""
    if not all(letter in _BYTES for letter in piece):
        return piece
    data = bytes(_BYTES[letter] for letter in piece)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in data)
