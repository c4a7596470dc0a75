"""The programs that the README and the page on generation show, run as they stand there."""

import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny_models import random_params, tiny_config

import tfm
from tfm.pipeline import TextModel
from tfm.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
WORDS = ["abc", "cab", "bac", "a", "b", "c", "ccc", "abab"]


def program(name: str, folder: Path) -> Path:
    """Writes the README's program of that name."""
    (code,) = re.findall(rf"```python\n(# {name}: .*?)```", README, re.DOTALL)
    (folder / name).write_text(code, encoding="utf-8")
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("readme")
    tokenizer = Tokenizer.train(WORDS, kind="char", vocab_size=260)
    size = tokenizer.vocab_size
    config = tiny_config(
        source_vocab_size=size, target_vocab_size=size, pad_id=tokenizer.pad_id, start_id=tokenizer.start_id,
        end_id=tokenizer.end_id, max_source_length=16, max_target_length=32,
    )  # fmt: skip
    TextModel(config, random_params(config), tokenizer, tokenizer).save(path / "model")
    return path


@pytest.mark.slow
def test_the_service_answers_many_at_once_and_each_its_own(folder):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    expected = tfm.load(folder / "model")(WORDS)

    def ask(text: str) -> tuple[int, str]:
        request = urllib.request.Request(f"http://localhost:{port}", data=text.encode())
        for _ in range(600):
            try:
                with urllib.request.urlopen(request, timeout=120) as response:
                    return response.status, response.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()
            except urllib.error.URLError:  # not listening yet
                time.sleep(0.1)
        raise AssertionError("the service did not start")

    with subprocess.Popen([sys.executable, program("serve.py", folder), folder / "model", str(port)]) as service:
        try:
            asked = [*WORDS, "a" * 40, *WORDS, *WORDS]
            with ThreadPoolExecutor(len(asked)) as together:
                answers = list(together.map(ask, asked))
        finally:
            service.kill()
    assert answers[:8] == answers[9:17] == answers[17:] == [(200, answer) for answer in expected]
    status, message = answers[8]
    assert status == 400
    assert "at most 16 tokens" in message


@pytest.mark.slow
def test_an_exported_model_answers_without_tfm(folder):
    model = tfm.load(folder / "model", weights="float32")
    subprocess.run([sys.executable, program("export.py", folder), "model"], cwd=folder, check=True)
    alone = folder / "alone"
    alone.mkdir()
    for name in ("prefill.bin", "step.bin"):
        shutil.move(folder / name, alone / name)
    code = program("greedy.py", alone).read_text()
    blocked = "import sys\nsys.modules['tfm'] = sys.modules['flax'] = None\n" + code
    ids = [*model.source_tokenizer.encode("cab"), model.config.end_id]
    printed = subprocess.run(
        [sys.executable, "-c", blocked, *map(str, ids)], cwd=alone, check=True, capture_output=True, text=True
    ).stdout
    (answer,) = model.generate(["cab"], max_tokens=20)
    expected = answer.tokens + [model.config.end_id] * answer.finished
    assert list(map(int, printed.split()))[: len(expected)] == expected


@pytest.mark.slow
@pytest.mark.usefixtures("compile_fast")
@pytest.mark.parametrize("page", ["README.md", "docs/generation.md"])
def test_the_lines_of_a_page_run_one_after_another(page, tmp_path, monkeypatch, capsys):
    """All but the programs that have a name, with a model where the page has one."""
    monkeypatch.chdir(tmp_path)
    tokenizer = Tokenizer.train(["A dog runs through the snow. Ein Hund kind of Schnee"], kind="char", vocab_size=290)
    size = tokenizer.vocab_size
    config = tiny_config(source_vocab_size=size, target_vocab_size=size, max_source_length=32, max_target_length=48)
    TextModel(config, random_params(config), tokenizer, tokenizer).save("runs/en-de/best")
    of_text = config.replace(architecture="decoder-only", max_source_length=0, max_target_length=64)
    TextModel(of_text, random_params(of_text), tokenizer, tokenizer).save("runs/book/best")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    lines = [block for block in blocks if not re.match(r"# \w+\.py:", block)]
    assert len(lines) > 2
    names: dict = {}
    for block in lines:
        exec(compile(block, page, "exec"), names)
    assert capsys.readouterr().out


def test_every_link_within_the_pages_leads_somewhere():
    pages = [ROOT / "README.md", ROOT / "docs" / "generation.md", ROOT / "benchmarks" / "README.md"]
    headings = {}
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        headings[page] = {
            re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        }
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if link.startswith("https://"):
                continue
            path, _, heading = link.partition("#")
            other = (page.parent / path).resolve() if path else page
            assert other.exists(), (page.name, link)
            assert not heading or heading in headings[other], (page.name, link)
