"""Minibatches of one batch: advantages of the whole, weights of the part, as verl trains them."""

import jax
import jax.numpy as jnp
from golden_data import Ours

from jaxrl_llm import advantages, aggregate, recipes
from jaxrl_llm.core import stateless

RECIPE = recipes.grpo(kl_coef=0.0).replace(
    advantage=stateless(advantages.grpo), weights=aggregate.token_mean
)


def minibatches(a):
    """Two minibatches of whole groups, in the order of the case, as the train step takes them."""
    batch = recipes.Batch(
        tokens=jnp.zeros(a["mask"].shape, jnp.int32),
        mask=a["mask"],
        rewards=a["rewards"],
        where=a["where"],
        prompt_tokens=jnp.zeros((len(a["mask"]), 1), jnp.int32),
        prompt_mask=jnp.ones((len(a["mask"]), 1), bool),
        old_logp=a["old_logp"],
    )
    whole, _ = RECIPE.prepare(batch, RECIPE.init())
    losses, gradients = [], []
    for prompts in a["order"].reshape(2, -1):
        part = RECIPE.weigh(jax.tree.map(lambda x, prompts=prompts: x[prompts], whole))
        value, gradient = jax.value_and_grad(RECIPE.loss)(a["logp"][prompts], part)
        losses.append(value)
        gradients.append(gradient)
    return {
        "advantages": jnp.where(a["mask"], whole.advantages[..., None], 0.0),
        "loss": jnp.stack(losses),
        "gradient": jnp.stack(gradients),
    }


MINIBATCHES = {"grpo_token_mean": Ours(minibatches)}
TABLES = {"verl_minibatch": MINIBATCHES}
