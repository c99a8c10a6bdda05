"""What the lessons launch compiles for the T4 of a free Colab session (sm_75), in the formats they use there.

The cases of `minipaged kernels` are a server's; lessons also run SmolLM2 and the tiny model in float32.
"""

import json
import os
import subprocess
import sys

import pytest

from coursekit.lesson import pick_device
from minipaged.attention.targets import TARGETS
from minipaged.model.tiny import TINY

pytest.importorskip("triton")

COMPILE = """
import json, sys
import torch
from coursekit.aot.report import report_case
from coursekit.aot.cases import Shape, _grouped, _prefill, _split, _write
from minipaged.attention.targets import TARGETS

target = TARGETS["sm_75"]
for dtype, kv_dtype, *heads in json.loads(sys.argv[1]):
    shape = Shape(getattr(torch, dtype), getattr(torch, kv_dtype), *heads)
    for case in (_grouped(shape, target), *_split(shape, target), _prefill(shape, target), _write(shape)):
        report = report_case(case, target)
        print(json.dumps([f"{report.kernel} {report.variant}", report.spill_bytes, report.shared_memory]))
"""
SMOLLM2 = (3, 3, 64)  # KV heads, query heads on each, head size
SHAPES = [
    ("float16", "float16", *SMOLLM2),
    ("float32", "float32", *SMOLLM2),
    ("float32", "int8", *SMOLLM2),
    ("float32", "float32", TINY.num_kv_heads, TINY.queries_per_kv, TINY.head_size),
]


def test_a_t4_is_given_float16(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (7, 5))
    assert str(pick_device()[1]) == "torch.float16"


@pytest.mark.slow
def test_every_kernel_of_the_lessons_compiles_and_fits():
    """Slow because the compiler runs 20 times, in a process where Triton does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, json.dumps(SHAPES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == 5 * len(SHAPES)
    assert {name.split()[0] for name, *_ in reports} == {
        "decode_grouped",
        "decode_split",
        "decode_combine",
        "prefill",
        "write_kv",
    }
    limit = TARGETS["sm_75"].shared_per_program
    assert [name for name, spilled, shared in reports if spilled or shared > limit] == []
