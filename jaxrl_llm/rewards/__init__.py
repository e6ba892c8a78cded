"""Rewards of completions: any callable, verifiers in worker processes, reward shaping.

A reward is any callable `(prompt, completion, metadata)` that returns a number or a mapping of
names to numbers, texts and lists of numbers. `score` runs it over a batch, on the host, and rejects
non-finite values; NaN in a mapping means that a name does not apply.

Verifiers: `last_integer`, `math_verify`, `boxed_math`, `reasoning_accuracy`, `dapo_math`, `f1`,
`exact_match`, `multiple_choice`, `reasoning_gym`; formats: `think_format`, `word_repetition`.
For programs, in a sandbox (`run_python`): `code_stdio`, `code_asserts`.
For the text of a judge: `verdict`, `rating`.
`weighted_sum` combines several rewards, `majority_vote` votes if no answer is known.

The functions of arrays shape rewards afterwards. Those that take `rewards` first belong at the head
of a recipe's advantage chain: `fapo_reward`, `steered_bonus`, `paraphrase_rewards`,
`overlong_rewards`, `cosine_length_rewards`, `group_length_rewards`, `budget_rewards`,
`hbpo_rewards`, `repetition_rewards`, `progress_rewards`.
"""

from jaxrl_llm.rewards.agents import call_rewards
from jaxrl_llm.rewards.answers import (
    Extract,
    after_thinking,
    answer_of,
    boxed_answer,
    choice_letter,
    extracts,
    final_answer,
    normalize_math,
    normalize_words,
)
from jaxrl_llm.rewards.builtin import (
    boxed_math,
    last_integer,
    last_integer_vote,
    math_verify,
    math_verify_pool,
    reasoning_accuracy,
)
from jaxrl_llm.rewards.code import code_asserts, code_stdio, from_code_block
from jaxrl_llm.rewards.composed import majority_vote, weighted_sum
from jaxrl_llm.rewards.gym import reasoning_gym
from jaxrl_llm.rewards.length import (
    budget_rewards,
    cosine_length_reward,
    cosine_length_rewards,
    group_length_rewards,
    hbpo_reward,
    hbpo_rewards,
    overlong_penalty,
    overlong_rewards,
)
from jaxrl_llm.rewards.meta import (
    Prediction,
    calibrated_rewards,
    constrained_rewards,
    crpg_rewards,
    meta_rewards,
)
from jaxrl_llm.rewards.meta_answers import (
    MetaAnswer,
    meta_answer_rewards,
    parse_meta_answer,
)
from jaxrl_llm.rewards.paraphrases import (
    bleu,
    cross_paraphrase_reward,
    paraphrase_rewards,
    paraphrase_similarity,
    sample_pair_mask,
)
from jaxrl_llm.rewards.pool import VerifierPool
from jaxrl_llm.rewards.progress import progress_rewards
from jaxrl_llm.rewards.repetition import repetition_penalty, repetition_rewards
from jaxrl_llm.rewards.sandbox import (
    SandboxError,
    SandboxResult,
    check_sandbox,
    run_python,
)
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
from jaxrl_llm.rewards.turns import step_ends, turns_of_tokens
from jaxrl_llm.rewards.verdicts import rating, verdict
from jaxrl_llm.rewards.verifiers import (
    dapo_math,
    exact_match,
    f1,
    multiple_choice,
    think_format,
    word_repetition,
)
from jaxrl_llm.rewards.votes import (
    Majority,
    majority_label,
    majority_rewards,
)

__all__ = [
    "BatchReward",
    "Extract",
    "FAILED",
    "Majority",
    "MetaAnswer",
    "Prediction",
    "Reward",
    "RewardError",
    "SandboxError",
    "SandboxResult",
    "Scores",
    "VerifierPool",
    "VerifierWarning",
    "after_thinking",
    "answer_of",
    "bleu",
    "boxed_answer",
    "boxed_math",
    "budget_rewards",
    "calibrated_rewards",
    "call_rewards",
    "check_sandbox",
    "choice_letter",
    "code_asserts",
    "code_stdio",
    "constrained_rewards",
    "cosine_length_reward",
    "cosine_length_rewards",
    "cross_paraphrase_reward",
    "crpg_rewards",
    "dapo_math",
    "exact_match",
    "extracts",
    "f1",
    "fapo_reward",
    "final_answer",
    "from_code_block",
    "genrm_step_reward",
    "group_length_rewards",
    "hbpo_reward",
    "hbpo_rewards",
    "last_integer",
    "last_integer_vote",
    "majority_label",
    "majority_rewards",
    "majority_vote",
    "math_verify",
    "math_verify_pool",
    "meta_answer_rewards",
    "meta_rewards",
    "multiple_choice",
    "normalize_math",
    "normalize_words",
    "overlong_penalty",
    "overlong_rewards",
    "paraphrase_rewards",
    "paraphrase_similarity",
    "parse_meta_answer",
    "progress_rewards",
    "rating",
    "reasoning_accuracy",
    "reasoning_gym",
    "repetition_penalty",
    "repetition_rewards",
    "run_python",
    "sample_pair_mask",
    "score",
    "steered_bonus",
    "step_ends",
    "think_format",
    "turns_of_tokens",
    "verdict",
    "weighted_sum",
    "word_repetition",
]
