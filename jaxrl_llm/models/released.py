"""Checkpoints as they are released, under the names of the decoder of texts alone.

A model of images and text has its decoder under ``model.language_model``, beside an encoder of
images, and heads that predict several tokens under ``mtp``; neither computes logits of a text. Its
experts are two tensors a layer: ``experts.gate_up_proj`` ``[E, 2 M, D]`` and ``experts.down_proj``
``[E, D, M]``. Here each expert has its own three tensors, as the decoder alone has them.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrl_llm.models.safetensors import TensorSource

_PREFIX = "model.language_model."
_NOT_READ = ("model.visual.", "mtp.")
_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")


class _Place(NamedTuple):
    """A tensor of the source: all of it, or rows of one expert."""

    name: str
    expert: int | None = None
    start: int = 0
    rows: int = 0


class TextDecoder:
    """The tensors of the decoder of texts in a source, see the module."""

    def __init__(self, source: TensorSource):
        self._source, self.path = source, Path(source.path)
        self._places: dict[str, _Place] = {}
        for held in source.names():
            if held.startswith(_NOT_READ):
                continue
            name = f"model.{held.removeprefix(_PREFIX)}" if held.startswith(_PREFIX) else held
            if fused := _EXPERTS.fullmatch(name):
                self._split(held, *fused.groups())
            else:
                self._places[name] = _Place(held)

    def _split(self, held: str, name: str, which: str) -> None:
        """One tensor of all experts as those of each."""
        count, rows, _ = self._source.shape(held)
        parts = ("gate", "up") if which == "gate_up" else ("down",)
        size = rows // len(parts)
        for expert in range(count):
            for i, part in enumerate(parts):
                place = _Place(held, expert, i * size, size)
                self._places[f"{name}.{expert}.{part}_proj.weight"] = place

    def names(self) -> frozenset[str]:
        """All tensor names."""
        return frozenset(self._places)

    def label(self, name: str) -> str:
        """The tensor's name in the file."""
        place = self._places.get(name)
        return self._source.label(name if place is None else place.name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape."""
        place = self._places[name]
        shape = self._source.shape(place.name)
        return shape if place.expert is None else (place.rows, shape[-1])

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        """One slice per axis of the tensor."""
        place = self._places[name]
        if place.expert is None:
            return self._source.read(place.name, index)
        start, stop, _ = index[0].indices(place.rows)
        rows = slice(place.start + start, place.start + stop)
        return self._source.read(
            place.name, [slice(place.expert, place.expert + 1), rows, index[1]]
        )[0]
