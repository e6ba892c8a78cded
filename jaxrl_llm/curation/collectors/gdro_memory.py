"""The memory of Rollout-GDRO across batches: bins of prompts, their arms, a price."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import Array, checks, masking
from jaxrl_llm.curation.collectors.two_phase import Memory
from jaxrl_llm.curation.prompts.arms import arm_scores_update, shadow_price
from jaxrl_llm.curation.prompts.bins import (
    PassHistory,
    bin_means,
    difficulty_bins,
    pass_history_init,
    pass_history_rate,
    pass_history_update,
)

__all__ = ["RolloutGdroState", "rollout_gdro_memory"]


class RolloutGdroState(NamedTuple):
    """State of :func:`rollout_gdro_memory`.

    Attributes:
      history: :class:`PassHistory` over the N prompts.
      bins: int32 ``[N]``, the bin of each prompt at its last visit; -1 before.
      scores: ``[Nb, M]`` float32, scores of the arms.
      price: float32 ``[]``, price of a rollout.
    """

    history: PassHistory
    bins: Array
    scores: Array
    price: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class _GdroMemory:
    """Made by :func:`rollout_gdro_memory`."""

    arms: tuple[int, ...]
    edges: tuple[float, ...]
    window: int
    hysteresis: float
    rate: float
    threshold: float

    def init(self, num_prompts: int) -> RolloutGdroState:
        history = pass_history_init(num_prompts, self.window)
        return RolloutGdroState(
            history=jax.tree.map(np.asarray, history),
            bins=np.full(num_prompts, -1, np.int32),
            scores=np.zeros((len(self.edges) + 1, len(self.arms)), np.float32),
            price=np.zeros((), np.float32),
        )

    def read(self, state: RolloutGdroState, *, prompts: np.ndarray) -> dict[str, Any]:
        history = PassHistory(state.history.hits[prompts], state.history.count[prompts])
        bins = difficulty_bins(
            pass_history_rate(history),
            edges=self.edges,
            last=state.bins[prompts],
            hysteresis=self.hysteresis,
        )
        return {"bins": np.asarray(bins), "arm_scores": state.scores}

    def learn(
        self,
        state: RolloutGdroState,
        *,
        prompts: np.ndarray,
        rewards: np.ndarray,
        where: np.ndarray,
        counts: np.ndarray,
        group_size: int,
    ) -> RolloutGdroState:
        bins, size = self.read(state, prompts=prompts)["bins"], len(self.edges) + 1
        each = np.broadcast_to(bins[:, None], rewards.shape)
        failed = 1.0 - rewards
        failure, present = bin_means(failed, each, num_bins=size, where=where)
        # Above or below the batch: a score that only grows would never try another arm.
        failure = jnp.where(present, failure - masking.masked_mean(failed, where), 0.0)
        chosen = np.full(size, -1, np.int32)
        graded = np.any(where, axis=-1)  # else a count is not of an arm that the bin chose
        for b, count, there in zip(bins, counts, graded, strict=True):
            if there and count in self.arms:
                chosen[b] = self.arms.index(count)
        learned = RolloutGdroState(
            history=pass_history_update(
                PassHistory(jnp.asarray(state.history.hits), jnp.asarray(state.history.count)),
                prompts,
                np.any((rewards > self.threshold) & where, axis=-1),
                where=where.any(axis=-1),
            ),
            bins=jnp.asarray(state.bins).at[prompts].set(bins),
            scores=arm_scores_update(
                jnp.asarray(state.scores),
                chosen,
                failure,
                arms=self.arms,
                price=state.price,
                mean_rollouts=group_size,
            ),
            price=shadow_price(
                state.price, float(counts.mean()), mean_rollouts=group_size, rate=self.rate
            ),
        )
        return jax.tree.map(np.asarray, learned)

    def __repr__(self) -> str:
        return (
            f"rollout_gdro_memory(arms={self.arms}, edges={self.edges}, window={self.window}, "
            f"hysteresis={self.hysteresis}, rate={self.rate}, threshold={self.threshold})"
        )


def rollout_gdro_memory(
    *,
    arms: tuple[int, ...],
    edges: tuple[float, ...] = (0.4, 0.75),
    window: int = 50,
    hysteresis: float = 0.03,
    rate: float = 0.05,
    threshold: float = 0.5,
) -> Memory:
    """The memory of Rollout-GDRO: bins of prompts, scores of their arms, the price of a rollout.

    An allocator reads ``bins`` ``[P]`` and ``arm_scores`` ``[Nb, M]``. After a batch, the score of
    each bin's arm increases by the bin's failure rate relative to the batch's, minus the price of
    its rollouts.

    Args:
      arms: Numbers of rollouts to choose from, each above 0, in ascending order.
      edges: As in :func:`~jaxrl_llm.curation.difficulty_bins`.
      window: Number of recent groups of a prompt that count.
      hysteresis: As in :func:`~jaxrl_llm.curation.difficulty_bins`.
      rate: Update rate of the price, as in :func:`~jaxrl_llm.curation.shadow_price`.
      threshold: A reward above it counts as a right answer.

    Returns:
      A Memory with :class:`RolloutGdroState`, for :func:`~jaxrl_llm.curation.two_phase`.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import numpy as np
      >>> import jaxrl_llm as jr
      >>> memory = jr.curation.rollout_gdro_memory(arms=(2, 4))
      >>> memory.read(memory.init(10), prompts=np.array([3, 4]))["bins"].tolist()
      [0, 0]

    References:
      Rollout-GDRO (arXiv:2601.19280) and its released code, where the arm gains the mean clipped
      loss of its bin as an estimate of -J; here J is the mean reward itself, which is known before
      the update.
    """
    name = "rollout_gdro_memory"
    pass_history_init(1, window)
    checks.check_positive(name, finite=True, rate=rate)
    difficulty_bins(jnp.zeros(1), edges=edges, last=jnp.zeros(1, jnp.int32), hysteresis=hysteresis)
    if not arms or list(arms) != sorted(set(arms)) or arms[0] < 1:
        raise ValueError(f"{name}: arms must be integers above 0 in ascending order; got {arms!r}.")
    return _GdroMemory(
        arms=tuple(arms),
        edges=edges,
        window=window,
        hysteresis=hysteresis,
        rate=rate,
        threshold=threshold,
    )
