"""The names of peers in the catalog: each is something here, and is found."""

import dataclasses
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from preset_cases import batch_of
from rows import for_each

import jaxrl_llm
from jaxrl_llm.core import call_with
from jaxrl_llm.recipes import Batch, catalog
from jaxrl_llm.recipes.catalog.peers import NONE
from jaxrl_llm.recipes.recipe import Recipe

KEYS = {method.key for method in catalog.CATALOG}
# Read in the peer's source, and not run.
READ_ALONE = {
    ("tunix", "GRPOConfig.sampler_is=token"),
    ("slime", "--advantage-estimator=grpo"),
    ("slime", "--advantage-estimator=reinforce_plus_plus_baseline"),
}
OPTION = re.compile(r"jr\.train\.(\w+)\.(\w+)")


def test_every_name_is_one_thing_here():
    named = [(row.peer, str(row)) for row in catalog.PEER_NAMES]
    assert len(set(named)) == len(named)
    assert {row.peer for row in catalog.PEER_NAMES} == set(catalog.PEER_VERSIONS)
    for row in catalog.PEER_NAMES:
        assert set(row.keys) <= KEYS, row
        assert not row.differs or row.differs.endswith("."), row


@functools.cache
def made_by(code):
    """What a row's code makes, once for all tests."""
    return eval(code, {"jr": jaxrl_llm})


@for_each("peer", catalog.PEER_VERSIONS)
def test_our_code_runs_as_it_stands(peer):
    for row in catalog.PEER_NAMES:
        if row.peer != peer:
            continue
        if row.ours == NONE:  # it says why, and belongs to no method
            assert row.differs and not row.keys, row
            continue
        if option := OPTION.fullmatch(row.ours):
            config = getattr(jaxrl_llm.train, option[1])
            assert option[2] in {field.name for field in dataclasses.fields(config)}, row
            continue
        made = made_by(row.ours)
        assert isinstance(made, Recipe) or callable(made) or hasattr(made, "init"), row


def test_a_recipe_makes_one_update_a_batch_unless_its_row_says_how_many():
    """The updates of a preset are those of its paper, and a peer's name stands for none."""
    for row in catalog.PEER_NAMES:
        if row.ours.startswith("jr.recipes."):
            recipe = made_by(row.ours)
            passes = getattr(recipe, "epochs", 1), getattr(recipe, "minibatches", 1)
            assert passes == (1, 1) or f" {passes[1]} minibatches" in row.differs, row


# The rows of PPO: the penalty of the KL in the rewards, its estimator, lam, and whether it whitens.
WITH_CRITIC = {
    ("verl", "algorithm.adv_estimator=gae"): (0.0, "k1", 1.0, True),
    ("tunix", "PPOLearner"): (0.04, "k3", 0.95, True),
    ("OpenRLHF", "--algo.advantage.estimator=gae"): (0.01, "k1", 1.0, True),
    ("slime", "--advantage-estimator=ppo"): (0.0, "k1", 1.0, False),
}


@for_each("name", WITH_CRITIC, ids=" ".join)
def test_a_critic_learns_the_returns_of_the_rewards_that_its_advantage_reads(name):
    coef, estimator, lam, whitens = WITH_CRITIC[name]
    recipe = recipe_of(*name)
    batch = batch_of_tokens(values=jnp.zeros((2, 3, 4)), old_values=jnp.zeros((2, 3, 4, 1)))
    mask, d = np.asarray(batch.mask), np.asarray(batch.old_logp - batch.ref_logp)
    token_rewards = -coef * {"k1": d, "k3": np.exp(-d) - 1 + d}[estimator] * mask
    last = mask & (np.cumsum(mask, -1) == mask.sum(-1, keepdims=True))
    token_rewards += last * np.asarray(batch.rewards)[..., None]
    returns = np.zeros_like(token_rewards)
    after = np.zeros(mask.shape[:2])
    for t in reversed(range(mask.shape[-1])):
        after = returns[..., t] = np.where(mask[..., t], token_rewards[..., t] + lam * after, after)
    prepared, _ = recipe.prepare(batch, recipe.init())
    learned = np.asarray(prepared.extras["returns"])[..., 0]
    np.testing.assert_allclose(learned[mask], returns[mask], rtol=1e-5, atol=1e-6)
    # Of values that are all 0, the advantage is what the critic learns.
    scale = returns[mask].std(ddof=1) if whitens else 1.0
    want = (returns[mask] - (returns[mask].mean() if whitens else 0.0)) / scale
    np.testing.assert_allclose(np.asarray(prepared.advantages)[mask], want, rtol=1e-4, atol=1e-5)
    assert not recipe.group_relative  # these peers sample one response unless told otherwise


def test_the_penalty_of_dro_acts_from_the_second_update_on():
    recipe = recipe_of("verl", "actor_rollout_ref.actor.policy_loss.loss_mode=dro")
    recipe.check_passes(1, 2)
    batch = batch_of_tokens()
    prepared, _ = recipe.prepare(batch.replace(ref_logp=batch.old_logp), recipe.init())
    mask = np.asarray(prepared.mask)
    share = mask / mask.sum()  # the mean over tokens, as verl has it
    signal = np.where(mask, np.asarray(prepared.advantages)[..., None], 0.0)
    for moved in (0.0, 0.1):
        distance = moved * np.arange(4.0)
        found = jax.grad(recipe.loss)(batch.old_logp + distance, prepared)
        want = share * (1.0 * distance - signal)  # dro_beta is 1
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-6)


def recipe_of(peer, name):
    """The recipe of a row."""
    (row,) = [row for row in catalog.PEER_NAMES if (row.peer, str(row)) == (peer, name)]
    recipe = made_by(row.ours)
    assert isinstance(recipe, Recipe)
    return recipe


def batch_of_tokens(**extras):
    """Two prompts with three responses of one to four tokens."""
    rng = np.random.default_rng(0)
    lengths = np.array([[4, 2, 3], [1, 4, 2]])
    old_logp = rng.normal(-1.0, 0.3, (2, 3, 4)).astype(np.float32)
    return batch_of(
        np.arange(4) < lengths[..., None],
        rng.normal(size=(2, 3)),
        old_logp=old_logp,
        ref_logp=old_logp - rng.normal(0.0, 0.5, (2, 3, 4)),
        extras=extras,
    )


def test_a_recipe_belongs_first_to_the_method_of_its_preset():
    """`methods --like` describes the first method of a row."""
    of_key = {method.key: method.preset for method in catalog.CATALOG}
    others = []
    for row in catalog.PEER_NAMES:
        made = re.match(r"jr\.recipes\.(\w+)", row.ours)
        preset = of_key[row.keys[0]] if row.keys else None
        if preset and made and made[1] in of_key.values() and made[1] != preset:
            others.append(row.setting)
    # Its name is of a correction, which it leaves out.
    assert others == ["algorithm.rollout_correction.bypass_mode"]


def test_functions_take_the_options_that_stand_with_them():
    """Traced on arrays by the names of their parameters; those that need other arrays are few."""
    shape = (2, 4, 8)
    tokens = (
        "logp old_logp behavior_logp ref_logp values old_values returns token_rewards "
        "action_values entropy old_entropy x sum_pi_sq"
    )
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name in tokens.split()}
    for name in ("rewards", "advantages", "greedy_rewards", "lengths"):
        arrays[name] = jax.ShapeDtypeStruct(shape[:2], jnp.float32)
    arrays["mask"] = jax.ShapeDtypeStruct(shape, bool)
    arrays["truncated"] = jax.ShapeDtypeStruct(shape[:2], bool)
    traced, others = 0, set()
    for row in catalog.PEER_NAMES:
        code = row.ours != NONE and "jr.train." not in row.ours
        made = made_by(row.ours) if code else None
        if isinstance(made, Recipe | type) or not callable(made):
            continue
        named = inspect.signature(made).parameters
        if not {name for name, x in named.items() if x.default is x.empty} <= set(arrays):
            others.add(row.ours)
        elif named.keys() & arrays.keys() and "gdpo" not in row.ours:
            jax.eval_shape(lambda context, made=made: call_with(made, context=context), arrays)
            traced += 1
    assert traced > 90 and len(others) < 10, (traced, others)


def a_batch(**extras) -> Batch:
    logp = np.log(np.linspace(0.2, 0.9, 40).reshape(2, 4, 5))
    rewards, mask = np.arange(8.0).reshape(2, 4), np.ones(logp.shape, bool)
    return batch_of(mask, rewards, old_logp=logp, ref_logp=logp - 0.1, extras=extras)


def test_the_rule_of_the_most_uncertain_tokens_fits_the_slot_that_its_row_names():
    (row,) = catalog.find_peer_names("TRL:top_entropy_quantile")
    recipe = jaxrl_llm.recipes.grpo().replace(selection=made_by(row.ours))
    entropy = jnp.sin(jnp.arange(40.0)).reshape(2, 4, 5)
    ready, _ = recipe.prepare(a_batch(old_entropy=entropy), recipe.init())
    assert ready.mask.tolist() == (entropy >= jnp.sort(entropy.ravel())[-8]).tolist()
    assert "slot selection" in row.differs and ready.mask.sum() == 8  # a fifth


@for_each(
    ("name", "slot"),
    [
        ("TRL:use_adaptive_entropy", "regularizers"),
        ("verl:kl_ctrl.type=adaptive", "advantage"),
        ("OpenRLHF:--algo.kl.target", "advantage"),
    ],
)
def test_a_row_of_a_controller_says_how_a_recipe_reads_its_coefficient(name, slot):
    (row,) = catalog.find_peer_names(name)
    computed, reader = re.search(
        r"computed=(.*\),\)), .* (jr\.connect\(.*?\))", row.differs
    ).groups()
    (entry,) = computed = eval(computed, {"jr": jaxrl_llm})
    assert repr(entry.function) == repr(made_by(row.ours)())
    reads = eval(reader, {"jr": jaxrl_llm})
    value = (reads,) if slot == "regularizers" else jaxrl_llm.stateless(reads)
    # A coefficient of 0.5 in place of the first one of the controller.
    half = entry._replace(function=jaxrl_llm.regularizers.fixed(0.5))
    found = {}
    for which in (computed, (half,)):
        recipe = jaxrl_llm.recipes.reinforce_pp().replace(computed=which, **{slot: value})
        batch = a_batch(old_entropy=jnp.ones((2, 4, 5)))
        ready, _ = recipe.prepare(batch, recipe.init())
        loss = recipe.loss(batch.old_logp, ready, entropy=jnp.ones((2, 4, 5)))
        found[which] = float(loss), ready.advantages
    (first, advantages), (other, moved) = found.values()
    assert first != other and (slot == "advantage") == bool((advantages != moved).any())


def test_names_with_a_number_of_their_own_were_compared_with_that_peer():
    """With its code, as the catalog says, one of the methods that a row names."""
    compared, alone = {"TRL", "verl", "tunix", "OpenRLHF", "slime", "rlax"}, set()
    for row in catalog.PEER_NAMES:
        if row.peer in compared and row.keys and row.value:
            peers = {each.peer for key in row.keys for each in catalog.CONFIRMED.get(key, ())}
            if not any(peer.split()[0] == row.peer for peer in peers):
                alone.add((row.peer, str(row)))
    assert alone == READ_ALONE


def ours(text):
    return [row.ours for row in catalog.find_peer_names(text)]


@for_each(
    "text",
    [
        "verl:adv_estimator=rloo_vectorized",
        "verl:algorithm.adv_estimator=rloo_vectorized",
        "VERL:ADV_ESTIMATOR=RLOO_vectorized",
        "verl:adv_estimator='rloo_vectorized'",
        "verl:rloo_vectorized",
    ],
)
def test_a_name_is_found_however_it_is_written(text):
    assert ours(text) == ["jr.advantages.rloo"]


FIRST_DAY = """
verl:critic.optim.lr TrainConfig.critic; verl:model.lora_rank LoRAConfig.rank;
verl:save_freq CheckpointConfig.every; verl:test_freq EvaluationConfig.every;
verl:trainer.logger ReportConfig.sinks; verl:total_epochs TrainConfig.steps;
verl:total_training_steps TrainConfig.steps; TRL:peft_config LoRAConfig.rank;
TRL:report_to ReportConfig.sinks; TRL:save_steps CheckpointConfig.every;
TRL:eval_steps EvaluationConfig.every
"""


@for_each("text, option", [row.split() for row in FIRST_DAY.split(";")])
def test_options_of_the_first_day_are_found(text, option):
    assert ours(text) == [f"jr.train.{option}"]


def test_a_part_of_a_name_finds_all_that_have_it():
    values = {row.value for row in catalog.find_peer_names("verl:loss_agg_mode")}
    assert values >= {"token-mean", "seq-mean-token-mean"}
    assert {row.setting.split(".")[0] for row in catalog.find_peer_names("TRL:beta")} == {
        "GRPOConfig",
        "DPOConfig",
    }
    # An option of the command line, with and without its dashes, and a number as its value.
    assert ours("OpenRLHF:actor.dual_clip=3") == ours("openrlhf:--actor.dual_clip")
    assert len(catalog.find_peer_names("rlax")) == len(
        [row for row in catalog.PEER_NAMES if row.peer == "rlax"]
    )
    # A class has all of its settings, and a trainer those of its config.
    for name in ("DPOConfig", "dpotrainer"):
        settings = {row.setting.split(".")[0] for row in catalog.find_peer_names(f"TRL:{name}")}
        assert settings == {"DPOConfig"}
    found = map(str, catalog.find_peer_names("TRL:GRPOTrainer"))
    assert {"GRPOConfig.loss_type=dapo", "GRPOTrainer.peft_config"} < set(found)
    assert len(catalog.find_peer_names("TRL:SFTTrainer")) == 1
    # Two trainers have an option of this name and value.
    assert {row.setting for row in catalog.find_peer_names("TRL:loss_type=sigmoid")} == {
        "DPOConfig.loss_type",
        "CPOConfig.loss_type",
        "TPOConfig.loss_type",
    }


@for_each(
    ("text", "words"),
    [
        ("TRL:loss_type=dappo", "Did you mean loss_type=dapo"),
        ("verl:qqqq", "--like verl lists them all"),
        ("trlx:loss_type=dapo", "no library is named 'trlx', only TRL, verl"),
        ("loss_type=dappo", "no name matches 'loss_type=dappo'. Did you mean loss_type=dapo"),
        ("cipso", "Did you mean cispo"),
        ("qqqq", "no name matches 'qqqq'. --like with one of TRL, verl"),
    ],
)
def test_an_unknown_name_is_one_sentence(text, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        catalog.find_peer_names(text)


def test_a_method_says_what_peers_call_it():
    names = catalog.names_at_peers("gspo")
    assert names["TRL"] == ["GRPOConfig.importance_sampling_level=sequence"]
    assert names["OpenRLHF"] == ["--actor.policy_loss_type=gspo"]
    assert catalog.names_at_peers("salt") == {}
