"""One token after another, where what comes next depends on nothing but what came: greedy decoding and sampling.

`begin` and `advance` are all of it. `tfm.decoding.generate` loops over them on the device, `tfm.decoding.stream` on the
host.
"""

import typing

import flax.struct
import jax
import jax.numpy as jnp

from tfm.axes import Array, Bool, Float, Int, KeyArray
from tfm.decoding.arguments import Arguments
from tfm.decoding.constraints import Constraints, Rules
from tfm.decoding.growing import growing_capacities
from tfm.decoding.inference import decode_step, prefill
from tfm.decoding.sampling import Sampler
from tfm.nn.cache import AnyCache, grow, widen
from tfm.nn.logprob import label_log_probs
from tfm.nn.models import Model
from tfm.nn.params import Params


@typing.no_type_check  # a pytree is also built from shapes, specs and other non-arrays
@flax.struct.dataclass
class Generation:
    """What was generated, without the prompt."""

    tokens: Int[Array, "B T"]
    """The new ids, the end token included where one came; the padding id behind."""
    token_log_probs: Float[Array, "B T"]
    """The log-probability of each of them under the model as it is, whatever the sampler made of it; 0 behind."""
    lengths: Int[Array, "B"]
    """New ids of each row, the end token counted."""
    scores: Float[Array, "B"]
    """The sum of `token_log_probs`."""
    finished: Bool[Array, "B"]
    """True where the row ended with the end token, False where its limit of tokens cut it off."""
    unmet: Bool[Array, "B"]
    """True where it ended with the end token because constraints left nothing else, so that some are not met."""


@typing.no_type_check
@flax.struct.dataclass
class Choosing:
    """How tokens are chosen: what stays the same from step to step. W continuations of a row lie row after row."""

    sampler: Sampler
    limits: Int[Array, "BW"]
    keys: KeyArray
    """[BW]"""
    rules: Rules | None
    end_id: int = flax.struct.field(pytree_node=False)
    pad_id: int = flax.struct.field(pytree_node=False)

    def goes_on(self, output: Generation) -> Bool[Array, "BW"]:
        """Which rows have not ended."""
        return ~output.finished & (output.lengths < self.limits)

    def pick(
        self, logits: Float[Array, "BW V"], step: Int[Array, ""], output: Generation
    ) -> tuple[Int[Array, "BW"], Generation]:
        """Chooses each row's token number `step` and notes it for the rows that are still going."""
        going = self.goes_on(output)
        step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(self.keys, step)
        allowed, unmet = logits, output.unmet
        if self.rules is not None:
            allowed, _, is_stuck, *_ = self.rules(logits, output.tokens, step)
            unmet |= going & is_stuck
        token = jnp.where(going, self.sampler.pick(allowed, step_keys), self.pad_id)
        log_prob = jnp.where(going, label_log_probs(logits, token), 0)
        at = (jnp.zeros_like(step), step)
        return token, Generation(
            tokens=jax.lax.dynamic_update_slice(output.tokens, token[:, None], at),
            token_log_probs=jax.lax.dynamic_update_slice(output.token_log_probs, log_prob[:, None], at),
            lengths=output.lengths + going,
            scores=output.scores + log_prob,
            finished=output.finished | (going & (token == self.end_id)),
            unmet=unmet,
        )


class Progress(typing.NamedTuple):
    """How far generation has come."""

    step: Int[Array, ""]
    """Tokens that were chosen."""
    token: Int[Array, "BW"]
    """The last of them."""
    cache: AnyCache
    output: Generation


def begin(
    model: Model,
    params: Params,
    arguments: Arguments,
    sampler: Sampler,
    keys: KeyArray,
    *,
    capacity: int,
    max_new: int,
    width: int = 1,
) -> tuple[Choosing, Progress]:
    """Reads source and prompt and chooses the first token.

    Args:
        model: the model.
        params: its parameters.
        arguments: as they were checked.
        sampler: with each number one for all, or one for each of B·W continuations.
        keys: [BW].
        capacity: the cache's.
        max_new: T of the output, whatever the capacity has room for now.
        width: W, continuations of each row, which share its source.
    """
    source, source_lengths, prompt, prompt_lengths, limits, constraints = arguments
    limits, rules = bound_rules(
        constraints, jnp.minimum(limits, max_new), source_lengths, model,
        prompt=prompt, prompt_lengths=prompt_lengths, width=width,
    )  # fmt: skip
    config, batch = model.config, limits.shape[0] * width
    choosing = Choosing(sampler, jnp.repeat(limits, width), keys, rules, config.end_id, config.pad_id)
    logits, cache = prefill(model, params, source, source_lengths, prompt, prompt_lengths, capacity=capacity)
    if width > 1:
        logits, cache = jnp.repeat(logits, width, axis=0), widen(cache, width)
    nothing = Generation(
        tokens=jnp.full((batch, max_new), config.pad_id, jnp.int32),
        token_log_probs=jnp.zeros((batch, max_new), jnp.float32),
        lengths=jnp.zeros(batch, jnp.int32),
        scores=jnp.zeros(batch, jnp.float32),
        finished=jnp.zeros(batch, bool),
        unmet=jnp.zeros(batch, bool),
    )
    token, output = choosing.pick(logits[:, -1], jnp.int32(0), nothing)
    return choosing, Progress(jnp.int32(1), token, cache, output)


def advance(model: Model, params: Params, choosing: Choosing, progress: Progress) -> Progress:
    """One token more for every row that goes on."""
    logits, cache = decode_step(model, params, progress.token[:, None], progress.cache)
    token, output = choosing.pick(logits[:, -1], progress.step, progress.output)
    return Progress(progress.step + 1, token, cache, output)


def capacities_of(model: Model, capacity: int, prompt_length: int) -> list[int]:
    """The cache's capacities one after another: see `tfm.decoding.growing`. A recurrent model's needs to grow never."""
    return [capacity] if model.config.architecture == "recurrent" else growing_capacities(capacity, prompt_length)


def with_room(model: Model, cache: AnyCache, max_new: int, arguments: Arguments) -> AnyCache:
    """The cache with room for so many new tokens."""
    before = 0 if model.config.has_encoder else arguments.source.shape[1]
    return grow(cache, before + arguments.prompt.shape[1] + max_new - 1)


def bound_rules(
    constraints: Constraints | None,
    limits: Int[Array, "B"],
    source_lengths: Int[Array, "B"],
    model: Model,
    **rest: typing.Any,
) -> tuple[Int[Array, "B"], Rules | None]:
    """The rows' limits as the constraints cut them, and their rules; see `Constraints.bind` for the rest."""
    if constraints is None:
        return limits, None
    limits = constraints.cut(limits, source_lengths)
    end_id = model.config.end_id
    return limits, constraints.bind(source_lengths=source_lengths, limits=limits, end_id=end_id, **rest)
