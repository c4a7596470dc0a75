"""Pictures say what they are pictures of: labels, weights, curves and edges are those of the data."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure
from text_models import CONFIG, make_model
from tiny_models import tiny_config

from tfm import plot
from tfm.decoding.alignment import attention_weights
from tfm.decoding.beam import BeamSearch
from tfm.decoding.inference import prefill
from tfm.nn.cache import cache_bytes
from tfm.pipeline import TextModel

pytestmark = pytest.mark.usefixtures("compile_fast")

TEXT, ANSWER = "a b c", "d e"
ROWS, COLUMNS = ["d", "e", "</s>"], ["a", "b", "c", "</s>"]


@pytest.fixture(scope="module")
def model() -> TextModel:
    return make_model()


def labels(ax) -> tuple[list[str], list[str]]:
    return tuple([label.get_text() for label in axis.get_ticklabels()] for axis in (ax.yaxis, ax.xaxis))


def image(ax) -> np.ndarray:
    (drawn,) = ax.images
    return np.asarray(drawn.get_array())


def expected_weights(model: TextModel, part: str) -> np.ndarray:
    source = [*model.source_tokenizer.encode(TEXT), model.source_tokenizer.end_id]
    target = [*model.target_tokenizer.encode(ANSWER), model.target_tokenizer.end_id]
    found = attention_weights(model.model, model.prepared_params, [source], [target])
    return np.asarray(getattr(found, part))[:, 0]


class TestAttention:
    @pytest.mark.parametrize(
        ("of", "part", "rows", "columns"),
        [
            ("cross", "cross_attention", ROWS, COLUMNS),
            ("self", "self_attention", ROWS, ["<s>", "d", "e"]),
            ("encoder", "encoder", COLUMNS, COLUMNS),
        ],
    )
    def test_a_map_shows_the_weights_of_a_head_between_its_tokens(self, model, of, part, rows, columns):
        figure = plot.attention_map(model, TEXT, ANSWER, of=of, layer=-1, head=1)
        (ax,) = figure.axes
        assert labels(ax) == (rows, columns)
        np.testing.assert_allclose(image(ax), expected_weights(model, part)[-1, 1], atol=1e-6)
        assert image(ax).sum(axis=1) == pytest.approx(np.ones(len(rows)), abs=1e-5)
        assert ax.get_title() == "layer 0, head 1"

    def test_without_a_layer_or_head_it_shows_their_mean(self, model):
        figure = plot.attention_map(model, TEXT, ANSWER, layer=None)
        expected = expected_weights(model, "cross_attention").mean(axis=(0, 1))
        np.testing.assert_allclose(image(figure.axes[0]), expected, atol=1e-6)

    def test_the_answer_is_the_models_own_where_none_is_given(self, model):
        (answer,) = model.generate([TEXT])
        looked = plot.token_attention(model, TEXT)
        assert looked.rows == model.target_tokenizer.tokens(answer.tokens) + ["</s>"] * answer.finished
        given = plot.token_attention(model, TEXT, answer)
        assert np.array_equal(looked.weights, given.weights)

    def test_a_grid_has_a_row_for_each_layer_and_a_column_for_each_head(self, model):
        figure = plot.attention_grid(model, TEXT, ANSWER)
        weights = expected_weights(model, "cross_attention")
        assert len(figure.axes) == weights.shape[0] * weights.shape[1] == 2
        for ax, expected in zip(figure.axes, weights.reshape(-1, *weights.shape[2:]), strict=True):
            assert labels(ax) == (ROWS, COLUMNS)
            np.testing.assert_allclose(image(ax), expected, atol=1e-6)

    def test_a_decoder_only_model_has_no_encoder_to_look_at(self):
        model = make_model(CONFIG.replace(architecture="decoder-only", shared_embeddings="target-output"))
        assert labels(plot.attention_map(model, TEXT, ANSWER, head=0).axes[0]) == (ROWS, COLUMNS)
        with pytest.raises(ValueError, match=r"that the model has \(cross, self\), got 'encoder'"):
            plot.attention_map(model, TEXT, ANSWER, of="encoder")

    def test_it_draws_on_axes_that_it_is_given(self, model):
        mine = Figure()
        _, second = mine.subplots(1, 2)
        assert plot.attention_map(model, TEXT, ANSWER, ax=second) is mine
        assert labels(second) == (ROWS, COLUMNS)
        part = Figure().subfigures(1, 2)[0]
        assert plot.heat_map(np.eye(2), ["a", "b"], ["c", "d"], ax=part.subplots()) is part.figure

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"head": 2}, "expected a head from -2 to 1, or None for all, got 2"),
            ({"layer": 1}, "expected a layer from -1 to 0"),
            ({"of": "both"}, "expected of to be one of cross, self, encoder, got 'both'"),
        ],
    )
    def test_what_there_is_not_cannot_be_drawn(self, model, options, message):
        with pytest.raises(ValueError, match=message):
            plot.attention_map(model, TEXT, ANSWER, **options)

    def test_a_language_model_is_refused(self):
        model = make_model(CONFIG.replace(architecture="decoder-only", max_source_length=0))
        with pytest.raises(ValueError, match="expected a model that answers texts, got a language model"):
            plot.attention_map(model, TEXT, ANSWER, of="self")

    def test_a_heat_map_has_as_many_labels_as_rows_and_columns(self):
        with pytest.raises(ValueError, match=r"expected weights of 1 rows and 2 columns, as labels, got \(2, 2\)"):
            plot.heat_map(np.eye(2), ["a"], ["b", "c"])

    def test_spaces_are_seen_and_dollars_are_no_formulas(self, tmp_path):
        figure = plot.heat_map(np.eye(2), ["$", "$x$"], [" ", "b"])
        figure.savefig(tmp_path / "map.png")
        assert labels(figure.axes[0])[1] == ["␣", "b"]


def write_run(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


RECORD = [
    {"step": 5, "split": "train", "seconds": 1.5, "perplexity": 9.0, "grad_norm": 2.0},
    {"step": 10, "split": "train", "seconds": 3.0, "perplexity": None, "grad_norm": 1.0},
    {"step": 10, "split": "validation", "seconds": 3.0, "perplexity": 7.0, "wer": 80.0, "samples": [{"source": "a"}]},
]


def curves(figure: Figure) -> dict[str, tuple[list, list]]:
    return {line.get_label(): tuple(map(list, line.get_data())) for line in figure.axes[0].lines}


class TestLearningCurves:
    def test_the_curves_of_a_run_are_the_rows_of_its_record(self, trained):
        drawn = curves(plot.learning_curves(trained / "run"))
        rows = [json.loads(line) for line in (trained / "run" / "metrics.jsonl").read_text().splitlines()]
        for split in ("train", "validation"):
            of_split = [row for row in rows if row["split"] == split]
            assert drawn[split] == ([row["step"] for row in of_split], [row["perplexity"] for row in of_split])
        assert len(drawn) == 2

    def test_several_runs_have_their_names_and_a_colour_each(self, tmp_path):
        runs = [write_run(tmp_path / name, RECORD) for name in ("first", "second")]
        figure = plot.learning_curves(runs, metric="wer", x="seconds")
        assert curves(figure) == {f"{name}, validation": ([3.0], [80.0]) for name in ("first", "second")}
        assert len({line.get_color() for line in figure.axes[0].lines}) == 2
        assert set(curves(plot.learning_curves({"mine": runs[0], "yours": runs[1]}))) == {
            f"{name}, {split}" for name in ("mine", "yours") for split in ("train", "validation")
        }

    def test_runs_of_one_name_are_told_apart_by_their_paths(self, tmp_path):
        runs = [write_run(tmp_path / folder / "run", RECORD) for folder in "ab"]
        assert set(curves(plot.learning_curves(runs, metric="wer"))) == {f"{run}, validation" for run in runs}

    def test_what_was_not_finite_is_a_gap_and_a_line_that_is_not_whole_is_left_out(self, tmp_path):
        run = write_run(tmp_path / "run", RECORD)
        with (run / "metrics.jsonl").open("ab") as file:
            file.write('{"step": 15, "samples": [{"source": "ü'.encode()[:-1])
        assert np.array_equal(curves(plot.learning_curves(run))["train"][1], [9.0, np.nan], equal_nan=True)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (b"nonsense\n", "line 1: expected JSON, got 'nonsense"),
            (b"[1]\n", "expected a row with step and split"),
            (b'"\xff"\n', "line 1: expected JSON, got '\"\N{REPLACEMENT CHARACTER}"),
        ],
    )
    def test_a_line_that_is_no_row_is_named(self, tmp_path, text, message):
        run = write_run(tmp_path / "run", [])
        (run / "metrics.jsonl").write_bytes(text)
        with pytest.raises(ValueError, match=message):
            plot.learning_curves(run)

    def test_only_a_line_feed_ends_a_row(self, tmp_path):
        sample = {"step": 12, "split": "validation", "perplexity": 6.0, "samples": [{"source": "a\u2028b\x85"}]}
        run = write_run(tmp_path / "run", [])
        rows = [json.dumps(row, ensure_ascii=False) + "\n" for row in (sample, *RECORD)]
        (run / "metrics.jsonl").write_text("".join(rows), encoding="utf-8")
        assert len(plot.read_metrics(run)) == 1 + len(RECORD)

    def test_every_name_is_shown_as_it_is(self, tmp_path):
        figure = plot.learning_curves({"$\\a$": write_run(tmp_path / "run", RECORD)} | {"_b": tmp_path / "run"})
        figure.savefig(tmp_path / "names.png")
        shown = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        assert [label.lstrip() for label in shown][2:] == ["_b, train", "_b, validation"]
        plot.cache_growth({"$\\a$": tiny_config()}, [4], source_length=5).savefig(tmp_path / "growth.png")

    def test_what_cannot_be_drawn_is_said(self, tmp_path):
        run = write_run(tmp_path / "run", RECORD)
        tested = write_run(tmp_path / "tested", [{"step": 5, "split": "test", "seconds": 1.0, "wer": 2.0}])
        with pytest.raises(ValueError, match=r"run tested has recorded \(nothing yet\), got 'wer'"):
            plot.learning_curves(tested, metric="wer")
        with pytest.raises(ValueError, match=r"run run has recorded \(grad_norm, perplexity, wer\), got 'bleu'"):
            plot.learning_curves(run, metric="bleu")
        with pytest.raises(ValueError, match=r"recorded \(nothing yet\)"):
            plot.learning_curves(write_run(tmp_path / "new", []))
        with pytest.raises(ValueError, match=r"expected the folder of a run, with a metrics.jsonl in it, got"):
            plot.learning_curves(tmp_path)
        with pytest.raises(ValueError, match="expected at least one run, got none"):
            plot.learning_curves([])
        with pytest.raises(ValueError, match="expected x to be one of step, seconds, got 'hours'"):
            plot.learning_curves(run, x="hours")


SEARCH = BeamSearch(width=3, num_best=3)


class TestBeamTree:
    @pytest.mark.parametrize("search", [SEARCH, BeamSearch(width=4, num_best=2, groups=2, alpha=1.0)])
    @pytest.mark.slow
    def test_it_holds_the_hypotheses_that_the_search_finds_with_their_scores(self, model, search):
        nodes = plot.search_tree(model, TEXT, search, max_tokens=8)
        (answers,) = model.generate_n_best([TEXT], sampler=search, max_tokens=8)
        complete = sorted((node for node in nodes if node.rank is not None), key=lambda node: node.rank)
        ends = [[model.config.end_id] * answer.finished for answer in answers]
        assert [list(node.tokens) for node in complete] == [
            answer.tokens + end for answer, end in zip(answers, ends, strict=True)
        ]
        assert [node.score for node in complete] == pytest.approx([answer.search_score for answer in answers], abs=1e-4)
        assert [node.log_prob for node in complete] == pytest.approx([answer.score for answer in answers], abs=1e-4)

    def test_every_node_continues_another_and_is_less_likely(self, model):
        nodes = {node.tokens: node for node in plot.search_tree(model, TEXT, SEARCH, max_tokens=8)}
        assert nodes[()].log_prob == 0
        for tokens, node in nodes.items():
            if tokens:
                assert node.log_prob <= nodes[tokens[:-1]].log_prob
                assert node.text == model.target_tokenizer.tokens([tokens[-1]])[0]

    def test_at_no_step_more_is_followed_than_the_width_and_it_is_the_likeliest(self, model):
        nodes = plot.search_tree(model, TEXT, SEARCH, max_tokens=8)
        first = [node for node in nodes if len(node.tokens) == 1]
        source = [*model.source_tokenizer.encode(TEXT), model.source_tokenizer.end_id]
        logits = prefill(model.model, model.prepared_params, [source], capacity=8)[0][0, 0]
        expected = np.sort(np.asarray(jax.nn.log_softmax(logits)))[::-1]
        followed = [node.log_prob for node in first if node.tokens[0] != model.config.end_id]
        assert len(followed) <= SEARCH.width
        assert [node.log_prob for node in first] == pytest.approx(expected[: len(first)], abs=1e-4)

    def test_the_picture_has_an_edge_for_each_prefix(self, model):
        nodes = plot.search_tree(model, TEXT, SEARCH, max_tokens=8)
        (ax,) = plot.beam_tree(model, TEXT, SEARCH, max_tokens=8).axes
        places = {text.get_position(): text.get_text() for text in ax.texts if text.get_bbox_patch() is not None}
        assert len(places) == len(nodes)
        assert sorted(places.values()) == sorted(node.text for node in nodes)
        edges = [tuple(zip(*line.get_data(), strict=True)) for line in ax.lines]
        assert len(edges) == len(nodes) - 1
        assert all(begin in places and end in places and end[0] == begin[0] + 1 for begin, end in edges)
        lengths = sorted(len(node.tokens) for node in nodes if node.tokens)
        assert sorted(end[0] for _, end in edges) == lengths
        best = next(node for node in nodes if node.rank == 0)
        heavy = [line for line in ax.lines if line.get_linewidth() > 2]
        assert len(heavy) == len(best.tokens)

    @pytest.mark.parametrize(
        ("search", "max_tokens", "message"),
        [
            (BeamSearch(coverage=0.2), 8, "without coverage"),
            (BeamSearch(num_best=9), 8, "expected num_best from 1 to the width 4, got 9"),
            (SEARCH, 0, "expected max_tokens of at least 1, got 0"),
            (SEARCH, 1000, "expected a cache capacity of at most 150"),
        ],
    )
    def test_what_cannot_be_searched_is_said(self, model, search, max_tokens, message):
        with pytest.raises(ValueError, match=message):
            plot.beam_tree(model, TEXT, search, max_tokens=max_tokens)


class TestCacheGrowth:
    @pytest.mark.parametrize("dtype", ["float32", "int8"])
    @pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder-only"])
    def test_dots_are_the_bytes_of_the_arrays_and_the_line_is_the_formula(self, architecture, dtype):
        config, lengths = tiny_config(architecture=architecture, num_kv_heads=2), [4, 8, 32]
        figure = plot.cache_growth(config, lengths, batch=3, source_length=5, dtype=dtype)
        sizes = dict(batch=3, source_length=5, dtype=dtype)
        expected = [cache_bytes(config, capacity=length, **sizes) / 2**20 for length in lengths]
        assert curves(figure) == {"formula": (lengths, expected), "arrays of the cache": (lengths, expected)}

    def test_several_models_have_their_names(self):
        configs = {"N": tiny_config(), "1": tiny_config(num_kv_heads=1)}
        assert set(curves(plot.cache_growth(configs, [4], source_length=5))) == {
            f"{name}: {what}" for name in configs for what in ("formula", "arrays of the cache")
        }

    def test_what_cannot_be_drawn_is_said(self):
        with pytest.raises(ValueError, match="expected at least one model and one length, got 1 and 0"):
            plot.cache_growth(tiny_config(), [])
        with pytest.raises(ValueError, match="expected lengths of at least 1, got 0"):
            plot.cache_growth(tiny_config(), [4, 0])
        with pytest.raises(ValueError, match="expected a batch of at least 1, got -1"):
            plot.cache_growth(tiny_config(), [4], batch=-1, source_length=5)
        with pytest.raises(ValueError, match="expected a cache capacity of at most 32"):
            plot.cache_growth(tiny_config(), [33], source_length=5)


def test_without_matplotlib_the_error_says_what_to_install():
    program = "import sys; sys.modules['matplotlib.axes'] = None\nimport tfm.plot"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "ImportError: tfm.plot draws with matplotlib, which is not installed: pip install 'tfm-jax[plot]'" in (
        found.stderr
    )


def test_no_picture_goes_through_pyplot_and_tfm_alone_needs_no_matplotlib():
    program = (
        "import sys, tfm\nfrom tfm.pipeline import TextModel\nassert 'matplotlib' not in sys.modules\n"
        "import tfm.plot\nassert 'matplotlib.pyplot' not in sys.modules"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
