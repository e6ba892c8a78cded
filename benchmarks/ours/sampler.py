"""`rollout.make_sampler`: a group shares one prefill, and both log-probabilities are returned."""

import dataclasses

import jax

import jaxrl_llm as jr
from benchmarks.worker import Measured, jax_device_memory, jax_device_name, serve

PACKAGES = ("jax", "jaxlib", "jaxrl_llm")


def setup(workload: dict) -> Measured:
    """Load the model; no token ends a sequence."""
    model, params = jr.models.load_model(workload["folder"])
    model = jr.models.make_model(dataclasses.replace(model.config, dtype=workload["dtype"]))
    prompts, new_tokens = workload["prompt_ids"], workload["new_tokens"]
    sample = jr.rollout.make_sampler(
        model,
        max_new_tokens=new_tokens,
        group_size=workload["rollouts"],
        stop_ids=(),
        temperature=workload["temperature"],
    )

    def run(seed: int) -> None:
        rollout = jax.device_get(sample(params, jax.random.key(seed), prompts))
        expected = (len(prompts), workload["rollouts"], new_tokens)
        if rollout.tokens.shape != expected or not rollout.mask.all():
            raise ValueError(f"the sampler made {rollout.tokens.shape} tokens, not {expected}")

    def check() -> list:
        greedy = jr.rollout.make_sampler(
            model,
            max_new_tokens=workload["check_tokens"],
            group_size=1,
            stop_ids=(),
            temperature=0.0,
        )
        return greedy(params, jax.random.key(0), prompts).tokens.flatten().tolist()

    return Measured(run, check, jax_device_name(), PACKAGES, jax_device_memory)


if __name__ == "__main__":
    serve(setup)
