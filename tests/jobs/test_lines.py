"""Whatever a line of the input holds: it is a task or an error of its own, and the next one is read."""

import json

import pytest

from minipaged.jobs import lines
from minipaged.jobs.lines import BadLine, Task, read_tasks, require_text

SETTINGS = {"sampling": {"max_tokens": 4, "temperature": 0.0}, "seed": 0}
GOOD = b'{"id": "good", "prompt": "x"}'


def read(tmp_path, content: bytes, settings=SETTINGS) -> list[Task | BadLine]:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    return list(read_tasks(path, settings))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{not json", "not JSON"),
        (b'{"id": "a", "prompt": "x"', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"id": "a", "prompt": "x", "seed": ' + b"1" * 5000 + b"}", "not JSON"),
        (b'{"id": "a", "prompt": "\xff"}', "not UTF-8: byte 0xff at 23"),
        ('{"id": "a", "prompt": "x"}'.encode("utf-16"), "not UTF-8"),
        (b'["a", "x"]', "a line is a JSON object, this is list"),
        (b'{"prompt": "x"}', "'id' is text or a whole number, got None"),
        (b'{"id": 1.5, "prompt": "x"}', "got 1.5"),
        (b'{"id": true, "prompt": "x"}', "got True"),
        (b'{"id": "\\ud800", "prompt": "x"}', "not valid Unicode"),
        (b'{"id": "a", "id": "b", "prompt": "x"}', "the key 'id' is given 2 times"),
        (b'{"id": "a"}', "exactly one of prompt, messages, prompt_token_ids is needed, got none"),
        (b'{"id": "a", "prompt": "x", "prompt_token_ids": [1]}', "got ['prompt', 'prompt_token_ids']"),
        (b'{"id": "a", "prompt": "x", "max_token": 3}', "no key 'max_token'; did you mean 'max_tokens'?"),
        (b'{"id": "a", "prompt": "x", "logprobs": 3}', "there is no key 'logprobs'; known are cache_salt,"),
        (b'{"id": "a", "prompt": "x", "top_p": 3}', "top_p must be in (0, 1], got 3"),
        (b'{"id": "a", "prompt": "x", "n": 2}', "n must be 1 with temperature 0"),
        (b'{"id": "a", "prompt": "x", "stop": [1]}', "stop must hold non-empty strings"),
        (b'{"id": "good", "prompt": "x"}', 'id "good" is taken: line 1 has it'),
    ],
)
def test_a_bad_line_is_an_error_of_its_own(tmp_path, line, says):
    first, bad, last = read(tmp_path, GOOD + b"\n" + line + b"\n" + GOOD.replace(b"good", b"next"))
    assert isinstance(first, Task) and isinstance(last, Task) and isinstance(bad, BadLine)
    assert says in bad.error
    assert (bad.line, last.line) == (2, 3)


@pytest.mark.parametrize(
    "rest", ['"prompt": "x", "max_token": 3', '"prompt": "x", "top_p": 3', '"text": "x"']
)
def test_a_bad_line_keeps_its_id(tmp_path, rest):
    (bad,) = read(tmp_path, b'{"id": "c", ' + rest.encode() + b"}")
    assert isinstance(bad, BadLine) and bad.id == "c"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\x1f\x8b\x08rest", "is packed with gzip: unpack it first"),
        (b"\x89PNG\r\n\x1a\n\0\0", "is no UTF-8 text: byte 8 is 0"),
        (GOOD.decode().encode("utf-16-le"), "is no UTF-8 text: byte 1 is 0"),
    ],
)
def test_a_file_that_is_no_text_is_refused_once(tmp_path, content, says):
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=says):
        require_text(path)


def test_an_id_that_is_taken_is_not_given_to_the_second_line(tmp_path):
    _, second = read(tmp_path, GOOD + b"\n" + GOOD)
    assert second.id is None


def test_a_number_and_its_text_are_two_ids(tmp_path):
    found = read(tmp_path, b'{"id": 1, "prompt": "x"}\n{"id": "1", "prompt": "x"}')
    assert [task.id for task in found] == [1, "1"]


@pytest.mark.parametrize(
    "content",
    [
        GOOD,
        GOOD + b"\n",
        GOOD + b"\r\n",
        b"\xef\xbb\xbf" + GOOD + b"\n",
        GOOD + b"\n\n \t\r\n",
        b"\xef\xbb\xbf" + GOOD,
    ],
)
def test_ends_of_lines_blank_lines_and_a_mark_at_the_start_are_no_content(tmp_path, content):
    (task,) = read(tmp_path, content)
    (plain,) = read(tmp_path, GOOD)
    assert task == plain


def test_blank_lines_count_in_the_numbers(tmp_path):
    assert [task.line for task in read(tmp_path, b"\n\n" + GOOD)] == [3]


@pytest.mark.parametrize("content", [b"", b"\n", b"\xef\xbb\xbf", b"\r\n \n"])
def test_a_file_without_lines_has_no_tasks(tmp_path, content):
    assert read(tmp_path, content) == []


def test_only_a_newline_ends_a_line(tmp_path):
    (task,) = read(tmp_path, '{"id": "a", "prompt": "one\u2028two\x85three"}\n'.encode())
    assert task.prompt == {"prompt": "one\u2028two\x85three"}


@pytest.mark.parametrize("size", [49, 50, 51, 99, 100, 101, 102, 151, 153])
def test_a_line_that_is_too_long_is_skipped_whole(tmp_path, monkeypatch, size):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 50)
    start, end = b'{"id": "long", "prompt": "', b'"}'
    long = start + b"x" * (size - len(start) - len(end)) + end
    assert len(long) == size
    first, last = read(tmp_path, long + b"\n" + GOOD)
    assert isinstance(first, Task) == (size < 50)  # the newline counts too
    assert isinstance(first, Task) or "longer than 50 bytes" in first.error
    assert isinstance(last, Task) and last.line == 2


def test_a_line_s_own_settings_come_before_those_of_the_job(tmp_path):
    own, default = read(
        tmp_path,
        b'{"id": 1, "prompt": "x", "max_tokens": 7, "seed": 3}\n{"id": 2, "prompt": "x"}',
    )
    assert (own.sampling["max_tokens"], own.sampling["seed"]) == (7, 3)
    assert default.sampling["max_tokens"] == 4


def test_seeds_come_from_the_id_and_the_job_not_from_the_place(tmp_path):
    line = b'{"id": "%s", "prompt": "x", "temperature": 1, "seed": null}\n'
    a, b = read(tmp_path, line % b"a" + line % b"b")
    b_again, a_again = read(tmp_path, line % b"b" + line % b"a")
    (other,) = read(tmp_path, line % b"a", SETTINGS | {"seed": 1})
    assert a.sampling["seed"] == a_again.sampling["seed"]
    assert b.sampling["seed"] == b_again.sampling["seed"]
    assert len({a.sampling["seed"], b.sampling["seed"], other.sampling["seed"]}) == 3


def test_equal_keys_mean_the_same_text_under_the_same_settings(tmp_path):
    (task,) = read(tmp_path, GOOD)
    (again,) = read(tmp_path, GOOD + b"\r\n")
    (edited,) = read(tmp_path, GOOD.replace(b'"x"', b'"y"'))
    (other,) = read(tmp_path, GOOD, SETTINGS | {"engine": "another"})
    assert task.key == again.key
    assert len({task.key, edited.key, other.key}) == 3


def test_a_task_survives_the_journey_to_another_process(tmp_path):
    (task,) = read(
        tmp_path, b'{"id": "\xc3\xa9", "prompt_token_ids": [1, 2], "stop": ["a"], "cache_salt": "s"}'
    )
    assert task.prompt == {"prompt_token_ids": [1, 2], "cache_salt": "s"}
    assert Task(**json.loads(json.dumps(vars(task)))) == task
