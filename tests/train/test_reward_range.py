"""Rewards that a method has no meaning for end the run where they become a batch."""

import numpy as np
import pytest
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.data import Prompt
from jaxrl_llm.data.questions import Question
from jaxrl_llm.recipes import PRESETS
from jaxrl_llm.train import train
from jaxrl_llm.train.fields import check_rewards

QUESTIONS = [Question(Prompt("What?", id="a"), [1]), Question(Prompt("Who?"), [1])]


def recipe_of(name):
    return PRESETS[name](**({"num_prompts": 2} if name in ("spo_tracker", "mssr") else {}))


@pytest.mark.parametrize("name", ["spo_tracker", "mssr", "v05_baseline"])
@pytest.mark.parametrize("value", [1.5, -1.0])
def test_a_success_rate_takes_rewards_between_0_and_1(name, value):
    recipe = recipe_of(name)
    good = np.array([[0.0, 1.0], [0.5, 0.25]], np.float32)
    check_rewards(recipe, good, QUESTIONS)
    # Three float32 parts of 0.1, 0.2 and 0.7 may add up to the next number above 1.
    check_rewards(recipe, np.nextafter(good, np.float32(2)), QUESTIONS)
    good[1, 0] = value
    words = rf"^recipe '{name}' is defined for rewards in \[0, 1\] alone; "
    with pytest.raises(ValueError, match=words + rf"prompt 'Who\?' has a reward of {value:g}\.$"):
        check_rewards(recipe, good, QUESTIONS)


def test_maxrl_takes_any_reward_from_0_on():
    recipe, rewards = recipe_of("maxrl"), np.array([[0.0, 40.0]], np.float32)
    check_rewards(recipe, rewards, QUESTIONS)
    with pytest.raises(ValueError, match="of at least 0 alone; prompt 'a' has a reward of -40"):
        check_rewards(recipe, -rewards, QUESTIONS)


def test_other_methods_take_any_reward():
    check_rewards(jr.recipes.grpo(), np.array([[-7.0, 9.0]], np.float32), QUESTIONS)


def test_a_run_is_told_the_prompt(tmp_path):
    config = tiny_run(tmp_path, recipe="maxrl", reward=lambda *_: -1.0, steps=1)
    with pytest.raises(ValueError, match="recipe 'maxrl' .* at least 0 alone; prompt .* of -1"):
        train(config)
