"""The training loop runs each preset as far as the catalog says, and the check can fail."""

import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.cli.options import load_config
from jaxrl_llm.curation.collectors.protocol import sized
from jaxrl_llm.data import PromptSet
from jaxrl_llm.diffusion import FlowLikelihood
from jaxrl_llm.recipes import Computed, catalog
from jaxrl_llm.recipes.needs import RunNeeds
from jaxrl_llm.testing import ByteTokenizer, assert_loop_runs_whole, loop_checks, tiny_model
from jaxrl_llm.train import DataConfig, LoRAConfig, OptimizerConfig
from jaxrl_llm.train.config import find_prompts
from jaxrl_llm.train.data.fields import needs_environment
from jaxrl_llm.train.experiment.run_data import warn_of_warmup
from jaxrl_llm.train.experiment.setup import load_experiment

ROOT = Path(__file__).parents[2]
EVERY = [x.preset for x in catalog.CATALOG if x.preset]
pytestmark = pytest.mark.usefixtures("shared_programs")
# A run of three steps ends before their first hint, the first rollout that stops, or the first
# update of the policy, by default.
EARLY = {
    "scaf_grpo": jr.recipes.scaf_grpo(warmup=0),
    "arrol": jr.recipes.arrol(warmup=1),
    "ppo_max": jr.recipes.ppo_max(critic_warmup=1),
    "vapo": jr.recipes.vapo(critic_warmup=1),
    "vc_ppo": jr.recipes.vc_ppo(critic_warmup=1),
}
DESCENT = OptimizerConfig(name="sgd", b1=0.0, learning_rate=1.0)


@pytest.mark.slow
@pytest.mark.of_many
@pytest.mark.parametrize("name", sorted(EVERY))
def test_the_loop_runs_a_preset_whole(name):
    recipe = catalog.preset(name, length=8, num_prompts=20)
    if recipe.needs.samples_members:
        # Greedy, the model of configs/tiny.py writes no letter: nobody in a population is better.
        return assert_loop_runs_whole(name)
    # As the command does. A collector acts where groups fail or agree; these on what is right.
    hard = recipe.collector is not None or name in ("passk_training", "srpo_vla")
    plays = needs_environment(recipe) or name in ("dart", "epo", "igpo", "mua_rl", "oprl")
    which = "game" if plays else "hard" if hard else "config"
    examples = {"ui_s1": "path", "hiper_hae": "subgoals", "m_grpo": "team", "masa": "predictor"}
    which = examples.get(name, which)
    denoises = "flow" if isinstance(recipe.likelihood, FlowLikelihood) else "denoiser"
    denoises = "text_flow" if name == "unigrpo" else denoises
    which = which if recipe.likelihood is None else denoises
    which = "scorer" if recipe.head else "inpainter" if name == "igpo_inpainting" else which
    config = example(which)
    # With one layer, not all that these check happens.
    if name not in ("latr", "ui_s1", "hiper_hae", "masa") and recipe.likelihood is None:
        config = dataclasses.replace(config, model=one_layer)
    # In a tenth, the first tokens that all prompts share are computed once; see numbers_first.
    if which in ("config", "hard") and len(name) % 8:
        config = dataclasses.replace(config, data=DataConfig(prompts=numbers_first, chat=False))
    # All but a tenth, denoisers and reward models train by plain gradient descent, which takes less
    # time to compile than AdamW.
    if len(name) % 8 and recipe.likelihood is None and not recipe.head:
        config = dataclasses.replace(config, optimizer=DESCENT)
    assert_loop_runs_whole(EARLY.get(name, name), config=config)


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
@pytest.mark.parametrize("name", ["scaf_grpo", "spo_tracker", "igpo_inpainting", "masa"])
def test_what_a_preset_reads_is_in_the_default_run(name):
    assert_loop_runs_whole(EARLY.get(name, name))


def forgetful():
    """A controller that reads the last KL and remembers nothing."""

    def update(rewards, state, *, last_kl):
        return jnp.float32(0.0), state

    return jr.Transform(lambda: jnp.float32(0.0), update)


@dataclasses.dataclass(frozen=True)
class Idle:
    """A collector that asks in order and never learns what it says it remembers."""

    value: float = 0.0

    def init(self, num_prompts):
        return np.full(num_prompts, self.value)

    def propose(self, state, key, collection, count):
        requests, _ = jr.curation.in_order().propose((), key, collection, count)
        return requests, state

    def observe(self, state, collection):
        return jr.curation.in_order().observe((), collection)[0], state


def still(reference, params, step):
    return reference


@pytest.mark.slow
def test_what_does_not_move_fails():
    kl = jr.connect(jr.bind(jr.regularizers.kl_to_reference), coef="kl_coef")
    controller = Computed("kl_coef", forgetful(), "controller")
    recipe = jr.recipes.grpo().replace(name="forgetful", regularizers=(kl,), computed=(controller,))
    with pytest.raises(AssertionError, match="'forgetful': the state of its controller 'kl_coef'"):
        assert_loop_runs_whole(recipe, steps=1)
    recipe = jr.recipes.grpo().replace(name="idle", collector=Idle(np.nan))
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


@pytest.mark.slow
def test_a_collector_that_helps_where_all_fail_passes_by_default():
    assert_loop_runs_whole("ghpo")


def check_collector(collector, *, moved=True, **row):
    """The check of a collector after three steps with these metrics."""
    config = dataclasses.replace(loop_checks._CONFIG, steps=3)
    sizes = {"group_size": 6, "max_new_tokens": 6, "num_groups": 4}
    first = sized(collector, **sizes).init(10)
    state = jax.tree.map(lambda x: x + 1 if moved else x, first)
    result = SimpleNamespace(
        history=[{"rollouts_sampled": 24.0, **row}] * 3,
        state=SimpleNamespace(collector_state=state),
    )
    loop_checks._check_collector(collector, result, "recipe 'x'", config, 10)


DEMONSTRATED = jr.curation.demonstrations()
REPLAYED = jr.curation.replayed(share=0.5, capacity=4)
REFILLED = jr.curation.refill(jr.curation.informative_groups)
MIXED = jr.curation.mixed((jr.curation.in_order(), 0.5), (jr.curation.in_order(), 0.5))


@for_each(
    ("collector", "row"),
    [
        (jr.curation.in_order(), {}),
        (MIXED, {}),
        (REFILLED, {"rollouts_sampled": 30.0}),
        (DEMONSTRATED, {"rollouts/demonstration": 4.0}),
        (jr.curation.demonstrations(when="failed"), {"rollouts/demonstration": 1.0}),
        (REPLAYED, {"rollouts/replayed": 12.0}),
        (jr.curation.replayed(share=0.5, capacity=4, start=3), {}),
    ],
)
def test_what_a_collector_does_in_three_steps(collector, row):
    check_collector(collector, **row)


@for_each(
    ("collector", "reason"),
    [
        (REFILLED, "asked for no more rollouts"),
        (DEMONSTRATED, "no help of its collector is in a batch"),
        (jr.recipes.igpo_inpainting().collector, "no token of the data is in a batch"),
        (jr.curation.demonstrations(when="failed"), "no help of its collector is in a batch"),
        (jr.curation.hinted(jr.curation.hint_share()), "no help of its collector is in a batch"),
        (REPLAYED, "no stored group is in a batch"),
        (
            jr.curation.mixed((REPLAYED, 0.5), (jr.curation.in_order(), 0.5)),
            "no stored group is in a batch",
        ),
    ],
)
def test_what_a_collector_does_not_do_in_three_steps(collector, reason):
    with pytest.raises(AssertionError, match=f"^recipe 'x': .*{reason}"):
        check_collector(collector)


def test_predictions_that_nobody_can_read():
    collector, state = jr.recipes.masa().collector, {"predictions": 24, "gated": 0}
    result = SimpleNamespace(history=[{"rollouts_sampled": 24.0}] * 3)
    config = dataclasses.replace(loop_checks._CONFIG, steps=3)
    for parsed in (0, 1):
        counts = {k: np.int32(v) for k, v in {**state, "parsed": parsed}.items()}
        result.state = SimpleNamespace(collector_state=counts)
        check = functools.partial(loop_checks._check_collector, collector, result, "'x'", config)
        if parsed:
            check(10)
        else:
            with pytest.raises(AssertionError, match="'x': no prediction of its policy was read"):
                check(10)


@for_each("value", [0.0, np.nan, np.inf])
def test_what_stays_has_not_moved(value):
    with pytest.raises(AssertionError, match="the state of its collector did not move"):
        check_collector(Idle(value), moved=False)
    check_collector(Idle(0.0))
    assert loop_checks._differ([np.nan], [0.0]) and loop_checks._differ([0.0], [np.nan])


@pytest.mark.slow
def test_an_adapter_moves_if_it_learns():
    config = dataclasses.replace(
        example("config"), model=one_layer, lora=LoRAConfig(rank=4), optimizer=DESCENT
    )
    assert_loop_runs_whole("grpo", config=config, steps=1)
    # Without a KL term, whose gradient is rounding rather than 0 on some processors.
    still = jr.recipes.grpo(kl_coef=0.0).replace(
        name="still", advantage=jr.stateless(lambda r: 0.0 * r)
    )
    with pytest.raises(AssertionError, match="'still': the parameters did not move"):
        assert_loop_runs_whole(still, config=config, steps=1)


def test_the_start_of_a_run_is_what_trains():
    config = dataclasses.replace(example("config"), model=one_layer, recipe="grpo")
    whole, adapter = (
        loop_checks._start(dataclasses.replace(config, lora=LoRAConfig(rank=rank)))
        for rank in (None, 4)
    )
    assert not loop_checks._differ(whole.params, tiny_model(num_layers=1)[1])
    assert not loop_checks._differ(adapter.base, whole.params)
    sizes = [sum(x.size for x in jax.tree.leaves(y.params)) for y in (whole, adapter)]
    assert 0 < sizes[1] < sizes[0]


def test_help_that_begins_after_the_run_warns():
    config = dataclasses.replace(example("hard"), model=one_layer)
    assert "--recipe scaf_grpo" not in (ROOT / "configs" / "tiny.py").read_text()
    late = dataclasses.replace(config, recipe="scaf_grpo")
    with pytest.warns(UserWarning, match=r"warmup=50\) gives no help in the first 50 steps, and"):
        load_experiment(late)
    for recipe in (jr.recipes.scaf_grpo(warmup=29), "ghpo"):
        load_experiment(dataclasses.replace(config, recipe=recipe))
    for warmup in (None, optax.constant_schedule(1.0), 10_000):  # of other things
        own = SimpleNamespace(policy=SimpleNamespace(warmup=warmup))
        warn_of_warmup(config, SimpleNamespace(collector=own, needs=RunNeeds()))


@for_each(
    ("name", "first", "words"),
    [
        ("arrol", 20, r"^config: pruned\(.* warmup=20, .* has no effect in the first 20 steps"),
        ("dots", 2, r"^config: replayed\(.*start=2.* has no effect in the first 2 steps"),
        ("ppo_max", 50, r"^config: the critic of 'ppo_max' trains alone in the first 50 steps"),
    ],
)
def test_a_rule_that_begins_after_the_run_warns(name, first, words):
    recipe = catalog.preset(name, length=8)
    config = dataclasses.replace(example("hard"), recipe=name, steps=first)
    with pytest.warns(UserWarning, match=words):
        warn_of_warmup(config, recipe)
    warn_of_warmup(dataclasses.replace(config, steps=first + 1), recipe)  # without a warning
