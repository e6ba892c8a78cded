"""Numbers that change during training, as functions and as controllers of a recipe.

- ``step``: int ``[...]``, batches trained on so far, whatever the number of updates of each.
- Results are float32 ``[...]``. A number out of its range raises ValueError.
"""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp

from jaxrl_llm.core import Array, Transform, bind, checks, prints_as_call

__all__ = [
    "icpo_bonus",
    "linear_schedule",
    "no_update",
    "scheduled",
    "sqrt_lr",
    "training_progress",
    "warmup_cosine",
]


def linear_schedule(progress: Array, *, start: float, end: float) -> Array:
    """A straight line from ``start`` to ``end``.

        (1 - p) start + p end,   p = clip(progress, 0, 1)

    Args:
      progress: ``[...]``, share of the training that is done, in [0, 1].
      start: Value at 0.
      end: Value at 1 and beyond.

    Returns:
      ``[...]``.

    Raises:
      TypeError: If ``progress`` is not a number or an array.

    Example:
      >>> import jaxrl_llm as jr
      >>> float(jr.curation.linear_schedule(0.5, start=0.25, end=0.75))
      0.5

    References:
      D3S (arXiv:2509.22115) relaxes its shares in this way.
    """
    checks.check_min_rank("linear_schedule", 0, progress=progress)
    p = jnp.clip(jnp.asarray(progress, jnp.float32), 0.0, 1.0)
    return (1.0 - p) * start + p * end


def training_progress(step: Array, *, steps: int) -> Array:
    """The share of the training that is done.

        min(step / steps, 1)

    Args:
      step: See the module.
      steps: Total number of batches, above 0.

    Returns:
      ``[...]`` in [0, 1].

    Example:
      >>> import jaxrl_llm as jr
      >>> float(jr.curation.training_progress(25, steps=100))
      0.25

    References:
      None; the clock of the schedules here.
    """
    checks.check_positive("training_progress", finite=True, steps=steps)
    return jnp.clip(jnp.asarray(step, jnp.float32) / steps, 0.0, 1.0)


def warmup_cosine(step: Array, *, peak: float, valley: float, warmup: int, decay: int) -> Array:
    """A share that rises in a straight line and then falls along half of a cosine.

        peak step / warmup                                                   for step < warmup
        valley + (peak - valley) (1 + cos(pi (step - warmup) / decay)) / 2   for the next ``decay``
        valley                                                               afterwards

    Args:
      step: See the module.
      peak: Value after the warmup, in [0, 1].
      valley: Value at the end, in [0, 1].
      warmup: Number of batches of the rise, 0 or above.
      decay: Number of batches of the fall, 0 or above.

    Returns:
      ``[...]`` in [0, 1].

    Raises:
      ValueError: Also if there is neither a rise nor a fall, so that a peak other than the valley
        has no effect.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> steps = jnp.array([0, 1, 2, 4, 6, 9])
      >>> jr.curation.warmup_cosine(steps, peak=0.5, valley=0.25, warmup=2, decay=4).tolist()
      [0.0, 0.25, 0.5, 0.375, 0.25, 0.25]

    References:
      Zhang et al., CHORD (arXiv:2508.11408), the weight mu of its SFT loss, with the cosine of
      Trinity-RFT and ms-swift.
    """
    name = "warmup_cosine"
    checks.check_share(name, peak=peak, valley=valley)
    checks.check_non_negative(name, finite=True, warmup=warmup, decay=decay)
    if not (warmup or decay) and peak != valley:
        raise ValueError(
            f"{name}: peak {peak:g} has no effect without warmup and decay; valley is {valley:g}."
        )
    step = jnp.asarray(step, jnp.float32)
    fallen = jnp.clip((step - warmup) / max(decay, 1), 0.0, 1.0)
    falling = valley + (peak - valley) * (1.0 + jnp.cos(math.pi * fallen)) / 2
    after = jnp.where(step >= warmup + decay, valley, falling)
    return jnp.where(step < warmup, peak * step / max(warmup, 1), after).astype(jnp.float32)


def no_update(advantages: Array) -> Array:
    """The scale of an update that leaves the parameters unchanged: 0.

        params + 0 * update

    For ``Computed("update_scale", no_update, "batch")`` of a method that learns outside of the
    weights, such as :func:`experienced`.

    Args:
      advantages: Not read.

    Returns:
      ``[]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> float(jr.curation.no_update(jnp.ones((2, 4))))
      0.0

    References:
      Training-free GRPO (arXiv:2510.08191).
    """
    del advantages
    return jnp.zeros((), jnp.float32)


def sqrt_lr(lr: float, *, old_size: float, new_size: float) -> float:
    """The learning rate for another number of rollouts per step.

        lr sqrt(new_size / old_size)

    Args:
      lr: Learning rate for ``old_size``.
      old_size: Previous number of rollouts per step, above 0.
      new_size: New number of rollouts per step, above 0.

    Returns:
      A number.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.sqrt_lr(1e-6, old_size=512 * 16, new_size=128 * 512)
      2.82...e-06

    References:
      BroRL (arXiv:2510.01180). PAPER reading.
    """
    checks.check_positive("sqrt_lr", finite=True, old_size=old_size, new_size=new_size)
    return lr * math.sqrt(new_size / old_size)


def icpo_bonus(step: Array, *, beta: float = 1.0, anneal: int = 400) -> Array:
    """Factor of the reward of a steered rollout, which decays to 1.

        1 + beta max(0, 1 - step / anneal)

    Args:
      step: See the module.
      beta: Bonus at the start, 0 or above, as a share of the reward.
      anneal: Number of batches until the bonus is 0, above 0.

    Returns:
      ``[...]``, 1 or above.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.icpo_bonus(jnp.array([0, 200, 400, 900])).tolist()
      [2.0, 1.5, 1.0, 1.0]

    References:
      ICPO (arXiv:2510.26519); in its released code it replaces the reward 1 of a right answer.
    """
    checks.check_non_negative("icpo_bonus", finite=True, beta=beta)
    checks.check_positive("icpo_bonus", finite=True, anneal=anneal)
    return 1.0 + beta * jnp.maximum(1.0 - jnp.asarray(step, jnp.float32) / anneal, 0.0)


@dataclasses.dataclass(frozen=True)
class _Scheduled:
    """The update half of :func:`scheduled`; a value, so that equal transforms compare equal."""

    function: Callable

    def __call__(self, rewards, step):
        return self.function(step), step + 1


@prints_as_call
def scheduled(function: Callable, **options) -> Transform:
    """A controller whose value depends on the step alone, which counts batches.

        value = function(step);  step <- step + 1,  from 0

    Args:
      function: ``function(step, **options) -> float32 []``, such as :func:`icpo_bonus`.
      **options: Fixed with :func:`jaxrl_llm.bind`, which rejects unknown names.

    Returns:
      A Transform for a recipe's ``computed`` "controller"; its state is the step.

    Raises:
      TypeError: If ``function`` has no option of that name.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> clock = jr.curation.scheduled(jr.curation.training_progress, steps=4)
      >>> state = clock.init()
      >>> value, state = clock.update(jnp.zeros(1), state)
      >>> value, state = clock.update(jnp.zeros(1), state)
      >>> float(value), int(state)
      (0.25, 2)

    References:
      None; the state behind the schedules here.
    """
    first = bind(jnp.zeros, shape=(), dtype=jnp.int32)
    return Transform(first, _Scheduled(bind(function, **options)))
