"""Lines in, groups of lines out, while they come."""

import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st
from streams import Blocks

from train.streaming import LINES_AT_ONCE, file_lines, group_lines


@given(
    st.lists(st.binary(max_size=4).map(lambda line: line.replace(b"\n", b"")), max_size=3 * LINES_AT_ONCE),
    st.lists(st.integers(1, 40), max_size=30),
    st.booleans(),
    st.booleans(),
)
def test_lines_come_whole_in_order_and_numbered_however_the_bytes_arrive(lines, sizes, whole_groups, newline_at_end):
    content = b"\n".join(lines) + b"\n" * (newline_at_end and bool(lines))
    expected = content.split(b"\n")
    expected = expected[:-1] if expected[-1] == b"" else expected
    groups = list(group_lines(Blocks(content, sizes), whole_groups=whole_groups))
    assert [line for _, group in groups for line in group] == expected
    assert [first for first, _ in groups] == [1 + sum(len(g) for _, g in groups[:i]) for i in range(len(groups))]
    assert all(len(group) <= LINES_AT_ONCE for _, group in groups)
    if whole_groups:
        assert all(len(group) == LINES_AT_ONCE for _, group in groups[:-1])


def test_a_line_is_given_before_the_stream_goes_on():
    given = []

    class Waiting:
        def read1(self, size):
            given.append(len(seen))
            return [b"one\ntw", b"o\n", b""][len(given) - 1]

    seen: list = []
    for _, group in group_lines(Waiting(), whole_groups=False):
        seen += group
    assert seen == [b"one", b"two"]
    assert given == [0, 1, 2]


def test_gzip_is_known_by_its_first_bytes_or_by_its_name(tmp_path):
    plain, zipped = b"x\ny\n", gzip.compress(b"x\ny\n")
    for name, content in {"a.txt": plain, "b.gz": zipped, "c.txt": zipped}.items():
        (tmp_path / name).write_bytes(content)
        assert list(file_lines(tmp_path / name)) == [(1, [b"x", b"y"])]


@pytest.mark.parametrize("damage", ["cut", "changed", "no gzip"])
def test_gzip_that_is_damaged_is_an_error_that_names_the_file(tmp_path, damage):
    whole = gzip.compress(b"".join(b"%d\n" % i for i in range(999)))
    damaged = {"cut": whole[:-12], "changed": whole[:20] + b"\x00\x00" + whole[22:], "no gzip": b"x"}
    (tmp_path / "words.gz").write_bytes(damaged[damage])
    with pytest.raises(ValueError, match=r"words.gz: the gzip data cannot be read on"):
        list(file_lines(tmp_path / "words.gz"))
