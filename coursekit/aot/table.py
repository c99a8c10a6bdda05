"""Printing kernel reports and listings for a reader with 100 columns and no GPU."""

from collections import Counter

from coursekit.aot.listing import Listing, matrix_instructions
from coursekit.aot.report import KernelReport
from minipaged.attention.targets import Target

COLUMNS = (
    f"{'kernel':<16} {'data':<20} {'warps':>5} {'regs':>4} {'spills':>6} {'shared':>9} "
    f"{'resident':>9} {'read':>4} {'buf':>3} {'matrix':>11}"
)

FOOTER = """\
warps     warps that work on one program; a program is Triton's unit of work, CUDA calls it a block
regs      32-bit registers per thread; NVIDIA has no more than 255, the rest spills
spills    bytes of registers per thread kept in memory instead: any number here costs bandwidth
shared    shared memory of one program: the tiles in flight, and scratch for reductions
resident  programs one multiprocessor holds at a time, the share of its warp slots they fill, and
          what allows no more: r registers, s shared memory, w warps, p programs; an estimate
read      bytes a thread reads at once from what the kernel streams through (K and V, or the rows
          it copies), at the narrowest such load; 16 is the most that one instruction usually can
buf       tiles of K (and of V) kept in shared memory, so that the next ones arrive while one is
          used; 0: the tile is read into registers
matrix    the tensor-core instruction of the hot loop and how many stand there; -: none"""


def heading(target: Target) -> str:
    """The line above a target's rows."""
    registers = f"{target.registers} registers" + (" a lane" if target.backend == "hip" else "")
    return (
        f"{target.name} ({target.card}): {target.num_multiprocessors} multiprocessors of {target.max_warps} "
        f"warps, {target.shared_memory // 1024} KiB shared memory, {registers}"
    )


def row(report: KernelReport) -> str:
    """One kernel as one line."""
    read = min(report.load_bytes.values(), default=0)
    resident = f"{report.resident} {report.occupancy:4.0%} {report.limited_by[0]}"
    families = Counter[str]()
    for name, count in report.matrix.items():
        families[_family(name)] += count
    matrix = " ".join(f"{name} x{count}" for name, count in families.items()) or "-"
    return (
        f"{report.kernel:<16} {report.variant:<20} {report.num_warps:>5} {report.registers:>4} "
        f"{report.spill_bytes or '-':>6} {report.shared_memory / 1024:>5.1f} KiB {resident:>9} "
        f"{f'{read} B' if read else '-':>4} {max(report.buffers.values(), default=0):>3} {matrix:>11}"
    )


def _family(name: str) -> str:
    """HMMA for HMMA.16816.F32.BF16, mfma for v_mfma_f32_32x32x8_f16, wgmma for wgmma.mma_async.sync..."""
    return name.removeprefix("v_").split(".")[0].split("_")[0]


def marked(text: str) -> str:
    """A listing with its hot loop marked by a bar, and its source line beside each instruction."""
    listing = Listing.parse(text)
    loop = listing.hot_loop
    at = {instruction.row: instruction for instruction in listing.instructions}
    lines = [_summary(listing, loop)]
    for number, line in enumerate(listing.rows):
        instruction = at.get(number)
        if instruction is None and not any(number == start for start in listing.labels.values()):
            continue
        bar = "┃" if loop is not None and number in loop else " "
        source = (
            f"{instruction.source[0]}:{instruction.source[1]}" if instruction and instruction.source else ""
        )
        lines.append(f"{bar} {_shorten(line.strip(), 76):<76} {source}".rstrip())
    return "\n".join(lines)


def _shorten(text: str, width: int) -> str:
    """Leave out the middle of a line that is too long: a matrix instruction in PTX names every register."""
    text = text.expandtabs(1)
    half = (width - 3) // 2
    return text if len(text) <= width else f"{text[:half]}...{text[-half:]}"


def _summary(listing: Listing, loop: range | None) -> str:
    """What the loop consists of."""
    if loop is None:
        return "no loop: straight-line code"
    inside = listing.within(loop)
    loads = [i.load_bytes for i in inside if i.load_bytes]
    widths = ", ".join(f"{loads.count(width)} of {width} B" for width in sorted(set(loads), reverse=True))
    matrix = ", ".join(f"{count} {name}" for name, count in matrix_instructions(inside).items())
    return (
        f"hot loop, marked ┃: {len(inside)} of {len(listing.instructions)} instructions\n"
        f"  loads from global memory: {widths or 'none'}\n"
        f"  matrix instructions: {matrix or 'none'}"
    )
