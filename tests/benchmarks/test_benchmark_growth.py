"""Curves, scaling and prefix sharing without clocks: mixes, fits, tables, block counts, and the README."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import curves, figures, prefix_sharing, readme, records, scaling
from benchmarks.floor import ModelCost, Rates
from minipaged import LLM
from minipaged.cache import BlockPool
from minipaged.checkpoints.loading import LoadedModel
from minipaged.memory import KVSpec
from minipaged.model.tiny import TINY, random_llama
from tests.benchmarks.test_benchmark_scheduler import scheduler_result


def tiny_llm(**settings: Any) -> LLM:
    model = random_llama()
    return LLM(LoadedModel(model, None, TINY, "tiny"), max_model_len=64, **settings)


def test_a_line_is_found_again_and_the_residual_is_its_distance():
    exact = scaling.fit_line([1, 2, 4], [5, 7, 11])
    assert (exact["a"], exact["b"]) == pytest.approx((3, 2)) and exact["residual"] == pytest.approx(
        0, abs=1e-9
    )
    scattered = scaling.fit_line([0, 0, 1, 1], [1, -1, 1, -1])
    assert scattered["residual"] == pytest.approx(1)
    with pytest.raises(ValueError, match="two different x, there are 1"):
        scaling.fit_line([2, 2], [1, 3])


def test_tables_take_the_blocks_of_a_pool_in_turns():
    pool, tables = scaling.fill_tables([5, 2], block_size=2)
    assert isinstance(pool, BlockPool) and pool.num_free == 0
    assert [table.num_tokens for table in tables] == [5, 2]
    first, second = (table.blocks for table in tables)
    assert len(first) == 3 and first[1] - first[0] != 1 and not set(first) & set(second)


def test_memory_of_a_step_is_of_the_blocks_that_hold_its_tokens():
    runner = tiny_llm(num_blocks=4).engine.runner
    point = scaling.measure_step(runner, [9, 4], block_size=4)
    spec = KVSpec.from_model(TINY, torch.float32)
    assert point["entries"] == 4 and point["bytes"] == 4 * spec.bytes_per_block(4)
    assert point["seconds"] > 0


def line_series(step: float, memory: float, against: str = "x") -> dict[str, Any]:
    """A series that grows by `step` seconds and `memory` bytes for each x."""
    points = [{"x": x, "seconds": 1 + step * x, "bytes": memory * x, "entries": x} for x in (1, 2, 4)]
    fits = {
        "step": {"against": against, "a": 1.0, "b": step, "residual": 0.0},
        "memory": {"against": "x", "a": 0.0, "b": memory, "residual": 0.0},
    }
    return {"title": "t", "x_label": "x", "points": points, "fits": fits}


def scaling_result() -> dict[str, Any]:
    spec = KVSpec.from_model(TINY, torch.float32)
    cost, rates = ModelCost.from_config(TINY, torch.float32), Rates(bandwidth=1e9, operations=1e10)
    token = spec.bytes_per_token
    requests, _ = scaling.AT_LENGTHS
    series = {
        "requests": line_series(0.002, 100.0) | {"bend": cost.rows_at_the_bend(rates)},
        "context": line_series(2 * scaling.AT_REQUESTS * token / rates.bandwidth, 100.0),
        "block size": line_series(1e-6, requests * token / 2, "entries"),
    }
    return {"series": series, "reasons": scaling.explain(series, cost, spec, rates)}


def test_reasons_compare_each_fit_with_what_the_rates_allow():
    requests, context, size = scaling_result()["reasons"]
    assert "1000.0 ms + 2.000 ms for each" in requests and "It bends at 20 requests" in requests
    assert "0.50 of the bandwidth" in context
    assert "1000 ns for each entry" in size and "costs each request 0.50 slots" in size


def test_the_spread_is_told_as_steps_of_a_static_batch_for_each_token():
    assert curves.longest_over_mean([4] * 20) == 1
    assert curves.longest_over_mean([8] + [4] * 15 + [4] * 16) == pytest.approx((8 + 4) / (4.25 + 4))
    x = [x for x, _ in curves.static_mixes()]
    assert x == sorted(x) and x[0] == 1
    tokens = {sum(request["max_tokens"] for request in mix) for _, mix in curves.static_mixes()}
    assert len(tokens) == 1


def test_requests_times_context_is_what_the_mix_holds_halfway():
    for x, mix in curves.continuous_mixes():
        assert x == sum(len(r["prompt_token_ids"]) + r["max_tokens"] // 2 for r in mix)


class StandIn:
    """An engine that needs `seconds` for each token."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def sample(self, name: str, mix: list[dict]) -> dict[str, float]:
        tokens = sum(request["max_tokens"] for request in mix)
        return {"output_tokens": tokens, "seconds": tokens * self.seconds}


def curves_result() -> dict[str, Any]:
    ours, theirs = StandIn(0.25), StandIn(1.0)
    return {
        name: curves.measure(ours, theirs, mixes()[:2], repeat=2)
        for name, (_, mixes, _) in curves.CURVES.items()
    }


def test_a_curve_divides_our_rate_by_theirs_at_each_point():
    result = curves_result()
    assert [point["ratio"] for point in result["static"]] == [4.0, 4.0]
    assert curves.rows(result, "static")[1] == ["1", "4", "1", "4.00 ×"]


@pytest.fixture
def small_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six requests behind 32 tokens, with tokens that the tiny model knows."""
    monkeypatch.setattr(prefix_sharing, "REQUESTS", 6)
    monkeypatch.setattr(prefix_sharing, "SYSTEM_PROMPT", 32)
    monkeypatch.setattr(prefix_sharing, "QUESTION", 4)
    monkeypatch.setattr(prefix_sharing, "OUTPUT", 4)
    mix_of = prefix_sharing.mix_of

    def small(*lengths: list[int]) -> list[dict]:
        return [r | {"prompt_token_ids": [t % 250 for t in r["prompt_token_ids"]]} for r in mix_of(*lengths)]

    monkeypatch.setattr(prefix_sharing, "mix_of", small)


@pytest.mark.usefixtures("small_sharing")
def test_a_shared_prompt_is_there_once_new_or_known_and_an_unshared_one_for_every_request():
    engines = [tiny_llm(num_blocks=64, enable_prefix_caching=on) for on in (False, True)]
    runs = prefix_sharing.compare(*engines)
    assert runs["off"]["prompt_copies"] == 6 and runs["off"]["blocks"] == runs["off"]["entries"]
    for run in (runs["cold"], runs["warm"]):
        assert run["prompt_copies"] == 1
        assert run["entries"] - run["blocks"] == 5 * 32 // 16
    with pytest.raises(AssertionError, match="copies of the system prompt"):
        prefix_sharing.compare(engines[1], engines[0])


def sharing_runs() -> dict[str, dict[str, Any]]:
    counts = {"entries": 70, "blocks": 40, "prompt_copies": 1}
    times = {"off": (6.0, 9.0, 5.0), "cold": (2.0, 1.5, 3.0), "warm": (1.0, 0.5, 1.5)}
    samples = [
        {name: {"ttft": [mean[i]] * 2, "ttft_mean": mean[i], **counts} for name, mean in times.items()}
        for i in range(3)
    ]
    return prefix_sharing.summarise(samples)


def test_sharing_is_judged_by_the_median_of_the_runs():
    off, cold, warm = prefix_sharing.rows(sharing_runs())[1:]
    assert off[1:4] == ["6.00", "1.0 ×", "-"]
    assert cold[1:4] == ["2.00", "3.0 ×", "≥ 5, not met"] and warm[2:4] == ["6.0 ×", "≥ 5, met"]


@pytest.mark.parametrize(
    ("draw", "result", "gids"),
    [
        (figures.curves, curves_result, {"ratio:static", "ratio:continuous"}),
        (figures.scaling, scaling_result, {"bend", "points:step:context", "fit:memory:block size"}),
        (figures.prefix_sharing, lambda: {"runs": sharing_runs()}, {"ttft:off", "ttft:cold", "ttft:warm"}),
    ],
)
def test_pictures_carry_what_was_measured(draw: Any, result: Any, gids: set[str]):
    drawn = {artist.get_gid() for artist in draw(result()).findobj()}
    assert gids <= drawn


def test_every_page_shows_the_recorded_figures_and_nothing_else():
    pages = readme.pages()
    assert {path: path.read_text() for path in pages} == pages
    assert len(pages) == 1 + len(records.recorded_folders())


def test_recorded_figures_are_from_a_quiet_machine():
    for folder in records.recorded_folders():
        for name in readme.SECTIONS:
            result = records.read(name, folder)
            assert result is None or result["foreign_limit"] <= 0.1


def test_every_recorded_result_becomes_a_section(tmp_path: Path):
    about = {
        "date": "2026-11-29T00:00:00",
        "machine": {"processor": "Some CPU", "cores": 2, "versions": {"torch": "2.13.0"}},
        "threads": 2,
        "dtype": "bfloat16",
    }
    results = {
        "curves": curves_result(),
        "scaling": scaling_result(),
        "prefix_sharing": {"runs": sharing_runs()},
        "scheduler": scheduler_result(),
    }
    for name, result in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(about | result))
    text = readme.render(tmp_path)
    assert text.count("Some CPU") == 4 and text.count(readme.NOT_RECORDED) == 1
    assert "| warm | 1.00 | 6.0 × | ≥ 5, met |" in text and "- context: " in text
    with pytest.raises(ValueError, match="markers"):
        readme.replace_block("no markers", text)
