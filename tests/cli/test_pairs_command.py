"""`jaxrl-llm pairs`: right over wrong answers of a model, and a run that learns from the file."""

import json
from pathlib import Path

import pytest
from test_cli import ran, refused, run

from jaxrl_llm.cli import pairs
from jaxrl_llm.cli.options import load_target
from jaxrl_llm.rewards import RewardError
from jaxrl_llm.train.config import find_prompts
from jaxrl_llm.train.experiment.run_data import load_prompts

# Odd bytes end a response, so that some of a random model do. Prompts of an even number have no
# right answer, and every prompt comes twice.
CONFIG = """
import dataclasses
from pathlib import Path
import jax
from tiny_run import CONFIG
from jaxrl_llm.data import Prompt, PromptSet
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.train import DataConfig, EvaluationConfig, SamplingConfig

class Tokenizer(ByteTokenizer):
    eos_ids = (257, *range(1, 256, 2))

def model():
    return *tiny_model(num_layers=1), Tokenizer()

def prompts():
    every = range(20)
    rows = (Prompt(f"q{n % 10:02}", f"{n % 10}", {"n": [n % 10]}, f"id{n % 10}") for n in every)
    return PromptSet(rows, source="test")

def even(prompt, completion, metadata):
    assert prompt == f"q{int(metadata['answer']):02}" and metadata["n"] == [int(prompt[1:])]
    return float(len(completion) % 2) if metadata["n"][0] % 2 else 0.0

config = dataclasses.replace(
    CONFIG,
    model=model,
    data=DataConfig(prompts=prompts, chat=False),
    reward=even,
    evaluation=EvaluationConfig(),
    sampling=SamplingConfig(group_size=2, max_new_tokens=6),
    steps=2,
)
learn = dataclasses.replace(
    config, recipe="dpo", data=DataConfig(prompts="pairs.jsonl", chat=False), run_dir="run"
)
sampling = SamplingConfig(max_new_tokens=6)  # no group size, as no evaluation samples groups
played = dataclasses.replace(learn, reward=None, sampling=sampling)

def other():
    scale = float(Path("scale.txt").read_text())
    network, params = tiny_model(num_layers=1)
    return network, jax.tree.map(lambda x: scale * x, params)

compared = dataclasses.replace(played, reference=other)

def with_sets():
    rows = (Prompt(f"q{n}", "1", {"n": {n}}, f"id{n}") for n in range(4))
    return PromptSet(rows, source="test")

sets = dataclasses.replace(config, data=DataConfig(prompts=with_sets, chat=False))
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("task.py").write_text(CONFIG)
    return tmp_path


def rows_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.slow
def test_the_file_is_right_over_wrong_and_a_run_learns_from_it(capsys, here):
    words = ("pairs", "task.py", "--samples", 12, "--pairs", 2, "--seed", 1)
    out = ran(capsys, *words, "--out", "pairs.jsonl")
    rows = rows_of("pairs.jsonl")
    assert f"pairs.jsonl holds {len(rows)} pairs." in out and len(rows) >= 4
    config, _ = load_target("task.py")
    train, held_out, _ = load_prompts(config)
    odd = {prompt.text for prompt in train if int(prompt.answer) % 2}
    assert {row["prompt"] for row in rows} <= odd
    assert not {row["prompt"] for row in rows} & set(held_out.texts)
    chosen = {}
    for row in rows:
        assert len(row["chosen"]) % 2 == 1 and len(row["rejected"]) % 2 == 0
        assert (row["answer"], row["n"]) == (row["id"][2:], [int(row["prompt"][1:])])
        chosen.setdefault(row["prompt"], set()).add(row["chosen"])
    assert {len(texts) for texts in chosen.values()} == {1}  # the shortest
    assert len({(r["prompt"], r["chosen"], r["rejected"]) for r in rows}) == len(rows)
    assert f"{12 * len(train)} answers to {len(train)} prompts" in out
    assert f"{len(chosen)} prompts have a right and a wrong answer" in out
    assert find_prompts("pairs.jsonl")[0].metadata["chosen"] == rows[0]["chosen"]
    # The same words make the same file; others, with another seed or choice, another one.
    for name, more, same in (
        ("again", (), True),
        ("any", ("--prefer", "any"), False),
        ("cold", ("--temperature", 0.5), False),
    ):
        assert run(capsys, *words, *more, "--out", f"{name}.jsonl")[0] == 0
        assert (rows_of(f"{name}.jsonl") == rows) == same
    # A run on it, and pairs of the trained policy for another one.
    assert run(capsys, "train", "task.py:learn")[0] == 0
    last = rows_of("run/metrics.jsonl")[-1]["held_out"]
    questions = len({row["prompt"] for row in rows})
    assert set(last) == {"greedy", "sampled", "pairs"}
    # Rows of one prompt are one question.
    assert last["greedy"]["questions"] == max(round(0.2 * questions), 1)
    assert last["pairs"]["questions"] == last["greedy"]["questions"]
    assert run(capsys, "pairs", "run", "--out", "next.jsonl")[0] == 0
    texts = [row["prompt"] for row in rows_of("next.jsonl")]
    assert len(set(texts)) == len(texts) and set(texts) < {row["prompt"] for row in rows}


@pytest.mark.slow
def test_pairs_are_not_ranked_by_another_reference_than_that_of_the_run(capsys, here):
    rows = [{"prompt": f"q{n}", "chosen": f"{n}!", "rejected": f"{n}"} for n in range(10)]
    Path("pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("scale.txt").write_text("0.5")
    assert run(capsys, "train", "task.py:compared")[0] == 0
    last = rows_of("run/metrics.jsonl")[-1]["held_out"]["pairs"]
    out = ran(capsys, "evaluate", "run", "--json")
    assert json.loads(out.splitlines()[-1])["pairs"]["mean"] == last["mean"]
    Path("scale.txt").write_text("2")
    refused(capsys, "evaluate run", "was made with another reference")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RewardError("no")])
def test_pairs_sampled_before_an_error_are_written(capsys, here, monkeypatch, error):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 3

    def sample_pairs(*args, on_batch, **kwargs):
        on_batch(2, rows[:1])
        on_batch(2, rows[1:])
        raise error

    monkeypatch.setattr(pairs, "sample_pairs", sample_pairs)
    code, _, err = run(capsys, "pairs", "task.py", "--out", "new/a.jsonl")
    assert code == (130 if error is KeyboardInterrupt else 1)
    assert "new/a.jsonl holds the 3 pairs so far." in err
    assert rows_of("new/a.jsonl") == rows


def test_what_cannot_make_pairs_is_one_sentence(capsys, here):
    Path("there.jsonl").write_text("")
    for words, part in (
        (("task.py", "--out", "there.jsonl"), "'there.jsonl' exists already"),
        (("task.py:played", "--out", "a.jsonl"), "has no reward, which tells right answers"),
        (("task.py:sets", "--out", "a.jsonl"), "cannot be written as JSON (Object of type set"),
        (("task.py", "--out", "a.jsonl", "--success", 9), "no prompt has both a right and a wrong"),
        (("task.py", "--out", "a.jsonl", "--best"), "--best has no effect on 'task.py'"),
        (("task.py:sets", "--out", "task.py/a.jsonl"), "cannot be created: not a directory"),
    ):
        refused(capsys, ["pairs", *words], part)
    for words, part in (
        (("--out", "a.json"), "--out must end in .jsonl"),
        (("--out", "a.jsonl", "--samples", 1), "--samples must be at least 2"),
        (("--out", "a.jsonl", "--pairs", 16), "--pairs 16 needs more --samples than that"),
        (("--out", "a.jsonl", "--temperature", 0), "--temperature must be positive"),
        (("--out", "a.jsonl", "--limit", 0), "--limit must be at least 1"),
    ):
        code, _, err = run(capsys, "pairs", "task.py", *words)
        assert code == 2 and part in " ".join(err.replace("│", " ").split())
    assert not Path("a.jsonl").exists()
