"""Layer 0: the building blocks of every method; nothing here depends on RL."""

from jaxrl_llm.core import checks, kl, low_rank, masking, segments, stats, trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.compose import (
    Bound,
    Transform,
    accepted,
    bind,
    call_with,
    chain,
    connect,
    functions_of,
    given,
    parts_of,
    pipe,
    prints_as_call,
    stateless,
)
from jaxrl_llm.core.traits import Traits, traits, traits_of

__all__ = [
    "Array",
    "ArrayTree",
    "Bound",
    "Traits",
    "Transform",
    "accepted",
    "bind",
    "call_with",
    "chain",
    "checks",
    "connect",
    "functions_of",
    "given",
    "kl",
    "low_rank",
    "masking",
    "parts_of",
    "pipe",
    "prints_as_call",
    "segments",
    "stateless",
    "stats",
    "traits",
    "traits_of",
    "trees",
]
