"""Two trainers with one folder: each trains on groups of the other, and resumes exactly."""

import shutil

import pytest
from test_checkpoint import assert_same
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.train import CheckpointConfig, SamplingConfig, train

pytestmark = pytest.mark.usefixtures("shared_programs")

# Of the second trainer: text of four random bytes may have more bytes than that.
LONGER = {"sampling": SamplingConfig(group_size=2, max_new_tokens=16)}


def first_is_low(prompt, completion, metadata):
    return float(completion[:1] < "@")


def run(folder, node, steps, **changes):
    swarm = jr.curation.shared_folder(str(folder / "swarm"), node=node)
    return tiny_run(
        folder / node,
        recipe=jr.recipes.sapo_swarm(swarm=swarm),
        reward=first_is_low,
        seed=ord(node),
        steps=steps,
        checkpoint=CheckpointConfig(every=1, keep=4),
        **changes,
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Three steps of a trainer that is alone: what it shares."""
    folder = tmp_path_factory.mktemp("swarm")
    result = train(run(folder, "a", 3))
    assert [row.get("rollouts/demonstration", 0) for row in result.history] == [0, 0, 0]
    assert int(result.state.collector_state["shared"]) == 12
    return folder


@pytest.mark.slow
def test_two_trainers_take_turns(alone, tmp_path):
    shutil.copytree(alone, tmp_path / "both")
    folder = tmp_path / "both"
    second = train(run(folder, "b", 2, **LONGER))
    # Of four groups of two rollouts, two are of the first trainer.
    assert [row["rollouts/demonstration"] for row in second.history] == [4, 4]
    assert int(second.state.collector_state["drawn"]) == 4
    groups = jr.curation.shared_folder(str(folder / "swarm"), node="a").get()
    assert len(groups) == 4  # two a step
    # The folder has moved, which a run that is resumed names.
    first = train(run(folder, "a", 4), resume=True, allow_changed=True)
    counts = first.state.collector_state
    assert int(counts["shared"]) + int(counts["drawn"]) == 16


@pytest.mark.slow
def test_with_the_same_folder_a_run_is_the_same_and_resumes_exactly(alone, tmp_path):
    results = []
    for name in ("one", "two"):
        shutil.copytree(alone / "swarm", tmp_path / name / "swarm")
        # Of a trainer that was killed while it wrote.
        (tmp_path / name / "swarm" / "c.00000000.json.tmp").write_text('{"format": 1, "gro')
        results.append(train(run(tmp_path / name, "b", 3, **LONGER)))
    one, two = results
    assert_same(one.state, two.state)
    assert int(one.state.collector_state["drawn"]) == 6
    for step in (2, 3):
        shutil.rmtree(tmp_path / "two" / "b" / "checkpoints" / f"step_{step:08d}")
    again = train(run(tmp_path / "two", "b", 3, **LONGER), resume=True)
    assert_same(again.state, one.state)
    assert [row["loss"] for row in again.history] == [row["loss"] for row in one.history]
