"""ADHint: rollouts with and without a hint in one group, and the tokens of the hint."""

import numpy as np
from cheap import close, equal, value_and_grad
from rows import for_each

from jaxrl_llm.advantages import adhint, grpo, grpo_imitating, hint_consistency, hint_preservation
from jaxrl_llm.core import traits_of


def reference(rewards, hinted, where, kappa=1.0):
    rewards = np.float64(rewards)
    out = np.zeros(rewards.shape)
    for p, (r, h, w) in enumerate(zip(rewards, hinted, where, strict=True)):
        if w.sum() < 2 or np.ptp(r[w]) == 0:
            continue
        base = (r - r[w].mean()) / (r[w].std(ddof=1) + 1e-6)
        both = (w & h).any() and (w & ~h).any()
        d = r[w & h].mean() - r[w & ~h].mean() if both else 0.0
        up = np.where(h, base < 0, base > 0)
        out[p] = np.where(w, base * np.exp(kappa * d * np.where(up, 1, -1)), 0.0)
    return out


def arrays(seed=0, prompts=6, group=6):
    rng = np.random.default_rng(seed)
    rewards = rng.choice([0.0, 0.5, 1.0], (prompts, group)).astype(np.float32)
    hinted, where = rng.random((2, prompts, group)) < 0.6
    hinted[0], hinted[1] = False, True
    where[2] = False
    return rewards, hinted, where


def test_equals_the_reference():
    for seed in range(5):
        rewards, hinted, where = arrays(seed)
        junk = np.where(where, rewards, np.nan).astype(np.float32)
        ours = adhint(junk, hinted=hinted, where=where)
        close(ours, reference(rewards, hinted, where), atol=2e-5)


def test_a_hint_that_helps_weighs_the_exceptions():
    rewards, hinted = (
        np.array([1.0, 0.0, 1.0, 0.0, 1.0]),
        np.array([False, False, True, True, True]),
    )
    ours, plain = adhint(rewards, hinted=hinted), grpo(rewards)
    grown = np.abs(ours) > np.abs(plain)
    assert grown.tolist() == [True, False, False, True, False]  # D = 2/3 - 1/2 > 0
    equal(np.sign(ours), np.sign(plain))


def test_hint_tokens_count_by_their_consistency():
    mask = np.array([[True, True, True, True, False]])
    hint = np.array([[True, True, False, False, False]])
    entropy = np.array([[1.2, 0.1, 0.3, 0.5, np.nan]])
    shaped = hint_consistency(np.array([3.0]), mask, hint_mask=hint, old_entropy=entropy)
    close(shaped, [[1.0, 0.75, 3.0, 3.0, 0.0]], rtol=1e-6)
    silent = hint_consistency(np.array([3.0]), mask, hint_mask=hint, old_entropy=0.0 * mask)
    equal(silent, [[0.0, 0.0, 3.0, 3.0, 0.0]])


def test_a_failed_rollout_does_not_blame_its_hint():
    mask = np.array([[True, True, True, False]] * 2)
    hint = np.array([[True, False, False, True]] * 2)
    kept = hint_preservation(np.array([2.0, -2.0]), mask, hint_mask=hint)
    assert kept.tolist() == [[2.0, 2.0, 2.0, 0.0], [0.0, -2.0, -2.0, 0.0]]
    assert traits_of(hint_preservation).token_values and traits_of(hint_consistency).token_values


@for_each("junk", [np.nan, np.inf, -np.inf])
def test_rewards_of_imitated_responses_are_not_read(junk):
    imitated = np.array([False, False, True, False])
    where = np.array([True, True, True, False])

    def total(rewards):
        advantages = grpo_imitating(rewards, imitated=imitated, where=where)
        return advantages @ np.arange(1.0, 5.0), advantages

    clean, read = (np.array([1.0, 0.0, x, x]) for x in (0.0, junk))
    (_, expected), slope = value_and_grad(total, has_aux=True)(clean)
    (_, found), found_slope = value_and_grad(total, has_aux=True)(read)
    equal(found, expected)
    equal(found_slope, slope)
