"""The rewards that a method is defined for: their range, and whether they are 0 and 1 alone."""

import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.core import functions_of, traits_of
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.curation.collectors.protocol import collector_parts
from jaxrl_llm.data.questions import Question
from jaxrl_llm.recipes import PRESETS
from jaxrl_llm.recipes.catalog import preset

# Parts of a reward that add up in float32 may miss a bound by a rounding.
_ROUNDING = 1e-6


class RewardValues(NamedTuple):
    """The rewards of a method.

    Attributes:
      low, high: The smallest and the largest, or infinity.
      binary: The function that means 0 and 1 alone; None for none.
    """

    low: float
    high: float
    binary: Any = None

    def __str__(self) -> str:
        if self.binary is not None:
            return f"rewards of 0 and 1, which {stable_repr(self.binary)} counts"
        if math.isinf(self.high):
            return f"rewards of at least {self.low:g}"
        if math.isinf(self.low):
            return f"rewards of at most {self.high:g}"
        return f"rewards in [{self.low:g}, {self.high:g}]"


def reward_values(recipe: Any) -> RewardValues:
    """The rewards that all parts of a recipe are defined for.

    The advantage states a ``reward_range`` (see ``core.traits``), and so does a collector as an
    attribute. ``binary_rewards`` may be a trait of an advantage, of a rule of curation or of an
    option of a collector.

    Example:
      >>> import jaxrl_llm as jr
      >>> reward_values(jr.recipes.mopps())[:2], reward_values(jr.recipes.grpo())[:2]
      ((0.0, 1.0), (-inf, inf))
    """
    parts = list(collector_parts(recipe.collector))
    held = [option for part in parts for option in getattr(part, "__dict__", {}).values()]
    ranges = [each.reward_range for each in (*parts, *held) if hasattr(each, "reward_range")]
    options = [option for option in held if callable(option)]
    ranges.append(recipe.needs.reward_range)
    rules = (*options, *recipe.needs.reward_functions)
    binary = next((rule for rule in rules if traits_of(rule).binary_rewards), None)
    if binary is not None:
        ranges.append((0.0, 1.0))
    return RewardValues(
        max((low for low, _ in ranges), default=-math.inf),
        min((high for _, high in ranges), default=math.inf),
        binary,
    )


def check_stated(recipe: Any, graded: Any) -> None:
    """Raises ValueError if a reward or an environment states rewards that a recipe cannot take.

    An environment states the smallest and largest sum of an episode as ``reward_range``, a reward
    its values by ``core.traits(reward_range=...)``.
    """
    stated = getattr(graded, "reward_range", None) or traits_of(graded).reward_range
    values = reward_values(recipe)
    if all(map(math.isinf, stated)) or values.low <= stated[0] and stated[1] <= values.high:
        return
    raise ValueError(
        f"config: recipe {recipe.name!r} is only defined for {values}, but {stable_repr(graded)} "
        f"gives rewards from {stated[0]:g} to {stated[1]:g}; scale them, or use another recipe."
    )


def check_rewards(recipe: Any, rewards: np.ndarray, questions: Sequence[Question]) -> None:
    """Raises ValueError if a recipe is not defined for a reward ``[P, G]`` of a batch."""
    values = reward_values(recipe)
    wrong = (rewards < values.low - _ROUNDING) | (rewards > values.high + _ROUNDING)
    if values.binary is not None:
        wrong |= np.minimum(np.abs(rewards), np.abs(rewards - 1)) > _ROUNDING
    if not wrong.any():
        return
    row, place = np.argwhere(wrong)[0]
    raise ValueError(
        f"recipe {recipe.name!r} is only defined for {values}; prompt "
        f"{questions[row].prompt.name!r} has a reward of {rewards[row, place]:g}."
    )


def check_weights(config: Any, recipe: Any) -> None:
    """Raises ValueError if a recipe reads no weights, and the reward has some."""
    weights = getattr(config.reward, "weights_of_sum", None) or {}
    if "reward_components" not in recipe.needs.fields:
        return
    if recipe.name not in PRESETS or all(weight == 1 for weight in weights.values()):
        return
    functions = [getattr(x, "function", x) for x in functions_of(recipe.advantage)]
    options = [dict(getattr(function, "options", ())) for function in functions]
    left_out = any(bound.get("weights", weights) is None for bound in options)
    length = config.sampling.max_new_tokens
    if not left_out and recipe != preset(recipe.name, length=length):
        return  # it may have weights of its own
    known = inspect.signature(PRESETS[recipe.name]).parameters
    by_name = {f"{name}_weight": weight for name, weight in weights.items()}
    takes = ", ".join(f"{name}={x:g}" for name, x in by_name.items() if name in known)
    if "weights" in known:
        pairs = ", ".join(f"({name!r}, {weight:g})" for name, weight in weights.items())
        takes = f"weights=({pairs})"
    remedy = f"give them to jr.recipes.{recipe.name}({takes}), or " if takes else ""
    raise ValueError(
        f"config: recipe {recipe.name!r} reads each reward apart, and not the weights of "
        f"{config.reward!r}; {remedy}make them 1."
    )
