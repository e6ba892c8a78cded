"""How the members of an evolution recipe answer the questions of a run."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.models.sharding import batch_sharding, batch_shards
from jaxrl_llm.recipes import EvolutionRecipe
from jaxrl_llm.rollout import Rollout, make_population_sampler, make_sampler
from jaxrl_llm.rollout.sampler import pad_prompts, prompt_room

Population = Callable[..., Rollout]
"""``population(params, key, prompts, *, version) -> Rollout [P, G tries, T]``: the members of
epoch ``version`` in a run with this key."""


def make_population(
    model: Model,
    recipe: EvolutionRecipe,
    *,
    group_size: int,
    mesh: jax.sharding.Mesh | None = None,
    shared_prefix_len: int = 0,
    **sampling,
) -> Population:
    """A sampler of a recipe's members, whose noise is drawn with every batch.

    Args:
      model: The model.
      recipe: The method.
      group_size: G, members that answer a prompt.
      mesh: Spreads members (with full noise: prompts) over its axes ``data`` and ``fsdp``.
      shared_prefix_len: How many first tokens all prompts share.
      **sampling: Other options of ``rollout.make_population_sampler``.

    Returns:
      A :data:`Population`.
    """
    if recipe.noise == "full":
        return _one_by_one(
            model, recipe, group_size, mesh=mesh, shared_prefix_len=shared_prefix_len, **sampling
        )
    sample = make_population_sampler(
        model,
        shared=recipe.shared,
        tries=recipe.tries,
        temperature=recipe.temperature,
        shared_prefix_len=shared_prefix_len,
        mesh=mesh,
        **sampling,
    )
    placed = {} if mesh is None else {"out_shardings": batch_sharding(mesh)}
    draw = jax.jit(_delta, static_argnums=(0, 4, 5), **placed)
    shards = 1 if mesh is None else batch_shards(mesh)

    def population(params: ArrayTree, key: Array, prompts, *, version: int = 0) -> Rollout:
        members = recipe.population(len(prompts), group_size)
        # On a mesh a device has its rows' factors, so that no pair may be on two.
        share = recipe.pairs and members % (2 * shards) == 0
        delta = draw(recipe, params, key, np.int32(version), members, share)
        return sample(params, delta, jax.random.fold_in(key, version), prompts, version=version)

    return population


def _delta(recipe: EvolutionRecipe, params: ArrayTree, key: Array, epoch: Array, count: int, share):
    classes, members = recipe.classes(params), np.arange(count)
    return recipe.delta(params, classes, key, epoch, members, share_pairs=share)


def _one_by_one(
    model, recipe, group_size: int, *, mesh, shared_prefix_len: int, **sampling
) -> Population:
    """Members with noise of full rank: each has weights of its own, for as long as it answers."""
    options = {
        "temperature": recipe.temperature,
        "shared_prefix_len": shared_prefix_len,
        "mesh": mesh,
    }
    sample = make_sampler(model, group_size=recipe.tries, **options, **sampling)

    @jax.jit
    def perturbed(params: ArrayTree, key: Array, epoch: Array, member: Array) -> ArrayTree:
        return recipe.member(params, recipe.classes(params), key, epoch, member)

    def population(params: ArrayTree, key: Array, prompts, *, version: int = 0) -> Rollout:
        members = recipe.population(len(prompts), group_size)
        now, found = jax.random.fold_in(key, version), []
        for member in range(members):
            asked = list(prompts) if recipe.shared else [prompts[member // group_size]]
            first = np.arange(len(asked))[:, None] * members + member
            ids = first * recipe.tries + np.arange(recipe.tries)
            weights = perturbed(params, key, np.int32(version), np.int32(member))
            found.append(sample(weights, now, asked, request_ids=ids, version=version))
        if not recipe.shared:
            each = range(0, members, group_size)
            found = [_joined(found[i : i + group_size], axis=1) for i in each]
        room = prompt_room("make_population", model, sampling["max_new_tokens"])
        tokens, mask = pad_prompts(prompts, vocab_size=model.config.vocab_size, room=room)
        joined = _joined(found, axis=1 if recipe.shared else 0)
        return joined._replace(prompt_tokens=tokens, prompt_mask=mask)

    return population


def _joined(parts: Sequence[Rollout], *, axis: int) -> Rollout:
    """Responses side by side (axis 1) or below each other (axis 0), without their prompts."""
    parts = [part._replace(prompt_tokens=None, prompt_mask=None) for part in parts]
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=axis), *parts)
