"""Qwen3-8B learns grade-school math on a TPU v5e slice of 64 chips: sixteen hosts of four.

Command, on every host: jaxrl-llm train configs/tpu_v5e_64.py --distributed.detect
Hardware: 64 chips of 16 GB; a folder that all hosts share, which `run_dir` names; for how to start
it, see docs/pods.md. Shapes and memory are checked by abstract evaluation; the run itself has not
been made here.
Method: as configs/gpu_8.py, with twice the prompts of a step.
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
    # Tensor parallel over the four chips of a host, whose links are the shortest; the rest splits
    # the batch and the state.
    mesh=MeshConfig(fsdp=16, tensor=4),
    evaluation=EvaluationConfig(limit=256, samples=1),
    checkpoint=CheckpointConfig(every=25, keep=2),  # 98 GB each
    steps=200,
    prompts_per_step=128,
    microbatches=8,
    remat="full",
    run_dir="/shared/runs/tpu_v5e_64",
)
