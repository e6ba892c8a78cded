"""Noise from keys: the worked draws, pairs, reuse, leaves by path."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from rows import for_each

from jaxrl_llm.evolution import antithetic, full_noise, leaf_key, lowrank_noise

KEY = jax.random.key(0)


def test_worked_numbers():
    noise = lowrank_noise(KEY, 3, jnp.array([7, 6]), (3, 2))
    for member, sign in ((0, -1.0), (1, 1.0)):
        close(noise.b[member, :, 0], [0.430820, 0.637471], atol=1e-6)
        expected = [-0.582878, -0.575578, 0.579975]
        close(noise.a[member, :, 0], expected, atol=1e-6)
        assert noise.sign[member] == sign


@for_each(("reuse", "same"), [(0, "AAAA"), (1, "ABCD"), (2, "AABB"), (3, "AAAB")])
def test_reuse_of_noise(reuse, same):
    draw = jax.jit(lambda e: lowrank_noise(KEY, e, jnp.array(5), (3, 2), noise_reuse=reuse).a)
    found = [tuple(np.ravel(draw(epoch))) for epoch in range(4)]
    assert [found.index(x) for x in found] == ["".join(same).index(x) for x in same]
    # An epoch that is known gives what one that is traced gives.
    assert (
        tuple(np.ravel(lowrank_noise(KEY, 3, jnp.array(5), (3, 2), noise_reuse=reuse).a))
        == (found[3])
    )


def test_members_and_their_draws():
    draw, sign = antithetic(jnp.array([[0, 1, 5], [4, 3, 2]]))
    assert draw.tolist() == [[0, 0, 2], [2, 1, 1]]
    assert sign.tolist() == [[1, -1, -1], [1, -1, 1]]
    draw, sign = antithetic(jnp.arange(4), pairs=False, baseline=1)
    assert draw.tolist() == [0, 1, 2, 3] and sign.tolist() == [0, 1, 1, 1]
    assert antithetic(jnp.arange(4), baseline=2)[1].tolist() == [0, 0, 1, -1]


def test_a_batch_of_members_is_a_loop_over_members():
    members = jnp.array([[3, 0], [9, 2]])
    for draw in (lowrank_noise, full_noise):
        batch = draw(KEY, 1, members, (4, 3))
        for place in np.ndindex(2, 2):
            one = draw(KEY, 1, members[place], (4, 3))
            jax.tree.map(lambda x, y, p=place: equal(x[p], y), batch, one)


@for_each(
    ("members", "pairs", "drawn"),
    [
        (np.arange(6), True, 3),
        (np.array([[4, 5], [0, 1]]), True, 2),
        (np.array([1, 2]), True, 2),
        (np.arange(6), False, 6),
    ],
)
def test_pairs_that_are_known_are_drawn_once(members, pairs, drawn):
    options = {"pairs": pairs, "baseline": 2}
    for draw in (lowrank_noise, full_noise):
        known, traced = (draw(KEY, 1, x, (4, 3), **options) for x in (members, jnp.array(members)))
        jax.tree.map(equal, known, traced)
    text = str(jax.make_jaxpr(lambda: full_noise(KEY, 1, members, (4, 3), **options).eps)())
    assert re.findall(r"key<fry>\[(\d+)\]", text)[0] == str(drawn)


def test_a_leaf_has_its_noise_by_its_path_alone():
    names = [f"layers/{i}/mlp/{part}/kernel" for i in range(40) for part in ("up", "down", "gate")]
    words = {jax.random.key_data(leaf_key(KEY, name)).tobytes() for name in names}
    assert len(words) == len(names)
    known = jax.random.key_data(leaf_key(KEY, "layers/0/mlp/up/kernel"))
    assert known.tolist() == jax.random.key_data(leaf_key(KEY, names[0])).tolist()


def test_the_dtype_decides_what_is_drawn():
    members = jnp.arange(2)
    half = lowrank_noise(KEY, 0, members, (3, 2), dtype=jnp.bfloat16)
    assert half.a.dtype == jnp.bfloat16 and half.sign.dtype == jnp.float32
    assert full_noise(KEY, 0, members, (3,), dtype=jnp.float16).eps.dtype == jnp.float16
