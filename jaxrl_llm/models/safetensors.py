"""Weights of a Hugging Face folder: one model.safetensors, or else several with an index."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxrl_llm.core.runtime.files import parsing

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F32", "F16", "BF16", "F64")


class TensorSource(Protocol):
    """A file or folder of tensors under the names of Hugging Face."""

    path: Path

    def names(self) -> frozenset[str]:
        """All tensor names."""
        ...

    def label(self, name: str) -> str:
        """The tensor's name in the file."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape."""
        ...

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        """One slice per axis of the tensor."""
        ...


class SafetensorsFolder:
    """Tensors of a folder by name; only the bytes of the requested slice are read.

    The folder holds model.safetensors, or model.safetensors.index.json and the files it names. Of
    both, model.safetensors is read, as by transformers.

    Raises:
      FileNotFoundError: If neither is there, or a file of the index is missing.
      ValueError: If a file is incomplete, or the index names a tensor that its file lacks.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder)
        self._files: dict[str, Any] = {}
        self._where: dict[str, Any] = {}
        index = self.path / INDEX
        if (self.path / SINGLE).is_file():
            file = self._open(SINGLE)
            self._where = dict.fromkeys(file.keys(), file)
        elif index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ValueError(f"SafetensorsFolder: {index} lacks its `weight_map`")
            for tensor, name in weight_map.items():
                if not isinstance(name, str) or Path(name).name != name:
                    raise ValueError(
                        f"SafetensorsFolder: {index} names {name!r}, outside its folder"
                    )
                self._where[tensor] = self._open(name)
            held = {name: set(file.keys()) for name, file in self._files.items()}
            for tensor, name in weight_map.items():
                if tensor not in held[name]:
                    raise ValueError(
                        f"SafetensorsFolder: {self.path / name} lacks the tensor {tensor} that "
                        f"{INDEX} places there"
                    )
        else:
            raise FileNotFoundError(
                f"SafetensorsFolder: {self.path} holds neither {SINGLE} nor {INDEX}"
            )

    def _open(self, name: str) -> Any:
        from safetensors import safe_open

        if name not in self._files:
            path = self.path / name
            if not path.is_file():
                raise FileNotFoundError(f"SafetensorsFolder: there is no file {path}")
            with parsing("SafetensorsFolder", path, "safetensors file"):
                # Reading through numpy needs neither torch nor a device.
                self._files[name] = safe_open(path, framework="numpy")
        return self._files[name]

    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._where)

    def label(self, name: str) -> str:
        """The name of a tensor in the files, for messages."""
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, [out, in] for a projection."""
        return tuple(self._where[name].get_slice(name).get_shape())

    def read(
        self, name: str, index: Sequence[slice], *, kinds: Sequence[str] = FLOATS
    ) -> np.ndarray:
        """One slice per axis of a tensor, in the stored dtype; bfloat16 is that of `ml_dtypes`.

        A tensor of another kind than ``kinds``, by the names of the format, is refused.
        """
        with parsing("SafetensorsFolder", self.path, "folder of safetensors"):
            tensor = self._where[name].get_slice(name)
            kind = tensor.get_dtype()
            if kind not in kinds:
                what = "a plain floating-point type" if kinds is FLOATS else " or ".join(kinds)
                raise ValueError(
                    f"SafetensorsFolder: tensor {name} of {self.path} is {kind}, not {what}"
                )
            return tensor[tuple(index)]


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that must hold an object; every error names the file."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except FileNotFoundError:
        raise FileNotFoundError(f"read_json: there is no file {path}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"read_json: {path} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"read_json: {path} must hold a JSON object, got {type(value).__name__}")
    return value
