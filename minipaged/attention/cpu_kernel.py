"""Builds and calls `kernels/decode_cpu.cpp`, so that a machine without a GPU runs a compiled kernel too.

The C++ compiler of the machine builds it on first use, in a second or two, for the very processor it runs on;
the library is kept in the user's cache folder. Without a compiler `load` answers None and torch serves.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from minipaged.attention.batch import AttentionBatch
    from minipaged.cache.storage import LayerKV

SOURCE = Path(__file__).parent / "kernels" / "decode_cpu.cpp"
FUNCTIONS = {torch.float32: "decode_float32", torch.bfloat16: "decode_bfloat16"}
# Fast maths lets the compiler turn sums and exponentials into vector code. It is left out of the link: there,
# older gcc would make the whole process flush denormal numbers.
COMPILE_FLAGS = ("-std=c++17", "-O3", "-ffast-math", "-fPIC")
# Best first: vector instructions of this processor and threads, then what any compiler takes.
OPTIONAL_FLAGS = (("-march=native", "-fopenmp"), ("-march=native",), ())


class Arguments(ctypes.Structure):
    """`struct Batch` of the source: pointers, integers and one float, in the same order."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("query", "keys", "values", "out", "seqs", "rows", "lens", "tables")
        ),
        *(
            (name, ctypes.c_int64)
            for name in ("num_seqs", "table_stride", "block_size", "heads", "kv_heads", "size")
        ),
        ("scale", ctypes.c_float),
    ]


@dataclass(frozen=True)
class CpuDecode:
    """The compiled kernel."""

    library: ctypes.CDLL

    def supports(self, query: Tensor, layer: LayerKV) -> bool:
        """Whether the kernel reads these tensors: on the CPU, of one dtype, contiguous, not quantised."""
        return (
            query.device.type == "cpu"
            and query.dtype in FUNCTIONS
            and layer.key.dtype == layer.value.dtype == query.dtype
            and layer.key.is_contiguous()
            and layer.value.is_contiguous()
        )

    def __call__(
        self, output: Tensor, query: Tensor, layer: LayerKV, batch: AttentionBatch, seqs: Tensor, scale: float
    ) -> None:
        """Fill the rows of `output` that belong to the sequences `seqs`; the others are left alone.

        query, output: [num_tokens, num_query_heads, head_size], output contiguous. seqs: int64 [n], sequences
        of `batch` with one query token and at least one key each.
        """
        query = query.contiguous()
        tensors = (query, layer.key, layer.value, output, seqs)
        tables = (batch.query_start, batch.context_lens, batch.block_tables)
        arguments = Arguments(
            *(tensor.data_ptr() for tensor in (*tensors, *tables)),
            len(seqs),
            batch.block_tables.stride(0),
            batch.block_size,
            query.shape[1],
            layer.key.shape[2],
            query.shape[2],
            scale,
        )
        getattr(self.library, FUNCTIONS[query.dtype])(ctypes.byref(arguments))


@cache
def load() -> CpuDecode | None:
    """The kernel, built now if this machine has not built it yet; None, with one warning, if it cannot be."""
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        warnings.warn(
            "no C++ compiler found: decode attention runs in plain torch, which is slower", stacklevel=2
        )
        return None
    try:
        return CpuDecode(ctypes.CDLL(str(_build(compiler))))
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1:]
        warnings.warn(
            f"decode attention runs in plain torch, the kernel was not built: {reason}", stacklevel=2
        )
        return None


def _build(compiler: str) -> Path:
    """Path of the shared library for this source, compiler and processor, compiled if it is not there yet."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    identity = "\n".join([version, platform.machine(), _processor(), str(COMPILE_FLAGS + OPTIONAL_FLAGS[0])])
    digest = hashlib.sha256(SOURCE.read_bytes() + identity.encode()).hexdigest()[:16]
    library = cache_folder() / f"decode_cpu-{digest}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled = Path(folder) / "decode_cpu"
        for i, optional in enumerate(OPTIONAL_FLAGS):
            try:
                _compile(compiler, compiled, optional)
                break
            except subprocess.CalledProcessError:
                if i == len(OPTIONAL_FLAGS) - 1:
                    raise
        os.replace(compiled.with_suffix(".so"), library)  # another process may be building it too
    return library


def _compile(compiler: str, target: Path, optional: tuple[str, ...]) -> None:
    object_file, library = target.with_suffix(".o"), target.with_suffix(".so")
    openmp = [flag for flag in optional if flag == "-fopenmp"]
    steps = (
        [compiler, *COMPILE_FLAGS, *optional, "-c", str(SOURCE), "-o", str(object_file)],
        [compiler, "-shared", *openmp, str(object_file), "-o", str(library)],
    )
    for step in steps:
        subprocess.run(step, capture_output=True, text=True, check=True, timeout=120)


def cache_folder() -> Path:
    """Where compiled kernels are kept: $XDG_CACHE_HOME/minipaged, by default ~/.cache/minipaged."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minipaged"


def _processor() -> str:
    """What `-march=native` depends on: a home folder may be shared by machines of different kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
