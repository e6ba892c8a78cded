"""What a run writes: which completions, its settings, and what a resumed run may change."""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fresh import fresh
from rows import for_each
from tiny_run import CONFIG, low_bytes, tiny_run

import jaxrl_llm as jr
from jaxrl_llm import rewards as R
from jaxrl_llm.core import bind
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.rewards import _worker
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.train import (
    CheckpointConfig,
    Checkpoints,
    EvaluationConfig,
    LoRAConfig,
    OptimizerConfig,
    ReportConfig,
    accuracy,
    make_optimizer,
    train,
)
from jaxrl_llm.train.checkpoint.serialization import shapes_digest
from jaxrl_llm.train.data.grading import spread_rows
from jaxrl_llm.train.experiment.experiment import Experiment
from jaxrl_llm.train.logging import RunFolder, run_folder
from jaxrl_llm.train.logging.results import (
    JsonLines,
    damage_of,
    plot_reward,
    read_jsonl,
    samples_table,
    training_reward,
)
from jaxrl_llm.train.logging.settings import (
    changed_evaluation,
    changed_score,
    changed_settings,
    fixed_settings,
    recipe_settings,
    settings,
)
from jaxrl_llm.train.mesh import MeshConfig
from jaxrl_llm.train.models.teachers import AlignedTeacher, ServerTeacher

pytestmark = pytest.mark.usefixtures("shared_programs")


def parted(prompt, completion, metadata):
    right = low_bytes(prompt, completion, metadata)
    return {"reward": right + 1.0, "right": right, "polite": 1.0}


@for_each(
    "kind, rewards, what",
    [
        ("greedy", [[1.0], [0.0]], "Accuracy"),
        ("greedy", [[0.25], [0.75]], "Mean reward"),
        ("greedy", [[3.0], [-2.0]], "Mean reward"),
        ("pairs", [[1.0], [0.0]], "Share of pairs in the right order"),
    ],
)
def test_only_a_share_of_right_answers_is_called_accuracy(tmp_path, kind, rewards, what):
    lines = []
    with RunFolder(fresh(tmp_path), resume=False, log=lines.append) as folder:
        folder.start(0, {})
        folder.held_out(0, {kind: accuracy(np.array(rewards))}, [])
        assert folder.accuracy_at(0) == {kind: accuracy(np.array(rewards))}
    sentence = f"{what} on 2 held-out questions after step 0: {kind} 0.500 ["
    assert any(line.startswith(sentence) for line in lines)


def test_a_mean_without_an_interval_is_read_as_it_was_written(tmp_path):
    lines, found = [], {"greedy": accuracy(np.array([[5.0]]))}
    with RunFolder(tmp_path, resume=False, log=lines.append) as folder:
        folder.start(0, {})
        folder.held_out(0, found, [])
        assert folder.accuracy_at(0) == found
    assert any("greedy 5.000 [no interval]" in line for line in lines)


def test_a_run_that_begins_anew_keeps_no_command_of_another_one(tmp_path):
    command = {"config.py": "config = 1\n", "run.json": "{}\n"}

    def files():
        return {path.name for path in tmp_path.iterdir()} & set(command)

    with RunFolder(tmp_path, resume=False) as folder:
        folder.start(0, command)
    with RunFolder(tmp_path, resume=True) as folder:
        folder.start(2, {})  # goes on as it was
    assert files() == set(command)
    with RunFolder(tmp_path, resume=True) as folder:
        folder.start(2, {}, changed={"reward": ("a", "b")})
    assert not files()
    (tmp_path / "config.py").write_text("of the user\n")
    with RunFolder(tmp_path, resume=False, overwrite=True) as folder:
        folder.start(0, {})
    assert files() == {"config.py"}


def test_the_bar_says_why_the_first_step_takes_long(tmp_path):
    with RunFolder(tmp_path, resume=False, log=print) as folder, folder.progress(0, 2) as bar:
        assert str(bar).endswith(", compiling the first step]")
        bar.set_postfix_str("reward 1.000")  # as after a step
        assert "compiling" not in str(bar)


def test_what_does_not_decide_a_score_leaves_it():
    old = {"sampling.temperature": 1.0, "sampling.slots": 4, "reward": "a", "episodes.max_turns": 2}
    new = {"sampling.temperature": 0.5, "sampling.slots": 8, "reward": "b", "episodes.max_turns": 3}
    pairs = {name: (old[name], new[name]) for name in old}
    assert changed_score(old, new, "sampled") == pairs
    rounded = [{"sampling.quantization": mode} for mode in (None, "int8")]
    for metric in ("greedy", "sampled", "pairs", "reward"):
        assert bool(changed_score(*rounded, metric)) == (metric == "reward")
    assert set(changed_score(old, new, "greedy")) == {"reward", "episodes.max_turns"}
    assert set(changed_score(old, new, "pairs")) == {"sampling.temperature"}
    agents = ({**each, "recipe.subagent": "Subagent()"} for each in (old, new))
    assert "sampling.temperature" in changed_score(*agents, "greedy")


@for_each(
    "groups, count, expected",
    [
        (4, 0, []),
        (4, 1, ["a0"]),
        (4, 2, ["a0", "c0"]),
        (4, 4, ["a0", "b0", "c0", "d0"]),
        (4, 6, ["a0", "a1", "b0", "c0", "c1", "d0"]),
        (4, 99, ["a0", "a1", "b0", "b1", "c0", "c1", "d0", "d1"]),
        (1, 2, ["a0", "a1"]),
    ],
)
def test_completions_are_of_as_many_prompts_as_there_can_be(groups, count, expected):
    rows = [f"{name}{i}" for name in "abcd"[:groups] for i in range(2)]
    assert spread_rows(rows, groups, count) == expected


@pytest.mark.slow
def test_completions_of_every_second_step_with_the_parts_of_their_reward(tmp_path):
    options = {"steps": 4, "samples_every": 2, "samples_shown": 3, "reward": parted}
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=2, decay_steps=4)
    lines = []
    run = tiny_run(tmp_path, recipe=jr.recipes.grpo(kl_coef=0.1), optimizer=optimizer, **options)
    result = train(run, log=lines.append)
    rows = read_jsonl(tmp_path / "samples.jsonl")
    assert [row["step"] for row in rows] == [1, 1, 1, 3, 3, 3]
    for step in (1, 3):
        assert len({row["prompt"] for row in rows if row["step"] == step}) == 3
    for row in rows:
        assert row["reward/right"] == low_bytes(None, row["completion"], None)
        assert row["reward"] == 1.0 + row["reward/right"] and row["reward/polite"] == 1.0
    assert any(repr(rows[-1]["completion"])[1:-1] in line for line in lines)  # the last ones
    page = (tmp_path / "report.html").read_text()
    assert "right " in page and "polite 1" in page
    rates = [row["learning_rate"] for row in result.history]
    np.testing.assert_allclose(rates, [5e-3, 1e-2, 1e-2, 7.5e-3], rtol=1e-6)
    divergence = [row["ref_kl"] for row in result.history]
    assert divergence[0] == pytest.approx(0.0, abs=1e-6) and divergence[-1] > 1e-5


def test_settings_show_the_slots_of_a_recipe_and_where_it_differs_from_its_preset():
    config = tiny_run("unused")
    named = settings(config)
    assert named["recipe"] == "dr_grpo" and "recipe.changed_slots" not in named
    assert named["recipe.advantage"] == "stateless(dr_grpo)"
    preset = jr.recipes.dr_grpo(length=config.sampling.max_new_tokens)
    assert settings(dataclasses.replace(config, recipe=preset))["recipe.changed_slots"] == "none"
    changed = preset.replace(weights=jr.aggregate.token_mean)
    shown = settings(dataclasses.replace(config, recipe=changed))
    assert shown["recipe.changed_slots"] == "weights" and shown["recipe.weights"] == "token_mean"
    mine = settings(dataclasses.replace(config, recipe=changed.replace(name="mine")))
    assert mine["recipe"] == "mine" and "recipe.changed_slots" not in mine


@for_each(
    "changes, names",
    [
        ({"steps": 9, "run_dir": "other", "samples_shown": 1, "max_skipped": 1}, ()),
        ({"report": ReportConfig(peak_flops=1.0), "microbatches": 2}, ()),
        ({"prompts_per_step": 8, "seed": 3}, ("prompts_per_step", "seed")),
        ({"optimizer": OptimizerConfig(learning_rate=1e-3)}, ("optimizer.learning_rate",)),
        ({"reward": parted}, ("reward",)),
        ({"lora": LoRAConfig(rank=2)}, ("lora.rank",)),
        ({"critic": OptimizerConfig(), "recipe": "ppo_max"}, ("recipe", "critic.learning_rate")),
        ({"recipe": jr.recipes.dr_grpo(length=5)}, ("recipe.weights",)),
    ],
)
def test_which_settings_a_resumed_run_should_not_change(changes, names):
    config = tiny_run("run")
    old = settings(config)
    changed = changed_settings(old, settings(dataclasses.replace(config, **changes)))
    assert changed_settings(old, old) == {}
    assert set(names) <= set(changed) and (bool(names) or changed == {})


@for_each(
    "old, new, changed",
    [
        ("/a/models/small", "/b/small", False),
        ("rows.jsonl", "../data/rows.jsonl", False),
        ("/a/models/small", "/a/models/large", True),
        ("owner/small", "other/small", True),
        ("/a/small", None, True),
    ],
)
def test_a_file_may_be_moved_but_not_be_another_one(old, new, changed):
    for name in ("model", "data.prompts"):
        assert bool(changed_settings({name: old}, {name: new})) == changed
    assert changed_settings({"dtype": old}, {"dtype": new})


CENTER = "(Computed('center', Transform(...), 'controller'),)"


@for_each(
    "recipe, slot, old",
    [
        ("dr_grpo", "status", "experimental"),  # recipes had a status
        (
            jr.recipes.rloo(kl_coef=0.5),
            "advantage",
            "chain(stateless(_penalized(kl_coef=0.5)), stateless(rloo))",
        ),
        # Slots that compare equal since.
        (jr.recipes.verl_erank(gain=3.0), "advantage", "chain(stateless(grpo), Transform(...))"),
        (jr.recipes.bco(beta=0.2), "computed", CENTER),
    ],
)
def test_what_earlier_versions_wrote_otherwise_is_no_change(recipe, slot, old):
    now = recipe_settings(recipe, length=8)
    assert now.get(f"recipe.{slot}") != old
    earlier = now | {f"recipe.{slot}": old}
    if "Transform" in old:
        slots = now["recipe.changed_slots"].split(", ")
        slots.remove(slot)
        earlier["recipe.changed_slots"] = ", ".join(slots) or "none"
    assert changed_settings(earlier, now) == {}


@for_each(
    "name, old, new, changed",
    [
        ("recipe.surrogate", "f(is_clip=1)", "f(cap=1)", True),
        ("recipe.surrogate", "my_sdpo(is_clip=1)", "my_sdpo(cap=1)", True),
        ("recipe.surrogate", "sdpo(the_is_clip=1)", "sdpo(the_cap=1)", True),
        ("reward", "sdpo(is_clip=1)", "sdpo(cap=1)", True),
        ("recipe.surrogate", "sdpo(is_clip=1)", "sdpo(is_clip=1)", False),
        ("recipe.surrogate", "given(f(a=1), b='c')", "connect(f(a=1), b='c')", False),
        ("recipe.selection", "capo_selection(lr=1)", "capo_selection(learning_rate=1)", False),
        # Earlier versions wrote "Bound" for the name of a bound reward in a pool.
        ("reward", "Bound", "code_stdio", False),
        ("reward", "majority_vote(Bound)", "majority_vote(f)", False),
        ("reward", "majority_vote(Bound)", "f", True),
        ("reward", "f", "Bound", True),
        ("reward", "Boundary", "f", True),
    ],
)
def test_options_of_other_functions_keep_their_names(name, old, new, changed):
    assert bool(changed_settings({name: old}, {name: new})) == changed


@for_each(
    "recipe, slot, old",
    [
        ("sdpo", "surrogate", "sdpo(alpha=0.5, is_clip=2.0)"),
        (
            "srpo",
            "surrogate",
            "srpo(alpha=0.5, correct_at=1.0, eps_high=0.2, eps_low=0.2, is_clip=2.0)",
        ),
        (
            "dcpo_distribution",
            "advantage",
            "chain(stateless(grpo), stateless(dcpo_distribution(good_above=0.05, max_gap=0.1, "
            "target_entropy=0.5)))",
        ),
        ("rollout_gdro", "collector", ("threshold=0.5", "correct=0.5")),
        ("capo", "computed", ("learning_rate=None", "lr=None")),
    ],
)
def test_a_run_whose_options_had_other_names_resumes(recipe, slot, old):
    now, slot = recipe_settings(recipe, length=8), f"recipe.{slot}"
    old = now[slot].replace(*old) if isinstance(old, tuple) else old
    assert now[slot] != old
    assert changed_settings(now | {slot: old}, now) == {}
    pair = (old.replace("5", "7"), now[slot])  # another value is a change
    assert changed_settings(now | {slot: pair[0]}, now) == {slot: pair}


def test_changes_within_a_slot_are_noticed():
    # Options of a state are noticed.
    now = recipe_settings(jr.recipes.verl_erank(), length=8)
    changed = recipe_settings(jr.recipes.verl_erank(gain=3.0), length=8)
    assert list(changed_settings(now, changed)) == ["recipe.advantage", "recipe.changed_slots"]
    # Earlier versions wrote no more than that there is one.
    old = "chain(stateless(grpo), Transform(...))"
    assert changed_settings(now | {"recipe.advantage": old}, now) == {}
    old = "chain(stateless(rloo), Transform(...))"
    assert "recipe.advantage" in changed_settings(now | {"recipe.advantage": old}, now)

    # A function of ones own with the name of a preset is noticed.
    def rloo(rewards, *, where=None):
        return rewards

    rloo.__qualname__ = "rloo"
    preset = jr.recipes.rloo()
    own = preset.replace(advantage=jr.stateless(rloo))
    old, new = (recipe_settings(recipe, length=8) for recipe in (preset, own))
    assert old["recipe.advantage"] == new["recipe.advantage"]
    assert changed_settings(old, new) == {"recipe.changed_slots": ("none", "advantage")}


def within(prompt, completion, metadata, *, tol=0.0):
    return float(abs(float(completion) - metadata["answer"]) <= tol)


class Grader:
    def __init__(self, model):
        self.model = model

    def __call__(self, prompt, completion, metadata, *, tol=0.0):
        return 1.0

    def grade(self, prompt, completion, metadata):
        return 1.0


def rewards(folder):
    """Names of rewards, what makes them, and two options of which it makes other rewards."""
    lm, response, step = (str(folder / name) for name in ("lm", "response", "step"))
    close, far = bind(within, tol=1e-3), functools.partial(within, tol=1.0)
    graders = Grader("a"), Grader("b")
    partials = [functools.partial(x, tol=1.0) for x in graders]
    bound, methods = [bind(x, tol=1.0) for x in graders], [x.grade for x in graders]
    pool, total, train = R.VerifierPool, R.weighted_sum, jr.train
    near = {"near": (close, 0.5)}
    return [
        (f"judge({lm!r})", lambda x: train.judge(lm, **x), {}, {"compare": True}),
        (
            f"reward_model({response!r})",
            lambda x: train.reward_model(response, **x),
            {},
            {"chat": False},
        ),
        (
            f"reward_model({step!r})",
            lambda x: train.reward_model(step, **x),
            {},
            {"reduce": "product"},
        ),
        (
            "right + 0.5 near",
            lambda x: total({"right": (x, 1)} | near),
            R.last_integer,
            R.boxed_math,
        ),
        ("within", lambda x: total({"within": (x, 1)}), within, close),
        ("within", pool, close, far),
        ("within", R.math_verify_pool, close, far),
        ("Grader", pool, *graders),
        ("Grader", pool, *partials),
        ("Grader", pool, *bound),
        ("Grader.grade", lambda x: pool(bind(x)), *methods),
        ("Grader.grade", lambda x: x, *methods),
        (stable_repr(partials[0]), lambda x: x, *partials),
        ("right", lambda x: pool(total({"right": (x, 1.0)})), close, far),
        ("right", lambda x: total({"right": (x, 1.0)}), *bound),
        ("majority_vote(dapo_math)", lambda x: R.majority_vote(R.dapo_math, **x), {}, STRIPPED),
        ("majority_vote(within)", lambda x: R.majority_vote(x, **STRIPPED), close, far),
        (
            "reasoning_gym('chain_sum')",
            lambda x: R.reasoning_gym("chain_sum", **x),
            {},
            {"max_terms": 3},
        ),
    ]


STRIPPED = {"answer": str.strip}


def graded(prompt, completion, metadata, *, by):
    return 0.0


@pytest.mark.slow
def test_a_resumed_run_notices_other_options_of_its_reward(tmp_path, monkeypatch):
    monkeypatch.setenv(_worker.LOADING, "1")  # pools without workers
    model, params = tiny_model(num_layers=1)
    jr.models.save_safetensors(params, tmp_path / "lm", config=model.config)
    _, params = jr.models.with_head(model, params, key=jax.random.key(0))
    for head in ("response", "step"):
        jr.models.save_safetensors(params, tmp_path / head, config=model.config, head=head)
    for name, make, first, second in rewards(tmp_path):
        options = (first, copy.deepcopy(first), second)
        old, again, new = (settings(tiny_run("run", reward=make(x))) for x in options)
        assert old["reward"] == new["reward"] == name
        assert changed_settings(old, again) == {}
        assert set(changed_settings(old, new)) == {"reward"}, name
        for now in (old, new):  # an earlier version wrote names alone
            earlier = {k: value for k, value in now.items() if not k.endswith(".in_full")}
            assert earlier != now and changed_settings(earlier, now) == {}
    graders = [Grader(model) for model in "ab"]
    for bound in (graders, [grader.grade for grader in graders]):
        old, new = (settings(tiny_run("run", reward=bind(each))) for each in bound)
        assert set(changed_settings(old, new)) == {"reward.function"}
    for terms in (lambda each: each, lambda each: (each,)):
        old, new = (settings(tiny_run("run", reward=bind(graded, by=terms(x)))) for x in graders)
        assert set(changed_settings(old, new)) == {"reward.options"}


def test_a_resumed_run_notices_another_environment():
    environments = jr.environments
    tools = [environments.calculator, environments.python]
    first = environments.ToolEnv(tools[:1], R.last_integer)

    def of(environment):
        return settings(tiny_run("run", reward=None, environment=environment))

    for other in ((tools[:1], R.boxed_math), (tools, R.last_integer)):
        for wrap, name in ((lambda env: env, ""), (environments.Subgoals, ".env")):
            old, new = (of(wrap(env)) for env in (first, environments.ToolEnv(*other)))
            assert set(changed_settings(old, new)) == {f"environment{name}"}

    # And one of another class.
    class Other(jr.environments.NumberGuess):
        pass

    old, new = of(jr.environments.NumberGuess()), of(Other())
    assert set(changed_settings(old, new)) == {"environment"}
    assert set(changed_evaluation(old, new)) == {"environment"}
    earlier = {k: value for k, value in old.items() if k != "environment.in_full"}
    assert changed_settings(earlier, old) == {} == changed_evaluation(earlier, old)


def test_a_changed_reward_is_told_with_its_options():
    old = {"reward": "a", "reward.in_full": "a(x=1)"}
    new = {"reward": "a", "reward.in_full": "a(x=2)"}
    assert changed_settings(old, new) == {"reward": ("a(x=1)", "a(x=2)")}
    assert changed_settings({"reward": "b"}, new) == {"reward": ("b", "a")}
    assert changed_settings(old, {"reward": "b"}) == {"reward": ("a", "b")}
    assert changed_settings(new, {"reward": None}) == {"reward": ("a", None)}


@for_each("aligned", [False, True])
def test_a_resumed_run_notices_another_model_of_the_server_that_teaches(aligned):
    def shown(model):
        teacher = ServerTeacher("http://localhost:8000/", model=model)
        recipe = "span_distillation" if aligned else jr.recipes.gkd(top=2)
        teacher = AlignedTeacher(teacher, ByteTokenizer()) if aligned else teacher
        return settings(tiny_run("run", recipe=recipe, teacher=teacher))

    old, new = shown("A"), shown("B")
    name = "ServerTeacher('http://localhost:8000')"
    assert old["teacher"] == new["teacher"] == (f"AlignedTeacher({name})" if aligned else name)
    assert set(changed_settings(old, new)) == {"teacher"} == set(changed_settings(shown(None), new))
    assert changed_settings(new, shown("B")) == {}


def test_the_minibatches_of_a_recipe_are_those_of_its_mesh():
    """GSPO's four minibatches of two groups do not divide among four devices."""
    one = tiny_run("run", recipe="gspo", prompts_per_step=8)
    four = dataclasses.replace(one, mesh=MeshConfig(data=4))
    changed = changed_settings(settings(one), settings(four))
    assert changed == {"minibatches": (4, 2)}
    assert changed_settings(settings(one) | {"minibatches": None}, settings(four)) == {}
    given = settings(dataclasses.replace(one, minibatches=4))
    assert changed_settings(settings(one), given) == {}


@pytest.mark.slow
def test_a_run_is_resumed_with_other_settings_only_if_they_are_accepted(tmp_path):
    train(tiny_run(tmp_path, steps=1))
    with pytest.raises(
        ValueError, match=r"minibatches was 1, is 2\. .* \(--minibatches 1 if it was"
    ):
        train(tiny_run(tmp_path, steps=2, minibatches=2), resume=True)
    sampling = dataclasses.replace(CONFIG.sampling, group_size=4, temperature=0.5)
    changed = tiny_run(tmp_path, recipe="rloo", prompts_per_step=2, steps=2, sampling=sampling)
    before = (tmp_path / "sessions.jsonl").read_text()
    with pytest.raises(ValueError, match=r"^train: the run in '.*' had other settings: ") as error:
        train(changed, resume=True)
    for told in (
        "recipe was 'dr_grpo', is 'rloo'",
        "prompts_per_step was 4, is 2",
        "sampling.group_size was 2, is 4",
        "sampling.temperature was 1.0, is 0.5",
        ". Resume it with",
        "accept the changes (--allow-changed)",
    ):
        assert told in str(error.value)
    assert (tmp_path / "sessions.jsonl").read_text() == before
    assert int(train(changed, resume=True, allow_changed=True).state.step) == 2
    row = [row for row in read_jsonl(tmp_path / "sessions.jsonl") if row["event"] == "start"][-1]
    assert row["changed"]["sampling.group_size"] == [2, 4] and "steps" not in row["changed"]
    assert "sampling.group_size: 2 \u2192 4" in (tmp_path / "report.html").read_text("utf-8")
    # Now those are its settings, until they are lost; and damage is said where a run goes on.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    lines = []
    train(dataclasses.replace(changed, steps=3), resume=True, log=lines.append)
    told = "metrics.jsonl' is damaged at line 3, which is left out."
    assert any(line.endswith(told) for line in lines)
    (tmp_path / "sessions.jsonl").unlink()
    train(tiny_run(tmp_path, steps=4, prompts_per_step=2), resume=True, log=lines.append)
    assert any(line.startswith("No sessions.jsonl in ") for line in lines)


@for_each(
    "changes, evaluates, dropped",
    [
        ({"evaluation.limit": 1}, True, True),
        ({"evaluation.limit": 1}, False, False),  # at this step, which is no longer due
        ({"evaluation.samples": 2}, True, False),  # the group size
        ({"evaluation.every": 1}, True, False),
    ],
)
def test_only_an_evaluation_that_is_made_again_is_dropped(tmp_path, changes, evaluates, dropped):
    tmp_path = fresh(tmp_path)
    named = settings(tiny_run(tmp_path, evaluation=EvaluationConfig()))
    with RunFolder(tmp_path, resume=False) as folder:
        folder.start(0, {}, settings=named)
        for step in (0, 1):
            folder.held_out(step, {"greedy": accuracy(np.ones((2, 1)))}, [])
    with RunFolder(tmp_path, resume=True) as folder:
        folder.start(1, {}, settings=named | changes, evaluates=evaluates)
        assert folder.accuracy_at(0) and bool(folder.accuracy_at(1)) is not dropped


@pytest.mark.slow
def test_an_evaluation_with_other_settings_is_made_again_and_stays_until_then(
    tmp_path, monkeypatch
):
    config = tiny_run(tmp_path, steps=1, evaluation=EvaluationConfig())
    train(config)
    more, lines = dataclasses.replace(config, evaluation=EvaluationConfig(samples=3)), []

    def fail(*arguments, **options):
        raise OSError("the server is away")

    def samples(rows):
        return [row["held_out"]["sampled"]["samples"] for row in rows if "held_out" in row]

    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "evaluate", fail)
        with pytest.raises(OSError, match="the server is away"):
            train(more, resume=True, log=lines.append)
    assert samples(read_jsonl(tmp_path / "metrics.jsonl")) == [2, 2]
    # The settings are now those of the last session, but not of the evaluation.
    result = train(more, resume=True, log=lines.append)
    assert "The evaluation after step 1 is made again: evaluation.samples was 2, is 3." in lines
    assert samples(result.history) == [2, 3]
    assert result.after["sampled"].samples == 3 and result.before["sampled"].samples == 2


@for_each("known", [True, False])
def test_an_evaluation_is_compared_with_the_session_that_made_it(tmp_path, known):
    """The second session changes the samples, and does not evaluate the step it begins with."""
    tmp_path = fresh(tmp_path)
    named = settings(tiny_run(tmp_path, evaluation=EvaluationConfig(samples=4)))
    more = named | {"evaluation.samples": 64}
    found = {"greedy": accuracy(np.ones((2, 1)))}
    with RunFolder(tmp_path, resume=False) as folder:
        folder.start(0, {}, settings=named)
        folder.held_out(1, found, [])
    if not known:  # as earlier versions wrote it: then it is taken as that of the last session
        rows = read_jsonl(tmp_path / "metrics.jsonl")
        (tmp_path / "metrics.jsonl").unlink()
        for row in rows:
            del row["settings"]
            JsonLines(tmp_path / "metrics.jsonl").write(row)
    with RunFolder(tmp_path, resume=True) as folder:
        folder.start(1, {}, settings=more)
        assert folder.accuracy_at(1)
    with RunFolder(tmp_path, resume=True) as folder:
        folder.start(1, {}, settings=more, evaluates=True)
        assert bool(folder.accuracy_at(1)) is not known
        if known:
            folder.held_out(1, found, [])
        assert folder.accuracy_at(1) and len(folder.history()) == 1


@for_each(
    "name, values, counts",
    [
        ("reward", ("a", "b"), True),
        ("environment.size", (2, 3), True),
        ("episodes.max_turns", (2, 3), True),
        ("episodes.seconds", (2, 3), False),
        ("sampling.max_new_tokens", (4, 8), True),
        ("sampling.group_size", (4, 8), False),  # the evaluation has samples of its own
        ("data.system", (None, "Be brief."), True),
        ("report.sinks", ("a", "b"), False),
        ("seed", (1, 2), False),
    ],
)
def test_the_settings_that_decide_an_evaluation(name, values, counts):
    old, new = ({"evaluation.samples": 4, name: value} for value in values)
    assert changed_evaluation(old, new) == ({name: values} if counts else {})


def begun_with(folder, config):
    """A folder as a run with a checkpoint leaves it."""
    (folder / "checkpoints" / "step_00000001").mkdir(parents=True)
    row = {"step": 0, "event": "start", "settings": settings(config), "about": {}}
    JsonLines(folder / "sessions.jsonl").write(row)


SGD, PPO = {"name": "sgd", "b2": 0.999, "eps": 1e-8}, {"recipe": "ppo_max"}


@for_each(
    "before, after, fixed",
    [
        ({}, {"seed": 1}, "seed"),
        ({}, {"data": {"seed": 1}}, "data.seed"),
        ({}, {"lora": {"rank": 2}}, "lora.rank"),
        ({"lora": {"rank": 2}}, {"lora": {"rank": 2, "alpha": 1.0}}, "lora.alpha"),
        ({}, {"evaluation": {"enabled": True}}, "evaluation.enabled"),
        ({}, {"optimizer": {"decay_steps": 4}}, "optimizer.decay_steps"),
        ({}, {"optimizer": {"warmup_steps": 4}}, "optimizer.warmup_steps"),
        ({}, {"optimizer": {"moment_dtype": "bfloat16"}}, "optimizer.moment_dtype"),
        ({}, {"optimizer": {"max_grad_norm": None}}, "optimizer.max_grad_norm"),
        ({}, {"optimizer": SGD}, "optimizer.name"),
        ({"optimizer": SGD}, {"optimizer": SGD | {"b1": 0.0}}, "optimizer.b1"),
        (PPO | {"critic": {}}, PPO | {"critic": {"decay_steps": 4}}, "critic.decay_steps"),
    ],
)
def test_what_no_resumed_run_can_change_is_told_before_it_loads(
    tmp_path, monkeypatch, before, after, fixed
):
    tmp_path = fresh(tmp_path)
    monkeypatch.setattr("jaxrl_llm.train.run.init_experiment", None)  # it loads nothing
    kinds = {"lora": LoRAConfig, "evaluation": EvaluationConfig, "critic": OptimizerConfig}

    def config(changes):
        for name, value in changes.items():
            if isinstance(value, dict):
                now = getattr(CONFIG, name) if name in ("data", "optimizer") else kinds[name]()
                changes = changes | {name: dataclasses.replace(now, **value)}
        return tiny_run(tmp_path, **changes)

    begun_with(tmp_path, config(before))
    changed = dataclasses.replace(config(after), reward_on_error="zero")
    with pytest.raises(ValueError, match="reward_on_error was 'drop', is 'zero'") as error:
        train(changed, resume=True)
    told = f"Resume it with the same settings; a resumed run cannot change {fixed}."
    assert f"{fixed} was " in str(error.value) and str(error.value).endswith(told)
    with pytest.raises(ValueError, match="^train: the run in ") as error:
        train(changed, resume=True, allow_changed=True)
    assert f"had other settings: {fixed} was " in str(error.value)  # and none that is allowed
    assert str(error.value).endswith(told)


OPTIMIZERS = [
    OptimizerConfig(learning_rate=1e-3, **options)
    for options in (
        {},
        {"decay_steps": 5},
        {"decay_steps": 6, "warmup_steps": 2},
        {"max_grad_norm": None},
        {"moment_dtype": "bfloat16", "b1": 0.8},
        {"name": "sgd"},
        {"name": "sgd", "b1": 0.5},
        {"name": "sgd", "b1": 0.0},
        {"name": "sgd", "weight_decay": 0.1},
        {"name": "sgd", "b1": 0.0, "decay_steps": 5},
        {"name": "sgd", "moment_dtype": "bfloat16", "max_grad_norm": None},
    )
]


def test_an_optimizer_is_fixed_where_its_state_would_have_other_arrays():
    states = [shapes_digest(make_optimizer(each).init(jnp.ones(2))) for each in OPTIMIZERS]
    named = [settings(tiny_run("run", optimizer=each)) for each in OPTIMIZERS]
    for old, before in zip(named, states, strict=True):
        for new, after in zip(named, states, strict=True):
            assert bool(fixed_settings(old, new)) == (before != after), (old, new)


def test_questions_that_have_moved_may_be_accepted(tmp_path):
    begun_with(tmp_path, tiny_run(tmp_path))
    other = dataclasses.replace(CONFIG.data, prompts=lambda: CONFIG.data.prompts())
    told = r"accept the changes \(--allow-changed\); the questions must stay the same\.$"
    with pytest.raises(ValueError, match=f"data.prompts was .* {told}"):
        train(tiny_run(tmp_path, data=other), resume=True)


def test_lines_are_written_whole_and_read_as_far_as_they_are(tmp_path):
    file = JsonLines(tmp_path / "m.jsonl")
    file.keep_up_to(0)
    for step in (1, 2, 3):
        file.write({"step": step, "x": jnp.float32(step), "bad": float("nan"), "v": np.ones(2)})
    assert read_jsonl(file.path)[0] == {"step": 1, "x": 1.0, "bad": None, "v": [1.0, 1.0]}
    with file.path.open("a") as handle:
        handle.write('{"step": 4, "x"')  # cut off in the middle
    file.keep_up_to(2)
    assert [row["step"] for row in read_jsonl(file.path)] == [1, 2]
    file.keep_up_to(0)
    assert read_jsonl(file.path) == []

    # Damaged lines are counted.
    path = tmp_path / "metrics.jsonl"
    good = '{"step": 1}\n'
    path.write_text(good)
    assert damage_of(path) == "" == damage_of(tmp_path / "nowhere.jsonl")
    path.write_bytes(good.encode() + b'\xff\n[1]\n\n{"step": "2"}\n{"step": 3, "x"')
    told = "is damaged at line 2 and 3 more, which are left out."
    assert damage_of(path) == f"{str(path)!r} {told}"
    assert read_jsonl(path) == [{"step": 1}]
    for row in ('{"step": 2, "held_out": {"greedy": 1}}', '{"step": 2, "settings": "x"}'):
        path.write_text(f"{good}{row}\n")
        assert damage_of(path).endswith("is damaged at line 2, which is left out.")
    path.write_text(f'{{"step": 2, "reward": 1{"0" * 400}}}\n{good}')
    assert read_jsonl(path) == [{"step": 1}]
    path.write_bytes(b"[" * 100_000 + b"\n" + good.encode())
    assert damage_of(path).endswith("is damaged at line 1, which is left out.")


def test_table_and_curve_of_all_sampled_rollouts(tmp_path):
    # The curve shows all sampled rollouts.
    rows = [{"reward": 0.5, "sampled_reward": 0.25}, {"reward": 0.5}, {"held_out": {}}]
    assert [training_reward(row) for row in rows] == [0.25, 0.5, None]
    assert training_reward({"reward": 0.5, "sampled_reward": None}) == 0.5

    # Table and curve.
    rows = [{"reward": 0.5, "prompt": "a\nb", "completion": "x" * 200}]
    table = samples_table(rows, width=60)
    assert "a\\nb" in table and "xx..xx" in table and max(map(len, table.splitlines())) <= 60
    accuracy = {"mean": 0.5, "low": 0.3, "high": 0.7}
    history = [{"step": 0, "held_out": {"greedy": accuracy, "sampled": accuracy}}]
    history += [{"step": 1, "reward": 0.2}, {"step": 2, "reward": None}, {"step": 3, "loss": 0.1}]
    history += [{"step": 3, "held_out": {"pairs": accuracy}}]
    history += [{"step": 4, "held_out": {"pairs": accuracy | {"low": None, "high": None}}}]
    plot_reward(history, tmp_path / "reward.png", title="t")
    plot_reward([], tmp_path / "empty.png")
    for name in ("reward.png", "empty.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_lines_reach_the_disk_before_the_checkpoint_after_them(tmp_path, monkeypatch):
    done, save = [], Checkpoints.save

    def saved(*args, **kwargs):
        done.append("save")
        return save(*args, **kwargs)

    monkeypatch.setattr(run_folder, "sync", lambda path: done.append(path.name))
    monkeypatch.setattr(Checkpoints, "save", saved)
    train(tiny_run(tmp_path, steps=2, checkpoint=CheckpointConfig(every=1)))
    assert done == ["metrics.jsonl", "samples.jsonl", "save"] * 2
