"""Rules for agents that branch when they become uncertain, or that call other agents.

All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option out of range.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking

__all__ = ["Calls", "align_calls", "entropy_branches", "top_k_entropy"]


class Calls(NamedTuple):
    """Result of :func:`align_calls`.

    Attributes:
      index: int32 ``[..., G, D]``, index of the call in its rollout; 0 where there is none.
      where: bool ``[..., G, D]``, False for a rollout without calls.
    """

    index: Array
    where: Array


def align_calls(where: Array, key: Array, *, count: int) -> Calls:
    """The same number of calls for each rollout: a random subset, or all and random copies.

    A rollout with more than ``count`` calls keeps a random subset, in order; one with fewer all of
    them, and copies of random ones; one without any has none.

    Args:
      where: bool ``[..., G, S]``, True for the calls that exist.
      key: A typed key.
      count: D, at least 1.

    Returns:
      :class:`Calls`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> where = jnp.array([[True, True], [True, False], [False, False]])
      >>> calls = jr.curation.align_calls(where, jax.random.key(0), count=2)
      >>> calls.index.tolist(), calls.where[:, 0].tolist()
      ([[0, 1], [0, 0], [0, 0]], [True, True, False])

    References:
      M-GRPO (arXiv:2511.13288), ABSTRACT reading.
    """
    function = "align_calls"
    checks.check_mask(function, where, name="where")
    checks.check_min_rank(function, 2, where=where)
    checks.check_count(function, count=count)
    where = jnp.asarray(where)
    subset, copies = jax.random.split(key)
    S = where.shape[-1]
    # The calls that there are, in random order; the first D of them are the subset.
    noise = jnp.where(where, jax.random.uniform(subset, where.shape), jnp.inf)
    order = jnp.argsort(noise, axis=-1)
    total = jnp.sum(where, axis=-1, keepdims=True)
    places = jnp.arange(count)
    picked = jnp.pad(order[..., :count], [(0, 0)] * (where.ndim - 1) + [(0, max(count - S, 0))])
    first = jnp.sort(jnp.where(places < total, picked, S), axis=-1)
    drawn = jax.random.randint(copies, (*where.shape[:-1], count), 0, jnp.maximum(total, 1))
    again = jnp.take_along_axis(order, drawn, axis=-1)
    there = jnp.broadcast_to(total > 0, first.shape)
    index = jnp.where(there, jnp.where(places < total, first, again), 0)
    return Calls(index.astype(jnp.int32), there)


def top_k_entropy(
    logp: Array,
    *,
    vocab_size: int,
    reduce: Literal["mean", "sum"] = "mean",
    where: Array | None = None,
) -> Array:
    """The entropy of the K most likely tokens at the first positions of a turn, divided by log V.

        H = mean over tokens of -sum over K of p log p, over log V;   "sum" adds the tokens up

    Args:
      logp: ``[..., k, K]``, floating point, log-probabilities (nats) of the K most likely tokens.
      vocab_size: V, at least 2.
      reduce: "mean" or "sum".
      where: bool ``[..., k]``, True for tokens that exist; None for all.

    Returns:
      ``[...]`` float32; 0 without a token.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> float(jr.curation.top_k_entropy(jnp.log(jnp.full((3, 4), 0.25)), vocab_size=16))
      0.5

    References:
      ARPO (arXiv:2507.19849); the released code sums over 20 tokens, with K = 10. The mean is ours.
    """
    function = "top_k_entropy"
    checks.check_min_rank(function, 2, logp=logp)
    checks.check_float(function, logp=logp)
    checks.check_count(function, vocab_size=vocab_size)
    checks.check_option(function, "reduce", reduce, ("mean", "sum"))
    if vocab_size < 2:
        raise ValueError(f"{function}: vocab_size must be at least 2; got {vocab_size}.")
    shape = jnp.shape(logp)[:-1]
    valid = jnp.ones(shape, bool) if where is None else jnp.asarray(where)
    checks.check_bool(function, where=valid)
    checks.check_shape(function, "where", valid, shape)
    logp = masking.zero_masked(logp, valid[..., None])
    terms = jnp.where(logp == -jnp.inf, 0.0, -jnp.exp(logp) * logp)
    total = masking.masked_sum(jnp.sum(terms, axis=-1), valid, axis=-1)
    if reduce == "mean":
        total = total / jnp.maximum(jnp.sum(valid, axis=-1), 1)
    return total / jnp.log(float(vocab_size))


def entropy_branches(
    first_entropy: Array,
    entropy: Array,
    draws: Array,
    *,
    slots: Array | int,
    prob: float = 0.5,
    weight: float = 0.2,
    where: Array | None = None,
) -> Array:
    """The rollouts that branch after a tool's answer: at random, more often when uncertain.

        branch where clip(u - weight (H_now - H_first), 0, 1) <= prob

    that is with probability ``clip(prob + weight (H_now - H_first), 0, 1)``. Rollouts are processed
    in order until the slots are used; with fewer slots than draws, a rollout uses only as many
    draws.

    Args:
      first_entropy: ``[..., n]``, floating point, entropy of the first turn of each rollout, such
        as :func:`top_k_entropy`.
      entropy: ``[..., n]``, entropy of its last turn.
      draws: ``[..., n, b]``, floating point, u in [0, 1): one for each possible branch.
      slots: ``[...]`` integers, number of branches that fit.
      prob: In [0, 1].
      weight: Not negative.
      where: bool ``[..., n]``, True for rollouts that continue; None for all.

    Returns:
      bool ``[..., n, b]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> first, now = jnp.array([0.1, 0.1, 0.1]), jnp.array([0.8, 0.1, 0.8])
      >>> jr.curation.entropy_branches(first, now, jnp.full((3, 1), 0.6), slots=1).tolist()
      [[True], [False], [False]]

    References:
      ARPO (arXiv:2507.19849), the released code: 16 rollouts of 8 first ones, one branch a round,
      0.5 and 0.2. The paper branches where ``alpha + beta (H_now - H_first)`` is above a bound.
    """
    function = "entropy_branches"
    checks.check_min_rank(function, 1, first_entropy=first_entropy)
    checks.check_float(function, first_entropy=first_entropy, entropy=entropy, draws=draws)
    checks.check_bool(function, where=where)
    checks.check_same_shape(function, first_entropy=first_entropy, entropy=entropy, where=where)
    shape = jnp.shape(first_entropy)
    checks.check_min_rank(function, 2, draws=draws)
    checks.check_shape(function, "draws", draws, (*shape, jnp.shape(draws)[-1]))
    checks.check_integer(function, slots=slots)
    checks.check_share(function, prob=prob)
    checks.check_non_negative(function, finite=True, weight=weight)
    valid = jnp.ones(shape, bool) if where is None else jnp.asarray(where)
    gain = masking.zero_masked(entropy, valid) - masking.zero_masked(first_entropy, valid)
    u = jnp.clip(draws - weight * gain[..., None], 0.0, 1.0)
    wanted = (u <= prob) & valid[..., None]
    return _grant(wanted, jnp.broadcast_to(jnp.asarray(slots), shape[:-1]))


@jax.jit  # a loop of its own for each call would be compiled for each call
def _grant(wanted: Array, slots: Array) -> Array:
    """The branches among those wanted, the first rollouts first, until no slot is left."""
    tries = jnp.arange(wanted.shape[-1])

    def one(left: Array, wanted: Array) -> tuple[Array, Array]:
        taken = wanted & (tries < left[..., None])
        return left - jnp.sum(taken, axis=-1), taken

    _, taken = jax.lax.scan(one, slots, jnp.moveaxis(wanted, -2, 0))
    return jnp.moveaxis(taken, 0, -2)
