"""The memory of two policies as text: every cell of the pool is drawn, and what it says is so."""

import io

import pytest
import torch
from rich.console import Console

from coursekit.live import GROUP, LEGEND, draw_cells, in_rows, race
from coursekit.workloads import Request
from minipaged.checkpoints.loading import LoadedModel
from minipaged.model.tiny import TINY, random_llama

REQUESTS = [Request(f"r{i}", [i + 1] * (3 + 5 * (i % 3)), max_tokens=20 + i) for i in range(8)]
MAX_MODEL_LEN = 64
BYTES_PER_TOKEN = 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_size * 4  # float32


def test_a_strip_shows_what_it_reserves_and_what_it_holds():
    assert draw_cells(2, 64, [([1], 17)]) == "····" + "██░░"


def test_blocks_are_drawn_where_they_lie():
    assert draw_cells(6, 16, [([4, 0], 17), ([2], 16)]) == "█·█·█·"


def test_a_block_of_which_no_slot_is_filled_is_reserved():
    assert draw_cells(3, 16, [([0, 1], 16)]) == "█░·"


def test_rows_keep_every_cell():
    cells = "█" * (2 * GROUP + 5)
    rows = in_rows(cells)
    assert len(rows) == 2
    assert "".join(rows).replace(" ", "") == cells


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel(random_llama(seed=0, dtype=torch.float32), tokenizer=None, config=TINY, name="tiny")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_both_policies_serve_everything_and_the_fullest_step_stays(model, is_terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=100, color_system=None)
    views = race(
        model,
        REQUESTS,
        {"strips": MAX_MODEL_LEN, "blocks": 16},
        kv_memory=2 * MAX_MODEL_LEN * BYTES_PER_TOKEN,
        max_model_len=MAX_MODEL_LEN,
        console=console,
    )
    strips, blocks = views
    assert strips.peak == 2 < blocks.peak
    assert not any(view.engine.has_unfinished_requests() for view in views)
    shown = out.getvalue()
    assert f"strips: up to 2 requests at once, done after {strips.steps} steps" in shown
    assert f"blocks: up to {blocks.peak} requests at once, done after {blocks.steps} steps" in shown
    assert LEGEND in shown
    assert ("(step 1)" in shown) == is_terminal  # elsewhere the last picture alone, with no control codes
    assert ("\x1b" in shown) == is_terminal
