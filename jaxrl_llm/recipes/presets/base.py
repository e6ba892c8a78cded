"""The base recipe of all policy-gradient presets; see the package's docstring."""

from collections.abc import Callable
from typing import Any

from jaxrl_llm import advantages, aggregate, curation, rewards, surrogates
from jaxrl_llm.core import Transform, bind, checks, stateless
from jaxrl_llm.curation import Collector
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.records import replace_fields
from jaxrl_llm.recipes.wiring import validate

BASE = Recipe(
    name="base",
    advantage=stateless(advantages.grpo),
    surrogate=surrogates.ppo_clip,
    weights=aggregate.token_mean,
)


def from_base(**changes: Any) -> Recipe:
    """``BASE`` with these slots changed, after a dry run that checks their options."""
    return validate(replace_fields(BASE, changes))


def nonzero_term(regularizer: Callable, *, coef: float, **options: Any) -> tuple[Callable, ...]:
    """The regularizer with these options, as a recipe's terms; none if its coefficient is 0.

    Without the KL term of GRPO, for example, no reference is computed.
    """
    return (bind(regularizer, coef=coef, **options),) if coef else ()


def overlong(
    name: str, *, length: float | None, buffer_share: float, usual: float, overlong_factor: float
) -> tuple[Transform, ...]:
    """The penalty of long responses, for the front of an advantage; nothing without a length.

    Args:
      name: The preset's name, for errors.
      usual: The preset's own ``buffer_share``.
    """
    if length is None:
        changed = {"buffer_share": buffer_share != usual, "overlong_factor": overlong_factor != 1.0}
        for option in (option for option, is_changed in changed.items() if is_changed):
            raise ValueError(f"{name}: {option} has no effect without length.")
        return ()
    checks.check_positive(name, finite=True, length=length)
    checks.check_share(name, zero=False, buffer_share=buffer_share)
    checks.check_non_negative(name, finite=True, overlong_factor=overlong_factor)
    buffer = buffer_share * length
    penalized = stateless(
        rewards.overlong_rewards, max_length=length, buffer=buffer, factor=overlong_factor
    )
    return (penalized,)


def with_texts(name: str, *, text_coef: float, text_share: float, column: str) -> Collector | None:
    """The collector of prompts in order and of texts of the data; None if ``text_coef`` is 0.

    Args:
      name: The preset's name, for errors.
      text_coef: The recipe's.
      text_share: Share of the groups of a batch that are texts; 0.5 is the default of presets.
      column: Column of the data with a text in each row; "pretraining" is the default.
    """
    if not text_coef:
        if (text_share, column) != (0.5, "pretraining"):
            raise ValueError(f"{name}: text_share and column have no effect with text_coef 0.")
        return None
    checks.check_share(name, zero=False, one=False, text_share=text_share)
    texts = curation.plain_texts(column=column)
    return curation.mixed((curation.in_order(), 1.0 - text_share), (texts, text_share))


def refilled(recipe: Recipe, enabled: bool = True) -> Recipe:
    """The recipe, where each group of equal rewards is replaced by another if ``enabled``."""
    if not enabled:
        return recipe
    return recipe.replace(collector=curation.refill(curation.informative_groups))
