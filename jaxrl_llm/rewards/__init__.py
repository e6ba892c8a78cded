"""Rewards of completions, on the host: any callable, verifiers in processes, and a few built in.

A reward is any callable `(prompt, completion, metadata)` that gives a number or a mapping of names
to numbers. `score` runs it over a batch and refuses what is not a finite number.
"""

from jaxrl_llm.rewards.builtin import last_integer, math_verify, math_verify_pool, reasoning_gym
from jaxrl_llm.rewards.pool import VerifierPool, VerifierWarning
from jaxrl_llm.rewards.scoring import FAILED, BatchReward, Reward, RewardError, Scores, score

__all__ = [
    "FAILED",
    "BatchReward",
    "Reward",
    "RewardError",
    "Scores",
    "VerifierPool",
    "VerifierWarning",
    "last_integer",
    "math_verify",
    "math_verify_pool",
    "reasoning_gym",
    "score",
]
