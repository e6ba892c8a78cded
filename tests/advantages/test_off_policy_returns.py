"""V-trace, Retrace, n-step returns, weighed errors: loops in float64, gaps, reductions to GAE."""

import jax
import numpy as np
from cheap import close
from rows import for_each

from jaxrl_llm import advantages as adv

SHAPE = (2, 3, 7)


def sample(seed):
    rng = np.random.default_rng(seed)
    rewards, values, q = rng.normal(size=(3, *SHAPE)).astype(np.float32)
    mask = rng.random(SHAPE) < 0.7
    mask[0, 2] = False
    logps = -rng.exponential(size=(2, *SHAPE)).astype(np.float32)
    return rewards, values, q, mask, dict(zip(("old_logp", "behavior_logp"), logps, strict=True))


def at_most(x, bound):
    return x if bound is None else np.minimum(x, bound)


def rows(mask, *arrays, bootstrap):
    """Each rollout as lists of its unmasked tokens, with the value that follows each."""
    for index in np.ndindex(mask.shape[:-1]):
        keep = mask[index]
        yield index, keep, float(bootstrap[index]), [np.float64(x[index][keep]) for x in arrays]


def check(out, mask, make, arrays, bootstrap):
    for index, keep, last, columns in rows(mask, *arrays, bootstrap=bootstrap):
        close(np.asarray(out)[index][keep], make(last, *columns), rtol=2e-5,
                                   atol=2e-5)  # fmt: skip
        assert not np.asarray(out)[index][~keep].any()


CLIPS = [(1.0, 1.0, 1.0), (1.5, 0.8, 2.0), (None, None, None)]


@for_each(("clip_rho", "clip_trace", "clip_advantage"), CLIPS)
def test_vtrace_equals_its_sum_over_later_tokens(clip_rho, clip_trace, clip_advantage):
    rewards, values, _, mask, logps = sample(0)
    gamma, lam, boot = 0.9, 0.7, np.float32([[0.5, -1, 2], [0, 1, 3]])
    clips = {"clip_rho": clip_rho, "clip_trace": clip_trace}
    options = {**logps, **clips, "gamma": gamma, "lam": lam, "bootstrap_value": boot}
    returns = jax.jit(
        lambda r, v: adv.vtrace_returns(r, v, mask, **options)
    )(rewards, values)  # fmt: skip
    credit = adv.vtrace(rewards, values, mask, **options, clip_advantage=clip_advantage)

    def targets(last, r, v, old, behavior):
        rho, after = np.exp(old - behavior), np.append(v[1:], last)[: len(v)]
        delta = at_most(rho, clip_rho) * (r + gamma * after - v)
        c, out = lam * at_most(rho, clip_trace), v.copy()
        for t in range(len(r)):
            for s in range(t, len(r)):
                out[t] += gamma ** (s - t) * np.prod(c[t:s]) * delta[s]
        return out

    def advantages(last, r, v, old, behavior):
        vs = np.append(targets(last, r, v, old, behavior)[1:], last)[: len(v)]
        after = np.append(v[1:], last)[: len(v)]
        q = r + gamma * (lam * vs + (1 - lam) * after)
        return at_most(np.exp(old - behavior), clip_advantage) * (q - v)

    arrays = (rewards, values, logps["old_logp"], logps["behavior_logp"])
    check(returns, mask, targets, arrays, boot)
    check(credit, mask, advantages, arrays, boot)


@for_each("clip_trace", [1.0, None])
def test_retrace_equals_its_sum_over_later_tokens(clip_trace):
    rewards, values, q, mask, logps = sample(1)
    gamma, lam, boot = 0.8, 0.9, np.float32([[0.5, -1, 2], [0, 1, 3]])
    out = adv.retrace_returns(
        rewards, values, mask, action_values=q, **logps, gamma=gamma, lam=lam,
        clip_trace=clip_trace, bootstrap_value=boot,
    )  # fmt: skip

    def targets(last, r, v, q, old, behavior):
        """Q plus the discounted errors of later tokens, each by the traces up to it."""
        c = lam * at_most(np.exp(old - behavior), clip_trace)
        delta = r + gamma * np.append(v[1:], last)[: len(v)] - q
        found = q.copy()
        for t in range(len(r)):
            for s in range(t, len(r)):
                found[t] += gamma ** (s - t) * np.prod(c[t + 1 : s + 1]) * delta[s]
        return found

    arrays = (rewards, values, q, logps["old_logp"], logps["behavior_logp"])
    check(out, mask, targets, arrays, boot)


@for_each(("n", "lam"), [(1, 1.0), (3, 1.0), (2, 0.6), (9, 1.0)])
def test_n_steps_equal_the_sum_of_rewards_and_the_value_after(n, lam):
    rewards, values, _, mask, _ = sample(2)
    boot = np.float32([[0.5, -1, 2], [0, 1, 3]])
    out = adv.n_step_returns(rewards, values, mask, n=n, gamma=0.9, lam=lam, bootstrap_value=boot)

    def whole(t, m, last, r, v):
        m = min(m, len(r) - t)
        total = sum(0.9**i * r[t + i] for i in range(m))
        return total + 0.9**m * (v[t + m] if t + m < len(v) else last)

    def targets(last, r, v):
        found = np.zeros(len(r))
        for t in range(len(r)):
            # Of m = 1 .. n steps with weights (1 - lam) lam^(m - 1), the rest on the last.
            weights = [(1 - lam) * lam ** (m - 1) for m in range(1, n)] + [lam ** (n - 1)]
            found[t] = sum(w * whole(t, m, last, r, v) for m, w in enumerate(weights, 1))
        return found

    check(out, mask, targets, (rewards, values), boot)


def test_weighed_errors_are_vtrace_without_bounds():
    rewards, values, _, mask, logps = sample(3)
    options = {**logps, "gamma": 0.9, "lam": 0.8}
    errors = adv.corrected_td_errors(rewards, values, mask, **options)
    returns = adv.vtrace_returns(rewards, values, mask, **options, clip_rho=None, clip_trace=None)
    close(errors, np.where(mask, returns - values, 0), rtol=1e-4, atol=1e-4)


def test_on_policy_all_of_them_are_gae():
    rewards, values, _, mask, logps = sample(4)
    same = {name: logps["old_logp"] for name in logps}
    options = {"gamma": 0.9, "lam": 0.8}
    plain = adv.gae(rewards, values, mask, **options)
    returns = adv.gae_returns(rewards, values, mask, **options)
    near = {"rtol": 1e-4, "atol": 1e-5}
    close(adv.vtrace_returns(rewards, values, mask, **same, **options), returns, **near)
    close(adv.corrected_td_errors(rewards, values, mask, **same, **options), plain, **near)
    found = adv.retrace_returns(rewards, values, mask, action_values=values, **same, **options)
    close(found, returns, **near)
    one = adv.vtrace(rewards, values, mask, **same, gamma=0.9, lam=1.0)
    full = adv.gae(rewards, values, mask, gamma=0.9, lam=1.0)
    close(one, full, **near)
    steps = adv.n_step_returns(rewards, values, mask, n=7, gamma=0.9)
    close(steps, np.where(mask, full + values, 0), **near)
