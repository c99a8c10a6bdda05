"""Which loads read which kernel argument: traced in Triton's GPU IR, before names are lost to registers.

Pointers to the K/V cache are followed from the kernel's argument through address arithmetic to the loads. A
load's source line then finds its machine instructions in the listing, and their width.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_LINE = re.compile(r"^\s*(?P<results>%[^=]+?) = (?P<op>[\w.]+)(?P<rest>.*?)(?: loc\((?P<loc>#loc\d*)\))?$")
_NAME = re.compile(r"%[\w]+")
_LOADS = {"tt.load", "ttg.async_copy_global_to_local", "amdg.buffer_load", "amdg.buffer_load_to_local"}
_LOC_FILE = re.compile(r'^(#loc\d*) = loc\("([^"]+)":(\d+):\d+')
_LOC_REFERENCE = re.compile(r"^(#loc\d*) = loc\((?:\"[^\"]*\"\(|callsite\()(#loc\d*)")


@dataclass(frozen=True)
class ArgumentLoad:
    """One load through a pointer argument.

    `source` is (file name, line). `buffers` is the number of copies of the tile that the software pipeline
    keeps in shared memory, 0 when the load goes to registers.
    """

    argument: str
    source: tuple[str, int]
    buffers: int


def argument_loads(ttgir: str, arguments: Sequence[str]) -> list[ArgumentLoad]:
    """Loads through each pointer argument, in program order.

    Args:
        ttgir: the text of Triton's GPU IR.
        arguments: names of the arguments that exist at run time, in order (no compile-time constants).
    """
    locations = _locations(ttgir)
    origin: dict[str, str] = {}  # pointer value -> the argument it was computed from
    buffers: dict[str, int] = {}  # shared-memory value -> copies of the tile it was allocated with
    loads = []
    for row in ttgir.splitlines():
        if "tt.func public" in row:
            names = re.findall(r"(%\w+): ", row)
            origin.update(zip(names, arguments, strict=True))
            continue
        match = _LINE.match(row)
        if not match:
            continue
        operands, _, types = match["rest"].partition(" : ")
        used = _NAME.findall(operands)
        pointer = next((origin[name] for name in used[:1] if name in origin), None)
        if match["op"] in _LOADS:
            if pointer and match["loc"] in locations:
                depth = next((buffers[name] for name in used[1:2] if name in buffers), 0)
                loads.append(ArgumentLoad(pointer, locations[match["loc"]], depth))
        elif match["op"] == "scf.for":
            for carried, initial in re.findall(r"(%\w+) = (%\w+)", match["rest"]):
                if initial in origin:
                    origin[carried] = origin[initial]
        elif match["op"] == "ttg.local_alloc" and (shape := re.search(r"memdesc<(\d+)x\d+x", types)):
            buffers[match["results"]] = int(shape[1])
        elif match["op"] == "ttg.memdesc_index" and used[0] in buffers:
            buffers[match["results"]] = buffers[used[0]]
        elif "!tt.ptr" in types and (known := [origin[name] for name in used if name in origin]):
            origin[match["results"]] = known[0]
    return loads


def _locations(ttgir: str) -> dict[str, tuple[str, int]]:
    """Source line of every location id. Of an inlined call it is the line inside the function called."""
    found: dict[str, tuple[str, int]] = {}
    references: dict[str, str] = {}
    for row in ttgir.splitlines():
        if match := _LOC_FILE.match(row):
            found[match[1]] = (match[2].rsplit("/", 1)[-1], int(match[3]))
        elif match := _LOC_REFERENCE.match(row):
            references[match[1]] = match[2]
    for name in references:
        target = name
        while target in references and target not in found:
            target = references[target]
        if target in found:
            found[name] = found[target]
    return found
