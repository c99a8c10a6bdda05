"""Memory that the system refuses, and settings beyond measure: one sentence with the value and the limit."""

import subprocess
import sys
import warnings

import pytest
from checkout import ROOT

from minipaged.config import EngineConfig
from minipaged.engine.input_processor import one_for_each, parse_prompt
from minipaged.sampling_params import SamplingParams
from tests.engine.fake_tokenizers import ByteTokenizer

LIMITED = """
import resource, sys
from minipaged.engine.llm import LLM
from minipaged.checkpoints.loading import LoadedModel
from minipaged.model.tiny import TINY, random_llama
model = LoadedModel(random_llama(), None, TINY, "tiny")
taken = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (taken + 2**30,) * 2)
try:
    LLM(model, device="cpu", **eval(sys.argv[1]))
except ValueError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits on address space are Linux's")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_memory": "6GiB"}, r"6144 MiB, \d+ MiB are free"),
        ({"num_blocks": 10**7}, r"take \d+ MiB, \d+ MiB are free"),
        ({"max_num_seqs": 10**9, "num_blocks": 4}, "max_num_seqs is 1000000000, the most allowed is 65536"),
    ],
)
def test_cache_beyond_an_address_limit_is_refused_with_both_numbers(settings: dict, message: str) -> None:
    import re

    command = [sys.executable, "-c", LIMITED, repr(settings)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert re.search(message, done.stdout), done.stdout + done.stderr


def test_allocator_that_refuses_is_put_into_words(monkeypatch: pytest.MonkeyPatch) -> None:
    from minipaged.checkpoints.loading import LoadedModel
    from minipaged.engine import engine, llm
    from minipaged.model.tiny import TINY, random_llama

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:116]")

    monkeypatch.setattr(engine, "KVStorage", refuse)
    with pytest.raises(ValueError, match=r"8 blocks of 16 tokens take \d+ MiB, which cpu refused"):
        llm.LLM(LoadedModel(random_llama(), None, TINY, "tiny"), num_blocks=8, max_model_len=32, device="cpu")


def test_more_sequences_than_any_machine_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="max_num_seqs is 65537, the most allowed is 65536"):
        EngineConfig(max_model_len=8, max_num_seqs=65537, max_num_batched_tokens=65537)


def test_seed_given_once_for_many_prompts_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="seed 7 is given once for 3 prompts"):
        one_for_each(SamplingParams(temperature=1, seed=7), 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_for_each(SamplingParams(temperature=1, seed=7), 1)
        one_for_each(SamplingParams(temperature=0, seed=7), 3)
        one_for_each(SamplingParams(temperature=1), 3)
        one_for_each([SamplingParams(temperature=1, seed=seed) for seed in range(3)], 3)


class WithBos(ByteTokenizer):
    """Puts token 0 before a text; a template's text begins with it as "\\0"."""

    special_token_ids = frozenset({0})

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [0] * add_special_tokens + list(text.encode())


def test_bos_before_a_text_that_has_it_already_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="begins with the special token 0 twice"):
        assert parse_prompt("\0hi", WithBos(), 256)[1] == [0, 0, 104, 105]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parse_prompt("hi", WithBos(), 256)
        parse_prompt("\0hi", WithBos(), 256, add_special_tokens=False)
        parse_prompt("aa", WithBos(), 256)
