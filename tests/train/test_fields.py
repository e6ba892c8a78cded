"""The fields that the loop attaches to a batch, and the rewards that a method takes."""

import inspect
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.data import Prompt
from jaxrl_llm.data.questions import Question
from jaxrl_llm.recipes import PRESETS, Batch, Recipe, catalog
from jaxrl_llm.rewards import Scores
from jaxrl_llm.train import train
from jaxrl_llm.train.fields import attach_fields, check_fields, check_rewards, host_fields

P, G, T = 2, 3, 4
REWARDS = np.array([1, 0, 1, 0, 0, 1], np.float32)


def needing(*names, inputs=()) -> Recipe:
    """A recipe that cannot do without some entries of the context."""

    def advantage(rewards, **context):
        return rewards

    kinds = inspect.Parameter
    advantage.__signature__ = inspect.Signature(
        [
            kinds("rewards", kinds.POSITIONAL_OR_KEYWORD),
            *(kinds(name, kinds.KEYWORD_ONLY) for name in names),
        ]
    )
    slots = {"advantage": jr.stateless(advantage), "surrogate": jr.surrogates.ppo_clip}
    return Recipe(name="plain", inputs=inputs, **slots)


def questions(**metadata):
    """P questions; each name of the metadata has a list of P values."""
    return [
        Question(
            Prompt(f"q{i}", id=f"q{i}", metadata={k: v[i] for k, v in metadata.items()}), [1, 2]
        )
        for i in range(P)
    ]


def bring(recipe, *, reward_components=(), failures=0, metadata=(), greedy=None, **rollout):
    kept = np.ones((P, G, T), bool)
    batch = Batch(
        tokens=np.zeros((P, G, T), np.int32),
        mask=kept,
        rewards=REWARDS.reshape(P, G),
        where=kept[..., 0],
        prompt_tokens=np.ones((P, 2), np.int32),
        prompt_mask=np.ones((P, 2), bool),
    )
    reward_components = {k: np.asarray(x, np.float32) for k, x in dict(reward_components).items()}
    return attach_fields(
        batch,
        recipe,
        scores=Scores(REWARDS, reward_components, np.arange(P * G) < failures),
        rollout=SimpleNamespace(
            finish=jnp.array([[0, 1, 1], [1, 0, 1]]), version=jnp.full((P, G, T), 6), **rollout
        ),
        step=7,
        indices=[9, 4],
        questions=questions(**dict(metadata)),
        greedy=greedy or (lambda: pytest.fail("nobody asked for greedy responses")),
    )


def test_a_recipe_that_needs_nothing_gets_nothing():
    batch = bring(jr.recipes.dapo(), reward_components={"a": REWARDS})
    assert batch.extras == {} and batch.reward_components is None


def test_what_the_loop_knows_by_itself():
    names = ("prompt_ids", "truncated", "versions", "current_version", "greedy_rewards")
    recipe = needing(*names)
    assert host_fields(recipe) == set(names)
    check_fields(recipe, questions())
    greedy = np.array([0.25, 0.5])
    extras = bring(recipe, greedy=lambda: greedy).extras
    assert extras["prompt_ids"].tolist() == [9, 4]
    assert extras["truncated"].tolist() == [[True, False, False], [False, True, False]]
    assert extras["versions"].shape == (P, G, T) and (extras["versions"] == 6).all()
    assert extras["current_version"].tolist() == [7, 7]
    assert extras["greedy_rewards"].tolist() == [0.25, 0.5]
    kinds = {k: x.dtype.name for k, x in extras.items()}
    assert kinds == {
        "prompt_ids": "int32",
        "truncated": "bool",
        "versions": "int32",
        "current_version": "int32",
        "greedy_rewards": "float32",
    }


def test_a_number_a_rollout_comes_from_the_rewards_components():
    flawed = [0, 1, 0, 1, 0, 0]
    batch = bring(jr.recipes.fapo(), reward_components={"reward": REWARDS, "flawed": flawed})
    assert batch.extras["flawed"].dtype == bool
    assert batch.extras["flawed"].tolist() == [[False, True, False], [True, False, False]]
    assert batch.reward_components is None
    both = bring(
        needing("budgets", "reward_components"),
        reward_components={"reward": REWARDS, "style": REWARDS / 2, "budgets": 8 * REWARDS},
    )
    assert both.extras["budgets"].tolist() == (8 * REWARDS).reshape(P, G).tolist()
    assert set(both.reward_components) == {"reward", "style"}  # a budget is no reward


def test_a_number_a_prompt_comes_from_the_metadata():
    recipe = jr.recipes.v05_baseline()
    check_fields(recipe, questions(prior=[0.5, 1]))
    # A column of that name has one number a rollout, which is not what is meant.
    reward_components = {"reward": REWARDS, "prior": REWARDS}
    for options in ({}, {"reward_components": reward_components}):
        batch = bring(recipe, metadata={"prior": [0.5, 1]}, **options)
        assert batch.extras["prior"].tolist() == [0.5, 1.0]
        assert batch.extras["prior"].dtype == np.float32


def test_names_of_ones_own_come_from_either():
    recipe = needing("mine", inputs=("mine",))
    check_fields(recipe, questions())  # what the reward returns is not known yet
    found = bring(recipe, metadata={"mine": [[1.0, 2.0], [3.0, 4.0]]}).extras["mine"]
    assert found.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    found = bring(recipe, reward_components={"reward": REWARDS, "mine": 2 * REWARDS}).extras["mine"]
    assert found.shape == (P, G)
    with pytest.raises(
        ValueError,
        match="'plain' needs 'mine'; prompt 'q0' has none in its metadata, and the reward returns "
        "no mapping that has it",
    ):
        bring(recipe)


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        (["flawed"], {}, r"needs 'flawed' \(whether .*\); it is no name in the mapping that the"),
        (
            ["flawed"],
            {"metadata": {"flawed": [True, False]}},  # a prompt has no flaws
            "it is no name in the mapping that the reward returns",
        ),
        (
            ["flawed"],
            {"reward_components": {"right": REWARDS, "flawed": REWARDS}},
            "takes 'flawed' from the mapping .* added up to the reward; give the mapping an entry "
            "'reward'",
        ),
        (
            ["flawed"],
            {"reward_components": {"reward": REWARDS, "flawed": REWARDS / 2}},
            "needs 0 and 1 in 'flawed' .*; got 0.5",
        ),
        (
            ["flawed"],
            {"reward_components": {"reward": REWARDS, "flawed": [0, 1, 0, 1, np.nan, 0]}},
            "needs a number in 'flawed' for every response; the reward gave NaN for prompt 'q1'",
        ),
        (
            ["prior"],
            {"reward_components": {"reward": REWARDS, "prior": REWARDS}},
            r"needs 'prior' \(predicted .*\); prompt 'q0' has none in its metadata\.",
        ),
        (["prior"], {"metadata": {"prior": [0.5, "high"]}}, "prompt 'q1' has 'high', where a num"),
        (["prior"], {"metadata": {"prior": [None, 0.5]}}, "prompt 'q0' has None, where a number"),
        (["prior"], {"metadata": {"prior": [0.5, np.nan]}}, "prompt 'q1' has nan, where a number"),
        (["prior"], {"metadata": {"prior": [0.5, [1.0]]}}, r"'q1' has \[1.0\], where a number"),
        (
            ["mine"],
            {"metadata": {"mine": [[1.0], [1.0, 2.0]]}},
            r"prompt 'q1' has a value of shape \(2,\), those before it \(1,\)",
        ),
        (
            ["reward_components"],
            {},
            "several rewards apart, but the reward returns one number; r",
        ),
        (["reward_components"], {"failures": 6}, "one number, or failed in all 6 calls; return a"),
    ],
)
def test_what_is_nowhere_or_no_number_is_one_sentence(names, options, words):
    recipe = needing(*names, inputs=("mine",) if "mine" in names else ())
    with pytest.raises(ValueError, match=f"recipe 'plain' .*{words}"):
        bring(recipe, **options)


def test_presets_that_no_run_can_bring_what_they_need_are_refused():
    refused = {}
    for name in PRESETS:
        try:
            recipe = catalog.preset(name, length=8, num_prompts=P)
            check_fields(recipe, questions(prior=[0.5, 0.5]))
        except ValueError as error:
            refused[name] = str(error)
    first = {
        "ps_grpo": "similarity",
        "sdpo": "teacher_prompt_tokens",
        "srpo": "teacher_prompt_tokens",
        "trloo": "turn_ids",
        "verpo": "test_passes",
    }
    assert refused.keys() == first.keys()
    for name, extra in first.items():
        assert refused[name].startswith(f"recipe {name!r} needs {extra!r} (")
        assert refused[name].endswith(
            "which this loop cannot bring; call train.make_step with batches that hold it in "
            "extras."
        )


def test_metadata_that_is_missing_is_told_before_the_first_step():
    with pytest.raises(ValueError, match="'v05_baseline' needs 'prior' .* prompt 'q1' has None"):
        check_fields(jr.recipes.v05_baseline(), questions(prior=[0.5, None]))
    adapts = jr.recipes.spo_tracker(num_prompts=P, rho=None)
    with pytest.raises(ValueError, match="'spo_tracker' needs 'policy_shift'.*'q0' has none in"):
        check_fields(adapts, questions())


def test_values_of_a_critic_are_computed_and_those_of_nobody_refused():
    gae = jr.chain(
        jr.stateless(jr.advantages.terminal_rewards),
        jr.stateless(jr.advantages.gae),
        jr.stateless(jr.advantages.whiten),
    )
    assert host_fields(jr.recipes.ppo_max()) == set()
    values = Recipe(
        name="plain", advantage=gae, surrogate=jr.surrogates.ppo_clip, inputs=("values",)
    )
    with pytest.raises(ValueError, match="needs 'values' .* which this loop cannot bring"):
        check_fields(values, questions())


QUESTIONS = [Question(Prompt("What?", id="a"), [1]), Question(Prompt("Who?"), [1])]


def recipe_of(name):
    return PRESETS[name](**({"num_prompts": 2} if name in ("spo_tracker", "mssr") else {}))


@pytest.mark.parametrize("name", ["spo_tracker", "mssr", "v05_baseline"])
@pytest.mark.parametrize("value", [1.5, -1.0])
def test_a_success_rate_takes_rewards_between_0_and_1(name, value):
    recipe = recipe_of(name)
    good = np.array([[0.0, 1.0], [0.5, 0.25]], np.float32)
    check_rewards(recipe, good, QUESTIONS)
    # Three float32 parts of 0.1, 0.2 and 0.7 may add up to the next number above 1.
    check_rewards(recipe, np.nextafter(good, np.float32(2)), QUESTIONS)
    good[1, 0] = value
    words = rf"^recipe '{name}' is defined for rewards in \[0, 1\] alone; "
    with pytest.raises(ValueError, match=words + rf"prompt 'Who\?' has a reward of {value:g}\.$"):
        check_rewards(recipe, good, QUESTIONS)


def test_maxrl_takes_any_reward_from_0_on():
    recipe, rewards = recipe_of("maxrl"), np.array([[0.0, 40.0]], np.float32)
    check_rewards(recipe, rewards, QUESTIONS)
    with pytest.raises(ValueError, match="of at least 0 alone; prompt 'a' has a reward of -40"):
        check_rewards(recipe, -rewards, QUESTIONS)


def test_other_methods_take_any_reward():
    check_rewards(jr.recipes.grpo(), np.array([[-7.0, 9.0]], np.float32), QUESTIONS)


def test_a_run_is_told_the_prompt(tmp_path):
    config = tiny_run(tmp_path, recipe="maxrl", reward=lambda *_: -1.0, steps=1)
    with pytest.raises(ValueError, match="recipe 'maxrl' .* at least 0 alone; prompt .* of -1"):
        train(config)
