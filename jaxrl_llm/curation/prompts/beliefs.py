"""Beliefs about the success rate of every prompt of the dataset, as Beta distributions.

The state is two arrays over the N prompts, part of the train state. The counts include the prior: a
prompt without rollouts has ``alpha, beta = prior``. Prompt ids are integers in [0, N); a row with
another id changes nothing. Any NamedTuple with fields ``alpha`` and ``beta`` serves as state, such
as ``advantages.BetaTracker``.

Every function raises TypeError for an array of the wrong dtype, and ValueError for shapes that do
not match or an option out of its range.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, stats

__all__ = [
    "PromptBelief",
    "belief_init",
    "belief_mean",
    "belief_update",
    "beta_bernoulli_information",
    "thompson_rates",
    "variance_reduction",
]


class PromptBelief(NamedTuple):
    """Pseudo-counts of success and failure of each prompt, including the prior.

    Attributes:
      alpha: ``[N]`` float32, of success, above 0.
      beta: ``[N]`` float32, of failure, above 0.
    """

    alpha: Array
    beta: Array


def belief_init(
    num_prompts: int,
    *,
    prior: tuple[float, float] = (1.0, 1.0),
    successes: Array | None = None,
    samples: Array | None = None,
    weight: float = 1.0,
) -> PromptBelief:
    """The belief before training: a prior, and the outcomes of earlier rollouts.

        alpha = prior_a + weight successes,   beta = prior_b + weight (samples - successes)

    Args:
      num_prompts: N.
      prior: Pseudo-counts of success and failure, each above 0. (1, 1) is the uniform prior.
      successes: ``[N]``, sum of the rewards (in [0, 1]) of earlier rollouts; None for none.
      samples: ``[N]``, the number of earlier rollouts; required with ``successes``.
      weight: Pseudo-count of an earlier rollout, not negative. MoPPS uses 3.

    Returns:
      :class:`PromptBelief`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> state = jr.curation.belief_init(
      ...     2, successes=jnp.array([2.0, 0.0]), samples=jnp.array([4, 0]), weight=3.0)
      >>> state.alpha.tolist(), state.beta.tolist()
      ([7.0, 1.0], [7.0, 1.0])

    References:
      MoPPS (arXiv:2507.04632), and its released code, for the start from earlier rollouts.
    """
    name = "belief_init"
    checks.check_count(name, num_prompts=num_prompts)
    _check_prior(name, prior, zero=False)
    checks.check_non_negative(name, finite=True, weight=weight)
    if (successes is None) != (samples is None):
        raise ValueError(f"{name}: successes and samples are required together.")
    alpha, beta = (jnp.full(num_prompts, x, jnp.float32) for x in prior)
    if successes is not None and samples is not None:
        checks.check_shape(name, "successes", successes, (num_prompts,))
        checks.check_shape(name, "samples", samples, (num_prompts,))
        successes, samples = (jnp.asarray(x, jnp.float32) for x in (successes, samples))
        alpha, beta = alpha + weight * successes, beta + weight * (samples - successes)
    return PromptBelief(alpha, beta)


def belief_update(
    state: PromptBelief,
    prompt_ids: Array,
    rewards: Array,
    *,
    retain: float | Array = 1.0,
    retain_rest: float = 1.0,
    prior: tuple[float, float] = (1.0, 1.0),
    where: Array | None = None,
) -> PromptBelief:
    """The belief after a batch: counts of visited prompts decay and grow; others may decay too.

        visited:   alpha <- retain alpha + (1 - retain) prior_a + sum(r)
                   beta  <- retain beta  + (1 - retain) prior_b + sum(1 - r)
        the rest:  the same with retain_rest, and nothing to count

    The decay is toward the prior. MoPPS and InSight leave the rest unchanged. VADE decays at two
    rates, ``retain=0.2, retain_rest=0.999``; it stores its counts without the prior of (1, 1),
    which is the same recursion. ``prior=(0, 0)`` decays toward 0, as the tracker of SPO does.

    Args:
      state: :class:`PromptBelief` over N prompts.
      prompt_ids: integer ``[P]``. A prompt with several rows decays once, by the mean of their
        ``retain``, and counts all of them.
      rewards: ``[P, G]``, floating point, each in [0, 1]; a fraction counts as both in part.
      retain: Share of the past counts that remains, in [0, 1]: a number, or ``[P]``.
      retain_rest: The same for prompts that are not in the batch.
      prior: Pseudo-counts that the decay leads to, not negative.
      where: bool ``[P, G]``, True for rollouts that take part; the rest may hold anything. A row
        without one is no visit.

    Returns:
      The next state, of the type of ``state``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> state = jr.curation.PromptBelief(jnp.array([3.0, 3.0]), jnp.array([5.0, 5.0]))
      >>> rewards = jnp.array([[1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
      >>> state = jr.curation.belief_update(state, jnp.array([1]), rewards, retain=0.5)
      >>> state.alpha.tolist(), state.beta.tolist()
      ([3.0, 4.0], [5.0, 9.0])

    References:
      MoPPS (arXiv:2507.04632), and its released code, where a misplaced conditional sets a prompt
      with one rollout to 8. InSight (arXiv:2603.01907), equation 6. VADE (arXiv:2511.18902), PAPER
      reading.
    """
    name = "belief_update"
    checks.check_rank(name, 2, rewards=rewards)
    stats.check_group(name, rewards, where)
    checks.check_integer(name, prompt_ids=prompt_ids)
    checks.check_shape(name, "prompt_ids", prompt_ids, jnp.shape(rewards)[:1])
    if jnp.ndim(retain):
        checks.check_shape(name, "retain", retain, jnp.shape(prompt_ids))
    checks.check_share(name, retain=retain, retain_rest=retain_rest)
    _check_prior(name, prior, zero=True)
    count = stats.group_count(rewards, where)[:, 0]
    success = masking.masked_sum(rewards, where, axis=-1)
    size = state.alpha.shape[0]
    # A scatter drops what is written at `size`.
    row = jnp.where((count > 0) & (prompt_ids >= 0), prompt_ids, size)

    def added(x: Array) -> Array:
        return jnp.zeros(size, jnp.float32).at[row].add(x, mode="drop")

    visits = added(jnp.ones_like(count))
    share = added(jnp.broadcast_to(jnp.asarray(retain, jnp.float32), count.shape))
    share = jnp.where(visits > 0, share / jnp.maximum(visits, 1.0), retain_rest)
    return state._replace(
        alpha=share * state.alpha + (1.0 - share) * prior[0] + added(success),
        beta=share * state.beta + (1.0 - share) * prior[1] + added(count - success),
    )


def belief_mean(state: PromptBelief) -> Array:
    """The expected success rate of every prompt.

        alpha / (alpha + beta)

    Args:
      state: :class:`PromptBelief`.

    Returns:
      ``[N]`` float32, in [0, 1]; 1/2 where both counts are 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> state = jr.curation.PromptBelief(jnp.array([3.0]), jnp.array([1.0]))
      >>> jr.curation.belief_mean(state).tolist()
      [0.75]

    References:
      InSight (arXiv:2603.01907) ranks by this rate, since a random draw adds noise to the order.
    """
    checks.check_float("belief_mean", alpha=state.alpha, beta=state.beta)
    alpha, beta = (jnp.asarray(x, jnp.float32) for x in (state.alpha, state.beta))
    total = alpha + beta
    return jnp.where(total > 0, alpha / jnp.where(total > 0, total, 1.0), 0.5)


def thompson_rates(key: Array, state: PromptBelief, prompt_ids: Array | None = None) -> Array:
    """A success rate drawn for each prompt from its belief.

        p_i ~ Beta(alpha_i, beta_i)

    Thompson sampling: the draws of prompts with few outcomes spread widely, so that such prompts
    are selected now and then. On a CPU 16,000 draws take milliseconds and a million take a quarter
    of a second; :func:`candidate_pool` limits the draw to some prompts, as the papers do.

    Args:
      key: Typed PRNG key.
      state: :class:`PromptBelief` over N prompts.
      prompt_ids: integer ``[M]``, the candidates; None for all prompts.

    Returns:
      ``[M]``, or ``[N]``, float32 in [0, 1]; NaN for an id outside [0, N).

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> state = jr.curation.PromptBelief(jnp.array([900.0, 1.0]), jnp.array([100.0, 1.0]))
      >>> rates = jr.curation.thompson_rates(jax.random.key(0), state)
      >>> bool(abs(rates[0] - 0.9) < 0.05), rates.shape
      (True, (2,))

    References:
      VADE (arXiv:2511.18902) and MoPPS (arXiv:2507.04632). Marsaglia and Tsang (2000) for the
      gamma variates, all elements at once.
    """
    name = "thompson_rates"
    checks.check_rank(name, 1, alpha=state.alpha, beta=state.beta)
    checks.check_float(name, alpha=state.alpha, beta=state.beta)
    alpha, beta = (jnp.asarray(x, jnp.float32) for x in (state.alpha, state.beta))
    if prompt_ids is not None:
        checks.check_rank(name, 1, prompt_ids=prompt_ids)
        checks.check_integer(name, prompt_ids=prompt_ids)
        known = (prompt_ids >= 0) & (prompt_ids < alpha.shape[0])
        at = jnp.where(known, prompt_ids, 0)
        alpha, beta = (jnp.where(known, x[at], jnp.nan) for x in (alpha, beta))
    log_x, log_y = log_gamma_variates(key, jnp.stack([alpha, beta]))
    return jnp.where(jnp.isnan(alpha + beta), jnp.nan, jax.nn.sigmoid(log_x - log_y))


def log_gamma_variates(key: Array, shape: Array) -> Array:
    """Logarithms of Gamma(shape, 1) variates: proposals for all elements until each has one.

    jax.random.gamma loops over elements one by one, which takes 13 times as long on a CPU.
    """
    # Below 1 the variate is that of shape + 1 times U^(1/shape).
    small = ~(shape >= 1.0)
    d = jnp.where(small, shape + 1.0, shape) - 1.0 / 3.0
    c = 1.0 / jnp.sqrt(9.0 * d)
    boost_key, loop_key = jax.random.split(key)

    def propose(carry):
        step, log_v, accepted = carry
        normal_key, uniform_key = jax.random.split(jax.random.fold_in(loop_key, step))
        x = jax.random.normal(normal_key, shape.shape)
        v = (1.0 + c * x) ** 3
        log_u = jnp.log1p(-jax.random.uniform(uniform_key, shape.shape))
        positive = jnp.where(v > 0, v, 1.0)
        good = (v > 0) & (log_u < 0.5 * x**2 + d * (1.0 - positive + jnp.log(positive)))
        log_v = jnp.where(good & ~accepted, jnp.log(positive), log_v)
        return step + 1, log_v, accepted | good

    # A NaN, or a shape of 0 or less, is never accepted: one of no effect stands in.
    sound = (shape > 0) & jnp.isfinite(shape)
    d, c = jnp.where(sound, d, 1.0), jnp.where(sound, c, 1.0 / 3.0)
    start = (0, jnp.zeros_like(shape), ~sound)
    _, log_v, _ = jax.lax.while_loop(lambda s: ~jnp.all(s[2]), propose, start)
    log_u = jnp.log1p(-jax.random.uniform(boost_key, shape.shape))
    log_boost = jnp.where(small, log_u / jnp.where(sound, shape, 1.0), 0.0)
    # Shape 0 is a variate of 0.
    return jnp.where(sound, jnp.log(d) + log_v + log_boost, -jnp.inf)


def beta_bernoulli_information(alpha: Array, beta: Array, *, rollouts: int) -> Array:
    """The information that the next rollouts of a prompt carry about its success rate, in nats.

        I(S; Phi) = sum over s = 0 .. K of P(S = s) KL( Beta(alpha + s, beta + K - s)
                                                        || Beta(alpha, beta) )
        P(S = s) = C(K, s) B(alpha + s, beta + K - s) / B(alpha, beta)

    The mutual information between the number S of right answers among K rollouts and the rate Phi,
    which is Beta(alpha, beta). For large counts it falls as K / (2 (alpha + beta)); logarithms of
    Beta functions, whose rounding would exceed it there, are never subtracted.

    Args:
      alpha: ``[...]``, floating point, above 0.
      beta: ``[...]``, of the same shape, above 0.
      rollouts: K, 1 or more.

    Returns:
      ``[...]`` float32, 0 or more.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> counts = jnp.array([1.0, 5.0, 50.0])
      >>> jr.curation.beta_bernoulli_information(counts, counts, rollouts=8).round(2)
      Array([0.77, 0.29, 0.04], dtype=float32)

    References:
      InSight (arXiv:2603.01907), equations 10 to 13, with entropies in place of the divergence.
    """
    name = "beta_bernoulli_information"
    alpha, beta = _counts(name, alpha, beta, rollouts)
    steps = jnp.arange(rollouts, dtype=jnp.float32)
    total = alpha + beta

    def rising(x: Array) -> tuple[Array, Array]:
        """For s = 0 .. K: log of x (x + 1) .. (x + s - 1), and s psi(x + s) less that."""
        each = x[..., None] + steps
        log_rising = _from_zero(jnp.log(each))
        # Sum over j < s of log((x + s) / (x + j)), as a sum of small terms.
        spread = _from_zero((steps + 1.0) * jnp.log1p(1.0 / each))
        counts = jnp.arange(rollouts + 1, dtype=jnp.float32)
        last = x[..., None] + counts
        # digamma(last) - log(last), without the cancellation for large ones.
        near, y = jnp.minimum(last, 6.0), 1.0 / jnp.maximum(last, 6.0)
        series = -y * (0.5 + y * (1 / 12 - y**2 * (1 / 120 - y**2 / 252)))
        plain = jax.scipy.special.digamma(near) - jnp.log(near)
        return log_rising, spread + counts * jnp.where(last < 6.0, plain, series)

    (log_a, gain_a), (log_b, gain_b), (log_m, gain_m) = map(rising, (alpha, beta, total))
    log_b, gain_b = log_b[..., ::-1], gain_b[..., ::-1]
    ways = jnp.log(jnp.array([math.comb(rollouts, s) for s in range(rollouts + 1)], jnp.float32))
    prob = jnp.exp(ways + log_a + log_b - log_m[..., -1:])
    divergence = gain_a + gain_b - gain_m[..., -1:]
    return jnp.maximum(jnp.sum(prob * divergence, axis=-1), 0.0)


def _from_zero(x: Array) -> Array:
    """Sums of the first 0, 1, .., K entries of the last axis."""
    total = jnp.cumsum(x, axis=-1)
    return jnp.concatenate([jnp.zeros_like(total[..., :1]), total], axis=-1)


def variance_reduction(alpha: Array, beta: Array, *, rollouts: int) -> Array:
    """The expected decrease of the variance of a success rate by the next rollouts.

        m (1 - m) K / ((n + 1) (n + K)),   n = alpha + beta,  m = alpha / n

    A factor of difficulty times a factor of evidence: a cheap substitute for
    :func:`beta_bernoulli_information`.

    Args:
      alpha: ``[...]``, floating point, above 0.
      beta: ``[...]``, of the same shape, above 0.
      rollouts: K, 1 or more.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> one = jnp.ones(1)
      >>> jr.curation.variance_reduction(one, one, rollouts=8).round(6)
      Array([0.066667], dtype=float32)

    References:
      InSight (arXiv:2603.01907), equation 8 for K = 1; other K are ours.
    """
    alpha, beta = _counts("variance_reduction", alpha, beta, rollouts)
    total = alpha + beta
    mean = alpha / total
    return mean * (1.0 - mean) * rollouts / ((total + 1.0) * (total + rollouts))


def _counts(function: str, alpha: Array, beta: Array, rollouts: int) -> tuple[Array, Array]:
    checks.check_min_rank(function, 0, alpha=alpha, beta=beta)
    checks.check_float(function, alpha=alpha, beta=beta)
    checks.check_same_shape(function, alpha=alpha, beta=beta)
    checks.check_count(function, rollouts=rollouts)
    return jnp.asarray(alpha, jnp.float32), jnp.asarray(beta, jnp.float32)


def _check_prior(function: str, prior: tuple[float, float], *, zero: bool) -> None:
    if not isinstance(prior, tuple) or len(prior) != 2:
        raise ValueError(f"{function}: prior must be a pair (alpha, beta); got {prior!r}.")
    check = checks.check_non_negative if zero else checks.check_positive
    check(function, finite=True, **{"prior[0]": prior[0], "prior[1]": prior[1]})
