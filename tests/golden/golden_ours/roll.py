"""Our loss of tapered off-policy REINFORCE against ROLL's own code."""

import jax.numpy as jnp
from golden_data import Ours

from golden_ours import loss
from jaxrl_llm import surrogates


def total(mask):
    """ROLL's function leaves the weighting to its worker."""
    return mask.astype(jnp.float32)


TABLE = {"topr": Ours(loss(surrogates.topr, total, level="token"))}
TABLES = {"roll": TABLE}
