"""Prompt-GDRO: an adversary sets the weights of bins of prompts, by how much they fail.

Bins are those of :mod:`jaxrl_llm.curation.prompts.bins`, int32; -1 means none. ``where`` (bool,
True = takes part) excludes entries, which may hold anything.

Every function raises TypeError for an array of the wrong dtype, and ValueError for shapes that do
not match or an option out of its range.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_llm.core import Array, Transform, checks, masking, stats
from jaxrl_llm.curation.prompts.bins import (
    BinScores,
    PassHistory,
    bin_means,
    bin_scores_update,
    difficulty_bins,
    exponential_weights,
    pass_history_init,
    pass_history_rate,
    pass_history_update,
)


def bin_advantage_weights(
    weights: Array, bins: Array, *, most: float = 15.0, where: Array | None = None
) -> Array:
    """Factors of the advantages of each sequence: the weight of its bin, with mean 1.

        w_j = min(q[bin_j] / mean of q[bin] over the batch, most)

    Args:
      weights: ``[Nb]``, floating point, as :func:`exponential_weights` gives them.
      bins: int ``[...]``, of prompts or of sequences. Entries without a bin (-1) get 1 and are
        not in the mean.
      most: Greatest factor, above 0.
      where: ``[...]``. See the module.

    Returns:
      ``[...]`` float32; 1 where excluded.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> weights, bins = jnp.array([0.25, 0.75]), jnp.array([0, 0, 1, 1, -1])
      >>> jr.curation.bin_advantage_weights(weights, bins).tolist()
      [0.5, 0.5, 1.5, 1.5, 1.0]

    References:
      Prompt-GDRO (arXiv:2601.19280), and its released code; the paper multiplies by
      ``min(exp(eta s), most)``, of the same ratios between bins but for the exploration. In the
      released code the prompts without a bin are another bin.
    """
    name = "bin_advantage_weights"
    checks.check_rank(name, 1, weights=weights)
    checks.check_float(name, weights=weights)
    checks.check_integer(name, bins=bins)
    checks.check_bool(name, where=where)
    checks.check_same_shape(name, bins=bins, where=where)
    checks.check_positive(name, most=most)
    size = jnp.shape(weights)[0]
    valid = (bins >= 0) & (bins < size)
    if where is not None:
        valid &= where
    each = jnp.asarray(weights, jnp.float32)[jnp.clip(bins, 0, size - 1)]
    mean = masking.masked_mean(each, valid)
    scaled = jnp.minimum(each / jnp.where(mean > 0, mean, 1.0), most)
    return jnp.where(valid & (mean > 0), scaled, 1.0)


class PromptGdroState(NamedTuple):
    """State of :func:`prompt_gdro`.

    Attributes:
      history: :class:`PassHistory` over the N prompts.
      bins: int32 ``[N]``, the bin of each prompt at its last visit; -1 before.
      adversary: :class:`BinScores`.
    """

    history: PassHistory
    bins: Array
    adversary: BinScores


@dataclasses.dataclass(frozen=True)
class _GdroInit:
    num_prompts: int
    window: int
    num_bins: int

    def __call__(self) -> PromptGdroState:
        return PromptGdroState(
            pass_history_init(self.num_prompts, self.window),
            jnp.full(self.num_prompts, -1, jnp.int32),
            BinScores(jnp.zeros(self.num_bins, jnp.float32), jnp.zeros(self.num_bins, bool)),
        )


@dataclasses.dataclass(frozen=True)
class _GdroUpdate:
    edges: tuple[float, ...]
    hysteresis: float
    extremes: bool
    eta: float
    explore: float
    rate: float
    most: float
    correct: float

    def __call__(self, advantages, state, *, prompt_ids, rewards, where=None, **context):
        name = "prompt_gdro"
        stats.check_group(name, rewards, where)
        checks.check_rank(name, 2, rewards=rewards)
        checks.check_integer(name, prompt_ids=prompt_ids)
        checks.check_shape(name, "prompt_ids", prompt_ids, jnp.shape(rewards)[:1])
        size = state.bins.shape[0]
        known = (prompt_ids >= 0) & (prompt_ids < size)
        at = jnp.where(known, prompt_ids, 0)
        bins = difficulty_bins(
            pass_history_rate(state.history)[at],
            edges=self.edges,
            last=state.bins[at],
            hysteresis=self.hysteresis,
            extremes=self.extremes,
        )
        valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
        visited = known & jnp.any(valid, axis=-1)
        bins = jnp.where(visited, bins, -1)
        each = jnp.broadcast_to(bins[:, None], rewards.shape)
        failure, present = bin_means(
            1.0 - masking.zero_masked(rewards, valid),
            each,
            num_bins=len(self.edges) + 1,
            by_share=True,
            where=valid,
        )
        weights = exponential_weights(
            state.adversary.scores, eta=self.eta, explore=self.explore, present=present
        )
        factor = bin_advantage_weights(weights, each, most=self.most, where=valid)
        # One value a sequence, or one a token.
        factor = factor.reshape(factor.shape + (1,) * (jnp.ndim(advantages) - 2))
        hit = jnp.any((masking.zero_masked(rewards, valid) > self.correct) & valid, axis=-1)
        next_state = PromptGdroState(
            pass_history_update(state.history, prompt_ids, hit, where=visited),
            state.bins.at[jnp.where(bins >= 0, at, size)].set(bins, mode="drop"),
            bin_scores_update(state.adversary, failure, present, rate=self.rate),
        )
        return advantages * factor, next_state


def prompt_gdro(
    *,
    num_prompts: int,
    edges: tuple[float, ...] = (0.4, 0.75),
    window: int = 50,
    hysteresis: float = 0.03,
    extremes: bool = False,
    eta: float = 0.65,
    explore: float = 0.01,
    rate: float = 0.12,
    most: float = 15.0,
    correct: float = 0.5,
) -> Transform:
    """Advantages with weights of an adversary, which raises the bins that fail most.

        bin of a prompt       difficulty_bins of its last `window` groups
        weight of the batch   exponential_weights of the bins' scores, of mean 1, up to `most`
        afterwards            score <- moving average of the bin's mean 1 - reward, over its share

    A batch has the weights of the state before it. Reads ``prompt_ids [P]``, ``rewards [P, G]`` and
    ``where`` from the batch; put it after an advantage with :func:`jaxrl_llm.chain`.

    Args:
      num_prompts: N, the prompts of the dataset.
      edges: As in :func:`difficulty_bins`.
      window: Groups of a prompt that are remembered.
      hysteresis: As in :func:`difficulty_bins`.
      extremes: Whether prompts of rate 0 or 1 have a bin; where not, their weight is 1.
      eta: As in :func:`exponential_weights`.
      explore: As in :func:`exponential_weights`.
      rate: As in :func:`bin_scores_update`.
      most: As in :func:`bin_advantage_weights`.
      correct: A reward above it counts as a right answer.

    Returns:
      A Transform ``advantages [P, G] or [P, G, T] -> the same`` with :class:`PromptGdroState`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> robust = jr.curation.prompt_gdro(num_prompts=4, extremes=True)
      >>> rewards, ids = jnp.array([[1.0, 0.0]]), jnp.array([2])
      >>> out, state = robust.update(
      ...     jnp.array([[0.5, -0.5]]), robust.init(), prompt_ids=ids, rewards=rewards)
      >>> out.tolist(), state.adversary.scores.tolist()
      ([[0.5, -0.5]], [0.5, 0.0, 0.0])

    References:
      Prompt-GDRO (arXiv:2601.19280). The paper's score is the mean clipped loss of the bin, which
      with centered advantages is close to 0 at a ratio of 1; the failure rate instead is ours.
      :func:`bin_means` and :func:`bin_scores_update` take losses as well.
    """
    name = "prompt_gdro"
    pass_history_init(num_prompts, window)
    difficulty_bins(jnp.zeros(1), edges=edges, last=jnp.zeros(1, jnp.int32), hysteresis=hysteresis)
    checks.check_non_negative(name, finite=True, eta=eta)
    checks.check_share(name, explore=explore)
    checks.check_share(name, zero=False, rate=rate)
    checks.check_positive(name, most=most)
    return Transform(
        _GdroInit(num_prompts, window, len(edges) + 1),
        _GdroUpdate(edges, hysteresis, extremes, eta, explore, rate, most, correct),
    )
