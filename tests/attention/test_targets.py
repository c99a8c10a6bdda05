"""Which limits a card in the machine is given, and what an architecture is said to have."""

from types import SimpleNamespace

import pytest
import torch

from minipaged.attention.targets import TARGETS, Target


def card(major: int, minor: int, shared_kib: int, threads: int, name: str = "card") -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        major=major,
        minor=minor,
        multi_processor_count=58,
        max_threads_per_multi_processor=threads,
        warp_size=32,
        shared_memory_per_multiprocessor=shared_kib * 1024,
    )


def test_a_card_between_two_known_ones_keeps_its_own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card(8, 9, 100, 1536, "L4"))
    target = Target.of(torch.device("cuda"))
    assert (target.name, target.card, target.num_multiprocessors) == ("sm_89", "L4", 58)
    assert (target.max_warps, target.shared_memory, target.shared_per_program) == (48, 100 * 1024, 99 * 1024)
    assert target.has_bfloat16 and target.has_float8


def test_a_card_too_old_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card(7, 0, 96, 2048, "V100"))
    with pytest.raises(ValueError, match="V100 is sm_70, the kernels need sm_75 or newer"):
        Target.of(torch.device("cuda"))


def test_every_listed_target_would_be_found_for_its_own_card(monkeypatch: pytest.MonkeyPatch) -> None:
    for target in TARGETS.values():
        if not isinstance(target.arch, int):
            continue
        major, minor = divmod(target.arch, 10)
        found = card(major, minor, target.shared_memory // 1024, 32 * target.max_warps, target.card)
        found.multi_processor_count = target.num_multiprocessors
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=found: found)
        assert Target.of(torch.device("cuda")) == target


def test_data_types_by_architecture() -> None:
    assert [t.name for t in TARGETS.values() if not t.has_bfloat16] == ["sm_75"]
    assert [t.name for t in TARGETS.values() if t.has_float8] == ["sm_90", "sm_100", "sm_120"]


def test_without_a_gpu_the_interpreter_stands_in() -> None:
    assert Target.of(torch.device("cpu")).name == "sm_80"
