"""rollout_correction: weights and rules put together, and what the Recipe makes of them."""

import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, equal, grad
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm import bind
from jaxrl_llm.core import traits, traits_of
from jaxrl_llm.corrections import (
    importance_weights,
    m2_mask,
    masked_importance_weights,
    rejection_mask,
    rollout_correction,
    sequence_rollout_correction,
    veto_mask,
)

RNG = np.random.default_rng(0)
OLD = RNG.normal(-2, 1, (3, 4, 5)).astype(np.float32)
BEHAVIOR = (OLD + RNG.normal(0, 0.7, OLD.shape)).astype(np.float32)
MASK = RNG.random(OLD.shape) < 0.8
MASK[0, 0] = False
TIS = bind(importance_weights, cap=2.0)
RULES = (
    bind(rejection_mask, statistic="k1", level="token", lower=0.4, upper=3.0),
    bind(rejection_mask, statistic="k3", level="sequence_mean", upper=0.4),
    bind(veto_mask, threshold=0.15),
)


def test_without_weights_every_token_counts_once():
    weights, keep = rollout_correction(OLD, BEHAVIOR, MASK, reject=(lambda old, new, mask: mask,))
    equal(weights, MASK.astype(np.float32))
    equal(keep, MASK)


@for_each("function", [rollout_correction, sequence_rollout_correction])
def test_without_weights_and_rules_it_has_no_effect(function):
    words = f"{function.__name__}.* has no effect without weights or a rule in reject"
    with pytest.raises(ValueError, match=words):
        function(OLD, BEHAVIOR, MASK)
    # Stale data would even lose the ratio to the weights that sampled them; see score_batch.
    tokens = function.__name__ == "rollout_correction"
    recipe = jr.recipes.grpo() if tokens else jr.recipes.gspo()
    for bare in (function, bind(function), bind(function, weights=None, reject=())):
        with pytest.raises(ValueError, match=f"Recipe '.*': correction {words}"):
            recipe.replace(correction=bare)
    recipe.replace(correction=bind(function, reject=(veto_mask,)))


def test_on_policy_every_weight_is_one_and_nothing_goes():
    for weights in (TIS, masked_importance_weights, bind(importance_weights, normalize=True)):
        w, keep = rollout_correction(OLD, OLD, MASK, weights=weights, reject=(*RULES, m2_mask))
        equal(w, MASK.astype(np.float32))
        equal(keep, MASK)


def test_all_rules_must_keep():
    _, keep = rollout_correction(OLD, BEHAVIOR, MASK, reject=RULES)
    each = [np.asarray(rule(OLD, BEHAVIOR, MASK)) for rule in RULES]
    equal(keep, np.logical_and.reduce(each))
    assert all((np.asarray(keep) != one).any() for one in each)


def test_weights_are_zero_where_rejected_and_do_not_depend_on_it():
    weights = bind(importance_weights, normalize=True)
    w, keep = rollout_correction(OLD, BEHAVIOR, MASK, weights=weights, reject=RULES)
    equal(w, np.where(keep, weights(OLD, BEHAVIOR, MASK), 0.0))


def test_the_denominator_can_be_kept():
    inside = {"weights": TIS, "reject": RULES}
    w, keep = rollout_correction(OLD, BEHAVIOR, MASK, **inside)
    w_kept, all_kept = rollout_correction(OLD, BEHAVIOR, MASK, keep_denominator=True, **inside)
    equal(w, w_kept)
    equal(all_kept, MASK)
    assert (np.asarray(keep) != MASK).any()


def test_options_hash_and_compare():
    one, two = (bind(rollout_correction, weights=TIS, reject=RULES) for _ in range(2))
    assert one == two and hash(one) == hash(two)


def test_sequence_form_is_marked_and_takes_sequence_parts_only():
    parts = {
        "weights": bind(importance_weights, level="sequence"),
        "reject": (
            bind(rejection_mask, statistic="k2", level="sequence_mean", upper=0.3),
            veto_mask,
            traits(level="sequence")(lambda old, behavior, mask: mask),
        ),
    }
    w, keep = sequence_rollout_correction(OLD, BEHAVIOR, MASK, **parts)
    expected = rollout_correction(OLD, BEHAVIOR, MASK, **parts)
    equal(w, expected[0])
    equal(keep, expected[1])
    assert traits_of(bind(sequence_rollout_correction, **parts)).level == "sequence"
    assert traits_of(rollout_correction).level == "token"
    for part in (TIS, importance_weights, m2_mask, RULES[0]):
        slot = {"weights": part} if part in (TIS, importance_weights) else {"reject": (part,)}
        with pytest.raises(ValueError, match="is of the token level"):
            sequence_rollout_correction(OLD, BEHAVIOR, MASK, **slot)


def test_a_sequence_surrogate_refuses_the_token_form():
    gspo = jr.recipes.gspo()
    with pytest.raises(ValueError, match="weighs its tokens one by one"):
        gspo.replace(correction=bind(rollout_correction, weights=TIS))
    weights = bind(importance_weights, level="sequence")
    gspo.replace(correction=bind(sequence_rollout_correction, weights=weights))


def test_three_policies_on_one_token():
    # Probabilities .3 now, .2 at the start of the update, .25 when sampled: w = .8, r = 1.5.
    logp, old, behavior = (np.log(np.full((1, 1), p)) for p in (0.3, 0.2, 0.25))
    mask = np.ones((1, 1), bool)
    w, keep = rollout_correction(old, behavior, mask, weights=TIS)
    loss = w * jr.surrogates.ppo_clip(logp, old, np.ones(1), mask)
    close(w, [[0.8]], rtol=1e-6)
    close(loss, [[-0.96]], rtol=1e-6)
    # The proximal policy that is the sampler leaves PPO; one that is trained, w times REINFORCE.
    w_bypass, _ = rollout_correction(behavior, behavior, mask, weights=TIS)
    equal(w_bypass, [[1.0]])

    def near(logp):
        w, _ = rollout_correction(logp, behavior, mask, weights=TIS)
        return jnp.sum(w * jr.surrogates.ppo_clip(logp, None, np.ones(1), mask))

    close(grad(near)(logp), [[-1.2]], rtol=1e-6)
