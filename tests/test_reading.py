import gzip
import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.reading import DataError, read_examples
from train.tasks import Examples

DATA = Path(os.environ.get("TFM_DATA", Path(__file__).parents[2] / "shared" / "data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"needs the public corpora: no folder {DATA} (TFM_DATA)")

# Everything that some reader takes for the end of a line, but that line-aligned corpora have inside their lines.
INSIDE_LINES = "\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e\r"


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def json_lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


# What is read


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last_line_ends", [True, False])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("zipped", [True, False])
def test_endings_marks_and_compression_change_nothing(tmp_path, ending, last_line_ends, mark, zipped):
    content = ending.join(["ein\tone\ta", "zwei\ttwo", "drei ähm\t三"]) + ending * last_line_ends
    content = mark + content.encode()
    path = write(tmp_path, "pairs.tsv", gzip.compress(content, mtime=0) if zipped else content)
    assert read_examples([path]) == Examples(["ein", "zwei", "drei ähm"], [["one", "a"], ["two"], ["三"]])


def test_only_line_feeds_end_lines(tmp_path):
    source = write(tmp_path, "a", f"one{INSIDE_LINES}more\ntwo\r\n")
    target = write(tmp_path, "b", "eins\nzwei\n")
    assert read_examples([source, target]) == Examples([f"one{INSIDE_LINES}more", "two"], [["eins"], ["zwei"]])


TEXT = st.text(st.characters(exclude_characters="\r\n\t", exclude_categories=["Cs"])).filter(
    lambda text: not text.startswith("\ufeff")
)


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1))
def test_every_format_gives_back_any_text(tmp_path_factory, pairs):
    folder = tmp_path_factory.mktemp("pairs")
    expected = Examples([source for source, _ in pairs], [[target] for _, target in pairs])
    lines = [write(folder, str(side), "".join(pair[side] + "\n" for pair in pairs)) for side in (0, 1)]
    assert read_examples(lines) == expected
    assert read_examples([write(folder, "x.tsv", "".join(f"{s}\t{t}\n" for s, t in pairs))]) == expected
    records = json_lines(*({"source": source, "target": target} for source, target in pairs))
    assert read_examples([write(folder, "x.jsonl", records)]) == expected


def test_fields_and_lists_of_answers_of_jsonl(tmp_path):
    path = write(tmp_path, "x.jsonl.gz", gzip.compress(json_lines(
        {"document": "long\ntext", "summary": "short", "id": 7},
        {"document": "b", "summary": ["c", "", "d"]},
    ).encode()))  # fmt: skip
    examples = read_examples([path], source_field="document", target_field="summary")
    assert examples == Examples(["long\ntext", "b"], [["short"], ["c", "d"]])


def test_empty_pairs_are_rows(tmp_path):
    assert read_examples([write(tmp_path, "x.tsv", "a\tb\n\n\tb\na\t\na\t\tb\t\n")]) == Examples(
        ["a", "", "", "a", "a"], [["b"], [""], ["b"], [""], ["b"]]
    )
    records = json_lines({"source": "a", "target": []}, {"source": "", "target": ""}) + "\n \t\n"
    assert read_examples([write(tmp_path, "x.jsonl", records)]) == Examples(["a", "", "", ""], [[""]] * 4)
    assert read_examples([write(tmp_path, "x.tsv", "a\tb\n  \n")]) == Examples(["a", "  "], [["b"], [""]])
    lines = write(tmp_path, "a", "\n"), write(tmp_path, "b", "\n")
    assert read_examples(lines) == Examples([""], [[""]])


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.jsonl.gz", "x.json.gz"])
def test_the_ending_says_what_is_jsonl(tmp_path, name):
    content = json_lines({"source": "a", "target": "b"}).encode()
    path = write(tmp_path, name, gzip.compress(content, mtime=0) if name.endswith(".gz") else content)
    assert read_examples([path]) == Examples(["a"], [["b"]])


def test_a_format_that_is_asked_for_goes_before_the_ending(tmp_path):
    path = write(tmp_path, "x.jsonl", "a\tb\n")
    assert read_examples([path], format="tsv") == Examples(["a"], [["b"]])


# What is refused


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.tsv", b"", "expected text, got an empty file"),
        ("x.tsv", b"\xef\xbb\xbf", "expected text, got an empty file"),
        ("x.tsv.gz", b"", "expected text, got an empty file"),
        ("x.tsv", gzip.compress(b"", mtime=0), "expected text, got an empty file"),
        ("x.tsv", b"a\tb\nno tab\n", "line 2: expected source<TAB>target, got no tab in 'no tab'"),
        ("x.tsv", b"a\tb\n" * 5_000 + b"caf\xe9\tb\n", "line 5001: not UTF-8: byte 0xe9 after 3 characters"),
        ("x.tsv", b"a\tb\n\xed\xa0\x80\tb", "line 2: not UTF-8: byte 0xed after 0 characters"),
        ("x.tsv", b"a\tb\ncut \xe4\xb8", "line 2: not UTF-8: byte 0xe4 after 4 characters"),
        ("x.tsv", "a\tb\n".encode("utf-16"), "line 1: not UTF-8: byte 0xff after 0 characters"),
        ("x.tsv", gzip.compress(b"a\tb\ncaf\xe9\tb\n", mtime=0), "line 2: not UTF-8: byte 0xe9 after 3 characters"),
        ("x.tsv.gz", b"a\tb\n", "the gzip data cannot be read on after line 0: Not a gzipped file"),
        ("x.jsonl", b'{"source": "a", "target": "b"}\n{"source": "a"}\n', "line 2: expected the field 'target', got"),
        ("x.jsonl", b"{}\n", "line 1: expected the field 'source', got no field"),
        ("x.jsonl", b'{"source": "a", "target": "b"}\n{"source": "a"', "line 2: not JSON: Expecting ',' delimiter"),
        ("x.jsonl", b'["a", "b"]\n', "line 1: expected a JSON object, got '[\"a\", \"b\"]'"),
        ("x.jsonl", b"12\n", "line 1: expected a JSON object, got '12'"),
        ("x.jsonl", b'{"source": 5, "target": "b"}', "line 1: expected a string in 'source', got '5'"),
        ("x.jsonl", b'{"source": "a", "target": null}', "line 1: expected a string or a list of strings in 't"),
        ("x.jsonl", b'{"source": "a", "target": ["b", 1]}', "line 1: expected a string or a list of strings in 't"),
        ("x.jsonl", b'{"source": "\\ud83d", "target": "b"}', "line 1: expected Unicode text, got half of a surrogate"),
        ("x.jsonl", b'\n{"source": "a", "source": "b", "target": "c"}', "line 2: not JSON that can be read: "
         "expected each key once in an object, got 'source' twice"),
        ("x.jsonl", b"[" * 100_000, "line 1: not JSON that can be read"),
        ("x.jsonl", b"9" * 10_000, "line 1: not JSON that can be read"),
    ],
)  # fmt: skip
def test_errors_name_file_and_line(tmp_path, name, content, message):
    path = write(tmp_path, name, content)
    separator = ", " if message.startswith("line") else ": "
    with pytest.raises(DataError, match="^" + re.escape(f"{path}{separator}{message}")):
        read_examples([path])


@pytest.mark.parametrize(("lines", "partners"), [(3, 5), (5, 3), (1, 2)])
def test_unequal_line_counts_name_both_files_and_counts(tmp_path, lines, partners):
    source, target = write(tmp_path, "a.en", "x\n" * lines), write(tmp_path, "b.de", "y\n" * partners)
    with pytest.raises(DataError) as error:
        read_examples([source, target])
    assert str(error.value) == (
        f"{source}: expected as many lines as in {target}, which has {partners}, got {lines}; the first line without a "
        f"partner is {min(lines, partners) + 1}"
    )


def test_the_file_at_fault_is_the_one_that_is_named(tmp_path):
    good, bad = write(tmp_path, "good", "x\nx\n"), write(tmp_path, "bad", b"y\n\xff\n")
    with pytest.raises(DataError, match=f"^{bad}, line 2: not UTF-8"):
        read_examples([good, bad])
    with pytest.raises(DataError, match=f"^{bad}, line 2: not UTF-8"):
        read_examples([bad, good])
    empty = write(tmp_path, "empty", "")
    with pytest.raises(DataError, match=f"^{empty}: expected text, got an empty file"):
        read_examples([good, empty])


@pytest.mark.parametrize("fault", ["truncated", "flipped", "trailing"])
def test_damaged_gzip_is_found(tmp_path, fault):
    whole = gzip.compress("".join(f"{number}\tb{number * number}\n" for number in range(20_000)).encode(), mtime=0)
    middle = len(whole) // 2
    damaged = {
        "truncated": whole[:middle],
        "flipped": whole[:middle] + bytes(byte ^ 0xFF for byte in whole[middle : middle + 16]) + whole[middle + 16 :],
        "trailing": whole + b"not gzip",
    }[fault]
    path = write(tmp_path, "x.tsv.gz", damaged)
    with pytest.raises(DataError, match=re.escape(str(path))):
        read_examples([path])
    if fault == "truncated":
        with pytest.raises(DataError, match=r"the gzip data cannot be read on after line [1-9]\d{2,}: "):
            read_examples([path])


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=f"^{tmp_path}/absent.tsv: .* No such file"):
        read_examples([tmp_path / "absent.tsv"])
    with pytest.raises(DataError, match=f"^{tmp_path}: .* Is a directory"):
        read_examples([tmp_path])
    with pytest.raises(DataError, match=r"^'': expected the name of a file"):
        read_examples([""])


@pytest.mark.parametrize(
    ("names", "format", "message"),
    [
        ([], "auto", "expected one file for format 'tsv', got 0"),
        (["a"], "lines", r"expected two line-aligned files \(source, target\), got 1: a"),
        (["a", "b"], "tsv", "expected one file for format 'tsv', got 2: a, b"),
        (["a", "b", "c"], "auto", "got 3: a, b, c"),
    ],
)
def test_the_number_of_paths_fits_the_format(names, format, message):
    with pytest.raises(ValueError, match=message):
        read_examples(names, format=format)


# Real files


@needs_data
@pytest.mark.parametrize(
    ("names", "rows", "pairs"),
    [
        (["multi30k_en_de/train.en.gz", "multi30k_en_de/train.de.gz"], 29_000, 29_000),
        (["multi30k_en_de/test_2016_flickr.en.gz", "multi30k_en_de/test_2016_flickr.de.gz"], 1_000, 1_000),
        (["cmudict_g014b2b/g014b2b.train"], 113_438, 113_438),
        (["cmudict_g014b2b/g014b2b.ref"], 12_000, 12_753),
        (["ar2en/ar2en-train.txt"], 12_877, 12_877),
        (["sigmorphon2021_g2p/jpn_hira_train.tsv"], 8_000, 8_000),
    ],
)
def test_real_corpora_have_the_rows_that_are_known(names, rows, pairs):
    examples = read_examples([DATA / name for name in names])
    assert (len(examples), len(examples.pairs())) == (rows, pairs)


@needs_data
def test_rows_of_one_word_merge_into_one(tmp_path):
    examples = read_examples([DATA / "cmudict_g014b2b" / "g014b2b.train"])
    assert len(examples.merged()) == 106_837
    assert len(examples.merged().pairs()) == 113_438


@needs_data
def test_another_format_is_refused_at_its_first_line():
    with pytest.raises(DataError, match=r"tasks_test_simple\.txt\.gz, line 1: expected source<TAB>target"):
        read_examples([DATA / "scan" / "tasks_test_simple.txt.gz"])
