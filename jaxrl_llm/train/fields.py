"""The fields of a batch that the loop attaches on the host; the train step computes the rest.

Shared arguments: ``recipe``, the method; ``questions``, P of them. Every function raises ValueError
where the recipe cannot be trained on what the run has.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_llm.curation.collectors.protocol import DEMONSTRATION, HINTED
from jaxrl_llm.data.questions import Question
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.recipes.inputs import EXTRAS
from jaxrl_llm.rewards import Scores

_DTYPES = {"float": np.float32, "int": np.int32, "bool": np.bool_}
# Parts of a reward that add up to 1 on paper may come out as the next float32 above it.
_ROUNDING = 1e-6
# What the loop knows without the reward or the data.
_KNOWN = ("prompt_ids", "truncated", "greedy_rewards", "versions", "current_version", "roles")


def host_fields(recipe: Recipe) -> frozenset[str]:
    """The extras that a batch must have before the train step computes the rest."""
    names = recipe.required_fields
    if recipe.computed_from("teacher"):
        names |= {"teacher_prompt_tokens"}
    return (names - recipe.step_fields) & (frozenset(EXTRAS) | frozenset(recipe.inputs))


def reads_reward(recipe: Recipe) -> bool:
    """Whether a recipe reads more of a reward than one number, which no check sees before a batch.

    Example:
      >>> import jaxrl_llm as jr
      >>> reads_reward(jr.recipes.fapo()), reads_reward(jr.recipes.grpo())
      (True, False)
    """
    if "reward_components" in recipe.required_fields:
        return True
    names = host_fields(recipe) - set(_KNOWN)
    return any(name not in EXTRAS or EXTRAS[name].axes == "PG" for name in names)


def check_fields(recipe: Recipe, questions: Sequence[Question]) -> None:
    """Raises ValueError if a recipe needs arrays that no training run on these questions has.

    Components of a reward are not known before it is called: the first batch checks them.
    """
    for name in sorted(host_fields(recipe)):
        axes = EXTRAS[name].axes if name in EXTRAS else None
        if name in _KNOWN or axes in (None, "PG"):
            continue
        if axes != "P":
            raise ValueError(
                f"recipe {recipe.name!r} needs {name!r} ({EXTRAS[name].about}), which this loop "
                "cannot bring; call train.make_step with batches that hold it in extras."
            )
        _from_metadata(recipe, name, questions)


def check_rewards(recipe: Recipe, rewards: np.ndarray, questions: Sequence[Question]) -> None:
    """Raises ValueError if a reward ``[P, G]`` is outside the range that the recipe takes."""
    low, high = recipe.reward_range
    wrong = np.argwhere((rewards < low - _ROUNDING) | (rewards > high + _ROUNDING))
    if wrong.size:
        row, place = wrong[0]
        prompt = questions[row].prompt
        if math.isinf(high):
            within = f"rewards of at least {low:g}"
        elif math.isinf(low):
            within = f"rewards of at most {high:g}"
        else:
            within = f"rewards in [{low:g}, {high:g}]"
        raise ValueError(
            f"recipe {recipe.name!r} is defined for {within} alone; prompt "
            f"{prompt.id or prompt.text[:40]!r} has a reward of {rewards[row, place]:g}."
        )


def attach_fields(
    batch: Batch,
    recipe: Recipe,
    *,
    scores: Scores,
    rollout,
    step: int,
    indices: Sequence[int],
    questions: Sequence[Question],
    greedy: Callable[[], np.ndarray],
    roles: np.ndarray | None = None,
) -> Batch:
    """The batch with the extras and reward components that the recipe needs.

    One number a rollout comes from the reward's component of that name, one number a prompt from
    the prompts' metadata. A name that only the recipe knows may come from either.

    Args:
      batch: P groups of G.
      recipe, questions: See the module.
      scores: Rewards, with their components ``[P * G]``.
      rollout: What was sampled.
      step: Updates made when it is trained on: the version of the weights by then.
      indices: Places of the prompts in the data set.
      greedy: Grades the most likely response of each prompt: ``[P]``; called only if needed.
      roles: int ``[P, G]``, of each rollout; None for all own.

    Raises:
      ValueError: Also if a component of the reward would be added to the reward that is trained on.
    """
    check_rewards(recipe, np.asarray(batch.rewards), questions)
    shape, names = batch.rewards.shape, host_fields(recipe)
    if "reward_components" in recipe.required_fields:
        batch = batch.replace(reward_components=_components(recipe, scores, names, shape))
    known = {
        "prompt_ids": lambda: np.asarray(indices),
        "truncated": lambda: np.asarray(rollout.finish) == 0,
        "versions": lambda: rollout.version,
        "current_version": lambda: np.full(shape[0], step),
        "greedy_rewards": greedy,
        "roles": lambda: np.zeros(shape, np.int32) if roles is None else roles,
    }
    if recipe.collector is not None and roles is not None:
        known["steered"] = lambda: np.isin(roles, (HINTED, DEMONSTRATION))
    extras = {}
    for name in sorted(names):
        spec = EXTRAS.get(name)
        if name in known:
            value = np.asarray(known[name]())
        elif name in scores.reward_components and (spec is None or spec.axes == "PG"):
            if "reward" not in scores.reward_components:
                raise ValueError(
                    f"recipe {recipe.name!r} takes {name!r} from the mapping that the reward "
                    "returns, whose entries would be added up to the reward; give the mapping an "
                    "entry 'reward' of its own."
                )
            value = scores.reward_components[name].reshape(shape)
        elif spec is None or spec.axes == "P":
            value = _from_metadata(recipe, name, questions)
        else:
            raise ValueError(
                f"recipe {recipe.name!r} needs {name!r} ({spec.about}); it is no name in the "
                "mapping that the reward returns."
            )
        if value.dtype.kind == "f" and (absent := np.isnan(value)).any():
            prompt = questions[int(np.argmax(absent.reshape(len(questions), -1).any(1)))].prompt
            raise ValueError(
                f"recipe {recipe.name!r} needs a number in {name!r} for every response; the reward "
                f"gave NaN for prompt {prompt.id or prompt.text[:40]!r}."
            )
        extras[name] = value if spec is None else value.astype(_DTYPES[spec.kind])
        if spec and spec.kind != "float" and (wrong := value[extras[name] != value]).size:
            what = "0 and 1" if spec.kind == "bool" else "integers"
            raise ValueError(
                f"recipe {recipe.name!r} needs {what} in {name!r} ({spec.about}); got {wrong[0]:g}."
            )
    return batch.replace(extras={**batch.extras, **extras}).check() if extras else batch


def _components(recipe: Recipe, scores: Scores, names, shape) -> dict[str, np.ndarray]:
    """Rewards by name ``[P, G]``, less what the recipe takes as something else."""
    rewards = scores.reward_components.items()
    components = {k: np.float32(x).reshape(shape) for k, x in rewards if k not in names}
    if not components:
        # Without a single value it cannot be known which names there would have been.
        failed = f", or failed in all {scores.failures} calls" if scores.failures else ""
        raise ValueError(
            f"recipe {recipe.name!r} keeps several rewards apart, but the reward returns one "
            f"number{failed}; return a mapping of names to numbers."
        )
    return components


def _from_metadata(recipe: Recipe, name: str, questions: Sequence[Question]) -> np.ndarray:
    """Finite numbers of the prompts ``[P, ...]``."""
    spec = EXTRAS.get(name)
    about = f" ({spec.about})" if spec else ""
    values = []
    for question in questions:
        prompt = question.prompt
        what = f"recipe {recipe.name!r} needs {name!r}{about}; prompt {prompt.id or prompt.text!r}"
        if name not in prompt.metadata:
            source = "" if spec else ", and the reward returns no mapping that has it"
            raise ValueError(f"{what} has none in its metadata{source}.")
        value = np.asarray(prompt.metadata[name])
        numeric = value.dtype.kind in "biuf" and (spec is None or value.shape == ())
        if not numeric or not np.isfinite(value).all():
            raise ValueError(f"{what} has {prompt.metadata[name]!r}, where a number is needed.")
        if values and value.shape != values[0].shape:
            raise ValueError(
                f"{what} has a value of shape {value.shape}, those before it {values[0].shape}."
            )
        values.append(value)
    return np.stack(values)
