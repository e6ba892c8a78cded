"""EGG in integers: worked numbers, wide NumPy integers, saturation, votes and their thresholds."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from rows import for_each

from jaxrl_llm import evolution as es
from jaxrl_llm.evolution import LowRank, leaf_key, pair_sign

KEY = leaf_key(jax.random.key(5), "gru/wf")
TABLE = es.int8_table(jax.random.key(6), size=4096)


def i8(x):
    return jnp.asarray(x, jnp.int8)


X = i8([[16, -8, 4, 20]])
W = i8([[16, 8, -4, 2], [-16, 0, 16, 32]])
A, B = i8([[16], [-32]]), i8([[8], [-16], [0], [24]])


def test_worked_numbers():
    assert (X.astype(int) @ B.astype(int)).item() == 736
    assert (X.astype(int) @ W.T.astype(int)).tolist() == [[216, 448]]
    for sign, expected in ((1, [8, 11]), (-1, [5, 16])):
        assert es.egg_matmul(X, W, LowRank(A, B, jnp.array(sign))).tolist() == [expected]
    assert es.egg_matmul(X, W, None).tolist() == [[216 // 32, 448 // 32]]
    alphas = jnp.array([1, 0.5, 0.1, 0.0625, 0.01])
    assert es.egg_threshold(alphas).tolist() == [0, 10, 26, 29, 41]
    assert es.egg_log_likelihood(i8([10, -5, 0]), jnp.array(0)).item() == -17
    assert es.pack_ternary(jnp.array([1, -1, 0, 1, 0])).tolist() == [96]
    assert float(es.egg_alpha(0)) == 1.0


@for_each(("threshold", "limit"), [(0, 0), (10, 1280), (26, 3328), (29, 3712), (41, 5248)])
def test_a_weight_moves_by_one_where_the_votes_reach_the_limit(threshold, limit):
    votes = jnp.array([limit, -limit, limit - 1, 1 - limit, 10**6, 0])
    w = i8([0, 0, 0, 0, 127, 0])
    found = es.egg_step(w, votes, num_pairs=64, threshold=threshold)
    # At 0 every vote counts, and none is no vote.
    expected = [1, -1, 0, 0, 127, 0] if threshold else [0, 0, -1, 1, 127, 0]
    assert found.tolist() == expected and found.dtype == jnp.int8
    equal(es.egg_step(i8([-127]), jnp.array([-(10**6)]), num_pairs=1, threshold=0), [-127])


@for_each("rank", [1, 3])
def test_layers_in_wide_integers(rank):
    rng = np.random.default_rng(rank)
    members = jnp.arange(4)
    w = rng.integers(-127, 128, (6, 9)).astype(np.int8)
    x = rng.integers(-127, 128, (4, 2, 9)).astype(np.int8)
    noise = es.int8_noise(TABLE, KEY, 2, members, (6, 9), rank=rank)
    a, b, sign = (np.asarray(part, np.int64) for part in noise)
    own = np.einsum("nti,nir,nor->nto", x.astype(np.int64), b, a * sign[:, None, None]) >> 7
    expected = np.clip((x.astype(np.int64) @ w.T.astype(np.int64) + own) // 48, -127, 127)
    found = jax.jit(partial(es.egg_matmul, shift=3))(jnp.asarray(x), jnp.asarray(w), noise)
    equal(found, expected)
    assert (np.abs(expected) == 127).any() and (np.abs(expected) < 127).any()
    tokens = rng.integers(0, 6, (4, 5))
    rows = (a * sign[:, None, None]) @ np.swapaxes(b, 1, 2) >> 7
    expected = np.clip(w + rows, -127, 127)[np.arange(4)[:, None], tokens]
    found = jax.jit(partial(es.egg_embed, shift=3))(jnp.asarray(tokens), jnp.asarray(w), noise)
    equal(found, expected)


def test_vectors_and_pairs_that_round_down():
    w = i8([0, 0, 120])
    noise = LowRank(i8([10, 10, 127]), i8([10, 10, 127]), jnp.array([[1], [-1]]))
    noise = LowRank(*(jnp.broadcast_to(x, (2, 1, 3)) for x in noise[:2]), noise.sign)
    found = es.egg_vector(w, noise)
    # 100 >> 8 is 0 and -100 >> 8 is -1.
    assert found.tolist() == [[[0, 0, 127]], [[-1, -1, 56]]]
    assert es.egg_vector(w, None).tolist() == w.tolist()
    drawn = es.int8_noise(TABLE, KEY, 0, jnp.arange(6), (5,))
    assert drawn.a.shape == drawn.b.shape == (6, 5)
    assert np.array_equal(drawn.a[0], drawn.a[1]) and not np.array_equal(drawn.a[0], drawn.b[0])


def test_the_table_is_read_by_slices():
    table = np.asarray(TABLE)
    assert abs(table.std() / 16 - 1) < 0.1 and TABLE.dtype == jnp.int8
    word = int(jax.random.key_data(jax.random.fold_in(KEY, 2))[0])
    noise = es.int8_noise(TABLE, KEY, 5, jnp.array([2**18 + 4]), (3, 2), noise_reuse=2)
    pair = 2**17 + 2
    start = word ^ (((pair >> 16) ^ pair) * 0x45D9F3B) % 2**32
    places = (start + np.arange(5)) % 4096
    equal(noise.b[0, :, 0], table[places[:2]])
    equal(noise.a[0, :, 0], table[places[2:]])
    assert noise.sign.tolist() == [1]
    small = es.int8_table(KEY, size=8)  # reading wraps
    starts = {
        tuple(np.ravel(es.int8_noise(small, KEY, 0, jnp.array(n), (4, 4)).a)) for n in range(40)
    }
    assert len(starts) > 4


def test_norm_cell_and_score():
    rng = np.random.default_rng(0)
    x = rng.integers(-127, 128, (3, 8)).astype(np.int8)
    x[0] = [1, 0, 0, 0, 0, 0, 0, 0]  # its mean size is 0 in integers
    w = rng.integers(-127, 128, 8).astype(np.int8)
    wide = x.astype(np.int64)
    expected = np.clip(
        wide * w // np.maximum(np.abs(wide).sum(1, keepdims=True) // 8, 1), -127, 127
    )
    equal(es.egg_norm(jnp.asarray(x), jnp.asarray(w)), expected)
    s, f, h = (rng.integers(-127, 128, 50).astype(np.int64) for _ in range(3))
    gated = ((f + 127) * s) >> 8

    def propose(g):
        equal(g, gated)
        return i8(h)

    found = es.egg_gru(i8(s), i8(f), propose)
    equal(found, s + (((f + 127) * (h - s)) >> 8))
    logits = rng.integers(-127, 128, (20, 256)).astype(np.int8)
    targets = rng.integers(0, 256, 20)
    y = logits.astype(np.int64) + 128
    total = sum(np.array([int(16 * 2 ** (i / 16)) for i in row]).sum() for row in y[:1])
    score = es.egg_log_likelihood(jnp.asarray(logits), jnp.asarray(targets))
    assert score[0] == y[0, targets[0]] - int(16 * math.log2(total / 16))
    exact = y / 16 - np.log2(np.exp2(y / 16).sum(1, keepdims=True))
    close(score / 16, exact[np.arange(20), targets], atol=0.1)


@for_each("total", [16, 17, 31, 32, 33, 13710, 2**20 - 1, 2**20, 2**28])
def test_the_integer_logarithm_is_exact(total):
    from jaxrl_llm.evolution.integer.layers import _LOG2

    assert np.searchsorted(_LOG2, total, side="right") == int(16 * math.log2(total / 16))


@for_each(("shape", "chunk"), [((5, 3), 2), ((7,), 64)])
def test_an_update_is_the_vote_of_all_pairs(shape, chunk):
    signs = pair_sign(jax.random.normal(jax.random.key(8), (18,)).at[:4].set(0.0))
    noise = es.int8_noise(TABLE, KEY, 1, jnp.arange(0, 18, 2), shape)
    a, b = (np.asarray(x, np.int64) for x in noise[:2])
    form = "k,kir,kjr->ij" if len(shape) == 2 else "k,ki,ki->i"
    votes = np.einsum(form, np.asarray(signs, np.int64), a, b)
    w = i8(np.random.default_rng(0).integers(-127, 128, shape))
    threshold = es.egg_threshold(0.5)
    expected = es.egg_step(w, jnp.asarray(votes), num_pairs=9, threshold=threshold)
    assert 0 < np.abs(np.asarray(expected, int) - np.asarray(w, int)).sum() < w.size
    update = jax.jit(partial(es.egg_update, w, TABLE, KEY, 1, chunk=chunk))
    equal(update(signs, threshold=threshold), expected)
    equal(update(jnp.zeros(9, jnp.int8), threshold=0), w)


def test_ternary_values_survive_packing():
    values = jnp.asarray(np.random.default_rng(0).integers(-1, 2, (3, 17)))
    packed = es.pack_ternary(values)
    assert packed.shape == (3, 4) and packed.dtype == jnp.uint8
    equal(es.unpack_ternary(packed, 17), values)
