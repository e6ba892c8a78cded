"""A population in one batch of the built-in model: each row is the model of its member."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close

from jaxrl_llm.evolution import leaf_classes, model_delta, perturb
from jaxrl_llm.models import AttentionContext
from jaxrl_llm.rollout import Generation, Group, make_engine
from jaxrl_llm.testing import tiny_model

KEY = jax.random.key(9)
P, G, T = 2, 2, 5
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 250, (P, G, T)))
POSITIONS = jnp.broadcast_to(jnp.arange(T), TOKENS.shape)
MEMBERS = jnp.array([[0, 1], [5, 2]])


@pytest.fixture(scope="module")
def everything():
    """A model with every kind of leaf, all of them perturbed but the output matrix."""
    options = {"architecture": "qwen3", "qk_norm": True, "attention_bias": True, "tied": False}
    model, params = tiny_model(num_layers=1, **options)
    # Biases begin at zero, which would hide a wrong sign.
    params = jax.tree.map(lambda x: x + 0.1, params)
    return model, params, leaf_classes(params, rules=[("embed/*", "embedding")], others="full")


@functools.partial(jax.jit, static_argnames=("model", "remat"))
def hidden(model, params, delta=None, tokens=TOKENS, remat="none"):
    context = AttentionContext(mask=jnp.ones(tokens.shape, bool))
    positions = POSITIONS[: tokens.shape[0], : tokens.shape[1]]
    return model.apply(params, tokens, positions, context, delta=delta, remat=remat)[0]


@pytest.mark.slow
def test_rows_may_share_the_factors_of_their_pair(everything):
    """Four rows of two pairs, every kind of leaf: values and gradients are those of copies."""
    model, params, classes = everything
    members, tokens = np.array([4, 5, 0, 1]), TOKENS.reshape(4, 1, T)
    noise = {"sigma": 0.05, "rank": 2}

    def delta(**options):
        made = model_delta(params, classes, KEY, 4, members, **noise, **options)
        return jax.tree.map(lambda x: x[:, None], made)

    shared, each = delta(share_pairs=True), delta()
    assert shared["embed"][0].shape[0] == 2 and each["embed"][0].shape[0] == 4
    context = AttentionContext(mask=jnp.ones(tokens.shape, bool))
    positions = jnp.broadcast_to(jnp.arange(T), tokens.shape)

    def mean(delta):
        out, _ = model.apply(params, tokens, positions, context, delta=delta)
        return jnp.mean(out**3), out

    grad = jax.jit(jax.value_and_grad(mean, has_aux=True))
    found, expected = grad(shared), grad(each)
    close(found[0][1], expected[0][1], atol=1e-5)
    # The gradient of what is shared is the sum of both members'.
    summed = jax.tree.map(
        lambda x, y: x if x.shape == y.shape else x.reshape(-1, 2, *x.shape[1:]).sum(1),
        expected[1],
        found[1],
    )
    jax.tree.map(lambda x, y: close(x, y, atol=1e-4), found[1], summed)


HOOKS = ["*bias", "*q_norm*", "*k_norm*", "*mlp_norm*", "norm/*", "embed/*", "layers/*kernel"]


@pytest.mark.of_many
@pytest.mark.parametrize("leaf", HOOKS)
def test_each_row_is_its_member(everything, leaf):
    """One kind of leaf alone moves the output, as in the model of the member."""
    model, params, classes = everything
    kind = {"embed/*": "embedding", "layers/*kernel": "lowrank"}.get(leaf, "full")
    alone = leaf_classes(params, rules=[(leaf, kind), ("*", "frozen")])
    remat, noise = "full" if kind == "lowrank" else "none", {"sigma": 0.2, "rank": 2}

    @jax.jit
    def both(params):
        delta = model_delta(params, alone, KEY, 4, MEMBERS, **noise)
        moved = perturb(params, alone, KEY, 4, MEMBERS[1, 0], **noise)
        return hidden(model, params, delta, remat=remat), hidden(model, moved)

    found, expected = both(params)
    close(found[1, 0], expected[1, 0], atol=2e-4)
    assert np.abs(expected - hidden(model, params)).max() > 1e-3


@pytest.mark.slow
def test_a_population_decodes_in_the_slots_of_one_engine():
    """Greedy completions of members side by side are those of each model alone."""
    model, params = tiny_model(num_layers=1)
    classes = leaf_classes(params, others="full")
    members, noise = jnp.arange(5), {"sigma": 0.3, "rank": 2}
    deltas = jax.jit(lambda p: model_delta(p, classes, KEY, 0, members, **noise))(params)
    sizes = {"rows": 2, "width": 1, "prompt_length": 8, "max_new_tokens": 6}
    engine = make_engine(model, temperature=0.0, **sizes)

    def decode(params, *groups, **options):
        generation = Generation(engine, params, key=KEY, **options)
        generation.submit(*groups)
        return {done.id: tuple(done.completions[0].tokens) for done in generation}

    groups = [Group(n, [5, 60, 7], (n,), adapter=n) for n in range(5)]
    found = decode(params, *groups, deltas=deltas)
    assert len(set(found.values())) > 2
    member = jax.jit(lambda p, n: perturb(p, classes, KEY, 0, n, **noise))
    for n in (0, 1, 4):
        moved = member(params, n)
        assert found[n] == decode(moved, groups[n]._replace(adapter=0))[n]


def test_bad_deltas():
    model, params = tiny_model(num_layers=1)
    classes = leaf_classes(params, rules=[("embed/*", "embedding"), ("*", "frozen")])
    delta = model_delta(params, classes, KEY, 0, MEMBERS, sigma=0.1)
    three = jnp.array([[0, 1], [5, 2], [3, 4]])
    of_three = model_delta(params, leaf_classes(params), KEY, 0, three, sigma=0.1)
    for bad, message in [
        (delta, "would not change the output matrix of a tied model"),
        ({"norm": (0, 0, 1)}, "delta 'norm' is not at a linear layer"),
        ({"norm": 0.5}, "'norm' must have at least 1 axis"),
        (of_three, "3 factors of a delta do not divide 2 rows"),
    ]:
        with pytest.raises(ValueError, match=message):
            hidden(model, params, bad)
