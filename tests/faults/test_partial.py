"""Rollouts that were half done are lost with a process; a resumed run samples them again."""

import dataclasses

import pytest
from test_checkpoint import assert_same
from tiny_run import CONFIG, low_bytes, tiny_run

from jaxrl_llm.rewards import RewardError
from jaxrl_llm.train import CheckpointConfig, train

pytestmark = pytest.mark.usefixtures("shared_programs")

SLOTS = dataclasses.replace(CONFIG.sampling, slots=2)


def config_of(run_dir, log, *, stop=None):
    """A run whose eight rollouts a step decode in two slots; its reward may fail at a call."""

    def reward(prompt, completion, metadata):
        if len(log) == stop:
            raise OSError("the judge is away")
        log.append((prompt, completion))
        return low_bytes(prompt, completion, metadata)

    checkpoint = CheckpointConfig(every=2)
    return tiny_run(run_dir, sampling=SLOTS, reward=reward, checkpoint=checkpoint, samples_shown=8)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    return train(config_of(tmp_path_factory.mktemp("whole"), []))


@pytest.mark.slow
def test_half_a_batch_is_sampled_again_as_it_was(whole_run, tmp_path):
    """Some groups of the step were graded, one was decoding, and others had not begun."""
    lost, log, stop = [], [], 2 * 8 + 3
    with pytest.raises(RewardError, match="the judge is away"):
        train(config_of(tmp_path / "run", lost, stop=stop))
    done = train(config_of(tmp_path / "run", log), resume=True)
    assert_same(done.state, whole_run.state)
    folders = (whole_run.run_dir, tmp_path / "run")
    samples = [(folder / "samples.jsonl").read_text() for folder in folders]
    assert samples[0] == samples[1]
    # Groups may be graded in another order; each of those of the step comes again.
    whole_steps = stop // 8
    assert len(lost) == stop and len(log) == (6 - whole_steps) * 8
    assert set(lost[whole_steps * 8 :]) <= set(log[:8])
