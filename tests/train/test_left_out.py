"""Rows that a run refuses, cuts or leaves out before its first step."""

import dataclasses
import json

import numpy as np
import pytest
from helpers import refuses
from rows import for_each
from tiny_run import low_bytes, tiny_run

import jaxrl_llm as jr
from jaxrl_llm.data import Prompt, PromptSet, from_file
from jaxrl_llm.rewards import RewardError
from jaxrl_llm.rollout.cut import cut_response
from jaxrl_llm.rollout.types import LENGTH
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.train import CheckpointConfig, DataConfig, EvaluationConfig, SamplingConfig, train
from jaxrl_llm.train.experiment.left_out import gradable
from jaxrl_llm.train.experiment.setup import load_experiment

pytestmark = pytest.mark.usefixtures("shared_programs")


class Grader:
    """Grades rows whose answer is a number."""

    def __call__(self, prompt, completion, metadata):
        return low_bytes(prompt, completion, metadata)

    def check_row(self, metadata):
        if not str(metadata["answer"]).isdigit():
            raise RewardError(f"{metadata['answer']!r} is no number.")


class Broken(Grader):
    def check_row(self, metadata):
        return metadata["solution"]


def answers(*values):
    """Prompts with these answers, named by their places."""
    return lambda: PromptSet(
        [Prompt(f"q{n:02}", str(x), id=f"q{n:02}") for n, x in enumerate(values)], source="tiny"
    )


def of(run_dir, prompts, rule="refuse", **changes):
    data = DataConfig(prompts=prompts, chat=False, unreadable=rule, held_out=0.0)
    return tiny_run(run_dir, **{"reward": Grader(), "data": data} | changes)


def checked(config, held_out=()):
    return gradable(config, config.data.prompts(), held_out)


def test_a_row_that_cannot_be_graded_is_refused_before_the_model_is_loaded(tmp_path):
    def never():
        raise AssertionError("the model is loaded")

    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"q{n}", "answer": x} for n, x in enumerate([1, "two", 3, None, "5", "?"])]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    config = of(tmp_path / "run", lambda: from_file(path, needs_answer=False), model=never)
    told = (
        rf"data: the reward Grader cannot grade row 'rows.jsonl:1' \(line 3 of {path}\) and 2 "
        r"others: 'two' is no number; set data.unreadable to \"drop\" to leave such rows out\.$"
    )
    for resume in (False, True):
        refuses(told, train, config, resume=resume)
    assert not (tmp_path / "run").exists()
    with pytest.raises(
        RewardError, match=r"raised KeyError on row 'rows.jsonl:0' \(line 1 of .*\): 'sol"
    ):
        checked(dataclasses.replace(config, reward=Broken()))


def test_rows_that_are_graded_are_read_and_no_others(tmp_path):
    # Only rows that are graded are read.
    bad, good = answers("a", "b"), answers(1, 2)
    config = of(tmp_path, good)
    assert checked(config, bad())[1] == bad()  # without an evaluation
    with pytest.raises(ValueError, match="row 'q00' of tiny and 1 others: 'a' is no number"):
        checked(dataclasses.replace(config, evaluation=EvaluationConfig()), bad())
    # The data have the rewards of the responses.
    assert (
        checked(dataclasses.replace(config, recipe="dpo", data=of(tmp_path, bad).data))[0] == bad()
    )
    assert checked(of(tmp_path, bad, reward=low_bytes))[2] == []
    with pytest.raises(
        ValueError,
        match=r"row 'q00' of tiny and 1 others: .*number, and no row to train on remains",
    ):
        checked(of(tmp_path, bad, "drop"))
    evaluated = of(tmp_path, good, "drop", evaluation=EvaluationConfig())
    with pytest.raises(ValueError, match="'a' is no number, and no row held out remains"):
        checked(evaluated, bad())

    # An option without effect is refused.
    with pytest.raises(
        ValueError, match="unreadable has no effect with low_bytes, which has no ch"
    ):
        of(tmp_path, answers(1), "drop", reward=low_bytes)
    with pytest.raises(ValueError, match="data: unreadable has no effect without a reward"):
        of(tmp_path, answers(1), "drop", reward=None, recipe="dpo")
    for option in ("unreadable", "too_long"):
        refuses(f"data: {option} must be one of", DataConfig, prompts="a.jsonl", **{option: "skip"})


def test_a_slow_check_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrl_llm.train.experiment.left_out._SLOW_SECONDS", -1.0)
    with pytest.warns(UserWarning, match="Grader.check_row has read 1 of 3 rows in") as told:
        checked(of(tmp_path, answers(1, 2, 3)))
    assert len(told) == 1


@pytest.mark.slow
def test_rows_left_out_are_counted_and_compared_on_resume(tmp_path):
    prompts = answers(*range(6), "?", 7, 8, "x")
    config = of(tmp_path, prompts, "drop", steps=1, checkpoint=CheckpointConfig(every=1))
    lines = []
    train(config, log=lines.append)
    count = "2 rows left out that the reward cannot grade"
    assert any(f"8 questions to train on, 0 held out; {count}" in line for line in lines)
    train(dataclasses.replace(config, steps=2), resume=True)
    sessions = [json.loads(x) for x in (tmp_path / "sessions.jsonl").read_text().splitlines()]
    starts = [row for row in sessions if row["event"] == "start"]
    assert [row["about"]["rows left out or cut"] for row in starts] == [count] * 2
    assert starts[0]["settings"]["data.unreadable"] == "drop"
    # A reward that now reads other rows would leave the cursor at another prompt.
    config.reward.check_row = lambda metadata: None
    with pytest.raises(ValueError, match="questions"):
        train(dataclasses.replace(config, steps=3), resume=True)


def network():
    return *tiny_model(num_layers=1, max_length=20), ByteTokenizer()


ROWS = [
    {
        "prompt": "q" * (n % 4 + 1),
        "chosen": "abcdefgh"[: n + 1],
        "rejected": "XY",
        "demonstration": ["abcdefgh"[: n + 1]],
        "completion": "abcdefgh"[: n + 1],
        "label": n % 2 == 0,
        "responses": ["XY", "abcdefgh"[: n + 1]],
        "rewards": [0.0, 1.0],
        "completions": ["a", "b" * n] if n else ["a"],
        "labels": [True, False] if n else [True],
    }
    for n in range(8)
]
MOST = 6  # tokens of a response, of which the last ends it


def of_rows(folder, recipe, rule, rows=ROWS, **changes):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    data = DataConfig(prompts=str(path), chat=False, held_out=0.0, too_long=rule)
    options = {"model": network, "reward": None, "recipe": recipe, "data": data}
    options |= {"sampling": SamplingConfig(max_new_tokens=MOST)}
    return tiny_run(folder / "run", **options | changes)


def responses_of(experiment):
    """The tokens, ends and rewards of all responses of the data, by their prompts and members."""
    seen = {}
    for places, batch, collected, _ in experiment.offline_batches(experiment.train):
        rollout = collected.rollout
        for p, place in enumerate(places):
            for g in np.flatnonzero(collected.where[p]):
                tokens = rollout.tokens[p, g][rollout.mask[p, g]].tolist()
                name = experiment.train[place].prompt.name, int(g)
                seen[name] = tokens, int(rollout.finish[p, g]), float(batch.rewards[p, g])
    return seen


# A recipe, and the place of the long response in its group.
KINDS = {
    "dpo": ("dpo", 0),
    "kto": ("kto", 0),
    "lists": (jr.recipes.dpo().replace(collector=jr.curation.offline_lists(size=2)), 1),
}


@for_each("kind", ["dpo", "kto", "lists"])
def test_long_responses_by_each_rule(tmp_path, kind):
    recipe, member = KINDS[kind]
    long = [n for n, row in enumerate(ROWS) if n + 2 > MOST]
    with pytest.raises(
        ValueError, match=r"response to prompt 'rows.jsonl:5' \(line 6 of .* has 7 tokens"
    ):
        load_experiment(of_rows(tmp_path, recipe, "refuse"))
    dropped, _ = load_experiment(of_rows(tmp_path, recipe, "drop"))
    assert len(dropped.train) == len(ROWS) - len(long)
    assert dropped.left_out[:3] == (0, len(long), 0)
    cut, _ = load_experiment(of_rows(tmp_path, recipe, "truncate"))
    assert len(cut.train) == len(ROWS) and cut.left_out[:3] == (0, 0, len(long))
    assert cut.questions != dropped.questions
    before, after = responses_of(dropped), responses_of(cut)
    assert before.items() <= after.items()
    for n in long:
        tokens, finish, _ = after[f"rows.jsonl:{n}", member]
        assert bytes(tokens).decode() == "abcdefgh"[:MOST] and finish == LENGTH
    assert {finish for _, finish, _ in before.values()} == {1}


@for_each("rule, count", [("drop", 6), ("truncate", 8)])
def test_long_prompts_by_each_rule(tmp_path, rule, count):
    rows = [{"prompt": "abcdefghijklmnopqrstuvwxyz"[: 9 + n]} for n in range(8)]  # room for 14
    options = {"rows": rows, "reward": low_bytes}
    with pytest.raises(ValueError, match=r"6' \(line 7 of .*\) has 15 tokens, but .* room for 14"):
        load_experiment(of_rows(tmp_path, "grpo", "refuse", **options, sampling=TWO))
    experiment, _ = load_experiment(of_rows(tmp_path, "grpo", rule, **options, sampling=TWO))
    assert len(experiment.train) == count
    numbers = (0, 2, 0) if rule == "drop" else (0, 0, 2)
    assert experiment.left_out[:3] == numbers
    if rule == "truncate":
        assert bytes(experiment.train[-1].tokens) == b"cdefghijklmnop"
    few = dataclasses.replace(TWO, max_new_tokens=19)
    with pytest.raises(ValueError, match="all rows to train on are too long; a prompt may have 1"):
        load_experiment(of_rows(tmp_path, "grpo", "drop", **options, sampling=few))


TWO = SamplingConfig(group_size=2, max_new_tokens=MOST)


def test_held_out_rows_are_left_out_too(tmp_path):
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("\n".join(map(json.dumps, ROWS[3:])))
    config = of_rows(tmp_path, "dpo", "drop")
    data = dataclasses.replace(config.data, evaluation=str(held_out))
    config = dataclasses.replace(config, data=data, evaluation=EvaluationConfig())
    with pytest.warns(UserWarning, match="also trained on"):
        experiment, _ = load_experiment(config)
    assert (len(experiment.train), len(experiment.held_out)) == (5, 2)
    assert experiment.left_out.too_long == 3 + 3


def test_steps_behind_a_cut_are_left_out():
    tokens = list(b"ab\n\ncd\n\nef") + [0]
    response = jr.curation.Response(
        tokens, reward=0.5, turn_rewards=np.float32([1, 0, 1]), turn_ends=np.array([4, 8, 10])
    )
    for most, count in ((10, 3), (9, 2), (8, 2), (7, 1), (3, 0)):
        cut = cut_response(response, tokens, most, ByteTokenizer())
        assert cut.tokens.tolist() == tokens[:most] and (cut.finish, cut.reward) == (LENGTH, 0.5)
        assert cut.turn_ends.tolist() == [4, 8, 10][:count]
        assert cut.turn_rewards.tolist() == [1.0, 0.0, 1.0][:count]
