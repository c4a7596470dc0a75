"""Descriptions of models and runs: what they refuse, how they are read, and that they come back as they were."""

import dataclasses
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfm.config import PRESETS, ModelConfig, preset
from train import schema
from train.config import (
    FROM_TOKENIZERS,
    RESUME_MAY_CHANGE,
    DataConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
    ValidationConfig,
    changed_fields,
    from_dict,
    from_json,
    load_recipe,
    recipe_names,
    to_dict,
    to_json,
)
from train.template import template

KEYS = sorted(schema.flatten(TrainConfig()))


def nested(dotted):
    """{"a.b": 1} as {"a": {"b": 1}}."""
    tables: dict = {}
    for key, value in dotted.items():
        *sections, leaf = key.split(".")
        table = tables
        for section in sections:
            table = table.setdefault(section, {})
        table[leaf] = value
    return tables


# --- ModelConfig


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_config_and_takes_changes(name):
    assert preset(name, dropout_rate=0.25) == preset(name).replace(dropout_rate=0.25)
    assert ModelConfig.from_dict(json.loads(json.dumps(preset(name).to_dict()))) == preset(name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(model_dim=10, num_heads=4), ["model_dim (10)", "num_heads (4)"]),
        (dict(num_heads=8, num_kv_heads=3), ["num_heads (8)", "num_kv_heads (3)"]),
        (dict(num_kv_heads=0), ["num_kv_heads"]),
        (dict(positions="rope", head_dim=7), ["even head dimension", "7"]),
        (dict(model_dim=7, num_heads=7), ["even model_dim", "7"]),
        (dict(positions="t5-bias", relative_buckets=3), ["relative_buckets", "3"]),
        (dict(positions="t5-bias", relative_max_distance=16), ["relative_max_distance (16)"]),
        (dict(shared_embeddings="all", source_vocab_size=5), ["equal vocabularies", "5", "32000"]),
        (dict(dropout_rate=1.0, attention_dropout_rate=-0.5), ["dropout_rate", "1.0", "attention_dropout", "-0.5"]),
        (dict(norm_epsilon=0.0, rope_base=1.0), ["norm_epsilon", "rope_base"]),
        (dict(encoder_layers=0), ["encoder_layers"]),
        (dict(encoder_layers=1001, decoder_layers=10**6), ["encoder_layers", "1001", "decoder_layers", "at most 1000"]),
        (dict(num_heads=1024, model_dim=1024), ["num_heads", "1024"]),
        (dict(relative_buckets=2000), ["relative_buckets", "2000"]),
        (dict(model_dim=2**31), ["model_dim must be less than 2**31, not 2147483648"]),
        (dict(max_source_length=2**62), ["max_source_length must be less than 2**31"]),
        (dict(norm_epsilon=float("inf")), ["norm_epsilon", "inf"]),
        (dict(rope_base=float("inf")), ["rope_base", "inf"]),
        (dict(rope_base=float("nan")), ["rope_base", "nan"]),
        (dict(end_id=32_000, pad_id=-1), ["end_id", "pad_id", "31999"]),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_is_refused_naming_every_field(changes, words):
    with pytest.raises(ValueError, match="model config") as error:
        ModelConfig(**changes)
    assert all(word in str(error.value) for word in words)


def test_a_decoder_only_model_needs_no_encoder():
    assert ModelConfig(architecture="decoder-only", encoder_layers=0).encoder_layers == 0


def test_unknown_names_of_a_model_name_the_nearest():
    with pytest.raises(ValueError, match=r"'model_dimm'.*'model_dim'"):
        ModelConfig.from_dict({"model_dimm": 8})
    with pytest.raises(ValueError, match=r"'smal'.*'small'"):
        preset("smal")


def test_head_sizes_follow_from_the_model():
    config = ModelConfig(model_dim=96, num_heads=6)
    assert (config.head_size, config.kv_heads) == (16, 6)
    config = config.replace(head_dim=32, num_kv_heads=2)
    assert (config.head_size, config.kv_heads) == (32, 2)


# --- reading and writing a TrainConfig


def leaf_values(annotation):
    """Values that fit an annotation, whether or not the config allows them."""
    if annotation is int:
        return st.integers(-1, 40) | st.integers()
    if annotation is float:
        return st.floats(0, 1) | st.floats(allow_nan=False, allow_infinity=False)
    if annotation is bool:
        return st.booleans()
    if annotation is str:
        return st.text(max_size=5)
    if annotation == int | None:
        return st.none() | st.integers(-1, 40)
    if annotation == tuple[str, ...]:
        return st.lists(st.text(max_size=5), max_size=3)
    return st.sampled_from(annotation.__args__)


@given(st.data())
def test_every_config_that_can_be_comes_back_from_json_as_it_was(data):
    keys = data.draw(st.lists(st.sampled_from(KEYS), max_size=6, unique=True))
    types = schema.leaf_types(TrainConfig)
    values = {key: data.draw(leaf_values(types[key])) for key in keys}
    try:
        config = from_dict(nested(values))
    except ValueError as error:
        assert any(key.rpartition(".")[2] in str(error) for key in keys)  # noqa: PT017
        return
    assert from_json(to_json(config)) == config
    assert to_dict(config) == json.loads(to_json(config))
    flat = schema.flatten(config)
    assert all(flat[key] == (tuple(value) if isinstance(value, list) else value) for key, value in values.items())
    hash(config)


@given(st.sampled_from(KEYS), st.sampled_from([None, True, 3, 2.5, "four", ["five"], {"six": 6}, float("nan")]))
def test_a_value_of_another_type_is_refused_with_its_key_and_what_was_expected(key, value):
    annotation = schema.leaf_types(TrainConfig)[key]
    numbers = {int: int, float: int | float, bool: bool, str: str, int | None: int | None}
    if type(value) is bool:
        fits = annotation is bool
    elif isinstance(value, list):
        fits = annotation == tuple[str, ...]
    else:
        fits = isinstance(value, numbers.get(annotation, ())) and value == value
    if fits:
        return
    with pytest.raises(ValueError, match=r"expected|unknown key") as error:
        from_dict(nested({key: value}))
    assert key in str(error.value)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("optimizer.learning_rat", "optimizer.learning_rate"),
        ("optmizer.beta1", "optimizer"),
        ("learning_rate", "optimizer.learning_rate"),
        ("loss.smoothing", "loss.label_smoothing"),
        ("model.dropout", "model.dropout_rate"),
        ("validation.every_step", "validation.every_steps"),
        ("step", "steps"),
    ],
)
def test_an_unknown_key_at_any_depth_names_the_nearest(key, near):
    with pytest.raises(ValueError, match=f"the nearest known one is '{near}'$"):
        from_dict(nested({key: 1}))


def test_all_problems_of_a_file_are_named_at_once():
    with pytest.raises(schema.ConfigError) as error:
        from_dict(
            nested({"steps": "many", "data.trian": [], "model.model_dim": 2.5, "optimizer.beta1": 2.0, "loss": 3})
        )
    assert len(error.value.problems) == 5
    for words in ("steps: expected a whole number, got 'many'", "data.trian", "model.model_dim", "optimizer.beta1"):
        assert words in str(error.value)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_counts_in_the_recipe_to_start_from(name, tmp_path):
    recipe = tmp_path / "mine.toml"
    text = template().replace("\n# preset =\n", f'\npreset = "{name}"\n')
    recipe.write_text(text.replace("\nshared = false\n", "\nshared = true\n"))  # of which a preset may make use
    assert load_recipe(recipe).model == preset(name)


def test_a_preset_is_resolved_and_what_stands_beside_it_wins():
    config = from_dict({"model": {"preset": "small", "decoder_layers": 1}})
    assert config.model == preset("small", decoder_layers=1)
    for wrong in ("smal", 3, []):
        with pytest.raises(ValueError, match=r"model\.preset: expected one of tiny, small"):
            from_dict({"model": {"preset": wrong}})


def test_a_text_where_a_list_belongs_says_how_to_write_it():
    with pytest.raises(ValueError, match=r"data\.train: .*write \['a\.tsv'\]"):
        from_dict({"data": {"train": "a.tsv"}})


# --- what a TrainConfig cannot be


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"steps": 0, "log_every_steps": 0}, ["steps must be at least 1", "log_every_steps must be at least 1"]),
        ({"seed": -1}, ["seed"]),
        ({"data.train": ["a", "b", "c"]}, ["data.train", "two line-aligned files"]),
        ({"data.train": ["a"], "data.format": "lines"}, ["data.train", "two line-aligned files"]),
        ({"data.train": ["a", "b"], "data.format": "tsv"}, ["data.train", "one TSV file"]),
        ({"data.train": ["a"], "data.task": "cmudict"}, ["data.train must be empty", "cmudict"]),
        ({"data.validation_share": 1.0}, ["data.validation_share", "less than 1"]),
        ({"data.source_field": ""}, ["data.source_field"]),
        ({"data.max_source_tokens": 2048}, ["data.max_source_tokens (2048)", "model.max_source_length (1024)"]),
        ({"data.max_target_tokens": 2048}, ["data.max_target_tokens (2048)", "model.max_target_length (1024)"]),
        ({"validation.max_tokens": 2048}, ["validation.max_tokens (2048)", "model.max_target_length (1024)"]),
        ({"tokenizer.source_vocab_size": 259}, ["tokenizer.source_vocab_size must be at least 260, got 259"]),
        ({"tokenizer.target_kind": "word", "tokenizer.target_vocab_size": 4}, ["target_vocab_size must be at least 5"]),
        ({"tokenizer.shared": True, "tokenizer.target_file": "t.json"}, ["tokenizer.target_file"]),
        ({"batch.tokens": 0, "batch.accumulation_steps": -1}, ["batch.tokens", "batch.accumulation_steps"]),
        ({"optimizer.learning_rate": 0, "optimizer.beta2": 1}, ["optimizer.learning_rate", "optimizer.beta2"]),
        ({"optimizer.final_share": 1.5, "optimizer.clip_norm": -1}, ["optimizer.final_share", "optimizer.clip_norm"]),
        ({"optimizer.schedule": "cosine", "steps": 999}, ["optimizer.warmup_steps (1000)", "steps (999)", "cosine"]),
        ({"loss.label_smoothing": 1, "loss.z_loss": -1}, ["loss.label_smoothing", "loss.z_loss"]),
        ({"validation.every_steps": 0, "validation.patience": 3}, ["validation.patience (3)"]),
        ({"validation.metric": "bleu", "validation.max_examples": 0}, ["validation.metric bleu"]),
        ({"checkpoint.keep": 0}, ["checkpoint.keep"]),
        ({"model.architecture": "decoder-only"}, ["tokenizer.shared", "decoder-only"]),
        ({"model.shared_embeddings": "all"}, ["tokenizer.shared", "shared_embeddings"]),
        ({"model.num_heads": 7, "loss.z_loss": -1}, ["num_heads (7)", "loss.z_loss"]),
    ],
)
def test_a_run_that_cannot_be_is_refused_by_the_dotted_key(values, words):
    with pytest.raises(schema.ConfigError) as error:
        from_dict(nested(values))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_the_limits_themselves_are_allowed():
    TokenizerConfig(source_kind="word", source_vocab_size=5, target_file="t.json", target_vocab_size=4)
    TokenizerConfig(shared=True, source_vocab_size=260, target_vocab_size=1)
    OptimizerConfig(beta1=0.0, final_share=1.0, clip_norm=0.0, warmup_steps=0)
    ValidationConfig(every_steps=0, max_examples=0)
    DataConfig(train=("a", "b"), format="lines")
    from_dict(nested({"optimizer.schedule": "linear", "steps": 1000, "data.max_source_tokens": 1024}))
    shared = {"tokenizer.shared": True, "model.architecture": "decoder-only"}
    assert from_dict(nested(shared)).tokenizer == TokenizerConfig(shared=True)


# --- resuming


def test_changed_fields_are_named_with_both_values():
    old = TrainConfig()
    new = dataclasses.replace(old, steps=5, optimizer=OptimizerConfig(beta1=0.5), data=DataConfig(train=("a.tsv",)))
    assert changed_fields(old, old) == {}
    assert changed_fields(old, new) == {
        "steps": (10_000, 5),
        "optimizer.beta1": (0.9, 0.5),
        "data.train": ((), ("a.tsv",)),
    }


def test_what_may_change_or_comes_from_tokenizers_is_a_setting():
    assert set(KEYS) >= RESUME_MAY_CHANGE
    assert set(KEYS) >= set(FROM_TOKENIZERS)


# --- recipes and documentation


@pytest.mark.parametrize("name", ["g2p-demo", "g2p", "translation", "summarization"])
def test_a_packaged_recipe_is_read_by_its_name(name):
    assert name in recipe_names()
    config = load_recipe(name)
    assert config.data.train == ()


def test_a_recipe_is_read_from_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('steps = 7\noptimizer.warmup_steps = 3\n[data]\ntrain = ["a", "b"]\n[model]\npreset = "tiny"\n')
    config = load_recipe(path)
    assert (config.steps, config.data.train, config.model) == (7, ("a", "b"), preset("tiny"))
    assert load_recipe(str(path)) == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps = = 3", ["mine.toml", "line 1"]),
        ("stepz = 3", ["mine.toml", "'stepz'", "'steps'"]),
        (
            "[model]\nsource_vocab_size = 9\nend_id = 3",
            ["mine.toml", "tokenizer.source_vocab_size", "model.end_id"],
        ),
    ],
)
def test_a_file_that_cannot_be_read_as_a_recipe_says_so(tmp_path, text, words):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ValueError, match=r"mine\.toml") as error:
        load_recipe(tmp_path / "mine.toml")
    assert all(word in str(error.value) for word in words)


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(ValueError, match="'translatoin'; the nearest recipe is 'translation'"):
        load_recipe("translatoin")


def sections(cls=TrainConfig):
    yield cls
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type) and field.type is not ModelConfig:
            yield from sections(field.type)


@pytest.mark.parametrize("section", list(sections()))
def test_every_setting_of_a_run_is_explained(section):
    docs = schema.field_docs(section)
    missing = [field.name for field in dataclasses.fields(section) if not docs[field.name]]
    assert [name for name in missing if not dataclasses.is_dataclass(section.__dataclass_fields__[name].type)] == []


def test_field_docs_are_the_text_below_each_field():
    docs = schema.field_docs(DataConfig)
    assert docs["source_field"] == "JSONL key of the source text."
    assert docs["format"].startswith("`auto`: two paths")
    assert "\n" not in "".join(docs.values())


def test_settings_are_read_without_jax():
    code = "import sys, train.config; print('jax' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "False"


def test_a_recipe_may_begin_with_a_byte_order_mark_and_must_be_utf_8(tmp_path):
    (tmp_path / "mine.toml").write_bytes("\ufeffsteps = 7\noptimizer = { warmup_steps = 2 }\n".encode())
    assert load_recipe(tmp_path / "mine.toml").steps == 7
    (tmp_path / "mine.toml").write_bytes("# für\nsteps = 7\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"mine.toml: .*utf-8"):
        load_recipe(tmp_path / "mine.toml")


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "[optimizer]\nlearning_rate = " + "9" * 400])
def test_a_recipe_made_to_do_harm_is_one_error(tmp_path, text):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ValueError, match=r"mine.toml"):
        load_recipe(tmp_path / "mine.toml")
