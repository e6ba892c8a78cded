"""Whole runs: what they leave, how they end, and that a resumed one ends as one without a stop."""

import collections
import dataclasses
import functools
import gc
import itertools
import json
import shutil
import signal
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fresh import fresh
from helpers import refuses
from rows import for_each
from test_checkpoint import assert_same, truncate
from tiny_run import CONFIG, begun, low_bytes, tiny_run, wide_model
from tiny_run import prompts as tiny_prompts

import jaxrl_llm as jr
from jaxrl_llm.data import Prompt, PromptSet
from jaxrl_llm.environments import NumberGuess
from jaxrl_llm.models import average_params, loading
from jaxrl_llm.models.scanned import run_layers
from jaxrl_llm.rewards import RewardError
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.train import (
    CheckpointConfig,
    CheckpointError,
    Checkpoints,
    DataConfig,
    EvaluationConfig,
    LoRAConfig,
    MeshConfig,
    OccupiedError,
    OptimizerConfig,
    SamplingConfig,
    TrainingError,
    make_step,
    train,
)
from jaxrl_llm.train.checkpoint.checkpoints import best_of
from jaxrl_llm.train.experiment.run_data import load_prompts
from jaxrl_llm.train.logging import run_folder
from jaxrl_llm.train.logging.results import read_jsonl

pytestmark = pytest.mark.usefixtures("shared_programs")


def remember(log):
    """The reward, which also keeps every completion it sees."""

    def reward(prompt, completion, metadata):
        log.append((prompt, completion))
        return low_bytes(prompt, completion, metadata)

    return reward


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, plots):
    """Six steps without a stop, and all that was sampled in them."""
    log = []
    with plots():
        result = train(tiny_run(tmp_path_factory.mktemp("whole"), reward=remember(log)))
    return result, log


def test_a_run_leaves_its_files(whole_run):
    result, log = whole_run
    assert int(result.state.step) == 6 and len(log) == 6 * 4 * 2
    assert result.state.data_cursor == (2, 4)  # 24 prompts of 10: none is held out
    assert [row["step"] for row in result.history] == [1, 2, 3, 4, 5, 6]
    first = result.history[0]
    rewards = [low_bytes(None, completion, None) for _, completion in log[:8]]
    np.testing.assert_allclose(first["reward"], np.mean(rewards), rtol=1e-6)
    assert abs(first["sampler_gap"]) < 1e-5  # what samples and what scores agree
    assert first["tokens_per_second"] > 0 and first["seconds_train"] > 0
    assert (result.run_dir / "reward.png").read_bytes().startswith(b"\x89PNG")
    samples = [json.loads(x) for x in (result.run_dir / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 6 * 4
    assert (samples[0]["prompt"], samples[0]["completion"]) == log[0]
    folders = [p.name for p in (result.run_dir / "checkpoints").iterdir()]
    assert folders == ["step_00000006"]


def test_resume_is_exact(whole_run, tmp_path):
    # The state holds parameters, optimizer, key and cursor; the log holds every rollout.
    expected, expected_log = whole_run
    log = []
    best = CheckpointConfig(every=1, keep=1, best="reward")
    config = tiny_run(tmp_path, reward=remember(log), checkpoint=best)
    half = train(dataclasses.replace(config, steps=3))
    assert int(half.state.step) == 3
    done = train(config, resume=True)
    assert_same(done.state, expected.state)
    assert log == expected_log
    numbers = ("step", "loss", "grad_norm", "reward", "entropy", "sampler_gap")
    for row, other in zip(done.history, expected.history, strict=True):
        assert {k: row[k] for k in numbers} == {k: other[k] for k in numbers}
    best = best_of({row["step"]: row["reward"] for row in done.history})
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == [f"step_{step:08d}" for step in sorted({best, 6})]


def test_changes_are_allowed_only_to_a_run_that_goes_on(tmp_path):
    with pytest.raises(ValueError, match=r"train: allow_changed has no effect without resume\."):
        train(tiny_run(tmp_path / "run"), allow_changed=True)
    assert not (tmp_path / "run").exists()


def test_a_signal_saves_and_the_run_goes_on_from_there(whole_run, tmp_path):
    expected, expected_log = whole_run
    log, number = [], signal.SIGTERM

    def reward(prompt, completion, metadata):
        if len(log) == 2 * 8:  # in the middle of step 3
            signal.raise_signal(number)
        return remember(log)(prompt, completion, metadata)

    # The reward runs in a thread; the signal reaches the main one.
    before = signal.getsignal(number)
    config = tiny_run(tmp_path, reward=reward)
    stopped = train(config)
    assert stopped.interrupted == number and int(stopped.state.step) == 3
    assert stopped.after == {} and signal.getsignal(number) is before
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000003"]
    done = train(config, resume=True)
    assert done.interrupted is None
    assert_same(done.state, expected.state)
    assert log == expected_log


def test_held_out_questions_are_never_trained_on(tmp_path):
    log, lines = [], []
    config = tiny_run(
        tmp_path, reward=remember(log), evaluation=EvaluationConfig(samples=3, every=1), steps=2
    )
    result = train(config, log=lines.append)
    # Behind the first batch: greedy, two questions, before the first step.
    held_out = {log[8][0], log[9][0]}
    trained = {row[0] for row in log if row not in log[8 : 8 + 2 + 6]} - held_out
    steps = [json.loads(x) for x in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(log) == 2 * 8 + 3 * (2 + 6)  # and that batch is the one that trains first
    assert len(held_out) == 2 and not held_out & {row["prompt"] for row in steps}
    assert len(trained) == 8
    assert set(result.before) == set(result.after) == {"greedy", "sampled"}
    assert result.before["greedy"].samples == 1 and result.before["sampled"].samples == 3
    assert result.before["greedy"].questions == 2
    evaluated = [row["step"] for row in result.history if "held_out" in row]
    assert evaluated == [0, 1, 2]
    assert any("2 held-out questions after step 0" in line for line in lines)
    assert any("completion" in line for line in lines)


RELEASED = threading.Event()


@for_each(
    "reward, message",
    [
        (lambda p, c, m: float("nan"), "gave nan"),
        (lambda p, c, m: 1 / 0, "raised ZeroDivisionError"),
        (lambda p, c, m: RELEASED.wait(60), "gave nothing .* within 0.2 s"),
    ],
)
def test_a_bad_reward_ends_the_run_and_names_the_prompt(tmp_path, reward, message):
    hangs = "nothing" in message
    with pytest.raises(RewardError, match=message) as error:
        train(tiny_run(tmp_path, reward=reward, reward_deadline=0.2 if hangs else 60.0))
    if hangs:
        RELEASED.set()  # its thread ends
    assert "prompt 0 (id 'q" in str(error.value)
    assert not (tmp_path / "checkpoints").exists()


async def moody(prompt, completion, metadata):
    """A judge that is away for every odd prompt."""
    if int(prompt[1:]) % 2:
        raise OSError("the judge is away")
    return {"one": 1.0, "absent": float("nan"), "even": float("nan" if prompt == "q00" else 2.0)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Reward moody failed")
# With slots all calls of a group fail together.
@pytest.mark.parametrize(("on_error", "slots"), [("drop", None), ("zero", 4)])
def test_a_call_of_the_reward_that_fails_costs_its_response_alone(tmp_path, on_error, slots):
    changes = {"sampling": dataclasses.replace(CONFIG.sampling, slots=slots)}
    changes |= {"recipe": "gdpo"} if on_error == "drop" else {}
    history = train(
        tiny_run(tmp_path, reward=moody, reward_on_error=on_error, steps=3, **changes)
    ).history
    failures = [row["reward_failures"] for row in history]
    assert 0 < sum(failures) < 24
    assert all(np.isfinite(row["loss"]) for row in history)
    if on_error == "drop":
        assert all(row["reward/absent"] is None for row in history)
        assert all(row["reward/one"] == 1 for row in history)
        assert all(row["reward/even"] in (None, 2.0) for row in history)
        assert all(1 <= row["reward"] <= 3 for row in history)
    else:
        expected = [1 - failed / 8 for failed in failures]
        assert [row["reward/one"] for row in history] == expected


@pytest.mark.filterwarnings("ignore:Reward")
@for_each("evaluates, what", [(False, "8 responses of step 1"), (True, "2 responses of the eval")])
def test_a_batch_all_of_whose_calls_fail_ends_the_run(tmp_path, evaluates, what):
    calls = []

    async def away(prompt, completion, metadata):
        calls.append(prompt)
        if not evaluates or len(calls) > 8:  # the first batch comes before the evaluation
            raise OSError("no")
        return 1.0

    evaluation = EvaluationConfig(enabled=evaluates)
    config = tiny_run(tmp_path, reward=away, reward_on_error="drop", evaluation=evaluation)
    refuses(f"on all {what}.*; the first raised OSError", train, config, error=RewardError)


def sampling(new_tokens):
    return {"sampling": SamplingConfig(group_size=2, max_new_tokens=new_tokens)}


def data(**changes):
    return {"data": dataclasses.replace(CONFIG.data, **changes)}


@for_each(
    "changes, message",
    [
        (sampling(254), "has 3 tokens, but the model's context leaves room for 2"),
        (sampling(256), "256 leaves no room for a prompt in the model's context of 256"),
        (
            {"mesh": MeshConfig(data=3), "prompts_per_step": 3},
            "make_mesh: data 3 x .* needs 3 devices, but there are 8",
        ),
        ({"mesh": MeshConfig(data=-1)}, "a microbatch of 4 prompts .* does not divide over 8 dev"),
        (
            {"evaluation": EvaluationConfig()} | data(held_out=0.0),
            "there are no held-out questions",
        ),
        (data(prompts=lambda: PromptSet((), source="nothing")), "PromptSet: nothing is empty"),
    ],
)
def test_what_does_not_fit_is_one_sentence(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(tiny_run(tmp_path / "run", **changes))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_run_folders(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointError, match="The run folder '.*file/run' cannot be written: Not a"
    ):
        train(tiny_run(tmp_path / "file" / "run"))
    train(tiny_run(tmp_path / "run", steps=1))
    with pytest.raises(OccupiedError, match=r"a run; continue it \(--resume\), name another"):
        train(tiny_run(tmp_path / "run", steps=1))
    with pytest.raises(ValueError, match="belongs to another model"):
        train(tiny_run(tmp_path / "run", model=wide_model), resume=True, allow_changed=True)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000001"]
    truncate(tmp_path / "run" / "checkpoints" / "step_00000001")
    for name in ("step_00000001", "step_00000001.damaged"):  # then as a later run set it aside
        with (
            warnings.catch_warnings(action="ignore"),
            pytest.raises(CheckpointError, match="There is no checkpoint that can be read in"),
        ):
            train(tiny_run(tmp_path / "run"), resume=True)
        checkpoints = tmp_path / "run" / "checkpoints"
        (checkpoints / name).rename(checkpoints / "step_00000001.damaged")


@pytest.mark.slow
def test_another_precision_of_the_model_is_told_and_may_be_accepted(tmp_path):
    def run(dtype, steps):
        def model():
            return *tiny_model(num_layers=1, dtype=dtype), ByteTokenizer()

        return tiny_run(tmp_path, model=model, steps=steps)

    train(run("float32", 1))
    with pytest.raises(ValueError, match="another model: .*dtype='float32'.*, not .*'bfloat16'"):
        train(run("bfloat16", 2), resume=True)
    assert int(train(run("bfloat16", 2), resume=True, allow_changed=True).state.step) == 2


def test_resume_without_a_checkpoint_starts_from_the_first_step(whole_run, tmp_path):
    expected, _ = whole_run
    left, lines = tmp_path / "killed", []
    (left / "checkpoints" / "step_00000002.unfinished").mkdir(parents=True)
    (left / "metrics.jsonl").write_text('{"step": 1, "reward": 9.0}\n{"step": 2, "rew')
    (left / "samples.jsonl").write_text('{"step": 1}\n')
    begun(left)
    done = train(tiny_run(left), resume=True, log=lines.append)
    assert_same(done.state, expected.state)
    assert lines[0].endswith("has no checkpoint yet; the run starts from step 0.")
    assert [row["step"] for row in done.history] == [1, 2, 3, 4, 5, 6]
    samples = [(folder / "samples.jsonl").read_text() for folder in (left, expected.run_dir)]
    assert samples[0] == samples[1]
    assert [p.name for p in (left / "checkpoints").iterdir()] == ["step_00000006"]
    new, lines = tmp_path / "new", []
    train(tiny_run(new, steps=1), resume=True, log=lines.append)
    assert "is new or empty, and nothing is resumed" in lines[0]


def signal_at(call, number=signal.SIGTERM, *, calls=None):
    """The reward, at a call of which a signal comes; it counts over all runs that it serves."""
    calls = [] if calls is None else calls

    def reward(prompt, completion, metadata):
        calls.append(prompt)
        if len(calls) == call:
            signal.raise_signal(number)
        return low_bytes(prompt, completion, metadata)

    return reward


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Four steps with an evaluation before, after each second one and at the end."""
    config = tiny_run("x", evaluation=EvaluationConfig(every=2), steps=4)
    folder = tmp_path_factory.mktemp("evaluated")
    return config, train(dataclasses.replace(config, run_dir=str(folder)))


# Two held-out questions: two calls greedily and four sampled; eight calls a step.
@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "step"),
    [
        pytest.param(6 + 2 * 8, 2, id="before an evaluation"),
        pytest.param(6 + 2 * 8 + 1, 2, id="in an evaluation"),
    ],
)
def test_an_evaluation_that_a_signal_ends_is_made_by_the_resumed_run(
    evaluated, tmp_path, call, step
):
    config, whole = evaluated
    config = dataclasses.replace(config, run_dir=str(tmp_path), reward=signal_at(call))
    stopped = train(config)
    assert stopped.interrupted == signal.SIGTERM and int(stopped.state.step) == step
    assert not any(row["step"] == step and "held_out" in row for row in stopped.history)
    done = train(config, resume=True)
    assert done.interrupted is None
    assert_same(done.state, whole.state)
    for row, other in zip(done.history, whole.history, strict=True):
        for name in ("step", "loss", "reward", "held_out"):
            assert row.get(name) == other.get(name)
    assert done.before == whole.before and done.after == whole.after != {}


@for_each("late, number", [("plot_reward", signal.SIGINT), ("write_report", signal.SIGTERM)])
def test_a_signal_while_the_end_is_written_costs_nothing(tmp_path, late, number):
    folder = fresh(tmp_path)

    def interrupted(*arguments, **options):
        signal.raise_signal(number)
        return write(*arguments, **options)

    write = getattr(run_folder, late)
    before = signal.signal(number, lambda *_: pytest.fail("the process would have died"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_folder, late, interrupted)
            result = train(tiny_run(folder, steps=1))
    finally:
        signal.signal(number, before)
    assert result.interrupted is None and int(result.state.step) == 1
    assert (folder / "report.html").exists()
    last = (folder / "sessions.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["outcome"] == "done"


@pytest.mark.slow
def test_the_reference_may_be_another_model_such_as_a_soup(tmp_path):
    """SALSA: a penalty towards the average of two models, which the policy is not at first."""
    model, params = tiny_model(num_layers=1)
    other = jax.tree.map(lambda x: 0.5 * x, params)

    def soup():
        return model, average_params([params, other]), ByteTokenizer()

    kl = jr.recipes.grpo(kl_coef=0.1)

    def config(name, **changes):
        return tiny_run(tmp_path / name, **{"recipe": kl, "steps": 1} | changes)

    plain = train(config("plain"))
    assert_same(train(config("same", reference=CONFIG.model)).state, plain.state)
    away = train(config("soup", reference=soup)).history[0]
    assert away["loss"] > plain.history[0]["loss"] + 1e-3  # at the first step already
    adapter = {"lora": LoRAConfig(rank=2), "optimizer": CONFIG.optimizer}
    assert train(config("lora", reference=soup, **adapter)).history[0]["loss"] == pytest.approx(
        away["loss"], rel=1e-4
    )
    with pytest.raises(ValueError, match="was made with another reference: the parameters of the"):
        other = config("soup", reference=CONFIG.model, steps=2)
        train(other, resume=True, allow_changed=True)
    with pytest.raises(ValueError, match="reference has no effect: recipe 'dr_grpo' reads none"):
        config("none", reference=soup, recipe="dr_grpo")
    wide = config("wide", reference=wide_model)
    refuses("model and reference must have the same shapes", train, wide)


@pytest.mark.slow
def test_a_recipe_whose_state_begins_as_no_array_of_jax_resumes(tmp_path):
    def update(rewards, state, **context):
        return rewards - rewards.mean(-1, keepdims=True), tuple(x + 1.0 for x in state)

    advantage = jr.Transform(lambda: (np.zeros(2), 0.1), update)
    recipe = jr.recipes.dr_grpo(length=4).replace(advantage=advantage)
    config = tiny_run(tmp_path, steps=2, recipe=recipe)
    train(config)
    state = train(dataclasses.replace(config, steps=3), resume=True).state
    for found, first in zip(state.algo_state.advantage, (np.zeros(2), 0.1), strict=True):
        assert state.step == 3 and found.dtype == jnp.float32
        np.testing.assert_allclose(found, first + 3.0, rtol=1e-6)


@pytest.mark.slow
def test_a_reference_may_come_with_a_resumed_run(tmp_path):
    train(tiny_run(tmp_path, recipe=jr.recipes.grpo(kl_coef=0.0), steps=1))
    config = tiny_run(tmp_path, recipe=jr.recipes.grpo(kl_coef=0.1), steps=2)
    assert int(train(config, resume=True, allow_changed=True).state.step) == 2


@for_each("call, ended", [(8 + 6, 0), (8 + 6 + 6, 1)])
def test_a_signal_in_the_last_batch_of_an_evaluation(tmp_path, call, ended):
    calls = []
    reward = signal_at(call, signal.SIGINT, calls=calls)
    config = tiny_run(fresh(tmp_path), reward=reward, evaluation=EvaluationConfig(), steps=1)
    result = train(config)
    assert int(result.state.step) == ended and len(calls) == call
    # After the last one nothing is left to resume.
    assert result.interrupted == (None if ended else signal.SIGINT)
    assert bool(result.after) == bool(ended) and result.before


def test_an_error_leaves_a_checkpoint_of_the_last_whole_step(whole_run, tmp_path):
    expected, _ = whole_run
    calls, lines = [], []

    def reward(prompt, completion, metadata):
        calls.append(prompt)
        if len(calls) == 2 * 8 + 3:
            raise OSError("the judge is away")
        return low_bytes(prompt, completion, metadata)

    config = tiny_run(tmp_path, reward=reward)
    refuses("the judge is away", train, config, error=RewardError, log=lines.append)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]
    assert any("the state after step 2 is saved, for --resume" in line for line in lines)
    assert_same(train(config, resume=True).state, expected.state)


def test_a_run_without_a_step_starts_over(whole_run, tmp_path):
    expected, _ = whole_run
    with pytest.raises(RewardError):
        train(tiny_run(tmp_path, reward=lambda p, c, m: None, evaluation=EvaluationConfig()))
    lines = []
    result = train(tiny_run(tmp_path), log=lines.append)
    assert "holds a run without a step; it starts over" in lines[0]
    assert [row["step"] for row in result.history] == [1, 2, 3, 4, 5, 6]
    assert_same(result.state, expected.state)
    assert any("completion" in line for line in lines)  # though nothing was evaluated


def test_a_second_end_of_a_run_is_not_evaluated_again(tmp_path):
    config = tiny_run(tmp_path, evaluation=EvaluationConfig(), steps=1)
    first = train(config)
    again = train(config, resume=True)
    assert [row["step"] for row in again.history] == [0, 1, 1]
    assert again.after == first.after != {} and again.before == first.before


@for_each(
    "changes, fixed, message",
    [
        ({"seed": 1}, "seed", "was made with seed 0, this run has 1"),
        (data(seed=1), "data.seed", "was made with other questions"),
        (data(prompts=lambda: tiny_prompts()[:8]), None, "was made with other questions"),
        (
            {"evaluation": EvaluationConfig()},
            "evaluation.enabled",
            "was made with other questions, or another split",
        ),
    ],
)
def test_another_run_is_not_resumed(whole_run, tmp_path, changes, fixed, message):
    folder = fresh(tmp_path) / "run"
    shutil.copytree(whole_run[0].run_dir, folder)
    if fixed is not None:
        with pytest.raises(ValueError, match=rf"a resumed run cannot change {fixed}\.$"):
            train(tiny_run(folder, **changes), resume=True, allow_changed=True)
        (folder / "sessions.jsonl").unlink()  # then the checkpoint tells
    with pytest.raises(ValueError, match=rf"checkpoint '.*step_00000006' {message}"):
        train(tiny_run(folder, **changes), resume=True, allow_changed=True)
    assert (folder / "metrics.jsonl").read_text().count("\n") == 6


def test_what_cannot_be_written_is_told(tmp_path, plots):
    """Completions are required; the curve is not."""
    begun(tmp_path)
    (tmp_path / "reward.png").mkdir()
    told = "reward.png' cannot be written: is a directory"
    with plots(), pytest.warns(UserWarning, match=told):
        assert int(train(tiny_run(tmp_path, steps=1)).state.step) == 1
    begun(folder := fresh(tmp_path))
    (folder / "samples.jsonl").mkdir()
    with pytest.raises(TrainingError, match="samples.jsonl' cannot be written: "):
        train(tiny_run(folder))


def saved_model(folder, monkeypatch):
    """The tiny model as one of a name, here a folder."""
    model, params, tokenizer = CONFIG.model()
    jr.models.save_safetensors(params, folder / "model", config=model.config)
    monkeypatch.setattr(jr.data, "load_tokenizer", lambda name: tokenizer)
    return str(folder / "model")


@pytest.mark.slow
def test_a_run_that_scans_the_layers_learns_the_same(tmp_path, monkeypatch):
    """And a run that was begun without may go on with it."""
    model, params = jr.testing.tiny_model()
    monkeypatch.setattr(jr.data, "load_tokenizer", lambda name: CONFIG.model()[2])
    jr.models.save_safetensors(params, tmp_path / "model", config=model.config)
    periods = []

    def watched(*args, period):
        periods.append(period)
        return run_layers(*args, period=period)

    monkeypatch.setattr("jaxrl_llm.models.transformer.run_layers", watched)

    def run(folder, **changes):
        config = {"model": str(tmp_path / "model"), "mesh": MESH, "steps": 2} | changes
        return train(tiny_run(tmp_path / folder, **config), resume="steps" in changes)

    plain = run("plain")
    assert set(periods) == {None}
    scanned = run("scanned", scan_layers=True)
    assert set(periods) == {None, 1}  # decoding does not scan
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, scanned.state.params, plain.state.params)
    assert int(run("plain", steps=3, scan_layers=True).state.step) == 3


MESH = MeshConfig(data=2, fsdp=2, tensor=2)


@pytest.mark.slow
def test_programs_are_compiled_side_by_side_and_once(tmp_path, monkeypatch):
    """The samplers while the weights of a named model are read, and the step beside a sampler.

    Of rounded weights the rollouts have a sampler of their own.
    """
    threads, while_reading = collections.defaultdict(list), []
    load_params = loading.load_params

    def listen(event, seconds, fun_name="", **_):
        if event == "/jax/core/compile/backend_compile_duration":
            name = fun_name.removeprefix("jit(").removesuffix(")")
            threads[name].append(threading.current_thread().name)

    def read(*args, **options):
        while_reading.extend(thread.name for thread in threading.enumerate())
        return load_params(*args, **options)

    monkeypatch.setattr(loading, "load_params", read)
    # Sizes of no other test.
    sizes = {"quantization": "int8", "max_new_tokens": 7, "group_size": 4}
    changes = {
        "model": saved_model(tmp_path, monkeypatch),
        "sampling": dataclasses.replace(CONFIG.sampling, **sizes),
        "evaluation": EvaluationConfig(),
        "mesh": MESH,
        "steps": 2,
    }
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        train(tiny_run(tmp_path / "run", **changes, **data(held_out=0.5)))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert threads["decode"] == ["compile a sampler"] * 3
    assert while_reading.count("compile a sampler") == 2
    assert threads["step"] == ["compile a step"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["dr_grpo", "eggroll"])
def test_a_named_model_trains_and_resumes_as_that_of_a_function(tmp_path, monkeypatch, recipe):
    changes = {
        "recipe": jr.recipes.eggroll(sigma=0.1) if recipe == "eggroll" else recipe,
        "remat": "full",
        "data": dataclasses.replace(CONFIG.data, held_out=0.5),
        "evaluation": EvaluationConfig(enabled=recipe == "dr_grpo"),
        "sampling": dataclasses.replace(CONFIG.sampling, group_size=4),
    }
    model = saved_model(tmp_path, monkeypatch)
    named = train(tiny_run(tmp_path / "named", model=model, steps=1, **changes))
    plain = train(tiny_run(tmp_path / "plain", steps=1, **changes))
    assert_same(named.state.params, plain.state.params)
    assert str(named.before) == str(plain.before)
    results = [
        train(tiny_run(tmp_path / name, steps=2, **changes, **more), resume=True)
        for name, more in (("named", {"model": model}), ("plain", {}))
    ]
    assert_same(*(result.state.params for result in results))


def test_evaluation_prompts_that_are_trained_on_are_counted(tmp_path):
    own = data(evaluation=lambda: tiny_prompts()[7:], held_out=0.0)
    with pytest.warns(UserWarning, match="3 of the 3 evaluation prompts are also trained on"):
        load_prompts(tiny_run(tmp_path, evaluation=EvaluationConfig(), **own))

    # Games of one text are other evaluation prompts.
    def games(*numbers, text="Play.", **columns):
        rows = (Prompt(text, metadata={"game": n, **columns}, id=f"{n}") for n in numbers)
        return lambda: PromptSet(rows)

    def loaded(training, evaluation, environment=NumberGuess(), reward=None):  # noqa: B008
        options = data(prompts=training, evaluation=evaluation, held_out=0.0)
        options |= {"environment": environment, "reward": reward, "evaluation": EvaluationConfig()}
        return load_prompts(tiny_run(tmp_path, **options))

    told = "{} of the 3 evaluation prompts are also trained on"
    loaded(games(0, 1, 2), games(3, 4, 5))
    loaded(games(0), games(3, 4, 5))
    with pytest.warns(UserWarning, match=told.format(1)):
        loaded(games(0, 1, 2), games(2, 3, 4))
    # Questions are told apart by their texts, whatever columns the two sets have.
    with pytest.warns(UserWarning, match="1 of the 1 evaluation prompts are also trained on"):
        loaded(games(0, text="1 + 1 ="), games(0, text="1 + 1 =", part="test"))
    with pytest.warns(UserWarning, match=told.format(3)):
        loaded(games(0, 1, 2), games(3, 4, 5), environment=None, reward=low_bytes)

    # A limit counts games also if a collector reads their stage.
    rows = [Prompt("Play.", metadata={"game": n, "stage": 0}, id=f"{n}") for n in range(8)]
    staged = jr.recipes.grpo().replace(collector=jr.curation.staged((1,)))
    options = data(prompts=lambda: PromptSet(rows), held_out=0.5)
    options |= {"environment": NumberGuess(), "reward": None, "recipe": staged}
    config = tiny_run(tmp_path, evaluation=EvaluationConfig(limit=2), **options)
    assert config.reads_columns and len(load_prompts(config)[1]) == 2


@pytest.mark.slow
def test_bfloat16_computes_and_float32_learns(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        "jaxrl_llm.train.policy_gradient.make_step",
        lambda *a, **k: made.append(make_step(*a, **k)) or made[0],
    )
    model = saved_model(tmp_path, monkeypatch)
    options = {"model": model, "dtype": "bfloat16", "epochs": 2}
    result = train(tiny_run(tmp_path / "bfloat16", steps=2, **options))
    assert made[0].compiled._cache_size() <= 1  # none where a long session evicted it
    assert {x.dtype for x in jax.tree.leaves(result.state.params)} == {np.dtype("float32")}
    plain = train(tiny_run(tmp_path / "float32", steps=2, **options | {"dtype": "float32"}))
    assert result.history[0]["entropy"] != plain.history[0]["entropy"]  # so it did compute in it
    done = train(tiny_run(tmp_path / "bfloat16", steps=3, **options), resume=True)
    assert int(done.state.step) == 3


@pytest.mark.slow
def test_resume_frees_the_fresh_state_before_it_reads_the_saved_one(tmp_path, monkeypatch):
    alive, restore = [], Checkpoints.restore

    def spy(self, like, **options):
        assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(like[:3]))
        gc.collect()  # which the tests put off
        alive.extend(x for x in jax.live_arrays() if x.shape == mark.shape)
        return restore(self, like, **options)

    def model():
        # A shape that nothing else in this process has; freed unless the run holds on to it.
        return *tiny_model(num_layers=1, mlp_width=56), ByteTokenizer()

    mark = jax.eval_shape(lambda: jax.numpy.zeros((32, 56)))
    config = tiny_run(tmp_path, model=model, steps=1)
    train(config)
    monkeypatch.setattr(Checkpoints, "restore", spy)
    train(config, resume=True)
    assert alive == []


def test_the_model_of_a_function_is_not_consumed(tmp_path):
    model, params = tiny_model(num_layers=1)
    train(tiny_run(tmp_path, model=lambda: (model, params, ByteTokenizer()), steps=1))
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))


@pytest.mark.slow
def test_minibatches_resume_exactly_and_are_packed(tmp_path):
    changes = {"recipe": "dapo", "epochs": 2, "minibatches": 2, "packing": "always"}
    changes["optimizer"] = OptimizerConfig(learning_rate=1e-2, decay_steps=2)  # in batches
    lines = []
    done = train(tiny_run(tmp_path / "whole", steps=3, **changes), log=lines.append)
    assert "4 optimizer steps a batch, at a learning rate of 0 after step 2 of 3" in lines[0]
    rates = [row["learning_rate"] for row in done.history]
    np.testing.assert_allclose(rates, [6.25e-3, 1.25e-3, 0], rtol=1e-6)
    assert [row["update_norm"] > 0 for row in done.history] == [True, True, False]
    train(tiny_run(tmp_path / "parts", steps=1, **changes))
    resumed = train(tiny_run(tmp_path / "parts", steps=3, **changes), resume=True)
    assert_same(resumed.state, done.state)
    padded = train(tiny_run(tmp_path / "padded", steps=1, **changes | {"packing": "never"}))
    for name in ("loss", "grad_norm", "reward", "tokens"):
        assert done.history[0][name] == pytest.approx(padded.history[0][name], abs=1e-4)


@pytest.mark.slow
def test_the_schedule_goes_on_from_its_step_if_a_resumed_run_has_other_minibatches(tmp_path):
    changes = {"recipe": jr.recipes.ppo_max(kl_coef=0, critic_warmup=0), "minibatches": 4}
    changes["optimizer"] = OptimizerConfig(learning_rate=1e-2, decay_steps=4)  # of the critic too
    first = train(tiny_run(tmp_path, steps=2, **changes))
    np.testing.assert_allclose(first.history[-1]["learning_rate"], 1e-2 * (1 - 7 / 16), rtol=1e-6)
    changes["minibatches"] = 1
    resumed = train(tiny_run(tmp_path, steps=4, **changes), resume=True, allow_changed=True)
    rates = [row["learning_rate"] for row in resumed.history[-2:]]
    np.testing.assert_allclose(rates, [5e-3, 2.5e-3], rtol=1e-6)
    again = train(tiny_run(tmp_path, steps=5, **changes), resume=True)
    assert again.history[-1]["learning_rate"] == 0
    moved = [row["critic_update_norm"] > 0 for row in again.history]
    assert moved == [True] * 4 + [False]


@pytest.mark.slow
def test_a_recipe_that_masks_every_token_ends_the_run(tmp_path):
    """Rewards differ, so the batches have a signal, which no token takes."""

    def none(advantages, mask):
        return jnp.zeros_like(mask)

    def shown():
        rows = [dataclasses.replace(x, metadata={"demonstration": "ab"}) for x in tiny_prompts()]
        return PromptSet(rows, source="tiny")

    def as_shown(prompt, completion, metadata):
        return float(completion == "ab")

    one = jr.curation.demonstrations(count=1)
    recipe = jr.recipes.grpo().replace(name="nothing", selection=none, collector=one)
    options = {"recipe": recipe, "reward": as_shown, "minibatches": 2}
    options["data"] = DataConfig(prompts=shown, chat=False)
    told = "Step 3 makes no update: the recipe trains no token of the 4 groups .*none of the last 3"
    with pytest.raises(TrainingError, match=told):
        train(tiny_run(tmp_path, steps=5, max_skipped=3, **options))
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert all(row["updates"] == 0 and row["sampled_reward"] == 0 for row in rows)
    # The demonstrations take part, so they count, as in the spread of rewards.
    assert all(row["reward"] == 0.5 and row["informative"] == 1 for row in rows)
    assert all("mfu" not in row or row["mfu"] < 1e3 for row in rows)


@pytest.mark.slow
def test_a_gradient_of_exactly_zero_is_warned_of_once(tmp_path):
    def nothing(logp, old_logp, advantages, mask):
        return 0.0 * logp

    counts = itertools.count()

    def alternating(prompt, completion, metadata):  # so that the rewards of a group differ
        return float(next(counts) % 2)

    recipe = jr.recipes.dr_grpo(length=4).replace(name="nothing", surrogate=nothing)
    with pytest.warns(UserWarning, match="exactly zero in every parameter") as caught:
        train(tiny_run(tmp_path, recipe=recipe, steps=8, reward=alternating))
    assert len([w for w in caught if "exactly zero" in str(w.message)]) == 1
