"""SmolLM2-135M-Instruct learns to add and subtract two one-digit numbers.

Command: jaxrl-llm train configs/quickstart.py
Hardware: two CPU cores, 6 GB of memory, 4 GB of disk; the model, 98 MB, is downloaded once.
Method: Dr. GRPO's advantage, token mean, entropy bonus; full fine-tuning with AdamW.
Expected: in five to ten minutes, accuracy on held-out questions rises by more than 0.5 for sampled
answers and by at least 0.25 for greedy ones.
The task has some two hundred distinct questions; a fifth of them is held out and never trained on.

configs/quickstart.py:dapo is DAPO: a higher upper clip, a penalty of long responses, more rounds
and two updates a step.
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
prompts = jr.bind(
    jr.data.from_reasoning_gym,
    task="chain_sum",
    size=2000,
    min_terms=2,
    max_terms=2,
    min_digits=1,
    max_digits=1,
)

# Dr. GRPO's advantage. The mean over tokens replaces its constant denominator, so that a step does
# not depend on how long the replies are. Where the rollouts of a group agree, right or wrong, the
# advantage is zero: such groups are dropped, and others requested in at most two further rounds.
# The entropy bonus keeps the rollouts of a group apart for longer.
recipe = jr.recipes.dr_grpo(length=16).replace(
    name="dr_grpo_token_mean",
    weights=jr.aggregate.token_mean,
    regularizers=(jr.bind(jr.regularizers.entropy_bonus, coef=0.02),),
    collector=jr.curation.refill(jr.curation.informative_groups, max_rounds=3),
)

config = TrainConfig(
    model="smollm2-135m-instruct",
    data=DataConfig(prompts=prompts, held_out=0.2),
    reward=jr.rewards.last_integer,
    recipe=recipe,
    sampling=SamplingConfig(group_size=8, max_new_tokens=16),
    optimizer=OptimizerConfig(learning_rate=3e-5, b2=0.99, decay_steps=40),
    checkpoint=CheckpointConfig(every=20, keep=1),  # 1.6 GB each
    steps=40,
    max_skipped=10,  # a late step may find no group whose rollouts differ
    prompts_per_step=8,
    dtype="auto",  # products in bfloat16 where the processor multiplies it faster
    remat="dots",
    run_dir="runs/quickstart",
)

# Up to ten rounds for eight groups that disagree, and two updates (the paper: 16, of 512 groups).
dapo = dataclasses.replace(
    config,
    recipe="dapo",
    optimizer=OptimizerConfig(learning_rate=2e-5, b2=0.99, decay_steps=40),
    max_skipped=3,
    minibatches=2,
    run_dir="runs/quickstart_dapo",
)
