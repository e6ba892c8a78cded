"""Where one response always wins, DPO's margin grows with training and IPO's ends at its target.

One prompt with four responses in a strict order: the better one of every pair is always chosen. A
softmax policy over free logits starts uniform, which is the reference, and makes Adam's steps on
all six pairs. For `ipo` with beta 0.5 the margin between the best and the worst response should
stop: its change from step 1,000 to step 10,000, as a share, must be below 0.01. For `dpo` with the
same beta it should not: the margin at step 10,000 over that at step 1,000 must be above 1.1. And
beta should hold a policy to its reference under `ipo` alone: with beta 5, the probability of the
best response at step 10,000 must be below 0.5 for `ipo` (the reference's is 0.25) and above 0.9 for
`dpo`. Each of these refutes the claim where it fails.

Everything is deterministic. With noisy labels, or early stopping, DPO's margin stays finite too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxrl_llm as jr
from benchmarks.claims import harness

PAPER = "2310.12036"
RESPONSES, BETA, STRONG = 4, 0.5, 5.0
STEPS = (100, 300, 1_000, 3_000, 10_000)
BETTER, WORSE = np.triu_indices(RESPONSES, k=1)


@functools.partial(jax.jit, static_argnames="loss")
def train(*, loss):
    """Log-probabilities ``[steps, A]`` after each of STEPS."""
    optimizer, start = optax.adam(0.02), jnp.zeros(RESPONSES)
    reference = jax.nn.log_softmax(start)

    def objective(logits):
        logp = jax.nn.log_softmax(logits)
        return jnp.mean(loss(logp[BETTER], logp[WORSE], reference[BETTER], reference[WORSE]))

    def step(carry, _):
        logits, state = carry
        updates, state = optimizer.update(jax.grad(objective)(logits), state)
        logits = optax.apply_updates(logits, updates)
        return (logits, state), jax.nn.log_softmax(logits)

    _, path = jax.lax.scan(step, (start, optimizer.init(start)), None, STEPS[-1])
    return path[jnp.array(STEPS) - 1]


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Deterministic; neither seed nor size plays a part."""
    del seed, quick
    paths = {
        (name, beta): np.asarray(train(loss=jr.bind(getattr(jr.preferences, name), beta=beta)))
        for name in ("ipo", "dpo")
        for beta in (BETA, STRONG)
    }
    margins = {key: path[:, 0] - path[:, -1] for key, path in paths.items()}
    early, last = STEPS.index(1_000), -1
    how = "deterministic, full batch"

    def measure(what, value, *side):
        return harness.Measure(what, harness.exact(value, how), *side)

    ipo, dpo = margins["ipo", BETA], margins["dpo", BETA]
    change, growth = abs(ipo[last] / ipo[early] - 1.0), dpo[last] / dpo[early]
    measures = [
        measure("change of ipo's margin, step 1,000 to 10,000, as a share", change, "below", 0.01),
        measure("dpo's margin at step 10,000 over step 1,000", growth, "above", 1.1),
    ]
    for name, side in (("ipo", ("below", 0.5)), ("dpo", ("above", 0.9))):
        best = float(np.exp(paths[name, STRONG][last, 0]))
        measures.append(measure(f"probability of the best response, {name}, beta 5", best, *side))
    series = [
        harness.Series(f"{name}, beta {beta:g}", STEPS, value)
        for (name, beta), value in margins.items()
    ]
    facts = {f"margin of {name}, beta 0.5": margins[name, BETA][last] for name in ("ipo", "dpo")}
    plot = harness.Plot("steps", "margin of the best over the worst, nats", series, log="xy")
    return harness.Claim(measures, plot, facts)
