"""The comparison of two policies: one budget, every byte accounted for, the same tokens."""

import pytest
import torch

from coursekit.comparison import Run, equal_outputs, serve
from coursekit.workloads import Request
from minipaged.checkpoints.loading import LoadedModel
from minipaged.model.tiny import TINY, random_llama

MAX_MODEL_LEN = 32
REQUESTS = [Request(f"r{i}", [i + 1] * (3 + 5 * (i % 3)), max_tokens=2 + 3 * (i % 4)) for i in range(10)]
BYTES_PER_TOKEN = 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_size * 4  # float32
BUDGET = 3 * MAX_MODEL_LEN * BYTES_PER_TOKEN + 100  # three strips, and 100 bytes that fit nothing


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel(random_llama(seed=0, dtype=torch.float32), tokenizer=None, config=TINY, name="tiny")


@pytest.fixture(scope="module")
def runs(model: LoadedModel) -> list[Run]:
    return [
        serve(
            name,
            model,
            REQUESTS,
            block_size=block_size,
            kv_memory=BUDGET,
            max_model_len=MAX_MODEL_LEN,
            use_tqdm=False,
        )
        for name, block_size in (("strips", MAX_MODEL_LEN), ("blocks", 4))
    ]


def test_every_byte_of_the_budget_is_accounted_for(runs):
    for run in runs:
        assert sum(run.figures()["shares"].values()) == pytest.approx(1)
        assert run.waste.budget == BUDGET * len(run.samples)
        assert all(0 <= sample.used_bytes <= sample.reserved_bytes <= BUDGET for sample in run.samples)


def test_waste_agrees_with_the_engines_own_trace(runs):
    for run in runs:
        assert run.waste.used == sum(sample.used_bytes for sample in run.samples)
        empty = run.waste.to_come + run.waste.never
        assert empty == sum(sample.reserved_bytes - sample.used_bytes for sample in run.samples)


def test_strips_run_as_many_requests_as_there_are_strips_and_blocks_run_more(runs):
    strips, blocks = (run.figures() for run in runs)
    assert strips["blocks"] == strips["running_peak"] == 3
    assert blocks["running_peak"] > strips["running_peak"]
    assert blocks["share_of_taken"] > strips["share_of_taken"]
    assert blocks["steps"] < strips["steps"]


def test_both_policies_give_the_same_tokens_and_exact_lengths(runs):
    assert equal_outputs(*runs) == len(REQUESTS)
    for run in runs:
        lengths = [len(output.outputs[0].token_ids) for output in run.outputs]
        assert lengths == [request.max_tokens for request in REQUESTS]


def test_a_request_that_can_never_fit_is_refused_with_both_numbers(model):
    too_long = Request("long", [1] * (MAX_MODEL_LEN + 1), max_tokens=1)
    with pytest.raises(ValueError, match=r"33.*32"):
        serve(
            "blocks",
            model,
            [too_long],
            block_size=4,
            kv_memory=BUDGET,
            max_model_len=MAX_MODEL_LEN,
            use_tqdm=False,
        )


def test_the_share_of_other_programs_is_a_share(runs):
    assert all(0 <= run.foreign_share <= 1 for run in runs)
    assert all(run.figures()["foreign_share"] == run.foreign_share for run in runs)
