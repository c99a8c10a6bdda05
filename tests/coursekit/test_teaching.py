"""docs/teaching.md says of times and mistakes what the sources say."""

import pytest
from checkout import ROOT

from coursekit.grading.tasks import TASKS
from coursekit.publish import teaching


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_the_tables_are_up_to_date(capsys):
    assert teaching.main(["--check"]) == 0, "run python -m coursekit.publish.teaching"


def test_a_table_that_differs_is_noticed_and_rewritten(tmp_path, monkeypatch, capsys):
    copy = tmp_path / "teaching.md"
    text = teaching.DOCUMENT.read_text()
    copy.write_text(text.replace("| 00 | 0:15 |", "| 00 | 0:25 |"))
    assert copy.read_text() != text
    monkeypatch.setattr(teaching, "DOCUMENT", copy)
    assert teaching.main(["--check"]) == 1
    assert teaching.main([]) == 0
    assert copy.read_text() == text


def test_a_document_without_a_place_for_a_table_is_refused():
    text = teaching.DOCUMENT.read_text()
    with pytest.raises(ValueError, match="no place for the table 'day'"):
        teaching.with_tables(text.replace("<!-- day -->", ""))


def test_a_term_has_every_lesson_once_and_the_day_only_tasks_that_exist():
    assert sorted(number for _, numbers in teaching.TERM for number in numbers) == list(
        teaching.lesson_minutes()
    )
    assert {name for _, _, names in teaching.DAY for name in names} <= set(TASKS)
    assert {number for _, numbers, _ in teaching.DAY for number in numbers} <= set(teaching.lesson_minutes())


def test_every_task_and_every_check_is_listed():
    text = teaching.DOCUMENT.read_text()
    for task in TASKS.values():
        assert f"**{task.exercise} · {task.title}**" in text
        assert all(f"*{check.title}.* If not: {check.hint}" in text for check in task.checks)


def test_hours_are_hours_and_minutes():
    assert [teaching.hours(minutes) for minutes in (0, 5, 60, 135)] == ["0:00", "0:05", "1:00", "2:15"]
