"""Rules in the outputs of all that decodes."""

import dataclasses

import jax
import numpy as np
import pytest
from compile_counter import count_compilations
from constraint_statement import (
    CAPACITY,
    CONFIGS,
    END,
    MOST,
    NEUTRAL,
    PROMPT,
    PROMPT_LENGTHS,
    SOURCE,
    SOURCE_LENGTHS,
    B,
    P,
    contains,
    rows_of,
)
from recurrent_kinds import one_then_slow
from tiny_models import V, random_ids, random_params, tiny_model
from tolerances import assert_close, assert_same_bits

from tfm.decoding.beam import BeamSearch
from tfm.decoding.constraints import Constraints
from tfm.decoding.generate import generate, generate_n_best
from tfm.decoding.sampling import Greedy, Sampling
from tfm.decoding.score import score

pytestmark = pytest.mark.usefixtures("compile_fast")

both_architectures = pytest.mark.parametrize("config", one_then_slow(CONFIGS), ids=lambda config: config.architecture)
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
    "beam": BeamSearch(width=4, num_best=4),
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


# Errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_tokens": -1}, "expected min_tokens a whole number from 0 to .*, got -1"),
        ({"min_tokens": 2.5}, "expected min_tokens as a whole number .*, one or 4, one a row, got 2.5"),
        ({"min_tokens": True}, "expected min_tokens as a whole number .*, got True"),
        ({"min_tokens": 10**20}, f"expected min_tokens as a whole number .*, one or 4, one a row, got {10**20}"),
        ({"min_tokens": "x"}, "expected min_tokens as a whole number .*, one or 4, one a row, got 'x'"),
        ({"min_ratio": 10**400}, "expected min_ratio a finite number of at least 0, got 1000"),
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
