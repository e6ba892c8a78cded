"""Scores to fitness: the worked numbers, what each form does not see, ties, what is missing."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm import evolution as es

F = jnp.array([1.0, 3.0, 2.0, 6.0])
S = jnp.array([[1.0, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 1]])


def close(found, expected, atol=2e-6):
    np.testing.assert_allclose(found, expected, atol=atol)


def test_worked_numbers():
    close(es.zscore(F), [-1.069043, 0, -0.534522, 1.603565])
    grouped = es.zscore(F.reshape(2, 2)).reshape(-1)
    close(grouped, [-0.534522, 0.534522, -1.069043, 1.069043])
    close(es.zscore(F.reshape(2, 2), deviation="group", eps=0.0), [[-1, 1], [-1, 1]])
    close(es.centered_ranks(F), [-1 / 2, 1 / 6, -1 / 6, 1 / 2])
    close(es.question_fitness(S), [0.507093, -0.169031, -0.169031, -0.169031])
    close(es.mean_fitness(S), [1.731635, -0.577212, -0.577212, -0.577212])
    close(es.mean_fitness(S, shape=es.centered_ranks), [1 / 2, -1 / 2, -1 / 6, 1 / 6])
    close(es.zscore(S.sum(0)), [1.732005, -0.577335, -0.577335, -0.577335])
    close(
        es.baseline_fitness(jnp.array([[1.0, 3, 0, 2], [0, 0, 1, 1]])), [0, 0, 0.552786, 1.447214]
    )
    close(es.zscore(jnp.array([0.2, 0.4, 0.9]), eps=0.0), [-1.019049, -0.339683, 1.358732])
    assert es.pair_sign(F).tolist() == [-1, -1] and es.pair_sign(F).dtype == jnp.int8
    assert es.pair_fitness(es.pair_sign(F)).tolist() == [-0.5, 0.5, -0.5, 0.5]


def rows(shape, *scales):
    """A form of questions as one of the scores of members, each question another multiple."""

    def call(f, where=None):
        where = None if where is None else jnp.tile(where, (len(scales), 1))
        return shape(jnp.stack([scale * f for scale in scales]), where=where)

    return call


EXACT, RANKS = jr.bind(es.zscore, eps=0.0), jr.bind(es.centered_ranks, ties="mean")
FORMS = {
    "zscore": EXACT,
    "mean ranks": RANKS,
    "questions": rows(es.question_fitness, 1),
    "means": rows(jr.bind(es.mean_fitness, shape=EXACT), 1),
    "ranks of means": rows(jr.bind(es.mean_fitness, shape=RANKS), 1, 2),
    "baseline": rows(jr.bind(es.baseline_fitness, eps=0.0), 1),
    "ranks": es.centered_ranks,
    "pair sign": es.pair_sign,
}


@for_each("name", FORMS)
def test_units_of_the_score_do_not_matter(name):
    f = jnp.asarray(np.random.default_rng(0).integers(-8, 8, 12) / 4.0, jnp.float32)
    shape = jax.jit(FORMS[name])
    found = shape(f)
    assert np.abs(found).max() > 0.1
    close(shape(4 * f + 3), found)
    if name not in ("pair sign", "baseline"):
        close(np.sum(found), 0.0, atol=1e-5)
    # 1.1 is not a binary fraction: its mean is another number.
    for value in (0.0, 1.1, -7.3e5):
        assert not np.any(shape(jnp.full(12, value)))


def test_fitness_of_means_over_questions():
    # Eighths, so that every mean is exact.
    rng = np.random.default_rng(1)
    scores = jnp.asarray(rng.integers(-8, 8, (4, 6)) / 8.0, jnp.float32)
    found = es.mean_fitness(scores)
    close(found, es.zscore(scores.mean(axis=0)))
    close(es.mean_fitness(scores[:1]), es.zscore(scores[0]))
    # The order of the questions does not count, nor how hard each of them is.
    close(es.mean_fitness(scores[::-1]), found)
    close(es.mean_fitness(scores + jnp.arange(4.0)[:, None]), found)
    close(es.mean_fitness(scores[:, ::-1]), found[::-1])
    # The paper's form is the same but for its length.
    paper = es.question_fitness(scores)
    close(paper * (found[0] / paper[0]), found, atol=1e-5)
    assert (
        es.pair_sign(scores.mean(axis=0)).tolist()
        == es.mean_fitness(scores, shape=es.pair_sign).tolist()
    )


def test_one_member_alone_gets_nothing():
    for shape in (es.zscore, es.centered_ranks, lambda f: es.zscore(f, eps=0.0)):
        assert shape(jnp.array([3.0])).tolist() == [0.0]


def test_ties():
    scores = jnp.array([0.0, 1.0, 1.0, 0.0])
    close(es.centered_ranks(scores), [-1 / 2, 1 / 6, 1 / 2, -1 / 6])
    close(es.centered_ranks(scores, ties="mean"), [-1 / 3, 1 / 3, 1 / 3, -1 / 3])
    assert es.pair_sign(jnp.array([2, 2, 0, 255], jnp.uint8)).tolist() == [0, -1]


def test_a_score_counts_with_its_partner():
    scores = jnp.array([[0.5, jnp.nan, -1.0, 2.0], [jnp.nan] * 4, [1.0, 2.0, jnp.inf, 4.0]])
    where = jnp.array([[True] * 4, [True] * 4, [True, False, True, True]])
    found = jax.jit(lambda s, w: es.graded(s, where=w))(scores, where)
    assert found.tolist() == [[False, False, True, True], [False] * 4, [False] * 4]
    alone = es.graded(scores, where=where, pairs=False)
    assert alone.tolist() == [[True, False, True, True], [False] * 4, [True, False, False, True]]
    assert es.graded(F).all()


@for_each("name", [name for name in FORMS if name != "pair sign"])
def test_fitness_is_that_of_the_members_that_count(name):
    shape = jax.jit(FORMS[name])
    scores = np.random.default_rng(4).integers(-3, 4, 12).astype(np.float32)
    stay = np.setdiff1d(np.arange(12), [2, 3, 8, 9])
    where = jnp.zeros(12, bool).at[stay].set(True)
    expected = np.zeros(12, np.float32)
    expected[stay] = shape(jnp.asarray(scores[stay]))
    for junk in (jnp.nan, 1e9, -jnp.inf):
        found = shape(jnp.where(where, scores, junk), where=where)
        np.testing.assert_allclose(found, expected, atol=2e-6)
    assert not np.any(shape(jnp.full(12, jnp.nan), where=jnp.zeros(12, bool)))


def test_a_question_without_a_grade_favors_no_member():
    """The first pair was not graded on the easy question, the second not on the hard one."""
    scores = jnp.array([[jnp.nan, 1, 1, 1, 1, 1], [0, 0, 0, jnp.nan, 0, 0], [1, 0, 1, 0, 1, 0.0]])
    where = es.graded(scores)
    better = [0.5, -0.5, 0.5, -0.5, 0.5, -0.5]
    close(
        es.mean_fitness(scores, where=where, shape=jr.bind(es.zscore, eps=0.0)),
        2 * np.array(better),
    )
    found = es.question_fitness(scores, where=where)
    close(found / found[0], 2 * np.array(better))


def test_a_pair_without_a_grade_has_no_vote():
    where = jnp.array([True, False, True, True])
    assert es.pair_sign(jnp.array([3, 1, 2, 1], jnp.uint8), where=where).tolist() == [0, 1]
    assert es.pair_sign(jnp.array([jnp.nan, 1.0, 1.0, jnp.nan, 2.0, 1.0])).tolist() == [0, 0, 1]


@for_each("k", [1, 2, 3, 5])
def test_the_best_of_k_tries_is_the_mean_over_all_choices(k):
    tries = np.random.default_rng(k).normal(size=(3, 5)).astype(np.float32)
    expected = [[max(x) for x in itertools.combinations(row, k)] for row in tries]
    close(es.best_of(jnp.asarray(tries), k=k), np.mean(expected, axis=1), atol=1e-6)
    if k == 5:
        close(es.best_of(jnp.asarray(tries)), tries.max(1))


def test_only_rounding_ties_means():
    ranks = jr.bind(es.centered_ranks, ties="mean")
    steps = 0.5 + 9e-7 * jnp.arange(1000.0)
    found = es.mean_fitness(jnp.stack([steps, steps]), shape=ranks)
    assert found[0] < found[500] < found[-1]
    small = 1e-6 * jnp.array([[0.0, 0, 1, 1], [0, 1, 0, 1]])
    assert jr.recipes.es_qiu().shape(small)[0].any()
    close(es.mean_fitness(steps[None], shape=ranks), ranks(steps))
