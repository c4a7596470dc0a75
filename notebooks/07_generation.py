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
# # 7. Generation
#
# A model gives, for every next token, a probability. A text has to be made of that: by taking the likeliest token each
# time, by drawing, or by a search among whole texts. This notebook does all three with one trained model, and looks at
# what a beam search keeps, what its length penalty does, and what an n-best list is worth.
#
# Papers: Sutskever et al. 2014 (section 3.2, beam search); Wu et al. 2016 (section 7, equation 14, the length penalty);
# Holtzman et al. 2020 (nucleus sampling). $W$ is the beam's width, $Y$ an answer, $X$ its source.

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
import collections
import inspect
import os

import jax.numpy as jnp
import numpy as np
from IPython.display import display
from matplotlib.figure import Figure
from rich.console import Console

import tfm
from tfm import BeamSearch, Samples, Sampling, plot
from tfm.decoding import beam, sampling
from train.config import load_recipe
from train.loop import train
from train.overrides import apply_overrides
from train.progress import Reporter
from train.tasks import load_task

# %matplotlib inline
SMALL = os.environ.get("TFM_NOTEBOOK") == "small"  # as continuous integration runs it: in seconds

# %% [markdown]
# A model of English spelling → pronunciation, as in notebook 5; a run that is there already is used.

# %%
recipe = load_recipe("g2p-demo")
settings = "--steps 1000 --optimizer.warmup_steps 100 --validation.every_steps 250"
if SMALL:
    settings = (
        "--steps 250 --model.preset tiny --batch.tokens 1024 --batch.max_shapes 2 --optimizer.learning_rate 4e-3 "
        "--optimizer.warmup_steps 25 --validation.every_steps 125 --validation.max_examples 300"
    )
config = apply_overrides(recipe, settings.split())  # as on the command line: tfm train g2p-demo --steps …
RUN = Path("runs/g2p-small" if SMALL else "runs/g2p")
outcome = train(config, RUN, reporter=Reporter(Console(quiet=True)))  # goes on with a run that is there; made, it stays
model = tfm.load(RUN / "best", weights="float32")
test = load_task("cmudict").test
short = np.array([len(word) <= 15 for word in test.sources])  # all in one batch of one shape: fewer programs
examples = test.where(short & (np.arange(len(test)) % (100 if SMALL else 25) == 0))
words = examples.sources
print(model, "·", outcome.metrics, f"· {len(words)} held-out words")

# %% [markdown]
# ## Greedy
#
# The likeliest token, each time. The whole rule:

# %%
print(inspect.getsource(sampling.Greedy))
WORD = "thoroughly"
(answer,) = model.generate([WORD])
for token, log_prob in zip([*answer.text.split(), "</s>"], answer.token_scores, strict=False):
    print(f"{token:5} probability {np.exp(log_prob):.3f}")
print(f"log P = {answer.score:.3f}: the sum of the logarithms; it ended by {answer.ending}")

# %% [markdown]
# **Claim.** Greedy decoding takes the largest logit at every step: the ids are those of the `argmax` over one pass of
# the whole answer. And an answer's score is its log-probability, which `score` gives for any answer.

# %%
source = jnp.array([[*model.source_tokenizer.encode(WORD), model.source_tokenizer.end_id]])
target = jnp.array([[model.config.start_id, *answer.tokens]])
logits = model.model.apply({"params": model.prepared_params}, source, jnp.array([source.shape[1]]), target)
likeliest = logits[0].argmax(axis=-1).tolist()
(scored,) = model.score([WORD], [answer])
print("logits", logits.shape, "·", model.target_tokenizer.tokens(likeliest), f"· score {scored.score:.4f}")
assert likeliest[: len(answer.tokens)] == answer.tokens
assert answer.ending != "end" or likeliest[-1] == model.config.end_id
assert abs(scored.score - answer.score) < 1e-3

# %% [markdown]
# ## Sampling
#
# Drawing from the distribution; a temperature divides the logits first, top-k and top-p cut off what is unlikely.

# %%
print(inspect.getsource(sampling.Sampling.pick))

# %% [markdown]
# **Claim.** Samples come as often as the model says: among many draws, an answer's share is its probability $P(Y \mid
# X)$, within what chance allows (four standard deviations of a share of so many draws).

# %%
SHORT, DRAWS, AT_ONCE = "mat", 128 if SMALL else 512, 128  # of one text, each draw meets the keys of all at once
sampler = Samples(num_samples=AT_ONCE)
drawn = [
    one for seed in range(DRAWS // AT_ONCE) for one in model.generate_n_best([SHORT], sampler=sampler, seed=seed)[0]
]
counts = collections.Counter(tuple(one.tokens) for one in drawn)
said = {tuple(one.tokens): np.exp(one.score) for one in drawn}
for tokens, count in counts.most_common(5):
    text = model.target_tokenizer.decode(tokens)
    print(f"{text:12} drawn {count / DRAWS:.3f}, probability {said[tokens]:.3f}")
for tokens, count in counts.most_common(5):
    chance = 4 * np.sqrt(said[tokens] * (1 - said[tokens]) / DRAWS)
    assert abs(count / DRAWS - said[tokens]) < chance + 2 / DRAWS

# %% [markdown]
# **Claim.** A low temperature draws nearly always the same, a high one nearly always something else; and what it draws
# is less likely to the model.

# %%
temperatures = [0.25, 0.5, 1.0, 1.5]
different, likely = [], []
for temperature in temperatures:
    sampler = Samples(num_samples=32, sampler=Sampling(temperature=temperature))
    found = model.generate_n_best(words[:8], sampler=sampler, seed=2)
    different.append(np.mean([len({one.text for one in each}) for each in found]))
    likely.append(np.mean([one.score for each in found for one in each]))
    print(f"temperature {temperature}: {different[-1]:.1f} different of 32, mean log P {likely[-1]:.2f}")
figure = Figure(figsize=(5, 3), layout="constrained")
ax = figure.subplots()
ax.plot(temperatures, different, "o-")
ax.set(xlabel="temperature", ylabel="different answers of 32")
display(figure)
assert (np.diff(different) > 0).all()
assert (np.diff(likely) < 0).all()

# %% [markdown]
# **Claim.** Temperature 0, and top-k of 1 at any temperature, are greedy decoding.

# %%
greedy = model(words)
cold = model(words, sampler=Sampling(temperature=0.0), seed=3)
single = model(words, sampler=Sampling(temperature=1.5, top_k=1), seed=4)
print(f"equal answers: {np.mean([a == b for a, b in zip(greedy, cold, strict=True)]):.0%} and "
      f"{np.mean([a == b for a, b in zip(greedy, single, strict=True)]):.0%} of {len(words)}")  # fmt: skip
assert greedy == cold == single

# %% [markdown]
# ## Beams, as a tree
#
# A beam search follows the $W$ likeliest beginnings at once. Below is all that it followed for one word: a step to the
# right is one token more. Heavy is the best; complete answers have their rank and score.

# %%
print(inspect.getdoc(beam.beam_search).split("Args:")[0])
SEARCH = BeamSearch(width=4, num_best=4)
display(plot.beam_tree(model, WORD, SEARCH))

# %% [markdown]
# **Claim.** At no step are more than $W$ incomplete beginnings followed, each continues one that was followed the step
# before, and none is likelier than what it continues. The complete ones are those that `generate_n_best` returns.

# %%
nodes = {node.tokens: node for node in plot.search_tree(model, WORD, SEARCH)}
(found,) = model.generate_n_best([WORD], sampler=SEARCH)
by_rank = sorted((node for node in nodes.values() if node.rank is not None), key=lambda node: node.rank)
ended = {node.tokens for node in by_rank}
followed = collections.Counter(len(tokens) for tokens in nodes if tokens and tokens not in ended)
print("beginnings followed, by length:", dict(sorted(followed.items())))
for node, one in zip(by_rank, found, strict=True):
    print(f"{node.score:7.3f} {one.search_score:7.3f}  {one.text}")
assert max(followed.values()) <= SEARCH.width
assert all(node.log_prob <= nodes[tokens[:-1]].log_prob + 1e-6 for tokens, node in nodes.items() if tokens)
assert np.allclose([node.score for node in by_rank], [one.search_score for one in found], atol=1e-3)

# %% [markdown]
# **Claim.** Following more beginnings finds likelier answers: over held-out words the mean log-probability rises with
# the width (α = 0, so that nothing but log P ranks them). Width 1 is greedy decoding.

# %%
widths, mean_log_prob = [1, 2, 4] if SMALL else [1, 2, 4, 8], []
for width in widths:
    answers = model.generate(words, sampler=BeamSearch(width=width, alpha=0.0))
    mean_log_prob.append(np.mean([one.score for one in answers]))
    right = np.mean([one.text in references for one, references in zip(answers, examples.references, strict=True)])
    print(f"width {width}: mean log P {mean_log_prob[-1]:.4f}, right {right:.1%}")
narrow = model(words, sampler=BeamSearch(width=1, alpha=0.0))
print(f"width 1 gives the greedy answer for {np.mean([a == b for a, b in zip(narrow, greedy, strict=True)]):.0%}")
assert narrow == greedy
assert mean_log_prob[-1] > mean_log_prob[0]
assert (np.diff(mean_log_prob) > -1e-3).all()

# %% [markdown]
# ## The length penalty
#
# Every token makes an answer less likely, so log P favours short ones. Complete hypotheses are ranked by $\log P(Y) /
# lp(|Y|)$ with $lp(n) = ((5 + n) / 6)^\alpha$ (Wu et al. 2016, equation 14).

# %%
print(inspect.getsource(beam.BeamSearch.penalty))
ALPHAS = [0.0, 0.6, 1.0, 2.0, 4.0]
lengths, log_probs = [], []
for alpha in ALPHAS:
    answers = model.generate(words, sampler=BeamSearch(width=8, alpha=alpha, stop="all-finished"))
    lengths.append(np.mean([len(one.tokens) for one in answers]))
    log_probs.append(np.mean([one.score for one in answers]))
    right = np.mean([one.text in references for one, references in zip(answers, examples.references, strict=True)])
    print(f"α = {alpha}: {lengths[-1]:.3f} phones, mean log P {log_probs[-1]:.4f}, right {right:.1%}")
figure = Figure(figsize=(8, 3), layout="constrained")
left, right_hand = figure.subplots(1, 2)
left.plot(ALPHAS, lengths, "o-")
left.set(xlabel="α", ylabel="phones in an answer")
right_hand.plot(ALPHAS, log_probs, "o-", color="C1")
right_hand.set(xlabel="α", ylabel="mean log P")
display(figure)

# %% [markdown]
# **Claim.** Answers become longer with α, and less likely. (All with `stop="all-finished"`, so that α changes the
# ranking alone and not when the search ends.) For pronunciations, whose length the spelling nearly fixes, it changes
# little and helps little; it was made for translations.

# %%
more, less = lengths[-1] - lengths[0], log_probs[-1] - log_probs[0]
print(f"α from {ALPHAS[0]} to {ALPHAS[-1]}: {more:+.3f} phones, {less:+.4f} nats")
assert (np.diff(lengths) >= 0).all()
assert lengths[-1] > lengths[0]
assert log_probs[-1] < log_probs[0]

# %% [markdown]
# ## n-best lists
#
# What a search has found besides the best is often right where the best is not.

# %%
N_BEST = BeamSearch(width=8, num_best=8, alpha=0.0)
lists = model.generate_n_best(words, sampler=N_BEST)
for word, found in list(zip(words, lists, strict=True))[:2]:
    for one in found[:4]:
        print(f"{word:12} {one.text:30} log P {one.score:7.3f}, P {np.exp(one.score):.3f}")

# %% [markdown]
# **Claim.** A list is in the order of its scores, no answer twice, and its probabilities sum to at most 1, as different
# answers exclude each other. How much of 1 is in the list says how sure the model is.

# %%
mass = np.array([sum(np.exp(one.score) for one in each) for each in lists])
print(f"probability within 8 answers: from {mass.min():.2f} to {mass.max():.2f}, {np.median(mass):.2f} in the median")
assert all([one.score for one in each] == sorted((one.score for one in each), reverse=True) for each in lists)
assert all(len({tuple(one.tokens) for one in each}) == len(each) for each in lists)
assert mass.max() < 1 + 1e-4

# %% [markdown]
# **Claim.** The longer the list, the more often the right answer is in it: what a better judge could pick.

# %%
sizes = [1, 2, 4, 8]
inside = [
    np.mean([any(one.text in references for one in each[:size])
             for each, references in zip(lists, examples.references, strict=True)])
    for size in sizes
]  # fmt: skip
print({f"first {size}": f"{share:.1%}" for size, share in zip(sizes, inside, strict=True)})
assert (np.diff(inside) >= 0).all()
assert inside[-1] > inside[0] + 0.1
