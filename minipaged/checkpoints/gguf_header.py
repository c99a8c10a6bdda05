"""The header of a GGUF file: metadata, and where each tensor lies.

The file comes from a stranger, so nothing it says is believed: every count and offset is compared with the
file's size before memory is taken for it, and each tensor must begin where the one before it ends. That is
what llama.cpp asks of a file as well (specification: ggml/docs/gguf.md).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# A header of the largest vocabularies has some 900 000 values in its lists and a few thousand tensors.
MOST_VALUES = 2**20
MOST_ENTRIES = 2**16
MOST_DIMENSIONS = 4
ALIGNMENT_KEY, ALIGNMENT = "general.alignment", 32

STRING, ARRAY, BOOL = 8, 9, 7
# Type id -> how numpy writes a number of that type.
NUMBERS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", BOOL: "u1", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` is ours: (out, in), slowest dimension first."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    nbytes: int
    offset: int  # bytes from the beginning of the data


class GGUFHeader:
    """Metadata and tensors of a file that stays mapped; ValueError for a header that cannot be right.

    Attributes:
        fields: key -> a number, a bool, `bytes` for a string, a numpy array or a list of `bytes` for a list.
        tensors: name -> where it lies.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._place, self._num_values = 0, 0
        if self._take(4) != b"GGUF":
            raise ValueError("GGUF magic invalid")
        (version,) = self._unpack("<I")
        if version & 0xFFFF == 0:
            raise ValueError("the file is big-endian, supported is little-endian")
        if version not in (2, 3):
            raise ValueError(f"GGUF version is {version}, supported are 2 and 3")
        num_tensors, num_fields = self._unpack("<QQ")
        for what, count in (("tensors", num_tensors), ("metadata fields", num_fields)):
            if count > MOST_ENTRIES:
                raise ValueError(f"the header has {count} {what}, at most {MOST_ENTRIES} are read")
        self.fields: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._name()
            if key in self.fields:
                raise ValueError(f"metadata {key} is there twice")
            self.fields[key] = self._value(key)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        self._data_start = _round_up(self._place, self._alignment())
        self.tensors = self._checked(infos)

    def rows(self, info: TensorInfo) -> np.ndarray:
        """The bytes of a tensor as they are stored, uint8 [..., bytes of a row]; no copy."""
        raw = np.frombuffer(self._data, np.uint8, info.nbytes, self._data_start + info.offset)
        return raw.reshape(gguf.quant_shape_to_byte_shape(info.shape, info.kind))

    def _take(self, count: int) -> bytes:
        """The next bytes; ValueError where the file ends before."""
        return self._data[self._advance(count) : self._place]

    def _advance(self, count: int) -> int:
        start, self._place = self._place, self._place + count
        if self._place > len(self._data):
            raise ValueError(
                f"truncated: data up to byte {self._place} is missing, the file has {len(self._data)}"
            )
        return start

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack_from(form, self._data, self._advance(struct.calcsize(form)))

    def _string(self) -> bytes:
        return self._take(self._unpack("<Q")[0])

    def _name(self) -> str:
        raw = self._string()
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise ValueError(f"a name is not UTF-8: {raw[:64]!r}") from None

    def _value(self, key: str) -> Any:
        (kind,) = self._unpack("<I")
        if kind != ARRAY:
            return self._string() if kind == STRING else self._numbers(key, kind, 1).tolist()[0]
        kind, count = self._unpack("<IQ")
        self._num_values += count
        if self._num_values > MOST_VALUES:
            raise ValueError(
                f"metadata {key} has {count} values: with those before it more than {MOST_VALUES}, "
                "which no vocabulary needs"
            )
        return [self._string() for _ in range(count)] if kind == STRING else self._numbers(key, kind, count)

    def _numbers(self, key: str, kind: int, count: int) -> np.ndarray:
        if kind not in NUMBERS:
            raise ValueError(f"metadata {key} has the unknown type {kind}")
        dtype = np.dtype(NUMBERS[kind])
        found = np.frombuffer(self._data, dtype, count, self._advance(count * dtype.itemsize))
        return found.astype(bool) if kind == BOOL else found

    def _tensor_info(self) -> TensorInfo:
        name = self._name()
        (num_dimensions,) = self._unpack("<I")
        if num_dimensions > MOST_DIMENSIONS:
            raise ValueError(f"tensor {name} has {num_dimensions} dimensions, at most {MOST_DIMENSIONS}")
        shape = self._unpack(f"<{num_dimensions}Q")[::-1]
        kind_id, offset = self._unpack("<IQ")
        try:
            kind = gguf.GGMLQuantizationType(kind_id)
        except ValueError:
            raise ValueError(f"tensor {name} has unknown quantisation type {kind_id}") from None
        numbers, (block, block_bytes) = int(np.prod(shape, dtype=object)), gguf.GGML_QUANT_SIZES[kind]
        if numbers % block or (shape and shape[-1] % block):
            raise ValueError(
                f"tensor {name} has rows of {shape[-1]} numbers, {kind.name} has blocks of {block}"
            )
        return TensorInfo(name, shape, kind, numbers // block * block_bytes, offset)

    def _alignment(self) -> int:
        alignment = self.fields.get(ALIGNMENT_KEY, ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"{ALIGNMENT_KEY} is {alignment!r}, a power of two is needed")
        return alignment

    def _checked(self, infos: list[TensorInfo]) -> dict[str, TensorInfo]:
        """By name, each where the sizes of those before it say that it must be, and inside the file."""
        tensors: dict[str, TensorInfo] = {}
        end = 0
        for info in infos:
            if info.name in tensors:
                raise ValueError(f"tensor {info.name} is there twice")
            if info.offset != end:
                raise ValueError(
                    f"tensor {info.name} begins at byte {info.offset} of the data, by the sizes before it "
                    f"at {end}"
                )
            tensors[info.name] = info
            last = self._data_start + end + info.nbytes
            if last > len(self._data):
                raise ValueError(
                    f"truncated: data up to byte {last} is missing, the file has {len(self._data)}"
                )
            end = _round_up(end + info.nbytes, self._alignment())
        return tensors


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
