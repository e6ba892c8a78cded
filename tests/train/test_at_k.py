"""pass@k, maj@k and their intervals, against the formulas of their papers and every set of k."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from rows import for_each

from jaxrl_llm.train import AtK, bootstrap, majority_at_k, pass_at_k
from jaxrl_llm.train.evaluation.at_k import at_k, check_k


def codex(n, c, k):
    """The product of the Codex paper's appendix, in float64."""
    return 1.0 if n - c < k else 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))


@for_each("n", [1, 4, 16, 200])
def test_pass_at_k_is_the_codex_estimator(n):
    counts = [*range(min(n, 5) + 1), n - 1, n]
    right = np.arange(n) < np.array(counts)[:, None]
    for k in {1, 2, n // 2, n} - {0}:
        if k <= n:
            wanted = [codex(n, c, k) for c in counts]
            np.testing.assert_allclose(pass_at_k(right, k), wanted, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(pass_at_k(right, 1), right.mean(1))
    assert pass_at_k(right, n).tolist() == [float(c > 0) for c in counts]


def test_pass_at_k_leaves_failed_calls_out():
    right = np.array([[True, False, True, False], [True, True, True, True]])
    where = np.array([[True, True, False, True], [True, False, False, False]])
    np.testing.assert_allclose(pass_at_k(right, 2, where=where), [codex(3, 1, 2), np.nan])


def enumerated(right, answers, k):
    """The majority of every set of k, ties shared."""
    values = []
    for chosen in itertools.combinations(range(len(answers)), k):
        votes = Counter(answers[i] for i in chosen if answers[i] >= 0)
        most = max(votes.values(), default=0)
        winners = [a for a, n in votes.items() if n == most]
        shares = [
            np.mean([r for r, b in zip(right, answers, strict=True) if b == a]) for a in winners
        ]
        values.append(np.mean(shares) if shares else 0.0)
    return np.mean(values)


def test_majority_at_k_counts_every_set():
    rng = np.random.default_rng(1)
    answers = rng.integers(-1, 4, (12, 8))
    right = answers == 2
    for k in range(1, 9):
        wanted = [enumerated(r, a, k) for r, a in zip(right, answers, strict=True)]
        np.testing.assert_allclose(majority_at_k(right, answers, k), wanted, atol=1e-12)


def test_majority_at_k_in_closed_form():
    # Two answers and odd k: the chance of more than half of a hypergeometric draw.
    n, c = 40, 26
    right = (np.arange(n) < c)[None]
    answers = np.where(right, 1, 0)
    for k in (1, 7, 39):
        wins = sum(math.comb(c, j) * math.comb(n - c, k - j) for j in range(k // 2 + 1, k + 1))
        assert majority_at_k(right, answers, k)[0] == pytest.approx(wins / math.comb(n, k))
    # Answers that count as right in part, nobody who votes, and failed calls.
    right, answers = np.array([[True, False, False]]), np.array([[5, 5, 3]])
    assert majority_at_k(right, answers, 3)[0] == pytest.approx(0.5)
    assert majority_at_k(right, np.full((1, 3), -1), 2)[0] == 0.0
    where = np.array([[True, False, True]])
    assert majority_at_k(right, answers, 2, where=where)[0] == pytest.approx(0.5)
    assert np.isnan(majority_at_k(right, answers, 3, where=where)[0])


def test_the_bootstrap_has_the_width_of_the_normal_interval():
    values = np.random.default_rng(2).random(400)
    low, high = bootstrap(values, resamples=4000)
    half = 1.96 * values.std(ddof=1) / 20
    assert (values.mean() - low, high - values.mean()) == pytest.approx((half, half), rel=0.08)
    assert bootstrap(values) == bootstrap(values)
    with_gaps = np.concatenate([values, [np.nan] * 5])
    assert bootstrap(with_gaps) == bootstrap(values)


def test_at_k_names_and_counts():
    right = np.array([[True, False], [True, True], [False, False]])
    where = np.array([[True, True], [True, True], [True, False]])
    answers = np.array([[4, 5], [4, 4], [1, -1]])
    results = at_k(right, [1, 2], answers=answers, where=where)
    assert [x.name for x in results] == ["pass@1", "maj@1", "pass@2", "maj@2"]
    assert [x.questions for x in results] == [3, 3, 2, 2]
    assert [x.mean for x in results] == pytest.approx([0.5, 0.5, 1.0, 0.75])
    assert all(x.low <= x.mean <= x.high for x in results)
    assert str(AtK("pass@2", 0.5, 0.25, 0.75, 4)) == "0.500 [0.250, 0.750]"
    assert at_k(right, []) == ()


def test_equal_questions_have_an_interval_too():
    none = at_k(np.zeros((4, 2), bool), [1])[0]
    assert (none.mean, none.low) == (0.0, 0.0) and none.high == pytest.approx(0.49, abs=0.01)
    half = at_k(np.array([[True, False]] * 4), [1])[0]
    assert half.low == pytest.approx(0.15, abs=0.01) and half.high == pytest.approx(0.85, abs=0.01)


def test_a_k_without_enough_graded_completions_is_left_out():
    right = np.array([[True, False], [True, True]])
    one = np.array([[True, False], [True, False]])
    with pytest.warns(UserWarning, match="pass@2: no question has 2 graded completions") as told:
        results = at_k(right, [1, 2], answers=np.zeros((2, 2), int), where=one)
    assert [(x.name, x.mean) for x in results] == [("pass@1", 1.0), ("maj@1", 1.0)]
    assert len(told) == 1


RIGHT = np.ones((2, 4), bool)


@for_each(
    ("call", "message"),
    [
        (lambda: pass_at_k(RIGHT, 5), "from 1 to the 4 completions of a question; got 5"),
        (lambda: pass_at_k(RIGHT, 0), "got 0"),
        (lambda: pass_at_k(RIGHT, True), "got True"),
        (lambda: pass_at_k(RIGHT * 0.5, 1), "right must be bool"),
        (lambda: pass_at_k(RIGHT[0], 1), "right must have 2 axes"),
        (lambda: pass_at_k(RIGHT, 1, where=RIGHT[:1]), "where"),
        (lambda: majority_at_k(RIGHT, RIGHT * 0.5, 1), "answers must hold integers"),
        (lambda: majority_at_k(RIGHT, np.ones((2, 3), int), 1), "of shape (2, 4), got"),
        (lambda: pass_at_k(np.ones((1, 1001), bool), 1), "at most 1000 completions; got 1001"),
        (lambda: bootstrap(np.array([np.nan])), "there are no values"),
        (lambda: bootstrap(np.ones(2), resamples=0), "resamples must be above 0"),
        (lambda: check_k([1, 5], 4), "pass_at_k: k must be an integer from 1 to the 4"),
        (lambda: check_k([1], 1001), "at most 1000 completions; got 1001"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert message in str(caught.value)
