"""Whole runs that predict their own solutions: rewards, cutoffs, an exact resume."""

import dataclasses

import numpy as np
import pytest
from exact_resume import assert_resumes
from rows import for_each
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.curation import JUDGE, OWN
from jaxrl_llm.train import CheckpointConfig, TrainingError, train

pytestmark = pytest.mark.usefixtures("shared_programs")


def parse(text):
    """A prediction of every text that the tiny model writes."""
    return jr.rewards.MetaAnswer(float(len(text) > 2), sum(map(ord, text)) % 3 / 2, ())


def last_is_low(prompt, completion, metadata):
    return float(completion[-1:] < "@")


MASA = jr.recipes.masa()
EFFICIENT = MASA.replace(
    collector=jr.curation.predicted(
        parse,
        jr.rewards.meta_answer_rewards,
        message="{} Predict.".format,
        gate=jr.curation.predictive_gate,
        cutoff=jr.curation.length_cutoff,
    )
)


@pytest.mark.slow
def test_an_efficient_run_is_resumed_exactly(tmp_path):
    config = tiny_run(
        tmp_path / "run",
        recipe=EFFICIENT,
        reward=last_is_low,
        steps=3,
        checkpoint=CheckpointConfig(every=1, keep=3),
    )
    straight = train(config)
    state = straight.state.collector_state
    assert int(state["predictions"]) == int(state["parsed"]) == 3 * 2 * 2
    # Of four groups of two: two predict, and two are solved if the predictions let them.
    judged = [int(row.get("rollouts/judge", 0)) for row in straight.history]
    assert [row["rollouts_sampled"] for row in straight.history] == [4 + n for n in judged]
    assert sum(judged) + 2 * int(state["gated"]) == 12 and 0 < int(state["gated"]) < 6
    assert_resumes(config, straight, tmp_path / "again")


@pytest.mark.slow
def test_predictions_train_with_the_reward_of_their_solutions(tmp_path, monkeypatch):
    rows = []
    collect = jr.rollout.collect.collect

    def spy(*args, **options):
        rows.append(collect(*args, **options))
        return rows[-1]

    monkeypatch.setattr("jaxrl_llm.train.experiment.rollouts.collect", spy)
    recipe = MASA.replace(
        collector=jr.curation.predicted(
            parse, jr.rewards.meta_answer_rewards, message="{} Predict.".format
        )
    )
    train(tiny_run(tmp_path, recipe=recipe, reward=last_is_low, steps=1))
    (batch,) = rows
    assert (batch.roles == np.array([[OWN], [OWN], [JUDGE], [JUDGE]])).all()
    assert batch.places[:2] == batch.places[2:] and batch.where.all()
    rewards = batch.scores.rewards.reshape(4, 2)
    for p in range(2):
        expected = jr.rewards.meta_answer_rewards(
            [parse(text) for text in batch.texts[p + 2]],
            problem=batch.questions[p].prompt.text,
            texts=batch.texts[p],
            rewards=rewards[p],
            lengths=batch.rollout.mask[p].sum(-1),
        )
        np.testing.assert_array_equal(rewards[p + 2], expected)
        assert (expected > 0).all()


@dataclasses.dataclass(frozen=True)
class Wrong:
    """Gives a row the rewards of another."""

    rewards: tuple

    def init(self, num_prompts):
        return ()

    def propose(self, state, key, collection, count):
        return jr.curation.in_order().propose(state, key, collection, count)

    def observe(self, state, collection):
        decision, _ = jr.curation.in_order().observe(state, collection)
        if decision.rows is None:
            return decision, state
        rows = tuple(row._replace(rewards=self.rewards) for row in decision.rows)
        return decision._replace(rows=rows), state


@pytest.mark.slow
@for_each("rewards", [(1.0,), (1.0, float("nan"))])
def test_rewards_of_a_row_are_finite_and_one_a_member(tmp_path, rewards):
    recipe = jr.recipes.grpo().replace(name="wrong", collector=Wrong(rewards))
    with pytest.raises((ValueError, TrainingError), match="row 0 has the rewards .* for 2 members"):
        train(tiny_run(tmp_path, recipe=recipe, steps=1))
