"""What the machine has: memory within a container's limit, and the refusal that names both numbers."""

import pytest

from minipaged import machine
from minipaged.commands import CommandError

MIB = 2**20


def write_cgroup(folder, limit: str, used: int, cache: int) -> None:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")


def test_memory_of_a_container_is_its_limit_less_what_is_used_and_not_given_back(tmp_path):
    write_cgroup(tmp_path, str(1000 * MIB), 700 * MIB, 200 * MIB)
    assert machine.cgroup_available(tmp_path) == 500 * MIB


def test_container_without_limit_or_without_cgroup_has_none(tmp_path):
    assert machine.cgroup_available(tmp_path) is None
    write_cgroup(tmp_path, "max", 700 * MIB, 0)
    assert machine.cgroup_available(tmp_path) is None


def test_container_over_its_limit_has_nothing_left(tmp_path):
    write_cgroup(tmp_path, str(100 * MIB), 200 * MIB, 0)
    assert machine.cgroup_available(tmp_path) == 0


def test_available_memory_is_the_smaller_of_machine_and_container(monkeypatch):
    monkeypatch.setattr(machine, "cgroup_available", lambda: 5 * MIB)
    assert machine.available_memory() == 5 * MIB
    monkeypatch.setattr(machine, "cgroup_available", lambda: 2**60)
    assert 0 < machine.available_memory() < 2**60


def test_too_little_memory_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(machine, "available_memory", lambda: 300 * MIB)
    machine.require_memory(300 * MIB, "the demo")
    with pytest.raises(CommandError, match="the demo needs about 301 MiB of free memory, 300 MiB are free"):
        machine.require_memory(301 * MIB, "the demo")


def test_version_of_a_missing_package_is_none():
    assert machine.version("no-such-package-here") is None
    assert machine.version("numpy") is not None


def test_broken_torch_is_reported_not_raised(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    error, gpu, bfloat16 = machine.torch_facts()
    assert "torch" in error
    assert (gpu, bfloat16) == (None, False)
