"""Hints for groups that are all wrong: chunks of a reference answer are held fixed.

A group without a correct response has no gradient. The group is sampled again with some chunks of a
reference trace held fixed and the other tokens denoised as before. Some of the correct responses
then replace wrong ones.

Raises: see :mod:`jaxrl_llm.diffusion`, TypeError and ValueError.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking
from jaxrl_llm.diffusion import _inputs


def hint_chunks(key: Array, trace: Array, *, shortest: int = 5, longest: int = 10) -> Array:
    """Cuts a reference trace into chunks of random length, in order.

    Args:
      key: See the package.
      trace: bool ``[..., T]``, True for tokens of the trace, without those of its final answer.
      shortest, longest: Lengths are uniform between these, both included; the last chunk takes the
        remaining tokens.

    Returns:
      int32 ``[..., T]``, the chunk of each token from 0; -1 outside the trace.

    Raises:
      ValueError: If ``shortest`` is above ``longest``, or either is no integer above 0.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> trace = jnp.array([True] * 5 + [False])
      >>> jr.diffusion.hint_chunks(jax.random.key(0), trace, shortest=2, longest=2).tolist()
      [0, 0, 1, 1, 2, -1]

    References:
      Zhao et al., IGPO (arXiv:2509.10396), with the lengths of the released script. Its code drops
      a last chunk that is shorter, and its trace includes the final answer.
    """
    function = "hint_chunks"
    checks.check_key(function, key)
    _inputs.check_token_mask(function, "trace", trace)
    checks.check_count(function, shortest=shortest, longest=longest)
    if shortest > longest:
        raise ValueError(f"{function}: shortest {shortest} is above longest {longest}.")
    lengths = jax.random.randint(key, jnp.shape(trace), shortest, longest + 1)
    ends = jnp.cumsum(lengths, axis=-1)
    place = jnp.cumsum(trace, axis=-1) - 1
    search = jnp.vectorize(
        lambda ends, place: jnp.searchsorted(ends, place, side="right"), signature="(t),(t)->(t)"
    )
    chunk = search(ends, place)
    return jnp.where(trace, chunk, -1).astype(jnp.int32)


def hint_mask(key: Array, chunk_ids: Array, share: Array | float) -> Array:
    """Which tokens of a trace are fixed: a share of its chunks, at random.

        floor(share N) of the N chunks

    Args:
      key: See the package.
      chunk_ids: integers ``[..., T]``, :func:`hint_chunks`.
      share: ``[...]`` or a number, in [0, 1]; the paper draws it from U[0.2, 0.6] per response.

    Returns:
      bool ``[..., T]``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> chunks = jnp.array([0, 0, 1, 1, 2, -1])
      >>> jr.diffusion.hint_mask(jax.random.key(0), chunks, 1.0).tolist()
      [True, True, True, True, True, False]

    References:
      Zhao et al., IGPO (arXiv:2509.10396), the paper. The released code hides at most
      floor((1 - share) N) chunks and never the last one, so that it shows more. Where the trace is
      shorter than a response can be, it also makes the gaps between chunks up to 1.5 times as long.
    """
    function = "hint_mask"
    checks.check_key(function, key)
    checks.check_integer(function, chunk_ids=chunk_ids)
    checks.check_min_rank(function, 1, chunk_ids=chunk_ids)
    checks.check_share(function, share=share)
    share = jnp.asarray(share, jnp.float32)
    if share.shape not in ((), jnp.shape(chunk_ids)[:-1]):
        checks.check_shape(function, "share", share, jnp.shape(chunk_ids)[:-1])
    number = jnp.max(chunk_ids, axis=-1, keepdims=True, initial=-1) + 1
    # 0.6 of 5 is 3: float32 has it as 3.0000001 or 2.9999998.
    chosen = jnp.floor(share[..., None] * number + 1e-4)
    score = jax.random.uniform(key, jnp.shape(chunk_ids))
    score = jnp.where(jnp.arange(jnp.shape(chunk_ids)[-1]) < number, score, 2.0)
    rank = jnp.argsort(jnp.argsort(score, axis=-1), axis=-1)
    of_token = jnp.take_along_axis(rank, jnp.maximum(chunk_ids, 0), axis=-1)
    return (chunk_ids >= 0) & (of_token < chosen)


def draw_hints(
    key: Array,
    trace: Array,
    *,
    shortest: int = 5,
    longest: int = 10,
    low: float = 0.2,
    high: float = 0.6,
) -> Array:
    """Which tokens of a trace are fixed in each response: :func:`hint_mask` of :func:`hint_chunks`.

        share ~ U[low, high], one a response

    Args:
      key, trace, shortest, longest: As in :func:`hint_chunks`.
      low, high: Range of the share of the chunks, in [0, 1].

    Returns:
      bool ``[..., T]``.

    Raises:
      ValueError: If ``low`` is above ``high``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> hints = jr.diffusion.draw_hints(
      ...     jax.random.key(0), jnp.ones(8, bool), shortest=2, longest=2, low=0.5, high=0.5)
      >>> int(hints.sum())
      4

    References:
      Zhao et al., IGPO (arXiv:2509.10396), with the lengths and shares of the released script; see
      both functions for what differs.
    """
    function = "draw_hints"
    checks.check_key(function, key)
    checks.check_share(function, low=low, high=high)
    if low > high:
        raise ValueError(f"{function}: low {low} is above high {high}.")
    of_chunks, of_share, of_mask = jax.random.split(key, 3)
    chunks = hint_chunks(of_chunks, trace, shortest=shortest, longest=longest)
    share = jax.random.uniform(of_share, jnp.shape(trace)[:-1], minval=low, maxval=high)
    return hint_mask(of_mask, chunks, share)


def igpo_replace(rewards: Array, new_rewards: Array, *, share: float = 0.5) -> Array:
    """Which hinted response replaces which wrong response.

    Only groups that are all wrong change. In such a group the first K correct hinted responses
    replace the first K responses, in order, where ``K = min(correct hinted, floor(share G))``.

    Args:
      rewards: ``[..., G]``, floating point, above 0 for a correct response.
      new_rewards: ``[..., G]``, the rewards of the responses with hints.
      share: Largest share of a group to replace, in [0, 1].

    Returns:
      int32 ``[..., G]``: the index of the hinted response that replaces each response; -1 for none.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.diffusion.igpo_replace(jnp.zeros(4), jnp.array([1.0, 0.0, 1.0, 1.0])).tolist()
      [0, 2, -1, -1]

    References:
      Zhao et al., IGPO (arXiv:2509.10396), with 4 of the 8 responses of the released script. Its
      code takes correct ones at random, and not in order, if there are more.
    """
    function = "igpo_replace"
    checks.check_float(function, rewards=rewards, new_rewards=new_rewards)
    checks.check_min_rank(function, 1, rewards=rewards)
    checks.check_same_shape(function, rewards=rewards, new_rewards=new_rewards)
    checks.check_share(function, share=share)
    size = jnp.shape(rewards)[-1]
    right = new_rewards > 0
    count = jnp.minimum(jnp.sum(right, axis=-1, keepdims=True), int(share * size + 1e-6))
    # Right ones first, each in its order.
    order = jnp.argsort(~right, axis=-1, stable=True)
    taken = ~jnp.any(rewards > 0, axis=-1, keepdims=True) & (jnp.arange(size) < count)
    return jnp.where(taken, order, -1).astype(jnp.int32)


def entropy_top_mask(entropy: Array, hint: Array, mask: Array, *, share: float = 0.2) -> Array:
    """Which tokens train: all sampled tokens, and the hint tokens with the highest entropy.

        max(1, floor(share H)) of the H hint tokens, by entropy; equal ones in their order

    Args:
      entropy: ``[..., T]``, floating point, of the denoiser at each token; read only at hints.
      hint: bool ``[..., T]``, :func:`hint_mask`; False for a response that was not replaced.
      mask: bool ``[..., T]``, True for tokens of the response.
      share: Share of the hint tokens that train, in [0, 1]; with 0 none does.

    Returns:
      bool ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> entropy = jnp.array([0.1, 0.9, 0.5, 0.7])
      >>> hint, mask = jnp.array([True, True, False, False]), jnp.ones(4, bool)
      >>> jr.diffusion.entropy_top_mask(entropy, hint, mask, share=0.5).tolist()
      [False, True, True, True]

    References:
      Zhao et al., IGPO (arXiv:2509.10396), the released code, in which one token trains with a
      share of 0 too.
    """
    function = "entropy_top_mask"
    _inputs.check_token_mask(function, "hint", hint)
    masking.check_tokens(function, mask, entropy=entropy)
    checks.check_same_shape(function, entropy=entropy, hint=hint)
    checks.check_share(function, share=share)
    hint = hint & mask
    score = jnp.where(hint, -masking.zero_masked(entropy, hint), jnp.inf)
    rank = jnp.argsort(jnp.argsort(score, axis=-1, stable=True), axis=-1)
    count = jnp.floor(share * masking.lengths(hint) + 1e-4)
    count = jnp.where(share > 0, jnp.maximum(count, 1.0), 0.0)
    return mask & (~hint | (rank < count[..., None]))
