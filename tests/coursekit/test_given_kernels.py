"""What the exercises' kernels run in: fenced memory, and a compiler for cards that are not here."""

import pytest
import torch
import triton
import triton.language as tl

from coursekit.given.fence import extent, run_fenced
from coursekit.grading.learner import Learner, Raised
from coursekit.grading.tasks.kernels import COMPILING


@triton.jit
def fill_kernel(target_ptr, count, first, TILE: tl.constexpr):
    lanes = tl.arange(0, TILE)
    tl.store(target_ptr + first.to(tl.int64) + lanes, tl.zeros([TILE], tl.float32) + 1, mask=lanes < count)


@triton.jit
def not_written_kernel(target_ptr):
    raise NotImplementedError()


def fill(target, count, first=0, skipped=None):
    args = {"target_ptr": target, "count": count, "first": first, "TILE": 8}
    run_fenced(fill_kernel, (1,), args, skipped)


def test_a_kernel_reaches_its_tensor_and_an_address_behind_it_is_an_error():
    memory = torch.zeros(10)
    fill(memory[:5], 5)
    assert memory.tolist() == [1.0] * 5 + [0.0] * 5
    with pytest.raises(
        IndexError, match=r"program \(0, 0, 0\) writes outside of its tensors, at 2 addresses"
    ):
        fill(memory[:5], 7)
    assert memory[5:].eq(0).all()


def test_the_next_kernel_is_not_fenced_in():
    other = torch.zeros(8)
    with pytest.raises(IndexError):
        fill(torch.zeros(2), 3)
    fill_kernel[(1,)](other[:2], 8, 0, TILE=8)
    assert other.eq(1).all()


def test_a_small_tensor_stands_for_the_end_of_a_large_one():
    end, far = torch.zeros(4), 2**40
    fill(end, 4, first=far, skipped={"target_ptr": far})
    assert end.eq(1).all()
    with pytest.raises(IndexError):
        fill(end, 4, first=0, skipped={"target_ptr": far})


def test_the_kernel_s_own_exception_comes_out():
    with pytest.raises(NotImplementedError):
        run_fenced(not_written_kernel, (1,), {"target_ptr": torch.zeros(1)})


def test_the_extent_of_a_view_ends_with_its_last_element():
    rows = torch.zeros(3, 8)
    assert extent(rows) == rows.nbytes
    assert extent(rows[:, :2]) == (2 * 8 + 2) * 4
    assert extent(rows[:0]) == 0


KERNEL = """
@triton.jit
def sum_kernel(out_ptr, count, TILE: tl.constexpr):
    total = START
    for first in range(0, count, TILE):
        total += tl.sum(tl.load(out_ptr + first + tl.arange(0, TILE)), axis=0)
    tl.store(out_ptr, total)
"""


def assembly(source, arch):
    with Learner({"sum": source}, preamble=COMPILING) as learner:
        types = {"out_ptr": "*fp32", "count": "i32"}
        return learner.assembly_of(learner.sum_kernel, types, {"TILE": 32}, arch)


@pytest.mark.parametrize("arch", [80, 90])
def test_a_kernel_is_compiled_in_the_guarded_process(arch):
    text = assembly(KERNEL.replace("START", "0.0"), arch)
    assert f".target sm_{arch}" in text and ".entry sum_kernel(" in text


def test_what_the_compiler_rejects_is_said_with_its_line():
    with pytest.raises(
        Raised, match=r"total has initial type int32 .* in: for first in range\(0, count, TILE\):"
    ):
        assembly(KERNEL.replace("START", "0"), 80)
