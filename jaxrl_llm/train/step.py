"""``make_step``: one compiled update from a batch of rollouts."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.core import checks, trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime.heap import trim_after_compiling
from jaxrl_llm.models.lora import merge_adapter
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.models.sharding import batch_shards, on_mesh, spread_update
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.train import mesh as meshes
from jaxrl_llm.train.critic import CriticState, average
from jaxrl_llm.train.guards import guarded_update, keep, stays_finite
from jaxrl_llm.train.metrics import batch_metrics
from jaxrl_llm.train.passes import Passes, join, over_parts, split
from jaxrl_llm.train.state import TrainState

Step = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]


def make_step(
    model: Model,
    recipe: Recipe,
    optimizer: optax.GradientTransformation,
    *,
    microbatches: int = 1,
    updates: int = 1,
    temperature: float = 1.0,
    mesh: jax.sharding.Mesh | None = None,
    remat: str = "full",
    donate: bool = True,
    chunk_size: int | None = None,
    shared_prefix_len: int = 0,
    critic_optimizer: optax.GradientTransformation | None = None,
    critic_model: Model | None = None,
) -> Step:
    """A compiled function that makes one batch of rollouts into an update of the state.

    In order: what the recipe wants to know of the policy at the start of the step, of its teacher
    and of its critic; ``recipe.prepare`` on the whole batch; a scan over microbatches of whole
    groups that adds gradients in float32; one update of the optimizer; the same for the critic.
    Since the weights of the loss were computed from the whole batch, the number of microbatches and
    of devices changes nothing but rounding.

    An update whose loss, gradient or scale is no finite number, or with which the recipe's state
    would hold one, is not made: parameters, optimizer, recipe's state, reference and critic's
    target stay bit for bit what they were, while the step is counted. The critic's update has the
    same guard of its own. ``skipped`` and ``critic_skipped`` say how many were left out.

    With one update, ``old_logp`` may be left None: the policy that is being trained is then its own
    proximal policy and the ratio is 1. With more, or where the recipe needs it to prepare, it is
    computed here before the first, unless given.

    Args:
      model: The model.
      recipe: The method.
      optimizer: Any optax transformation, clipping and schedule included.
      microbatches: Parts of the batch that are in memory one after the other; divides P.
      updates: How many times the optimizer passes over the same batch.
      temperature: Of the policy that is trained; the one that sampled.
      mesh: The mesh that state and batch live on.
      remat: What the backward pass keeps of a layer: "none", "dots" or "full" (recompute all).
      donate: Reuse the memory of the state that comes in, which then cannot be used again.
      chunk_size: As of ``logprobs``, which it is left to if None: bounds the logits in memory.
      shared_prefix_len: How many first tokens the prompts of every batch share; the policy computes
        them once for all prompts.
      critic_optimizer: For a recipe with a critic, the one given to ``init_state``.
      critic_model: The critic's body, if it is another model than the policy.

    Returns:
      ``step(state, batch) -> (state, metrics)``; metrics are float32 scalars: ``loss``,
      ``grad_norm`` (before any clipping) and ``update_norm`` (of what was added to the parameters,
      0 where nothing was), of the last of several updates; ``skipped``, the number of updates that
      were left out; the same four of a critic after ``critic_``; and those of
      :func:`~jaxrl_llm.train.metrics.batch_metrics`.

    Raises:
      ValueError: When made, if a number is not positive, or the recipe has a critic and there is no
        optimizer for it; when called, if P does not divide.

    Example:
      >>> import jax, optax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model()
      >>> recipe, optimizer = jr.recipes.dr_grpo(length=4), optax.adamw(1e-3)
      >>> step = jr.train.make_step(model, recipe, optimizer)
      >>> state = jr.train.init_state(params, optimizer, recipe, key=jax.random.key(0))
      >>> kept = jax.numpy.ones((2, 2, 4), bool)
      >>> batch = jr.recipes.Batch(
      ...     tokens=jax.numpy.arange(16).reshape(2, 2, 4), mask=kept,
      ...     rewards=jax.numpy.array([[1.0, 0.0], [0.0, 1.0]]), where=kept[..., 0],
      ...     prompt_tokens=jax.numpy.ones((2, 3), int), prompt_mask=jax.numpy.ones((2, 3), bool))
      >>> state, metrics = step(state, batch)
      >>> int(state.step), float(metrics["reward"])
      (1, 0.5)
    """
    numbers = {"microbatches": microbatches, "updates": updates, "temperature": temperature}
    checks.check_positive("make_step", **numbers)
    checks.check_non_negative("make_step", shared_prefix_len=shared_prefix_len)
    recipe.check_passes(updates, 1)
    if (recipe.critic is None) != (critic_optimizer is None):
        has = "a critic but no" if critic_optimizer is None else "no critic but a"
        raise ValueError(f"make_step: recipe {recipe.name!r} has {has} critic_optimizer.")
    passes = Passes(
        model, recipe, temperature, chunk_size, remat, critic_model or model, shared_prefix_len
    )

    def loss(base: ArrayTree, params: ArrayTree, part: Batch):
        logp, entropy, statistics = passes.policy(merge_adapter(base, params), part)
        value = recipe.loss(logp, part, entropy=entropy, statistics=statistics)
        return value, (logp, entropy)

    def update(base: ArrayTree, sound: Array, carry, batch: Batch):
        of_batch = functools.partial(loss, base)
        value, (logp, entropy), grads = _gradients(of_batch, carry[0], batch, microbatches)
        scale = None
        if "update_scale" in recipe.computed_from("batch"):
            scale = batch.extras["update_scale"][0, 0, 0]
        carry, metrics = guarded_update(optimizer, carry, value, grads, scale=scale, sound=sound)
        return carry, metrics | batch_metrics(recipe, logp, entropy, batch)

    def update_critic(critic_optimizer, carry, batch: Batch):
        value, _, grads = _gradients(passes.critic_loss, carry[0], batch, microbatches)
        return guarded_update(critic_optimizer, carry, value, grads)

    def prepare(state: TrainState, batch: Batch, key: Array | None):
        prompts = batch.tokens.shape[0]
        meshes.check_batch("make_step", prompts, microbatches, batch_shards(mesh))
        batch = passes.before(state, batch, microbatches, score_old=updates > 1)
        if key is not None:
            key = prepare_key(key, state.step)
        return recipe.prepare(batch, state.algo_state, key=key)

    def step(state: TrainState, batch: Batch, key: Array | None, base: ArrayTree):
        state = state._replace(base=base)
        batch, algo_state = prepare(state, batch, key)
        sound = stays_finite(state.algo_state, algo_state)
        one = functools.partial(update, state.base, sound)
        policy, metrics = _repeat(one, (state.params, state.opt_state), batch, updates)
        made = metrics["skipped"] < updates
        kl = metrics.get("approx_kl", jnp.float32(0))
        kl = keep(jnp.isfinite(kl), kl, state.algo_state.last_kl)
        algo_state = keep(made, algo_state._replace(last_kl=kl), state.algo_state)
        if recipe.critic is not None:
            old, one = state.critic, functools.partial(update_critic, critic_optimizer)
            (params, opt_state), more = _repeat(one, (old.params, old.opt_state), batch, updates)
            target = average(old.target, params, recipe.critic.target_rate)
            target = keep(more["skipped"] < updates, target, old.target)
            state = state._replace(critic=CriticState(params, opt_state, target))
            metrics |= {f"critic_{name}": value for name, value in more.items()}
        if recipe.reference is not None:
            reference = recipe.reference(state.reference, policy[0], state.step + 1)
            state = state._replace(reference=keep(made, reference, state.reference))
        params, opt_state = policy
        state = state._replace(
            params=params,
            opt_state=opt_state,
            algo_state=algo_state,
            step=state.step + 1,
            base=(),
        )
        return state, metrics

    return compiled_step(
        on_mesh(step, mesh), on_mesh(prepare, mesh), donate=donate, draws=recipe.draws
    )


# Sets the numbers that a recipe draws apart from those of the sampler in the same step.
_PREPARE = 0x70726570


def prepare_key(key: Array, step: int | Array) -> Array:
    """The key that ``Recipe.prepare`` gets in a step of a run with this key."""
    return jax.random.fold_in(jax.random.fold_in(key, step), _PREPARE)


def _repeat(update: Callable, carry, batch: Batch, updates: int):
    """The state after several updates on one batch, and the metrics of the last.

    Of the skipped ones it is the number: after the first of them the others are, too, since they
    see the same parameters and the same batch.
    """
    if updates == 1:
        return update(carry, batch)
    carry, history = jax.lax.scan(lambda c, _: update(c, batch), carry, length=updates)
    metrics = jax.tree.map(lambda x: x[-1], history)
    return carry, metrics | {"skipped": jnp.sum(history["skipped"])}


def make_scorer(
    model: Model,
    *,
    microbatches: int = 1,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    shared_prefix_len: int = 0,
    mesh: jax.sharding.Mesh | None = None,
) -> Callable[[ArrayTree, Batch], Array]:
    """A compiled ``scorer(params, batch) -> logp [P, G, T]``, without gradients.

    For log-probabilities that must be known before the step: of a frozen reference, or of the
    proximal policy where a correction compares it with what sampled.
    """
    checks.check_positive("make_scorer", microbatches=microbatches, temperature=temperature)
    checks.check_non_negative("make_scorer", shared_prefix_len=shared_prefix_len)
    passes = Passes(model, None, temperature, chunk_size, "none", model, shared_prefix_len)

    def scorer(params: ArrayTree, batch: Batch) -> Array:
        return over_parts(lambda part: passes.policy(params, part)[0], batch, microbatches)

    return jax.jit(on_mesh(scorer, mesh))


def _gradients(loss: Callable, params: ArrayTree, batch: Batch, microbatches: int):
    """Loss, log-probabilities with entropies, and the gradient of the whole batch in float32."""
    grad = jax.value_and_grad(loss, has_aux=True)
    if microbatches == 1:
        (value, aux), grads = grad(params, batch)
        return value, aux, trees.cast(spread_update(grads), jnp.float32)

    def add(total, part):
        (value, aux), grads = grad(params, part)
        grads = spread_update(grads)
        added = jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total[1], grads)
        return (total[0] + value, added), aux

    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
    start = (jnp.float32(0), spread_update(zeros))
    (value, grads), aux = jax.lax.scan(add, start, split(batch, microbatches))
    return value, join(aux), grads


def compiled_step(step: Callable, prepare: Callable, *, donate: bool, draws: bool) -> Step:
    """The step that the loop calls, from functions that are traced.

    Args:
      step: ``step(state, batch, key, base) -> (state, metrics)``, on a state without key, cursor
        and base.
      prepare: ``prepare(state, batch, key) -> (batch, algo_state)``.
      donate: Whether the state that comes in is given away.
      draws: Whether the two take a key; else it is None.
    """
    trim_after_compiling()
    return _Step(step, prepare, donate, draws)


class _Step:
    """``jit`` of a step that hands the state back where it came from, so that it compiles once."""

    def __init__(self, step: Callable, prepare: Callable, donate: bool, draws: bool):
        self._step, self._prepare, self._donate, self._draws = step, prepare, donate, draws
        self.compiled: Callable | None = None  # made on the first call, which brings the shardings

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        given = self._arguments(state, batch)
        if self.compiled is None:
            self.compiled = self._jit(given[0])
        new, metrics = self.compiled(*given)
        kept = {"key": state.key, "data_cursor": state.data_cursor, "base": state.base}
        return new._replace(**kept), metrics

    def lower(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
        """The program for arrays of these shapes and shardings, of which none need exist."""
        given = self._arguments(state, batch)
        return self._jit(given[0]).lower(*given)

    def _arguments(self, state: TrainState, batch: Batch) -> tuple:
        # What does not change in a step is not given away with the rest; the cursor is the host's.
        inner = state._replace(key=(), data_cursor=(), base=())
        return inner, batch, state.key if self._draws else None, state.base

    def _jit(self, inner: TrainState) -> Any:
        shardings = jax.tree.map(lambda x: x.sharding, inner)
        on_mesh = isinstance(inner.step.sharding, jax.sharding.NamedSharding)
        options = {"out_shardings": (shardings, None)} if on_mesh else {}
        return jax.jit(self._step, donate_argnums=(0,) if self._donate else (), **options)

    def prepared(self, state: TrainState, batch: Batch) -> Batch:
        """The batch with all that the step computes of it before its update, for a closer look."""
        inner = state._replace(data_cursor=())
        key = state.key if self._draws else None
        return jax.jit(self._prepare)(inner, batch, key)[0]
