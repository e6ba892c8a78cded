"""Every surrogate with options, and the same in float64 NumPy, written from the formulas.

References take the policy twice: `x` is differentiated, `fixed` is where the gradient stops.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import surrogates

SHAPE = (2, 3, 5)
LENGTHS = np.array([[5, 3, 1], [0, 4, 2]])
MASK = np.arange(5) < LENGTHS[..., None]


def make(seed=0, per_token=False):
    """Log-probabilities, new and old, and advantages."""
    rng = np.random.default_rng(seed)
    old = rng.normal(-1.5, 0.6, SHAPE)
    logp = old + rng.normal(0.05, 0.4, SHAPE)
    advantages = rng.normal(0, 1, SHAPE if per_token else SHAPE[:-1])
    return logp.astype(np.float32), old.astype(np.float32), advantages.astype(np.float32)


def numeric_gradient(loss, x, step=1e-6):
    """Central differences of a function of a float64 array."""
    gradient = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        high, low = x.copy(), x.copy()
        high[i] += step
        low[i] -= step
        gradient[i] = (loss(high) - loss(low)) / (2 * step)
    return gradient


def with_context(function, context):
    """A surrogate that gets its further arrays from those that all surrogates have."""

    @functools.wraps(function)
    def call(logp, old_logp, advantages, mask, **options):
        more = context(logp, old_logp, advantages)
        return function(logp, old_logp, advantages, mask, **more, **options)

    return call


def _sampler_is_old(logp, old_logp, advantages):
    return {"behavior_logp": jax.lax.stop_gradient(logp) if old_logp is None else old_logp}


def _improbable(logp, old_logp, advantages):
    return {"selected": jnp.asarray(logp) < -1.8}


SIGNAL = np.linspace(-1, 1, SHAPE[-1], dtype=np.float32)


def _signal(logp, old_logp, advantages):
    return {"signal": jnp.broadcast_to(SIGNAL, jnp.shape(logp))}


def _same_side(logp, old_logp, advantages):
    return {"median_advantages": advantages}


TURNS = np.array([0, 1, 1, 2, 2])


def _turns(logp, old_logp, advantages):
    return {"turn_ids": jnp.broadcast_to(TURNS[: jnp.shape(logp)[-1]], jnp.shape(logp))}


def ratio(x, old):
    return np.exp(np.clip(x - old, -20, 20))


def clipped(r, a, low, high):
    """The pessimistic clip, with the bounds themselves."""
    return np.maximum(-a * r, -a * np.clip(r, low, high))


def mean_log_ratio(x, old, mask):
    return np.where(mask, x - old, 0).sum(-1) / np.maximum(mask.sum(-1), 1)


def ref_reinforce(x, fixed, old, a, mask):
    return -a * x


def ref_ppo_clip(x, fixed, old, a, mask):
    return clipped(ratio(x, old), a, 0.8, 1.2)


def ref_ppo_dual(x, fixed, old, a, mask):
    loss = clipped(ratio(x, old), a, 0.8, 1.3)
    return np.where(a < 0, np.minimum(loss, -a * 1.4), loss)


def ref_dapo_clip(x, fixed, old, a, mask):
    loss = clipped(ratio(x, old), a, 0.8, 1.28)
    return np.where(a < 0, np.minimum(loss, -a * 10.0), loss)


def ref_hapo(x, fixed, old, a, mask):
    h = np.float64(SIGNAL)
    low, high = 0.2 * (1 - 0.5 * np.minimum(h, 0)), 0.28 * (1 + 0.5 * np.maximum(h, 0))
    now = np.exp(fixed - old)
    near = (now > 1 - low / 2) & (now < 1 + high / 2)
    a = a * np.where(np.where(h > 0, ~near, near), 1 + 0.8 * h, 1.0)
    r = np.exp(x - old)
    loss = np.maximum(-a * r, -a * np.clip(r, 1 - low, 1 + high))
    return np.where(a < 0, np.minimum(loss, -a * 1.4), loss)


def ref_gspo(x, fixed, old, a, mask):
    s = np.exp(np.minimum(mean_log_ratio(x, old, mask), 10.0))[..., None]
    return clipped(s, a, 0.9, 1.15) * np.ones(x.shape)


def ref_gspo_dual(x, fixed, old, a, mask):
    loss = ref_gspo(x, fixed, old, a, mask)
    return np.where(a < 0, np.minimum(loss, -a * 1.05), loss)


def ref_gspo_turns(x, fixed, old, a, mask):
    mean = np.zeros(x.shape)
    for k in range(3):
        member = mask & (k == TURNS)
        mean += np.where(member, mean_log_ratio(fixed, old, member)[..., None], 0.0)
    return clipped(np.exp(mean + x - fixed), a, 0.9, 1.15)


def ref_gspo_token_dual(x, fixed, old, a, mask):
    loss = ref_gspo_token(x, fixed, old, a, mask)
    return np.where(a < 0, np.minimum(loss, -a * 1.05), loss)


def ref_luspo(x, fixed, old, a, mask):
    return ref_gspo(x, fixed, old, a, mask) * mask.sum(-1, keepdims=True)


def ref_gspo_token(x, fixed, old, a, mask):
    s = np.exp(np.minimum(mean_log_ratio(fixed, old, mask)[..., None] + x - fixed, 10.0))
    return clipped(s, a, 0.9, 1.15)


def ref_gmpo(x, fixed, old, a, mask):
    d, sign = x - old, np.sign(a)
    z = sign * np.minimum(sign * d, sign * np.clip(d, -0.3, 0.2))
    mean = np.where(mask, z, 0).sum(-1) / np.maximum(mask.sum(-1), 1)
    return -a * np.exp(mean)[..., None] * np.ones(x.shape)


def ref_sapo(x, fixed, old, a, mask):
    tau = np.where(a > 0, 1.0, 1.05)
    return -a * 4 / tau / (1 + np.exp(-tau * (ratio(x, old) - 1)))


def ref_sapo_sequence(x, fixed, old, a, mask):
    s, tau = np.exp(mean_log_ratio(x, old, mask))[..., None], np.where(a > 0, 1.0, 1.05)
    return -a * 4 / tau / (1 + np.exp(-tau * (s - 1))) * np.ones(x.shape)


def ref_dppo_tv(x, fixed, old, a, mask):
    change = np.exp(fixed) - np.exp(old)
    keep = np.where(a > 0, change <= 0.08, change >= -0.05)
    return keep * np.minimum(ratio(fixed, old), 1.5) * -a * x


def ref_dppo_kl(x, fixed, old, a, mask):
    p, q = np.exp(fixed), np.exp(old)
    rest, old_rest = np.maximum(1 - p, 0) + 1e-8, np.maximum(1 - q, 0) + 1e-8
    divergence = q * np.log(q / p) + np.maximum(1 - q, 0) * np.log(old_rest / rest)
    rose, fell = (divergence <= 0.02) | (p <= q), (divergence <= 0.01) | (p >= q)
    return np.where(a > 0, rose, fell) * np.minimum(ratio(fixed, old), 1.5) * -a * x


def ref_cispo(x, fixed, old, a, mask):
    return -np.clip(ratio(fixed, old), 0.8, 1.3) * a * x


def ref_dft(x, fixed, old, a, mask):
    return -np.exp(fixed) * a * x


def ref_dispo(x, fixed, old, a, mask):
    r = ratio(fixed, old)
    return -np.where(a > 0, np.clip(r, 0.9, 1.3), np.clip(r, 0.6, 1.1)) * a * x


def ref_topr(x, fixed, old, a, mask):
    whole = np.exp(np.where(mask, fixed - old, 0.0).sum(-1, keepdims=True))
    return -np.where(a > 0, 1.0, np.minimum(whole, 1.0)) * a * x


def ref_topr_token(x, fixed, old, a, mask):
    return -np.where(a > 0, 1.0, np.minimum(ratio(fixed, old), 1.0)) * a * x


def ref_minpro(x, fixed, old, a, mask):
    weight = np.ones(x.shape)
    for i in np.ndindex(x.shape[:-1]):
        seen = []
        for t in np.flatnonzero(mask[i]):
            r = np.exp(fixed[i][t] - old[i][t])
            weight[i][t] = np.clip(r * (min(seen) if seen else 1.0), 0.3, 1.2)
            seen.append(r)
    return -weight * a * x


def ref_fipo(x, fixed, old, a, mask):
    """Half-life 2, dual clip 1.5, safe ratio 1.2, at most one dual-clipped token."""
    r = ratio(fixed, old)
    d = np.where(mask & (r <= 1.5), fixed - old, 0.0)
    future = np.zeros(d.shape)
    for t in reversed(range(d.shape[-1])):
        later = future[..., t + 1] if t + 1 < d.shape[-1] else 0.0
        future[..., t] = d[..., t] + 2**-0.5 * later
    f = np.clip(np.exp(future), 0.7, 1.3)
    f = np.where((a < 0) & (r > 1.2), np.clip(f, 0.8, 1.0), f)
    loss = f * clipped(ratio(x, old), a, 0.8, 1.28)
    loss = np.where(a < 0, np.minimum(loss, -f * a * 1.5), loss)
    too_far = (mask & (a < 0) & (r > 1.5)).sum(-1, keepdims=True) > 1
    return np.where(too_far, 0.0, loss)


def ref_clip_cov(x, fixed, old, a, mask):
    return np.where(fixed < -1.8, 0.0, clipped(ratio(x, old), a, 0.8, 1.3))


def ref_kl_cov(x, fixed, old, a, mask):
    return -a * ratio(x, old) + np.where(fixed < -1.8, 0.5 * np.abs(x - old), 0.0)


def ref_gbpo(x, fixed, old, a, mask):
    return np.abs(a) * np.abs(ratio(x, old) - np.where(a > 0, 1.3, 0.8))


def ref_dcpo(x, fixed, old, a, mask):
    q = np.exp(old)
    low = 0.5 + 0.5 * np.sqrt(np.maximum(1 - 4 * 0.03 / q, 0))
    high = np.minimum(0.5 + 0.5 * np.sqrt(1 + 4 * 0.05 / q), 1.3)
    loss = clipped(ratio(x, old), a, low, high)
    return np.where(a < 0, np.minimum(loss, -a * 1.5), loss)


S = surrogates
CASES = {
    "reinforce": (S.reinforce, {}, ref_reinforce),
    "ppo_clip": (S.ppo_clip, {}, ref_ppo_clip),
    "ppo_dual": (S.ppo_clip, {"eps_high": 0.3, "dual_clip": 1.4}, ref_ppo_dual),
    "dapo_clip": (S.dapo_clip, {}, ref_dapo_clip),
    "hapo": (
        with_context(S.hapo, _signal),
        {"alpha": 0.5, "beta": 0.8, "dual_clip": 1.4},
        ref_hapo,
    ),
    "gspo": (S.gspo, {"eps_low": 0.1, "eps_high": 0.15}, ref_gspo),
    "gspo_token": (S.gspo_token, {"eps_low": 0.1, "eps_high": 0.15}, ref_gspo_token),
    "gspo_turns": (
        with_context(S.gspo_turns, _turns),
        {"eps_low": 0.1, "eps_high": 0.15},
        ref_gspo_turns,
    ),
    "gspo_dual": (S.gspo, {"eps_low": 0.1, "eps_high": 0.15, "dual_clip": 1.05}, ref_gspo_dual),
    "gspo_token_dual": (
        S.gspo_token,
        {"eps_low": 0.1, "eps_high": 0.15, "dual_clip": 1.05},
        ref_gspo_token_dual,
    ),
    "luspo": (S.luspo, {"eps_low": 0.1, "eps_high": 0.15}, ref_luspo),
    "gmpo": (S.gmpo, {"eps_low": 0.3, "eps_high": 0.2}, ref_gmpo),
    "sapo": (S.sapo, {}, ref_sapo),
    "sapo_sequence": (S.sapo_sequence, {}, ref_sapo_sequence),
    "dppo_tv": (S.dppo_tv, {"delta_low": 0.05, "delta_high": 0.08, "w_max": 1.5}, ref_dppo_tv),
    "dppo_kl": (S.dppo_kl, {"delta_low": 0.01, "delta_high": 0.02, "w_max": 1.5}, ref_dppo_kl),
    "cispo": (S.cispo, {"w_min": 0.8, "w_max": 1.3}, ref_cispo),
    "dft": (S.dft, {}, ref_dft),
    "dispo": (S.dispo, {"eps_pos": (0.1, 0.3), "eps_neg": (0.4, 0.1)}, ref_dispo),
    "topr": (S.topr, {}, ref_topr),
    "topr_token": (S.topr, {"level": "token"}, ref_topr_token),
    "minpro": (S.minpro, {"w_min": 0.3, "w_max": 1.2}, ref_minpro),
    "fipo": (
        S.fipo,
        {"half_life": 2, "w_min": 0.7, "w_max": 1.3, "safe_ratio": 1.2, "dual_clip": 1.5},
        ref_fipo,
    ),
    "clip_cov": (with_context(S.clip_cov, _improbable), {"eps_high": 0.3}, ref_clip_cov),
    "kl_cov": (with_context(S.kl_cov, _improbable), {"coef": 0.5}, ref_kl_cov),
    "gbpo": (with_context(S.gbpo, _same_side), {"eps_high": 0.3}, ref_gbpo),
    "decoupled_ppo": (with_context(S.decoupled_ppo, _sampler_is_old), {}, ref_ppo_clip),
    "mix_ppg": (with_context(S.mix_ppg, _sampler_is_old), {}, ref_ppo_clip),
    "dcpo_dynamic_clip": (
        S.dcpo_dynamic_clip,
        {"eps_low": 0.03, "eps_high": 0.05, "r_max": 1.3, "dual_clip": 1.5},
        ref_dcpo,
    ),
}
# One advantage a sequence by definition.
SEQUENCE_ADVANTAGES = {"gspo", "gspo_dual", "gmpo", "luspo", "sapo_sequence"}
TOKEN_ADVANTAGES = [name for name in CASES if name not in SEQUENCE_ADVANTAGES]
