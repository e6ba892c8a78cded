"""Rewards for agreement with the rollouts of other paraphrases of a question.

N paraphrases of a question have G rollouts each. ``similarity`` is the floating-point similarity of
two decoded texts (:func:`bleu` in the paper), computed on the host. Its size is quadratic in N G
because the method compares every pair. Rewards are float32. Every function raises TypeError for
another dtype and ValueError where shapes disagree or a number is out of its range.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import Array, checks, masking, stats


def bleu(candidate: str, reference: str, *, order: int = 2) -> float:
    """BLEU of one text against another; words are separated by white space.

        precision_n = n-grams of the candidate that the reference has (as often at most) / all
        BLEU = min(1, exp(1 - words of reference / words of candidate)) (prod_n precision_n)^(1/N)

    N is ``order``, or the number of words of the shorter text if that is smaller.

    Args:
      candidate: The text that is measured.
      reference: The text that it is compared with.
      order: Length of the longest n-gram.

    Returns:
      In [0, 1]; 1 for equal non-empty texts, 0 if either is empty.

    Raises:
      ValueError: If ``order`` is below 1.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.rewards.bleu("the capital is Paris", "the capital is Rome", order=1)
      0.75
      >>> jr.rewards.bleu("Paris", "Paris"), jr.rewards.bleu("", "Paris")
      (1.0, 0.0)

    References:
      Papineni et al., BLEU (2002), per sentence and without smoothing.
    """
    checks.check_positive("bleu", order=order)
    words, others = candidate.split(), reference.split()
    order = min(order, len(words), len(others))
    if not order:
        return 0.0
    logs = 0.0
    for n in range(1, order + 1):
        grams, known = (
            Counter(tuple(x[i : i + n]) for i in range(len(x) - n + 1)) for x in (words, others)
        )
        matches = (grams & known).total()
        if not matches:
            return 0.0
        logs += float(np.log(matches / grams.total())) / order
    return float(np.exp(min(0.0, 1 - len(others) / len(words)) + logs))


def paraphrase_similarity(
    texts: Sequence[Sequence[str]], *, metadata: Sequence[Mapping[str, Any]], order: int = 2
) -> np.ndarray:
    """Similarities of the responses of a batch to those of their question's paraphrases.

        similarity[p, i, (m, j)] = bleu(text[p, i], text[m, j]),   m of the same question as p

    The N paraphrases of a question are consecutive prompts, as
    :func:`jaxrl_llm.curation.paraphrased` requests them; N is the length of the column
    "paraphrases". Use it as ``Computed("similarity", ..., "responses")``.

    Args:
      texts: P lists of G responses.
      metadata: The columns of P prompts.
      order: Longest n-gram.

    Returns:
      float32 ``[P, G, N G]``, for :func:`paraphrase_rewards`. Similarities within a paraphrase are
      not used and are 0.

    Example:
      >>> import jaxrl_llm as jr
      >>> rows = [{"paraphrases": ["a?", "b?"]}] * 2
      >>> jr.rewards.paraphrase_similarity([["x", "y"], ["x", "x"]], metadata=rows)[0].tolist()
      [[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]

    References:
      Con-RAG, PS-GRPO (arXiv:2510.04392), which measures agreement by BLEU. PAPER reading.
    """
    count, group = len(metadata[0]["paraphrases"]), len(texts[0])
    similarity = np.zeros((len(texts), group, count, group), np.float32)
    for p, row in enumerate(texts):
        first = p - p % count
        for m in range(count):
            if first + m == p:
                continue
            for i, candidate in enumerate(row):
                for j, reference in enumerate(texts[first + m]):
                    similarity[p, i, m, j] = bleu(candidate, reference, order=order)
    return similarity.reshape(len(texts), group, count * group)


def cross_paraphrase_reward(similarity: Array, *, pair_mask: Array | None = None) -> Array:
    """The agreement of a rollout with the rollouts of the other paraphrases of its question.

        r[n, i] = mean over m != n and all j of similarity[n, i, m, j]

    Similarities within a paraphrase, including the diagonal, are never read. ``pair_mask``
    (:func:`sample_pair_mask`) selects a sample of the pairs, which needs ``N G kappa s``
    similarities instead of ``N (N - 1) G^2``.

    Args:
      similarity: ``[..., N, G, N, G]``; see the module.
      pair_mask: bool ``[..., N, G, N, G]``, True for pairs that count. None counts all.

    Returns:
      Rewards ``[..., N, G]``; 0 for a rollout without a pair. Compute advantages per paraphrase,
      not over the set.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rows = [[1, .5, .2, .4], [.5, 1, .6, .8], [.2, .6, 1, .3], [.4, .8, .3, 1]]
      >>> reward = jr.rewards.cross_paraphrase_reward(jnp.array(rows).reshape(2, 2, 2, 2))
      >>> reward.round(3).tolist()
      [[0.3..., 0.7...], [0.4..., 0.6...]]

    References:
      Con-RAG, PS-GRPO (arXiv:2510.04392). PAPER reading, through a detailed note; we read no code.
    """
    function = "cross_paraphrase_reward"
    checks.check_min_rank(function, 4, similarity=similarity)
    checks.check_float(function, similarity=similarity)
    checks.check_bool(function, pair_mask=pair_mask)
    checks.check_same_shape(function, similarity=similarity, pair_mask=pair_mask)
    shape = jnp.shape(similarity)
    if shape[-4:-2] != shape[-2:]:
        raise ValueError(
            f"{function}: similarity must be [..., N, G, N, G], each rollout against each; "
            f"got shape {shape}."
        )
    other = ~jnp.eye(shape[-2], dtype=bool)[:, None, :, None]
    counted = other if pair_mask is None else other & pair_mask
    counted = jnp.broadcast_to(counted, shape)
    return masking.masked_mean(similarity, counted, axis=(-2, -1))


def paraphrase_rewards(
    rewards: Array,
    *,
    similarity: Array,
    where: Array | None = None,
    agreement: float = 1.0,
    accuracy: float = 0.0,
) -> Array:
    """Rewards of a batch whose prompts come in sets of paraphrases: agreement plus accuracy.

        r = agreement * cross_paraphrase_reward + accuracy * rewards

    N consecutive prompts are the paraphrases of one question, and each row has its similarities to
    those N. No rollout is compared with a rollout with ``where=False``.

    Args:
      rewards: ``[P, G]``, floating point, the accuracy; P is a multiple of N.
      similarity: ``[P, G, N G]``: similarities of a rollout to those of its set, starting with the
        G of the set's first prompt. See the module.
      where: bool ``[P, G]``, True for rollouts to include; the rest get 0.
      agreement: Weight of the agreement.
      accuracy: Weight of ``rewards``; at 0 they are not read.

    Returns:
      Rewards ``[P, G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rows = [[1, .5, .2, .4], [.5, 1, .6, .8], [.2, .6, 1, .3], [.4, .8, .3, 1]]
      >>> similarity = jnp.array(rows).reshape(2, 2, 4)
      >>> r = jr.rewards.paraphrase_rewards(jnp.ones((2, 2)), similarity=similarity, accuracy=1.0)
      >>> r.round(3).tolist()
      [[1.3..., 1.7...], [1.4..., 1.6...]]

    References:
      Con-RAG, PS-GRPO (arXiv:2510.04392). PAPER reading; the paper has both terms, the weights are
      ours.
    """
    function = "paraphrase_rewards"
    stats.check_group(function, rewards, where)
    checks.check_rank(function, 2, rewards=rewards)
    checks.check_rank(function, 3, similarity=similarity)
    prompts, group = jnp.shape(rewards)
    count = jnp.shape(similarity)[2] // max(group, 1)
    checks.check_shape(function, "similarity", similarity, (prompts, group, count * group))
    if count == 0 or prompts % count:
        raise ValueError(
            f"{function}: the prompts of rewards {jnp.shape(rewards)} must be sets of the "
            f"{count} paraphrases of similarity {jnp.shape(similarity)}."
        )
    blocks = (prompts // count, count, group)
    valid = jnp.ones((prompts, group), bool) if where is None else where
    valid = valid.reshape(blocks)
    pairs = jnp.broadcast_to(valid[..., None, None] & valid[:, None, None], (*blocks, count, group))
    agreed = cross_paraphrase_reward(
        jnp.reshape(similarity, (*blocks, count, group)), pair_mask=pairs
    )
    total = agreement * agreed.reshape(prompts, group)
    if accuracy != 0:
        total = total + accuracy * masking.zero_masked(rewards, where)
    return masking.zero_masked(total, where)


def sample_pair_mask(
    key: Array, *, shape: tuple[int, ...], paraphrases: int = 3, rollouts: int = 1
) -> Array:
    """Draws for each rollout a few other paraphrases, and a few rollouts of each.

        for each (n, i): ``paraphrases`` of the m != n, and ``rollouts`` of the G of each, uniformly
        and without replacement

    With ``paraphrases = N - 1`` and ``rollouts = G`` all pairs are drawn, which is exact.

    Args:
      key: Typed PRNG key.
      shape: ``(..., N, G)``.
      paraphrases: Number of other paraphrases that a rollout is compared with, 1 to N - 1.
      rollouts: Number of rollouts of each, 1 to G.

    Returns:
      bool ``[..., N, G, N, G]``, True for the pairs drawn; ``paraphrases * rollouts`` in each row.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> mask = jr.rewards.sample_pair_mask(jax.random.key(0), shape=(4, 2), paraphrases=3)
      >>> mask.shape, mask.sum((-2, -1)).tolist()
      ((4, 2, 4, 2), [[3, 3], [3, 3], [3, 3], [3, 3]])

    References:
      Con-RAG, PS-GRPO (arXiv:2510.04392), with 3 paraphrases and 1 rollout. PAPER reading.
    """
    if len(shape) < 2:
        raise ValueError(f"sample_pair_mask: shape must be (..., N, G); got {tuple(shape)}.")
    count, group = shape[-2:]
    for name, value, most in (
        ("paraphrases", paraphrases, count - 1),
        ("rollouts", rollouts, group),
    ):
        if not 1 <= value <= most:
            raise ValueError(
                f"sample_pair_mask: {name} must be from 1 to {most} for shape {tuple(shape)}; "
                f"got {value}."
            )
    among, within = jax.random.split(key)
    lots = jax.random.uniform(among, (*shape, count))
    itself = jnp.eye(count, dtype=bool)[:, None, :]
    _, place = stats.order_and_ranks(jnp.where(itself, 2.0, lots))
    drawn = place < paraphrases
    lots = jax.random.uniform(within, (*shape, count, group))
    _, place = stats.order_and_ranks(lots)
    return drawn[..., None] & (place < rollouts)
