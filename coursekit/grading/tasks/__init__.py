"""The tasks of all exercises, each loaded when it is first asked for."""

from collections.abc import Iterator, Mapping
from importlib import import_module

from coursekit.grading.task import Task

# task -> the module of this package that defines it in its TASKS; the course's order
_MODULES = {
    "multiplications": "ex01",
    "cached_attention": "ex01",
    "bytes_per_token": "ex02",
    "memory_plan": "ex02",
    "arena": "ex03",
    "waste": "ex03",
    "allocator": "ex04",
    "block_table": "ex04",
    "paged_attention": "ex05",
    "write_kv": "ex06",
    "decode_kernel": "ex07",
    "combine": "ex07_combine",
    "chunk_mask": "ex08",
    "chunked_prefill": "ex08",
    "ref_counts": "ex09",
    "fork": "ex09",
    "block_hash": "ex10",
    "prefix_cache": "ex10_cache",
    "scheduler_step": "ex11",
    "engine_step": "ex12",
    "engine_batch": "ex12",
    "step_cost": "ex15",
    "first_token": "ex15",
}


class _Tasks(Mapping[str, Task]):
    def __getitem__(self, name: str) -> Task:
        module = import_module(f"{__name__}.{_MODULES[name]}")
        return next(task for task in module.TASKS if task.name == name)

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


TASKS: Mapping[str, Task] = _Tasks()
