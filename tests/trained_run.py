"""A trained model that the commands work on, made in seconds by the command line itself."""

import random
from pathlib import Path

from train.cli import main

SMALL = """
steps = 20
log_every_steps = 5
data = { train = ["TRAIN"], test = ["TEST"], validation_share = 0.1, max_source_tokens = 10, max_target_tokens = 10 }
tokenizer = { source_kind = "char", target_kind = "word" }
batch = { tokens = 256, max_shapes = 1 }
optimizer = { learning_rate = 0.003, schedule = "cosine", warmup_steps = 5 }
validation = { every_steps = 10, metric = "ter", max_examples = 8 }
checkpoint = { every_steps = 10 }

[model]
model_dim = 16
feed_forward_dim = 32
num_heads = 2
encoder_layers = 1
decoder_layers = 1
max_source_length = 16
max_target_length = 16
"""


def make_run(folder: Path) -> None:
    """Puts test.tsv, small.toml and the finished run `run` into a folder."""
    make_files(folder)
    recipe = SMALL.replace("TRAIN", str(folder / "train.tsv")).replace("TEST", str(folder / "test.tsv"))
    (folder / "small.toml").write_text(recipe)
    assert main(["train", str(folder / "small.toml"), "--run", str(folder / "run")]) == 0


def make_files(folder: Path) -> None:
    draw = random.Random(0)
    words = sorted({"".join(draw.choices("abcdef", k=draw.randint(2, 7))) for _ in range(150)})
    lines = [f"{word}\t{' '.join(reversed(word.upper()))}\n" for word in words]
    (folder / "train.tsv").write_text("".join(lines[:-20]))
    (folder / "test.tsv").write_text("".join(lines[-20:]))
