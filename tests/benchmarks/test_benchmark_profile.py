"""The profile page says what the recorded file holds, and the parts of a step add up."""

import pytest
import torch

from benchmarks import profile_step, records
from benchmarks.profile_step import BEGIN, END, PARTS, ROWS, VARIANTS, measure, render_all, write_page
from minipaged.attention.torch_backend import TorchBackend
from minipaged.config import CacheConfig, EngineConfig
from minipaged.engine.engine import Engine
from minipaged.model.tiny import random_llama


def test_the_page_is_what_the_recorded_files_render_to():
    text = profile_step.PAGE.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert text.partition(BEGIN)[2].partition(END)[0].strip() == render_all()


@pytest.mark.parametrize("folder", records.recorded_folders(), ids=lambda folder: folder.name)
def test_what_is_recorded_is_whole_and_from_a_quiet_machine(folder):
    recorded = records.read("profile", folder)
    if recorded is None:
        pytest.skip("no profile of this machine is recorded")
    assert list(recorded["rows"]) == [str(count) for count in ROWS]
    for turns in recorded["rows"].values():
        assert list(turns) == list(VARIANTS)
        for turn in turns.values():
            assert sum(turn["shares"].values()) == pytest.approx(1)
            assert turn["foreign_share"] <= recorded["foreign_limit"]


def test_shares_of_all_parts_add_up_and_the_requests_are_gone_afterwards():
    cache = CacheConfig(num_blocks=64, dtype=torch.float32)
    engine = Engine(random_llama(), cache, EngineConfig(max_model_len=512), backend=TorchBackend())
    turn = measure(engine, 2)
    assert set(turn["shares"]) == set(PARTS)
    assert sum(turn["shares"].values()) == pytest.approx(1)
    assert all(share > 0 for share in turn["shares"].values())
    assert turn["seconds"] > 0
    assert not engine.has_unfinished_requests()
    assert "forward" not in vars(engine.runner.model)  # the clocks are off again


def test_only_the_marked_block_of_a_page_changes(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"head\n{BEGIN}\nold\n{END}\ntail\n")
    write_page("new", page)
    assert page.read_text() == f"head\n{BEGIN}\nnew\n{END}\ntail\n"
