"""The loss of a policy on a prepared batch, with its gradient and without."""

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.models.lora import merge_adapter
from jaxrl_llm.models.sharding import spread_update
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.recipes.wiring import UPDATE_SCALE
from jaxrl_llm.train.batches import accumulate_gradients, map_microbatches
from jaxrl_llm.train.models.denoising import PolicyScorer, tell_temperature
from jaxrl_llm.train.update.part import Gradients, Objective


def policy_objective(
    scorer: PolicyScorer, recipe: Recipe, base: ArrayTree, microbatches: int
) -> Objective:
    """The recipe's loss in the trained parameters; ``base`` are the frozen ones under LoRA."""
    statistics = recipe.computed_from("policy")
    updates = bool(recipe.computed_from("update").keys() - {UPDATE_SCALE})

    def gradient(params: ArrayTree, batch: Batch) -> Gradients:
        tell_temperature(batch, scorer)
        measured = updates and batch.old_logp is not None
        if measured and microbatches > 1:  # measured on all rows, so before the first microbatch
            policy = merge_adapter(base, params)
            before = map_microbatches(lambda part: scorer(policy, part).logp, batch, microbatches)
            batch, measured = recipe.measure(batch, before), False

        def loss(params: ArrayTree, part: Batch):
            logp, entropy, computed = scorer(merge_adapter(base, params), part, statistics)
            part = recipe.measure(part, logp) if measured else part
            value = recipe.loss(logp, part, entropy=entropy, statistics=computed)
            return value, (logp, entropy)

        value, (logp, entropy), grads = accumulate_gradients(loss, params, batch, microbatches)
        return Gradients(value, grads, logp, entropy)

    def value(params: ArrayTree, batch: Batch) -> Gradients:
        logp, entropy, computed = map_microbatches(
            lambda part: scorer(merge_adapter(base, params), part, statistics), batch, microbatches
        )
        measured = recipe.measure(batch, logp)
        loss = recipe.loss(logp, measured, entropy=entropy, statistics=computed)
        zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), params)
        return Gradients(loss, spread_update(zeros), logp, entropy)

    return Objective(
        gradient, value, lambda other: policy_objective(other, recipe, base, microbatches)
    )
