import inspect
import itertools

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import V, random_ids, random_params, tiny_config, tiny_model
from tolerances import assert_close, assert_same_bits

from tfm.config import ModelConfig, preset
from tfm.nn import params as params_module
from tfm.nn.params import count_by_part, count_params, init_params, param_shapes, prepare_for_inference

pytestmark = pytest.mark.usefixtures("compile_fast")


def counted(config: ModelConfig) -> dict[str, int]:
    """The entries of each part, from the sizes in the papers; written out, so that nothing is taken from the code."""
    D, F, H = config.model_dim, config.feed_forward_dim, config.head_size
    N, K, bias = config.num_heads, config.kv_heads, int(config.use_bias)
    attention = (N * H * D + bias * N * H) + 2 * (K * H * D + bias * K * H) + (D * N * H + bias * D)
    up = F * D + bias * F
    feed_forward = (2 if config.gated else 1) * up + (D * F + bias * D)
    norm = D + (D if config.norm == "layernorm" and config.use_bias else 0)
    last_norm = norm if config.norm_position == "pre" else 0
    positions = {"t5-bias": config.relative_buckets * N}.get(config.positions, 0)
    source_max, target_max = config.max_source_length, config.max_target_length
    two_sides = config.architecture == "encoder-decoder"

    def learned(length):
        return length * D if config.positions == "learned" else 0

    parts = {"target_embedding": config.target_vocab_size * D}
    if two_sides:
        layer = attention + norm + feed_forward + norm
        parts["encoder"] = config.encoder_layers * layer + last_norm + positions + learned(source_max)
        layer = 2 * (attention + norm) + feed_forward + norm
        parts["decoder"] = config.decoder_layers * layer + last_norm + positions + learned(target_max)
        if config.shared_embeddings != "all":
            parts["source_embedding"] = config.source_vocab_size * D
    else:
        layer = attention + norm + feed_forward + norm
        parts["decoder"] = config.decoder_layers * layer + last_norm + positions + learned(source_max + target_max)
    if config.shared_embeddings == "none":
        parts["output"] = config.target_vocab_size * D
    return parts


@pytest.mark.parametrize(("name", "millions"), [("vaswani-base", 63), ("vaswani-big", 214)])
def test_the_papers_models_have_the_papers_sizes(name, millions):
    """Vaswani et al. 2017, table 3: 65 and 213 million, rounded there; 37,000 shared tokens, no final norms."""
    config = preset(name)
    shapes = param_shapes(config)
    assert count_by_part(shapes) == counted(config)
    assert round(count_params(shapes) / 1e6) == millions


def test_the_papers_base_model_part_by_part_in_plain_numbers():
    parts = count_by_part(param_shapes(preset("vaswani-base")))
    attention, feed_forward, norm = 4 * (512 * 512 + 512), 512 * 2048 + 2048 + 2048 * 512 + 512, 2 * 512
    assert parts == {
        "target_embedding": 37_000 * 512,
        "encoder": 6 * (attention + feed_forward + 2 * norm),
        "decoder": 6 * (2 * attention + feed_forward + 3 * norm),
    }


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder-only"])
@pytest.mark.parametrize("shared", ["none", "target-output", "all"])
@pytest.mark.parametrize("use_bias", [True, False])
def test_every_option_has_the_count_of_its_formula(architecture, shared, use_bias):
    for gated, norm, norm_position, kv_heads, positions in itertools.chain(
        [(True, "layernorm", "pre", 2, "none"), (False, "rmsnorm", "post", 1, "learned")],
        [(True, "rmsnorm", "pre", None, "t5-bias"), (False, "layernorm", "post", None, "rope")],
    ):
        config = tiny_config(
            architecture=architecture, shared_embeddings=shared, use_bias=use_bias, gated=gated, norm=norm,
            norm_position=norm_position, num_kv_heads=kv_heads, positions=positions, head_dim=6,
        )  # fmt: skip
        shapes = param_shapes(config)
        assert count_by_part(shapes) == counted(config)
        assert count_params(shapes) == sum(counted(config).values())


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder-only"])
def test_parameters_are_float32_arrays_by_plain_names(architecture):
    config = tiny_config(architecture=architecture, positions="t5-bias", gated=True, decoder_layers=1)
    params = init_params(tiny_model(config, "bfloat16"), jax.random.key(0))
    shapes = param_shapes(config)
    assert jax.tree.structure(params) == jax.tree.structure(shapes)
    for (path, leaf), shape in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(shapes), strict=True):
        assert all(isinstance(step, jax.tree_util.DictKey) for step in path)
        assert path[-1].key in ("weight", "bias", "scale")
        assert leaf.dtype == shape.dtype == np.float32
        assert leaf.shape == shape.shape
        assert np.isfinite(leaf).all()
    assert count_params(params) == count_params(shapes)


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder-only"])
def test_parameters_are_all_that_a_model_holds(architecture):
    """No state beside them that a call could change."""
    model = tiny_model(tiny_config(architecture=architecture))
    one = jax.numpy.ones((1, 1), int)
    assert set(jax.eval_shape(model.init, jax.random.key(0), one, one[0], one)) == {"params"}


def test_shapes_are_known_without_an_array():
    """Of a model that fits no machine."""
    huge = param_shapes(preset("big", model_dim=2**17, feed_forward_dim=2**19, num_heads=512))
    assert count_params(huge) > 10**12


def test_the_same_key_makes_the_same_parameters_and_another_others():
    model = tiny_model(tiny_config(decoder_layers=1))
    one, same, other = (init_params(model, jax.random.key(seed)) for seed in (0, 0, 1))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(same), strict=True):
        assert_same_bits(a, b)
    table = one["target_embedding"]["weight"]
    assert table.shape == (V, 16)
    assert (table != other["target_embedding"]["weight"]).any()
    # no two matrices start alike
    query, key = (one["decoder"]["layer_0"]["self_attention"][name]["weight"] for name in ("query", "key"))
    assert (query != key).any()


def test_weights_lie_out_in():
    config = tiny_config(num_kv_heads=2, head_dim=6)
    layer = param_shapes(config)["decoder"]["layer_0"]
    assert layer["self_attention"]["query"]["weight"].shape == (4 * 6, 16)
    assert layer["self_attention"]["key"]["weight"].shape == (2 * 6, 16)
    assert layer["self_attention"]["output"]["weight"].shape == (16, 4 * 6)
    assert layer["feed_forward"]["up"]["weight"].shape == (24, 16)
    assert layer["feed_forward"]["down"]["weight"].shape == (16, 24)
    assert param_shapes(config.replace(shared_embeddings="none"))["output"]["weight"].shape == (V, 16)


@pytest.fixture(params=[False, True], ids=["out-in", "in-out"])
def in_out(request, monkeypatch) -> bool:
    """Matrices as they lie best on one CPU, and on another."""
    monkeypatch.setattr(params_module, "lies_best_in_out", lambda: request.param)
    return request.param


def test_parameters_are_prepared_once_and_as_something_that_there_is(in_out):
    params = random_params(tiny_config())
    with pytest.raises(ValueError, match="expected weights 'float32', 'bfloat16' or 'int8', got 'int4'"):
        inspect.unwrap(prepare_for_inference)(params, "int4")
    for first, then in itertools.product(["float32", "bfloat16", "int8"], repeat=2):
        with pytest.raises(ValueError, match="expected parameters as they were trained"):
            prepare_for_inference(prepare_for_inference(params, first), then)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "t5-bias"])
@pytest.mark.parametrize("shared", ["all", "target-output", "none"])
@pytest.mark.slow
def test_prepared_parameters_answer_like_those_they_were_made_of(positions, shared, in_out):
    config = tiny_config(positions=positions, shared_embeddings=shared)
    params, source, target = random_params(config), random_ids(3, 7), random_ids(3, 5, seed=1)
    arguments = tuple(map(jnp.asarray, (source, [7, 5, 1], target)))
    for weights, size in (("float32", 4), ("bfloat16", 2), ("int8", 1)):
        prepared = prepare_for_inference(params, weights)
        model = tiny_model(config, "bfloat16" if weights == "bfloat16" else "float32")
        logits, expected = (model.apply({"params": tree}, *arguments) for tree in (prepared, params))
        if weights == "float32":
            assert_close(logits, expected)
        else:
            assert not np.array_equal(logits, expected)
            assert float(np.std(logits - expected)) < 0.05 * float(np.std(expected))
        table = jax.tree.leaves(prepared["target_embedding"])[0]
        assert table.nbytes == size * table.size
        small = {"relative_bias", "position_embedding", "bias", "scale"}
        for path, leaf in jax.tree_util.tree_leaves_with_path(prepared):
            if small & {getattr(key, "key", None) for key in path}:
                assert leaf.dtype == np.float32


@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder-only"])
def test_prepared_parameters_make_queries_keys_and_values_in_one_product(architecture, weights, in_out):
    """And of groups of heads, rotated, without biases, what three products make."""
    for options in ({}, dict(num_kv_heads=2, head_dim=6, positions="rope", use_bias=False)):
        config = tiny_config(architecture=architecture, **options)
        params, model = random_params(config), tiny_model(config)
        prepared = prepare_for_inference(params, weights)
        attention = prepared["decoder"]["layer_0"]["self_attention"]
        assert set(attention) == {"query_key_value", "output"}
        if architecture == "encoder-decoder":  # keys and values of a source are made of other vectors than queries
            assert set(prepared["decoder"]["layer_0"]["cross_attention"]) == {"query", "key", "value", "output"}
        if weights == "float32":
            assert count_params(prepared) == count_params(params)

        arguments = tuple(map(jnp.asarray, (random_ids(2, 6), [6, 3], random_ids(2, 4, seed=1))))

        def logits(tree, model=model, arguments=arguments):
            return model.apply({"params": tree}, *arguments)

        made = [str(jax.make_jaxpr(logits)(tree)).count("dot_general") for tree in (params, prepared)]
        layers = config.decoder_layers + (config.encoder_layers if architecture == "encoder-decoder" else 0)
        assert made[0] - made[1] == 2 * layers
        exact, near = logits(params), logits(prepared)
        assert float(np.std(near - exact)) < {"float32": 1e-5, "int8": 0.05}[weights] * float(np.std(exact))


def test_prepared_parameters_of_another_model_are_refused(in_out):
    """Of another vocabulary, another width of a layer, and other heads, as those that were trained are."""
    config = tiny_config(shared_embeddings="all", num_kv_heads=2)
    prepared = prepare_for_inference(random_params(config), "float32")
    arguments = tuple(map(jnp.asarray, (random_ids(2, 6), [6, 3], random_ids(2, 4, seed=1))))
    more = 2 * config.source_vocab_size
    for other in (
        dict(source_vocab_size=more, target_vocab_size=more),
        dict(feed_forward_dim=2 * config.feed_forward_dim, use_bias=False),
        dict(num_kv_heads=1, use_bias=False),
    ):
        with pytest.raises((ValueError, flax.errors.ScopeParamShapeError), match="shape"):
            tiny_model(config.replace(**other)).apply({"params": prepared}, *arguments)


@pytest.mark.parametrize("shared", ["all", "target-output", "none"])
def test_only_float32_matrices_of_products_are_turned(shared, in_out):
    config = tiny_config(positions="learned", shared_embeddings=shared)
    for weights in ("float32", "bfloat16", "int8"):
        prepared = prepare_for_inference(random_params(config), weights)
        turned = in_out and weights == "float32"
        layer = prepared["encoder"]["layer_0"]["feed_forward"]["up"]
        assert set(layer) == {"weight_in_out" if turned else "weight", "bias"}
        if turned:
            assert layer["weight_in_out"].shape == (16, 24)
        looked_up_only = {"source_embedding"} if shared != "all" else set()
        looked_up_only |= {"target_embedding"} if shared == "none" else set()
        for name in looked_up_only:
            assert set(prepared[name]) == {"weight"}
        assert set(prepared["encoder"]["position_embedding"]) == {"weight"}
        assert set(prepared["output" if shared == "none" else "target_embedding"]) == set(layer) - {"bias"}
