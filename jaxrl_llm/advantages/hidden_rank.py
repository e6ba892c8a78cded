"""Advantages shaped by the rank of hidden states: VERL.

:func:`effective_rank` and :func:`rank_growth` measure a response, :func:`rank_bonus` compares both
with a moving baseline, and :func:`bounded_bonus` adds the bonus to the advantage.

Shared arguments:
  ``mask``: bool ``[..., T]``, True for the response tokens that are trained.
  ``where``: bool ``[..., G]``, True for the rollouts that take part; the others are not read.

All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option out of range.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, Transform, checks, masking, prints_as_call

__all__ = [
    "RankBaseline",
    "RankGrowth",
    "bounded_bonus",
    "effective_rank",
    "rank_baseline_init",
    "rank_baseline_update",
    "rank_bonus",
    "rank_growth",
    "rank_shaping",
]

_FLOOR = 1e-8


def _rank_of(values: Array) -> Array:
    """Exponential of the entropy of singular values, ``[..., K] -> [...]``."""
    share = values / (jnp.sum(values, axis=-1, keepdims=True) + _FLOOR)
    return jnp.exp(-jnp.sum(share * jnp.log(share + _FLOOR), axis=-1))


def _centered_values(x: Array, rows: Array) -> Array:
    """Singular values of the rows that count, less their mean."""
    x = jnp.where(rows[..., None], x, 0.0)
    count = jnp.maximum(jnp.sum(rows, axis=-1), 1)[..., None, None]
    mean = jnp.sum(x, axis=-2, keepdims=True) / count
    centered = jnp.where(rows[..., None], x - mean, 0.0)
    return jnp.linalg.svd(centered, compute_uv=False)


def effective_rank(hidden: Array, mask: Array) -> Array:
    """The effective number of directions in the hidden states of a response.

        p_i = s_i / (sum s + 1e-8),   rank = exp(-sum p_i log(p_i + 1e-8))
        s = singular values of the states of the unmasked tokens, less their mean

    Between 1 and the dimension. Shifting, rotating or scaling all states changes nothing.

    Args:
      hidden: ``[..., T, D]``, floating point, states of the last layer.
      mask: See the module.

    Returns:
      ``[...]`` float32; 0 with fewer than two tokens.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> hidden = jnp.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
      >>> round(float(jr.advantages.effective_rank(hidden, jnp.ones(4, bool))), 4)
      2.0

    References:
      Roy and Vetterli, The effective rank (EUSIPCO 2007); VERL (arXiv:2509.23808), whose released
      code uses singular values, not their squares.
    """
    _check_hidden("effective_rank", hidden, mask)
    rank = _rank_of(_centered_values(jnp.asarray(hidden, jnp.float32), mask))
    return jnp.where(jnp.sum(mask, axis=-1) < 2, 0.0, rank)


def _check_hidden(function: str, hidden: Array, mask: Array) -> None:
    checks.check_mask(function, mask)
    checks.check_min_rank(function, 1, mask=mask)
    checks.check_min_rank(function, 2, hidden=hidden)
    checks.check_float(function, hidden=hidden)
    checks.check_shape(function, "hidden", hidden, (*jnp.shape(mask), jnp.shape(hidden)[-1]))


class RankGrowth(NamedTuple):
    """The rank of a response and how it grows; float32 ``[...]``.

    Attributes:
      rank: :func:`effective_rank` of the complete response.
      velocity: Mean rise of a prefix's rank above the mean rank of the prefixes before it.
      acceleration: Mean change of that rise.
    """

    rank: Array
    velocity: Array
    acceleration: Array


def rank_growth(
    hidden: Array, mask: Array, *, stride: int = 40, max_tokens: int = 512
) -> RankGrowth:
    """The effective rank of a response and how it grows along the prefixes.

        m_j = rank of the first j stride + 1 tokens,   j = 1, 2, ...   j stride < n
        d_j = m_j - mean(m_1 .. m_{j-1}),   velocity = mean of d_j from j = 2
        acceleration = mean of d_j - d_{j-1} from j = 3

    n counts the last ``max_tokens`` tokens. With too few prefixes a difference is 0. The cost is
    one singular value decomposition of T rows per prefix.

    Args:
      hidden: ``[..., T, D]``, floating point, states of the last layer.
      mask: See the module.
      stride: Tokens between prefixes, at least 1.
      max_tokens: Number of tokens, counted from the end, that are measured; at least 2.

    Returns:
      :class:`RankGrowth`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> hidden = jax.random.normal(jax.random.key(0), (9, 4))
      >>> growth = jr.advantages.rank_growth(hidden, jnp.ones(9, bool), stride=2)
      >>> bool(growth.velocity > 0)
      True

    References:
      VERL (arXiv:2509.23808); the released code.
    """
    function = "rank_growth"
    _check_hidden(function, hidden, mask)
    checks.check_positive(function, finite=True, stride=stride)
    if max_tokens < 2:
        raise ValueError(f"{function}: max_tokens must be at least 2; got {max_tokens}.")
    window = min(max_tokens, jnp.shape(mask)[-1])
    # The last tokens of the window, in their order, moved to the front.
    count = jnp.sum(mask, axis=-1, keepdims=True)
    place = jnp.cumsum(mask, axis=-1) - 1
    order = jnp.argsort(~(mask & (place >= count - window)), axis=-1, stable=True)[..., :window]
    rows = jnp.where(mask[..., None], jnp.asarray(hidden, jnp.float32), 0.0)
    rows = jnp.take_along_axis(rows, order[..., None], axis=-2)
    n = jnp.minimum(count, window)
    # The rows of this triangle have the same products with one another, in fewer columns.
    rows = jnp.swapaxes(jnp.linalg.qr(jnp.swapaxes(rows, -1, -2), mode="r"), -1, -2)
    prefixes = range(stride, window, stride)
    series = [_rank_of(_centered_values(rows, jnp.arange(window) <= t)) for t in prefixes]
    rank = effective_rank(hidden, mask)
    nothing = jnp.zeros_like(rank)
    if len(series) < 2:
        return RankGrowth(rank, nothing, nothing)
    m = jnp.stack(series, axis=-1)
    there = jnp.asarray(list(prefixes)) < n
    before = (jnp.cumsum(m, axis=-1)[..., :-1]) / jnp.arange(1, m.shape[-1])
    d = m[..., 1:] - before
    velocity = masking.masked_mean(d, there[..., 1:], axis=-1)
    acceleration = nothing
    if d.shape[-1] > 1:
        acceleration = masking.masked_mean(d[..., 1:] - d[..., :-1], there[..., 2:], axis=-1)
    return RankGrowth(rank, velocity, acceleration)


class RankBaseline(NamedTuple):
    """Moving averages of :class:`RankGrowth` over the steps.

    Attributes:
      rank: float32 ``[]``.
      velocity: float32 ``[]``.
      acceleration: float32 ``[]``.
      steps: int32 ``[]``, how many batches were measured.
    """

    rank: Array
    velocity: Array
    acceleration: Array
    steps: Array


def rank_baseline_init() -> RankBaseline:
    """The state before the first batch: zeros.

    Returns:
      :class:`RankBaseline`.

    Example:
      >>> import jaxrl_llm as jr
      >>> int(jr.advantages.rank_baseline_init().steps)
      0

    References:
      VERL (arXiv:2509.23808).
    """

    # A buffer each: a train step donates its state.
    def zero() -> Array:
        return jnp.zeros((), jnp.float32)

    return RankBaseline(zero(), zero(), zero(), jnp.zeros((), jnp.int32))


def rank_baseline_update(
    state: RankBaseline, growth: RankGrowth, *, where: Array | None = None, rate: float = 0.3
) -> RankBaseline:
    """The averages after a batch.

        mu = (1 - rate) mu + rate mean,   mu = mean at the first batch

    Args:
      state: The averages before.
      growth: Of the batch, ``[...]``.
      where: bool ``[...]``, True for the responses that count. None keeps all.
      rate: Share of the new batch, in (0, 1].

    Returns:
      :class:`RankBaseline`; as before if no response counts.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> growth = jr.advantages.RankGrowth(*(jnp.array([1.0, 3.0]) for _ in range(3)))
      >>> state = jr.advantages.rank_baseline_init()
      >>> float(jr.advantages.rank_baseline_update(state, growth).rank)
      2.0

    References:
      VERL (arXiv:2509.23808); the released code starts at 0, so that every deviation of its second
      step is cut.
    """
    function = "rank_baseline_update"
    checks.check_share(function, zero=False, rate=rate)
    checks.check_bool(function, where=where)
    checks.check_same_shape(function, rank=growth.rank, where=where)
    some = jnp.asarray(True) if where is None else jnp.any(where)

    def moved(old: Array, x: Array) -> Array:
        mean = masking.masked_mean(x, where)
        new = jnp.where(state.steps == 0, mean, (1.0 - rate) * old + rate * mean)
        return jnp.where(some, new, old)

    return RankBaseline(
        rank=moved(state.rank, growth.rank),
        velocity=moved(state.velocity, growth.velocity),
        acceleration=moved(state.acceleration, growth.acceleration),
        steps=state.steps + some.astype(jnp.int32),
    )


def rank_bonus(
    growth: RankGrowth, baseline: RankBaseline, *, gain: float = 2.0, weight: float = 1.0
) -> Array:
    """A bonus for responses whose rank is higher and grows faster than on average.

        dev(x) = clip((x - mu) / (|mu| + 1e-8), -5, 5)
        b      = sigmoid(gain dev(acceleration))
        bonus  = weight (b tanh(dev(rank)) + (1 - b) tanh(dev(velocity)))

    Args:
      growth: ``[...]``, :func:`rank_growth`.
      baseline: Averages over the earlier steps. Before the first batch the bonus is 0.
      gain: How sharply the acceleration decides between rank and velocity, not negative.
      weight: Strength, not negative.

    Returns:
      ``[...]`` float32, in [-weight, weight].

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> growth = jr.advantages.RankGrowth(jnp.array(4.0), jnp.array(1.0), jnp.array(0.2))
      >>> baseline = jr.advantages.RankBaseline(
      ...     jnp.array(3.0), jnp.array(0.5), jnp.array(0.1), jnp.array(1))
      >>> round(float(jr.advantages.rank_bonus(growth, baseline)), 4)
      0.374

    References:
      VERL (arXiv:2509.23808); the released code, with the fixed weight.
    """
    checks.check_non_negative("rank_bonus", finite=True, gain=gain, weight=weight)

    def deviation(x: Array, mu: Array) -> Array:
        return jnp.clip((jnp.asarray(x, jnp.float32) - mu) / (jnp.abs(mu) + _FLOOR), -5.0, 5.0)

    share = jax.nn.sigmoid(gain * deviation(growth.acceleration, baseline.acceleration))
    explore = jnp.tanh(deviation(growth.rank, baseline.rank))
    exploit = jnp.tanh(deviation(growth.velocity, baseline.velocity))
    bonus = weight * (share * explore + (1.0 - share) * exploit)
    return jnp.where(baseline.steps > 0, bonus, 0.0)


def bounded_bonus(
    advantages: Array, mask: Array, *, bonus: Array, where: Array | None = None, cap: float = 2.0
) -> Array:
    """Adds a bonus of at most a fixed share of the advantage's magnitude.

        A' = A + min(max(bonus, 0), |A| / cap)

    With ``cap`` above 1 no advantage changes its sign, and one of 0 stays 0.

    Args:
      advantages: ``[..., G]``, floating point, one per rollout.
      mask: bool ``[..., G, T]``; a rollout without a token gets no bonus.
      bonus: ``[..., G]``, floating point.
      where: See the module.
      cap: At least 1.

    Returns:
      Advantages ``[..., G]``, float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> advantages, bonus = jnp.array([1.0, -1.0, 0.2]), jnp.full(3, 0.374)
      >>> jr.advantages.bounded_bonus(
      ...     advantages, jnp.ones((3, 1), bool), bonus=bonus).round(3).tolist()
      [1.37..., -0.62..., 0.3...]

    References:
      VERL (arXiv:2509.23808): the released code adds the bonus to the last token of the response;
      here it is added to all tokens.
    """
    function = "bounded_bonus"
    checks.check_mask(function, mask)
    checks.check_float(function, advantages=advantages, bonus=bonus)
    sequences = jnp.shape(mask)[:-1]
    for name, x in (("advantages", advantages), ("bonus", bonus)):
        checks.check_shape(function, name, x, sequences)
    checks.check_bool(function, where=where)
    checks.check_same_shape(function, advantages=advantages, where=where)
    if not cap >= 1:
        raise ValueError(f"{function}: cap must be at least 1; got {cap:g}.")
    advantages = masking.zero_masked(advantages, where)
    spoken = jnp.any(mask, axis=-1) if where is None else jnp.any(mask, axis=-1) & where
    added = jnp.minimum(
        jnp.maximum(masking.zero_masked(bonus, spoken), 0.0), jnp.abs(advantages) / cap
    )
    return advantages + added


@dataclasses.dataclass(frozen=True)
class _Shaping:
    """The update half of :func:`rank_shaping`."""

    gain: float
    weight: float
    cap: float
    rate: float

    def __call__(self, advantages, state, *, mask, where, hidden_rank):
        growth = RankGrowth(hidden_rank[..., 0], hidden_rank[..., 1], hidden_rank[..., -1])
        bonus = rank_bonus(growth, state, gain=self.gain, weight=self.weight)
        shaped = bounded_bonus(advantages, mask, bonus=bonus, where=where, cap=self.cap)
        return shaped, rank_baseline_update(state, growth, where=where, rate=self.rate)


@prints_as_call
def rank_shaping(
    *, gain: float = 2.0, weight: float = 1.0, cap: float = 2.0, rate: float = 0.3
) -> Transform:
    """More advantage for responses whose hidden states spread more, and faster, than on average.

        A' = bounded_bonus(A, rank_bonus(growth, averages));   averages follow the batches

    Args:
      gain, weight: Of :func:`rank_bonus`.
      cap: Of :func:`bounded_bonus`.
      rate: Of :func:`rank_baseline_update`.

    Returns:
      A Transform of advantages ``[P, G]``; its state is :class:`RankBaseline`. It reads ``mask``,
      ``where`` and ``hidden_rank`` ``[P, G, 3]``, the parts of :class:`RankGrowth`, which the train
      step computes. The first batch gets no bonus.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> shaping = jr.advantages.rank_shaping()
      >>> batch = {"mask": jnp.ones((1, 2, 1), bool), "where": jnp.ones((1, 2), bool)}
      >>> ranks = jnp.array([[[2.0, 0.1, 0.0], [4.0, 0.1, 0.0]]])
      >>> out, state = shaping.update(
      ...     jnp.array([[1.0, -1.0]]), shaping.init(), hidden_rank=ranks, **batch)
      >>> out.tolist(), float(state.rank)
      ([[1.0, -1.0]], 3.0)
      >>> out, _ = shaping.update(jnp.array([[1.0, -1.0]]), state, hidden_rank=ranks, **batch)
      >>> out.round(3).tolist()
      [[1.0, -0.83...]]

    References:
      VERL (arXiv:2509.23808); the released code, which adds the bonus to the last token alone.
    """
    name = "rank_shaping"
    checks.check_non_negative(name, finite=True, gain=gain, weight=weight)
    checks.check_share(name, zero=False, rate=rate)
    checks.check_real(name, cap=cap)
    if not cap >= 1.0:
        raise ValueError(f"{name}: cap must be at least 1; got {cap}.")

    return Transform(rank_baseline_init, _Shaping(gain, weight, cap, rate))
