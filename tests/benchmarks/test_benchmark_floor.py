"""The least time of a mix: its steps, what one must read and multiply, and which of the two takes longer."""

import pytest
import torch

from benchmarks.floor import ModelCost, Rates, best_seconds, floor_of, least_steps
from benchmarks.mixes import mix_of, named_mix, spread_lengths
from minipaged.config import ModelConfig
from minipaged.model.tiny import TINY, random_llama

COST = ModelCost(body_params=1000, head_params=200, bytes_per_param=2)


def test_steps_take_all_prompts_first_and_then_a_token_of_everyone_who_is_not_done():
    steps = list(least_steps(mix_of([3, 5], [4, 2]), max_tokens=100))
    assert steps == [(8, 2), (2, 2), (1, 1), (1, 1)]


def test_a_step_takes_no_more_prompt_tokens_than_it_may_and_samples_only_prompts_that_end():
    steps = list(least_steps(mix_of([10, 2], [1, 1]), max_tokens=4))
    assert steps == [(4, 0), (4, 0), (4, 2)]
    assert list(least_steps(mix_of([4], [1]), max_tokens=4)) == [(4, 1)]


@pytest.mark.parametrize("name", ["chat48", "instruct64", "alone"])
def test_steps_compute_every_prompt_token_once_and_sample_every_output_token(name: str):
    mix = named_mix(name)
    steps = list(least_steps(mix))
    prompt, output = (sum(lengths) for lengths in zip(*lengths_of(mix), strict=True))
    assert sum(sampled for _, sampled in steps) == output
    assert sum(tokens for tokens, _ in steps) == prompt + output - len(mix)  # the last token is never read


def lengths_of(mix: list[dict]) -> list[tuple[int, int]]:
    return [(len(request["prompt_token_ids"]), request["max_tokens"]) for request in mix]


def test_weights_are_counted_as_the_model_has_them():
    untied = ModelConfig(**{**TINY.__dict__, "tie_word_embeddings": False})
    cost = ModelCost.from_config(untied, torch.float32)
    model = random_llama(untied)
    matrices = [p.numel() for p in model.layers.parameters() if p.dim() == 2]
    assert cost.body_params == sum(matrices)
    assert cost.head_params == model.lm_head.weight.numel()
    assert cost.weight_bytes == 4 * (cost.body_params + cost.head_params)


def test_floor_reads_all_weights_in_each_step_and_multiplies_each_row():
    rates = Rates(bandwidth=2400.0, operations=2000.0)  # reading all weights takes a second
    assert COST.step_seconds(3, 1, rates) == (1.0, (2 * 3 * 1000 + 2 * 200) / 2000)
    floor = floor_of(mix_of([3], [2]), COST, rates)  # steps (3, 1) and (1, 1): 3.2 and 1.2 s of multiplying
    assert floor.floor == pytest.approx(2 / (2 * 1.0 + 3.2 + 1.2))
    assert floor.overlapped == pytest.approx(2 / (3.2 + 1.2))


def test_of_two_measurements_the_better_rates_count():
    assert Rates(2.0, 5.0).best_with(Rates(3.0, 4.0)) == Rates(3.0, 5.0)


def test_at_the_bend_reading_and_multiplying_take_as_long():
    rates = Rates(bandwidth=100.0, operations=7000.0)
    rows = COST.rows_at_the_bend(rates)
    reading, multiplying = COST.step_seconds(1, 1, rates)
    assert rows * multiplying == pytest.approx(reading)


def test_best_of_several_rounds_leaves_the_first_call_out():
    calls = []
    best_seconds(lambda: calls.append(1))
    assert len(calls) > 2


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.5])
def test_lengths_of_any_spread_have_the_same_sum(spread: float):
    lengths = spread_lengths(count=32, mean=40, spread=spread)
    assert sum(lengths) == 32 * 40 and min(lengths) >= 1
    assert (max(lengths) == 40) == (spread == 0)


def test_a_mix_is_the_same_each_time_and_unknown_names_are_refused():
    assert named_mix("alone") == named_mix("alone")
    assert lengths_of(named_mix("alone")) == [(128, 128)]
    with pytest.raises(ValueError, match="'chat49'"):
        named_mix("chat49")
