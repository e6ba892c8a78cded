"""A run with a subagent: both policies learn, each by its own rows, weights and optimizer."""

import asyncio
import dataclasses
import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batch_makers import first_batch
from exact_resume import assert_resumes
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.cli.options import load_config
from jaxrl_llm.data import make_renderer
from jaxrl_llm.environments import (
    NoSubagentError,
    Parsed,
    SubagentError,
    ToolCall,
    ToolEnv,
    answered_by,
    ask,
    call_tool,
    tool,
)
from jaxrl_llm.rewards import Scores
from jaxrl_llm.rollout import make_sampler
from jaxrl_llm.rollout.episodes import EPISODES, Episode, Turn
from jaxrl_llm.rollout.subagent import CallRecord, SubagentPlayer
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.train import (
    AsyncConfig,
    CheckpointConfig,
    EvaluationConfig,
    LoRAConfig,
    OptimizerConfig,
    SubagentConfig,
    init_state,
    make_step,
    train,
)
from jaxrl_llm.train.experiment.setup import init_experiment, load_experiment
from jaxrl_llm.train.memory.memory_plan import lay_out, load_inputs, make_plan
from jaxrl_llm.train.subagent import subagent_batch

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("shared_programs")


def one_layer():
    return *tiny_model(num_layers=1), ByteTokenizer()


def config(folder, **changes):
    team = load_config(ROOT / "configs" / "tiny.py", name="team")
    values = {
        "model": one_layer,
        "run_dir": str(folder),
        "prompts_per_step": 4,
        "steps": 3,
        "evaluation": EvaluationConfig(enabled=False),
        "checkpoint": CheckpointConfig(every=2),
        "optimizer": OptimizerConfig(name="sgd", b1=0.0, learning_rate=1.0, max_grad_norm=None),
    }
    return dataclasses.replace(team, **(values | changes))


def fake(words, key=0):
    """Answers, a token for each letter; questions of one token."""
    model, params = tiny_model(num_layers=1)
    sample = make_sampler(model, max_new_tokens=2, group_size=1, buckets=(4,))
    rollout = jax.device_get(sample(params, jax.random.key(key), [[n + 1] for n in range(9)]))
    rows = [jax.tree.map(lambda x, i=i: x[i : i + 1], rollout) for i in range(9)]
    return [CallRecord(rows[n], word, form=float(word != "bad")) for n, word in enumerate(words)]


def test_rows_and_advantages_are_those_of_the_aligned_answers():
    # Two rollouts of a query: one asked twice, one once; the third of another query never asked.
    a, b, c = fake(["one", "two", "three"])
    episodes = [
        Episode((Turn(1, "x", calls=(a,)), Turn(1, "y", calls=(b,))), "done"),
        Episode((Turn(1, "x", calls=(c,)),), "done"),
        Episode((Turn(1, "x"),), "done"),
        None,
    ]
    rewards, where = np.array([[0.9, 0.2], [1.0, 0.0]]), np.array([[True, True], [True, False]])
    nobody = np.zeros(4, bool)
    scores = Scores(rewards.reshape(-1), {}, nobody, details={EPISODES: tuple(episodes)})

    def earned(forms, rewards, *, call_where):
        assert forms.tolist() == [[[1.0, 1.0], [1.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]]
        assert call_where.sum(axis=-1).tolist() == [[2, 1], [0, 0]]
        return jnp.array([[[0.8, 0.6], [0.2, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])

    subagent = dataclasses.replace(jr.recipes.m_grpo().subagent, rewards=earned)
    batch = subagent_batch(subagent, scores, rewards, where, jax.random.key(0)).check()
    assert batch.tokens.shape == (2 * 2 * 2, 1, 2)
    assert batch.where[:, 0].tolist() == [True] * 4 + [False] * 4
    # The specification's numbers: rewards .8, .6, .2, .2, of mean .45 and deviation .3.
    np.testing.assert_allclose(batch.rewards[:4, 0], [0.8, 0.6, 0.2, 0.2], rtol=1e-6)
    want = [1.1667, 0.5, -0.8333, -0.8333, 0, 0, 0, 0]
    np.testing.assert_allclose(batch.extras["call_advantages"][:, 0], want, atol=1e-4)
    for row, record in enumerate([a, b, c, c]):
        np.testing.assert_array_equal(batch.tokens[row, 0], record.row.tokens[0, 0])
        assert batch.prompt_tokens[row, 0] == record.row.prompt_tokens[0, 0]
    alone = Scores(rewards.reshape(-1), {}, nobody, details={EPISODES: (episodes[2],) * 4})
    assert subagent_batch(subagent, alone, rewards, where, jax.random.key(0)) is None


@pytest.mark.slow
def test_both_learn_and_a_resumed_run_is_the_same(tmp_path):
    settings = config(tmp_path / "whole", checkpoint=CheckpointConfig(every=2, keep=2))
    whole, (_, params, _) = train(settings), one_layer()
    for trained in (whole.state.params, whole.state.subagent.params):
        moved = jax.tree.map(lambda a, b: np.any(np.asarray(a) != b), trained, params)
        assert all(jax.tree.leaves(moved))
    for row in whole.history:
        assert row["calls"] == 2.0 and row["subagent_skipped"] == 0.0
        assert row["subagent_grad_norm"] > 0.0 and math.isfinite(row["subagent_loss"])
        assert not {"subagent_informative", "subagent_reward_std"} & set(row)
    assert_resumes(settings, whole, tmp_path / "again", first=2)


@pytest.mark.slow
def test_its_update_is_that_of_its_own_rows(tmp_path):
    """The step of a run changes each policy as a step of that policy alone on its rows would."""
    settings = config(tmp_path / "run")
    experiment, algorithm, _, state = init_experiment(settings, tmp_path / "c", resume=False)
    rollouts = first_batch(experiment, state.policy, subagent=state.subagent.params)
    recipe, optimizer = experiment.recipe, optax.sgd(1.0)
    assert rollouts.batch.called.tokens.shape == (4 * 8 * 2, 1, 8)
    alone = {}
    for name, method, batch in (
        ("main", recipe, rollouts.batch.replace(called=None)),
        ("subagent", recipe.subagent.recipe, rollouts.batch.called),
    ):
        own = init_state(one_layer()[1], optimizer, method, key=jax.random.key(0))
        step = make_step(experiment.model, method, optimizer)
        alone[name] = step(own, batch)[0].params
    batch, _ = algorithm.score(rollouts.batch)
    after, metrics = algorithm.step(state, batch)
    assert int(after.step) == 1 and {"loss", "subagent_loss"} <= set(metrics)
    for got, want in ((after.params, alone["main"]), (after.subagent.params, alone["subagent"])):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), got, want)
    assert all(metrics[name] > 1e-3 for name in ("update_norm", "subagent_update_norm"))


def player(params, sampler, rows=2):
    tokenizer = ByteTokenizer()
    texts = {"renderer": make_renderer(tokenizer), "decode": tokenizer.decode}
    key = jax.random.key(3)
    return SubagentPlayer(sampler, params, key, **texts, rows=rows, prompt_length=64)


@pytest.mark.slow
def test_an_answer_does_not_depend_on_other_questions():
    model, params, _ = one_layer()
    sampler = make_sampler(model, max_new_tokens=4, group_size=1, buckets=(64,))

    def play(rows, asked):
        answers = player(params, sampler, rows=rows)

        def asks(n):
            return answers.ask(n, 1, [{"role": "user", "content": f"ask {n}"}], None)

        with ThreadPoolExecutor(len(asked)) as pool:
            return [record.row.tokens.tolist() for record in pool.map(asks, asked)]

    alone = [play(1, [n])[0] for n in range(5)]
    assert play(3, range(5)) == alone
    assert len({str(x) for x in alone}) == 5


@tool
def delegate(question: str) -> str:
    """Asks an assistant and returns its answer."""
    return ask(question, check=lambda text: float(text.isdigit()))


def test_a_tool_asks_in_one_line():
    seen = []

    def answer(messages, check):
        seen.append((messages[-1]["content"], check("7")))
        return "7"

    env = ToolEnv([delegate], lambda prompt, text, row: float(text == row["answer"]))
    state, _ = env.reset({"text": "3 + 4?", "answer": "7"}, seed=0)
    with answered_by(answer):
        call = ToolCall("delegate", {"question": "3 + 4"})
        state, observation = env.step(state, Parsed("", calls=(call,)))
    assert observation.messages[0]["content"] == "7" and seen == [("3 + 4", 1.0)]
    with pytest.raises(NoSubagentError, match="ask: no subagent answers; use a recipe that has"):
        call_tool([delegate], call)

    def fails(messages, check):
        raise SubagentError("out of memory")

    with answered_by(fails), pytest.raises(SubagentError, match="out of memory"):
        call_tool([delegate], call)


@dataclasses.dataclass(frozen=True)
class Asks:
    """One turn; asks what it is told to ask, one question after the other or two at once."""

    question: str
    check: Callable | None = None
    at_once: bool = False
    tools = ()

    def reset(self, task, seed):
        observation = jr.environments.Observation([{"role": "user", "content": task["text"]}])
        return 0, observation

    async def step(self, state, action):
        if self.at_once:
            one = functools.partial(asyncio.to_thread, ask, self.question)
            await asyncio.gather(one(), one())
        ask(self.question, check=self.check)
        return 1, jr.environments.Observation([], reward=1.0, done=True)


@pytest.mark.slow
@for_each(
    "changes, message",
    [
        ({"recipe": "dr_grpo", "subagent": SubagentConfig()}, "no subagent answers"),
        ({"environment": Asks("x" * 80)}, "has 9[0-9] tokens, more than the 64 of subagent.prompt"),
        ({"environment": Asks("who?", lambda text: 5)}, "check of an answer must give 0 to 1; got"),
        ({"environment": Asks("who?", lambda text: 1 / 0)}, "the check failed with ZeroDivision"),
        ({"environment": Asks("who?", at_once=True)}, "a step asks one question at a time"),
    ],
)
def test_a_question_that_nobody_answers_ends_the_run_with_its_reason(tmp_path, changes, message):
    with pytest.raises(Exception, match=message):
        train(config(tmp_path, **({"environment": Asks("who?")} | changes)))


@for_each(
    "changes, message",
    [
        ({"recipe": "dr_grpo"}, "config: subagent has no effect: recipe 'dr_grpo' has none"),
        ({"lora": LoRAConfig(rank=2)}, "lora: recipe 'm_grpo' trains all weights of its two"),
        ({"asynchrony": AsyncConfig(max_staleness=1)}, "a subagent on the answers of its own weig"),
    ],
)
def test_what_a_subagent_does_not_go_with_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **changes)


@pytest.mark.slow
def test_a_subagent_that_fails_is_no_text():
    (model, params), who = tiny_model(num_layers=1), [{"role": "user", "content": "who?"}]
    sampler = make_sampler(model, max_new_tokens=2, group_size=1, buckets=(64,))
    broken = jax.tree.map(lambda x: x * np.nan, params)
    with pytest.raises(SubagentError, match="the subagent's logits are not finite"):
        player(broken, sampler).ask(0, 0, who, None)
    with pytest.raises(SubagentError, match="the subagent failed with"):
        player({}, sampler).ask(0, 0, who, None)


def test_what_a_subagent_needs_is_named(tmp_path):
    # Only the run evaluates both.
    experiment, params = load_experiment(config(tmp_path), trains=False)
    with pytest.raises(ValueError, match="recipe 'm_grpo' has a subagent, whose parameters are in"):
        experiment.evaluate(params, jax.random.key(0))

    # Needs an environment and room.
    tiny = load_config(ROOT / "configs" / "tiny.py", name="config")
    with pytest.raises(ValueError, match="recipe 'm_grpo' trains a subagent, which an environment"):
        dataclasses.replace(tiny, recipe="m_grpo")
    wide = SubagentConfig(max_new_tokens=8, prompt_length=10_000)
    with pytest.raises(ValueError, match="subagent: a question of 10000 tokens and an answer of 8"):
        train(config(tmp_path, subagent=wide))
    long = SubagentConfig(max_new_tokens=160, prompt_length=96)
    with pytest.raises(ValueError, match="subagent: .*tokens_per_microbatch"):
        sampling = dataclasses.replace(config(tmp_path).sampling, group_size=2, max_new_tokens=64)
        train(config(tmp_path, subagent=long, sampling=sampling, tokens_per_microbatch=250))


def test_its_memory_is_planned(tmp_path):
    found = []
    for length in (8, 300):
        own = SubagentConfig(max_new_tokens=length)
        settings = lay_out(config(tmp_path, subagent=own))
        found.append(make_plan(settings, load_inputs(settings)))
    small, large = (plan.sampling["sampler of the subagent"] for plan in found)
    assert large > small > 0 and found[0].peak <= found[1].peak


@for_each(
    "change, message",
    [
        (lambda s: {"recipe": jr.recipes.grpo()}, "recipe 'grpo' does not read call_advantages"),
        (lambda s: {"count": 0}, "count"),
        (lambda s: {"rewards": None}, "rewards must be a function"),
        (lambda s: {"recipe": s.recipe.replace(epochs=2)}, "makes 2 optimizer steps per batch"),
    ],
)
def test_a_subagent_is_checked_when_it_is_made(change, message):
    subagent = jr.recipes.m_grpo().subagent
    with pytest.raises((TypeError, ValueError), match=message):
        dataclasses.replace(subagent, **change(subagent))
