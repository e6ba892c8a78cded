"""The training loop runs each preset that the catalog calls whole, and the check can fail."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jr
from jaxrl_llm.cli.options import load_config
from jaxrl_llm.recipes import Computed, catalog
from jaxrl_llm.testing import assert_loop_runs_whole

ROOT = Path(__file__).parents[2]
WHOLE = [method.preset for method in catalog.CATALOG if method.whole]
# One that reads the last update's KL and remembers prompts; the others with -m slow.
ALWAYS = ("mssr",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in ALWAYS else [pytest.mark.slow]) for n in sorted(WHOLE)],
)
def test_the_loop_runs_a_preset_whole(name):
    recipe = catalog.preset(name, length=8, num_prompts=20)
    if recipe.forward_only:
        # Greedy, the model of configs/tiny.py writes no letter: nobody in a population is better.
        return assert_loop_runs_whole(name)
    # As the command does. A collector acts where groups fail or agree, pass@k on what is right.
    hard = recipe.collector is not None or name == "passk_training"
    which = "hard" if hard else "config"
    assert_loop_runs_whole(name, config=load_config(ROOT / "configs" / "tiny.py", name=which))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scaf_grpo", "spo_tracker"])
def test_what_a_preset_reads_is_in_the_default_run(name):
    assert_loop_runs_whole(name)


def forgetful():
    """A controller that reads the last KL and remembers nothing."""

    def update(rewards, state, *, last_kl):
        return jnp.float32(0.0), state

    return jr.Transform(lambda: jnp.float32(0.0), update)


@dataclasses.dataclass(frozen=True)
class Idle:
    """A collector that asks in order and never learns what it says it remembers."""

    def init(self, num_prompts):
        return np.zeros(num_prompts)

    def propose(self, state, key, collection, count):
        requests, _ = jr.curation.in_order().propose((), key, collection, count)
        return requests, state

    def observe(self, state, collection):
        return jr.curation.in_order().observe((), collection)[0], state


def still(reference, params, step):
    return reference


def test_what_does_not_move_fails():
    kl = jr.given(jr.bind(jr.regularizers.kl_to_reference), coef="kl_coef")
    controller = Computed("kl_coef", forgetful(), "controller")
    recipe = jr.recipes.grpo().replace(name="forgetful", regularizers=(kl,), computed=(controller,))
    with pytest.raises(AssertionError, match="'forgetful': the state of its controller 'kl_coef'"):
        assert_loop_runs_whole(recipe, steps=1)
    recipe = jr.recipes.grpo().replace(name="idle", collector=Idle())
    with pytest.raises(AssertionError, match="'idle': the state of its collector did not move"):
        assert_loop_runs_whole(recipe, steps=1)
    recipe = jr.recipes.grpo().replace(name="still", reference=still)
    with pytest.raises(AssertionError, match="'still': the reference did not move"):
        assert_loop_runs_whole(recipe, steps=1)
