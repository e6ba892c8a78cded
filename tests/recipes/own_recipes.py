"""A small recipe of one's own and a batch for it: what the tests of slots change."""

import numpy as np
from preset_cases import batch_of

import jaxrl_llm as jr
from jaxrl_llm.recipes import Batch, Recipe

P, G, T = 2, 3, 4
LENGTHS = np.array([[4, 2, 3], [1, 4, 2]])
LOGP = np.random.default_rng(1).normal(-1.5, 0.3, (P, G, T)).astype(np.float32)
LOGPS = ("old_logp", "behavior_logp", "ref_logp")


def make_batch(**changes) -> Batch:
    """Two prompts, three rollouts, four tokens; rollout [1, 2] takes no part."""
    rng = np.random.default_rng(0)
    batch = batch_of(
        np.arange(T) < LENGTHS[..., None],
        np.array([[1.0, 0.0, 0.0], [0.5, 0.25, np.nan]]),
        tokens=rng.integers(0, 9, (P, G, T)),
        **{name: rng.normal(-1.5, 0.3, (P, G, T)) for name in LOGPS},
    )
    return batch.replace(**changes)


def plain(**changes) -> Recipe:
    slots = {
        "name": "plain",
        "advantage": jr.stateless(jr.advantages.dr_grpo),
        "surrogate": jr.surrogates.reinforce,
    }
    return Recipe(**{**slots, **changes})


def prepare(recipe, batch, state=None, **options):
    return recipe.prepare(batch, recipe.init() if state is None else state, **options)
