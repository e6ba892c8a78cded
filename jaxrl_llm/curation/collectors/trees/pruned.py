"""A collector that drops beginnings of responses: a rule selects those that continue."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import ArrayTree, call_with, checks
from jaxrl_llm.core.compose import accepted, stable_repr
from jaxrl_llm.curation.collectors.needs import Needs, needs_of_sources
from jaxrl_llm.curation.collectors.on_source import prompt_source
from jaxrl_llm.curation.collectors.protocol import (
    Collection,
    Collector,
    Decision,
    Request,
    beginning,
    in_order,
    more_of,
    on_host,
    sized,
)
from jaxrl_llm.curation.collectors.trees.rounds import (
    NEEDS_OF_TREES,
    STATISTICS,
    check_counts,
    complete_batch,
    finished_members,
    go_on,
    paused,
    rule_arrays,
)
from jaxrl_llm.curation.trees.pruning import (
    ScoreBins,
    quality_loss,
    score_bins_init,
    score_bins_update,
    score_rates,
    survival_rates,
    systematic_survivors,
)

__all__ = ["QualityState", "SurvivalRule", "pruned", "quality_survivors"]


class SurvivalRule(NamedTuple):
    """A rule that selects the beginnings to continue, and learns from their outcomes; host side.

    Both functions may have as parameters, for the beginnings of a group: ``mask`` bool ``[n, T]``,
    ``old_entropy``, ``old_logp`` and ``behavior_logp`` ``[n, T]``, ``lengths`` and ``unfinished``
    ``[n]``, ``step`` (of the run) and ``key`` (of seed, step and group).

    Attributes:
      init: ``init() -> state``, a pytree of arrays.
      keep: ``keep(state, **named) -> bool [n]``, True for those that continue; finished responses
        are part of the group in any case.
      learn: ``learn(state, **named) -> state``, which may also name ``rewards`` and ``where``
        ``[n]``, True for those that have a reward.
    """

    init: Callable
    keep: Callable
    learn: Callable

    @property
    def first_help(self) -> int:
        """The first step of a run in which it may drop a beginning, as far as it says so."""
        return getattr(getattr(self.init, "__self__", None), "first_help", 0)

    def __repr__(self) -> str:
        rule = getattr(self.init, "__self__", None)
        names = f"{stable_repr(self.init)}, {stable_repr(self.keep)}, {stable_repr(self.learn)}"
        return f"SurvivalRule({names})" if rule is None else repr(rule)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Pruned:
    """Made by :func:`pruned`."""

    rule: Any  # a function or a SurvivalRule
    limit: int | None
    first: int | None
    source: Collector
    length: int | None = None

    @property
    def needs(self) -> Needs:
        entropy = any("old_entropy" in accepted(x) for x in self._functions)
        return needs_of_sources(self.source) | NEEDS_OF_TREES | Needs(records_entropy=entropy)

    @property
    def _functions(self) -> tuple[Callable, ...]:
        learned = isinstance(self.rule, SurvivalRule)
        return (self.rule.keep, self.rule.learn) if learned else (self.rule,)

    @property
    def first_help(self) -> int:
        return getattr(self.rule, "first_help", 0)

    def width(self, group_size: int) -> int:
        return self.first or group_size

    def for_run(self, group_size: int, max_new_tokens: int) -> "_Pruned":
        source = sized(self.source, group_size=group_size, max_new_tokens=max_new_tokens)
        limit = max(1, max_new_tokens // 4) if self.limit is None else self.limit
        if limit >= max_new_tokens:
            raise ValueError(
                f"{self!r}: limit must be below the {max_new_tokens} tokens of a response."
            )
        return dataclasses.replace(self, source=source, length=max_new_tokens, limit=limit)

    def init(self, num_prompts: int) -> ArrayTree:
        rule = self.rule.init() if isinstance(self.rule, SurvivalRule) else ()
        return {"rule": rule, "source": self.source.init(num_prompts)}

    def propose(self, state, key, collection: Collection, count: int):
        if self.length is None or self.limit is None:
            raise ValueError(f"{self!r} needs the sizes of a run, for_run(...).")
        size = collection._replace(group_size=self.width(collection.group_size))
        requests, source = self.source.propose(state["source"], key, size, count)
        limited = tuple(paused(x, self.limit, root=x, length=self.length) for x in requests)
        return limited, state | {"source": source}

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        def more(group: int, before: list[int]) -> tuple[Request, ...]:
            alive = self._survivors(state["rule"], collection, group)
            responses = collection.outcome(group).responses
            begins = tuple(beginning(responses[j], len(responses[j].tokens)) for j in alive)
            if not begins:
                return ()
            request = more_of(collection.requests[group], len(begins), begins)
            return (request._replace(limit=None, pauses=False),)

        if (decision := go_on(collection, 1, more)) is not None:
            return decision, state
        rule, members = state["rule"], finished_members(collection)
        if isinstance(self.rule, SurvivalRule):
            for group, row in enumerate(members):
                # From the rewards of those that ended, early or not.
                alive = self._survivors(state["rule"], collection, group)
                rewards = np.zeros(len(collection.outcome(group).responses), np.float32)
                where = np.zeros(rewards.shape, bool)
                for i, j in row:
                    place, outcome = j if i == group else alive[j], collection.outcome(i)
                    rewards[place], where[place] = outcome.rewards[j], outcome.where[j]
                with on_host():
                    context = self._context(collection, group)
                    context |= {"rewards": rewards, "where": where}
                    rule = call_with(self.rule.learn, rule, context=context)
                rule = jax.tree.map(np.asarray, rule)
        decision, source = complete_batch(self.source, state["source"], collection, members)
        return decision, {"rule": rule, "source": source}

    def _context(self, collection: Collection, group: int) -> dict:
        """What a rule may name of the beginnings of a group."""
        names = [n for n in STATISTICS if any(n in accepted(x) for x in self._functions)]
        size = len(collection.outcome(group).responses)
        arrays = rule_arrays(collection, [group], size, self.length or 0, names)
        key = jax.random.fold_in(jax.random.key(collection.seed), collection.step)
        key = jax.random.fold_in(key, group)
        return arrays | {"key": key, "step": np.int32(collection.step)}

    def _survivors(self, state, collection: Collection, group: int) -> list[int]:
        """Which of the beginnings of a group go on."""
        with on_host():
            context = self._context(collection, group)
            if isinstance(self.rule, SurvivalRule):
                keep = np.asarray(call_with(self.rule.keep, state, context=context))
            else:
                keep = np.asarray(call_with(self.rule, context=context))
        unfinished = context["unfinished"]
        if keep.shape != unfinished.shape or keep.dtype != bool:
            raise ValueError(
                f"{self!r}: the rule must return bool {unfinished.shape}; got shape {keep.shape} "
                f"of {keep.dtype}."
            )
        if not (keep | ~unfinished).any():
            raise ValueError(f"{self!r}: the rule drops all rollouts of group {group}.")
        return np.flatnonzero(keep & unfinished).tolist()

    def __repr__(self) -> str:
        text = stable_repr(self.rule)
        for option in ("limit", "first"):
            if getattr(self, option) is not None:
                text += f", {option}={getattr(self, option)}"
        if self.source != in_order():
            text += f", source={self.source!r}"
        return f"pruned({text})"


def pruned(
    rule: Callable | SurvivalRule,
    *,
    limit: int | None = None,
    first: int | None = None,
    source: Collector | None = None,
) -> Collector:
    """Samples beginnings of responses; a rule selects those that continue.

        round 0: `first` beginnings of `limit` tokens;   round 1: those that the rule keeps continue

    A group consists of the finished responses. A dropped beginning costs `limit` tokens and is not
    graded.

    Args:
      rule: Function that returns bool ``[n]``, True for those that continue; for its parameters see
        :class:`SurvivalRule`. A :class:`SurvivalRule`, such as :func:`quality_survivors`, also
        learns from rewards.
      limit: Tokens of a beginning, below those of a response; None for a quarter of them.
      first: Number of beginnings of a group, and the width of the batch; None for G.
      source: The collector that proposes the prompts; None for :func:`in_order`.

    Returns:
      A collector; its state is that of the rule and of ``source``.

    Raises:
      TypeError: If ``rule`` is no function, or a number no integer.
      ValueError: If a number is not above 0.

    Example:
      >>> import numpy as np
      >>> import jaxrl_llm as jr
      >>> def likely(old_logp):
      ...     return old_logp.mean(-1) > -1.0
      >>> jr.curation.pruned(likely, limit=64)
      pruned(likely, limit=64)

    References:
      ARRoL (arXiv:2603.24840).
    """
    name = "pruned"
    if not callable(rule) and not isinstance(rule, SurvivalRule):
        raise TypeError(f"{name}: rule must be a function or a SurvivalRule; got {rule!r}.")
    check_counts(name, {"limit": limit, "first": first})
    return _Pruned(rule=rule, limit=limit, first=first, source=prompt_source(name, source))


class QualityState(NamedTuple):
    """State of :func:`quality_survivors`: NumPy arrays.

    Attributes:
      head: float32 ``[5]``, a bias and weights of four statistics of a beginning.
      bins: Counts of good outcomes of beginnings by score.
    """

    head: np.ndarray
    bins: ScoreBins


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _QualityRule:
    """The functions of :func:`quality_survivors`."""

    share: float
    balance: float
    warmup: int
    num_bins: int
    learning_rate: float

    @property
    def first_help(self) -> int:
        return self.warmup

    def init(self) -> QualityState:
        bins = jax.tree.map(np.asarray, score_bins_init(bins=self.num_bins))
        return QualityState(np.zeros(5, np.float32), bins)

    def __repr__(self) -> str:
        return (
            f"quality_survivors(share={self.share}, balance={self.balance}, warmup={self.warmup}, "
            f"bins={self.num_bins}, learning_rate={self.learning_rate})"
        )

    def keep(self, state, old_logp, old_entropy, mask, unfinished, key, step):
        if step < self.warmup:
            return np.ones(unfinished.shape, bool)
        scores = _scores(state.head, old_logp, old_entropy, mask)
        # One at least: a group without a response cannot train.
        count = max(round(self.share * len(unfinished)), 1) - int((~unfinished).sum())
        if count <= 0:
            return ~unfinished
        rates = score_rates(state.bins, scores)
        rates = survival_rates(rates, keep=self.share, balance=self.balance, where=unfinished)
        return systematic_survivors(key, rates, count=count, where=unfinished)

    def learn(self, state, old_logp, old_entropy, mask, rewards, where):
        return _learned(state, old_logp, old_entropy, mask, rewards, where, self.learning_rate)


@jax.jit  # one operation after the other, a group would take 30 ms
def _learned(state: QualityState, old_logp, old_entropy, mask, rewards, where, learning_rate):
    """The head after a step of gradient descent, and the bins after these outcomes."""
    features = _features(old_logp, old_entropy, mask)

    def loss(head):
        return quality_loss(features @ head, rewards, where=where)

    scores = jax.nn.sigmoid(features @ state.head)
    bins = score_bins_update(state.bins, scores, rewards, where=where)
    return QualityState(state.head - learning_rate * jax.grad(loss)(state.head), bins)


def _features(old_logp, old_entropy, mask):
    """``[n, 5]``: 1, and mean and extreme of log-probabilities and entropies."""
    n = jnp.maximum(jnp.sum(mask, axis=-1), 1)

    def mean(x):
        return jnp.sum(jnp.where(mask, x, 0.0), axis=-1) / n

    least = jnp.min(jnp.where(mask, old_logp, 0.0), axis=-1)
    most = jnp.max(jnp.where(mask, old_entropy, 0.0), axis=-1)
    return jnp.stack([jnp.ones_like(least), mean(old_logp), least, mean(old_entropy), most], -1)


@jax.jit
def _scores(head, old_logp, old_entropy, mask):
    return jax.nn.sigmoid(_features(old_logp, old_entropy, mask) @ head)


def quality_survivors(
    *,
    share: float = 0.5,
    balance: float = 0.5,
    warmup: int = 20,
    bins: int = 20,
    learning_rate: float = 0.1,
) -> SurvivalRule:
    """Selects beginnings such that good and bad outcomes balance, by a score learned online.

        score = sigmoid(head . statistics of the beginning),   q = score_rates(score)
        share of the group continues, each with about survival_rates(q)

    Responses that ended early count as part of the share, which is one response at least.

    Args:
      share: Share of a group that continues, in (0, 1].
      balance: Target share of good ones among them, in [0, 1].
      warmup: Steps of the run in which all continue, not negative.
      bins: Number of bins of the scores.
      learning_rate: Learning rate of the head, one gradient step per group, above 0.

    Returns:
      A :class:`SurvivalRule`, whose state is a :class:`QualityState`.

    Raises:
      ValueError: If a share is outside its range, or a number negative.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.quality_survivors().init().head.shape
      (5,)

    References:
      ARRoL (arXiv:2603.24840), ABSTRACT reading. There the head reads the policy's hidden state at
      token 512; here mean and extreme of the log-probabilities and entropies of the beginning,
      which the sampler records.
    """
    name = "quality_survivors"
    checks.check_share(name, zero=False, share=share)
    checks.check_share(name, balance=balance)
    checks.check_non_negative(name, warmup=warmup)
    checks.check_positive(name, bins=bins, learning_rate=learning_rate)
    rule = _QualityRule(
        share=share, balance=balance, warmup=warmup, num_bins=bins, learning_rate=learning_rate
    )
    return SurvivalRule(rule.init, rule.keep, rule.learn)
