"""``make_step``: one compiled update from a batch of rollouts."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.core import checks, trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.models.sharding import batch_shards
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.train import mesh as meshes
from jaxrl_llm.train.metrics import batch_metrics
from jaxrl_llm.train.score import score
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
) -> Step:
    """A compiled function that makes one batch of rollouts into an update of the state.

    In order: ``recipe.prepare`` on the whole batch; a scan over microbatches of whole groups that
    adds gradients in float32; one update of the optimizer. Since the weights of the loss were
    computed from the whole batch, the number of microbatches and of devices changes nothing but
    rounding.

    With one update, ``old_logp`` may be left None: the policy that is being trained is then its own
    proximal policy and the ratio is 1. With more, it is computed here before the first, unless
    given.

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
      chunk_size: Tokens whose logits exist at one time; None leaves it to ``logprobs``.

    Returns:
      ``step(state, batch) -> (state, metrics)``; metrics are float32 scalars, described in
      :func:`~jaxrl_llm.train.metrics.batch_metrics`.

    Raises:
      ValueError: When made, if a number is not positive; when called, if P does not divide.

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
    checks.check_positive("make_step", microbatches=microbatches, updates=updates)
    recipe.check_updates(updates)
    policy = _policy("make_step", model, temperature, chunk_size, remat)

    def loss(params: ArrayTree, part: Batch):
        logp, entropy = policy(params, part)
        return recipe.loss(logp, part, entropy=entropy), (logp, entropy)

    def update(carry, batch: Batch):
        params, opt_state = carry
        value, (logp, entropy), grads = _gradients(loss, params, batch, microbatches)
        changes, opt_state = optimizer.update(grads, opt_state, params)
        metrics = {
            "loss": value,
            "grad_norm": trees.norm(grads),
            "update_norm": trees.norm(changes),
            **batch_metrics(recipe, logp, entropy, batch),
        }
        return (optax.apply_updates(params, changes), opt_state), metrics

    def step(state: TrainState, batch: Batch):
        prompts = batch.tokens.shape[0]
        meshes.check_batch("make_step", prompts, microbatches, batch_shards(mesh))
        if updates > 1 and batch.old_logp is None:
            batch = batch.replace(old_logp=_whole(policy, state.params, batch, microbatches))
        batch, algo_state = recipe.prepare(batch, state.algo_state)
        carry = (state.params, state.opt_state)
        if updates == 1:
            carry, metrics = update(carry, batch)
        else:
            carry, history = jax.lax.scan(lambda c, _: update(c, batch), carry, length=updates)
            metrics = jax.tree.map(lambda x: x[-1], history)
        params, opt_state = carry
        state = state._replace(
            params=params, opt_state=opt_state, algo_state=algo_state, step=state.step + 1
        )
        return state, metrics

    return _Step(step, donate)


def make_scorer(
    model: Model,
    *,
    microbatches: int = 1,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> Callable[[ArrayTree, Batch], Array]:
    """A compiled ``scorer(params, batch) -> logp [P, G, T]``, without gradients.

    For log-probabilities that must be known before the step: of a frozen reference, or of the
    proximal policy where a correction compares it with what sampled.
    """
    checks.check_positive("make_scorer", microbatches=microbatches)
    policy = _policy("make_scorer", model, temperature, chunk_size, "none")
    return jax.jit(lambda params, batch: _whole(policy, params, batch, microbatches))


def _policy(function: str, model: Model, temperature, chunk_size: int | None, remat: str):
    """``policy(params, batch) -> (logp, entropy)`` of the responses of a batch."""
    checks.check_positive(function, temperature=temperature)
    options = {"temperature": temperature, "chunk_size": chunk_size, "remat": remat}

    def policy(params: ArrayTree, batch: Batch) -> tuple[Array, Array]:
        arrays = (batch.prompt_tokens, batch.prompt_mask, batch.tokens, batch.mask)
        return score(model, params, *arrays, **options)

    return policy


def _gradients(loss: Callable, params: ArrayTree, batch: Batch, microbatches: int):
    """Loss, log-probabilities with entropies, and the gradient of the whole batch in float32."""
    grad = jax.value_and_grad(loss, has_aux=True)
    if microbatches == 1:
        (value, aux), grads = grad(params, batch)
        return value, aux, trees.cast(grads, jnp.float32)

    def add(total, part):
        (value, aux), grads = grad(params, part)
        added = jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total[1], grads)
        return (total[0] + value, added), aux

    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
    (value, grads), aux = jax.lax.scan(add, (jnp.float32(0), zeros), _split(batch, microbatches))
    return value, _join(aux), grads


class _Step:
    """``jit`` of a step that hands the state back where it came from, so that it compiles once."""

    def __init__(self, step: Callable, donate: bool):
        self._step, self._donate = step, donate
        self.compiled: Callable | None = None  # made on the first call, which brings the shardings

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        # The key and the cursor do not change in a step; the cursor is the host's.
        inner = state._replace(key=(), data_cursor=())
        if self.compiled is None:
            shardings = jax.tree.map(lambda x: x.sharding, inner)
            on_mesh = isinstance(inner.step.sharding, jax.sharding.NamedSharding)
            options = {"out_shardings": (shardings, None)} if on_mesh else {}
            donated = (0,) if self._donate else ()
            self.compiled = jax.jit(self._step, donate_argnums=donated, **options)
        new, metrics = self.compiled(inner, batch)
        return new._replace(key=state.key, data_cursor=state.data_cursor), metrics


def _whole(policy: Callable, params: ArrayTree, batch: Batch, microbatches: int) -> Array:
    """Log-probabilities of the whole batch, one microbatch after the other."""
    if microbatches == 1:
        return policy(params, batch)[0]
    _, logp = jax.lax.scan(
        lambda _, part: (None, policy(params, part)[0]), None, _split(batch, microbatches)
    )
    return _join(logp)


def _split(batch: ArrayTree, microbatches: int) -> ArrayTree:
    """``[P, ...] -> [M, P / M, ...]``: prompt ``i`` goes to microbatch ``i % M``.

    Strided, so that on a mesh each microbatch still has prompts on every device.
    """
    return jax.tree.map(
        lambda x: jnp.swapaxes(x.reshape(-1, microbatches, *x.shape[1:]), 0, 1), batch
    )


def _join(parts: ArrayTree) -> ArrayTree:
    """The inverse of :func:`_split`."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), parts)
