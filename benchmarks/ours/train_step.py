"""`train.make_step` with the GRPO recipe: advantages, loss, gradient and AdamW in one call."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

import jaxrl_llm as jr
from benchmarks.worker import Measured, jax_device_memory, jax_device_name, serve

PACKAGES = ("jax", "jaxlib", "optax", "jaxrl_llm")


def setup(workload: dict) -> Measured:
    """Load the model and put the rollouts into one batch."""
    model, params = jr.models.load_model(workload["folder"])
    model = jr.models.make_model(dataclasses.replace(model.config, dtype=workload["dtype"]))
    recipe = jr.recipes.grpo(kl_coef=0.0).replace(weights=jr.aggregate.token_mean)
    optimizer = optax.adamw(workload["learning_rate"], weight_decay=workload["weight_decay"])
    step = jr.train.make_step(
        model, recipe, optimizer, remat="dots" if workload["remat"] else "none"
    )
    prompts = jnp.array(workload["prompt_ids"])
    tokens = jnp.array(workload["response_ids"])
    rewards = jnp.array(workload["rewards"])
    batch = jr.recipes.Batch(
        tokens=tokens,
        mask=jnp.ones_like(tokens, bool),
        rewards=rewards,
        where=jnp.ones_like(rewards, bool),
        prompt_tokens=prompts,
        prompt_mask=jnp.ones_like(prompts, bool),
    )
    # The step gives its state away, so the one that is alive is kept here.
    alive = [jr.train.init_state(params, optimizer, recipe, key=jax.random.key(0), copy=False)]
    del params
    norms: list[float] = []

    def run(seed: int) -> None:
        del seed
        state, metrics = step(alive.pop(), batch)
        jax.block_until_ready(state.params)
        alive.append(state)
        norms.append(float(metrics["grad_norm"]))

    return Measured(run, lambda: norms[:1], jax_device_name(), PACKAGES, jax_device_memory)


if __name__ == "__main__":
    serve(setup)
