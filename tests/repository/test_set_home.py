"""`make home REPO=owner/name`: one command moves every address, and only addresses."""

import importlib.util
import subprocess
import sys

import pytest
from checkout import ROOT, tracked_files

from coursekit.publish import home

SPEC = importlib.util.spec_from_file_location("set_home", ROOT / "scripts" / "set_home.py")
set_home = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(set_home)

OLD, NEW = "old-owner/old.name", "new-owner/new"


@pytest.mark.parametrize(
    "text",
    [
        'Repository = "https://github.com/{}"',
        "[a](https://colab.research.google.com/github/{}/blob/main/notebooks/1.ipynb)",
        "https://codespaces.new/{}?quickstart=1",
        "git clone https://github.com/{}.\n",
    ],
)
def test_addresses_move(text):
    assert set_home.renamed(text.format(OLD), OLD, NEW) == text.format(NEW)


@pytest.mark.parametrize(
    "text",
    [
        "src/old-owner/old.name/x.py",
        "https://github.com/old-owner/old.name-docs",
        "https://github.com/old-owner/old.names",
        "https://github.com/old-owner/oldxname",
    ],
)
def test_what_only_resembles_the_address_stays(text):
    assert set_home.renamed(text, OLD, NEW) == text


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository of the files that name the address."""
    for file in tracked_files():
        if file.suffix in {".toml", ".md", ".cff", ".ipynb", ".yml"}:
            copy = tmp_path / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    monkeypatch.setattr(set_home, "ROOT", tmp_path)
    return tmp_path


def badges(checkout):
    address = "colab.research.google.com/github/"
    return {path.name for path in checkout.rglob("*.ipynb") if address in path.read_text()}


def test_notebooks_have_a_badge_from_the_first_address_on(checkout):
    set_home.main([home.UNSET])
    assert badges(checkout) == set()
    set_home.main([NEW])
    assert {"00_start_here.ipynb", "04_block_table.ipynb"} <= badges(checkout)


def test_every_file_moves_and_a_move_back_restores_every_byte(checkout, capsys, monkeypatch):
    old = home.declared_repository()
    before = {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()}
    assert set_home.main([NEW]) == 0
    printed = capsys.readouterr().out
    assert "pyproject.toml" in printed and "notebooks/00_start_here.ipynb" in printed
    left = [path for path in before if f"github.com/{old}".encode() in path.read_bytes()]
    assert left == []
    monkeypatch.setattr(set_home, "declared_repository", lambda: NEW)
    assert set_home.main([old]) == 0
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("arguments", [[], ["name"], ["https://github.com/a/b"], ["a/b", "c/d"], [""]])
def test_a_wrong_address_changes_nothing_and_is_one_sentence(arguments):
    script = [sys.executable, str(ROOT / "scripts" / "set_home.py"), *arguments]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 2
    assert "make home REPO=owner/name" in done.stderr
