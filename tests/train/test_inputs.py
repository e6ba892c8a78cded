"""What a method reads besides rewards arrives in its batches, from the data and the reward."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from rows import for_each
from tiny_run import tiny_run

from jaxrl_llm.cli.options import load_config
from jaxrl_llm.data import Cursor, Prompt, PromptSet
from jaxrl_llm.train import EvaluationConfig, train
from jaxrl_llm.train.rollouts import collect_rollouts
from jaxrl_llm.train.setup import load_experiment

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


@pytest.mark.parametrize("slots", [None, pytest.param(16, marks=pytest.mark.slow)])
def test_rollouts_of_hbpo_are_told_their_budgets(slots):
    rollouts, _ = first_batch("hbpo", slots=slots)
    batch = rollouts.batch
    budgets = np.asarray(batch.extras["budgets"])
    assert budgets.tolist() == [[1, 1, 2, 2, 4, 4, 5, 5]] * 4  # shares of 8 tokens
    for place in np.ndindex(*budgets.shape):
        assert f"Answer within {budgets[place]:g} tokens." in text_of(batch, place)
        assert np.asarray(batch.mask[place]).sum() <= 8
    assert rollouts.cursor.index == 4  # four questions, whatever they are told


@pytest.mark.slow
@pytest.mark.parametrize("slots", [None, 16])
def test_rows_of_ps_grpo_are_the_paraphrases_of_a_question(slots):
    rollouts, experiment = first_batch("ps_grpo", slots=slots)
    batch = rollouts.batch
    assert batch.extras["similarity"].shape == (4, 8, 16) and rollouts.cursor.index == 2
    texts = [text_of(batch, (p, 0)) for p in range(4)]
    every = {q.prompt.metadata["paraphrases"][0]: q.prompt for q in experiment.train}
    for first, second in (texts[:2], texts[2:]):
        prompt = next(every[key] for key in every if f"\n{key}assistant" in first)
        assert f"\n{prompt.metadata['paraphrases'][1]}assistant" in second
    sent = {x for q in experiment.train for x in q.prompt.metadata["paraphrases"]}
    assert {row["prompt"] for row in rollouts.rows} <= sent


@pytest.mark.slow
def test_the_rollouts_are_the_same_in_rounds_and_in_slots():
    for name in ("hbpo", "ps_grpo"):
        rounds, slots = (first_batch(name, slots=n)[0].batch for n in (None, 16))
        mask = np.asarray(rounds.mask)
        np.testing.assert_array_equal(mask, slots.mask)
        np.testing.assert_array_equal(
            np.where(mask, rounds.tokens, 0), np.where(mask, slots.tokens, 0)
        )
        np.testing.assert_array_equal(rounds.rewards, slots.rewards)


@pytest.mark.slow
def test_turns_tests_and_verdicts_are_those_of_the_reward():
    batch = first_batch("trloo")[0].batch
    turn_ids, mask = np.asarray(batch.extras["turn_ids"]), np.asarray(batch.mask)
    assert batch.extras["turn_rewards"].shape == (4, 8, 2)
    assert set(turn_ids[mask]) == {0, 1} and set(turn_ids[~mask]) <= {-1}
    passes = first_batch("verpo")[0].batch.extras
    assert passes["test_passes"].shape == (4, 8, 2, 2) and passes["test_where"].all()
    flawed = np.asarray(first_batch("fapo")[0].batch.extras["flawed"])
    assert flawed.any() and not flawed.all()


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


@pytest.mark.slow
def test_the_default_run_reads_the_number_alone(tmp_path):
    def number(prompt, completion, metadata):
        return TINY.reward(prompt, completion, metadata)["reward"]

    def plain():
        return PromptSet((Prompt(f"write {n}", id=str(n)) for n in range(20)), source="plain")

    def curve(folder, **changes):
        changes |= {"run_dir": str(tmp_path / folder), "steps": 2}
        config = dataclasses.replace(TINY, evaluation=EvaluationConfig(enabled=False), **changes)
        history = train(config).history
        timed = {"mfu", "time"}
        return [
            {k: x for k, x in row.items() if k not in timed and "/" not in k and "second" not in k}
            for row in history
        ]

    data = dataclasses.replace(TINY.data, prompts=plain)
    assert curve("a") == curve("b", reward=number, data=data)


@for_each(
    ("recipe", "words"),
    [
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
    with pytest.raises(ValueError, match=words):
        load_experiment(config)
