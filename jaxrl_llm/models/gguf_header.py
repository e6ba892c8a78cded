"""The header of a GGUF file: its metadata and the offsets of its tensors.

Every length is compared with the rest of the file before data of that length is read. A malformed
header therefore cannot cause a huge allocation or a loop of 2^40 steps.
"""

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS |= {12: "d"}
_STRING, _ARRAY = 8, 9
# The fewest bytes of a text, an array, an entry of the metadata and one of the tensors.
_LEAST = {_STRING: 8, _ARRAY: 12}
_LEAST_ENTRY, _LEAST_TENSOR = 13, 24
_MAX_AXES, _MAX_DEPTH, _MAX_ALIGNMENT = 4, 8, 2**20
_PLAIN = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
_PLAIN |= {"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}


class Tensor(NamedTuple):
    """A tensor as stored in the file.

    Args:
      name: Name in the file.
      shape: Row-major shape, in elements.
      kind: Block format.
      data: Memory-mapped: an array of ``shape`` for a plain kind, else the bytes of each row.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: np.ndarray


def read_header(path: Path) -> tuple[dict[str, Any], list[Tensor]]:
    """The metadata, and the tensors, whose data is not read yet.

    Raises:
      ValueError: If it is not a little-endian GGUF file of version 2 or 3, or is shorter than its
        header states.
    """
    data = np.memmap(path, np.uint8, mode="r")
    cursor = _Cursor(memoryview(data))
    if bytes(cursor.take(4)) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in (2, 3):
        swapped = version & 0xFFFF == 0
        raise ValueError("it is big-endian" if swapped else f"its version {version} is not 2 or 3")
    num_tensors, num_entries = cursor.number("Q"), cursor.number("Q")
    cursor.check(num_entries, _LEAST_ENTRY)
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"it has {key!r} twice")
        metadata[key] = cursor.value(cursor.number("I"))
    cursor.check(num_tensors, _LEAST_TENSOR)
    entries = [_entry(cursor) for _ in range(num_tensors)]
    if len({name for name, *_ in entries}) < len(entries):
        raise ValueError("it has two tensors of one name")
    alignment = metadata.get("general.alignment", 32)
    powers = [2**n for n in range(_MAX_ALIGNMENT.bit_length())]
    if isinstance(alignment, bool) or alignment not in powers:
        raise ValueError(
            f"its alignment is {alignment!r}, not a power of two up to {_MAX_ALIGNMENT}"
        )
    start = -(-cursor.at // alignment) * alignment
    return metadata, [_tensor(data, start, *entry) for entry in entries]


def _entry(cursor: "_Cursor") -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    """Name, row-major shape, kind and offset of a tensor."""
    name, axes = cursor.text(), cursor.number("I")
    if axes > _MAX_AXES:
        raise ValueError(f"tensor {name!r} has {axes:,} axes")
    sizes = [cursor.number("Q") for _ in range(axes)]
    kind = GGMLQuantizationType(cursor.number("I"))
    return name, tuple(reversed(sizes)), kind, cursor.number("Q")


def _tensor(
    data: np.ndarray,
    start: int,
    name: str,
    shape: tuple[int, ...],
    kind: GGMLQuantizationType,
    offset: int,
) -> Tensor:
    block, size = GGML_QUANT_SIZES[kind]
    row = shape[-1] if shape else 1
    if row % block:
        raise ValueError(f"tensor {name!r} has rows of {row:,}, not a multiple of {block}")
    begin, length = start + offset, math.prod(shape) // block * size
    if begin + length > data.size:
        raise ValueError(
            f"tensor {name!r} ends at byte {begin + length:,} of {data.size:,}; it may be truncated"
        )
    content = data[begin : begin + length]
    if kind.name in _PLAIN:
        return Tensor(name, shape, kind, content.view(_PLAIN[kind.name]).reshape(shape))
    return Tensor(name, shape, kind, content.reshape(*shape[:-1], row // block * size))


class _Cursor:
    """A place in the bytes of a file, which only moves forward."""

    def __init__(self, data: memoryview):
        self._data, self.at = data, 0

    def check(self, count: int, size: int) -> None:
        """Raises ValueError unless so many things of at least that size may follow."""
        left = len(self._data) - self.at
        if count * size > left:
            raise ValueError(
                f"byte {self.at:,} announces {count:,} of at least {size} bytes; {left:,} follow"
            )

    def take(self, size: int) -> memoryview:
        """The next bytes."""
        self.check(size, 1)
        self.at += size
        return self._data[self.at - size : self.at]

    def number(self, form: str) -> Any:
        """A number in a form of :mod:`struct`."""
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def text(self) -> str:
        """A text behind its length."""
        return str(self.take(self.number("Q")), "utf-8")

    def value(self, kind: int, depth: int = 0) -> Any:
        """A value of the metadata, by the number of its type."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"byte {self.at:,} has a value of the unknown type {kind}")
        if depth == _MAX_DEPTH:
            raise ValueError(f"byte {self.at:,} has an array more than {_MAX_DEPTH} levels deep")
        inner, count = self.number("I"), self.number("Q")
        if inner in _SCALARS:
            size = struct.calcsize(f"<{_SCALARS[inner]}")
            self.check(count, size)
            return list(struct.unpack(f"<{count}{_SCALARS[inner]}", self.take(count * size)))
        self.check(count, _LEAST.get(inner, 1))
        return [self.value(inner, depth + 1) for _ in range(count)]
