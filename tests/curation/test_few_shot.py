"""Examples of the same user, scores of plans and stages."""

import compiled_curation as cur
import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal

USERS = np.array([3, 1, 3, 3, -1, 1, 3, 7, -1])


def test_examples():
    # Examples are other rows of the user.
    draw = jax.jit(lambda key: cur.sample_few_shot(key, USERS, count=2))
    seen = set()
    for seed in range(60):
        shots, where = map(np.asarray, draw(jax.random.key(seed)))
        assert where.tolist() == [u == 3 for u in USERS]
        assert (shots[~where] == -1).all()
        for row in np.flatnonzero(where):
            assert len({row, *shots[row]}) == 3 and (USERS[shots[row]] == 3).all()
        seen |= set(map(tuple, shots[[0]]))
    # Every ordered pair of the three other rows.
    assert seen == {(a, b) for a in (2, 3, 6) for b in (2, 3, 6) if a != b}

    # A draw depends on its query alone.
    key = jax.random.key(5)
    every = cur.sample_few_shot(key, USERS, count=3)
    some = cur.sample_few_shot(key, USERS, count=3, queries=jnp.array([6, 0]))
    equal(some.shots, every.shots[jnp.array([6, 0])])
    shots, where = cur.sample_few_shot(key, USERS, count=0)
    assert shots.shape == (9, 0) and where.tolist() == [u >= 0 for u in USERS]


def test_stages_and_scores():
    # Structured scores.
    scores = np.random.default_rng(0).random((3, 4)).astype(np.float32)
    close(cur.structured_score(*scores), scores.mean(0), rtol=1e-6)
    weights = {"task_weight": 0.5, "grounding_weight": 0.0, "history_weight": 0.25}
    expected = 0.5 * scores[0] + 0.25 * scores[2]
    close(cur.structured_score(*scores, **weights), expected, rtol=1e-6)

    # Stages open one after the other.
    stages = jnp.array([0, 2, 1, 3])
    opened = jax.jit(lambda step: cur.stage_mask(stages, step, boundaries=(10, 20)))
    assert opened(9).tolist() == [True, False, False, False]
    assert opened(10).tolist() == [True, False, True, False]
    assert opened(99).tolist() == [True, True, True, False]
