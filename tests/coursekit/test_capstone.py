"""Answers are loaded once they pass, and the engine that joins them says what the course's engine says."""

import shutil
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
import torch
from checkout import ROOT

from coursekit import capstone
from coursekit.capstone import Runner, load_answers, most_held, serve
from coursekit.given import parts
from coursekit.grading.grade import grade_answer
from coursekit.grading.tasks import TASKS
from coursekit.publish.exercise_build import handed_out_notebook, solved_notebook
from minipaged import LLM, SamplingParams
from minipaged.checkpoints.loading import LoadedModel
from minipaged.model.tiny import TINY, random_llama
from tests.exercises.proof import answers

PROMPTS = [list(range(5, 16)), [*range(5, 14), 3], [9, 10]]
NEW_TOKENS = 8
BLOCK_SIZE = 4
LOADED = ("04", "07", "10", "11")


def tiny():
    return LoadedModel(random_llama(), None, TINY, "tiny")


def serve_prompts(num_blocks, *, attend=None):
    """The answers, and the blocks of each step, of the solution with the parts that its check has."""
    space = dict(vars(parts))
    exec(answers()["engine_step"], space)
    exec(answers()["engine_batch"], space)
    engine = space["MyEngine"](num_blocks, BLOCK_SIZE, 3)
    for number, prompt in enumerate(PROMPTS):
        engine.add(str(number), prompt, NEW_TOKENS)
    runner = Runner(tiny(), num_blocks, BLOCK_SIZE, attend)
    steps = serve(engine, runner, space["my_batch"])
    assert engine.cache.num_free == num_blocks
    said = [engine.tokens[str(number)][len(prompt) :] for number, prompt in enumerate(PROMPTS)]
    return said, steps, runner


def engine_says():
    llm = LLM(tiny(), num_blocks=16, block_size=BLOCK_SIZE, device="cpu", max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    given = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [list(out.outputs[0].token_ids) for out in llm.generate(given, params, use_tqdm=False)]


@pytest.mark.parametrize("num_blocks", [16, 6])
def test_the_solution_says_what_the_engine_says(num_blocks):
    said, steps, _ = serve_prompts(num_blocks)
    assert said == engine_says()
    assert most_held(steps) <= num_blocks
    gave_way = any("1" in before and "1" not in after for before, after in pairwise(steps[:-1]))
    assert gave_way == (num_blocks == 6)


def test_a_kernel_gets_every_row_of_every_layer():
    rows = []

    def attend(query, key_cache, value_cache, block_tables, context_lens, scale):
        rows.append(len(query))
        assert block_tables.dtype == context_lens.dtype == torch.int32
        answer = torch.empty_like(query)
        for row, (q, table, length) in enumerate(zip(query, block_tables, context_lens, strict=True)):
            k, v = (cache[table.long()].flatten(0, 1)[:length] for cache in (key_cache, value_cache))
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            weights = torch.softmax(torch.einsum("hd,nhd->hn", q, k) * scale, dim=1)
            answer[row] = torch.einsum("hn,nhd->hd", weights, v)
        return answer

    said, steps, runner = serve_prompts(16, attend=attend)
    assert said == engine_says()
    assert runner.num_calls == len(rows) == len(steps) * TINY.num_layers
    assert rows[0] == sum(map(len, PROMPTS))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (([5], [0], [0], [[7]], [1]), "block 7 is named, the memory has 0 to 3"),
        (([5], [0], [16], [[0]], [1]), "block 4 is named, the memory has 0 to 3"),
        (([5], [0], [-1], [[0]], [1]), "slot -1: the memory has 0 to 15"),
        (([5], [0], [0], [[-(2**20)]], [1]), "block -1048576"),
        (([999], [0], [0], [[0]], [1]), "token 999: the model knows 0 to 319"),
        (([5], [4], [4], [[0]], [5]), "max_context_len is 5, the block tables hold 4"),
    ],
)
def test_rows_that_lead_out_of_the_memory_are_refused(rows, message):
    runner = Runner(tiny(), 4, BLOCK_SIZE)
    with pytest.raises(ValueError, match=message):
        runner.hidden(rows)


def test_an_engine_that_plans_nothing_is_not_waited_for():
    class Idle:
        class scheduler:
            running, waiting = (), ("a",)

        def schedule(self):
            return []

    with pytest.raises(RuntimeError, match=r"nothing is computed, and \['a'\] wait"):
        serve(Idle(), Runner(tiny(), 4, BLOCK_SIZE), None)


@pytest.mark.parametrize("task", parts.TASKS)
def test_the_parts_that_a_check_brings_pass_their_own_checks(task):
    result = grade_answer(TASKS[task], {task: Path(parts.__file__).read_text()})
    assert result.passed, result.text()


@pytest.fixture
def folder(tmp_path):
    """An exercises folder with the notebooks 04, 10 and 11 solved, and 07 as it was handed out."""
    for number in LOADED:
        (source,) = (ROOT / "solutions" / "src").glob(f"{number}_*.py")
        make = handed_out_notebook if number == "07" else solved_notebook
        target = tmp_path / "exercises" / source.stem / f"{source.stem}.ipynb"
        target.parent.mkdir(parents=True)
        nbformat.write(make(source), target)
    return tmp_path / "exercises"


def test_answers_that_pass_are_loaded_and_the_others_named(folder, capsys):
    pytest.importorskip("triton")
    mine = load_answers(folder)
    table = mine.MyBlockTable(mine.MyPrefixCache(4), 2)
    assert table.append(3) and len(table.blocks) == 2
    assert len(mine.my_block_hashes([1, 2, 3], 2)) == 1
    assert mine.MyScheduler(4, 2, 1).step() == []
    with pytest.raises(NotImplementedError, match="do exercise 07 first"):
        mine.my_decode_kernel()
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "04  A block table and its slots: yours, passed"
    assert said[1].endswith('not done yet; do exercise 07 first, or load_answers("..", ours=["07"])')


def test_an_answer_that_does_not_pass_is_not_loaded(folder, capsys):
    (path,) = folder.glob("11_*/*.ipynb")
    path.write_text(
        path.read_text().replace("self.waiting.insert(0, youngest)", "self.waiting.append(youngest)")
    )
    mine = load_answers(folder)
    with pytest.raises(NotImplementedError, match="do exercise 11 first"):
        mine.MyScheduler(4, 2, 1)
    assert "does not pass (when a block is missing, the youngest gives way" in capsys.readouterr().out


def test_the_courses_own_solution_is_taken_only_when_asked_for(folder, capsys, monkeypatch):
    pytest.importorskip("triton")
    shutil.rmtree(next(folder.glob("04_*")))
    mine = load_answers(folder, ours=["4", "07"])
    assert mine.MyBlockTable(mine.MyPrefixCache(4), 2).append(3)
    said = capsys.readouterr().out.splitlines()
    assert [line.rpartition(": ")[2] for line in said] == ["the course's own"] * 2 + ["yours, passed"] * 3
    load_answers(folder)
    assert "04  A block table and its slots: no notebook 04_… in" in capsys.readouterr().out
    monkeypatch.setattr(capstone, "COURSE", folder / "coursekit")  # an installation without solutions
    mine = load_answers(folder, ours=["04", "07"])
    assert mine.MyBlockTable(mine.MyPrefixCache(4), 2).append(3)
    assert "07  Attention through the block table, in one pass: the folder solutions is not here" in (
        capsys.readouterr().out
    )
    with pytest.raises(ValueError, match=r"ours names \['05'\]; exercises 04, 07, 10 and 11"):
        load_answers(folder, ours=["05"])
