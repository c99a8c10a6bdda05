"""Occupancy against figures of NVIDIA's occupancy calculator and the CUDA programming guide's limits."""

import pytest

from coursekit.aot.occupancy import occupancy
from minipaged.attention.targets import TARGETS


@pytest.mark.parametrize(
    ("target", "num_warps", "registers", "shared", "programs", "limited_by"),
    [
        ("sm_80", 8, 32, 0, 8, "warps"),  # 64 warps of 64: 100 %
        ("sm_80", 4, 128, 0, 4, "registers"),  # 128 * 32 * 4 = 16 384 of 65 536 registers
        ("sm_80", 4, 255, 0, 2, "registers"),  # 255 rounds up to 256 a thread
        ("sm_80", 4, 168, 0, 3, "registers"),  # 5 376 a warp: 12 warps fit
        ("sm_80", 1, 32, 0, 32, "programs"),  # 64 warps would fit, 32 programs is the limit
        ("sm_80", 4, 32, 82 * 1024, 1, "shared memory"),  # 2 * (82 + 1) KiB is more than 164
        ("sm_80", 4, 32, 81 * 1024, 2, "shared memory"),
        ("sm_90", 4, 64, 75 * 1024, 3, "shared memory"),  # 3 * (75 + 1) = 228 KiB exactly
        ("sm_90", 4, 64, 75 * 1024 + 1, 2, "shared memory"),
        ("sm_75", 8, 64, 0, 4, "warps"),  # Turing holds 32 warps
        ("sm_75", 4, 64, 32 * 1024, 2, "shared memory"),  # nothing reserved before sm_80
        ("sm_120", 4, 40, 0, 12, "warps"),  # 48 warps
        ("gfx942", 4, 128, 0, 4, "registers"),  # 512 / 128 wavefronts on each SIMD unit
        ("gfx942", 4, 129, 0, 3, "registers"),  # 129 rounds up to 136
        ("gfx942", 4, 40, 0, 8, "warps"),
        ("gfx942", 4, 40, 32 * 1024, 2, "shared memory"),
    ],
)
def test_resident_programs(
    target: str, num_warps: int, registers: int, shared: int, programs: int, limited_by: str
) -> None:
    found = occupancy(TARGETS[target], num_warps=num_warps, registers=registers, shared_memory=shared)
    assert (found.programs, found.limited_by) == (programs, limited_by)
    assert found.warps == programs * num_warps
    assert found.fraction == found.warps / TARGETS[target].max_warps


def test_a_program_larger_than_a_multiprocessor_does_not_run() -> None:
    for target in TARGETS.values():
        fits = occupancy(target, num_warps=4, registers=32, shared_memory=target.shared_per_program)
        beyond = occupancy(target, num_warps=4, registers=32, shared_memory=target.shared_per_program + 1)
        assert (fits.programs, beyond.programs) == (1, 0)
