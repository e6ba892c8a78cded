"""Our CHORD, loss, weighting and schedule, against Trinity-RFT's own code."""

from golden_data import Ours

from golden_ours import graded
from jaxrl_llm import aggregate, curation, surrogates

SCHEDULE = {"peak": 0.9, "valley": 0.05, "warmup": 4, "decay": 10}


def chord(step, *, phi=True, **schedule):
    def run(a):
        mu = curation.warmup_cosine(step, **schedule)
        weight = aggregate.guided_token_mean(a["mask"], steered=a["steered"], mu=mu)

        def total(logp):
            inputs = (logp, a["old_logp"], a["advantages"], a["mask"])
            each = surrogates.chord(*inputs, steered=a["steered"], phi=phi, dual_clip=3.0)
            return aggregate.weighted_sum(each, weight)

        return graded(total, a["logp"])

    return Ours(run)


TABLE = {
    "phi": chord(0, peak=0.1, valley=0.1, warmup=0, decay=0),
    "mu": chord(0, phi=False, peak=0.9, valley=0.1, warmup=0, decay=200),
    "warmup": chord(3, phi=False, **SCHEDULE),
    "decay": chord(7, **SCHEDULE),
    "valley": chord(20, **SCHEDULE),
}
TABLES = {"trinity": TABLE}
