"""What a step costs beside the model, without clocks: parts, tables, verdicts and the picture."""

from typing import Any

import pytest

from benchmarks import figures, readme, scheduler
from minipaged import LLM
from minipaged.checkpoints.loading import LoadedModel
from minipaged.model.tiny import TINY, random_llama
from tests.engine.fake_tokenizers import ByteTokenizer

PARTS = {"planning", "tables", "sampling", "records", "new tokens", "text and outputs", "rest"}


def scheduler_result(many: float = 2.0, slow_pool: float = 3.0, streamed: float = 900.0) -> dict[str, Any]:
    """3 µs for each of 64 requests, `many` for each of 1024; 600 µs beside a model of 39.4 ms."""
    smollm2 = {
        kind: {"model_us": 39_400.0, "beside_us": beside, "share": beside / (beside + 39_400), "parts": parts}
        for kind, beside, parts in (
            ("at the end", 600.0, {"sampling": 300.0, "text and outputs": 1.0, "rest": 299.0}),
            ("streamed", streamed, {"sampling": 300.0, "text and outputs": 301.0, "rest": 299.0}),
        )
    }
    sizes = ((1, 70.0), (64, 3.0), (1024, many))
    idle = [{"running": n, "blocks": 100, "us_per_request": us, "parts": {"rest": us}} for n, us in sizes]
    pools = [idle[1], idle[1] | {"blocks": 10**6, "us_per_request": slow_pool}]
    return {"smollm2": smollm2, "idle": idle, "pools": pools}


def test_every_part_of_a_step_is_timed_and_the_requests_are_gone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scheduler, "STEPS", 4)
    llm = LLM(LoadedModel(random_llama(), ByteTokenizer(), TINY, "tiny"), num_blocks=40, max_model_len=128)
    for kind in scheduler.KINDS.values():
        found = scheduler.measure_beside(llm, kind, num_running=3)
        assert set(found["parts"]) == PARTS
        assert all(micros > 0 for micros in (found["model_us"], *found["parts"].values()))
        assert found["share"] == found["beside_us"] / (found["beside_us"] + found["model_us"])
        assert not llm.engine.has_unfinished_requests()
    assert "forward" not in vars(llm.engine.runner.model)  # the clocks are off again


def test_an_idle_model_leaves_only_what_is_beside_it():
    found = scheduler.measure_idle(num_running=4, num_blocks=200, steps=3)
    assert set(found["parts"]) == PARTS
    assert (found["running"], found["blocks"]) == (4, 200) and found["us_per_request"] > 0


def verdicts(**times: float) -> list[bool]:
    return [goal["met"] for goal in scheduler.judge(scheduler_result(**times))]


def test_each_goal_is_judged_by_its_own_figure():
    assert verdicts() == [True, False, True, True, True]
    assert verdicts(streamed=700.0)[1]
    assert verdicts(many=3.4) == [True, False, True, False, True]
    assert verdicts(slow_pool=3.4) == [True, False, True, True, False]


def test_tables_and_the_readme_say_what_was_measured():
    result = scheduler_result()
    assert scheduler.beside_rows(result)[1] == ["at the end", "39400", "600", "300", "1", "299"]
    assert scheduler.idle_rows(result)[1] == ["1", "100", "70.00", "70.00"]
    assert scheduler.goal_rows(result)[2][1:] == ["0.02", "0.0223", "not met"]
    assert "| share of a step at 64 requests, text at the end | 0.02 | 0.015 | met |" in (
        readme.render_scheduler(result)
    )


def test_the_picture_has_a_bar_for_each_part():
    drawn = {artist.get_gid() for artist in figures.beside_the_model(scheduler_result()).findobj()}
    assert {"part:streamed:text and outputs", "part:at the end:sampling"} <= drawn
