"""With sanitizers in the library: the tests that call it as the engine does, in a process of their own."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

from minipaged.cpu import build

FOLDERS = ("tests/attention", "tests/cpu", "tests/engine/test_equality.py")
# Of these folders: what runs the C++ kernels, and no kernel of a GPU. Emulated tiles would be another library
# to build; test_any_processor.py has them with sanitizers.
MODULES = "test_cpu_kernels or test_products or test_compiled or test_accelerate or test_equality"
NAMES = f"({MODULES} or cpu and (test_agreement or test_backends)) and not triton and not emulated"


@pytest.mark.slow
def test_the_kernels_read_and_write_nothing_but_their_own(tmp_path: Path):
    """Slow: half a minute of building, then hundreds of tests. What the sanitizers find they write to a file,
    and end the process."""
    compiler = build.find_compiler()
    if compiler is None or not shutil.which(compiler):
        pytest.skip("no C++ compiler on this machine")
    named = [compiler, "-print-file-name=libasan.so"]
    runtime = Path(subprocess.run(named, capture_output=True, text=True, check=True).stdout.strip())
    if not runtime.is_absolute():
        pytest.skip(f"{compiler} has no library of the address sanitizer")
    sanitizing = tmp_path / "c++"
    flags = "-O1 -fsanitize=address,undefined -fno-sanitize-recover=all -g"  # -O3 is the other test's
    sanitizing.write_text(f'#!/bin/sh\nexec {shlex.quote(compiler)} "$@" {flags}\n')
    sanitizing.chmod(0o755)
    environment = os.environ | {
        "CXX": str(sanitizing),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "LD_PRELOAD": str(runtime),
        "ASAN_OPTIONS": f"detect_leaks=0:log_path={tmp_path / 'report'}",  # Python keeps much until it ends
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={tmp_path / 'report'}",
        "MINIPAGED_FUZZ": "1",
    }
    pytest_options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not extra", "-k", NAMES]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *pytest_options, *FOLDERS],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    reports = "\n".join(path.read_text() for path in tmp_path.glob("report*"))
    print(done.stdout[-3000:], done.stderr[-1000:], reports[:5000])
    assert not reports and done.returncode == 0
    libraries = list((tmp_path / "cache" / "minipaged").glob("*.so"))
    assert libraries and all(b"__asan_report_load" in path.read_bytes() for path in libraries)
