"""``Recipe``: one frozen record that combines the functions of the lower layers."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxrl_llm import aggregate, surrogates
from jaxrl_llm.core import (
    Array,
    ArrayTree,
    Transform,
    accepted,
    call_with,
    checks,
    functions_of,
    masking,
    parts_of,
    traits_of,
)
from jaxrl_llm.curation import Collector, no_update
from jaxrl_llm.curation.collectors.needs import needs_of
from jaxrl_llm.diffusion import FlowLikelihood, Likelihood
from jaxrl_llm.recipes import wiring
from jaxrl_llm.recipes.batch import Batch
from jaxrl_llm.recipes.needs import RunNeeds
from jaxrl_llm.recipes.parts import (
    Critic,
    ProcessRewardModel,
    RecipePart,
    SecondModel,
    Subagent,
    TurnUpdates,
    merged,
    without_repeats,
)
from jaxrl_llm.recipes.records import format_fields, name_of, replace_fields
from jaxrl_llm.recipes.results import (
    corrected,
    weights_of,
    with_computed,
    with_extra,
    without,
)
from jaxrl_llm.recipes.wiring import Computed
from jaxrl_llm.regularizers import EarlierPolicies

P = TypeVar("P", bound=RecipePart)


class AlgoState(NamedTuple):
    """State of a recipe: arrays only, saved with the train state.

    Attributes:
      advantage: State of the advantage Transform.
      curation: State of the curation Transform; ``()`` without one.
      controllers: State of each computed controller and memory of visits, by its name.
      last_kl: float32 ``[]``, KL between the policies before and after the last update, as measured
        by the train step; 0 before the first.
      rules: State of each rule of the optimizer's step, by its name.
    """

    advantage: ArrayTree
    curation: ArrayTree
    controllers: dict[str, ArrayTree]
    last_kl: Array
    rules: dict[str, ArrayTree] = {}  # noqa: RUF012  a default that nothing changes


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Recipe:
    """A policy-gradient method: one function per slot. It holds no arrays.

        loss = sum_t weights_t * (correction_t * surrogate_t + sum_r regularizer_t)
               + what its parts add

    The slots are orthogonal. An inconsistent combination raises an error with the reason when the
    Recipe is created.

    Attributes:
      name: Short name, for messages and metrics.
      advantage: Transform ``rewards [P, G] -> [P, G]`` or ``[P, G, T]``; it receives by name
        entries of ``wiring.PREPARE_CONTEXT``, the batch's extras and the controllers of
        ``computed``. Lift a function with ``stateless``; combine several with ``chain``.
      surrogate: ``(logp, old_logp, advantages, mask) -> token loss [..., T]``, and by name entries
        of ``wiring.LOSS_CONTEXT``, the extras and everything ``computed``.
      weights: ``mask -> weights [..., T]``, computed once for each optimizer step.
      regularizers: Functions of named entries of the surrogate's context, each returning a token
        loss that is added to the surrogate's.
      correction: ``(old_logp, behavior_logp, mask) -> (weights, keep)``, both ``[..., T]``. The
        weights multiply only the surrogate, not the regularizers. Tokens where ``keep`` is False
        leave the mask before token advantages and ``weights``, so they count in no denominator;
        tokens of weight 0 do count. Rollouts remain in their group's baseline, with the lengths
        that they have: what counts tokens of a response names ``response_mask``. A sequence-level
        surrogate accepts only a correction that is marked with ``core.traits(level="sequence")``.
      curation: Transform ``rewards [P, G] -> where [P, G]``, with the same context as
        ``advantage``; its result is combined with the batch's ``where`` by "and".
      selection: ``(advantages, mask) -> keep [P, G, T]`` with named entries of the same context:
        tokens that leave the mask after the advantages, so they still count in every baseline, and
        in the ratios of sequences (``core.traits(reads_sequence=True)``).
      collector: Chooses the prompts of a batch, their numbers of rollouts and the groups that
        train; None for each prompt once an epoch. See
        :mod:`jaxrl_llm.curation.collectors.protocol`.
      computed: Numbers that the method needs beyond the batch, each a :class:`Computed`. Later
        functions read them by name; see also ``core.connect``.
      parts: What the method adds to the update beyond these slots: values of
        :class:`~jaxrl_llm.recipes.parts.RecipePart`, each of another kind. The arguments from
        ``critic`` to ``text_coef`` are short forms: each makes its part, and has the value of a
        part that ``parts`` names.
      critic: A value model that is trained with the policy; see :class:`Critic`.
      prm: A process reward model that is trained with the policy, in place of a critic;
        see :class:`ProcessRewardModel`.
      likelihood: For a denoising model, the estimate that replaces log-probabilities,
        :class:`jaxrl_llm.diffusion.Likelihood`, or the densities of the steps of a flow,
        :class:`jaxrl_llm.diffusion.FlowLikelihood`. None for a causal model.
      reference: ``(reference, params, step) -> reference``, the update of the reference model after
        each step; None for a frozen one. It may name ``key``, a key of the run's seed. A rule with
        ``init`` has a state, and may also change the policy; see
        :mod:`jaxrl_llm.regularizers.references`.
      earlier: Policies of earlier iterations, whose weighted log-probabilities are the extra
        ``earlier_logp``; see :func:`jaxrl_llm.regularizers.earlier_policies`. None for none.
      sampled_by: "policy"; "reference", one that moves; or ("policy", "reference"), a half each.
      teacher_mixture: Weight of the teacher in the sampling distribution, in [0, 1): each token is
        drawn from ``(1 - w) policy + w teacher``, and ``behavior_logp`` is of this mixture. The
        teacher is another model.
      sampler_quantization: "int8" or "fp8" if rollouts are sampled with the policy's linear layers
        rounded to 8 bits, and ``behavior_logp`` is of the rounded policy; with a collector of
        drafts, only the drafts are. None for full precision. A run's config may override it.
      turn_updates: If set, each turn of a batch is an optimizer step; see :class:`TurnUpdates`.
      subagent: A second policy that answers what the environment asks it, and is trained on its
        answers; see :class:`~jaxrl_llm.recipes.Subagent`. None for none.
      text_coef: Weight of the loss on texts, see :class:`~jaxrl_llm.recipes.parts.Texts`; 0 for no
        texts.
      inputs: Names of further extras that the batch holds.
      epochs: Number of passes over a batch; a run's config or ``train.make_step`` may override it.
      minibatches: Number of parts of a batch, each with an optimizer step; the same may override
        it.
      paper: Reference.
      group_relative: True if the method compares the rollouts of one prompt, which requires two.

    Raises:
      TypeError: If a slot has a wrong type, or ``replace`` names an unknown field.
      ValueError: If a sequence-level surrogate is combined with a token-level weighting or
        correction, or a slot needs an input that is not available.

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
    collector: Collector | None = None
    computed: tuple[Computed, ...] = ()
    parts: tuple[RecipePart, ...] = ()
    critic: Critic | None = None
    prm: ProcessRewardModel | None = None
    likelihood: Likelihood | FlowLikelihood | None = None
    reference: Callable | None = None
    earlier: EarlierPolicies | None = None
    sampled_by: str | tuple[str, str] = "policy"
    teacher_mixture: float = 0.0
    sampler_quantization: str | None = None
    turn_updates: TurnUpdates | None = None
    subagent: Subagent | None = None
    text_coef: float = 0.0
    inputs: tuple[str, ...] = ()
    epochs: int = 1
    minibatches: int = 1
    paper: str = ""
    group_relative: bool = True

    def __post_init__(self):
        for field, value in merged(self).items():
            object.__setattr__(self, field, value)
        wiring.check_recipe(self)

    def __repr__(self) -> str:
        """The slots by the names of their functions; those left at their defaults are not shown."""
        written = format_fields(self, leave_out="parts")
        further = f", parts={self.further_parts!r}" if self.further_parts else ""
        return f"Recipe({written}{further})"

    def replace(self, **changes) -> "Recipe":
        """A copy with some slots changed, checked anew; TypeError if a name is not a field."""
        return replace_fields(self, without_repeats(self, changes))

    @property
    def further_parts(self) -> tuple[RecipePart, ...]:
        """The parts that no other field makes."""
        return tuple(part for part in self.parts if not part.keyword)

    def part(self, kind: type[P]) -> P | None:
        """The part of this kind, or None."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def computed_from(self, *sources: str) -> dict[str, Any]:
        """The functions of ``computed`` from these sources by name, in their order."""
        return {x.name: x.function for x in self.computed if x.source in sources}

    @functools.cached_property
    def needs(self) -> RunNeeds:
        """What it needs of a training run."""
        slots = (self.advantage, self.curation)
        return RunNeeds(
            samples_responses=self.samples_responses,
            sampled_by=self.sampled_by,
            teacher_mixture=self.teacher_mixture,
            sampler_quantization=self.sampler_quantization,
            epochs=self.epochs,
            minibatches=self.minibatches,
            divides_batch=any(part.divides_batch for part in self.parts),
            needs_updates=self.needs_updates,
            waits=max((part.steps_before_policy for part in self.parts), default=0),
            head=self.head,
            likelihood=self.likelihood,
            second_model=self.second_model,
            subagent=self.subagent,
            uses_reference=self.uses_reference,
            moves_reference=self.reference is not None,
            has_teacher=self.has_teacher,
            learns_from_model=self.learns_from_model,
            fields=self.required_fields,
            computed=self.computed,
            reads_behavior=self.reads_behavior,
            reward_range=self.reward_range,
            reward_functions=tuple(x for slot in slots if slot for x in functions_of(slot)),
        )

    @property
    def required_fields(self) -> frozenset[str]:
        """The names of the inputs that it requires.

        Of "ref_logp", "entropy", "behavior_logp", "old_logp" and "reward_components", those that a
        function names (``bind(function, ref_logp=None)`` removes one); of the extras, those that a
        function requires. A correction needs the two log-probabilities that it compares. "old_logp"
        is included if the batch must hold it before it is prepared; for a surrogate or a
        regularizer it is optional, since the policy being trained replaces it.
        """
        return wiring.required_fields(self).in_all

    @property
    def second_model(self) -> SecondModel | None:
        """The critic or the process reward model; a recipe has at most one of them."""
        return self.part(SecondModel)

    @property
    def step_fields(self) -> frozenset[str]:
        """Which of ``required_fields`` the train step computes; the batch holds the others."""
        names = set(self.computed_from(*wiring.BEFORE_PREPARE, "optimizer"))
        names |= {"old_entropy", "hidden_sq", "hidden_rank", "kl_logp", "kl_ref_logp"}
        names |= {"grad_sq_norms"}
        if wiring.ANSWER_TEXTS in self.computed_from("responses"):
            names |= {"answer_logp"}
        for part in self.parts:
            names |= part.computed_by_step(self)
        return frozenset(names | {"old_logp", "ref_logp", "entropy"})

    @property
    def draws(self) -> bool:
        """Whether ``prepare`` draws random numbers and so takes a key."""
        return wiring.prepare_names(self, "key")

    @property
    def reference_draws(self) -> bool:
        """Whether a moving reference draws random numbers."""
        return self.reference is not None and "key" in accepted(self.reference)

    @property
    def reads_last_kl(self) -> bool:
        """Whether ``prepare`` reads the KL of the previous update."""
        return wiring.prepare_names(self, "last_kl")

    @property
    def policy_controllers(self) -> frozenset[str]:
        """The controllers whose coefficient follows the policy, such as its KL or its entropy."""
        return wiring.policy_controllers(self)

    @property
    def trains_weights(self) -> bool:
        """Whether an update can move the weights: ``curation.no_update`` does not scale each."""
        return self.computed_from("batch", "update").get(wiring.UPDATE_SCALE) is not no_update

    @property
    def learns(self) -> bool:
        """Whether a Transform updates its state by results of an update."""
        return bool(wiring.learners(self))

    @property
    def uses_reference(self) -> bool:
        """Whether it uses the reference model: ``ref_logp``, or statistics of it."""
        return wiring.uses_reference(self)

    @property
    def reads_teacher_logits(self) -> bool:
        """Whether a statistic of the policy reads all logits of the teacher."""
        return wiring.reads_teacher_logits(self)

    @property
    def has_teacher(self) -> bool:
        """Whether it uses a teacher: another model, or the policy after another prompt."""
        spans = "teacher_span_logp" in self.required_fields
        return bool(self.computed_from("teacher")) or self.reads_teacher_logits or spans

    @property
    def teacher_top(self) -> int:
        """Number of the teacher's most probable tokens that are read at each position."""
        function = self.computed_from("teacher").get("top_ids")
        return dict(getattr(function, "options", ())).get("count", 0)

    @property
    def learns_from_model(self) -> bool:
        """Whether the teacher is another model, not the policy after another prompt."""
        itself = wiring.TEACHER_TEXTS in self.computed_from("responses")
        return self.has_teacher and not itself

    @property
    def uses_ratio(self) -> bool:
        """Whether the surrogate compares the policy with ``old_logp``.

        A surrogate that does not (``core.traits(has_ratio=False)``) has the right gradient only on
        policy, so each batch that a policy sampled has one optimizer step; or several, if that is
        its method (``reuses_samples=True``), which may be for older samples too
        (``off_policy=True``).
        """
        return traits_of(self.surrogate).has_ratio

    @property
    def compares_old(self) -> bool:
        """Whether several optimizer steps on a batch need ``old_logp`` from before the first.

        It is False if the surrogate reuses samples without a ratio and nothing else reads
        ``old_logp``: then the old policy is not scored, and there are no metrics of it.
        """
        return wiring.compares_old(self)

    @property
    def reads_sequences(self) -> bool:
        """Whether a part of the loss reads a ratio, a mean or a length of whole sequences."""
        return any(traits_of(f).reads_sequence for f in (self.surrogate, *self.regularizers))

    @property
    def needs_updates(self) -> bool:
        """Whether a part of the method has an effect only after the first update on a batch.

        Such as a term of the loss, a state, or what is computed before each update.
        """
        adjusts = parts_of(self.advantage) or (self.advantage,)
        functions = (self.surrogate, *self.regularizers, *(each.update for each in adjusts))
        measured = bool(self.computed_from("update"))
        return measured or any(traits_of(each).needs_updates for each in functions)

    @property
    def samples_responses(self) -> bool:
        """Whether some weights sample the responses; those of the data are right at any step."""
        needs = needs_of(self.collector)
        return not (needs.samples_nothing or needs.offline)

    @property
    def _only_on_policy(self) -> bool:
        """Whether its gradient is right only for the weights that sampled the batch."""
        surrogate = traits_of(self.surrogate)
        return self.samples_responses and not (surrogate.has_ratio or surrogate.off_policy)

    @property
    def head(self) -> str | None:
        """The unit that a reward model's head scores, "response" or "step"; None for a policy."""
        surrogate = traits_of(self.surrogate)
        if not surrogate.reads_head:
            return None
        return "response" if surrogate.level == "sequence" else "step"

    @property
    def reads_behavior(self) -> bool:
        """Whether it has a correction or reads ``behavior_logp``."""
        return "behavior_logp" in self.required_fields

    @property
    def reward_range(self) -> tuple[float, float]:
        """The smallest and largest reward that the advantage is defined for, or infinity."""
        return wiring.reward_range(self.advantage)

    def check_group_size(self, group_size: int) -> None:
        """Raises ValueError if the recipe compares rollouts of a prompt and there is only one."""
        if self.group_relative and group_size < 2:
            raise ValueError(
                f"recipe {self.name!r} compares the rollouts of one prompt, so group_size must be "
                f"at least 2; got {group_size}. Sample more rollouts a prompt, or replace the "
                "advantage by one that needs no group and set group_relative=False."
            )

    def check_passes(self, epochs: int, minibatches: int) -> None:
        """Raises ValueError if a sampled batch has several optimizer steps and there is no ratio.

        A surrogate that reuses samples (``core.traits(reuses_samples=True)``) or is for samples of
        any policy (``off_policy=True``) needs none. Also if
        each turn of the batch already is a step, the likelihood draws masks for another number of
        passes, or the recipe compares with an old policy that the likelihood cannot score.
        """
        several = epochs * minibatches > 1
        if several and self._only_on_policy and not traits_of(self.surrogate).reuses_samples:
            raise ValueError(
                f"recipe {self.name!r} has a surrogate without a ratio to old_logp, so the "
                f"optimizer steps on one batch would be biased from the second on; got epochs "
                f"{epochs} and minibatches {minibatches}; use 1 and 1."
            )
        for part in self.parts:
            part.check_passes(self, epochs, minibatches)

    def check_staleness(self, max_staleness: int) -> None:
        """Raises ValueError if older weights may sample and the recipe has no correction for it."""
        if max_staleness <= 0:
            return
        option = f"max_staleness {max_staleness}"
        self._check_policy_samples(option, instead="0")
        if needs_of(self.collector).fresh_weights:
            raise ValueError(
                f"recipe {self.name!r} trains each window of a response once and knows it by the "
                f"version of its weights, which batches may share ({option}); use 0."
            )
        if self.reads_behavior and not wiring.corrects_behavior(self):
            corrects = self.correction is not None
            remedy = "give its correction weights" if corrects else "add a correction"
            raise ValueError(
                f"recipe {self.name!r} reads behavior_logp, but only to drop tokens or to scale "
                f"its update, so those of older weights ({option}) would have no ratio to them; "
                f"{remedy}, or use 0."
            )
        self._check_ratio_to("older weights", option, instead="0")

    def _check_policy_samples(self, option: str, *, instead: str) -> None:
        """Raises ValueError if a part allows no other weights to sample than the policy's."""
        for part in self.parts:
            if (reason := part.refuses_other_sampler()) is not None:
                raise ValueError(
                    f"recipe {self.name!r} {reason}, so rollouts of other weights ({option}) "
                    f"would bias it; use {instead}."
                )

    def _check_ratio_to(self, sampler: str, option: str, *, instead: str) -> None:
        """Raises ValueError if another policy samples, and old_logp cannot be of that policy.

        Without a correction the ratio of the surrogate is to the policy that sampled.
        """
        if self.reads_behavior:
            return
        of_step = [x.name for x in self.computed if x.source == "old_policy" and not _is_choice(x)]
        if of_step and self.samples_responses:
            raise ValueError(
                f"recipe {self.name!r} reads {of_step[0]!r} of the policy at the start of the step "
                f"beside old_logp, which would be that of the {sampler} that sampled ({option}); "
                f"use {instead}, or add a correction."
            )
        if self._only_on_policy:
            raise ValueError(
                f"recipe {self.name!r} has no correction and a surrogate without a ratio, so "
                f"rollouts of {sampler} ({option}) would bias it; use {instead}, or a recipe such "
                "as rollout_correction."
            )

    def check_quantization(self, mode: str) -> None:
        """Raises ValueError if the policy may not be rounded to 8 bits where it samples.

        What only drops tokens by ``behavior_logp`` is made for such a sampler, so unlike older
        weights it needs no weights of tokens.
        """
        option = f"quantization {mode!r}"
        if not self.samples_responses:
            raise ValueError(
                f"recipe {self.name!r} samples nothing, so {option} of the sampler has no effect; "
                "use None."
            )
        if needs_of(self.collector).draft_steps is not None:
            return
        drafts = ", or for a flow policy a collector of drafts, such as curation.drafted"
        drafts = drafts if self.likelihood is not None else ""
        self._check_policy_samples(option, instead=f"None{drafts}")
        self._check_ratio_to("rounded weights", option, instead="None")

    def init(self, output_shape: tuple[int, int] | None = None) -> AlgoState:
        """The first state of the recipe's Transforms.

        Args:
          output_shape: ``(V, D)`` of the model's output matrix, for a recipe with numbers computed
            from "optimizer"; None if its batches hold them.
        """
        controllers = self.computed_from("controller", "last_visit")
        rules: dict[str, ArrayTree] = {}
        if output_shape is not None:
            vocab_size, width = output_shape
            computed = self.computed_from("optimizer")
            rules = {name: rule.init(vocab_size, width) for name, rule in computed.items()}
        return AlgoState(
            advantage=self.advantage.init(),
            curation=() if self.curation is None else self.curation.init(),
            controllers={name: transform.init() for name, transform in controllers.items()},
            last_kl=jnp.zeros((), jnp.float32),
            rules=rules,
        )

    def prepare(
        self, batch: Batch, algo_state: AlgoState, *, key: Array | None = None
    ) -> tuple[Batch, AlgoState]:
        """The batch with advantages, weights and all other inputs of ``loss``, and the next state.

        In order: controllers; curation clears ``where`` and with it ``mask``; the correction drops
        tokens from ``mask``; advantages; the selection drops more tokens; entries computed from the
        batch; the critic's returns, with the mask from before the selection; weights. All in
        float32. Texts take part only in the weights: they are in ``mask`` again, not in ``where``.
        So are tokens that the selection drops, with the weight 0, if a loss ``reads_sequences``.

        Args:
          batch: ``[P, G, T]`` arrays of all prompts of this update. The prepared batch may be
            divided into any microbatches of complete groups.
          algo_state: From ``init()`` or the last call.
          key: A typed key, for a recipe that ``draws``.

        Raises:
          ValueError: If fields of the batch disagree about a shape, the group has one rollout but
            the recipe compares rollouts, a required input is missing, or a slot returns a wrong
            shape.
          TypeError: If a field of the batch has a wrong dtype, or a slot returns a mask that is not
            bool or another array that is not floating point.
        """
        batch = batch.check()
        self.check_group_size(batch.rewards.shape[1])
        self._check_present(batch, wiring.required_fields(self).to_prepare - {"entropy"}, "prepare")
        if self.draws and key is None:
            raise ValueError(f"Recipe {self.name!r}.prepare draws random numbers; give it a key.")
        present = batch.mask & batch.where[..., None]
        batch = self.responses(batch)
        state = AlgoState._make(algo_state)
        step = {"response_mask": batch.mask} | ({} if key is None else {"key": key})
        if self.reads_last_kl:  # else the train step does not measure it
            step["last_kl"] = state.last_kl
        rewards = jnp.asarray(batch.rewards, jnp.float32)

        def call(function: Callable, *arrays: Any, of: Batch | None = None) -> Any:
            """Calls a function of a slot with a batch, by default as it is by then."""
            context = wiring.context(of or batch, wiring.PREPARE_CONTEXT) | step
            return call_with(function, *arrays, context=context)

        controllers = dict(state.controllers)  # those of visits move before the batch is prepared
        for name, transform in self.computed_from("controller").items():
            value, controllers[name] = call(transform.update, rewards, state.controllers[name])
            wiring.check_output(self.name, f"computed {name!r}", value, (), batch.mask.shape)
            batch = with_extra(batch, name, value)

        where, curation = batch.where, state.curation
        if self.curation is not None:
            keep, curation = call(self.curation.update, rewards, curation)
            checks.check_shape(f"curation of recipe {self.name!r}", "where", keep, where.shape)
            checks.check_bool(f"curation of recipe {self.name!r}", where=keep)
            where = where & keep
        # A correction that another recipe left in the batch would be multiplied in silently.
        batch = batch.replace(where=where, mask=batch.mask & where[..., None], correction=None)
        step["response_mask"] = batch.mask  # a length counts all tokens of a response
        if self.correction is not None:
            batch = corrected(self, batch)

        advantages, advantage = call(self.advantage.update, rewards, state.advantage)
        wiring.check_output(self.name, "advantages", advantages, where.shape, batch.mask.shape)
        checks.check_float(f"Recipe {self.name!r}", advantages=advantages)
        per_token = jnp.ndim(advantages) == batch.mask.ndim
        advantages = masking.zero_masked(advantages, batch.mask if per_token else where)
        unselected = batch.mask
        if self.selection is not None:
            keep = call(self.selection, advantages, batch.mask)
            batch = without(self, "selection", batch, keep)
            advantages = masking.zero_masked(advantages, batch.mask) if per_token else advantages
        batch = batch.replace(advantages=advantages)

        for name, function in self.computed_from("batch").items():
            batch = with_computed(self, batch, name, call(function, advantages))
        batch = self.measure(batch, batch.old_logp)
        for part in self.parts:
            batch = part.prepared(self, batch, unselected, call)
        if self.selection is not None and self.reads_sequences:
            left = jnp.any(batch.mask, axis=-1, keepdims=True)
            batch = batch.with_extras({"selected_tokens": batch.mask})
            batch = batch.replace(mask=unselected & left)
        for part in self.parts:
            batch = part.masked(batch, present)
        batch = self.weigh(batch).check()
        return batch, AlgoState(advantage, curation, controllers, state.last_kl, state.rules)

    def responses(self, batch: Batch) -> Batch:
        """The batch in which only responses have a part, without tokens that the selection drops.

        What else trains, such as texts, is False in ``where`` and ``mask``.
        """
        if "selected_tokens" in batch.extras:
            batch = batch.replace(mask=batch.mask & batch.extras["selected_tokens"])
        return self._sequences(batch)

    def sequence_mask(self, batch: Batch) -> Array:
        """The ``mask`` of a prepared batch's responses, with what the selection drops of them."""
        return self._sequences(batch).mask

    def _sequences(self, batch: Batch) -> Batch:
        for part in self.parts:
            batch = part.responses(batch)
        return batch

    def measure(self, batch: Batch, logp: Array | None) -> Batch:
        """The batch with the entries computed from "update", for a policy's log-probabilities.

        ``prepare`` calls it for the old policy, and the train step calls it before each optimizer
        step. Without ``old_logp`` the policy is the old one.
        """
        for name, function in self.computed_from("update").items():
            old_logp = batch.old_logp
            if logp is None or old_logp is None:
                logp = old_logp = jnp.zeros(batch.mask.shape, jnp.float32)
            mask = self.responses(batch).mask
            value = function(jax.lax.stop_gradient(logp), old_logp, mask)
            batch = with_computed(self, batch, name, value)
        return batch

    def learn(self, batch: Batch, algo_state: AlgoState, *, logp: Array) -> AlgoState:
        """The state after the update on a prepared batch, for a recipe that ``learns``.

        The train step calls it after the update.

        Args:
          batch: As ``prepare`` returned it, all prompts of the update.
          algo_state: The state that ``prepare`` returned with it.
          logp: ``[P, G, T]``, each row under the policy before its first optimizer step.
        """
        context = wiring.context(self.responses(batch), wiring.LEARN_CONTEXT)
        old_logp = logp if batch.old_logp is None else batch.old_logp
        context |= {"logp": logp, "old_logp": old_logp}

        def learned(transform: Transform | None, state: ArrayTree) -> ArrayTree:
            if transform is None or transform.learn is None:
                return state
            return call_with(transform.learn, state, context=context)

        controllers = self.computed_from("controller")
        return AlgoState(
            learned(self.advantage, algo_state.advantage),
            learned(self.curation, algo_state.curation),
            {name: learned(controllers.get(name), x) for name, x in algo_state.controllers.items()},
            algo_state.last_kl,
            algo_state.rules,
        )

    def weigh(self, batch: Batch) -> Batch:
        """The batch with the weights of the loss, and of the critic's, from its final mask.

        It is the last part of ``prepare``. A train step that divides the batch into minibatches
        calls it on each, so that the weights of every optimizer step add up as those of a batch do.
        Raises ValueError if a weighting returns a wrong shape, TypeError if it is not floating
        point.
        """
        responses = self.responses(batch)
        context = wiring.context(responses, wiring.PREPARE_CONTEXT)
        surrogate = traits_of(self.surrogate)
        repeated = surrogate.reads_sequence and surrogate.level == "sequence"
        counted = responses.replace(mask=self.sequence_mask(batch)) if repeated else responses
        weights = weights_of(self, self.weights, counted, context)
        weights = masking.zero_masked(weights, responses.mask)
        batch = batch.replace(weights=weights)
        for part in self.parts:
            batch = part.weighed(self, batch, responses, context)
        return batch

    def loss(
        self,
        logp: Array,
        batch: Batch,
        *,
        entropy: Array | None = None,
        statistics: Mapping[str, Array] | None = None,
    ) -> Array:
        """The loss: a weighted sum of token losses, so that microbatches add.

        Args:
          logp: ``[P, G, T]`` log-probabilities of the policy being trained, of all prompts or of
            some.
          batch: The same rows of a prepared batch.
          entropy: ``[P, G, T]``, if "entropy" is in ``required_fields``; others ignore it.
          statistics: ``[P, G, T, ...]`` by name, for a recipe with numbers computed from
            "policy".

        Returns:
          A float32 scalar. Its gradient over microbatches sums to that of the full batch.

        Raises:
          ValueError: If the batch was not prepared, shapes differ, a required input is missing, or
            the surrogate or a regularizer does not return one value per token.
        """
        self._check_present(batch, {"advantages", "weights"}, "loss", hint="call prepare first")
        required = self.required_fields
        if self.correction is not None:
            required |= {"correction"}
        self._check_present(batch, required - {"entropy"}, "loss")
        if "entropy" in required and entropy is None:
            raise ValueError(f"Recipe {self.name!r}.loss: a regularizer needs entropy; it is None.")
        checks.check_same_shape(f"Recipe {self.name!r}.loss", logp=logp, mask=batch.mask)
        for name in self.computed_from("policy"):
            if name not in (statistics or {}):
                raise ValueError(f"Recipe {self.name!r}.loss: statistics has no {name!r}.")
        old_logp = jax.lax.stop_gradient(logp) if batch.old_logp is None else batch.old_logp
        responses = self.responses(batch)
        context = wiring.context(responses, wiring.LOSS_CONTEXT) | dict(statistics or {})
        context |= {"logp": logp, "old_logp": old_logp, "entropy": entropy}
        of_sequences = context | {"mask": self.sequence_mask(batch)}
        given = of_sequences if traits_of(self.surrogate).reads_sequence else context
        arrays = logp, old_logp, batch.advantages, given["mask"]
        loss = call_with(self.surrogate, *arrays, context=given)
        what = f"the loss of surrogate {name_of(self.surrogate)}"
        wiring.check_output(self.name, what, loss, batch.mask.shape)
        if batch.correction is not None:
            loss = loss * batch.correction
        for term in self.regularizers:
            given = of_sequences if traits_of(term).reads_sequence else context
            added = call_with(term, context=given)
            what = f"the loss of regularizer {name_of(term)}"
            wiring.check_output(self.name, what, added, batch.mask.shape)
            loss = loss + added
        for part in self.parts:
            loss = part.token_loss(loss, logp, batch)
        return aggregate.weighted_sum(loss, batch.weights)

    def _check_present(self, batch: Batch, names, where: str, hint: str = "") -> None:
        for name in sorted(names):
            if getattr(batch, name, batch.extras.get(name)) is None:
                hint = f"; {hint}" if hint else ""
                raise ValueError(f"Recipe {self.name!r}.{where}: the batch has no {name}{hint}.")


def _is_choice(computed: Computed) -> bool:
    """Whether a statistic only says which tokens a teacher is asked for."""
    return getattr(computed.function, "function", computed.function) is surrogates.top_tokens
