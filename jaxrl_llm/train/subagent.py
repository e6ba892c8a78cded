"""A second policy in a run: its model and sampler, its batch of answers, its part of a step.

episodes   environments.ask(question) -> the subagent's answer, a CallRecord of its turn
batch      answers of all rollouts of a query, aligned, with the rewards of their callers
step       the main policy's, then the subagent's on its own rows, with its own optimizer
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.curation import align_calls
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.recipes import Batch, Subagent
from jaxrl_llm.rewards import Scores
from jaxrl_llm.rollout import make_sampler
from jaxrl_llm.rollout.episodes import EPISODES, Episode
from jaxrl_llm.rollout.subagent import CallRecord, SubagentPlayer
from jaxrl_llm.train.algorithm import Algorithm
from jaxrl_llm.train.state import SubagentState, TrainState

# Metrics that compare the rollouts of a prompt: a question has one answer.
_OF_GROUPS = ("informative", "reward_std")
# Separate the random numbers of a subagent, and of the choice of its answers, from others.
_ANSWERS, _ALIGN = 0x616E7377, 0x616C6967


@dataclass(frozen=True, kw_only=True)
class SubagentParts:
    """What a run has for its subagent, except its state.

    Attributes:
      model: Its model.
      params: Its parameters before the first step.
      sampler: Of one answer per question.
      renderer, decode: Of its tokenizer.
      rows: Number of questions that are answered at one time.
      prompt_length: Maximum number of tokens of a question.
    """

    model: Model
    params: ArrayTree
    sampler: Any
    renderer: Any
    decode: Any
    rows: int
    prompt_length: int

    def player(self, params: ArrayTree, key: Array, number: int) -> SubagentPlayer:
        """Answers the questions of the episodes of batch ``number``."""
        return SubagentPlayer(
            self.sampler,
            params,
            jax.random.fold_in(jax.random.fold_in(key, number), _ANSWERS),
            renderer=self.renderer,
            decode=self.decode,
            rows=self.rows,
            prompt_length=self.prompt_length,
        )


class Calls(NamedTuple):
    """The answers in a batch of P groups of G rollouts, up to S in each rollout."""

    records: list[list[CallRecord]]  # by rollout, P G lists
    where: np.ndarray  # bool [P, G, S]
    forms: np.ndarray  # float32 [P, G, S]


def calls_of(scores: Scores, where: np.ndarray) -> Calls:
    """The answers in the episodes of rollouts that take part, ``where`` ``[P, G]``."""
    episodes: Sequence[Episode | None] = scores.details[EPISODES]
    taken = zip(episodes, where.reshape(-1), strict=True)
    records = [
        [call for turn in episode.turns for call in turn.calls]
        if takes_part and episode is not None
        else []
        for episode, takes_part in taken
    ]
    most = max(1, *map(len, records))
    exists, forms = np.zeros((len(records), most), bool), np.zeros((len(records), most), np.float32)
    for row, made in enumerate(records):
        exists[row, : len(made)] = True
        forms[row, : len(made)] = [call.form for call in made]
    shape = (*where.shape, most)
    return Calls(records, exists.reshape(shape), forms.reshape(shape))


def mean_calls(scores: Scores, where: np.ndarray) -> float:
    """The mean number of questions of the rollouts that take part, ``where`` ``[P, G]``."""
    return float(calls_of(scores, where).where.sum() / max(where.sum(), 1))


def subagent_batch(
    subagent: Subagent, scores: Scores, rewards: np.ndarray, where: np.ndarray, key: Array
) -> Batch | None:
    """The rows that train the subagent: D answers of each rollout, each a group of its own.

    Args:
      subagent: Its method.
      scores: Of the batch, with the episodes in their details.
      rewards, where: ``[P, G]``, rewards of the main policy, and which rollouts take part.
      key: Chooses the answers of a rollout that has more or fewer than D.

    Returns:
      ``[P G D, 1, T]``, or None if no rollout that takes part has asked.
    """
    calls = calls_of(scores, where)
    if not calls.where.any():
        return None
    rewards = np.where(where, rewards, 0.0).astype(np.float32)
    earned = subagent.rewards(calls.forms, rewards, call_where=calls.where)
    aligned = align_calls(jnp.asarray(calls.where), key, count=subagent.count)
    advantages = subagent.advantage(earned, aligned.index, call_where=aligned.where)
    index, exists = np.asarray(aligned.index), np.asarray(aligned.where)
    earned = np.take_along_axis(np.asarray(earned), index, axis=-1)
    blank = next(made for made in calls.records if made)[0]
    picked = index.reshape(len(calls.records), -1)
    rows = [
        (made[i] if made else blank).row
        for made, places in zip(calls.records, picked, strict=True)
        for i in places
    ]
    rollout = trees.zip_leaves(lambda x: np.concatenate(x), rows)
    batch = Batch.from_rollout(
        rollout._replace(sampled_at=None),
        np.where(exists, earned, 0.0).reshape(-1, 1),
        where=exists.reshape(-1, 1),
    )
    of_calls = np.asarray(advantages, np.float32).reshape(-1, 1)
    return batch.replace(extras={"call_advantages": of_calls})


def alignment_key(key: Array, number: int) -> Array:
    """The key that aligns the answers of batch ``number`` of a run."""
    return jax.random.fold_in(jax.random.fold_in(key, number), _ALIGN)


def make_subagent_sampler(
    model: Model,
    tokenizer: Any,
    sampling: Any,
    *,
    stop_ids: Sequence[int],
    max_new_tokens: int,
    prompt_length: int,
    mesh,
) -> Any:
    """The sampler of a :class:`SubagentPlayer`: one answer per question, of one shape."""
    return make_sampler(
        model,
        group_size=1,
        mesh=mesh,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        max_new_tokens=max_new_tokens,
        buckets=(prompt_length,),
        stop_ids=stop_ids,
        pad_id=tokenizer.pad_id,
    )


def with_subagent(main: Algorithm, subagent: Algorithm) -> Algorithm:
    """The algorithm of both: a step of the main policy, then one of the subagent.

    ``Batch.called`` holds the rows of the subagent. Its metrics begin with ``subagent_``; it makes
    no update in a step in which nobody asked.
    """

    def score(batch: Batch) -> tuple[Batch, dict[str, float]]:
        called = batch.called
        batch, metrics = main.score(batch.replace(called=None))
        if called is not None:
            called, more = subagent.score(called)
            metrics = metrics | {f"subagent_{name}": value for name, value in more.items()}
        return batch.replace(called=called), metrics

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        called, before = batch.called, state.subagent
        # Copied before the main step donates its state.
        subagent_state = state._replace(
            **before._asdict(),
            step=jnp.copy(state.step),
            base=(),
            parts={},
        )
        after, metrics = main.step(state.with_parts(subagent=()), batch.replace(called=None))
        if called is None:
            return after.with_parts(subagent=before), metrics
        subagent_state, more = subagent.step(subagent_state, called)
        trained = SubagentState(
            subagent_state.params, subagent_state.opt_state, subagent_state.algo_state
        )
        named = {f"subagent_{k}": value for k, value in more.items() if k not in _OF_GROUPS}
        return after.with_parts(subagent=trained), metrics | named

    def inspect(state: TrainState, batch: Batch) -> tuple[Batch, Array]:
        called = batch.called
        batch, logp = main.inspect(state.with_parts(subagent=()), batch.replace(called=None))
        return batch.replace(called=called), logp

    def pass_over(state: TrainState) -> TrainState:
        after = main.pass_over(state.with_parts(subagent=()))
        return after.with_parts(subagent=state.subagent)

    return Algorithm(main.sampler, score, step, inspect, pass_over=pass_over)


def check_subagent(config: Any, recipe: Any) -> None:
    """Raises ValueError unless the options of a subagent have an effect."""
    if recipe.needs.subagent is None:
        if config.subagent != type(config.subagent)():
            raise ValueError(f"config: subagent has no effect: recipe {recipe.name!r} has none.")
        return
    if config.environment is None:
        raise ValueError(
            f"config: recipe {recipe.name!r} trains a subagent, which an environment asks; set "
            "config.environment."
        )
    if config.lora.rank is not None:
        raise ValueError(
            f"lora: recipe {recipe.name!r} trains all weights of its two policies; leave out "
            "the rank."
        )
