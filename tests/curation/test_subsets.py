"""D3S: the subset of greatest variance against all subsets, and the ranked tokens."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal, quick
from compiled_curation import d3s_selection, max_variance_subset, top_fraction_token_mask
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rows import for_each

subset = jax.jit(max_variance_subset)
fraction_mask = jax.jit(top_fraction_token_mask)
select = jax.jit(d3s_selection, static_argnames=("scope", "rollouts", "tokens"))
eighths = st.integers(-24, 24).map(lambda i: i / 8)
WORKED = [1.5, 0.2, -0.1, -1.2, 0.9, 0.0]


def by_rule(x, n, where):
    """Every k in float64: sort, take the k first and the n - k last, compare, smallest k wins."""
    kept = np.flatnonzero(where)
    n = min(n, len(kept))
    order = sorted(kept, key=lambda i: (-float(x[i]), i))
    best, chosen = -1.0, []
    for k in range(n + 1):
        picked = order[:k] + order[len(order) - (n - k) :]
        variance = np.var([float(x[i]) for i in picked]) if picked else 0.0
        if variance > best + 1e-9:
            best, chosen = variance, picked
    out = np.zeros(len(x), bool)
    out[chosen] = True
    return out


def test_worked_numbers():
    keep = np.asarray(subset(jnp.array(WORKED), 3))
    assert keep.tolist() == [True, False, False, True, True, False]
    close(np.var(np.array(WORKED)[keep]), 1.34)
    ordered = sorted(WORKED, reverse=True)
    others = [np.var(ordered[:k] + ordered[6 - (3 - k) :]) for k in (0, 1, 3)]
    close(others, [0.295556, 1.228889, 0.282222], atol=1e-6)


@quick
@given(
    x=hnp.arrays(np.float32, 7, elements=eighths),
    where=hnp.arrays(np.bool_, 7),
    n=st.integers(0, 8),
)
def test_no_subset_of_that_size_varies_more(x, where, n):
    # Ties as in the rule; what is dropped is never read.
    keep = np.asarray(subset(np.where(where, x, np.nan), jnp.int32(n), where=where))
    size = min(n, where.sum())
    assert keep.sum() == size and not (keep & ~where).any()
    equal(keep, by_rule(x, n, where))
    if size:
        values = np.asarray(x, np.float64)
        best = max(
            np.var(values[list(s)]) for s in itertools.combinations(np.flatnonzero(where), size)
        )
        close(np.var(values[keep]), best, atol=1e-9)


def test_ties_and_spread():
    # A large mean does not drown the spread.
    x = jnp.array([1000.0, 1000.25, 1000.5, 1000.125, 1000.75])
    equal(subset(x, 3), subset(x - 1000.0, 3))

    # Rows have sizes of their own.
    x = jnp.array([WORKED, WORKED[::-1]])
    keep = subset(x, jnp.array([[3], [6]]))
    equal(keep[0], subset(x[0], 3))
    assert keep[1].all()


def test_what_is_left_out():
    # A kept nan is kept and seen.
    x = jnp.array([jnp.nan, 0.5, -1.0, 2.0, jnp.nan])
    where = jnp.array([False, True, True, True, True])
    assert subset(x, 2, where=where).tolist() == [False, False, False, True, True]
    assert not subset(x, 0, where=where).any()
    assert fraction_mask(x, where, 0.25).tolist() == [False, False, False, False, True]

    # An empty batch keeps nothing.
    assert max_variance_subset(jnp.zeros((2, 0)), 1).shape == (2, 0)
    advantages, mask = jnp.zeros((0, 3)), jnp.zeros((0, 3, 2), bool)
    assert d3s_selection(advantages, mask, old_entropy=jnp.zeros(mask.shape)).shape == mask.shape

    # Where junk and a controllers array.
    advantages, mask, entropy = arrays(3)
    where = np.ones(advantages.shape, bool)
    where[1, 2] = False
    selection = jax.jit(
        lambda a, m, e, w, p: d3s_selection(a, m, old_entropy=e, where=w, progress=p)
    )
    progress = jnp.full((3, 1, 1), 0.5)
    clean = selection(advantages, mask & where[..., None], entropy, where, progress)
    junk = np.where(where, advantages, np.nan).astype(np.float32)
    dirty = np.where(mask & where[..., None], entropy, np.inf).astype(np.float32)
    equal(selection(junk, mask, dirty, where, progress), clean)
    equal(d3s_selection(advantages, mask, old_entropy=entropy, where=where, progress=0.5), clean)


def test_groups_and_tokens():
    # Token advantages count with their mean.
    advantages, mask, entropy = arrays(4)
    tokens = np.broadcast_to(advantages[..., None], mask.shape)
    options = {"old_entropy": entropy, "progress": 0.5}
    equal(d3s_selection(tokens, mask, **options), d3s_selection(advantages, mask, **options))


@quick
@given(
    scores=hnp.arrays(np.float32, (2, 4), elements=st.sampled_from([0.0, 0.5, 1.0, 2.0])),
    mask=hnp.arrays(np.bool_, (2, 4)),
    fraction=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
)
def test_the_highest_scores_of_the_whole_array(scores, mask, fraction):
    junk = np.where(mask, scores, np.nan).astype(np.float32)
    keep = np.asarray(fraction_mask(junk, mask, jnp.float32(fraction)))
    places = sorted(np.flatnonzero(mask), key=lambda i: (-scores.reshape(-1)[i], i))
    expected = np.zeros(8, bool)
    expected[places[: int(np.round(np.float32(fraction) * mask.sum()))]] = True
    equal(keep.reshape(-1), expected)


def arrays(seed=0, prompts=3, group=4, tokens=5):
    rng = np.random.default_rng(seed)
    advantages = rng.normal(size=(prompts, group)).astype(np.float32)
    advantages[0] = 0.0
    mask = rng.random((prompts, group, tokens)) < 0.7
    entropy = rng.random(mask.shape).astype(np.float32)
    return advantages, mask, entropy


def reference(advantages, mask, entropy, share, fraction, scope):
    kept = mask.any(-1)
    rows = advantages.reshape(1, -1) if scope == "batch" else advantages
    taking = kept.reshape(rows.shape)
    chosen = np.stack(
        [by_rule(a, int(np.round(share * w.sum())), w) for a, w in zip(rows, taking, strict=True)]
    ).reshape(kept.shape)
    alive = mask & chosen[..., None]
    key = (np.abs(advantages)[..., None] * entropy).reshape(-1)
    places = sorted(np.flatnonzero(alive.reshape(-1)), key=lambda i: (-key[i], i))
    out = np.zeros(mask.size, bool)
    out[places[: int(np.round(fraction * alive.sum()))]] = True
    return out.reshape(mask.shape)


@for_each("scope", ["batch", "group"])
@for_each("progress", [0.0, 0.5, 1.0])
def test_selection_equals_the_reference(scope, progress):
    advantages, mask, entropy = arrays()
    keep = select(advantages, mask, old_entropy=entropy, scope=scope, progress=progress)
    share, fraction = 0.25 + 0.5 * progress, 0.2 + 0.8 * progress
    expected = reference(advantages, mask, entropy, share, fraction, scope)
    equal(keep, expected)
