import pytest

from coursekit.multiprocessors import ProgramRun, busy_share, decode_programs, run_programs


def test_a_program_goes_to_the_multiprocessor_that_is_free_first():
    runs = run_programs([5, 2, 1, 4], num_multiprocessors=2)
    assert runs == [
        ProgramRun(0, 0, 5),
        ProgramRun(1, 0, 2),
        ProgramRun(1, 2, 3),
        ProgramRun(1, 3, 7),
    ]


def test_programs_without_keys_take_no_multiprocessor():
    assert run_programs([0, 3, 0], num_multiprocessors=4) == [ProgramRun(0, 0, 3)]


def test_idle_multiprocessors_and_early_ends_count_as_idle():
    assert busy_share(run_programs([8], 4), 4) == pytest.approx(1 / 4)
    assert busy_share(run_programs([4, 8], 2), 2) == pytest.approx(12 / 16)
    assert busy_share([], 4) == 0.0


def test_a_context_is_cut_into_parts_that_add_up():
    programs = decode_programs([10, 3], num_kv_heads=2, part_len=4)
    assert programs == [4, 4, 3, 3, 4, 4, 0, 0, 2, 2, 0, 0]
    assert sum(programs) == 2 * (10 + 3)


def test_one_part_is_one_program_per_head_and_sequence():
    assert decode_programs([10, 3], num_kv_heads=2, part_len=10) == [10, 10, 3, 3]
    assert decode_programs([], num_kv_heads=2, part_len=10) == []
