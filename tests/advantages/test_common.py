"""What every group-relative advantage promises, whichever it is."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, quick
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rows import for_each

from jaxrl_llm.advantages import dr_grpo, grpo, reinforce_pp_baseline, rloo


def per_sequence(norm, rewards, *, where=None):
    """reinforce_pp_baseline with one token a rollout: [..., G] like the others."""
    mask = np.ones((*rewards.shape, 1), bool)
    return reinforce_pp_baseline(rewards, mask, where=where, norm=norm)[..., 0]


GROUP = {
    "grpo": grpo,
    "grpo_population": partial(grpo, ddof=0),
    "grpo_batch": partial(grpo, scale="batch"),
    "dr_grpo": dr_grpo,
    "rloo": rloo,
}
BATCH = {
    "pp_token": partial(per_sequence, "token"),
    "pp_sequence": partial(per_sequence, "sequence"),
}
EAGER = GROUP | BATCH
# Compiled as they are used in a step, which also makes these tests several times faster.
COMPILED = {name: jax.jit(f) for name, f in EAGER.items()}
every_group = for_each("name", GROUP)
everyone = for_each("name", EAGER)

# One shape, so that each function compiles once; eighths, so that sums are exact in float32.
SHAPE = (3, 4)
eighths = hnp.arrays(np.float32, SHAPE, elements=st.integers(-40, 40).map(lambda i: i / 8))
kept = hnp.arrays(np.bool_, SHAPE)


@everyone
@quick
@given(rewards=eighths, where=kept, shift=st.integers(-16, 16), log_scale=st.integers(-2, 4))
def test_laws_of_groups(name, rewards, where, shift, log_scale):
    function = partial(COMPILED[name], where=where)
    out, shift, scale = function(rewards), np.float32(shift), np.float32(2.0**log_scale)
    assert out.dtype == np.float32 and np.isfinite(out).all() and not out[~where].any()
    # The order of the rewards is kept.
    for a, r, keep in zip(out, rewards, where, strict=True):
        assert (np.diff(a[keep][np.argsort(r[keep], kind="stable")]) >= -1e-6).all()
    if name in GROUP:
        close(out.sum(-1), 0.0, atol=2e-5)
        close(function(rewards + shift), out, rtol=1e-4, atol=1e-4)
        expected = out if name.startswith("grpo") else out * scale
        close(function(rewards * scale), expected, rtol=1e-4, atol=1e-5)


@everyone
def test_equal_rewards_give_exactly_zero(name):
    where = np.arange(12) < np.array([[3], [12]])
    for value in (0.1, 1.1, -3.3):
        assert not COMPILED[name](np.full((2, 12), value), where=where).any()


@every_group
def test_a_constant_group_next_to_a_varied_one_has_a_finite_gradient(name):
    rewards = np.array([[0.1, 0.1, 0.1], [1.0, 0.0, 0.0]])
    gradient = jax.jit(jax.jacobian(GROUP[name]))(rewards)
    assert np.isfinite(gradient).all()
    assert not gradient[0].any()


@for_each("name", ["grpo", "dr_grpo", "rloo"])
def test_bad_input_names_function_argument_and_shapes(name):
    function = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}[name]
    rewards = np.ones((2, 3))
    with pytest.raises(TypeError, match=f"{name}: rewards must be floating point; got int32"):
        function(np.ones((2, 3), int))
    with pytest.raises(ValueError, match=f"{name}: rewards must have at least 1 axis"):
        function(jnp.float32(1.0))
    with pytest.raises(TypeError, match=f"{name}: where must be bool.*float32"):
        function(rewards, where=np.ones((2, 3)))
    with pytest.raises(ValueError, match=rf"{name}: .*rewards \(2, 3\), where \(2, 4\)"):
        function(rewards, where=np.ones((2, 4), bool))
    with pytest.raises(ValueError, match=f"{name}: singleton must be one of 'zero', 'raw'"):
        function(rewards, singleton="keep")
    with pytest.raises(TypeError):
        function(rewards, np.ones((2, 3), bool))
