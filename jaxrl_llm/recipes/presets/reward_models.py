"""Reward models: a scalar head on a model, trained on pairs, lists or steps of the data."""

from collections.abc import Callable

from jaxrl_llm import advantages, aggregate, curation, preferences
from jaxrl_llm.core import Array, bind, connect, stateless
from jaxrl_llm.curation import Collector
from jaxrl_llm.recipes.presets.base import from_base
from jaxrl_llm.recipes.recipe import Recipe

__all__ = ["process_reward_model", "reward_model", "reward_model_listwise"]


def reward_model(
    *,
    margin: float = 0.0,
    margins: bool = False,
    centering: float = 0.01,
    label_smoothing: float = 0.0,
) -> Recipe:
    """A Bradley-Terry reward model: the chosen response scores above the rejected one.

        loss = -log sigmoid(r_w - r_l - margin) + centering (r_w + r_l)^2
        r = the head's value at the last token

    Args:
      margin: Required lead of the chosen response.
      margins: Whether the margin is instead the column "margin" of each row, such as the strength
        of its label.
      centering: Weight of a penalty that moves the mean reward of a pair to 0.
      label_smoothing: Assumed share of pairs with swapped labels.

    References:
      Ouyang et al., InstructGPT (arXiv:2203.02155); the margin is from Llama 2 (arXiv:2307.09288),
      the centering from Eisenstein et al. (arXiv:2312.09244).
    """
    if margins and margin:
        raise ValueError("reward_model: margin has no effect where the data have margins.")
    loss = bind(preferences.bradley_terry, centering=centering, label_smoothing=label_smoothing)
    if margins:
        surrogate = connect(bind(preferences.paired_rewards, loss=loss), margins="margin")
    else:
        loss = bind(loss, margin=margin)
        surrogate = bind(preferences.paired_rewards, loss=loss, margins=None)
    return _of_groups("reward_model", surrogate, curation.offline_pairs())


def reward_model_listwise(*, loss: Callable | None = None, size: int = 8) -> Recipe:
    """A reward model trained on ranked lists.

        loss = mean over the pairs of a list of -log sigmoid(r_i - r_j),   i better than j

    Args:
      loss: Another loss of lists, such as ``preferences.plackett_luce``; None for that of all
        pairs.
      size: Maximum responses in a row of the data.

    References:
      Ouyang et al., InstructGPT (arXiv:2203.02155), who rank 4 to 9 responses.
    """
    loss = bind(preferences.pair_logistic, reduce="mean") if loss is None else loss
    return _of_groups(
        "reward_model_listwise",
        bind(preferences.listed_rewards, loss=loss),
        curation.offline_lists(size),
    )


def process_reward_model(*, separator: str = "\n\n") -> Recipe:
    """A process reward model: how likely each step of a response is right.

        loss = mean over steps of -y log sigmoid(z) - (1 - y) log sigmoid(-z)
        z = the head's value at the last token of the step

    Args:
      separator: Text between two steps.

    References:
      Lightman et al. (arXiv:2305.20050); TRL 1.13's PRM trainer has two classes in place of z.
    """
    return from_base(
        name="process_reward_model",
        advantage=stateless(advantages.dr_grpo),
        surrogate=preferences.step_rewards,
        selection=step_ends_only,
        collector=curation.offline_steps(separator=separator),
        group_relative=False,
        paper="arXiv:2305.20050",
    )


def step_ends_only(advantages: Array, mask: Array, *, turn_ids: Array) -> Array:
    """The tokens ``[P, G, T]`` that end a step."""
    del advantages
    return preferences.step_marks(turn_ids, mask)


def _of_groups(name: str, surrogate: Callable, collector: Collector) -> Recipe:
    return from_base(
        name=name,
        advantage=stateless(advantages.dr_grpo),
        surrogate=surrogate,
        weights=aggregate.group_mean,
        curation=stateless(curation.informative_groups),
        collector=collector,
        paper="arXiv:2203.02155",
    )
