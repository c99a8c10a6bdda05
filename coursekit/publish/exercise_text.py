"""What the text of an exercise says about its tasks: read here for the tests and for docs/teaching.md.

The text of a task is the Markdown between the test of the task before it and its own answer cell:

    ## Task 1 · A block allocator
    *About 12 lines · difficulty 2 of 5 · 15 minutes · 3 points*
    **Contract.** …  **Example.** …  and three hints, each folded away inside the one before
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from nbformat import NotebookNode

HEADING = re.compile(r"^## Task (\d+) · (.+)$", re.MULTILINE)
FACTS = re.compile(
    r"^\*About (\d+) lines · difficulty ([1-5]) of 5 · (\d+) minutes · (\d+) points?\*$", re.MULTILINE
)


@dataclass(frozen=True)
class TaskText:
    """One task as its exercise describes it."""

    name: str  # the grade_id of its answer cell
    number: int
    title: str
    lines: int
    difficulty: int  # 1 … 5
    minutes: int
    points: int
    text: str

    def part(self, name: str) -> str:
        """The text after `**name.**`, up to the next part or the hints; empty when there is none."""
        found = re.search(
            rf"\*\*{name}\.\*\*(.+?)(?=^\*\*\w+\.\*\*|^<details>|\Z)", self.text, re.DOTALL | re.MULTILINE
        )
        return found[1].strip() if found else ""

    def hints(self) -> list[str]:
        """The hints in order. ValueError when one is not folded inside the one before."""
        texts: list[str] = []
        depth = 0
        for piece in re.split(r"(<details><summary>Hint \d</summary>|</details>)", self.text):
            if piece.startswith("<details>"):
                depth += 1
                if f"Hint {depth}<" not in piece or len(texts) >= depth:
                    raise ValueError(f"{self.name}: {piece} is not inside the hint before it")
                texts.append("")
            elif piece == "</details>":
                depth -= 1
            elif depth:
                texts[depth - 1] += piece.strip()
        if depth:
            raise ValueError(f"{self.name}: {depth} hints are not closed")
        return texts


def task_texts(notebook: NotebookNode) -> Iterator[TaskText]:
    """The tasks of an exercise in order. ValueError for one without its heading and its line of facts."""
    text = ""
    for cell in notebook.cells:
        marks = cell.metadata.get("nbgrader", {})
        if cell.cell_type == "markdown":
            text += cell.source + "\n\n"
        if marks.get("solution"):
            headings, facts = HEADING.findall(text), FACTS.findall(text)
            if len(headings) != 1 or len(facts) != 1:
                raise ValueError(
                    f"{marks['grade_id']}: {len(headings)} headings and {len(facts)} lines of facts"
                )
            number, title = headings[0]
            lines, difficulty, minutes, points = map(int, facts[0])
            yield TaskText(marks["grade_id"], int(number), title, lines, difficulty, minutes, points, text)
        if marks.get("grade"):
            text = ""
