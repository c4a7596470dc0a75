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
# # 6. The key/value cache
#
# A decoder writes one token at a time, and each token looks back at all before it. What it looks at, keys and values,
# does not change any more: so they are kept. This notebook shows that they are the same, what keeping them saves, what
# it costs in memory, and why decoding is bound by memory and not by arithmetic.
#
# Papers: Vaswani et al. 2017 (section 3.2, attention; 3.2.3, the causal mask); Shazeer 2019 and Ainslie et al. 2023
# (fewer key/value heads); Pope et al. 2022 (section 2, costs of inference); Williams et al. 2009 (the roofline).
# Letters are those of `tfm.axes`: $B$ rows, $S$ source tokens, $C$ target tokens that the cache can hold, $L$ layers,
# $N$ query heads, $K$ key/value heads of $H$ entries each.

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
import statistics
import time

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from IPython.display import display
from matplotlib.figure import Figure

import tfm
from tfm import plot
from tfm.nn import blocks
from tfm.nn import cache as caches

# %matplotlib inline
SMALL = os.environ.get("TFM_NOTEBOOK") == "small"  # as continuous integration runs it: in seconds
SIZES = dict(model_dim=256, feed_forward_dim=1024, num_heads=8, encoder_layers=1, decoder_layers=2 if SMALL else 4)
LENGTHS = [32, 64, 128, 256] if SMALL else [32, 64, 128, 256, 512, 1024]
print(f"tfm on {jax.devices()[0].device_kind}, jax {jax.__version__}, matplotlib {matplotlib.__version__}")


# %%
def seconds(run, *, repeats=5, at_least=0.01):
    """The median time of a call; short ones are made several times for each look at the clock."""

    def taken(calls):
        begun = time.perf_counter()
        for _ in range(calls):
            result = run()
        jax.block_until_ready(result)
        return (time.perf_counter() - begun) / calls

    jax.block_until_ready(run())  # compiles
    calls = 1 + int(at_least / taken(1))
    return statistics.median(taken(calls) for _ in range(repeats))


def legend(ax, x, y):
    """Names of the axes, which both have logarithmic scales here."""
    ax.set(xlabel=x, ylabel=y, xscale="log", yscale="log")
    ax.legend()


# %% [markdown]
# ## Keys and values that would be made again
#
# A model as it comes from `init_params`: all that is said here holds whatever the weights are. In float32, so that what
# should be equal is equal to the last digits.

# %%
config = tfm.preset("small", source_vocab_size=1000, target_vocab_size=1000, max_target_length=2048, **SIZES)
model = tfm.build_model(config, dtype="float32")
params = tfm.init_params(model, jax.random.key(0))
source = jax.random.randint(jax.random.key(1), (1, 16), 3, 1000)
target = jax.random.randint(jax.random.key(2), (1, 12), 3, 1000)
print("source", source.shape, "target", target.shape, f"{tfm.count_params(params):,} parameters")

# %% [markdown]
# `prefill` runs a prompt in one pass and hands back the keys and values that the layers made on the way. Without a
# cache a step would be just that: another pass, over a prompt that is a token longer.

# %%
seen = []
for length in range(1, 13):
    logits, cache = tfm.prefill(model, params, source, prompt=target[:, :length], capacity=16)
    seen.append([layer.self_attention for layer in cache.layers])
print("logits", logits.shape, "· keys of a layer [B, K, C, H]", seen[-1][0].keys.shape)

# %% [markdown]
# **Claim.** Of all that step $t + 1$ would compute for the $t$ tokens before, every key and every value is the one that
# step $t$ had. It follows from the causal mask: a token's vector depends on no later token, in no layer.

# %%
worst, again = 0.0, 0
for length in range(1, 12):
    for before, after in zip(seen[length - 1], seen[length], strict=True):
        for old, new in ((before.keys, after.keys), (before.values, after.values)):
            worst = max(worst, float(jnp.abs(old[:, :, :length] - new[:, :, :length]).max()))
            again += old[:, :, :length].size
scale = float(jnp.abs(seen[-1][-1].keys[:, :, :12]).max())
print(f"{again:,} numbers made again in 11 steps; largest difference {worst:.1e}, of numbers up to {scale:.1f}")
assert worst < 1e-5 * max(scale, 1)

# %% [markdown]
# So a step needs the last token only: its own query meets the keys that are there. This is the whole of it in the
# decoder layer: `past` is the cache, and `caches.write` puts the new key and value behind the others.

# %%
print(inspect.getsource(blocks.DecoderLayer.__call__))

# %% [markdown]
# **Claim.** With the cache, one token a step, the logits are those of the full pass at every position.

# %%
logits, cache = tfm.prefill(model, params, source, prompt=target[:, :1], capacity=16)
stepwise = [logits]
for at in range(1, 12):
    logits, cache = tfm.decode_step(model, params, target[:, at : at + 1], cache)
    stepwise.append(logits)
full = model.apply({"params": params}, source, jnp.array([16]), target)
difference = float(jnp.abs(jnp.concatenate(stepwise, axis=1) - full).max())
print(
    "full pass", full.shape, f"· largest difference {difference:.1e}, of logits up to {float(jnp.abs(full).max()):.1f}"
)
assert difference < 1e-4

# %% [markdown]
# ## Writing against concatenating
#
# The textbook's cache grows by concatenation. Here it has its final size from the start, and a step writes into it.

# %%
print(inspect.getsource(caches.write))

# %%
write = jax.jit(caches.write, donate_argnums=0)
concatenate = jax.jit(lambda old, new: jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=2), old, new))


def vectors(length):
    """Keys and values of so many positions: 8 rows, 8 heads, 64 entries."""
    return caches.KeysValues(*(jnp.ones((8, 8, length, 64)) for _ in range(2)))


new, steps = vectors(1), 12
written, grown = vectors(steps), vectors(1)
for at in range(1, steps):
    written = write(written, new, jnp.full(8, at))
    grown = concatenate(grown, new)
programs = {"write": write._cache_size(), "concatenate": concatenate._cache_size()}
print("shapes at the end", written.keys.shape, grown.keys.shape, "· programs compiled", programs)

# %% [markdown]
# **Claim.** For `steps` − 1 tokens, concatenation compiles a program each, as every length is a shape of its own;
# writing compiles one. The result is the same.

# %%
print("equal keys:", bool((written.keys == grown.keys).all()))
assert programs == {"write": 1, "concatenate": steps - 1}
assert (written.keys == grown.keys).all()

# %% [markdown]
# **Claim.** And writing copies nothing: given away ("donated"), the old cache's memory is the new cache's, at the same
# address. A decode step does so with the whole cache.

# %%
logits, cache = tfm.prefill(model, params, source, capacity=64)
before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.layers)]
logits, cache = tfm.decode_step(model, params, logits.argmax(-1), cache, donate_cache=True)
after = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.layers)]
print(f"{sum(a == b for a, b in zip(before, after, strict=True))} of {len(before)} arrays stayed where they were")
assert before == after

# %% [markdown]
# **Claim.** So writing takes about the same time however long the cache is; concatenating copies it and takes longer
# the longer it is.

# %%
times = {"write": [], "concatenate": []}
for length in LENGTHS:
    held = vectors(length)

    def write_in_place():
        global held
        held = write(held, new, jnp.full(8, 3))  # donated: the old name must not be used again
        return held

    times["write"].append(seconds(write_in_place))
    old = vectors(length)
    times["concatenate"].append(seconds(lambda: concatenate(old, new)))  # noqa: B023 - called at once
figure = Figure(figsize=(5, 3.5), layout="constrained")
ax = figure.subplots()
for name, taken in times.items():
    ax.plot(LENGTHS, np.array(taken) * 1e3, "o-", label=name)
legend(ax, "length", "milliseconds a step, one layer")
display(figure)
growth = {name: taken[-1] / taken[0] for name, taken in times.items()}
ratio = times["concatenate"][-1] / times["write"][-1]
print({name: f"{factor:.1f} times as long at {LENGTHS[-1]} as at {LENGTHS[0]}" for name, factor in growth.items()})
print(f"at {LENGTHS[-1]} concatenating takes {ratio:.0f} times as long as writing")
assert ratio > 2

# %% [markdown]
# ## What the cache saves
#
# One more token at length $t$. Without a cache: a pass over all $t$. With it: a step for one. XLA counts the operations
# that each asks for, a multiplication and an addition being two.

# %%
encoded = model.apply({"params": params}, source, jnp.array([16]), method="encode")


@jax.jit
def without_cache(target):
    return model.apply({"params": params}, encoded, jnp.array([16]), target, method="decode")


def operations(function, *arguments):
    """Of the program as it was asked for, before XLA optimizes it."""
    return jax.jit(function).lower(*arguments).cost_analysis()["flops"]


rows = []
for length in LENGTHS:
    tokens = jax.random.randint(jax.random.key(3), (1, length), 3, 1000)
    _, cache = tfm.prefill(model, params, source, prompt=tokens[:, :-1], capacity=length)
    with_cache = lambda token, cache: tfm.decode_step(model, params, token, cache)  # noqa: E731
    rows.append(
        (
            operations(without_cache, tokens),
            operations(with_cache, tokens[:, -1:], cache),
            seconds(lambda: without_cache(tokens)),  # noqa: B023 - called at once
            seconds(lambda: tfm.decode_step(model, params, tokens[:, -1:], cache)[0]),  # noqa: B023
        )
    )
    print("length {}: operations {:,.0f} and {:,.0f}, milliseconds {:.2f} and {:.2f}".format(
        length, *rows[-1][:2], *(1e3 * each for each in rows[-1][2:])))  # fmt: skip
asked_without, asked_with, took_without, took_with = np.array(rows).T

# %%
figure = Figure(figsize=(9, 3.5), layout="constrained")
left, right = figure.subplots(1, 2)
left.plot(LENGTHS, asked_without, "o-", label="without cache")
left.plot(LENGTHS, asked_with, "o-", label="with cache")
legend(left, "length", "operations of one more token")
right.plot(LENGTHS, took_without * 1e3, "o-", label="without cache")
right.plot(LENGTHS, took_with * 1e3, "o-", label="with cache")
legend(right, "length", "milliseconds of one more token")
display(figure)

# %% [markdown]
# **Claim.** Without a cache, one more token costs in proportion to the length and more (attention's part grows with the
# square); with it, nearly the same at every length, as only the products of one query with the keys grow. At the
# longest length here the full pass multiplies more than half as many times as much as there are tokens.

# %%
longer = LENGTHS[-1] / LENGTHS[0]
growth_without, growth_with = asked_without[-1] / asked_without[0], asked_with[-1] / asked_with[0]
saved = asked_without[-1] / asked_with[-1]
print(f"length × {longer:.0f}: operations × {growth_without:.1f} without, × {growth_with:.2f} with the cache")
print(f"at {LENGTHS[-1]} tokens the cache saves a factor of {saved:.0f} in operations")
assert growth_without > longer > 2 * growth_with
assert saved > LENGTHS[-1] / 2

# %% [markdown]
# **Claim.** The clock agrees, though by less: a pass over many tokens keeps the arithmetic units busy, a step for one
# token waits for memory, as we shall see below.

# %%
faster = took_without[-1] / took_with[-1]
print(f"at {LENGTHS[-1]} tokens a step with the cache is {faster:.1f} times as fast")
assert faster > 2

# %% [markdown]
# ## What the cache costs
#
# Two numbers, key and value, for each row, position, key/value head, head entry and layer:
#
# $$ \text{bytes} = 2 \cdot (B \cdot W \cdot C + B \cdot S) \cdot K \cdot H \cdot L \cdot \text{bytes of a number} $$
#
# and a few integers. $W$ beams of a row share its source. `tfm.cache_bytes` says so before anything is allocated.

# %%
print(inspect.getdoc(tfm.cache_bytes))

# %%
heads = {f"{name}, K = {kv}": config.replace(num_kv_heads=kv) for name, kv in
         (("multi-head", 8), ("grouped", 2), ("multi-query", 1))}  # fmt: skip
display(plot.cache_growth(heads, LENGTHS, batch=8, source_length=64))

# %% [markdown]
# **Claim.** The arrays of a real cache have just as many bytes, for every number of key/value heads and every type that
# keys and values can be kept in (int8 has a float32 scale beside each vector).

# %%
for name, one in heads.items():
    for dtype in ("float32", "bfloat16", "int8"):
        real = caches.init_cache(one, batch=2, source_length=16, capacity=32, dtype=dtype)
        said = tfm.cache_bytes(one, batch=2, source_length=16, capacity=32, dtype=dtype)
        found = sum(leaf.nbytes for leaf in jax.tree.leaves(real))
        print(f"{name:18} {dtype:9} keys {real.layers[0].self_attention.length} long: {found:,} bytes, said {said:,}")
        assert found == said == plot.measured_cache_bytes(one, batch=2, source_length=16, capacity=32, dtype=dtype)

# %% [markdown]
# ## The largest batch in a given memory
#
# A server has a fixed memory for caches. How many rows fit, by length?

# %%
BUDGET = 256 << 20


def largest_batch(config, length, dtype="float32", budget=BUDGET):
    return budget // tfm.cache_bytes(config, batch=1, source_length=64, capacity=length, dtype=dtype)


settings = {**{name: (one, "float32") for name, one in heads.items()}}
settings["grouped, int8"] = (heads["grouped, K = 2"], "int8")
batches = {name: [largest_batch(one, length, dtype) for length in LENGTHS] for name, (one, dtype) in settings.items()}
figure = Figure(figsize=(5, 3.5), layout="constrained")
ax = figure.subplots()
for name, counts in batches.items():
    ax.plot(LENGTHS, counts, "o-", label=name)
    print(f"{name:18}", counts)
legend(ax, "target tokens", f"rows in {BUDGET >> 20} MiB")
display(figure)

# %% [markdown]
# **Claim.** Rows and positions share the memory: source and target together are what counts, so twice as many positions
# leave half as many rows. A quarter of the key/value heads holds four times as many rows, and int8 nearly four times as
# many again. At the budget a batch fits, and one row more does not.

# %%
multi_head, grouped, int8 = (batches[name] for name in ("multi-head, K = 8", "grouped, K = 2", "grouped, int8"))
positions = [64 + length for length in LENGTHS]
used = [rows * number for rows, number in zip(multi_head, positions, strict=True)]
print("rows × positions", used)
assert max(used) - min(used) < max(positions) + 0.01 * max(used)  # but for the row that does not fit whole
print(
    "grouped to multi-head", np.round(np.divide(grouped, multi_head), 2), "int8", np.round(np.divide(int8, grouped), 2)
)
assert np.allclose(np.divide(grouped, multi_head), 4, rtol=0.05)
assert ((np.divide(int8, grouped) > 3) & (np.divide(int8, grouped) < 4)).all()
tight = 1 << 20
rows_that_fit = largest_batch(config, 32, budget=tight)
sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(caches.init_cache(config, batch=b, source_length=64, capacity=32)))
         for b in (rows_that_fit, rows_that_fit + 1)]  # fmt: skip
print(f"in {tight:,} bytes {rows_that_fit} rows fit: {sizes[0]:,} bytes; one more takes {sizes[1]:,}")
assert sizes[0] <= tight < sizes[1]

# %% [markdown]
# ## The roofline: what binds prefill, and what binds decoding
#
# A program that does $I$ operations for each byte that it reads runs, at best, at $\min(\text{operations a second}, I
# \cdot \text{bytes a second})$ (Williams et al. 2009). Both limits are measured here, on this machine: the best rate of
# a large product, and the rate of reading an array too large for the processor's caches.

# %%
size, megabytes = (1024, 64) if SMALL else (2048, 256)
a, b = (jax.random.normal(jax.random.key(seed), (size, size)) for seed in (0, 1))
product, total = jax.jit(jnp.matmul), jax.jit(lambda x: x.sum(axis=1))
peak = 2 * size**3 / seconds(lambda: product(a, b))
large = jnp.ones((64, megabytes * (1 << 20) // 4 // 64))
bandwidth = large.nbytes / seconds(lambda: total(large))
ridge = peak / bandwidth
print(
    f"{peak / 1e9:,.0f} GFLOP/s, {bandwidth / 1e9:,.1f} GB/s: from {ridge:.1f} operations a byte on, arithmetic binds"
)
del a, b, large

# %% [markdown]
# Now the model: a decoder whose weights are more than a processor's cache holds, a prefill of a prompt, and decode
# steps of several batch sizes. A step reads all weights of the decoder, once for the whole batch, and each row's cache.

# %%
wide = config.replace(model_dim=512, feed_forward_dim=2048, decoder_layers=2 if SMALL else 6)
model = tfm.build_model(wide, dtype="float32")
params = tfm.init_params(model, jax.random.key(0))
BATCHES = [1, 4, 16, 32] if SMALL else [1, 2, 4, 8, 16, 32, 64]
weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves((params["decoder"], params["target_embedding"])))
print(f"decoder and output: {weight_bytes / 1e6:.0f} MB of weights")

points = {}
for batch in BATCHES:
    source = jnp.ones((batch, 16), jnp.int32)
    logits, cache = tfm.prefill(model, params, source, capacity=64)
    token = logits.argmax(-1)
    step = lambda token, cache: tfm.decode_step(model, params, token, cache)  # noqa: E731
    asked = operations(step, token, cache)
    read = weight_bytes + sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    taken = seconds(lambda: tfm.decode_step(model, params, token, cache)[0])  # noqa: B023 - called at once
    points[f"decode, batch {batch}"] = (asked / read, asked / taken)
prompt = jnp.ones((4, 128), jnp.int32)
start = lambda prompt: tfm.prefill(model, params, prompt[:, :16], prompt=prompt, capacity=128)  # noqa: E731
asked = operations(start, prompt)
read = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
points["prefill, 4 × 128 tokens"] = (asked / read, asked / seconds(lambda: start(prompt)[0]))
for name, (intensity, rate) in points.items():
    print(f"{name:24} {intensity:7.1f} operations a byte, {rate / 1e9:6.1f} GFLOP/s, {rate / peak:.0%} of the peak")

# %%
figure = Figure(figsize=(6, 4), layout="constrained")
ax = figure.subplots()
along = np.geomspace(0.2, max(500, 2 * points["prefill, 4 × 128 tokens"][0]), 100)
ax.plot(along, np.minimum(peak, bandwidth * along) / 1e9, "k-", label="roof, measured")
ax.axvline(ridge, color="0.7", linestyle=":")
ax.plot(
    *np.array([points[f"decode, batch {batch}"] for batch in BATCHES]).T * [[1], [1e-9]], "o-", label="decode steps"
)
intensity, rate = points["prefill, 4 × 128 tokens"]
ax.plot(intensity, rate / 1e9, "s", label="prefill")
legend(ax, "operations a byte", "GFLOP/s")
display(figure)

# %% [markdown]
# **Claim.** A decode step of one row lies left of the ridge: bound by reading, it leaves most of the arithmetic unused.
# Prefill lies far right of it: bound by arithmetic.

# %%
alone, prefilling = points["decode, batch 1"], points["prefill, 4 × 128 tokens"]
print(f"decode {alone[0]:.2f}, ridge {ridge:.1f}, prefill {prefilling[0]:.0f} operations a byte")
print(f"rates: decode {alone[1] / peak:.0%}, prefill {prefilling[1] / peak:.0%} of the peak")
assert alone[0] < ridge < prefilling[0]
assert prefilling[1] > 2 * alone[1]

# %% [markdown]
# **Claim.** The way up is the batch: the weights are read once for all its rows, so operations a byte grow with it, and
# with them the rate, and rows a second. (Until the caches, which no rows share, are what is read: they set the limit.)

# %%
most = points[f"decode, batch {BATCHES[-1]}"]
print(f"batch × {BATCHES[-1]}: operations a byte × {most[0] / alone[0]:.1f}, rate × {most[1] / alone[1]:.1f}")
intensities = [points[f"decode, batch {batch}"][0] for batch in BATCHES]
assert intensities == sorted(intensities)
assert most[0] > 4 * alone[0]
assert most[1] > 1.5 * alone[1]
