"""What a compiled kernel tells about itself: one `KernelReport` per kernel and target."""

from dataclasses import dataclass

from coursekit.aot.cases import KernelCase
from coursekit.aot.compile import Compiled, compile_launch
from coursekit.aot.listing import Listing, matrix_instructions, spill_instructions
from coursekit.aot.loads import argument_loads
from coursekit.aot.occupancy import occupancy
from minipaged.attention.targets import Target


@dataclass(frozen=True)
class KernelReport:
    """Facts read from the compiler's output for one kernel and target.

    Registers are per thread, `spill_bytes` bytes of local memory per thread, `shared_memory` bytes per
    program. `load_bytes` gives, for each argument the kernel streams through, the bytes one thread reads with
    its narrowest load; `buffers` the tiles of each that the pipeline keeps in shared memory. `matrix` counts
    matrix instructions by name, in the hot loop if there is one. `resident`, `occupancy` and `limited_by` are
    estimates (`occupancy.py`).
    """

    kernel: str
    variant: str
    target: str
    num_warps: int
    num_stages: int
    registers: int
    spill_bytes: int
    spill_instructions: int
    shared_memory: int
    resident: int
    occupancy: float
    limited_by: str
    load_bytes: dict[str, int]
    buffers: dict[str, int]
    matrix: dict[str, int]
    loop_instructions: int


def listing_of(compiled: Compiled, kind: str = "sass") -> str:
    """The machine code of a compiled kernel, or its PTX. An AMD kernel has its GCN text for both."""
    return compiled.asm["amdgcn"] if "amdgcn" in compiled.asm else compiled.asm[kind]


def report_case(case: KernelCase, target: Target) -> KernelReport:
    """Compile one case for one target and read off what came out."""
    return describe(case, target, compile_launch(case.launch, target))


def describe(case: KernelCase, target: Target, compiled: Compiled) -> KernelReport:
    """The report of a case already compiled."""
    listing = Listing.parse(listing_of(compiled))
    loop = listing.within(listing.hot_loop)
    resident = occupancy(
        target,
        num_warps=case.launch.num_warps,
        registers=compiled.registers,
        shared_memory=compiled.shared_memory,
    )
    traced = [
        load
        for load in argument_loads(compiled.asm["ttgir"], compiled.run_time)
        if load.argument in case.streamed
    ]
    return KernelReport(
        kernel=case.name,
        variant=case.variant,
        target=target.name,
        num_warps=case.launch.num_warps,
        num_stages=case.launch.num_stages,
        registers=compiled.registers,
        spill_bytes=compiled.spill_bytes,
        spill_instructions=spill_instructions(listing.instructions),
        shared_memory=compiled.shared_memory,
        resident=resident.programs,
        occupancy=resident.fraction,
        limited_by=resident.limited_by,
        load_bytes={
            name: _narrowest(listing, {t.source for t in traced if t.argument == name})
            for name in case.streamed
        },
        buffers={t.argument: t.buffers for t in traced},
        matrix=dict(matrix_instructions(loop)),
        loop_instructions=len(loop) if listing.hot_loop else 0,
    )


def _narrowest(listing: Listing, sources: set[tuple[str, int]]) -> int:
    """Bytes of the narrowest load that stems from one of these source lines; 0 if there is none."""
    return min(
        (i.load_bytes for i in listing.instructions if i.load_bytes and i.source in sources), default=0
    )
