"""KVSpec and MemoryPlan: bytes that can be checked by hand."""

import pytest
import torch

from minipaged.config import ModelConfig
from minipaged.dtypes import KV_DTYPES
from minipaged.memory import KVSpec, MemoryPlan, blocks_for, count_parameters

GB = 10**9


def plan_for(model, card_bytes, bits_per_weight=16, reserve_bytes=0, kv_dtype=torch.float16):
    spec = KVSpec.from_model(model, kv_dtype)
    return MemoryPlan(card_bytes, count_parameters(model), bits_per_weight, reserve_bytes, spec)


def config(**changes) -> ModelConfig:
    fields = {
        "vocab_size": 32000, "hidden_size": 8192, "intermediate_size": 28672, "num_layers": 80,
        "num_query_heads": 64, "num_kv_heads": 8, "head_size": 128, "max_position_embeddings": 4096,
    }  # fmt: skip
    return ModelConfig(**{**fields, **changes})


SMOLLM2_135M = config(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_query_heads=9,
    num_kv_heads=3, head_size=64, max_position_embeddings=8192, tie_word_embeddings=True,
)  # fmt: skip
LLAMA2_7B = config(
    hidden_size=4096, intermediate_size=11008, num_layers=32, num_query_heads=32, num_kv_heads=32
)
LLAMA2_70B = config()  # 64 query heads on 8 KV heads
LLAMA2_70B_MHA = config(num_kv_heads=64)  # the same with a KV head for every query head


@pytest.mark.parametrize(
    ("num_tokens", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (7, 2), (8, 2), (9, 3)]
)
def test_blocks_are_rounded_up(num_tokens, blocks):
    """A whole last block counts as one block, not as none."""
    assert blocks_for(num_tokens, 4) == blocks


def test_smollm2_takes_23040_bytes_a_token_in_16_bits():
    spec = KVSpec.from_model(SMOLLM2_135M, torch.float16)
    assert spec.bytes_per_token == 2 * 30 * 3 * 64 * 2 == 23040
    assert KVSpec.from_model(SMOLLM2_135M, torch.float32).bytes_per_token == 2 * 23040
    assert spec.bytes_per_block(16) == 368640
    assert spec.bytes_for(17, 16) == 2 * 368640
    assert spec.bytes_for(0, 16) == 0


def test_opt_13b_takes_800_kib_a_token():
    """The PagedAttention paper, section 3."""
    assert KVSpec(40, 40, 128, torch.float16).bytes_per_token == 800 * 1024


def test_scales_are_part_of_the_bytes():
    for dtype in (torch.int8, torch.float8_e4m3fn):
        spec = KVSpec(30, 3, 64, dtype)
        assert spec.is_quantized
        assert spec.bytes_per_token == 2 * 30 * 3 * (64 + 4)
    assert not KVSpec(30, 3, 64, torch.bfloat16).is_quantized


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_the_head_size_is_read_not_derived(dtype):
    """4 heads of 32 where 64 / 4 would say 16."""
    spec = KVSpec.from_model(config(hidden_size=64, num_query_heads=4, num_kv_heads=2, head_size=32), dtype)
    assert spec.head_size == 32


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_size"])
def test_impossible_shapes_are_refused(field):
    fields = {"num_layers": 1, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32, field: 0}
    with pytest.raises(ValueError, match=f"{field} is 0"):
        KVSpec(**fields)


def test_an_unsupported_dtype_is_refused_by_name():
    with pytest.raises(ValueError, match="KV dtype is float64, must be one of float32, float16"):
        KVSpec(1, 1, 1, torch.float64)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [(SMOLLM2_135M, 134_515_008), (LLAMA2_7B, 6_738_415_616), (LLAMA2_70B, 68_976_648_192)],
    ids=["SmolLM2-135M", "Llama-2-7B", "Llama-2-70B"],
)
def test_parameters_are_those_the_models_are_published_with(model, parameters):
    assert count_parameters(model) == parameters


def test_a_plan_by_hand():
    spec = KVSpec(2, 1, 4, torch.float16)  # 32 bytes a token, 128 a block of 4
    plan = MemoryPlan(1000, 500, 4.5, 100, spec, block_size=4)
    assert plan.weight_bytes == 282  # 281.25, rounded up
    assert plan.kv_bytes == 618
    assert plan.num_blocks == 4
    assert plan.num_tokens == 16
    assert [plan.requests(n) for n in (1, 4, 5, 8, 9, 16, 17)] == [4, 4, 2, 2, 1, 1, 0]


def test_a_70b_model_in_4_bits_on_an_80_gb_card():
    """Conversations of 4096 tokens at once: 30 with 8 KV heads, 3 with one for each of 64 query heads."""
    plans = [
        plan_for(model, card_bytes=80 * GB, bits_per_weight=4, reserve_bytes=4 * GB)
        for model in (LLAMA2_70B, LLAMA2_70B_MHA)
    ]
    per_token = [2 * 80 * heads * 128 * 2 for heads in (8, 64)]
    assert [plan.spec.bytes_per_token for plan in plans] == per_token == [327_680, 2_621_440]
    for plan, kv_heads in zip(plans, (8, 64), strict=True):
        assert plan.weight_bytes == (68_976_648_192 + 80 * 2 * 8192 * 128 * (kv_heads - 8)) // 2
        assert plan.num_blocks == (80 * GB - 4 * GB - plan.weight_bytes) // (16 * plan.spec.bytes_per_token)
    assert [plan.requests(4096) for plan in plans] == [30, 3]


def test_kv_in_8_bits_doubles_the_tokens_nearly():
    plans = [
        plan_for(LLAMA2_70B, card_bytes=80 * GB, bits_per_weight=4, kv_dtype=dtype)
        for dtype in (torch.float16, torch.float8_e4m3fn)
    ]
    assert plans[1].num_tokens / plans[0].num_tokens == pytest.approx(2 * 128 / (128 + 4), rel=1e-3)


def test_weights_that_do_not_fit_are_refused_with_the_numbers():
    with pytest.raises(
        ValueError, match="137953296384 bytes of weights and 0 in reserve do not fit 80000000000"
    ):
        plan_for(LLAMA2_70B, card_bytes=80 * GB)


def test_impossible_plans_are_refused():
    spec = KVSpec(2, 1, 4, torch.float16)
    for position, field in enumerate(("card_bytes", "num_parameters", "bits_per_weight")):
        values = [1000, 100, 8, 0, spec]
        values[position] = 0
        with pytest.raises(ValueError, match=f"{field} is 0, must be above 0"):
            MemoryPlan(*values)
    with pytest.raises(ValueError, match="block_size is 0"):
        MemoryPlan(1000, 100, 8, 0, spec, block_size=0)
    with pytest.raises(ValueError, match="reserve_bytes is -1"):
        MemoryPlan(1000, 100, 8, -1, spec)
    with pytest.raises(ValueError, match="tokens_per_request is 0"):
        MemoryPlan(1000, 100, 8, 0, spec).requests(0)


def test_a_card_with_no_room_left_holds_no_request():
    spec = KVSpec(2, 1, 4, torch.float16)
    plan = MemoryPlan(100, 100, 8, 0, spec)
    assert (plan.kv_bytes, plan.num_blocks, plan.num_tokens, plan.requests(1)) == (0, 0, 0, 0)
