"""The one door for settings: each is checked before anything is loaded, and said in one place."""

import argparse
import inspect
import pickle
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from minipaged import machine
from minipaged.commands.serving import add_engine_arguments, engine_settings, explanations
from minipaged.engine import args as args_module
from minipaged.engine import llm as llm_module
from minipaged.engine.args import EngineArgs
from minipaged.engine.llm import LLM
from minipaged.model.tiny import TINY

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float8"}, "dtype is 'float8', supported are 'auto', 'float32'"),
        ({"dtype": torch.int8}, "dtype is torch.int8"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"dtype": 16}, "dtype is 16"),
        ({"dtype": ["float32"]}, r"dtype is \['float32'\]"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype is 'int3', supported are 'auto', .*'int8', 'fp8'"),
        ({"kv_cache_dtype": torch.float64}, "kv_cache_dtype is torch.float64"),
        ({"block_size": True}, "block_size is True, a whole number"),
        ({"block_size": None}, "block_size is None, a whole number"),
        ({"num_blocks": 0}, "num_blocks is 0, the least allowed is 1"),
        ({"num_blocks": "64"}, "num_blocks is '64', a whole number"),
        ({"num_blocks": True}, "num_blocks is True, a whole number"),
        ({"kv_memory": "64 apples"}, "kv_memory is '64 apples'"),
        ({"kv_memory": "1MiB", "num_blocks": 5}, r"give kv_memory \('1MiB'\) or num_blocks \(5\), not both"),
        ({"max_model_len": "64"}, "max_model_len is '64', a whole number"),
        ({"max_model_len": 0}, "max_model_len is 0, the least allowed is 1"),
        ({"max_num_seqs": "many"}, "max_num_seqs is 'many', a whole number"),
        ({"max_num_seqs": 2.0}, "max_num_seqs is 2.0, a whole number"),
        ({"max_num_batched_tokens": "512"}, "max_num_batched_tokens is '512', a whole number"),
        ({"enable_chunked_prefill": 1}, "enable_chunked_prefill is 1, True or False"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching is 'no', True or False"),
        ({"preemption": "never"}, "preemption is 'never', supported are 'recompute', 'swap'"),
        ({"preemption": ["swap"]}, r"preemption is \['swap'\]"),
        ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization is 0, a share in \(0, 1\]"),
        ({"gpu_memory_utilization": True}, "gpu_memory_utilization is True"),
        ({"gpu_memory_utilization": "0.9", "num_blocks": 4}, "gpu_memory_utilization is '0.9'"),
        ({"watermark": 1}, r"watermark is 1, a share in \[0, 1\)"),
        ({"watermark": False}, "watermark is False"),
        ({"swap_space": "lots"}, "swap_space is 'lots'"),
        ({"swap_space": -1}, "swap_space is -1 GiB"),
        ({"swap_space": None}, "swap_space is None GiB"),
        ({"swap_space": 0, "preemption": "swap"}, "swap_space is 0 GiB"),
        ({"seed": "lucky"}, "seed must be an integer, got 'lucky'"),
        ({"seed": 2**64}, "seed must be in "),
    ],
)
def test_a_wrong_setting_is_refused_before_a_model_is_looked_for(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=message):
        EngineArgs(**settings)

    def load(*args: Any, **more: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(llm_module, "load_model", load)
    with pytest.raises(ValueError, match=message):
        LLM(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "tpu"}, "device is 'tpu', give 'auto', 'cpu' or 'cuda'"),
        ({"attention_backend": "flash", "device": "cpu"}, "attention backend 'flash' is none of auto"),
    ],
)
def test_what_this_machine_lacks_is_refused_before_a_model_is_looked_for(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LLM("no-such-model", **settings)


def test_a_name_that_is_no_setting_is_refused_with_the_name() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'blok_size'"):
        LLM(blok_size=16)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        LLM("smollm2-135m", "float32")  # type: ignore[call-arg]


def test_llm_shows_the_settings_as_its_own() -> None:
    theirs, ours = inspect.signature(EngineArgs), inspect.signature(LLM)
    assert ours.parameters == theirs.parameters
    assert list(inspect.signature(LLM.__init__).parameters) == ["self", *theirs.parameters]


def test_every_setting_is_explained_where_it_is_said() -> None:
    names = [field.name for field in fields(EngineArgs)]
    texts = explanations(EngineArgs)
    assert list(texts) == names
    assert all(texts.values())


def test_commands_offer_the_settings_with_the_engine_s_own_defaults() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser, kv_memory="64MiB")
    settings = engine_settings(parser.parse_args([]))
    assert EngineArgs(**settings) == EngineArgs(kv_memory="64MiB")
    settings = engine_settings(parser.parse_args(["--block-size", "32", "--max-model-len", "512"]))
    assert EngineArgs(**settings) == EngineArgs(kv_memory="64MiB", block_size=32, max_model_len=512)
    assert "  --block-size N        tokens per block (default: 16)" in parser.format_help()


def test_commands_read_the_settings_without_torch() -> None:
    """Help is printed at once, and too little memory is noticed before torch takes some of it."""
    code = "import sys, minipaged.commands.serving; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_settings_survive_the_journey_to_another_process() -> None:
    args = EngineArgs("a", kv_memory="1MiB", dtype=torch.float16, kv_cache_dtype="fp8", seed=None)
    assert pickle.loads(pickle.dumps(args)) == args


def test_no_swap_space_is_needed_where_nothing_is_swapped() -> None:
    """vLLM takes 0 for none."""
    cache, _ = EngineArgs(swap_space=0, num_blocks=4).resolve(TINY, torch.float32, CPU)
    assert cache.num_host_blocks == 0


@pytest.mark.parametrize(("swap_space", "num_bytes"), [(1, 2**30), (0.5, 2**29), ("512MiB", 2**29)])
def test_swap_space_is_a_number_of_gib_or_text(swap_space: float | str, num_bytes: int) -> None:
    assert EngineArgs(swap_space=swap_space, preemption="swap").swap_bytes() == num_bytes


def test_the_default_step_holds_a_token_of_every_sequence_and_a_prompt_that_cannot_be_cut() -> None:
    long = replace(TINY, max_position_embeddings=10_000)

    def step_tokens(device: torch.device, **settings: Any) -> int:
        return EngineArgs(**settings).limits(long, device).max_num_batched_tokens

    assert step_tokens(CPU) == 512
    assert step_tokens(CUDA) == 2048
    assert step_tokens(CPU, enable_chunked_prefill=False) == 10_000
    assert step_tokens(CPU, max_model_len=100, max_num_seqs=3000) == 3000
    assert step_tokens(CPU, max_num_seqs=600) == 600
    assert step_tokens(CPU, max_num_seqs=600, max_num_batched_tokens=700) == 700


def test_a_step_that_cannot_hold_the_sequences_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens is 8, it must reach max_num_seqs \(9\)"):
        EngineArgs(max_num_batched_tokens=8, max_num_seqs=9).limits(TINY, CPU)
    assert EngineArgs(max_num_batched_tokens=8).limits(TINY, CPU).max_num_seqs == 8


@pytest.mark.parametrize(("free", "blocks"), [(8 * 1024 * 16 * 10, 10), (2**50, 2**32 // (1024 * 16))])
def test_the_default_cache_of_a_cpu_is_an_eighth_of_what_is_free_and_at_most_4_gib(
    free: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(args_module, "available_memory", lambda: free)
    wide = replace(TINY, max_position_embeddings=2**20, num_layers=2, num_kv_heads=2, head_size=32)
    cache, _ = EngineArgs().resolve(wide, torch.float32, CPU)
    assert (cache.num_blocks, cache.dtype) == (blocks, torch.float32)


@pytest.mark.parametrize("taken", [0, 2 * 2**30])
def test_the_default_cache_of_a_gpu_is_what_its_share_leaves(
    taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = 10 * 2**30
    monkeypatch.setattr(args_module, "gpu_memory", lambda device: (total - taken, total))
    wide = replace(TINY, max_position_embeddings=2**20, num_layers=2, num_kv_heads=2, head_size=32)
    cache, _ = EngineArgs(gpu_memory_utilization=0.5, kv_cache_dtype="int8").resolve(
        wide, torch.float16, CUDA
    )
    per_block = 16 * 2 * 2 * 2 * (32 + 4)
    assert cache.num_blocks == (total // 2 - taken - 2**30) // per_block
    with pytest.raises(ValueError, match=r"gpu_memory_utilization is 0\.1: of 10240 MiB"):
        EngineArgs(gpu_memory_utilization=0.1).resolve(wide, torch.float16, CUDA)


def test_a_machine_without_a_gpu_serves_from_its_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert EngineArgs().find_device() == CPU
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert EngineArgs().find_device() == CUDA
    with pytest.raises(ValueError, match="device is 'cuda:1', torch sees 1 GPUs here"):
        machine.find_device("cuda:1")
