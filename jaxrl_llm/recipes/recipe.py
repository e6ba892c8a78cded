"""``Recipe``: one frozen record that puts the functions of the lower layers together."""

import dataclasses
from collections.abc import Callable, Mapping

import jax

from jaxrl_llm import aggregate
from jaxrl_llm.core import Array, Transform, call_with, checks, traits_of
from jaxrl_llm.recipes import slots, validity
from jaxrl_llm.recipes.batch import Batch
from jaxrl_llm.recipes.critic import Critic
from jaxrl_llm.recipes.prepare import AlgoState, first_state, run


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Recipe:
    """A policy-gradient method: which function stands in which slot. It holds no arrays.

        loss = sum_t weights_t * (correction_t * surrogate_t + sum_r regularizer_t)

    The slots are orthogonal; construction refuses the combinations that would mean another method
    than they say, and tells why.

    Attributes:
      name: Short name, for messages and metrics.
      advantage: Transform ``rewards [P, G] -> [P, G]`` or ``[P, G, T]``; it receives what it names
        of ``slots.PREPARE_CONTEXT``, the batch's extras and the controllers. Lift a function with
        ``stateless``; put several in a row with ``chain``.
      surrogate: ``(logp, old_logp, advantages, mask) -> token loss [..., T]``, and what it names of
        ``slots.LOSS_CONTEXT``, extras, controllers, derived arrays and statistics.
      weights: ``mask -> weights [..., T]``, computed once on the whole batch.
      regularizers: Functions of what they name of the same, each returning a token loss that is
        added to the surrogate's.
      correction: ``(old_logp, behavior_logp, mask) -> (weights, keep)``, both ``[..., T]``. The
        weights multiply the surrogate alone, not the regularizers. Tokens where ``keep`` is False
        leave the mask before token advantages and ``weights``, so they count in no denominator; a
        correction that wants to keep the denominator returns weight 0 instead. Rollouts do not
        leave their group's baseline. A sequence-level surrogate takes only a correction that is
        marked with ``core.traits(level="sequence")``.
      curation: Transform ``rewards [P, G] -> where [P, G]``, with the same context as
        ``advantage``; its result is combined with the batch's own ``where`` by "and".
      selection: ``(advantages, mask) -> keep [P, G, T]`` and what it names of the same context:
        tokens that leave the mask after the advantages, so that they stay in every baseline.
      derived: ``(name, function)`` pairs, ``function(advantages, **context)`` an array with leading
        axis P or a scalar: what the loss needs of the whole batch, under that name. The name
        ``"update_scale"`` is a scalar by which the train step multiplies the optimizer's update.
      controllers: ``(name, Transform)`` pairs, ``rewards -> scalar``: coefficients with a state,
        under that name for everything that comes after; see ``core.given``.
      statistics: ``(name, function)`` pairs, ``function(logits [N, V], targets [N]) -> [N, ...]``
        and the extras it names, row by row: numbers of the policy being trained that take the whole
        vocabulary; computed in chunks of tokens and differentiated.
      scored: The same for the policy at the start of the step; they go to the extras.
      taught: The same for the teacher, which is the policy (or ``reference``) after the extras
        ``teacher_prompt_tokens`` instead of the prompt.
      critic: A value model to train beside the policy; see :class:`Critic`.
      reference: ``(reference, params, step) -> reference``, how the reference model moves after
        each step; None keeps it frozen.
      inputs: Names of extras of your own that the batch brings.
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
    selection: Callable | None = None
    derived: tuple[tuple[str, Callable], ...] = ()
    controllers: tuple[tuple[str, Transform], ...] = ()
    statistics: tuple[tuple[str, Callable], ...] = ()
    scored: tuple[tuple[str, Callable], ...] = ()
    taught: tuple[tuple[str, Callable], ...] = ()
    critic: Critic | None = None
    reference: Callable | None = None
    inputs: tuple[str, ...] = ()
    paper: str = ""
    status: str = "experimental"
    group_relative: bool = True

    def __post_init__(self):
        validity.check_kinds(self)
        checks.check_option(f"Recipe {self.name!r}", "status", self.status, slots.STATUSES)
        validity.check_names(self)
        validity.check_functions(self)
        validity.check_read(self)
        validity.check_meaning(self)
        validity.check_levels(self)

    def __repr__(self) -> str:
        """The slots by the names of their functions; those left at their defaults are not shown."""
        return f"Recipe({slots.shown_fields(self)})"

    def replace(self, **changes) -> "Recipe":
        """A copy with some slots changed, checked anew.

        Raises:
          TypeError: If a name is not a field, with the nearest one.
        """
        return slots.replaced(self, changes)

    @property
    def needs(self) -> frozenset[str]:
        """Which inputs it cannot do without: log-probabilities, entropy, columns, extras by name.

        Of "ref_logp", "entropy", "behavior_logp", "old_logp" and "columns", those that a function
        names (``bind(function, ref_logp=None)`` takes one away); of the extras, those that it
        requires. A correction needs the two log-probabilities it compares. "old_logp" is here if
        the batch must hold it before it is prepared; a surrogate or a regularizer can do without,
        since the policy being trained stands in for it.
        """
        return slots.needed(self)[1]

    @property
    def computed(self) -> frozenset[str]:
        """Which of ``needs`` the train step computes itself; the rest comes with the batch."""
        names = slots.own_extras(self) | {"old_entropy", "hidden_sq"}
        if self.critic is not None:
            names |= {"values", "old_values"}
        return frozenset(names | {"old_logp", "ref_logp", "entropy"})

    @property
    def draws(self) -> bool:
        """Whether ``prepare`` draws random numbers and so takes a key."""
        return slots.draws(self)

    @property
    def uses_ratio(self) -> bool:
        """Whether the surrogate compares the policy with ``old_logp``.

        One that does not (``core.traits(has_ratio=False)``) has the right gradient only for the
        policy that sampled, so that a batch serves one update.
        """
        return traits_of(self.surrogate).has_ratio

    @property
    def reads_behavior(self) -> bool:
        """Whether it knows of what sampled: it has a correction or reads ``behavior_logp``."""
        return "behavior_logp" in self.needs

    @property
    def reward_range(self) -> tuple[float, float]:
        """The least and the greatest reward that the advantage is defined for, else infinite."""
        return slots.reward_range(self.advantage)

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

    def check_staleness(self, max_staleness: int) -> None:
        """Raises ValueError if older weights may sample and nothing in it would make up for it."""
        if max_staleness > 0 and not self.uses_ratio and not self.reads_behavior:
            raise ValueError(
                f"recipe {self.name!r} has no correction and a surrogate without a ratio, so "
                f"rollouts of older weights (max_staleness {max_staleness}) would bias it; use 0, "
                "or a recipe such as rollout_correction."
            )

    def init(self) -> AlgoState:
        """The first state of the recipe's Transforms."""
        return first_state(self)

    def prepare(
        self, batch: Batch, algo_state: AlgoState, *, key: Array | None = None
    ) -> tuple[Batch, AlgoState]:
        """Fills advantages, weights, correction and what is derived, before the batch is divided.

        In order: controllers; curation clears ``where`` and with it ``mask``; the correction drops
        tokens from ``mask``; advantages; the selection drops more; weights; derived arrays. All in
        float32.

        Args:
          batch: ``[P, G, T]`` arrays of all prompts of this update.
          algo_state: From ``init()`` or the last call.
          key: A typed key, for a recipe that ``draws``; others have no use for it.

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
        self._check_present(batch, slots.needed(self)[0] - {"entropy"}, "prepare")
        if self.draws and key is None:
            raise ValueError(f"Recipe {self.name!r}.prepare draws random numbers; give it a key.")
        return run(self, batch, AlgoState(*algo_state), key)

    def loss(
        self,
        logp: Array,
        batch: Batch,
        *,
        entropy: Array | None = None,
        statistics: Mapping[str, Array] | None = None,
    ) -> Array:
        """The whole loss: a weighted sum of token losses, so that parts of a batch simply add.

        Args:
          logp: ``[P, G, T]`` log-probabilities of the policy being trained, of all prompts or of
            some.
          batch: The same rows of a prepared batch.
          entropy: ``[P, G, T]``, if "entropy" is in ``needs``; ignored by other recipes, which may
            be handed it for the metrics' sake.
          statistics: ``[P, G, T, ...]`` by name, for a recipe with ``statistics``.

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
        for name, _ in self.statistics:
            if name not in (statistics or {}):
                raise ValueError(f"Recipe {self.name!r}.loss: statistics has no {name!r}.")
        old_logp = jax.lax.stop_gradient(logp) if batch.old_logp is None else batch.old_logp
        context = slots.context(batch, slots.LOSS_CONTEXT) | dict(statistics or {})
        context |= {"logp": logp, "old_logp": old_logp, "entropy": entropy}
        places = (logp, old_logp, batch.advantages, batch.mask)
        loss = call_with(self.surrogate, *places, context=context)
        what = f"the loss of surrogate {slots.called(self.surrogate)}"
        slots.check_output(self.name, what, loss, batch.mask.shape)
        if batch.correction is not None:
            loss = loss * batch.correction
        for term in self.regularizers:
            added = call_with(term, context=context)
            what = f"the loss of regularizer {slots.called(term)}"
            slots.check_output(self.name, what, added, batch.mask.shape)
            loss = loss + added
        return aggregate.weighted_sum(loss, batch.weights)

    def _check_present(self, batch: Batch, names, where: str, hint: str = "") -> None:
        for name in sorted(names):
            value = getattr(batch, name, batch.extras.get(name))
            if value is None:
                hint = f"; {hint}" if hint else ""
                raise ValueError(f"Recipe {self.name!r}.{where}: the batch has no {name}{hint}.")
