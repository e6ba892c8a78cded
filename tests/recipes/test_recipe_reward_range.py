"""Which rewards a recipe is defined for, as its advantage says."""

import math

import pytest

import jaxrl_llm as jr
from jaxrl_llm.core import traits, traits_of

ANY = (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (jr.stateless(jr.advantages.grpo), ANY),
        (jr.stateless(jr.advantages.maxrl, scale="root"), (0.0, math.inf)),
        (jr.stateless(jr.advantages.v05_baseline), (0.0, 1.0)),
        (jr.advantages.spo_tracker(num_prompts=2), (0.0, 1.0)),
        (jr.advantages.spo_tracker(num_prompts=2, rho=None), (0.0, 1.0)),
        (jr.advantages.mssr_tracker(num_prompts=2), (0.0, 1.0)),
        (
            jr.chain(
                jr.advantages.mssr_tracker(num_prompts=2),
                jr.stateless(jr.advantages.positive_part, error_sq=1.0),
            ),
            (0.0, 1.0),
        ),
        (jr.chain(), ANY),
    ],
)
def test_the_advantage_says_it(advantage, expected):
    recipe = jr.recipes.grpo(kl_coef=0.0).replace(advantage=advantage, inputs=("prior",))
    assert recipe.reward_range == expected


def test_what_comes_first_in_a_chain_may_bring_rewards_into_range():
    def right(rewards):
        return (rewards > 0).astype("float32")

    maxrl = jr.stateless(jr.advantages.maxrl)
    recipe = jr.recipes.maxrl()
    assert recipe.replace(advantage=jr.chain(jr.stateless(right), maxrl)).reward_range == ANY
    inner = jr.chain(jr.chain(maxrl, jr.stateless(abs)))
    assert recipe.replace(advantage=inner).reward_range == (0.0, math.inf)


def test_the_mark_is_seen_through_wrappings_and_leaves_the_function_as_it_was():
    def plain(rewards, *, where=None):
        return rewards

    marked = traits(reward_range=(-1.0, 1.0))(plain)
    assert traits_of(jr.bind(marked, where=None)).reward_range == (-1.0, 1.0)
    assert traits_of(plain).reward_range == ANY
    assert jr.recipes.maxrl().replace(advantage=jr.stateless(marked)).reward_range == (-1.0, 1.0)
