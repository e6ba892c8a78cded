"""A run of the tiny model, as small as a run can be, for the tests of loop and command line."""

import dataclasses
import json

from jaxrl_llm.data import Prompt, PromptSet
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.train import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    ReportConfig,
    SamplingConfig,
    TrainConfig,
)


def model():
    return *tiny_model(num_layers=1), ByteTokenizer()


def wide_model():
    return *tiny_model(num_layers=1, width=16), ByteTokenizer()


def prompts():
    return PromptSet((Prompt(f"q{n:02}", id=f"q{n:02}") for n in range(10)), source="tiny")


def low_bytes(prompt, completion, metadata):
    return sum(ord(c) < 64 for c in completion) / 4


CONFIG = TrainConfig(
    model=model,
    data=DataConfig(prompts=prompts, chat=False),
    reward=low_bytes,
    recipe="dr_grpo",
    sampling=SamplingConfig(group_size=2, max_new_tokens=4),
    optimizer=OptimizerConfig(learning_rate=1e-2),
    checkpoint=CheckpointConfig(every=0),
    evaluation=EvaluationConfig(enabled=False),
    steps=6,
    max_skipped=9,  # a test may give equal rewards
    prompts_per_step=4,
    remat="none",
    report=ReportConfig(peak_flops=1e12),  # else every process measures it
)


def tiny_run(run_dir, **changes) -> TrainConfig:
    return dataclasses.replace(CONFIG, run_dir=str(run_dir), **changes)


def without_plot() -> None:
    """Ends reward.png, which takes longer than a few steps, in a process that does nothing else."""
    from jaxrl_llm.train.logging import run_folder

    run_folder.plot_reward = lambda *arguments, **options: None


def begun(folder) -> None:
    """Makes a folder one that a run began in."""
    row = {"step": 0, "event": "start", "settings": {}, "about": {}}
    (folder / "sessions.jsonl").write_text(json.dumps(row) + "\n")
