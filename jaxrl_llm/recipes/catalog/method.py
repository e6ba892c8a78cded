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

    A row is whole if a run that names only the preset makes every step that the paper's algorithm
    makes. One rule holds for all rows:

    - A term of the paper's loss or reward whose coefficient is 0 by default is missing.
    - A number of the paper is missing if the method is that number, as 512 rollouts are BroRL's.
    - A model, a phase or a signal that a default replaces by another is missing.
    - A step in another form is not missing; the preset's docstring names the difference. A number
      may be that of the authors' or a peer's code; the docstring names the source.
    - No part of a method: data, reward and environment, a model that a run starts from, sizes
      (batch, group, lengths, model), the optimizer's settings, precision, and what corrects for a
      sampler whose numbers differ from the trainer's.

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
