"""A critic of tokens read at turns: worked numbers, step tables in float64, reductions to GAE."""

import jax
import numpy as np
from cheap import close, equal
from rows import for_each

from jaxrl_llm import advantages as adv

ONES = np.ones((1, 4), bool)


def sample(seed, shape=(3, 2, 9), turns=4):
    """Rewards of turns, values, a mask with observations between turns, ids, and which happened."""
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.integers(0, turns, shape), axis=-1)
    mask = rng.random(shape) < 0.7
    ids = np.where(rng.random(shape) < 0.15, -1, ids)
    # Where a token is of no turn, the turns around it go on.
    rewards = rng.normal(size=(*shape[:-1], turns)).astype(np.float32)
    values = rng.normal(size=shape).astype(np.float32)
    happened = np.arange(turns) < rng.integers(2, turns + 1, shape[:-1])[..., None]
    return rewards, values, mask, ids.astype(np.int32), happened


def steps_of(values, mask, ids, happened, rewards):
    """The step table of one rollout: its turns with their tokens, rewards, first and last value."""
    rows = []
    for k in np.flatnonzero(happened):
        tokens = np.flatnonzero(mask & (ids == k))
        if len(tokens):
            v = np.float64(values[tokens])
            rows.append((k, tokens, np.float64(rewards[k]), v[0], v[-1]))
    return rows


def backward(r, v, after, discount, trace):
    """delta = r + discount after - v, summed back with discount trace."""
    out, running = np.zeros(len(r)), 0.0
    for i in range(len(r) - 1, -1, -1):
        running = r[i] + discount[i] * after[i] - v[i] + discount[i] * trace * running
        out[i] = running
    return out


def test_worked_numbers_of_poad_and_egae():
    rewards, values = np.array([[0.0, 0, 0, 1]]), np.array([[0.1, 0.2, 0.4, 0.7]])
    ids = np.array([[0, 0, 1, 1]])
    for intra, expected in (
        (1.0, [0.727166, 0.660175, 0.585, 0.3]),
        (0.9, [0.572444, 0.575958, 0.4865, 0.3]),
    ):
        out = adv.poad(rewards, values, ONES, turn_ids=ids, gamma=0.9, intra_gamma=intra, lam=0.95)
        close(out, [expected], atol=1e-5)
    values = np.array([[0.2, 0.5, 0.6]] * 2)
    out = adv.egae(
        np.zeros((2, 3)), values, np.ones((2, 3), bool), unfinished=np.array([True, False])
    )
    close(out, [[0.395, 0.1, 0], [-0.1465, -0.47, -0.6]], atol=1e-6)


def test_starts_ends_and_rewards_of_turns():
    ids = np.array([[0, 0, -1, 1, -1, 1, 3]])
    mask = np.array([[True, True, True, True, False, True, True]])
    assert adv.turn_starts(mask, turn_ids=ids)[0].tolist() == [1, 0, 0, 1, 0, 0, 1]
    assert adv.turn_ends(mask, turn_ids=ids)[0].tolist() == [0, 1, 0, 0, 0, 1, 1]
    assert adv.turn_borders(mask, turn_ids=ids)[0].tolist() == [1, 1, 0, 1, 0, 1, 1]
    # The turn without a token loses its reward, and so does one that did not happen.
    rewards = np.array([[1.0, 2.0, 3.0, np.nan]])
    happened = np.array([[True, True, True, False]])
    out = adv.turn_end_rewards(rewards, mask, turn_ids=ids, turn_where=happened)
    assert out.tolist() == [[0, 1, 0, 0, 0, 2, 0]]


def test_sums_of_turns_equal_a_loop_and_leave_out_what_is_of_none():
    _, values, mask, ids, _ = sample(0)
    out = adv.turn_sums(values, mask, turn_ids=ids, turns=3)
    for k in range(3):
        expected = np.where(mask & (ids == k), values, 0).sum(-1)
        close(out[..., k], expected, atol=1e-6)


@jax.jit
def of_turns(rewards, values, mask, **options):
    """Advantages, returns, both forms of post-decision values, and their targets."""
    arrays = (rewards, values, mask)
    both = {x: adv.pdppo(*arrays, **options, combine=x) for x in ("max", "mean", "before")}
    turn, returns = adv.turn_gae(*arrays, **options), adv.turn_gae_returns(*arrays, **options)
    return turn, returns, both, adv.pdppo_returns(*arrays, **options)


@for_each(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.6), (0.5, 0.0)])
def test_turns_equal_the_step_table(gamma, lam):
    rewards, values, mask, ids, happened = sample(1)
    options = {"turn_ids": ids, "turn_where": happened, "gamma": gamma, "lam": lam}
    turn, returns, both, targets = of_turns(rewards, values, mask, **options)
    for index in np.ndindex(mask.shape[:-1]):
        table = steps_of(*(x[index] for x in (values, mask, ids, happened, rewards)))
        want, want_returns = np.zeros(rewards.shape[-1]), np.zeros(mask.shape[-1])
        later, want_targets = np.zeros(rewards.shape[-1]), np.zeros(mask.shape[-1])
        if table:
            places, tokens, r, first, last = zip(*table, strict=True)
            a = backward(r, first, [*first[1:], 0.0], [gamma] * len(r), lam)
            want[list(places)] = a
            y = a + np.array(first)
            later[list(places)] = np.array(r) + [*last[:-1], 0.0] - np.array(first)
            for i, t in enumerate(tokens):
                # A turn of one token learns the first.
                want_targets[t[-1]] = gamma * y[i + 1] if i + 1 < len(y) else 0.0
                want_targets[t[0]] = want_returns[t[0]] = y[i]
        close(turn[index], want, atol=1e-5)
        close(returns[index], want_returns, atol=1e-5)
        close(both["before"][index], want, atol=1e-5)
        close(both["mean"][index], (want + later) / 2, atol=1e-5)
        close(both["max"][index], np.maximum(want, later), atol=1e-5)
        close(targets[index], want_targets, atol=1e-5)


@for_each("intra", [1.0, 0.7])
def test_poad_equals_a_scan_through_the_tokens_of_each_action(intra):
    rewards, values, mask, ids, happened = sample(2)
    mask = mask & (ids >= 0)
    options = {"turn_ids": ids, "gamma": 0.7, "intra_gamma": intra, "lam": 0.8}
    placed = adv.turn_end_rewards(rewards, mask, turn_ids=ids, turn_where=happened)
    out = adv.poad(placed, values, mask, **options)
    returns = adv.poad_returns(placed, values, mask, **options)
    for index in np.ndindex(mask.shape[:-1]):
        tokens = np.flatnonzero(mask[index])
        turn = ids[index][tokens]
        ends = np.append(turn[1:] != turn[:-1], True) if len(turn) else np.zeros(0, bool)
        r = [rewards[index][k] * happened[index][k] * e for k, e in zip(turn, ends, strict=True)]
        v = np.float64(values[index][tokens])
        expected = backward(r, v, np.append(v[1:], 0.0), np.where(ends, 0.7, intra), 0.8)
        close(np.asarray(out[index])[tokens], expected, atol=1e-5)
        close(np.asarray(returns[index])[tokens], expected + v, atol=1e-5)


def test_egae_of_what_ended_is_gae_and_of_what_did_not_ignores_a_constant():
    rng = np.random.default_rng(4)
    rewards, values = rng.normal(size=(2, 3, 6)).astype(np.float32)
    mask = rng.random((3, 6)) < 0.7
    options = {"gamma": 0.9, "lam": 0.8}
    ended = adv.egae(rewards, values, mask, unfinished=np.zeros(3, bool), **options)
    equal(ended, adv.gae(rewards, values, mask, **options))
    cut = np.ones(3, bool)
    one = adv.egae(rewards, values, mask, unfinished=cut)
    two = adv.egae(rewards, values + 7.0, mask, unfinished=cut)
    close(one, two, atol=2e-5)


X, IDS = np.ones((1, 4)), np.zeros((1, 4), int)


@for_each("name", ["turn_end_rewards", "turn_gae_returns", "pdppo_returns"])
def test_a_turn_beyond_the_rewards_is_nan_at_its_tokens_alone(name):
    ids, values = np.array([[0, 1, 2, 9]]), () if name == "turn_end_rewards" else (X,)
    out = getattr(adv, name)(X[:, :2], *values, np.arange(4) < np.array([[3]]), turn_ids=ids)
    assert np.isnan(out).tolist() == [[False, False, True, False]]
