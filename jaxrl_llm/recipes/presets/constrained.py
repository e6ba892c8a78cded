"""Rollouts count only if all judges agree, by task: CGPO, with three constrained optimizers."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jaxrl_llm import advantages, aggregate, curation, preferences, rewards, surrogates
from jaxrl_llm.core import (
    Array,
    accepted,
    bind,
    call_with,
    chain,
    checks,
    connect,
    functions_of,
    pipe,
    stateless,
    traits_of,
)
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.core.traits import Traits
from jaxrl_llm.curation.collectors.hints.hinted import prompt_name, read_column
from jaxrl_llm.recipes.presets.base import from_base
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed

__all__ = ["cgpo"]

Optimizer = Literal["crpg", "codpo", "crraft"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CgpoTask:
    """A task of :func:`cgpo`: how its prompts train, and how much.

    Attributes:
      optimizer: "crpg", "codpo" or "crraft".
      weight: Weight of the task's loss in the sum over tasks, above 0.
      budget: Of "crpg" and "crraft": the divergence of a response in nats from which its reward is
        0; None for 5.
      beta: Of "codpo": scale of the implicit rewards; None for 0.1.
      likelihood: Of "codpo": weight of the mean log-probability of the chosen response; None for 5.

    Raises:
      ValueError: If an option is unknown, out of its range or not one of the optimizer's.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.CgpoTask(optimizer="codpo", beta=0.2).weight
      1.0
    """

    optimizer: Optimizer = "crpg"
    weight: float = 1.0
    budget: float | None = None
    beta: float | None = None
    likelihood: float | None = None

    def __post_init__(self):
        name = "CgpoTask"
        checks.check_option(name, "optimizer", self.optimizer, ("crpg", "codpo", "crraft"))
        because = f"with optimizer={self.optimizer!r}"
        if self.optimizer == "codpo":
            checks.check_no_effect(name, because, budget=self.budget)
        else:
            checks.check_no_effect(name, because, beta=self.beta, likelihood=self.likelihood)
        checks.check_positive(name, finite=True, weight=self.weight, budget=self.budget)
        checks.check_positive(name, finite=True, beta=self.beta)
        checks.check_non_negative(name, finite=True, likelihood=self.likelihood)


def cgpo(
    *,
    optimizer: Optimizer = "crpg",
    budget: float | None = None,
    beta: float | None = None,
    likelihood: float | None = None,
    answers: str | None = None,
    tasks: Mapping[str, CgpoTask] | None = None,
    column: str | None = None,
) -> Recipe:
    """Rollouts count only if all judges agree and the policy is near the reference.

        d = log pi(y) - log pi_ref(y);   r = sigmoid(reward - baseline)
        crpg:    A = R - mean R over the batch,   R = [satisfied] r max(0, 1 - d / budget)
                 loss = mean over tokens of -A logp
        crraft:  A = R of the best response of a group,   R = [satisfied] r [d <= budget]
                 loss = mean over the tokens of those with A above 0 of -A logp
        codpo:   w = the best that is satisfied,   l = the worst that is not (or of all, if all are)
                 loss = mean over groups with such a pair of
                        -log sigmoid(beta (d_w - d_l)) - likelihood (mean over tokens of logp_w)
        tasks:   loss = sum over tasks of weight times the loss of the task's groups

    The reward's component "satisfied" is 1 where all judges agree, else 0. The baseline is the
    reward of the greedy response, or that of an answer of the data. Groups without a satisfied
    rollout, or without a reward above 0, do not train with "codpo" and "crraft". If several are the
    best or the worst, the loss of the group is the mean over them.

    With ``tasks`` the prompts of a batch belong to several tasks, each with an optimizer, a budget
    and a mean of its own. The reward reads the task in ``metadata``, so each task has judges, and a
    reward model, of its own. Metrics: ``task_reward/NAME`` and ``task_satisfied/NAME``. A task that
    no prompt has is refused.

    Args:
      optimizer, budget, beta, likelihood: See :class:`CgpoTask`, for a run with one task.
      answers: Column of the data with an answer of each prompt. It takes the place of one of the G
        rollouts of the group and is graded like them; its reward is the baseline, and with "crraft"
        it trains, with a reward of 1/2, if no rollout has a reward above 0 and it is satisfied and
        within the budget; pairs of "codpo" leave it out, so they need a G of 3. None for the
        greedy response, which does not train.
      tasks: The tasks by name; None for one task.
      column: Column of the data with the name of a prompt's task; None for "task".

    Example:
      >>> import jaxrl_llm as jr
      >>> task = jr.recipes.CgpoTask
      >>> recipe = jr.recipes.cgpo(tasks={
      ...     "math": task(optimizer="crpg", budget=10.0), "chat": task(optimizer="codpo")})
      >>> sorted(recipe.required_fields - recipe.step_fields)
      ['greedy_rewards', 'satisfied', 'task_ids']

    References:
      CGPO (arXiv:2409.20370), through third-party code that cites its equations. There the baseline
      is the reward of an answer of the data, CRPG's loss is also divided by G, and the code has one
      task; the sum over tasks is NOTES. There a task also has a number of rollouts of its own; here
      G is that of the run. The code's CODPO multiplies rewards by verdicts and so may choose a
      response that violates a constraint; here it cannot. It takes the first of several best
      rollouts; a mean over them is ours.
    """
    if tasks is not None:
        other = None if optimizer == "crpg" else optimizer
        because = "with tasks, which have options of their own"
        checks.check_no_effect("cgpo", because, optimizer=other, budget=budget)
        checks.check_no_effect("cgpo", because, beta=beta, likelihood=likelihood)
        return _several_tasks(tasks, answers, "task" if column is None else column)
    checks.check_no_effect("cgpo", "without tasks", column=column)
    if optimizer == "codpo":
        checks.check_no_effect("cgpo", "with optimizer='codpo'", answers=answers)
    task = CgpoTask(optimizer=optimizer, budget=budget, beta=beta, likelihood=likelihood)
    return _one_task(task, answers)


def _one_task(task: CgpoTask, answers: str | None) -> Recipe:
    """The recipe of a task; with a column of answers, each group has one."""
    make = {"crpg": _crpg, "codpo": _codpo, "crraft": _crraft}[task.optimizer]
    return make(task, None if answers is None else curation.demonstrations(column=answers))


def _crpg(task: CgpoTask, collector: curation.Collector | None) -> Recipe:
    answered = collector is not None
    centered = stateless(centered_samples if answered else advantages.center)
    return from_base(
        name="cgpo",
        advantage=chain(stateless(_judged(task, answered, soft=True)), centered),
        surrogate=surrogates.reinforce,
        curation=stateless(answered_groups) if answered else None,
        selection=sampled_tokens if answered else None,
        collector=collector,
        group_relative=False,
        paper="arXiv:2409.20370",
    )


def _crraft(task: CgpoTask, collector: curation.Collector | None) -> Recipe:
    answered = collector is not None
    judged = stateless(_judged(task, answered, soft=False))
    return from_base(
        name="cgpo",
        advantage=chain(judged, stateless(best_of_group)),
        surrogate=surrogates.reinforce,
        weights=mean_of_best,
        curation=stateless(answered_groups) if answered else None,
        selection=trained_rollouts,
        collector=collector,
        group_relative=False,
        paper="arXiv:2409.20370",
    )


def _judged(task: CgpoTask, answered: bool, *, soft: bool) -> Callable:
    """The rewards of CRPG or CRRAFT, against answers in the groups or greedy responses."""
    budget = 5.0 if task.budget is None else task.budget
    judged = bind(rewards.crpg_rewards, budget=budget)
    judged = judged if soft else bind(judged, soft=False)
    if answered:
        return connect(judged, reference="imitated")
    return connect(judged, baseline="greedy_rewards")


def _codpo(task: CgpoTask, collector: curation.Collector | None) -> Recipe:
    loss = bind(
        preferences.dpo,
        beta=0.1 if task.beta is None else task.beta,
        likelihood=5.0 if task.likelihood is None else task.likelihood,
    )
    return from_base(
        name="cgpo",
        advantage=stateless(pair_signs),
        surrogate=bind(preferences.paired, loss=loss, behavior_logp=None),
        weights=aggregate.group_mean,
        curation=None if collector is None else stateless(sampled_rollouts),
        selection=trained_rollouts,
        collector=collector,
        paper="arXiv:2409.20370",
    )


def _several_tasks(tasks: Mapping[str, CgpoTask], answers: str | None, column: str) -> Recipe:
    """The recipe in which each slot calls that of the task of each group."""
    if not tasks:
        raise ValueError("cgpo: tasks must name at least one task.")
    for name, task in tasks.items():
        if not isinstance(task, CgpoTask):
            raise TypeError(f"cgpo: tasks[{name!r}] must be a CgpoTask; got {task!r}.")
    if answers is not None and all(task.optimizer == "codpo" for task in tasks.values()):
        checks.check_no_effect("cgpo", "if all tasks have optimizer='codpo'", answers=answers)
    parts = [_one_task(task, answers) for task in tasks.values()]
    scales = tuple(task.weight for task in tasks.values())
    curations = tuple(function for part in parts for function in functions_of(part.curation))
    pairs = any(part.group_relative for part in parts)
    collector = parts[0].collector
    if answers is not None and pairs:  # which are of two rollouts beside the answer
        collector = curation.demonstrations(column=answers, least_sampled=2)
    return from_base(
        name="cgpo",
        advantage=stateless(ByTask(tuple(pipe(*functions_of(x.advantage)) for x in parts))),
        surrogate=ByTask(tuple(part.surrogate for part in parts)),
        weights=ByTask(tuple(part.weights for part in parts), scales),
        curation=stateless(ByTask(curations)) if curations else None,
        selection=ByTask(tuple(part.selection or every_token for part in parts)),
        collector=collector,
        computed=(Computed("task_ids", TaskIds(column, tuple(tasks)), "responses"),),
        group_relative=pairs,
        paper="arXiv:2409.20370",
    )


# What the slots hold


def pair_signs(rewards: Array, *, satisfied: Array, mask: Array, where: Array) -> Array:
    """Advantages 1 and -1 for the rollouts of CODPO's pairs, 0 for the others.

    Those that tie with the chosen or the rejected one, under the same verdict, have its sign.
    """
    there = where & jnp.any(mask, axis=-1)
    pairs = curation.constrained_pairs(rewards, satisfied=satisfied, where=there)

    def tied(index: Array) -> Array:
        alike = there & pairs.where[..., None]
        for x in (rewards, satisfied):
            alike &= x == jnp.take_along_axis(x, index[..., None], axis=-1)
        return alike

    return tied(pairs.chosen).astype(jnp.float32) - tied(pairs.rejected)


def best_of_group(
    calibrated: Array, *, rewards: Array, where: Array, imitated: Array | None = None
) -> Array:
    """:func:`curation.best_constrained` by the rewards before their calibration, with all ties."""
    return curation.best_constrained(
        calibrated, order=rewards, reference=imitated, ties="all", where=where
    )


def mean_of_best(mask: Array) -> Array:
    """:func:`aggregate.token_mean`, where the tied best rollouts of a group count as one."""
    members = jnp.sum(jnp.any(mask, axis=-1), axis=-1, dtype=jnp.float32)
    shares = mask / jnp.maximum(members, 1.0)[..., None, None]
    return shares / jnp.maximum(jnp.sum(shares), 1.0)


def centered_samples(rewards: Array, *, imitated: Array, where: Array) -> Array:
    """:func:`advantages.center` of the rollouts that the policy sampled; 0 for answers."""
    return advantages.center(rewards, where=where & ~imitated)


def answered_groups(rewards: Array, *, imitated: Array, where: Array) -> Array:
    """Groups whose answer of the data was graded."""
    del rewards
    return where & jnp.any(where & imitated, axis=-1, keepdims=True)


def sampled_rollouts(rewards: Array, *, imitated: Array, where: Array) -> Array:
    """Rollouts that are not of the data."""
    del rewards
    return where & ~imitated


def sampled_tokens(advantages: Array, mask: Array, *, imitated: Array) -> Array:
    """Tokens of rollouts that are not of the data."""
    del advantages
    return mask & ~imitated[..., None]


def trained_rollouts(advantages: Array, mask: Array) -> Array:
    """Tokens of rollouts with an advantage, so that the others count in no mean."""
    return mask & (advantages != 0)[..., None]


def every_token(advantages: Array, mask: Array) -> Array:
    """The selection that drops nothing."""
    del advantages
    return mask


@dataclasses.dataclass(frozen=True)
class TaskIds:
    """The place of each prompt's task among the tasks, read from a column of the data."""

    column: str
    tasks: tuple[str, ...]

    def __call__(self, texts: Sequence, *, metadata: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """int32 ``[P]``, for ``Computed("task_ids", ..., "responses")``."""
        del texts
        return np.array([self.task_of(row) for row in metadata], np.int32)

    def task_of(self, row: Mapping[str, Any]) -> int:
        """The place of the task of a prompt; ValueError if it is none of the recipe's."""
        task = read_column("cgpo", row, self.column)
        if task not in self.tasks:
            known = ", ".join(map(repr, self.tasks))
            raise ValueError(
                f"cgpo: prompt {prompt_name(row)} has the task {task!r} in column "
                f"{self.column!r}; the recipe has the tasks {known}."
            )
        return self.tasks.index(task)

    check = task_of  # before the run


@dataclasses.dataclass(frozen=True, repr=False)
class ByTask:
    """A function of a slot that applies to the groups of each task the function of that task.

        f(x) = scale_k f_k(x) on the groups of task k, as if the batch had only these

    Each function gets ``where`` and ``mask`` without the groups of other tasks, so that its means
    are over its task; what it returns there does not count. Without ``scales`` each is 1.
    """

    functions: tuple[Callable, ...]
    scales: tuple[float, ...] = ()

    def __post_init__(self):
        place = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        first = [p for p in accepted(self.functions[0]).values() if p.kind in place]
        named = {"task_ids": Parameter("task_ids", Parameter.KEYWORD_ONLY)}
        for function in self.functions:
            for name, parameter in accepted(function).items():
                # What one of the functions requires is required.
                optional = parameter.default is not parameter.empty and name in named
                if parameter.kind is parameter.KEYWORD_ONLY and not optional:
                    named[name] = parameter
        signature = Signature([*(p.replace(kind=place[0]) for p in first), *named.values()])
        object.__setattr__(self, "__signature__", signature)

    def __call__(self, *args: Array, task_ids: Array, **context: Any) -> Array:
        """The sum, or for masks the union, over tasks of what the task's function returns."""
        context |= dict(zip(accepted(self), args, strict=False))
        parts = []
        for task, function in enumerate(self.functions):
            own = task_ids == task
            restricted = {
                name: context[name] & _along(own, context[name])
                for name in ("where", "mask", "response_mask")
                if name in context
            }
            part = context | restricted
            result = call_with(function, *(part[n] for n in self._places), context=part)
            if self.scales:
                result = self.scales[task] * result
            parts.append(jnp.where(_along(own, result), result, jnp.zeros_like(result)))
        total = parts[0]
        for part in parts[1:]:
            total = total | part if total.dtype == bool else total + part
        return total

    @property
    def _places(self) -> list[str]:
        keyword = Parameter.KEYWORD_ONLY
        return [name for name, p in accepted(self).items() if p.kind is not keyword]

    @property
    def __traits__(self) -> Traits:
        every = [traits_of(function) for function in self.functions]
        if len(set(every)) == 1:
            return every[0]
        return Traits(
            level="sequence" if any(t.level == "sequence" for t in every) else "token",
            has_ratio=all(t.has_ratio for t in every),
            policy_gradient=all(t.policy_gradient for t in every),
            takes_correction=all(t.takes_correction for t in every),
            reads_sequence=any(t.reads_sequence for t in every),
            supervised=any(t.supervised for t in every),
        )

    def __repr__(self) -> str:
        scales = [f"scales={self.scales}"] if self.scales else []
        return f"by_task({', '.join([*map(stable_repr, self.functions), *scales])})"


def _along(own: Array, x: Array) -> Array:
    """Bool ``[P]`` with the rank of an array ``[P, ...]``."""
    return own.reshape((-1, *[1] * (jnp.ndim(x) - 1)))
