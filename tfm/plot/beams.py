"""What a beam search kept at each step, as a tree of prefixes.

`tfm.decoding.beam.beam_search` hands its caller the tokens of the hypotheses that it follows, and whose continuation
each is. Run with jit off, where its loop is Python's, it lets one write that down; the decode steps stay compiled.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tfm.axes import Array
from tfm.checks import whole_number
from tfm.decoding.beam import BeamSearch, NBest, beam_search
from tfm.decoding.inference import decode_step, prefill
from tfm.nn import cache as caches
from tfm.pipeline import TextModel
from tfm.plot.figures import Axes, Figure, as_label, figure_and_axes


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A node of the tree: a prefix that the search kept, or one of its complete hypotheses."""

    tokens: tuple[int, ...]
    """Its ids; the root has none. Its parent is the one with all but the last."""
    text: str
    """Of its last token, to be shown."""
    log_prob: float
    """log P of its tokens, natural."""
    rank: int | None = None
    """0 for the best complete hypothesis, 1 for the next; None for one that is not complete."""
    score: float | None = None
    """Of a complete one, what ranks it: log P / lp, as `BeamSearch` says."""


def search_tree(
    model: TextModel,
    text: str,
    search: BeamSearch = BeamSearch(num_best=4),  # noqa: B008 - frozen and without state
    *,
    max_tokens: int | None = None,
) -> list[Hypothesis]:
    """Every hypothesis that a search followed, and the `num_best` complete ones that it found.

    It is the search of `TextModel.generate_n_best`, run slowly, so that each step can be seen. What it kept last, when
    it had found enough, it did not follow, and that is not among them.

    Args:
        model: any that answers texts.
        text: the source.
        search: how; without a coverage penalty, which is not computed here.
        max_tokens: the most tokens of an answer; None: 2·S + 32 or the model's limit, S being the source's tokens.

    Returns:
        The nodes, the root first, parents before children, and of one depth in the order of their log P.

    Raises:
        ValueError: the text is longer than the model accepts, or a setting of the search cannot be.
    """
    config, tokenizer = model.config, model.target_tokenizer
    if not isinstance(search, BeamSearch) or search.coverage is not None:
        raise ValueError(f"expected BeamSearch(…) without coverage, got {search!r}")
    if config.is_language_model:
        raise ValueError("expected a model that answers texts, got a language model, which continues them")
    search.check(1, config)
    source = jnp.array([[*model.source_tokenizer.encode(text), model.source_tokenizer.end_id]], jnp.int32)
    limit = min(2 * source.shape[1] + 32, config.max_target_length) if max_tokens is None else whole_number(max_tokens)
    if limit is None or limit < 1:
        raise ValueError(f"expected max_tokens of at least 1, got {max_tokens!r}")
    logits, cache = prefill(model.model, model.prepared_params, source, capacity=limit)
    found, followed = _watched_search(model, logits[:, -1], cache, search, limit)

    root = Hypothesis((), tokenizer.tokens([config.start_id])[0], 0.0)
    nodes = {root.tokens: root} | {
        tokens: Hypothesis(tokens, tokenizer.tokens([tokens[-1]])[0], log_prob) for tokens, log_prob in followed.items()
    }
    for rank in np.flatnonzero(found.scores[0] > -np.inf).tolist():
        tokens = tuple(found.tokens[0, rank, : found.lengths[0, rank]].tolist())
        log_probs = np.cumsum(found.token_log_probs[0, rank])
        for end in range(1, len(tokens) + 1):
            prefix = tokens[:end]
            new = Hypothesis(prefix, tokenizer.tokens([prefix[-1]])[0], float(log_probs[end - 1]))
            nodes.setdefault(prefix, new)
        if tokens:
            score = float(found.scores[0, rank])
            nodes[tokens] = dataclasses.replace(nodes[tokens], rank=rank, score=score)
    return sorted(nodes.values(), key=lambda node: (len(node.tokens), -node.log_prob, node.tokens))


def _watched_search(
    model: TextModel, logits: Array, cache: caches.AnyCache, search: BeamSearch, limit: int
) -> tuple[NBest, dict[tuple[int, ...], float]]:
    """What the search found, and the log P of each prefix that it went on with."""
    width = search.width
    followed: dict[tuple[int, ...], float] = {}

    # of each hypothesis the tokens, their log P, and the log-probabilities of its next token
    prefixes: list[tuple[tuple[int, ...], float]] = [((), 0.0)] * width
    next_log_probs = np.repeat(np.asarray(jax.nn.log_softmax(logits)), width, axis=0)

    def step(tokens: Array, cache: caches.AnyCache) -> tuple[Array, caches.AnyCache]:
        nonlocal prefixes, next_log_probs
        chosen = zip(tokens[:, 0].tolist(), prefixes, next_log_probs, strict=True)
        prefixes = [((*prefix, token), log_prob + float(each[token])) for token, (prefix, log_prob), each in chosen]
        followed.update(prefixes)
        with jax.disable_jit(False):
            logits, cache = decode_step(model.model, model.prepared_params, tokens, cache)
        next_log_probs = np.asarray(jax.nn.log_softmax(logits[:, -1]))
        return logits[:, -1], cache

    def reorder(cache: caches.AnyCache, parents: Array) -> caches.AnyCache:
        nonlocal prefixes, next_log_probs
        places = np.asarray(parents)
        prefixes, next_log_probs = [prefixes[place] for place in places], next_log_probs[places]
        return caches.reorder(cache, parents)

    with jax.disable_jit():
        found = beam_search(
            search.as_arrays(),
            logits,
            caches.widen(cache, width),
            step=step,
            reorder=reorder,
            limits=jnp.array([limit], jnp.int32),
            max_tokens=limit,
            end_id=model.config.end_id,
            pad_id=model.config.pad_id,
        )
    return jax.device_get(found), followed


def beam_tree(
    model: TextModel,
    text: str,
    search: BeamSearch = BeamSearch(num_best=4),  # noqa: B008 - frozen and without state
    *,
    max_tokens: int | None = None,
    ax: Axes | None = None,
) -> Figure:
    """The tree of what a search kept: a step to the right is a token more, the likelier branch is above.

    The best hypothesis has heavy lines; complete ones show their rank, from 1, and their score.

    Args:
        model: any that answers texts.
        text: the source.
        search: as in `search_tree`.
        max_tokens: as in `search_tree`.
        ax: where to draw; None: on a new figure.

    Raises:
        ValueError: as `search_tree`.
    """
    nodes = search_tree(model, text, search, max_tokens=max_tokens)
    heights = _heights(nodes)
    depth, leaves = max(len(node.tokens) for node in nodes), round(max(heights.values())) + 1
    figure, ax = figure_and_axes(ax, min(1.5 + 0.6 * depth, 30), min(0.8 + 0.3 * leaves, 30))
    best = next((node.tokens for node in nodes if node.rank == 0), ())
    for node in nodes:
        x, y = len(node.tokens), heights[node.tokens]
        on_best = node.tokens == best[:x]
        if node.tokens:
            parent = node.tokens[:-1]
            color, width = ("C0", 2.5) if on_best else ("0.6", 1.0)
            ax.plot([x - 1, x], [heights[parent], y], color=color, linewidth=width, zorder=1)
        box = dict(boxstyle="round,pad=0.2", facecolor="white", edgecolor="C0" if on_best else "0.6")
        label = as_label(node.text)
        ax.text(x, y, label, ha="center", va="center", fontsize="small", bbox=box, zorder=2)
        if node.rank is not None:
            ax.text(x + 0.4, y, f"{node.rank + 1}: {node.score:.2f}", va="center", fontsize="small")
    ax.set_xlim(-0.5, depth + 1.5)
    ax.set_ylim(leaves - 0.5, -0.5)
    ax.set_xlabel("tokens")
    ax.set_yticks([])
    return figure


def _heights(nodes: list[Hypothesis]) -> dict[tuple[int, ...], float]:
    """Leaves one below the other, so that no lines cross; every other node between its first and last child."""
    children: dict[tuple[int, ...], list[tuple[int, ...]]] = {node.tokens: [] for node in nodes}
    for node in nodes:
        if node.tokens:
            children[node.tokens[:-1]].append(node.tokens)
    in_order: list[tuple[int, ...]] = []
    waiting: list[tuple[int, ...]] = [()]
    while waiting:  # a parent before its children, the likeliest child first
        in_order.append(waiting.pop())
        waiting.extend(reversed(children[in_order[-1]]))
    heights: dict[tuple[int, ...], float] = {}
    for tokens in in_order:
        if not children[tokens]:
            heights[tokens] = float(len(heights))
    for tokens in reversed(in_order):
        if below := children[tokens]:
            heights[tokens] = (heights[below[0]] + heights[below[-1]]) / 2
    return heights
