"""With hundreds of rollouts a prompt a step hardly ever takes mass from the right answers.

Random softmax policies over 256 answers, of which a random share between 0.05 and 0.5 is right.
`mass_balance` splits the change of the mass of right answers, by a step on N sampled answers of
reward 1 or -1, into what sampled answers contribute, which is never negative, and what the answers
that were not sampled contribute. The number is the share of steps in which the mass falls, with 512
rollouts less that with 16; 0 or above refutes the claim. With 16 rollouts the share must be above
0.01, or there is nothing to repair, and with 512 it must be below 0.01.

The size of the contribution of answers that were not sampled, with 512 over 16 rollouts, must be
below a half. Last, a plain step of policy gradient with the advantages of `dr_grpo`: the share of
right answers whose own probability falls, with 512 rollouts less that with 16; 0 or above refutes
that more rollouts lose fewer of them.

In these policies no step lowers the mass, not even with 16 rollouts: what sampled answers
contribute outweighs the rest, so the first number has nothing to improve and decides nothing. With
more rollouts fewer right answers do become less probable.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _sequences, harness

PAPER = "2510.01180"
ANSWERS, SPREAD = 256, 2.0
ROLLOUTS = (4, 16, 64, 512)
FEW, MANY = 16, 512


@functools.partial(jax.jit, static_argnames="rollouts")
def measure(keys, *, rollouts: int):
    """Of each draw: change of the mass, part of the unsampled answers, right answers that fall."""

    def one(key):
        of_policy, of_share, of_right, of_answers = jax.random.split(key, 4)
        logits = SPREAD * jax.random.normal(of_policy, (ANSWERS,))
        probs = jax.nn.softmax(logits)
        share = jax.random.uniform(of_share, minval=0.05, maxval=0.5)
        right = jax.random.bernoulli(of_right, share, (ANSWERS,))
        answers = _sequences.draw(of_answers, jax.nn.log_softmax(logits), (rollouts,))
        sampled = jnp.zeros(ANSWERS, bool).at[answers].set(True)
        balance = jr.diagnostics.mass_balance(probs, right, sampled)
        advantages = jr.advantages.dr_grpo(right[answers].astype(jnp.float32))

        def loss(logits):
            logp = jax.nn.log_softmax(logits)[answers][:, None]
            mask = jnp.ones(logp.shape, bool)
            return jnp.mean(jr.surrogates.reinforce(logp, None, advantages, mask))

        step = -jax.grad(loss)(logits)
        change = probs * (step - jnp.sum(probs * step))
        falls = jnp.sum(right & (change < 0)) / jnp.maximum(jnp.sum(right), 1)
        total = balance.correct + balance.wrong + balance.unsampled
        return total, balance.unsampled, falls

    return jax.lax.map(one, keys, batch_size=100)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Many random policies, the same for each number of rollouts."""
    draws = 400 if quick else 2000
    sizes = (FEW, MANY) if quick else ROLLOUTS
    keys = jax.random.split(jax.random.key(seed), draws)
    found = {n: [np.asarray(x, np.float64) for x in measure(keys, rollouts=n)] for n in sizes}
    drops = {n: total < 0 for n, (total, _, _) in found.items()}
    sizes_of = {n: np.abs(unsampled) for n, (_, unsampled, _) in found.items()}
    lost = {n: falls for n, (_, _, falls) in found.items()}
    less = f"{MANY} rollouts less {FEW}"
    measures = [
        harness.Measure(
            f"share of steps that lower the mass of right answers, {less}",
            harness.share_difference(drops[MANY].sum(), drops[FEW].sum(), draws, "policies"),
            "below",
            0.0,
        ),
        *(
            harness.Measure(
                f"share of steps that lower the mass of right answers, {n} rollouts",
                harness.share(drops[n].sum(), draws, "policies"),
                side,
                0.01,
            )
            for n, side in ((FEW, "above"), (MANY, "below"))
        ),
        harness.Measure(
            f"part of the answers that were not sampled, {MANY} rollouts over {FEW}",
            harness.ratio(sizes_of[MANY], sizes_of[FEW], what="policies"),
            "below",
            0.5,
        ),
        harness.Measure(
            f"share of right answers that a step of dr_grpo makes less probable, {less}",
            harness.mean(lost[MANY] - lost[FEW], "policies"),
            "below",
            0.0,
        ),
    ]  # fmt: skip
    facts = {f"share of right answers that fall, {n} rollouts": lost[n].mean() for n in (FEW, MANY)}
    series = []
    for label, values in (
        ("steps that lower the mass of right answers", drops),
        ("right answers that a step of dr_grpo lowers", lost),
    ):
        centers = [harness.mean(values[n], "policies") for n in sizes]
        value, low, high, _ = zip(*centers, strict=True)
        series.append(harness.Series(label, sizes, value, low, high))
    return harness.Claim(measures, harness.Plot("rollouts", "share", series, log="x"), facts)
