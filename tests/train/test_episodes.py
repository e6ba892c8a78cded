"""Whole runs of an environment: tokens in, tokens out, and what fails ends its episode alone."""

import asyncio
import dataclasses
import itertools
import json
import signal
import threading
import time
from typing import NamedTuple

import jax
import numpy as np
import pytest
from helpers import batch_with, refuses
from rows import for_each
from test_checkpoint import assert_same
from tiny_run import tiny_run

import jaxrl_llm as jr
import jaxrl_llm.train.experiment.experiment
from jaxrl_llm.data import Cursor, Prompt, PromptSet, make_renderer
from jaxrl_llm.environments import Observation, Subgoals
from jaxrl_llm.rollout import Completion
from jaxrl_llm.rollout.episodes import EPISODES, Episode, EpisodeOptions, Episodes, Turn
from jaxrl_llm.rollout.slots import Tokens
from jaxrl_llm.rollout.types import STOP
from jaxrl_llm.train import (
    AsyncConfig,
    DataConfig,
    EvaluationConfig,
    MeshConfig,
    SamplingConfig,
    make_scorer,
    train,
)
from jaxrl_llm.train.data.episode_fields import episode_fields
from jaxrl_llm.train.experiment.rollouts import collect_rollouts
from jaxrl_llm.train.experiment.setup import load_experiment

pytestmark = pytest.mark.usefixtures("shared_programs")


def raises(state):
    raise KeyError("door")


def hangs(state):
    threading.Event().wait(600)


def ending(**changes):
    """An observation that ends the episode, with a value that it must not have."""
    return lambda state: (state, Observation([], **{"done": True} | changes))


def telling(message, **changes):
    return lambda state: (state, Observation([{"role": "user"} | message], **changes))


NAN, INF32 = float("nan"), "which is no finite number in float32"
# What a step that fails returns, and what is told of it.
FAULTS = {
    "raises": (raises, "KeyError: 'door'"),
    "hangs": (hangs, "longer than 0.5 s"),
    "nan": (ending(reward=NAN, done=False), "reward nan"),
    "assistant": (telling({"role": "assistant", "content": "I won"}), "role 'assistant'"),
    "nothing": (lambda state: (state, None), "NoneType"),
    "no state": (lambda state: None, "where a state and an Observation are needed"),
    "one message": (lambda state: (state, Observation("low")), "messages 'low'"),
    "no text": (telling({"content": None}), "which is no text"),
    "list for state": (ending(state=[1, 2]), "state of type list, which is no text"),
    "nan behind info": (ending(reward=NAN, info={"reward": 1.0}), f"reward nan, {INF32}"),
    "no instead": (telling({"content": ""}, instead=5), "instead 5, which is no text"),
    "no room for text": (telling({"content": "\ud83d"}), "observation cannot be read: Unicode"),
    "no info": (ending(info=None), "info None"),
    "too large": (ending(reward=1e39), f"reward 1e+39, {INF32}"),
    "no reward": (ending(reward=None), f"reward None, {INF32}"),
    "a large info": (ending(info={"low": -1e39}), f"low -1e+39, {INF32}"),
    "no name": (ending(info={1: 0.5, "low": 1.0}), "info with the name 1, which is no text"),
}


class State(NamedTuple):
    seed: int
    turn: int


@dataclasses.dataclass(frozen=True)
class Letters:
    """Three turns; one earns the share of its letters below "m"; it sees how many there were."""

    tools = ()
    turns: int = 3
    fault: str = ""
    at: int = 2  # the turn of the fault
    seconds: float = 0.0

    def reset(self, task, seed):
        if self.fault == "reset":
            raise OSError("no such level.")
        return State(seed % 100, 0), Observation([{"role": "user", "content": f"{seed % 100}?"}])

    def step(self, state, action):
        time.sleep(self.seconds)
        state = state._replace(turn=state.turn + 1)
        low = sum(c < "m" for c in action.text)
        if self.fault in FAULTS and state.turn == self.at and low % 2:
            return FAULTS[self.fault][0](state)
        reward = low / max(len(action.text), 1)
        message = {"role": "user", "content": str(low)}
        done = state.turn == self.turns
        info = {"low": float(low)}
        return state, Observation([message], reward, done=done, state=f"{low}", info=info)


@dataclasses.dataclass(frozen=True)
class Later(Letters):
    """The same, async."""

    async def step(self, state, action):
        await asyncio.sleep(0.01)
        return Letters.step(self, state, action)


def tasks(*texts):
    return lambda: PromptSet([Prompt(text, id=text) for text in texts], source="test")


SAMPLING = SamplingConfig(group_size=4, max_new_tokens=64, slots=8, prompt_length=40)
TURNS = EpisodeOptions(turn_tokens=6)


def config(folder, env, **changes):
    options = {
        "recipe": "grpo", "reward": None, "environment": env, "sampling": SAMPLING,
        "episodes": TURNS, "steps": 2, "prompts_per_step": 4,
    }  # fmt: skip
    return tiny_run(folder, **(options | changes))


def one_batch(folder, env, recipe=None, **changes):
    """The run's experiment, its parameters and its first batch."""
    chosen = config(folder, env, **({} if recipe is None else {"recipe": recipe}) | changes)
    experiment, params = load_experiment(chosen)
    key, cursor = jax.random.key(0), Cursor(0, 0)
    state = experiment.collector.init(len(experiment.train))
    batch = collect_rollouts(experiment, params, key, cursor, state, number=0, version=0)
    return experiment, params, batch


TROLL = jr.recipes.trloo()


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    return one_batch(tmp_path_factory.mktemp("batch"), Letters(), TROLL)


def test_sampler_and_trainer_agree_on_every_sampled_token_and_no_other_trains(batch):
    experiment, params, collected = batch
    made = collected.batch
    turn_ids, mask = np.asarray(made.extras["turn_ids"]), np.asarray(made.mask)
    assert ((turn_ids >= 0) == mask).all() and set(turn_ids[mask]) == {0, 1, 2}
    # Observations stand between the turns and belong to none.
    used = np.arange(mask.shape[-1]) < (mask * np.arange(1, mask.shape[-1] + 1)).max(-1)[..., None]
    between = used & ~mask
    assert between.any(axis=-1).all() and (np.asarray(made.tokens)[between] != 0).any()
    logp = make_scorer(experiment.model)(params, made)
    np.testing.assert_allclose(
        np.asarray(logp)[mask], np.asarray(made.behavior_logp)[mask], atol=1e-4
    )
    # The text of the answer that follows a turn is there, token by token.
    decode = experiment.tokenizer.decode
    text = decode(np.asarray(made.tokens)[0, 0][between[0, 0]].tolist())
    turns = [
        decode(np.asarray(made.tokens)[0, 0][turn_ids[0, 0] == turn].tolist()) for turn in range(2)
    ]
    assert text.split() == [str(sum(c < "m" for c in turn)) for turn in turns]


def test_prompts_have_one_of_few_widths(batch):
    mask = np.asarray(batch[2].batch.prompt_mask)
    needed = int(mask.sum(axis=-1).max())
    assert mask.shape[1] == min(width for width in (40, 20, 10, 5) if width >= needed)


def test_rewards_are_sums_over_turns_and_states_have_numbers(batch, tmp_path):
    _, _, collected = batch
    made = collected.batch
    rewards = np.asarray(made.extras["turn_rewards"])
    where = np.asarray(made.extras["turn_where"])
    assert rewards.shape == (4, 4, 4) and where.sum(-1).tolist() == [[3] * 4] * 4
    np.testing.assert_allclose(rewards.sum(-1), np.asarray(made.rewards), rtol=1e-6)
    assert collected.metrics["turns"] == 3 and collected.metrics["end/done"] == 1
    assert collected.metrics["info/low"] >= 0
    assert collected.rows[0]["end"] == "done" and len(collected.rows[0]["turn_rewards"]) == 3
    json.dumps(collected.rows)
    # All rollouts of a group begin in the same state.
    prompts = {tuple(row.tolist()) for row in np.asarray(made.prompt_tokens)}
    assert 1 < len(prompts) <= 4


@pytest.mark.slow
def test_slow_and_async_steps_change_nothing(batch, tmp_path):
    _, _, reference = batch
    _, _, collected = one_batch(tmp_path, Later(), TROLL)
    batches = collected.batch, reference.batch
    # Log-probabilities are those of other rounding where others decode beside a response.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), *batches)
    np.testing.assert_array_equal(*(np.asarray(each.tokens) for each in batches))


TOKENIZER = jr.testing.ByteTokenizer()
RENDERER = make_renderer(TOKENIZER)


def playing(env, renderer=RENDERER, max_new_tokens=64, **options):
    """Episodes of an environment outside of a run."""
    return Episodes(
        env,
        renderer,
        decode=TOKENIZER.decode,
        seed=(0,),
        max_new_tokens=max_new_tokens,
        options=EpisodeOptions(**options),
    )


@for_each("fault", FAULTS)
def test_a_fault_is_the_end_of_its_episode(fault):
    end = "env_timeout" if fault == "hangs" else "env_error"
    episodes = playing(Letters(fault=fault, at=1), seconds=60.0)
    episodes.start(0, {"text": ""}, "a")
    if fault == "hangs":  # a reset may take a while on a busy machine
        episodes._workers._seconds = 0.5
    completion = completed(0, np.int32([97, 257]))
    assert episodes.follow(0)(completion).result(60) is None
    episode = episodes.take(completion).episode
    episodes.close()
    assert episode.end == end and FAULTS[fault][1] in episode.error


def test_a_first_observation_that_cannot_be_read_names_the_prompt():
    class Surrogate(Letters):
        def reset(self, task, seed):
            return State(0, 0), Observation([{"role": "user", "content": "\ud83d"}])

    episodes = playing(Surrogate())
    message = r"environment: the first observation of prompt 'a' cannot be read: UnicodeEncodeError"
    refuses(message, episodes.start, 0, {"text": ""}, "'a'", error=RuntimeError)
    episodes.close()


@pytest.mark.slow
def test_a_fault_ends_its_episode_alone(tmp_path):
    fault = "raises"
    _, _, collected = one_batch(tmp_path, Letters(fault=fault), TROLL, samples_shown=16)
    made = collected.batch
    share = collected.metrics["end/env_error"]
    assert 0 < share < 1 and collected.metrics["end/done"] == 1 - share
    assert np.asarray(made.where).mean() == 1 - share
    assert collected.metrics["reward_failures"] == share * made.where.size
    errors = [row["error"] for row in collected.rows if row["end"] == "env_error"]
    assert errors and all(FAULTS[fault][1] in error for error in errors)


def test_a_reset_that_fails_names_the_prompt(tmp_path):
    with pytest.raises(RuntimeError, match=r"reset of prompt .* failed: OSError: no such level\.$"):
        one_batch(tmp_path, Letters(fault="reset"))


@for_each("recipe", ["rlsd", "sdpo", "srpo"])
def test_a_teacher_of_the_texts_of_the_data_is_refused(tmp_path, recipe):
    with pytest.raises(ValueError, match=f"recipe '{recipe}' writes the prompts of its teacher"):
        load_experiment(config(tmp_path, Letters(), recipe=recipe))


@dataclasses.dataclass(frozen=True)
class TellsTask(Letters):
    """Its first observation is nine times as long as its task."""

    def reset(self, task, seed):
        state, _ = Letters.reset(self, task, seed)
        return state, Observation([{"role": "user", "content": task["text"] * 9}])


def test_a_held_out_task_that_begins_too_long_is_named(tmp_path):
    data = DataConfig(prompts=tasks(*"abcd"), evaluation=tasks("long one"), held_out=0, chat=False)
    options = {"data": data, "evaluation": EvaluationConfig(every=0, samples=1)}
    experiment, params = load_experiment(config(tmp_path, TellsTask(), **options))
    message = r"first observation of prompt 'long one' has \d+ tokens, but prompts have room for 40"
    with pytest.raises(ValueError, match=message):
        experiment.evaluate(params, jax.random.key(0))


@dataclasses.dataclass(frozen=True)
class Costly(Letters):
    """A limit of the run costs something."""

    cost: float = 2.0

    def truncation_reward(self, state, end, action):
        return -self.cost


@pytest.mark.slow
def test_an_evaluation_and_a_batch_have_what_a_limit_costs(tmp_path):
    options = {"episodes": dataclasses.replace(TURNS, max_turns=2), "recipe": TROLL}
    options["evaluation"] = EvaluationConfig(every=0, samples=1)
    means, batches = [], []
    for env in (Letters(), Costly(cost=0.0), Costly()):
        experiment, params, made = one_batch(tmp_path, env, **options)
        assert made.metrics["end/turns"] == 1
        results, _ = experiment.evaluate(params, jax.random.key(1))
        means.append([results[kind].mean for kind in ("greedy", "sampled")])
        batches.append(jax.tree.map(np.asarray, made.batch))
    jax.tree.map(np.testing.assert_array_equal, batches[0], batches[1])
    assert means[0] == means[1]
    np.testing.assert_allclose(np.subtract(means[0], means[2]), 2, atol=1e-6)
    cost = batches[0].extras["turn_rewards"] - batches[2].extras["turn_rewards"]
    assert cost.shape == (4, 4, 2)
    np.testing.assert_allclose(cost, np.broadcast_to([0, 2], cost.shape), atol=1e-6)
    np.testing.assert_allclose(batches[0].rewards - batches[2].rewards, 2, atol=1e-6)


@pytest.mark.slow
def test_a_run_trains_evaluates_and_resumes_exactly(tmp_path):
    evaluation = EvaluationConfig(every=0, samples=2)
    whole = train(config(tmp_path / "whole", Letters(), steps=4, evaluation=evaluation))
    steps = [row for row in whole.history if "loss" in row]
    assert len(steps) == 4 and {"turns", "end/done", "reward"} <= set(steps[-1])
    first = json.loads((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[0])
    assert 0 <= first["held_out"]["greedy"]["mean"] <= 3
    part = config(tmp_path / "part", Letters(), steps=2, evaluation=evaluation)
    train(part)
    resumed = train(dataclasses.replace(part, steps=4), resume=True)
    assert_same(resumed.state, whole.state)


def test_an_evaluation_of_episodes_draws_apart_from_the_batches(tmp_path, monkeypatch):
    """Each held-out task is played once greedily and then as often as the evaluation says."""
    played = []

    def play(engine, params, key, tasks, episodes, **options):
        played.append((key, len(tasks), options["samples"], options["temperature"]))
        return len(played), []

    monkeypatch.setattr(jaxrl_llm.train.experiment.experiment, "play_tasks", play)
    evaluation = EvaluationConfig(every=0, samples=3)
    experiment, params = load_experiment(config(tmp_path, Letters(), evaluation=evaluation))
    key = jax.random.key(0)
    results, _ = experiment.evaluate(params, key)
    held_out = len(experiment.held_out)
    assert [x[1:] for x in played] == [(held_out, 1, 0.0), (held_out, 3, None)]
    assert results == {"greedy": 1, "sampled": 2}
    for drawn in (x[0] for x in played):
        assert drawn != key


class Graded(Letters):
    truncation_reward = -1.0


@for_each(
    ("changes", "message"),
    [
        ({"reward": lambda p, c, m: 0.0}, "reward has no effect"),
        ({"environment": object()}, "reset and step"),
        ({"environment": Graded()}, "truncation_reward of an environment must be a function"),
        ({"environment": None, "reward": lambda p, c, m: 0.0}, "episodes has no effect"),
        ({"recipe": "eggroll"}, "cannot use an environment"),
        ({"reward_deadline": 3.0}, "episodes.seconds"),
        ({"reward_on_error": "zero"}, "reward_on_error has no effect"),
    ],
)
def test_what_has_no_effect_with_an_environment_is_refused(tmp_path, changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        config(tmp_path, Letters(), **changes)


def test_several_processes_play_no_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="an environment needs a single process; there are 2"):
        load_experiment(config(tmp_path, Letters()))


@pytest.mark.slow
def test_turns_branch_with_the_state_of_their_episode(tmp_path):
    """What a branch shares it plays once; from its turn on it is an episode of its own."""
    recipe = jr.recipes.portool(first=2, prob=1.0)
    experiment, _, collected = one_batch(tmp_path, Letters(), recipe, samples_shown=16)
    made, parse = collected.batch, make_renderer(experiment.tokenizer, chat=False).parse
    assert collected.metrics["end/done"] == 1 and collected.metrics["turns"] == 3
    nodes, mask = np.asarray(made.extras["node_ids"]), np.asarray(made.mask)
    tokens, turn_ids = np.asarray(made.tokens), np.asarray(made.extras["turn_ids"])
    rewards = np.array([row["turn_rewards"] for row in collected.rows]).reshape(4, 4, 3)
    shared = 0
    for p in range(4):
        for g in range(4):
            # A turn earns the share of its letters: the state was that of its own past.
            for turn in range(3):
                text = parse(tokens[p, g, turn_ids[p, g] == turn]).text
                share = sum(c < "m" for c in text) / max(len(text), 1)
                assert rewards[p, g, turn] == pytest.approx(share, abs=1e-6)
            for other in range(g):
                same = mask[p, g] & (nodes[p, g] == nodes[p, other]) & (nodes[p, g] >= 0)
                np.testing.assert_array_equal(tokens[p, g, same], tokens[p, other, same])
                shared += len(set(turn_ids[p, g, same]))
    assert shared >= 8  # two branches of each group, after one or two turns


@pytest.mark.slow
def test_a_greedy_baseline_is_an_episode_that_begins_as_its_group(tmp_path):
    """ReMax: at a temperature as good as greedy, each episode of a group is its baseline."""
    cold = dataclasses.replace(SAMPLING, temperature=2e-5)
    _, _, made = one_batch(tmp_path, Letters(), "remax", sampling=cold)
    rewards, baselines = made.batch.rewards, made.batch.extras["greedy_rewards"]
    assert np.ptp(baselines) > 0
    np.testing.assert_array_equal(rewards, np.broadcast_to(baselines[:, None], rewards.shape))
    # What the policy sampled, without what it was told, of the groups of four and of the baselines.
    assert made.metrics["tokens_sampled"] == np.sum(made.batch.mask) * (4 + 1) / 4


def test_branches_need_an_environment_and_a_turn(tmp_path):
    recipe = jr.recipes.arpo()
    with pytest.raises(ValueError, match=r"branches after the turns.*set config.environment"):
        load_experiment(tiny_run(tmp_path, recipe=recipe))
    pausing = jr.recipes.grpo().replace(collector=jr.curation.entropy_branched(segment=8))
    with pytest.raises(ValueError, match="pauses or continues responses within a turn"):
        one_batch(tmp_path, Letters(), pausing)
    short = jr.recipes.grpo().replace(collector=ShortAnswers())
    with pytest.raises(ValueError, match="asks for episodes of at most 6 tokens, but an env"):
        one_batch(tmp_path, Letters(), short)


class ShortAnswers:
    """A collector that limits the tokens of a response."""

    needs = jr.curation.Needs(slots=True)

    def init(self, num_prompts):
        return ()

    def propose(self, state, key, collection, count):
        return (jr.curation.Request(collection.group_size, limit=6),) * count, state

    def observe(self, state, collection):
        return jr.curation.in_order().observe(state, collection)


def completed(request, tokens):
    none = np.zeros(len(tokens), np.float32)
    return Completion(request, Tokens(tokens, none, none, none, np.zeros_like(tokens)), STOP)


def test_steps_that_wait_when_a_batch_ends_are_cancelled(caplog):
    episodes = playing(Letters(seconds=0.5), workers=1)
    episodes.start(0, {"text": ""}, "a")
    turns = [episodes.follow(0)(completed(i, np.int32([97, 257]))) for i in range(3)]
    turns[1].cancel()  # as the generation does
    episodes.close()
    assert turns[2].cancelled() and not caplog.records


DRAFT = "<switch>SWITCH</switch><subgoal>run</subgoal><action>east</action>"


@for_each(
    ("turn", "thinking", "blocks"),
    [
        (f"<think>{DRAFT}</think><subgoal>rest</subgoal><action>go</action>", False, True),
        (f"{DRAFT}</think><subgoal>rest</subgoal><action>go</action>", True, True),
        (DRAFT, True, False),
    ],
)
def test_a_subgoal_in_the_reasoning_is_not_credited(turn, thinking, blocks):
    """The environment does not see it, also where the prompt has opened the reasoning."""
    for stored in (False, True):
        check_credit(turn, thinking, blocks, stored)


def check_credit(turn, thinking, blocks, stored):
    renderer, tokens = make_renderer(TOKENIZER), np.int32([*turn.encode(), 257])
    renderer._thinking = thinking
    episodes = playing(Subgoals(Letters(turns=1)), renderer, max_new_tokens=200)
    if stored:
        trains = np.ones(len(tokens), bool)
        episode = episodes.stored(jr.curation.Response(tokens, trains=trains, reward=1.0))
    else:
        episodes.start(0, {"text": ""}, "a")
        completion = completed(0, tokens)
        assert episodes.follow(0)(completion).result(60) is None
        episode = episodes.take(completion).episode
        assert episode.turns[0].info["switch"] == 0
    episodes.close()
    batch = batch_with(tokens[None, None])
    none = np.zeros(1, np.float32)
    scores = jr.rewards.Scores(none, {}, none > 0, details={EPISODES: [episode]})
    names = ["switches", "subgoal_ids", "token_roles"]
    fields = episode_fields(batch, names, scores, decode=TOKENIZER.decode)
    assert fields["switches"].tolist() == [[[False]]]
    assert fields["subgoal_ids"].tolist() == [[[0 if blocks else -1]]]
    roles = fields["token_roles"][0, 0]
    said = [TOKENIZER.decode(tokens[roles == role]) for role in (1, 2, 3)]
    expected = ["<action>go</action>", "<subgoal>rest</subgoal>", ""] if blocks else [turn, "", ""]
    assert said == expected


WON = [True]


class Door:
    """A task that always begins alike; its door opens in the second turn, if it does."""

    tools = ()

    def reset(self, task, seed):
        return 0, Observation([{"role": "user", "content": task["text"]}])

    def step(self, turn, action):
        opened = WON[0] and turn == 1
        message = {"role": "user", "content": f"{turn}"}
        return turn + 1, Observation([message], float(opened), done=opened)


@pytest.mark.slow
def test_an_episode_of_the_pool_stands_in_where_all_fail(tmp_path):
    """DART: the tokens of a success train again, and no episode is longer than it was."""
    data = jr.train.DataConfig(prompts=tasks(*(f"door {n}" for n in range(4))), chat=False)
    WON[0] = True
    experiment, params, first = one_batch(tmp_path, Door(), "dart", data=data)
    assert (first.batch.rewards == 1).all() and not np.asarray(first.batch.where).any()
    assert first.collector_state.turns.tolist() == [2] * 4
    WON[0] = False
    later = params, jax.random.key(1), first.cursor, first.collector_state
    made = collect_rollouts(experiment, *later, number=1, version=0)
    batch = jax.tree.map(np.asarray, made.batch)
    # A prompt that always succeeded has two rollouts, the first of which gives way.
    assert batch.where.tolist() == [[True, True, False, False]] * 4
    assert batch.rewards[:, :2].tolist() == [[1.0, 0.0]] * 4
    turn_ids, mask = batch.extras["turn_ids"], batch.mask
    assert ((turn_ids >= 0) == mask)[:, :2].all()
    assert [set(turn_ids[p, g][mask[p, g]]) for p, g in np.ndindex(4, 2)] == [{0, 1}] * 8
    logp = np.asarray(make_scorer(experiment.model)(params, made.batch))
    np.testing.assert_allclose(logp[mask], batch.behavior_logp[mask], atol=1e-4)
    stored = {row.tobytes() for row in np.asarray(first.batch.tokens).reshape(16, -1)}
    width = first.batch.tokens.shape[-1]
    padded = np.pad(batch.tokens, [(0, 0), (0, 0), (0, max(width - batch.tokens.shape[-1], 0))])
    assert all(padded[p, 0, :width].tobytes() in stored for p in range(4))
    assert all(padded[p, 1, :width].tobytes() not in stored for p in range(4))


SEEDS = []


class Seeded(Letters):
    """Records the seeds of its resets."""

    def reset(self, task, seed):
        SEEDS.append(seed)
        return Letters.reset(self, task, seed)


def test_the_episodes_of_a_prompt_begin_alike_at_each_visit_if_a_method_remembers_them(tmp_path):
    """DART, whose limit of turns and stored success are of one start; others see new ones."""
    seeds = {}
    for name in ("dart", "grpo"):
        experiment, _ = load_experiment(config(tmp_path / name, Seeded(), recipe=name))
        SEEDS.clear()
        for number in (0, 1, 2, 2**31 - 1):  # the last is that of evaluations
            experiment.episodes((number,)).start(0, {"text": "door"}, "door")
        seeds[name] = SEEDS[:]
    assert len(set(seeds["dart"][:3])) == 1 and len(set(seeds["grpo"][:3])) == 3
    assert seeds["dart"][3] == seeds["grpo"][3] not in seeds["dart"][:3]


@pytest.mark.slow
def test_evaluations_go_to_the_devices_that_sample(tmp_path):
    made = config(
        tmp_path,
        Letters(),
        recipe="dapo",
        mesh=MeshConfig(data=4),
        asynchrony=AsyncConfig(max_staleness=1, sampler_devices=4, sampler_mesh=MeshConfig(data=4)),
        evaluation=EvaluationConfig(every=1, samples=1),
        steps=1,
    )
    train(made)
    again = train(dataclasses.replace(made, steps=2), resume=True)
    assert sum("held_out" in row for row in again.history) == 3


class Signals(Letters):
    """One turn; a signal comes in a given step of a held-out task."""

    def __init__(self, at):
        super().__init__(turns=1)
        object.__setattr__(self, "at", at)
        object.__setattr__(self, "held_out", itertools.count(1))  # of which no thread loses one

    def reset(self, task, seed):
        state, observation = Letters.reset(self, task, seed)
        return (task["text"], state), observation

    def step(self, state, action):
        task, state = state
        if task.startswith("held out") and next(self.held_out) == self.at:
            signal.raise_signal(signal.SIGTERM)
        return Letters.step(self, state, action)


# Twelve tasks, each played once greedily and once sampled, before the first step and after it.
@pytest.mark.slow
def test_a_signal_ends_an_evaluation_of_episodes_and_saves_its_step(tmp_path):
    at = 24 + 12 + 1

    held_out = tasks(*(f"held out {n}" for n in range(12)))
    made = config(
        tmp_path,
        env := Signals(at),
        data=DataConfig(prompts=tasks(*"abcd"), evaluation=held_out, held_out=0, chat=False),
        sampling=SamplingConfig(group_size=4, max_new_tokens=32, slots=4, prompt_length=40),
        evaluation=EvaluationConfig(every=1, samples=1),
    )
    result = train(made)
    assert result.interrupted == signal.SIGTERM and int(result.state.step) == 1
    assert [row["step"] for row in result.history if "held_out" in row] == [0]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
    assert at < next(env.held_out) < at + 12  # the other tasks are not played


@for_each("end", ["length", "env_error"])
def test_the_last_turn_of_an_episode_may_have_no_answer(end):
    """One episode that was cut off or failed does not end the run of all others."""
    whole = Episode((Turn(1, "a", info={"turn_formats": 0.5}),) * 2, "done")
    cut = Episode((Turn(1, "a", info={"turn_formats": 0.5}), Turn(1, "b")), end)
    batch = batch_with(np.ones((1, 2, 2), np.int32))

    def fields(*episodes):
        none = np.zeros(2, np.float32)
        scores = jr.rewards.Scores(none, {}, none > 0, details={EPISODES: list(episodes)})
        return episode_fields(batch, ["turn_formats"], scores, decode=str)["turn_formats"]

    assert fields(whole, cut).tolist() == [[[0.5, 0.5], [0.5, 0.0]]]
    with pytest.raises(ValueError, match="has nothing for the turn 'b'"):
        fields(whole, cut._replace(end="done"))
