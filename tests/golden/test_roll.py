"""Our loss of tapered off-policy REINFORCE against ROLL's own code."""

import golden_data
import jax.numpy as jnp
from golden_data import Ours
from golden_ours import loss
from rows import for_each

from jaxrl_llm import surrogates

ROLL = golden_data.load("roll")


def total(mask):
    """ROLL's function leaves the weighting to its worker."""
    return mask.astype(jnp.float32)


TABLE = {"topr": Ours(loss(surrogates.topr, total, level="token"))}


@for_each(("name", "case"), ROLL.cases())
def test_numbers_of_roll(name, case):
    golden_data.check(ROLL, TABLE, name, case)


def test_every_entry_is_compared():
    golden_data.check_complete(ROLL, TABLE)
