"""Entries computed from "optimizer": the optimizer step that each token alone would make.

The selection reads them, and their rules read the advantages, which are therefore prepared for the
rules first, without the selection.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.core import masking
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.train.batches import join_microbatches, split_microbatches
from jaxrl_llm.train.optimizer import next_rate
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.train.update.part import At, Part, Setup, absent

_SOURCE = "optimizer"


def part(recipe: Recipe, setup: Setup) -> Part | None:
    """The part of a recipe with such numbers."""
    del setup
    if not recipe.computed_from(_SOURCE):
        return None
    return Part("token_steps", amend=_amend, cost="a pass of the policy for the step of each token")


def _amend(state: TrainState, batch: Batch, at: At) -> tuple[TrainState, Batch]:
    recipe, states = at.recipe, dict(state.algo_state.rules)
    scorer: Any = at.setup.scorer
    rules: dict[str, Any] = absent(batch, recipe, _SOURCE)
    if not rules:
        return state, batch
    rate = _rate(rules, state, at)
    others = tuple(entry for entry in recipe.computed if entry.source != _SOURCE)
    unselected = recipe.replace(selection=None, computed=others)
    prepared, _ = unselected.prepare(batch, state.algo_state, key=at.draw)
    mask, extras = recipe.responses(prepared).mask, dict(batch.extras)
    advantages = masking.spread("apply_rules", "advantages", prepared.advantages, mask)
    parts = split_microbatches((batch.replace(mask=mask), advantages), at.slices)
    for name, rule in rules.items():
        old = states[name]

        def add(total, part, rule=rule, old=old):
            part, advantages = part
            effects, sums = scorer.step_effects(
                state.policy, part, rule, old, advantages=advantages, rate=rate
            )
            return jax.tree.map(jnp.add, total, sums), effects

        zeros = rule.zeros(*scorer.model.output_matrix(state.policy).shape)
        sums, effects = jax.lax.scan(add, zeros, parts)
        extras[name], states[name] = join_microbatches(effects), rule.learn(old, sums)
    algo_state = state.algo_state._replace(rules=states)
    return state._replace(algo_state=algo_state), batch.replace(extras=extras)


def _rate(rules, state: TrainState, at: At):
    """The learning rate of the update, or None; ValueError if a rule lacks it or its state."""
    if missing := [name for name in rules if name not in state.algo_state.rules]:
        raise ValueError(
            f"recipe {at.recipe.name!r} computes {', '.join(missing)} from the output matrix; pass "
            "its output_shape to init_state."
        )
    if at.setup.learning_rate is not None:
        return next_rate(at.setup.learning_rate, state.opt_state)
    if any(rule.reads_rate for rule in rules.values()):
        raise ValueError(
            f"recipe {at.recipe.name!r} reads the learning rate of the update; pass learning_rate "
            "to make_step, a number or the optimizer's schedule."
        )
    return None
