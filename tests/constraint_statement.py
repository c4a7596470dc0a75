"""The rules of constraints in plain Python, and a batch that they are tried on."""

import dataclasses

import numpy as np
from tiny_models import V, random_ids, tiny_config

from tfm.decoding.constraints import Constraints

B, S, P, CAPACITY = 4, 5, 3, 12
CONFIGS = [
    tiny_config(positions="t5-bias", shared_embeddings="none", decoder_layers=1),
    tiny_config(positions="rope", architecture="decoder-only", shared_embeddings="none", decoder_layers=1),
]
END = CONFIGS[0].end_id
SOURCE = random_ids(B, S, seed=1)
SOURCE_LENGTHS = np.array([5, 1, 3, 4], np.int32)
PROMPT = random_ids(B, P, seed=3)
PROMPT[:, 0] = CONFIGS[0].start_id
PROMPT_LENGTHS = np.array([1, 3, 2, 1], np.int32)
MOST = CAPACITY + 1 - P
NEUTRAL = Constraints(
    min_tokens=0, min_ratio=0, max_ratio=np.inf, repetition_penalty=1, no_repeat_ngram=0,
    banned_tokens=np.zeros(V, bool), banned_phrases=np.full((2, 3), -1), required_phrases=np.full((2, 3), -1),
)  # fmt: skip
"""Every rule there is, with numbers that change nothing."""


@dataclasses.dataclass
class Row:
    """The rules of one row, as a reader would write them down."""

    limit: int
    source_length: int = 0
    prompt: tuple = ()
    min_tokens: int = 0
    min_ratio: float = 0
    max_ratio: float = np.inf
    repetition_penalty: float = 1
    no_repeat_ngram: int = 0
    banned_tokens: tuple = (False,) * V
    banned_phrases: tuple = ()
    required_phrases: tuple = ()
    end_id: int = END

    def reweighted(self, logits, output):
        logits = logits.astype(np.float64).copy()
        for token in {*self.prompt, *output}:
            logits[token] = logits[token] / self.repetition_penalty if logits[token] > 0 else (
                logits[token] * self.repetition_penalty
            )  # fmt: skip
        return logits

    def progress(self, output, token):
        """The most tokens of a missing phrase that the output and this token end with."""
        ends = [*output, token]
        return max(
            (k for phrase in self.missing(output) for k in range(1, len(phrase) + 1) if ends[-k:] == [*phrase[:k]]),
            default=0,
        )

    def missing(self, output):
        return [phrase for phrase in self.required_phrases if not contains(output, phrase)]

    def is_banned(self, output, token):
        text, n = [*self.prompt, *output, token], self.no_repeat_ngram
        if self.banned_tokens[token] or any(text[-len(phrase) :] == [*phrase] for phrase in self.banned_phrases):
            return True
        if n and len(text) >= n and contains(text[:-1], text[-n:]):
            return True
        if token == self.end_id and (
            len(output) < max(self.min_tokens, self.min_ratio * self.source_length - 1e-3) or self.missing(output)
        ):
            return True
        return any(  # would use up n tokens of a missing phrase, which then could not come any more
            text[-n:] == [*phrase[end - n : end]] and [*output, token][-end:] != [*phrase[:end]]
            for phrase in self.missing(output)
            for end in (range(n, len(phrase) + 1) if n else ())
        )

    def allowed(self, output, vocab_size=V):
        """The tokens that may come next; the end token, where none may."""
        return self.choices(output, vocab_size) or [self.end_id]

    def choices(self, output, vocab_size=V):
        missing = sum(map(len, self.missing(output)))
        progress = [self.progress(output, token) for token in range(vocab_size)]
        room = self.limit - 1 - len(output)
        least = min(max(missing - (room - 1), 0), max(progress))
        if 0 < self.no_repeat_ngram < max(progress):
            least = max(progress)
        return [t for t in range(vocab_size) if not self.is_banned(output, t) and progress[t] >= least]


def contains(text, phrase):
    return any([*text[i : i + len(phrase)]] == [*phrase] for i in range(len(text) - len(phrase) + 1))


def phrases_of(array):
    return tuple(tuple(t for t in phrase if t >= 0) for phrase in array if phrase[0] >= 0)


def rows_of(constraints, limits, *, prompts=None, source_lengths=SOURCE_LENGTHS):
    """One `Row` for each of the batch."""
    arrays = constraints.as_arrays(batch=B, vocab_size=V, end_id=END)
    for i in range(B):
        own = {f.name: getattr(arrays, f.name) for f in dataclasses.fields(arrays)}
        own = {name: np.asarray(value[i]) for name, value in own.items() if value is not None}
        numbers = {name: value.item() for name, value in own.items() if value.ndim == 0}
        others = {name: phrases_of(value.tolist()) for name, value in own.items() if value.ndim == 2}
        if "banned_tokens" in own:
            others["banned_tokens"] = tuple(own["banned_tokens"])
        limit = min(limits[i], np.floor(numbers.get("max_ratio", np.inf) * source_lengths[i] + 1e-3))
        prompt = () if prompts is None else tuple(prompts[i])
        yield Row(limit=int(limit), source_length=source_lengths[i], prompt=prompt, **numbers, **others)


def without(banned, required):
    """The banned phrases, [B, P, M], without those that are within a required one of their row."""
    kept = banned.copy()
    for row, phrases in enumerate(banned.tolist()):
        for i, phrase in enumerate(phrases_of(phrases)):
            at = [j for j, padded in enumerate(phrases) if padded[0] >= 0][i]
            if any(contains(other, phrase) for other in phrases_of(required[row].tolist())):
                kept[row, at] = -1
    return kept
