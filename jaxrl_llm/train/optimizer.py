"""The optimizer of a run, and its step, which skips non-finite updates."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.core import trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.recipes.optimizer import OptimizerConfig


def policy_optimizer(config: Any) -> OptimizerConfig:
    """The optimizer of a run's policy: that of its config, else of its recipe, else AdamW.

    A ``TrainConfig`` whose ``optimizer`` is None, the default, leaves the choice to the recipe. Any
    ``OptimizerConfig`` replaces the recipe's as a whole; to change a field of it, replace that in
    ``recipe.optimizer``.
    """
    return config.optimizer or _of_recipe(config) or OptimizerConfig()


def _of_recipe(config: Any) -> OptimizerConfig | None:
    return getattr(config.resolved_recipe, "optimizer", None)


def describe_optimizer(config: Any) -> str:
    """Which optimizer runs, and whose it is, for a recipe with one; otherwise an empty text.

    Example:
      >>> from types import SimpleNamespace
      >>> import jaxrl_llm as jr
      >>> from jaxrl_llm.train.optimizer import describe_optimizer
      >>> describe_optimizer(SimpleNamespace(optimizer=None, resolved_recipe=jr.recipes.es_qiu()))
      'sgd of es_qiu, learning rate 0.0005, no bound of the gradient'
    """
    of_recipe, name = _of_recipe(config), config.resolved_recipe.name
    if of_recipe is None:
        return ""
    run = policy_optimizer(config)
    whose = f"of {name}" if config.optimizer is None else f"of the config, not that of {name}"
    text = f"{run.shown_name} {whose}, learning rate {run.learning_rate:g}"
    if run.max_grad_norm is None:
        return f"{text}, no bound of the gradient"
    # A population's estimate is mostly noise, and its norm usually far above a bound.
    return f"{text}, the gradient cut to a norm of {run.max_grad_norm:g} (optimizer.max_grad_norm)"


def make_schedule(config: OptimizerConfig, *, updates: int = 1) -> float | optax.Schedule:
    """The step size: a number, or a function of the number of previous updates.

    Args:
      config: The options.
      updates: Updates of a batch: so many are one step of the warmup and the decay, so that a run
        has the same step sizes however many updates its recipe makes.
    """
    rate: Any = config.learning_rate
    if config.decay_steps:
        rate = optax.linear_schedule(rate, 0.0, config.decay_steps)
    if config.warmup_steps:
        # Step 0 already moves the parameters: the first of n warmup steps has 1 / n of the rate.
        start = config.learning_rate / config.warmup_steps
        warm = optax.linear_schedule(start, config.learning_rate, max(config.warmup_steps - 1, 1))
        after = rate if callable(rate) else optax.constant_schedule(rate)
        rate = optax.join_schedules([warm, after], [config.warmup_steps])
    if not callable(rate) or updates == 1:
        return rate
    return lambda count: rate(count / updates)


def learning_rate(config: OptimizerConfig, opt_state: ArrayTree, *, updates: int = 1) -> float:
    """The step size of the last update, or of the first if none has been made.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxrl_llm.train.optimizer import OptimizerConfig, learning_rate, make_optimizer
      >>> config, params = OptimizerConfig(learning_rate=0.5, decay_steps=4), jnp.ones(2)
      >>> optimizer = make_optimizer(config)
      >>> _, state = optimizer.update(params, optimizer.init(params), params)
      >>> _, state = optimizer.update(params, state, params)
      >>> learning_rate(config, state)
      0.375
    """
    schedule = make_schedule(config, updates=updates)
    if not callable(schedule):
        return schedule
    return float(schedule(max(int(_updates(opt_state)) - 1, 0)))


def at_updates(opt_state: ArrayTree, *, old: int, new: int) -> ArrayTree:
    """The state at the same step of its schedule, if a batch has ``new`` updates and had ``old``.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxrl_llm.train.optimizer import OptimizerConfig, at_updates, learning_rate
      >>> config, params = OptimizerConfig(learning_rate=0.5, decay_steps=4), jnp.ones(2)
      >>> optimizer = make_optimizer(config, updates=2)
      >>> state = optimizer.init(params)
      >>> for _ in range(4):  # two batches
      ...     _, state = optimizer.update(params, state, params)
      >>> float(next_rate(make_schedule(config), at_updates(state, old=2, new=1)))
      0.25
    """

    def moved(node: Any) -> Any:
        if not isinstance(node, optax.ScaleByScheduleState):
            return node
        return node._replace(count=node.count * new // old)

    def is_schedule(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    return jax.tree.map(moved, opt_state, is_leaf=is_schedule)


def next_rate(schedule: float | optax.Schedule, opt_state: ArrayTree) -> float | Array:
    """The step size of the next update, from a schedule and the optimizer's state."""
    return schedule(_updates(opt_state)) if callable(schedule) else schedule


def _updates(opt_state: ArrayTree) -> Array:
    """The number of updates that the schedule has counted."""
    kind = optax.ScaleByScheduleState
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kind))
    counts = [node.count for node in nodes if isinstance(node, kind)]
    if not counts:  # a transformation with a schedule of another kind
        counts = [count for _, count in optax.tree.get_all_with_path(opt_state, "count")]
    if not counts:
        raise ValueError(
            "optimizer: the state of this transformation counts no updates, so a schedule of the "
            "learning rate cannot be followed; use warmup_steps 0 and decay_steps None."
        )
    return counts[0]


def make_optimizer(config: OptimizerConfig, *, updates: int = 1) -> optax.GradientTransformation:
    """The optax transformation that a configuration describes.

        g <- g min(1, max_grad_norm / |g|)                            if max_grad_norm is set
        params <- params - lr(n) (adam(g) + weight_decay params)      after n updates

    For "sgd", ``adam(g)`` is the sum of past gradients, each update multiplying it by ``b1``; with
    ``b1`` of 0 it is the gradient. The step size rises over ``warmup_steps`` and falls over
    ``decay_steps``.

    Args:
      config: The options.
      updates: Updates of a batch, which together are one step of the warmup and the decay.

    Returns:
      A transformation for :func:`init_state` and :func:`make_step`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> config = jr.train.OptimizerConfig(name="sgd", learning_rate=0.5, b1=0.0, decay_steps=2)
      >>> optimizer, params = jr.train.make_optimizer(config), jnp.array([3.0, 4.0])
      >>> state = optimizer.init(params)
      >>> for _ in range(2):  # the gradient of norm 5 is scaled down to 1
      ...     update, state = optimizer.update(params, state, params)
      ...     print(update.round(3))
      [-0.3 -0.4]
      [-0.15 -0.2 ]
    """
    rate = make_schedule(config, updates=updates)
    if config.transform is not None:
        moves = config.transform(learning_rate=rate)
        if not (hasattr(moves, "init") and hasattr(moves, "update")):
            raise TypeError(
                f"optimizer: {config.transform!r} must return an optax transformation; got "
                f"{type(moves).__name__}."
            )
    elif config.name == "sgd":  # as in AdamW, the decay bypasses the momentum
        transforms = []
        if config.b1:
            transforms.append(optax.trace(config.b1, accumulator_dtype=config.moment_dtype))
        if config.weight_decay:
            transforms.append(optax.add_decayed_weights(config.weight_decay))
        moves = optax.chain(*transforms, optax.scale_by_learning_rate(rate))
    else:
        moves = optax.adamw(
            rate,
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mu_dtype=config.moment_dtype,
        )
    if config.max_grad_norm is None:
        return moves
    return ClippedOptimizer(*optax.chain(clip_by_norm(config.max_grad_norm), moves))


class ClippedOptimizer(optax.GradientTransformationExtraArgs):
    """What :func:`make_optimizer` returns with a bound; its ``update`` takes the gradient's norm.

    An optax wrapper around it is of another class. Wrappers pass extra arguments on even where they
    change the gradient, so a step gives the norm to this class alone.
    """


def clip_by_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """``optax.clip_by_global_norm`` with a norm that the step has already computed.

    The gradient is multiplied by one factor where it is read next, whereas optax selects between
    two full gradients and therefore writes another gradient to memory.
    """

    def update(
        grads: ArrayTree, state, params=None, *, grad_norm: Array | None = None, **_
    ) -> tuple[ArrayTree, Any]:
        norm = trees.norm(grads) if grad_norm is None else grad_norm
        factor = jnp.minimum(1.0, max_norm / norm)
        return jax.tree.map(lambda x: (factor * x).astype(x.dtype), grads), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def keep(applied: Array, new: ArrayTree, old: ArrayTree) -> ArrayTree:
    """The new tree if ``applied``, else the old tree bit for bit; it selects, never multiplies."""
    return jax.tree.map(lambda a, b: jnp.where(applied, a, b), new, old)


def stays_finite(old: ArrayTree, new: ArrayTree) -> Array:
    """Whether no value of a state became non-finite; values that already were may remain so."""
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    checked = [
        jnp.all(jnp.isfinite(a) | ~jnp.isfinite(b))
        for a, b in pairs
        if jnp.issubdtype(a.dtype, jnp.floating)
    ]
    return jnp.all(jnp.stack(checked)) if checked else jnp.bool_(True)


def apply_if_finite(
    optimizer: optax.GradientTransformation,
    carry: tuple[ArrayTree, ArrayTree],
    loss: Array,
    grads: ArrayTree,
    *,
    scale: Array | None = None,
    finite: Array | bool = True,
    trains: Array | bool = True,
) -> tuple[tuple[ArrayTree, ArrayTree], dict[str, Array]]:
    """One step of an optimizer, skipped if the loss, the gradient or the update is non-finite.

    The update itself is not checked if the optimizer multiplies matrices.

    Parameters and state are written in place. On a GPU, each leaf is a choice between old and new:
    one kernel makes all three arrays of a leaf, so the compiler needs no copy. Compilers for CPUs
    and TPUs would copy the old leaves of such a choice, so there the update is in the branches of
    conditionals, whose results compilers for GPUs would copy. The norm of the update is computed
    before the update is made; computed together, the norm would keep the old state alive. An update
    without matrix products is therefore computed twice, which costs less than the copy.

    Args:
      optimizer: Any optax transformation. One of :func:`make_optimizer` that is not wrapped in
        another receives ``grad_norm``.
      carry: Parameters and the optimizer's state.
      loss: ``[]``.
      grads: Gradient of the loss.
      scale: ``[]``, multiplies the optimizer's update; None leaves the update unchanged, and with 0
        no step is made.
      finite: Whether everything else that the update depends on is finite.
      trains: Whether there is anything to learn from; if not, no step is made, and none is skipped.

    Returns:
      Parameters and state after the step, and the metrics ``loss``, ``grad_norm``, ``update_norm``
      (0 without a step), ``updates`` (1 if the step was made), ``skipped`` (1 if skipped) and, with
      a ``scale``, ``withheld`` (1 if it is 0).
    """
    norm = trees.norm(grads)  # non-finite if any gradient is
    applied = jnp.isfinite(loss) & jnp.isfinite(norm) & finite & trains
    withheld = jnp.zeros((), bool)
    if scale is not None:
        applied &= jnp.isfinite(scale)
        withheld = applied & (scale == 0)
        applied &= ~withheld

    known = {"grad_norm": norm} if isinstance(optimizer, ClippedOptimizer) else {}

    def changed(grads, carry):
        params, opt_state = carry
        changes, opt_state = optimizer.update(grads, opt_state, params, **known)
        if scale is not None:
            changes = jax.tree.map(lambda x: (scale * x).astype(x.dtype), changes)
        return (optax.apply_updates(params, changes), opt_state), trees.norm(changes)

    changed = jax.jit(changed, inline=True)  # traced once, for its check and for both its results
    write = update_by_choice if jax.default_backend() == "gpu" else update_by_branch
    carry, update_norm, applied = write(applied, changed, grads, carry)
    metrics = {
        "loss": loss,
        "grad_norm": norm,
        "update_norm": update_norm,
        "updates": applied.astype(jnp.float32),
        "skipped": (trains & ~applied & ~withheld).astype(jnp.float32),
    }
    if scale is not None:
        metrics["withheld"] = withheld.astype(jnp.float32)
    return carry, metrics


def update_by_branch(applied: Array, changed: Callable, grads: ArrayTree, carry):
    """Parameters and state after ``changed``, the update's norm, and whether it was applied."""

    def stay(grads, carry):
        return carry, jnp.zeros_like(trees.norm(grads))

    if _multiplies(changed, grads, carry):
        return *jax.lax.cond(applied, changed, stay, grads, carry), applied
    norm = jax.lax.cond(applied, _item(changed, 1), _item(stay, 1), grads, carry)
    # The norm is known before the update is made, so it can stop a non-finite update. The second
    # conditional waits for the first, so it can overwrite the arrays that both read.
    applied &= jnp.isfinite(norm)
    carry = jax.lax.cond(applied, _item(changed, 0), _item(stay, 0), grads, carry)
    return carry, jnp.where(applied, norm, 0.0), applied


def update_by_choice(applied: Array, changed: Callable, grads: ArrayTree, carry):
    """As :func:`update_by_branch`, with a choice between old and new for each leaf."""
    new, norm = changed(grads, carry)
    if not _multiplies(changed, grads, carry):
        applied &= jnp.isfinite(norm)
        applied, grads, carry = jax.lax.optimization_barrier((applied, grads, carry))
        new, _ = changed(grads, carry)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(carry), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):  # jnp.where would promote the leaf
            raise TypeError(
                f"apply_if_finite: the optimizer turns {b.dtype}{list(b.shape)} into "
                f"{a.dtype}{list(a.shape)}."
            )
    return keep(applied, new, carry), jnp.where(applied, norm, 0.0), applied


def _item(function: Callable, index: int) -> Callable:
    return lambda grads, carry: function(grads, carry)[index]


def _multiplies(function: Callable, grads: ArrayTree, carry) -> bool:
    """Whether a function multiplies matrices, which makes it too costly to compute twice."""
    return "dot_general" in str(jax.make_jaxpr(function)(grads, carry))
