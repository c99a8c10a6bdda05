"""Submissions that attack their grader: each scores nothing for the item and is named, and stops nobody.

An attack of attacks.txt stands in the answer cell of exercise 04's allocator; the block table in
the same notebook is right, and so is everything of a learner who comes later.
"""

import json
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkout import ROOT

from coursekit.grading import gradebook
from coursekit.grading.grade import grade_answer
from coursekit.grading.learner import Learner
from coursekit.grading.notebook import answers, read_notebook, tasks_of
from coursekit.grading.task import Task
from coursekit.grading.tasks import TASKS

NAME = "04_block_table"
SOLUTION = ROOT / "solutions" / NAME / f"{NAME}.ipynb"
SOURCE = ROOT / "solutions" / "src" / f"{NAME}.py"
MODULE = ROOT / "minipaged" / "cache" / "block_pool.py"
RIGHT = answers(read_notebook(SOLUTION), tasks_of("04"))["allocator"]
SHORT = 3.0  # seconds for whatever would be stopped later: the attacks that hang need no more


def attacks():
    """The attacks of attacks.txt: (name, reason, code)."""
    text = (Path(__file__).parent / "attacks.txt").read_text()
    found = re.findall(r"^# %% (.+?): (.+)\n((?:(?!# %%).*\n)+)", text, re.MULTILINE)
    paths = {"SOURCE": SOURCE, "SOLUTION": SOLUTION, "MODULE": MODULE}
    for name, reason, code in found:
        code = re.sub(r"\b(SOURCE|SOLUTION|MODULE)\b", lambda match: repr(str(paths[match[1]])), code)
        yield name, reason, code if "MyBlockPool" in code else f"{code}\n{RIGHT}"


ATTACKS = list(attacks())


def submit(folder, student, **sources):
    """Hand in the solved notebook of exercise 04 with other answers."""
    notebook = json.loads(SOLUTION.read_text())
    for cell in notebook["cells"]:
        name = cell["metadata"].get("nbgrader", {}).get("grade_id")
        cell["source"] = sources.get(name, cell["source"])
    (folder / student).mkdir(parents=True)
    (folder / student / f"{NAME}.ipynb").write_text(json.dumps(notebook))


@pytest.fixture(scope="module")
def marks(tmp_path_factory):
    """A class in which everybody attacks but the last one, marked once: {learner: {task: item}}.

    Slow because two attacks are waited for, and a process starts for each.
    """
    classroom = tmp_path_factory.mktemp("class")
    for name, _, code in ATTACKS:
        submit(classroom, name, allocator=code)
    submit(classroom, "zoe")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "time_limit", at_most(SHORT))
        submissions = gradebook.find_submissions(classroom, [NAME])
        everybody = gradebook.grade_class(submissions, [NAME], lambda _: None)
        return {found.student: {item.task: item for item in found.items} for found in everybody}


def at_most(seconds):
    """`Learner.time_limit` with its limits cut to `seconds`; not while libraries are read at the start."""
    whole = Learner.time_limit

    @contextmanager
    def time_limit(self, wanted):
        with whole(self, wanted if wanted > 60 else min(wanted, seconds)):
            yield

    return time_limit


@pytest.mark.slow
@pytest.mark.parametrize(("name", "reason"), [attack[:2] for attack in ATTACKS], ids=[a[0] for a in ATTACKS])
def test_an_attack_scores_nothing_and_is_named(marks, name, reason):
    item = marks[name]["allocator"]
    assert (item.points, item.verdict) == (0, "failed")
    assert re.search(reason, item.reason + "\n" + item.text), f"the reason given is {item.reason!r}"


@pytest.mark.slow
def test_what_is_right_elsewhere_is_marked_all_the_same(marks):
    assert {name: items["block_table"].points for name, items in marks.items()} == dict.fromkeys(marks, 4)
    assert marks["zoe"]["allocator"].points == 3
    assert list(marks)[-1] == "zoe"


@pytest.mark.slow
def test_the_grader_is_what_it_was(marks):
    assert not MODULE.read_text().endswith("x")
    assert grade_answer(TASKS["allocator"], {"allocator": RIGHT}).passed


def test_a_copied_or_edited_test_cell_changes_no_mark(tmp_path):
    notebook = json.loads(SOLUTION.read_text())
    by_id = {cell["metadata"].get("nbgrader", {}).get("grade_id"): cell for cell in notebook["cells"]}
    by_id["allocator"]["source"] = "class MyBlockPool: pass"
    test = by_id["allocator-check"]
    copy = json.loads(json.dumps(test)) | {"source": "print('passed')", "id": "copy"}
    notebook["cells"].append(copy)
    by_id["block_table-check"]["cell_type"] = "markdown"
    test["metadata"]["nbgrader"]["points"] = 1000
    path = tmp_path / "eve" / f"{NAME}.ipynb"
    path.parent.mkdir()
    path.write_text(json.dumps(notebook))
    items = list(gradebook.grade_exercise(gradebook.find_files(path.parent, [NAME]), NAME))
    assert [(item.points, item.max_points) for item in items] == [(0, 3), (4, 4)]


GIVEN = ("coursekit.given", "coursekit.grading", "coursekit.lesson")


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_an_answer_finds_no_part_of_the_engine_loaded(task: Task):
    """What an exercise asks for must not lie in sys.modules, brought there by what is given."""
    look = "import sys\nloaded = sorted(name for name in sys.modules if name.startswith('minipaged.'))"
    with Learner({"look": look}, preamble=task.preamble) as learner:
        loaded = [name for name in learner.loaded if name != "coursekit"]
    assert [name for name in loaded if not name.startswith(GIVEN)] == []
