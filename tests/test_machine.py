"""What the machine has: memory within a container's limit, and the refusal that names both numbers."""

import pytest

from minipaged import machine

MIB = 2**20


def write_cgroup(folder, limit: str, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    active = 3 * cache // 4
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache - active}\nactive_file {active}\n")


def write_old_cgroup(folder, limit: int, used: int, cache: int) -> None:
    """Version 1, where the numbers of a group and of those below it have names of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    active = 3 * cache // 4
    total = f"total_inactive_file {cache - active}\ntotal_active_file {active}\n"
    (folder / "memory.stat").write_text(f"inactive_file 1\nactive_file 1\n{total}")


def left(root, *membership: str) -> int | None:
    """What a process in these groups may take."""
    (root / "membership").write_text("".join(f"{line}\n" for line in membership))
    return machine.cgroup_available(root, root / "membership")


def test_memory_of_a_container_is_its_limit_less_what_is_used_and_not_given_back(tmp_path):
    write_cgroup(tmp_path, str(1000 * MIB), 700 * MIB, 200 * MIB)
    assert left(tmp_path, "0::/") == 500 * MIB
    assert left(tmp_path, "0::/docker/0123") == 500 * MIB  # as the host names it: no such folder here
    assert machine.cgroup_available(tmp_path, tmp_path / "none") == 500 * MIB


def test_the_tightest_limit_above_a_process_counts(tmp_path):
    """Batch systems and systemd limit groups within the machine's own: a slice, a job in it, its step."""
    write_cgroup(tmp_path / "user.slice", str(900 * MIB), 300 * MIB, 0)
    write_cgroup(tmp_path / "user.slice" / "job", str(800 * MIB), 300 * MIB, 0)
    write_cgroup(tmp_path / "user.slice" / "job" / "step", "max", 0, 0)
    write_cgroup(tmp_path / "user.slice" / "other", str(1 * MIB), 0, 0)
    assert left(tmp_path, "0::/user.slice/job/step") == 500 * MIB
    assert left(tmp_path, "0::/user.slice") == 600 * MIB
    assert left(tmp_path, "0::/") is None


def test_the_limits_of_version_1_count_as_well(tmp_path):
    write_old_cgroup(tmp_path / "memory" / "job", 600 * MIB, 300 * MIB, 100 * MIB)
    write_old_cgroup(tmp_path / "memory", 2**63 - 4096, 700 * MIB, 0)  # none
    groups = ("5:cpu,cpuacct:/", "4:memory:/job", "1:name=systemd:/", "0::/")
    assert left(tmp_path, *groups) == 400 * MIB
    assert left(tmp_path, "4:memory:/", "0::/") is None
    write_old_cgroup(tmp_path / "memory", 200 * MIB, 0, 0)  # a container's own, under whatever name
    assert left(tmp_path, "4:memory:/docker/0123", "0::/") == 200 * MIB


def test_container_without_limit_or_without_cgroup_has_none(tmp_path):
    assert left(tmp_path, "0::/") is None
    write_cgroup(tmp_path, "max", 700 * MIB, 0)
    assert left(tmp_path, "0::/") is None


def test_container_over_its_limit_has_nothing_left(tmp_path):
    write_cgroup(tmp_path, str(100 * MIB), 200 * MIB, 0)
    assert left(tmp_path, "0::/") == 0


def test_available_memory_is_the_smaller_of_machine_and_container(monkeypatch):
    monkeypatch.setattr(machine, "cgroup_available", lambda: 5 * MIB)
    assert machine.available_memory() == 5 * MIB
    monkeypatch.setattr(machine, "cgroup_available", lambda: 2**60)
    assert 0 < machine.available_memory() < 2**60


def test_too_little_memory_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(machine, "available_memory", lambda: 300 * MIB)
    machine.require_memory(300 * MIB, "the demo")
    with pytest.raises(MemoryError, match="the demo needs about 301 MiB of free memory, 300 MiB are free"):
        machine.require_memory(301 * MIB, "the demo")


def test_version_of_a_missing_package_is_none():
    assert machine.version("no-such-package-here") is None
    assert machine.version("numpy") is not None


def test_broken_torch_is_reported_not_raised(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    error, gpu, bfloat16 = machine.torch_facts()
    assert "torch" in error
    assert (gpu, bfloat16) == (None, False)
