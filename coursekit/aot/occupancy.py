"""How many programs of a kernel one multiprocessor can hold at a time."""

from dataclasses import dataclass

from minipaged.attention.targets import Target


@dataclass(frozen=True)
class Occupancy:
    """Programs and warps resident on one multiprocessor, and the resource that allows no more.

    `fraction` is resident warps over the most the multiprocessor can hold. It is an upper bound computed from
    resources: whether enough programs exist, and whether they keep the memory busy, only a run shows.
    """

    programs: int
    warps: int
    fraction: float
    limited_by: str  # "registers", "shared memory", "warps" or "programs"


def occupancy(target: Target, *, num_warps: int, registers: int, shared_memory: int) -> Occupancy:
    """Occupancy of a kernel with `num_warps` warps per program.

    Args:
        target: the architecture, whose limits are listed in `targets.py` with their source.
        num_warps: warps (on AMD: wavefronts) that work on one program.
        registers: registers per thread, as the compiler reports them.
        shared_memory: bytes of shared memory one program asks for.

    Returns:
        Occupancy with 0 programs if one program alone is too large.

    The rule is that of NVIDIA's occupancy calculator (Nsight Compute documentation, "Occupancy Calculator"):
    registers are handed out per warp in units of 256, and warps in fours, one for each quarter of the
    multiprocessor. On CDNA 3 each of the four SIMD units gives a lane 512 vector registers, in units of 8,
    and holds at most 8 wavefronts (LLVM, "User Guide for AMDGPU Backend").
    """
    shared = _round_up(shared_memory + target.shared_reserved, target.shared_unit)
    limits = {
        "warps": target.max_warps // num_warps,
        "programs": target.max_programs,
        "registers": _warps_by_registers(target, registers) // num_warps,
        "shared memory": target.shared_memory // shared if shared else target.max_programs,
    }
    if shared_memory > target.shared_per_program:
        limits["shared memory"] = 0
    limited_by = min(limits, key=lambda name: limits[name])
    programs = limits[limited_by]
    warps = programs * num_warps
    return Occupancy(programs, warps, warps / target.max_warps, limited_by)


def _warps_by_registers(target: Target, registers: int) -> int:
    """Warps whose registers fit into one multiprocessor."""
    if target.backend == "hip":
        return min(4 * (target.registers // max(8, _round_up(registers, 8))), target.max_warps)
    per_warp = _round_up(max(1, registers) * target.warp_size, 256)
    return target.registers // per_warp // 4 * 4


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
