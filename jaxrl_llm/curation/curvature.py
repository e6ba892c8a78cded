"""Tokens whose update would change the policy too much: CAPO's curvature of the last layer.

The logits are ``W h``, so the gradient of ``A log pi(a)`` with respect to W is ``A v h'`` with
``v = onehot(a) - pi``. The effect of a token follows from its last hidden state, its distribution
and its advantage.

- ``advantages``: ``[..., T]``, or ``[...]`` for one value per sequence.
- ``mask``: bool ``[..., T]``, True = keep; masked entries are not read.
- ``learning_rate``: lr, that of the step, not negative.
- ``fisher``: "sample" for the squared score of the sampled token, as released; "full" for its
  expectation, which is the KL divergence to second order.
- ``tau_h``, ``tau_f``: bounds of the change of the objective and of the policy, above 0.
- ``symmetric``: whether a step that lowers the objective by less than ``tau_h`` is allowed.
- A wrong dtype raises TypeError; shapes that do not match, and an option that is unknown, out of
  its range or without effect, raise ValueError.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking

__all__ = [
    "CapoMoments",
    "CapoScores",
    "CapoSums",
    "capo_adam",
    "capo_bounds",
    "capo_mask",
    "capo_scores",
    "capo_selection",
    "sum_pi_cubed",
]

Fisher = Literal["sample", "full"]

# Tokens whose matrices [top, D] are in memory together.
_AT_ONCE = 16


class CapoScores(NamedTuple):
    """Predicted effects of an update on one token alone, ``[..., T]`` float32.

    Attributes:
      objective: m_H, change of the objective to second order.
      policy: m_F, change of the policy: its KL divergence to second order, nats.
    """

    objective: Array
    policy: Array


class CapoMoments(NamedTuple):
    """Adam's state for the output matrix, in the direction of ascent.

    Attributes:
      mu: ``[V, D]``, first moment of the gradient of the objective (that of a loss, negated).
      nu: ``[V, D]``, second moment.
      count: int ``[]``, steps taken so far.
    """

    mu: Array
    nu: Array
    count: Array


class CapoSums(NamedTuple):
    """Sums of :func:`capo_adam` over the tokens of an update.

    Attributes:
      total: ``[V, D]``, sum of the gradients of the selected tokens.
      count: ``[V]``, number of selected tokens that have this token among their most likely.
    """

    total: Array
    count: Array


def _scores(advantages, lr, slope, spread, fisher) -> CapoScores:
    """From ``slope = v.u`` and ``spread = Var_pi(u)``, where u is what the step adds to logits."""
    squared = slope**2
    hessian = advantages * (squared - spread)
    # <g, G> = A v'(G h) = A v.u, whatever the optimizer.
    objective = lr * advantages * slope + 0.5 * lr**2 * hessian
    return CapoScores(objective, 0.5 * lr**2 * (squared if fisher == "sample" else spread))


def _sgd(advantages, lr, hidden_sq, p, powers, fisher) -> CapoScores:
    """Plain gradient ascent: u = A |h|^2 v, so four numbers of a token suffice."""
    sum_sq, sum_cubed = powers
    scale = advantages * hidden_sq
    norm = 1.0 - 2.0 * p + sum_sq  # |v|^2
    mean = p - sum_sq  # pi.v
    spread = p - 2.0 * p**2 + sum_cubed - mean**2  # Var_pi(v)
    return _scores(advantages, lr, scale * norm, scale**2 * jnp.maximum(spread, 0.0), fisher)


def capo_scores(
    hidden: Array,
    probs: Array,
    actions: Array,
    advantages: Array,
    mask: Array,
    *,
    learning_rate: float | Array,
    fisher: Fisher = "sample",
    moments: CapoMoments | None = None,
    support: Array | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> CapoScores:
    """Changes of the objective and of the policy by an update on each token alone.

        g = A v h',  v = onehot(a) - pi        gradient of the objective with respect to W
        G = g, or Adam's step with g as the gradient;  u = G h
        m_F = lr^2 / 2 (v.u)^2                 fisher="full":  lr^2 / 2 Var_pi(u)
        m_H = lr <g, G> + lr^2 / 2 A [(v.u)^2 - Var_pi(u)]

    With ``moments`` the step is Adam's, as if the token were the full batch; the moments do not
    change. Tokens are then processed one by one, since each has a matrix ``[K, D]``.

    Args:
      advantages, mask, learning_rate, fisher: See the module.
      hidden: ``[..., T, D]``, floating point, last hidden states, the input of the output matrix.
      probs: ``[..., T, K]``, floating point: the distribution, or its K most likely tokens.
      actions: int ``[..., T]``, index of the sampled token in ``probs``.
      moments: Adam's state for the output matrix; None for plain ascent.
      support: int ``[..., T, K]``, the tokens of ``probs``, with ``moments``; None for all.
      betas: Adam's decay rates; only with ``moments``.
      eps: Adam's epsilon; only with ``moments``.

    Returns:
      :class:`CapoScores`; 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> hidden, probs = jnp.array([[1.0, 2.0]]), jnp.array([[0.7, 0.2, 0.1]])
      >>> actions, mask = jnp.array([0]), jnp.ones(1, bool)
      >>> scores = jr.curation.capo_scores(
      ...     hidden, probs, actions, jnp.array([1.5]), mask, learning_rate=0.01)
      >>> scores.objective.round(4).tolist()
      [0.015...]

    References:
      CAPO (arXiv:2510.00819); the released trainer (stable-pg-llm), token level.
    """
    function = "capo_scores"
    checks.check_mask(function, mask)
    checks.check_float(function, hidden=hidden, probs=probs)
    checks.check_integer(function, actions=actions, support=support)
    checks.check_same_shape(function, actions=actions, mask=mask)
    shape = jnp.shape(mask)
    checks.check_shape(function, "hidden", hidden, (*shape, *jnp.shape(hidden)[-1:]))
    checks.check_shape(function, "probs", probs, (*shape, *jnp.shape(probs)[-1:]))
    checks.check_same_shape(function, probs=probs, support=support)
    checks.check_option(function, "fisher", fisher, ("sample", "full"))
    checks.check_non_negative(function, finite=True, learning_rate=learning_rate)
    if moments is None:
        changed = {
            "support": support is not None,
            "betas": betas != (0.9, 0.999),
            "eps": eps != 1e-8,
        }
        for name in (name for name, is_changed in changed.items() if is_changed):
            raise ValueError(f"{function}: {name} has no effect without moments; leave it out.")
    advantages = masking.spread(function, "advantages", advantages, mask)
    hidden = masking.zero_masked(hidden, mask[..., None])
    probs = masking.zero_masked(probs, mask[..., None])
    actions = jnp.where(mask, actions, 0)
    if moments is None:
        p = jnp.take_along_axis(probs, actions[..., None], axis=-1)[..., 0]
        powers = tuple(jnp.sum(probs**k, axis=-1) for k in (2, 3))
        scores = _sgd(advantages, learning_rate, jnp.sum(hidden**2, axis=-1), p, powers, fisher)
    else:
        tokens = probs.shape[-1]
        places = jnp.broadcast_to(jnp.arange(tokens), probs.shape) if support is None else support
        places = jnp.where(mask[..., None], places, 0)
        scores = jax.nn.one_hot(actions, tokens) - probs
        slope, spread = adam(hidden, probs, scores, advantages, places, moments, betas, eps)
        scores = _scores(advantages, learning_rate, slope, spread, fisher)
    return CapoScores(*(masking.zero_masked(x, mask) for x in scores))


def adam(hidden, probs, v, advantages, places, moments: CapoMoments, betas, eps, batch=None):
    """``v.u`` and ``Var_pi(u)`` of the Adam step of each token, ``batch`` of them at a time."""
    mu, nu = (jnp.asarray(x, jnp.float32) for x in moments[:2])
    count = jnp.asarray(moments.count, jnp.float32) + 1.0
    # 1 - beta^count, of which float32 would lose most digits where beta is close to 1.
    logs = (math.log(beta) if beta else -math.inf for beta in betas)
    first, second = (-jnp.expm1(count * log) for log in logs)

    def one(token):
        h, pi, score, advantage, rows = token
        gradient = advantage * score[:, None] * h
        m = betas[0] * mu[rows] + (1.0 - betas[0]) * gradient
        n = betas[1] * nu[rows] + (1.0 - betas[1]) * gradient**2
        u = (m / first / (jnp.sqrt(n / second) + eps)) @ h
        mean = jnp.sum(pi * u)
        return jnp.sum(score * u), jnp.sum(pi * u**2) - mean**2

    shape = jnp.shape(advantages)
    flat = [x.reshape(-1, *x.shape[len(shape) :]) for x in (hidden, probs, v, advantages, places)]
    slope, spread = jax.lax.map(one, tuple(flat), batch_size=batch)
    return slope.reshape(shape), spread.reshape(shape)


def capo_mask(
    scores: CapoScores, mask: Array, *, tau_h: float, tau_f: float, symmetric: bool = True
) -> Array:
    """The tokens whose step is small enough.

        keep = mask and m_F < tau_F and |m_H| < tau_H      symmetric
        keep = mask and m_F < tau_F and 0 <= m_H < tau_H   otherwise

    A token whose score is NaN is kept, so that the NaN appears in the loss.

    Args:
      mask, tau_h, tau_f, symmetric: See the module.
      scores: From :func:`capo_scores`.

    Returns:
      bool ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> scores = jr.curation.CapoScores(jnp.array([0.02, -0.005]), jnp.array([0.0, 0.0]))
      >>> jr.curation.capo_mask(scores, jnp.ones(2, bool), tau_h=0.01, tau_f=1e-4).tolist()
      [False, True]

    References:
      CAPO (arXiv:2510.00819); released with 0.01 and 1e-4 for GRPO, 5e-4 and 1e-3 for Dr. GRPO.
    """
    checks.check_mask("capo_mask", mask)
    checks.check_same_shape(
        "capo_mask", objective=scores.objective, policy=scores.policy, mask=mask
    )
    checks.check_positive("capo_mask", tau_h=tau_h, tau_f=tau_f)
    rise = scores.objective
    far = (jnp.abs(rise) >= tau_h) if symmetric else (rise < 0) | (rise >= tau_h)
    # A NaN compares as not too far: it stays, and is seen.
    return mask & ~(scores.policy >= tau_f) & ~far


@dataclasses.dataclass(frozen=True)
class _CapoAdam:
    """Made by :func:`capo_adam`."""

    tau_h: float
    tau_f: float
    symmetric: bool
    learning_rate: float | None
    top: int
    betas: tuple[float, float]
    eps: float

    @property
    def reads_rate(self) -> bool:
        return self.learning_rate is None

    def init(self, vocab_size: int, width: int) -> CapoMoments:
        zeros = jnp.zeros((vocab_size, width), jnp.float32)
        return CapoMoments(zeros, jnp.zeros_like(zeros), jnp.zeros((), jnp.int32))

    def zeros(self, vocab_size: int, width: int) -> CapoSums:
        return CapoSums(jnp.zeros((vocab_size, width), jnp.float32), jnp.zeros(vocab_size))

    def __call__(self, state, hidden, logits, targets, *, advantages, mask, learning_rate=None):
        rate = learning_rate if self.learning_rate is None else self.learning_rate
        hidden = masking.zero_masked(hidden.astype(jnp.float32), mask[..., None])
        advantages = masking.zero_masked(advantages, mask)
        top, places = jax.lax.top_k(logits, min(self.top, logits.shape[-1]))
        probs = masking.zero_masked(jax.nn.softmax(top.astype(jnp.float32)), mask[..., None])
        v = (places == targets[..., None]) - probs
        slope, spread = adam(
            hidden, probs, v, advantages, places, state, self.betas, self.eps, batch=_AT_ONCE
        )
        changes = _scores(advantages, rate, slope, spread, "sample")
        scores = CapoScores(*(masking.zero_masked(x, mask) for x in changes))
        keep = capo_mask(scores, mask, tau_h=self.tau_h, tau_f=self.tau_f, symmetric=self.symmetric)
        row = jnp.arange(len(targets))[:, None]
        weights = jnp.zeros(logits.shape, jnp.float32)
        weights = weights.at[row, places].add((keep * advantages)[:, None] * v)
        total = jnp.einsum("nv,nd->vd", weights, hidden, precision=jax.lax.Precision.HIGHEST)
        count = jnp.zeros(logits.shape[-1]).at[places].add(keep[:, None].astype(jnp.float32))
        return jnp.stack(scores, axis=-1), CapoSums(total, count)

    def learn(self, state: CapoMoments, sums: CapoSums) -> CapoMoments:
        seen = (sums.count > 0)[:, None]
        mean = sums.total / jnp.maximum(sums.count, 1.0)[:, None]

        def moved(old, new, beta):
            return jnp.where(seen, beta * old + (1.0 - beta) * new, old)

        mu = moved(state.mu, mean, self.betas[0])
        return CapoMoments(mu, moved(state.nu, mean**2, self.betas[1]), state.count + 1)


def capo_adam(
    *,
    tau_h: float = 0.01,
    tau_f: float = 1e-4,
    symmetric: bool = True,
    learning_rate: float | None = None,
    top: int = 50,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> _CapoAdam:
    """CAPO's curvature along the step of an Adam model of the optimizer, for a recipe.

        m_H, m_F   as in capo_scores, on the ``top`` most likely tokens, at the rate of the step
        g_j        mean of A v_j h over the tokens left that have j among their most likely ones
        mu_j       b1 mu_j + (1 - b1) g_j,   nu_j  b2 nu_j + (1 - b2) g_j^2;   j of no token stays

    The moments are of the gradient of the last layer alone, with terms ``A v h`` per token. They
    are not those of the run's optimizer, which may be another one or train an adapter.

    Args:
      tau_h, tau_f, symmetric: See the module; tokens out of bounds are not in the means.
      learning_rate: That of the scores; None for the learning rate of the update.
      top: Number of most likely tokens to which a distribution is cut.
      betas: Adam's decay rates.
      eps: Adam's epsilon.

    Returns:
      A rule for ``Computed(name, rule, "optimizer")``: its array ``[..., 2]`` holds m_H and m_F.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rule = jr.curation.capo_adam(learning_rate=0.01, tau_h=1.0, tau_f=1.0)
      >>> state = rule.init(3, 2)
      >>> effects, sums = rule(
      ...     state, jnp.ones((1, 2)), jnp.zeros((1, 3)), jnp.array([0]),
      ...     advantages=jnp.ones(1), mask=jnp.ones(1, bool))
      >>> (1000 * rule.learn(state, sums).mu).round().tolist()
      [[67.0, 67.0], [-33.0, -33.0], [-33.0, -33.0]]

    References:
      CAPO (arXiv:2510.00819), and its released trainer in the recipe of its main result. Before the
      first update, at a rate of 0, that trainer takes plain ascent.
    """
    function = "capo_adam"
    checks.check_positive(function, finite=True, tau_h=tau_h, tau_f=tau_f, eps=eps)
    checks.check_non_negative(function, finite=True, learning_rate=learning_rate)
    checks.check_count(function, top=top)
    for beta in betas:
        checks.check_share(function, betas=beta)
    return _CapoAdam(tau_h, tau_f, symmetric, learning_rate, top, tuple(betas), eps)


def capo_bounds(
    advantages: Array,
    mask: Array,
    *,
    step_effects: Array,
    tau_h: float = 0.01,
    tau_f: float = 1e-4,
    symmetric: bool = True,
) -> Array:
    """CAPO as the selection of a recipe that computes the effects of each token's step.

    Args:
      advantages: Not read.
      mask, tau_h, tau_f, symmetric: As in :func:`capo_mask`.
      step_effects: ``[..., T, 2]``: m_H and m_F, such as the result of :func:`capo_adam`.

    Returns:
      bool ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> effects = jnp.array([[[0.02, 0.0], [0.005, 0.0]]])
      >>> mask = jnp.ones((1, 2), bool)
      >>> jr.curation.capo_bounds(jnp.ones(1), mask, step_effects=effects).tolist()
      [[False, True]]

    References:
      CAPO (arXiv:2510.00819).
    """
    del advantages
    checks.check_shape("capo_bounds", "step_effects", step_effects, (*jnp.shape(mask), 2))
    scores = CapoScores(step_effects[..., 0], step_effects[..., 1])
    return capo_mask(scores, mask, tau_h=tau_h, tau_f=tau_f, symmetric=symmetric)


def capo_selection(
    advantages: Array,
    mask: Array,
    *,
    old_logp: Array,
    sum_pi_sq: Array,
    sum_pi_cubed: Array,
    hidden_sq: float | Array,
    learning_rate: float | Array,
    tau_h: float = 0.01,
    tau_f: float = 1e-4,
    symmetric: bool = True,
    fisher: Fisher = "sample",
) -> Array:
    """CAPO as the selection of a recipe: plain gradient ascent, from four numbers per token.

        |v|^2 = 1 - 2 p + sum pi^2,   Var_pi(v) = p - 2 p^2 + sum pi^3 - (p - sum pi^2)^2
        u = A |h|^2 v,  and m_F, m_H and the mask as in capo_scores and capo_mask

    Args:
      advantages, mask, learning_rate, tau_h, tau_f, symmetric, fisher: See the module.
      old_logp: ``[..., G, T]``, nats: log p of the sampled token.
      sum_pi_sq: ``[..., G, T]``, sum of the squared probabilities of the vocabulary.
      sum_pi_cubed: ``[..., G, T]``, sum of their cubes; see :func:`sum_pi_cubed`.
      hidden_sq: ``[..., G, T]``, squared norm of the last hidden state over the temperature; or a
        number for all. A model that ends with an RMS norm has about its width, times the squared
        scale, over the squared temperature.

    Returns:
      bool ``[..., G, T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, logp = jnp.ones((2, 1), bool), jnp.log(jnp.full((2, 1), 0.7))
      >>> jr.curation.capo_selection(
      ...     jnp.array([1.5, 0.1]), mask, old_logp=logp, sum_pi_sq=jnp.full((2, 1), 0.54),
      ...     sum_pi_cubed=jnp.full((2, 1), 0.352), hidden_sq=5.0, learning_rate=0.01).tolist()
      [[False], [True]]

    References:
      CAPO (arXiv:2510.00819). The reduction of its plain-ascent scores to these sums is ours.
    """
    function = "capo_selection"
    checks.check_min_rank(function, 1, sum_pi_sq=sum_pi_sq, sum_pi_cubed=sum_pi_cubed)
    checks.check_min_rank(function, 1, old_logp=old_logp)
    masking.check_tokens(
        function, mask, old_logp=old_logp, sum_pi_sq=sum_pi_sq, sum_pi_cubed=sum_pi_cubed
    )
    checks.check_option(function, "fisher", fisher, ("sample", "full"))
    checks.check_non_negative(
        function, finite=True, learning_rate=learning_rate, hidden_sq=hidden_sq
    )
    if jnp.ndim(hidden_sq) > 0:
        checks.check_same_shape(function, hidden_sq=hidden_sq, mask=mask)
        hidden_sq = masking.zero_masked(hidden_sq, mask)
    values = masking.spread(function, "advantages", advantages, mask)
    p = jnp.exp(masking.zero_masked(old_logp, mask))
    sums = (masking.zero_masked(x, mask) for x in (sum_pi_sq, sum_pi_cubed))
    scores = _sgd(values, jnp.max(jnp.asarray(learning_rate)), hidden_sq, p, sums, fisher)
    return capo_mask(scores, mask, tau_h=tau_h, tau_f=tau_f, symmetric=symmetric)


def sum_pi_cubed(logits: Array, targets: Array) -> Array:
    """Sum of the cubed probabilities of the vocabulary, for :func:`capo_selection`.

        sum_j softmax(logits)_j^3

    Args:
      logits: ``[..., V]``, floating point.
      targets: Not read; the sampled tokens that a recipe passes.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> float(jr.curation.sum_pi_cubed(jnp.zeros(4), jnp.int32(0)))
      0.0625

    References:
      CAPO (arXiv:2510.00819); the reduction to this sum is ours.
    """
    del targets
    checks.check_float("sum_pi_cubed", logits=logits)
    return jnp.sum(jax.nn.softmax(jnp.asarray(logits, jnp.float32), axis=-1) ** 3, axis=-1)
