"""Mean rewards of held-out questions and their 95% intervals: Wilson's, or Student's t."""

import json

import jax
import numpy as np
import pytest
from helpers import refuses
from rows import for_each
from tiny_run import low_bytes, prompts, tiny_run

from jaxrl_llm.data.questions import encode_prompts
from jaxrl_llm.rewards import FAILED, RewardError, Scores
from jaxrl_llm.rollout import make_sampler
from jaxrl_llm.rollout import types as rollout_types
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.train import EvaluationConfig, accuracy, evaluate, wilson
from jaxrl_llm.train.evaluation.evaluate import answer_ids
from jaxrl_llm.train.experiment.setup import load_experiment

TOKENIZER = ByteTokenizer()


@for_each(
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
    refuses("wilson: mean must be in", wilson, 1.1, 10)
    refuses("wilson: n must be above 0", wilson, 0.5, 0)


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
    half = 12.706205 * np.sqrt(4.5 / 2)  # Student's t with one degree of freedom
    assert found[:3] == pytest.approx((0.5, 0.5 - half, 0.5 + half), rel=1e-6)
    for lost in (np.full((40, 1), -1.0), np.full((2, 3), 5.0)):  # no spread says how sure that is
        assert np.isnan(accuracy(lost)[1:3]).all()
    with pytest.raises(ValueError, match="accuracy: there are no rewards"):
        accuracy(np.zeros((0, 2)))
    with pytest.raises(ValueError, match="accuracy: rewards must have 2 axes"):
        accuracy(np.zeros(3))


def test_the_interval_of_few_returns_covers_in_95_of_100_cases():
    """That of a normal distribution would in 86."""
    draws = np.random.default_rng(0).normal(3.0, 1.0, (4000, 4, 1))
    found = [accuracy(rewards) for rewards in draws]
    assert 0.94 < np.mean([each.low <= 3.0 <= each.high for each in found]) < 0.96


def test_one_return_has_no_interval():
    found = accuracy(np.array([[5.0, 6.0]]))
    assert found.mean == 5.5 and np.isnan(found[1:3]).all() and str(found) == "5.500 [no interval]"
    record = json.loads(json.dumps(found.record(), allow_nan=False))
    assert (record["low"], record["high"]) == (None, None) and record["questions"] == 1
    assert accuracy(np.array([[1.0]]))[1:3] == wilson(1.0, 1)  # which needs no spread


@pytest.fixture(scope="module")
def asked():
    """A sampler of two completions, its parameters, and ten questions."""
    model, params = tiny_model(num_layers=1)
    sampler = make_sampler(model, max_new_tokens=4, group_size=2, stop_ids=TOKENIZER.eos_ids)
    return sampler, params, encode_prompts(prompts(), TOKENIZER, room=20, chat=False)


def test_evaluate_covers_each_question_once(asked):
    sampler, params, questions = asked
    options = {"reward": low_bytes, "tokenizer": TOKENIZER, "batch_size": 4}
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


def test_failed_calls_are_left_out_and_counted():
    rewards = np.array([[1.0, 0.0, 1.0], [0.0, 7.0, 1.0], [7.0, 7.0, 7.0], [1.0, 1.0, 1.0]])
    where = rewards < 7
    found = accuracy(rewards, where)
    assert found.mean == pytest.approx(6 / 8) and found.binary
    assert (found.questions, found.samples, found.failed) == (3, 3, 4)
    # What is not read may be anything; the ratio estimator's variance in float64.
    assert accuracy(np.where(where, rewards, np.nan), where) == found
    sums, sizes = np.array([2.0, 1.0, 3.0]), np.array([3, 2, 3])
    variance = ((sums - 0.75 * sizes) ** 2).sum() / 8**2 * 3 / 2
    n = np.clip(0.75 * 0.25 / variance, 64 / 22, 8)
    assert found[1:3] == pytest.approx(wilson(0.75, n))
    with pytest.raises(ValueError, match="there are no rewards; got shape .* 0 are graded"):
        accuracy(rewards, ~np.ones_like(where))


def test_a_question_with_most_of_the_completions_is_one_question():
    """A hundred of one and one of a hundred others: half of the weight is one draw."""
    rewards, where = np.zeros((101, 100)), np.zeros((101, 100), bool)
    rewards[0], where[0], where[1:, 0], rewards[1:51, 0] = 1.0, True, True, 1.0
    found = accuracy(rewards, where)
    assert found.mean == 0.75 and found.high - found.low > 0.3


def test_an_empty_answer_and_a_failed_call_have_no_vote():
    def reward(prompt, completion, metadata):
        return 0.0

    reward.answer = lambda text: text[1:]
    scores = Scores(np.zeros(5, np.float32), {}, np.zeros(5, bool))
    ids = answer_ids(reward, [["a", "b", "ab", "cb", "ac"]], scores)
    assert [x.tolist() for x in ids] == [[-1, -1, 0, 0, 1]]
    hung = Scores(np.zeros(4, np.float32), {}, np.zeros(4, bool), np.array([True, False] * 2))
    ids = answer_ids(reward, [["ab", "ab"], ["ab", "ac"]], hung)
    assert [x.tolist() for x in ids] == [[-1, 0], [-1, 1]]
    parts, zeroed = {"answer_ids": np.float32([0, 2, 0])}, np.array([True, False, False])
    scores = Scores(np.zeros(3, np.float32), parts, np.zeros(3, bool), zeroed)
    assert [x.tolist() for x in answer_ids(reward, [["a"] * 3], scores)] == [[-1, 2, 0]]


class Flaky:
    """Grades a completion by its first byte; fails on every third."""

    calls = 0

    def __init__(self, every=3):
        self.every = every

    def answer(self, text):
        return text[:1] or None

    def score_batch(self, prompts, completions, metadata):
        values = []
        for text in completions:
            self.calls += 1
            failed = self.calls % self.every == 0
            values.append(FAILED if failed else float(text[:1] < "`"))
        return values


async def answered(prompt, completion, metadata):
    """Fails on the questions after the fourth."""
    if prompt > "q03":
        raise ValueError("x")
    return {"reward": 1.0, "answer_ids": 0}


@for_each("on_error", ["drop", "zero"])
def test_a_batch_whose_calls_all_fail_has_no_answers_and_the_others_do(asked, on_error):
    sampler, params, questions = asked
    questions = questions[:8]
    options = {"tokenizer": TOKENIZER, "batch_size": 4, "k": (1,), "on_error": on_error}
    with pytest.warns(match="failed on"):
        found, _ = evaluate(
            sampler, params, jax.random.key(0), questions, reward=answered, **options
        )
    by_name = {x.name: x for x in found.at_k}
    assert found.failed == 8 * (on_error == "drop")
    assert list(by_name) == ["pass@1", "maj@1"] and by_name["maj@1"][1] == by_name["pass@1"][1]


def test_evaluate_at_k_without_failed_calls(asked):
    sampler, params, questions = asked
    options = {"tokenizer": TOKENIZER, "batch_size": 4, "k": (1, 2)}
    key = jax.random.key(0)
    with pytest.warns(match="failed on"):
        found, rows = evaluate(sampler, params, key, questions, reward=Flaky(), **options)
    graded = [row["reward"] for n, row in enumerate(rows) if (n + 1) % 3]
    assert found.mean == pytest.approx(np.mean(graded)) and found.failed == 6
    record = found.record()
    assert list(record)[-4:] == ["pass@1", "maj@1", "pass@2", "maj@2"] and "at_k" not in record
    assert record["pass@2"]["questions"] == 4  # of ten, those without a failed call
    assert record["maj@1"]["mean"] == pytest.approx(record["pass@1"]["mean"])
    plain, _ = evaluate(sampler, params, key, questions, reward=low_bytes, **options)
    assert [x.name for x in plain.at_k] == ["pass@1", "pass@2"]  # it tells no answers
    with pytest.raises(ValueError, match="pass_at_k: k must be an integer from 1 to the 2"):
        evaluate(sampler, params, key, questions, reward=low_bytes, **options | {"k": (3,)})
    every = pytest.raises(RewardError, match="failed on all 20 responses of the evaluation")
    with every, pytest.warns():
        evaluate(sampler, params, key, questions, reward=Flaky(every=1), **options)


def never_asked(prompt, completion, metadata):
    pytest.fail("it has already sampled")


def test_a_k_that_cannot_be_computed_is_refused_before_sampling(tmp_path):
    config = tiny_run(tmp_path, evaluation=EvaluationConfig(samples=4), reward=never_asked)
    experiment, params = load_experiment(config, trains=False)
    with pytest.raises(ValueError, match="from 1 to the 4 completions"):
        experiment.evaluate(params, jax.random.key(0), k=(1, 5))


def test_non_finite_logits_are_no_wrong_answers(asked):
    sample, params, questions = asked
    questions = questions[:8]

    def breaking(params, key, tokens):
        rollout = sample(params, key, tokens)
        broken = [bytes(x).startswith(b"q06") for x in tokens]
        return rollout._replace(
            finish=np.where(np.array(broken)[:, None], rollout_types.FAILED, rollout.finish)
        )

    options = {"reward": low_bytes, "tokenizer": TOKENIZER, "batch_size": 4}
    key, told = jax.random.key(0), "evaluate: the logits of a response to prompt 'q06' are non-fin"
    refuses(told, evaluate, breaking, params, key, questions, **options)
    with pytest.warns(UserWarning, match=told) as warned:
        evaluate(breaking, params, key, questions, **options, on_non_finite="warn")
    assert len(warned) == 1
