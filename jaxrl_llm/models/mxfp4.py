"""Expert matrices that a folder stores as MXFP4, such as those of gpt-oss, read as numbers.

A tensor `X` is stored as `X_blocks`, uint8 `[E, out, groups, 16]`, and `X_scales`, uint8
`[E, out, groups]`. A byte holds two numbers of four bits (sign, two bits of exponent, one of
mantissa), the lower half first; the 32 numbers of a group share a power of two:

    X[e, 32 g + 2 b + h, o] = FP4[half h of blocks[e, o, g, b]] 2^(scales[e, o, g] - 127)

Every such number is exact in bfloat16 and float32, as long as its exponent is. Training needs the
numbers: the stored form has no gradient.

References:
  OCP Microscaling Formats (MX) Specification 1.0, sec. 5; gpt-oss (arXiv:2508.10925), sec. 2.1.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxrl_llm.models.safetensors import SafetensorsFolder

# By the four bits; the highest is the sign.
_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
FP4 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_GROUP, _BYTES, _BIAS, _NAN = 32, 16, 127, 255
_BLOCKS, _SCALES = "_blocks", "_scales"


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The numbers of packed groups.

    Args:
      blocks: uint8 ``[..., groups, 16]``.
      scales: uint8 ``[..., groups]``, exponents plus 127.

    Returns:
      float32 ``[..., 32 * groups]``.

    Example:
      >>> import numpy as np
      >>> blocks = np.zeros((1, 16), np.uint8)
      >>> blocks[0, 0] = 0xF1
      >>> dequantize(blocks, np.array([128], np.uint8))[:3].tolist()
      [1.0, -12.0, 0.0]
    """
    halves = np.stack([blocks & 0x0F, blocks >> 4], axis=-1)
    numbers = FP4[halves].reshape(*scales.shape, _GROUP)
    numbers = np.ldexp(numbers, scales[..., None].astype(np.int32) - _BIAS)
    return numbers.reshape(*scales.shape[:-1], -1)


class Mxfp4Folder:
    """The tensors of a folder, with the packed ones as numbers ``[E, in, out]``.

    Only the groups of the requested slice are read and unpacked.

    Args:
      folder: The tensors as they are stored.

    Raises:
      ValueError: If blocks lack their scales, or their shapes do not belong together; when a slice
        is read, if a scale is not a number.
    """

    def __init__(self, folder: SafetensorsFolder) -> None:
        self.path: Path = folder.path
        self._folder, held = folder, folder.names()
        self._packed = {x.removesuffix(_BLOCKS) for x in held if x.endswith(_BLOCKS)}
        for name in sorted(self._packed):
            if name + _SCALES not in held:
                raise ValueError(
                    f"Mxfp4Folder: {self.path} has {name}{_BLOCKS} but not {name}{_SCALES}"
                )
            blocks, scales = (folder.shape(name + end) for end in (_BLOCKS, _SCALES))
            if len(blocks) != 4 or blocks[-1] != _BYTES or blocks[:-1] != scales:
                raise ValueError(
                    f"Mxfp4Folder: {name}{_BLOCKS} of {self.path} must have shape [experts, out, "
                    f"groups, {_BYTES}], and its scales one for each group; got {blocks} and "
                    f"{scales}"
                )

    def names(self) -> frozenset[str]:
        """Names of all tensors, those of packed ones without their ending."""
        stored = {name + end for name in self._packed for end in (_BLOCKS, _SCALES)}
        return self._folder.names() - stored | self._packed

    def label(self, name: str) -> str:
        """The name of a tensor in the files, for messages."""
        return name + _BLOCKS if name in self._packed else name

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, [experts, in, out] for a packed one."""
        if name not in self._packed:
            return self._folder.shape(name)
        experts, outputs, groups = self._folder.shape(name + _SCALES)
        return experts, _GROUP * groups, outputs

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        """One slice per axis of a tensor, without steps; float32 for a packed one."""
        if name not in self._packed:
            return self._folder.read(name, index)
        experts, inputs, outputs = index
        start, stop, _ = inputs.indices(self.shape(name)[1])
        first = start // _GROUP
        groups = slice(first, max(first, -(-stop // _GROUP)))
        stored = (experts, outputs, groups)
        scales = self._folder.read(name + _SCALES, stored, kinds=("U8",))
        if (scales == _NAN).any():
            raise ValueError(f"Mxfp4Folder: {name}{_SCALES} of {self.path} has a scale of 255, NaN")
        blocks = self._folder.read(name + _BLOCKS, (*stored, slice(None)), kinds=("U8",))
        cut = slice(start - _GROUP * first, stop - _GROUP * first)
        return dequantize(blocks, scales)[..., cut].swapaxes(1, 2)


def open_folder(path: Path) -> SafetensorsFolder | Mxfp4Folder:
    """The tensors of a Hugging Face folder, packed or not."""
    folder = SafetensorsFolder(path)
    packed = any(name.endswith(_BLOCKS) for name in folder.names())
    return Mxfp4Folder(folder) if packed else folder
