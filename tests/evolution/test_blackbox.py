"""Black boxes: their closed forms, and that both evolution strategies climb them by a margin."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cheap import close, equal
from rows import for_each

from jaxrl_llm import testing
from jaxrl_llm.evolution import centered_ranks, full_rank, leaf_classes, perturb
from jaxrl_llm.testing import control_returns, evolve, mlp, mlp_init, quadratic, rastrigin

KEY = jax.random.key(5)
# EGGROLL, and OpenAI-ES.
RANKS = pytest.mark.parametrize("rank", [1, None], ids=["eggroll", "open_es"])


def flat(members):
    return members["x"].reshape(len(members["x"]), -1)


def population_of(params, count, *, sigma, rank):
    classes = leaf_classes(params)
    options = {"rank": rank} if rank else {}
    classes = classes if rank else full_rank(classes)
    members = jnp.arange(count)

    @jax.jit
    @jax.vmap
    def made(n):
        return perturb(params, classes, KEY, 0, n, sigma=sigma, **options)

    return made(members)


@for_each(
    ("rank", "share"), [(1, 0.622677), (2, 0.558794), (None, 0.454041)], ids=["1", "2", "full"]
)
def test_the_mean_score_of_a_population_among_waves(rank, share):
    """What noise leaves of the waves: the less, the higher its rank."""
    sigma, x = 0.2, np.array([[0.3, 2.7], [-1.1, 0.0]])
    phase = (2 * np.pi * sigma) ** 2
    closed = (1 + phase / rank) ** (-rank / 2) if rank else np.exp(-phase / 2)
    assert abs(closed - share) < 1e-6
    params = {"x": jnp.asarray(x, jnp.float32)}
    scores = rastrigin(flat(population_of(params, 2**16, sigma=sigma, rank=rank)))
    expected = -(x**2 + sigma**2 + 10 * (1 - share * np.cos(2 * np.pi * x))).sum()
    assert abs(float(scores.mean()) - expected) < 0.15


@pytest.mark.of_many
@RANKS
def test_a_bowl_is_climbed(rank):
    params = {"x": jnp.full((4, 6), 1.5), "b": jnp.zeros(3)}
    center = jnp.linspace(-1, 1, 24)

    def score(members, step):
        return quadratic(flat(members), center) + quadratic(members["b"], 1.0)

    before = quadratic(params["x"].reshape(-1), center) - 3
    new, history = evolve(
        params, KEY, score, steps=80, optimizer=optax.adam(0.1), population=48, rank=rank
    )
    after = quadratic(new["x"].reshape(-1), center) + quadratic(new["b"], 1.0)
    assert before < -60 and after > -1.0
    assert history.shape == (80,) and history[-10:].mean() > -2.0


@pytest.mark.of_many
@pytest.mark.parametrize("rank", [4, None], ids=["eggroll", "open_es"])
def test_the_best_top_of_many_is_found(rank):
    """From the third top on every axis, where a gradient stays."""
    params = {"x": jnp.full((4, 4), 3.0)}
    new, _ = evolve(
        params,
        KEY,
        lambda members, step: rastrigin(flat(members)),
        steps=120,
        optimizer=optax.adam(optax.linear_schedule(0.15, 0.0, 120)),
        population=256,
        sigma=0.7,
        rank=rank,
        shape=centered_ranks,
    )
    assert rastrigin(params["x"].reshape(-1)) < -140
    assert jnp.abs(new["x"]).max() < 0.4


def test_a_run_is_its_key():
    params = {"x": jnp.ones((2, 3))}

    def run(key):
        score = lambda members, step: quadratic(flat(members))  # noqa: E731
        options = {"steps": 3, "optimizer": optax.sgd(1.0), "population": 8}
        return evolve(params, key, score, **options)[1]

    first = run(KEY)
    equal(first, run(KEY))
    assert (first != run(jax.random.key(6))).all()


def test_a_member_without_a_score_is_left_out_with_its_partner():
    params = {"x": jnp.full((2, 3), 2.0)}

    def score(members, step):
        failed = np.random.default_rng(step).uniform(size=32) < 0.3
        return np.where(failed, np.nan, quadratic(flat(members)))

    options = {"steps": 60, "optimizer": optax.adam(0.1), "population": 32}
    new, history = evolve(params, KEY, score, **options)
    assert np.isfinite(history).all() and quadratic(new["x"].reshape(-1)) > -1.0


def test_a_population_of_networks_is_a_loop_over_networks():
    population = jax.vmap(lambda key: mlp_init(key, (4, 6, 2)))(jax.random.split(KEY, 5))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)), jnp.float32)
    together = mlp(population, x)
    for n in range(5):
        own = jax.tree.map(lambda leaf, n=n: leaf[n], population)
        hidden = np.tanh(x[n] @ own["0"]["kernel"] + own["0"]["bias"])
        expected = hidden @ own["1"]["kernel"] + own["1"]["bias"]
        close(together[n], expected, atol=1e-6)
        close(mlp(own, x[n]), expected, atol=1e-6)


def always(action, count):
    """Networks that choose one action whatever they see."""
    params = {"0": {"kernel": jnp.zeros((4, 2)), "bias": jax.nn.one_hot(action, 2)}}
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), params)


def test_a_pole_that_is_pushed_one_way_falls_at_once():
    for action in (0, 1):
        returns = control_returns(always(action, 6), 3)
        assert returns.dtype == np.float32 and ((returns > 7) & (returns < 12)).all()


def test_an_episode_is_its_seed():
    population = jax.vmap(lambda key: mlp_init(key, (4, 4, 2)))(jax.random.split(KEY, 8))
    equal(control_returns(population, 1), control_returns(population, 1))
    assert (control_returns(population, 1) != control_returns(population, 2)).any()


@pytest.mark.slow
@RANKS
def test_a_pole_is_balanced(rank):
    """By networks that learn it; 500 is the most that an episode gives."""
    params, history = evolve(
        mlp_init(jax.random.key(0), (4, 8, 2)),
        KEY,
        control_returns,
        steps=20,
        optimizer=optax.adam(optax.linear_schedule(0.4, 0.1, 20)),
        population=128,
        sigma=0.5,
        rank=rank,
    )
    many = jax.tree.map(lambda x: jnp.broadcast_to(x, (64, *x.shape)), params)
    # Gymnasium calls the task solved at 475.
    assert history[0] < 30 and control_returns(many, 1000).mean() > 475


def test_what_cannot_be_played(monkeypatch):
    for name, words in (
        ("Acrobot-v1", r"reads \(6,\) and has 3 outputs; got one of 4 and 2"),
        ("Pendulum-v1", "discrete actions; 'Pendulum-v1' has Box"),
    ):
        with pytest.raises(ValueError, match=words):
            control_returns(always(0, 2), 0, name=name)
    options = {"steps": 1, "optimizer": optax.sgd(1.0), "population": 4}
    with pytest.raises(ValueError, match=r"must have shape \(4,\); got \(3,\)"):
        evolve({"x": jnp.ones((2, 2))}, KEY, lambda members, step: jnp.zeros(3), **options)
    assert {"evolve", "quadratic", "rastrigin", "control_returns"} <= set(testing.__all__)
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ImportError, match=r"control_returns needs .* 'jaxrl_llm\[envs\]'"):
        control_returns(always(0, 2), 0)
