"""Libraries of experiences, and regrets over kinds of actions."""

import compiled_curation as cur
import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from rows import for_each

from jaxrl_llm.curation import Operation

LIBRARY = {"G0": "a", "G1": "b", "G2": "c"}


@for_each(
    ("operations", "texts"),
    [
        ([], "abc"),
        ([Operation("add", "d")], "abcd"),
        ([Operation("update", "d", "G1")], "adc"),
        ([Operation("update", "d", "G9")], "abcd"),
        ([Operation("update", "d")], "abcd"),
        ([Operation("delete", "b", "G1")], "ac"),
        ([Operation("delete", "b", "G9")], "abc"),
        (
            [Operation("delete", "", "G1"), Operation("add", ""), Operation("update", "", "G0")],
            "abc",
        ),
        ([Operation("delete", "a", "G0"), Operation("update", "d", "G0")], "bcd"),
        ([Operation("add", "d"), Operation("add", "e"), Operation("delete", "c", "G2")], "abde"),
    ],
)
def test_operations_in_their_order(operations, texts):
    before = dict(LIBRARY)
    after = cur.apply_operations(LIBRARY, operations)
    assert "".join(after.values()) == texts and before == LIBRARY
    assert list(after) == [f"G{i}" for i in range(len(texts))]


def test_centroids():
    # Centroids.
    rng = np.random.default_rng(0)
    x, c = rng.normal(size=(2, 5, 3)), rng.normal(size=(4, 3))
    ours = cur.nearest_centroid(jnp.asarray(x, jnp.float32), jnp.asarray(c, jnp.float32))
    expected = np.linalg.norm(x[:, :, None] - c, axis=-1).argmin(-1)
    equal(ours, expected)

    # Clusters of utterances and pairs of strategies.
    rng = np.random.default_rng(1)
    places = np.array([[0.0, 0.0], [5.0, 0.0], [0.0, 5.0]])
    kinds = rng.integers(0, 3, 40)
    x = (places[kinds] + rng.normal(0, 0.3, (40, 2))).astype(np.float32)
    where = np.arange(40) < 36
    junk = np.where(where[:, None], x, np.nan)
    for seed in range(3):
        centers = cur.k_means(junk, jax.random.key(seed), clusters=3, where=where)
        ours = np.asarray(cur.nearest_centroid(x, centers))
        expected = [x[where & (kinds == k)].mean(0) for k in range(3)]
        for k in range(3):
            (found,) = set(ours[where & (kinds == k)].tolist())
            close(centers[found], expected[k], atol=1e-5)
    # More clusters than points: the same ones again, and nothing non-finite.
    few = cur.k_means(jnp.ones((2, 1)), jax.random.key(0), clusters=4)
    equal(few, 1.0)
    strategies, values = jnp.array([[2, 0, 1, 0], [1, 1, 1, 1]]), jnp.array([[0.1, 0.5, 0.4]] * 2)
    pair = cur.strategy_pair(strategies, values)
    assert pair.chosen.tolist() == [2, 0] and pair.rejected.tolist() == [1, 0]
    assert pair.where.tolist() == [True, False]
    there = jnp.array([[True, False, False, True], [False] * 4])
    pair = cur.strategy_pair(jnp.where(there, strategies, 99), values, where=there)
    assert (int(pair.chosen[0]), int(pair.rejected[0])) == (0, 3)
    assert pair.where.tolist() == [True, False]


@for_each(
    ("regrets", "policy"),
    [
        ([2.0, -1.0, 1.0], [2 / 3, 0, 1 / 3]),
        ([0.0, -1.0, -2.0], [1 / 3] * 3),
        ([5.0, 0.0, 0.0], [1, 0, 0]),
    ],
)
def test_policies_of_regrets(regrets, policy):
    close(cur.regret_matching(jnp.array(regrets)), policy, rtol=1e-6)


def test_games():
    # Self play finds the solution of a game. Rock, paper, scissors with a rock that wins double:
    # 1/4, 1/2, 1/4.
    payoff = jnp.array([[0.0, -1.0, 2.0], [1.0, 0.0, -1.0], [-2.0, 1.0, 0.0]])

    def play(state, _):
        regrets, total = state
        policies = cur.regret_matching(regrets)
        utilities = policies[::-1] @ payoff.T
        return (cur.regret_update(regrets, utilities, policies), total + policies), None

    start = jnp.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]), jnp.zeros((2, 3))
    (_, total), _ = jax.lax.scan(play, start, length=20_000)
    close(total / 20_000, [[0.25, 0.5, 0.25]] * 2, atol=0.02)

    # An id of the caller is never overwritten.
    after = cur.apply_operations({"new 0": "a", "3": "b"}, [Operation("add", "c")])
    assert list(after.values()) == ["a", "b", "c"]
