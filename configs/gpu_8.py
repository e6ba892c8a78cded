"""Qwen3-8B learns grade-school math on one node of eight GPUs.

Command: jaxrl-llm train configs/gpu_8.py
Hardware: eight GPUs of 80 GB that see each other (one node); for how to start it, and how to go on
to more nodes, see docs/pods.md. Shapes and memory are checked by abstract evaluation; the run
itself has not been made here.
Method: Dr. GRPO; float32 weights and AdamW, split over the GPUs, bfloat16 products.
"""

import jaxrl_llm as jr
from jaxrl_llm.train import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    MeshConfig,
    OptimizerConfig,
    SamplingConfig,
    TrainConfig,
)

prompts = jr.bind(
    jr.data.from_hub, name="openai/gsm8k", config="main", split="train", prompt_field="question"
)
held_out = jr.bind(
    jr.data.from_hub, name="openai/gsm8k", config="main", split="test", prompt_field="question"
)

config = TrainConfig(
    model="Qwen/Qwen3-8B",
    dtype="bfloat16",
    data=DataConfig(prompts=prompts, evaluation=held_out, held_out=0.0),
    reward=jr.rewards.last_integer,
    recipe="dr_grpo",
    sampling=SamplingConfig(group_size=8, max_new_tokens=1024),
    optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10),
    mesh=MeshConfig(fsdp=8),
    evaluation=EvaluationConfig(limit=256, samples=1),
    checkpoint=CheckpointConfig(every=25, keep=2),  # 98 GB each
    steps=200,
    prompts_per_step=64,
    microbatches=8,
    remat="full",
    run_dir="runs/gpu_8",
)
