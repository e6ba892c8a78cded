"""What every surrogate promises, against float64 NumPy references written from the formulas."""

import functools
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each
from surrogate_cases import (
    CASES,
    MASK,
    SEQUENCE_ADVANTAGES,
    SHAPE,
    TOKEN_ADVANTAGES,
    make,
    numeric_gradient,
)

import jaxrl_llm as jr
from jaxrl_llm import surrogates
from jaxrl_llm.core import traits_of

POLICY_GRADIENTS = [name for name, case in CASES.items() if traits_of(case[0]).policy_gradient]


@functools.cache
def gradient(name):
    """Of a weighted sum of the token losses, compiled."""
    function, options, _ = CASES[name]

    def loss(x, old, advantages, weights):
        return jnp.sum(weights * function(x, old, advantages, MASK, **options))

    return jax.jit(jax.grad(loss))


@for_each("name", CASES)
@for_each("per_token", [False, True])
@for_each("seed", range(3))
def test_value_and_gradient_match_float64(name, per_token, seed):
    per_token = per_token and name not in SEQUENCE_ADVANTAGES
    function, options, reference = CASES[name]
    logp, old, advantages = make(seed, per_token)
    weights = np.random.default_rng(seed + 10).uniform(0.5, 1.5, SHAPE)
    x64, old64 = logp.astype(np.float64), old.astype(np.float64)
    a64 = (advantages if per_token else advantages[..., None]).astype(np.float64)

    def loss64(x):
        return np.sum(weights * MASK * reference(x, x64, old64, a64, MASK))

    tokens = function(logp, old, advantages, MASK, **options)
    expected = MASK * reference(x64, x64, old64, a64, MASK)
    np.testing.assert_allclose(tokens, expected, rtol=1e-5, atol=1e-6)
    got = gradient(name)(logp, old, advantages, weights)
    np.testing.assert_allclose(got, numeric_gradient(loss64, x64), rtol=1e-4, atol=1e-5)


@for_each("name", CASES)
def test_masked_cells_are_never_read(name):
    function, options, _ = CASES[name]
    arrays = make(1, per_token=name in TOKEN_ADVANTAGES)
    kept = [MASK, MASK, MASK if arrays[2].ndim == 3 else MASK.any(-1)]

    @jax.jit
    def both(*arrays):
        loss = lambda x: function(x, *arrays[1:], MASK, **options)  # noqa: E731
        return loss(arrays[0]), jax.grad(lambda x: loss(x).sum())(arrays[0])

    clean = np.asarray(both(*arrays))
    assert np.all(clean[:, ~MASK] == 0)
    for junk in np.float32([1e4, -1e4, np.nan, np.inf, -np.inf]):
        dirty = [np.where(k, x, junk) for k, x in zip(kept, arrays, strict=True)]
        for only in ((0,), (1,), (2,), (0, 1, 2)):
            mixed = [dirty[i] if i in only else arrays[i] for i in range(3)]
            np.testing.assert_array_equal(np.asarray(both(*mixed)), clean)


@for_each("name", TOKEN_ADVANTAGES)
def test_an_empty_sequence_may_have_any_sequence_advantage(name):
    function, options, _ = CASES[name]
    logp, old, advantages = map(jnp.asarray, make(2))
    dirty = jnp.where(MASK.any(-1), advantages, jnp.nan)
    gradient = jax.grad(lambda x, a: function(x, old, a, MASK, **options).sum())
    np.testing.assert_array_equal(gradient(logp, dirty), gradient(logp, advantages))


@for_each("name", ["reinforce", "ppo_clip", "dapo_clip", "fipo"])
@for_each("junk", [np.nan, np.inf])
def test_weight_is_detached_masked_and_multiplied_last(name, junk):
    function = CASES[name][0]
    logp, old, advantages = map(jnp.asarray, make(3))

    def moving(x):  # a weight that depends on the policy must not add to the gradient
        return jnp.where(MASK, 0.5 * jnp.exp(x - old), junk)

    def loss(x, weight):
        return function(x, old, advantages, MASK, weight=weight)

    np.testing.assert_allclose(
        loss(logp, moving(logp)), jnp.exp(logp - old) * 0.5 * function(logp, old, advantages, MASK),
        rtol=1e-6,
    )  # fmt: skip
    fixed = jnp.where(MASK, moving(logp), 0.0)
    got = jax.grad(lambda x: loss(x, moving(x)).sum())(logp)
    expected = jax.grad(lambda x: (fixed * function(x, old, advantages, MASK)).sum())(logp)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    per_sequence = jnp.full(SHAPE[:-1], 2.0)
    np.testing.assert_allclose(
        loss(logp, per_sequence), 2 * function(logp, old, advantages, MASK), rtol=1e-6
    )


@for_each("name", CASES)
def test_old_policy_and_advantages_are_constants(name):
    function, options, _ = CASES[name]
    arrays = tuple(map(jnp.asarray, make(4)))
    gradients = jax.grad(lambda *x: function(*x, MASK, **options).sum(), argnums=(0, 1, 2))(*arrays)
    assert np.any(gradients[0])
    assert not np.any(gradients[1])
    assert not np.any(gradients[2])


@for_each("name", POLICY_GRADIENTS)
@for_each("old", ["none", "copy"])
def test_unchanged_policy_has_the_plain_gradient(name, old):
    function, options, _ = CASES[name]
    logp, _, advantages = map(jnp.asarray, make(5))
    weights = jr.aggregate.sequence_mean(jnp.asarray(MASK))

    def loss(f, x, **kw):
        old_logp = None if old == "none" else logp
        return jnp.sum(weights * f(x, old_logp, advantages, MASK, **kw))

    got = jax.grad(lambda x: loss(function, x, **options))(logp)
    expected = jax.grad(lambda x: loss(surrogates.reinforce, x))(logp)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-9)


@for_each("name", CASES)
def test_no_old_policy_means_the_policy_itself(name):
    function, options, _ = CASES[name]
    logp, _, advantages = map(jnp.asarray, make(6))
    np.testing.assert_array_equal(
        function(logp, None, advantages, MASK, **options),
        function(logp, logp, advantages, MASK, **options),
    )


@for_each("name", [name for name in CASES if name != "kl_cov"])
def test_zero_advantage_gives_exactly_zero(name):
    function, options, _ = CASES[name]
    logp, old, advantages = map(jnp.asarray, make(7))
    loss = lambda x: function(x, old, 0 * advantages, MASK, **options).sum()  # noqa: E731
    value, gradient = jax.value_and_grad(loss)(logp)
    assert value == 0
    assert not np.any(gradient)


@for_each("name", [name for name in CASES if name != "kl_cov"])
@for_each("sampled", [False, True])
def test_an_impossible_token_of_advantage_zero_gives_exactly_zero(name, sampled):
    """Whether the old policy could sample it or neither policy can."""
    function, options, _ = CASES[name]
    logp, old, advantages = map(jnp.asarray, make(7))
    logp = logp.at[0, 0, 1].set(-jnp.inf)
    old = old if sampled else old.at[0, 0, 1].set(-jnp.inf)
    loss = lambda x, a: function(x, old, a, MASK, **options)  # noqa: E731
    tokens = loss(logp, 0 * advantages)
    gradient = jax.grad(lambda x: loss(x, 0 * advantages).sum())(logp)
    assert not np.any(tokens)
    assert not np.any(gradient)


@for_each("name", ["reinforce", "ppo_clip", "dapo_clip", "fipo"])
def test_an_impossible_token_of_weight_zero_gives_exactly_zero(name):
    function = CASES[name][0]
    logp, old, _ = map(jnp.asarray, make(7))
    logp, weight = logp.at[0, 0, 1].set(-jnp.inf), jnp.ones(SHAPE).at[0, 0, 1].set(0.0)
    loss = lambda x: function(x, old, jnp.ones(SHAPE[:-1]), MASK, weight=weight)  # noqa: E731
    tokens, gradient = loss(logp), jax.grad(lambda x: loss(x).sum())(logp)
    assert tokens[0, 0, 1] == gradient[0, 0, 1] == 0
    assert np.isfinite(tokens).all() and np.isfinite(gradient).all()


@pytest.mark.parametrize("name", CASES)
def test_jit_vmap_and_eager_agree(name):
    function, options, _ = CASES[name]
    bound = jr.bind(function, **options)
    logp, old, advantages = map(jnp.asarray, make(8))
    eager = bound(logp, old, advantages, MASK)
    np.testing.assert_allclose(jax.jit(bound)(logp, old, advantages, MASK), eager, rtol=1e-6)
    mapped = jax.vmap(jax.vmap(bound))(logp, old, advantages, jnp.asarray(MASK))
    np.testing.assert_allclose(mapped, eager, rtol=1e-6)


@for_each("name", CASES)
def test_bfloat16_in_float32_out(name):
    function, options, _ = CASES[name]
    low = [jnp.asarray(x, jnp.bfloat16) for x in make(9)]
    out = function(*low, MASK, **options)
    assert out.dtype == jnp.float32
    full = function(*(x.astype(jnp.float32) for x in low), MASK, **options)
    np.testing.assert_array_equal(out, full)


@for_each("name", CASES)
def test_all_masked_is_finite(name):
    function, options, _ = CASES[name]
    arrays = tuple(map(jnp.asarray, make(10)))
    nothing = jnp.zeros(SHAPE, bool)
    loss = lambda x: function(x, *arrays[1:], nothing, **options).sum()  # noqa: E731
    value, gradient = jax.value_and_grad(loss)(arrays[0])
    assert value == 0
    assert not np.any(gradient)


@for_each("name", CASES)
def test_bad_arrays_are_named(name):
    function, options, _ = CASES[name]
    logp, old, advantages = map(jnp.asarray, make())
    arrays = {"logp": logp, "old_logp": old, "advantages": advantages, "mask": MASK}
    integers = jnp.ones(SHAPE, int)
    for argument, bad, error, message in (
        ("old_logp", old[..., :4], ValueError, r".*logp \(2, 3, 5\).*old_logp \(2, 3, 4\)"),
        ("mask", MASK[..., :1], ValueError, r".*mask \(2, 3, 1\)"),
        ("mask", MASK.astype(np.float32), TypeError, "mask must be bool.*float32"),
        ("mask", None, TypeError, "mask must be a bool array.*None"),
        (
            "advantages",
            advantages[:, 0],
            ValueError,
            r"advantages .*\(2, 3, 5\).*\(2, 3\).*\(2,\)",
        ),
        ("advantages", integers[..., 0], TypeError, "advantages must be floating"),
        ("logp", integers, TypeError, "logp must be floating"),
        ("old_logp", integers, TypeError, "old_logp must be floating"),
    ):
        places = {**arrays, argument: bad}.values()
        with pytest.raises(error, match=f"{function.__name__}: {message}"):
            function(*places, **options)


@for_each("name", ["reinforce", "ppo_clip", "dapo_clip", "fipo"])
def test_bad_weight_is_named(name):
    function = CASES[name][0]
    logp, old, advantages = map(jnp.asarray, make())
    with pytest.raises(ValueError, match=rf"{name}: weight must .*got \(5,\)"):
        function(logp, old, advantages, MASK, weight=jnp.ones(5))
    with pytest.raises(TypeError, match=f"{name}: weight must be floating"):
        function(logp, old, advantages, MASK, weight=MASK)


@for_each(
    ("function", "options", "message"),
    [
        ("ppo_clip", {"eps_low": -0.1}, "eps_low must not be negative"),
        ("ppo_clip", {"eps_high": float("nan")}, "eps_high must not be negative"),
        ("ppo_clip", {"dual_clip": 1.0}, "dual_clip must be above 1"),
        ("ppo_clip", {"dual_clip": float("nan")}, "dual_clip must not be negative; got nan"),
        ("dapo_clip", {"eps_high": -0.1}, "eps_high must not be negative"),
        ("dapo_clip", {"dual_clip": 0.5}, "dual_clip must be above 1"),
        ("gspo", {"eps_low": -1e-4}, "eps_low must not be negative"),
        ("gspo_token", {"eps_high": -1e-4}, "eps_high must not be negative"),
        ("sapo", {"tau_pos": 0.0}, "tau_pos must be above 0"),
        ("sapo", {"tau_neg": float("inf")}, "tau_neg must be finite"),
        ("cispo", {"w_min": -0.1}, "w_min must not be negative"),
        ("cispo", {"w_max": 0.0}, "w_max must be above 0"),
        ("cispo", {"w_min": 2.0, "w_max": 1.0}, "w_min must not be above w_max; got 2 and 1"),
    ],
)
def test_bad_options_are_named(function, options, message):
    logp, old, advantages = map(jnp.asarray, make())
    with pytest.raises(ValueError, match=f"^{function}: {message}"):
        getattr(surrogates, function)(logp, old, advantages, MASK, **options)


def test_levels():
    sequence = {name for name, case in CASES.items() if traits_of(case[0]).level == "sequence"}
    assert sequence == SEQUENCE_ADVANTAGES | {"gspo_token", "gspo_token_dual"}
    assert set(CASES) - set(POLICY_GRADIENTS) == {
        "dft",
        "luspo",
        "clip_cov",
        "kl_cov",
        "gbpo",
        "hapo",
    }


def test_which_surrogates_know_the_old_policy():
    logp, old, advantages = map(jnp.asarray, make())
    for case in CASES.values():
        losses = [case[0](logp, other, advantages, MASK) for other in (old, logp)]
        assert traits_of(case[0]).has_ratio == (not np.array_equal(*losses))


def test_every_public_surrogate_is_tested():
    form = ["logp", "old_logp", "advantages", "mask"]
    public = {n for n in surrogates.__all__ if _parameters(getattr(surrogates, n))[:4] == form}
    here = {case[0].__name__ for case in CASES.values()}
    assert here <= public
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert not [name for name in public - here if name not in tests]


def _parameters(function):
    return list(inspect.signature(function).parameters) if callable(function) else []
