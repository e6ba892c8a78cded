"""Whole runs of collectors that choose prompts, pool successes or keep a library: they resume."""

import dataclasses
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from exact_resume import assert_resumes
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.cli import main
from jaxrl_llm.train import CheckpointConfig, EvaluationConfig, train
from jaxrl_llm.train.checkpoint import Checkpoints
from jaxrl_llm.train.experiment.setup import load_experiment

pytestmark = pytest.mark.usefixtures("shared_programs")


def low(prompt, completion, metadata):
    """0 or 1; of two steps."""
    ends = [len(completion) // 2, len(completion)]
    reward = float(completion[:1] < "@")
    return {"reward": reward, "turn_ends": ends, "turn_rewards": [0.0, reward]}


RECIPES = {
    "dots": lambda: jr.recipes.dots(references=3, capacity=8),
    "training_free_grpo": lambda: jr.recipes.training_free_grpo(capacity=4, max_bytes=32),
}


def run_of(folder, name, steps, **changes):
    checkpoint = CheckpointConfig(every=1, keep=steps)
    options = {"reward": low, "steps": steps, "checkpoint": checkpoint} | changes
    return tiny_run(folder, recipe=RECIPES[name](), **options)


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_what_a_run_remembers_is_what_its_method_says_and_it_resumes_exactly(name, tmp_path):
    config = run_of(tmp_path / "run", name, 3)
    result = train(config)
    state, history = result.state.collector_state, result.history
    asked = [row["groups_sampled"] for row in history]
    if name == "dots":
        # Three references at the first and the third step; then two of four groups are stored.
        assert asked == [7, 4, 5] and history[2]["rollouts/replayed"] == 4
        assert int(state.drawn_at) == 2 and sorted(state.order) == list(range(10))
    else:
        library, reviews = jr.curation.experience_texts(state), sum(asked) - 12
        assert int(state.reviews) == reviews > 0 and 0 < len(library) <= 4
        jax.tree.map(np.testing.assert_array_equal, result.state.params, config.model()[1])
        assert "rollouts/hinted" not in history[0] and history[-1]["rollouts/hinted"] == 8
    assert_resumes(config, result, tmp_path / "again")


@pytest.mark.slow
def test_the_evaluation_of_a_config_has_an_empty_library(tmp_path, capsys):
    text = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    text += "from test_selected import RECIPES, low\nfrom tiny_run import CONFIG\n"
    text += "import dataclasses\nconfig = dataclasses.replace(\n"
    text += "    CONFIG, recipe=RECIPES['training_free_grpo'](), reward=low)\n"
    (tmp_path / "config.py").write_text(text)
    assert main(["evaluate", str(tmp_path / "config.py"), "--samples", "1"]) == 0


def test_a_library_that_does_not_reach_an_evaluation_is_named(tmp_path):
    experienced = jr.curation.experienced()
    both = jr.curation.mixed((jr.curation.in_order(), 0.5), (experienced, 0.5))
    recipe = jr.recipes.grpo().replace(name="mine", collector=both)
    config = tiny_run(tmp_path / "run", recipe=recipe, evaluation=EvaluationConfig())
    with pytest.warns(UserWarning, match=r"lack what experienced\(\) puts into those of training"):
        load_experiment(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_experiment(dataclasses.replace(config, evaluation=EvaluationConfig(enabled=False)))


@pytest.mark.slow
def test_an_evaluation_has_the_library_in_its_prompts(tmp_path, capsys):
    """What a run has learned without weights is in the prompts of its evaluations."""
    evaluation = EvaluationConfig(samples=2)
    config = run_of(tmp_path / "run", "training_free_grpo", 2, evaluation=evaluation)
    result = train(config)
    rows = [row["held_out"] for row in result.history if "held_out" in row]
    experiment, params = load_experiment(config)
    sent, greedy = [], experiment.samplers.greedy

    def sample(params, key, prompts):
        sent.append([bytes(t for t in tokens if t < 256).decode() for tokens in prompts])
        return greedy(params, key, prompts)

    samplers = experiment.samplers._replace(greedy=sample)
    experiment = dataclasses.replace(experiment, samplers=samplers)
    state = result.state.collector_state
    (first, *_) = jr.curation.experience_texts(state).values()
    now, _ = experiment.evaluate(params, result.state.key, collector_state=state)
    assert all(first in text for text in sent[0])
    assert now["greedy"].mean == rows[-1]["greedy"]["mean"]
    empty = experiment.collector.init(10)
    before, _ = experiment.evaluate(params, result.state.key, collector_state=empty)
    assert not any(first in text for text in sent[1])
    assert before["greedy"].mean == rows[0]["greedy"]["mean"]
    restored = Checkpoints(tmp_path / "run" / "checkpoints", model=experiment.model)
    again = restored.restore_collector(experiment.collector.init(8))
    jax.tree.map(np.testing.assert_array_equal, again, state)
