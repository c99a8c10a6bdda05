"""What a class is given: the course as committed, without solutions."""

import subprocess
import zipfile

import pytest
from checkout import ROOT, tracked_files

from coursekit.publish import handout
from coursekit.working_copy import bring_up_to_date


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    folder = tmp_path_factory.mktemp("out") / "minipaged"
    handout.write_handout(ROOT, folder)
    return folder


def test_no_solution_no_planted_answer_and_no_key_is_handed_out(folder):
    given = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert [name for name in given if name.startswith(("solutions/", "tests/exercises/"))] == []
    assert "docs/teaching.md" not in given
    assert {"README.md", "Makefile", "pyproject.toml", "constraints.txt", "scripts/setup_env.py"} <= given
    assert "exercises/04_block_table/04_block_table.ipynb" in given
    tracked = {file.relative_to(ROOT).as_posix() for file in tracked_files()}
    assert given - tracked == {handout.VERSION}


def test_the_answer_of_an_exercise_stands_in_no_file_that_is_handed_out(folder):
    answer = "self.blocks[p // self.block_size] * self.block_size + p % self.block_size"
    assert answer in (ROOT / "solutions/src/04_block_table.py").read_text()
    texts = [path for path in folder.rglob("*") if path.suffix in {".py", ".ipynb", ".md"}]
    assert [path for path in texts if answer in path.read_text(encoding="utf-8")] == []


def test_a_learner_can_work_in_it(folder):
    added = bring_up_to_date(folder, update=False).added
    assert "notebooks/00_start_here.ipynb" in added and len(added) > 25


def test_what_a_teacher_typed_into_an_exercise_stays_here(tmp_path, monkeypatch, capsys):
    course = tmp_path / "course"
    (course / "exercises").mkdir(parents=True)
    exercise = course / "exercises/a.ipynb"
    exercise.write_text("as handed out")
    identity = ["-c", "user.name=x", "-c", "user.email=x@y.z"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], cwd=course, check=True)
    exercise.write_text("solved")
    monkeypatch.chdir(course)
    assert handout.main([]) == 0
    assert (course / "out/handout/exercises/a.ipynb").read_text() == "as handed out"
    with zipfile.ZipFile(course / "out/handout.zip") as packed:
        assert packed.read("handout/exercises/a.ipynb") == b"as handed out"
    assert "without its solutions" in capsys.readouterr().out


def test_outside_a_checkout_one_sentence_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert handout.main([]) == 1
    assert "a handout is made from a commit" in capsys.readouterr().err


def test_no_link_in_it_leads_to_what_was_left_out(folder):
    dead = []
    for page in folder.rglob("*.md"):
        for words, target in handout.LINK.findall(page.read_text(encoding="utf-8")):
            source = ROOT / page.relative_to(folder).parent / target
            if ":" not in target and source.exists() and not (page.parent / target).exists():
                dead.append(f"{page.relative_to(folder)}: [{words}]({target})")
    assert dead == []


def test_a_dead_link_leaves_its_words():
    text = "see [the guide](../docs/teaching.md#giving-it-out), [lessons](../notebooks) and [x](https://x.org/tests/)"
    kept = "see the guide, [lessons](../notebooks) and [x](https://x.org/tests/)"
    assert handout.without_dead_links("docs/a.md", text.replace("](", "](", 1)) == kept
