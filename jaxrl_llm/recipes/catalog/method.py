"""A row of the catalog."""

import dataclasses

KINDS = (
    "reward",
    "curation",
    "advantage",
    "surrogate",
    "correction",
    "regularizer",
    "aggregate",
    "reference",
    "diagnostic",
    "rollout",
    "evolution",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A row of the catalog.

    Attributes:
      key: Short key; the public name of the method.
      title: What the paper calls it.
      arxiv: arXiv id, or "" where there is none.
      kind: One of ``KINDS``: what it is, mostly the slot it fills.
      functions: Public functions, as paths below ``jaxrl_llm``.
      preset: Key in ``PRESETS``, or None.
      verified_against: What its numbers were compared with; the catalog puts the peers first that
        ``peers.py`` names.
      confidence: CODE (formula read in released code), PAPER, NOTES or ABSTRACT.
    """

    key: str
    title: str
    arxiv: str
    kind: str
    functions: tuple[str, ...]
    preset: str | None = None
    verified_against: str
    confidence: str = "CODE"


NUMPY = "own float64 NumPy, worked numbers"
