"""AMX: its instructions emulated as Intel's manual has them, real where there are any; an engine on both."""

import shutil
from dataclasses import replace

import pytest
import torch

from minipaged import LLM, SamplingParams
from minipaged.attention import get_backend
from minipaged.attention.torch_backend import TorchBackend
from minipaged.checkpoints.loading import LoadedModel
from minipaged.cpu import kernels as cpu_kernels
from minipaged.cpu.abi import After
from minipaged.cpu.accelerate import accelerate
from minipaged.cpu.calibrate import Choice
from minipaged.cpu.kernels import CpuKernels
from minipaged.cpu.modules import CompiledLinear, CpuLlama
from minipaged.model.llama import LlamaModel
from minipaged.model.tiny import random_llama
from tests.cpu.conftest import HAS_AMX
from tests.cpu.test_compiled import WIDE
from tests.model.model_files import logits_of

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on this machine"
)
CONFIG = replace(WIDE, hidden_size=96, num_query_heads=3, num_kv_heads=1, intermediate_size=208)
PROMPTS = [list(range(i, i + 3 * i % 50 + 1)) for i in range(1, 40)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def emulated(library_with_emulated_tiles) -> CpuKernels:
    return CpuKernels(library_with_emulated_tiles, Choice.pinned("amx-t0", tiles=True))


def sums(kernels: CpuKernels, x: list[float], weight: list[float]) -> float:
    """Their product as float32, of numbers that bfloat16 has."""
    columns = torch.tensor(weight).bfloat16().expand(32, -1).contiguous()
    out = CompiledLinear(columns, kernels, After.KEEP_FLOAT32)(torch.tensor([x]).bfloat16())
    assert (out == out[0, 0]).all()
    return float(out[0, 0])


def test_emulated_sums_are_those_of_the_manual(emulated):
    """Lower and upper numbers of pairs are summed apart, then added. 2^24 + 1 rounds, 1 - 2^24 does not."""
    large = 2.0**24
    assert sums(emulated, [large, -large, 1, 1], [1, 1, 1, 1]) == 1
    assert sums(emulated, [1, 1, large, -large], [1, 1, 1, 1]) == 1
    assert sums(emulated, [large, 1, -large, 1], [1, 1, 1, 1]) == 2  # exact in both
    next_tile = [large, *[0] * 31]  # and then its sums are added to those before
    assert sums(emulated, [*next_tile, 1, 0], [1] * 34) == large
    assert sums(emulated, [*next_tile, 1, 1], [1] * 34) == large + 2


def test_emulated_numbers_that_are_denormal_are_zero(emulated):
    assert sums(emulated, [2.0**-130, 2.0**-126], [2.0**100, 2.0**100]) == 2.0**-26
    assert sums(emulated, [2.0**-70, 0], [2.0**-70, 0]) == 0
    assert sums(emulated, [2.0**-63, 0], [2.0**-63, 0]) == 2.0**-126


def test_emulated_rounding_is_to_nearest_and_ties_to_even(emulated):
    assert sums(emulated, [2.0**24, 0, 1, 0], [1] * 4) == 2.0**24
    assert sums(emulated, [2.0**24, 0, 3, 0], [1] * 4) == 2.0**24 + 4
    assert sums(emulated, [-(2.0**24), 0, -3, 0], [1] * 4) == -(2.0**24) - 4


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(rows, 1000, generator=generator).bfloat16() for rows in (40, 64))


def test_tiles_are_what_serves_once_they_are_chosen(emulated):
    """In another order than that of vectors, so that last bits differ, and no more."""
    x, weight = operands()
    tiles = CompiledLinear(weight, emulated, After.KEEP_FLOAT32)(x)
    vectors = CpuKernels(emulated.library, Choice.pinned("vectors-t0", tiles=True))
    others = CompiledLinear(weight, vectors, After.KEEP_FLOAT32)(x)
    assert not torch.equal(tiles, others)
    assert (tiles - others).abs().max() <= 1e-5 * others.abs().max()


@pytest.mark.skipif(not HAS_AMX, reason="this processor has no AMX")
def test_real_tiles_equal_the_emulated_ones_but_for_rounding(emulated):
    own = cpu_kernels.load()
    assert own is not None
    if not own.library.tiles_allowed():
        pytest.skip("this process may not use AMX")
    x, weight = operands()
    expected = CompiledLinear(weight, emulated, After.KEEP_FLOAT32)(x)
    try:
        real = CpuKernels(own.library, Choice.pinned("amx-t0", tiles=True))
        ours = CompiledLinear(weight, real, After.KEEP_FLOAT32)(x)
    finally:
        CpuKernels(own.library, own.choice)
    assert (ours - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_where_tiles_are_not_allowed_choosing_them_leaves_vectors():
    """The process would end at the first of their instructions."""
    own = cpu_kernels.load()
    assert own is not None
    if own.library.tiles_allowed():
        pytest.skip("this process may use AMX")
    x, weight = operands()
    expected = CompiledLinear(weight, own, After.KEEP_FLOAT32)(x)
    try:
        asked = CpuKernels(own.library, Choice({"bfloat16": "amx-t0", "float32": "vectors-t0"}))
        assert torch.equal(CompiledLinear(weight, asked, After.KEEP_FLOAT32)(x), expected)
    finally:
        CpuKernels(own.library, own.choice)


def models() -> tuple[LlamaModel, LlamaModel]:
    """One with bfloat16 weights, and in float32 one with the same weights."""
    rounded, exact = random_llama(CONFIG, dtype=torch.bfloat16), random_llama(CONFIG)
    exact.load_state_dict({name: weight.float() for name, weight in rounded.state_dict().items()})
    return rounded, exact


def llm_of(model: LlamaModel) -> LLM:
    loaded, backend = accelerate(LoadedModel(model, None, CONFIG, "wide"), get_backend("torch"))
    assert isinstance(loaded.model, CpuLlama) and backend.name == "cpu"
    return LLM(loaded, num_blocks=300, max_model_len=100, device="cpu", enable_prefix_caching=False)


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [output.outputs[0].token_ids for output in llm.generate(asked, GREEDY, use_tqdm=False)]


def test_an_engine_in_bfloat16_answers_a_request_alike_alone_and_among_others(every_way):
    llm = llm_of(models()[0])
    together = answers(llm, PROMPTS)
    assert [answers(llm, [prompt])[0] for prompt in PROMPTS] == together


def test_an_engine_in_bfloat16_chooses_what_plain_torch_in_float32_finds_best(every_way):
    """At every step: the token's logit is the largest, or as large but for bfloat16's rounding."""
    rounded, exact = models()
    for prompt, answer in zip(PROMPTS, answers(llm_of(rounded), PROMPTS), strict=True):
        logits = logits_of(exact, prompt + answer[:-1], backend=TorchBackend())[-len(answer) :]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert (logits.amax(1) - chosen <= 0.03 * logits.norm(dim=1) / logits.shape[1] ** 0.5).all()


def test_an_engine_in_float32_answers_as_plain_torch_does(every_way):
    exact = models()[1]
    plain = LLM(LoadedModel(exact, None, CONFIG, "wide"), num_blocks=300, max_model_len=100, device="cpu",
                attention_backend="torch", enable_prefix_caching=False)  # fmt: skip
    expected = answers(plain, PROMPTS)
    assert answers(llm_of(exact), PROMPTS) == expected
