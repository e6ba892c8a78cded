"""Where segments begin: lines, stretches, uncertain tokens."""

import compiled_curation as cur
import jax
import jax.numpy as jnp
import numpy as np

ONES = np.ones(8, bool)


def test_places():
    # Lines begin after breaks and empty ones belong to the line before.
    cases = {
        "........": [0],
        ".n..n...": [0, 2, 5],
        ".nn.nn..": [0, 3, 6],
        "n.......": [0, 1],
        ".......n": [0],
    }
    for text, expected in cases.items():
        breaks = jnp.array([c == "n" for c in text])
        assert lines(breaks, jnp.array(ONES), 8) == expected
    # What does not fit belongs to the last; padding begins nothing.
    breaks = jnp.array([c == "n" for c in ".n..n..."])
    assert lines(breaks, jnp.array(ONES), 2) == [0, 2]
    assert lines(breaks, jnp.arange(8) < 4, 8) == [0, 2]
    assert lines(breaks, jnp.zeros(8, bool), 8) == []

    # Stretches and cut points equal a loop.
    rng = np.random.default_rng(0)
    mask = np.arange(9) < rng.integers(0, 10, (4, 3))[..., None]
    old_logp = np.where(mask, np.log(rng.uniform(0.05, 1.0, mask.shape)), np.nan)
    stretches = cur.stretch_starts(mask, count=3, length=4)
    cuts = jax.jit(cur.spo_cutpoints, static_argnames=("count", "interval"))(
        old_logp, mask, count=4, rho=0.6, interval=2
    )
    for index in np.ndindex(4, 3):
        n = mask[index].sum()
        expected = [*range(0, n, 4)] + [-1] * 3
        assert stretches[index].tolist() == expected[:3]
        unlikely = np.flatnonzero(np.exp(old_logp[index]) < 0.6)
        assert cuts[index].tolist() == [*unlikely[::2].tolist(), -1, -1, -1, -1][:4]

    # The tokens of a window.
    versions = jnp.array([[3, 3, 4, 4], [4, 4, 4, 9], [2, 3, 3, 3]])
    mask = jnp.array([[True] * 4, [True, True, True, False], [True] * 4])
    numbers = {"unfinished": jnp.array([True, False, False]), "versions": versions}
    numbers["current_version"] = 4
    out = cur.window_tokens(mask, **numbers, drop_tail=1)
    none = [False] * 4
    assert out.tolist() == [[False, False, True, False], [True, True, True, False], none]
    assert cur.window_tokens(mask, **numbers).sum() == 5
    assert cur.ended_tokens(mask, **numbers).tolist() == [none, [True, True, True, False], none]
    # Rows that this batch sampled nothing for train nothing, also in a minibatch of their own.
    old = {name: x if name == "current_version" else x[2:] for name, x in numbers.items()}
    assert (
        not cur.window_tokens(mask[2:], **old).any() and not cur.ended_tokens(mask[2:], **old).any()
    )
    each = numbers | {"current_version": jnp.array([4, 4, 3])}
    assert cur.window_tokens(mask, **each)[2].tolist() == [False, True, True, True]


def lines(breaks, mask, count):
    return [x for x in cur.line_starts(breaks, mask, count=count).tolist() if x >= 0]
