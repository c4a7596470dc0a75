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
# # 4. The encoder-decoder, read from top to bottom
#
# The Transformer of Vaswani et al. 2017, beside its figure 1: what goes in at the bottom, what each box does, what
# comes out at the top. Then what the boxes cost, why there are residual connections and norms, and what is left of it
# without them.
#
# Papers: Vaswani et al. 2017 (section 3; section 5.4 for dropout); He et al. 2016 (residual connections); Ba et al.
# 2016 (LayerNorm); Xiong et al. 2020 (where the norm stands). Letters are those of `tfm.axes`: $B$ rows, $S$ source and
# $T$ target tokens, $D$ the model's width, $F$ the feed-forward's, $L$ layers, $V$ entries of a vocabulary.

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

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from IPython.display import display
from matplotlib.figure import Figure

import tfm
from tfm.nn import layers, positions, transformer
from tfm.nn.blocks import Block, DecoderLayer, EncoderLayer
from tfm.nn.params import count_by_part
from train import step as steps
from train.config import load_recipe
from train.evaluate import held_out_loss
from train.optimizer import make_optimizer
from train.overrides import apply_overrides
from train.prepare import prepare

# %matplotlib inline
SMALL = os.environ.get("TFM_NOTEBOOK") == "small"  # as continuous integration runs it: in seconds

# %% [markdown]
# ## The bottom of the figure: text, ids, vectors
#
# The data of notebook 5: spellings and pronunciations. A batch is a few pairs, padded.

# %%
recipe = load_recipe("g2p-demo")
settings = "--steps 400 --model.encoder_layers 4 --model.decoder_layers 4 --optimizer.warmup_steps 40"
if SMALL:
    settings = (
        "--steps 120 --model.preset tiny --model.encoder_layers 2 --model.decoder_layers 1 --batch.tokens 1024 "
        "--optimizer.warmup_steps 20 --optimizer.learning_rate 3e-3"
    )
settings += " --batch.max_shapes 1"
prepared = prepare(apply_overrides(recipe, settings.split()))
config = prepared.config.model
batch = jax.tree.map(lambda rows: jnp.asarray(rows[:3]), prepared.train[0])
for name in ("source", "source_lengths", "target_in", "target_out"):
    print(f"{name:15} {getattr(batch, name).shape}")
print("source row 0:", prepared.source_tokenizer.tokens(batch.source[0].tolist()))

# %%
model = tfm.build_model(config, dtype="float32")
params = tfm.init_params(model, jax.random.key(0))
whole = model.bind({"params": params})  # the module with its parameters, to call its parts by name
embedded = whole.embed(whole.source_embedding, batch.source)
at = jnp.arange(batch.source.shape[1])[None]
placed = whole.encoder.add_positions(embedded, at)
print("ids", batch.source.shape, "→ embedded [B, S, D]", embedded.shape, "→ with positions", placed.shape)

# %% [markdown]
# **Claim.** "Input embedding" and "positional encoding" in the figure are this: a row of a table for each id, times
# $\sqrt{D}$ (section 3.4), plus the sinusoid of the place (section 3.5).

# %%
print(inspect.getsource(transformer.Transformer.embed))
by_hand = params["source_embedding"]["weight"][batch.source] * np.sqrt(config.model_dim)
by_hand += positions.sinusoidal(at, config.model_dim)
difference = float(jnp.abs(by_hand - placed).max())
print(f"largest difference {difference:.1e}")
assert difference < 1e-5

# %% [markdown]
# ## The left half: the encoder
#
# Each layer is two sublayers, self-attention and feed-forward, each inside a residual connection.

# %%
print(inspect.getsource(EncoderLayer))
print(inspect.getsource(Block.residual))
print(inspect.getsource(layers.FeedForward))

# %% [markdown]
# The figure has the norm *after* the addition ("Add & Norm"), post-norm; this model has it before each sublayer,
# pre-norm, as most have today. `norm_position` in the config says which. And the whole stack:

# %%
print(inspect.getsource(transformer.Encoder.__call__))
encoded = whole.encode(batch.source, batch.source_lengths)
print("encoded [B, S, D]", encoded.shape)

# %% [markdown]
# ## The right half: the decoder
#
# A layer has one sublayer more, in the middle: attention to what was encoded. Its keys and values are projected once a
# source; the decoder's own come from the tokens so far.

# %%
print(inspect.getsource(DecoderLayer))
sources = whole.decoder.cross_keys_values(encoded)
print(f"{len(sources)} layers of keys [B, K, S, H]", sources[0].keys.shape)
target = whole.embed(whole.target_embedding, batch.target_in)
decoded, seen = whole.decoder(target, sources, batch.source_lengths)
logits = whole.logits(decoded)
probabilities = jax.nn.softmax(logits)
print("decoded [B, T, D]", decoded.shape, "→ logits [B, T, V]", logits.shape, "→ probabilities", probabilities.shape)

# %% [markdown]
# **Claim.** These parts, one after another, are the model: its call gives the same logits. At the top, every place has
# a distribution over the vocabulary.

# %%
print(inspect.getsource(transformer.EncoderDecoder.__call__).split('"""')[2])
called = model.apply({"params": params}, batch.source, batch.source_lengths, batch.target_in)
difference = float(jnp.abs(called - logits).max())
print(f"largest difference {difference:.1e}")
assert difference < 1e-5
assert np.allclose(probabilities.sum(axis=-1), 1, atol=1e-5)

# %% [markdown]
# **Claim.** The order in the figure is the order of what depends on what: what is encoded depends on every letter of a
# word, what is predicted at $t$ on the targets up to $t$ and on all letters.

# %%
other_source = batch.source.at[0, 0].set((batch.source[0, 0] + 1) % config.source_vocab_size)
other_target = batch.target_in.at[0, 3].set((batch.target_in[0, 3] + 1) % config.target_vocab_size)
length = int(batch.source_lengths[0])
by_source = jnp.abs(whole.encode(other_source, batch.source_lengths) - encoded)[0, :length].max(axis=-1)
by_target = jnp.abs(whole(batch.source, batch.source_lengths, other_target) - logits)[0].max(axis=-1)
print("first letter changed: every letter's vector by", np.round(np.asarray(by_source, float), 2))
print("target 3 changed: logits by", np.round(np.asarray(by_target, float), 2))
assert (by_source > 0).all()
assert (by_target[:3] == 0).all()
assert (by_target[3:] > 0).all()

# %% [markdown]
# ## Parameters by part
#
# An attention has four matrices of $D \times D$, a feed-forward two of $D \times F$, each with its bias; a norm has a
# scale and a bias. A decoder layer has a second attention, with a norm.

# %%
D, F = config.model_dim, config.feed_forward_dim
attention, feed_forward, norm = 4 * (D * D + D), 2 * D * F + F + D, 2 * D
formula = {
    "source_embedding": config.source_vocab_size * D,
    "target_embedding": config.target_vocab_size * D,  # and the output projection: the same matrix
    "encoder": config.encoder_layers * (attention + feed_forward + 2 * norm) + norm,
    "decoder": config.decoder_layers * (2 * attention + feed_forward + 3 * norm) + norm,
}
counted = count_by_part(params)
for name, count in counted.items():
    print(
        f"{name:17} {count:10,} parameters, {count / tfm.count_params(params):6.1%}; by the formula {formula[name]:,}"
    )
figure = Figure(figsize=(6, 2.2), layout="constrained")
ax = figure.subplots()
ax.barh(list(counted), list(counted.values()))
ax.set_xlabel("parameters")
display(figure)

# %% [markdown]
# **Claim.** The formula counts them exactly. (And for the paper's base model, with its vocabulary of 37,000, one matrix
# for both embeddings and the output, it gives the 63 million that tfm's has, which the paper rounds to 65.)

# %%
base = tfm.preset("vaswani-base")
shapes = jax.eval_shape(functools.partial(tfm.init_params, tfm.build_model(base)), jax.random.key(0))
millions = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) / 1e6
print(f"vaswani-base: {millions:.1f} million parameters")
assert counted == formula
assert 60 < millions < 66

# %% [markdown]
# ## The residual's gradient path
#
# $x + \mathrm{Sublayer}(x)$ has the derivative $1 + \ldots$: whatever the sublayer does, the gradient has a way past
# it. To see what that is worth, here are deep stacks, untrained, with it and without. The model's code is not touched:
# Flax lets one stand between a call and its method, and there the input is taken off the output again.


# %%
def without_residual(call, args, kwargs, context):
    """x + f(x) becomes f(x)."""
    if context.method_name == "residual":
        return call(*args, **kwargs) - args[0]
    return call(*args, **kwargs)


def without_norm(call, args, kwargs, context):
    """Norms give back what they are given."""
    if isinstance(context.module, layers.Norm) and context.method_name == "__call__":
        call(*args, **kwargs)  # so that its parameters are made
        return args[0]
    return call(*args, **kwargs)


def without_either(call, args, kwargs, context):
    """Neither norm nor residual: f(g(h(…)))."""
    return without_residual(lambda *args, **kwargs: without_norm(call, args, kwargs, context), args, kwargs, context)


def without_feed_forward(call, args, kwargs, context):
    """Feed-forward layers add nothing."""
    result = call(*args, **kwargs)
    if isinstance(context.module, layers.FeedForward) and context.method_name == "__call__":
        return jnp.zeros_like(result)
    return result


def with_all(call, args, kwargs, context):
    return call(*args, **kwargs)


CHANGES = {
    "as it is": with_all,
    "without norm": without_norm,
    "without residual": without_residual,
    "without feed-forward": without_feed_forward,
}
DEPTHS = (3, 8) if SMALL else (8, 16)


@functools.cache
def stack(depth):
    """A model with so many encoder layers, and its first parameters."""
    model = tfm.build_model(config.replace(encoder_layers=depth, decoder_layers=1), dtype="float32")
    return model, tfm.init_params(model, jax.random.key(0))


def gradient_by_layer(change, depth):
    """The norm of the loss's gradient at each encoder layer's matrices, from the first layer to the last."""
    deep, deep_params = stack(depth)

    def loss(params):
        logits = deep.apply({"params": params}, batch.source, batch.source_lengths, batch.target_in)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.target_out[..., None], axis=-1)[..., 0]
        return -(chosen * batch.weights).sum() / batch.weights.sum()

    with nn.intercept_methods(change):
        gradients = jax.grad(loss)(deep_params)["encoder"]
    each = [jax.tree.leaves(gradients[f"layer_{i}"]) for i in range(depth)]
    return np.array([float(jnp.sqrt(sum((leaf**2).sum() for leaf in leaves))) for leaves in each])


STACKS = {
    "as it is": with_all,
    "residual, no norm": without_norm,
    "norm, no residual": without_residual,
    "neither": without_either,
}
shallow, deep = DEPTHS
by_layer = {name: gradient_by_layer(change, deep) for name, change in STACKS.items()}
of_few = gradient_by_layer(without_either, shallow)
figure = Figure(figsize=(6, 3.5), layout="constrained")
ax = figure.subplots()
for name, norms in by_layer.items():
    ax.plot(range(deep), norms, "o-", label=name)
ax.set(yscale="log", xlabel="encoder layer, from the bottom", ylabel="norm of its gradient")
ax.legend()
display(figure)
share = {name: norms[0] / norms[-1] for name, norms in by_layer.items()}
for name, value in share.items():
    print(f"{name:18} the first of {deep} layers has {value:.3g} times the last one's gradient")

# %% [markdown]
# **Claim.** With neither residual connections nor norms the gradient vanishes on its way down, and the deeper the
# stack, the more. With residual connections alone it does not.

# %%
bare, residual = share["neither"], share["residual, no norm"]
bare_shallow = of_few[0] / of_few[-1]
print(f"with neither: {bare_shallow:.2g} of {shallow} layers, {bare:.2g} of {deep}; with residuals {residual:.2g}")
assert bare < 0.5 * bare_shallow
assert bare < 0.3
assert residual > 0.5

# %% [markdown]
# **Claim.** The textbook's story is not the whole of it. Norms alone keep the *size* of the gradient too, as each
# sublayer starts from vectors of size 1 again; and residuals alone let sizes grow from layer to layer, so that
# gradients are far larger than with both. Residual and norm together keep it steady. (What norms alone do not give is
# seen below.)

# %%
largest = {name: float(norms.max()) for name, norms in by_layer.items()}
print({name: f"{value:.3g}" for name, value in largest.items()})
assert share["norm, no residual"] > 0.3
assert largest["residual, no norm"] > 10 * largest["as it is"]
assert 0.3 < share["as it is"] < 10

# %% [markdown]
# ## What is left without norm, residual, feed-forward
#
# The same model on the same batches with the same steps, once as it is and once without each. Dropout there is none.


# %%
run = prepared.config
optimizer = make_optimizer(run.optimizer, run.steps)
learner = tfm.build_model(config)
first_state = steps.init_state(learner, optimizer, run)


def learn(change):
    """The held-out loss after training; the losses, and the gradients' norms before clipping, on the way."""
    state = jax.tree.map(jnp.copy, first_state)  # the first step is given its arrays for good
    with nn.intercept_methods(change):
        train_step, eval_step = steps.make_train_step(learner, optimizer, run), steps.make_eval_step(learner)
        losses, gradients = [], []
        for number in range(run.steps):
            state, metrics = train_step(state, prepared.train[number])
            losses.append(metrics.nll)
            gradients.append(metrics.gradient_norm)
        held_out = held_out_loss(eval_step, state.params, prepared.validation)["loss"]
        return held_out, np.array(jax.device_get(losses)), np.array(jax.device_get(gradients))


results = {name: learn(change) for name, change in CHANGES.items()}
figure = Figure(figsize=(6, 3.5), layout="constrained")
ax = figure.subplots()
for name, (held_out, losses, _) in results.items():
    ax.plot(np.convolve(losses, np.ones(10) / 10, mode="valid"), label=name)
    print(f"{name:21} held-out loss {held_out:.3f} nats a phone")
ax.set(xlabel="step", ylabel="nats a phone")
ax.legend()
display(figure)

# %% [markdown]
# **Claim.** Without residual connections it learns far less, and without feed-forward layers less than as it is.

# %%
held_out = {name: loss for name, (loss, *_) in results.items()}
print({name: f"{loss - held_out['as it is']:+.3f} nats" for name, loss in held_out.items()})
assert held_out["without residual"] > held_out["as it is"] + (0.1 if SMALL else 0.3)
assert held_out["without feed-forward"] > held_out["as it is"]

# %% [markdown]
# And without norms? That depended on the depth: in trials with $D = 64$, stacks of two layers were ahead without them
# by 0.45 nats after 100 steps, and stacks of three behind by 0.29 and 1.20 (of two widths $F$) after 120. Gradients are
# clipped here, to a norm of `clip_norm`, which hides a part of the difference.
#
# **Claim.** What norms do is hold sizes steady: without them the gradient begins many times as large.

# %%
first = {name: float(gradients[0]) for name, (*_, gradients) in results.items()}
print(f"clipped to {prepared.config.optimizer.clip_norm}; norm of the first gradient:",
      {name: f"{value:.3g}" for name, value in first.items()})  # fmt: skip
assert first["without norm"] > 3 * first["as it is"]
