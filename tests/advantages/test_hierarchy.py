"""Hierarchical advantages: worked numbers, a loop over segments in float64, laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages as adv

compiled = jax.jit(adv.hae)


def loop(r, v, w, u, switch, truncated, gamma, action_lam, subgoal_lam):
    """One rollout, segment by segment, as the paper's code goes through them."""
    n = len(r)
    starts = [0] + [k for k in range(1, n) if switch[k]]
    ends = [*(s - 1 for s in starts[1:]), n - 1]
    out = {name: np.zeros(n) for name in ("action", "subgoal", "switch")}
    above = 0.0
    for s, e in reversed(list(zip(starts, ends, strict=True))):
        final = e == n - 1
        boot_low = (v[e] if truncated else 0.0) if final else w[e + 1]
        boot_high = (w[s] if truncated else 0.0) if final else w[e + 1]
        running, total = 0.0, boot_high
        for k in range(e, s - 1, -1):
            after = boot_low if k == e else v[k + 1]
            running = r[k] + gamma * after - v[k] + gamma * action_lam * running
            total = r[k] + gamma * total
            out["action"][k], out["switch"][k] = running, total - u[k]
        d = e - s + 1
        reward = sum(gamma**j * r[s + j] for j in range(d))
        above = reward + gamma**d * boot_high - w[s] + gamma**d * subgoal_lam * above
        out["subgoal"][s] = above
    return out


def test_worked_numbers():
    r, v = jnp.array([[0.0, 0, 0, 1]]), jnp.array([[0.2, 0.3, 0.5, 0.6]])
    w = jnp.array([[0.25, jnp.nan, 0.45, jnp.nan]])
    out = adv.hae(
        r, v, w, jnp.zeros((1, 4)), jnp.array([[True, False, True, False]]), gamma=0.9,
        action_lam=0.8, subgoal_lam=0.5,
    )  # fmt: skip
    np.testing.assert_allclose(out.action, [[0.1456, 0.105, 0.328, 0.4]], atol=1e-6)
    np.testing.assert_allclose(out.subgoal, [[0.29675, 0, 0.45, 0]], atol=1e-6)
    np.testing.assert_allclose(out.switch_returns, [[0.3645, 0.405, 0.9, 1.0]], atol=1e-6)
    np.testing.assert_allclose(out.subgoal_returns, [[0.54675, 0, 0.9, 0]], atol=1e-6)
    assert out.begins.tolist() == [[True, False, True, False]]


def test_equals_the_loop_over_segments():
    rng = np.random.default_rng(0)
    r, v, w, u = rng.normal(size=(4, 3, 2, 6)).astype(np.float32)
    switch, where = rng.random((3, 2, 6)) < 0.4, rng.random((3, 2, 6)) < 0.8
    truncated = rng.random((3, 2)) < 0.5
    options = {"gamma": 0.9, "action_lam": 0.7, "subgoal_lam": 0.6}
    junk = [np.where(where, x, np.nan) for x in (r, v, w, u)]
    out = compiled(*junk, switch, turn_where=where, truncated=truncated, **options)
    for index in np.ndindex(3, 2):
        keep = where[index]
        columns = [np.float64(x[index][keep]) for x in (r, v, w, u)]
        expected = loop(*columns, switch[index][keep], truncated[index], *options.values())
        for name, want in expected.items():
            found = np.asarray(getattr(out, name)[index])
            np.testing.assert_allclose(found[keep], want, atol=2e-5)
            assert not found[~keep].any()


def test_without_a_switch_it_is_gae_and_with_every_switch_one_step():
    rng = np.random.default_rng(1)
    r, v, w = rng.normal(size=(3, 2, 5)).astype(np.float32)
    options = {"gamma": 0.9, "action_lam": 0.7}
    none = adv.hae(r, v, w, w, jnp.zeros((2, 5), bool), **options)
    plain = adv.gae(r, v, jnp.ones((2, 5), bool), gamma=0.9, lam=0.7)
    np.testing.assert_allclose(none.action, plain, atol=1e-5)
    every = adv.hae(r, v, w, w, jnp.ones((2, 5), bool), **options)
    after = np.append(w[:, 1:], np.zeros((2, 1)), -1)
    np.testing.assert_allclose(every.action, r + 0.9 * after - v, atol=1e-5)


def test_perfect_critics_leave_nothing():
    r = jnp.array([[0.0, 0, 1.0, 0.5]])
    v = adv.turn_returns(r, gamma=0.5)
    out = adv.hae(r, v, v, v, jnp.array([[True, False, True, False]]), gamma=0.5)
    for x in (out.action, out.subgoal, out.switch):
        np.testing.assert_allclose(x, 0, atol=1e-6)


def test_tokens_by_what_they_are_a_part_of():
    rng = np.random.default_rng(2)
    r, v, w, u = rng.normal(size=(4, 2, 3)).astype(np.float32)
    credit = adv.hae(r, v, w, u, jnp.array([[True, False, True]] * 2))
    ids = np.repeat(np.arange(3), 4)[None].repeat(2, 0)
    roles = np.tile([3, 2, 1, 0], 3)[None].repeat(2, 0)
    mask = np.ones((2, 12), bool)
    mask[1, 8:] = False
    out = adv.hae_tokens(credit, mask, turn_ids=ids, roles=roles)
    values = {1: credit.action, 2: credit.subgoal, 3: credit.switch}
    expected, keep = np.zeros((2, 12)), np.zeros((2, 12), bool)
    for role, x in values.items():
        turns = np.ones((2, 3), bool) if role != 2 else np.asarray(credit.begins)
        turns = turns & np.array([[True] * 3, [True, True, False]])
        x = np.float64(x)
        x = (x - x[turns].mean()) / (x[turns].std() + 1e-8)
        for b, t in zip(*np.nonzero(mask & (roles == role)), strict=True):
            if turns[b, ids[b, t]]:
                expected[b, t], keep[b, t] = x[b, ids[b, t]], True
    np.testing.assert_allclose(out.advantages, expected, atol=1e-4)
    np.testing.assert_array_equal(out.keep, keep)
    plain = adv.hae_tokens(credit, mask, turn_ids=ids, roles=roles, normalize=False)
    assert float(plain.advantages[0, 2]) == pytest.approx(float(credit.action[0, 0]))


def test_bad_input():
    x, switch = jnp.ones((1, 3)), jnp.ones((1, 3), bool)
    with pytest.raises(ValueError, match="hae: .*one shape"):
        adv.hae(x, x[:, 1:], x, x, switch)
    with pytest.raises(TypeError, match="hae: switches must be bool"):
        adv.hae(x, x, x, x, x)
    with pytest.raises(ValueError, match=r"hae: subgoal_lam must be in \[0, 1\]"):
        adv.hae(x, x, x, x, switch, subgoal_lam=2.0)
    with pytest.raises(ValueError, match="hae: truncated must have shape"):
        adv.hae(x, x, x, x, switch, truncated=switch)
    credit = adv.hae(x, x, x, x, switch)
    with pytest.raises(TypeError, match="hae_tokens: roles must hold integers"):
        adv.hae_tokens(credit, switch, turn_ids=jnp.zeros((1, 3), int), roles=x)
