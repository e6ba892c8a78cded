"""Who samples the rollouts of a batch, if it is not the policy alone."""

import dataclasses
from typing import Any, ClassVar, Self

from jaxrl_llm.core import checks
from jaxrl_llm.recipes.parts.part import RecipePart
from jaxrl_llm.recipes.wiring import corrects_behavior

_HALVES = ("policy", "reference")


@dataclasses.dataclass(frozen=True)
class SampledBy(RecipePart):
    """The reference samples, or each of the two half of the rollouts.

    Attributes:
      who: "reference", one that moves; or ("policy", "reference").
    """

    who: str | tuple[str, str]

    keyword: ClassVar[str] = "sampled_by"
    title: ClassVar[str] = "sampled_by"

    @classmethod
    def of(cls, recipe: str, value: Any) -> Self | None:
        """The part; None if the policy samples."""
        options = (*_HALVES, _HALVES)
        checks.check_option(f"Recipe {recipe!r}", cls.keyword, value, options)
        return None if value == "policy" else cls(value)

    @property
    def value(self) -> str | tuple[str, str]:
        """Who samples."""
        return self.who

    def check(self, recipe) -> None:
        """Raises ValueError unless the recipe has such a reference."""
        moves = recipe.reference is not None
        if self.who == "reference":
            present, needs = moves, "moves"
        else:
            present = recipe.uses_reference and not moves
            needs = "is frozen and whose ref_logp a function reads"
        if not present:
            raise ValueError(
                f"Recipe {recipe.name!r}: sampled_by={self.who!r} needs a reference that {needs}."
            )


@dataclasses.dataclass(frozen=True)
class TeacherMixture(RecipePart):
    """Each token is drawn from ``(1 - weight) policy + weight teacher``.

    Attributes:
      weight: In (0, 1).
    """

    weight: float

    keyword: ClassVar[str] = "teacher_mixture"
    title: ClassVar[str] = "teacher_mixture"

    @classmethod
    def of(cls, recipe: str, value: Any) -> Self | None:
        """The part; None for the weight 0."""
        checks.check_share(f"Recipe {recipe!r}", one=False, teacher_mixture=value)
        return cls(value) if value else None

    @property
    def value(self) -> float:
        """The weight of the teacher."""
        return self.weight

    def check(self, recipe) -> None:
        """Raises ValueError unless the recipe learns from a model, and corrects for the mixture."""
        if not (recipe.learns_from_model and corrects_behavior(recipe)):
            raise ValueError(
                f"Recipe {recipe.name!r}: teacher_mixture samples from policy and teacher, so the "
                "recipe must read another model's numbers and weigh by behavior_logp."
            )


@dataclasses.dataclass(frozen=True)
class RoundedSampler(RecipePart):
    """Rollouts, or the drafts of a collector, are sampled with layers rounded to 8 bits.

    Attributes:
      mode: "int8" or "fp8".
    """

    mode: str

    keyword: ClassVar[str] = "sampler_quantization"
    title: ClassVar[str] = "sampler_quantization"

    @classmethod
    def of(cls, recipe: str, value: Any) -> Self | None:
        """The part; None for full precision."""
        checks.check_option(f"Recipe {recipe!r}", cls.keyword, value, (None, "int8", "fp8"))
        return None if value is None else cls(value)

    @property
    def value(self) -> str:
        """The mode."""
        return self.mode
