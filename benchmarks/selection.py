"""Milliseconds to select 512 of a million prompts, by the rules of `jaxrl_llm.curation`.

python -m benchmarks.selection --save

Every rule is compiled and timed with what a step of it does: the draw or the ranking, and the
update of what is believed of all prompts. ``step`` is what a training run does with the collector
`prioritized(learnability)`: it proposes a batch and learns from its outcomes. The rules run in
turn.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.engine import in_turns
from benchmarks.worker import jax_device_name, package_versions
from jaxrl_llm import curation

SIZES = {"prompts": 1_000_000, "selected": 512, "rollouts": 8, "candidates": 8192}
TINY = {"prompts": 1000, "selected": 8, "rollouts": 8, "candidates": 64}


def rules(size) -> dict[str, Callable]:
    """Each rule as a function of a key and the belief, compiled."""
    prompts, count, rollouts = size["prompts"], size["selected"], size["rollouts"]

    def candidates(key):
        return curation.candidate_pool(key, num_prompts=prompts, size=size["candidates"])

    def learnability(key, belief):
        weights = curation.learnability(curation.belief_mean(belief))
        return curation.draw_prompts(key, weights, count=count)

    def dots(key, belief):
        logits = curation.target_logits(curation.belief_mean(belief))
        return curation.gumbel_top(key, logits, count=count)

    def vade(key, belief):
        pool_key, key = jax.random.split(key)
        pool = candidates(pool_key)
        rates = curation.thompson_rates(key, belief, pool)
        return pool[curation.select_top(curation.vade_information_gain(rates), count=count)]

    def vade_without_candidates(key, belief):
        rates = curation.thompson_rates(key, belief)
        return curation.select_top(curation.vade_information_gain(rates), count=count)

    def mopps(key, belief):
        pool_key, key = jax.random.split(key)
        pool = candidates(pool_key)
        rates = curation.thompson_rates(key, belief, pool)
        return pool[curation.select_top(curation.nearest_target(rates), count=count)]

    def insight(key, belief):
        pool = candidates(key)
        some = curation.PromptBelief(belief.alpha[pool], belief.beta[pool])
        scores = curation.insight_scores(some, rollouts=rollouts)
        return pool[curation.select_top(scores, count=count)]

    chosen = (learnability, dots, vade, vade_without_candidates, mopps, insight)
    return {rule.__name__: jax.jit(rule) for rule in chosen}


def collector_step(size, belief: curation.PromptBelief) -> Callable:
    """A step of `prioritized(learnability)` on the host."""
    collector = curation.prioritized(curation.learnability)
    state = curation.PromptBelief(np.asarray(belief.alpha), np.asarray(belief.beta))
    rewards = np.float32(np.arange(size["rollouts"]) % 2)
    n, key = len(rewards), jax.random.key(0)

    ones = np.ones(n, np.int32)
    some = curation.Outcome(0, rewards, ones.astype(bool), ones, ones < 0, {})

    def step():
        empty = curation.Collection(size["selected"], n)
        requests, _ = collector.propose(state, key, empty, size["selected"])
        outcomes = tuple(some._replace(prompt=request.prompt) for request in requests)
        return collector.observe(state, empty._replace(requests=requests, outcomes=outcomes))[1]

    return step


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    options = harness.parser(__doc__.splitlines()[0]).parse_args(argv)
    if options.peer_python is not None or options.gguf is not None:
        raise SystemExit("benchmarks.selection measures ours alone, without a model.")
    size = TINY if options.tiny else SIZES
    rng, prompts = np.random.default_rng(0), size["prompts"]
    belief = curation.PromptBelief(
        *(jnp.asarray(x, jnp.float32) for x in rng.uniform(1.0, 20.0, (2, prompts)))
    )
    ids = jnp.asarray(rng.choice(prompts, size["selected"], replace=False))
    rewards = jnp.asarray(rng.random((size["selected"], size["rollouts"])) < 0.5, jnp.float32)
    update = jax.jit(
        lambda state: curation.belief_update(state, ids, rewards, retain=0.2, retain_rest=0.999)
    )
    key = jax.random.key(0)
    timed = {name: functools.partial(rule, key, belief) for name, rule in rules(size).items()}
    timed |= {"update": lambda: update(belief), "step": collector_step(size, belief)}
    seconds = in_turns(options.rounds, timed)
    result = {
        "name": "selection",
        "workload": {**size, "runs": options.rounds},
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "jaxrl_llm"))},
        "commit": harness.commit(),
        "milliseconds": {
            name: harness.summary([1e3 * s for s in values]) for name, values in seconds.items()
        },
    }
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
