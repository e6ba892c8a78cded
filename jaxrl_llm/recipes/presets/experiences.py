"""Methods that learn without changing the weights."""

from jaxrl_llm import curation
from jaxrl_llm.recipes.presets.base import from_base
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed

__all__ = ["training_free_grpo"]


def training_free_grpo(*, capacity: int = 32, max_bytes: int = 512, limit: int = 2) -> Recipe:
    """A library of experiences in the prompt, which the policy edits; the parameters do not change.

        library <- operations of the policy on it, for each group whose rewards differ
        params <- params + 0 update

    The library is the state of the collector: :func:`jaxrl_llm.curation.experience_texts` reads
    it. Evaluations put it into their prompts too.

    Args:
      capacity: Maximum number of experiences; the oldest are removed first.
      max_bytes: Maximum bytes of an experience; longer ones are truncated.
      limit: Maximum operations per group.

    References:
      Training-free GRPO (arXiv:2510.08191); see :func:`jaxrl_llm.curation.experienced`.
    """
    return from_base(
        name="training_free_grpo",
        computed=(Computed("update_scale", curation.no_update, "batch"),),
        collector=curation.experienced(capacity=capacity, length=max_bytes, limit=limit),
        paper="arXiv:2510.08191",
    )
