"""SmolLM2-135M-Instruct learns sums from SmolLM2-360M-Instruct, on its own answers.

Command: jaxrl-llm train configs/distill.py
Hardware: two CPU cores, 16 GB of memory; two models are downloaded once.
Method: GKD (arXiv:2306.13649) with the reverse KL over the full vocabulary; full fine-tuning.

The reward is reported and evaluated, and not trained on. With configs/distill.py:tiny two random
models take their places: a minute, no download, and the loss falls by half.
"""

import dataclasses

import jaxrl_llm as jr
from jaxrl_llm.data import Prompt, PromptSet
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.train import (
    CheckpointConfig,
    DataConfig,
    OptimizerConfig,
    SamplingConfig,
    TrainConfig,
)

prompts = jr.bind(
    jr.data.from_reasoning_gym,
    task="chain_sum",
    size=2000,
    min_terms=2,
    max_terms=2,
    min_digits=1,
    max_digits=1,
)

config = TrainConfig(
    model="smollm2-135m-instruct",
    teacher="HuggingFaceTB/SmolLM2-360M-Instruct",
    data=DataConfig(prompts=prompts, held_out=0.2),
    reward=jr.rewards.last_integer,
    recipe=jr.recipes.gkd(beta=1.0),
    sampling=SamplingConfig(group_size=4, max_new_tokens=32),
    optimizer=OptimizerConfig(learning_rate=2e-5, b2=0.99),
    checkpoint=CheckpointConfig(every=20, keep=1),
    steps=80,
    prompts_per_step=8,
    remat="none",
    run_dir="runs/distill",
)


def student():
    return *tiny_model(num_layers=1), ByteTokenizer()


def teacher():
    return *tiny_model(seed=1), ByteTokenizer()


def questions():
    rows = (
        Prompt(f"say {n}", str(n), metadata={"demonstration": str(n), "pretraining": f"{n} is it"})
        for n in range(20)
    )
    return PromptSet(rows, source="configs/distill.py")


tiny = dataclasses.replace(
    config,
    model=student,
    teacher=teacher,
    data=DataConfig(prompts=questions, chat=False, held_out=0.2),
    sampling=SamplingConfig(group_size=4, max_new_tokens=8),
    optimizer=OptimizerConfig(learning_rate=1e-2),
    steps=30,
    run_dir="runs/distill_tiny",
)
