"""Hierarchical advantages: worked numbers, a loop over segments in float64, laws."""

import numpy as np
import pytest
from cheap import close, equal, put
from rows import for_each

from jaxrl_llm import advantages as adv


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
    r, v = np.array([[0.0, 0, 0, 1]]), np.array([[0.2, 0.3, 0.5, 0.6]])
    w = np.array([[0.25, np.nan, 0.45, np.nan]])
    out = adv.hae(
        r, v, w, np.zeros((1, 4)), np.array([[True, False, True, False]]), gamma=0.9,
        action_lam=0.8, subgoal_lam=0.5,
    )  # fmt: skip
    close(out.action, [[0.1456, 0.105, 0.328, 0.4]], atol=1e-6)
    close(out.subgoal, [[0.29675, 0, 0.45, 0]], atol=1e-6)
    close(out.switch_returns, [[0.3645, 0.405, 0.9, 1.0]], atol=1e-6)
    close(out.subgoal_returns, [[0.54675, 0, 0.9, 0]], atol=1e-6)
    assert out.begins.tolist() == [[True, False, True, False]]


def test_equals_the_loop_over_segments():
    rng = np.random.default_rng(0)
    r, v, w, u = rng.normal(size=(4, 3, 2, 6)).astype(np.float32)
    switch, where = rng.random((3, 2, 6)) < 0.4, rng.random((3, 2, 6)) < 0.8
    truncated = rng.random((3, 2)) < 0.5
    options = {"gamma": 0.9, "action_lam": 0.7, "subgoal_lam": 0.6}
    junk = [np.where(where, x, np.nan) for x in (r, v, w, u)]
    out = adv.hae(*junk, switch, turn_where=where, truncated=truncated, **options)
    for index in np.ndindex(3, 2):
        keep = where[index]
        columns = [np.float64(x[index][keep]) for x in (r, v, w, u)]
        expected = loop(*columns, switch[index][keep], truncated[index], *options.values())
        for name, want in expected.items():
            found = np.asarray(getattr(out, name)[index])
            close(found[keep], want, atol=2e-5)
            assert not found[~keep].any()


def test_tokens_by_what_they_are_a_part_of():
    rng = np.random.default_rng(2)
    r, v, w, u = rng.normal(size=(4, 2, 3)).astype(np.float32)
    credit = adv.hae(r, v, w, u, np.array([[True, False, True]] * 2))
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
    close(out.advantages, expected, atol=1e-4)
    equal(out.keep, keep)
    plain = adv.hae_tokens(credit, mask, turn_ids=ids, roles=roles, normalize=False)
    assert float(plain.advantages[0, 2]) == pytest.approx(float(credit.action[0, 0]))


@for_each("turns", [1, 3])
def test_equal_advantages_normalize_to_zero(turns):
    """The mean of three 0.9 is not 0.9 in float32."""
    x = np.full((3, turns), 0.9)
    credit = adv.Hierarchy(x, x, x, x, x, x, np.ones(x.shape, bool))
    ids = np.broadcast_to(np.arange(turns), x.shape)
    for role in (1, 2, 3):
        out = adv.hae_tokens(credit, x > 0, turn_ids=ids, roles=np.full(x.shape, role))
        assert not out.advantages.any() and out.keep.all()


def test_the_price_of_keeping_a_subgoal():
    rewards = np.array([[0.0, 0.5, np.nan, 1.0], [2.0, np.nan, np.nan, np.nan]])
    where = np.array([[True, True, False, True], [True, False, False, False]])
    ids = np.array([[4, 4, 9, 5], [-1, 0, 0, 0]])
    switches = np.zeros((2, 4), bool)
    # Three turns keep; the last writes another subgoal than the one before. One turn pays nothing.
    out = adv.hiper_rewards(rewards, switches=switches, subgoal_ids=ids, turn_where=where)
    close(out, [[-0.1, 0.4, 0, 0.6], [2, 0, 0, 0]], atol=1e-6)
    options = {"keep_penalty": 0.5, "per": "turn", "change_penalty": 0.0}
    out = adv.hiper_rewards(
        rewards,
        switches=put(switches, np.s_[0, 1], True),
        subgoal_ids=ids,
        turn_where=where,
        **options,
    )
    close(out, [[-0.5, 0.5, 0, 0.5], [1.5, 0, 0, 0]], atol=1e-6)
    # A turn that switches may write what it likes, and so may one behind a turn without a subgoal.
    some = {"turn_where": where, "keep_penalty": 0.0}
    for changed in ({"switches": ~switches, "subgoal_ids": ids}, {"switches": switches,
                    "subgoal_ids": put(ids, np.s_[0, 1], -1)}):  # fmt: skip
        out = adv.hiper_rewards(rewards, **changed, **some)
        close(out, np.where(where, rewards, 0))


# Tokens of two turns: a switch, a subgoal, an action; then an action alone, an observation before.
IDS = np.array([[0, 0, 0, 0, -1, 1, 1]])
ROLES = np.array([[3, 2, 0, 1, 1, 1, 1]])
MASK = IDS >= 0
TURNS = {"turn_ids": IDS, "token_roles": ROLES, "turn_where": np.array([[True, True]])}


def test_critics_are_read_behind_the_subgoal_and_at_the_first_tokens():
    switches = np.array([[False, False]])
    out = adv.hiper_places(MASK, switches=switches, **TURNS)
    assert [np.flatnonzero(out[0, :, c]).tolist() for c in range(3)] == [[2, 5], [0], [0, 5]]
    # Without a subgoal it is behind the switch; where nothing comes behind it, at the first token.
    roles = np.array([[0, 3, 1, 1, 2, 1, 2]])
    turns = TURNS | {"token_roles": roles, "turn_where": np.array([[True, True]])}
    out = adv.hiper_places(MASK, switches=~switches, **turns)
    assert [np.flatnonzero(out[0, :, c]).tolist() for c in range(3)] == [[2, 5], [0, 5], [0, 5]]
    keep = adv.hiper_tokens(MASK, switches=switches, **turns)
    assert np.flatnonzero(keep[0]).tolist() == [1, 2, 3, 5]  # the second turn keeps its subgoal


def test_values_at_tokens_are_those_of_turns():
    rewards, switches = np.array([[0.25, 1.0]]), np.array([[True, True]])
    values = np.full((1, 7, 3), np.nan, np.float32)
    for place, head, value in ((2, 0, 0.5), (5, 0, 0.75), (0, 1, 0.25), (5, 1, 0.125),
                               (0, 2, 0.1), (5, 2, 0.2)):  # fmt: skip
        values[0, place, head] = value
    options = {"gamma": 0.9, "action_lam": 0.8, "subgoal_lam": 0.5}
    of_turns = adv.hae(
        rewards, np.array([[0.5, 0.75]]), np.array([[0.25, 0.125]]), np.array([[0.1, 0.2]]),
        switches, truncated=np.array([True]), **options,
    )  # fmt: skip
    wanted = adv.hae_tokens(of_turns, MASK, turn_ids=IDS, roles=ROLES)
    taken = TURNS | {"switches": switches, "truncated": np.array([True])}
    out = adv.hiper(rewards, values, MASK, **taken, **options)
    close(out, wanted.advantages, atol=1e-6)
    equal(adv.hiper_tokens(MASK, switches=switches, **TURNS), wanted.keep)
    returns = adv.hiper_returns(rewards, values, MASK, **taken, **options)
    expected = np.zeros((7, 3))
    expected[[2, 5], 0] = of_turns.action_returns[0]
    expected[[0, 5], 1] = of_turns.subgoal_returns[0]
    expected[[0, 5], 2] = of_turns.switch_returns[0]
    close(returns[0], expected, atol=1e-6)


def test_bad_input():
    x = np.ones((1, 2))
    turns = TURNS | {"switches": np.ones((1, 2), bool)}
    with pytest.raises(ValueError, match=r"hiper: old_values must have shape \(1, 7, 3\)"):
        adv.hiper(x, np.zeros((1, 7, 2)), MASK, **turns)
    with pytest.raises(TypeError, match="hiper_places: token_roles must hold integers"):
        adv.hiper_places(MASK, **turns | {"token_roles": np.zeros((1, 7))})
