import subprocess
import sys

import nbformat
import pytest

from coursekit.publish import build, notebooks

SOURCE = """# %% [markdown]
# # A lesson

# %%
import ipywidgets
value = 2
print(value)

# %% tags=["nbval-ignore-output"]
import time
time.time()
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MPLBACKEND", raising=False)
    path = tmp_path / "notebooks" / "src" / "01_lesson.py"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    return path


def stored(source):
    """A notebook as the build would write it, without the seconds that a kernel takes."""
    notebook = build.read_source(source)
    nbformat.write(notebook, build.target_of(source))
    return build.target_of(source)


def test_a_build_executes_and_is_byte_stable(source):
    source.write_text(SOURCE.replace("time.time()", "time.sleep(0)"))
    first = build.build(source).read_bytes()
    assert build.build(source).read_bytes() == first
    cells = nbformat.reads(first.decode(), as_version=4).cells
    assert [cell.get("execution_count") for cell in cells] == [None, 1, 2, 3]
    assert cells[1].outputs == []
    assert cells[2].outputs[0].text == "2\n"
    assert [cell.id[-4:] for cell in cells] == ["-000", "home", "-001", "-002"]
    assert "version" not in nbformat.reads(first.decode(), as_version=4).metadata.language_info


def test_agreeing_files_pass_the_check(source, capsys):
    stored(source)
    assert build.main(["--check"]) == 0
    assert "1 sources agree" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("value = 2", "value = 3", "cell 2: its source"),
        ("nbval-ignore-output", "nbval-skip", "cell 3: its metadata"),
        ("# %% [markdown]\n# # A", "# %% [raw]\n# # A", "cell 0: its cell_type"),
        ("import time\n", "import time\n\n# %%\n", "has 4 cells, its source has 5"),
    ],
)
def test_an_edited_source_fails_the_check(source, capsys, old, new, complaint):
    stored(source)
    source.write_text(SOURCE.replace(old, new))
    assert build.main(["--check"]) == 1
    assert complaint in capsys.readouterr().out


def test_a_study_goes_into_a_folder_of_its_own_with_the_number_of_its_lesson(source, capsys, monkeypatch):
    monkeypatch.setattr(notebooks, "declared_repository", lambda: "someone/course")  # then there are badges
    stored(source)
    study = source.parent / "extra" / "01_study.py"
    study.parent.mkdir()
    study.write_text(SOURCE)
    (source.parents[1] / "extra").mkdir()
    assert stored(study) == source.parents[1] / "extra" / "01_study.ipynb"
    first = nbformat.read(stored(study), as_version=4).cells[0].source
    assert "/notebooks/extra/01_study.ipynb)" in first and "(../../docs/images/" in first
    assert build.main(["--check", "01"]) == 0
    assert "2 sources agree" in capsys.readouterr().out
    study.unlink()
    assert build.main(["--check"]) == 1
    assert "extra/01_study.ipynb has no source" in capsys.readouterr().out


def test_a_missing_notebook_and_a_notebook_without_source_fail_the_check(source, capsys):
    stored(source).rename(source.parent.parent / "09_gone.ipynb")
    assert build.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "01_lesson.ipynb is missing" in said and "09_gone.ipynb has no source" in said


def test_widget_views_give_way_to_their_picture():
    data = {"image/png": "AAAA", "text/plain": "words", notebooks.WIDGET_VIEW: {"model_id": "1"}}
    cell = nbformat.v4.new_code_cell("w", outputs=[nbformat.v4.new_output("display_data", data)])
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"widgets": {"state": {}}})
    tidied = notebooks.tidy(notebook)
    assert set(tidied.cells[0].outputs[0].data) == {"image/png", "text/plain"}
    assert "widgets" not in tidied.metadata


def test_a_failing_cell_fails_the_build(source):
    source.write_text(SOURCE.replace("print(value)", "assert value == 3"))
    with pytest.raises(Exception, match="AssertionError"):
        build.build(source)
    assert not build.target_of(source).exists()


def test_outside_the_repository_one_sentence_says_so(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "coursekit.publish.build"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2 and "run this from the root of the repository" in run.stderr
    assert "Traceback" not in run.stderr
