"""SmolLM2-135M-Instruct learns two tasks of reasoning-gym that it can already do now and then.

Commands: jaxrl-llm train configs/reasoning.py
          jaxrl-llm train configs/reasoning.py:gcd
Hardware: two CPU cores, 10 GB of memory, 4 GB of disk; the model, 98 MB, is downloaded once.
Method: GRPO with two updates on a batch; full fine-tuning with AdamW, products in bfloat16 where
the processor multiplies it faster.
Tasks: products of two one-digit numbers, and the greatest common divisor of two numbers from 2 to
20. Of all answers that the model samples at first, a fifth and a tenth are right, and nearly half
and a third of the groups of four have some right and some wrong ones. A share of the questions is
held out and never trained on.
"""

import dataclasses

import jaxrl_llm as jr
from jaxrl_llm.train import (
    CheckpointConfig,
    DataConfig,
    OptimizerConfig,
    SamplingConfig,
    TrainConfig,
)

# Two thousand draws hold every distinct question.
of_products = jr.bind(
    jr.data.from_reasoning_gym,
    task="products",
    size=2000,
    min_terms=2,
    max_terms=2,
    min_digits=1,
    max_digits=1,
)
of_gcd = jr.bind(
    jr.data.from_reasoning_gym,
    task="gcd",
    size=2000,
    min_numbers=2,
    max_numbers=2,
    min_value=2,
    max_value=20,
)

config = TrainConfig(
    model="smollm2-135m-instruct",
    data=DataConfig(prompts=of_products, held_out=0.4),
    reward=jr.rewards.last_integer,
    recipe="grpo",
    sampling=SamplingConfig(group_size=8, max_new_tokens=16),
    optimizer=OptimizerConfig(learning_rate=2e-5, b2=0.99, decay_steps=24),
    checkpoint=CheckpointConfig(every=0, keep=1),  # 1.6 GB
    steps=24,
    max_skipped=3,
    prompts_per_step=8,
    minibatches=2,
    dtype="auto",
    remat="dots",
    run_dir="runs/products",
)

gcd = dataclasses.replace(
    config,
    data=DataConfig(prompts=of_gcd, held_out=0.2),
    run_dir="runs/gcd",
)
