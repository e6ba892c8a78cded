"""Rewards against those of slime, TRL, open-r1, verl and prime-rl."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each

from jaxrl_llm import rewards

PEERS = json.loads((Path(__file__).parents[1] / "golden" / "rewards.json").read_text())

# Texts on which we differ from a peer, and why; each must differ.
DIFFERENT = {
    "grade_answer_verl": {r"$\boxed{\frac{2}{4}}$": "slime wants fractions reduced"},
    "math_dapo compute_score": {"**Answer:** 18": "they keep the asterisks of Markdown"},
    "accuracy_reward": {
        r"\boxed{1} no, \boxed{\frac{1}{2}}.": "TRL takes the first box",
        r"\boxed{\text{12 cm}}": "math-verify alone reads no number in a text",
    },
    "compute_gpqa_reward": {
        "The choice because of heat. The answer is D": "slime reads the B of because",
        "Option A is wrong. The answer is C": "slime takes the first pattern that matches",
        "The answer is B? No, the answer is C": "slime takes the first statement",
    },
    "think_format_reward": {"a</think>b": "TRL does not know of a tag in the prompt"},
    "reasoning_accuracy_reward": {r"</think> a </think> $4$": "TRL's math-verify wants an anchor"},
}


def rows(peer, function):
    return PEERS[peer]["functions"][function]


def graded(peer, function, reward, **metadata):
    """Compares a reward with a peer's function, but for the texts where they differ."""
    different = DIFFERENT.get(function, {})
    for text, answer, value in rows(peer, function):
        ours = reward("", text, {"answer": answer, **metadata})
        assert (ours != pytest.approx(value)) == (text in different), (text, answer, value, ours)


@for_each(
    ("peer", "function", "reward", "metadata"),
    [
        ("slime", "math_dapo compute_score", rewards.dapo_math, {}),
        ("verl", "math_dapo compute_score", rewards.dapo_math, {}),
        ("slime", "f1_score", rewards.f1, {}),
        ("slime", "compute_gpqa_reward", rewards.multiple_choice, {"choices": [*"wxyz"]}),
        ("slime", "grade_answer_verl", rewards.boxed_math, {}),
        ("TRL", "accuracy_reward", rewards.boxed_math, {}),
        ("TRL", "reasoning_accuracy_reward", rewards.reasoning_accuracy, {}),
    ],
)
def test_verifiers_agree_with_released_code(peer, function, reward, metadata):
    if "grade" in function or "accuracy" in function:
        pytest.importorskip("math_verify")
    graded(peer, function, reward, **metadata)


@for_each(
    ("peer", "function", "ours"),
    [
        ("slime", "extract_answer", rewards.boxed_answer),
        ("slime", "normalize_final_answer", rewards.normalize_math),
        ("TRL", "think_format_reward", lambda text: rewards.think_format("", text, {})),
        (
            "open-r1",
            "get_repetition_penalty_reward",
            lambda text: -rewards.word_repetition("", text, {}),
        ),
    ],
)
def test_functions_of_a_text_agree_with_released_code(peer, function, ours):
    different = DIFFERENT.get(function, {})
    for text, value in rows(peer, function):
        value = pytest.approx(value) if isinstance(value, float) else value
        assert (ours(text) != value) == (text in different), text


def test_repetition_is_that_of_trl():
    cases = rows("TRL", "get_repetition_penalty_reward")
    length = max(len(tokens) for tokens, *_ in cases) + 5
    penalty_of = jax.jit(rewards.repetition_penalty, static_argnames=("ngram", "max_penalty"))
    for tokens, ngram, most, value in cases:
        # Junk behind the response, as padding may be, up to one length.
        padded = np.full(length, 7, np.int32)
        padded[: len(tokens)] = tokens
        mask = np.arange(length) < len(tokens)
        penalty = penalty_of(padded, mask, ngram=ngram, max_penalty=most)
        assert penalty == pytest.approx(value, abs=1e-6), tokens


def test_cosine_and_overlong_are_those_of_trl():
    cases = rows("TRL", "get_cosine_scaled_reward")
    right, lengths, values = map(np.array, zip(*cases, strict=True))
    ours = rewards.cosine_length_reward(jnp.array(right), jnp.array(lengths), max_length=100)
    np.testing.assert_allclose(ours, values, atol=1e-6)
    lengths, values = map(np.array, zip(*rows("TRL", "get_soft_overlong_punishment"), strict=True))
    ours = rewards.overlong_penalty(jnp.array(lengths), max_length=100, buffer=20)
    np.testing.assert_allclose(ours, values, atol=1e-6)


def masks(lengths):
    return jnp.arange(12) < jnp.array(lengths)[:, None]


def test_the_bonus_for_short_responses_is_that_of_open_r1():
    for lengths, right, values in rows("open-r1", "len_reward"):
        correct = jnp.array(right, jnp.float32)
        ours = rewards.group_length_rewards(correct, masks(lengths)) - correct
        np.testing.assert_allclose(ours, values, atol=1e-6)


def test_budgets_are_those_of_prime_rl():
    for form, reward, target, length, value in rows("prime-rl", "_compute_completion_reward"):
        correct, budgets = jnp.array([reward], jnp.float32), jnp.array([target], jnp.float32)
        options = {} if form == "clip" else {"coef": 0.1}
        ours = rewards.budget_rewards(
            correct, masks([length]), budgets=budgets, form=form, **options
        )
        assert ours[0] == pytest.approx(value, abs=1e-6), (form, reward, target, length)
