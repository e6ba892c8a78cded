import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, equal
from rows import for_each

from jaxrl_llm.surrogates import dapo_clip, fipo, fipo_weights

OPEN = {"w_min": 0.0, "w_max": 1e6}  # bounds that no weight here reaches


def of(ratios, advantage=1.0, mask=None, **options):
    logp = jnp.log(jnp.asarray(ratios, jnp.float32))
    mask = jnp.ones(logp.shape, bool) if mask is None else jnp.asarray(mask)
    return fipo_weights(logp, 0 * logp, jnp.asarray(advantage), mask, **options).tolist()


def test_weights():
    # Worked numbers of the weights.
    # Ratios of 4, 1/2 and 4 with half-life 1: exponents of 2 are 2 - 1/2 + 2/4, -1 + 2/2 and 2.
    close(of([4, 0.5, 4], half_life=1, **OPEN), [4, 1, 4], rtol=1e-6)
    close(of([4, 0.5, 0.5], half_life=1), [1.2, 1, 1], rtol=1e-6)
    wide = {"w_min": 0.6, "w_max": 3.0}
    close(of([4, 0.5, 0.5], half_life=1, **wide), [2.378, 0.6, 0.6], rtol=1e-3)

    # A token beyond the dual clip moves no weight.
    options = {"half_life": 1, "dual_clip": 3.0} | OPEN
    for advantage in (1.0, -1.0):
        options["safe_ratio"] = None
        close(of([2, 4, 2], advantage, **options), [2 * 2**0.25, 2**0.5, 2])

    # A bad token that became likely is not amplified.
    ratios = [1.5, 1.05, 1.0]
    for advantage, expected in ((1.0, [1.2, 1.05, 1.0]), (-1.0, [1.0, 1.05, 1.0])):
        close(of(ratios, advantage, safe_ratio=1.4), expected, rtol=1e-6)
    low = of([1.5, 0.1, 1.0], -1.0, safe_ratio=1.4, w_min=0.1)
    close(low, [0.8, 0.1, 1.0], rtol=1e-6)
    assert of(ratios, -1.0, safe_ratio=None)[0] == pytest.approx(1.2)

    # Masked tokens are neither read nor counted in distances.
    options = {"half_life": 1} | OPEN
    holes = of([4, 7, 7, 0.5, 4], mask=[True, False, False, True, True], **options)
    close(holes, [4, 0, 0, 1, 4], rtol=1e-6)

    # An endless half life sums the rest and none takes the token alone.
    rng = np.random.default_rng(0)
    d = rng.normal(0, 0.1, 7)
    rest = np.exp(np.cumsum(d[::-1])[::-1])
    close(of(np.exp(d), half_life=np.inf, **OPEN), rest, rtol=1e-5)
    close(of(np.exp(d), half_life=1e-3, **OPEN), np.exp(d), rtol=1e-5)


def test_the_loss_is_dapos_times_a_constant():
    rng = np.random.default_rng(1)
    old = jnp.asarray(rng.normal(-2, 1, (4, 9)), jnp.float32)
    logp = old + jnp.asarray(rng.normal(0, 0.3, (4, 9)), jnp.float32)
    advantages = jnp.asarray(rng.normal(size=4), jnp.float32)
    mask = jnp.asarray(rng.random((4, 9)) < 0.8)
    weights = fipo_weights(logp, old, advantages, mask, half_life=3.0, w_min=0.8)
    assert 0.8 < float(weights[mask].min()) < 1 or float(weights[mask].min()) == np.float32(0.8)

    def gradient(loss):
        return jax.grad(lambda x: loss(x).sum())(logp)

    ours = gradient(lambda x: fipo(x, old, advantages, mask, half_life=3.0, w_min=0.8))
    dapo = gradient(lambda x: dapo_clip(x, old, advantages, mask))
    close(ours, weights * dapo, rtol=1e-6)
    equal(fipo(logp, logp, advantages, mask), dapo_clip(logp, logp, advantages, mask))


@for_each(("max_clipped", "kept"), [(0, 1), (1, 2), (2, 3), (None, 3)])
def test_a_response_with_many_dual_clipped_tokens_does_not_train(max_clipped, kept):
    ratios = np.ones((4, 3), np.float32)
    ratios[1, 0] = ratios[2, :2] = ratios[3] = 5.0
    logp, mask = jnp.log(ratios), jnp.ones((4, 3), bool).at[3, 2].set(False)
    advantages = jnp.array([-1.0, -1.0, -1.0, 1.0])  # that of the last one bounds nothing
    options = {"dual_clip": 4.0, "max_clipped": max_clipped}
    loss = fipo(logp, 0 * logp, advantages, mask, **options)
    assert np.asarray(loss != 0).any(-1).tolist() == [i < kept for i in range(3)] + [True]


@for_each(
    ("options", "message"),
    [
        ({"half_life": 0.0}, "half_life must be above 0"),
        ({"w_min": -0.1}, "w_min must not be negative"),
        ({"w_max": np.inf}, "w_max must be"),
        ({"w_min": 1.1}, "w_min and w_max must have 1 between them"),
        ({"w_max": 0.9}, "w_min and w_max must have 1 between them"),
        ({"dual_clip": 1.0}, "dual_clip must be above 1"),
        ({"safe_ratio": 1.0}, "safe_ratio must be above 1"),
    ],
)
def test_bad_options_are_named(options, message):
    x, mask = jnp.zeros(3), jnp.ones(3, bool)
    for function in (fipo, fipo_weights):
        with pytest.raises(ValueError, match=f"{function.__name__}: {message}"):
            function(x, x, jnp.ones(3), mask, **options)


def test_bad_limits_of_dual_clipped_tokens_are_named():
    x, mask = jnp.zeros(3), jnp.ones(3, bool)
    with pytest.raises(ValueError, match="fipo: max_clipped has no effect without dual_clip"):
        fipo(x, x, jnp.ones(3), mask, dual_clip=None)
    with pytest.raises(ValueError, match="fipo: max_clipped must"):
        fipo(x, x, jnp.ones(3), mask, max_clipped=-1)
