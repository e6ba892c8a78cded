"""What a collector, its data or its reward does wrong in a run: one sentence, and a checkpoint."""

import dataclasses
import itertools

import numpy as np
import pytest
from helpers import refuses
from rows import for_each
from test_resumed_collectors import first_is_low
from tiny_run import low_bytes, tiny_run

import jaxrl_llm as jr
from jaxrl_llm import curation
from jaxrl_llm.data import Prompt
from jaxrl_llm.environments import Gridworld, MemoryBandit, NumberGuess
from jaxrl_llm.rewards import RewardError
from jaxrl_llm.train import train
from jaxrl_llm.train.experiment.run_data import check_data
from jaxrl_llm.train.experiment.setup import load_experiment

pytestmark = pytest.mark.usefixtures("shared_programs")

BATCH = 4 * 2  # rollouts of a step


def too_many():
    """Nobody gets more rollouts in the first step; then one group gets three."""
    called = itertools.count()
    count = {True: [0, 0, 0, 3], False: [0] * 4}
    return curation.two_phase(lambda counts: np.asarray(count[next(called) > 0]), max_rollouts=4)


def named_at_first():
    """A mapping in the first step and for some calls of the second."""
    called = itertools.count()

    def reward(prompt, completion, metadata):
        mean = first_is_low(prompt, completion, metadata)
        return {"reward": mean, "short": 1.0} if next(called) < BATCH + 3 else mean

    return reward


def playing(folder, recipe, environment=NumberGuess()):  # noqa: B008
    return tiny_run(folder, recipe=recipe, reward=None, environment=environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("collector", "reward", "message"),
    [
        (too_many(), first_is_low, "3 more; from 0 to 2 are left to max_rollouts 4"),
        (
            None,
            named_at_first(),
            r"a plain number for .* but the names \['reward', 'short'\] before",
        ),
    ],
    ids=["collector", "reward"],
)
def test_a_run_ends_with_a_sentence_and_its_state(tmp_path, collector, reward, message):
    recipe = jr.recipes.grpo().replace(name="wrong", collector=collector)
    config = tiny_run(tmp_path, recipe=recipe, reward=reward, steps=3)
    with pytest.raises((ValueError, RewardError), match=message) as error:
        train(config)
    assert "\n" not in str(error.value)
    saved = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert saved == ["step_00000001"]


def everything(mask):
    return np.ones(len(mask), bool)


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
    refuses(f"^config: recipe '{recipe}' is only defined .*{told}", playing, tmp_path, recipe, env)
    for fits in (NumberGuess(turns=1), Gridworld(cost=0.0), MemoryBandit(turns=1)):
        playing(tmp_path, recipe, fits)


def collected(collector):
    return jr.recipes.grpo().replace(name="own", collector=collector)


def half(other):
    return curation.mixed((curation.in_order(), 0.5), (other, 0.5))


WITHIN = r"within a turn of an episode|sends messages in place of the first"
OF_DATA = "brings responses of the data .* use another recipe"
TEACHER = curation.repair(teacher=lambda question, shown: "")


@for_each(
    "recipe, told",
    [
        ("rollout_replay", "without the turns of an episode; use another recipe"),
        *((name, WITHIN) for name in ("april", "vineppo", "spo_tree")),
        (collected(curation.windowed()), WITHIN),
        (collected(half(curation.pruned(everything))), WITHIN),
        (collected(curation.hinted(TEACHER)), WITHIN),
        # A collector may send the first one only late, after which no resume can go on.
        ("scaf_grpo", "sends messages .* use another recipe"),
        ("training_free_grpo", "sends messages .* use another recipe"),
        (collected(curation.demonstrations(when="failed")), OF_DATA),
        (collected(curation.prefixed()), OF_DATA),
        (collected(curation.hinted(curation.hint_share())), OF_DATA),
        (collected(half(curation.plain_texts())), OF_DATA),
    ],
)
def test_what_an_environment_does_not_play_is_said_by_the_configuration(tmp_path, recipe, told):
    with pytest.raises(ValueError, match=rf"^config: .*({told})") as error:
        playing(tmp_path, recipe)
    assert "\n" not in str(error.value)


def test_a_reward_that_states_other_values_is_refused(tmp_path):
    signed = jr.core.traits(reward_range=(-1.0, 1.0))(low_bytes)
    with pytest.raises(ValueError, match="mopps' .* low_bytes gives rewards from -1 to 1; scale"):
        tiny_run(tmp_path, recipe="mopps", reward=signed)
    tiny_run(tmp_path, recipe="mopps", reward=jr.core.traits(reward_range=(0.0, 1.0))(low_bytes))


def test_a_population_answers_prompts_of_data_that_are_checked(tmp_path):
    recipe = jr.recipes.eggroll().replace(name="stages", collector=curation.staged((2,)))
    config = tiny_run(tmp_path, recipe=recipe, remat="full", model=lambda: pytest.fail("loaded"))
    refuses("staged: 'stage' of prompt .* must be an integer", load_experiment, config)


def test_a_column_of_the_name_of_the_prompt_is_refused(tmp_path):
    def checked(recipe, prompts, held_out=(), **options):
        check_data(tiny_run(tmp_path, recipe=recipe, **options), recipe, prompts, held_out)

    recipe, plain = jr.recipes.sft(column="text"), jr.recipes.grpo()
    other = Prompt("2+2?", metadata={"text": "4"}, id="q")
    same = Prompt("a", metadata={"text": "a"})
    message = "^data: prompt 'q' has a column 'text', which collectors read as the prompt itself"
    for prompts in ([same, other],), ([same], [other]):
        refuses(message, checked, recipe, *prompts)
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
    refuses("offline_pairs: prompt 'r' has no 'chosen'", checked, both)
