"""An answer cell as a notebook runs it: IPython's own syntax, and the names that a notebook has.

`%%time`, `%matplotlib inline`, `!pip list` and `name?` are no Python. A notebook understands them, so a cell
that holds them is not wrong: what they run is run, the rest of such a line is left out.
"""

import re
import sys
from contextlib import suppress
from functools import partial
from types import CodeType, ModuleType
from typing import Any

MOST_LINES = 200  # of a cell that are IPython's
RUNS_ITS_BODY = ("time", "timeit", "capture", "prun", "memit", "mprun", "lprun")
CELL_MAGIC = re.compile(r"\s*%%(\w+)")
STATEMENT = re.compile(r"(\s*)%(?:time|timeit|prun)\b(?: +-\S+)* *(.*)")  # a line magic that runs a statement
COMMAND = re.compile(r"(\s*)(?:%\w|!|\?|,\w|;\w|\w[\w.]*\?)")
ASSIGNED = re.compile(r"(\s*[\w., ]+= *)[!%]")


def plain_text(source: str) -> str:
    """Line ends of Windows and old Macs become newlines; a byte order mark at the beginning goes."""
    return source.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def compile_cell(source: str, name: str) -> tuple[CodeType, str]:
    """The code of a cell, and the text that was compiled, which has as many lines. SyntaxError as in Python.

    Python says where it stops understanding: only a line of which it complains is read as IPython's. So a
    line of a text or of a long expression that looks like one stays what it is.
    """
    source = without_cell_magic(plain_text(source))
    for _ in range(MOST_LINES):
        try:
            return compile(source, name, "exec"), source
        except SyntaxError as error:
            lines = source.split("\n")
            number = (error.lineno or 0) - 1
            if not 0 <= number < len(lines):
                raise
            line = without_magic(lines[number])
            if line == lines[number]:
                raise
            lines[number] = line
            source = "\n".join(lines)
    return compile(source, name, "exec"), source


def without_cell_magic(source: str) -> str:
    """The cell without a first line like `%%time`; empty when that line gives the cell to another program."""
    before, magic, rest = source.partition("%%")
    found = CELL_MAGIC.match(magic + rest) if magic and not before.strip() else None
    if not found:
        return source
    first, newline, body = rest.partition("\n")
    kept = without_cell_magic(body) if found[1] in RUNS_ITS_BODY else "\n" * body.count("\n")
    return before + newline + kept


def without_magic(line: str) -> str:
    """A line of IPython's as Python: the statement that it runs, an assignment of None, or nothing."""
    if statement := STATEMENT.fullmatch(line):
        return statement[1] + (statement[2] or "pass")
    if command := COMMAND.match(line):
        return command[1] + "pass"
    if assigned := ASSIGNED.match(line):
        return assigned[1] + "None"
    return line


class Nothing:
    """Stands for what a notebook has and a check's process has not: whatever is asked of it does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **more: Any) -> None:
        return None


def names_of_a_notebook() -> dict[str, Any]:
    """Names that are there in every notebook, and those that the first cell of an exercise imports."""
    nothing = Nothing()
    attempt = partial(suppress, NotImplementedError)
    own = {"check": nothing, "attempt": attempt, "show_source": nothing}
    return {"get_ipython": lambda: nothing, "display": nothing, **own}


def what_a_notebook_has() -> dict[str, Any]:
    """The same names, and modules in place of those that they are imported from: they hold the same."""
    names = names_of_a_notebook()
    for name, own in (("checks", ("check", "attempt")), ("lesson", ("show_source",))):
        module = sys.modules[f"coursekit.{name}"] = ModuleType(f"coursekit.{name}")
        vars(module).update({each: names[each] for each in own})
    return names
