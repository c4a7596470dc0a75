"""Beam search over a step callback, wholly on the device. It knows no model: only logits, and how to go on.

A hypothesis is complete when it ends with the end token, or is cut off at its row's limit of tokens; complete ones are
ranked by  score = log P(Y) / lp(|Y|),  |Y| counting the end token. Both length penalties are 1 for α = 0, and favour
longer hypotheses as α grows:

    gnmt     lp(n) = ((5 + n) / 6)^α      (Wu et al. 2016, equation 14)
    power    lp(n) = n^α                  (α = 1: the mean log-probability of a token)

Where the attention that a hypothesis laid on each source token is known, β times a penalty for neglected ones is added:

    coverage    cp(X, Y) = Σ over source tokens of log min(attention on it, summed over the tokens of Y, 1)
                                      (Wu et al. 2016, equation 15)

A row's search ends, at the latest when no incomplete hypothesis is left, by one of three rules:

    first-finished    one hypothesis is complete
    all-finished      W hypotheses are complete, W being the width
    provably-best     the num_best-th best complete score  ≥  max log P(incomplete) / lp(limit): tokens to come can only
                      lower log P, no penalty is larger than that of the limit, and coverage only lowers a score, so no
                      later one can be better

**Groups** (diverse beam search, Vijayakumar et al. 2018). W/G hypotheses each are searches of their own, with their own
complete hypotheses and their own end. At each step they choose in turn, and to a group a token counts for λ less, in
log-probability, for each time that groups before it have chosen it at this step (Hamming diversity, section 4.1). That
decides what is followed; what ranks hypotheses in the end is their score without it. What two groups find is kept once.

Where a caller has rules on what may come, they say at each step which tokens may, and by what hypotheses are ranked
instead of log P, which is still summed and returned. Where something must come, hypotheses compete for places with
those that have met as much of it: see `_in_turns`.
"""

import dataclasses
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tfm.axes import Array, Bool, Float, Int
from tfm.checks import checked_whole_number, keep_whole_numbers, whole_number
from tfm.config import ModelConfig
from tfm.decoding.constraints import Constrained
from tfm.decoding.growing import loop_while_growing
from tfm.decoding.top_k import top_k

MAX_ALPHA = 10
"""Beyond it only lengths count, and float32 does not hold the penalty of long ones."""

LengthPenalty = Literal["gnmt", "power"]
Stop = Literal["first-finished", "provably-best", "all-finished"]


@typing.no_type_check  # pytrees are also built from shapes, specs and other non-arrays
@flax.struct.dataclass
class BeamSearch:
    """How to search. α, β and λ are traced; the rest decides what is compiled."""

    width: int = flax.struct.field(pytree_node=False, default=4)
    """W: incomplete hypotheses that are followed."""
    num_best: int = flax.struct.field(pytree_node=False, default=1)
    """Hypotheses that are returned, at most W."""
    alpha: Float[Array, "*B"] | float = 0.6
    """α of the length penalty, from 0 to 10: one for all rows or one for each."""
    length_penalty: LengthPenalty = flax.struct.field(pytree_node=False, default="gnmt")
    stop: Stop = flax.struct.field(pytree_node=False, default="provably-best")
    coverage: Float[Array, "*B"] | float | None = None
    """β of the coverage penalty, from 0 to 10: one for all rows or one for each. Wu et al. had 0.2. None: there is
    none, and attention need not be looked at."""
    groups: int = flax.struct.field(pytree_node=False, default=1)
    """G: groups that the W hypotheses are divided into, equally."""
    diversity: Float[Array, "*B"] | float = 0.5
    """λ between groups, from 0 to 1,000: one for all rows or one for each. Vijayakumar et al. found 0.2 to 0.8 good."""

    def __post_init__(self) -> None:
        keep_whole_numbers(self, "width", "num_best", "groups")

    def check(self, batch: int, config: ModelConfig) -> None:
        """Raises ValueError for a setting out of its range, or one that this model cannot be searched with.

        An α that is only known later is cut to its range.
        """
        vocab_size = config.target_vocab_size
        for name in ("width", "num_best"):
            checked_whole_number(name, getattr(self, name))
        if not 1 <= self.width <= vocab_size:
            raise ValueError(f"expected a width from 1 to the vocabulary's {vocab_size}, got {self.width}")
        if not 1 <= self.num_best <= self.width:
            raise ValueError(f"expected num_best from 1 to the width {self.width}, got {self.num_best}")
        for name, options in (("length_penalty", LengthPenalty), ("stop", Stop)):
            if getattr(self, name) not in typing.get_args(options):
                expected = ", ".join(typing.get_args(options))
                raise ValueError(f"expected a {name} of {expected}, got {getattr(self, name)!r}")
        groups = whole_number(self.groups)
        if groups is None or groups < 1:
            raise ValueError(f"expected a whole number of at least 1 as groups, got {self.groups!r}")
        if self.width % self.groups:
            raise ValueError(f"expected groups that divide the width {self.width}, got {self.groups}")
        for name, most in _RANGES.items():
            _check_number(name, getattr(self, name), most, batch)
        if self.coverage is not None and not config.attends_to_source:
            raise ValueError(
                "expected no coverage, which counts attention, for a recurrent model without attention (source_context "
                f"{config.source_context!r}), got {self.coverage}"
            )

    def as_arrays(self) -> "BeamSearch":
        """The same with each number as an array of one dtype: to jit, 1 and 1.0 are two kinds of argument."""
        return jax.tree.map(lambda number: jnp.asarray(number, jnp.float32), self)

    def penalty(self, lengths: Int[Array, "*B"]) -> Float[Array, "_ 1"]:
        """lp(lengths): one length for all rows, or one for each."""
        n = jnp.asarray(lengths, jnp.float32)
        base = (5 + n) / 6 if self.length_penalty == "gnmt" else jnp.maximum(n, 1)
        return base.reshape(-1, 1) ** _column(self.alpha, MAX_ALPHA)


_RANGES = {"alpha": MAX_ALPHA, "coverage": 10, "diversity": 1000}
"""The traced numbers of a search go from 0 to these."""


def _check_number(name: str, value: typing.Any, most: int, batch: int) -> None:
    if value is None and name == "coverage":
        return
    number = value if isinstance(value, jax.Array) else np.asarray(value)
    if number.dtype == bool or not jnp.issubdtype(number.dtype, jnp.number) or number.shape not in ((), (batch,)):
        raise ValueError(
            f"expected one number as {name} or {batch}, one a row, got {number.dtype} of shape {number.shape}"
        )
    if not isinstance(number, jax.core.Tracer) and not np.all((number >= 0) & (number <= most)):
        raise ValueError(f"expected {name} from 0 to {most}, got {value}")


def _column(value: Array | float, most: int) -> Float[Array, "_ 1"]:
    """A number for all rows or one for each, cut to its range, which a caller's jit cannot check."""
    return jnp.clip(jnp.nan_to_num(jnp.asarray(value, jnp.float32)), 0, most).reshape(-1, 1)


@typing.no_type_check
@flax.struct.dataclass
class NBest:
    """The best hypotheses of each row, best first. Where a row has fewer, those that are missing have score -inf.

    Samples are hypotheses, too, whose score is their log P.
    """

    tokens: Int[Array, "B R T"]
    """The new ids, the end token included where one came; the padding id behind."""
    token_log_probs: Float[Array, "B R T"]
    """The log-probability of each of them; 0 behind."""
    lengths: Int[Array, "B R"]
    """New ids of each hypothesis, the end token counted."""
    log_probs: Float[Array, "B R"]
    """log P: the sum of the tokens' log-probabilities under the model as it is, whatever the rules made of it."""
    scores: Float[Array, "B R"]
    """What ranks them: log P / lp(length), and β · cp where coverage counts. With a repetition penalty log P is that of
    the logits which it leaves, and a hypothesis that ended because rules left nothing else is far below all others."""
    finished: Bool[Array, "B R"]
    """True where the hypothesis ended with the end token, False where its limit of tokens cut it off."""
    unmet: Bool[Array, "B R"]
    """True where it ended with the end token because rules left nothing else, so that some are not met."""


State = Any
"""What the callbacks remember of B·W hypotheses: a pytree that the search only hands on."""


class _Loop(typing.NamedTuple):
    """What the loop carries: W incomplete hypotheses a row and the W best complete ones."""

    step: Array
    live: NBest
    """Their scores are without the length penalty; -inf where there is none."""
    complete: NBest
    going: Array
    """[B], rows whose search goes on."""
    state: State


def beam_search(
    search: BeamSearch,
    logits: Float[Array, "B V"],
    state: State,
    *,
    step: Callable[[Int[Array, "BW 1"], State], tuple[Float[Array, "BW V"], State]],
    reorder: Callable[[State, Int[Array, "BW"]], State],
    constrain: Callable[[Float[Array, "BW V"], Int[Array, "BW T"], Int[Array, ""]], Constrained] | None = None,
    cover: Callable[[State], Float[Array, "BW"]] | None = None,
    grow: Callable[[State, int], State] | None = None,
    rooms: Sequence[int] = (),
    limits: Int[Array, "B"],
    max_tokens: int,
    end_id: int,
    pad_id: int,
) -> NBest:
    """Follows the W likeliest hypotheses of every row.

    At each step the 2·W likeliest continuations of a row are looked at. Those of the first W that are complete are kept
    as such, as one that follows only one hypothesis would end where greedy decoding ends; the first W of all others go
    on, and there are so many, for each hypothesis ends in one way only. With groups that is said of each group, and of
    W/G.

    Args:
        search: its settings, checked; the vocabulary has at least 2 tokens.
        logits: of the first token.
        state: W equal hypotheses a row, lying row after row.
        step: feeds one token to every hypothesis; gives the logits of the next one.
        reorder: has hypothesis i become a continuation of hypothesis parents[i], always one of the same row.
        constrain: from logits, each hypothesis's tokens so far and their number, which tokens may come next.
        cover: cp of each hypothesis, the tokens counted up to the one whose logits came last. None: cp is 0.
        grow: gives the state room for so many tokens.
        rooms: the numbers of tokens that the state is given room for, one after another; the first is what it has, the
            last is `max_tokens`. None given: it has room for all.
        limits: the most tokens of each row, at most `max_tokens`. A row with 0 has one empty hypothesis.
        max_tokens: T of the result.
        end_id: ends a hypothesis.
        pad_id: fills rows behind their end.

    Returns:
        `search.num_best` hypotheses a row.
    """
    # from here on a group is a row of its own, but for the choosing
    groups, width = search.groups, search.width // search.groups
    limits = jnp.repeat(limits, groups)
    batch, diversity = limits.shape[0], search.diversity
    search = jax.tree.map(lambda x: jnp.repeat(x, groups) if jnp.ndim(x) else x, search)
    num_best = min(search.num_best, width)
    rows = jnp.arange(batch)[:, None]

    def going(live: NBest, complete: NBest, was: Array) -> Array:
        """Where the search has not ended yet, by its rule."""
        best_live = live.scores.max(axis=1)
        open_ = was & (best_live > -jnp.inf)
        if search.stop == "first-finished":
            return open_ & ~(complete.scores[:, 0] > -jnp.inf)
        if search.stop == "all-finished":
            return open_ & ~(complete.scores[:, -1] > -jnp.inf)
        bound = best_live / search.penalty(limits)[:, 0]
        return open_ & ~(complete.scores[:, num_best - 1] >= bound)

    def choose(totals: Array, banks: Array | None, number: int) -> tuple[Array, Array]:
        """The scores and the places of each row's best candidates, in the order in which they come."""
        if banks is not None:
            chosen = _in_turns(totals, banks)[:, :number]
            return jnp.take_along_axis(totals, chosen, axis=1), chosen
        scores, chosen = jax.lax.top_k(totals, number)
        return scores, chosen

    def choose_in_groups(totals: Array, tokens: Array, banks: Array | None, number: int) -> tuple[Array, Array]:
        """The same, each group avoiding what the groups before it have chosen."""
        by_group = jax.tree.map(lambda x: x.reshape(-1, groups, x.shape[-1]), (totals, tokens, banks))
        taken: list[Array] = []
        places = []
        for group in range(groups):
            scores, ids, group_banks = jax.tree.map(lambda x: x[:, group], by_group)  # noqa: B023 - called at once
            times = sum(((ids[..., None] == chosen[:, None]).sum(axis=-1) for chosen in taken), jnp.zeros_like(ids))
            less = _column(diversity, _RANGES["diversity"]) * times
            _, place = choose(scores - less, group_banks, number)
            first = place[:, :width]
            there = jnp.take_along_axis(scores, first, axis=1) > -jnp.inf
            taken.append(jnp.where(there, jnp.take_along_axis(ids, first, axis=1), -1))
            places.append(place)
        chosen = jnp.stack(places, axis=1).reshape(batch, number)
        return jnp.take_along_axis(totals, chosen, axis=1), chosen

    def expand(loop: _Loop, logits: Array, state: State) -> tuple[_Loop, Array]:
        """One token more; and each new incomplete hypothesis's parent, as an index into the state."""
        live, length = loop.live, loop.step + 1
        logits = logits.reshape(batch, width, -1)
        # of each hypothesis so many that as many are left when earlier groups have chosen
        most = min((groups + 1) * width, logits.shape[-1])
        log_z = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        ranked, ranked_log_z, rules = logits, log_z, None
        if constrain is not None:
            rules = constrain(logits.reshape(batch * width, -1), live.tokens.reshape(batch * width, -1), loop.step)
            ranked, ranked_log_z = rules.logits.reshape(logits.shape), rules.log_z.reshape(log_z.shape)
        # the likeliest of each hypothesis first, so that nothing of size W·V is sorted, or normalised
        best, best_tokens = top_k(ranked, most)
        if rules is not None and rules.wanted is not None:
            wanted, wanted_logits = _further(rules.wanted.reshape(batch, width, -1), ranked, best_tokens)
            best = jnp.concatenate([best, wanted_logits], axis=-1)
            best_tokens = jnp.concatenate([best_tokens, wanted], axis=-1)
        each = best.shape[-1]
        totals = (live.scores[..., None] + (best - ranked_log_z)).reshape(batch, -1)
        banks = None
        if rules is not None and rules.banks is not None:
            banks = jnp.take_along_axis(rules.banks.reshape(logits.shape), best_tokens, axis=-1).reshape(batch, -1)
        number = min(2 * width, totals.shape[1])
        if groups == 1:
            scores, chosen = choose(totals, banks, number)
        else:
            scores, chosen = choose_in_groups(totals, best_tokens.reshape(batch, -1), banks, number)
        parents = chosen // each
        tokens = best_tokens.reshape(batch, -1)[rows, chosen]
        token_log_probs = logits[rows, parents, tokens] - log_z[rows, parents, 0]
        ended = tokens == end_id
        first = jnp.zeros_like(loop.step)
        candidates = NBest(
            tokens=jax.lax.dynamic_update_slice(
                live.tokens[rows, parents], tokens[..., None], (first, first, loop.step)
            ),
            token_log_probs=jax.lax.dynamic_update_slice(
                live.token_log_probs[rows, parents],
                token_log_probs[..., None],
                (first, first, loop.step),
            ),
            lengths=jnp.full(tokens.shape, length, jnp.int32),
            log_probs=live.log_probs[rows, parents] + token_log_probs,
            scores=scores,
            finished=ended,
            unmet=jnp.zeros_like(ended)
            if rules is None
            else ended & rules.is_stuck.reshape(batch, width)[rows, parents],
        )
        is_complete = ended | (length >= limits)[:, None]
        counts = is_complete & loop.going[:, None] & (jnp.arange(tokens.shape[1]) < width)[None]
        final = scores / search.penalty(length)
        if cover is not None and search.coverage is not None:
            final += _column(search.coverage, _RANGES["coverage"]) * cover(state).reshape(batch, width)[rows, parents]
        new = dataclasses.replace(candidates, scores=jnp.where(counts, final, -jnp.inf))
        pool = jax.tree.map(lambda *both: jnp.concatenate(both, axis=1), loop.complete, new)
        complete = _take(pool, jax.lax.top_k(pool.scores, width)[1])

        # the first of those that go on, in the order in which they were chosen
        _, kept = jax.lax.top_k(jnp.where(is_complete, -number, -jnp.arange(number)[None]), width)
        live = _take(dataclasses.replace(candidates, scores=jnp.where(is_complete, -jnp.inf, scores)), kept)
        still = going(live, complete, loop.going)
        # a hypothesis of a row that has ended has no continuation that could be among the best
        live = dataclasses.replace(live, scores=jnp.where(still[:, None], live.scores, -jnp.inf))
        return _Loop(length, live, complete, still, state), (rows * width + parents[rows, kept]).reshape(-1)

    def advance(loop: _Loop) -> _Loop:
        last = jax.lax.dynamic_index_in_dim(loop.live.tokens, loop.step - 1, axis=2)
        logits, state = step(last.reshape(batch * width, 1), loop.state)
        loop, parents = expand(loop, logits, state)
        return loop._replace(state=reorder(loop.state, parents))

    def with_room(loop: _Loop, room: int) -> _Loop:
        assert grow is not None
        return loop._replace(state=grow(loop.state, room))

    empty = _nothing(batch, width, max_tokens, pad_id)
    # one hypothesis, the empty one: W equal ones would stay equal
    live = dataclasses.replace(empty, log_probs=jnp.zeros_like(empty.log_probs), scores=empty.scores.at[:, 0].set(0))
    at_once = jnp.where(limits == 0, 0, -jnp.inf)
    complete = dataclasses.replace(
        empty, scores=empty.scores.at[:, 0].set(at_once), log_probs=empty.log_probs.at[:, 0].set(at_once)
    )
    start = _Loop(jnp.int32(0), live, complete, limits > 0, state)
    loop, _ = expand(start, jnp.repeat(logits, groups * width, axis=0), state)
    complete = loop_while_growing(
        loop,
        rooms or [max_tokens],
        goes_on=lambda loop: loop.going.any(),
        step=lambda loop: loop.step,
        advance=advance,
        grow=with_room,
        result=lambda loop: loop.complete,
    )
    best = _best_of_groups(complete, groups, search.num_best)
    missing = best.scores == -jnp.inf
    return dataclasses.replace(
        best,
        tokens=jnp.where(missing[..., None], pad_id, best.tokens),
        token_log_probs=jnp.where(missing[..., None], 0, best.token_log_probs),
        lengths=jnp.where(missing, 0, best.lengths),
        log_probs=jnp.where(missing, -jnp.inf, best.log_probs),
        finished=best.finished & ~missing,
        unmet=best.unmet & ~missing,
    )


def _best_of_groups(complete: NBest, groups: int, num_best: int) -> NBest:
    """The best of all groups of a row, those that an earlier group has found too left out."""
    if groups == 1:
        return jax.tree.map(lambda x: x[:, :num_best], complete)
    together = jax.tree.map(lambda x: x.reshape(-1, groups * x.shape[1], *x.shape[2:]), complete)
    equal = (together.lengths[:, :, None] == together.lengths[:, None]) & (
        together.tokens[:, :, None] == together.tokens[:, None]
    ).all(axis=-1)
    there = together.scores > -jnp.inf
    number = jnp.arange(there.shape[1])
    again = (equal & there[:, None] & (number[None, :] < number[:, None])[None]).any(axis=-1)
    scores = jnp.where(again, -jnp.inf, together.scores)
    return _take(dataclasses.replace(together, scores=scores), jax.lax.top_k(scores, num_best)[1])


def _nothing(batch: int, width: int, max_tokens: int, pad_id: int) -> NBest:
    return NBest(
        tokens=jnp.full((batch, width, max_tokens), pad_id, jnp.int32),
        token_log_probs=jnp.zeros((batch, width, max_tokens), jnp.float32),
        lengths=jnp.zeros((batch, width), jnp.int32),
        log_probs=jnp.full((batch, width), -jnp.inf, jnp.float32),
        scores=jnp.full((batch, width), -jnp.inf, jnp.float32),
        finished=jnp.zeros((batch, width), bool),
        unmet=jnp.zeros((batch, width), bool),
    )


def _take(hypotheses: NBest, chosen: Int[Array, "B R"]) -> NBest:
    return jax.tree.map(lambda x: x[jnp.arange(x.shape[0])[:, None], chosen], hypotheses)


def _further(
    wanted: Int[Array, "B W P"], logits: Float[Array, "B W V"], chosen: Int[Array, "B W M"]
) -> tuple[Int[Array, "B W P"], Float[Array, "B W P"]]:
    """The wanted tokens as candidates beside those chosen already: ids, and logits, -inf where it is no further one."""
    vocab_size, places = logits.shape[-1], jnp.arange(wanted.shape[-1])
    ids = jnp.minimum(wanted, vocab_size - 1)
    again = (wanted[..., None] == chosen[..., None, :]).any(axis=-1)
    earlier = (places[:, None] > places[None])[None, None]
    again |= ((wanted[..., None] == wanted[..., None, :]) & earlier).any(axis=-1)
    found = jnp.take_along_axis(logits, ids, axis=-1)
    return ids, jnp.where(again | (wanted >= vocab_size), -jnp.inf, found)


def _in_turns(scores: Float[Array, "B M"], banks: Int[Array, "B M"]) -> Int[Array, "B M"]:
    """Candidates in the order in which banks take turns: the best of each bank, then the second best of each, and on.

    In one turn better scores go first. So banks have equal shares of the first W places, what a bank has no candidates
    for is shared by the others (Post & Vilar 2018, section 3.2), and the first place of all is that of the best score.

    Example:
        >>> _in_turns(jnp.array([[-1.0, -2.0, -3.0, -4.0, -jnp.inf]]), jnp.array([[0, 0, 0, 1, 2]])).tolist()
        [[0, 3, 1, 2, 4]]
    """
    places = jnp.broadcast_to(jnp.arange(scores.shape[1], dtype=jnp.int32)[None], scores.shape)
    bank, worst, index = jax.lax.sort((banks, -scores, places), dimension=1, num_keys=2)
    is_first = jnp.pad(bank[:, 1:] != bank[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    turn = places - jax.lax.cummax(jnp.where(is_first, places, 0), axis=1)
    turn = jnp.where(worst == jnp.inf, scores.shape[1], turn)  # one that may not come takes no bank's turn
    return jax.lax.sort((turn, worst, index), dimension=1, num_keys=2)[2]
