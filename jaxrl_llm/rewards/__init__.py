"""Rewards of completions: any callable, verifiers in processes, a few built in, and their shaping.

A reward is any callable `(prompt, completion, metadata)` that returns a number or a mapping of
names to numbers. `score` runs it over a batch, on the host, and refuses a non-finite value;
NaN in a mapping says that a name does not apply.

The functions of arrays shape rewards afterwards. Those that take `rewards` first stand at the head
of a recipe's advantage chain: `fapo_reward`, `steered_bonus`, `overlong_rewards`, `hbpo_rewards`,
`paraphrase_rewards`.
"""

from jaxrl_llm.rewards.builtin import (
    last_integer,
    last_integer_vote,
    math_verify,
    math_verify_pool,
    reasoning_gym,
)
from jaxrl_llm.rewards.length import hbpo_reward, hbpo_rewards, overlong_penalty, overlong_rewards
from jaxrl_llm.rewards.meta import (
    Prediction,
    calibrated_rewards,
    constrained_rewards,
    meta_rewards,
)
from jaxrl_llm.rewards.paraphrases import (
    cross_paraphrase_reward,
    paraphrase_rewards,
    sample_pair_mask,
)
from jaxrl_llm.rewards.pool import VerifierPool
from jaxrl_llm.rewards.scoring import (
    FAILED,
    BatchReward,
    Reward,
    RewardError,
    Scores,
    VerifierWarning,
    score,
)
from jaxrl_llm.rewards.shaping import fapo_reward, genrm_step_reward, steered_bonus
from jaxrl_llm.rewards.votes import (
    Majority,
    majority_label,
    majority_rewards,
)

__all__ = [
    "BatchReward",
    "FAILED",
    "Majority",
    "Prediction",
    "Reward",
    "RewardError",
    "Scores",
    "VerifierPool",
    "VerifierWarning",
    "calibrated_rewards",
    "constrained_rewards",
    "cross_paraphrase_reward",
    "fapo_reward",
    "genrm_step_reward",
    "hbpo_reward",
    "hbpo_rewards",
    "last_integer",
    "last_integer_vote",
    "majority_label",
    "majority_rewards",
    "math_verify",
    "math_verify_pool",
    "meta_rewards",
    "overlong_penalty",
    "overlong_rewards",
    "paraphrase_rewards",
    "reasoning_gym",
    "sample_pair_mask",
    "score",
    "steered_bonus",
]
