"""What holds for every test."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import pytest

# Traced programs are millions of objects that stay; looking through them again and again finds no garbage.
gc.set_threshold(50_000, 20, 50)

# The commands keep what they compile in the user's cache directory: not in that of whoever runs the tests.
os.environ["XDG_CACHE_HOME"] = os.devnull

# A sum of arrays of different rank is a mistake more often than a wish; the library says which axes it means.
jax.config.update("jax_numpy_rank_promotion", "raise")

# The first example of a property compiles for seconds, so there is no deadline; on CI the examples are the same ones
# every time, so that a failure there is of the change and not of chance.
_checks = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("local", deadline=None, suppress_health_check=_checks)
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("local"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

_LONGEST_FIRST = (
    "notebooks",
    "resume",
    "loop",
    "inference",
    "pipeline",
    "recipes",
    "option_pairs",
    "benchmarks",
    "transformer",
)
"""Files of tests that take a minute and more. Each runs in one process, and the last may keep one alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"test_{name}": place for place, name in enumerate(_LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


_MOST_MAPS = 25_000
"""Of a process's memory maps; Linux allows 65,530, and each compiled program takes some. Beyond them LLVM aborts."""


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_do_not_pile_up() -> Iterator[None]:
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > _MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with test.tsv, small.toml and the finished run `run`."""
    from tiny_models import compiled_fast  # what needs no run imports no command line
    from trained_run import make_run

    folder = tmp_path_factory.mktemp("cli")
    with compiled_fast():
        make_run(folder)
    return folder


@pytest.fixture
def compile_fast() -> Iterator[None]:
    """For tests of many programs that run a few times each; see `tiny_models.compiled_fast`."""
    from tiny_models import compiled_fast

    with compiled_fast():
        yield


@pytest.fixture
def compile_fully() -> Iterator[None]:
    """For a test of what the compiler makes, in a file of those that compile fast."""
    from tiny_models import compiled_fully

    with compiled_fully():
        yield
