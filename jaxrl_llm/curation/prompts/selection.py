"""Selection of the next prompts: scores of success rates, and draws by score or weight.

``rates`` ``[...]``, floating point, are success rates in [0, 1]: expected (:func:`belief_mean`),
drawn (:func:`thompson_rates`), tracked or predicted. A score is one number per prompt; larger is
better. A selection takes scores, weights or logits ``[N]`` and returns ``count`` prompt ids, int32
``[count]``, each at most once, with -1 at the end if there are fewer prompts. ``where`` (bool
``[N]``, True = may be selected) excludes prompts, and so does a NaN; excluded entries may hold
anything.

Every function raises TypeError for an array of the wrong dtype, and ValueError for shapes that do
not match or an option out of its range.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks
from jaxrl_llm.curation.prompts.beliefs import (
    PromptBelief,
    belief_mean,
    beta_bernoulli_information,
    variance_reduction,
)

__all__ = [
    "candidate_pool",
    "draw_prompts",
    "gumbel_top",
    "insight_scores",
    "learnability",
    "nearest_target",
    "select_top",
    "target_logits",
    "vade_information_gain",
    "within_band",
]


def learnability(rates: Array, *, power: float = 1.0) -> Array:
    """The variance of one outcome: largest for a success rate of 1/2.

        (p (1 - p))^power

    Args:
      rates: See the module.
      power: Above 0; a larger power prefers rates nearer to 1/2.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.learnability(jnp.array([0.0, 0.25, 0.5, 1.0])).tolist()
      [0.0, 0.1875, 0.25, 0.0]

    References:
      ABSTRACT reading: our form of a baseline that VADE, MoPPS and DOTS are compared with.
    """
    rates = _rates("learnability", rates)
    checks.check_positive("learnability", finite=True, power=power)
    return jnp.maximum(rates * (1.0 - rates), 0.0) ** power


def vade_information_gain(rates: Array) -> Array:
    """The value of a rollout by the success rate, with a preference for hard prompts.

        p (1 - p)^2         greatest at p = 1/3

    VADE selects the prompts with the largest gain at a rate drawn by :func:`thompson_rates`.

    Args:
      rates: See the module.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.vade_information_gain(jnp.array([0.0, 0.5])).tolist()
      [0.0, 0.125]

    References:
      VADE (arXiv:2511.18902). PAPER reading, of the project page.
    """
    rates = _rates("vade_information_gain", rates)
    return rates * (1.0 - rates) ** 2


def nearest_target(rates: Array, *, target: float = 0.5) -> Array:
    """Scores by the distance from a target rate.

        -(p - target)^2

    MoPPS selects the prompts nearest to the target at a rate drawn by :func:`thompson_rates`.

    Args:
      rates: See the module.
      target: Target rate, in [0, 1].

    Returns:
      ``[...]`` float32, 0 or less.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.nearest_target(jnp.array([0.5, 0.25])).tolist()
      [-0.0, -0.0625]

    References:
      MoPPS (arXiv:2507.04632), and its released code.
    """
    rates = _rates("nearest_target", rates)
    checks.check_share("nearest_target", target=target)
    return -((rates - target) ** 2)


def within_band(key: Array, rates: Array, *, low: float, high: float) -> Array:
    """Prompts within a band of rates in random order, then the others by distance from the band.

        u,  uniform in [0, 1)                  where low <= p <= high
        -max(low - p, p - high)                elsewhere

    Args:
      key: Typed PRNG key.
      rates: See the module.
      low: Smallest rate of the band, in [0, 1].
      high: Largest rate of the band, not below ``low``, in [0, 1].

    Returns:
      Scores ``[...]`` float32.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rates = jnp.array([0.1, 0.5, 0.9])
      >>> scores = jr.curation.within_band(jax.random.key(0), rates, low=0.25, high=0.75)
      >>> jr.curation.select_top(scores, count=1).tolist(), scores[0].round(3)
      ([1], Array(-0.15, dtype=float32))

    References:
      MoPPS (arXiv:2507.04632), "threshold" of its released code.
    """
    rates = _rates("within_band", rates)
    checks.check_share("within_band", low=low, high=high)
    if low > high:
        raise ValueError(f"within_band: low must not be above high; got {low:g} and {high:g}.")
    outside = jnp.maximum(low - rates, rates - high)
    # A NaN rate is in no band.
    return jnp.where(outside <= 0, jax.random.uniform(key, rates.shape), -outside)


def insight_scores(
    state: PromptBelief,
    *,
    rollouts: int,
    target: float = 0.3,
    sharpness: float = 3.0,
    information: Literal["mutual", "variance"] = "mutual",
) -> Array:
    """A weight of the expected difficulty times the information of the next rollouts.

        w(m) I(S; Phi),   w(m) = m (1 - m) exp(-sharpness (m - target)^2)
        m = alpha / (alpha + beta)

    I is :func:`beta_bernoulli_information` or :func:`variance_reduction`, so that a prompt with
    much evidence is no longer selected, whatever its difficulty. With ``retain_rest=1`` a batch
    changes the scores of its own prompts only.

    Args:
      state: :class:`PromptBelief` with arrays ``[...]``.
      rollouts: K, the rollouts a prompt will get, 1 or more.
      target: mu, the preferred rate, in [0, 1].
      sharpness: eta, not negative; 0 prefers only rates near 1/2.
      information: "mutual", or "variance" for the cheaper approximation.

    Returns:
      ``[...]`` float32, 0 or more.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> counts = jnp.array([1.0, 50.0])
      >>> state = jr.curation.PromptBelief(counts, counts)
      >>> jr.curation.insight_scores(state, rollouts=8).round(4)
      Array([0.1699, 0.0085], dtype=float32)

    References:
      InSight (arXiv:2603.01907), equations 15 and 16, PAPER reading: the prompts with the
      largest scores among 16 times as many candidates. Its appendix prints mu = 3.0 where the
      tables have 0.3; "variance" in place of the information is ours.
    """
    name = "insight_scores"
    checks.check_share(name, target=target)
    checks.check_non_negative(name, finite=True, sharpness=sharpness)
    checks.check_option(name, "information", information, ("mutual", "variance"))
    gain = beta_bernoulli_information if information == "mutual" else variance_reduction
    mean = belief_mean(state)
    weight = mean * (1.0 - mean) * jnp.exp(-sharpness * (mean - target) ** 2)
    return weight * gain(state.alpha, state.beta, rollouts=rollouts)


def target_logits(rates: Array, *, target: float = 0.5, temperature: float = 1e-3) -> Array:
    """Logits of a draw that prefers prompts near a target rate.

        -|p - target| / temperature

    Args:
      rates: See the module; a prediction may leave [0, 1].
      target: The preferred rate.
      temperature: Above 0. 0.001 almost sorts by the distance.

    Returns:
      ``[...]`` float32, 0 or less, for :func:`gumbel_top`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logits = jr.curation.target_logits(jnp.array([0.5, 0.499, 0.6]))
      >>> [round(x, 3) for x in jax.nn.softmax(logits).tolist()]
      [0.731, 0.269, 0.0]

    References:
      DOTS (arXiv:2506.05316), and its released code.
    """
    rates = _rates("target_logits", rates)
    checks.check_positive("target_logits", finite=True, temperature=temperature)
    return -jnp.abs(rates - target) / temperature


def select_top(scores: Array, *, count: int, where: Array | None = None) -> Array:
    """The prompts with the largest scores, best first; ties go to the first.

    Args:
      scores: ``[N]``, floating point; -inf is never selected.
      count: How many, from 1 to N.
      where: See the module.

    Returns:
      Prompt ids, int32 ``[count]``; see the module.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> scores, where = jnp.array([0.1, 0.9, 0.5]), jnp.array([True, False, True])
      >>> jr.curation.select_top(scores, count=3, where=where).tolist()
      [2, 0, -1]

    References:
      VADE (arXiv:2511.18902), MoPPS (arXiv:2507.04632), InSight (arXiv:2603.01907).
    """
    scores = _pool("select_top", "scores", scores, count, where)
    best, ids = jax.lax.top_k(scores, count)
    return jnp.where(best > -jnp.inf, ids, -1).astype(jnp.int32)


def gumbel_top(key: Array, logits: Array, *, count: int, where: Array | None = None) -> Array:
    """Draws prompts without replacement, each time with probability softmax(logits) of the rest.

        the count greatest of  logits + g,   g independent Gumbel noise

    Args:
      key: Typed PRNG key.
      logits: ``[N]``, floating point; -inf is never drawn.
      count: How many, from 1 to N.
      where: See the module.

    Returns:
      Prompt ids in the order of the draw, int32 ``[count]``; see the module.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logits = jnp.array([0.0, -jnp.inf, 50.0])
      >>> jr.curation.gumbel_top(jax.random.key(0), logits, count=3).tolist()
      [2, 0, -1]

    References:
      Kool et al. (arXiv:1903.06059) for the identity. DOTS (arXiv:2506.05316) draws this way.
    """
    logits = _pool("gumbel_top", "logits", logits, count, where)
    return select_top(logits + jax.random.gumbel(key, logits.shape), count=count)


def draw_prompts(
    key: Array,
    weights: Array,
    *,
    count: int,
    uniform: float = 0.0,
    where: Array | None = None,
) -> Array:
    """Draws prompts without replacement, partly by weight and partly uniformly.

        round((1 - uniform) count) by weight, then the others uniformly from the rest

    Prompts of weight 0 come after all others, uniformly, so that a pool without any weight is
    drawn uniformly.

    Args:
      key: Typed PRNG key.
      weights: ``[N]``, floating point, not negative: such as :func:`learnability`, or
        ``advantages.uncertainty_sampling_weights``.
      count: How many, from 1 to N.
      uniform: Share of the draw that ignores the weights, in [0, 1].
      where: See the module.

    Returns:
      Prompt ids in the order of the draw, int32 ``[count]``; see the module.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> weights = jnp.array([0.0, 0.25, 0.0])
      >>> ids = jr.curation.draw_prompts(jax.random.key(0), weights, count=3)
      >>> int(ids[0]), sorted(ids.tolist())
      (1, [0, 1, 2])

    References:
      SPO (arXiv:2509.13232), whose released code draws a batch out of a larger pool.
    """
    name = "draw_prompts"
    checks.check_share(name, uniform=uniform)
    weights = _pool(name, "weights", weights, count, where)
    key, uniform_key = jax.random.split(key)
    noise = jax.random.gumbel(key, weights.shape)
    positive = weights > 0
    # All scores of positive weights are above -200: float32 reaches down to exp(-104).
    log_weights = jnp.where(positive, jnp.log(jnp.where(positive, weights, 1.0)), -1e3)
    scores = jnp.where(jnp.isneginf(weights), -jnp.inf, log_weights + noise)
    free = round(uniform * count)
    if not free:
        return select_top(scores, count=count)
    drawn = [] if free == count else [select_top(scores, count=count - free)]
    rest = jnp.where(jnp.isneginf(weights), -jnp.inf, jax.random.gumbel(uniform_key, weights.shape))
    for ids in drawn:
        rest = rest.at[jnp.where(ids < 0, len(rest), ids)].set(-jnp.inf, mode="drop")
    return jnp.concatenate([*drawn, select_top(rest, count=free)])


def candidate_pool(key: Array, *, num_prompts: int, size: int) -> Array:
    """Prompts drawn uniformly, one from each section of the dataset: candidates for costly scores.

        id_i uniform in the i-th of `size` stretches, whose lengths differ by one at most

    Takes time in proportion to ``size`` whatever N is. Each id comes at most once, in ascending
    order; neighbors in the dataset are seldom drawn together.

    Args:
      key: Typed PRNG key.
      num_prompts: N, the prompts of the dataset, above 0.
      size: Number of candidates, from 1 to N. InSight and MoPPS use 16 times the batch.

    Returns:
      Prompt ids, int32 ``[size]``.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> pool = jr.curation.candidate_pool(jax.random.key(0), num_prompts=100, size=4)
      >>> (pool // 25).tolist()
      [0, 1, 2, 3]

    References:
      InSight (arXiv:2603.01907) and MoPPS (arXiv:2507.04632) take a random part of the dataset;
      one prompt per section, instead of a shuffle, is ours.
    """
    name = "candidate_pool"
    checks.check_count(name, num_prompts=num_prompts)
    checks.check_count(name, most=num_prompts, size=size)
    # Products such as i N would overflow int32.
    step, rest = divmod(num_prompts, size)
    edges = jnp.arange(size + 1) * step + jnp.minimum(jnp.arange(size + 1), rest)
    return jax.random.randint(key, (size,), edges[:-1], edges[1:], jnp.int32)


def _rates(function: str, rates: Array) -> Array:
    checks.check_min_rank(function, 0, rates=rates)
    checks.check_float(function, rates=rates)
    return jnp.asarray(rates, jnp.float32)


def _pool(function: str, name: str, values: Array, count: int, where: Array | None) -> Array:
    """The values of a pool in float32, -inf for what is left out."""
    checks.check_rank(function, 1, **{name: values})
    checks.check_float(function, **{name: values})
    checks.check_bool(function, where=where)
    (size,) = jnp.shape(values)
    if where is not None:
        checks.check_shape(function, "where", where, (size,))
    checks.check_count(function, most=size, count=count)
    values = jnp.asarray(values, jnp.float32)
    keep = ~jnp.isnan(values) if where is None else where & ~jnp.isnan(values)
    return jnp.where(keep, values, -jnp.inf)
