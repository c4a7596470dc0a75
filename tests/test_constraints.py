"""Rules against a statement of them in plain Python, and in the outputs of all that decodes."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_counter import count_compilations
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import V, compiled_fast, random_ids, random_params, tiny_config, tiny_model
from tolerances import assert_close, assert_same_bits

from tfm.decoding.beam import BeamSearch, beam_search
from tfm.decoding.constraints import LAST_RESORT, Constraints
from tfm.decoding.generate import generate, generate_n_best
from tfm.decoding.sampling import Greedy, Sampling
from tfm.decoding.score import score

B, S, P, CAPACITY, W = 4, 5, 3, 12, 4
CONFIGS = [
    tiny_config(positions="t5-bias", shared_embeddings="none", decoder_layers=1),
    tiny_config(positions="rope", architecture="decoder-only", shared_embeddings="none", decoder_layers=1),
]
both_architectures = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.architecture)
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


@pytest.fixture(autouse=True)
def _compile_fast():
    with compiled_fast():
        yield


# The statement


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


@functools.cache
def rules_program():
    @jax.jit
    def apply(constraints, logits, output, step, prompt, prompt_lengths, limits):
        rules = constraints.bind(
            prompt=prompt, prompt_lengths=prompt_lengths, source_lengths=jnp.array(SOURCE_LENGTHS), limits=limits,
            end_id=END,
        )  # fmt: skip
        return rules(logits, output, step)

    return apply


few = st.integers(0, 5).map(lambda token: token if token != END else 6)  # few tokens, so that much matches


def without(banned, required):
    """The banned phrases, [B, P, M], without those that are within a required one of their row."""
    kept = banned.copy()
    for row, phrases in enumerate(banned.tolist()):
        for i, phrase in enumerate(phrases_of(phrases)):
            at = [j for j, padded in enumerate(phrases) if padded[0] >= 0][i]
            if any(contains(other, phrase) for other in phrases_of(required[row].tolist())):
                kept[row, at] = -1
    return kept


@st.composite
def constraints_drawn(draw):
    def phrases(most):
        padded = st.lists(few, max_size=most).map(lambda phrase: phrase + [-1] * (3 - len(phrase)))
        return np.array(draw(st.lists(padded, min_size=2 * B, max_size=2 * B)), np.int32).reshape(B, 2, 3)

    def numbers(values):
        return np.array(draw(st.lists(values, min_size=B, max_size=B)))

    banned = np.array(draw(st.lists(st.sampled_from([True] + [False] * 5), min_size=B * V, max_size=B * V)))
    required = phrases(3)
    banned = banned.reshape(B, V)
    for row in range(B):
        banned[row, required[row][required[row] >= 0]] = False
    return Constraints(
        min_tokens=numbers(st.integers(0, 6)),
        min_ratio=numbers(st.sampled_from([0.0, 0.5, 1.0])),
        max_ratio=numbers(st.sampled_from([1.0, 1.5, np.inf])),
        repetition_penalty=numbers(st.sampled_from([0.8, 1.0, 1.3, 5.0])),
        no_repeat_ngram=numbers(st.integers(0, 4)),
        banned_tokens=banned,
        banned_phrases=without(phrases(3), required),
        required_phrases=required,
    )


@settings(max_examples=100)
@given(
    constraints=constraints_drawn(),
    text=st.lists(few, min_size=B * (MOST + P), max_size=B * (MOST + P)),
    step=st.integers(0, MOST - 1),
    limit=st.integers(1, MOST),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_may_come_is_what_the_statement_says(constraints, text, step, limit, seed):
    text = np.array(text, np.int32).reshape(B, -1)
    output, prompt = text[:, :MOST], text[:, MOST:]
    logits = np.random.default_rng(seed).normal(0, 2, (B, V)).astype(np.float32)
    arrays = constraints.as_arrays(batch=B, vocab_size=V, end_id=END)
    limits = np.asarray(arrays.cut(jnp.full(B, limit), jnp.array(SOURCE_LENGTHS)))
    found = rules_program()(arrays, logits, output, np.int32(step), prompt, PROMPT_LENGTHS, limits)
    prompts = [prompt[i, 1 : PROMPT_LENGTHS[i]].tolist() for i in range(B)]
    for i, row in enumerate(rows_of(constraints, [limit] * B, prompts=prompts)):
        assert row.limit == limits[i]
        so_far = output[i, :step].tolist()
        allowed = row.allowed(so_far)
        assert np.flatnonzero(np.isfinite(found.logits[i])).tolist() == allowed
        reweighted = row.reweighted(logits[i], so_far)
        last_resort = 0 if row.choices(so_far) else LAST_RESORT
        assert_close(found.logits[i, np.array(allowed)], reweighted[allowed] - last_resort)
        assert_close(found.log_z[i, 0], np.log(np.exp(reweighted).sum()))
        # nothing that is wanted is less than what is under way
        done = sum(map(len, row.required_phrases)) - sum(map(len, row.missing(so_far)))
        assert found.banks[i].tolist() == [done + row.progress(so_far, token) for token in range(V)]


def test_values_that_only_the_device_knows_make_no_nan():
    arrays = NEUTRAL.as_arrays(batch=B, vocab_size=V, end_id=END)
    broken = dataclasses.replace(
        arrays,
        repetition_penalty=np.array([0, np.nan, np.inf, -1], np.float32),
        min_ratio=np.full(B, np.nan, np.float32),
        no_repeat_ngram=np.array([-3, 2**31 - 1, 0, 1], np.int32),
        required_phrases=np.full((B, 2, 3), 4, np.int32),
    )
    logits = np.random.default_rng(0).normal(0, 9, (B, V)).astype(np.float32)
    inputs = (np.int32(2), PROMPT, PROMPT_LENGTHS, np.array([0, 1, 2, 9]))
    found = rules_program()(broken, logits, random_ids(B, MOST), *inputs)
    assert np.isfinite(found.logits).any(axis=1).all()
    assert not np.isnan(found.logits).any()
    assert np.isfinite(found.log_z).all()


def test_a_rule_that_is_not_there_is_not_compiled():
    assert Constraints().as_arrays(batch=B, vocab_size=V, end_id=END) is None
    assert Constraints(banned_phrases=np.zeros((0, 3), int)).as_arrays(batch=B, vocab_size=V, end_id=END) is None
    arrays = Constraints(min_tokens=2).as_arrays(batch=B, vocab_size=V, end_id=END)
    inputs = (np.zeros((B, V), np.float32), PROMPT, np.int32(0), PROMPT, PROMPT_LENGTHS, np.full(B, 9))
    program = str(jax.make_jaxpr(rules_program())(arrays, *inputs))
    assert "while" not in program
    assert "scatter" not in program


# In what comes out


ALL_RULES = Constraints(
    min_tokens=np.array([0, 3, 5, 2]),
    min_ratio=np.array([0.6, 1.0, 0.0, 0.5], np.float32),
    max_ratio=np.array([2.0, 9.0, np.inf, 2.0], np.float32),
    repetition_penalty=np.array([1.0, 1.3, 0.9, 2.0], np.float32),
    no_repeat_ngram=np.array([2, 0, 3, 2]),
    banned_tokens=np.arange(V)[None] == np.array([[3], [0], [-1], [10]]),
    banned_phrases=np.array([[[4, -1, -1], [5, 5, -1]], [[7, 8, -1], [6, -1, -1]], [[1, 0, -1]] * 2, [[-1] * 3] * 2]),
    required_phrases=np.array(
        [[[6, 7, 8], [9, -1, -1]], [[5, 5, -1], [3, 4, -1]], [[-1] * 3] * 2, [[0, 1, 3], [1, 3, 9]]]
    ),
)
LIMITS = np.array([10, 8, 10, 9])
DECODERS = {
    "greedy": Greedy(),
    "sampling": Sampling(temperature=1.5, top_k=8, top_p=0.95),
    "beam": BeamSearch(width=W, num_best=W),
}


def run(config, decoder, *, source=SOURCE, source_lengths=SOURCE_LENGTHS, **arguments):
    """All that was found, as lists of tokens: [row][hypothesis]; and the result itself."""
    arguments = {"max_tokens": LIMITS, "capacity": CAPACITY, "constraints": ALL_RULES, **arguments}
    model, params = tiny_model(config), random_params(config, arguments.pop("seed", 0))
    inputs = (model, params, source)
    if isinstance(decoder, BeamSearch):
        made = generate_n_best(*inputs, source_lengths=source_lengths, search=decoder, **arguments)
    else:
        arguments.setdefault("key", jax.random.key(5))
        made = generate(*inputs, source_lengths=source_lengths, sampler=decoder, **arguments)
        made = jax.tree.map(lambda x: x[:, None], made)
    made = jax.tree.map(np.asarray, made)
    there = made.scores > -np.inf
    found = [
        [made.tokens[i, j, : made.lengths[i, j]].tolist() for j in np.flatnonzero(there[i])] for i in range(len(there))
    ]
    return found, made


def assert_honoured(found, constraints, limits, prompts=None):
    met = 0
    for outputs, row in zip(found, rows_of(constraints, limits, prompts=prompts), strict=True):
        assert outputs
        for output in outputs:
            assert len(output) <= row.limit
            for step, token in enumerate(output):
                assert token in row.allowed(output[:step]), (row, output, step)
            gave_up = output[-1] == END and row.is_banned(output[:-1], END)
            assert gave_up or all(contains(output, phrase) for phrase in row.required_phrases), (row, output)
            met += not gave_up
    return met


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
@both_architectures
def test_every_rule_is_honoured_and_none_compiles_when_it_changes(config, decoder):
    found, made = run(config, decoder)
    met = assert_honoured(found, ALL_RULES, LIMITS)
    shuffled = {f.name: np.asarray(getattr(ALL_RULES, f.name))[[2, 0, 3, 1]] for f in dataclasses.fields(ALL_RULES)}
    shuffled |= {name: getattr(ALL_RULES, name) for name in ("min_ratio", "max_ratio")}  # which fit the sources
    changes = [
        {"seed": 1},
        {"seed": 2},
        {"constraints": Constraints(**shuffled), "max_tokens": np.full(B, 10)},
        {"constraints": dataclasses.replace(ALL_RULES, no_repeat_ngram=1, repetition_penalty=1.0, min_tokens=4)},
        {"constraints": dataclasses.replace(ALL_RULES, required_phrases=np.array([[5, 9, 5], [-1, -1, -1]]))},
    ]
    for change in changes:
        random_params(config, change.get("seed", 0))  # which compiles on its first call
    with count_compilations() as compilations:
        for change in changes:
            found, _ = run(config, decoder, **change)
            rules, limits = change.get("constraints", ALL_RULES), change.get("max_tokens", LIMITS)
            met += assert_honoured(found, rules, limits)
            assert compilations.count == 0, (change, compilations.names)
        only_bans = dataclasses.replace(
            NEUTRAL, banned_tokens=~np.eye(V, dtype=bool)[END], banned_phrases=np.array([[END, -1, -1]] * 2)
        )
        nothing_left, made = run(config, decoder, constraints=only_bans)
    assert met > 12  # and not all gave up
    assert [outputs[0] for outputs in nothing_left] == [[END]] * B
    assert np.isfinite(made.scores[:, 0]).all()


@both_architectures
def test_prompts_count_for_repetition_and_phrases(config):
    prompts = [PROMPT[i, 1 : PROMPT_LENGTHS[i]].tolist() for i in range(B)]
    limits = np.full(B, MOST)
    rules = Constraints(
        repetition_penalty=1.2, no_repeat_ngram=np.array([1, 2, 1, 3]), required_phrases=np.array([[8, 6]]),
        banned_phrases=np.stack([[[PROMPT[i, PROMPT_LENGTHS[i] - 1], t] for t in (4, 5, 7)] for i in range(B)]),
    )  # fmt: skip
    prompted = dict(prompt=PROMPT, prompt_lengths=PROMPT_LENGTHS, max_tokens=limits, constraints=rules)
    junk = np.where(np.arange(P) < PROMPT_LENGTHS[:, None], PROMPT, random_ids(B, P, seed=9))
    for decoder in (Greedy(), DECODERS["beam"]):
        found, made = run(config, decoder, **prompted)
        assert_honoured(found, rules, limits, prompts)
        _, again = run(config, decoder, **{**prompted, "prompt": junk})
        assert_same_bits(again.tokens, made.tokens)


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
def test_scores_are_the_models_own(decoder):
    config = CONFIGS[0]
    found, made = run(config, decoder)
    log_probs = made.log_probs if isinstance(decoder, BeamSearch) else made.scores
    pairs = [(i, j, output) for i, outputs in enumerate(found) for j, output in enumerate(outputs)]
    target = np.zeros((len(pairs), CAPACITY), np.int32)
    for at, (_, _, output) in enumerate(pairs):
        target[at, : len(output)] = output
    rows = np.array([i for i, _, _ in pairs])
    expected = score(
        tiny_model(config), random_params(config), SOURCE[rows], target, source_lengths=SOURCE_LENGTHS[rows],
        target_lengths=[len(output) for _, _, output in pairs],
    )  # fmt: skip
    np.testing.assert_allclose([log_probs[i, j] for i, j, _ in pairs], expected.log_probs, atol=1e-4)
    if isinstance(decoder, BeamSearch):
        at = np.arange(CAPACITY) < target.shape[1]
        each = np.stack([made.token_log_probs[i, j] for i, j, _ in pairs])
        np.testing.assert_allclose(each[:, at], np.asarray(expected.token_log_probs)[:, at], atol=1e-4)
        assert (np.diff(np.where(np.isfinite(made.scores), made.scores, -1e9), axis=1) <= 0).all()


@pytest.mark.parametrize("decoder", [Greedy(), DECODERS["beam"]], ids=["greedy", "beam"])
def test_numbers_that_change_nothing_change_nothing(decoder):
    for config in CONFIGS:
        _, free = run(config, decoder, constraints=None)
        _, ruled = run(config, decoder, constraints=NEUTRAL)
        assert free.tokens.tolist() == ruled.tokens.tolist()
        assert_close(free.scores, ruled.scores, times=10)


def test_a_beam_of_one_is_greedy():
    for config in CONFIGS:
        _, greedy = run(config, Greedy())
        _, best = run(config, BeamSearch(width=1, stop="first-finished"))
        assert_same_bits(best.tokens, greedy.tokens)


@pytest.mark.parametrize("decoder", [DECODERS["sampling"], DECODERS["beam"]], ids=["sampling", "beam"])
def test_neighbours_and_padding_change_nothing(decoder):
    config = CONFIGS[1]
    keys = {} if isinstance(decoder, BeamSearch) else {"key": jax.random.split(jax.random.key(3), B)}
    _, together = run(config, decoder, **keys)
    order = np.array([3, 1, 0, 2])
    moved_rules = jax.tree.map(lambda x: x[order], ALL_RULES)
    moved_keys = {name: key[order] for name, key in keys.items()}
    _, moved = run(
        config, decoder, source=SOURCE[order], source_lengths=SOURCE_LENGTHS[order], max_tokens=LIMITS[order],
        constraints=moved_rules, **moved_keys,
    )  # fmt: skip
    padded_rules = dataclasses.replace(
        ALL_RULES,
        banned_phrases=np.pad(ALL_RULES.banned_phrases, ((0, 0), (0, 1), (0, 2)), constant_values=-1),
        required_phrases=np.pad(ALL_RULES.required_phrases, ((0, 0), (1, 0), (0, 1)), constant_values=-1),
    )
    _, padded = run(config, decoder, source=np.pad(SOURCE, ((0, 0), (0, 2))), constraints=padded_rules, **keys)
    for made, rows in ((moved, order), (padded, np.arange(B))):
        assert made.tokens.tolist() == together.tokens[rows].tolist()
        assert_close(made.scores, together.scores[rows], times=10)


def test_it_works_inside_a_callers_jit():
    config, search = CONFIGS[0], DECODERS["beam"]
    inputs = dict(source_lengths=SOURCE_LENGTHS, max_tokens=LIMITS, capacity=CAPACITY)

    @jax.jit
    def inside(params, constraints):
        one = generate(tiny_model(config), params, SOURCE, constraints=constraints, **inputs)
        several = generate_n_best(tiny_model(config), params, SOURCE, constraints=constraints, search=search, **inputs)
        return one.tokens[:, None], several.tokens

    within = inside(random_params(config), ALL_RULES)
    for tokens, decoder in zip(within, (Greedy(), search), strict=True):
        assert_same_bits(tokens, run(config, decoder)[1].tokens)


# Beam search, against all that there is


SMALL_V, SMALL_T, SMALL_END, WIDE = 4, 4, 2, 4**4


@functools.partial(jax.jit, static_argnames="width")
def search_table(table, constraints, limits, width=WIDE):
    """Beam search in a table of logits, [B, prefixes, V], whose state is each hypothesis's prefix."""
    batch = table.shape[0]
    rows = jnp.repeat(jnp.arange(batch), width)

    def step(tokens, prefixes):
        prefixes = prefixes * SMALL_V + tokens[:, 0] + 1
        return table[rows, prefixes], prefixes

    rules = constraints.bind(
        prompt=jnp.ones((batch, 1), int), prompt_lengths=jnp.ones(batch, int), source_lengths=jnp.ones(batch, int),
        limits=limits, end_id=SMALL_END, width=width,
    )  # fmt: skip
    return beam_search(
        BeamSearch(width=width, num_best=min(width, 5), alpha=0.7, stop="provably-best"),
        table[:, 0], jnp.zeros(batch * width, jnp.int32), step=step, reorder=lambda state, p: state[p],
        constrain=rules, limits=limits, max_tokens=SMALL_T, end_id=SMALL_END, pad_id=0,
    )  # fmt: skip


def exhaustive(table, row):
    """Every output that the rules let come: (score, log P, tokens), best first."""
    found = []

    def grow(output, prefix, ranked, log_prob):
        if output and (output[-1] == SMALL_END or len(output) == row.limit):
            found.append((ranked / ((5 + len(output)) / 6) ** 0.7, log_prob, output))
            return
        logits = table[prefix].astype(np.float64)
        reweighted = row.reweighted(logits, output)
        log_z = np.log(np.exp(reweighted).sum()) + (0 if row.choices(output, SMALL_V) else LAST_RESORT)
        for token in row.allowed(output, SMALL_V):
            grow(
                [*output, token],
                prefix * SMALL_V + token + 1,
                ranked + reweighted[token] - log_z,
                log_prob + logits[token] - np.log(np.exp(logits).sum()),
            )

    grow([], 0, 0.0, 0.0)
    return sorted(found, key=lambda found: -found[0])


SMALL_TOKENS = [0, 1, 3]


@st.composite
def small_rules(draw):
    phrase = st.lists(st.sampled_from(SMALL_TOKENS), max_size=2).map(lambda tokens: tokens + [-1] * (2 - len(tokens)))
    required = np.array(draw(st.lists(phrase, min_size=6, max_size=6))).reshape(3, 2, 2)
    limits = draw(st.tuples(*[st.integers(1, SMALL_T)] * 3))
    for row, limit in enumerate(limits):  # no more than there is room for
        while (required[row] >= 0).sum() > limit - 1:
            required[row][tuple(np.argwhere(required[row] >= 0)[-1])] = -1
    return limits, Constraints(
        min_tokens=np.array(draw(st.lists(st.integers(0, 3), min_size=3, max_size=3))),
        repetition_penalty=np.array(draw(st.lists(st.sampled_from([1.0, 1.5]), min_size=3, max_size=3))),
        no_repeat_ngram=np.array(draw(st.lists(st.integers(0, 2), min_size=3, max_size=3))),
        banned_phrases=without(np.array(draw(st.lists(phrase, min_size=3, max_size=3))).reshape(3, 1, 2), required),
        required_phrases=required,
    )


def random_table(seed):
    prefixes = sum(SMALL_V**n for n in range(SMALL_T + 1))
    return np.random.default_rng(seed).normal(0, 2, (3, prefixes, SMALL_V)).astype(np.float32)


def small_rows(constraints, limits):
    for i, limit in enumerate(limits):
        numbers = {
            name: np.asarray(getattr(constraints, name))[i].item()
            for name in ("min_tokens", "repetition_penalty", "no_repeat_ngram")
            if getattr(constraints, name) is not None
        }
        phrases = {
            name: phrases_of(np.asarray(getattr(constraints, name))[i].tolist())
            for name in ("banned_phrases", "required_phrases")
            if getattr(constraints, name) is not None
        }
        yield Row(limit=limit, **numbers, **phrases, banned_tokens=(False,) * SMALL_V, end_id=SMALL_END)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), drawn=small_rules())
def test_a_beam_that_is_wide_enough_finds_what_exhaustive_search_finds(seed, drawn):
    limits, constraints = drawn
    table = random_table(seed)
    arrays = constraints.as_arrays(batch=3, vocab_size=SMALL_V, end_id=SMALL_END)
    best = jax.tree.map(np.asarray, search_table(table, arrays, np.array(limits)))
    for i, row in enumerate(small_rows(constraints, limits)):
        expected = exhaustive(table[i], row)[:5]
        there = best.scores[i] > -np.inf
        assert there.sum() == len(expected)
        assert_close(best.scores[i][there], [score for score, _, _ in expected])
        met = np.array([value > -LAST_RESORT / 2 for value, _, _ in expected])
        log_probs = np.array([log_prob for _, log_prob, _ in expected])
        assert_close(best.log_probs[i][there][met], log_probs[met])
        for j, (value, _, tokens) in enumerate(expected):
            if value > -LAST_RESORT / 2:  # float32 does not tell apart those behind
                assert best.tokens[i, j, : best.lengths[i, j]].tolist() == tokens


def test_a_narrow_beam_places_phrases_where_they_fit():
    """Better than forcing them at the end, and mostly as well as it can be done."""
    limits = (SMALL_T,) * 3
    required = np.array([[[1, 3]], [[3, 1]], [[0, -1]]])
    constraints = Constraints(required_phrases=required)
    arrays = constraints.as_arrays(batch=3, vocab_size=SMALL_V, end_id=SMALL_END)
    gaps: dict[int, list[float]] = {1: [], SMALL_V: []}
    for seed, width in itertools.product(range(20), gaps):
        table = random_table(seed)
        found = jax.tree.map(np.asarray, search_table(table, arrays, np.array(limits), width=width))
        for i, row in enumerate(small_rows(constraints, limits)):
            tokens = found.tokens[i, 0, : found.lengths[i, 0]].tolist()
            assert contains(tokens, row.required_phrases[0])
            gaps[width].append(exhaustive(table[i], row)[0][0] - found.scores[i, 0])
    assert min(map(min, gaps.values())) > -1e-4
    assert np.mean(gaps[SMALL_V]) < 0.5 * np.mean(gaps[1])
    assert np.mean(np.array(gaps[SMALL_V]) < 1e-4) > 0.5


# Errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_tokens": -1}, "expected min_tokens a whole number from 0 to .*, got -1"),
        ({"min_tokens": 2.5}, r"expected min_tokens as a whole number .*, one or 4, one a row, got float64"),
        ({"min_tokens": True}, "expected min_tokens as a whole number .*, got bool"),
        ({"min_tokens": [1, 2]}, r"one or 4, one a row, got int64 of shape \(2,\)"),
        ({"min_tokens": 9}, r"expected room for 9 tokens \(min_tokens\) in row 1, got a limit of 8"),
        ({"min_ratio": 3.0}, r"expected room for 15 tokens \(min_ratio\) in row 0, got a limit of 10"),
        ({"min_ratio": np.inf}, "expected min_ratio a finite number of at least 0, got inf"),
        ({"max_ratio": np.nan}, "expected max_ratio at least 0, got nan"),
        ({"min_ratio": 2, "max_ratio": 1}, "expected a max_ratio of at least min_ratio, got 1.0 and 2.0"),
        ({"repetition_penalty": 0}, "expected repetition_penalty from 0.01 to 100.0, got 0"),
        ({"repetition_penalty": "much"}, "expected repetition_penalty as from 0.01 to 100.0, one or 4"),
        ({"no_repeat_ngram": -2}, "expected no_repeat_ngram a whole number from 0 to .*, got -2"),
        ({"banned_tokens": np.zeros(V - 1, bool)}, r"expected banned_tokens as booleans \[11\] or \[4, 11\], got bool"),
        ({"banned_tokens": np.zeros(V, int)}, r"expected banned_tokens as booleans .*, got int64"),
        ({"banned_phrases": [[1, 2], [3]]}, r"expected banned_phrases as whole numbers \[P, M\], padded with -1"),
        ({"banned_phrases": [[1.0]]}, r"expected banned_phrases as whole numbers .* got float64 of shape \(1, 1\)"),
        ({"banned_phrases": np.zeros((2, 1, 1), int)}, r"\[P, M\] or \[4, P, M\], .* got int64 of shape \(2, 1, 1\)"),
        ({"banned_phrases": [[V]]}, f"expected ids from 0 to 10 in banned_phrases, and -1 behind them, got {V}"),
        ({"required_phrases": [[-2]]}, "expected ids from 0 to 10 in required_phrases, and -1 behind them, got -2"),
        ({"required_phrases": [[-1, 3]]}, "expected -1 only behind the ids of required_phrases"),
        ({"required_phrases": [[3, END]]}, f"expected required_phrases without the end token {END}"),
        (
            {"required_phrases": [[3] * 8]},
            "expected room for 9 required tokens and the end token in row 1, got a limit of 8",
        ),
        (
            {"required_phrases": [[3, 4]], "max_ratio": 2.0},
            "expected room for 3 required tokens and the end token in row 1, got a limit of 2",
        ),
        (
            {"required_phrases": [[3, 4]], "banned_tokens": np.arange(V) == 4},
            "expected required_phrases without banned tokens, got 4 in one",
        ),
        (
            {"required_phrases": [[3, 4, 5]], "banned_phrases": [[4, 5], [6, -1]]},
            r"expected required_phrases without banned ones, got \[4, 5\] in \[3, 4, 5\]",
        ),
    ],
)
def test_rules_that_cannot_be(changes, message):
    with count_compilations() as compilations, pytest.raises(ValueError, match=message):
        run(CONFIGS[0], Greedy(), constraints=Constraints(**changes))
    assert "jit(_generate)" not in compilations.names
    with pytest.raises(ValueError, match=message):
        run(CONFIGS[0], DECODERS["beam"], constraints=Constraints(**changes))
