"""What a method reads besides rewards arrives in its batches, from the data and the reward."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import refuses
from rows import for_each
from tiny_run import tiny_run

from jaxrl_llm.cli.options import load_config
from jaxrl_llm.data import Cursor
from jaxrl_llm.train import EvaluationConfig
from jaxrl_llm.train.experiment.rollouts import collect_rollouts
from jaxrl_llm.train.experiment.setup import load_experiment

TINY = load_config(Path(__file__).parents[2] / "configs" / "tiny.py")
KEY = jax.random.key(0)
pytestmark = pytest.mark.usefixtures("shared_programs")


def first_batch(name, **sampling):
    """The first batch of a recipe on the tiny configuration, and the experiment."""
    config = dataclasses.replace(
        TINY,
        recipe=name,
        evaluation=EvaluationConfig(enabled=False),
        sampling=dataclasses.replace(TINY.sampling, **sampling),
        prompts_per_step=4,
    )
    experiment, params = load_experiment(config)
    state = experiment.collector.init(len(experiment.train))
    rollouts = collect_rollouts(experiment, params, KEY, Cursor(0, 0), state, number=0, version=0)
    return rollouts, experiment


def text_of(batch, place):
    """The prompt that a rollout of a batch was sampled from, as text."""
    tokens = np.asarray(batch.prompt_tokens[place[0]])[np.asarray(batch.prompt_mask[place[0]])]
    before = np.asarray(batch.tokens[place])[: int(np.argmax(batch.mask[place]))]
    return bytes(int(t) for t in [*tokens, *before] if t < 256).decode(errors="replace")


def test_rollouts_of_hbpo_are_told_their_budgets():
    rollouts, _ = first_batch("hbpo")
    batch = rollouts.batch
    budgets = np.asarray(batch.extras["budgets"])
    assert budgets.tolist() == [[1, 1, 2, 2, 4, 4, 5, 5]] * 4  # shares of 8 tokens
    for place in np.ndindex(*budgets.shape):
        assert f"Answer within {budgets[place]:g} tokens." in text_of(batch, place)
        assert np.asarray(batch.mask[place]).sum() <= 8
    assert rollouts.cursor.index == 4  # four questions, whatever they are told


@pytest.mark.slow
def test_rows_of_ps_grpo_are_the_paraphrases_of_a_question():
    rollouts, experiment = first_batch("ps_grpo", slots=16)
    batch = rollouts.batch
    assert batch.extras["similarity"].shape == (4, 8, 16) and rollouts.cursor.index == 2
    texts = [text_of(batch, (p, 0)) for p in range(4)]
    every = {q.prompt.metadata["paraphrases"][0]: q.prompt for q in experiment.train}
    for first, second in (texts[:2], texts[2:]):
        prompt = next(every[key] for key in every if f"\n{key}assistant" in first)
        assert f"\n{prompt.metadata['paraphrases'][1]}assistant" in second
    sent = {x for q in experiment.train for x in q.prompt.metadata["paraphrases"]}
    assert {row["prompt"] for row in rollouts.rows} <= sent


def test_a_teacher_reads_feedback_where_no_sibling_is_right():
    batch = first_batch("sdpo")[0].batch
    extras = batch.extras
    assert extras["has_teacher"].all()
    for place in np.ndindex(4, 8):
        mask = np.asarray(extras["teacher_prompt_mask"][place])
        tokens = np.asarray(extras["teacher_prompt_tokens"][place])[mask]
        text = bytes(int(t) for t in tokens if t < 256).decode(errors="replace")
        right = np.flatnonzero(np.asarray(batch.rewards[place[0]]) >= 0.5)
        solved = any(g != place[1] for g in right)
        assert ("A right answer" in text) == solved and ("lower-case letters" in text) != solved


@for_each(
    ("recipe", "words"),
    [
        ("luffy_shaping", r"'luffy_shaping': .* prompt 'q0\d' has no 'demonstration' in its row"),
        ("nurl", r"prompt 'q0\d' has no 'hints'"),
        ("v05_baseline", "'v05_baseline' needs 'prior' .*; prompt 'q00' has none in its metad"),
        ("ps_grpo", r"paraphrased\(\): prompt 'q00' has None in its column 'paraphrases'"),
        ("hbpo", "a group of 2 rollouts is less than one for each of the 4 budgets"),
    ],
)
def test_what_a_run_lacks_is_told_before_the_model_loads(tmp_path, recipe, words):
    def model():
        raise AssertionError("the model was loaded")

    sampling = dataclasses.replace(tiny_run(tmp_path).sampling, max_new_tokens=8)
    config = tiny_run(tmp_path, recipe=recipe, model=model, sampling=sampling)
    refuses(words, load_experiment, config)
