"""Layer 0: the vocabulary that every method is written in; nothing here knows about RL."""

from jaxrl_llm.core import checks, masking, stats, trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.bind import Bound, accepted, bind, call_with
from jaxrl_llm.core.level import has_ratio, level_of, no_ratio, sequence_level
from jaxrl_llm.core.transform import Transform, chain, functions_of, parts_of, stateless

__all__ = [
    "Array",
    "ArrayTree",
    "Bound",
    "Transform",
    "accepted",
    "bind",
    "call_with",
    "chain",
    "checks",
    "functions_of",
    "has_ratio",
    "level_of",
    "masking",
    "no_ratio",
    "parts_of",
    "sequence_level",
    "stateless",
    "stats",
    "trees",
]
