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
# # 8. The bottleneck and its end
#
# From 2014 to 2017 a model's way to its source changed twice: the encoder's last state was all that the decoder had;
# then attention let every step look at every token's state; then attention was all there is. Here models of these
# generations learn one task, reversing strings of symbols, with equal numbers of parameters, and we measure what each
# gets wrong by length, what it keeps, and what its steps take. (`benchmarks/lineage.py` has more of all.)
#
# Papers: Sutskever et al. 2014 and Cho et al. 2014 (the fixed vector); Bahdanau et al. 2014 (attention; its figure 2 is
# the error by length); Vaswani et al. 2017. $S$ are source tokens, $C$ target tokens, $D$ the width, $L$ the decoder's
# layers.

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
import bisect
import inspect
import os
import random
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from IPython.display import display
from matplotlib.figure import Figure
from rich.console import Console

import tfm
from tfm import plot
from tfm.nn import recurrent, recurrent_cache, source_attention
from tfm.nn.cache import init_cache
from tfm.nn.params import param_shapes
from train.config import from_dict
from train.loop import train
from train.progress import Reporter

# %matplotlib inline
SMALL = os.environ.get("TFM_NOTEBOOK") == "small"  # as continuous integration runs it: in seconds
BUDGET, STEPS, BATCH_TOKENS = (30_000, 250, 512) if SMALL else (60_000, 1500, 1024)
SYMBOLS, SHORTEST, LONGEST = "abcdefgh", 3, 12 if SMALL else 30
GROUPS = [(3, 5), (6, 9), (10, 12)] if SMALL else [(3, 7), (8, 14), (15, 22), (23, 30)]
FOLDER = Path("runs/lineage-small" if SMALL else "runs/lineage")
print(f"tfm on {jax.devices()[0].device_kind}, jax {jax.__version__}")

# %% [markdown]
# ## Three generations, one budget
#
# What a recurrent decoder gets from its source is a setting, `source_context`; this is its step. With "fixed" it starts
# from the encoder's last state, and the source is not mentioned again.

# %%
print(inspect.getsource(recurrent.DecoderStep.__call__))
print(inspect.getsource(source_attention.SourceAttention._scores))

# %%
RECURRENT = dict(architecture="recurrent", encoder_layers=1, decoder_layers=1)
LAYERS = 1 if SMALL else 2
GENERATIONS = {
    "lstm, fixed vector": dict(RECURRENT, cell="lstm", source_context="fixed"),
    "gru, fixed vector": dict(RECURRENT, cell="gru", source_context="fixed-each-step"),
    "gru, attention": dict(RECURRENT, cell="gru", bidirectional=True, source_context="additive"),
    "transformer": dict(norm_position="post", encoder_layers=LAYERS, decoder_layers=LAYERS, num_heads=4),
}
if SMALL:
    del GENERATIONS["gru, fixed vector"]
FIXED = [name for name in GENERATIONS if "fixed" in name]


def of_width(settings, dim):
    vocabulary = len(SYMBOLS) + 4  # padding, start, end, unknown
    return tfm.ModelConfig(
        source_vocab_size=vocabulary, target_vocab_size=vocabulary, max_source_length=512, max_target_length=512,
        model_dim=dim, feed_forward_dim=4 * dim, dropout_rate=0.0, **settings,
    )  # fmt: skip


def parameters(config):
    return tfm.count_params(param_shapes(config))


configs = {}
for name, settings in GENERATIONS.items():
    widths = range(8, 256, 4)
    larger = bisect.bisect(widths, BUDGET, key=lambda dim: parameters(of_width(settings, dim)))
    around = [of_width(settings, dim) for dim in widths[larger - 1 : larger + 1]]
    configs[name] = min(around, key=lambda config: abs(parameters(config) - BUDGET))
    print(f"{name:19} D = {configs[name].model_dim:3}, {parameters(configs[name]):,} parameters")

# %% [markdown]
# **Claim.** Their numbers of parameters differ by less than a fifth: it is not size that decides what follows.

# %%
counts = [parameters(config) for config in configs.values()]
print(f"from {min(counts):,} to {max(counts):,}")
assert max(counts) < 1.2 * min(counts)

# %% [markdown]
# ## Training
#
# Strings are drawn from all strings of their length, and each length is as frequent as any other. Every model gets the
# same pairs, steps and learning rates. (A run that is there already is used.)


# %%
def strings(count, shortest, longest, seed):
    draw = random.Random(seed)
    return [" ".join(draw.choices(SYMBOLS, k=draw.randint(shortest, longest))) for _ in range(count)]


def reverse(text):
    return " ".join(reversed(text.split()))


FOLDER.mkdir(parents=True, exist_ok=True)
pairs = sorted(set(strings(8_000 if SMALL else 30_000, SHORTEST, LONGEST, seed=0)))
(FOLDER / "reversal.tsv").write_text("".join(f"{text}\t{reverse(text)}\n" for text in pairs))
print(len(pairs), "pairs, such as", pairs[0], "→", reverse(pairs[0]))


def run_config(config):
    """Of a model's training; all but the model is the same."""
    return from_dict({
        "steps": STEPS,
        "data": {"train": [str(FOLDER / "reversal.tsv")], "max_source_tokens": LONGEST + 1,
                 "max_target_tokens": LONGEST + 1},
        "tokenizer": {"source_kind": "word", "target_kind": "word", "shared": True},
        "model": config.to_dict(),
        "batch": {"tokens": BATCH_TOKENS, "max_shapes": 1},
        "optimizer": {"learning_rate": 5e-3, "schedule": "cosine", "warmup_steps": STEPS // 10},
        "loss": {"label_smoothing": 0.0},
        "validation": {"every_steps": 0},
        "checkpoint": {"every_steps": STEPS},
        "dtype": "float32",
    })  # fmt: skip


models = {}
for name, config in configs.items():
    run = FOLDER / name.replace(", ", "-").replace(" ", "-")
    train(run_config(config), run, reporter=Reporter(Console(quiet=True)))
    models[name] = tfm.load(run / "last", weights="float32")
    rows = [row for row in plot.read_metrics(run) if row["split"] == "train"]
    speed = statistics.median(row["tokens_per_second"] for row in rows)
    print(f"{name:19} loss {rows[0]['loss']:.2f} → {rows[-1]['loss']:.3f}; {speed:,.0f} target tokens a second")

# %% [markdown]
# ## Error by length
#
# Fresh strings, answered greedily; the error is the share of symbols that are not what stands at their place.

# %%
tests = {group: strings(40 if SMALL else 100, *group, seed=1) for group in GROUPS}


def errors(model):
    """The share of wrong symbols in each group of lengths, in percent."""
    answers = iter(model([text for texts in tests.values() for text in texts], max_tokens=LONGEST + 1))
    shares = []
    for texts in tests.values():
        wrong = []
        for text, answer in zip(texts, answers, strict=False):  # the groups stand one after another in the answers
            right, said = reverse(text).split(), answer.split()
            said += [""] * (len(right) - len(said))
            wrong += [a != b for a, b in zip(right, said, strict=False)]
        shares.append(100 * float(np.mean(wrong)))
    return shares


wrong = {name: errors(model) for name, model in models.items()}
labels = [f"{low}–{high}" for low, high in GROUPS]
figure = Figure(figsize=(6, 3.5), layout="constrained")
ax = figure.subplots()
for name, shares in wrong.items():
    ax.plot(labels, shares, "o-", label=name)
    print(f"{name:19}", ", ".join(f"{label}: {share:.1f} %" for label, share in zip(labels, shares, strict=True)))
ax.axhline(100 * (1 - 1 / len(SYMBOLS)), color="0.7", linestyle=":")  # guessing
ax.set(xlabel="symbols", ylabel="wrong symbols, %", ylim=0)
ax.legend()
display(figure)

# %% [markdown]
# **Claim.** With a fixed vector, the error grows with the length: it holds what a short string needs, and from the
# shortest group to the longest the error more than doubles, to a fifth of all symbols or more.

# %%
for name in FIXED:
    print(f"{name}: {wrong[name][0]:.1f} % at {labels[0]} symbols, {wrong[name][-1]:.1f} % at {labels[-1]}")
    assert wrong[name][-1] > max(2 * wrong[name][0], 20)

# %% [markdown]
# **Claim.** Attention closes most of the gap: with it, the same kind of cells, as many parameters and as many steps,
# the error of the longest strings is less than a third of the best fixed vector's.

# %%
best = min(wrong[name][-1] for name in FIXED)
print(f"at {labels[-1]} symbols: {wrong['gru, attention'][-1]:.1f} % with attention, {best:.1f} % without")
assert wrong["gru, attention"][-1] < best / 3

# %% [markdown]
# The Transformer has attention too, and closes the gap as well once it has had steps enough. It needs more of them than
# a recurrence that is led from state to state: nothing but its positions tells it what stands where. (In the small
# settings, of 250 steps, it has not come far.)
#
# ## What attention looks at
#
# To say symbol $t$ of the reversed string, look at symbol $S - 1 - t$: an anti-diagonal.

# %%
(WORD,) = strings(1, LONGEST - 2, LONGEST - 2, seed=2)
looked = plot.token_attention(models["gru, attention"], WORD, reverse(WORD))
weights, title = looked.chosen(-1, None)
display(plot.heat_map(weights, looked.rows, looked.columns))

# %% [markdown]
# **Claim.** So it has learned, without being told of any alignment: of fresh strings, the weights' largest entry is on
# the anti-diagonal, or beside it, in nine rows of ten and more.

# %%
near = []
for text in strings(10, LONGEST - 2, LONGEST - 2, seed=3):
    weights, _ = plot.token_attention(models["gru, attention"], text, reverse(text)).chosen(-1, None)
    size = len(text.split())
    near += (np.abs(weights[:size].argmax(axis=1) - np.arange(size)[::-1]) <= 1).tolist()
by_chance = 3 / LONGEST
print(f"{np.mean(near):.0%} of {len(near)} rows; {by_chance:.0%} by chance")
assert np.mean(near) > 0.9

# %% [markdown]
# ## What is kept while decoding
#
# The fixed vector is a bottleneck, and a small one to carry: of one row it is $D$ numbers a layer (an LSTM's two),
# whatever the lengths. Attention has the encoder's states and their keys besides, $3D$ for each of $S$ tokens where the
# encoder reads both ways; a Transformer keys and values of every layer, of source and target.

# %%
print(inspect.getsource(recurrent_cache.count_bytes))
LENGTHS = [16, 32, 64, 128, 256]


def formula(name, length):
    """Bytes for one row, source and target both of that length: float32 numbers, and two integers for the lengths."""
    D, layers = configs[name].model_dim, configs[name].decoder_layers
    numbers = {
        "lstm, fixed vector": 2 * D,
        "gru, fixed vector": 2 * D,  # its own state, and the encoder's last, which each step reads
        "gru, attention": D + 3 * D * length,
        "transformer": 2 * layers * D * (length + length),
    }[name]
    return 4 * numbers + 8


allocated = {}
for name, config in configs.items():
    caches = [init_cache(config, batch=1, source_length=length, capacity=length) for length in LENGTHS]
    allocated[name] = [sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) for cache in caches]
    print(f"{name:19}", dict(zip(LENGTHS, allocated[name], strict=True)))

# %% [markdown]
# **Claim.** The arrays have as many bytes as the formulas say, at every length; those of the fixed vector are the same
# at all of them.

# %%
for name, found in allocated.items():
    print(f"{name:19} {found[-1] / found[0]:5.1f} times the bytes for {LENGTHS[-1] // LENGTHS[0]} times the length")
    assert found == [formula(name, length) for length in LENGTHS]
    assert (found[0] == found[-1]) == (name in FIXED)

# %% [markdown]
# ## What a step takes
#
# Target tokens a second of training stood above, by the library's own record. Two things decide them. A recurrence's
# token $t$ waits for token $t - 1$, which costs much where a device could do much at once, and little on a few CPU
# cores (notebook 1 counts the products in turn). And attention meets every source token at every target token. For the
# second, here are forward passes over the same number of tokens, in many short rows and in few long ones.

# %%
TOKENS, ROW_LENGTHS = 4096, [16, 512]
COMPARED = ["lstm, fixed vector", "gru, attention"] if SMALL else list(configs)


def forward_pass(model, params, rows, length):
    """A teacher-forced one, compiled."""
    ids = jax.random.randint(jax.random.key(0), (rows, length), 4, 4 + len(SYMBOLS))
    compiled = jax.jit(lambda params: model.apply({"params": params}, ids, jnp.full(rows, length), ids))
    jax.block_until_ready(compiled(params))
    return lambda: jax.block_until_ready(compiled(params))


passes = {
    (name, length): forward_pass(models[name].model, models[name].params, TOKENS // length, length)
    for name in COMPARED
    for length in ROW_LENGTHS
}
took = {which: [] for which in passes}
for _ in range(9):  # all of them in turn, so that what else the machine does meets them alike
    for which, run in passes.items():
        begun = time.perf_counter()
        run()
        took[which].append(time.perf_counter() - begun)
speeds = {name: [TOKENS / min(took[name, length]) for length in ROW_LENGTHS] for name in COMPARED}
for name, (short, long) in speeds.items():
    print(f"{name:19} {short:8,.0f} target tokens a second in rows of {ROW_LENGTHS[0]}, {long:8,.0f} in long ones")

# %% [markdown]
# **Claim.** What attention gives it takes in time: in long rows it keeps less than half as much of its speed as a
# recurrence with a fixed vector does, whose work for a token is the same at every length.

# %%
kept = {name: long / short for name, (short, long) in speeds.items()}
print({name: f"{share:.0%} kept" for name, share in kept.items()})
assert kept["gru, attention"] < 0.5 * kept["lstm, fixed vector"]
