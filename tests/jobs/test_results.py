"""The file of results: whole lines only, whatever ended the process that wrote them."""

import json

import pytest

from minipaged.jobs.results import ResultFile


def result(line: int, **more):
    return {"line": line, "id": f"é{line}", "key": f"k{line}", **(more or {"outputs": []})}


def written(path, *lines: int) -> bytes:
    with ResultFile(path) as results:
        results.append([result(line) for line in lines])
    return path.read_bytes()


def test_what_was_appended_is_done_when_the_file_is_opened_again(tmp_path):
    path = tmp_path / "out"
    written(path, 2, 1)
    with ResultFile(path) as results:
        assert results.done == {2: "k2", 1: "k1"}
        results.append([result(3, error="no")])
    with ResultFile(path) as results:
        assert results.done == {2: "k2", 1: "k1", 3: "k3"}
        assert results.num_errors == 1


def test_cut_anywhere_the_file_keeps_its_whole_lines(tmp_path):
    path = tmp_path / "out"
    whole = written(path, 1, 2, 3)
    for size in [0, *range(len(b'{"line": 1, "id": '), len(whole))]:
        path.write_bytes(whole[:size])
        with ResultFile(path) as results:
            kept = len(results.done)
            assert kept == whole[:size].count(b"\n")
            assert results.append([result(n) for n in range(kept + 1, 4)]) == 3 - kept
        assert path.read_bytes() == whole


def test_a_line_is_written_once_whoever_brings_it_again(tmp_path):
    path = tmp_path / "out"
    with ResultFile(path) as results:
        assert results.append([result(1), result(2), result(1)]) == 2
        assert results.append([result(2), result(3)]) == 1
    assert [json.loads(line)["line"] for line in path.read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize(
    "content",
    [
        b"a shopping list\n",
        b"without a newline",
        b"{",  # as a result begins, and as much else does
        b'{"line": ',
        b'{"line": 5 apples and a diary without newline',
        b'{"line": 1, "key": "k"}\n{"line": 5 apples',
        b'{"id": "a", "prompt": "x"}\n',
        b'{"line": "1", "key": "k"}\n',
        b'{"line": 1}\n',
        b"[]\n",
        b'{"line": 1, "key": "k"}\n\x00\x00\n',
    ],
)
def test_a_file_that_is_not_ours_is_left_alone(tmp_path, content):
    path = tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"line \d is no result: is it another file\?"):
        ResultFile(path)
    assert path.read_bytes() == content


def test_a_line_that_was_answered_twice_is_noticed(tmp_path):
    path = tmp_path / "out"
    path.write_bytes(2 * written(path, 1))
    with pytest.raises(ValueError, match=r"line 2 answers line 1 of the input a second time"):
        ResultFile(path)


def test_two_jobs_do_not_write_to_one_file(tmp_path):
    path = tmp_path / "out"
    with ResultFile(path), pytest.raises(ValueError, match="another job is writing to it"):
        ResultFile(path)
    with ResultFile(path):
        pass


def test_a_folder_is_no_place_for_results(tmp_path):
    with pytest.raises(ValueError, match="is no plain file"):
        ResultFile(tmp_path)


def test_nothing_is_cut_off_before_there_is_something_to_write(tmp_path):
    path = tmp_path / "out"
    content = written(path, 1) + b'{"line": 2, "id": "b'
    path.write_bytes(content)
    with ResultFile(path) as results:
        results.append([])
    assert path.read_bytes() == content


def test_an_error_may_be_followed_by_an_answer(tmp_path):
    path = tmp_path / "out"
    with ResultFile(path) as results:
        results.append([result(1, error="no"), result(2)])
        results.forget(1)
        assert results.append([result(1), result(2)]) == 1
    with ResultFile(path) as results:
        assert results.done == {1: "k1", 2: "k2"}
        assert results.num_errors == 0
