"""References that move and policies of earlier iterations: copies that follow the policy."""

import dataclasses
from typing import Any, ClassVar, Self

import jax

from jaxrl_llm.core import call_with
from jaxrl_llm.recipes.parts.denoiser import of_likelihood
from jaxrl_llm.recipes.parts.part import RecipePart
from jaxrl_llm.recipes.records import name_of
from jaxrl_llm.recipes.wiring import Reader, check_arguments
from jaxrl_llm.regularizers import AnchoredReference, EarlierPolicies


@dataclasses.dataclass(frozen=True)
class MovingReference(RecipePart):
    """A reference that moves after each step.

    Attributes:
      rule: ``(reference, params, step) -> reference``; it may name ``key``, and with ``init`` it
        has a state, see :mod:`jaxrl_llm.regularizers.references`.
    """

    rule: Any

    keyword: ClassVar[str] = "reference"
    title: ClassVar[str] = "a reference"
    must_be: ClassVar[str] = "a function"

    @classmethod
    def of(cls, recipe: str, value: Any) -> Self | None:
        """The part of a rule; None for a frozen reference."""
        return cls(value) if callable(value) else super().of(recipe, value)

    @property
    def value(self) -> Any:
        """The rule."""
        return self.rule

    def check(self, recipe) -> None:
        """Raises ValueError if nothing reads the reference, or the policy that it began with."""
        name, arguments = f"Recipe {recipe.name!r}", ("reference", "params", "step")
        check_arguments(recipe.name, Reader("reference", self.rule, arguments), {"key"})
        if not (recipe.uses_reference or recipe.has_teacher):
            raise ValueError(
                f"{name}: reference {name_of(self.rule)} moves a model that nothing uses: no "
                "function names ref_logp, and nothing is computed from the reference or the "
                "teacher."
            )
        if isinstance(self.rule, AnchoredReference) and not of_likelihood(recipe, "anchor"):
            raise ValueError(
                f"{name}: reference {self.rule!r} stores a policy that nothing uses: no function "
                "reads an extra of the anchor, such as anchor_velocity."
            )

    def dry_run(self) -> None:
        """Calls the rule on shapes."""
        weights = {"w": jax.ShapeDtypeStruct((1,), "float32")}
        init = getattr(self.rule, "init", None)
        start = weights if init is None else init(weights)
        key = jax.eval_shape(lambda: jax.random.key(0))
        jax.eval_shape(
            lambda *args: call_with(self.rule, *args[:3], context={"key": args[3]}),
            *(start, weights, jax.ShapeDtypeStruct((), "int32"), key),
        )


@dataclasses.dataclass(frozen=True)
class EarlierIterations(RecipePart):
    """Policies of earlier iterations, whose log-probabilities are the entry ``earlier_logp``.

    Attributes:
      policies: Made by :func:`jaxrl_llm.regularizers.earlier_policies`.
    """

    policies: EarlierPolicies

    keyword: ClassVar[str] = "earlier"
    title: ClassVar[str] = "earlier policies"
    must_be: ClassVar[str] = "made by regularizers.earlier_policies"

    @classmethod
    def of(cls, recipe: str, value: Any) -> Self | None:
        """The part of stored policies; None for none."""
        return cls(value) if isinstance(value, EarlierPolicies) else super().of(recipe, value)

    @property
    def value(self) -> EarlierPolicies:
        """The policies."""
        return self.policies

    def computed_by_step(self, recipe) -> frozenset[str]:
        """Their log-probabilities."""
        del recipe
        return frozenset({"earlier_logp"})

    def check(self, recipe) -> None:
        """Raises ValueError if nothing reads their log-probabilities."""
        if "earlier_logp" not in recipe.required_fields:
            raise ValueError(
                f"Recipe {recipe.name!r}: earlier has policies that nothing uses: no function "
                "reads earlier_logp."
            )
