"""What may and must come: rules on the tokens of an answer, whatever then picks them or searches among them.

A rule is a field of `Constraints`. Its numbers and ids are traced, so that changing them compiles nothing; a field that
is None is no part of the program. At each step the rules turn the model's logits into others, from which greedy
decoding, sampling and beam search choose: a token that may not come has -inf. Where nothing is left, the end token
comes, and beam search ranks such a hypothesis behind all others. What is reported is the model's own log-probability.

Nothing is remembered between steps but the tokens themselves, so a hypothesis may become the continuation of any other.
All matching is one question, asked of the text so far, of banned and of required phrases (`_agree`): at which positions
of a sequence do the tokens before it equal those that have just come? A rule on repetition looks at prompt and output,
without the start token; a required phrase has to be in the output alone.

**Required phrases.** The tokens still needed are those of all phrases that are not yet in the output, less the tokens
of the one of them that is under way. The end token may not come while any is needed, and a token may come only if what
is needed after it still has room before the limit, one place being kept for the end token. So what has to come is
forced as late as possible, but in beam search it comes earlier where it fits (Post & Vilar 2018): `Constrained.wanted`
makes a candidate of every token that goes on with a phrase, and `Constrained.banks` lets hypotheses compete with those
that have met as many required tokens.
"""

import typing

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tfm.axes import Array, Bool, Float, Int
from tfm.decoding.rule_arrays import (
    as_array,
    check_against_each_other,
    checked_numbers,
    checked_phrases,
    for_each_row,
    known_value,
)
from tfm.nn.transformer import join

PENALTY_RANGE = (0.01, 100.0)
"""Of a repetition penalty: logits stay finite in float32."""

LAST_RESORT = 1e4
"""What the end token's logit loses where it comes because nothing else may: in beam search any other hypothesis is
better."""

_ROUNDING = 1e-3
"""Of a ratio times a length: float32 makes 6.9999999 or 7.0000002 of 0.7 · 10, which is 7 tokens."""

_WHOLE: typing.Any = (np.int32, lambda x: (x >= 0) & (x < 2**31), "a whole number from 0 to 2**31 - 1")
_NUMBERS: dict[str, typing.Any] = {
    "min_tokens": _WHOLE,
    "min_ratio": (np.float32, lambda x: (x >= 0) & (x < np.inf), "a finite number of at least 0"),
    "max_ratio": (np.float32, lambda x: x >= 0, "at least 0"),
    "repetition_penalty": (
        np.float32,
        lambda x: (x >= PENALTY_RANGE[0]) & (x <= PENALTY_RANGE[1]),
        "from {} to {}".format(*PENALTY_RANGE),
    ),
    "no_repeat_ngram": _WHOLE,
}


class NoRoomError(ValueError):
    """A row is to have more tokens than it may."""

    def __init__(self, row: int, wanted: str, given: str) -> None:
        self.row = row
        self.without_row = f"expected room for {wanted}, got {given}"
        super().__init__(f"expected room for {wanted} in row {row}, got {given}")


@typing.no_type_check  # pytrees are also built from shapes, specs and other non-arrays
@flax.struct.dataclass
class Constraints:
    """The rules. Each number is one for all rows or one for each; tokens that are counted are those of the output."""

    min_tokens: Int[Array, "*B"] | int | None = None
    """No end token before so many other tokens."""
    min_ratio: Float[Array, "*B"] | float | None = None
    """No end token before this many times as many other tokens as the row's source has."""
    max_ratio: Float[Array, "*B"] | float | None = None
    """At most this many times as many tokens as the row's source has, the end token counted; infinity: no limit."""
    repetition_penalty: Float[Array, "*B"] | float | None = None
    """Of tokens in prompt or output, positive logits are divided by it and negative ones multiplied (Keskar et al.
    2019, section 4.1); 1 changes nothing. In beam search such hypotheses are ranked by the softmax of what results."""
    no_repeat_ngram: Int[Array, "*B"] | int | None = None
    """n: no n tokens of prompt and output come twice (Paulus et al. 2018, section 2.5); 0: any may."""
    banned_tokens: Bool[Array, "V"] | Bool[Array, "B V"] | None = None
    """True: never comes."""
    banned_phrases: Int[Array, "P M"] | Int[Array, "B P M"] | None = None
    """Phrases, each padded behind with -1: their last token does not come where those before it have just come."""
    required_phrases: Int[Array, "P M"] | Int[Array, "B P M"] | None = None
    """Phrases, each padded behind with -1, that the output contains, in any order; they may overlap. As bans go first,
    one that other rules forbid ends the output unmet."""

    def as_arrays(self, *, batch: int, vocab_size: int, end_id: int) -> "Constraints | None":
        """The same, checked, every field having a row for each of the batch; None where there is no rule.

        Raises:
            ValueError: a value of another kind or shape, or out of its range, as far as values are known: a caller's
                jit knows none.
        """
        fields: dict[str, typing.Any] = {}
        for name, number in _NUMBERS.items():
            if (value := getattr(self, name)) is not None:
                fields[name] = checked_numbers(name, value, batch, *number)
        if self.banned_tokens is not None:
            banned = as_array(self.banned_tokens)
            if banned.dtype != bool or banned.shape not in ((vocab_size,), (batch, vocab_size)):
                raise ValueError(
                    f"expected banned_tokens as booleans [{vocab_size}] or [{batch}, {vocab_size}], "
                    f"got {banned.dtype} of shape {banned.shape}"
                )
            fields["banned_tokens"] = for_each_row(banned, batch, 1)
        for name in ("banned_phrases", "required_phrases"):
            if (value := getattr(self, name)) is not None:
                phrases = checked_phrases(name, value, batch, vocab_size)
                if phrases.size:
                    fields[name] = phrases
        known = {name: value for name, field in fields.items() if (value := known_value(field)) is not None}
        check_against_each_other(known, end_id)
        return Constraints(**fields) if fields else None

    def check_room(self, limits: Int[Array | np.ndarray, "B"], source_lengths: Int[Array | np.ndarray, "B"]) -> None:
        """Raises NoRoomError where a row that may have tokens is to have more than it may, as far as values are known.

        Args:
            limits: the most tokens of each row.
            source_lengths: real tokens of each source.
        """
        known_limits, lengths = known_value(limits), known_value(source_lengths)
        if known_limits is None or lengths is None:
            return
        ratio = known_value(self.max_ratio)
        if self.max_ratio is not None:
            if ratio is None:
                return
            most = np.where(np.isfinite(ratio), ratio, 0) * lengths + _ROUNDING
            known_limits = np.where(np.isfinite(ratio) & (most < known_limits), np.floor(most), known_limits)
        needs: list[tuple[str, np.ndarray]] = []
        if (phrases := known_value(self.required_phrases)) is not None:
            needs.append(("required tokens and the end token", (phrases >= 0).sum((1, 2)) + (phrases >= 0).any((1, 2))))
        if (tokens := known_value(self.min_tokens)) is not None:
            needs.append(("tokens (min_tokens)", tokens))
        if (ratio := known_value(self.min_ratio)) is not None:
            needs.append(("tokens (min_ratio)", np.ceil(ratio * lengths - _ROUNDING)))
        for what, needed in needs:
            for row in np.flatnonzero((needed > known_limits) & (known_limits > 0))[:1]:
                raise NoRoomError(int(row), f"{needed[row]:.0f} {what}", f"a limit of {known_limits[row]:.0f}")

    def cut(self, limits: Int[Array, "B"], source_lengths: Int[Array, "B"]) -> Int[Array, "B"]:
        """The rows' limits, cut by `max_ratio`."""
        if self.max_ratio is None:
            return limits
        most = self.max_ratio * source_lengths + _ROUNDING
        return jnp.where(most < limits, jnp.floor(most), limits).astype(limits.dtype)  # NaN is never less

    def bind(
        self,
        *,
        prompt: Int[Array, "B T"],
        prompt_lengths: Int[Array, "B"],
        source_lengths: Int[Array, "B"],
        limits: Int[Array, "B"],
        end_id: int,
        width: int = 1,
    ) -> "Rules":
        """The rules for these rows, as a function of logits and tokens.

        Args:
            prompt: with the start token, which counts as no text, padded on the right.
            prompt_lengths: real tokens of each prompt.
            source_lengths: real tokens of each source.
            limits: the most tokens of each row, cut already.
            end_id: ends a row.
            width: hypotheses of each row, lying row after row.
        """
        rows = (self, prompt[:, 1:], prompt_lengths - 1, source_lengths, limits)
        if width > 1:
            rows = jax.tree.map(lambda x: jnp.repeat(x, width, axis=0), rows)
        return Rules(*rows, end_id)


class Constrained(typing.NamedTuple):
    """What the rules make of the logits of a step."""

    logits: Float[Array, "BW V"]
    """-inf where a token may not come; at least one is finite."""
    log_z: Float[Array, "BW 1"]
    """logits - log_z ranks hypotheses. Bans leave it as it is: a token is no likelier because others may not come."""
    is_stuck: Bool[Array, "BW"]
    """Nothing may come, so the end token does."""
    banks: Int[Array, "BW V"] | None = None
    """Required tokens met, were this token the next; None: nothing is required."""
    wanted: Int[Array, "BW P"] | None = None
    """The token with which each required phrase begins or goes on; V where it is in the output already."""


@typing.no_type_check
@flax.struct.dataclass
class Rules:
    """`Constraints` for B·W hypotheses; see `Constraints.bind`."""

    constraints: Constraints
    prompt: Array
    prompt_lengths: Array
    source_lengths: Array
    limits: Array
    end_id: int = flax.struct.field(pytree_node=False)

    def __call__(self, logits: Float[Array, "BW V"], output: Int[Array, "BW T"], step: Int[Array, ""]) -> Constrained:
        """Applies the rules to one step.

        Args:
            logits: of the next token.
            output: the tokens so far; from `step` on, junk.
            step: how many there are.
        """
        rules, vocab_size = self.constraints, logits.shape[1]
        history, length = output, jnp.broadcast_to(step, self.limits.shape)
        if self.prompt.shape[1]:
            history, length = join(self.prompt, self.prompt_lengths, output), self.prompt_lengths + step
        is_past = jnp.arange(history.shape[1])[None] < length[:, None]

        if rules.repetition_penalty is not None:
            penalty = jnp.clip(jnp.nan_to_num(rules.repetition_penalty, nan=1), *PENALTY_RANGE)[:, None]
            penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
            logits = jnp.where(_mark(history, is_past, vocab_size), penalised, logits)
        log_z = jax.nn.logsumexp(logits, axis=-1, keepdims=True)

        bans: list[tuple[Array, Array]] = []
        n = None
        if rules.no_repeat_ngram is not None:
            n = jnp.asarray(rules.no_repeat_ngram)[:, None, None]
            repeats = _agree(history[:, None], n - 1, history, length)[:, 0]
            bans.append((history, repeats & is_past & (n[:, 0] > 0)))
        if rules.banned_phrases is not None:
            phrases = rules.banned_phrases
            at = jnp.arange(phrases.shape[2])[None, None]
            is_last = at == (phrases >= 0).sum(axis=-1, keepdims=True) - 1
            bans.append(_flat(phrases, is_last & _agree(phrases, at, history, length)))
        required = None
        if rules.required_phrases is not None:
            required = _Required.make(rules.required_phrases, output, step, vocab_size)
            if n is not None:
                bans.append(_flat(*required.reserved(n, history, length)))

        is_end = (jnp.arange(vocab_size) == self.end_id)[None]
        allowed = jnp.ones(logits.shape, bool)
        if rules.banned_tokens is not None:
            allowed &= ~rules.banned_tokens
        if bans:
            ids, where = (jnp.concatenate(parts, axis=1) for parts in zip(*bans, strict=True))
            allowed &= ~_mark(ids, where, vocab_size)
        if rules.min_tokens is not None:
            allowed &= ~(is_end & (step < rules.min_tokens)[:, None])
        if rules.min_ratio is not None:
            allowed &= ~(is_end & (step < rules.min_ratio * self.source_lengths - _ROUNDING)[:, None])
        if required is not None:
            allowed &= ~(is_end & (required.missing > 0)[:, None])
            allowed &= required.progress >= required.least(self.limits - 1 - step, n)[:, None]
        ends_unmet = is_end & ~allowed.any(axis=-1, keepdims=True)
        logits = jnp.where(allowed, logits, jnp.where(ends_unmet, logits - LAST_RESORT, -jnp.inf))
        is_stuck = ends_unmet.any(axis=-1)
        if required is None:
            return Constrained(logits, log_z, is_stuck)
        return Constrained(
            logits, log_z, is_stuck, required.done[:, None] + required.progress, required.wanted(vocab_size)
        )


class _Required(typing.NamedTuple):
    """How far each hypothesis is with its required phrases. Nothing here depends on the order of the phrases."""

    phrases: Int[Array, "BW P M"]
    is_next: Bool[Array, "BW P M"]
    """Where the tokens of a phrase before this one have just come, and the phrase is not in the output yet."""
    done: Int[Array, "BW"]
    """Tokens of phrases that are in the output."""
    missing: Int[Array, "BW"]
    """Tokens of those that are not."""
    progress: Int[Array, "BW V"]
    """Tokens of one missing phrase that would have come, in a row, were this token the next; 0 for most."""

    @classmethod
    def make(cls, phrases: Array, output: Array, step: Array, vocab_size: int) -> "_Required":
        at = jnp.arange(phrases.shape[2], dtype=jnp.int32)[None, None]
        lengths = (phrases >= 0).sum(axis=-1, dtype=jnp.int32)
        is_missing = ~_contains(output, step, phrases)
        stands = _agree(phrases, at, output, jnp.broadcast_to(step, output.shape[:1]))
        is_next = stands & (phrases >= 0) & is_missing[..., None]
        ids, counts = _flat(phrases, jnp.where(is_next, at + 1, 0))
        rows = jnp.arange(len(ids))[:, None]
        progress = jnp.zeros((len(ids), vocab_size), jnp.int32).at[rows, jnp.where(counts > 0, ids, vocab_size)]
        missing = jnp.where(is_missing, lengths, 0).sum(axis=1, dtype=jnp.int32)
        done = lengths.sum(axis=1, dtype=jnp.int32) - missing
        return cls(phrases, is_next, done, missing, progress.max(counts, mode="drop"))

    def least(self, room: Array, n: Array | None) -> Array:
        """The least progress that the next token may make.

        A phrase under way counts as not begun after any token that does not go on with it: `missing - progress` tokens
        are needed after a token, and one place of `room` is gone.

        Args:
            room: tokens that still may come, without the end token.
            n: of the n-grams that may not come twice. Whoever has begun a phrase with n tokens cannot begin it again.
        """
        most = self.progress.max(axis=-1)
        least = jnp.clip(self.missing - room + 1, 0, most)
        return least if n is None else jnp.where((n[:, 0, 0] > 0) & (most > n[:, 0, 0]), most, least)

    def reserved(self, n: Array, history: Array, length: Array) -> tuple[Array, Array]:
        """The tokens that would use up an n-gram of a missing phrase elsewhere, so that it could not come any more."""
        would = _agree(self.phrases, n - 1, history, length) & (n > 0) & (self.phrases >= 0)
        is_missing = self.is_next.any(axis=-1, keepdims=True)  # the first token of a missing phrase is always one
        return self.phrases, would & is_missing & ~self.is_next

    def wanted(self, vocab_size: int) -> Array:
        at = jnp.arange(self.phrases.shape[2])[None, None]
        furthest = jnp.where(self.is_next, at, -1).argmax(axis=-1)
        ids = jnp.take_along_axis(self.phrases, furthest[..., None], axis=-1)[..., 0]
        return jnp.where(self.is_next.any(axis=-1), ids, vocab_size)


def _agree(
    sequences: Int[Array, "BW P M"],
    needed: Int[Array, "#BW #P #M"],
    tail: Int[Array, "BW T"],
    length: Int[Array, "BW"],
) -> Bool[Array, "BW P M"]:
    """At which positions of the sequences the `needed` tokens before are those that have just come.

    Args:
        sequences: P of each row.
        needed: how many tokens; 0 or fewer: always. Where a sequence or the tail has not so many, never.
        tail: tokens that have come, then junk.
        length: how many have come.

    Example:
        >>> _agree(jnp.array([[[7, 8, 7, 9]]]), jnp.array([[[1]]]), jnp.array([[5, 7, 0]]), jnp.array([2])).tolist()
        [[[False, True, False, True]]]
    """
    at = jnp.arange(sequences.shape[2])[None, None]

    def compare(k: Array, agrees: Array) -> Array:
        last = jnp.take_along_axis(tail, jnp.clip(length - 1 - k, 0, tail.shape[1] - 1)[:, None], axis=1)
        same = (jnp.roll(sequences, k + 1, axis=2) == last[..., None]) & (at > k) & (length > k)[:, None, None]
        return agrees & (same | (k >= needed))

    # no position has as many tokens before it as there are positions
    steps = jnp.minimum(jnp.max(needed), sequences.shape[2]).astype(jnp.int32)
    return jax.lax.fori_loop(jnp.int32(0), steps, compare, jnp.ones(sequences.shape, bool))


def _contains(output: Int[Array, "BW T"], step: Int[Array, ""], phrases: Int[Array, "BW P M"]) -> Bool[Array, "BW P"]:
    """Which phrases are in the first `step` tokens; an empty one is."""
    at = jnp.arange(output.shape[1])[None]

    def compare(k: Array, found: Array) -> Array:
        token = jax.lax.dynamic_index_in_dim(phrases, k, axis=2)
        same = (jnp.roll(output, -k, axis=1)[:, None] == token) & (at + k < step)[:, None]
        return found & (same | (token < 0))

    every = jnp.ones((*phrases.shape[:2], output.shape[1]), bool)
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(phrases.shape[2]), compare, every).any(axis=-1)


def _mark(ids: Int[Array, "BW M"], where: Bool[Array, "BW M"], vocab_size: int) -> Bool[Array, "BW V"]:
    """True for the ids of each row that stand where `where` is True."""
    rows = jnp.arange(len(ids))[:, None]
    marks = jnp.zeros((len(ids), vocab_size), bool)
    return marks.at[rows, jnp.where(where, ids, vocab_size)].set(True, mode="drop")


def _flat(phrases: Array, values: Array) -> tuple[Array, Array]:
    return phrases.reshape(len(phrases), -1), values.reshape(len(phrases), -1)
