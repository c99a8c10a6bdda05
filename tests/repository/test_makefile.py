"""The Makefile has the commands that the documents name, and `setup` does its work once."""

import os
import re
import shutil
import subprocess
import tomllib

import pytest
from checkout import ROOT, tracked_files

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make as from a fresh shell, also when these tests were started by `make unit JOBS=1`."""
    passed_on = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "PYTHON", "TORCH_INDEX", "ARGS", "JOBS"}
    environment = {name: value for name, value in os.environ.items() if name not in passed_on}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def targets() -> set[str]:
    """The targets that `make help` shows."""
    return set(re.findall(r"^  make (\S+)", make("help").stdout, re.MULTILINE))


def test_help_lists_every_phony_target():
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets() == set(phony.split())


def test_commands_in_the_documents_exist():
    documents = [file for file in tracked_files() if file.suffix in {".md", ".yml"} or file.name == "run"]
    named = {}
    for document in documents:
        for line in re.findall(
            r"(?:^|`|\$ |&& |step )make ([a-z]+(?: [a-z]+)*)", document.read_text(), re.MULTILINE
        ):
            for word in line.split():
                named[word] = document.name
    assert "demo" in named and "test" in named
    assert {word: where for word, where in named.items() if word not in targets()} == {}


@pytest.mark.parametrize(
    "target",
    [
        *("check", "demo", "test", "lint", "types", "lab", "kernels", "fuzz", "doctor", "build", "site"),
        *("long", "served", "scale", "teach"),
    ],
)
def test_every_command_sets_up_first(target):
    done = make("--dry-run", target)
    assert done.returncode == 0, done.stderr
    first = done.stdout.index("scripts/setup_env.py")
    rest = done.stdout[first:]
    assert ".venv/bin/" in rest
    assert ".venv/bin/" not in done.stdout[:first]


def extras(target: str) -> set[str]:
    """What a command adds to the engine and the course."""
    planned = make("--dry-run", target).stdout
    return {name for names in re.findall(r"setup_env\.py --extra (.*)", planned) for name in names.split()}


def test_a_command_installs_what_it_needs_and_no_more():
    for target in ("setup", "doctor", "demo", "lab", "serve", "kernels", "build", "slides", "pictures"):
        assert extras(target) == set(), target
    for target in ("test", "unit", "notebooks", "check", "long", "fuzz", "bench"):
        assert extras(target) == {"test"}, target
    assert extras("lint") == extras("types") == {"lint"}
    assert extras("browser") == {"test", "browser"}
    for target in ("scale", "teach", "site"):
        assert extras(target) == {target}
    assert extras("served") == {"test", "serve-test", "browser"}


def test_only_a_teacher_gets_nbgrader_and_its_menu():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [name for name, rows in project.items() if "nbgrader" in " ".join(rows)] == ["teach"]


def test_test_runs_unit_tests_and_notebooks_each_file_in_one_process():
    planned = make("--dry-run", "test").stdout
    assert "pytest -n 2 --dist=worksteal tests" in planned
    if list(ROOT.glob("notebooks/*.ipynb")):
        assert "--nbval" in planned
        assert "--dist=loadfile" in planned


def test_check_runs_what_test_runs_and_what_it_leaves_out():
    planned = make("--dry-run", "check").stdout
    assert make("--dry-run", "test").stdout.splitlines() == planned.splitlines()[:-2]
    left_out, run_later = re.findall('-m "([^"]+)"', planned)
    assert left_out == "not slow and not extra and not browser and not serve"
    assert run_later == "(slow or fuzz or extra) and not browser and not serve"


def test_exercises_that_somebody_may_be_solving_are_run_again_in_ci_only():
    assert make("--dry-run", "notebooks", "CI=true").stdout.rstrip().endswith("notebooks solutions exercises")
    assert make("--dry-run", "notebooks", "CI=").stdout.rstrip().endswith("notebooks solutions")


def test_arguments_and_torch_index_are_passed_on():
    planned = make("--dry-run", "demo", "ARGS=--quick", "TORCH_INDEX=https://example.org/whl").stdout
    assert '--torch-index "https://example.org/whl"' in planned
    assert "minipaged demo --quick" in planned


def test_no_suitable_python_is_one_sentence_with_the_way_out():
    done = make("setup", "PYTHON=")
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr
    assert "make setup PYTHON=" in done.stderr
