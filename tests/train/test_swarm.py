"""Two trainers with one folder: each trains on groups of the other."""

import pytest
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


@pytest.mark.slow
def test_two_trainers_take_turns(tmp_path):
    """The first is alone for three steps; then the second trains on what it shared."""
    alone = train(run(tmp_path, "a", 3))
    assert [row.get("rollouts/demonstration", 0) for row in alone.history] == [0, 0, 0]
    assert int(alone.state.collector_state["shared"]) == 12
    second = train(run(tmp_path, "b", 2, **LONGER))
    # Of four groups of two rollouts, two are of the first trainer.
    assert [row["rollouts/demonstration"] for row in second.history] == [4, 4]
    assert int(second.state.collector_state["drawn"]) == 4
    groups = jr.curation.shared_folder(str(tmp_path / "swarm"), node="a").get()
    assert len(groups) == 4  # two a step
    counts = train(run(tmp_path, "a", 4), resume=True).state.collector_state
    assert int(counts["shared"]) + int(counts["drawn"]) == 16
