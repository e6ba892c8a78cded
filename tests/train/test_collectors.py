"""Whole runs with a collector: what is dropped is asked for again, whatever the timing."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from rows import for_each
from test_checkpoint import assert_same
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.curation import Decision, Request, Response, Row
from jaxrl_llm.curation.collectors.protocol import DEMONSTRATION, HINTED
from jaxrl_llm.train import (
    AsyncConfig,
    CheckpointConfig,
    EvaluationConfig,
    SamplingConfig,
    TrainingError,
    train,
)
from jaxrl_llm.train.rollouts import _next_state

pytestmark = pytest.mark.usefixtures("shared_programs")

SLOTS = SamplingConfig(group_size=2, max_new_tokens=4, slots=4)


def first_is_low(prompt, completion, metadata):
    """0 or 1, so that half of all groups of two agree."""
    return float(completion[:1] < "@")


def never(prompt, completion, metadata):
    return 0.0


def after_the_first_step(config, folder):
    """The run again, in a copy of its folder, from the checkpoint of its first step."""
    shutil.copytree(config.run_dir, folder)
    for step in range(2, config.steps + 1):
        shutil.rmtree(folder / "checkpoints" / f"step_{step:08d}")
    return train(dataclasses.replace(config, run_dir=str(folder)), resume=True)


def assert_same_run(again, whole):
    assert_same(again.state, whole.state)
    assert again.state.data_cursor == whole.state.data_cursor
    states = again.state.collector_state, whole.state.collector_state
    jax.tree.map(np.testing.assert_array_equal, *states)


DAPO = jr.recipes.dapo(max_rounds=6)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three steps of dapo: by rounds of the sampler, in slots, and ahead of the training."""

    def run(name, **changes):
        folder = tmp_path_factory.mktemp(name)
        options = {"recipe": DAPO, "reward": first_is_low, "steps": 3}
        config = tiny_run(
            folder, **options, checkpoint=CheckpointConfig(every=1, keep=3), **changes
        )
        return config, train(config)

    return {
        "rounds": run("rounds"),
        "slots": run("slots", sampling=SLOTS),
        "ahead": run("ahead", asynchrony=AsyncConfig(max_staleness=1)),
    }


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("name", ["rounds", "slots", "ahead"])
def test_dapo_trains_on_groups_that_differ_alone(runs, name):
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


@pytest.mark.slow
def test_dapo_compares_a_component_of_the_reward(tmp_path):
    def shaped(prompt, completion, metadata):
        right = first_is_low(prompt, completion, metadata)
        return {"reward": right - 0.01 * len(completion), "accuracy": right}

    recipe = jr.recipes.dapo(metric="accuracy", max_rounds=6)
    config = tiny_run(tmp_path, recipe=recipe, reward=shaped, steps=2, sampling=SLOTS)
    result = train(config)
    assert [row["reward/accuracy"] for row in result.history] == [0.5, 0.5]
    assert sum(row["groups_sampled"] for row in result.history) > 8


@pytest.mark.slow
def test_rounds_and_slots_collect_the_same_groups(runs):
    (_, rounds), (_, slots) = runs["rounds"], runs["slots"]
    for name in ("groups_sampled", "sampled_reward", "length"):
        assert rounds.history[0][name] == slots.history[0][name]
    assert rounds.history[0]["loss"] == pytest.approx(slots.history[0]["loss"], abs=1e-5)


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("name", ["rounds", "slots"])
def test_resume_is_exact_in_the_middle_of_an_epoch(runs, name, tmp_path):
    config, whole = runs[name]
    assert_same_run(after_the_first_step(config, tmp_path / "run"), whole)


@dataclasses.dataclass(frozen=True)
class LeastAsked:
    """Takes the prompts that were asked for least often, and remembers their mean rewards."""

    def init(self, num_prompts):
        return {"count": np.zeros(num_prompts, np.int32), "mean": np.zeros(num_prompts)}

    def propose(self, state, key, collection, count):
        first = len(collection.requests)
        order = np.argsort(state["count"], kind="stable")[first : first + count]
        return tuple(Request(collection.group_size, int(place)) for place in order), state

    def observe(self, state, collection):
        decision, _ = jr.curation.in_order().observe((), collection)
        if decision.rows is None:
            return decision, state
        count, mean = state["count"].copy(), state["mean"].copy()
        for outcome in collection.outcomes:
            count[outcome.prompt] += 1
            mean[outcome.prompt] = outcome.rewards.mean()
        return decision, {"count": count, "mean": mean}


class Counted:
    """Questions in order, and a state that its first batch turns into another."""

    def __init__(self, before, after):
        self.before, self.after = before, after

    def init(self, num_prompts):
        return self.before

    def propose(self, state, key, collection, count):
        return jr.curation.in_order().propose((), key, collection, count)[0], state

    def observe(self, state, collection):
        return jr.curation.in_order().observe((), collection)[0], self.after


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
    with pytest.raises(ValueError, match=f"collector 'c': its state must keep .*{message}"):
        _next_state("c", before, after)


@pytest.mark.slow
def test_a_collector_whose_state_no_checkpoint_could_restore_ends_the_run(tmp_path):
    collector = Counted({"last": np.zeros(3)}, {"last": np.zeros(2)})
    recipe = jr.recipes.grpo().replace(name="counted", collector=collector)
    with pytest.raises(ValueError, match=r"'last' changed from float64\[3\] to float64\[2\]"):
        train(tiny_run(tmp_path, recipe=recipe, steps=2))


@pytest.mark.slow
def test_a_collector_may_return_plain_numbers(tmp_path):
    collector = Counted({"last": np.int64(0)}, {"last": 3})
    recipe = jr.recipes.grpo().replace(name="counted", collector=collector)
    config = tiny_run(tmp_path, recipe=recipe, steps=2, checkpoint=CheckpointConfig(every=1))
    assert train(config).state.collector_state["last"] == 3
    assert train(dataclasses.replace(config, steps=3), resume=True).state.step == 3


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_state_of_a_collector_is_saved_with_the_run(tmp_path, staleness):
    config = tiny_run(
        tmp_path / "whole",
        recipe=jr.recipes.grpo().replace(name="least", collector=LeastAsked()),
        steps=4,
        checkpoint=CheckpointConfig(every=1, keep=4),
        asynchrony=AsyncConfig(max_staleness=staleness),
    )
    whole = train(config)
    state = whole.state.collector_state
    assert sorted(state["count"].tolist()) == [1] * 4 + [2] * 6 and (state["mean"] > 0).any()
    assert whole.state.data_cursor == (0, 0)  # no prompt was taken in order
    again = after_the_first_step(config, tmp_path / "again")
    np.testing.assert_array_equal(again.state.collector_state["count"], state["count"])
    if not staleness:
        assert_same_run(again, whole)


def test_a_batch_without_signal_makes_no_update_and_says_so(tmp_path):
    told = []
    recipe = jr.recipes.dapo(max_rounds=2)
    config = tiny_run(tmp_path, recipe=recipe, reward=never, steps=2, max_skipped=3)
    result = train(config, log=told.append)
    rows = result.history
    assert [row["no_signal"] for row in rows] == [1.0, 1.0]
    assert [row["groups_sampled"] for row in rows] == [8.0, 8.0]
    assert all(row["loss"] == row["update_norm"] == row["reward"] == 0.0 for row in rows)
    for x, y in zip(
        jax.tree.leaves(config.model()[1]), jax.tree.leaves(result.state.params), strict=True
    ):
        np.testing.assert_array_equal(x, y)
    assert int(result.state.step) == 2 and result.state.data_cursor == (1, 6)
    text = "Step 2 makes no update: none of the 8 groups that refill(informative_groups, "
    assert any(line.startswith(text) and "(2 in a row; 3 end the run)" in line for line in told)
    with pytest.raises(TrainingError) as error:
        train(dataclasses.replace(config, steps=5), resume=True, allow_changed=True)
    assert "Step 3 makes no update" in str(error.value) and "last 3 steps" in str(error.value)
    assert (tmp_path / "checkpoints" / "step_00000003").is_dir()


@pytest.mark.slow
def test_a_reference_is_replaced_at_its_step_also_if_that_has_no_signal(tmp_path):
    asked = []

    def first_batch_only(prompt, completion, metadata):
        asked.append(prompt)
        return float(len(asked) <= 8 and len(asked) % 2)

    reset = jr.bind(jr.regularizers.reset_reference, every=2, times=1)
    term = jr.bind(jr.regularizers.kl_to_reference, estimator="k3", coef=0.1)
    recipe = jr.recipes.dapo(max_rounds=1).replace(regularizers=(term,), reference=reset)
    states = []
    for steps in (1, 2, 3):
        asked.clear()
        folder = tmp_path / str(steps)
        config = tiny_run(folder, recipe=recipe, reward=first_batch_only, steps=steps)
        states.append(train(config, log=lambda line: None))
    assert [row["no_signal"] for row in states[-1].history] == [0.0, 1.0, 1.0]
    first, *later = (jax.device_get(result.state) for result in states)
    jax.tree.map(np.testing.assert_array_equal, first.reference, config.model()[1])
    for state in later:
        jax.tree.map(np.testing.assert_array_equal, state.params, first.params)
        jax.tree.map(np.testing.assert_array_equal, state.reference, first.params)


def test_evaluations_between_batches_without_signal_do_not_count_as_signal(tmp_path):
    evaluation = EvaluationConfig(every=1, samples=1)
    recipe, changes = jr.recipes.dapo(max_rounds=1), {"steps": 4, "max_skipped": 2}
    config = tiny_run(tmp_path, recipe=recipe, reward=never, evaluation=evaluation, **changes)
    with pytest.raises(TrainingError, match="Step 2 makes no update.*last 2 steps"):
        train(config)


@pytest.mark.slow
def test_a_checkpoint_of_another_collector_is_refused(tmp_path):
    recipe = jr.recipes.grpo().replace(name="least", collector=LeastAsked())
    config = tiny_run(tmp_path, recipe=recipe, steps=1)
    train(config)
    other = dataclasses.replace(config, recipe=recipe.replace(collector=None), steps=2)
    with pytest.raises(ValueError, match="another optimizer or recipe"):
        train(other, resume=True, allow_changed=True)


def test_a_slot_that_is_no_collector_is_refused():
    with pytest.raises(TypeError) as error:
        jr.recipes.dapo().replace(collector=jr.curation.informative_groups)
    assert "collector must have the functions init, propose and observe" in str(error.value)


@dataclasses.dataclass(frozen=True)
class Guided:
    """Two rollouts of a prompt, one with a hint and a demonstration; remembers the best ones."""

    sends_text: bool = True

    def width(self, group_size):
        return group_size + 3

    def init(self, num_prompts):
        return {
            "tokens": np.zeros((num_prompts, 4), np.int32),
            "length": np.zeros(num_prompts, int),
        }

    def propose(self, state, key, collection, count):
        return (Request(collection.group_size),) * count, state

    def observe(self, state, collection):
        asked, P = collection.requests, collection.num_groups
        if len(asked) < P:
            return Decision(ask=P - len(asked)), state
        if collection.waiting:
            return Decision(), state
        if len(asked) == P:
            more = []
            for i, outcome in enumerate(collection.outcomes):
                text = collection.data[outcome.prompt]["text"]
                more.append(Request(1, extends=i, text=f"{text} low", role=HINTED))
                demonstration = Response("!!", reward=1.0)
                more.append(
                    Request(
                        1,
                        extends=i,
                        responses=(demonstration,),
                        sampled=False,
                        role=DEMONSTRATION,
                    )
                )
            return Decision(requests=tuple(more)), state
        tokens, length = state["tokens"].copy(), state["length"].copy()
        rows = []
        for i, outcome in enumerate(collection.outcomes[:P]):
            best = outcome.responses[int(np.argmax(outcome.rewards))].tokens
            tokens[outcome.prompt, : len(best)], length[outcome.prompt] = best, len(best)
            members = [(i, 0), (i, 1), (P + 2 * i, 0), (P + 2 * i + 1, 0)]
            rows.append(Row(tuple(members)))
        return Decision(rows=tuple(rows)), {"tokens": tokens, "length": length}


@pytest.fixture(scope="module")
def guided(request, tmp_path_factory):
    changes = {
        "rounds": {},
        "slots": {"sampling": dataclasses.replace(SLOTS, prompt_length=20)},
        "ahead": {"asynchrony": AsyncConfig(max_staleness=1)},
    }[request.param]
    config = tiny_run(
        tmp_path_factory.mktemp(request.param),
        recipe=jr.recipes.grpo().replace(name="guided", collector=Guided()),
        steps=3,
        checkpoint=CheckpointConfig(every=1, keep=3),
        **changes,
    )
    return config, train(config)


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("guided", ["rounds", "slots", "ahead"], indirect=True)
def test_hints_and_demonstrations_train_with_what_was_sampled(guided):
    _, result = guided
    for row in result.history:
        assert row["rollouts/hinted"] == row["rollouts/demonstration"] == 4
        assert row["groups_sampled"] == 4 and row["rollouts_sampled"] == 12
        assert np.isfinite(row["loss"]) and row["grad_norm"] > 0 and row["skipped"] == 0
        # Of tokens that nobody knows the log-probability of, the ratio is 1.
        assert row["sampler_gap_max"] < (0.1 if row["staleness_max"] == 0 else 5)
    assert (result.state.collector_state["length"] > 0).all()


# Ahead of the training, which weights sample depends on timing.
@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(
    "guided", ["rounds", pytest.param("slots", marks=pytest.mark.slow)], indirect=True
)
def test_a_run_with_mixed_requests_resumes_exactly(guided, tmp_path):
    config, whole = guided
    assert_same_run(after_the_first_step(config, tmp_path / "run"), whole)


def test_room_for_texts_that_nobody_sends_has_no_effect(tmp_path):
    sampling = dataclasses.replace(SLOTS, prompt_length=20)
    with pytest.raises(ValueError, match="prompt_length has no effect with recipe 'dr_grpo'"):
        train(tiny_run(tmp_path, sampling=sampling))


@pytest.mark.slow
def test_a_text_longer_than_the_room_is_one_sentence(tmp_path):
    recipe = jr.recipes.grpo().replace(name="guided", collector=Guided())
    sampling = dataclasses.replace(SLOTS, prompt_length=5)
    with pytest.raises(ValueError, match="Prompt 'q.*has 7 tokens.*room for 5 before"):
        train(tiny_run(tmp_path, recipe=recipe, sampling=sampling))


@for_each(
    ("length", "message"),
    [
        (1, r"prompt_length is 1, but the longest prompt of the data has \d tokens"),
        (256, r"prompt_length is 256, but a context of 256 leaves \d+ tokens before a response"),
    ],
)
def test_a_room_that_the_run_could_not_have_is_refused(tmp_path, length, message):
    recipe = jr.recipes.grpo().replace(name="guided", collector=Guided())
    sampling = dataclasses.replace(SLOTS, prompt_length=length)
    with pytest.raises(ValueError, match=message):
        train(tiny_run(tmp_path, recipe=recipe, sampling=sampling))


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_a_population_answers_the_prompts_that_a_collector_chooses(tmp_path, shared):
    collector = jr.curation.prioritized(jr.curation.learnability)
    recipe = jr.recipes.eggroll(sigma=0.05).replace(collector=collector)
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
    assert_same_run(after_the_first_step(config, tmp_path / "again"), whole)


@pytest.mark.slow
def test_a_population_answers_once(tmp_path):
    refill = jr.curation.refill(jr.curation.informative_groups)
    recipe = jr.recipes.eggroll(sigma=0.05).replace(collector=refill)
    config = tiny_run(tmp_path, recipe=recipe, reward=never, remat="full")
    with pytest.raises(ValueError, match="samples 2 rollouts of each of 4 prompts once per step"):
        train(config)


def test_a_population_has_no_slots(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Slotted(LeastAsked):
        needs_slots: bool = True

    recipe = jr.recipes.eggroll(sigma=0.05).replace(collector=Slotted())
    with pytest.raises(ValueError, match="decodes in slots, which a population does not"):
        train(tiny_run(tmp_path, recipe=recipe, remat="full"))


class EndsEarly(jr.testing.ByteTokenizer):
    """Of the tokens a random model writes, one in three ends a response."""

    eos_ids = (257, *range(86))


def early_model():
    return *jr.testing.tiny_model(num_layers=1), EndsEarly()


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_unfinished_responses_go_on_in_the_next_batch(tmp_path, staleness):
    config = tiny_run(
        tmp_path / "whole",
        model=early_model,
        recipe=jr.recipes.april(segments=4),
        steps=4,
        checkpoint=CheckpointConfig(every=1, keep=4),
        asynchrony=AsyncConfig(max_staleness=staleness),
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
    if staleness:
        return
    assert_same_run(after_the_first_step(config, tmp_path / "again"), whole)
