"""docs/scaling.md: its tables are those that the code computes."""

import pytest
import torch
from checkout import ROOT

from coursekit.publish import scaling
from minipaged.jobs.lines import MAX_LINE_BYTES
from minipaged.memory import KVSpec

TEXT = (ROOT / "docs/scaling.md").read_text()


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_the_tables_are_computed():
    assert scaling.with_tables(TEXT) == TEXT, "run: python -m coursekit.publish.scaling"


def test_a_table_that_differs_is_noticed():
    assert scaling.with_tables(TEXT.replace("| 16 |", "| 17 |")) == TEXT
    with pytest.raises(ValueError, match="computed: cards"):
        scaling.with_tables(TEXT.replace("<!-- computed: cards -->", ""))


def test_heads_are_split_until_there_is_one_on_each_card():
    spec = KVSpec(num_layers=6, num_kv_heads=4, head_size=16, dtype=torch.float16)
    heads = [scaling.tensor_parallel(spec, cards).num_kv_heads for cards in (1, 2, 4, 8)]
    layers = [scaling.pipeline_parallel(spec, cards).num_layers for cards in (1, 2, 4, 8)]
    assert (heads, layers) == ([4, 2, 1, 1], [6, 3, 2, 1])


def test_a_model_larger_than_the_card_serves_nobody():
    assert scaling.requests_that_fit(scaling.SPEC, 1) == 0
    assert scaling.requests_that_fit(scaling.tensor_parallel(scaling.SPEC, 4), 4) > 0


def test_limits_in_the_text_are_those_of_the_code():
    assert f"longer than {MAX_LINE_BYTES >> 20} MiB" in TEXT
