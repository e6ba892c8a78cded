"""A collector that chooses prompts by beliefs about their success rates."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import numpy as np

from jaxrl_llm.core import Array, ArrayTree, call_with, checks
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.core.sizes import power_of_two
from jaxrl_llm.curation.collectors.needs import Needs
from jaxrl_llm.curation.collectors.protocol import (
    Collection,
    Collector,
    Decision,
    Outcome,
    Request,
    Row,
    in_order,
    on_host,
    stack_outcomes,
)
from jaxrl_llm.curation.prompts.beliefs import (
    PromptBelief,
    belief_init,
    belief_mean,
    belief_update,
    thompson_rates,
)
from jaxrl_llm.curation.prompts.selection import candidate_pool, draw_prompts, select_top

__all__ = ["prioritized"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Prioritized:
    """Made by :func:`prioritized`."""

    score: Callable
    choose: str = "weight"
    thompson: bool = False
    candidates: int | None = None
    prior: tuple[float, float] = (1.0, 1.0)
    retain: float = 1.0
    retain_rest: float = 1.0
    follows: Callable | None = None
    first: int = 0

    reward_range = (0.0, 1.0)

    @property
    def needs(self) -> Needs:
        """Rows of new prompts have the value of the empty response."""
        return Needs(values_prefixes=self.first > 0)

    def _are_new(self, state: PromptBelief, prompts: np.ndarray) -> np.ndarray:
        """Bool, the prompts whose belief is still the prior."""
        alpha, beta = (np.float32(x) for x in self.prior)
        return (state.alpha[prompts] == alpha) & (state.beta[prompts] == beta)

    def follow(self, state: PromptBelief, learned: ArrayTree) -> PromptBelief:
        """The belief that training has come to, in place of the one of the collector."""
        if np.shape(learned.alpha) != np.shape(state.alpha):
            raise ValueError(
                f"{self!r}: it follows a belief about {len(learned.alpha)} prompts; the data set "
                f"has {len(state.alpha)}."
            )
        return PromptBelief(np.asarray(learned.alpha), np.asarray(learned.beta))

    def init(self, num_prompts: int) -> PromptBelief:
        belief = belief_init(num_prompts, prior=self.prior)
        return jax.tree.map(np.asarray, belief)

    def propose(self, state, key, collection: Collection, count: int):
        # The first prompts of the batch, the same for every count, less those asked for.
        first, total, belief, pool = len(collection.requests), len(state.alpha), state, None
        with on_host():
            key = jax.random.wrap_key_data(np.asarray(jax.random.key_data(key)))
            pool_key, rate_key, draw_key = jax.random.split(key, 3)
            if self.candidates is not None:
                size = min(total, self.candidates * collection.num_groups)
                pool = np.asarray(candidate_pool(pool_key, num_prompts=total, size=size))
                belief = PromptBelief(belief.alpha[pool], belief.beta[pool])
            most = min(len(belief.alpha), power_of_two(first + count))
            G = collection.group_size
            try:
                ids = _compiled_order(rate_key, draw_key, belief, self, G, most)
            except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError):
                ids = _ordered(rate_key, draw_key, belief, self, G, most)  # a score in NumPy
            ids = np.asarray(ids)
        if not (ids := ids[ids >= 0]).size:
            raise ValueError(f"{self!r}: the score is NaN for every prompt.")
        ids = np.resize(ids, first + count)[first:]
        places = ids if pool is None else pool[ids]
        sizes = collection.group_size + self.first * self._are_new(state, places)
        return tuple(map(Request, sizes.tolist(), places.tolist())), state

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        decision, _ = in_order().observe((), collection)
        groups = [outcome for outcome in collection.outcomes if outcome is not None]
        if decision.rows is None and (collection.waiting or not groups):
            return decision, state
        seen = stack_outcomes(groups, rows=len(groups))
        outside = seen.where & ~((seen.rewards >= 0) & (seen.rewards <= 1))
        for row, member in np.argwhere(outside)[:1]:
            raise ValueError(
                f"{self!r}: rewards must be in [0, 1]; prompt {groups[row].prompt} has "
                f"{seen.rewards[row, member]:g}."
            )
        if self.first:
            state, seen, rows = self._start(state, collection)
            decision = decision if decision.rows is None else Decision(rows=rows)
        with on_host():
            belief = _compiled_update(
                state,
                seen.prompt,
                seen.rewards,
                where=seen.where,
                retain=self.retain,
                retain_rest=self.retain_rest,
                prior=self.prior,
            )
        return decision, jax.tree.map(np.asarray, belief)

    def _start(
        self, state: PromptBelief, collection: Collection
    ) -> tuple[PromptBelief, Outcome, tuple[Row, ...]]:
        """The belief after the first rollouts of new prompts, the other rollouts, their rows."""
        alpha, beta = np.array(state.alpha), np.array(state.beta)
        done = [(i, x) for i, x in enumerate(collection.outcomes) if x is not None]
        rows, others = [], []
        for i, outcome in done:
            rollouts = len(outcome.rewards)
            trains = range(rollouts - collection.group_size, rollouts)
            first = np.asarray(outcome.where) & (np.arange(rollouts) < trains.start)
            value: tuple[tuple[int, float], ...] = ()
            if count := int(first.sum()):
                success = float(np.sum(outcome.rewards, where=first))
                weight = 1.0 / (1.0 - self.retain) / (count + sum(self.prior))
                alpha[outcome.prompt] = weight * (success + self.prior[0])
                beta[outcome.prompt] = weight * (count - success + self.prior[1])
                value = ((0, success / count),)
            members = tuple((i, j) for j in trains)
            rows.append(Row(members, segments=(value,) * len(members)))
            others.append(
                Outcome(
                    prompt=outcome.prompt,
                    rewards=outcome.rewards[trains.start :],
                    where=outcome.where[trains.start :],
                    lengths=outcome.lengths[trains.start :],
                    truncated=outcome.truncated[trains.start :],
                    reward_components={},
                )
            )
        return PromptBelief(alpha, beta), stack_outcomes(others, rows=len(others)), tuple(rows)

    def __repr__(self) -> str:
        text = stable_repr(self.score)
        for field in dataclasses.fields(self)[1:]:
            if (value := getattr(self, field.name)) != field.default:
                text += f", {field.name}={stable_repr(value)}"
        return f"prioritized({text})"


def _ordered(
    rate_key: Array,
    draw_key: Array,
    belief: PromptBelief,
    collector: _Prioritized,
    rollouts: int,
    count: int,
) -> Array:
    """The first ``count`` prompts of a belief by the collector's score."""
    rates = thompson_rates(rate_key, belief) if collector.thompson else belief_mean(belief)
    context = {"rates": rates, "state": belief, "rollouts": rollouts}
    scores = call_with(collector.score, context=context)
    checks.check_shape(repr(collector), "the score's result", scores, rates.shape)
    if collector.choose == "weight":
        return draw_prompts(draw_key, scores, count=count)
    return select_top(scores, count=count)


# Compiled: the data set may have a million prompts.
_compiled_order = jax.jit(_ordered, static_argnums=(3, 4, 5))


_compiled_update = jax.jit(belief_update, static_argnames=("retain", "retain_rest", "prior"))


def prioritized(
    score: Callable,
    *,
    choose: Literal["weight", "top"] = "weight",
    thompson: bool = False,
    candidates: int | None = None,
    prior: tuple[float, float] = (1.0, 1.0),
    retain: float = 1.0,
    retain_rest: float = 1.0,
    follows: Callable | None = None,
    first: int = 0,
) -> Collector:
    """Requests the prompts with the largest scores, or draws them with the scores as weights.

        rates = mean of each prompt's belief, or a draw from it (Thompson sampling)
        batch = P prompts without replacement, by score(rates)
        belief <- belief_update(belief, rewards)      once the batch is complete

    Rewards must be in [0, 1]. Prompts of weight 0 come after all others, in random order; among
    equal scores the first prompt is chosen. If a batch needs more prompts than there are
    candidates, their order repeats.

    Args:
      score: ``rates [M] -> scores [M]``, such as :func:`~jaxrl_llm.curation.learnability`. Its
        parameters may be ``rates``, ``state`` (a :class:`~jaxrl_llm.curation.PromptBelief` of the M
        candidates) or ``rollouts`` (G).
      choose: "weight" draws by scores, which are not negative; "top" selects the largest.
      thompson: Whether rates are drawn from the belief.
      candidates: Score only this many times P prompts, one from each section of the data; None for
        all. Drawing rates for a million prompts takes a quarter of a second.
      prior: Pseudo-counts of success and failure of a prompt never seen.
      retain: See :func:`~jaxrl_llm.curation.belief_update`, as for the next.
      retain_rest: The same for prompts that were not requested.
      follows: ``algo_state -> belief``, selects from the recipe's state a NamedTuple with ``alpha``
        and ``beta`` ``[N]``. A run then starts each batch with the belief of the newest weights
        instead of its own, which is only used without training.
      first: Number n of rollouts that are sampled in addition at the first visit of a prompt. They
        do not train: with S, the sum of their rewards, ``belief = (S + prior[0], n - S + prior[1])
        / ((1 - retain) (n + prior[0] + prior[1]))``, and the batch has their mean as the
        ``prefix_values`` of this row's first segment. Other rows have no segment.

    Returns:
      A collector; its state is a PromptBelief ``[N]``.

    Raises:
      TypeError: If ``score`` or ``follows`` is not a function.
      ValueError: If an option is out of its range, or ``retain`` is 1 with ``first``; in a run, if
        a reward is outside [0, 1] or the score has another shape than ``[M]`` or is NaN for every
        prompt.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.prioritized(jr.curation.learnability, retain=0.5)
      prioritized(learnability, retain=0.5)

    References:
      VADE (arXiv:2511.18902), MoPPS (arXiv:2507.04632), InSight (arXiv:2603.01907) and SPO
      (arXiv:2509.13232), which differ in score, choice and belief.
    """
    name = "prioritized"
    if not callable(score):
        raise TypeError(f"{name}: score must be a function; got {score!r}.")
    if not (follows is None or callable(follows)):
        raise TypeError(f"{name}: follows must be a function; got {follows!r}.")
    checks.check_option(name, "choose", choose, ("weight", "top"))
    checks.check_share(name, retain=retain, retain_rest=retain_rest)
    if candidates is not None:
        checks.check_positive(name, candidates=candidates)
    if first:
        checks.check_count(name, first=first)
    if first and retain == 1:
        raise ValueError(f"{name}: first={first} needs a retain below 1, which limits a belief.")
    prior = (float(prior[0]), float(prior[1]))
    checks.check_positive(name, **{"prior[0]": prior[0], "prior[1]": prior[1]})
    return _Prioritized(
        score=score,
        choose=choose,
        thompson=thompson,
        candidates=candidates,
        prior=prior,
        retain=retain,
        retain_rest=retain_rest,
        follows=follows,
        first=int(first),
    )
