"""What every correction promises, whichever it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import equal, grad
from rows import for_each

from jaxrl_llm import corrections
from jaxrl_llm.core import bind

RNG = np.random.default_rng(0)
OLD = RNG.normal(-2, 1, (2, 3, 5)).astype(np.float32)
BEHAVIOR = (OLD + RNG.normal(0, 0.25, OLD.shape)).astype(np.float32)
MASK = RNG.random(OLD.shape) < 0.7
MASK[0, 1] = False
ADVANTAGES = np.where(MASK.any(-1), RNG.normal(size=MASK.shape[:-1]), np.nan).astype(np.float32)


def selects(old, behavior, mask):
    return corrections.off_policy_sequence_mask(
        ADVANTAGES, mask, old_logp=old, behavior_logp=behavior, threshold=0.1
    )


def scales(old, behavior, mask):
    return corrections.ess_lr_scale(
        ADVANTAGES, old_logp=old, behavior_logp=behavior, mask=mask, rho_base=2.0
    )


def corrected(part, old, behavior, mask):
    rules = (
        bind(corrections.rejection_mask, statistic="k2", level="token", upper=0.3),
        bind(corrections.veto_mask, threshold=0.2),
    )
    weights = bind(corrections.importance_weights, normalize=True)
    return corrections.rollout_correction(old, behavior, mask, weights=weights, reject=rules)[part]


WEIGHTS = {
    f"{name}_{level}": bind(function, level=level, normalize=normalize)
    for name, function, normalize in (
        ("tis", corrections.importance_weights, False),
        ("normalized", corrections.importance_weights, True),
        ("mis", corrections.masked_importance_weights, False),
    )
    for level in ("token", "sequence", "geometric")
} | {"correction_weights": lambda *a: corrected(0, *a)}
RULES = {
    f"{statistic}_{level}": bind(
        corrections.rejection_mask, statistic=statistic, level=level, upper=1.5
    )
    for statistic in ("k1", "k2", "k3")
    for level in ("token", "sequence_sum", "sequence_mean", "sequence_max")
} | {
    "veto": bind(corrections.veto_mask, threshold=0.8),
    "m2": corrections.m2_mask,
    "off_policy": selects,
    "correction_keep": lambda *a: corrected(1, *a),
}
SCALARS = {"ess_lr_scale": scales}
EVERY = WEIGHTS | RULES | SCALARS
everyone = for_each("name", EVERY)


@everyone
def test_kinds_and_zeros_where_masked(name):
    out = np.asarray(EVERY[name](OLD, BEHAVIOR, MASK))
    if name in SCALARS:
        assert out.shape == () and out.dtype == np.float32
        return
    assert out.shape == MASK.shape
    assert out.dtype == (np.float32 if name in WEIGHTS else np.bool_)
    assert out.any() and not out[~MASK].any()
    assert np.isfinite(out).all()


@everyone
def test_masked_cells_are_never_read(name):
    clean = EVERY[name](OLD, BEHAVIOR, MASK)
    for junk in (1e4, np.nan, np.inf, -np.inf):
        old, behavior = (np.where(MASK, x, np.float32(junk)) for x in (OLD, BEHAVIOR))
        equal(EVERY[name](old, BEHAVIOR, MASK), clean)
        equal(EVERY[name](OLD, behavior, MASK), clean)


@everyone
def test_on_policy_it_does_nothing(name):
    out = EVERY[name](OLD, OLD, MASK)
    if name in SCALARS:
        assert float(out) == pytest.approx(0.5**0.5)  # all of one, over a base of two
    else:
        equal(out, MASK)


@everyone
def test_nothing_is_differentiable(name):
    def total(old, behavior):
        return jnp.sum(EVERY[name](old, behavior, MASK) * 1.0)

    for gradient in grad(total, (0, 1))(OLD, BEHAVIOR):
        assert not np.asarray(gradient).any()


@everyone
def test_bfloat16_is_counted_in_float32(name):
    old, behavior = np.asarray(OLD, jnp.bfloat16), np.asarray(BEHAVIOR, jnp.bfloat16)
    out = EVERY[name](old, behavior, MASK)
    assert out.dtype != jnp.bfloat16
    exact = EVERY[name](old.astype(jnp.float32), behavior.astype(jnp.float32), MASK)
    equal(out, exact)


@for_each("name", [*WEIGHTS, *RULES])
def test_an_empty_batch_and_empty_sequences(name):
    if name != "off_policy":
        empty = (np.zeros((0, 5)), np.zeros((0, 5)), np.zeros((0, 5), bool))
        out = jax.eval_shape(EVERY[name], *empty)
        assert out.shape == (0, 5)
    nothing = EVERY[name](OLD, BEHAVIOR, np.zeros_like(MASK))
    assert not nothing.any()


@for_each(
    ("name", "function"),
    [
        ("importance_weights", corrections.importance_weights),
        ("masked_importance_weights", corrections.masked_importance_weights),
        ("rejection_mask", RULES["k1_token"]),
        ("veto_mask", corrections.veto_mask),
        ("m2_mask", corrections.m2_mask),
        ("rollout_correction", corrections.rollout_correction),
        ("sequence_rollout_correction", corrections.sequence_rollout_correction),
        ("ess_lr_scale", scales),
        ("off_policy_sequence_mask", selects),
    ],
)
def test_bad_input_names_function_argument_and_shapes(name, function):
    with pytest.raises(TypeError, match=rf"{name}: mask must be bool.*float32"):
        function(OLD, BEHAVIOR, MASK.astype(np.float32))
    with pytest.raises(TypeError, match=rf"{name}: mask must be a bool array.*got None"):
        function(OLD, BEHAVIOR, None)
    with pytest.raises(TypeError, match=rf"{name}: behavior_logp must be floating point; got int"):
        function(OLD, BEHAVIOR.astype(np.int32), MASK)
    with pytest.raises(ValueError, match=rf"{name}: .*behavior_logp \(2, 3, 4\)"):
        function(OLD, BEHAVIOR[..., :4], MASK)
    with pytest.raises(ValueError, match=rf"{name}: old_logp must have at least 1 axis"):
        function(jnp.float32(0.0), jnp.float32(0.0), jnp.bool_(True))
