"""``kl_logp``: responses after the previous row's prompt, by the policy before the step.

They estimate the divergence of a policy on inputs that it was not trained on.
"""

from jaxrl_llm.core.compose import bind
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.train.update.part import POLICY, At, Part, Read, Setup
from jaxrl_llm.train.update.parts.reference import total_logp
from jaxrl_llm.train.update.rows import after_previous_prompt


def part(recipe: Recipe, setup: Setup) -> Part | None:
    """The part of a recipe that reads ``kl_logp``."""
    del setup
    read = "kl_logp" in recipe.required_fields
    return Part("mismatched_prompts", reads=_reads) if read else None


def _reads(batch: Batch, at: At) -> tuple[Read, ...]:
    del at
    if "kl_logp" in batch.extras:
        return ()
    call = bind(total_logp, entry="kl_logp")
    return (Read(POLICY, {}, rows=after_previous_prompt, call=call),)
