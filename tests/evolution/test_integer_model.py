"""The integer language model: no floats inside, members side by side, and text that it learns."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import equal

from jaxrl_llm import evolution as es

KEY = jax.random.key(10)
TABLE = es.int8_table(jax.random.key(11), size=2**14)
MEMBERS = jnp.arange(6)


@pytest.fixture(scope="module")
def params():
    params = es.egg_init(jax.random.key(12), vocab=20, width=8, layers=1)
    # Biases begin at zero, which would hide them.
    rng = np.random.default_rng(0)

    def fill(w):
        return jnp.asarray(rng.integers(-20, 20, w.shape), jnp.int8) if w.ndim == 1 else w

    return jax.tree.map(fill, params)


TEXTS = jnp.asarray(np.random.default_rng(0).integers(0, 20, (6, 9)))


@pytest.fixture(scope="module")
def scored(params):
    """Scores and states of six members that read six texts, in one batch."""
    noise = es.egg_noise(params, TABLE, KEY, 3, MEMBERS)
    return jax.jit(lambda texts: es.egg_scores(params, texts, perturbations=noise, shift=2))(TEXTS)


def test_all_numbers_are_integers(params):
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.int8)}

    def run(params, table, texts):
        noise = es.egg_noise(params, table, KEY, 3, MEMBERS)
        scores, state = es.egg_scores(params, texts, perturbations=noise)
        signs = es.pair_sign(scores.sum(-1))
        return es.egg_evolve(params, table, KEY, 3, signs, threshold=10), state

    program = str(jax.make_jaxpr(run)(params, TABLE, TEXTS))
    assert not [name for name in ("f32", "f16", "f64") if f"{name}[" in program]


@pytest.mark.slow
def test_a_batch_of_members_is_a_loop_over_members(params, scored):
    @jax.jit
    def alone(member, text):
        noise = es.egg_noise(params, TABLE, KEY, 3, member)
        return es.egg_scores(params, text, perturbations=noise, shift=2)

    for n in (0, 1, 4):
        scores, state = alone(MEMBERS[n], TEXTS[n])
        equal(scored[0][n], scores)
        equal(scored[1][:, n], state)


def test_a_text_in_two_windows_is_the_text(params, scored):
    @jax.jit
    def window(texts, state):
        noise = es.egg_noise(params, TABLE, KEY, 3, MEMBERS)
        return es.egg_scores(params, texts, state, perturbations=noise, shift=2)

    scores, state = scored
    first, between = window(TEXTS[:, :5], jnp.zeros_like(state))
    second, after = window(TEXTS[:, 4:], between)
    equal(jnp.concatenate([first, second], -1), scores)
    equal(after, state)


def test_noise_matters_and_fades(params, scored):
    @jax.jit
    def both(texts):
        noise = es.egg_noise(params, TABLE, KEY, 3, MEMBERS)
        faint = es.egg_scores(params, texts, perturbations=noise, shift=20)
        return es.egg_scores(params, texts)[0], faint[0]

    plain, faint = map(np.asarray, both(TEXTS))
    changed = np.asarray(scored[0]) - plain
    assert (changed != 0).mean() > 0.3
    # A shift rounds down: what fades is 0 or -1 of a sixteenth.
    assert np.abs(faint - plain).mean() < np.abs(changed).mean()


def test_more_than_ten_layers_keep_their_order():
    """As texts, "10" comes before "2": only the layer that moves its state may change."""
    one = jax.tree.map(jnp.zeros_like, es.egg_init(KEY, vocab=5, width=4, layers=1))
    zeros = one | {"layers": {str(i): one["layers"]["0"] for i in range(11)}}
    zeros["layers"]["2"] = one["layers"]["0"] | {
        "bf": jnp.full(4, 127, jnp.int8),
        "bh": jnp.full(4, 100, jnp.int8),
    }
    with jax.disable_jit():  # one token alone, whose program would take long to compile
        _, state = es.egg_scores(zeros, jnp.array([1, 2]))
    assert [i for i in range(11) if np.any(state[i])] == [2]


def test_an_update_is_that_of_each_leaf(params):
    signs = jnp.array([1, -1, 0, 1], jnp.int8)
    leaf = params["layers"]["0"]["up"]
    some = {"layers": {"0": {"up": leaf}}, "norm": params["norm"]}
    new = es.egg_evolve(some, TABLE, KEY, 3, signs, threshold=8)
    here = es.leaf_key(KEY, "layers/0/up")
    expected = es.egg_update(leaf, TABLE, here, 3, signs, threshold=8)
    equal(new["layers"]["0"]["up"], expected)
    assert (np.asarray(new["norm"]) != np.asarray(params["norm"])).any()


@pytest.mark.slow
def test_it_learns_text_beyond_the_frequencies_of_its_letters(optimized):
    text = json.__doc__.encode()[:400]
    letters = sorted(set(text))
    data = np.array([letters.index(byte) for byte in text])
    share = np.bincount(data) / len(data)
    order_0 = -(share * np.log2(share)).sum()
    params = es.egg_init(jax.random.key(0), vocab=len(letters), width=24, layers=1)
    table, members, window = es.int8_table(jax.random.key(1), size=2**16), jnp.arange(256), 40

    @jax.jit
    def step(params, state, tokens, epoch):
        noise = es.egg_noise(params, table, KEY, epoch, members)
        texts = jnp.broadcast_to(tokens, (256, window + 1))
        scores, state = es.egg_scores(params, texts, state, perturbations=noise)
        threshold = es.egg_threshold(es.egg_alpha(epoch))
        signs = es.pair_sign(scores.sum(-1))
        return es.egg_evolve(params, table, KEY, epoch, signs, threshold=threshold), state

    for epoch in range(120):
        begin = epoch * window % (len(data) - window)
        if epoch == 0 or begin < window:
            state = jnp.zeros((1, 256, 24), jnp.int8)
        params, state = step(params, state, jnp.asarray(data[begin : begin + window + 1]), epoch)
    bits = -jax.jit(es.egg_scores)(params, jnp.asarray(data))[0].mean() / 16
    assert bits < order_0 - 0.3
