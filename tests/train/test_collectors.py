"""Whole runs with a collector: what is dropped is asked for again, whatever the timing."""

import dataclasses

import numpy as np
import pytest
from exact_resume import assert_resumes
from helpers import refuses
from rows import for_each
from test_checkpoint import assert_same
from tiny_run import CONFIG, tiny_run
from tiny_run import prompts as tiny_prompts

import jaxrl_llm as jr
from jaxrl_llm.data import PromptSet
from jaxrl_llm.train import CheckpointConfig, EvaluationConfig, SamplingConfig, TrainingError, train
from jaxrl_llm.train.experiment.rollouts import _next_state

pytestmark = pytest.mark.usefixtures("shared_programs")

SLOTS = SamplingConfig(group_size=2, max_new_tokens=4, slots=4)


def first_is_low(prompt, completion, metadata):
    """0 or 1, so that half of all groups of two agree."""
    return float(completion[:1] < "@")


def never(prompt, completion, metadata):
    return 0.0


DAPO = jr.recipes.dapo(max_rounds=6)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three steps of dapo: by rounds of the sampler, and in slots."""

    def run(name, **changes):
        folder = tmp_path_factory.mktemp(name)
        options = {"recipe": DAPO, "reward": first_is_low, "steps": 3}
        config = tiny_run(
            folder, **options, checkpoint=CheckpointConfig(every=1, keep=3), **changes
        )
        return config, train(config)

    return {"rounds": run("rounds"), "slots": run("slots", sampling=SLOTS)}


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("name", ["rounds", "slots"])
def test_dapo_trains_on_groups_that_differ_alone_and_resumes_exactly(runs, name, tmp_path):
    config, result = runs[name]
    assert [row["informative"] for row in result.history] == [1.0] * 3
    assert [row["reward"] for row in result.history] == [0.5] * 3
    asked = [row["groups_sampled"] for row in result.history]
    assert all(4 <= n <= 24 for n in asked) and max(asked) > 4
    # Each prompt that was asked for is used up, and no other.
    cursor = result.state.data_cursor
    assert cursor.epoch * 10 + cursor.index == sum(asked)
    assert all(row["no_signal"] == 0 and row["grad_norm"] > 0 for row in result.history)
    # Also of dropped groups: at most six rounds of four groups, of two responses of four tokens.
    for row in result.history:
        assert row["tokens"] < row["tokens_sampled"] <= 6 * 4 * 2 * 4
    assert_resumes(config, result, tmp_path / "run")  # in the middle of an epoch


@pytest.mark.slow
def test_rounds_and_slots_collect_the_same_groups(runs):
    (_, rounds), (_, slots) = runs["rounds"], runs["slots"]
    for name in ("groups_sampled", "sampled_reward", "length"):
        assert rounds.history[0][name] == slots.history[0][name]
    assert rounds.history[0]["loss"] == pytest.approx(slots.history[0]["loss"], abs=1e-5)


@for_each(
    ("after", "message"),
    [
        ({"last": np.zeros(3, np.float32)}, r"'last' changed from float64\[3\] to float32\[3\]"),
        ({"last": np.zeros(2)}, r"'last' changed from float64\[3\] to float64\[2\]"),
        ({"other": np.zeros(3)}, r"'last' changed from float64\[3\] to None"),
        ([np.zeros(3)], "changed from float64"),
    ],
)
def test_a_state_that_no_checkpoint_could_restore_is_refused(after, message):
    before = {"last": np.zeros(3)}
    np.testing.assert_array_equal(_next_state("c", np.int64(0), 3), 3)
    refuses(f"collector 'c': its state must keep .*{message}", _next_state, "c", before, after)


def test_a_batch_without_signal_makes_no_update_and_says_so(tmp_path):
    told = []
    recipe = jr.recipes.dapo(max_rounds=2)
    config = tiny_run(tmp_path, recipe=recipe, reward=never, steps=2, max_skipped=3)
    result = train(config, log=told.append)
    rows = result.history
    assert [row["no_signal"] for row in rows] == [1.0, 1.0]
    assert [row["groups_sampled"] for row in rows] == [8.0, 8.0]
    assert all(row["loss"] == row["update_norm"] == row["reward"] == 0.0 for row in rows)
    assert_same(config.model()[1], result.state.params)
    assert int(result.state.step) == 2 and result.state.data_cursor == (1, 6)
    text = "Step 2 makes no update: none of the 8 groups that refill(informative_groups, "
    assert any(line.startswith(text) and "(2 in a row; 3 end the run)" in line for line in told)
    with pytest.raises(TrainingError) as error:
        train(dataclasses.replace(config, steps=5), resume=True, allow_changed=True)
    assert "Step 3 makes no update" in str(error.value) and "last 3 steps" in str(error.value)
    assert (tmp_path / "checkpoints" / "step_00000003").is_dir()


def test_evaluations_between_batches_without_signal_do_not_count_as_signal(tmp_path):
    evaluation = EvaluationConfig(every=1, samples=1)
    recipe, changes = jr.recipes.dapo(max_rounds=1), {"steps": 4, "max_skipped": 2}
    config = tiny_run(tmp_path, recipe=recipe, reward=never, evaluation=evaluation, **changes)
    refuses("Step 2 makes no update.*last 2 steps", train, config, error=TrainingError)


PRIORITIZED = jr.curation.prioritized(jr.curation.learnability)


@pytest.mark.slow
def test_a_checkpoint_of_another_collector_is_refused(tmp_path):
    recipe = jr.recipes.grpo().replace(name="prioritized", collector=PRIORITIZED)
    config = tiny_run(tmp_path, recipe=recipe, steps=1)
    train(config)
    other = dataclasses.replace(config, recipe=recipe.replace(collector=None), steps=2)
    refuses("another optimizer or recipe", train, other, resume=True, allow_changed=True)


def test_a_slot_that_is_no_collector_is_refused():
    with pytest.raises(TypeError) as error:
        jr.recipes.dapo().replace(collector=jr.curation.informative_groups)
    assert "collector must have the functions init, propose and observe" in str(error.value)


TIERS = jr.bind(jr.curation.tier_messages, template="{question}: {hint}")
HINTED = jr.curation.hinted(jr.curation.ladder(TIERS))


def shown_prompts():
    columns = {"hints": ["low", "digits"], "demonstration": "!!"}
    return PromptSet([dataclasses.replace(x, metadata=columns) for x in tiny_prompts()])


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(
    ("collector", "role"),
    [(HINTED, "hinted"), (jr.curation.demonstrations(count=1), "demonstration")],
    ids=["hinted", "shown"],
)
def test_hints_and_demonstrations_train_in_slots_as_what_was_sampled(collector, role, tmp_path):
    room = {"prompt_length": 20} if role == "hinted" else {}
    config = tiny_run(
        tmp_path / "whole",
        recipe=jr.recipes.grpo().replace(name=role, collector=collector),
        data=dataclasses.replace(CONFIG.data, prompts=shown_prompts),
        reward=first_is_low,
        sampling=dataclasses.replace(SLOTS, **room),
        steps=3,
        checkpoint=CheckpointConfig(every=1, keep=3),
    )
    result = train(config)
    assert sum(row.get(f"rollouts/{role}", 0) for row in result.history) > 0
    for row in result.history:
        assert np.isfinite(row["loss"]) and row["skipped"] == 0
        # Of tokens that nobody knows the log-probability of, the ratio is 1.
        assert row["sampler_gap_max"] < 0.1
    assert_resumes(config, result, tmp_path / "again")


def test_room_for_texts_that_nobody_sends_has_no_effect(tmp_path):
    sampling = dataclasses.replace(SLOTS, prompt_length=20)
    with pytest.raises(ValueError, match="prompt_length has no effect with recipe 'dr_grpo'"):
        train(tiny_run(tmp_path, sampling=sampling))


@for_each(
    ("length", "message"),
    [
        (1, r"prompt_length is 1, but the longest prompt of the data has \d tokens"),
        (256, r"prompt_length is 256, but a context of 256 leaves \d+ tokens before a response"),
    ],
)
def test_a_room_that_the_run_could_not_have_is_refused(tmp_path, length, message):
    recipe = jr.recipes.grpo().replace(name="hinted", collector=HINTED)
    sampling = dataclasses.replace(SLOTS, prompt_length=length)
    data = dataclasses.replace(CONFIG.data, prompts=shown_prompts)
    with pytest.raises(ValueError, match=message):
        train(tiny_run(tmp_path, recipe=recipe, sampling=sampling, data=data))


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_a_population_answers_the_prompts_that_a_collector_chooses(tmp_path, shared):
    recipe = jr.recipes.eggroll(sigma=0.05).replace(collector=PRIORITIZED)
    if not shared:
        recipe = recipe.replace(shared=False, fitness=jr.evolution.zscore)
    config = tiny_run(
        tmp_path / "whole",
        recipe=recipe,
        reward=first_is_low,
        steps=3,
        remat="full",
        checkpoint=CheckpointConfig(every=1, keep=3),
    )
    whole = train(config)
    assert whole.interrupted is None
    belief = whole.state.collector_state
    # Four prompts of two members in each of three steps.
    assert (belief.alpha + belief.beta - 2).sum() == 4 * 2 * 3
    assert whole.state.data_cursor == (0, 0)
    assert_resumes(config, whole, tmp_path / "again")


@pytest.mark.slow
def test_a_population_answers_once(tmp_path):
    refill = jr.curation.refill(jr.curation.informative_groups)
    recipe = jr.recipes.eggroll(sigma=0.05).replace(collector=refill)
    config = tiny_run(tmp_path, recipe=recipe, reward=never, remat="full")
    refuses("samples 2 rollouts of each of 4 prompts once per step", train, config)


def test_a_population_has_no_slots(tmp_path):
    class Slotted(type(jr.curation.in_order())):
        needs = jr.curation.Needs(slots=True)

    recipe = jr.recipes.eggroll(sigma=0.05).replace(collector=Slotted())
    with pytest.raises(ValueError, match="decodes in slots, which a population does not"):
        train(tiny_run(tmp_path, recipe=recipe, remat="full"))


class EndsEarly(jr.testing.ByteTokenizer):
    """Of the tokens a random model writes, one in three ends a response."""

    eos_ids = (257, *range(86))


def early_model():
    return *jr.testing.tiny_model(num_layers=1), EndsEarly()


@pytest.mark.slow
def test_unfinished_responses_go_on_in_the_next_batch(tmp_path):
    config = tiny_run(
        tmp_path / "whole",
        model=early_model,
        recipe=jr.recipes.april(segments=4),
        steps=4,
        checkpoint=CheckpointConfig(every=1, keep=4),
    )
    whole = train(config)
    rows = whole.history
    continued = [row.get("tokens_continued", 0) for row in rows]
    assert continued[0] == 0 and max(continued) > 0
    assert all(row["staleness_max"] > 0 for row, n in zip(rows, continued, strict=True) if n)
    # A token is counted by the batch that sampled it.
    sampled = sum(row["tokens_sampled"] for row in rows)
    left = whole.state.collector_state.lengths
    assert sampled == sum(row["tokens"] for row in rows) + left.sum()
    # Each prompt that was taken has trained or waits: 4 a step, and those that are left.
    waiting = int((whole.state.collector_state.prompts >= 0).sum())
    cursor = whole.state.data_cursor
    assert cursor.epoch * 10 + cursor.index == 4 * 4 + waiting and waiting == 4
    assert all(np.isfinite(row["loss"]) and row["skipped"] == 0 for row in rows)
    assert_resumes(config, whole, tmp_path / "again")
