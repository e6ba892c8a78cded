import jax
import numpy as np
import pytest
from tiny_run import low_bytes, prompts

from jaxrl_llm.data.questions import encode_prompts
from jaxrl_llm.rollout import make_sampler
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.train import accuracy, evaluate, wilson


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # Newcombe, Two-sided confidence intervals for the single proportion (1998), method 3.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_equals_published_intervals(successes, n, low, high):
    np.testing.assert_allclose(wilson(successes / n, n), (low, high), atol=5e-5)


def test_wilson_refuses_what_is_no_share():
    with pytest.raises(ValueError, match="wilson: mean must be in"):
        wilson(1.1, 10)
    with pytest.raises(ValueError, match="wilson: n must be above 0"):
        wilson(0.5, 0)


def test_independent_trials_take_wilson_itself():
    rewards = np.array([[1.0], [0.0], [1.0], [1.0], [0.0], [1.0], [1.0], [1.0]])
    found = accuracy(rewards)
    # One completion a question: the formula gives Q - 1 trials, and there are Q.
    assert (found.low, found.high) == pytest.approx(wilson(0.75, 8), abs=1e-12)
    assert (found.mean, found.questions, found.samples) == (0.75, 8, 1)


def test_completions_of_one_question_are_not_independent():
    alike = np.repeat(np.array([[1.0], [0.0], [1.0], [0.0]]), 5, axis=1)
    assert accuracy(alike)[1:3] == pytest.approx(wilson(0.5, 4))  # 4 questions, whatever S
    rng = np.random.default_rng(0)
    mixed = (rng.random((50, 4)) < 0.5).astype(float)
    found = accuracy(mixed)
    variance = mixed.mean(1).var(ddof=1) / 50
    n = found.mean * (1 - found.mean) / variance
    assert n > 50 and found[1:3] == pytest.approx(wilson(found.mean, min(n, 200)))


def test_certain_and_unbounded_rewards():
    assert accuracy(np.ones((10, 2)))[:3] == pytest.approx((1.0, wilson(1, 10)[0], 1.0))
    found = accuracy(np.array([[1.0, 3.0], [-2.0, 0.0]]))  # means 2 and -1
    half = 1.959964 * np.sqrt(4.5 / 2)
    assert found[:3] == pytest.approx((0.5, 0.5 - half, 0.5 + half), rel=1e-6)
    with pytest.raises(ValueError, match="accuracy: there are no rewards"):
        accuracy(np.zeros((0, 2)))
    with pytest.raises(ValueError, match="accuracy: rewards must have 2 axes"):
        accuracy(np.zeros(3))


def test_evaluate_covers_each_question_once():
    model, params = tiny_model(num_layers=1)
    tokenizer = ByteTokenizer()
    sampler = make_sampler(model, max_new_tokens=4, group_size=2, stop_ids=tokenizer.eos_ids)
    questions = encode_prompts(prompts(), tokenizer, room=20, chat=False)
    options = {"reward": low_bytes, "tokenizer": tokenizer, "batch_size": 4}
    found, rows = evaluate(sampler, params, jax.random.key(0), questions, **options)
    assert [row["id"] for row in rows] == [q.prompt.id for q in questions for _ in range(2)]
    values = [low_bytes(None, row["completion"], None) for row in rows]
    assert [row["reward"] for row in rows] == values
    assert found.mean == pytest.approx(np.mean(values)) and found.questions == 10
    again, _ = evaluate(sampler, params, jax.random.key(0), questions, **options)
    assert again == found
    # The last batch is filled up to one shape; none is left where a long session evicted it.
    assert sampler.compiled._cache_size() <= 1
    with pytest.raises(ValueError, match="evaluate: there are no questions"):
        evaluate(sampler, params, jax.random.key(0), [], **options)
