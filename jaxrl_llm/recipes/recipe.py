"""``Recipe``: one frozen record that puts the functions of the lower layers together."""

import dataclasses
import difflib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm import aggregate
from jaxrl_llm.core import (
    Array,
    ArrayTree,
    Transform,
    call_with,
    checks,
    functions_of,
    has_ratio,
    masking,
)
from jaxrl_llm.recipes import slots
from jaxrl_llm.recipes.batch import Batch


class AlgoState(NamedTuple):
    """State of a recipe: arrays only, saved with the train state.

    Attributes:
      advantage: State of the advantage Transform.
      curation: State of the curation Transform; ``()`` without one.
    """

    advantage: ArrayTree
    curation: ArrayTree


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Recipe:
    """A policy-gradient method: which function stands in which slot. It holds no arrays.

        loss = sum_t weights_t * (correction_t * surrogate_t + sum_r regularizer_t)

    The slots are orthogonal; construction refuses the combinations that would mean another method
    than they say, and tells why.

    Attributes:
      name: Short name, for messages and metrics.
      advantage: Transform ``rewards [P, G] -> [P, G]`` or ``[P, G, T]``; it receives those of
        ``slots.PREPARE_CONTEXT`` that it names. Lift a function with ``stateless``.
      surrogate: ``(logp, old_logp, advantages, mask) -> token loss [..., T]``.
      weights: ``mask -> weights [..., T]``, computed once on the whole batch.
      regularizers: Functions of what they name among ``slots.LOSS_CONTEXT``, each returning a token
        loss that is added to the surrogate's.
      correction: ``(old_logp, behavior_logp, mask) -> (weights, keep)``, both ``[..., T]``. The
        weights multiply the surrogate alone, not the regularizers. Tokens where ``keep`` is False
        leave the mask before token advantages and ``weights``, so they count in no denominator; a
        correction that wants to keep the denominator returns weight 0 instead. Rollouts do not
        leave their group's baseline. A sequence-level surrogate takes only a correction that is
        marked with ``core.sequence_level``.
      curation: Transform ``rewards [P, G] -> where [P, G]``, with the same context as
        ``advantage``; its result is combined with the batch's own ``where`` by "and".
      paper: Reference.
      status: ``"experimental"``, or ``"reproduced"`` once a config reaches a published number.
      group_relative: True if the method compares the rollouts of one prompt, which takes two.

    Raises:
      TypeError: If a slot holds the wrong kind of thing, or ``replace`` names an unknown field.
      ValueError: If a sequence-level surrogate meets a token-level weighting or correction, a slot
        needs an input that it is not given, or ``status`` is unknown.

    Example:
      >>> import jaxrl_llm as jr
      >>> recipe = jr.recipes.grpo(kl_coef=0.0).replace(
      ...     name="loo_dapo", advantage=jr.stateless(jr.advantages.rloo),
      ...     surrogate=jr.bind(jr.surrogates.ppo_clip, eps_high=0.28),
      ...     weights=jr.aggregate.token_mean)
      >>> recipe.surrogate
      ppo_clip(eps_high=0.28)
      >>> recipe.replace(surrogate=jr.surrogates.gspo)
      Traceback (most recent call last):
      ...
      ValueError: Recipe 'loo_dapo': surrogate gspo is one value per sequence, ...
    """

    name: str
    advantage: Transform
    surrogate: Callable
    weights: Callable = aggregate.token_mean
    regularizers: tuple[Callable, ...] = ()
    correction: Callable | None = None
    curation: Transform | None = None
    paper: str = ""
    status: str = "experimental"
    group_relative: bool = True

    def __post_init__(self):
        slots.check_kinds(self)
        checks.check_option(f"Recipe {self.name!r}", "status", self.status, slots.STATUSES)
        slots.check_functions(self)
        slots.check_levels(self)

    def __repr__(self) -> str:
        """The slots by the names of their functions; those left at their defaults are not shown."""
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.default is dataclasses.MISSING or value != field.default:
                parts.append(f"{field.name}={slots.shown(value)}")
        return f"Recipe({', '.join(parts)})"

    def replace(self, **changes) -> "Recipe":
        """A copy with some slots changed, checked anew.

        Raises:
          TypeError: If a name is not a field, with the nearest one.
        """
        fields = [f.name for f in dataclasses.fields(self)]
        for name in changes:
            if name not in fields:
                near = difflib.get_close_matches(name, fields, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise TypeError(
                    f"Recipe.replace: there is no field {name!r}.{hint} "
                    f"Fields: {', '.join(fields)}."
                )
        return dataclasses.replace(self, **changes)

    @property
    def needs(self) -> frozenset[str]:
        """Which of "ref_logp", "entropy", "behavior_logp" and "old_logp" it cannot do without.

        A regularizer, or a stateless advantage or curation (in a chain, too), needs what it names;
        what a Transform of another make needs cannot be seen. A correction needs the two
        log-probabilities it compares. "old_logp" is here if the batch must hold it before it is
        prepared; a surrogate or a regularizer can do without, since the policy being trained stands
        in for it.
        """
        return self._needs_to_prepare | slots.named(*self.regularizers)

    @property
    def _needs_to_prepare(self) -> frozenset[str]:
        functions = functions_of(self.advantage) + functions_of(self.curation)
        named = slots.named(*functions, to_prepare=True)
        return named if self.correction is None else named | {"old_logp", "behavior_logp"}

    @property
    def uses_ratio(self) -> bool:
        """Whether the surrogate compares the policy with ``old_logp``.

        One that does not (see :func:`jaxrl_llm.core.no_ratio`) has the right gradient only for the
        policy that sampled, so that a batch serves one update.
        """
        return has_ratio(self.surrogate)

    def check_group_size(self, group_size: int) -> None:
        """Raises ValueError if the recipe compares rollouts of a prompt and there is only one."""
        if self.group_relative and group_size < 2:
            raise ValueError(
                f"recipe {self.name!r} compares the rollouts of one prompt, so group_size must be "
                f"at least 2; got {group_size}. Sample more rollouts a prompt, or replace the "
                "advantage by one that needs no group and set group_relative=False."
            )

    def check_updates(self, updates: int) -> None:
        """Raises ValueError if a batch serves several updates and the surrogate has no ratio."""
        if updates > 1 and not self.uses_ratio:
            raise ValueError(
                f"recipe {self.name!r} has a surrogate without a ratio to old_logp, so {updates} "
                "updates on one batch would be biased from the second on; use 1."
            )

    def init(self) -> AlgoState:
        """The first state of the recipe's Transforms."""
        curation = () if self.curation is None else self.curation.init()
        return AlgoState(advantage=self.advantage.init(), curation=curation)

    def prepare(self, batch: Batch, algo_state: AlgoState) -> tuple[Batch, AlgoState]:
        """Fills advantages, weights and correction; once, on the whole batch, before it is divided.

        In order: curation clears ``where`` and with it ``mask``; the correction drops tokens from
        ``mask``; advantages; weights. All in float32.

        Args:
          batch: ``[P, G, T]`` arrays of all prompts of this update.
          algo_state: From ``init()`` or the last call.

        Returns:
          The batch, ready for ``loss`` in any microbatches of whole groups, and the next state.

        Raises:
          ValueError: If fields of the batch disagree about a shape, the group has one rollout and
            the recipe compares, an input that the recipe needs is absent, or a slot returns a wrong
            shape.
          TypeError: If a field of the batch has a wrong dtype, or a slot returns a mask that is not
            bool or another array that is not floating point.
        """
        batch = batch.check()
        self.check_group_size(batch.rewards.shape[1])
        self._check_present(batch, self._needs_to_prepare - {"entropy"}, "prepare")
        state = AlgoState(*algo_state)
        where, curation = batch.where, state.curation
        rewards = jnp.asarray(batch.rewards, jnp.float32)
        if self.curation is not None:
            kept, curation = self.curation.update(
                rewards, curation, **slots.context(batch, slots.PREPARE_CONTEXT)
            )
            checks.check_shape(f"curation of recipe {self.name!r}", "where", kept, where.shape)
            checks.check_bool(f"curation of recipe {self.name!r}", where=kept)
            where = where & kept
        # A correction left over from another recipe would be multiplied in without a word.
        mask = batch.mask & where[..., None]
        batch = batch.replace(where=where, mask=mask, correction=None)
        if self.correction is not None:
            batch = self._corrected(self.correction, batch)
        context = slots.context(batch, slots.PREPARE_CONTEXT)
        advantages, advantage = self.advantage.update(rewards, state.advantage, **context)
        slots.check_output(self.name, "advantages", advantages, where.shape, batch.mask.shape)
        checks.check_float(f"Recipe {self.name!r}", advantages=advantages)
        per_token = jnp.ndim(advantages) == batch.mask.ndim
        advantages = masking.zero_masked(advantages, batch.mask if per_token else batch.where)
        weights = self.weights(batch.mask)
        slots.check_output(self.name, "weights", weights, batch.mask.shape)
        checks.check_float(f"Recipe {self.name!r}", weights=weights)
        weights = masking.zero_masked(weights, batch.mask)
        return batch.replace(advantages=advantages, weights=weights).check(), AlgoState(
            advantage, curation
        )

    def loss(self, logp: Array, batch: Batch, *, entropy: Array | None = None) -> Array:
        """The whole loss: a weighted sum of token losses, so that parts of a batch simply add.

        Args:
          logp: ``[P, G, T]`` log-probabilities of the policy being trained, of all prompts or of
            some.
          batch: The same rows of a prepared batch.
          entropy: ``[P, G, T]``, if "entropy" is in ``needs``; ignored by other recipes, which may
            be handed it for the metrics' sake.

        Returns:
          A float32 scalar. Its gradient over microbatches sums to that of the whole batch.

        Raises:
          ValueError: If the batch was not prepared, shapes differ, a needed input is absent, or the
            surrogate or a regularizer does not return one value a token.
        """
        self._check_present(batch, {"advantages", "weights"}, "loss", hint="call prepare first")
        needs = self.needs | ({"correction"} if self.correction is not None else frozenset())
        self._check_present(batch, needs - {"entropy"}, "loss")
        if "entropy" in needs and entropy is None:
            raise ValueError(f"Recipe {self.name!r}.loss: a regularizer needs entropy; it is None.")
        checks.check_same_shape(f"Recipe {self.name!r}.loss", logp=logp, mask=batch.mask)
        old_logp = jax.lax.stop_gradient(logp) if batch.old_logp is None else batch.old_logp
        loss = self.surrogate(logp, old_logp, batch.advantages, batch.mask)
        what = f"the loss of surrogate {slots.called(self.surrogate)}"
        slots.check_output(self.name, what, loss, batch.mask.shape)
        if batch.correction is not None:
            loss = loss * batch.correction
        context = slots.context(batch, slots.LOSS_CONTEXT)
        context |= {"logp": logp, "old_logp": old_logp, "entropy": entropy}
        for term in self.regularizers:
            added = call_with(term, context=context)
            what = f"the loss of regularizer {slots.called(term)}"
            slots.check_output(self.name, what, added, batch.mask.shape)
            loss = loss + added
        return aggregate.weighted_sum(loss, batch.weights)

    def _corrected(self, correction: Callable, batch: Batch) -> Batch:
        """The batch with the correction's weights, and without the tokens that it rejects."""
        name = f"correction of recipe {self.name!r}"
        weights, keep = correction(batch.old_logp, batch.behavior_logp, batch.mask)
        checks.check_shape(name, "weights", weights, batch.mask.shape)
        checks.check_shape(name, "keep", keep, batch.mask.shape)
        checks.check_bool(name, keep=keep)
        mask = batch.mask & keep
        return batch.replace(mask=mask, correction=masking.zero_masked(weights, mask))

    def _check_present(self, batch: Batch, names, where: str, hint: str = "") -> None:
        for name in sorted(names):
            if getattr(batch, name) is None:
                hint = f"; {hint}" if hint else ""
                raise ValueError(f"Recipe {self.name!r}.{where}: the batch has no {name}{hint}.")
