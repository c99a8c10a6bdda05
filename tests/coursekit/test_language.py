"""Messages of the course in the language of the notebook: English is the key, fields are the same."""

import ast
import string

import pytest
from checkout import ROOT

from coursekit import language, lesson
from coursekit.vllm_today import POINTS, SETTINGS


def fields(text):
    return sorted(name for _, name, _, _ in string.Formatter().parse(text) if name)


@pytest.mark.parametrize(("english", "chinese"), language.messages("zh").items())
def test_a_message_has_the_same_fields_in_both_languages(english, chinese):
    assert fields(english) == fields(chinese)


@pytest.mark.parametrize(("folder", "wanted"), [("notebooks", "en"), ("zh", "zh"), ("zh/extra", "zh")])
def test_the_folder_of_the_notebook_chooses(tmp_path, monkeypatch, folder, wanted):
    (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / folder)
    assert language.of_notebook() == wanted


def test_a_message_without_translation_is_english():
    assert language.said("{n} of what nobody translated", "zh", n=3) == "3 of what nobody translated"


def test_guesses_are_answered_in_chinese(tmp_path, monkeypatch):
    (tmp_path / "zh").mkdir()
    monkeypatch.chdir(tmp_path / "zh")
    answers = []
    monkeypatch.setattr(lesson, "say", answers.append)
    for guess in (None, 64, 5, 128, 32, 0):
        lesson.compare(guess, 64, "个请求", {5: "那是整段的数目"})
    assert answers[0] == "答案是 **64 个请求**。你没有写下预测。"
    assert answers[2].endswith("你的预测是 5：那是整段的数目。")
    assert not any(word in " ".join(answers) for word in ("guess", "It is"))


def test_every_message_that_a_lesson_says_has_a_translation():
    tree = ast.parse((ROOT / "coursekit" / "lesson.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    texts = [
        call.args[0].value
        for call in calls
        if getattr(call.func, "id", "") == "said" and isinstance(call.args[0], ast.Constant)
    ]
    assert len(texts) >= 5
    assert [text for text in texts if text not in language.messages("zh")] == []


def test_what_lesson_14_says_of_vllm_has_a_translation():
    rows = [(point.subject, point.paper, point.vllm, point.minipaged) for point in POINTS]
    texts = {text for row in rows for text in row} | {setting.subject for setting in SETTINGS}
    assert texts - set(language.messages("zh")) == set()
