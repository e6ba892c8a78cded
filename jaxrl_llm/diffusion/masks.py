"""Which tokens of a response are hidden from the denoiser.

The same key, shapes and levels give the same masks, so the policy, the old policy and the
reference can be compared on shared masks: the variance of a difference then nearly vanishes. Draw
masks once per batch and pass them on, so that microbatches use the masks of the batch.

Raises: see :mod:`jaxrl_llm.diffusion`, TypeError and ValueError.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking
from jaxrl_llm.diffusion import _inputs


def mask_tokens(key: Array, valid: Array, t: Array | float) -> Array:
    """Masks each token with probability t, independently.

        masked[i] ~ Bernoulli(t)   where valid

    Args:
      key, valid: See the package.
      t: See the package; 0 is allowed too, and a single number makes one draw.

    Returns:
      bool ``[J, ..., T]``; for one number ``[..., T]``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> valid = jnp.array([True, True, False])
      >>> jr.diffusion.mask_tokens(jax.random.key(0), valid, jnp.array([0.0, 1.0])).tolist()
      [[False, False, False], [True, True, False]]

    References:
      Nie et al., LLaDA (arXiv:2502.09992); shared masks: Zhu et al., VRPO (arXiv:2505.19223).
    """
    function = "mask_tokens"
    checks.check_key(function, key)
    _inputs.check_token_mask(function, "valid", valid)
    checks.check_share(function, t=t)
    t = _before_rows(function, "t", jnp.asarray(t, jnp.float32), valid)
    shape = jnp.broadcast_shapes(t.shape, jnp.shape(valid))
    return valid & (jax.random.uniform(key, shape) < t)


def mask_exact(key: Array, valid: Array, counts: Array) -> Array:
    """Masks an exact number of tokens; each set of that size is equally likely.

    Args:
      key, valid: See the package.
      counts: integers ``[J, ...]`` or ``[J]``, :func:`mask_counts`, or one number for one draw. A
        count above the number of valid tokens masks all of them.

    Returns:
      bool ``[J, ..., T]``; for one number ``[..., T]``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> valid = jnp.array([True, True, False, True])
      >>> masked = jr.diffusion.mask_exact(jax.random.key(0), valid, jnp.array([0, 1, 2, 3]))
      >>> masked.sum(-1).tolist(), masked[:, 2].any().item()
      ([0, 1, 2, 3], False)

    References:
      Nie et al., LLaDA (arXiv:2502.09992), the form of lower variance.
    """
    function = "mask_exact"
    checks.check_key(function, key)
    _inputs.check_token_mask(function, "valid", valid)
    checks.check_integer(function, counts=counts)
    counts = _before_rows(function, "counts", jnp.asarray(counts), valid)
    shape = jnp.broadcast_shapes(counts.shape, jnp.shape(valid))
    return valid & (_random_ranks(key, jnp.broadcast_to(valid, shape)) < counts)


def mask_blocks(key: Array, valid: Array, *, block: int, samples: int, p: float = 0.0) -> Array:
    """Masks as a blockwise sampler has them: part of one block and all later blocks are masked.

        block k of a response at random;   masked: all of the blocks after k,
        and of block k a random count of its tokens, from 1 to all, each set with the same chance,
        and each token of the blocks before k with probability p

    It suits responses that were sampled in blocks; the estimate is not the likelihood over all
    orders. Levels are :func:`count_levels`.

    Args:
      key, valid: See the package.
      block: Tokens of a block, at least 1.
      samples: J, how many draws, at least 1.
      p: Probability of masking a token of an earlier block, in [0, 1].

    Returns:
      bool ``[J, ..., T]``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> masked = jr.diffusion.mask_blocks(
      ...     jax.random.key(0), jnp.ones(4, bool), block=1, samples=4)
      >>> sorted(masked.tolist())[0]
      [False, False, False, True]

    References:
      Wang et al., SPG (arXiv:2510.09541), the released code, whose draws for a response use
      different blocks and whose settings have p = 0.15.
    """
    function = "mask_blocks"
    checks.check_key(function, key)
    _inputs.check_token_mask(function, "valid", valid)
    checks.check_count(function, block=block, samples=samples)
    checks.check_share(function, p=p)
    shape = (samples, *jnp.shape(valid))
    which, count, places, clean = jax.random.split(key, 4)
    blocks = jnp.ceil(masking.lengths(valid) / block)
    chosen = jnp.floor(jax.random.uniform(which, shape[:-1]) * blocks)[..., None]
    of = jnp.broadcast_to((jnp.cumsum(valid, axis=-1) - 1) // block, shape)
    inside = valid & (of == chosen)
    size = masking.lengths(inside)
    counts = 1.0 + jnp.floor(jax.random.uniform(count, shape[:-1]) * size)
    denoised = inside & (_random_ranks(places, inside) < counts[..., None])
    before = valid & (of < chosen) & (jax.random.uniform(clean, shape) < p)
    return (valid & (of > chosen)) | denoised | before


def complementary(masked: Array, valid: Array) -> Array:
    """Masks and their complements: each token is masked in exactly one of two forwards.

    Draw ``j + J`` masks the tokens that draw ``j`` does not mask. Complements of
    :func:`mask_tokens` have levels ``1 - t``. Complements of :func:`mask_exact` have the levels
    :func:`count_levels`, with counts drawn from 0.

    Args:
      masked, valid: See the package.

    Returns:
      bool ``[2 J, ..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> valid = jnp.array([True, True, True, False])
      >>> masked = jnp.array([[True, False, True, False]])
      >>> jr.diffusion.complementary(masked, valid)[1].tolist()
      [False, True, False, False]

    References:
      Gong et al., DiffuCoder's coupled-GRPO (arXiv:2506.20639); Ou et al., ESPO
      (arXiv:2512.03759).
    """
    function = "complementary"
    _inputs.check_token_mask(function, "masked", masked)
    _inputs.check_token_mask(function, "valid", valid)
    checks.check_min_rank(function, 2, masked=masked)
    checks.check_shape(function, "masked", masked, (jnp.shape(masked)[0], *jnp.shape(valid)))
    return jnp.concatenate([valid & masked, valid & ~masked], axis=0)


def diffu_mask(key: Array, prompt: Array, valid: Array, *, p: float = 0.15) -> Array:
    """Masks the complete response, and each token of the prompt with probability p.

    One forward then gives a log-probability of every token, :func:`mean_field`. Each of several
    updates on a batch uses its own key; the old policy and the reference use the key of the update.

    Args:
      key: See the package.
      prompt: bool ``[..., S]``, True for tokens of the prompt; S covers prompt and response.
      valid: bool ``[..., S]``, True for tokens of the response.
      p: Probability of masking a token of the prompt, in [0, 1].

    Returns:
      bool ``[..., S]``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> prompt, valid = jnp.array([True, True, False]), jnp.array([False, False, True])
      >>> jr.diffusion.diffu_mask(jax.random.key(0), prompt, valid, p=0.0).tolist()
      [False, False, True]

    References:
      Zhao et al., d1 (arXiv:2504.12216), diffu-GRPO, whose released settings use p = 0.15.
    """
    function = "diffu_mask"
    _inputs.check_token_mask(function, "prompt", prompt)
    _inputs.check_token_mask(function, "valid", valid)
    checks.check_same_shape(function, prompt=prompt, valid=valid)
    checks.check_share(function, p=p)
    return mask_tokens(key, prompt, p) | valid


def count_levels(masked: Array, valid: Array, *, least: int = 1) -> Array:
    """The levels of masks of an exact size: the chance that a token is masked.

        t = number masked / (L + 1 - least),   L = number of valid tokens

    Args:
      masked, valid: See the package.
      least: The lowest count that can be drawn, 0 or 1; 0 for masks with complements.

    Returns:
      ``[J, ...]`` float32; 0 where nothing is masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> masked = jnp.array([[True, False, True, True]])
      >>> jr.diffusion.count_levels(masked, jnp.ones(4, bool)).tolist()
      [0.75]

    References:
      Nie et al., LLaDA (arXiv:2502.09992), counts from 1; Ou et al., ESPO (arXiv:2512.03759),
      counts from 0.
    """
    function = "count_levels"
    _inputs.check_token_mask(function, "masked", masked)
    _inputs.check_token_mask(function, "valid", valid)
    checks.check_option(function, "least", least, (0, 1))
    checks.check_shape(function, "masked", masked, (jnp.shape(masked)[0], *jnp.shape(valid)))
    length = masking.lengths(valid) + (1.0 - least)
    return masking.lengths(valid & masked) / jnp.maximum(length, 1.0)


def _random_ranks(key: Array, where: Array) -> Array:
    """A random order of the tokens of each row, with the tokens of ``where`` first."""
    score = jnp.where(where, jax.random.uniform(key, jnp.shape(where)), 2.0)
    return jnp.argsort(jnp.argsort(score, axis=-1), axis=-1)


def _before_rows(function: str, name: str, x: Array, valid: Array) -> Array:
    """``[]``, ``[J]`` or ``[J, ...]`` as it broadcasts against rows ``[..., T]``."""
    shape, rows = jnp.shape(x), jnp.shape(valid)[:-1]
    if len(shape) == 1:
        x = jnp.reshape(x, (*shape, *(1,) * len(rows)))
    elif shape and shape[1:] != rows:
        raise ValueError(
            f"{function}: {name} must be a number, (J,) or (J, *rows) for J draws of rows {rows}; "
            f"got shape {shape}."
        )
    return x[..., None]
