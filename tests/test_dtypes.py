"""One table of number formats, and one answer to which machine multiplies bfloat16."""

import pytest
import torch

from coursekit.lesson import pick_device
from minipaged.attention.targets import TARGETS
from minipaged.dtypes import (
    DTYPES,
    KV_DTYPES,
    OF_TORCH,
    cpu_has_bfloat16,
    fast_dtype,
    gpu_has_bfloat16,
    named,
)
from minipaged.engine.args import EngineArgs
from minipaged.machine import torch_facts

CPU = torch.device("cpu")


def test_every_name_means_one_format() -> None:
    names = [name for dtype in DTYPES for name in dtype.names]
    assert len(names) == len(set(names))
    assert all(named(name, KV_DTYPES, "it") is dtype.torch for dtype in DTYPES for name in dtype.names)
    assert all(named(dtype, KV_DTYPES, "it") is dtype for dtype in KV_DTYPES)


def test_what_needs_a_scale_takes_one_byte_and_stores_its_largest_number() -> None:
    for dtype in DTYPES:
        assert dtype.has_scale == (dtype.torch.itemsize == 1)
        if dtype.largest is not None:
            assert torch.tensor(dtype.largest).to(dtype.torch).float().item() == dtype.largest
    limit = torch.finfo(torch.float8_e4m3fn).max
    assert OF_TORCH[torch.float8_e4m3fn].largest == limit


@pytest.mark.parametrize("instructions", ["avx512_bf16", "amx_bf16", "bf16", None])
def test_doctor_and_engine_agree_on_the_processor(
    instructions: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMX counts: some processors say that they have it and not AVX512-BF16."""
    found = {"avx512_bf16": False, "amx_bf16": False, "bf16": False}
    monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: found | ({instructions: True} if instructions else {})
    )
    assert torch_facts()[2] is cpu_has_bfloat16() is bool(instructions)
    if instructions:
        assert EngineArgs().find_dtype(CPU) is torch.bfloat16
        return
    with pytest.warns(UserWarning, match="multiplies no bfloat16: the model runs in float32"):
        assert EngineArgs().find_dtype(CPU) is torch.float32
    assert EngineArgs(dtype="bfloat16").find_dtype(CPU) is torch.bfloat16  # asked for: right, only slow


AVX512 = {"avx2": True, "avx512_f": True, "avx512_bw": True, "avx512_vnni": True}


@pytest.mark.parametrize(
    ("capabilities", "has_onednn", "expected"),
    [
        ({"sse4_2": True, "avx2": False}, True, torch.float32),
        ({"avx2": True, "fma3": True}, True, torch.float32),
        (AVX512, True, torch.float32),
        (AVX512 | {"avx512_bf16": True}, True, torch.bfloat16),
        (AVX512 | {"amx_bf16": True}, True, torch.bfloat16),
        ({"neon": True, "dot": True}, True, torch.float32),
        ({"neon": True, "bf16": True}, True, torch.bfloat16),
        ({"neon": True, "bf16": True}, False, torch.float32),
    ],
    ids=["old", "AVX2", "AVX-512", "AVX512-BF16", "AMX", "Arm", "Arm with BF16", "Apple's Arm, no oneDNN"],
)
@pytest.mark.filterwarnings("ignore:this CPU multiplies no bfloat16")
def test_a_processor_computes_in_bfloat16_only_where_that_is_native(
    capabilities: dict[str, bool], has_onednn: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_onednn)
    assert fast_dtype(CPU) is expected


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.backend == "cuda"])
def test_lessons_engine_and_kernels_agree_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = TARGETS[name]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: divmod(int(target.arch), 10))
    assert gpu_has_bfloat16() == target.has_bfloat16
    expected = torch.bfloat16 if target.has_bfloat16 else torch.float16
    assert fast_dtype(torch.device("cuda")) is pick_device()[1] is expected


def test_amd_gpus_have_bfloat16_whatever_number_they_report(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        gcnArchName = "gfx942:sramecc+:xnack-"

    monkeypatch.setattr("torch.version.hip", "7.0")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: Properties)
    assert gpu_has_bfloat16()
    assert TARGETS["gfx942"].has_bfloat16
