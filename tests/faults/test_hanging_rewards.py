"""Rewards and environments that hang, also such that nothing else runs: the run ends anyway."""

import os
import signal
import time

import pytest
from running import FAR, finish, start, wait_for

NOTICE = "Stopping after this step; a second Ctrl-C stops at once."

HANGING = """
def reward(prompt, completion, metadata):
    calls.append(prompt)
    if len(calls) == 9:  # of the second batch
        print("hangs", flush=True)
        time.sleep(3600)
    return low_bytes(prompt, completion, metadata)

class Whole:
    def score_batch(self, prompts, completions, metadata):
        return [reward(*row) for row in zip(prompts, completions, metadata)]

config = dataclasses.replace(
    CONFIG,
    reward=Whole() if {batch} else reward,
    reward_deadline=3600.0,
    asynchrony=AsyncConfig(max_staleness={staleness}),
    sampling=dataclasses.replace(CONFIG.sampling, slots={slots}),
)
"""

HELD = """
watchdog.HELD_SECONDS = 1.0
HOLDS = "--resume" not in sys.argv

def reward(prompt, completion, metadata):
    calls.append(prompt)
    if len(calls) == 8 + 3 and HOLDS:  # of the second batch
        print("hangs", flush=True)
        re.match("(a+)+b", "a" * 60)  # takes years
    return low_bytes(prompt, completion, metadata)

config = dataclasses.replace(
    CONFIG, reward=reward, reward_deadline={deadline}, checkpoint=CheckpointConfig(every=1), steps=3
)
"""

STEPPED = """
from jaxrl_llm.environments import NumberGuess
from jaxrl_llm.rollout.episodes import EpisodeOptions

watchdog.HELD_SECONDS = 1.0

class Played(NumberGuess):
    def reset(self, task, seed):
        calls.append("reset")
        return self.hold("reset") or super().reset(task, seed)

    def step(self, state, action):
        calls.append("step")
        return self.hold("step") or super().step(state, action)

    def hold(self, name):
        held = ("reset", 6) if "--resume" in sys.argv else ("step", 20)
        if (name, calls.count(name)) == held:
            re.match("(a+)+b", "a" * 60)  # takes years

config = dataclasses.replace(
    CONFIG,
    recipe="gigpo",
    reward=None,
    environment=Played(),
    episodes=EpisodeOptions(turn_tokens=6, seconds=2.0),
    sampling=SamplingConfig(group_size=2, max_new_tokens=64, slots=4, prompt_length=192),
    checkpoint=CheckpointConfig(every=1),
    steps=3,
)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "batch", "staleness"), [(4, True, 0), (None, False, 1)])
def test_a_second_ctrl_c_ends_a_run_whose_reward_hangs(tmp_path, slots, batch, staleness):
    text = HANGING
    for name, value in {"slots": slots, "batch": batch, "staleness": staleness}.items():
        text = text.replace(f"{{{name}}}", repr(value))
    process = start(tmp_path, text)
    wait_for(process, tmp_path / "out", "hangs")
    process.send_signal(signal.SIGINT)
    wait_for(process, tmp_path / "err", f"{NOTICE}\n")
    process.send_signal(signal.SIGINT)
    code, _, lines = finish(process, tmp_path)
    assert code == 130, lines
    assert lines[-2:] == [NOTICE, "jaxrl-llm: stopped; checkpoints that were saved remain."]


def told_of(lines):
    (line,) = [line for line in lines if "holds the interpreter" in line]
    assert "--resume" in line
    return line


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs processes of Unix")
@pytest.mark.parametrize("deadline", [2.0, 3600.0])
def test_a_reward_that_holds_the_interpreter_ends_the_run_which_then_goes_on(tmp_path, deadline):
    text = HELD.replace("{deadline}", str(deadline))
    process = start(tmp_path, text)
    if deadline == 3600:  # Python's handler cannot run, and the other process hears of both
        wait_for(process, tmp_path / "out", "hangs")
        end = time.monotonic() + FAR
        while process.poll() is None and time.monotonic() < end:
            process.send_signal(signal.SIGINT)
            time.sleep(1.0)
    code, _, lines = finish(process, tmp_path)
    assert code == -signal.SIGKILL, lines
    what = "stopped" if deadline == 3600 else "error"
    told = f"jaxrl-llm: {what}: Reward reward holds the interpreter on prompt 2 (id "
    assert told_of(lines).startswith(told)
    if deadline == 3600:
        return
    code, out, lines = finish(start(tmp_path, text, "--resume"), tmp_path)
    assert code == 0 and "The checkpoint of step 3" in out, lines


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs processes of Unix")
def test_an_environment_that_holds_the_interpreter_ends_the_run(tmp_path):
    for call, words in (("step", ()), ("reset", ("--resume",))):
        code, _, lines = finish(start(tmp_path, STEPPED, *words), tmp_path)
        assert code == -signal.SIGKILL, lines
        assert told_of(lines).startswith(f"jaxrl-llm: error: Played.{call} of prompt ")
