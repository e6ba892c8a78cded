"""The last few checkpoints stay, and the best."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint import make_state
from tiny_run import tiny_run

from jaxrl_llm.train import CheckpointConfig, Checkpoints, EvaluationConfig, train
from jaxrl_llm.train.checkpoint.checkpoints import best_of, superseded

NAN = float("nan")


@pytest.mark.parametrize(
    ("ratings", "best"),
    [({}, None), ({1: NAN}, None), ({1: 0.5, 2: 0.25}, 1), ({1: 0.5, 2: 0.5}, 2), ({1: -1.0}, 1)],
)
def test_the_best_is_the_latest_of_the_highest(ratings, best):
    assert best_of(ratings) == best


@given(
    ratings=st.dictionaries(st.integers(0, 50), st.one_of(st.none(), st.floats(-1, 1))),
    keep=st.integers(1, 5),
)
def test_what_stays_is_the_last_and_the_best(ratings, keep):
    steps = sorted(ratings)
    known = {step: value for step, value in ratings.items() if value is not None}
    gone = superseded(steps, known, keep=keep)
    stays = [step for step in steps if step not in gone]
    assert stays[-keep:] == steps[-keep:] and len(stays) <= keep + 1
    assert not known or best_of(known) in stays
    assert set(gone) <= set(steps)


def saved(tmp_path, values, **options):
    """Checkpoints of these ratings, in steps of one."""
    model, state = make_state()
    checkpoints = Checkpoints(tmp_path, model=model, **options)
    for step, value in enumerate(values, start=1):
        checkpoints.set_score(step, {"reward": value, "other": -value})
        checkpoints.save(state._replace(step=state.step + step))
    checkpoints.wait()
    return checkpoints


def test_the_best_stays_beside_the_last(tmp_path):
    checkpoints = saved(tmp_path, [0.5, 0.75, 0.25, NAN, 0.0], keep=1, best="reward")
    assert checkpoints.steps() == [2, 5] and checkpoints.best_step() == 2
    again = Checkpoints(tmp_path, model=checkpoints.model, best="reward")  # after a resume
    assert again.best_step() == 2
    assert again.restore(make_state(seed=4)[1]).step == 5
    with pytest.raises(ValueError, match="made without best=METRIC"):
        Checkpoints(tmp_path, model=checkpoints.model).best_step()
    assert Checkpoints(tmp_path, model=checkpoints.model, best="other").best_step() is None


def test_a_step_may_be_rated_after_it_is_saved(tmp_path):
    model, state = make_state()
    checkpoints = Checkpoints(tmp_path, model=model, keep=1, best="greedy")
    for step, value in ((1, 0.75), (2, 0.5), (3, 0.25)):
        checkpoints.save(state._replace(step=state.step + step))
        checkpoints.set_score(step, {"greedy": value, "sampled": 1.0})
    checkpoints.wait()
    assert checkpoints.steps() == [1, 3] and checkpoints.best_step() == 1
    assert checkpoints.restore(make_state()[1]).step == 3  # the checksums stay right


def test_without_a_metric_only_the_last_stay(tmp_path):
    assert saved(tmp_path, [0.5, 0.75, 0.25, 0.0], keep=2).steps() == [3, 4]


def test_a_run_keeps_its_best(tmp_path):
    checkpoint = CheckpointConfig(every=1, keep=1, best="reward")
    done = train(tiny_run(tmp_path, checkpoint=checkpoint))
    rewards = {row["step"]: row["reward"] for row in done.history}
    best = best_of(rewards)
    folder = Checkpoints(tmp_path / "checkpoints", model=None, best="reward")
    assert folder.steps() == sorted({best, 6}) and folder.best_step() == best
    other = tmp_path / "greedy"
    evaluation = EvaluationConfig(every=1)
    checkpoint = CheckpointConfig(every=1, keep=1, best="greedy")
    done = train(tiny_run(other, checkpoint=checkpoint, evaluation=evaluation, steps=3))
    means = {r["step"]: r["held_out"]["greedy"]["mean"] for r in done.history if "held_out" in r}
    folder = Checkpoints(other / "checkpoints", model=None, best="greedy")
    assert folder.best_step() == best_of({s: m for s, m in means.items() if s in folder.steps()})
    assert best_of({s: means[s] for s in (1, 2)}) in folder.steps()


def test_a_best_without_effect_is_refused():
    with pytest.raises(ValueError, match="best has no effect where only the last step is saved"):
        CheckpointConfig(every=0, best="reward")
    with pytest.raises(ValueError, match="checkpoint: best must be one of"):
        CheckpointConfig(best="loss")
    for evaluation in (
        EvaluationConfig(),
        EvaluationConfig(enabled=False),
        EvaluationConfig(every=3),
    ):
        with pytest.raises(ValueError, match="best='greedy' needs an evaluation at each checkpoin"):
            tiny_run(
                "x", checkpoint=CheckpointConfig(every=4, best="greedy"), evaluation=evaluation
            )
    options = {"checkpoint": CheckpointConfig(every=4, best="sampled")}
    assert tiny_run("x", **options, evaluation=EvaluationConfig(every=2)).checkpoint.best
