"""The step of a run of the dpo preset, after the reference has scored the batch or without it."""

import dataclasses

import jax
import numpy as np
import optax

import jaxrl_llm as jr
from benchmarks.worker import Measured, jax_device_memory, jax_device_name, serve
from jaxrl_llm.train.batches import Passes
from jaxrl_llm.train.policy_gradient import RunOptions, make_policy_gradient

PACKAGES = ("jax", "jaxlib", "optax", "jaxrl_llm")


def setup(workload: dict) -> Measured:
    """Load the model and put the pairs into one batch."""
    model, params = jr.models.load_model(workload["folder"])
    model = jr.models.make_model(dataclasses.replace(model.config, dtype=workload["dtype"]))
    recipe = jr.recipes.dpo(beta=workload["beta"])
    optimizer = optax.adamw(workload["learning_rate"], weight_decay=workload["weight_decay"])
    tokens, prompts = np.array(workload["response_ids"]), np.array(workload["prompt_ids"])
    batch = jr.recipes.Batch(
        tokens=tokens,
        mask=np.ones(tokens.shape, bool),
        rewards=np.tile(np.float32([1.0, 0.0]), (len(tokens), 1)),
        where=np.ones(tokens.shape[:2], bool),
        prompt_tokens=prompts,
        prompt_mask=np.ones(prompts.shape, bool),
    )
    precomputed = workload["precomputed"]
    if precomputed:
        scorer = jr.train.make_scorer(model, microbatches=workload["microbatches"])
        batch = batch.replace(ref_logp=np.asarray(scorer(params, batch)))
    algorithm = make_policy_gradient(
        model,
        recipe,
        optimizer,
        lambda *_: None,  # nothing is sampled
        options=RunOptions(
            passes=Passes(microbatches=workload["microbatches"]),
            temperature=1.0,
            remat=workload["remat"],
            shared_prefix_len=0,
            packing="never",
            stale=False,
            mesh=None,
        ),
        reference=None if precomputed else params,
    )
    # The step gives its state away, so the one that is alive is here.
    key = jax.random.key(0)
    alive = [jr.train.init_state(params, optimizer, recipe, key=key, copy=not precomputed)]
    del params
    norms: list[float] = []

    def run(seed: int) -> None:
        del seed
        scored, _ = algorithm.score(batch)
        state, metrics = algorithm.step(alive.pop(), scored)
        jax.block_until_ready(state.params)
        alive.append(state)
        norms.append(float(metrics["grad_norm"]))

    return Measured(run, lambda: norms[:1], jax_device_name(), PACKAGES, jax_device_memory)


if __name__ == "__main__":
    serve(setup)
