"""Runs on responses of the data: nothing is sampled, and held-out pairs are compared."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from batch_makers import first_batch, write_rows
from exact_resume import assert_resumes
from rows import for_each
from tiny_run import low_bytes, tiny_run

import jaxrl_llm as jr
from jaxrl_llm.cli import main
from jaxrl_llm.cli.options import load_config
from jaxrl_llm.data import Prompt, PromptSet
from jaxrl_llm.data.questions import TextEncoder
from jaxrl_llm.recipes import Computed
from jaxrl_llm.testing import ByteTokenizer
from jaxrl_llm.train import (
    AsyncConfig,
    CheckpointConfig,
    Checkpoints,
    DataConfig,
    EvaluationConfig,
    SamplingConfig,
    train,
)
from jaxrl_llm.train.batches import map_microbatches
from jaxrl_llm.train.experiment.pairs import _masked, evaluate_pairs, make_score
from jaxrl_llm.train.experiment.rollouts import collect_rollouts
from jaxrl_llm.train.experiment.run_data import check_classes, load_prompts
from jaxrl_llm.train.experiment.sampled_pairs import pair_row
from jaxrl_llm.train.experiment.setup import load_experiment
from jaxrl_llm.train.logging.results import read_jsonl
from jaxrl_llm.train.models.denoising import scorer_of

pytestmark = pytest.mark.usefixtures("shared_programs")

ROWS = [
    {"prompt": f"q{n % 10}", "chosen": "abc"[: 1 + n % 3], "rejected": "XY"[: 1 + n % 2]}
    for n in range(20)
]


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    write_rows(path, ROWS)
    return str(path)


def of_pairs(run_dir, path, **changes):
    data = DataConfig(prompts=path, chat=False)
    changes = {
        "data": data,
        "reward": None,
        "recipe": "dpo",
        "evaluation": EvaluationConfig(),
        "sampling": SamplingConfig(max_new_tokens=4),  # pairs need no group size
    } | changes
    return tiny_run(run_dir, **changes)


@for_each("recipe", ["sft", "dpo"])
def test_rows_of_one_prompt_all_train_and_are_part_of_the_data(tmp_path, pairs, recipe):
    path = tmp_path / "rows.jsonl"
    rows = [{**row, "demonstration": f"{n}"} for n, row in enumerate(ROWS)]
    write_rows(path, rows)
    reward = jr.rewards.last_integer if recipe == "sft" else None
    config = of_pairs(tmp_path / "run", str(path), recipe=recipe, reward=reward)
    train, held_out, digest = load_prompts(config)
    assert (len(train), len(held_out)) == (16, 4)
    name = "demonstration" if recipe == "sft" else "chosen"
    write_rows(path, (row | {name: "other"} for row in rows))
    assert load_prompts(config)[2] != digest


LIMITED = """
import dataclasses
import jaxrl_llm as jr
from jaxrl_llm.train import DataConfig, EvaluationConfig
from tiny_run import CONFIG
rows = {path!r}
data = DataConfig(prompts=rows, evaluation=rows, held_out=0, chat=False)
config = dataclasses.replace(
    CONFIG, data=data, recipe="sft", reward=jr.rewards.last_integer, evaluation=EvaluationConfig())
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:data. 12 of the 12 evaluation prompts")
def test_an_evaluation_counts_the_questions_of_its_rows(tmp_path, capsys):
    """Three rows for each of four prompts, one prompt after the other three times."""
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"q{n % 4}", "answer": "1", "demonstration": f"{n}"} for n in range(12)]
    write_rows(path, rows)
    file = tmp_path / "config.py"
    file.write_text(LIMITED.format(path=str(path)))
    for limit, questions in (["--limit", "2"], 2), ([], 4):
        assert main(["evaluate", str(file), *limit]) == 0
        assert capsys.readouterr().out.startswith(f"{questions} held-out questions, mean reward")
    config = load_config(file)
    config = dataclasses.replace(config, evaluation=EvaluationConfig(limit=2))
    assert [x.content for x in load_prompts(config)[1]] == ["q0", "q1"] * 3
    experiment, params = load_experiment(config)
    results, samples = experiment.evaluate(params, jax.random.key(0))
    assert [x.questions for x in results.values()] == [2, 2]
    assert [row["prompt"] for row in samples] == ["q0", "q1"]
    # With stored scores, only the evaluation has the limit.
    experiment = dataclasses.replace(experiment, unlimited=experiment.train)
    assert [x.prompt.content for x in experiment.held_out] == ["q0", "q1"] * 3


def test_the_seed_of_the_data_orders_rows(tmp_path, pairs):
    orders = []
    for seed in (0, 1, 1):
        data = DataConfig(prompts=pairs, chat=False, held_out=0, seed=seed)
        config = of_pairs(
            tmp_path / "run", pairs, data=data, evaluation=EvaluationConfig(enabled=False)
        )
        experiment, params = load_experiment(config)
        orders.append(first_batch(experiment, params).batch.tokens.tolist())
    assert orders[1] == orders[2] != orders[0]


def test_held_out_rows_have_examples_of_the_training_rows(tmp_path):
    """By users with five rows each, of which at most a few are held out."""
    path = tmp_path / "users.jsonl"
    rows = [{"prompt": f"q{n}", "chosen": "a", "rejected": "B", "user": n % 4} for n in range(20)]
    write_rows(path, rows)
    config = of_pairs(tmp_path / "run", str(path), recipe=jr.recipes.fspo(shots=2))
    experiment, _ = load_experiment(config)
    assert len(experiment.held_out) == 4
    seen = set()
    for places, batch, *_ in experiment.offline_batches(experiment.held_out, experiment.train):
        for place, tokens in zip(places, batch.prompt_tokens, strict=True):
            text = bytes(x for x in tokens.tolist() if x < 256).decode()
            assert text.count("Preferred answer") == 2 and place < 4
            seen.add(place)
    assert seen == {0, 1, 2, 3}


def prompts_of_an_evaluation(experiment, params):
    """The messages that the greedy sampler gets."""

    class Asked(Exception):
        pass

    def sample(params, key, prompts):
        raise Asked([bytes(x for x in tokens if x < 256).decode() for tokens in prompts])

    samplers = experiment.samplers._replace(greedy=sample, sampled=sample)
    experiment = dataclasses.replace(experiment, samplers=samplers)
    with pytest.raises(Asked) as asked:
        experiment.evaluate(params, jax.random.key(0))
    return asked.value.args[0]


def test_answers_are_evaluated_after_the_examples_of_each_user(tmp_path):
    """Two users ask the same questions, and each has another answer to them."""
    path = tmp_path / "users.jsonl"
    rows = [
        {"prompt": f"q{n // 2}", "chosen": "ab"[n % 2], "rejected": "C", "user": n % 2}
        for n in range(20)
    ]
    write_rows(path, rows)
    recipe, off = jr.recipes.fspo(shots=2), EvaluationConfig(enabled=False)
    config = of_pairs(tmp_path / "run", str(path), recipe=recipe, reward=low_bytes)
    experiment, params = load_experiment(config)
    texts = prompts_of_an_evaluation(experiment, params)
    asked = sorted((text.splitlines()[-1], text.count("answer: a")) for text in texts)
    held_out = sorted({f"Question: {x.prompt.content}" for x in experiment.held_out})
    assert asked == [(question, count) for question in held_out for count in (0, 2)]
    assert all(text.count("Preferred answer") == 2 for text in texts)
    # Among prompts without examples an evaluation has none.
    mixed = jr.curation.mixed((recipe.collector, 0.5), (jr.curation.in_order(), 0.5))
    config = dataclasses.replace(config, recipe=recipe.replace(collector=mixed))
    with pytest.warns(UserWarning, match="evaluation: its prompts lack what few_shot_pairs"):
        load_experiment(config)
    load_experiment(dataclasses.replace(config, evaluation=off))


def test_the_classes_of_a_head_end_no_response(tmp_path, pairs):
    recipe = jr.recipes.spo_degree(classes=(9, 257, 8))
    with pytest.raises(ValueError, match=r"config: classes=\(9, 257, 8\) of recipe 'spo_degree'"):
        load_experiment(of_pairs(tmp_path / "run", pairs, recipe=recipe))
    # As in SmolLM2, Gemma and OLMo, the first ids end a response.
    tokenizer = ByteTokenizer()
    tokenizer.eos_ids = (2, 1, 0)
    encoder = TextEncoder(tokenizer, 9, chat=False)
    check_classes(recipe := jr.recipes.spo_degree(), encoder)
    with pytest.raises(ValueError, match=r"holds \[0, 2\], at which a response ends"):
        check_classes(jr.recipes.spo_degree(classes=(0, 2, 5)), encoder)
    head = Computed("degree_logits", jr.preferences.degree_logits, "policy")
    tokenizer.eos_ids = (6,)
    with pytest.raises(ValueError, match=r"holds \[6\], at which a response ends"):
        check_classes(recipe.replace(computed=(head,)), TextEncoder(tokenizer, 9, chat=False))


def test_a_new_pair_keeps_what_describes_its_prompt():
    metadata = {"margin": 3.0, "density": 1.0, "level": 2, "chosen": "a", "rejected": "b"}
    messages = [{"role": "user", "content": "q"}]
    want = {"id": "p", "prompt": messages, "level": 2, "answer": "7"}
    found = pair_row(Prompt("q", "7", metadata, "p", messages), "c", "d")
    assert found == want | {"chosen": "c", "rejected": "d"}


@pytest.mark.slow
def test_a_run_needs_no_reward_and_is_resumed_exactly(tmp_path, pairs, monkeypatch):
    scores = []

    class Watched(Checkpoints):
        def set_score(self, step, values):
            scores.append(values.get("pairs"))
            super().set_score(step, values)

    def config(best):
        changes = {"checkpoint": CheckpointConfig(every=2, keep=2, best=best), "steps": 4}
        return of_pairs(tmp_path / "run", pairs, evaluation=EvaluationConfig(every=2), **changes)

    with pytest.raises(ValueError, match="best='greedy' is not measured by the evaluation of this"):
        config("greedy")
    monkeypatch.setattr("jaxrl_llm.train.experiment.setup.Checkpoints", Watched)
    through = train(config("pairs"))
    assert through.before["pairs"].mean == 0.5
    assert through.after["pairs"].mean > 0.5 and set(through.after) == {"pairs"}
    # All rows of a text are on one side, and one question of the interval.
    assert (through.after["pairs"].questions, through.after["pairs"].samples) == (2, 2)
    steps = [row for row in through.history if "loss" in row]
    np.testing.assert_allclose(steps[0]["loss"], np.log(2), rtol=1e-5)
    assert steps[0]["pair_margin"] == 0.0 < steps[-1]["pair_margin"]
    assert all(row["pairs"] == 4 and row["rollouts_sampled"] == 0 for row in steps)
    assert "sampler_gap" not in steps[0]
    # A checkpoint is never scored by the number of pairs of the step that it is saved after.
    assert [x for x in scores if x is not None] and all(x is None or x <= 1 for x in scores)
    assert_resumes(config("pairs"), through, tmp_path / "again", first=2)


@pytest.mark.slow
def test_the_command_evaluates_pairs(tmp_path, pairs, capsys, monkeypatch):
    config = tmp_path / "config.py"
    config.write_text(
        "from jaxrl_llm.train import *\nfrom tiny_run import model\nRECIPE = 'dpo'\n"
        f"config = TrainConfig(model=model, data=DataConfig(prompts={pairs!r}, chat=False),"
        " recipe=RECIPE, steps=2, prompts_per_step=4, remat='none',"
        f" sampling=SamplingConfig(max_new_tokens=4), run_dir={str(tmp_path / 'run')!r})\n"
    )
    assert main(["train", str(config)]) == 0
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    trained = [row for row in rows if "held_out" in row][-1]["held_out"]["pairs"]["mean"]
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"]["mean"] == trained
    assert main(["evaluate", str(tmp_path / "run"), "--samples", "2"]) == 2
    assert "--samples, --k and --seed have no effect" in capsys.readouterr().err
    text = config.read_text()
    moving = "import jaxrl_llm as jr\nRECIPE = jr.recipes.dpo().replace(reference=jr.bind("
    moving += "jr.regularizers.reset_reference, every=3))\n"
    config.write_text(text.replace("RECIPE = 'dpo'\n", moving))
    assert main(["train", str(config), "--run-dir", str(tmp_path / "moving")]) == 0
    with monkeypatch.context() as patch:  # it loads nothing
        patch.setattr("jaxrl_llm.cli.evaluate.load_experiment", None)
        assert main(["evaluate", str(tmp_path / "moving")]) == 2
    assert "error: the reference of recipe 'dpo' moves" in capsys.readouterr().err
    graded = moving + "def reward(prompt, completion, metadata):\n    return len(completion)\n"
    text = text.replace(" recipe=RECIPE", " reward=reward, recipe=RECIPE")
    config.write_text(text.replace("RECIPE = 'dpo'\n", graded))
    assert main(["train", str(config), "--run-dir", str(tmp_path / "graded")]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "graded"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert set(json.loads(out)) == {"greedy", "sampled"}
    assert "the reference of recipe 'dpo' moves" in err
    with open(pairs, "a") as file:  # other questions may be split otherwise
        file.write(json.dumps(ROWS[0] | {"prompt": "new"}) + "\n")
    assert main(["evaluate", str(tmp_path / "run")]) == 2
    assert "was made with other questions, or another split" in capsys.readouterr().err


def denoiser_of_pairs(run_dir, path, *, mask_id=259):
    """An experiment by VRPO whose training rows are compared too."""

    def model():
        sizes = {"num_layers": 1, "causal": False, "vocab_size": 260, "mask_id": mask_id}
        return *jr.testing.tiny_model(**sizes), jr.testing.ByteTokenizer()

    recipe = jr.recipes.dpo().replace(likelihood=jr.diffusion.elbo_likelihood(samples=2))
    sampling, off = SamplingConfig(max_new_tokens=5), EvaluationConfig(enabled=False)
    options = {"model": model, "recipe": recipe, "sampling": sampling, "evaluation": off}
    experiment, params = load_experiment(of_pairs(run_dir, path, **options))
    return dataclasses.replace(experiment, unlimited=experiment.train), params


@pytest.mark.slow
def test_pairs_are_ranked_by_the_likelihood_of_a_denoiser(tmp_path, pairs):
    """On masks that are the same for policy and reference, and in every evaluation."""
    experiment, params = denoiser_of_pairs(tmp_path / "run", pairs)
    batches = []

    def watched(score):
        return lambda batch: batches.append(batch) or score(batch)

    assert evaluate_pairs(experiment, watched(make_score(experiment, params, params))).mean == 0.5
    moved = jax.tree.map(lambda x: 1.5 * x, params)
    score = make_score(experiment, moved, params)
    results = [evaluate_pairs(experiment, watched(score)) for _ in range(2)]
    assert results[0] == results[1] and results[0].mean != 0.5
    count = len(batches) // 3
    for first, again in zip(batches[:count], batches[count:], strict=False):
        jax.tree.map(np.testing.assert_array_equal, first.extras, again.extras)
    assert (batches[0].extras["masked"] != batches[1].extras["masked"]).any()
    # As many cells as a sampled response has, and of each response its sum of estimates.
    assert all(batch.tokens.shape == (4, 2, 5) for batch in batches)
    scorer = jax.jit(scorer_of(experiment.recipe, experiment.model))
    of_policy, of_reference = (scorer(x, batches[0]).logp.sum(-1) for x in (moved, params))
    np.testing.assert_allclose(score(batches[0]).scores, of_policy - of_reference, atol=1e-4)


def test_masks_are_those_of_the_number_of_a_batch(tmp_path, pairs):
    experiment, _ = denoiser_of_pairs(tmp_path / "run", pairs)
    rows = next(experiment.offline_batches(experiment.train))
    first, again, second = (_masked(experiment, rows, n).extras["masked"] for n in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != second).any()


def watched_slices(monkeypatch):
    """The slices of each batch of data that a program is compiled for, and the cells of one."""
    seen = []

    def watched(function, batch, slices):
        cells = batch.prompt_tokens.size + batch.tokens.size
        cells = cells if batch.packing is None else batch.packing.num_cells
        seen.append((slices, cells / slices))
        return map_microbatches(function, batch, slices)

    monkeypatch.setattr("jaxrl_llm.train.experiment.pairs.map_microbatches", watched)
    return seen


@pytest.mark.slow
def test_pairs_are_ranked_within_a_budget_of_cells(tmp_path, pairs, monkeypatch):
    config = of_pairs(tmp_path / "run", pairs, tokens_per_microbatch=64)
    experiment, params = load_experiment(config)
    moved = jax.tree.map(lambda x: 1.5 * x, params)
    batch = next(experiment.offline_batches(experiment.held_out)).batch
    plain = dataclasses.replace(config, tokens_per_microbatch=None)
    plain = dataclasses.replace(experiment, config=plain)
    seen = watched_slices(monkeypatch)
    want, got = (make_score(x, moved, params)(batch) for x in (plain, experiment))
    np.testing.assert_allclose(got.scores, want.scores, atol=1e-4)
    assert np.ptp(want.scores) > 0.1
    assert seen[0][0] == 1 < seen[1][0] and seen[0][1] > 64 >= seen[1][1]


def test_what_does_not_fit_is_told_before_the_first_step(tmp_path, pairs):
    # A demonstration that is too long is found before the run if it trains.
    path = tmp_path / "rows.jsonl"
    row = {"prompt": "q", "demonstration": ["ab", "abcdefgh"]}
    path.write_text("".join(json.dumps(row | {"prompt": f"q{n}"}) + "\n" for n in range(9)))
    options = {"sampling": SamplingConfig(group_size=2, max_new_tokens=4), "reward": low_bytes}
    one = jr.recipes.grpo().replace(collector=jr.curation.demonstrations(count=1))
    load_experiment(of_pairs(tmp_path / "one", str(path), recipe=one, **options))
    failed = jr.curation.demonstrations(count=2, when="failed")
    two = jr.recipes.grpo().replace(collector=failed)
    with pytest.raises(ValueError, match="has 9 tokens, but sampling.max_new_tokens is 4"):
        load_experiment(of_pairs(tmp_path / "two", str(path), recipe=two, **options))

    # Held-out rows are checked before the model is loaded.
    def never():
        raise AssertionError("the model is loaded")

    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": "h0", "chosen": "a", "rejected": "a"}) + "\n")
    data = DataConfig(prompts=pairs, evaluation=str(held_out), held_out=0.0, chat=False)
    with pytest.raises(ValueError, match="of prompt 'held_out.jsonl:0' are equal"):
        load_experiment(of_pairs(tmp_path / "run", pairs, data=data, model=never))

    # A held-out prompt beyond the budget is refused at the start.
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps(ROWS[0] | {"prompt": "x" * 100}) + "\n")
    data = DataConfig(prompts=pairs, evaluation=str(path), held_out=0.0, chat=False)
    config = of_pairs(tmp_path / "run", "", data=data, tokens_per_microbatch=64)
    with pytest.raises(ValueError, match=r"tokens_per_microbatch must be at least .* prompt of 1"):
        load_experiment(config)

    # Held-out responses of a denoiser do not hold its mask id.
    experiment, _ = denoiser_of_pairs(tmp_path / "run", pairs, mask_id=ord("X"))
    message = f"a response to prompt 'pairs.jsonl:.*' holds the mask id {ord('X')}"
    with pytest.raises(ValueError, match=message):
        evaluate_pairs(experiment, lambda batch: None)


@pytest.mark.slow
@for_each("moves", [False, True])
def test_an_evaluation_reads_no_field_of_training_alone(tmp_path, pairs, moves):
    """Rows held out need none, and rows that training leaves out are compared."""

    def clear(rewards, *, where, margin):
        return where & (margin > 0)[:, None]

    path = tmp_path / "margins.jsonl"
    write_rows(path, (row | {"margin": 1.0} for row in ROWS))
    recipe = jr.recipes.dpo().replace(curation=jr.stateless(clear))
    if moves:
        reset = jr.bind(jr.regularizers.reset_reference, every=3)
        recipe = recipe.replace(reference=reset)
    data = DataConfig(prompts=str(path), evaluation=pairs, held_out=0.0, chat=False)
    config = of_pairs(tmp_path / f"run_{moves}", "", recipe=recipe, data=data, steps=2)
    with pytest.warns(UserWarning, match="20 of the 20 evaluation prompts are also trained on"):
        result = train(config)
        experiment, params = load_experiment(config)
    assert result.before["pairs"].mean == 0.5
    score = make_score(experiment, result.state.policy, params)
    assert result.after["pairs"] == evaluate_pairs(experiment, score)


def text_of(tokens, mask):
    return bytes(tokens[mask].tolist()).decode()


def test_batches_are_those_of_the_data(tmp_path, pairs):
    config = of_pairs(tmp_path / "run", pairs, evaluation=EvaluationConfig(enabled=False))
    experiment, params = load_experiment(config)
    state, seen = experiment.collector.init(len(experiment.train)), []
    start = experiment, params, jax.random.key(0), jr.data.Cursor()
    for number in range(5):
        rollouts = collect_rollouts(*start, state, number=number, version=0)
        state, batch = rollouts.collector_state, rollouts.batch
        assert batch.rewards.tolist() == [[1.0, 0.0]] * 4
        assert batch.behavior_logp is None and "behavior_known" not in batch.extras
        kept = batch.mask & (batch.tokens < 128)
        for p in range(4):
            prompt = text_of(batch.prompt_tokens[p], batch.prompt_mask[p])
            seen.append((prompt, *map(text_of, batch.tokens[p], kept[p])))
    # Each row once an epoch, all those of a text among them.
    assert sorted(seen) == sorted(tuple(row.values()) for row in ROWS)


@for_each(
    "changes, message",
    [
        ({"recipe": "dr_grpo"}, "got None. The data give no rewards to recipe 'dr_grpo'; set"),
        ({"data": DataConfig(prompts=lambda: PromptSet(map(Prompt, "ab")))}, "has no 'chosen'"),
        (
            {"sampling": SamplingConfig(max_new_tokens=2)},
            r"data: a response to prompt .* has 3 tok",
        ),
    ],
)
def test_what_a_run_on_pairs_cannot_use_is_named(tmp_path, pairs, changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        load_experiment(of_pairs(tmp_path / "run", pairs, **changes))


@pytest.mark.slow
def test_degraded_copies_train_a_head_beside_the_pairs(tmp_path):
    rows = [{"prompt": f"q{n}", "chosen": "abcdefg", "rejected": "XYZ"} for n in range(10)]
    path = write_rows(tmp_path / "long.jsonl", rows)
    sampling, off = SamplingConfig(max_new_tokens=8), EvaluationConfig(enabled=False)
    changes = {"recipe": "spo_degree", "sampling": sampling, "evaluation": off, "steps": 2}
    history = train(of_pairs(tmp_path / "run", path, **changes)).history
    # The policy is its reference, and of four degrees the head knows little; then both learn.
    assert np.log(2) + 0.1 < history[0]["loss"] < np.log(2) + 0.2
    assert history[1]["loss"] < history[0]["loss"]
    # Of chosen and rejected responses alone, though a group has five.
    assert [row["pairs"] for row in history] == [4.0, 4.0]


@pytest.mark.slow
def test_a_run_reads_margins_of_its_rows(tmp_path, pairs):
    def loss(name, margin):
        path = write_rows(tmp_path / f"{name}.jsonl", (row | margin for row in ROWS))
        changes = {"recipe": jr.recipes.dpo(margins=True), "steps": 1}
        changes["evaluation"] = EvaluationConfig(enabled=False)
        return train(of_pairs(tmp_path / name, path, **changes)).history[0]["loss"]

    expected = np.logaddexp(0.0, 2.0)  # of a policy that is its reference
    np.testing.assert_allclose(loss("two", {"margin": 2.0}), expected, rtol=1e-5)
    with pytest.raises(ValueError, match=r"needs 'margin' .* has none in its metadata"):
        loss("none", {})


@pytest.mark.slow
def test_demonstrations_train_in_several_steps_ahead_of_the_weights(tmp_path):
    """A likelihood of the data depends neither on the weights before a batch nor on their age."""
    rows = [Prompt(f"q{n}", id=f"{n}", metadata={"demonstration": "ab"[n % 2]}) for n in range(8)]

    def losses(name, **changes):
        options = {"recipe": "sft", "steps": 4, "evaluation": EvaluationConfig(enabled=False)}
        data = DataConfig(prompts=lambda: PromptSet(rows, source="test"), chat=False, held_out=0)
        sampling = SamplingConfig(group_size=1, max_new_tokens=2)
        options |= {"data": data, "sampling": sampling, "minibatches": 2}
        return [
            row["loss"] for row in train(of_pairs(tmp_path / name, "", **options | changes)).history
        ]

    turns = losses("turns")
    assert turns[-1] < turns[0]
    ahead = losses("ahead", asynchrony=AsyncConfig(max_staleness=1))
    np.testing.assert_allclose(ahead, turns, rtol=1e-5)


@pytest.mark.slow
def test_single_responses_are_not_compared(tmp_path, pairs):
    rows = [{"prompt": f"q{n}", "completion": "ab"[n % 2], "label": n % 2 == 0} for n in range(10)]
    labels = write_rows(tmp_path / "labels.jsonl", rows)
    recipe = jr.recipes.kto().replace(collector=jr.curation.offline_labels())
    changes = {"recipe": recipe, "data": DataConfig(prompts=labels, chat=False)}
    with pytest.raises(ValueError, match=r"offline_labels\(\) has one response a row, so there"):
        of_pairs(tmp_path / "run", labels, **changes)
    graded = of_pairs(tmp_path / "run", labels, **changes, steps=1, reward=lambda *args: 1.0)
    assert set(train(graded).after) == {"greedy", "sampled"}
    # Prompts that none of the good responses has count less.
    off = {"steps": 1, "evaluation": EvaluationConfig(enabled=False)}
    bco = jr.recipes.bco(density=True).replace(collector=jr.curation.offline_labels())
    rows = jr.bind(jr.data.from_file, path=labels, needs_answer=False)

    def weighed(prompts):
        data = DataConfig(prompts=prompts, chat=False)
        return of_pairs(tmp_path / "weighed", labels, recipe=bco, data=data, **off)

    with pytest.raises(ValueError, match="needs 'density' .* has none in its metadata"):
        load_experiment(weighed(rows))
    densities = weighed(lambda: jr.data.with_density(rows()))
    assert 0 < train(densities).history[0]["loss"] < np.log(2) - 1e-3
