"""The algorithm of a recipe, policy gradients or evolution; only this file tells them apart."""

from typing import Any

import optax

from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.curation.collectors.protocol import width_of
from jaxrl_llm.recipes import EvolutionRecipe
from jaxrl_llm.train.algorithm import Algorithm
from jaxrl_llm.train.batches import Passes, check_rows
from jaxrl_llm.train.data.episode_fields import check_episodes
from jaxrl_llm.train.data.grading import check_grading
from jaxrl_llm.train.data.halves import check_halves
from jaxrl_llm.train.data.offline import check_reference
from jaxrl_llm.train.data.reward_values import check_weights
from jaxrl_llm.train.evolution import check_population, make_evolution
from jaxrl_llm.train.models.critic import check_critic
from jaxrl_llm.train.models.model_rewards import check_judge
from jaxrl_llm.train.models.rounding import check_rounding
from jaxrl_llm.train.models.teachers import check_teaching
from jaxrl_llm.train.optimizer import make_optimizer, make_schedule, policy_optimizer
from jaxrl_llm.train.policy_gradient import RunOptions, make_policy_gradient
from jaxrl_llm.train.subagent import check_subagent, with_subagent
from jaxrl_llm.train.update.part import Teacher


def algorithm_of(
    experiment: Any,
    optimizer: optax.GradientTransformation,
    critic_optimizer: optax.GradientTransformation | None,
    reference: ArrayTree | None,
) -> Algorithm:
    """The algorithm that trains the recipe of an experiment."""
    config, recipe, sampler = experiment.config, experiment.recipe, experiment.samplers.rollouts
    if isinstance(recipe, EvolutionRecipe):
        return make_evolution(recipe, optimizer, sampler, mesh=experiment.mesh)
    options = RunOptions(
        passes=config.passes,
        temperature=config.sampling.temperature,
        remat=config.remat,
        shared_prefix_len=experiment.shared_prefix_len,
        packing=config.packing,
        stale=config.samples_off_policy,
        mesh=experiment.mesh,
        learning_rate=make_schedule(policy_optimizer(config), updates=config.passes.updates),
        tokens_per_microbatch=config.tokens_per_microbatch,
        steps=config.steps,
    )
    main = make_policy_gradient(
        experiment.model,
        recipe,
        optimizer,
        sampler,
        options=options,
        critic_optimizer=critic_optimizer,
        reference=reference,
        teacher=experiment.teacher if isinstance(experiment.teacher, Teacher) else None,
    )
    if (parts := experiment.subagent) is None:
        return main
    passes = Passes(microbatches=config.microbatches)
    options = options._replace(passes=passes, shared_prefix_len=0)
    method, of_subagent = recipe.needs.subagent.recipe, make_optimizer(policy_optimizer(config))
    return with_subagent(
        main,
        make_policy_gradient(parts.model, method, of_subagent, parts.sampler, options=options),
    )


def check_algorithm(config: Any, recipe: Any) -> None:
    """Raises ValueError for options of a run that a recipe and its algorithm do not use or allow.

    Each part of a run checks its options; their order is that in which a user hears of them.
    """
    sampling = config.sampling
    check_grading(config, recipe)
    if config.environment is not None:
        check_episodes(recipe)
    check_rows(config, recipe)
    # For a prompt, a collector that samples may take fewer than the widest group has.
    width = width_of(recipe.collector, sampling.group_size)
    recipe.check_group_size(width if config.offline else sampling.group_size)
    if sampling.slots is not None:
        sampling.grid(config.prompts_per_step)
    if isinstance(recipe, EvolutionRecipe):
        check_population(config, recipe)
    recipe.check_passes(config.passes.epochs, config.passes.minibatches)
    config.passes.check("config", config.prompts_per_step, config.mesh.shards)
    recipe.check_staleness(config.asynchrony.max_staleness)
    for check in (
        check_halves,
        check_rounding,
        check_subagent,
        check_critic,
        check_teaching,
        check_weights,
        check_reference,
        check_judge,
    ):
        check(config, recipe)
