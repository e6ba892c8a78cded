"""What the surrogates that are no plain policy gradient promise, against float64 NumPy."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, equal
from rows import for_each

from jaxrl_llm import surrogates
from jaxrl_llm.core import traits_of

SHAPE, SUPPORT = (2, 3, 4), 3
MASK = np.arange(4) < np.array([[4, 2, 1], [0, 3, 4]])[..., None]
MASK[1, 2, 1] = False  # an observation between two turns
STEERED = np.array([[True, False, False], [True, True, False]])
HAS_TEACHER = np.array([[True, True, False], [True, False, True]])


def _ratio(x, old):
    return np.exp(np.clip(x - old, -20, 20))


def _clipped(r, a, low, high, dual):
    loss = np.maximum(-a * r, -a * np.clip(r, 1 - low, 1 + high))
    return loss if dual is None else np.where(a < 0, np.minimum(loss, -a * dual), loss)


def _with_tail(log_probs):
    tail = np.log(1 - np.exp(log_probs).sum(-1, keepdims=True))
    return np.concatenate([log_probs, tail], -1)


def _divergence(s, t, alpha):
    s, t = _with_tail(s), _with_tail(t)
    kl = lambda p, q: (np.exp(p) * (p - q)).sum(-1)  # noqa: E731
    if alpha in (0, 1):
        return kl(s, t) if alpha else kl(t, s)
    m = np.log((1 - alpha) * np.exp(s) + alpha * np.exp(t))
    return (1 - alpha) * kl(s, m) + alpha * kl(t, m)


# `x` holds what is differentiated, `c` the same numbers where the gradient stops.
def ref_rover(x, c):
    gap = np.where(MASK, c["mean_log_probs"] - c["old_mean_log_probs"], 0.0)
    later = np.concatenate([gap[..., 1:], np.zeros_like(gap[..., :1])], -1)
    q = 0.5 * (x["logp"] - c["old_logp"])
    return (q - (c["advantages"] + 2.0 * 0.5 * later)) ** 2


def ref_otr(x, c):
    return x["one_token_loss"]


def ref_gkd(x, c):
    return x["divergence"]


def ref_minillm(x, c):
    return _clipped(_ratio(x["logp"], c["behavior_logp"]), c["advantages"], 0.3, 0.3, None)


def ref_sdpo(x, c, alpha=0.3):
    weight = np.minimum(_ratio(c["logp"], c["old_logp"]), 1.1)
    return weight * _divergence(x["student_logp"], c["teacher_logp"], alpha)


def ref_sdpo_taught(x, c):
    return ref_sdpo(x, c, alpha=1.0) * HAS_TEACHER[..., None]


def ref_sdpo_sampled(x, c):
    weight = np.minimum(_ratio(c["logp"], c["old_logp"]), 2.0)
    return weight * (c["logp"] - c["teacher_token_logp"]) * x["logp"]


def ref_srpo(x, c):
    routed = ((c["rewards"] < 1.0) & HAS_TEACHER)[..., None]
    clipped = _clipped(_ratio(x["logp"], c["old_logp"]), c["advantages"], 0.2, 0.2, None)
    return np.where(routed, c["distillation_weights"] * ref_sdpo(x, c, alpha=0.5), clipped)


def guided(low, high, dual, gamma):
    def reference(x, c):
        likelihood = np.exp(x["logp"])
        shaped = -c["advantages"] * likelihood / (likelihood + gamma)
        own = _clipped(_ratio(x["logp"], c["old_logp"]), c["advantages"], low, high, dual)
        return np.where(STEERED[..., None], shaped, own)

    return reference


def ref_chord(x, c):
    p = np.exp(c["logp"])  # of the base: the weight is a constant
    own = _clipped(_ratio(x["logp"], c["old_logp"]), c["advantages"], 0.2, 0.3, 1.3)
    return np.where(STEERED[..., None], -p * (1 - p) * x["logp"], own)


SDPO = {"student_logp": "support", "teacher_logp": "support"}
ROUTED = {"rewards": "rollout", "has_teacher": HAS_TEACHER, "distillation_weights": "token", **SDPO}
GUIDED = {"steered": STEERED}
# Function, options, arrays by keyword (their kind, or themselves), reference.
CASES = {
    "rover": (
        surrogates.rover,
        {"rho": 0.5, "beta": 2.0},
        {"mean_log_probs": "token", "old_mean_log_probs": "token"},
        ref_rover,
    ),
    "otr": (surrogates.otr, {}, {"one_token_loss": "token"}, ref_otr),
    "gkd": (surrogates.gkd, {}, {"divergence": "token"}, ref_gkd),
    "minillm": (surrogates.minillm, {"eps": 0.3}, {"behavior_logp": "logp"}, ref_minillm),
    "sdpo": (surrogates.sdpo, {"alpha": 0.3, "cap": 1.1}, SDPO, ref_sdpo),
    "sdpo_taught": (
        surrogates.sdpo,
        {"alpha": 1.0, "cap": 1.1},
        {**SDPO, "has_teacher": HAS_TEACHER},
        ref_sdpo_taught,
    ),
    "sdpo_sampled": (
        surrogates.sdpo_sampled,
        {},
        {"teacher_token_logp": "token"},
        ref_sdpo_sampled,
    ),
    "srpo": (surrogates.srpo, {"cap": 1.1}, ROUTED, ref_srpo),
    "luffy": (surrogates.luffy_shaping, {}, GUIDED, guided(np.inf, np.inf, None, 0.1)),
    "ampo": (surrogates.ampo, {"dual_clip": 1.3}, GUIDED, guided(0.2, 0.2, 1.3, 0.1)),
    "chord": (surrogates.chord, {"eps_high": 0.3, "dual_clip": 1.3}, GUIDED, ref_chord),
    "icpo": (surrogates.icpo, {"gamma": 0.4, "eps_high": 0.3}, GUIDED, guided(0.2, 0.3, 3.0, 0.4)),
}
every = for_each("name", CASES)
MOVING = {"rover": ("logp",), "otr": ("one_token_loss",), "sdpo": ("student_logp",)} | {
    "gkd": ("divergence",),
    "sdpo_taught": ("student_logp",),
    "srpo": ("logp", "student_logp"),
}


def make(name, seed=0):
    rng = np.random.default_rng(seed)
    old = rng.normal(-1.5, 0.5, SHAPE)
    arrays = {"logp": old + rng.normal(0.05, 0.3, SHAPE), "old_logp": old}
    arrays["advantages"] = rng.normal(0, 1, (*SHAPE[:-1], 1)).repeat(SHAPE[-1], -1)
    for key, kind in CASES[name][2].items():
        if isinstance(kind, np.ndarray):
            arrays[key] = kind
        elif kind == "support":
            probs = rng.dirichlet(np.ones(SUPPORT + 2), SHAPE)[..., :SUPPORT]
            arrays[key] = np.log(probs)
        elif kind == "logp":
            arrays[key] = old + rng.normal(0.0, 0.3, SHAPE)
        elif kind == "rollout":
            arrays[key] = rng.integers(0, 2, SHAPE[:-1])
        else:
            arrays[key] = rng.uniform(0.1, 2.0, SHAPE)
    return {k: v if v.dtype == bool else v.astype(np.float32) for k, v in arrays.items()}


def call(name, arrays, mask=MASK, **changes):
    function, options, _, _ = CASES[name]
    rest = dict(arrays) | changes
    places = [rest.pop(k) for k in ("logp", "old_logp", "advantages")]
    return function(*places, mask, **rest, **options)


@functools.cache
def program(name):
    """Token losses, and gradients of their weighted sum by all that is floating point."""

    def loss(floats, fixed, mask, weights):
        tokens = call(name, floats | fixed, mask)
        return jnp.sum(weights * tokens), tokens

    return jax.jit(jax.grad(loss, has_aux=True))


def run(name, arrays, mask=MASK, weights=None):
    floats = {k: v for k, v in arrays.items() if v.dtype != bool}
    fixed = {k: v for k, v in arrays.items() if v.dtype == bool}
    weights = np.ones(SHAPE, np.float32) if weights is None else weights
    gradients, tokens = program(name)(floats, fixed, mask, weights)
    return np.asarray(tokens), {k: np.asarray(v) for k, v in gradients.items()}


@every
@for_each("seed", range(2))
def test_value_and_gradient_match_float64(name, seed):
    arrays = make(name, seed)
    weights = np.random.default_rng(seed + 10).uniform(0.5, 1.5, SHAPE).astype(np.float32)
    exact = {k: v if v.dtype == bool else v.astype(np.float64) for k, v in arrays.items()}
    reference = CASES[name][3]
    tokens, gradients = run(name, arrays, weights=weights)
    close(tokens, MASK * reference(exact, exact), rtol=2e-5, atol=2e-6)
    for key, gradient in gradients.items():
        if key not in MOVING.get(name, ("logp",)):
            assert not np.any(gradient), key
            continue
        expected = np.zeros(gradient.shape)
        for i in np.ndindex(expected.shape):
            ends = []
            for step in (1e-6, -1e-6):
                moved = exact[key].copy()
                moved[i] += step
                ends.append(np.sum(weights * MASK * reference({**exact, key: moved}, exact)))
            expected[i] = (ends[0] - ends[1]) / 2e-6
        close(gradient, expected, rtol=2e-4, atol=2e-5, err_msg=key)


@every
def test_masked_cells_are_never_read(name):
    arrays = make(name, 1)

    def dirty(x, junk):
        if x.dtype == bool:
            return x
        if x.shape == MASK.shape[:-1]:
            return np.where(MASK.any(-1), x, junk)
        return np.where(MASK[..., None] if x.ndim == 4 else MASK, x, junk)

    clean = run(name, arrays)
    assert np.all(clean[0][~MASK] == 0)
    for junk in np.float32([1e4, np.nan, np.inf, -np.inf]):
        found = run(name, {k: dirty(v, junk) for k, v in arrays.items()})
        jax.tree.map(equal, found, clean)
    tokens, gradients = run(name, arrays, np.zeros(SHAPE, bool))
    assert not np.any(tokens) and not any(map(np.any, gradients.values()))


@pytest.mark.of_many
@pytest.mark.parametrize("name", CASES)
def test_other_ways_to_call_it(name):
    """Eagerly, mapped, without an old policy and in bfloat16."""
    arrays = make(name, 2)
    tokens, _ = run(name, arrays)
    close(call(name, arrays), tokens, rtol=1e-5, atol=1e-7)
    mapped = jax.jit(jax.vmap(lambda a, m: call(name, a, m)))(arrays, MASK)
    close(mapped, tokens, rtol=1e-5, atol=1e-7)
    old = {"old_logp": "logp"} | (
        {"old_mean_log_probs": "mean_log_probs"} if name == "rover" else {}
    )
    none = dict.fromkeys(old)
    same, _ = run(name, arrays | {k: arrays[v] for k, v in old.items()})
    alone = jax.jit(lambda a: call(name, a, **none))(arrays)
    close(alone, same, rtol=1e-6)
    # Rounding must leave some mass to the tail.
    low = {k: v - 0.1 if v.ndim == 4 else v for k, v in arrays.items()}
    low = {k: v if v.dtype == bool else jnp.asarray(v, jnp.bfloat16) for k, v in low.items()}
    out = jax.jit(lambda a: call(name, a))(low)
    assert out.dtype == jnp.float32
    full = {k: v if v.dtype == bool else np.asarray(v, np.float32) for k, v in low.items()}
    close(out, run(name, full)[0], rtol=1e-6)


@every
def test_bad_arrays_are_named(name):
    called = CASES[name][0].__name__
    arrays = make(name)
    with pytest.raises(ValueError, match=rf"{called}: .*logp \(2, 3, 4\).*old_logp \(2, 3, 3\)"):
        call(name, arrays, old_logp=arrays["old_logp"][..., :3])
    with pytest.raises(TypeError, match=f"{called}: mask must be a bool array.*None"):
        call(name, arrays, None)
    with pytest.raises(TypeError, match=f"{called}: advantages must be floating"):
        call(name, arrays, advantages=np.ones(SHAPE, int))
    for key in CASES[name][2]:
        with pytest.raises((ValueError, TypeError), match=f"{called}: .*{key}"):
            call(name, arrays, **{key: arrays[key][:1]})
        with pytest.raises(TypeError, match=f"{called}: .*{key} must be"):
            call(name, arrays, **{key: np.ones(arrays[key].shape, int)})


def test_marks():
    assert all(traits_of(case[0]).level == "token" for case in CASES.values())
    assert not any(traits_of(case[0]).policy_gradient for case in CASES.values())
    assert {name for name, case in CASES.items() if not traits_of(case[0]).has_ratio} == {"otr"}


def test_every_public_surrogate_with_an_objective_of_its_own_from_here_is_tested():
    here = ("valuation", "one_token", "distillation", "routing", "guided")
    public = {
        name
        for name in surrogates.__all__
        if (f := getattr(surrogates, name)).__module__.split(".")[-1] in here
        and list(inspect.signature(f).parameters)[:2] == ["logp", "old_logp"]
    }
    assert public == {case[0].__name__ for case in CASES.values()}
