"""What a collector, its data or its reward does wrong in a run: one sentence, and a checkpoint."""

import dataclasses
import itertools

import numpy as np
import pytest
from rows import for_each
from test_resumed_collectors import first_is_low
from tiny_run import CONFIG, low_bytes, tiny_run

import jaxrl_llm as jr
from jaxrl_llm import curation
from jaxrl_llm.data import Prompt, PromptSet
from jaxrl_llm.environments import Gridworld, MemoryBandit, NumberGuess
from jaxrl_llm.rewards import RewardError
from jaxrl_llm.train import train
from jaxrl_llm.train.run_data import check_data
from jaxrl_llm.train.setup import load_experiment

pytestmark = pytest.mark.usefixtures("shared_programs")

BATCH = 4 * 2  # rollouts of a step


def prompts():
    """Demonstrations of a tokenizer with more tokens."""
    rows = (Prompt(f"q{n}", metadata={"demonstration": [65, 70000]}, id=f"q{n}") for n in range(10))
    return PromptSet(rows, source="tiny")


def allocation(then):
    """Nobody gets more rollouts in the first step; then what ``then`` says."""
    called = itertools.count()
    return lambda counts: np.asarray(then if next(called) else [0] * 4)


def right_at_first():
    """Every rollout of the first step is right, and none after it."""
    called = itertools.count()
    return lambda prompt, completion, metadata: float(next(called) < BATCH)


def named_at_first():
    """A mapping in the first step and for some calls of the second."""
    called = itertools.count()

    def reward(prompt, completion, metadata):
        mean = first_is_low(prompt, completion, metadata)
        return {"reward": mean, "short": 1.0} if next(called) < BATCH + 3 else mean

    return reward


@dataclasses.dataclass(frozen=True)
class TooOld:
    """Asks for a stored group without regard to its age."""

    inner: object = curation.replayed(capacity=8, share=0.5)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def for_run(self, group_size, max_new_tokens):
        return TooOld(self.inner.for_run(group_size, max_new_tokens))

    def for_batch(self, num_groups):
        return TooOld(self.inner.for_batch(num_groups))

    def propose(self, state, key, collection, count):
        if collection.step:
            options = {"version": collection.version, "max_staleness": 0}
            return (curation.stored_request(state.buffer, 0, **options),) * count, state
        return self.inner.propose(state, key, collection, count)


@dataclasses.dataclass(frozen=True)
class LongText:
    """Sends a text without asking whether it has room, after the first step."""

    sends_text = True

    def __getattr__(self, name):
        return getattr(curation.in_order(), name)

    def init(self, num_prompts):
        return curation.in_order().init(num_prompts)

    def observe(self, state, collection):
        return curation.in_order().observe(state, collection)

    def propose(self, state, key, collection, count):
        requests, state = curation.in_order().propose(state, key, collection, count)
        if collection.step:
            requests = tuple(request._replace(text=_too_long) for request in requests)
        return requests, state


def _too_long(row):
    return row["text"] + 5000 * "!"


def more(then):
    return curation.two_phase(allocation(then), max_rollouts=4)


CASES = {
    "negative": (more([0, -1, 0, 0]), None, "gives group 1, which has 2 rollouts, -1 more"),
    "not integers": (more([0.5] * 4), None, "must return 4 integers; got shape .* of float64"),
    "too many": (more([0, 0, 0, 3]), None, "3 more; from 0 to 2 are left to max_rollouts 4"),
    "long hint": (
        LongText(),
        None,
        r"Prompt 'q\d', with the text of collector LongText.* has 5002 tokens, but .* room for",
    ),
    "other tokenizer": (
        curation.demonstrations(when="failed"),
        right_at_first(),
        r"response to prompt 'q\d' holds token 70000, outside the vocabulary of",
    ),
    "too old": (TooOld(), None, "by version 0 of the weights, 1 before version 1; max_staleness"),
    "some calls": (
        None,
        named_at_first(),
        r"a plain number for .* but the names \['reward', 'short'\] before",
    ),
}


@pytest.mark.slow
@pytest.mark.of_many
@pytest.mark.parametrize("name", CASES)
def test_a_run_ends_with_a_sentence_and_its_state(tmp_path, name):
    collector, reward, message = CASES[name]
    config = tiny_run(
        tmp_path,
        recipe=jr.recipes.grpo().replace(name="wrong", collector=collector),
        data=dataclasses.replace(CONFIG.data, prompts=prompts),
        reward=reward or first_is_low,
        steps=3,
    )
    with pytest.raises((ValueError, RewardError), match=message) as error:
        train(config)
    assert "\n" not in str(error.value)
    saved = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert saved == ["step_00000001"]


def never():
    pytest.fail("the model was loaded")


@for_each("recipe", ["rollout_replay", "sapo_swarm"])
def test_stored_responses_are_no_episodes(tmp_path, recipe):
    """Said by the configuration, and not when the first of them is brought."""
    with pytest.raises(ValueError, match="without the turns of an episode; use another recipe"):
        tiny_run(tmp_path, recipe=recipe, reward=None, environment=NumberGuess())


def everything(mask):
    return np.ones(len(mask), bool)


@for_each(
    "recipe",
    [
        *("april", "t_ppo", "vineppo", "scope", "spo_tree", "spo_chain", "arrol"),
        jr.recipes.grpo().replace(collector=curation.windowed()),
        jr.recipes.grpo().replace(
            collector=curation.mixed((curation.in_order(), 0.5), (curation.pruned(everything), 0.5))
        ),
        jr.recipes.grpo().replace(
            collector=curation.hinted(curation.repair(teacher=lambda question, shown: ""))
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else repr(x.collector),
)
def test_an_environment_plays_whole_turns(tmp_path, recipe):
    """Said by the configuration, and not when the first batch is sampled."""
    told = "within a turn of an episode|sends messages in place of the first"
    with pytest.raises(ValueError, match=rf"^config: .*({told}).* with an environment\.$"):
        tiny_run(tmp_path, recipe=recipe, reward=None, environment=NumberGuess())


@for_each(
    ("recipe", "env", "told"),
    [
        ("mopps", NumberGuess(high=3, turns=3), r"in \[0, 1\], but NumberGuess.* from 0 to 1.25"),
        ("v0_budget", MemoryBandit(turns=2), r"in \[0, 1\], but MemoryBandit.* from 0 to 2"),
        ("maxrl", Gridworld(), "at least 0, but Gridworld.* from -inf to 0.9"),
        ("dars", Gridworld(), "0 and 1, which .*dars_extra_rollouts.* counts, but Gridworld"),
    ],
)
def test_an_environment_of_other_rewards_is_refused(tmp_path, recipe, env, told):
    with pytest.raises(ValueError, match=f"^config: recipe '{recipe}' is only defined .*{told}"):
        tiny_run(tmp_path, recipe=recipe, reward=None, environment=env)
    for fits in (NumberGuess(turns=1), Gridworld(cost=0.0), MemoryBandit(turns=1)):
        tiny_run(tmp_path, recipe=recipe, reward=None, environment=fits)


def test_a_reward_that_states_other_values_is_refused(tmp_path):
    signed = jr.core.traits(reward_range=(-1.0, 1.0))(low_bytes)
    with pytest.raises(ValueError, match="mopps' .* low_bytes gives rewards from -1 to 1; scale"):
        tiny_run(tmp_path, recipe="mopps", reward=signed)
    tiny_run(tmp_path, recipe="mopps", reward=jr.core.traits(reward_range=(0.0, 1.0))(low_bytes))


@for_each("recipe", ["scaf_grpo", "nurl", "xrpo", "training_free_grpo", "masa"])
def test_an_environment_takes_no_messages(tmp_path, recipe):
    """A collector may send the first one only late, after which no resume can go on."""
    with pytest.raises(ValueError, match="sends messages .* use another recipe") as error:
        tiny_run(tmp_path, recipe=recipe, reward=None, environment=NumberGuess())
    assert str(error.value).startswith("config: ") and "\n" not in str(error.value)


@for_each(
    "collector",
    [
        curation.demonstrations(when="failed"),
        curation.prefixed(),
        curation.hinted(curation.hint_share()),
        curation.only_demonstrations(),
        curation.mixed((curation.in_order(), 0.5), (curation.plain_texts(), 0.5)),
    ],
    ids=repr,
)
def test_responses_of_the_data_are_no_episodes(tmp_path, collector):
    recipe = jr.recipes.grpo().replace(name="brings", collector=collector)
    with pytest.raises(ValueError, match="brings responses of the data .* use another recipe") as e:
        tiny_run(tmp_path, recipe=recipe, reward=None, environment=NumberGuess())
    assert str(e.value).startswith("config: ") and "\n" not in str(e.value)


def test_a_population_answers_prompts_of_data_that_are_checked(tmp_path):
    recipe = jr.recipes.eggroll().replace(name="stages", collector=curation.staged((2,)))
    config = tiny_run(tmp_path, recipe=recipe, remat="full", model=never)
    with pytest.raises(ValueError, match="staged: 'stage' of prompt .* must be an integer"):
        load_experiment(config)


def test_a_column_of_the_name_of_the_prompt_is_refused(tmp_path):
    def checked(recipe, prompts, held_out=(), **options):
        check_data(tiny_run(tmp_path, recipe=recipe, **options), recipe, prompts, held_out)

    recipe, plain = jr.recipes.sft(column="text"), jr.recipes.grpo()
    other = Prompt("2+2?", metadata={"text": "4"}, id="q")
    same = Prompt("a", metadata={"text": "a"})
    message = "^data: prompt 'q' has a column 'text', which collectors read as the prompt itself"
    for prompts in ([same, other],), ([same], [other]):
        with pytest.raises(ValueError, match=message):
            checked(recipe, *prompts)
    with pytest.warns(UserWarning, match="'text', which the environment gets as the prompt"):
        checked(plain, [same, other], environment=NumberGuess(), reward=None)
    checked(recipe, [same])
    for each in (plain, jr.recipes.sft(column="answer")):  # which do not read it
        checked(each, [Prompt("2+2?", "4", {"text": "2+2? 4"})])


def test_a_share_of_a_batch_is_at_least_one_group(tmp_path):
    collector = curation.mixed((curation.in_order(), 0.95), (curation.plain_texts(), 0.05))
    recipe = jr.recipes.grpo().replace(name="texts", text_coef=1.0, collector=collector)
    with pytest.raises(
        ValueError, match="share of plain_texts.* is no group .* prompts_per_step 4"
    ):
        check_data(tiny_run(tmp_path, recipe=recipe), recipe, [Prompt("q", id="q")])


@for_each(
    ("collector", "size", "least"),
    [
        (curation.judged(), 3, 4),
        (curation.judged(judges=0.0, refines=0.1), 8, 10),
        (curation.replayed(capacity=4, share=0.5), 1, 2),
        (curation.replayed(capacity=4, share=0.1), 4, 6),
        (curation.replayed(capacity=4, share=0.5, draw="each"), 1, 2),
        (curation.shared(curation.shared_folder("never", node="a"), share=0.1), 4, 6),
    ],
    ids=["judged", "refined", "replayed", "small share", "each", "shared"],
)
def test_a_share_that_is_no_group_of_a_batch_is_refused(tmp_path, collector, size, least):
    recipe = jr.recipes.grpo().replace(name="part", collector=collector)
    prompts = [Prompt(f"q{n}", id=f"q{n}") for n in range(4)]
    config = tiny_run(tmp_path, recipe=recipe, prompts_per_step=size)
    with pytest.raises(ValueError, match=f"0.* is no group of a batch of {size}, so it would"):
        check_data(config, recipe, prompts)
    check_data(dataclasses.replace(config, prompts_per_step=least), recipe, prompts)


def test_a_run_that_would_judge_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="judges=0.25 is no group of a batch of 3"):
        train(tiny_run(tmp_path, recipe="spark", prompts_per_step=3, model=never))
    off = jr.recipes.spark(judges=0.0, refines=0.0)
    check_data(tiny_run(tmp_path, recipe=off, prompts_per_step=1), off, [Prompt("q", id="q")])


def test_held_out_rows_have_no_responses_where_a_part_of_a_batch_is_sampled():
    """Their evaluation samples answers, where that of pairs of the data compares them."""
    config = tiny_run("never", recipe="grpo")
    pair = {"chosen": "4", "rejected": "5"}
    rows = [Prompt(f"q{n}", metadata=pair, id=f"q{n}") for n in range(4)]
    held_out = [Prompt("r", id="r")]

    def checked(collector):
        recipe = jr.recipes.grpo().replace(name="pairs", collector=collector)
        check_data(config, recipe, rows, held_out)

    checked(curation.mixed((curation.in_order(), 0.5), (curation.offline_pairs(), 0.5)))
    both = curation.mixed((curation.offline_pairs(), 0.5), (curation.offline_pairs(), 0.5))
    with pytest.raises(ValueError, match="offline_pairs: prompt 'r' has no 'chosen'"):
        checked(both)
