"""What the README and the install guide tell a reader to type works."""

import ast
import json
import re
import shlex

import pytest
from checkout import ROOT
from packaging.requirements import Requirement

from minipaged import cli

README = (ROOT / "README.md").read_text()
INSTALL = (ROOT / "docs/install.md").read_text()
FIRST_SCREEN = 30  # lines


def test_first_screen_has_the_picture_and_the_two_commands():
    screen = "\n".join(README.splitlines()[:FIRST_SCREEN])
    assert "docs/images/strip_and_blocks.svg" in screen
    assert "\nmake demo " in screen
    assert "\nmake test " in screen


def test_requests_at_once_are_those_that_were_measured():
    at_once = json.loads((ROOT / "docs/images/measured.json").read_text())["at_once"]
    strips, blocks = at_once.values()
    assert f"**{blocks} requests at once where {strips} fit**" in README
    assert f"accepts: {strips} at once." in README and f"needs one: {blocks} at once." in README


def test_speed_and_memory_beside_vllm_are_those_that_were_recorded():
    machine = ROOT / "benchmarks/results/cpu/amd-epyc-25-17-avx512-bf16-2-cores"  # the one that README names
    record = json.loads((machine / "throughput.json").read_text())
    assert "about twice as\nfast as vLLM's CPU build, in about a fifth of its memory" in README
    for mix in ("chat48", "instruct64"):
        ours, theirs = record["mixes"][mix]["minipaged"], record["mixes"][mix]["vllm"]
        assert 1.75 <= ours["tokens_per_second"] / theirs["tokens_per_second"] <= 2.25
        assert 0.175 <= ours["peak_mib"] / theirs["peak_mib"] <= 0.225
    maker, instructions = record["machine"]["processor"].split(", ")
    assert maker in README and instructions.replace("_", "-").upper() in README
    assert record["machine"]["cores"] == 2 and "two cores" in README


def test_hours_are_those_of_the_teaching_guide():
    stated = re.search(r"about (\d+) hours: (\d+) lessons of 15 to 50 minutes, and (\d+) exercises", README)
    table = (ROOT / "docs/teaching.md").read_text()
    total = re.search(
        r"^\| \*\*all\*\* \| \*\*(\d+):(\d+)\*\* \| (\d+) tasks \| \*\*(\d+):(\d+)\*\*", table, re.MULTILINE
    )
    assert stated is not None and total is not None
    hours, minutes, tasks, more_hours, more_minutes = map(int, total.groups())
    assert abs(hours + more_hours + (minutes + more_minutes) / 60 - int(stated[1])) <= 2
    assert int(stated[2]) == len(list((ROOT / "notebooks").glob("[0-9]*.ipynb"))) and int(stated[3]) == tasks


def test_course_table_lists_every_lesson_in_order():
    lessons = [f"notebooks/{path.name}" for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))]
    listed = re.findall(r"^\| \[\d\d · [^\]]+\]\((notebooks/[^)]+)\) \|", README, re.MULTILINE)
    assert listed == lessons


def reading_order() -> list[str]:
    """The files of the heart, as the table lists them."""
    (section,) = re.findall(r"^## Read the engine\n(.*?)^## ", README, re.MULTILINE | re.DOTALL)
    return re.findall(r"^\| \[[^\]]+\]\((minipaged/[^)]+)\) \|", section, re.MULTILINE)


def test_in_the_reading_order_no_file_needs_a_later_one():
    files = reading_order()
    modules = [file.removesuffix(".py").replace("/", ".") for file in files]
    for place, file in enumerate(files):
        nodes = ast.walk(ast.parse((ROOT / file).read_text()))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        named = {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
        named |= {node.module for node in imports}
        assert not named & set(modules[place + 1 :]), file


def test_the_size_of_the_heart_is_counted():
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in reading_order())
    stated = re.search(r"Its heart is (\d+) files, some ([\d,]+)\s+lines", README)
    assert stated is not None
    assert int(stated[1]) == len(reading_order())
    assert abs(int(stated[2].replace(",", "")) - lines) <= 150


@pytest.mark.model
def test_python_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert "blocks_held=" in capsys.readouterr().out


def test_minipaged_commands_exist():
    named = re.findall(r"(?:^|`)minipaged ([a-z]+(?: [a-z]+)?)", README + INSTALL, re.MULTILINE)
    assert named
    assert [command for command in named if cli.find_command(command.split()) is None] == []


@pytest.mark.parametrize("document", [README, INSTALL], ids=["README", "install"])
def test_every_documented_install_uses_the_pins(document):
    commands = [
        command for command in re.findall(r"pip install [^`\n]*", document) if "pip install ." not in command
    ]
    assert len(commands) >= 3
    for command in commands:
        words = shlex.split(command.partition("#")[0])
        is_pinned_package = "==" in words[-1] and Requirement(words[-1]) and "--no-deps" in words
        assert "-c constraints.txt" in command or is_pinned_package, command
