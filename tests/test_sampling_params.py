"""What may be asked of the sampler: ranges, values that mean off, lengths, and vLLM's defaults."""

import dataclasses
import math
import re

import pytest

from minipaged.engine.beam import beam_score
from minipaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

VLLM_DEFAULTS = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "output_kind": RequestOutputKind.CUMULATIVE,
}


def test_the_defaults_are_vllms():
    params = SamplingParams()
    assert {name: getattr(params, name) for name in VLLM_DEFAULTS} == VLLM_DEFAULTS
    assert {field.name for field in dataclasses.fields(params)} == {*VLLM_DEFAULTS, "stop", "stop_token_ids"}


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("n", 0, "at least 1|in .1, 16384"),
        ("n", 16385, "16384"),
        ("n", 1.5, "integer"),
        ("presence_penalty", 2.1, r"\[-2, 2\]"),
        ("frequency_penalty", -2.1, r"\[-2, 2\]"),
        *(("repetition_penalty", value, "must be in") for value in (0.0, 1e-40, 1e308, math.inf, -1.0)),
        ("temperature", -0.1, r"\[0, 2\]"),
        ("temperature", 2.5, r"\[0, 2\]"),
        ("top_p", -0.1, r"\(0, 1\]"),
        ("top_p", 1.5, r"\(0, 1\]"),
        ("top_k", -2, "at least -1"),
        ("top_k", 1.5, "integer"),
        ("min_p", 1.5, r"\[0, 1\]"),
        ("min_p", -0.5, r"\[0, 1\]"),
        ("seed", 2**64, "in"),
        ("seed", "7", "integer"),
        ("max_tokens", 0, "at least 1"),
        ("min_tokens", -1, "at least 0"),
        ("min_tokens", 17, "max_tokens=16"),
        ("logprobs", -2, "at least -1"),
        ("prompt_logprobs", -2, "at least -1"),
        *((name, math.nan, "must be in") for name in ("temperature", "top_p", "min_p", "repetition_penalty")),
        *((name, math.nan, "must be in") for name in ("presence_penalty", "frequency_penalty")),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name_value_and_limit(name, value, limit):
    with pytest.raises(ValueError, match=rf"{name}.*({limit}).*") as refusal:
        SamplingParams(**{name: value})
    assert str(value) in str(refusal.value)


@pytest.mark.parametrize(
    "name", ["n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "logprobs"]
)
def test_true_is_no_number(name):
    with pytest.raises(ValueError, match=f"{name} must be an? (integer|number), got True"):
        SamplingParams(**{name: True})


@pytest.mark.parametrize("name", ["ignore_eos", "detokenize", "skip_special_tokens"])
def test_a_flag_is_true_or_false_and_nothing_like_it(name):
    with pytest.raises(ValueError, match=f"{name} must be True or False, got 'no'"):
        SamplingParams(**{name: "no"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", 5),
        ("stop", [["a"]]),
        ("stop_token_ids", 5),
        ("stop_token_ids", [[4]]),
        ("output_kind", "DELTA"),
    ],
)
def test_other_kinds_of_values_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a.*, got {re.escape(repr(value))}"):
        SamplingParams(**{name: value})


def test_top_p_zero_is_refused_because_it_would_keep_nothing():
    with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\], got 0"):
        SamplingParams(top_p=0)


@pytest.mark.parametrize("off", [0, -1, None])
def test_every_way_to_switch_top_k_off_is_one_value(off):
    assert SamplingParams(top_k=off).top_k == 0


def test_stop_is_a_string_or_several():
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams(stop=None).stop_strings == SamplingParams().stop_strings == ()


@pytest.mark.parametrize("stop", ["", ["a", ""], [1]])
def test_an_empty_stop_string_is_refused(stop):
    with pytest.raises(ValueError, match="non-empty"):
        SamplingParams(stop=stop)


def test_stop_strings_need_text():
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(stop="a", detokenize=False)


def test_stop_token_ids_are_whole_numbers_named_once():
    assert SamplingParams(stop_token_ids=[4, 2, 4]).stop_token_ids == (4, 2)
    for bad in ([-1], ["a"], [1.0]):
        with pytest.raises(ValueError, match="stop_token_id"):
            SamplingParams(stop_token_ids=bad)


def test_several_samples_of_a_greedy_request_are_refused_as_in_vllm():
    with pytest.raises(ValueError, match="n must be 1 with temperature 0"):
        SamplingParams(n=2, temperature=0)


def test_tiny_temperatures_are_raised_to_a_hundredth_as_in_vllm():
    assert SamplingParams(temperature=1e-6).temperature == 0.01
    assert not SamplingParams(temperature=1e-6).is_greedy
    assert SamplingParams(temperature=0).is_greedy


def test_max_tokens_none_means_up_to_the_context_limit():
    assert SamplingParams(max_tokens=None, min_tokens=500).max_tokens is None


def test_parameters_cannot_change_under_a_running_request():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]


def test_beam_search_defaults_are_vllms():
    params = BeamSearchParams(4, 10)
    assert (params.ignore_eos, params.temperature, params.length_penalty) == (False, 0.0, 1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 0),
        ("max_tokens", 0),
        ("temperature", -1),
        ("length_penalty", math.nan),
        ("length_penalty", 33),
        ("length_penalty", -33),
    ],
)
def test_beam_search_refuses_values_outside_their_range(name, value):
    with pytest.raises(ValueError, match=f"{name}.*{value}"):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, name: value})


@pytest.mark.parametrize("length_penalty", [-32, 32])
def test_no_length_penalty_that_is_taken_overflows(length_penalty):
    params = BeamSearchParams(2, 2, length_penalty=length_penalty)
    assert -math.inf < beam_score(-1e3, 2**31 - 1, params.length_penalty) < 0
