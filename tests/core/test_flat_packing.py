"""Rows that different prompts share: every token has a cell, and cells see their own past only."""

import dataclasses
import math

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rows import for_each

from jaxrl_llm.core import flat_packing
from jaxrl_llm.core.flat_packing import plan_flat, smaller_rows
from jaxrl_llm.core.packing import check_packing, pack, pack_prompts, unpack


def arrays_of(lengths, prompt_lengths, *, seed=0, words=3):
    """Prompts of up to 5 tokens, responses of up to 4, of few words, so that some agree."""
    rng = np.random.default_rng(seed)
    lengths, prompt_lengths = np.asarray(lengths), np.asarray(prompt_lengths)
    tokens = rng.integers(0, words, (*lengths.shape, 4)).astype(np.int32)
    prompts = rng.integers(0, words, (len(lengths), 5)).astype(np.int32)
    mask = np.arange(4) < lengths[..., None]
    return tokens, mask, prompts, np.arange(5) < prompt_lengths[:, None]


def past(ends, cell):
    """The cells that a cell sees, itself included, in the order of a row."""
    return [j for j in range(cell + 1) if cell < ends[j]]


def check_plan(flat, tokens, mask, prompts, prompt_mask, microbatches):
    """Each token has a cell of its own row, which sees exactly the tokens before it."""
    P, G, T = mask.shape
    N, R, S = flat.sources.shape
    sources = flat.sources.reshape(N, -1)
    own_rows = {}
    for p, g in np.ndindex(P, G):
        part, inside = p % microbatches, p // microbatches
        length = int(np.max(np.where(mask[p, g], np.arange(1, T + 1), 0)))
        for t in range(length):
            n, cell = divmod(int(flat.cells[p, g, t]), R * S)
            n = n * microbatches + part
            own_rows.setdefault(p, set()).add(n)
            line, place = divmod(cell, S)
            seen = past(flat.ends[n, line], place)
            read = sources[n, [line * S + j for j in seen]]
            assert (read // (G * T) == inside).all()  # nothing of another prompt
            read_tokens = tokens[part::microbatches].reshape(-1)[read]
            assert read_tokens.tolist() == tokens[p, g, : t + 1].tolist()
    for p in range(P):
        part = p % microbatches
        words = prompts[part::microbatches].reshape(-1)

        def read(n, i, p=p, words=words):
            seen = past(flat.prompt_ends[n], int(flat.prompt_cells[p, i]))
            return words[flat.prompt_sources[n, seen]].tolist()

        # A prompt without responses may lie in any row of its microbatch.
        rows = own_rows.get(p, range(part, N, microbatches))
        length = int(prompt_mask[p].sum())
        assert any(
            all(read(n, i) == prompts[p, : i + 1].tolist() for i in range(length)) for n in rows
        )
        assert len(own_rows.get(p, {0})) == 1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    hnp.arrays(np.int64, (4, 3), elements=st.integers(0, 4)),
    hnp.arrays(np.int64, (4,), elements=st.integers(1, 5)),
    st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
    st.sampled_from([2, 1024]),
)
def test_a_token_sees_its_own_past(lengths, prompt_lengths, parts, span):
    microbatches, shards = parts
    arrays = arrays_of(lengths, prompt_lengths)
    flat = plan_flat(*arrays, microbatches=microbatches, shards=shards, span=span, most=99.0)
    check_packing("test", flat, lengths.shape + (4,))
    assert len(flat.sources) % (microbatches * shards) == 0
    unique_prompts = {
        (p % microbatches, tuple(arrays[2][p, : i + 1]))
        for p in range(4)
        for i in range(prompt_lengths[p])
    }
    assert (flat.prompt_sources >= 0).sum() >= len(unique_prompts)
    assert (flat.sources >= 0).sum() <= lengths.sum()
    if len(flat.sources) == 1:
        assert (flat.prompt_sources >= 0).sum() == len(unique_prompts)
    check_plan(flat, *arrays, microbatches)


def test_there_and_back_in_values_and_gradients():
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 5, (4, 3))
    tokens, mask, prompts, prompt_mask = arrays_of(lengths, [5, 2, 3, 1])
    flat = plan_flat(tokens, mask, prompts, prompt_mask, most=99.0)
    tree = {"int": tokens, "bool": mask, "float": np.where(mask, 1.5 * tokens, np.nan)}
    back = jax.jit(lambda tree: unpack(flat, pack(flat, tree), mask))(tree)
    for name, x in tree.items():
        np.testing.assert_array_equal(back[name], np.where(mask, x, 0))
        assert back[name].dtype == jnp.asarray(x).dtype
    cells = pack_prompts(flat, jnp.asarray(prompts))
    np.testing.assert_array_equal(
        cells,
        np.where(flat.prompt_sources >= 0, prompts.reshape(-1)[flat.prompt_sources], 0),
    )
    # The gradient of a shared cell is the sum of those of its tokens.
    slope = jax.grad(lambda x: jnp.sum(unpack(flat, x, mask)))(jnp.ones(flat.sources.shape))
    assert slope.sum() == lengths.sum() and (slope > 1).any()


def test_few_shapes_and_what_saves_nothing():
    rng, shapes = np.random.default_rng(0), set()
    for seed in range(40):
        lengths = rng.integers(1, rng.integers(2, 5) + 1, (8, 8))
        flat = plan_flat(*arrays_of(lengths, rng.integers(4, 6, 8), seed=seed, words=99))
        shapes.add((flat.prompt_sources.shape, flat.sources.shape))
    assert len(shapes) <= 6
    full = arrays_of(np.full((2, 2), 4), [5, 5], words=99)
    assert plan_flat(*full, most=0.8) is None and plan_flat(*full, most=9.0) is not None


def test_rows_are_planned_for_what_all_prompts_begin_with():
    tokens, mask, *_ = arrays_of(np.full((8, 2), 4), np.full(8, 5), words=99)
    prompts = np.random.default_rng(0).integers(0, 10**6, (8, 60))
    prompts[:, :40] = prompts[0, :40]
    arrays = tokens, mask, prompts, np.ones(prompts.shape, bool)
    # Counted as 60 cells each, prompts are worth more rows than as 20 each behind 40.
    rows = [plan_flat(*arrays, span=512, most=9.0, shared_prefix_len=n) for n in (0, 40)]
    assert [len(flat.prompt_sources) for flat in rows] == [4, 2]
    assert [(flat.prompt_sources >= 0).sum() for flat in rows] == [4 * 80, 2 * 120]
    assert rows[1].prompt_sources.shape[1] == 120  # 40 + 4 x 20, all of it used


@for_each(
    ("full", "cells", "sizes"),
    [
        (16, 64, [16, 8, 4, 2]),  # the last saves 128 cells
        (256, 16, [256, 128, 64, 32, 16, 8]),
        # A quarter from 2,048 cells on; then these, as long as they are less than a half.
        (1024, 16, [1024, 768, 576, 432, 304, 176, 88, 44, 22, 11]),
        (7.5, 512, [8, 4, 2, 1]),
        (3, 1, [3]),
        (40, None, [40, 30, 23, 18, 14, 11, 9, 7, 6, 5, 4, 3, 2, 1]),  # prompts
    ],
)
def test_sizes_of_rows(full, cells, sizes):
    top, least, quarter = math.ceil(full), 0.0, 0.0
    if cells is not None:
        least, quarter = flat_packing.LEAST_SAVED / cells, flat_packing._QUARTER / cells

    def rounded(n):
        return flat_packing._rounded_up(n, full, least=least, quarter=quarter)

    assert sorted({rounded(n) for n in range(1, top + 1)}, reverse=True) == sizes
    assert top < rounded(top + 1) <= 2 * top


@for_each(("least", "size"), [(1, 18), (21, 18), (28, 26), (40, 20), (41, 40)])
def test_smaller_rows_of_prompts_save_enough(least, size):
    """Two rows of 40 prompt cells at most, of which 17 are needed."""
    lengths = np.full((2, 2), 4)
    tokens, mask, *_ = arrays_of(lengths, np.full(2, 5), words=10**6)
    prompts = np.arange(80).reshape(2, 40)
    kept = np.arange(40) < 17
    flat = plan_flat(
        tokens, mask, prompts, np.stack([kept, kept]), microbatches=2, most=9.0, least_saved=least
    )
    assert flat.prompt_sources.shape == (2, size)


def test_rows_become_smaller_as_is_said_before():
    lengths = np.full((16, 16), 4)
    tokens, mask, *prompts = arrays_of(lengths, np.full(16, 5), words=10**6)
    shapes = []
    for share in (4, 3, 2, 1, 0):
        flat = plan_flat(tokens, mask & (np.arange(4) < share), *prompts, most=9.0)
        shapes.append(flat.sources.shape)
        smaller = smaller_rows(flat)
        if smaller is not None:
            assert smaller.ends.shape == smaller.sources.shape
            assert smaller.prompt_cells is flat.prompt_cells
            shapes.append(smaller.sources.shape)
    sizes = list(dict.fromkeys(shape[1] for shape in shapes))
    assert len(sizes) > 3 and sizes == sorted(sizes, reverse=True)  # each was said, none left out
    assert smaller is None


def test_values_that_differ_are_not_shared():
    tokens, mask, *prompts = arrays_of([[4, 4]], [2], words=1)
    assert (plan_flat(tokens, mask, *prompts, most=9.0).sources >= 0).sum() == 4
    same = np.arange(2)[None, :, None] * np.ones(mask.shape, int)
    assert (plan_flat(tokens, mask, *prompts, same=same, most=9.0).sources >= 0).sum() == 8


def test_bad_inputs_are_named():
    tokens, mask, prompts, prompt_mask = arrays_of([[4, 4]] * 3, [2, 2, 2])
    with pytest.raises(ValueError, match="plan_flat: 3 prompts do not split into 2 microbatches"):
        plan_flat(tokens, mask, prompts, prompt_mask, microbatches=2)
    with pytest.raises(TypeError, match="plan_flat: prompt_mask must be bool"):
        plan_flat(tokens, mask, prompts, prompt_mask * 1)
    with pytest.raises(ValueError, match="plan_flat: shared_prefix_len must be below the 5 tokens"):
        plan_flat(tokens, mask, prompts, prompt_mask, shared_prefix_len=5)
    with pytest.raises(ValueError, match="plan_flat: span must be above 0"):
        plan_flat(tokens, mask, prompts, prompt_mask, span=0)
    flat = plan_flat(tokens, mask, prompts, prompt_mask, most=9.0)
    with pytest.raises(ValueError, match=r"f: packing.cells must have shape \(1, 2, 4\)"):
        check_packing("f", flat, (1, 2, 4))
    with pytest.raises(ValueError, match="f: these must have the same shape"):
        check_packing("f", dataclasses.replace(flat, ends=flat.ends[:, :0]), mask.shape)
