"""A penalty for repeated n-grams of tokens.

``tokens`` are integers ``[..., T]`` and ``mask`` is bool of the same shape, True for the tokens of
the response. Both functions return float32, and raise TypeError for a wrong dtype and ValueError
where shapes differ or a number is out of its range.
"""

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, stats


def repetition_penalty(
    tokens: Array, mask: Array, *, ngram: int = 3, max_penalty: float = -1.0
) -> Array:
    """The share of repeated n-grams of a response, times a penalty.

        penalty = max_penalty (1 - distinct n-grams / all n-grams)

    N-grams are contiguous runs of response tokens. A response without any n-gram is not penalized.

    Args:
      tokens, mask: See the module.
      ngram: Length of an n-gram in tokens, at least 1.
      max_penalty: The limit for a response that only repeats itself, 0 or below.

    Returns:
      Penalties ``[...]`` in [max_penalty, 0], to be added to the rewards.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> tokens = jnp.array([[1, 2, 3, 4, 0], [5, 5, 5, 5, 5]])
      >>> mask = jnp.array([[True] * 4 + [False], [True] * 5])
      >>> jr.rewards.repetition_penalty(tokens, mask, ngram=2).tolist()
      [0.0, -0.75]

    References:
      Demystifying long chain-of-thought reasoning (arXiv:2502.03373), appendix C.2, as in TRL. The
      paper's released trainer applies the penalty at the repeated tokens.
    """
    function = "repetition_penalty"
    checks.check_min_rank(function, 1, tokens=tokens, mask=mask)
    checks.check_integer(function, tokens=tokens)
    checks.check_mask(function, mask)
    checks.check_same_shape(function, tokens=tokens, mask=mask)
    checks.check_positive(function, ngram=ngram)
    if max_penalty > 0:
        raise ValueError(f"{function}: max_penalty must be 0 or below; got {max_penalty:g}.")
    runs = jnp.shape(tokens)[-1] - ngram + 1
    if runs < 1:
        return jnp.zeros(jnp.shape(tokens)[:-1], jnp.float32)
    tokens = masking.zero_masked(jnp.asarray(tokens), mask)
    columns = [tokens[..., i : i + runs] for i in range(ngram)]
    exists = jnp.stack([mask[..., i : i + runs] for i in range(ngram)]).all(axis=0)
    # Sorted, those that exist first, a run is distinct where it differs from the one before it.
    order = jnp.lexsort((*columns, ~exists), axis=-1)
    exists, *columns = (jnp.take_along_axis(x, order, axis=-1) for x in (exists, *columns))
    differs = jnp.stack([x[..., 1:] != x[..., :-1] for x in columns]).any(axis=0)
    distinct = exists[..., 0] + jnp.sum(differs & exists[..., 1:], axis=-1)
    total = jnp.sum(exists, axis=-1)
    repeated = (total - distinct) / jnp.maximum(total, 1)
    # Added to zero, since minus zero would print.
    return 0.0 + max_penalty * repeated.astype(jnp.float32)


def repetition_rewards(
    rewards: Array,
    tokens: Array,
    mask: Array,
    *,
    ngram: int = 3,
    max_penalty: float = -1.0,
    where: Array | None = None,
    response_mask: Array | None = None,
) -> Array:
    """Rewards plus :func:`repetition_penalty` of their responses; the form for a chain.

        r_i + penalty(tokens_i)

    Args:
      rewards: ``[..., G]``, floating point.
      tokens, mask: ``[..., G, T]``; see the module.
      ngram, max_penalty: See :func:`repetition_penalty`.
      where: bool ``[..., G]``, True for rollouts to include; the rest are not read and get 0.
      response_mask: The mask before a correction rejected tokens of it, ``[..., G, T]``; None for
        ``mask``.

    Returns:
      Rewards ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> tokens, mask = jnp.array([[5, 5, 5, 5], [1, 2, 3, 4]]), jnp.ones((2, 4), bool)
      >>> jr.rewards.repetition_rewards(jnp.ones(2), tokens, mask).tolist()
      [0.5, 1.0]

    References:
      Demystifying long chain-of-thought reasoning (arXiv:2502.03373).
    """
    function = "repetition_rewards"
    stats.check_group(function, rewards, where)
    mask = masking.response_tokens(function, mask, response_mask)
    checks.check_shape(function, "mask", mask, (*jnp.shape(rewards), jnp.shape(mask)[-1]))
    penalty = repetition_penalty(tokens, mask, ngram=ngram, max_penalty=max_penalty)
    return masking.zero_masked(masking.zero_masked(rewards, where) + penalty, where)
