"""What every surrogate promises, against float64 NumPy references written from the formulas."""

import functools
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, equal
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


WEIGHTED = ["reinforce", "ppo_clip", "dapo_clip", "fipo"]
JUNK = np.float32([1e4, -1e4, np.nan, np.inf, -np.inf])
ONES = np.ones(SHAPE, np.float32)


@functools.cache
def compiled(name):
    """Token losses, and gradients of their weighted sum by policy, old policy and advantages."""
    function, options, _ = CASES[name]

    def loss(x, old, advantages, mask, weights):
        tokens = function(x, old, advantages, mask, **options)
        return jnp.sum(weights * tokens), tokens

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))


def run(name, logp, old, advantages, mask=MASK, weights=ONES):
    """One program a case: every test gives it the same shapes."""
    if advantages.ndim == 2 and name not in SEQUENCE_ADVANTAGES:
        advantages = np.broadcast_to(advantages[..., None], SHAPE)
    gradients, tokens = compiled(name)(logp, old, advantages, mask, weights)
    return np.asarray(tokens), [np.asarray(x) for x in gradients]


@for_each("name", CASES)
def test_value_and_gradient_match_float64(name):
    reference, moved = CASES[name][2], False
    for seed, per_token in enumerate((True, False, True)):
        logp, old, advantages = make(seed, per_token and name not in SEQUENCE_ADVANTAGES)
        weights = np.random.default_rng(seed + 10).uniform(0.5, 1.5, SHAPE)
        x64, old64, a64 = (x.astype(np.float64) for x in (logp, old, advantages))
        a64 = a64 if a64.ndim == 3 else a64[..., None]

        def loss64(x):
            return np.sum(weights * MASK * reference(x, x64, old64, a64, MASK))  # noqa: B023

        tokens, gradients = run(name, logp, old, advantages, weights=weights.astype(np.float32))
        expected = MASK * reference(x64, x64, old64, a64, MASK)
        close(tokens, expected, rtol=1e-5, atol=1e-6)
        slope = numeric_gradient(loss64, x64)
        close(gradients[0], slope, rtol=1e-4, atol=1e-5)
        moved |= bool(np.any(gradients[0]))
        # The old policy and the advantages are constants.
        assert not np.any(gradients[1]) and not np.any(gradients[2])
    assert moved


@for_each("name", CASES)
def test_masked_cells_are_never_read(name):
    arrays = make(1, per_token=name in TOKEN_ADVANTAGES)
    kept = [MASK, MASK, MASK if arrays[2].ndim == 3 else MASK.any(-1)]
    clean, slopes = run(name, *arrays)
    assert np.all(clean[~MASK] == 0) and np.all(slopes[0][~MASK] == 0)
    for junk in JUNK:
        dirty = [np.where(k, x, junk) for k, x in zip(kept, arrays, strict=True)]
        for only in ((0,), (1,), (2,), (0, 1, 2)):
            mixed = [dirty[i] if i in only else arrays[i] for i in range(3)]
            tokens, gradients = run(name, *mixed)
            equal(tokens, clean)
            equal(gradients[0], slopes[0])
    tokens, gradients = run(name, *arrays, mask=np.zeros(SHAPE, bool))
    assert not np.any(tokens) and not np.any(gradients[0])


@for_each("name", [name for name in CASES if name != "kl_cov"])
def test_zero_advantage_gives_exactly_zero(name):
    """At a token that is impossible too, whether the old policy could sample it or not."""
    logp, old, advantages = make(7)
    never, was_never = logp.copy(), old.copy()
    never[0, 0, 1] = was_never[0, 0, 1] = -np.inf
    for policies in ((logp, old), (never, old), (never, was_never)):
        tokens, gradients = run(name, *policies, 0 * advantages)
        assert not np.any(tokens)
        assert not np.any(gradients[0])


@for_each("name", WEIGHTED)
def test_weight_is_detached_masked_and_multiplied_last(name):
    function, options, _ = CASES[name]
    logp, old, advantages = make(3)
    plain, _ = run(name, logp, old, advantages)

    @jax.jit
    def moving(x, junk):  # a weight that depends on the policy must not add to the gradient
        def loss(x):
            weight = jnp.where(MASK, 0.5 * jnp.exp(x - old), junk)
            tokens = function(x, old, advantages, MASK, weight=weight, **options)
            return tokens.sum(), tokens

        return jax.grad(loss, has_aux=True)(x)

    half = 0.5 * np.exp(logp - old)
    _, (expected, _, _) = run(name, logp, old, advantages, weights=half)
    for junk in (np.nan, np.inf):
        gradient, tokens = moving(logp, junk)
        close(tokens, half * plain, rtol=1e-6)
        close(gradient, expected, rtol=1e-6)

    @jax.jit
    def weighted(x, weight):
        def loss(x):
            tokens = function(x, old, advantages, MASK, weight=weight, **options)
            return tokens.sum(), tokens

        return jax.grad(loss, has_aux=True)(x)

    _, per_sequence = weighted(logp, np.full(SHAPE[:-1], 2.0, np.float32))
    close(per_sequence, 2 * plain, rtol=1e-6)
    # An impossible token of weight zero gives exactly zero.
    weight = ONES.copy()
    logp[0, 0, 1], weight[0, 0, 1] = -np.inf, 0.0
    gradient, tokens = weighted(logp, weight)
    assert tokens[0, 0, 1] == gradient[0, 0, 1] == 0
    assert np.isfinite(tokens).all() and np.isfinite(gradient).all()


@pytest.mark.of_many
@pytest.mark.parametrize("name", CASES)
def test_other_ways_to_call_it(name):
    """Eagerly, mapped, without an old policy, of one advantage a sequence and in bfloat16."""
    function, options, _ = CASES[name]
    bound = jr.bind(function, **options)
    logp, old, advantages = make(8)
    tokens, gradients = run(name, logp, old, advantages)
    dirty = (
        advantages if name in SEQUENCE_ADVANTAGES else np.where(MASK.any(-1), advantages, JUNK[2])
    )
    eager = bound(*map(jnp.asarray, (logp, old, dirty)), MASK)
    close(eager, tokens, rtol=1e-6)
    mapped = jax.jit(jax.vmap(jax.vmap(bound)))(logp, old, advantages, MASK)
    close(mapped, tokens, rtol=1e-6)

    @jax.jit
    def without_old(x):
        tokens = bound(x, None, dirty, MASK)
        return tokens.sum(), tokens

    slope, alone = jax.jit(jax.grad(without_old, has_aux=True))(logp)
    tokens, gradients = run(name, logp, logp, advantages)
    close(alone, tokens, rtol=1e-6)
    close(slope, gradients[0], rtol=1e-6, atol=1e-9)

    low = [jnp.asarray(x, jnp.bfloat16) for x in (logp, old, advantages)]
    out = jax.jit(bound)(*low, MASK)
    assert out.dtype == jnp.float32
    tokens, _ = run(name, *(np.asarray(x, np.float32) for x in low))
    close(out, tokens, rtol=1e-6)


@for_each("name", CASES)
def test_bad_arrays_are_named(name):
    function, options, _ = CASES[name]
    logp, old, advantages = make()
    arrays = {"logp": logp, "old_logp": old, "advantages": advantages, "mask": MASK}
    integers = np.ones(SHAPE, int)
    for argument, bad, error, message in (
        ("old_logp", old[..., :4], ValueError, r".*logp \(2, 3, 5\).*old_logp \(2, 3, 4\)"),
        ("mask", MASK[..., :1], ValueError, r".*mask \(2, 3, 1\)"),
        ("mask", MASK.astype(np.float32), TypeError, "mask must be bool.*float32"),
        ("mask", None, TypeError, "mask must be a bool array.*None"),
        ("advantages", advantages[:, 0], ValueError, r"advantages .*\(2, 3, 5\).*\(2, 3\).*\(2,\)"),
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
    logp, old, advantages = make()
    with pytest.raises(ValueError, match=rf"{name}: weight must .*got \(5,\)"):
        function(logp, old, advantages, MASK, weight=np.ones(5))
    with pytest.raises(TypeError, match=f"{name}: weight must be floating"):
        function(logp, old, advantages, MASK, weight=MASK)


def test_traits():
    # Levels.
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

    # Which surrogates know the old policy.
    logp, old, advantages = make()
    for name, case in CASES.items():
        losses = [run(name, logp, other, advantages)[0] for other in (old, logp)]
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
