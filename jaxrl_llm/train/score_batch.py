"""What models compute of a batch before its update: the numbers that a recipe reads.

:func:`score_batch` adds those of the policy at the start of the step, a moving reference, a teacher
and a critic; :func:`score_reference` those of a frozen reference, before the step;
:func:`score_visits` those of the last visits to the prompts; :func:`apply_rules` those of the step
that each token alone would make. Fields that a batch already has stay unchanged. Shared arguments
are those of :mod:`~jaxrl_llm.train.policy_gradient`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.core import masking, stats
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.packing import FlatPacking, rewritten_rows
from jaxrl_llm.models.denoising import check_causal
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.models.sharding import batch_shards
from jaxrl_llm.recipes import AlgoState, Batch, Recipe
from jaxrl_llm.recipes.wiring import moot_if_equal, of_likelihood
from jaxrl_llm.train.batches import join_microbatches, map_microbatches, split_microbatches
from jaxrl_llm.train.critic import critic_values
from jaxrl_llm.train.denoising import PolicyScorer, tell_temperature
from jaxrl_llm.train.optimizer import next_rate
from jaxrl_llm.train.score import HIDDEN_STATISTICS, Scorer
from jaxrl_llm.train.score_norms import score_sq_norms
from jaxrl_llm.train.state import TrainState


class Teacher(NamedTuple):
    """A frozen model that the policy learns from, with the policy's vocabulary."""

    model: Model
    params: ArrayTree


def score_batch(
    batch: Batch,
    recipe: Recipe,
    scorer: PolicyScorer,
    *,
    state: TrainState,
    microbatches: int = 1,
    score_old: bool = False,
    stale: bool = False,
    critic_model: Model | None = None,
    teacher: Teacher | None = None,
) -> Batch:
    """Adds to a batch every number that a model computes before the update.

    Fields that the batch already has stay unchanged.

    - ``behavior_logp`` of tokens for which it is unknown (extra ``behavior_known``), as in a
      demonstration, if anything reads it: under the policy at the start of the step, so ratios and
      corrections treat these tokens as on-policy.
    - ``old_logp``, of the proximal policy: under the policy at the start of the step, if
      ``score_old`` is True or ``recipe.prepare`` requires it. If older weights may have sampled
      (``stale``) and the recipe does not read ``behavior_logp``, ``old_logp`` is ``behavior_logp``:
      the ratio then compares the policy with the weights that sampled.
    - ``old_entropy``, ``hidden_sq``, ``hidden_rank`` and statistics with source "old_policy": under
      the policy at the start of the step.
    - Other results of a likelihood's scorer, such as ``old_draw_logp``: under the same policy.
    - ``ref_logp`` and statistics with source "reference": under a moving reference. For a frozen
      reference, see :func:`score_reference`.
    - Results of a likelihood's scorer under the policy that an anchored reference began with, as
      ``anchor_velocity``.
    - Statistics with source "teacher", and ``teacher_hidden`` if the recipe reads the teacher's
      logits: of another model; or of the policy or the moving reference after the teacher's prompt.
    - ``grad_sq_norms``: of the same policy, with one backward pass for each response; see
      :func:`~jaxrl_llm.train.score_sq_norms`. They are 0 for texts, and in groups of equal
      rewards if these have the advantage 0 anyway.
    - ``answer_logp``: under the policy at the start of the step, after each turn.
    - ``kl_logp``: under the policy at the start of the step, after the previous row's prompt.
    - ``earlier_logp``: the weighted mean under the policies of earlier iterations.
    - ``old_values`` and ``values``: of the critic.
    - ``prm_logp``: of the process reward model, which has already learned from the batch.

    Args:
      batch, recipe, scorer, microbatches, critic_model, teacher: See the module.
      state: The state before the update.
      score_old: Whether ``old_logp`` is needed regardless of what the recipe reads.
      stale: Whether older weights may have sampled the batch.

    Returns:
      The batch that ``recipe.prepare`` takes.

    Raises:
      ValueError: If the recipe needs teacher prompts or reference answers, and the batch has
        neither those nor the numbers computed from them.
      TypeError: If ``scorer`` is not a :class:`~jaxrl_llm.train.Scorer` or one like it.

    Example:
      >>> import jax, optax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> recipe = jr.recipes.dr_grpo(length=6)
      >>> state = jr.train.init_state(params, optax.sgd(0.1), recipe, key=jax.random.key(0))
      >>> batch = jr.testing.make_case().batch.replace(old_logp=None)
      >>> batch = jr.train.score_batch(
      ...     batch, recipe, jr.train.Scorer(model), state=state, score_old=True)
      >>> bool((batch.old_logp[batch.mask] < 0).all())
      True
    """
    if not hasattr(scorer, "model"):
        raise TypeError(f"score_batch: scorer must be a train.Scorer; got {scorer!r}.")
    tell_temperature(batch, scorer)
    if stale and not recipe.reads_behavior and batch.old_logp is None:
        batch = _with_behavior(batch, scorer, state, microbatches)
        batch = batch.replace(old_logp=batch.behavior_logp)
    batch = _score_old(batch, recipe, scorer, state, microbatches, score_old=score_old)
    if recipe.reads_behavior:
        batch = _with_behavior(batch, scorer, state, microbatches)
    if "grad_sq_norms" in recipe.required_fields and "grad_sq_norms" not in batch.extras:
        norms = score_sq_norms(scorer, state.params, _measured(batch, recipe), base=state.base)
        batch = batch.with_extras({"grad_sq_norms": norms})
    if recipe.reference is not None:
        reference = state.reference_policy
        batch = score_reference(batch, recipe, scorer, reference, microbatches=microbatches)
        batch = _score_anchor(batch, recipe, scorer, state, microbatches)
    batch = _score_teacher(batch, recipe, scorer, state, microbatches, teacher=teacher)
    batch = _score_answers(batch, recipe, scorer, state, microbatches)
    if "kl_logp" in recipe.required_fields and "kl_logp" not in batch.extras:
        kl_logp = mismatched(scorer, state.policy, batch, microbatches)
        batch = batch.with_extras({"kl_logp": kl_logp})
    batch = _score_earlier(batch, recipe, scorer, state, microbatches)
    body = critic_model or scorer.model
    return _score_second_model(batch, recipe, scorer, state, microbatches, body=body)


def _absent(batch: Batch, recipe: Recipe, source: str) -> dict[str, Callable]:
    """The statistics with this source that the batch does not have."""
    return {k: f for k, f in recipe.computed_from(source).items() if k not in batch.extras}


def _with_behavior(
    batch: Batch, scorer: PolicyScorer, state: TrainState, microbatches: int
) -> Batch:
    """The batch with ``behavior_logp`` of tokens for which it is unknown."""
    known = batch.extras.get("behavior_known")
    if known is None or batch.behavior_logp is None:
        return batch
    logp = batch.old_logp
    if logp is None:
        logp = map_microbatches(lambda part: scorer(state.policy, part).logp, batch, microbatches)
    logp = jnp.where(known, batch.behavior_logp, jax.lax.stop_gradient(logp))
    return batch.replace(behavior_logp=logp)


def _score_old(
    batch: Batch,
    recipe: Recipe,
    scorer: PolicyScorer,
    state: TrainState,
    microbatches: int,
    *,
    score_old: bool,
) -> Batch:
    """The batch with what the recipe reads of the policy at the start of the step."""
    needs = recipe.required_fields
    old_logp = (score_old or "old_logp" in needs) and batch.old_logp is None
    statistics = _absent(batch, recipe, "old_policy")
    known = {*batch.extras, *statistics}  # a recipe's own statistic may have one of these names
    entropy = "old_entropy" in needs and "old_entropy" not in known
    of_hidden = tuple(x for x in HIDDEN_STATISTICS if x in needs and x not in known)
    besides = {k: name for k, name in of_likelihood(recipe, "old").items() if k not in batch.extras}
    if not (old_logp or entropy or of_hidden or statistics or besides):
        return batch
    scores = map_microbatches(
        lambda part: scorer(state.policy, part, statistics, of_hidden=of_hidden),
        batch,
        microbatches,
    )
    if old_logp:
        batch = batch.replace(old_logp=scores.logp)
    computed = scores.statistics
    if recipe.likelihood is not None:
        computed = _constants(computed, besides)
    return batch.with_extras(computed | ({"old_entropy": scores.entropy} if entropy else {}))


def _measured(batch: Batch, recipe: Recipe) -> Batch:
    """The batch with the responses whose gradient norms make a difference."""
    batch = recipe.without_texts(batch)
    if not moot_if_equal(recipe, "grad_sq_norms"):
        return batch
    rewards = jnp.asarray(batch.rewards, jnp.float32)  # as the advantage reads them
    return batch.replace(where=batch.where & ~stats.group_is_constant(rewards, batch.where))


def _score_anchor(
    batch: Batch, recipe: Recipe, scorer: PolicyScorer, state: TrainState, microbatches: int
) -> Batch:
    """The batch with what the recipe reads of the policy that its reference began with."""
    names = of_likelihood(recipe, "anchor")
    if not any(extra not in batch.extras for extra in names):
        return batch
    policy = state.anchor_policy
    scores = map_microbatches(lambda part: scorer(policy, part), batch, microbatches)
    return batch.with_extras(_constants(scores.statistics, names))


def _score_teacher(
    batch: Batch,
    recipe: Recipe,
    scorer: PolicyScorer,
    state: TrainState,
    microbatches: int,
    *,
    teacher: Teacher | None,
) -> Batch:
    """The batch with what the recipe reads of its teacher."""
    taught = _absent(batch, recipe, "teacher")
    states = recipe.reads_teacher_logits and "teacher_hidden" not in batch.extras
    if not taught and not states:
        return batch
    if teacher is None and "teacher_prompt_tokens" not in batch.extras:
        names = ", ".join([*taught, *(["teacher_hidden"] if states else [])])
        raise ValueError(
            f"Recipe {recipe.name!r}: the batch needs teacher_prompt_tokens and "
            f"teacher_prompt_mask in its extras, or {names} computed from them, since no other "
            "model is the teacher."
        )
    reader, params = teacher_of(recipe, scorer, state, teacher)
    read, slices = batch, microbatches
    if "teacher_prompt_tokens" in batch.extras:  # one for each response
        rows = batch.extras["teacher_prompt_tokens"].shape[1:], batch.tokens.shape[1:]
        read, slices = _padded(batch, microbatches, sum(map(math.prod, rows)))
    values = map_microbatches(
        lambda part: reader.teacher(params, part, taught, states=states), read, slices
    )
    return batch.with_extras(values)


def _score_answers(
    batch: Batch, recipe: Recipe, scorer: PolicyScorer, state: TrainState, microbatches: int
) -> Batch:
    """The batch with ``answer_logp``, if the recipe reads it."""
    if "answer_logp" not in recipe.required_fields or "answer_logp" in batch.extras:
        return batch
    sources = {"ground_truth", "ground_truth_mask", "turn_ids", "turn_where"}
    if missing := sorted(sources - set(batch.extras)):
        raise ValueError(
            f"Recipe {recipe.name!r}: the batch has no {' and no '.join(missing)} in its "
            "extras, and no answer_logp computed from them."
        )
    (G, T), L = batch.tokens.shape[1:], batch.extras["ground_truth"].shape[-1]
    cells = batch.prompt_tokens.shape[-1] + G * (T + L)
    padded, slices = _padded(batch, microbatches, cells)
    answers = map_microbatches(lambda part: scorer.answers(state.policy, part), padded, slices)
    return batch.with_extras({"answer_logp": answers})


def _score_earlier(
    batch: Batch, recipe: Recipe, scorer: PolicyScorer, state: TrainState, microbatches: int
) -> Batch:
    """The batch with ``earlier_logp``, if the recipe reads policies of earlier iterations."""
    if recipe.earlier is None or "earlier_logp" in batch.extras:
        return batch
    shares, total = recipe.earlier.shares(state.earlier), jnp.zeros(batch.mask.shape)
    unrouted = batch.replace(experts=None)  # these are of the policy that sampled
    for share, params in zip(shares, state.earlier.policies, strict=True):
        policy = state.with_base(params)
        logp = map_microbatches(
            lambda part, policy=policy: scorer(policy, part).logp, unrouted, microbatches
        )
        total += share * jax.lax.stop_gradient(logp)
    return batch.with_extras({"earlier_logp": total})


def _score_second_model(
    batch: Batch,
    recipe: Recipe,
    scorer: PolicyScorer,
    state: TrainState,
    microbatches: int,
    *,
    body: Model,
) -> Batch:
    """The batch with the values of a critic, or what a process reward model says."""
    if recipe.critic is not None and "old_values" not in batch.extras:
        critic = state.critic
        params = critic.params if recipe.critic.target_rate is None else critic.target
        values = map_microbatches(
            lambda part: critic_values(body, params, part), batch, microbatches
        )
        both = {"old_values": values, "values": recipe.critic.combine(values)}
        batch = batch.with_extras(both)
    if recipe.prm is not None and "prm_logp" not in batch.extras:
        reader = dataclasses.replace(scorer, model=body)
        chooses, params = batch.replace(experts=None), state.critic.params["model"]
        logp = map_microbatches(lambda part: reader(params, part).logp, chooses, microbatches)
        batch = batch.with_extras({"prm_logp": logp})
    return batch


def with_old_logp(
    batch: Batch,
    recipe: Recipe,
    scorer: PolicyScorer,
    *,
    state: TrainState,
    microbatches: int,
    stale: bool,
) -> Batch:
    """The batch with ``old_logp`` as :func:`score_batch` sets it, and nothing else."""
    if batch.old_logp is not None:
        return batch
    if stale and not recipe.reads_behavior and batch.behavior_logp is not None:
        batch = _with_behavior(batch, scorer, state, microbatches)
        return batch.replace(old_logp=batch.behavior_logp)
    logp = map_microbatches(lambda part: scorer(state.policy, part).logp, batch, microbatches)
    return batch.replace(old_logp=logp)


def check_teacher(function: str, recipe: Recipe, model: Model, teacher: Model) -> None:
    """Raises ValueError if a recipe does not learn from another model, or cannot from this one."""
    if not recipe.learns_from_model:
        what = "is its own teacher" if recipe.has_teacher else "learns from none"
        raise ValueError(f"{function}: teacher has no effect: recipe {recipe.name!r} {what}.")
    check_causal(function, teacher, what="the teacher")
    sizes = teacher.config.vocab_size, model.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{function}: the teacher has {sizes[0]:,} tokens in its vocabulary, but the policy "
            f"has {sizes[1]:,}; for a teacher with another tokenizer, use spans of text and a "
            "train.teachers.AlignedTeacher."
        )
    if recipe.teacher_top > sizes[0]:
        raise ValueError(
            f"{function}: recipe {recipe.name!r} reads the {recipe.teacher_top} most probable "
            f"tokens of the teacher, but its vocabulary has {sizes[0]:,}."
        )


def teacher_of(
    recipe: Recipe, scorer: Scorer, state: TrainState, teacher: Teacher | None
) -> tuple[Scorer, ArrayTree]:
    """The scorer and the parameters of a recipe's teacher.

    The teacher is another model, the moving reference or the policy itself.
    """
    if teacher is not None:
        return dataclasses.replace(scorer, model=teacher.model, remat="none"), teacher.params
    moving = recipe.reference is not None
    return scorer, state.reference_policy if moving else state.policy


def reads_logits_of(scorer: PolicyScorer, teacher: Model, params: ArrayTree) -> PolicyScorer:
    """The scorer with a teacher's output matrix and cap, which are constants of the step."""
    matrix = jax.lax.stop_gradient(teacher.output_matrix(params))
    return dataclasses.replace(scorer, teacher_matrix=matrix, teacher_logit_cap=teacher.logit_cap)


def mismatched(scorer: PolicyScorer, params: ArrayTree, batch: Batch, microbatches: int) -> Array:
    """Total log-probabilities ``[P, G]`` of responses after the previous row's prompt.

    The first row takes the prompt of the last row. The results estimate the divergence of a policy
    on inputs that it was not trained on. Raises ValueError for a batch of one prompt.
    """
    if batch.prompt_tokens.shape[0] < 2:
        raise ValueError(
            "score_batch: kl_logp scores responses after another row's prompt, so a batch needs at "
            f"least 2 prompts; got {batch.prompt_tokens.shape[0]}."
        )
    # Rows that share prompts would be others'; responses that are trees are so after any prompt.
    cells = batch.prompt_tokens.shape[-1] + math.prod(batch.tokens.shape[1:])
    others, slices = _padded(batch, microbatches, cells)
    others = others.replace(
        prompt_tokens=jnp.roll(batch.prompt_tokens, 1, axis=0),
        prompt_mask=jnp.roll(batch.prompt_mask, 1, axis=0),
        experts=None,
    )
    logp = map_microbatches(lambda part: scorer(params, part).logp, others, slices)
    return jax.lax.stop_gradient(jnp.sum(masking.zero_masked(logp, batch.mask), axis=-1))


def _padded(batch: Batch, microbatches: int, cells: int) -> tuple[Batch, int]:
    """The batch without a packing that a model cannot use, and in how many slices it is read then.

    A packing for a budget of cells has too few microbatches for padded rows. These are within the
    budget in the smallest number of slices of equally many groups, from ``microbatches`` on; or in
    slices of one group on each device, if even that exceeds it.

    Args:
      batch: With the packing, of which only rewritten responses remain.
      microbatches: Those of the packing.
      cells: The padded cells of a group.
    """
    packing, padded = batch.packing, batch.replace(packing=rewritten_rows(batch.packing))
    if not isinstance(packing, FlatPacking) or packing.budget is None:
        return padded, microbatches
    groups = batch.tokens.shape[0] // batch_shards(jax.sharding.get_abstract_mesh())
    counts = (n for n in range(microbatches, groups + 1) if groups % n == 0)
    return padded, next((n for n in counts if groups // n * cells <= packing.budget), groups)


def score_visits(
    batch: Batch, recipe: Recipe, scorer: PolicyScorer, *, state: TrainState, microbatches: int = 1
) -> tuple[Batch, AlgoState]:
    """The batch with numbers computed from the last visits to its prompts, and the next state.

    The policy at the start of the step scores the responses that the recipe recalls, over the full
    vocabulary. Numbers that the batch already has stay unchanged, and no visit is recorded.

    Args:
      batch, recipe, scorer, microbatches: See the module.
      state: The state before the update.

    Raises:
      ValueError: If the batch has no ``prompt_ids``, or turns that the chat template or the
        environment rewrites.

    Example:
      >>> import jax, optax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> recipe = jr.recipes.spo_tracker(num_prompts=8, length=6)
      >>> state = jr.train.init_state(params, optax.sgd(0.1), recipe, key=jax.random.key(0))
      >>> batch = jr.testing.make_case().batch.replace(extras={"prompt_ids": jax.numpy.arange(8)})
      >>> batch, algo_state = jr.train.score_visits(
      ...     batch, recipe, jr.train.Scorer(model), state=state)
      >>> batch.extras["policy_shift"].tolist()  # 0 at the first visits
      [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    algo_state, extras = state.algo_state, dict(batch.extras)
    for name, memory in recipe.computed_from("last_visit").items():
        if name in batch.extras:
            continue
        if rewritten_rows(batch.packing) is not None:
            raise ValueError(
                f"Recipe {recipe.name!r}: {name!r} recalls responses, but not their turns that the "
                "chat template or the environment rewrites."
            )
        if "prompt_ids" not in batch.extras:
            raise ValueError(f"Recipe {recipe.name!r}: the batch has no prompt_ids in its extras.")
        visits = algo_state.controllers[name]
        recalled = memory.recall(
            visits,
            prompt_ids=batch.extras["prompt_ids"],
            tokens=batch.tokens,
            mask=batch.mask,
            where=batch.where,
        )
        cells = batch.prompt_tokens.shape[-1] + math.prod(recalled.tokens.shape[1:])
        padded, slices = _padded(batch, microbatches, cells)
        responses = padded.replace(
            tokens=recalled.tokens, mask=recalled.mask, support=None, experts=None
        )
        logp = map_microbatches(lambda part: scorer(state.policy, part).logp, responses, slices)
        extras[name], visits = memory.update(jax.lax.stop_gradient(logp), visits, recalled)
        algo_state = algo_state._replace(controllers={**algo_state.controllers, name: visits})
    return batch.replace(extras=extras), algo_state


def apply_rules(
    batch: Batch,
    recipe: Recipe,
    scorer: PolicyScorer,
    *,
    state: TrainState,
    key: Array | None = None,
    learning_rate: float | optax.Schedule | None = None,
    microbatches: int = 1,
) -> tuple[Batch, dict[str, ArrayTree]]:
    """Adds the numbers computed from "optimizer"; returns the batch and the rules' next states.

    The selection reads these numbers, and the rules read the advantages. The advantages are
    therefore prepared for the rules first, without the selection.

    Args:
      batch, recipe, scorer, microbatches: See the module; the batch comes from ``score_batch``.
      state: The state before the update.
      key: The key of ``recipe.prepare``.
      learning_rate: See :func:`make_step`.

    Raises:
      ValueError: If the state of a rule is absent, or a rule reads the learning rate and it is
        None.

    Example:
      >>> import jax, optax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> recipe, shape = jr.recipes.capo(), model.output_matrix(params).shape
      >>> state = jr.train.init_state(
      ...     params, optax.adam(1e-3), recipe, key=jax.random.key(0), output_shape=shape)
      >>> batch = jr.testing.make_case().batch.replace(extras={})
      >>> batch, rules = jr.train.apply_rules(
      ...     batch, recipe, jr.train.Scorer(model), state=state, learning_rate=1e-3)
      >>> batch.extras["step_effects"].shape, list(rules)  # two numbers for each token
      ((8, 4, 6, 2), ['step_effects'])
    """
    states = dict(state.algo_state.rules)
    every = recipe.computed_from("optimizer")
    rules = {name: rule for name, rule in every.items() if name not in batch.extras}
    if not rules:
        return batch, states
    if absent := [name for name in rules if name not in states]:
        raise ValueError(
            f"recipe {recipe.name!r} computes {', '.join(absent)} from the output matrix; pass its "
            "output_shape to init_state."
        )
    if learning_rate is None and any(rule.reads_rate for rule in rules.values()):
        raise ValueError(
            f"recipe {recipe.name!r} reads the learning rate of the update; pass learning_rate to "
            "make_step, a number or the optimizer's schedule."
        )
    rate = None if learning_rate is None else next_rate(learning_rate, state.opt_state)
    others = tuple(entry for entry in recipe.computed if entry.source != "optimizer")
    unselected = recipe.replace(selection=None, computed=others)
    prepared, _ = unselected.prepare(batch, state.algo_state, key=key)
    mask, extras = recipe.without_texts(prepared).mask, dict(batch.extras)
    advantages = masking.spread("apply_rules", "advantages", prepared.advantages, mask)
    parts = split_microbatches((batch.replace(mask=mask), advantages), microbatches)
    for name, rule in rules.items():
        old = states[name]

        def add(total, part, rule=rule, old=old):
            part, advantages = part
            effects, sums = scorer.step_effects(
                state.policy, part, rule, old, advantages=advantages, rate=rate
            )
            return jax.tree.map(jnp.add, total, sums), effects

        zeros = rule.zeros(*scorer.model.output_matrix(state.policy).shape)
        sums, effects = jax.lax.scan(add, zeros, parts)
        extras[name], states[name] = join_microbatches(effects), rule.learn(old, sums)
    return batch.replace(extras=extras), states


def score_reference(
    batch: Batch, recipe: Recipe, scorer: PolicyScorer, params: ArrayTree, *, microbatches: int = 1
) -> Batch:
    """The batch with ``ref_logp``, ``kl_ref_logp`` and statistics with source "reference".

    Only those that the recipe reads are added. ``params`` are the reference's parameters.
    """
    functions = recipe.computed_from("reference")
    if "kl_ref_logp" in recipe.required_fields and "kl_ref_logp" not in batch.extras:
        kl_ref_logp = mismatched(scorer, params, batch, microbatches)
        batch = batch.with_extras({"kl_ref_logp": kl_ref_logp})
    statistics = {name: f for name, f in functions.items() if name not in batch.extras}
    ref_logp = "ref_logp" in recipe.required_fields and batch.ref_logp is None
    besides = {k: name for k, name in of_likelihood(recipe, "ref").items() if k not in batch.extras}
    if not ref_logp and not statistics and not besides:
        return batch
    chooses = batch.replace(experts=None)  # which are those of another model
    scores = map_microbatches(lambda part: scorer(params, part, statistics), chooses, microbatches)
    if ref_logp:
        batch = batch.replace(ref_logp=scores.logp)
    computed = _constants(scores.statistics, {name: name for name in statistics} | besides)
    return batch.with_extras(computed)


def _constants(statistics: dict[str, Array], names: dict[str, str]) -> dict[str, Array]:
    """Statistics of a scorer under other names, without a gradient."""
    return {extra: jax.lax.stop_gradient(statistics[name]) for extra, name in names.items()}
