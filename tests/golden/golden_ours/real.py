"""Our loss of REAL against the authors' own code."""

from golden_data import Ours

from golden_ours import graded
from jaxrl_llm import advantages, aggregate, surrogates


def real(**options):
    def run(a):
        mask, sides = a["mask"], advantages.dr_grpo(a["rewards"])
        weight = aggregate.group_mean(mask)

        def total(logp):
            each = surrogates.real(logp, a["old_logp"], sides, mask, **options)
            return aggregate.weighted_sum(each, weight)

        return graded(total, a["logp"])

    return run


TABLE = {"script": Ours(real()), "soft": Ours(real(tau=2.0))}
TABLES = {"real": TABLE}
