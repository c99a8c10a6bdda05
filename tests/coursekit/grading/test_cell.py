"""An answer cell as a notebook runs it."""

import pytest

from coursekit.grading.cell import compile_cell, plain_text
from coursekit.grading.grade import grade_answer
from coursekit.grading.learner import Learner
from coursekit.grading.tasks import TASKS
from tests.exercises.test_04_block_table import ALLOCATOR


@pytest.mark.parametrize(
    "cell",
    ["%%time\n{}", "\n%%capture out\n{}", "%%timeit -n1\n{}", "%load_ext autoreload\n{}", "{}\n!ls -l 'it's'",
     "{}\nstr?\n", "?str\n{}", "{}\nfiles = !ls\n", "{}\nx = %pwd",
     "{}\ndisplay(1)\nget_ipython().run_line_magic('time', '')",
     "from coursekit.checks import check, attempt\nfrom coursekit.lesson import show_source\n{}\n"
     "with attempt():\n    raise NotImplementedError\ncheck.allocator(MyBlockPool)", "\ufeff{}"],
)  # fmt: skip
def test_what_a_notebook_runs_is_no_mistake(cell):
    answer = cell.format(ALLOCATOR.second)
    result = grade_answer(TASKS["allocator"], {"allocator": answer})
    assert result.passed, result.text()


@pytest.mark.parametrize("ends", ["\r\n", "\r"])
def test_line_ends_of_other_systems_are_line_ends(ends):
    assert plain_text(f"a{ends}b") == "a\nb"
    assert grade_answer(TASKS["allocator"], {"allocator": ALLOCATOR.second.replace("\n", ends)}).passed


@pytest.mark.parametrize("text", ['s = """\n%time x\n!ls\n"""', "x = (5\n% 3)", "x = 5 \\\n% 3"])
def test_what_python_understands_stays_as_it_is(text):
    assert compile_cell(text, "x")[1] == text


def test_a_line_magic_runs_its_statement():
    with Learner({"x": "%time x = 3\nif x:\n    %matplotlib inline\ny = !ls\n"}) as learner:
        assert (learner.x, learner.y) == (3, None)


def test_a_cell_for_another_program_defines_nothing():
    result = grade_answer(TASKS["allocator"], {"allocator": f"%%bash\n{ALLOCATOR.second}"})
    assert result.reason == "the answer does not define 'MyBlockPool'"


def test_lines_keep_their_numbers():
    with pytest.raises(SyntaxError) as error:
        compile_cell("%%time\n!ls\nx = (", "answer")
    assert error.value.lineno == 3
