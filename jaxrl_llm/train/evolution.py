"""Evolution strategies: sampling from a population, and one update from its scores."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm import diagnostics
from jaxrl_llm.core import masking, trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.curation.collectors.needs import needs_of
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.models.sharding import batch_sharding, batch_shards, on_mesh
from jaxrl_llm.recipes import Batch, EvolutionRecipe
from jaxrl_llm.rollout import Rollout, make_population_sampler, make_sampler
from jaxrl_llm.rollout.sampler import PromptSpec, prompt_room
from jaxrl_llm.train.algorithm import Algorithm, CompiledStep, Step
from jaxrl_llm.train.optimizer import ClippedOptimizer, apply_if_finite
from jaxrl_llm.train.state import TrainState


def make_evolution_step(
    recipe: EvolutionRecipe,
    optimizer: optax.GradientTransformation,
    *,
    mesh: jax.sharding.Mesh | None = None,
    donate: bool = True,
) -> Step:
    """A compiled function that updates the state from the scores of a population.

    In order: the recipe shapes the fitness of the members that were graded; the noise of epoch
    ``state.step`` is drawn again and contracted to a gradient; the optimizer makes one update. The
    update depends only on ``rewards`` ``[P, G]`` and ``where`` of the batch. On a mesh every device
    has all scores and draws the same noise, so only norms and arrays of the size of the scores are
    communicated.

    Frozen leaves stay identical bit for bit, for any optimizer. ``optax.masked(optimizer,
    jr.evolution.moving(classes))`` saves the memory of their optimizer state. A non-finite update
    is not applied, as in :func:`make_step`, and without any score there is no update.

    Args:
      recipe: The method.
      optimizer: Any optax transformation; the one passed to ``init_state``.
      mesh: The mesh that the state lives on.
      donate: Whether to reuse the memory of the input state, which then cannot be used again.

    Returns:
      ``step(state, batch) -> (state, metrics)``; metrics are float32 scalars: ``reward``, the mean
      score; ``reward_std``, over the members of a prompt; ``member_std``, of the members' means
      over prompts; ``informative``, the share of prompts on which members differ; ``missing``,
      responses without a score; ``left_out``, responses that do not count for the fitness: those,
      and the other tries and the antithetic partners of their members; ``flat``, 1 if all fitness
      values are equal and the gradient is therefore zero; ``length`` and ``tokens`` of the
      responses; ``loss``, minus the mean score; ``grad_norm``, ``update_norm``, ``updates`` and
      ``skipped`` as in :func:`make_step`. A member with several tries has their outcome. The
      statistics of members are those of the scores that count.

    Raises:
      ValueError: When called, if the members do not match the recipe, or it moves no leaf.

    Example:
      >>> import jax, optax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model()
      >>> recipe, optimizer = jr.recipes.eggroll(sigma=0.01), optax.sgd(0.5)
      >>> state = jr.train.init_state(params, optimizer, recipe, key=jax.random.key(0))
      >>> population = jr.train.make_population(model, recipe, group_size=4, max_new_tokens=4)
      >>> now = int(state.step)  # the members are those of this epoch
      >>> rollout = population(state.params, state.key, [[1, 2, 3], [4]], version=now)
      >>> scores = (rollout.tokens > 100).mean(axis=-1, dtype=jnp.float32)
      >>> batch = jr.recipes.Batch.from_rollout(rollout, scores)
      >>> step = jr.train.make_evolution_step(recipe, optimizer)
      >>> state, metrics = step(state, batch)
      >>> int(state.step), float(metrics["missing"])
      (1, 0.0)

    References:
      EGGROLL (arXiv:2511.16652), sec. 4.
    """

    def prepare(
        state: TrainState, batch: Batch, key: Array | None, teacher: ArrayTree
    ) -> tuple[Batch, ArrayTree]:
        del key, teacher
        return batch, state.algo_state

    def step(state: TrainState, batch: Batch, key: Array, base: ArrayTree, teacher: ArrayTree):
        del base, teacher
        classes = recipe.classes(state.params)
        fitness, missing = recipe.shape(batch.rewards, where=batch.where)
        _, counted = recipe.outcomes(batch.rewards, where=batch.where)
        grads = recipe.gradient(state.params, classes, key, state.step, fitness, where=counted)
        metrics = population_metrics(recipe, batch, fitness, missing)
        carry = (state.params, state.opt_state)
        there = jnp.any(counted)
        carry, made = apply_if_finite(optimizer, carry, -metrics["reward"], grads, trains=there)
        params = jax.tree.map(
            lambda moves, new, old: new if moves else old,
            recipe.moving(state.params),
            carry[0],
            state.params,
        )
        state = state._replace(params=params, opt_state=carry[1], step=state.step + 1)
        return state, metrics | made

    return CompiledStep(on_mesh(step, mesh), on_mesh(prepare, mesh), donate=donate, takes_key=True)


def make_evolution(
    recipe: EvolutionRecipe,
    optimizer: optax.GradientTransformation,
    sampler: Callable,
    *,
    mesh: jax.sharding.Mesh | None = None,
) -> Algorithm:
    """The algorithm of a run that trains by evolution; every device has all scores.

    ``optimizer`` comes from :func:`moving_only`, ``sampler`` from :func:`make_population`.
    """
    return Algorithm(
        sampler=sampler,
        score=lambda batch: (batch, {}),
        step=make_evolution_step(recipe, optimizer, mesh=mesh),
        inspect=lambda state, batch: (batch, batch.behavior_logp),
    )


def check_population(config: Any, recipe: EvolutionRecipe) -> None:
    """Raises ValueError for options without effect on a population, which only samples."""
    if config.environment is not None:
        raise ValueError(
            f"config: {recipe.name!r} cannot use an environment, since it does not decode in slots."
        )
    for option in (
        "remat",
        "packing",
        "microbatches",
        "tokens_per_microbatch",
        "router_replay",
        "scan_layers",
    ):
        if getattr(config, option) != (default := getattr(type(config), option)):
            raise ValueError(
                f"config: {option} has no effect with {recipe.name!r}, which has no backward "
                f"pass; leave it at its default, {default!r}."
            )
    if config.sampling.slots is not None:
        raise ValueError(f"sampling: slots has no effect with {recipe.name!r}.")
    if not config.evaluation.enabled:
        filters = () if recipe.temperature > 0 else ("top_k", "top_p", "min_p")
        for option in ("temperature", *filters):
            if getattr(config.sampling, option) != getattr(type(config.sampling), option):
                raise ValueError(
                    f"sampling: {option} has no effect with {recipe.name!r} without an "
                    "evaluation: members answer at the temperature of the recipe, "
                    f"{recipe.temperature:g}."
                )
    if (own := config.sampling.quantization) not in (None, "off"):
        raise ValueError(
            f"sampling: quantization {own!r} has no effect with {recipe.name!r}, which trains "
            "by what its members sample; config.quantization rounds them."
        )
    if needs_of(recipe.collector).slots:
        raise ValueError(
            f"config: the collector of {recipe.name!r} decodes in slots, which a population "
            f"does not; got {recipe.collector!r}."
        )
    if config.lora.rank is not None:
        raise ValueError(
            f"lora: {recipe.name!r} changes the weights of the model itself with low-rank "
            "noise; leave out the rank."
        )
    for axis in ("context", "expert"):
        if getattr(config.mesh, axis) != 1:
            raise ValueError(
                f"mesh: {axis} has no effect with {recipe.name!r}, which only samples; use data."
            )
    members = recipe.population(config.prompts_per_step, config.sampling.group_size)
    if recipe.noise == "lowrank" and members % config.mesh.shards:
        raise ValueError(
            f"config: {members} members cannot be divided evenly among the "
            f"{config.mesh.shards} devices of the mesh axes data and fsdp."
        )
    if recipe.noise == "full" and not recipe.shared and config.mesh.shards > 1:
        raise ValueError(
            f"config: members with full noise that are not shared answer one prompt at a time, "
            f"which cannot be spread over the {config.mesh.shards} devices of the mesh axes data "
            f"and fsdp; share the members of {recipe.name!r}, or use one device there."
        )
    scores = (config.prompts_per_step, config.sampling.group_size * recipe.tries)
    jax.eval_shape(recipe.shape, jax.ShapeDtypeStruct(scores, jnp.float32))


def moving_only(recipe, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, without state for the leaves that an evolution recipe freezes.

    For any other recipe the optimizer is returned unchanged.
    """
    if not recipe.needs.freezes_leaves:
        return optimizer
    masked = optax.masked(optimizer, recipe.moving)
    # Gradients of frozen leaves are zero, so the norm of all is that of the others.
    return ClippedOptimizer(*masked) if isinstance(optimizer, ClippedOptimizer) else masked


def population_metrics(
    recipe: EvolutionRecipe, batch: Batch, fitness: Array, missing: Array
) -> dict[str, Array]:
    """Metrics of a population's scores; see :func:`make_evolution_step`."""
    where = batch.where & jnp.isfinite(batch.rewards)
    scores, counted = recipe.outcomes(batch.rewards, where=batch.where)
    spread = diagnostics.group_spread(scores, where=counted)
    flat = masking.is_constant(fitness, recipe.graded_members(counted))
    metrics = {
        "reward": masking.masked_mean(batch.rewards, where),
        "reward_std": spread.mean_std,
        "informative": spread.informative,
        "missing": missing,
        "left_out": recipe.tries * jnp.sum(~counted),
        "flat": flat,
        "no_signal": flat,
        "length": masking.masked_mean(masking.lengths(batch.mask), jnp.any(batch.mask, axis=-1)),
        "tokens": jnp.sum(batch.mask),
    }
    if recipe.shared:
        means = masking.masked_mean(scores, counted, axis=0)
        metrics["member_std"] = masking.masked_std(means, jnp.any(counted, axis=0))
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), metrics)


Population = Callable[..., Rollout]
"""``population(params, key, prompts, *, version) -> Rollout [P, G tries, T]``: the members of
epoch ``version`` in a run with this key."""


def make_population(
    model: Model,
    recipe: EvolutionRecipe,
    *,
    group_size: int,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    pad_id: int = 0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    shared_prefix_len: int = 0,
    mesh: jax.sharding.Mesh | None = None,
) -> Population:
    """A sampler from the population of a recipe, with noise drawn for every batch.

    Args:
      model: The model.
      recipe: The method.
      group_size: G, the number of members that answer a prompt.
      max_new_tokens, stop_ids, pad_id, top_k, top_p, min_p, shared_prefix_len: As for
        ``rollout.make_sampler``.
      mesh: Members (with full noise: prompts) are spread over its axes ``data`` and ``fsdp``.

    Returns:
      ``population(params, key, prompts, *, version) -> Rollout [P, G tries, T]`` for P lists of
      token ids. ``key`` is that of the run, which stays the same. ``version`` is the epoch whose
      noise the members have: the step of the state, so that :func:`make_evolution_step` draws the
      same noise again.

    Raises:
      ValueError: If an option is out of its range, or, when called, if the prompts and the members
        do not match the recipe.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> recipe = jr.recipes.eggroll(sigma=0.01)
      >>> population = jr.train.make_population(model, recipe, group_size=4, max_new_tokens=2)
      >>> rollout = population(params, jax.random.key(0), [[1, 2, 3], [4]], version=0)
      >>> rollout.tokens.shape  # two prompts, each answered by four members
      (2, 4, 2)
    """
    full = recipe.noise == "full"
    if full:
        make: Callable = functools.partial(make_sampler, group_size=recipe.tries)
    else:
        make = functools.partial(make_population_sampler, shared=recipe.shared, tries=recipe.tries)
    sample = make(
        model,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        pad_id=pad_id,
        temperature=recipe.temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        shared_prefix_len=shared_prefix_len,
        mesh=mesh,
    )
    if full:
        room = prompt_room("make_population", model, max_new_tokens)
        return _members_in_turn(model, recipe, group_size, sample, room)

    def delta(recipe, params, key, epoch, count: int, share_pairs: bool):
        classes, members = recipe.classes(params), np.arange(count)
        return recipe.delta(params, classes, key, epoch, members, share_pairs=share_pairs)

    sharding = None if mesh is None else batch_sharding(mesh)
    draw = jax.jit(delta, static_argnums=(0, 4, 5), out_shardings=sharding)
    shards = batch_shards(mesh)

    def population(params: ArrayTree, key: Array, prompts, *, version: int) -> Rollout:
        members = recipe.population(len(prompts), group_size)
        # On a mesh each device holds the factors of its rows, so a pair must not span two devices.
        share_pairs = recipe.pairs and members % (2 * shards) == 0
        drawn = draw(recipe, params, key, np.int32(version), members, share_pairs)
        return sample(params, drawn, jax.random.fold_in(key, version), prompts, version=version)

    return population


def _members_in_turn(
    model: Model, recipe: EvolutionRecipe, group_size: int, sample: Callable, room: int
) -> Population:
    """Samples members with full-rank noise one after another, each with separate weights."""

    @jax.jit
    def perturbed(params: ArrayTree, key: Array, epoch: Array, member: Array) -> ArrayTree:
        return recipe.member(params, recipe.classes(params), key, epoch, member)

    def join(rollouts: Sequence[Rollout], *, axis: int) -> Rollout:
        """Joins responses within groups (axis 1) or across prompts (axis 0), without prompts."""
        rollouts = [each._replace(prompt_tokens=None, prompt_mask=None) for each in rollouts]
        return trees.zip_leaves(lambda x: jnp.concatenate(x, axis=axis), rollouts)

    def population(params: ArrayTree, key: Array, prompts, *, version: int) -> Rollout:
        members = recipe.population(len(prompts), group_size)
        batch_key, rollouts = jax.random.fold_in(key, version), []
        for member in range(members):
            answered = list(prompts) if recipe.shared else [prompts[member // group_size]]
            first = np.arange(len(answered))[:, None] * members + member
            ids = first * recipe.tries + np.arange(recipe.tries)
            weights = perturbed(params, key, np.int32(version), np.int32(member))
            rollouts.append(sample(weights, batch_key, answered, request_ids=ids, version=version))
        if not recipe.shared:
            starts = range(0, members, group_size)
            rollouts = [join(rollouts[i : i + group_size], axis=1) for i in starts]
        tokens, mask = PromptSpec(model.config.vocab_size, room).pad(prompts)
        joined = join(rollouts, axis=1 if recipe.shared else 0)
        return joined._replace(prompt_tokens=tokens, prompt_mask=mask)

    return population
