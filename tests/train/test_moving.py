"""The moving reference of an adapter: an average of the changes of the weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.core.low_rank import Factors, average, widen
from jaxrl_llm.models.lora import is_pair
from jaxrl_llm.testing import loop_checks
from jaxrl_llm.train import LoRAConfig, OptimizerConfig, SamplingConfig, train
from jaxrl_llm.train.models.moving import adapter_of, first_reference, moved_reference
from jaxrl_llm.train.update.parts import reference

RNG = np.random.default_rng(0)
compiled = jax.jit(average)


def drawn(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def product(pair):
    a, b = (np.asarray(x, np.float64) for x in pair)
    return a @ b


@for_each("lead", [(), (3,)])
@for_each("rate", [0.0, 0.05, 1.0])
def test_an_average_of_products_is_exact_up_to_its_rank(lead, rate):
    old, new = (Factors(drawn(*lead, 9, 2), drawn(*lead, 2, 7)) for _ in range(2))
    exact = (1 - rate) * product(old) + rate * product(new)
    found = compiled(widen(old, 2), widen(new, 2), rate)
    assert found.a.shape == (*lead, 9, 4)
    np.testing.assert_allclose(product(found), exact, atol=1e-5)
    # At a lower rank it is the nearest matrix.
    u, s, v = np.linalg.svd(exact)
    nearest = np.einsum("...ij,...j,...jk->...ik", u[..., :2], s[..., :2], v[..., :2, :])
    np.testing.assert_allclose(product(compiled(old, new, rate)), nearest, atol=1e-5)
    assert widen(old, 9).b.shape == (*lead, 7, 7)  # a matrix has no higher rank


def by_path(tree, path=""):
    """The products of an adapter's pairs, float64."""
    if is_pair(tree):
        return {path: product((tree["a"], tree["b"]))}
    found = {}
    for name, subtree in tree.items():
        found |= by_path(subtree, f"{path}/{name}")
    return found


def distance(found, exact, start):
    """Distance of an average from the exact one, as a share of the way from the start."""
    off, way = (
        sum(np.sum((x[k] - y[k]) ** 2) for k in x) for x, y in ((found, exact), (exact, start))
    )
    return np.sqrt(off / way)


@pytest.fixture
def policies(monkeypatch):
    """The adapters after each step of a run."""
    seen = []

    def recorded(rule, state, params, step, *, key):
        jax.debug.callback(lambda x: seen.append(jax.device_get(x)), params, ordered=True)
        return moved_reference(rule, state, params, step, key=key)

    monkeypatch.setattr(reference, "moved_reference", recorded)
    return seen


def exact_average(policies, start, rate):
    exact = by_path(start)
    for params in policies:
        new = by_path(params)
        exact = {k: (1 - rate) * x + rate * new[k] for k, x in exact.items()}
    return exact


@pytest.mark.slow
def test_the_reference_of_an_adapter_is_the_average_of_its_products(policies, tmp_path):
    rate = 0.3
    rule = jr.bind(jr.regularizers.ema_reference, rate=rate)
    config = tiny_run(
        tmp_path,
        recipe=jr.recipes.grpo(kl_coef=0.1).replace(reference=rule),
        lora=LoRAConfig(rank=4),
        sampling=SamplingConfig(group_size=8, max_new_tokens=6),
        optimizer=OptimizerConfig(learning_rate=1e-2),
    )
    result = train(config)
    start = loop_checks._start(config).params
    exact = exact_average(policies, start, rate)
    assert len(policies) == 6
    found = by_path(result.state.reference_params)
    error = distance(found, exact, by_path(start))
    assert error < 1e-3
    factors = start
    for params in policies:
        factors = jr.regularizers.ema_reference(factors, params, rate=rate)
    assert distance(by_path(factors), exact, by_path(start)) > max(10 * error, 10e-3)


def test_other_rules_take_products_as_they_are():
    start = {"up": {"a": drawn(8, 2), "b": drawn(2, 5)}}
    new = {"up": {"a": drawn(8, 2), "b": drawn(2, 5)}}
    rules = jr.regularizers
    reset = jr.bind(rules.reset_reference, every=2)
    state = first_reference(reset, start, adapter=True)
    assert state["up"].a.shape == (8, 5)  # four times the rank, at most that of the matrix
    for step, of in ((1, start), (2, new)):
        moved = moved_reference(reset, state, new, step, key=None)
        np.testing.assert_allclose(by_path(adapter_of(moved))["/up"], by_path(of)["/up"], rtol=1e-5)
    synchronized = jr.recipes.coupled_grpo(kl_coef=0.1, sync_every=2).reference
    state = first_reference(synchronized, start, adapter=True)
    kept = adapter_of(moved_reference(synchronized, state, new, 1, key=None))
    np.testing.assert_allclose(by_path(kept)["/up"], by_path(start)["/up"], rtol=1e-5)
    moved = adapter_of(moved_reference(synchronized, state, new, 2, key=None))
    exact = 0.4 * by_path(start)["/up"] + 0.6 * by_path(new)["/up"]
    np.testing.assert_allclose(by_path(moved)["/up"], exact, atol=1e-5)
    anchored = rules.anchored(jr.bind(rules.ema_reference, rate=0.5))
    state = moved_reference(
        anchored, first_reference(anchored, start, adapter=True), new, 1, key=None
    )
    half = (by_path(start)["/up"] + by_path(new)["/up"]) / 2
    np.testing.assert_allclose(by_path(adapter_of(state.reference))["/up"], half, atol=1e-5)
    np.testing.assert_allclose(
        by_path(adapter_of(state.anchor))["/up"], by_path(start)["/up"], rtol=1e-5
    )
    # Parameters of a whole model are none, whatever their names.
    named = {"a": drawn(2, 2), "b": drawn(2, 2)}
    assert first_reference(reset, named, adapter=False) is named
    further = rules.extrapolated(every=2)
    assert first_reference(further, start, adapter=True).reference is start


def test_an_average_has_the_rank_of_the_old_factors():
    """Also where it exceeds that of the matrix, so the state of a run keeps its shapes."""
    old = Factors(jnp.ones((16, 8)), jnp.ones((8, 4)))
    new = average(old, Factors(jnp.zeros((16, 8)), jnp.zeros((8, 4))), 0.25)
    assert (new.a.shape, new.b.shape) == (old.a.shape, old.b.shape)
    np.testing.assert_allclose(new.a @ new.b, 0.75 * (old.a @ old.b), rtol=1e-5)
