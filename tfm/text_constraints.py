"""What may and must come in answers, said in text; `tfm.decoding.constraints` says the same in ids."""

import dataclasses
import itertools
import math
import typing
from collections.abc import Sequence

import jax
import numpy as np

from tfm.buckets import power_of_two
from tfm.checks import real_numbers, several
from tfm.config import ModelConfig
from tfm.decoding.constraints import Constraints
from tfm.tokenizer import Tokenizer


@typing.no_type_check  # its values are checked when they are used, with errors that say more
@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConstraints:
    """Rules for the answer to a text. Those left out change nothing; where there is any, tokens that are no text, such
    as the unknown one, do not come.

    A prefix of the answer counts for repetition and for banned phrases, and not for lengths and required phrases, which
    are of what follows it.
    """  # fmt: skip

    min_tokens: int = 0
    """No end before so many tokens."""
    min_ratio: float = 0.0
    """No end before this many times as many tokens as the text has, its end token counted."""
    max_ratio: float = math.inf
    """At most this many times as many tokens as the text has, end tokens counted."""
    repetition_penalty: float = 1.0
    """Of tokens that came already, positive logits are divided by it and negative ones multiplied (Keskar et al. 2019).
    1.2 is usual."""
    no_repeat_ngram: int = 0
    """n: no n tokens come twice; 0: any may."""
    banned_phrases: Sequence[str] = ()
    """Do not come, with or without a space before them, as the tokens that the tokenizer makes of them; the same
    letters in other tokens may."""
    required_phrases: Sequence[str] = ()
    """Come, in any order. With a tokenizer that joins words to the space before them, they come after a space."""


EachText = TextConstraints | Sequence[TextConstraints | None]
"""The same rules for all texts, or for each its own."""


def encode_constraints(
    constraints: typing.Any, count: int, tokenizer: Tokenizer, config: ModelConfig
) -> Constraints | None:
    """The rules in ids, in NumPy, a row for each text; None where no text has any.

    Numbers and lengths of phrases are rounded up to powers of two, so that few shapes compile.

    Args:
        constraints: the same for all texts, or one, or None, for each.
        count: how many texts there are.
        tokenizer: of the target.
        config: the model.

    Raises:
        ValueError: a number out of its range, a phrase that is empty or that the tokenizer does not know, or another
            number of rules than of texts.
    """
    if constraints is None:
        return None
    if isinstance(constraints, TextConstraints):
        given = [constraints] * max(count, 1)  # checked without texts, too
    else:
        given = [TextConstraints() if one is None else one for one in several("constraints", constraints)]
        if len(given) != count:
            raise ValueError(f"expected constraints for all texts or for each of {count}, got {len(given)}")
    for one in given:
        if not isinstance(one, TextConstraints):
            raise ValueError(f"expected TextConstraints(…) as constraints, got {one!r}")
    rows = {field.name: [getattr(one, field.name) for one in given] for field in dataclasses.fields(TextConstraints)}
    neutral = TextConstraints()
    fields = {name: _numbers(name, values) for name, values in rows.items() if not name.endswith("phrases")}
    banned, required = ([several("phrases", row) for row in rows[f"{kind}_phrases"]] for kind in ("banned", "required"))
    phrases = {
        "banned_phrases": [[ids for phrase in row for ids in _spellings(phrase, tokenizer)] for row in banned],
        "required_phrases": [[_spelling_within(phrase, tokenizer) for phrase in row] for row in required],
    }
    for wanted, unwanted in set(zip(map(tuple, required), map(tuple, banned), strict=True)):
        _check_apart(wanted, unwanted, tokenizer)
    rules = {name: values != getattr(neutral, name) for name, values in fields.items()}
    if config.is_language_model and (rules["min_ratio"].any() or rules["max_ratio"].any()):
        raise ValueError(
            "expected min_tokens or max_tokens for a language model, got min_ratio or max_ratio, of a source"
        )
    rules |= {name: np.array([bool(row) for row in lists]) for name, lists in phrases.items()}
    has_rules = np.any(list(rules.values()), axis=0)
    used: dict[str, typing.Any] = {name: fields[name] for name in fields if rules[name].any()}
    used |= {name: _padded(phrases[name]) for name in phrases if rules[name].any()}
    if has_rules.any():
        used["banned_tokens"] = has_rules[:, None] & _is_no_text(tokenizer, config)[None]
    return Constraints(**used).as_arrays(batch=len(given), vocab_size=config.target_vocab_size, end_id=config.end_id)


def rows_of(constraints: Constraints, indices: Sequence[int], rows: int) -> Constraints:
    """The rules of some texts, and any for the rows behind them, which generate nothing."""
    padded = [*indices, *[0] * (rows - len(indices))]
    return jax.tree.map(lambda x: x[np.array(padded)], constraints)


def known_ids(what: str, texts: list[typing.Any], tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of texts that are to come.

    Raises:
        ValueError: not a text, or one with something that the tokenizer does not know, so that it cannot come.
    """
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"expected a str as {what}, got {type(text).__name__}")
    encoded = tokenizer.encode_batch(texts)
    for text, ids in zip(texts, encoded, strict=True):
        if tokenizer.unk_id in ids:
            raise ValueError(f"expected a {what} that the tokenizer knows, got {text!r}")
    return encoded


def _is_no_text(tokenizer: Tokenizer, config: ModelConfig) -> np.ndarray:
    """[V], True for ids that `Tokenizer.decode` leaves out, without the end token.

    Between two tokens of a banned phrase such an id would leave the phrase in the text, and count as a token of it.
    """
    ids = np.arange(config.target_vocab_size)
    special = [id_ for id_ in (config.pad_id, config.start_id, tokenizer.unk_id) if id_ is not None]
    return (np.isin(ids, special) | (ids >= tokenizer.vocab_size)) & (ids != config.end_id)


def _spellings(phrase: typing.Any, tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of a phrase at the beginning of a text and, where they are others, after a space.

    As " word" and "word" are two pieces to byte-level BPE. A piece for the space alone before the phrase makes no
    other spelling.
    """
    (plain,) = known_ids("phrase", [phrase], tokenizer)
    if not plain:
        raise ValueError(f"expected a phrase of at least one token, got {phrase!r}")
    spaced = tokenizer.encode(" " + phrase)
    joined = spaced != plain and spaced != tokenizer.encode(" ") + plain and not phrase[:1].isspace()
    return [plain, spaced] if joined else [plain]


def _spelling_within(phrase: typing.Any, tokenizer: Tokenizer) -> list[int]:
    return _spellings(phrase, tokenizer)[-1]


def _check_apart(required: Sequence[str], banned: Sequence[str], tokenizer: Tokenizer) -> None:
    """Raises ValueError for a required phrase with a banned one in it; `Constraints` would name both by their ids."""
    for phrase, other in itertools.product(required, banned):
        ids = _spelling_within(phrase, tokenizer)
        for spelling in _spellings(other, tokenizer):
            if any(ids[i : i + len(spelling)] == spelling for i in range(len(ids))):
                raise ValueError(f"expected required_phrases without banned ones, got {phrase!r} with {other!r} in it")


def _numbers(name: str, values: Sequence[typing.Any]) -> np.ndarray:
    for value in values:
        number = real_numbers(value)
        if number is None or number.ndim:
            raise ValueError(f"expected one number as {name}, got {value!r}")
    return np.array(values)


def _padded(lists: Sequence[Sequence[Sequence[int]]]) -> np.ndarray:
    """[B, P, M], padded with -1 to powers of two."""
    most = power_of_two(max(map(len, lists)))
    longest = power_of_two(max(len(ids) for row in lists for ids in row))
    padded = np.full((len(lists), most, longest), -1, np.int32)
    for i, row in enumerate(lists):
        for j, ids in enumerate(row):
            padded[i, j, : len(ids)] = ids
    return padded
