"""What the README and the install guide tell a reader to type works."""

import ast
import re
import shlex

import pytest
from checkout import ROOT
from packaging.requirements import Requirement

from minipaged import cli

README = (ROOT / "README.md").read_text()
INSTALL = (ROOT / "docs/install.md").read_text()
FIRST_SCREEN = 25  # lines


def test_first_screen_has_the_picture_and_the_two_commands():
    screen = "\n".join(README.splitlines()[:FIRST_SCREEN])
    assert "docs/images/memory_over_time.svg" in screen
    assert "\nmake demo " in screen
    assert "\nmake test " in screen


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
