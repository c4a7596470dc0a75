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
# # 5. Training, from text to pictures
#
# Spelling in, pronunciation out: `through` → `TH R UW`. The task is small enough to learn in minutes on two processor
# cores, and hard enough to be worth learning: English spelling. This notebook goes the whole way, with the functions
# that the command `tfm train` calls: text, tokens, batches, steps, curves, held-out words, and at last what the model
# looks at while it spells out the sounds.
#
# Papers: Vaswani et al. 2017 (section 5, training); Kingma and Ba 2015 (Adam); Szegedy et al. 2016 (section 7, label
# smoothing); Bahdanau et al. 2014 (section 5.2, alignments as pictures). Data: the CMU Pronouncing Dictionary.

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
import matplotlib
import numpy as np
from IPython.display import display
from rich.console import Console

import tfm
from tfm import plot
from train import step as steps
from train.config import load_recipe
from train.evaluate import evaluate, held_out_loss
from train.loop import train
from train.optimizer import make_optimizer
from train.overrides import apply_overrides
from train.prepare import prepare
from train.progress import Reporter
from train.tasks import load_task

# %matplotlib inline
SMALL = os.environ.get("TFM_NOTEBOOK") == "small"  # as continuous integration runs it: in seconds
print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}, matplotlib {matplotlib.__version__}")

# %% [markdown]
# ## Text
#
# Words and their right answers; some words have several. A hash of the spelling decides which words are held out, so
# that a word stays where it is when others are added.

# %%
splits = load_task("cmudict")
for name in ("train", "validation", "test"):
    examples = getattr(splits, name)
    print(f"{name:11} {len(examples):7,} words; {examples.sources[7]!r} → {examples.references[7]}")

# %% [markdown]
# **Claim.** No held-out word is among those that are trained on.

# %%
trained_on, tested = set(splits.train.sources), {*splits.test.sources, *splits.validation.sources}
print(f"{len(trained_on):,} and {len(tested):,} different words, {len(trained_on & tested)} in both")
assert not trained_on & tested

# %% [markdown]
# ## A recipe
#
# A recipe is a TOML file of settings; here are the ones of `g2p-demo`, with fewer steps.

# %%
recipe = load_recipe("g2p-demo")
settings = "--steps 1000 --optimizer.warmup_steps 100 --validation.every_steps 250"
if SMALL:
    settings = (
        "--steps 250 --model.preset tiny --batch.tokens 1024 --batch.max_shapes 2 --optimizer.learning_rate 4e-3 "
        "--optimizer.warmup_steps 25 --validation.every_steps 125 --validation.max_examples 300"
    )
config = apply_overrides(recipe, settings.split())  # as on the command line: tfm train g2p-demo --steps …
print(config.model)
print(config.optimizer)

# %% [markdown]
# ## Tokens and batches
#
# `prepare` reads the data, trains the tokenizers (letters on one side, phones on the other), leaves out what is too
# long, and plans batches: pairs of about the same lengths together, in a few shapes, each compiled once.

# %%
prepared = prepare(config)
config = prepared.config
print("\n".join(prepared.notes))
source_tokenizer, target_tokenizer = prepared.source_tokenizer, prepared.target_tokenizer
word, (answer, *_) = splits.test.sources[7], splits.test.references[7]
for tokenizer, text in ((source_tokenizer, word), (target_tokenizer, answer)):
    ids = tokenizer.encode(text)
    print(f"{text!r} → {ids} → {tokenizer.tokens(ids)}; {tokenizer.vocab_size} entries")

# %% [markdown]
# **Claim.** The tokenizers lose nothing: every held-out word and pronunciation comes back from its ids.

# %%
for tokenizer, texts in (
    (source_tokenizer, splits.test.sources),
    (target_tokenizer, [text for references in splits.test.references for text in references]),
):
    wrong = [text for text in texts if tokenizer.decode(tokenizer.encode(text)) != text]
    print(f"{len(texts):,} texts, {len(wrong)} changed")
    assert not wrong

# %%
batch = prepared.train[0]
print({name: getattr(batch, name).shape for name in ("source", "source_lengths", "target_in", "target_out", "weights")})
length = int(batch.weights[0].sum())
print("source     ", source_tokenizer.tokens(batch.source[0])[: batch.source_lengths[0] + 1], "…")
print("target_in  ", target_tokenizer.tokens(batch.target_in[0])[: length + 1], "…")
print("target_out ", target_tokenizer.tokens(batch.target_out[0])[: length + 1], "…")
print("weights    ", batch.weights[0][: length + 1], "…")

# %% [markdown]
# **Claim.** The decoder reads the target one step late: what it reads at $t + 1$ is what it should have said at $t$. It
# starts with the start token, and what is padding has weight 0.

# %%
real = batch.weights[:, 1:] > 0
print(f"{real.sum():,} tokens, {1 - batch.weights.mean():.0%} of the places are padding")
assert (batch.target_in[:, 1:][real] == batch.target_out[:, :-1][real]).all()
assert (batch.target_in[:, 0] == config.model.start_id).all()
assert ((batch.weights == 0) | (batch.weights == 1)).all()

# %% [markdown]
# ## One step
#
# A pure function: state and batch go in, a new state and what to report come out.

# %%
print(inspect.getsource(steps.make_train_step).split('"""')[2])
model = tfm.build_model(config.model)
optimizer = make_optimizer(config.optimizer, config.steps)
state = steps.init_state(model, optimizer, config)
before = held_out_loss(steps.make_eval_step(model), state.params, prepared.validation)
print(f"{tfm.count_params(state.params):,} parameters; before training {before['loss']:.3f} nats a phone")

# %% [markdown]
# **Claim.** A model that knows nothing does worse than guessing, whose loss is $\ln V$. Not that its logits are large:
# one matrix embeds the phones and scores them, so what was read last scores best, and an untrained model expects it
# again.

# %%
guessing = np.log(config.model.target_vocab_size)
read = jax.tree.map(jnp.asarray, batch)
logits = model.apply({"params": state.params}, read.source, read.source_lengths, read.target_in)
again = jnp.take_along_axis(jax.nn.softmax(logits), read.target_in[..., None], axis=-1)[..., 0]
repeats = float((again * read.weights).sum() / read.weights.sum())
print(f"ln {config.model.target_vocab_size} = {guessing:.3f} nats by guessing, {before['loss']:.3f} by the model")
print(f"probability of the phone that was read last: {repeats:.2f}, by guessing {np.exp(-guessing):.2f}")
assert guessing < before["loss"] < guessing + 3
assert repeats > 3 * np.exp(-guessing)

# %% [markdown]
# ## The run
#
# The loop does the rest: steps, validation, checkpoints, the record. A run that is in the folder already is gone on
# with, and one that is complete is left as it is.

# %%
RUN = Path("runs/g2p-small" if SMALL else "runs/g2p")
outcome = train(config, RUN, reporter=Reporter(Console(quiet=True)))
print(f"stopped at step {outcome.step}: {outcome.reason}; best {config.validation.metric} {outcome.best_metric:.1f} %")
display(plot.learning_curves(RUN))

# %%
display(plot.learning_curves(RUN, metric="wer"), plot.learning_curves(RUN, metric="learning_rate"))

# %% [markdown]
# **Claim.** It learns: on held-out words, from validation to validation, perplexity falls to a small part of what it
# was before training.

# %%
validations = [row for row in plot.read_metrics(RUN) if row["split"] == "validation"]
perplexities = [before["perplexity"], *(row["perplexity"] for row in validations)]
print("perplexity on held-out words:", [round(one, 2) for one in perplexities])
assert (np.diff(perplexities) < 0).all()
assert perplexities[-1] < 0.1 * perplexities[0]

# %% [markdown]
# **Claim.** It does not just remember: a held-out phone is about as likely to it as a training phone of the last steps.
# (Held-out loss has no dropout and neither has this recipe's training, so the two may be compared.)

# %%
trainings = [row for row in plot.read_metrics(RUN) if row["split"] == "train"]
seen, unseen = trainings[-1]["nll"], validations[-1]["loss"]
print(f"{seen:.3f} nats a phone in training, {unseen:.3f} on held-out words")
assert unseen < seen + 0.3

# %% [markdown]
# **Claim.** A complete run called again makes no step.

# %%
again = train(config, RUN, reporter=Reporter(Console(quiet=True)))
print(f"{again.steps_made} steps made, step {again.step}")
assert again.steps_made == 0
assert again.step == config.steps

# %% [markdown]
# ## Held-out words
#
# The test words are read once, now. `wer` is the share of words whose pronunciation is none of the listed ones, `ter`
# the edits it takes to make them right, a phone; both in percent.

# %%
model = tfm.load(RUN / "best", weights="float32")
test = splits.test.where(np.arange(len(splits.test)) % (20 if SMALL else 4) == 0)
evaluation = evaluate(model, test, ["wer", "ter"], max_tokens=config.max_new_tokens, samples=6)
print(evaluation.metrics, f"on {len(test):,} words")
for sample in evaluation.samples:
    mark = "✓" if sample.hypothesis in sample.references else "✗"
    print(f"{mark} {sample.source:14} {sample.hypothesis:34} {' | '.join(sample.references)}")

# %% [markdown]
# **Claim.** A wrong word is mostly wrong in a phone or two: the share of wrong phones is less than half the share of
# wrong words. And it gets right words it has never seen.

# %%
wer, ter = evaluation.metrics["wer"], evaluation.metrics["ter"]
print(f"words {wer:.1f} % wrong, phones {ter:.1f} %")
assert wer < 95
assert ter < wer / 2

# %% [markdown]
# ## What it looks at
#
# Letters against phones, all heads of all layers: row by row, the letters that were looked at while the phone was
# chosen.

# %%
WORD = "photographer"
print(f"{WORD} → {model(WORD)}")
display(plot.attention_grid(model, WORD))

# %%
display(plot.attention_map(model, WORD, layer=None))
(aligned,) = model.align([WORD], [model(WORD)])
print("weights", aligned.weights.shape, aligned.source_tokens, aligned.target_tokens)

# %% [markdown]
# Nobody told it that phones follow the order of letters. For each head, the centre of what a phone looks at, and how it
# goes along with the phone's place (correlation, over held-out words of at least six phones):

# %%
words = [word for word, references in zip(test.sources, test.references, strict=True)
         if len(references[0].split()) >= 6][: 20 if SMALL else 60]  # fmt: skip
answers = model.generate(words)


def along(model):
    """[L, N]: the mean correlation between a phone's place and the centre of its attention."""
    found = []
    for word, answer in zip(words, answers, strict=True):
        weights = plot.token_attention(model, word, answer).weights[:, :, :-1, :-1]  # without the end tokens
        share = weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-6)
        centre = (share * np.arange(share.shape[-1])).sum(axis=-1)
        place = np.arange(centre.shape[-1])
        found.append([[np.corrcoef(place, head)[0, 1] for head in layer] for layer in centre])
    return np.nanmean(found, axis=0)


untrained = model.replace_params(tfm.init_params(model.model, jax.random.key(config.seed)))
by_head, at_random = along(model), along(untrained)
for name, table in (("trained", by_head), ("untrained", at_random)):
    for layer, heads in enumerate(table):
        print(f"{name:9} layer {layer}:", "  ".join(f"{value:+.2f}" for value in heads))

# %% [markdown]
# **Claim.** Some head reads along: its attention goes from left to right with the phones. No head of the untrained
# model does so nearly as closely.

# %%
print(f"closest head: {by_head.max():.2f} trained, {at_random.max():.2f} untrained")
assert by_head.max() > 0.8
assert by_head.max() > at_random.max() + 0.2
