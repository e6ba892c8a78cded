"""A tiny random model learns to write lower-case letters; for tests and notebooks.

Command: jaxrl-llm train configs/tiny.py
Hardware: one CPU core, less than a minute. No download.
Expected: the mean reward (share of bytes that are lower-case letters) goes from about 0.1 to above
0.8 in 30 steps, on held-out prompts as well.

Any method trains with --recipe NAME. Its rewards rarely agree within a group, and no group fails
wholly; with those of configs/tiny.py:hard most do, so that methods act that drop such groups, or
help them: jaxrl-llm train configs/tiny.py:hard --recipe scaf_grpo. Evolution strategies have no
backward pass: --recipe eggroll --remat full.
"""

import dataclasses

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
        "demonstration": "abcdefgh"[: 3 + n % 5],
        "paraphrases": [f"please write {n}", f"{n}: write"],
        "difficulty": n / 20,
        "prior": 0.1 + 0.02 * n,
    }


def prompts():
    every = (columns(n) for n in range(20))
    rows = (
        Prompt(f"write {n}", row["demonstration"][-1], metadata=row, id=str(n))
        for n, row in enumerate(every)
    )
    return PromptSet(rows, source="configs/tiny.py")


def share(text):
    return sum(c.isascii() and c.islower() for c in text) / max(len(text), 1)


def lower_case(prompt, completion, metadata):
    """The share of lower-case letters; the default recipe trains on the entry "reward" alone.

    Other recipes read the rest: more rewards, an answer to vote for, judges' verdicts, a text for a
    teacher, rewards and unit tests of the two halves.
    """
    reward, ends = share(completion), [len(completion) // 2, len(completion)]
    halves = [completion[: ends[0]], completion[ends[0] :]]
    return {
        "reward": reward,
        "varied": len(set(completion)) / max(len(completion), 1),
        "answer_ids": ord(completion[0]) % 3 if completion else -1,
        "flawed": len(set(completion)) < len(completion),
        "satisfied": completion.isascii(),
        "right_steps": 0,
        "feedback": f"{reward:.0%} of it are lower-case letters",
        "turn_ends": ends,
        "turn_rewards": [share(half) for half in halves],
        "test_passes": [[half.isascii(), share(half) > 0.5] for half in halves],
    }


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


def mostly_wrong(prompt, completion, metadata):
    """As lower_case, but 1 where more than a quarter of the letters are right, and else 0."""
    values = lower_case(prompt, completion, metadata)
    return values | {"reward": float(values["reward"] > 0.25)}


hard = dataclasses.replace(config, reward=mostly_wrong, run_dir="runs/tiny_hard")
