"""drpo_len against the paper's loss written group by group in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, compiled, equal
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm import aggregate
from jaxrl_llm.core import traits_of
from jaxrl_llm.surrogates import drpo_len, kl_barrier, kl_from_old, length_softmax_weights
from jaxrl_llm.surrogates.decoupled_length import log_mean_exp

SHAPE = (4, 3, 5)
LENGTHS = np.array([[5, 3, 1], [0, 4, 2], [2, 2, 5], [1, 3, 3]])
MASK = np.arange(5) < LENGTHS[..., None]
# Groups of both kinds, of one kind, and with one that takes no side.
ADVANTAGES = np.array(
    [[1.0, 0.5, -2.0], [1.0, 0.3, -0.1], [1.0, 1.0, 2.0], [0.0, -1.0, 1.0]], np.float32
)
LOGP = np.random.default_rng(0).normal(-1.5, 0.8, SHAPE).astype(np.float32)
OPTIONS = {"length": 6.0, "lam": 0.2, "tau": 2.0}


def shares64(lengths, right, length, lam):
    w = np.where(right, np.exp((1 - lengths / length) / lam), 0.0)
    return w / w.sum() if right.any() else w


def paper64(logp, advantages, mask, *, length, lam=0.1, tau=10.0):
    """The loss: minus the mean of J over all groups that are not empty."""
    total, groups = 0.0, 0
    for x, a, m in zip(logp, advantages, mask, strict=True):
        n = m.sum(-1)
        groups += bool(n.any())
        s = np.where(m, x, 0).sum(-1) / np.maximum(n, 1)
        right, wrong = (a > 0) & (n > 0), (a < 0) & (n > 0)
        if right.any() and wrong.any():
            total += shares64(n, right, length, lam) @ s
            total -= tau * np.log(np.mean(np.exp(s[wrong] / tau)))
    return -total / max(groups, 1)


def loss(logp, advantages=ADVANTAGES, mask=MASK, weights=aggregate.group_mean, **options):
    tokens = drpo_len(logp, None, advantages, mask, **(OPTIONS | options))
    return aggregate.weighted_sum(tokens, weights(jnp.asarray(mask)))


value_and_gradient, gradient_of = compiled(jax.value_and_grad(loss)), compiled(jax.grad(loss))


def test_worked_numbers():
    # Mean log-probabilities [-.5, -.2 | -.8, -.4]; lengths 1/4 and 1/2 of the most.
    logp = jnp.broadcast_to(jnp.array([-0.5, -0.2, -0.8, -0.4])[:, None], (4, 4))
    mask = jnp.arange(4) < jnp.array([1, 2, 4, 3])[:, None]
    advantages = jnp.array([1.0, 1.0, -1.0, -1.0])

    def group(x):
        tokens = drpo_len(x, None, advantages, mask, length=4)
        return -aggregate.weighted_sum(tokens, aggregate.group_mean(mask))

    value, gradient = jax.value_and_grad(group)(logp)
    assert float(value) == pytest.approx(0.120758, abs=1e-6)
    close(gradient.sum(-1), [0.924142, 0.075858, -0.490001, -0.509999], atol=1e-6)
    close(
        length_softmax_weights(jnp.array([1.0, 2.0, 4.0, 3.0]), advantages > 0, length=4),
        [0.924142, 0.075858, 0.0, 0.0],
        atol=1e-6,
    )


@for_each("options", [{}, {"lam": 0.1, "tau": 10.0}, {"lam": 0.02, "tau": 0.3}])
def test_value_and_gradient_are_those_of_the_paper(options):
    value, gradient = jax.jit(jax.value_and_grad(lambda x: loss(x, **options)))(LOGP)
    settings64 = OPTIONS | options
    x64 = LOGP.astype(np.float64)
    assert float(value) == pytest.approx(paper64(x64, ADVANTAGES, MASK, **settings64), rel=1e-5)
    numeric = np.zeros(SHAPE)
    for i in np.ndindex(SHAPE):
        high, low = x64.copy(), x64.copy()
        high[i] += 1e-6
        low[i] -= 1e-6
        numeric[i] = (
            paper64(high, ADVANTAGES, MASK, **settings64)
            - paper64(low, ADVANTAGES, MASK, **settings64)
        ) / 2e-6
    close(gradient, numeric, rtol=1e-4, atol=1e-6)


def test_gradients_of_groups():
    # The coefficients of either side add up to one and no right answer is lowered.
    gradient = np.asarray(gradient_of(LOGP)).sum(-1) * len(LOGP)
    coefficients = -gradient[[0, 1]]
    sides = np.sign(ADVANTAGES)[[0, 1]] * (LENGTHS[[0, 1]] > 0)
    close((coefficients * (sides > 0)).sum(-1), 1.0, rtol=1e-5)
    close((coefficients * (sides < 0)).sum(-1), -1.0, rtol=1e-5)
    assert (coefficients * sides >= 0).all()
    # The group of right answers alone, and who takes no side, have no gradient.
    assert not gradient[2].any()
    assert gradient[3, 0] == 0.0

    # Only the sign of the advantages counts.
    equal(gradient_of(LOGP), gradient_of(LOGP, advantages=np.sign(ADVANTAGES)))
    rewards = jnp.array([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    for baseline in (jr.advantages.dr_grpo, jr.advantages.grpo, jr.advantages.rloo):
        equal(
            loss(LOGP, advantages=baseline(rewards)),
            loss(LOGP, advantages=jr.advantages.dr_grpo(rewards)),
        )

    # Infinite temperatures.
    inf = float("inf")
    gradient = np.asarray(jax.grad(lambda x: loss(x, lam=1e6, tau=1e6))(LOGP)).sum(-1)
    close(4 * gradient[0], [-0.5, -0.5, 1.0], atol=1e-4)
    shares = length_softmax_weights(jnp.array([1.0, 5.0]), jnp.ones(2, bool), length=8, lam=inf)
    assert shares.tolist() == [0.5, 0.5]

    # Sequence mean is enough where groups are equally large.
    mask = np.ones(SHAPE, bool)
    got = [
        jax.grad(lambda x, w=w: loss(x, mask=mask, weights=w))(LOGP)
        for w in (aggregate.group_mean, aggregate.sequence_mean)
    ]
    close(got[0], got[1], rtol=1e-5)


@for_each("tau", [float("inf"), 1e8, 100.0])
def test_at_a_high_temperature_wrong_answers_are_lowered_equally(tau):
    logp = jnp.array([-0.5, -3.0, -0.25, -0.75])[:, None]
    mask, advantages = jnp.ones((4, 1), bool), jnp.array([1.0, -1.0, -1.0, -1.0])

    def objective(x, tau):
        return drpo_len(x, None, advantages, mask, length=8, tau=tau)[0, 0]

    wrong = np.float64(logp[1:, 0])
    mean, shares = wrong.mean(), np.full(3, 1 / 3)
    if np.isfinite(tau):
        mean += tau * np.log1p(np.expm1((wrong - mean) / tau).mean())
        shares = np.exp((wrong - wrong.mean()) / tau) / 3
        shares /= shares.sum()
    for number in (tau, jnp.float32(tau)):
        value, gradient = jax.jit(jax.value_and_grad(objective))(logp, number)
        assert float(value) == pytest.approx(0.5 + mean, rel=1e-6)
        close(gradient[:, 0], [-1.0, *shares], rtol=1e-6)


@for_each("junk", [1e4, np.nan, np.inf, -np.inf])
def test_masked_cells_are_never_read(junk):
    old = LOGP + 0.1
    clean = value_and_gradient(LOGP, advantages=ADVANTAGES)
    dirty = value_and_gradient(
        np.where(MASK, LOGP, np.float32(junk)),
        advantages=np.where(MASK.any(-1), ADVANTAGES, np.float32(junk)),
    )
    assert clean[0] == dirty[0]
    equal(clean[1], dirty[1])
    for estimator in ("k1", "k3"):
        term = lambda x, o: kl_from_old(x, o, MASK, estimator=estimator).sum()  # noqa: B023, E731
        want = jax.value_and_grad(term)(LOGP, old)
        got = jax.value_and_grad(term)(
            np.where(MASK, LOGP, np.float32(junk)), np.where(MASK, old, np.float32(junk))
        )
        assert want[0] == got[0]
        equal(want[1], got[1])
    shares = length_softmax_weights(jnp.array([1.0, junk]), jnp.array([True, False]), length=4)
    assert shares.tolist() == [1.0, 0.0]


def test_extremes():
    # Nothing kept and nothing to compare.
    for mask, advantages in (
        (np.zeros(SHAPE, bool), ADVANTAGES),
        (MASK, 0 * ADVANTAGES),
        (MASK, np.abs(ADVANTAGES)),
        (MASK, -np.abs(ADVANTAGES)),
    ):
        value, gradient = value_and_gradient(LOGP, advantages=advantages, mask=mask)
        assert value == 0.0
        assert not gradient.any()

    # Extreme log probabilities stay finite and kept nan shows.
    far = np.where(np.arange(5) % 2, LOGP, np.float32(-1e4))
    value, gradient = jax.value_and_grad(lambda x: loss(x, tau=0.01, lam=1e-3))(far)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    bad = LOGP.copy()
    bad[0, 0, 0] = np.nan
    assert np.isnan(loss(bad))
    worse = ADVANTAGES.copy()
    worse[0, 0] = np.nan
    assert np.isnan(loss(LOGP, advantages=worse))

    # An impossible wrong answer is lowered no further.
    logp = jnp.array([-0.5, -jnp.inf, -0.75, -1.5])[:, None]
    mask, advantages = jnp.ones((4, 1), bool), jnp.array([1.0, -1.0, -1.0, -1.0])

    def objective(x):
        return drpo_len(x, None, advantages, mask, length=8, tau=2.0)[0, 0]

    value, gradient = jax.value_and_grad(objective)(logp)
    terms = np.exp(np.array([-np.inf, -0.75, -1.5]) / 2.0)
    assert float(value) == pytest.approx(0.5 + 2.0 * np.log(terms.mean()), rel=1e-6)
    close(gradient[:, 0], [-1.0, *terms / terms.sum()], rtol=1e-6)
    # All of them: the objective has no bound, its gradient has.
    value, gradient = jax.value_and_grad(objective)(logp.at[1:].set(-jnp.inf))
    assert value == -jnp.inf
    close(gradient[:, 0], [-1.0, 1 / 3, 1 / 3, 1 / 3], rtol=1e-6)

    # A coefficient of zero leaves impossible tokens out.
    logp, old = jnp.array([-jnp.inf, -1.0]), jnp.array([-1.0, -1.5])
    for estimator in ("k1", "k3"):
        term = lambda x, e=estimator: kl_from_old(  # noqa: E731
            x, old, jnp.ones(2, bool), coef=jnp.array([0.0, 1.0]), estimator=e
        )
        assert term(logp)[0] == 0
        assert jax.grad(lambda x, f=term: f(x).sum())(logp)[0] == 0


@for_each("tau", [2.0, float("inf")])
@for_each(("advantage", "first"), [(0.0, 2), (1.0, 1)])
def test_an_impossible_response_outside_the_objective_changes_nothing(tau, advantage, first):
    """Of no side, or next to a shorter answer that leaves it a share of 0."""
    advantages = jnp.array([1.0, advantage, -1.0])
    mask = jnp.arange(2) < jnp.array([first, 2, 2])[:, None]
    logp = jnp.array([[-0.5, -0.25], [-jnp.inf, -1.0], [-0.75, -1.0]])

    def objective(x):
        return drpo_len(x, None, advantages, mask, length=2, lam=1e-3, tau=tau)[0, 0]

    value, gradient = jax.value_and_grad(objective)(logp)
    expected, slope = jax.value_and_grad(objective)(logp.at[1, 0].set(-3.0))
    assert value == expected
    equal(gradient, slope)
    assert not gradient[1].any() and gradient[2].all()


def test_constants_dtypes_and_compilation():
    old, advantages = jnp.asarray(LOGP + 0.1), jnp.asarray(ADVANTAGES)

    def function(x, o, a):
        return drpo_len(x, o, a, jnp.asarray(MASK), **OPTIONS)

    gradients = jax.grad(lambda *x: function(*x).sum(), argnums=(1, 2))(LOGP, old, advantages)
    assert not any(g.any() for g in gradients)
    equal(function(LOGP, old, advantages), function(LOGP, None, advantages))
    close(jax.jit(function)(LOGP, old, advantages), function(LOGP, old, advantages), rtol=1e-6)
    low = jnp.asarray(LOGP, jnp.bfloat16)
    assert function(low, None, advantages).dtype == jnp.float32
    equal(function(low, None, advantages), function(low.astype(jnp.float32), None, advantages))
    mapped = jax.vmap(lambda x, a, m: drpo_len(x, None, a, m, **OPTIONS))(LOGP, advantages, MASK)
    close(mapped, function(LOGP, None, advantages), rtol=1e-6)
    assert traits_of(drpo_len).level == "sequence"
    assert not traits_of(drpo_len).policy_gradient


@for_each("estimator", ["k1", "k3"])
def test_kl_has_the_value_and_the_gradient_of_the_divergence(estimator):
    """Exactly, over the three arms of a bandit that the old policy samples."""
    old = jnp.log(jnp.array([0.2, 0.5, 0.3]))
    logits = jnp.array([0.3, -0.2, 0.4])

    def sampled(z):
        tokens = kl_from_old(jax.nn.log_softmax(z), old, jnp.ones(3, bool), estimator=estimator)
        return jnp.sum(jnp.exp(old) * tokens)

    def exact(z):
        return jnp.sum(jnp.exp(old) * (old - jax.nn.log_softmax(z)))

    for z in (logits, old):
        close(sampled(z), exact(z), atol=1e-6)
        close(jax.grad(sampled)(z), jax.grad(exact)(z), atol=1e-6)


def test_kl_from_old_and_its_barrier():
    # Kl values and coefficient.
    logp, old = jnp.array([-1.0, -2.0, -1.5, -1.0]), jnp.array([-1.5, -1.0, -1.5, -1.01])
    mask = jnp.ones(4, bool)
    d = np.asarray(logp, np.float64) - np.asarray(old, np.float64)
    close(kl_from_old(logp, old, mask), -d, atol=1e-7)
    close(kl_from_old(logp, old, mask, estimator="k3"), np.expm1(d) - d, rtol=1e-4, atol=1e-8)
    wide = jnp.full((2, 1, 1), 3.0)
    close(
        kl_from_old(jnp.tile(logp, (2, 3, 1)), jnp.tile(old, (2, 3, 1)), jnp.ones((2, 3, 4), bool),
                    coef=wide),
        np.tile(-3 * d, (2, 3, 1)), rtol=1e-4, atol=1e-6,
    )  # fmt: skip
    coef_gradient = jax.grad(lambda c: kl_from_old(logp, old, mask, coef=c).sum())(2.0)
    assert coef_gradient == 0.0
    close(kl_barrier(jnp.array([-1.0, 0.0, 1e-4, 2e-4, 1.0])), [0, 0, 0, 0.1, 999.9], atol=1e-4)

    # The whole loss of the paper. J, and the divergence of the batch times its excess, the factor
    # detached.
    beta, delta = 50.0, 1e-2
    old = LOGP + np.random.default_rng(1).normal(0.1, 0.3, SHAPE).astype(np.float32)
    tokens = aggregate.token_mean(jnp.asarray(MASK))

    def ours(x):
        kl = aggregate.weighted_sum(kl_from_old(x, old, MASK), tokens)
        coef = kl_barrier(kl, beta=beta, delta=delta)
        return loss(x) + aggregate.weighted_sum(kl_from_old(x, old, MASK, coef=coef), tokens)

    x64, old64 = LOGP.astype(np.float64), old.astype(np.float64)
    kl = (old64 - x64)[MASK].mean()
    factor = max(beta * (kl - delta), 0.0)
    assert factor > 0
    value, gradient = jax.value_and_grad(ours)(LOGP)
    expected = paper64(x64, ADVANTAGES, MASK, **OPTIONS) + factor * kl
    assert float(value) == pytest.approx(expected, rel=1e-4)
    extra = np.asarray(gradient) - np.asarray(gradient_of(LOGP))
    close(extra, -factor * MASK / MASK.sum(), rtol=1e-3, atol=1e-6)

    # The coefficient as a controller.
    controller = jr.stateless(jr.bind(jr.connect(kl_barrier, kl="last_kl"), beta=10.0, delta=0.5))
    value, state = controller.update(jnp.ones((2, 3)), (), last_kl=jnp.float32(0.75), where=None)
    assert float(value) == 2.5
    assert state == ()


def test_a_mean_counts_the_entries_of_its_own_row():
    x = jnp.array([[0.0, 1.0, 2.0], [1.0, 1.0, 5.0]])
    where = jnp.array([[True, True, True], [True, False, False]])
    rows = [np.log(np.mean(np.exp([0.0, 1.0, 2.0]))), 1.0]
    close(log_mean_exp(x, where)[:, 0], rows, rtol=1e-6)
