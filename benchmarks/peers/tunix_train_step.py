"""tunix's GRPO step: its loss in its trainer's jitted step, wired as its GRPO learner does."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from tunix.rl import algo_core
from tunix.rl.common import TrainExample
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

from benchmarks.peers.tunix_model import PACKAGES, load
from benchmarks.worker import Measured, jax_device_memory, jax_device_name, serve


def setup(workload: dict) -> Measured:
    """Load the model into a trainer."""
    model = load(workload["folder"], remat=workload["remat"])
    config = GRPOConfig(
        beta=0.0,
        loss_agg_mode="token-mean",
        num_generations=workload["rollouts"],
        epsilon=0.2,
    )
    config.temperature = 1.0
    pad = model.config.vocab_size - 1
    optimizer = optax.adamw(workload["learning_rate"], weight_decay=workload["weight_decay"])
    trainer = PeftTrainer(model, optimizer, TrainingConfig(eval_every_n_steps=1))
    trainer.with_loss_fn(
        lambda model, train_example: algo_core.grpo_loss_fn(
            model, train_example, algo_config=config, pad_id=pad, eos_id=-1
        ),
        has_aux=True,
    )
    trainer.with_gen_model_input_fn(lambda example: {"train_example": example})
    train_step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)

    prompts = jnp.repeat(jnp.array(workload["prompt_ids"]), workload["rollouts"], axis=0)
    responses = jnp.array(workload["response_ids"]).reshape(len(prompts), -1)
    example = TrainExample(
        prompt_ids=prompts,
        prompt_mask=jnp.ones_like(prompts, bool),
        completion_ids=responses,
        completion_mask=jnp.ones_like(responses, bool),
        advantages=jnp.array(workload["advantages"]).reshape(-1),
        ref_per_token_logps=None,
        old_per_token_logps=None,
    )
    norms: list[float] = []

    def run(seed: int) -> None:
        del seed
        _, _, norm = train_step(example)
        jax.block_until_ready(nnx.state(model))
        norms.append(float(norm))

    return Measured(run, lambda: norms[:1], jax_device_name(), PACKAGES, jax_device_memory)


if __name__ == "__main__":
    serve(setup)
