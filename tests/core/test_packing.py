"""Responses of a prompt share rows: each token has one cell, and common beginnings lie once.

``unpack(pack(x))`` is x where the mask keeps it, in values and gradients; the gradient of a shared
token is the sum of those of all that share it; a node of a tree sees what its token comes after.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_calls import bad_calls, raises
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rows import for_each

from jaxrl_llm.core import packing as packings
from jaxrl_llm.core.packing import (
    pack,
    plan_packing,
    plan_tree,
    row_trees,
    unpack,
)


def mask_of(lengths, size):
    return np.arange(size) < np.asarray(lengths)[..., None]


def test_worked_example():
    # 5 | 4 1 | 3 2, and a group that one row would hold: all groups have as many rows.
    packing = plan_packing(mask_of([[2, 5, 1, 3, 4], [1, 0, 2, 0, 1]], 5))
    assert packing.members.tolist() == [
        [[1, 1, 1, 1, 1], [4, 4, 4, 4, 2], [3, 3, 3, 0, 0]],
        [[2, 2, 0, 4, -1], [-1] * 5, [-1] * 5],
    ]
    assert packing.starts[0].tolist() == [13, 0, 9, 10, 5]
    x = jnp.arange(50).reshape(2, 5, 5)
    rows = [[5, 6, 7, 8, 9], [20, 21, 22, 23, 10], [15, 16, 17, 0, 1]]
    assert pack(packing, x)[0].tolist() == rows
    assert pack(packing, x)[1].tolist() == [[35, 36, 25, 45, 0], [0] * 5, [0] * 5]


def test_a_response_ends_with_its_last_kept_token():
    packing = plan_packing(np.array([[[False, True, False, True, False, False], [True] * 6]]))
    assert packing.members.tolist() == [[[1] * 6, [0, 0, 0, 0, -1, -1]]]


@for_each(
    ("lengths", "rows"),
    [
        ([4] * 5, 5),  # 6 would be more than there are responses
        ([4] * 5 + [0] * 5, 6),
        ([4] * 7 + [0] * 5, 8),
        ([4] * 3 + [0], 3),
        ([4] * 9 + [0] * 9, 12),
        ([0, 0], 1),
    ],
)
def test_the_number_of_rows_is_one_of_few(lengths, rows):
    assert plan_packing(mask_of([lengths], 4)).members.shape == (1, rows, 4)


def test_no_plan_where_it_saves_too_little():
    mask = mask_of([[4, 4, 1, 1], [1, 1, 1, 1]], 4)  # three rows of four
    assert plan_packing(mask, most=0.7) is None
    assert plan_packing(mask, most=0.75).members.shape == (2, 3, 4)


@settings(max_examples=30, deadline=None)
@given(
    hnp.arrays(
        np.int64, st.tuples(st.integers(1, 3), st.integers(1, 6)), elements=st.integers(0, 7)
    ),
    st.integers(7, 12),
)
def test_every_token_has_one_cell(lengths, size):
    mask = mask_of(lengths, 7)
    members, starts = plan_packing(mask, size=size, most=2.0)
    assert members.shape[1] <= mask.shape[1] and members.shape[2] == size
    for p, g in np.ndindex(lengths.shape):
        cells = np.flatnonzero(members[p].ravel() == g)
        np.testing.assert_array_equal(cells, starts[p, g] + np.arange(lengths[p, g]))
        # A response lies in one row.
        assert len(set((cells // size).tolist())) == min(1, len(cells))
    assert (members >= 0).sum() == lengths.sum()


def test_there_and_back_in_values_and_gradients():
    rng = np.random.default_rng(0)
    mask = mask_of(rng.integers(0, 5, (3, 4)), 6)
    packing = plan_packing(mask)
    tree = {
        "float": jnp.asarray(rng.normal(size=(3, 4, 6, 2)), jnp.float32),
        "int": jnp.asarray(rng.integers(0, 9, (3, 4, 6)), jnp.int32),
        "bool": jnp.asarray(mask),
    }
    back = jax.jit(lambda t: unpack(packing, pack(packing, t), mask))(tree)
    for name, x in tree.items():
        kept = mask.reshape(mask.shape + (1,) * (x.ndim - 3))
        np.testing.assert_array_equal(back[name], np.where(kept, x, 0))
        assert back[name].dtype == x.dtype
    # Junk outside comes neither back nor into the gradient.
    junk = jnp.where(mask[..., None], tree["float"], jnp.nan)
    weights = jnp.asarray(rng.normal(size=mask.shape), jnp.float32)[..., None]
    slope = jax.grad(lambda x: jnp.sum(weights * unpack(packing, pack(packing, x), mask)))(junk)
    np.testing.assert_array_equal(
        slope, np.broadcast_to(np.where(mask[..., None], weights, 0), slope.shape)
    )


def test_on_a_mesh_no_token_leaves_its_device():
    rng = np.random.default_rng(0)
    mask = mask_of(rng.integers(0, 5, (8, 4)), 6)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jnp.asarray(rng.normal(size=(8, 4, 6, 2)), jnp.float32)
    arrays = jax.device_put((plan_packing(mask), x, mask), spread)

    def slope(packing, x, mask):
        return jax.grad(lambda x: jnp.sum(unpack(packing, pack(packing, x), mask) ** 2))(x)

    # The slope's program holds the loss's.
    program = jax.jit(slope, out_shardings=spread).lower(*arrays).compile()
    for sent in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert f" {sent}(" not in program.as_text()
    np.testing.assert_allclose(program(*arrays), np.where(mask[..., None], 2 * x, 0.0), rtol=1e-6)


def test_common_beginnings_lie_once():
    tokens = np.array([[[1, 2, 3, 4], [1, 2, 5, 0], [6, 7, 8, 9], [1, 2, 3, 4], [1, 2, 5, 6]]])
    mask = mask_of([[4, 3, 2, 4, 4]], 4)
    tree = plan_tree(tokens, mask, size=8)
    # The tree of 1 2 (3 4 | 5 (6)), and 6 7 alone.
    assert tree.sources.shape == (1, 1, 8)
    assert tree.cells[0].tolist()[0] == tree.cells[0].tolist()[3] == [0, 1, 2, 3]
    assert tree.cells[0, 1, :3].tolist() == [0, 1, 4] and tree.cells[0, 4].tolist() == [0, 1, 4, 5]
    assert tree.cells[0, 2, :2].tolist() == [6, 7]
    assert tree.ends.tolist() == [[[6, 6, 4, 4, 6, 6, 8, 8]]]
    assert pack(tree, tokens).tolist() == [[[1, 2, 3, 4, 5, 6, 6, 7]]]
    # Nothing is shared where it is too little, where other things differ, or beyond the size.
    assert (plan_tree(tokens, mask, least=0.7).sources >= 0).sum() == 4 + 4 + 2
    same = np.zeros((*tokens.shape, 2))
    same[0, 3, 1] = 1
    assert (plan_tree(tokens, mask, size=8, same=same).sources >= 0).sum() == 4 + 3 + 4 + 2
    assert (plan_tree(tokens, mask, size=4).sources >= 0).sum() == 4 + 4 + 2
    assert plan_tree(tokens, mask, size=8, most=0.4) is not None
    assert plan_tree(tokens, mask, size=8, most=0.3) is None


def test_a_shared_token_that_trains_for_one_alone_trains():
    tokens, mask = np.array([[[1, 2, 3], [1, 2, 4]]]), np.ones((1, 2, 3), bool)
    mask[0, 0, :2] = mask[0, 1, 0] = False
    tree = plan_tree(tokens, mask)
    assert tree.sources.tolist() == [[[3, 4, 2, 5, -1]]]
    assert pack(tree, mask).tolist() == [[[False, True, True, True, False]]]


@settings(max_examples=25, deadline=None)
@given(
    hnp.arrays(np.int64, (2, 5, 4), elements=st.integers(0, 1)),
    hnp.arrays(np.int64, (2, 5), elements=st.integers(0, 4)),
    st.sampled_from([0.0, 0.5]),
    st.integers(4, 20),
)
def test_a_node_sees_what_its_token_comes_after(tokens, lengths, least, size):
    mask = mask_of(lengths, 4)
    tree = plan_tree(tokens, mask, least=least, size=size, most=9.0)
    flat = pack(tree, tokens).reshape(2, -1)
    width = tree.sources.shape[-1]
    for p, g in np.ndindex(lengths.shape):
        for t in range(lengths[p, g]):
            row, i = divmod(tree.cells[p, g, t], width)
            seen = [j for j in range(i + 1) if i < tree.ends[p, row, j]]
            assert flat[p, row * width + np.array(seen)].tolist() == tokens[p, g, : t + 1].tolist()
    unique = sum(
        len({tuple(tokens[p, g, : t + 1]) for g in range(5) for t in range(lengths[p, g])})
        for p in range(2)
    )
    count = (tree.sources >= 0).sum()
    assert unique <= count <= lengths.sum()
    if least == 0.0 and size == 20:
        assert count == unique
    np.testing.assert_array_equal(unpack(tree, pack(tree, tokens), mask), np.where(mask, tokens, 0))


def test_the_gradient_of_a_shared_token_is_that_of_all():
    tokens, mask = np.array([[[1, 2, 3], [1, 2, 4]]]), np.ones((1, 2, 3), bool)
    tree = jax.tree.map(jnp.asarray, plan_tree(tokens, mask))
    weights = jnp.arange(6.0).reshape(1, 2, 3)
    slope = jax.grad(lambda x: jnp.sum(weights * unpack(tree, x, mask)))(jnp.zeros((1, 1, 5)))
    assert slope.tolist() == [[[3.0, 5.0, 2.0, 5.0, 0.0]]]


def test_without_a_packing_arrays_stay_as_they_are():
    x, mask = jnp.arange(6).reshape(1, 2, 3), mask_of([[1, 2]], 3)
    assert pack(None, x) is x
    assert unpack(None, x, mask).tolist() == [[[0, 0, 0], [3, 4, 0]]]


ONES = np.ones((1, 2, 3), bool)
PACKING = plan_packing(ONES)
TOKENS = np.zeros(ONES.shape, int)


@for_each(
    ("error", "call", "message"),
    bad_calls(r"""
ValueError:
    plan_packing(ONES[0])  # mask must have 3 axes
    plan_packing(ONES, size=2)  # a response of 3 tokens does not fit in size 2
    plan_packing(ONES, most=0.0)  # most must be above 0
    plan_tree(TOKENS, ONES, size=2)  # size must be at least the 3
    plan_tree(TOKENS, ONES, least=2.0)  # least must be
    check_packing("f", plan_tree(TOKENS, ONES), (1, 2, 4))
    # !f: packing.cells must have shape \(1, 2, 4\)
    check_packing("f", PACKING, (1, 4, 3))  # !f: packing.starts must have shape \(1, 4\)
    check_packing("f", PACKING, (5, 2, 3))  # !f: packing.members must have shape \(5, 2, 3\)
TypeError:
    plan_packing(1.0 * ONES)  # mask must be bool
    plan_tree(1.0 * TOKENS, ONES)  # tokens must hold integers
    check_packing("f", Packing(PACKING.members * 1.0, PACKING.starts), (1, 2, 3))
    # !f: members must hold integers
    check_packing("f", tuple(PACKING), (1, 2, 3))
    # !f: packing must be a Packing, a Tree or a FlatPacking; got tuple
"""),
)
def test_bad_input_is_named(error, call, message):
    raises(error, call, message, vars(packings) | globals())


def test_rows_that_are_trees_know_what_each_token_comes_after():
    rng = np.random.default_rng(0)
    ends = np.full((2, 3, 12), 12)
    for row in ends.reshape(-1, 12)[1:]:  # the first is no tree
        path, t = [], 0
        while t < 12:
            keep = int(rng.integers(0, len(path) + 1))
            row[path[keep:]] = t
            path = path[:keep]
            grow = int(rng.integers(1, 5))
            path += range(t, min(t + grow, 12))
            t += grow
    tree = row_trees(ends)
    for place in np.ndindex(2, 3, 12):
        row, t = ends[place[:2]], place[2]
        before = [s for s in range(t) if row[s] > t]
        assert tree.depths[place] == len(before)
        assert tree.parents[place] == (before[-1] if before else -1)
    assert (tree.cells == np.arange(36).reshape(3, 12)).all()
    for wrong in ([3, 1, 3], [2, 3, 3], [0, 3, 3]):
        with pytest.raises(ValueError, match="must be above the token's position and at most"):
            row_trees(np.array([[wrong]]))
