"""More rollouts than train: what a rule chooses, however often."""

import jax
import numpy as np
import pytest
from batches_of_collectors import RecordingSource, outcome, play_batch
from cheap import close
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm import curation as cur
from jaxrl_llm.curation import Collection, Row, downsampled

P, G = 2, 4
REWARDS = [[1, 1, 1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]]
PENALTY = [[0.5, 0.0, 1.0, 0.2, 0.1, 0, 0, 0], [1.0] * 8]


def chosen(collector, seed=0, where=None, component="penalty"):
    """The rollouts of each row, after every prompt has finished."""

    def answer(request, number, place):
        assert request.rollouts == 8
        parts = {component: np.float32(PENALTY[place])}
        done = outcome(place, REWARDS[place], reward_components=parts)
        return done if where is None or place == 0 else done._replace(where=np.array(where))

    batch, key = Collection(P, G), jax.random.key(seed)
    rows, _, _ = play_batch(collector, collector.init(10), batch, answer, key=key, order=0)
    assert [row.members[0][0] for row in rows] == [0, 1]
    return rows


def members(row):
    return [member for _, member in row.members]


def test_rules():
    # Clean right traces and the first wrong ones; the best and the worst half.
    small = jr.bind(cur.resample_on_correct, min_wrong=1, min_right=1)
    for rule, expected in (
        # 5 right and 3 wrong of 8: half of them are 2 and 2, as 1.5 rounds to even.
        (small, [[1, 4, 5, 6], [0, 1, 2, 3]]),
        (cur.resample_on_correct, [[1, 4, 5, 6], [0, 1, 2, 3]]),
        (cur.contrasts, [[0, 1, 5, 6], [0, 1, 2, 3]]),
    ):
        assert [members(row) for row in chosen(downsampled(rule))] == expected

    # Draws with replacement come from the key of the batch.
    collector = downsampled(cur.resample_groups)
    first, again, other = (chosen(collector, seed) for seed in (0, 0, 1))
    assert first == again and first != other
    for row in first:
        assert len(row.members) == G
    # Of equal rewards the last is the best and the first the worst.
    assert set(members(first[0])) <= {4, 5} and set(members(first[1])) <= {0, 1}

    # The votes of ttrl are answers.
    collector = jr.recipes.ttrl_majority().collector
    assert collector.oversample == 2 and collector.rule is cur.first_rollouts
    where, nan = np.ones((1, 4), bool), np.nan
    ids = np.float32([[3, nan, 4, 4]])
    assert collector.regrade(answer_ids=ids, where=where).tolist() == [[0, 0, 1, 1]]
    with pytest.raises(ValueError, match="answer_ids of the reward must be integers; got 0.5"):
        collector.regrade(answer_ids=ids + 0.5 - 3, where=where)
    with pytest.raises(ValueError, match="regrade reads 'answer_ids', which is missing from the m"):
        chosen(collector)

    # What has no reward does not train.
    rows = chosen(downsampled(cur.contrasts), where=[False] * 2 + [True] * 6)
    assert not {0, 1} & set(members(rows[1]))
    rows = chosen(downsampled(cur.resample_on_correct), where=[True] * 3 + [False] * 5)
    assert rows[1] == Row(((1, 0), (1, 1), (1, 2), (1, 3)), takes_part=False)


def agreement(answer_ids, where):
    return jr.rewards.majority_rewards(
        np.zeros(where.shape, np.float32), answer_ids=answer_ids.astype(int), where=where
    )


@for_each(
    ("votes", "where", "rewards"),
    [  # The first four of the second prompt alone would elect 5.
        ([5, 5, 3, 2, 3, 3, 3, -1], [True] * 8, [0, 0, 1, 0]),
        ([-1.0] * 8, [True] * 8, [0, 0, 0, 0]),
        ([5, 7, 7, 5, 7, 3, 3, 5], [False] + [True] * 7, [1, 1, 0, 1]),
    ],
)
def test_all_vote_and_the_first_half_trains(votes, where, rewards, monkeypatch):
    monkeypatch.setitem(globals(), "PENALTY", [[2.0] * 8, votes])
    collector = downsampled(cur.first_rollouts, regrade=agreement)
    rows = chosen(collector, where=where, component="answer_ids")
    assert rows[0].rewards == (1.0,) * 4 and members(rows[0]) == [0, 1, 2, 3]
    assert rows[1].rewards == tuple(rewards)
    assert members(rows[1]) == np.flatnonzero(where)[:G].tolist()


def test_the_draws_of_a_group_follow_the_weights():
    rewards = np.tile(np.float32([0, 1, 2, 3]), (2000, 1))
    times = cur.resample_groups(jax.random.key(0), rewards, count=4, rule="best_random")
    assert (np.asarray(times).sum(axis=-1) == 4).all()
    close(times.mean(axis=0) / 4, np.array([1, 1, 1, 4]) / 7, atol=0.02)
    none = cur.resample_groups(
        jax.random.key(0), np.zeros(3, np.float32), count=5, rule="power", where=np.zeros(3, bool)
    )
    assert none.tolist() == [0, 0, 0]
    even = cur.resample_groups(
        jax.random.key(0), np.zeros((900, 3), np.float32), count=1, rule="power"
    )
    close(even.mean(axis=0), [1 / 3] * 3, atol=0.06)


def test_mistakes():
    # Bad rules are refused.
    with pytest.raises(ValueError, match="takes 8 rollouts of a group; from 0 to 4 train"):
        chosen(downsampled(lambda where: where))
    with pytest.raises(ValueError, match="must return bool or integers; got float32"):
        chosen(downsampled(lambda rewards: rewards))
    with pytest.raises(ValueError, match="the rule's result"):
        chosen(downsampled(lambda where: where[:1]))

    # A rule reads no component that some responses lack.
    class Stored(type(cur.in_order())):
        needs = jr.curation.Needs(lacks_components=True)

    with pytest.raises(ValueError, match="the component 'penalty', but the run's reward does not"):
        chosen(downsampled(cur.resample_on_correct, source=Stored()))
    assert len(chosen(downsampled(cur.contrasts, source=Stored()))) == P


@for_each("name", ["count", "where", "rewards", "key"])
def test_a_component_that_has_the_name_of_what_a_rule_reads_is_refused(name):
    with pytest.raises(ValueError, match=f"reads '{name}', which is also the name of a component"):
        chosen(downsampled(cur.resample_groups), component=name)


@for_each("name", ["count", "where", "lengths", "truncated"])
def test_a_component_that_no_rule_reads_may_have_any_name(name):
    def first_half(rewards):
        return np.broadcast_to(np.arange(8) < G, rewards.shape)

    rows = chosen(downsampled(first_half), component=name)
    assert [members(row) for row in rows] == [[0, 1, 2, 3]] * P


def test_rewards_that_a_source_gives_are_read_and_stay_with_their_rollouts():
    class Graded(RecordingSource):
        """Rewards that are only known after all groups have finished."""

        def observe(self, state, collection):
            decision, _ = super().observe(state, collection)
            given = tuple(float(j) for j in range(2 * G))
            rows = decision.rows and tuple(x._replace(rewards=given) for x in decision.rows)
            return decision._replace(rows=rows), state

    def best_twice(rewards, count):
        return 2 * (rewards >= np.sort(rewards, axis=-1)[:, -2:-1])

    rows = chosen(downsampled(best_twice, source=Graded(cur.Request(G))))
    assert [row.members for row in rows] == [((p, 6), (p, 6), (p, 7), (p, 7)) for p in range(P)]
    assert {row.rewards for row in rows} == {(6.0, 6.0, 7.0, 7.0)}
