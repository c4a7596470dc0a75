"""Many devices compute what one does, but for the order of sums: fake devices, in a process of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from sharded_process import DIM, GENERATES, TARGET_VOCAB, TRAINS, batch_of, model_config
from tiny_run import tiny_config

from tfm.axis_rules import DEFAULT_RULES, LOGICAL_AXES, parse_rules, rule_problem
from tfm.nn.models import build_model
from tfm.nn.param_axes import check_heads, param_axes, param_shardings
from tfm.nn.params import param_shapes, prepare_for_inference
from tfm.sharding import Placement, constrain, make_placement
from train import loop
from train.config import ConfigError, MeshConfig
from train.device import placement_of
from train.progress import Reporter
from train.step import place_batch

RTOL = {"losses": 1e-5, "norms": 1e-5}
"""In float32, of sums in another order, over three steps."""
TRAINED = [(optimizer, name) for optimizer, names in TRAINS.items() for name in names if name != "none"]
GENERATED = [(weights, name) for weights, names in GENERATES.items() for name in names if name != "none"]


class Results:
    """What `sharded_process.py` wrote."""

    def __init__(self, folder: Path) -> None:
        self.arrays = np.load(folder / "arrays.npz")
        self.facts = json.loads((folder / "facts.json").read_text())

    def below(self, prefix: str) -> dict[str, np.ndarray]:
        return {key.removeprefix(prefix): self.arrays[key] for key in self.arrays if key.startswith(prefix)}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("sharded")
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("sharded_process.py"), folder],
        env={**env, "PYTHONPATH": str(Path(__file__).parent.parent)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return Results(folder)


def eight(**sizes: int) -> Placement:
    """A mesh of devices that are not there: what can be said about shapes needs none."""
    names = ("data", "fsdp", "tensor")
    shape = tuple(sizes.get(name, 1) for name in names)
    mesh = jax.sharding.AbstractMesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    return Placement(mesh, tuple((name, DEFAULT_RULES[name]) for name in LOGICAL_AXES))


def made_of(facts: dict, operation: str) -> Iterator[list[int]]:
    return (shape for name, shape in facts if name == operation)


# --- many devices and one


@pytest.mark.parametrize(("optimizer", "name"), TRAINED)
def test_parameters_begin_the_same_bit_for_bit(results, optimizer, name):
    alone, spread = results.below(f"{optimizer}/none/"), results.below(f"{optimizer}/{name}/")
    assert alone.keys() == spread.keys()
    assert len(alone) > 20
    assert all(np.array_equal(alone[path], spread[path]) for path in alone)


@pytest.mark.parametrize(("optimizer", "name"), TRAINED)
@pytest.mark.parametrize("what", RTOL)
def test_steps_are_those_of_one_device(results, optimizer, name, what):
    alone, spread = results.facts[f"{optimizer}/none"][what], results.facts[f"{optimizer}/{name}"][what]
    assert spread == pytest.approx(alone, rel=RTOL[what])
    assert len({round(value, 3) for value in alone}) == 3  # it learns: parameters of each step are compared


def test_accumulated_slices_of_rows_that_are_spread_are_the_whole_batch(results):
    alone, spread = results.facts["adamw/none"], results.facts["accumulated/2-2-2"]
    assert all(spread[what] == pytest.approx(alone[what], rel=RTOL[what]) for what in RTOL)


def test_a_step_is_compiled_once(results):
    counts = {key: facts["compilations"] for key, facts in results.facts.items() if "compilations" in facts}
    assert {count for count in counts.values() if count is not None} == {1}


@pytest.mark.parametrize(("weights", "name"), GENERATED)
def test_the_same_is_generated(results, weights, name):
    alone, spread = results.below(f"{weights}/none/"), results.below(f"{weights}/{name}/")
    assert np.array_equal(alone["greedy"], spread["greedy"])
    # An activation between two of int8's steps goes to either: among the last of a beam, another may then be kept.
    ranks = 4 if weights == "float32" else 1
    assert np.array_equal(alone["beam"][:, :ranks], spread["beam"][:, :ranks])
    np.testing.assert_allclose(spread["scores"][:, :ranks], alone["scores"][:, :ranks], atol=1e-4)
    assert np.mean((alone["beam"] == spread["beam"]).all(axis=-1)) > 0.9
    assert len(np.unique(alone["beam"])) > 8


def test_a_state_goes_from_mesh_to_mesh_unchanged(results):
    names = ("2-2-2", "2-1-2", "1-2-1", "none", "1-8-1")
    first, *others = (results.below(f"restored/{name}/") for name in names)
    assert len(first) > 100
    for other in others:
        assert first.keys() == other.keys()
        assert all(np.array_equal(first[path], other[path]) for path in first)


def test_the_loop_goes_on_on_another_mesh(results):
    rows = [results.facts["loop"][name] for name in ("one", "eight")]
    alone, spread = ({row["step"]: row for row in run if row["split"] == "train"} for run in rows)
    assert sorted(alone) == sorted(spread) == list(range(1, 9))
    for step, row in alone.items():
        assert spread[step]["loss"] == pytest.approx(row["loss"], rel=1e-5)
        assert spread[step]["padding_share"] == row["padding_share"]
    alone, spread = (run[-1] for run in rows)
    assert spread["split"] == "validation"
    assert spread["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert spread["samples"] == alone["samples"]


# --- what lies where, and what is sent


@pytest.mark.parametrize("name", ["1-8-1", "1-1-8", "2-2-2"])
def test_each_device_holds_its_part_of_matrices_and_of_what_the_optimizer_has_of_them(results, name):
    optimizer = "adamw" if name in TRAINS["adamw"] else "adafactor"
    lies = results.facts[f"{optimizer}/{name}"]["lies"]
    pieces = np.prod([int(size) for size in name.split("-")[1:]])
    matrices = {path: sizes for path, sizes in lies.items() if len(sizes[0]) == 2}
    assert len(matrices) > 15
    for path, (whole, part) in matrices.items():
        assert np.prod(part) * pieces == np.prod(whole), path


def test_rows_and_columns_of_adafactor_lie_as_their_matrix_does(results):
    lies = results.facts["adafactor/1-8-1"]["lies"]
    at = "['encoder']['layer_0']['feed_forward']['{}']['weight']"
    found = {
        (statistic, name): lies[f".opt_state[1][0].{statistic}{at.format(name)}"][1]
        for statistic in ("v_row", "v_col") for name in ("up", "down")
    }  # fmt: skip
    # up is [hidden, embed], and rows are means over embed; embed is cut into 8
    assert found == {("v_row", "up"): [DIM], ("v_col", "up"): [DIM // 8], ("v_row", "down"): [DIM // 8],
                     ("v_col", "down"): [DIM]}  # fmt: skip


def test_gradients_of_spread_rows_are_summed_and_nothing_else_is_sent(results):
    sent = results.facts["adamw/8-1-1"]["collectives"]
    assert {name for name, _ in sent} == {"all-reduce"}
    assert [DIM, DIM] in list(made_of(sent, "all-reduce"))


@pytest.mark.parametrize("name", ["1-1-8", "2-2-2"])
def test_logits_are_never_gathered(results, name):
    sent = results.facts[f"adamw/{name}"]["collectives"]
    _, fsdp, tensor = map(int, name.split("-"))
    gathered = list(made_of(sent, "all-gather"))
    assert all(shape[-1] != TARGET_VOCAB for shape in gathered)
    # only parameters come together, and those over fsdp alone
    assert all(np.prod(shape) <= max(DIM, TARGET_VOCAB) * DIM / tensor for shape in gathered)
    assert bool(gathered) == (fsdp > 1)
    assert list(made_of(sent, "all-reduce"))


@pytest.mark.parametrize(("name", "allowed"), [("8-1-1", set()), ("1-1-8", {"all-reduce"})])
def test_a_decode_step_sends_no_cache(results, name, allowed):
    assert {operation for operation, _ in results.facts["decode"][name]} == allowed


# --- placements


def test_a_placement_says_how_an_array_lies():
    placement = eight(data=2, fsdp=2, tensor=2)
    assert placement.mesh_axes("batch") == ("data", "fsdp")
    assert placement.pieces("batch") == 4
    assert placement.pieces(None) == 1
    assert placement.rows.spec == jax.P(("data", "fsdp"))
    assert placement.whole.spec == jax.P()
    assert placement.sharding("w", (8, 6), ("vocab", "embed")).spec == jax.P("tensor", "fsdp")
    assert eight(tensor=8).sharding("w", (8, 6), ("vocab", "embed")).spec == jax.P("tensor")
    assert hash(placement) == hash(eight(data=2, fsdp=2, tensor=2))


def test_what_cannot_be_cut_is_named():
    with pytest.raises(ValueError, match=r"decoder/w: axis 1 \(embed\) of shape \(8, 6\).* fsdp \(4\), and 4 .* 6;"):
        eight(fsdp=4).sharding("decoder/w", (8, 6), ("vocab", "embed"))
    with pytest.raises(ValueError, match=r"w: two axes of \('vocab', 'heads'\), of shape \(8, 8\).* tensor"):
        eight(tensor=4).sharding("w", (8, 8), ("vocab", "heads"))


def test_a_head_is_not_cut_in_two():
    config = model_config(num_heads=8, num_kv_heads=2)
    build_model(config, dtype="float32", placement=eight(tensor=2))
    with pytest.raises(ValueError, match=r"num_kv_heads: axis 0 \(kv_heads\) of shape \(2,\).* 4 does not divide 2"):
        build_model(config, dtype="float32", placement=eight(tensor=4))
    with pytest.raises(ValueError, match="num_heads"):
        check_heads(eight(tensor=16), config)


@pytest.mark.parametrize(
    "changes",
    [
        dict(gated=True, norm="rmsnorm", use_bias=False),
        dict(positions="learned", shared_embeddings="target-output"),
        dict(positions="t5-bias", architecture="decoder-only", target_vocab_size=24),
        dict(architecture="recurrent", shared_embeddings="target-output", encoder_layers=1),
        dict(architecture="recurrent", bidirectional=True),
    ],
)
def test_every_parameter_has_axes_prepared_ones_too(changes):
    config = model_config(**changes)
    shapes = param_shapes(config)
    lies = jax.tree.leaves(param_shardings(eight(fsdp=2, tensor=2), shapes))
    assert len(lies) == len(jax.tree.leaves(shapes))
    assert any(sharding.spec != jax.P() for sharding in lies) == (config.architecture != "recurrent")
    for weights in ("float32", "int8"):
        prepared = jax.eval_shape(lambda params, weights=weights: prepare_for_inference(params, weights), shapes)
        param_shardings(eight(fsdp=2, tensor=2), prepared)


def test_a_parameter_of_no_model_is_named():
    with pytest.raises(ValueError, match="got 'decoder/nobody/weight'"):
        param_axes({"decoder": {"nobody": {"weight": np.zeros((2, 2))}}})


def test_without_a_placement_nothing_is_done():
    x, batch = jax.numpy.ones((3, 2)), batch_of(model_config())
    assert constrain(None, x, "batch", "embed") is x
    assert place_batch(None, batch) is batch


def test_one_device_is_a_mesh_too():
    placement = make_placement()
    assert placement.mesh.size == jax.device_count()
    with pytest.raises(ValueError, match=r"data = 1, fsdp = 3, tensor = 2 needs 6 devices, and there are \d+"):
        make_placement(data=1, fsdp=3, tensor=2)
    with pytest.raises(ValueError, match="a multiple of 4096 devices"):
        make_placement(tensor=4096)
    with pytest.raises(ValueError, match="expected mesh sizes of at least 1"):
        make_placement(fsdp=0)
    with pytest.raises(ValueError, match="heads and embed"):
        make_placement(rules={"embed": ("tensor",)})


# --- rules and settings


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"vocabulary": ()}, "'vocabulary'"),
        ({"vocab": ("tensors",)}, "'tensors'"),
        ({"batch": ("data", "data")}, "once"),
        ({"batch": ("data", "tensor")}, "batch and heads"),
        ({"vocab": ("fsdp",)}, "vocab and embed"),
        ({"vocab": ("tensor", "fsdp"), "embed": (), "batch": ("data",)}, None),
    ],
)
def test_rules_that_cannot_be_are_named(rules, words):
    problem = rule_problem(rules)
    assert problem is None if words is None else words in problem


def test_rules_are_read():
    assert parse_rules(["batch = data + fsdp", "vocab="]) == {"batch": ("data", "fsdp"), "vocab": ()}
    for texts in (["vocab"], ["vocab=", "vocab=tensor"]):
        with pytest.raises(ValueError, match="expected rules such as"):
            parse_rules(texts)


def test_settings_are_checked_and_placed():
    for wrong in (dict(data=-1), dict(fsdp=0), dict(rules=("vocab=fsdp",)), dict(rules=("vocab",))):
        with pytest.raises(ConfigError, match=r"mesh\."):
            MeshConfig(**wrong)
    if jax.device_count() == 1:
        assert placement_of(MeshConfig()) is None
    with pytest.raises(ValueError, match=r"mesh: a mesh of data = 0, fsdp = 1, tensor = 4096 needs"):
        placement_of(MeshConfig(tensor=4096))


def test_a_mesh_of_other_devices_leaves_no_run_behind(tmp_path):
    config = tiny_config(tmp_path, mesh=MeshConfig(data=4096))
    with pytest.raises(ValueError, match="needs 4096 devices, and there are"):
        loop.train(config, tmp_path / "run", reporter=Reporter())
    assert not list((tmp_path / "run").glob("config*"))
