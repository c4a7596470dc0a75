"""Rules against a statement of them in plain Python."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from constraint_statement import END, MOST, NEUTRAL, PROMPT, PROMPT_LENGTHS, SOURCE_LENGTHS, B, P, rows_of, without
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import V, random_ids
from tolerances import assert_close

from tfm.decoding.constraints import LAST_RESORT, Constraints

pytestmark = pytest.mark.usefixtures("compile_fast")

few = st.integers(0, 5).map(lambda token: token if token != END else 6)  # few tokens, so that much matches


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
