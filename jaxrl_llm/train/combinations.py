"""Parts of a run that exclude one another, which its configuration refuses."""

from typing import Any

from jaxrl_llm.curation.collectors.protocol import declares
from jaxrl_llm.recipes.wiring import TEACHER_TEXTS
from jaxrl_llm.rewards.answers import row_check
from jaxrl_llm.rewards.scoring import name_of
from jaxrl_llm.train.reward_values import check_stated

# What a run with an environment does not support, by the attribute of a collector that needs it.
_NOT_IN_EPISODES = {
    "stores_responses": "reuses responses of earlier batches without the turns of an episode",
    "sends_text": "sends messages in place of the first observations of an environment",
    "brings_responses": "brings responses of the data without the turns of an episode",
    "splits_turns": "pauses or continues responses within a turn of an episode",
}


def check_combination(config: Any, recipe: Any) -> None:
    """Raises ValueError for a recipe, a reward and an environment that cannot be used together."""
    if config.environment is not None:
        _check_environment(recipe)
    if (graded := config.environment or config.reward) is not None:
        check_stated(recipe, graded)
    if config.data.unreadable != "refuse" and row_check(config.reward) is None:
        whose = "without a reward"
        if config.reward is not None:
            whose = f"with {name_of(config.reward)}, which has no check_row"
        raise ValueError(f"data: unreadable has no effect {whose}.")


def _check_environment(recipe: Any) -> None:
    for name, what in _NOT_IN_EPISODES.items():
        if declares(recipe.collector, name):
            raise ValueError(
                f"config: {recipe.collector!r} {what}; use another recipe with an environment."
            )
    if TEACHER_TEXTS in recipe.needs.computed_from("responses"):
        raise ValueError(
            f"config: recipe {recipe.name!r} writes the prompts of its teacher from the text of "
            "the data, not from the first observation of an environment; use another recipe."
        )
