"""``Denoiser``: the estimate that replaces the log-probabilities of a causal model."""

import dataclasses
from typing import Any, ClassVar, Self

from jaxrl_llm.diffusion import FlowLikelihood, Likelihood
from jaxrl_llm.recipes.parts.part import RecipePart
from jaxrl_llm.recipes.wiring import BEFORE_PREPARE, DRAW_LOGP, compares_old, label_of
from jaxrl_llm.regularizers import AnchoredReference

# Policies that are scored before an update, by the prefix of their entries.
_WHO = ("old", "ref", "anchor")
# What only a causal model has.
_CAUSAL = frozenset(
    {
        "behavior_logp",
        "hidden_sq",
        "hidden_rank",
        "kl_logp",
        "kl_ref_logp",
        "answer_logp",
        "grad_sq_norms",
    }
)


@dataclasses.dataclass(frozen=True)
class Denoiser(RecipePart):
    """The policy is a masked-diffusion model or a flow.

    Attributes:
      likelihood: Its estimate of log-probabilities, or the densities of the steps of a flow.
    """

    likelihood: Likelihood | FlowLikelihood

    keyword: ClassVar[str] = "likelihood"
    title: ClassVar[str] = "a likelihood of a denoising model"
    must_be: ClassVar[str] = "a diffusion.Likelihood or FlowLikelihood"
    takes_texts: ClassVar[bool] = False

    @classmethod
    def of(cls, recipe: str, value: Any) -> Self | None:
        """The part of a likelihood; None for a causal model."""
        if isinstance(value, Likelihood | FlowLikelihood):
            return cls(value)
        return super().of(recipe, value)

    @property
    def value(self) -> Likelihood | FlowLikelihood:
        """The likelihood."""
        return self.likelihood

    def required(self, recipe, names: frozenset[str]) -> frozenset[str]:
        """What the likelihood reads of a batch; with several sets of masks, each draw's numbers."""
        fields = frozenset(self.likelihood.fields)
        if self.likelihood.passes == 1:
            return fields
        compared = names & {"old_logp", "ref_logp"}
        compared |= {"old_logp"} if compares_old(recipe) else set()
        return fields | {name.replace("logp", DRAW_LOGP) for name in compared}

    def computed_by_step(self, recipe) -> frozenset[str]:
        """The results of its scorer."""
        return frozenset(name for who in _WHO for name in of_likelihood(recipe, who))

    def statistics(self) -> frozenset[str]:
        """The results of its scorer for the policy being trained."""
        return frozenset(name for name, _ in self.likelihood.statistics)

    def check(self, recipe) -> None:
        """Raises ValueError if the recipe reads what only a causal model has."""
        name = f"Recipe {recipe.name!r} has {self.title}, and"
        causal = [part.title for part in recipe.parts if part.left_to_right]
        causal += ["a correction"] if recipe.correction is not None else []
        causal += ["a teacher"] if recipe.has_teacher else []
        if causal:
            raise ValueError(
                f"{name} {causal[0]}, which reads tokens from left to right; leave one of them out."
            )
        if names := sorted(_CAUSAL & recipe.required_fields):
            raise ValueError(f"{name} reads {names[0]}, which only a causal model has.")
        scored = sorted({"old_logp", "ref_logp"} & recipe.required_fields)
        if scored and isinstance(self.likelihood, Likelihood) and self.likelihood.reads_advantages:
            raise ValueError(
                f"{name} reads {scored[0]}, which cannot be compared with the policy's bound, "
                f"since {self.likelihood.estimate!r} depends on the advantages; use another "
                "likelihood, such as diffusion.elbo_likelihood()."
            )
        for entry in recipe.computed:
            if entry.source in (*BEFORE_PREPARE, "optimizer", "policy"):
                raise ValueError(f"{name} {label_of(entry)}, which reads next-token probabilities.")
        of_anchor = sorted(of_likelihood(recipe, "anchor"))
        if of_anchor and not isinstance(recipe.reference, AnchoredReference):
            raise ValueError(
                f"Recipe {recipe.name!r} reads {of_anchor[0]}, of the policy that a moving "
                "reference began with; its reference must be made by regularizers.anchored."
            )

    def check_passes(self, recipe, epochs: int, minibatches: int) -> None:
        """Raises ValueError if there are other passes than sets of masks, or no old policy."""
        if self.likelihood.passes not in (1, epochs):
            raise ValueError(
                f"recipe {recipe.name!r} draws masks for {self.likelihood.passes} passes over a "
                f"batch; got epochs {epochs}; give its preset that number, as in "
                f"diffu_grpo(epochs={epochs}), or its likelihood passes={epochs}."
            )
        several = epochs * minibatches > 1
        if several and self.likelihood.reads_advantages and recipe.compares_old:
            raise ValueError(
                f"recipe {recipe.name!r} has a likelihood that depends on the advantages, and "
                "old_logp is scored without them, so the ratios of several optimizer steps on one "
                f"batch would be wrong; got epochs {epochs} and minibatches {minibatches}; use 1 "
                "and 1."
            )

    def refuses_other_sampler(self) -> str:
        """Its estimates are on the masks of a batch, the sampler's numbers are not."""
        return "estimates likelihoods without a comparison to the policy that sampled"


def of_likelihood(recipe, who: str) -> dict[str, str]:
    """The required extras that hold the results of a likelihood's scorer, by the scorer's names.

    ``who`` is the policy that is scored: "old", "ref" for the reference, or "anchor" for the one
    that a moving reference began with.
    """
    if recipe.likelihood is None:
        return {}
    names = {f"{who}_{name}": name for name, _ in recipe.likelihood.statistics}
    required = recipe.required_fields
    return {extra: name for extra, name in names.items() if extra in required}
