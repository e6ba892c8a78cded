"""The benchmark of six losses of preferences, of a tiny model, and what is not done again."""

import json
from pathlib import Path

import pytest
from rows import for_each

from benchmarks import preferences
from jaxrl_llm.cli import main

# Odd bytes end a response, so that some of a random model do.
CONFIG = """
import dataclasses
import jaxrl_llm as jr
from jaxrl_llm.data import Prompt, PromptSet
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.train import (
    CheckpointConfig, DataConfig, OptimizerConfig, SamplingConfig, TrainConfig
)

class Tokenizer(ByteTokenizer):
    eos_ids = (257, *range(1, 256, 2))

def model():
    return *tiny_model(num_layers=1), Tokenizer()

def prompts():
    return PromptSet((Prompt(f"q{n}") for n in range(12)), source="test")

def odd(prompt, completion, metadata):
    return float(len(completion) % 2)

config = TrainConfig(
    model=model,
    data=DataConfig(prompts=prompts, chat=False),
    reward=odd,
    recipe="dpo",
    sampling=SamplingConfig(group_size=2, max_new_tokens=6),
    optimizer=OptimizerConfig(learning_rate=1e-2),
    checkpoint=CheckpointConfig(every=0),
    steps=1,
    prompts_per_step=4,
    remat="none",
)
dpo = config
task = dataclasses.replace(config, recipe="dr_grpo")
"""


@pytest.mark.slow
def test_pairs_runs_and_figures(tmp_path, monkeypatch, capfd):
    (tmp_path / "learn.py").write_text(CONFIG)
    commands = []

    def run_command(*words):
        commands.append(words[0])
        assert main(words) == 0
        return 1.0

    monkeypatch.setattr(preferences, "run_command", run_command)
    folder, path = tmp_path / "out", str(tmp_path / "learn.py")
    words = ["--folder", str(folder), "--task", f"{path}:task", "--config", path, "--methods"]
    preferences.main([*words, "dpo"])
    first = json.loads(capfd.readouterr().out.splitlines()[-1])
    preferences.main([*words, "dpo"])
    assert commands == ["pairs", "train"]  # nothing is done twice
    assert json.loads(capfd.readouterr().out.splitlines()[-1]) == first
    assert first["pairs"]["rows"] >= first["pairs"]["prompts"] > 4
    (run,) = first["runs"]
    assert (run["method"], run["pairs_before"]) == ("dpo", 0.5)
    assert run["steps"] == 1 and run["questions"] == 2 and run["held_out_prompts"] >= 1
    for when in ("before", "after"):
        for what in ("greedy", "sampled", "pairs"):
            low, high = run[f"{what}_{when}_interval"]
            assert low <= run[f"{what}_{when}"] <= high
    assert not (folder / "dpo" / "checkpoints").exists()


@for_each("words", [["--methods", "dpo"], ["--task", "other.py"]])
def test_another_job_is_not_saved_as_this_one(words):
    with pytest.raises(SystemExit, match="benchmarks.preferences: "):
        preferences.main(["--save", *words])


def test_the_config_has_the_methods():
    from jaxrl_llm.cli.options import load_config

    root = Path(__file__).parents[2]
    configs = [load_config(root / preferences.CONFIG, name=x) for x in preferences.METHODS]
    names = [x.recipe if isinstance(x.recipe, str) else x.recipe.name for x in configs]
    assert names == ["dpo", *preferences.METHODS[1:]]  # the first is DPO with a likelihood
    assert all(config.offline and config.reward is not None for config in configs)
