"""The training loop runs each preset as far as the catalog says, and the check can fail."""

import dataclasses
import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jr
from jaxrl_llm.cli.options import load_config
from jaxrl_llm.data import PromptSet
from jaxrl_llm.diffusion import FlowLikelihood
from jaxrl_llm.recipes import Computed, catalog
from jaxrl_llm.testing import ByteTokenizer, assert_loop_runs_whole, tiny_model
from jaxrl_llm.train import DataConfig, OptimizerConfig
from jaxrl_llm.train.config import find_prompts
from jaxrl_llm.train.fields import needs_environment

ROOT = Path(__file__).parents[2]
EVERY = [x.preset for x in catalog.CATALOG if x.preset]
pytestmark = pytest.mark.usefixtures("shared_programs")
# One that reads the last update's KL and remembers prompts; the others with -m slow.
ALWAYS = ("mssr",)
SLOW = [pytest.mark.slow, pytest.mark.of_many]
DESCENT = OptimizerConfig(name="sgd", b1=0.0, learning_rate=1.0)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in ALWAYS else SLOW) for n in sorted(EVERY)],
)
def test_the_loop_runs_a_preset_whole(name):
    recipe = catalog.preset(name, length=8, num_prompts=20)
    if recipe.forward_only:
        # Greedy, the model of configs/tiny.py writes no letter: nobody in a population is better.
        return assert_loop_runs_whole(name)
    # As the command does. A collector acts where groups fail or agree; these on what is right.
    hard = recipe.collector is not None or name in ("passk_training", "srpo_vla")
    plays = needs_environment(recipe) or name in ("dart", "epo", "igpo", "mua_rl", "oprl")
    which = "game" if plays else "hard" if hard else "config"
    which = {"ui_s1": "path", "hiper_hae": "subgoals", "m_grpo": "team"}.get(name, which)
    denoises = "flow" if isinstance(recipe.likelihood, FlowLikelihood) else "denoiser"
    denoises = "text_flow" if name == "unigrpo" else denoises
    which = which if recipe.likelihood is None else denoises
    which = "scorer" if recipe.head else which
    config = example(which)
    # With one layer, not all that these two check happens.
    if which == "denoiser" and recipe.collector is not None:
        config = dataclasses.replace(config, reward=example("hard").reward)
    if name not in ("latr", "ui_s1", "hiper_hae") and recipe.likelihood is None:
        config = dataclasses.replace(config, model=one_layer)
    # In a tenth, the first tokens that all prompts share are computed once; see numbers_first.
    if which in ("config", "hard") and len(name) % 8:
        config = dataclasses.replace(config, data=DataConfig(prompts=numbers_first, chat=False))
    # All but a tenth, denoisers and reward models train by plain gradient descent, which takes less
    # time to compile than AdamW.
    if len(name) % 8 and recipe.likelihood is None and not recipe.head:
        config = dataclasses.replace(config, optimizer=DESCENT)
    assert_loop_runs_whole(name, config=config)


def numbers_first():
    """The prompts of configs/tiny.py without a common beginning, so that a step has one pass.

    With one it has three, of the beginning, the prompts and the responses, and takes longer to
    compile.
    """
    prompts = enumerate(find_prompts(example("config").data.prompts))
    prompts = [dataclasses.replace(x, text=f"{n}: write") for n, x in prompts]
    return PromptSet(prompts, source="configs/tiny.py, numbers first")


@functools.cache
def example(name):
    return load_config(ROOT / "configs" / "tiny.py", name=name)


def one_layer():
    """The model of configs/tiny.py with one layer: half the time to compile."""
    return *tiny_model(num_layers=1), ByteTokenizer()


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


@pytest.mark.slow
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


def not_a_number(logp, old_logp, advantages, mask):
    return jr.surrogates.reinforce(logp, old_logp, advantages, mask) * jnp.nan


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])  # after three such steps in a row, a run of its own ends
def test_a_loss_that_is_no_number_fails(steps):
    recipe = jr.recipes.grpo().replace(name="nan", surrogate=not_a_number)
    with pytest.raises(AssertionError, match="'nan': step 1 was skipped, with a loss of nan"):
        assert_loop_runs_whole(recipe, steps=steps)


def mean_of_each_prompt():
    """A running mean of the rewards of each prompt, from 0 on."""

    def update(rewards, means, *, prompt_ids, where, **context):
        now = jr.core.masking.masked_mean(rewards, where, axis=-1)
        return rewards - means[prompt_ids][:, None], means.at[prompt_ids].set(
            0.9 * means[prompt_ids] + 0.1 * now
        )

    return jr.Transform(lambda: jnp.zeros(10), update)


@pytest.mark.slow
def test_a_tracker_that_begins_with_zeros_passes():
    assert_loop_runs_whole(
        jr.recipes.grpo().replace(name="tracker", advantage=mean_of_each_prompt())
    )


@pytest.mark.slow
def test_a_collector_that_helps_where_all_fail_passes_by_default():
    assert_loop_runs_whole("ghpo")
