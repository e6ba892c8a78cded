"""A tiny random model learns to write lower-case letters; for tests and notebooks.

Command: jaxrl-llm train configs/tiny.py
Hardware: one CPU core, less than a minute. No download.
Expected: the mean reward (share of bytes that are lower-case letters) goes from about 0.1 to above
0.8 in 30 steps, on held-out prompts as well.
"""

from jaxrl_llm.data import Prompt, PromptSet
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.train import (
    CheckpointConfig,
    DataConfig,
    OptimizerConfig,
    SamplingConfig,
    TrainConfig,
)


def model():
    return *tiny_model(), ByteTokenizer()


def columns(n):
    """What some methods read of a question: help, other words for it, how hard it is."""
    return {
        "hints": ["use letters", "use lower-case letters", "write: abcdef"],  # weakest first
        "demonstration": "abcdefgh"[: 4 + n % 5],
        "paraphrases": [f"please write {n}", f"{n}: write"],
        "difficulty": n / 20,
        "prior": 0.1 + 0.02 * n,
    }


def prompts():
    rows = (Prompt(f"write {n}", metadata=columns(n), id=str(n)) for n in range(20))
    return PromptSet(rows, source="configs/tiny.py")


def lower_case(prompt, completion, metadata):
    return sum(c.isascii() and c.islower() for c in completion) / max(len(completion), 1)


config = TrainConfig(
    model=model,
    data=DataConfig(prompts=prompts),
    reward=lower_case,
    recipe="dr_grpo",
    sampling=SamplingConfig(group_size=8, max_new_tokens=8),
    optimizer=OptimizerConfig(learning_rate=1e-2),
    checkpoint=CheckpointConfig(every=10),
    steps=30,
    prompts_per_step=8,
    remat="none",
    run_dir="runs/tiny",
)
