"""Batch fields that describe the turns of episodes, by their names in ``Batch.extras``."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.core.sizes import power_of_two
from jaxrl_llm.curation.collectors.needs import needs_of
from jaxrl_llm.environments.subgoals import token_roles, turn_parts
from jaxrl_llm.recipes import Batch
from jaxrl_llm.recipes.inputs import EXTRAS
from jaxrl_llm.recipes.wiring import TEACHER_TEXTS
from jaxrl_llm.rewards import Scores
from jaxrl_llm.rollout.episodes import ENDS, EPISODES, Episode, Turn

# What a run with an environment does not support, by the need of a collector for it.
_NOT_IN_EPISODES = {
    "stores_responses": "reuses responses of earlier batches without the turns of an episode",
    "sends_text": "sends messages in place of the first observations of an environment",
    "brings_responses": "brings responses of the data without the turns of an episode",
    "splits_turns": "pauses or continues responses within a turn of an episode",
}


def episode_fields(
    batch: Batch,
    names: Collection[str],
    scores: Scores,
    *,
    decode: Callable[[list[int]], str],
) -> dict[str, np.ndarray]:
    """Arrays ``[P, G, K]`` of the turns of episodes, and ``turn_ids [P, G, T]`` of their tokens.

    K is the maximum number of turns, rounded up to a power of two. Equal states, actions and
    subgoals in the batch have equal ids, -1 for none. Subgoals and switches are parsed from the
    text of a turn after its reasoning, see ``environments.turn_parts``. Any other field of turns,
    and a name that only the recipe defines, is read from the information that the environment
    returns for each turn (``Observation.info``), 0 for a last turn that was cut off or failed.

    Args:
      batch: P groups of G.
      names: Names of the extras that the recipe needs. Of those that only the recipe defines, the
        ones that neither the data nor the reward has.
      scores: ``[P * G]``, with the episodes in their details.
      decode: Text of token ids.

    Raises:
      ValueError: If the environment returns no information for a name.
    """
    P, G, T = batch.mask.shape
    episodes: list[Episode | None] = list(scores.details[EPISODES])
    turns = [() if episode is None else episode.turns for episode in episodes]
    K = power_of_two(max(map(len, turns)))

    def of_turns(values, dtype, fill=0) -> np.ndarray:
        array = np.full((P * G, K), fill, dtype)
        for row, each in zip(array, turns, strict=True):
            row[: len(each)] = [values(turn) for turn in each]
        return array.reshape(P, G, K)

    states: dict[str, int] = {}
    actions: dict[str, int] = {}
    made = {
        "turn_rewards": of_turns(lambda turn: turn.reward, np.float32),
        "turn_where": of_turns(lambda turn: True, bool),
        "state_ids": of_turns(lambda x: states.setdefault(x.state, len(states)), np.int32, -1),
        "next_state_ids": of_turns(
            lambda x: states.setdefault(x.next_state, len(states)), np.int32, -1
        ),
        "action_ids": of_turns(lambda x: actions.setdefault(x.text, len(actions)), np.int32, -1),
    }
    turn_ids, mask = np.full((P * G, T), -1, np.int32), np.asarray(batch.mask).reshape(P * G, T)
    for row, sampled, each in zip(turn_ids, mask, turns, strict=True):
        numbers = np.repeat(np.arange(len(each)), [turn.tokens for turn in each])
        places = np.flatnonzero(sampled)
        row[places] = numbers[: len(places)]
    made["turn_ids"] = turn_ids.reshape(P, G, T)
    if {"switches", "subgoal_ids"} & set(names):
        subgoals: dict[str, int] = {}

        def numbered(turn: Turn) -> int:
            text = turn_parts(turn.text, reasoning=turn.reasoning).subgoal
            return -1 if text is None else subgoals.setdefault(text, len(subgoals))

        made["switches"] = of_turns(
            lambda turn: turn_parts(turn.text, reasoning=turn.reasoning).switch, bool
        )
        made["subgoal_ids"] = of_turns(numbered, np.int32, -1)
    if "token_roles" in names:
        tokens, roles = np.asarray(batch.tokens).reshape(P * G, T), np.zeros_like(turn_ids)
        for row, each, ids, played in zip(roles, tokens, turn_ids, turns, strict=True):
            for number, turn in enumerate(played):
                places = np.flatnonzero(ids == number)
                row[places] = token_roles(
                    each[places].tolist(), decode=decode, reasoning=turn.reasoning
                )
        made["token_roles"] = roles.reshape(P, G, T)
    for name in sorted(set(names) - set(made)):
        spec = EXTRAS.get(name)
        if spec is not None and spec.axes != "PGK":
            continue
        # The environment says nothing of a turn that it did not see, or that failed.
        seen = [turn for each in episodes if each is not None for turn in _answered(each)]
        if absent := [turn for turn in seen if name not in turn.info]:
            about = "" if spec is None else f" ({spec.about})"
            raise ValueError(
                f"the recipe needs {name!r}{about} of each turn, but the info of the environment "
                f"has {sorted(absent[0].info) or 'nothing'} for the turn {absent[0].text[:40]!r}"
                + ("." if spec is not None else ", and no prompt has it in its metadata.")
            )
        made[name] = of_turns(lambda turn, name=name: turn.info.get(name, 0.0), np.float32)
    return {name: array for name, array in made.items() if name in names}


def _answered(episode: Episode) -> Sequence[Turn]:
    """The turns to which the environment answered."""
    cut = episode.end in ("length", "env_error", "env_timeout")
    return episode.turns[:-1] if cut else episode.turns


def episode_metrics(scores: Scores, where: np.ndarray) -> dict[str, float]:
    """Means over the episodes that take part: ``turns``, ``end/NAME`` and ``info/NAME``.

    ``end/NAME`` is a share of all episodes, including failed episodes; ``info/NAME`` is a mean over
    turns.
    """
    episodes = [each for each in scores.details[EPISODES] if each is not None]
    taken = zip(scores.details[EPISODES], where.reshape(-1), strict=True)
    taken = [each for each, takes_part in taken if takes_part and each is not None] or episodes
    if not episodes:
        return {}
    values = {"turns": float(np.mean([len(each.turns) for each in taken]))}
    ends = [each.end for each in episodes]
    values |= {f"end/{name}": ends.count(name) / len(ends) for name in ENDS if name in ends}
    info: dict[str, list[float]] = {}
    for turn in (turn for each in taken for turn in each.turns):
        for name, value in turn.info.items():
            info.setdefault(name, []).append(value)
    return values | {f"info/{name}": float(np.mean(x)) for name, x in sorted(info.items())}


def check_episodes(recipe: Any) -> None:
    """Raises ValueError for a recipe whose rollouts or teacher cannot be those of episodes."""
    needs = needs_of(recipe.collector)
    for name, what in _NOT_IN_EPISODES.items():
        if getattr(needs, name):
            raise ValueError(
                f"config: {recipe.collector!r} {what}; use another recipe with an environment."
            )
    if TEACHER_TEXTS in recipe.needs.computed_from("responses"):
        raise ValueError(
            f"config: recipe {recipe.name!r} writes the prompts of its teacher from the text of "
            "the data, not from the first observation of an environment; use another recipe."
        )
