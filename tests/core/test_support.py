"""Sets of tokens as ids and as bits: the same sets, and junk that belongs to none."""

import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each

from jaxrl_llm.core.support import Support, check_support, keep_mask, pack_bits, unpack_bits


@for_each("size", [1, 31, 32, 33, 70])
def test_bits_come_back(size):
    mask = np.random.default_rng(size).random((2, 3, size)) < 0.4
    bits = pack_bits(mask)
    assert bits.dtype == jnp.uint32 and bits.shape == (2, 3, -(-size // 32))
    np.testing.assert_array_equal(unpack_bits(bits, size), mask)


def test_worked_bits():
    assert pack_bits(np.arange(34) % 33 == 0).tolist() == [1, 2]


def test_both_forms_are_the_same_sets():
    rng = np.random.default_rng(0)
    kept = rng.random((2, 5, 50)) < 0.1
    kept[..., 7] = True
    ids = np.full((2, 5, 50), -1)
    for place in np.ndindex(2, 5):
        (found,) = kept[place].nonzero()
        ids[place][: len(found)] = rng.permutation(found)
    np.testing.assert_array_equal(keep_mask(Support(ids=ids), 50), kept)
    np.testing.assert_array_equal(keep_mask(Support(bits=pack_bits(kept)), 50), kept)


def test_an_empty_set_is_the_whole_vocabulary():
    assert keep_mask(Support(ids=jnp.full((2, 3), -1)), 4).all()
    assert keep_mask(Support(bits=jnp.zeros((2, 2), jnp.uint32)), 40).all()


def test_ids_outside_the_vocabulary_belong_to_no_set():
    mask = keep_mask(Support(ids=jnp.array([[-7, 3, 10**6, 4]])), 4)
    assert mask.tolist() == [[False, False, False, True]]


@for_each(
    ("support", "error", "message"),
    [
        (np.zeros((2, 3), int), TypeError, "f: support must be a Support; got ndarray"),
        (Support(), ValueError, "either ids or bits"),
        (
            Support(np.zeros((2, 3), int), np.zeros((2, 2), np.uint32)),
            ValueError,
            "either ids or b",
        ),
        (Support(ids=np.zeros((2, 3))), TypeError, "ids must hold integers"),
        (Support(bits=np.zeros((2, 2), np.int32)), TypeError, "bits of support must be uint32"),
        (Support(ids=np.zeros((3, 3), int)), ValueError, r"ids must have shape \(2, K\)"),
        (Support(bits=np.zeros((2, 3), np.uint32)), ValueError, r"bits must have shape \(2, 2\)"),
    ],
)
def test_bad_supports_are_named(support, error, message):
    with pytest.raises(error, match=message):
        check_support("f", support, (2,), 40)
