"""The records of the catalog."""

import dataclasses
from typing import NamedTuple

KINDS = (
    "reward",
    "curation",
    "advantage",
    "surrogate",
    "correction",
    "preference",
    "regularizer",
    "aggregate",
    "reference",
    "diagnostic",
    "rollout",
    "evolution",
    "diffusion",
)


class Confirmed(NamedTuple):
    """A function whose values and gradients are compared with those of a peer's code.

    It is a function of the row or of a slot of its preset.

    Attributes:
      peer: Name and version, or the commit of a paper's repository.
      function: Our function, as a path below ``jaxrl_llm``.
      options: The options of the comparison: "defaults", then other values. Options that are not
        listed were not compared.
    """

    peer: str
    function: str
    options: str


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the catalog.

    Attributes:
      key: Short key; the public name of the method.
      title: The name in the paper.
      arxiv: arXiv id, or "" where there is none.
      kind: One of ``KINDS``, usually the slot that it fills.
      functions: Public functions, as paths below ``jaxrl_llm``.
      preset: Key in ``PRESETS``, or None.
      commands: Commands for a complete run of a method that needs more than a preset's name; words
        in capitals are placeholders for folders and a config file.
      missing: Parts of the method that a training run by the preset's name does not do; "" if
        nothing is missing. Without a preset, what a run would need.
      verified_against: Our checks of its numbers, in addition to the comparisons with peers.
      confidence: CODE (formula read in released code), PAPER, NOTES or ABSTRACT.
    """

    key: str
    title: str
    arxiv: str
    kind: str
    functions: tuple[str, ...]
    preset: str | None = None
    commands: tuple[str, ...] = ()
    missing: str = ""
    verified_against: str = "float64 NumPy, worked numbers"
    confidence: str = "CODE"

    @property
    def whole(self) -> bool:
        """Whether a run by the preset's name, or by the commands, trains the complete method."""
        return (self.preset is not None or bool(self.commands)) and not self.missing
