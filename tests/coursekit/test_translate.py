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


def test_a_lesson_is_not_published_before_it_is_whole(lesson, capsys):
    write(lesson, (TITLE, "# 一课"))
    assert translate.main([]) == 0
    assert not translate.target_of(lesson).exists()
    assert "is not whole" in capsys.readouterr().out


def test_a_cell_whose_english_has_changed_is_english_and_named(lesson, capsys):
    write(lesson, (TITLE, "# 一课"), ("## Why", "## 为什么"))
    translate.main([])
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


def lesson_that_says(lesson, monkeypatch, said):
    """The lesson with a cell that prints words; a stand-in for execution prints `said`."""
    source = lesson.parents[1] / "01_lesson.py"
    source.write_text(SOURCE.replace("print(1)", 'print(f"all {1 + 1} of them")'))
    notebook = build.read_source(source)
    notebook.cells[2].outputs = [nbformat.v4.new_output("stream", name="stdout", text="all 2 of them\n")]
    nbformat.write(notebook, build.target_of(source))

    def execute(notebook, folder):
        notebook.cells[2].outputs = [nbformat.v4.new_output("stream", name="stdout", text=said)]

    monkeypatch.setattr("coursekit.publish.notebooks.execute", execute)
    write(lesson, (TITLE, "# 一课"), ("## Why", "## 为什么"))
    lesson.with_suffix(".toml").write_text('"all {1 + 1} of them" = "全部 {1 + 1} 个"\n')


def test_strings_of_the_code_are_translated_and_the_cells_executed(lesson, monkeypatch):
    lesson_that_says(lesson, monkeypatch, "全部 2 个\n")
    assert translate.main([]) == 0
    cell = stored()[2]
    assert cell.source == 'print(f"全部 {1 + 1} 个")' and cell.outputs[0].text == "全部 2 个\n"
    assert translate.main(["--check"]) == 0


def test_a_translation_that_prints_other_numbers_is_not_written(lesson, monkeypatch):
    lesson_that_says(lesson, monkeypatch, "全部 3 个\n")
    with pytest.raises(ValueError, match=r"disagrees with the lesson: 01_lesson-001: prints \['3'\]"):
        translate.main([])
    assert not translate.target_of(lesson).exists()


def test_strings_without_translation_are_listed_and_printed_for_the_translator(lesson, monkeypatch, capsys):
    lesson_that_says(lesson, monkeypatch, "全部 2 个\n")
    lesson.with_suffix(".toml").write_text('"gone" = "没有了"\n')
    write(lesson, (TITLE, "# 一课"))
    assert translate.main(["--drift"]) == 0
    out = capsys.readouterr().out
    assert "1 paragraphs and 1 strings wanted" in out and "translates nothing: gone" in out
    translate.main(["--draft", "01"])
    out = capsys.readouterr().out
    assert f"{translate.mark('## Why')}\n## Why" in out and '"all {1 + 1} of them" = ""' in out
    assert TITLE not in out


def test_only_new_code_is_executed(lesson, monkeypatch):
    lesson_that_says(lesson, monkeypatch, "全部 2 个\n")
    translate.main([])
    monkeypatch.setattr("coursekit.publish.notebooks.execute", lambda *_: pytest.fail("executed again"))
    write(lesson, (TITLE, "# 第一课"), ("## Why", "## 为什么"))
    assert translate.main([]) == 0
    assert stored()[0].source == "# 第一课"


def test_a_cell_that_was_prose_when_the_translation_was_stored_takes_no_outputs(lesson, monkeypatch):
    lesson_that_says(lesson, monkeypatch, "全部 2 个\n")
    translate.main([])
    target = translate.target_of(lesson)
    notebook = nbformat.read(target, as_version=4)
    prose = nbformat.v4.new_markdown_cell("gone")
    prose.id = notebook.cells[2].id
    notebook.cells[2] = prose
    nbformat.write(notebook, target)
    assert translate.main([]) == 0
    assert stored()[2].outputs[0].text == "全部 2 个\n"


def test_studies_are_translated_below_and_linked_with_the_lessons(lesson):
    extra = lesson.parents[1] / "extra"
    extra.mkdir()
    study = extra / "01_study.py"
    study.write_text("# %% [markdown]\n# # Study of [one](../01_lesson.ipynb)\n")
    build.target_of(study).parent.mkdir()
    nbformat.write(build.read_source(study), build.target_of(study))
    (lesson.parent / "extra").mkdir()
    english = "# Study of [one](../01_lesson.ipynb)"
    chinese = f"{translate.mark(english)}\n# [一](../01_lesson.ipynb)的专题"
    (lesson.parent / "extra" / "01_study.md").write_text(chinese)
    write(lesson, (TITLE, "# 一课"), ("## Why", "[专题](extra/01_study.ipynb)"))
    assert translate.main([]) == 0
    assert stored()[3].source == "[专题](extra/01_study.ipynb)"
    assert stored("notebooks/zh/extra/01_study.ipynb")[0].source == "# [一](../01_lesson.ipynb)的专题"
    assert translate.main(["--check"]) == 0
