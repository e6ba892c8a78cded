"""Our loss of REAL against the authors' own code."""

import golden_data
import jax
from golden_data import Ours
from rows import for_each

from jaxrl_llm import advantages, aggregate, surrogates

REAL = golden_data.load("real")


def real(**options):
    def run(a):
        mask, sides = a["mask"], advantages.dr_grpo(a["rewards"])
        weight = aggregate.group_mean(mask)

        def total(logp):
            each = surrogates.real(logp, a["old_logp"], sides, mask, **options)
            return aggregate.weighted_sum(each, weight)

        value, gradient = jax.value_and_grad(total)(a["logp"])
        return {"loss": value, "gradient": gradient}

    return run


TABLE = {"script": Ours(real()), "soft": Ours(real(tau=2.0))}


@for_each(("name", "case"), REAL.cases())
def test_numbers_of_the_authors(name, case):
    golden_data.check(REAL, TABLE, name, case)


def test_every_entry_is_compared():
    golden_data.check_complete(REAL, TABLE)
