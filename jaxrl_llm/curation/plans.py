"""Structured preferences over plans: a score from several criteria, and easy tasks first.

All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option out of range.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks

__all__ = ["stage_mask", "structured_score"]


def structured_score(
    task: Array,
    grounding: Array,
    history: Array,
    *,
    task_weight: float = 1 / 3,
    grounding_weight: float = 1 / 3,
    history_weight: float = 1 / 3,
) -> Array:
    """The score of a chain of reasoning; the best and the worst of a group form a pair.

        task_weight task + grounding_weight grounding + history_weight history

    Args:
      task: ``[...]``, floating point, how relevant the chain is to the task.
      grounding: ``[...]``, likewise, how well it is grounded in the observations.
      history: ``[...]``, likewise, how consistent it is with the previous steps.
      task_weight: Not negative; likewise ``grounding_weight`` and ``history_weight``.
      grounding_weight: See ``task_weight``.
      history_weight: See ``task_weight``.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> task, grounding, history = jnp.array([[0.9], [0.6], [0.0]])
      >>> jr.curation.structured_score(task, grounding, history).round(3).tolist()
      [0.5]

    References:
      Structured preference optimization (arXiv:2502.20742). Confidence: ABSTRACT, the weights are
      ours.
    """
    function = "structured_score"
    scores = {"task": task, "grounding": grounding, "history": history}
    checks.check_alike(function, scores)
    weights = (task_weight, grounding_weight, history_weight)
    checks.check_non_negative(
        function,
        finite=True,
        task_weight=task_weight,
        grounding_weight=grounding_weight,
        history_weight=history_weight,
    )
    return sum(
        (w * jnp.asarray(x, jnp.float32) for w, x in zip(weights, scores.values(), strict=True)),
        jnp.zeros(jnp.shape(task), jnp.float32),
    )


def stage_mask(stages: Array, step: int | Array, *, boundaries: Sequence[int]) -> Array:
    """The tasks of the stages reached so far, from easy to hard.

        stages <= number of boundaries that are at most step

    Args:
      stages: integers ``[...]``, the stage of each task, from 0, such as by the length of its plan.
      step: ``[]``, updates made so far.
      boundaries: Steps at which the next stage begins, increasing.

    Returns:
      bool ``[...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.stage_mask(jnp.array([0, 1, 2]), 100, boundaries=(100, 200)).tolist()
      [True, True, False]

    References:
      Structured preference optimization (arXiv:2502.20742), which trains from easy to hard.
      Confidence: ABSTRACT.
    """
    function = "stage_mask"
    checks.check_integer(function, stages=stages)
    if not boundaries or any(b >= a for b, a in zip(boundaries, boundaries[1:], strict=False)):
        raise ValueError(
            f"{function}: boundaries must be increasing, at least one; got {tuple(boundaries)}."
        )
    opened = jnp.sum(jnp.asarray(step) >= jnp.asarray(boundaries))
    return jnp.asarray(stages) <= opened
