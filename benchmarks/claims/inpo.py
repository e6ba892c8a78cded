"""In a game without a best move, INPO's last policy is near Nash; DPO of its own samples is not.

Three moves, each beaten by another with a probability drawn from 0.6 to 1: a game whose Nash policy
is known in closed form. The policy is a softmax of three logits and plays 600 iterations of 30
gradient steps on the expected loss over pairs of moves that the policy of the iteration before
sampled. The gap of a policy is by how much more than half of the time the best answer beats it: 0
at Nash. `inpo` (eta 4, ratio 0.008), `nash_md` (beta 0.02) and `mnpo` of the last three policies
should end below 0.05, each; `dpo` against the fixed first policy, on pairs of its own samples,
should not: above 0.1. `sppo` (beta 8) has a guarantee for its mean policy alone: the gap of that
must be below 0.05. Intervals are over games, each with a first policy of its own.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import harness

PAPER = "2407.00617"
ITERATIONS, STEPS, RATE = 600, 30, 0.2
ETA, RATIO = 4.0, 0.008
HISTORY = 3
METHODS = ("online dpo", "sppo", "inpo", "mnpo", "nash_md")
FIRST, SECOND = np.divmod(np.arange(9), 3)


def make_game(key):
    """Probabilities ``[3, 3]`` that a move beats another; each is beaten by the one after it."""
    win = jax.random.uniform(key, (3,), minval=0.6, maxval=1.0)
    matrix = jnp.full((3, 3), 0.5)
    for move in range(3):
        other = (move + 1) % 3
        matrix = matrix.at[other, move].set(win[move]).at[move, other].set(1.0 - win[move])
    return matrix


def objective(name: str, game, logp, first, history):
    """The expected loss of a policy; ``history`` ``[J, 3]``, the latest first."""

    def pairs(*logps):
        return [x[..., k] for x in logps for k in (FIRST, SECOND)]

    previous = history[0]
    p = jnp.exp(previous)
    chance, wins = p[FIRST] * p[SECOND], game[FIRST, SECOND]
    if name == "online dpo":
        return jnp.sum(chance * wins * jr.preferences.dpo(*pairs(logp, first), beta=1.0))
    if name == "sppo":
        rates = {"chosen_win_rate": game @ p, "rejected_win_rate": game @ p}
        losses = jr.preferences.sppo(logp, logp, previous, previous, **rates, beta=8.0)
        return jnp.sum(p * losses)
    options = {"eta": ETA, "ratio": RATIO, "preference": wins}
    if name == "inpo":
        return jnp.sum(chance * jr.preferences.inpo(*pairs(logp, first, previous), **options))
    if name == "mnpo":
        earlier = [x.T for x in pairs(history)]
        return jnp.sum(chance * jr.preferences.mnpo(*pairs(logp, first), *earlier, **options))
    sampled = jax.lax.stop_gradient(jnp.exp(logp))
    mixed = jax.lax.stop_gradient(jax.nn.softmax(0.95 * logp + 0.05 * first))
    one_token = logp[:, None], first[:, None], jnp.ones((3, 1), bool)
    return jnp.sum(sampled * jr.preferences.nash_md(*one_token, game @ mixed, beta=0.02))


@functools.partial(jax.jit, static_argnames="name")
def play(keys, *, name: str):
    """Gaps ``[seeds, ITERATIONS]`` of the policies on the way, and of their means."""

    def one(key):
        of_game, of_start = jax.random.split(key)
        game = make_game(of_game)
        start = jax.random.normal(of_start, (3,))
        first = jax.nn.log_softmax(start)

        def iteration(carry, _):
            logits, history, total = carry
            slope = jax.grad(lambda x: objective(name, game, jax.nn.log_softmax(x), first, history))
            logits = jax.lax.fori_loop(0, STEPS, lambda _, x: x - RATE * slope(x), logits)
            logp = jax.nn.log_softmax(logits)
            history = jnp.concatenate([logp[None], history[:-1]])
            total = total + jnp.exp(logp)
            mean = total / jnp.sum(total)
            gaps = [jnp.max(game @ policy) - 0.5 for policy in (jnp.exp(logp), mean)]
            return (logits, history, total), tuple(gaps)

        begin = (start, jnp.tile(first, (HISTORY, 1)), jnp.zeros(3))
        return jax.lax.scan(iteration, begin, None, ITERATIONS)[1]

    return jax.vmap(one)(keys)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Every method plays the same games from the same first policies."""
    keys = jax.random.split(jax.random.key(seed), 8 if quick else 48)
    last, mean = {}, {}
    for name in METHODS:
        last[name], mean[name] = map(np.asarray, play(keys, name=name))
    measures = [
        harness.Measure(
            f"gap of the last policy, {name}", harness.mean(last[name][:, -1], "games"), *side
        )
        for name, side in (
            ("inpo", ("below", 0.05)),
            ("online dpo", ("above", 0.1)),
            ("nash_md", ("below", 0.05)),
            ("mnpo", ("below", 0.05)),
        )
    ]
    sppo = harness.mean(mean["sppo"][:, -1], "games")
    measures.append(harness.Measure("gap of the mean policy, sppo", sppo, "below", 0.05))
    facts = {"gap of the last policy, sppo": float(last["sppo"][:, -1].mean())}
    every = list(range(0, ITERATIONS, 20))
    series = [harness.Series(name, every, last[name][:, every].mean(0)) for name in METHODS]
    plot = harness.Plot("iterations", "gap of the policy", series, log="y", line=0.05)
    return harness.Claim(measures, plot, facts)
