"""`minipaged kernels`: its table, its listings, and what it says to questions it cannot answer."""

import subprocess
import sys

import pytest

pytest.importorskip("triton")
from coursekit.aot.table import heading
from minipaged.attention.targets import TARGETS


def minipaged(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as the tests run, with TRITON_INTERPRET set: it must find its way to the compiler."""
    return subprocess.run([sys.executable, "-m", "minipaged", *arguments], capture_output=True, text=True)


@pytest.fixture(scope="module")
def table() -> str:
    done = minipaged("kernels", "--target", "sm_80", "--kernel", "decode_grouped", "--kernel", "copy_blocks")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_table_names_the_asked_kernels_only_and_explains_its_columns(table: str) -> None:
    lines = table.splitlines()
    assert lines[0].startswith("sm_80 (A100)")
    columns = lines[1].split()
    rows = lines[2 : lines.index("")]
    assert {row.split()[0] for row in rows} == {"decode_grouped", "copy_blocks"}
    footer = "\n".join(lines[lines.index("") :])
    assert all(f"\n{column} " in footer for column in columns if column not in ("kernel", "data"))


def test_table_fits_100_columns(table: str) -> None:
    headings = [heading(target) for target in TARGETS.values()]
    assert max(map(len, [*headings, *table.splitlines()])) <= 100


def test_sass_is_shown_with_the_loop_marked() -> None:
    done = minipaged("kernels", "--show", "sass", "decode_grouped", "--target", "sm_80")
    assert done.returncode == 0, done.stderr
    marked = [line for line in done.stdout.splitlines() if line.startswith("┃")]
    assert any("HMMA" in line for line in marked) and any("LDGSTS" in line for line in marked)
    assert max(map(len, done.stdout.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "sm_60"], "no target 'sm_60'; the targets are sm_75"),
        (["--kernel", "encode"], "no kernel 'encode'; the kernels are copy_blocks"),
        (["--show", "spirv", "decode"], "cannot show 'spirv', only ptx or sass"),
    ],
)
def test_an_unknown_name_is_answered_with_the_known_ones(arguments: list[str], message: str) -> None:
    done = minipaged("kernels", *arguments)
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr
