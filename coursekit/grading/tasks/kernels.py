"""What the checks of kernels share: a run that is fenced in, memory compared, and a real compiler."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from coursekit.grading.learner import Learner, Raised
from coursekit.grading.task import Expect

Axes = Sequence[str | tuple[str, ...]]
FILLED = 1e4  # in every place of a memory before a kernel writes to it
CARDS = {80: "A100", 90: "H100"}
COMPILING = """
import os
os.environ["TRITON_INTERPRET"] = "0"
import triton
import triton.language as tl
from coursekit.given.compiling import assembly_of
"""
COMPILES = "the kernel compiles for a card, too"
COMPILES_HINT = (
    "the interpreter runs any Python. The compiler takes neither break nor continue, no return in a loop, "
    "and a variable that a loop changes keeps its type: it must start as 0.0 if it becomes a float"
)


def expect_compiled(
    learner: Learner, expect: Expect, name: str, types: Mapping[str, str], constants: Mapping[str, Any]
) -> None:
    """The kernel `name` compiles for every card, in a process of its own, where Triton does not interpret."""
    with compiler_with_answer(learner) as compiling:
        for arch, card in CARDS.items():
            given = f"{name} compiled for an {card} (sm_{arch}), which need not be in this machine"
            try:
                with compiling.time_limit(60):
                    assembly = compiling.assembly_of(
                        getattr(compiling, name), dict(types), dict(constants), arch
                    )
            except Raised as error:
                expect.true(False, given, "PTX", error.message)
            expect.true(f".entry {name}(" in assembly, given, "PTX with this kernel", assembly)


def compiler_with_answer(learner: Learner) -> Learner:
    """A process in which the answer's kernels can be compiled. It has torch where an answer asks for it."""
    try:
        return learner.again(COMPILING)
    except Raised as error:
        if "NameError" not in error.types:
            raise
    return learner.again(COMPILING + "import torch\n")


def run_fenced(expect: Expect, given: str, call: Callable[[], Any]) -> Any:
    """`call()` lets a kernel run; that it leaves its tensors is a mismatch like any other, with a hint."""
    try:
        return call()
    except Raised as error:
        if "IndexError" not in error.types:
            raise
        expect.true(False, given, "nothing outside of the tensors is read or written", str(error))


def expect_memory(
    expect: Expect, got: Tensor, wanted: Tensor, given: str, axes: Axes, *, hint: str = ""
) -> None:
    """Equal in every bit. The message names the first difference by `axes`: words, or a name per index."""
    places = (got != wanted).nonzero()
    given = f"{given}. {len(places)} of {wanted.numel()} numbers are wrong"
    if not len(places):
        expect.true(True, given, "", "")
        return
    first = tuple(places[0].tolist())
    where = ", ".join(
        f"{axis} {i}" if isinstance(axis, str) else axis[i] for axis, i in zip(axes, first, strict=True)
    )
    before = " as before" if wanted[first] == FILLED else ""
    expected = f"in {where}: {float(wanted[first]):g}{before}"
    expect.true(False, given, expected, f"{float(got[first]):g}", hint=hint)
