"""Lets these tests import the helpers of the training tests, and what they share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, shared_programs):
    """The tiny run, to which nothing happened, with the programs of the other runs of its file."""
    from tiny_run import tiny_run

    from jaxrl_llm.train import train

    return train(tiny_run(tmp_path_factory.mktemp("whole")))


@pytest.fixture
def acting():
    """``acting(actions)``: the tiny run's reward, which does something before some of its calls."""
    from tiny_run import low_bytes

    def acting(actions):
        calls = []

        def reward(prompt, completion, metadata):
            number = len(calls)
            calls.append(prompt)
            if number in actions:
                actions[number]()
            return low_bytes(prompt, completion, metadata)

        return reward

    return acting
