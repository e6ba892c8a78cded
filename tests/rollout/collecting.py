"""Batches of collectors on any backend."""

import jax

from jaxrl_llm.rollout.collect import collect


def collected(collector, backend, *, questions, groups, state=None, first=0, **options):
    """A batch of ``groups``, as many groups of so many rollouts.

    Prompts that come in order do so from ``first`` on.
    """
    count, size = groups
    n = len(questions)
    defaults = {
        "next_places": lambda count: [(first + i) % n for i in range(count)],
        "num_groups": count,
        "group_size": size,
        "step": 0,
    }
    state, key = (
        collector.init(n) if state is None else state,
        options.pop("key", jax.random.key(0)),
    )
    return collect(collector, state, key, backend, questions, **defaults | options)
