"""A translated lesson: prose of its own, everything else the executed lesson's; English where it lags."""

import nbformat
import pytest

from coursekit.publish import build, translate

SOURCE = """# %% [markdown]
# # A lesson
# See [a term](../docs/glossary.md#block) and [the next](02_next.ipynb).

# %%
print(1)

# %% [markdown]
# ## Why
"""
TITLE = "# A lesson\nSee [a term](../docs/glossary.md#block) and [the next](02_next.ipynb)."


@pytest.fixture
def lesson(tmp_path, monkeypatch):
    """A lesson as if executed, and the place of its translation."""
    monkeypatch.chdir(tmp_path)
    source = build.FOLDER / "src" / "01_lesson.py"
    (source.parent / "zh").mkdir(parents=True)
    source.write_text(SOURCE)
    notebook = build.read_source(source)
    for count, cell in enumerate([cell for cell in notebook.cells if cell.cell_type == "code"], 1):
        cell.execution_count = count
    notebook.cells[2].outputs = [nbformat.v4.new_output("stream", name="stdout", text="1\n")]
    nbformat.write(notebook, build.target_of(source))
    return source.parent / "zh" / "01_lesson.md"


def write(lesson, *texts):
    lesson.write_text("\n\n".join(f"{translate.mark(english)}\n{text}" for english, text in texts))


def stored(name="notebooks/zh/01_lesson.ipynb"):
    return nbformat.read(name, as_version=4).cells


def test_prose_is_translated_and_code_and_outputs_are_the_lessons(lesson):
    write(lesson, (TITLE, "# 一课\n见[术语](../docs/glossary.md#block)。"), ("## Why", "## 为什么"))
    assert translate.main([]) == 0
    english, chinese = stored("notebooks/01_lesson.ipynb"), stored()
    assert chinese[0].source.splitlines()[0] == "# 一课" and chinese[3].source == "## 为什么"
    assert chinese[1:3] == english[1:3]
    assert [cell.id for cell in chinese] == [cell.id for cell in english]
    assert translate.main(["--check"]) == 0


def test_a_cell_that_is_missing_or_whose_english_has_changed_is_english_and_named(lesson, capsys):
    write(lesson, (TITLE, "# 一课"), ("## Why?", "## 为什么"))
    assert translate.main([]) == 0
    assert stored()[3].source == "## Why"
    assert f"wanted: {translate.mark('## Why')}" in capsys.readouterr().out
    assert translate.main(["--check"]) == 1


def test_links_lead_to_the_same_places_and_to_translated_lessons_first(lesson, monkeypatch):
    monkeypatch.setattr("coursekit.publish.notebooks.declared_repository", lambda: "some-one/course")
    write(lesson, (TITLE, TITLE), ("## Why", "[a](#b) [c](https://d.org/e)"))
    assert translate.main([]) == 0
    cells = stored()
    assert "(../../docs/glossary.md#block)" in cells[0].source and "(../02_next.ipynb)" in cells[0].source
    assert "/blob/main/notebooks/zh/01_lesson.ipynb)" in cells[0].source, "its badge opens the translation"
    assert cells[3].source == "[a](#b) [c](https://d.org/e)"
    assert translate.moved("[n](02_next.ipynb)", {"02_next.ipynb"}) == "[n](02_next.ipynb)"


def test_a_notebook_that_is_older_than_its_sources_fails_the_check(lesson, capsys):
    write(lesson, (TITLE, "# 一课"), ("## Why", "## 为什么"))
    translate.main([])
    write(lesson, (TITLE, "# 第一课"), ("## Why", "## 为什么"))
    assert translate.main(["--check"]) == 1
    assert "differs from its sources" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["# 一课", "<!-- 12345678: a -->\nb\n<!-- 12345678: a -->\nc"])
def test_a_file_without_marks_or_with_one_twice_is_refused(lesson, text):
    lesson.write_text(text)
    with pytest.raises(ValueError, match=r"01_lesson\.md has no mark, or the same one twice"):
        translate.main([])
