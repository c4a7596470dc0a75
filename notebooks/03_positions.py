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
# # 3. Positions
#
# Attention does not know an order: shuffle the keys together with their values, and nothing changes. So where a token
# stands has to be said, and there are several ways to say it. This notebook looks at the sinusoids of the first
# Transformer and at rotations (RoPE), at what depends on the offset alone, and at what happens beyond the lengths that
# a model was trained on.
#
# Papers: Vaswani et al. 2017 (section 3.5); Su et al. 2021 (RoFormer, equations 15 and 34); Press et al. 2022 (ALiBi,
# and extrapolation). $D$ is the model's width, $H$ that of a head.

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
import pydoc_data.topics
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
from IPython.display import display
from matplotlib.figure import Figure
from rich.console import Console

import tfm
from tfm.nn import positions
from train.config import from_dict
from train.loop import train
from train.progress import Reporter

# %matplotlib inline
SMALL = os.environ.get("TFM_NOTEBOOK") == "small"  # as continuous integration runs it: in seconds

# %% [markdown]
# ## Sinusoids
#
# $$ PE_{(p, 2i)} = \sin(p / 10000^{2i/D}), \qquad PE_{(p, 2i+1)} = \cos(p / 10000^{2i/D}) $$

# %%
print(inspect.getsource(positions.sinusoidal))
print(inspect.getsource(positions._angles))
D = 64
encodings = positions.sinusoidal(jnp.arange(4096), D)
print("positions", encodings.shape)
figure = Figure(figsize=(8, 4), layout="constrained")
ax = figure.subplots()
picture = ax.imshow(encodings[:128].T, aspect="auto", cmap="RdBu", vmin=-1, vmax=1)
ax.set(xlabel="position", ylabel="entry")
figure.colorbar(picture)
display(figure)

# %% [markdown]
# **Claim.** Each pair of entries is a wave of its own: the periods, read off the heat map by counting changes of sign,
# are $2\pi \cdot 10000^{2i/D}$, from about 6 positions to tens of thousands.

# %%
said = 2 * np.pi * 10_000 ** (np.arange(0, D, 2) / D)
changes = (np.diff(np.sign(encodings[:, 0::2]), axis=0) != 0).sum(axis=0)
seen = changes >= 8  # a wave too long for 4,096 positions has hardly turned
measured = 2 * len(encodings) / np.maximum(changes, 1)
for i in range(0, seen.sum(), 4):
    print(f"entry {2 * i:2}: period {said[i]:8.1f} by the formula, {measured[i]:8.1f} counted")
assert seen.sum() >= 16
assert np.allclose(measured[seen], said[seen], rtol=0.15)

# %% [markdown]
# **Claim.** For a fixed offset $k$, $PE_{p+k}$ is a linear function of $PE_p$, the same for all $p$ (section 3.5 of the
# paper): least squares on the even positions finds it, and it holds on the odd ones.

# %%
OFFSET = 7
now, later = np.asarray(encodings[:4000], np.float64), np.asarray(encodings[OFFSET : 4000 + OFFSET], np.float64)
matrix, *_ = np.linalg.lstsq(now[0::2], later[0::2], rcond=None)
error = np.abs(now[1::2] @ matrix - later[1::2]).max()
print(f"matrix {matrix.shape}; largest error on positions that it was not fitted to: {error:.1e}")
assert error < 0.01

# %% [markdown]
# ## Rotations
#
# RoPE adds nothing. It turns queries and keys: the pair of entries $(2i, 2i+1)$ by the angle $p \cdot 10000^{-2i/H}$.

# %%
print(inspect.getsource(positions.rotate))
H, LENGTH = 16, 48
vector = jax.random.normal(jax.random.key(0), (H,))
turned = positions.rotate(jnp.broadcast_to(vector, (1, LENGTH, 1, H)), jnp.arange(LENGTH)[None])[0, :, 0]
print("one vector at", turned.shape, "positions and entries")
figure = Figure(figsize=(9, 3), layout="constrained")
for ax, i in zip(figure.subplots(1, 3), (0, 2, 4), strict=True):
    ax.scatter(turned[:, 2 * i], turned[:, 2 * i + 1], c=np.arange(LENGTH), s=12)
    ax.set(title=f"entries {2 * i} and {2 * i + 1}", aspect="equal")
display(figure)

# %% [markdown]
# **Claim.** It is a rotation: lengths stay, and from one position to the next each pair turns by its own angle.

# %%
pairs = np.asarray(turned).reshape(LENGTH, H // 2, 2)
lengths = np.linalg.norm(pairs, axis=-1)
angles = np.unwrap(np.arctan2(pairs[..., 1], pairs[..., 0]), axis=0)
each_step = np.diff(angles, axis=0)
by_formula = 10_000.0 ** (-np.arange(0, H, 2) / H)
print("radians a position:", np.round(each_step.mean(axis=0), 4))
print("by the formula:    ", np.round(by_formula, 4))
assert np.allclose(lengths, lengths[:1], rtol=1e-4)
assert np.allclose(each_step, by_formula, atol=1e-4)

# %% [markdown]
# **Claim.** So the dot product of a query at $m$ and a key at $n$ depends on $n - m$ only (equation 15 of the paper):
# along a diagonal all are equal. With sinusoids added before the projections they are not.

# %%
draw = jax.random.normal(jax.random.key(1), (4, H, H)) / np.sqrt(H)
query, key = jax.random.normal(jax.random.key(2), (2, H))
everywhere = jnp.arange(LENGTH)[None]


def everywhere_rotated(vector):
    return positions.rotate(jnp.broadcast_to(vector, (1, LENGTH, 1, H)), everywhere)[0, :, 0]


waves = positions.sinusoidal(jnp.arange(LENGTH), H)
rotary = np.asarray(everywhere_rotated(query) @ everywhere_rotated(key).T)
added = np.asarray(((query[None] + waves) @ draw[0]) @ ((key[None] + waves) @ draw[1]).T)


def spread_along_diagonals(table):
    """The largest difference within a diagonal, to the spread of the whole table."""
    diagonals = [np.diagonal(table, offset) for offset in range(1 - LENGTH, LENGTH)]
    return max(np.ptp(diagonal) for diagonal in diagonals) / np.ptp(table)


figure = Figure(figsize=(8, 3.5), layout="constrained")
for ax, (name, table) in zip(figure.subplots(1, 2), {"RoPE": rotary, "sinusoids": added}.items(), strict=True):
    ax.imshow(table)
    ax.set(title=f"query · key, {name}", xlabel="key's position", ylabel="query's position")
display(figure)
print(f"spread within a diagonal: RoPE {spread_along_diagonals(rotary):.1e}, "
      f"sinusoids {spread_along_diagonals(added):.2f}")  # fmt: skip
assert spread_along_diagonals(rotary) < 1e-4
assert spread_along_diagonals(added) > 0.1

# %% [markdown]
# ## Beyond the trained length
#
# The same small encoder-decoder, once for each way to say positions, learns to copy strings of up to 12 symbols. How
# well does it copy longer ones?

# %%
SYMBOLS, TRAINED_UP_TO, LENGTHS = "abcdefgh", 12, [8, 24] if SMALL else [4, 8, 12, 14, 16, 20, 24]
FOLDER = Path("runs/positions-small" if SMALL else "runs/positions")
FOLDER.mkdir(parents=True, exist_ok=True)


def strings(count, lengths, seed):
    drawn = random.Random(seed)
    return [" ".join(drawn.choices(SYMBOLS, k=drawn.choice(lengths))) for _ in range(count)]


pairs = sorted(set(strings(8_000 if SMALL else 20_000, range(1, TRAINED_UP_TO + 1), seed=0)))
(FOLDER / "copy.tsv").write_text("".join(f"{text}\t{text}\n" for text in pairs))


LAYERS = {"encoder_layers": 1, "decoder_layers": 1} if SMALL else {}  # else the preset's


def learn(name, data, *, positions, architecture="encoder-decoder", kind="word", steps, **batch):
    """A small model, trained by the loop that `tfm train` calls."""
    longest = batch.pop("longest")
    settings = {
        "steps": steps,
        "data": {"train": [str(data)], "max_source_tokens": longest, "max_target_tokens": longest},
        "tokenizer": {"source_kind": kind, "target_kind": kind, "shared": True},
        "model": {
            "preset": "tiny", "positions": positions, "architecture": architecture, "dropout_rate": 0.0,
            "max_source_length": 256, "max_target_length": 512, **LAYERS,
        },
        "batch": {"max_shapes": 1, **batch},
        "optimizer": {"learning_rate": 3e-3, "schedule": "cosine", "warmup_steps": steps // 10},
        "loss": {"label_smoothing": 0.0},
        "validation": {"every_steps": 0},
        "checkpoint": {"every_steps": steps},
    }  # fmt: skip
    train(from_dict(settings), FOLDER / name, reporter=Reporter(Console(quiet=True)))
    return tfm.load(FOLDER / name / "last", weights="float32")


KINDS = ["sinusoidal", "rope"] if SMALL else ["sinusoidal", "learned", "rope", "t5-bias", "alibi"]
STEPS, BATCH_TOKENS = (300, 512) if SMALL else (1000, 1024)
copiers = {
    kind: learn(f"copy-{kind}", FOLDER / "copy.tsv", positions=kind, steps=STEPS, tokens=BATCH_TOKENS, longest=16)
    for kind in KINDS
}
print(copiers)

# %%
TESTED = 32 if SMALL else 100
every_text = [text for length in LENGTHS for text in strings(TESTED, [length], seed=length)]
losses = {}
for kind, copier in copiers.items():
    scores = [one.token_scores for one in copier.score(every_text, every_text)]
    losses[kind] = [-np.mean(scores[start : start + TESTED]) for start in range(0, len(scores), TESTED)]
    print(f"{kind:11} nats a symbol", np.round(losses[kind], 2))
figure = Figure(figsize=(6, 3.5), layout="constrained")
ax = figure.subplots()
for kind, each in losses.items():
    ax.plot(LENGTHS, each, "o-", label=kind)
ax.axvline(TRAINED_UP_TO, color="0.7", linestyle=":")
ax.set(xlabel="symbols", ylabel="nats a symbol", yscale="log")
ax.legend()
display(figure)

# %% [markdown]
# **Claim.** Within the trained lengths every one of them has learned something of the task (guessing would be $\ln 8 =
# 2.08$ nats); at twice the trained length every one of them has lost most of it. Relative positions are no guarantee:
# what a model was never asked, it need not have learned.

# %%
within = {kind: each[LENGTHS.index(8)] for kind, each in losses.items()}
beyond = {kind: each[-1] for kind, each in losses.items()}
for kind in KINDS:
    print(f"{kind:11} {within[kind]:.3f} nats at 8 symbols, {beyond[kind]:.3f} at {LENGTHS[-1]}")
assert all(loss < 1.5 for loss in within.values())
assert all(beyond[kind] > 2 * within[kind] for kind in KINDS)

# %% [markdown]
# ## Does sinusoidal completion loop more?
#
# Do language models with sinusoids repeat themselves more than those with rotary positions? Two small decoder-only
# models, alike but for their positions, learn to go on with text: 48 characters are given, 48 follow. (The text is
# Python's own reference, which comes with every Python.) Then each completes held-out beginnings with 144 characters,
# greedily, three times as many as it was trained on.

# %%
text = re.sub(r"[^a-z ,.]+", " ", " ".join(pydoc_data.topics.topics.values()).lower())  # no rules, no tables
text = re.sub(" +", " ", text)
CONTEXT, FOLLOWING, WRITTEN = 48, 48, 144
cut = int(0.95 * len(text))
starts = random.Random(0).sample(range(cut - CONTEXT - FOLLOWING), 4_000 if SMALL else 20_000)


def written(start, length):
    """Characters with white space between, each a token; _ is a blank."""
    return " ".join(text[start : start + length].replace(" ", "_"))


pairs = [(written(start, CONTEXT), written(start + CONTEXT, FOLLOWING)) for start in starts]
(FOLDER / "text.tsv").write_text("".join(f"{before}\t{after}\n" for before, after in pairs))
writers = {
    kind: learn(
        f"text-{kind}", FOLDER / "text.tsv", positions=kind, architecture="decoder-only", steps=120 if SMALL else 1500,
        tokens=1024 if SMALL else 2048, longest=50,
    )
    for kind in ("sinusoidal", "rope")
}  # fmt: skip
held_out = random.Random(1).sample(range(cut, len(text) - CONTEXT - WRITTEN), 16 if SMALL else 128)
beginnings = [written(start, CONTEXT) for start in held_out]


# %%
def repeated(completion, n=8):
    """The share of its runs of n characters that stood in it before."""
    characters = completion.split()
    runs = [tuple(characters[i : i + n]) for i in range(len(characters) - n + 1)]
    return 1 - len(set(runs)) / max(len(runs), 1)


loops = {"the text itself": [repeated(written(start + CONTEXT, WRITTEN)) for start in held_out]}
for kind, writer in writers.items():
    completions = writer(beginnings, max_tokens=WRITTEN)
    loops[f"{kind}, greedy"] = [repeated(one) for one in completions]
    drawn = writer(beginnings, max_tokens=WRITTEN, sampler=tfm.Sampling(), seed=1)
    loops[f"{kind}, sampled"] = [repeated(one) for one in drawn]
    print(f"{kind}: {completions[0].replace(' ', '').replace('_', ' ')!r}")
for name, shares in loops.items():
    print(f"{name:20} {np.mean(shares):.1%} repeated, ± {np.std(shares) / np.sqrt(len(shares)):.1%}")
figure = Figure(figsize=(6, 3), layout="constrained")
ax = figure.subplots()
ax.barh(list(loops), [np.mean(shares) for shares in loops.values()])
ax.set_xlabel("share repeated")
display(figure)

# %% [markdown]
# **Claim.** Greedy completion of both repeats itself far more than the text does, and than what is sampled. So it is
# the greedy choice that loops, whatever says the positions.

# %%
mean = {name: float(np.mean(shares)) for name, shares in loops.items()}
for kind in writers:
    print(f"{kind}: {mean[f'{kind}, greedy']:.1%} greedy, {mean[f'{kind}, sampled']:.1%} sampled")
    assert mean[f"{kind}, greedy"] > mean["the text itself"] + 0.1
    assert mean[f"{kind}, greedy"] > mean[f"{kind}, sampled"] + 0.1

# %% [markdown]
# And between the two? The difference, with an interval that holds 95 % of what other samples of beginnings would give
# (bootstrap). One training each: another seed may change the sign.
#
# **Claim.** What the difference is, is printed here; it is small beside how much both loop.

# %%
differences = np.array(loops["sinusoidal, greedy"]) - np.array(loops["rope, greedy"])
resampled = np.random.default_rng(0).choice(differences, (2000, len(differences))).mean(axis=1)
low, high = np.percentile(resampled, [2.5, 97.5])
verdict = "more than" if low > 0 else "less than" if high < 0 else "about as much as"
print(f"sinusoidal less rope: {differences.mean():+.1%}, 95 % within [{low:+.1%}, {high:+.1%}]")
print(f"here the sinusoidal model repeats itself {verdict} the rotary one")
assert abs(differences.mean()) < (mean["sinusoidal, greedy"] + mean["rope, greedy"]) / 2
