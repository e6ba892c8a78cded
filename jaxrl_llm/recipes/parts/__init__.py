"""The parts of a recipe, one record a part; :data:`KEYWORDS` are those with a keyword of Recipe."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.recipes.parts.critic import Critic
from jaxrl_llm.recipes.parts.denoiser import Denoiser
from jaxrl_llm.recipes.parts.part import RecipePart
from jaxrl_llm.recipes.parts.process_reward import ProcessRewardModel
from jaxrl_llm.recipes.parts.references import EarlierIterations, MovingReference
from jaxrl_llm.recipes.parts.sampled_by import RoundedSampler, SampledBy, TeacherMixture
from jaxrl_llm.recipes.parts.second_model import SecondModel
from jaxrl_llm.recipes.parts.subagent import Subagent
from jaxrl_llm.recipes.parts.texts import Texts
from jaxrl_llm.recipes.parts.turn_updates import TurnUpdates

_KINDS: tuple[type[RecipePart], ...] = (
    Critic,
    ProcessRewardModel,
    Denoiser,
    MovingReference,
    EarlierIterations,
    SampledBy,
    TeacherMixture,
    RoundedSampler,
    TurnUpdates,
    Subagent,
    Texts,
)
KEYWORDS = {kind.keyword: kind for kind in _KINDS}


def merged(recipe) -> dict[str, Any]:
    """``parts`` and each keyword of a recipe, where a part is in both.

    Raises:
      TypeError: If a part is no RecipePart, or the value of a keyword has a wrong type.
      ValueError: If two parts are of one kind, or a keyword and a part of its kind differ.
    """
    name = f"Recipe {recipe.name!r}"
    if not isinstance(recipe.parts, tuple) or not all(
        isinstance(part, RecipePart) for part in recipe.parts
    ):
        raise TypeError(f"{name}: parts must be a tuple of parts; got {recipe.parts!r}.")
    values, parts = dict[str, Any](), dict[type, RecipePart]()
    for part in recipe.parts:
        if type(part) in parts:
            raise ValueError(f"{name}: parts has two of one kind, {part!r}.")
        parts[type(part)] = part
    for keyword, kind in KEYWORDS.items():
        part, listed = kind.of(recipe.name, getattr(recipe, keyword)), parts.get(kind)
        if part is not None and listed is not None and part != listed:
            raise ValueError(f"{name}: {keyword} and parts name two of one kind, {listed!r}.")
        if (part := part or listed) is not None:
            parts[kind], values[keyword] = part, part.value
    order = [*_KINDS, *(kind for kind in parts if kind not in _KINDS)]
    return values | {"parts": tuple(parts[kind] for kind in order if kind in parts)}


def without_repeats(recipe, changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Changes of a recipe, so that what they do not name stands once: as keyword or as part."""
    if "parts" not in changes:
        return {**changes, "parts": recipe.further_parts}
    defaults = {f.name: f.default for f in dataclasses.fields(recipe)}
    return {keyword: defaults[keyword] for keyword in KEYWORDS} | dict(changes)


__all__ = [
    "KEYWORDS",
    "Critic",
    "Denoiser",
    "EarlierIterations",
    "MovingReference",
    "ProcessRewardModel",
    "RecipePart",
    "RoundedSampler",
    "SampledBy",
    "SecondModel",
    "Subagent",
    "TeacherMixture",
    "Texts",
    "TurnUpdates",
    "merged",
    "without_repeats",
]
