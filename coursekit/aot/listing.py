"""Reading a compiler's listing: PTX, SASS (NVIDIA's machine code) or AMD GCN text.

The listing is only split as far as questions are asked of it: where the loops are, how wide the loads of
global memory are, which matrix instructions occur, and which source line each instruction comes from.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

MATRIX = re.compile(r"[HIQOBD]G?MMA|UTC\w*MMA|mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_s?mfma")
SPILL = re.compile(r"(LDL|STL|(ld|st)\.local|scratch_(load|store))")

_LABEL = re.compile(r"^\s*([.$]?L[\w$]+):")
_BRANCH = re.compile(r"^(BRA|bra|s_c?branch)")
_BRANCH_LABEL = re.compile(r"([.$]L[\w$]+)")
# SASS has lines like "/*0180*/  @!P0 LDG.E.128 R4, ..." and PTX "@%p1 ld.global.v4.b32 ...".
_SASS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+\{?\s*(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
_TEXT = re.compile(r"^\s+(?:@!?%\w+\s+)?([a-z]\w+[\w.:]*)(.*)")
_SASS_SOURCE = re.compile(r'//## File "([^"]+)", line (\d+)')
_TEXT_SOURCE = re.compile(r"^\s*\.loc\s.*(?://|;)\s*(\S+?):(\d+):\d+")
_SASS_LOAD = re.compile(r"^(?:LDG|LDGSTS)\b")
_PTX_LOAD = re.compile(r"^ld\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)$")
_PTX_COPY = re.compile(r"^cp\.async\.c[ag]\.shared\.global")
_GCN_LOAD = re.compile(r"^(?:global|buffer|flat)_load_(dwordx[234]|dword|[su]?short|[su]byte)")
_GCN_BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}


@dataclass(frozen=True)
class Instruction:
    """One instruction; `row` counts the lines of the listing, `source` is (file name, line) where known."""

    row: int
    opcode: str
    operands: str
    source: tuple[str, int] | None

    @property
    def load_bytes(self) -> int | None:
        """Bytes one thread reads from global memory with this instruction; None if it is no such load."""
        if _SASS_LOAD.match(self.opcode):
            sizes = [int(s) for s in re.findall(r"\.[US]?(8|16|64|128|256)\b", self.opcode)]
            return (sizes[0] if sizes else 32) // 8
        if match := _PTX_LOAD.match(self.opcode):
            return int(match[1] or 1) * int(match[2]) // 8
        if _PTX_COPY.match(self.opcode):
            return int(self.operands.split(",")[2].strip(" ;"), 0)
        if match := _GCN_LOAD.match(self.opcode):
            return _GCN_BYTES.get(match[1], 2 if "short" in match[1] else 1)
        return None


@dataclass(frozen=True)
class Listing:
    """The lines of a listing, its instructions, and the row each label stands on."""

    rows: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    @classmethod
    def parse(cls, text: str) -> "Listing":
        """Split a listing of any of the three dialects."""
        rows = tuple(text.splitlines())
        instructions: list[Instruction] = []
        labels: dict[str, int] = {}
        source: tuple[str, int] | None = None
        for number, row in enumerate(rows):
            if match := _LABEL.match(row):
                labels[match[1]] = number
            elif match := _SASS_SOURCE.search(row) or _TEXT_SOURCE.match(row):
                source = (match[1].rsplit("/", 1)[-1], int(match[2]))
            elif match := _SASS.match(row) or _TEXT.match(row):
                instructions.append(Instruction(number, match[1], match[2], source))
        return cls(rows, tuple(instructions), labels)

    @cached_property
    def loops(self) -> list[range]:
        """Rows of every innermost loop: from the label a later branch goes back to, up to that branch."""
        found = []
        for instruction in self.instructions:
            if _BRANCH.match(instruction.opcode):
                match = _BRANCH_LABEL.search(instruction.operands)
                start = self.labels.get(match[1], instruction.row) if match else instruction.row
                if any(start < other.row < instruction.row for other in self.instructions):
                    found.append(range(start, instruction.row + 1))
        return [loop for loop in found if not any(_inside(other, loop) for other in found)]

    @cached_property
    def hot_loop(self) -> range | None:
        """The innermost loop with most global loads and matrix instructions; None without a loop."""

        def work(loop: range) -> int:
            return sum(bool(i.load_bytes or MATRIX.match(i.opcode)) for i in self.within(loop))

        return max(self.loops, key=work, default=None)

    def within(self, rows: range | None) -> list[Instruction]:
        """Instructions that stand in `rows`; all of them for None."""
        return [i for i in self.instructions if rows is None or i.row in rows]


def matrix_instructions(instructions: Iterable[Instruction]) -> Counter[str]:
    """How often each kind of matrix (tensor-core) instruction occurs, by the name used in the listing."""
    return Counter(i.opcode for i in instructions if MATRIX.match(i.opcode))


def spill_instructions(instructions: Iterable[Instruction]) -> int:
    """Loads and stores of local memory, which is where registers that do not fit are spilled."""
    return sum(bool(SPILL.match(i.opcode)) for i in instructions)


def _inside(inner: range, outer: range) -> bool:
    return inner != outer and outer.start <= inner.start and inner.stop <= outer.stop
