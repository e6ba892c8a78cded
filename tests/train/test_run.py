"""Runs in which the loss of some steps is non-finite."""

import dataclasses
import json
from datetime import datetime

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_batch
from test_checkpoint import assert_same
from tiny_run import low_bytes, prompts, tiny_run

import jaxrl_llm as jr
from jaxrl_llm.cli.options import on_its_date
from jaxrl_llm.data import chat, templates
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.train import (
    AsyncConfig,
    Checkpoints,
    DataConfig,
    OptimizerConfig,
    TrainingError,
    make_optimizer,
    train,
)
from jaxrl_llm.train.experiment.rollouts import AsyncRollouts, SyncRollouts
from jaxrl_llm.train.logging import run_folder
from jaxrl_llm.train.loop import run_to_end
from jaxrl_llm.train.run import UpdateGuard, begin

pytestmark = pytest.mark.usefixtures("shared_programs")

HUGE = 50.0


def fragile():
    """Dr. GRPO with a surrogate that is NaN in a batch that holds a huge advantage."""
    plain = jr.recipes.dr_grpo(length=4)

    def surrogate(logp, old_logp, advantages, mask):
        loss = plain.surrogate(logp, old_logp, advantages, mask)
        bad = jnp.any(jnp.abs(jnp.where(mask, advantages[..., None], 0.0)) > HUGE / 10)
        return jnp.where(bad, jnp.nan, 1.0) * loss

    return plain.replace(name="fragile", surrogate=surrogate)


def huge_in(*steps):
    """A reward that makes the batch of some steps huge; four prompts, two completions each."""
    calls = []

    def reward(prompt, completion, metadata):
        calls.append(prompt)
        step, place = (len(calls) - 1) // 8 + 1, (len(calls) - 1) % 8
        value = low_bytes(prompt, completion, metadata)
        return value + HUGE if step in steps and place == 4 else value

    return reward


@pytest.fixture
def published(monkeypatch):
    """Copies of what was handed to the sampler, by step."""
    found = {}

    def spy(kind):
        publish = kind.publish

        def noted(self, state):
            found[int(state.step)] = jax.tree.map(np.asarray, state.params)
            publish(self, state)

        monkeypatch.setattr(kind, "publish", noted)

    spy(SyncRollouts)
    spy(AsyncRollouts)
    return found


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_skipped_steps_are_counted(tmp_path, published, staleness):
    lines = []
    config = tiny_run(
        tmp_path,
        recipe=fragile(),
        reward=huge_in(2, 3),
        steps=5,
        max_skipped=3,
        asynchrony=AsyncConfig(max_staleness=staleness),
    )
    result = train(config, log=lines.append)
    rows = result.history
    assert [row["skipped"] for row in rows] == [0, 1, 1, 0, 0]
    assert [row["loss"] is None for row in rows] == [False, True, True, False, False]
    assert [row["update_norm"] == 0 for row in rows] == [False, True, True, False, False]
    # The sampler goes on with the weights of the last good step, under a new version.
    assert_same(published[1], published[2])
    assert_same(published[1], published[3])
    with pytest.raises(AssertionError):
        assert_same(published[3], published[4])
    assert all(row["staleness_max"] <= staleness for row in rows)
    # The clock and the questions go on: five steps of four of the ten questions.
    assert int(result.state.step) == 5 and result.state.data_cursor == (2, 0)
    counts = [x for x in jax.tree.leaves(result.state.opt_state) if x.dtype == jnp.int32]
    assert counts and all(int(x) == 3 for x in counts)  # updates that Adam has seen
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.state.params))
    told = "Step 2 gave loss nan and gradient norm nan, so its update is skipped"
    assert f"{told} (1 in a row; 3 end the run)." in lines
    assert not list(tmp_path.glob("skipped_step_*"))


def test_too_many_in_a_row_end_the_run_and_leave_the_batch(tmp_path):
    lines = []
    config = tiny_run(tmp_path, recipe=fragile(), reward=huge_in(2, 4, 5), max_skipped=2)
    with pytest.raises(TrainingError) as error:
        train(config, log=lines.append)
    path = tmp_path / "skipped_step_00000005.npz"
    assert str(error.value) == (
        "Step 5 gave loss nan and gradient norm nan, so its update is skipped, and none of the "
        f"last 2 steps made one; its batch is in {str(path)!r}."
    )
    assert any("the state after step 5 is saved, for --resume" in line for line in lines)
    with np.load(path) as found:
        batch = dict(found)
    assert {"advantages", "behavior_logp", "logp", "weights", "where"} <= set(batch)
    assert batch["tokens"].shape == batch["logp"].shape == batch["mask"].shape == (4, 2, 4)
    assert batch["rewards"].shape == (4, 2) and batch["rewards"].max() >= HUGE
    expected = batch["rewards"] - batch["rewards"].mean(-1, keepdims=True)
    np.testing.assert_allclose(batch["advantages"], expected, rtol=1e-5)
    np.testing.assert_allclose(batch["logp"], batch["behavior_logp"], atol=1e-4)
    row, kept = batch["tokens"][1, 0], batch["sampled_mask"][1, 0]
    assert batch["completions"][1, 0] == ByteTokenizer().decode(row[kept].tolist())
    # The last good state is saved, and a run can go on from it.
    assert Checkpoints(tmp_path / "checkpoints", model=None).steps() == [5]
    done = train(dataclasses.replace(config, reward=low_bytes), resume=True, allow_changed=True)
    rows = done.history
    assert [row["skipped"] for row in rows] == [0, 1, 0, 1, 1, 0]
    first = [line for line in lines if "is skipped" in line]
    assert len(first) == 2 and first[0].startswith("Step 2") and first[1].startswith("Step 4")
    # The question of each row is there as the model read it.
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    asked = [row["prompt"] for row in map(json.loads, lines) if row["step"] == 5]
    assert asked == list(batch["prompts"])


class Folder:
    """What is asked of a run's folder."""

    def __init__(self, path):
        self.path, self.said = path, []
        self.log = self.said.append


NUMBERS = {"loss": float("nan"), "grad_norm": 1.0, "update_norm": 0.0, "skipped": 1.0}


def guard(folder, inspect=None, limit=1):
    def fails(state, batch):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    return UpdateGuard(folder, limit=limit, tokenizer=ByteTokenizer(), inspect=inspect or fails)


def test_a_batch_that_cannot_be_inspected_is_written_as_it_was_sampled(tmp_path):
    batch = make_batch(prompts=2, group=2)
    with pytest.raises(TrainingError, match="Step 3 gave loss nan .*; its batch is in"):
        guard(Folder(tmp_path))(3, NUMBERS, None, batch)
    with np.load(tmp_path / "skipped_step_00000003.npz") as found:
        np.testing.assert_array_equal(found["tokens"], batch.tokens)
        np.testing.assert_array_equal(found["sampled_mask"], batch.mask)
        assert "logp" not in found and found["prompts"].shape == (2,)
        assert found["completions"].shape == (2, 2)


def test_a_batch_that_cannot_be_written_does_not_hide_why(tmp_path):
    (tmp_path / "skipped_step_00000003.npz").mkdir()
    told = r"Step 3 gave loss nan .*; its batch cannot be written to '.*npz': is a directory\.$"
    with pytest.raises(TrainingError, match=told):
        guard(Folder(tmp_path))(3, NUMBERS, None, make_batch(prompts=2))


def test_a_row_of_steps_without_an_update_ends_the_run(tmp_path):
    # Steps without signal are in the row: which ends the run whether its steps have no signal or no
    # finite gradient.
    note = guard(Folder(tmp_path), limit=3)
    idle = NUMBERS | {"loss": 0.0, "grad_norm": 0.0, "skipped": 0.0, "no_signal": 1.0}
    note(1, NUMBERS, None, None)
    note(2, idle, None, None)
    assert note.in_a_row == 2
    with pytest.raises(TrainingError, match="none of the last 3 steps made one"):
        note(3, NUMBERS, None, make_batch(prompts=2))
    history = [{"skipped": 0.0}, {"skipped": 1.0}, {"held_out": {}}, idle]
    options = {"limit": 3, "tokenizer": ByteTokenizer(), "inspect": None, "history": history}
    assert UpdateGuard(Folder(tmp_path), **options).in_a_row == 2

    # Only a row of them ends the run.
    folder = Folder(tmp_path)
    note, good = guard(folder, limit=2), NUMBERS | {"loss": 1.0, "skipped": 0.0}
    for step, numbers in enumerate([NUMBERS, good, NUMBERS, good], start=1):
        note(step, numbers, None, None)
    assert len(folder.said) == 2 and folder.said[1].endswith("(1 in a row; 2 end the run).")
    # A state of the method that would be non-finite, and a critic alone, are told as such.
    note(5, NUMBERS | {"loss": 1.0}, None, None)
    assert "gradient norm 1 but a non-finite state or scale of the method" in folder.said[2]
    critic = {"critic_loss": float("nan"), "critic_grad_norm": 2.0, "critic_skipped": 1.0}
    told = "Step 6 gave loss 1 .*, of the critic nan and 2, so the critic's update is skipped, and"
    with pytest.raises(TrainingError, match=told):
        note(6, good | critic, None, make_batch(prompts=2))


def test_some_updates_or_withheld_ones_end_no_run(tmp_path):
    # A step with some of its updates is none without: of four updates of a batch, three were made.
    folder = Folder(tmp_path)
    note, some = guard(folder, limit=1), NUMBERS | {"updates": 3.0}
    for step in (1, 2, 3):
        note(step, some, None, None)
    assert note.in_a_row == 0 and len(folder.said) == 3
    assert folder.said[0].endswith("so 1 of 4 updates of the policy are skipped.")
    note(4, some | {"loss": 0.0, "updates": 0.0, "skipped": 0.0}, None, None)  # all were empty
    assert note.in_a_row == 1
    with pytest.raises(TrainingError, match="so its update is skipped"):
        note(5, some | {"updates": 0.0, "skipped": 4.0}, None, make_batch(prompts=2))
    of_critic = {"critic_loss": 1.0, "critic_grad_norm": 1.0, "critic_updates": 0.0}
    with pytest.raises(TrainingError, match="so the critic's update is skipped"):
        note(6, some | of_critic | {"critic_skipped": 4.0}, None, make_batch(prompts=2))

    # Updates that the recipe withholds end no run.
    folder = Folder(tmp_path)
    note, withheld = guard(folder, limit=1), {"updates": 0.0, "withheld": 2.0}
    note(1, NUMBERS | {"loss": 1.0, "skipped": 0.0} | withheld, None, None)
    assert note.in_a_row == 0 and not folder.said
    note(2, NUMBERS | withheld, None, None)
    assert note.in_a_row == 0
    assert folder.said[0].endswith("so 1 of 3 updates of the policy are skipped.")


@pytest.mark.slow
def test_an_optimizer_that_spoils_the_parameters_ends_the_run_at_once(tmp_path, monkeypatch):
    def make(config: OptimizerConfig, *, updates):
        def spoiled(updates, params):  # by a matrix product: the update is not computed twice
            nan = jnp.dot(jnp.ones(2), jnp.full(2, jnp.nan))
            return jax.tree.map(lambda x: x * nan, updates)

        spoil = optax.stateless(spoiled)
        once = optax.conditionally_transform(spoil, lambda count: count == 1)
        return optax.chain(make_optimizer(config, updates=updates), once)

    monkeypatch.setattr("jaxrl_llm.train.experiment.setup.make_optimizer", make)
    told = "Step 2 gave loss .* but a non-finite update, because of the optimizer or its"
    with pytest.raises(TrainingError, match=told):
        train(tiny_run(tmp_path))
    assert not (tmp_path / "checkpoints").exists()  # what is spoiled is not saved


class DatedTokenizer(ByteTokenizer):
    template = "{{ strftime_now('%d') }}{% for m in messages %} {{ m.content }}{% endfor %}"

    def chat(self, messages, *, add_generation_prompt=True, tools=None):
        return chat.render_chat(self.template, messages)


@pytest.mark.slow
def test_a_resumed_run_writes_the_date_of_its_first_session(tmp_path, monkeypatch):
    tokenizer = DatedTokenizer()
    data = DataConfig(prompts=prompts)

    def model():
        return *tiny_model(num_layers=1), tokenizer

    def first_day() -> str:
        return tokenizer.chat([{"role": "user", "content": "q"}])[:2]

    def on_day(day: int, **options):
        class Now(datetime):
            @classmethod
            def now(cls):
                return datetime(2026, 3, day, 12, 30)

        for module in (run_folder, templates, chat):
            monkeypatch.setattr(module, "datetime", Now)
        config = tiny_run(tmp_path, model=model, data=data, **options)
        begun = begin(
            config, resume=day > 1, allow_changed=False, overwrite=False, log=None, files={}
        )
        with begun as run:
            run_to_end(run)
        return [tokenizer.decode(question.tokens) for question in run.experiment.train]

    before = on_day(1, steps=1)
    assert before[0] == "01 q00"
    assert on_day(2, steps=2) == before
    assert first_day() == "02"  # outside of the run
    (tmp_path / "run.json").write_text("{}")
    with on_its_date(str(tmp_path)):
        assert first_day() == "01"
        assert "here 2026-03-01" in chat.date_written(tokenizer)
    # Earlier versions wrote no date, and the times of their sessions.
    sessions = tmp_path / "sessions.jsonl"
    rows = [json.loads(line) for line in sessions.read_text().splitlines()]
    rows = [row | {"time": f"2026-02-{5 + i:02}T23:00:00-0800"} for i, row in enumerate(rows)]
    for row in rows:
        row.pop("date", None)
    sessions.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert on_day(3, steps=3)[0] == "05 q00"
    assert on_day(4, steps=4)[0] == "05 q00"


def test_a_run_that_has_had_a_signal_goes_on_without_one(tmp_path):
    """Its policy may solve all prompts by then; before, the reward may be at fault."""
    good = NUMBERS | {"loss": 1.0, "grad_norm": 1.0, "skipped": 0.0, "updates": 1.0}
    flat = good | {"no_signal": 1.0}
    note = guard(Folder(tmp_path), limit=3)
    counts = []
    for step, values in enumerate([flat, flat, good, *[flat] * 5, flat | {"updates": 0.0}]):
        note(step, values, None, None)
        counts.append((note.in_a_row, note.without_signal))
    assert counts == [(1, 0), (2, 0), (0, 0), *((0, n) for n in range(1, 6)), (1, 0)]
