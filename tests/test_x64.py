"""With JAX's 64-bit mode on, which a process can only choose at its start, a model is the same model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import warnings; warnings.simplefilter("error")
import jax, numpy as np
from tfm.config import preset
from tfm.decoding.beam import BeamSearch
from tfm.decoding.constraints import Constraints
from tfm.decoding.generate import generate, generate_n_best
from tfm.nn.params import init_params
from tfm.nn.models import build_model
from tfm.store import load_model, save_model
from tfm.tokenizer import Tokenizer

assert jax.config.jax_enable_x64
tokenizer = Tokenizer.train(["a b c"], kind="word", vocab_size=16)
config = preset(
    "tiny", architecture=sys.argv[1], positions=sys.argv[2], norm=sys.argv[3], model_dim=8, feed_forward_dim=8,
    num_heads=2, encoder_layers=1, decoder_layers=1, source_vocab_size=tokenizer.vocab_size,
    target_vocab_size=tokenizer.vocab_size,
)
model = build_model(config, dtype="float32")
params = init_params(model, jax.random.key(0))
assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}

source, lengths = np.array([[4, 5, 2], [6, 2, 0]]), np.array([3, 2])
greedy = generate(model, params, source, source_lengths=lengths, max_tokens=5)
best = generate_n_best(model, params, source, source_lengths=lengths, max_tokens=5, search=BeamSearch(width=2))
rules = dict(
    constraints=Constraints(
        min_tokens=1, min_ratio=0.5, max_ratio=2.0, repetition_penalty=1.2, no_repeat_ngram=2,
        banned_tokens=np.zeros(config.target_vocab_size, bool), banned_phrases=np.array([[5, 6]]),
        required_phrases=np.array([[4, -1]]),
    ),
    prompt=np.array([[1, 4], [1, 5]]), source_lengths=lengths,
)
ruled = generate(model, params, source, max_tokens=5, **rules)
ruled_best = generate_n_best(model, params, source, max_tokens=5, search=BeamSearch(width=2), **rules)
assert all(4 in row for row in [*ruled.tokens.tolist(), *ruled_best.tokens[:, 0].tolist()])
for found in (greedy, best, ruled, ruled_best):
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"int32", "float32", "bool"}

save_model(sys.argv[4], config, params, tokenizer, tokenizer)
again = generate(model, load_model(sys.argv[4]).params, source, source_lengths=lengths, max_tokens=5)
assert (np.asarray(again.tokens) == greedy.tokens).all()
print("done")
"""


@pytest.mark.parametrize(
    "kind", [("encoder-decoder", "t5-bias", "layernorm"), ("decoder-only", "rope", "rmsnorm")], ids="-".join
)
@pytest.mark.slow
def test_a_model_is_made_runs_and_comes_back(tmp_path, kind):
    command = [sys.executable, "-c", SCRIPT, *kind, str(tmp_path / "model")]
    environment = {**os.environ, "JAX_ENABLE_X64": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    root = Path(__file__).parent.parent
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
