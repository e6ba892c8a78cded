"""Pushing bad responses down from an upper bound trains better than from the lower bound

Tabular denoisers of four tokens out of three, with rewards of responses from 0 to 1 of which few
are near 1, learn by policy gradient from groups of 16 for 60 steps, with two forwards a response.
`sandwiched` has a mixture of an upper and the lower bound for responses below the mean of their
group, the lower bound for the others; without (`mix=0`) it is the lower bound for all. Each learns
at the rate of a grid that is best for it on other seeds, and that is not at its end. With responses
that are right or wrong, as this claim was measured first, no rate was too great. The number is the
exact mean reward at the end, less that without, paired by seed; 0 or below refutes the claim.
"""

import jax.numpy as jnp

from benchmarks.claims import _denoisers, harness
from jaxrl_llm import diffusion

PAPER = "2510.09541"
RATES = tuple(4.0**power for power in range(1, 9))
FORWARDS = 2
MIXES = {"lower bound alone": 0.0, "mixture of a half": 0.5, "upper bound": 1.0}


def loss_with(mix):
    def loss(table, old, tokens, A, key):
        del old
        valid = jnp.ones(tokens.shape, bool)
        masked, t = _denoisers.exact_masks(key, valid, FORWARDS)
        logp = _denoisers.log_probs(table, tokens, masked)
        tokens = diffusion.sandwiched(logp, masked, t, A, valid, mix=mix)
        return -jnp.mean(A * tokens.mean(-1))

    return loss


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Three mixtures; the half of the paper decides first."""
    losses = {name: loss_with(mix) for name, mix in MIXES.items()}
    rates = RATES[3:4] if quick else RATES
    curves, chosen = _denoisers.best(losses, rates, seed=seed, quick=quick)
    plain, half, upper = curves.values()
    what = "mean reward less that with the lower bound alone"
    measures = [
        harness.Measure(f"{what}, {name}, at the {when}", estimate, "above", 0.0)
        for name, found in (("mixture of a half", half), ("upper bound", upper))
        for when, estimate in (
            ("end", harness.mean(found[:, -1] - plain[:, -1], "seeds")),
            ("mean of all steps", harness.mean((found - plain).mean(-1), "seeds")),
        )
    ]
    facts = {f"mean reward at the end, {name}": x[:, -1].mean() for name, x in curves.items()}
    facts |= {f"learning rate, {name}": rate for name, rate in chosen.items()}
    return harness.Claim(measures, _denoisers.curve_plot(curves), facts)
