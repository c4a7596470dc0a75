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
# # 1. Recurrence
#
# Before attention, a model read a sequence token by token and kept what it knew in a vector of fixed size. This
# notebook shows the equations, how fast the gradient fades with distance and what gates can change about it, what the
# fixed size costs and saves, and why such a model does not run in parallel over a sequence.
#
# Papers: Elman 1990; Hochreiter and Schmidhuber 1997 and Gers et al. 2000 (LSTM, forget gates); Cho et al. 2014 (GRU);
# Bengio et al. 1994 and Pascanu et al. 2013 (vanishing gradients); Sutskever et al. 2014 (the fixed vector). $B$ are
# rows, $S$ source tokens, $D$ the width of embeddings and states.

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
import functools
import inspect
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from IPython.display import display
from matplotlib.figure import Figure

import tfm
from tfm.nn import recurrent

# %matplotlib inline
SMALL = os.environ.get("TFM_NOTEBOOK") == "small"  # as continuous integration runs it: in seconds
CELLS = ("rnn", "lstm", "gru")
DISTANCE = 48
STEPS = 400 if SMALL else 800
LENGTHS = [16, 32, 64, 128] if SMALL else [16, 32, 64, 128, 256, 512]
print(f"tfm on {jax.devices()[0].device_kind}, jax {jax.__version__}")


# %%
@functools.cache
def built(cell, dim=64):
    """A model whose decoder has the encoder's last state and nothing else, and fresh parameters."""
    config = tfm.preset(
        "recurrent-tiny", cell=cell, model_dim=dim, bidirectional=False, source_context="fixed",
        source_vocab_size=16, target_vocab_size=16, dropout_rate=0.0,
    )  # fmt: skip
    model = tfm.build_model(config, dtype="float32")
    return model, tfm.init_params(model, jax.random.key(0))


def cell_params(params):
    """Those of the encoder's only layer."""
    return params["encoder"]["layer_0"]["cell"]


# %% [markdown]
# ## The equations
#
# Elman's cell makes a state of the token's embedding $x_t$ and of the state before:
#
# $$ h_t = \tanh(W_{xh} x_t + W_{hh} h_{t-1} + b_h) $$
#
# The library takes its cells from `flax.linen`, whose matrices lie [in, out].

# %%
print(inspect.getsource(recurrent.make_cell))
model, params = built("rnn")
D = model.config.model_dim
embedded = jax.random.normal(jax.random.key(1), (2, 10, D))
lengths = jnp.array([10, 10])


def states_of(cell):
    """Of every token, by the library."""
    model, params = built(cell)
    encoder = recurrent.RecurrentEncoder(model.config)
    return encoder.apply({"params": params["encoder"]}, embedded, lengths)[0]


print("embedded", embedded.shape, "states", states_of("rnn").shape)

# %% [markdown]
# **Claim.** The library's recurrence is this equation: a loop in NumPy comes to the same states.

# %%
p = jax.tree.map(np.asarray, cell_params(params))
h, by_hand = np.zeros((2, D)), []
for t in range(10):
    h = np.tanh(embedded[:, t] @ p["i"]["kernel"] + h @ p["h"]["kernel"] + p["i"]["bias"])
    by_hand.append(h)
difference = float(np.abs(np.stack(by_hand, axis=1) - states_of("rnn")).max())
print(f"largest difference {difference:.1e}")
assert difference < 1e-5

# %% [markdown]
# An LSTM has a memory $c$ beside its state, and gates between 0 and 1 that say what is kept, written and shown; a GRU
# has a gate $z$ between the old state and a new one, and $r$ for what of the old state the new one is made from:
#
# $$ c_t = f \odot c_{t-1} + i \odot g, \quad h_t = o \odot \tanh(c_t) \qquad\qquad
#    h_t = z \odot h_{t-1} + (1 - z) \odot n, \quad n = \tanh(W_{xn} x_t + b_n + r \odot (W_{hn} h_{t-1} + b_{hn})) $$
#
# **Claim.** So are the library's two gated cells.


# %%
def linear(p, x):
    return x @ p["kernel"] + p.get("bias", 0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm(p, carry, x):
    c, h = carry
    i, f, o = (sigmoid(linear(p[f"i{gate}"], x) + linear(p[f"h{gate}"], h)) for gate in "ifo")
    c = f * c + i * np.tanh(linear(p["ig"], x) + linear(p["hg"], h))
    return c, o * np.tanh(c)


def gru(p, carry, x):
    _, h = carry
    r, z = (sigmoid(linear(p[f"i{gate}"], x) + linear(p[f"h{gate}"], h)) for gate in "rz")
    n = np.tanh(linear(p["in"], x) + r * linear(p["hn"], h))
    return None, z * h + (1 - z) * n


differences = {}
for cell, step in (("lstm", lstm), ("gru", gru)):
    p = jax.tree.map(np.asarray, cell_params(built(cell)[1]))
    carry, by_hand = (np.zeros((2, D)), np.zeros((2, D))), []
    for t in range(10):
        carry = step(p, carry, np.asarray(embedded[:, t]))
        by_hand.append(carry[1])
    differences[cell] = float(np.abs(np.stack(by_hand, axis=1) - states_of(cell)).max())
print({cell: f"{difference:.1e}" for cell, difference in differences.items()})
assert max(differences.values()) < 1e-5

# %% [markdown]
# ## The gradient by distance
#
# How much does the last state still depend on a token $k$ steps before? We take the gradient of $v \cdot h_S$, with a
# random $v$, by every embedded token, and its norm, averaged over rows, relative to that of the last token.


# %%
def gradient_by_distance(model, params, length=DISTANCE):
    """At [k] for the token k before the last."""
    ids = jax.random.randint(jax.random.key(1), (32, length), 3, 16)
    embedded = params["source_embedding"]["weight"][ids] * model.config.model_dim**0.5
    v = jax.random.normal(jax.random.key(2), (32, model.config.model_dim))
    encoder = recurrent.RecurrentEncoder(model.config)

    def component(embedded):
        _, last, _ = encoder.apply({"params": params["encoder"]}, embedded, jnp.full(32, length))
        return (last * v).sum()

    norms = jnp.linalg.norm(jax.grad(component)(embedded), axis=-1).mean(axis=0)[::-1]
    return np.asarray(norms / norms[0])


def shown(gradients):
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    ax = figure.subplots()
    for name, norms in gradients.items():
        ax.plot(norms, label=name)
        print(f"{name:24}", {k: f"{norms[k]:.0e}" for k in (1, 4, 16, len(norms) - 1)})
    ax.set(xlabel="tokens before the last", ylabel="gradient, relative", yscale="log")
    ax.legend()
    display(figure)


fresh = {cell: gradient_by_distance(*built(cell)) for cell in CELLS}
shown(fresh)

# %% [markdown]
# **Claim.** In fresh parameters the gradient vanishes in all three, and about as fast: exponentially, by a factor of
# less than 0.8 a token. Gates alone do not prevent it. Fresh ones stand half open ($f$ and $z$ around ½), and what is
# halved at every token is soon gone.

# %%
per_token = {cell: float((norms[32] / norms[4]) ** (1 / 28)) for cell, norms in fresh.items()}
print("factor per token:", {cell: f"{factor:.2f}" for cell, factor in per_token.items()})
for cell, norms in fresh.items():
    print(f"{cell}: {norms[32]:.0e} of the last token's gradient at 32 tokens before it")
    assert per_token[cell] < 0.8
    assert norms[32] < 1e-4

# %% [markdown]
# **Claim.** What gates change is that the factor can be learned: a bias of 4 on the gate that keeps ($f$ of the LSTM,
# $z$ of the GRU; $\sigma(4) = 0.98$) carries the gradient over all tokens; −2 on the LSTM's forgets faster than before.


# %%
def with_bias(cell, name, bias):
    params = jax.tree.map(lambda x: x, built(cell)[1])  # dictionaries of its own
    cell_params(params)[name]["bias"] += bias
    return params


kept = {
    "lstm, f + 4": gradient_by_distance(built("lstm")[0], with_bias("lstm", "hf", 4.0)),
    "gru, z + 4": gradient_by_distance(built("gru")[0], with_bias("gru", "iz", 4.0)),
}
forgotten = gradient_by_distance(built("lstm")[0], with_bias("lstm", "hf", -2.0))
shown({**fresh, **kept, "lstm, f − 2": forgotten})
assert min(norms[DISTANCE - 1] for norms in kept.values()) > 0.05
assert forgotten[16] < fresh["lstm"][16] / 100

# %% [markdown]
# ## Does training open the gates?
#
# A task that needs the distance: say the first of 24 symbols. All the rest is noise.

# %%
RECALL = 24


def trained(cell, steps=STEPS):
    """The parameters and the loss of each step."""
    model, params = built(cell, dim=32)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))

    def loss(params, source):
        starts = jnp.ones((len(source), 1), jnp.int32)
        logits = model.apply({"params": params}, source, jnp.full(len(source), RECALL), starts)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, 0], source[:, 0]).mean()

    def step(carry, key):
        params, state = carry
        value, gradient = jax.value_and_grad(loss)(params, jax.random.randint(key, (64, RECALL), 3, 11))
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), value

    keys = jax.random.split(jax.random.key(0), steps)
    (params, _), losses = jax.jit(lambda *carry: jax.lax.scan(step, carry, keys))(params, optimizer.init(params))
    return params, np.asarray(losses)


results = {cell: trained(cell) for cell in CELLS}
figure = Figure(figsize=(6, 3.5), layout="constrained")
ax = figure.subplots()
for cell, (_, losses) in results.items():
    ax.plot(losses, label=cell)
    print(f"{cell:5} loss {losses[-20:].mean():.2f} at the end; guessing {np.log(8):.2f}")
ax.set(xlabel="step", ylabel="loss")
ax.legend()
display(figure)
far = {cell: gradient_by_distance(built(cell, dim=32)[0], params, RECALL) for cell, (params, _) in results.items()}
shown(far)

# %% [markdown]
# **Claim.** The GRU learns it, and with that its gradient reaches the first token. Elman's cell has no gate to open and
# still guesses. One training each: what the LSTM, which starts with forget gates half open, comes to in these steps
# depends on how many there are, and is only shown.

# %%
ends = {cell: float(losses[-20:].mean()) for cell, (_, losses) in results.items()}
print({cell: f"gradient {norms[-1]:.0e}, loss {ends[cell]:.2f}" for cell, norms in far.items()})
assert far["gru"][-1] > 100 * far["rnn"][-1]
assert ends["gru"] < 0.5 < 1.5 < ends["rnn"]

# %% [markdown]
# ## One size for every source
#
# **Claim.** What such a model has of its source and of all that it has written is one vector a layer (an LSTM's two):
# its cache has the same bytes at every length. A Transformer's grows in proportion.

# %%
transformer = tfm.preset("tiny", source_vocab_size=16, target_vocab_size=16, max_target_length=1024, dropout_rate=0.0)
sizes = {}
for name, config in ((cell, built(cell)[0].config) for cell in CELLS):
    sizes[name] = [tfm.cache_bytes(config, batch=1, source_length=n, capacity=n) for n in LENGTHS]
sizes["transformer"] = [tfm.cache_bytes(transformer, batch=1, source_length=n, capacity=n) for n in LENGTHS]
print("lengths", LENGTHS)
for name, found in sizes.items():
    print(f"{name:12}", found)
assert all(len(set(sizes[cell])) == 1 for cell in CELLS)
assert sizes["transformer"][-1] > sizes["transformer"][0] * LENGTHS[-1] / LENGTHS[0] / 2

# %% [markdown]
# **Claim.** Only real tokens go into it: padding behind a source, whatever ids it has, changes nothing.

# %%
model, params = built("lstm")
source = jax.random.randint(jax.random.key(3), (4, 12), 3, 16)
real = jnp.array([12, 7, 1, 0])
padding = jnp.arange(12) >= real[:, None]
encode = jax.jit(lambda source: model.apply({"params": params}, source, real, method="encode")[1].carries)
carries, others = encode(jnp.where(padding, 0, source)), encode(jnp.where(padding, 9, source))
difference = max(float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (carries, others)), strict=True))
print("carries", jax.tree.map(jnp.shape, carries), f"· largest difference {difference}")
assert difference == 0

# %% [markdown]
# ## Not in parallel
#
# $h_t$ needs $h_{t-1}$, so the tokens wait for each other. The program says so itself: we count its matrix products,
# those inside a scan as often as the scan runs.


# %%
def products(jaxpr):
    """Matrix products that the program starts, one after another."""
    total = 0
    for equation in jaxpr.eqns:
        values = [
            each for value in equation.params.values() for each in (value if isinstance(value, tuple) else [value])
        ]
        inner = [getattr(value, "jaxpr", value) for value in values]
        within = sum(products(each) for each in inner if hasattr(each, "eqns"))
        total += within * equation.params.get("length", 1) if equation.primitive.name == "scan" else within
        total += equation.primitive.name == "dot_general"
    return total


other = tfm.build_model(transformer, dtype="float32")
pairs = {"lstm": built("lstm"), "transformer": (other, tfm.init_params(other, jax.random.key(0)))}
counts, took = {name: [] for name in pairs}, {name: [] for name in pairs}
for name, (model, params) in pairs.items():
    encode = lambda source, model=model, params=params: model.apply(  # noqa: E731
        {"params": params}, source, jnp.full(len(source), source.shape[1]), method="encode"
    )
    for length in LENGTHS:
        source = jnp.full((4, length), 5)
        counts[name].append(products(jax.make_jaxpr(encode)(source).jaxpr))
        compiled = jax.jit(encode)
        jax.block_until_ready(compiled(source))
        begun = time.perf_counter()
        for _ in range(10):
            jax.block_until_ready(compiled(source))
        took[name].append((time.perf_counter() - begun) / 10)
figure = Figure(figsize=(9, 3.5), layout="constrained")
for ax, found, label in zip(figure.subplots(1, 2), (counts, took), ("products in turn", "seconds"), strict=True):
    for name, values in found.items():
        ax.plot(LENGTHS, values, "o-", label=name)
    ax.set(xlabel="source tokens", ylabel=label, xscale="log", yscale="log")
    ax.legend()
display(figure)

# %% [markdown]
# **Claim.** Twice as long a source means twice as many products in turn in the recurrence, of constant size; in the
# Transformer's encoder of the same width there are as many for every length, only larger, so that a machine with many
# arithmetic units has work for all of them. (On a few CPU cores the clock shows less of it, and attention's work grows
# with the square of the length.)

# %%
print("lengths", LENGTHS, counts)
assert len(set(counts["transformer"])) == 1
assert counts["lstm"][-1] - counts["lstm"][0] == (LENGTHS[-1] - LENGTHS[0]) * counts["lstm"][0] / LENGTHS[0]
