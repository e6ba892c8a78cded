"""A reference's log-probabilities of the data in a file: the same run, without the reference."""

import dataclasses
import unicodedata
from pathlib import Path

import jax
import numpy as np
import pytest
from batch_makers import write_rows
from rows import for_each
from test_checkpoint import assert_same
from test_pairs import ROWS, of_pairs, watched_slices
from tiny_run import model

import jaxrl_llm as jr
from jaxrl_llm.data import Prompt
from jaxrl_llm.data.questions import Question, TextEncoder
from jaxrl_llm.rollout.collect import Limits
from jaxrl_llm.testing import ByteTokenizer
from jaxrl_llm.train import DataConfig, EvaluationConfig, SamplingConfig, train
from jaxrl_llm.train.data.offline import offline_batches
from jaxrl_llm.train.experiment.pairs import evaluate_pairs
from jaxrl_llm.train.experiment.setup import init_experiment, load_experiment
from jaxrl_llm.train.metrics import scored_items

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path / "pairs.jsonl", ROWS)


def half():
    """A reference apart from the policy, so that its numbers matter at the first step."""
    module, params, tokenizer = model()
    return module, jax.tree.map(lambda x: 0.75 * x, params), tokenizer


def losses(result):
    return [row["loss"] for row in result.history if "loss" in row]


@pytest.mark.slow
def test_a_run_with_stored_numbers_is_the_run_without(tmp_path, rows):
    path = tmp_path / "refs" / "dpo.npz"

    def run(name, resume=False, **changes):
        changes = {"steps": 2, "reference": half, "reference_logp": str(path)} | changes
        return train(of_pairs(tmp_path / name, rows, **changes), resume=resume)

    plain = run("plain", reference_logp=None)
    first = run("first")
    made = path.stat().st_mtime_ns
    np.testing.assert_allclose(losses(first), losses(plain), rtol=1e-5)
    assert abs(losses(plain)[0] - np.log(2)) > 1e-3
    for way in ("before", "after"):
        assert getattr(first, way)["pairs"] == getattr(plain, way)["pairs"]
    # Read by another run, which is resumed, and by one of another order, split and batch.
    run("part", steps=1)
    assert_same(run("part", resume=True).state, first.state)
    data = DataConfig(prompts=rows, chat=False, seed=3, held_out=0.4)
    other = of_pairs(tmp_path, rows, data=data, prompts_per_step=2, reference=half)
    other = dataclasses.replace(other, reference_logp=str(path))
    init_experiment(other, tmp_path / "other", resume=False)
    assert path.stat().st_mtime_ns == made


@pytest.mark.slow
def test_paths_may_begin_in_the_home_folder(tmp_path, monkeypatch, rows):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    off = EvaluationConfig(enabled=False)
    config = of_pairs("~/run", "~/pairs.jsonl", reference_logp="~/refs.npz", evaluation=off)
    assert train(dataclasses.replace(config, steps=1)).run_dir == tmp_path / "run"
    assert {"run", "refs.npz"} < {x.name for x in tmp_path.iterdir()} and not Path("~").exists()
    again = dataclasses.replace(config, steps=1, run_dir="~/next", init_from="~/run")
    again = dataclasses.replace(again, reference_logp=None)
    assert train(again).run_dir == tmp_path / "next"
    with pytest.raises(ValueError, match="init_from '~/run' must be another run than run_dir"):
        dataclasses.replace(again, run_dir=str(tmp_path / "run"))


def test_neither_a_step_nor_memory_has_the_reference(tmp_path, rows):
    config = of_pairs(tmp_path / "run", rows, reference_logp=str(tmp_path / "refs.npz"))
    experiment, algorithm, _, _ = init_experiment(config, tmp_path / "a", resume=False)
    batch = next(experiment.offline_batches(experiment.train)).batch
    stored = experiment.references.attach(batch)
    np.testing.assert_array_equal(algorithm.score(stored)[0].ref_logp, stored.ref_logp)
    assert algorithm.score(batch)[0].ref_logp is None  # nothing computes it any more
    # KTO compares with responses after other prompts of the batch: for these the reference stays.
    kto = dataclasses.replace(config, recipe="kto")
    _, algorithm, _, _ = init_experiment(kto, tmp_path / "b", resume=False)
    plain = dataclasses.replace(kto, reference_logp=None)
    _, plain, _, _ = init_experiment(plain, tmp_path / "c", resume=False)
    scored, expected = algorithm.score(stored)[0], plain.score(batch)[0]
    np.testing.assert_array_equal(scored.ref_logp, stored.ref_logp)
    np.testing.assert_allclose(scored.ref_logp, expected.ref_logp, atol=1e-5)
    key = "kl_ref_logp"
    np.testing.assert_allclose(scored.extras[key], expected.extras[key], rtol=1e-5)


@pytest.mark.slow
def test_all_parts_of_a_mixture_are_scored_and_evaluated(tmp_path):
    path, texts = tmp_path / "rows.jsonl", {"chosen": "a", "rejected": "b"}
    texts |= {"better": "d", "worse": "c"}
    write_rows(path, ({"prompt": f"q{n}", **texts} for n in range(6)))
    others = jr.curation.offline_pairs(chosen="better", rejected="worse")
    both = jr.curation.mixed((jr.curation.offline_pairs(), 0.5), (others, 0.5))
    recipe, off = jr.recipes.dpo().replace(collector=both), EvaluationConfig(enabled=False)
    config = of_pairs(tmp_path / "run", str(path), recipe=recipe, steps=1, evaluation=off)
    stored = dataclasses.replace(config, reference_logp=str(tmp_path / "refs.npz"))
    np.testing.assert_allclose(losses(train(stored)), [np.log(2)], rtol=1e-5)
    experiment, _ = load_experiment(config)
    experiment = dataclasses.replace(experiment, unlimited=experiment.train)

    def by_letters(batch):
        """The earlier letter is likelier: right for the first pair of a row, not the second."""
        return scored_items(recipe, -1.0 * batch.tokens, None, batch)

    assert evaluate_pairs(experiment, by_letters).mean == 0.5


def test_the_data_are_scored_within_a_budget_of_cells(tmp_path, rows, monkeypatch):
    seen, values = watched_slices(monkeypatch), []
    for budget in (None, 64):
        path, off = tmp_path / f"{budget}.npz", EvaluationConfig(enabled=False)
        config = of_pairs(tmp_path / "run", rows, reference_logp=str(path), evaluation=off)
        config = dataclasses.replace(config, tokens_per_microbatch=budget)
        experiment = init_experiment(config, tmp_path / f"{budget}", resume=False)[0]
        every = (x.batch for x in experiment.offline_batches(experiment.train))
        values.append(np.stack([experiment.references.attach(x).ref_logp for x in every]))
    np.testing.assert_allclose(values[1], values[0], atol=1e-5)
    (first, *others), cells = zip(*seen, strict=True)
    assert first == 1 and min(others) > 1 and cells[0] > 64 >= max(cells[1:])


def test_a_file_of_another_model_or_data_is_refused(tmp_path, rows):
    path, other = tmp_path / "refs.npz", tmp_path / "other.jsonl"

    def config(**changes):
        changes = {"reference_logp": str(path), "steps": 1} | changes
        return of_pairs(tmp_path / "run", rows, **changes)

    def refused(words, **changes):
        with pytest.raises(ValueError, match=words):
            init_experiment(config(**changes), tmp_path / "ckpt", resume=False)

    train(config(evaluation=EvaluationConfig(enabled=False)))
    refused("refs.npz' was made with another reference model: ", reference=half)
    sampling = SamplingConfig(max_new_tokens=4, temperature=0.5)
    refused("was made with another temperature: 1.0, but this run has 0.5", sampling=sampling)
    write_rows(other, [{**ROWS[0], "prompt": "new", "id": "x"}, *ROWS])
    data = DataConfig(prompts=str(other), chat=False)
    refused("was made from other data: it lacks 2 of the responses of this run", data=data)

    def another_tokenizer():
        class Doubled(ByteTokenizer):
            def encode(self, text, **options):
                return super().encode(text, **options) * 2

        return *model()[:2], Doubled()

    sampling = SamplingConfig(max_new_tokens=8)
    refused("same rows, tokenizer and chat template", model=another_tokenizer, sampling=sampling)
    path.write_bytes(path.read_bytes()[:100])
    refused("is not a file of log-probabilities .*; name another one")


def test_a_file_has_all_held_out_rows_whatever_the_limit(tmp_path, rows):
    path = tmp_path / "refs.npz"

    def begin(name, limit):
        config = of_pairs(tmp_path, rows, reference_logp=str(path))
        evaluation = EvaluationConfig(limit=limit)
        config = dataclasses.replace(config, evaluation=evaluation)
        return init_experiment(config, tmp_path / name, resume=False)[0]

    # The two rows of one question, of two.
    (first, second) = begin("limited", 1).held_out
    assert first.prompt.content == second.prompt.content
    made = path.stat().st_mtime_ns
    assert len(begin("all", None).held_out) == 4
    assert path.stat().st_mtime_ns == made


def graded(prompt, completion, metadata):
    return float(len(completion))


@for_each(
    "changes, words",
    [
        ({"recipe": "simpo"}, "no effect: recipe 'simpo' reads none"),
        ({"recipe": "grpo", "reward": graded}, "no effect: recipe 'grpo' samples its responses"),
        ({"recipe": "eggroll", "reward": graded, "remat": "full"}, "recipe 'eggroll' reads none"),
        ({"recipe": "fspo"}, "prompts of recipe 'fspo' change with each batch"),
        ({"reference_logp": "refs"}, "reference_logp must end in .npz; got 'refs'"),
    ],
)
def test_where_it_has_no_effect(tmp_path, rows, changes, words):
    with pytest.raises(ValueError, match=words):
        of_pairs(tmp_path, rows, **{"reference_logp": "refs.npz"} | changes)


class Composed(ByteTokenizer):
    """Writes a letter and its accent as one character, as many tokenizers do."""

    def encode(self, text, *, allow_special=True):
        return super().encode(unicodedata.normalize("NFC", text), allow_special=allow_special)


def test_the_ends_of_steps_are_those_of_the_text_that_the_tokenizer_writes():
    tokenizer = Composed()
    steps = {"completions": ["cafe\u0301", "ok"], "labels": [1, 0]}
    [rows] = offline_batches(
        jr.curation.offline_steps(),
        [Question(Prompt("q", metadata=steps), [1, 2])],
        num_groups=1,
        group_size=1,
        limits=Limits(TextEncoder(tokenizer, 30, chat=False), 32, 259),
        pad_id=258,
    )
    text = tokenizer.decode(rows.batch.tokens[0, 0][rows.batch.mask[0, 0]].tolist())
    assert text == "caf\u00e9\n\nok"
    [ends] = rows.collected.scores.details["turn_ends"]
    assert np.asarray(ends).tolist() == [6, len(text)]
