import pytest
import torch
import triton
import triton.language as tl

from coursekit.interpreted import counted_reads, reversed_programs


@triton.jit
def copy_kernel(target_ptr, source_ptr, length, TILE: tl.constexpr):
    lanes = tl.arange(0, TILE)
    numbers = tl.load(source_ptr + lanes, mask=lanes < length, other=0.0)
    tl.store(target_ptr + lanes, numbers, mask=lanes < length)


@triton.jit
def last_program_kernel(target_ptr):
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(target_ptr, tl.load(target_ptr) * 10 + program)


def test_only_lanes_in_front_of_the_mask_are_counted():
    source, target = torch.ones(8, dtype=torch.float16), torch.zeros(8, dtype=torch.float16)
    with counted_reads(source) as reads:
        copy_kernel[(1,)](target, source, 5, TILE=8)
    assert target.tolist() == [1.0] * 5 + [0.0] * 3
    assert reads.num_bytes == 5 * source.element_size()


def test_every_program_counts_again():
    source, target = torch.ones(8), torch.zeros(8)
    with counted_reads(source) as reads:
        copy_kernel[(3,)](target, source, 8, TILE=8)
    assert reads.num_bytes == 3 * source.nbytes


def test_other_tensors_and_later_launches_do_not_count():
    source, target, other = torch.ones(8), torch.zeros(8), torch.zeros(8)
    with counted_reads(target, other) as reads:
        copy_kernel[(1,)](target, source, 8, TILE=8)
    copy_kernel[(1,)](other, target, 8, TILE=8)
    assert reads.num_bytes == 0


def test_programs_run_from_the_last_to_the_first():
    forward, backward, again = (torch.zeros(1, dtype=torch.int32) for _ in range(3))
    last_program_kernel[(2, 3)](forward)
    with reversed_programs():
        last_program_kernel[(2, 3)](backward)
    last_program_kernel[(2, 3)](again)
    assert (forward.item(), backward.item(), again.item()) == (12345, 543210, 12345)


def test_the_interpreter_is_itself_again_after_an_error():
    order = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ZeroDivisionError), reversed_programs(), counted_reads(order):
        raise ZeroDivisionError
    last_program_kernel[(2, 3)](order)
    assert order.item() == 12345
