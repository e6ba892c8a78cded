"""Modulators of advantages: worked numbers, gates, and evidence that masks hide."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from rows import for_each

from jaxrl_llm.advantages import ace, entropy_shaping, novelty_sharpening, sampled_entropy_shaping

SHAPE = (3, 4, 5)


def sample(seed=0):
    rng = np.random.default_rng(seed)
    mask = np.arange(SHAPE[-1]) < rng.integers(0, SHAPE[-1] + 1, SHAPE[:-1])[..., None]
    return {
        "advantages": rng.normal(size=SHAPE[:-1]).astype(np.float32),
        "mask": mask,
        "old_logp": -rng.exponential(size=SHAPE).astype(np.float32),
        "ref_logp": -rng.exponential(size=SHAPE).astype(np.float32),
        "old_entropy": rng.exponential(size=SHAPE).astype(np.float32),
        "where": rng.random(SHAPE[:-1]) < 0.7,
    }


FUNCTIONS = {
    "novelty_sharpening": (novelty_sharpening, ("old_logp", "where")),
    "ace": (ace, ("old_logp", "ref_logp", "where")),
    "ace_mean": (partial(ace, length_normalize=True), ("old_logp", "ref_logp", "where")),
    "entropy_shaping": (entropy_shaping, ("old_entropy",)),
    "sampled_entropy_shaping": (sampled_entropy_shaping, ("old_logp",)),
}
COMPILED = {name: jax.jit(f) for name, (f, _) in FUNCTIONS.items()}


def call(name, x, function=None):
    evidence = {k: x[k] for k in FUNCTIONS[name][1]}
    return (function or COMPILED[name])(x["advantages"], x["mask"], **evidence)


def tokens(values):
    """One token a rollout."""
    return jnp.asarray(values, jnp.float32)[..., None]


def novelty_reference(x, *, bonus=2.5, cap=0.5):
    out = np.where(x["where"], x["advantages"], 0.0).astype(np.float64)
    for g in np.ndindex(SHAPE[0]):
        score, taking = {}, []
        for i in range(SHAPE[1]):
            m = x["mask"][g][i]
            if m.any() and x["where"][g][i]:
                score[i] = x["old_logp"][g][i][m].astype(np.float64).mean()
                taking.append(i)
        if not taking:
            continue
        mean = np.mean([score[i] for i in taking])
        for i in taking:
            if out[g][i] > 0:
                gain = max(bonus * (1 - np.exp(score[i] - mean)), 0)
                out[g][i] += min(gain, cap * out[g][i])
    return out


def ace_reference(x, *, alpha=1.0, c_max=10.0, mean=False):
    out = np.where(x["where"], x["advantages"], 0.0).astype(np.float64)
    for i in np.ndindex(SHAPE[:-1]):
        if out[i] < 0:
            m = x["mask"][i]
            c = (x["old_logp"][i][m].astype(np.float64) - x["ref_logp"][i][m]).sum()
            c = min(c / max(m.sum(), 1) if mean else c, c_max)
            out[i] *= 1 + alpha * np.log1p(np.exp(c))
    return out


@for_each("seed", range(4))
def test_equals_the_float64_reference(seed):
    x = sample(seed)
    close(call("novelty_sharpening", x), novelty_reference(x), atol=1e-5)
    close(call("ace", x), ace_reference(x), atol=2e-5)
    close(call("ace_mean", x), ace_reference(x, mean=True), atol=2e-5)
    a, h = x["advantages"].astype(np.float64)[..., None], x["old_entropy"].astype(np.float64)
    shaped = np.where(x["mask"], a + np.minimum(0.4 * h, np.abs(a) / 2.0), 0.0)
    close(call("entropy_shaping", x), shaped, atol=1e-6)
    p = np.exp(x["old_logp"].astype(np.float64))
    shaped = np.where(x["mask"], a + np.minimum(-0.4 * p * np.log(p), np.abs(a) / 2.0), 0.0)
    close(call("sampled_entropy_shaping", x), shaped, atol=1e-6)


def test_novelty_has_the_worked_numbers():
    advantages = np.array([0.866, 0.866, -0.866, -0.866])
    old_logp, mask = tokens([-0.5, -1.0, -0.3, -0.6]), np.ones((4, 1), bool)
    out = novelty_sharpening(advantages, mask, old_logp=old_logp)
    close(out, [0.866, 1.299, -0.866, -0.866], rtol=1e-6)
    # With the cap out of the way the bonus itself shows: 2.5 (1 - .670320).
    free = novelty_sharpening(advantages, mask, old_logp=old_logp, cap=10.0)
    close(free[1], 0.866 + 2.5 * (1 - 0.670320), rtol=1e-5)
    for options in ({"bonus": 0.0}, {"cap": 0.0}):
        same = novelty_sharpening(advantages, mask, old_logp=old_logp, **options)
        equal(same, np.float32(advantages))


def test_ace_has_the_worked_numbers():
    confidence = np.array([-5.0, 0.0, 2.0, 2.0])
    advantages, mask = np.array([-1.0, -1.0, -1.0, 1.0]), np.ones((4, 1), bool)
    evidence = {"old_logp": tokens(confidence), "ref_logp": np.zeros((4, 1))}
    out = ace(advantages, mask, **evidence)
    close(out, [-1.006715, -1.693147, -3.126928, 1.0], rtol=1e-6)
    equal(ace(advantages, mask, alpha=0.0, **evidence), advantages)


def test_ace_counts_as_wrong_what_it_is_told():
    advantages, mask = np.array([1.0, -1.0]), np.ones((2, 1), bool)
    zeros = np.zeros((2, 1))
    wrong = np.array([True, False])
    out = ace(advantages, mask, old_logp=zeros, ref_logp=zeros, wrong=wrong)
    close(out, [1.693147, -1.0], rtol=1e-6)


def test_ace_bounds_the_confidence_of_long_answers():
    mask, advantages = np.ones((1, 1000), bool), np.array([-1.0])
    evidence = {"old_logp": np.full((1, 1000), -0.1), "ref_logp": np.full((1, 1000), -0.2)}
    close(ace(advantages, mask, **evidence), [-11.0], atol=1e-3)
    free = ace(advantages, mask, c_max=None, **evidence)
    close(free, [-101.0], rtol=1e-5)
    mean = ace(advantages, mask, length_normalize=True, **evidence)
    close(mean, [-1 - np.log1p(np.exp(0.1))], rtol=1e-5)


def test_ace_of_token_advantages_has_one_factor_a_rollout():
    x = sample(3)
    spread = np.where(x["mask"], x["advantages"][..., None], 0.0)
    out = call("ace", {**x, "advantages": spread})
    taken = x["mask"] & x["where"][..., None]
    expected = np.where(taken, np.asarray(call("ace", x))[..., None], 0.0)
    close(out, expected, rtol=1e-6)


def test_shaping_has_the_worked_numbers():
    mask = np.ones((4, 1), bool)
    advantages, entropy = np.array([-1.0, -1.0, 1.0, 0.0]), tokens([0.3, 3.0, 0.3, 1.0])
    out = entropy_shaping(advantages, mask, old_entropy=entropy)
    close(out[:, 0], [-0.88, -0.5, 1.12, 0.0], rtol=1e-6)
    # The constants exchanged, as one note on the paper prints them, turn the sign.
    flipped = entropy_shaping(advantages, mask, old_entropy=entropy, scale=2.0, cap=0.4)
    close(flipped[1], [1.5], rtol=1e-6)
    same = entropy_shaping(advantages, mask, old_entropy=np.zeros((4, 1)))
    equal(same[:, 0], advantages)


def test_a_token_that_cannot_be_sampled_has_no_share_of_the_entropy():
    mask = np.ones((1, 1), bool)
    out = sampled_entropy_shaping(np.array([1.0]), mask, old_logp=np.array([[-np.inf]]))
    close(out, [[1.0]], atol=1e-6)
