"""How a batch becomes optimizer steps: passes, minibatches, microbatches, packed rows."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import checks, trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.flat_packing import LEAST_SAVED, plan_flat
from jaxrl_llm.core.packing import FlatPacking, Layout, Tree, plan_packing, plan_tree
from jaxrl_llm.curation.collectors.protocol import width_of
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.models.sharding import keep_apart, spread_update
from jaxrl_llm.recipes import Batch
from jaxrl_llm.train.mesh import check_batch

PACKING = ("auto", "flat", "always", "tree", "never")

# Rows are packed only if at most this share of the cells remains and at least this many cells are
# saved, since a new shape must be compiled. Flat rows save more, and of prompts too.
_MAX_SHARE, MIN_SAVED, _MIN_SAVED_FLAT = 0.8, 4096, 512

# On two CPU cores the step of SmolLM2-135M is compiled in the time that it takes for 2,000 to 3,500
# cells. A smaller shape of flat rows saves more than twice as many if all steps of a run have it.
_SAVED_IN_A_RUN = 8192


class Passes(NamedTuple):
    """How one batch of P groups becomes optimizer steps.

    Attributes:
      epochs: Passes over the batch.
      minibatches: m, optimizer steps per pass. Group p belongs to minibatch ``p % m``, in every
        pass, as verl keeps its minibatches; batches come in random order already.
      microbatches: Slices of the full batch that are processed one after the other to save memory.
    """

    epochs: int = 1
    minibatches: int = 1
    microbatches: int = 1

    @property
    def updates(self) -> int:
        """Optimizer steps per batch."""
        return self.epochs * self.minibatches

    @property
    def accumulated(self) -> int:
        """Microbatches per minibatch, none larger than those of the full batch."""
        return -(-self.microbatches // self.minibatches)

    def of(self, packing: Layout | None) -> "Passes":
        """These passes over a batch with this packing: flat rows were made for microbatches."""
        if isinstance(packing, FlatPacking):
            return self._replace(microbatches=packing.microbatches)
        return self

    def divides(self, prompts: int, shards: int) -> bool:
        """Whether P groups divide into these minibatches and their microbatches, over the mesh."""
        each, left = divmod(prompts, self.minibatches)
        return not left and each % (self.accumulated * shards) == 0

    def check(self, function: str, prompts: int, shards: int) -> None:
        """Raises ValueError unless P groups divide, as ``divides`` checks."""
        check_batch(function, prompts, self.microbatches, shards)
        if self.minibatches > 1 and prompts % self.minibatches:
            raise ValueError(
                f"{function}: {prompts} prompts do not split into {self.minibatches} minibatches "
                "of full groups; pass minibatches=, a divisor of the prompts."
            )
        if self.minibatches > 1 and not self.divides(prompts, shards):
            raise ValueError(
                f"{function}: a minibatch of {prompts // self.minibatches} prompts ({prompts} in "
                f"{self.minibatches} minibatches) does not split into {self.accumulated} "
                f"microbatch(es) over {shards} device(s), the mesh axes data x fsdp x expert."
            )


# How metrics of several optimizer steps become one per batch; others are the mean over all steps.
_SUMS = ("tokens", "text_tokens", "pairs")
# Means over the first pass, and the unit that they are over: minibatches may have unequal counts.
_MEANS_OF = {
    "reward": "rollouts",
    "reward_std": "groups",
    "informative": "groups",
    "length": "responses",
    "entropy": "tokens",
    "text_loss": "text_tokens",
    "pair_accuracy": "pairs",
    "pair_margin": "pairs",
    "pair_chosen": "pairs",
    "pair_rejected": "pairs",
}
# Metrics of an optimizer step itself, also of one that trained on texts alone.
_OF_STEP = ("loss", "grad_norm", "update_norm", "updates", "skipped", "withheld")
_BEFORE_UPDATE = ("sampler_gap", "sampler_gap_max", "sampler_kl", "sampler_ess", "ref_kl")


def summarize_updates(
    history: dict[str, Array], minibatches: int, trains: Array, sizes: dict[str, Array]
) -> dict[str, Array]:
    """Combines the metrics ``[updates]`` of the optimizer steps of one batch.

    ``trains`` tells which minibatches have a token to train on. The others do not count, and all
    metrics are 0 if none has one. Rewards count where a rollout takes part, even if none of its
    tokens trains.
    ``sizes`` are the numbers ``[updates]`` of rollouts, groups and responses of the minibatches.

    - Metrics of the rollouts, of texts and of pairs, and the policy's entropy: the mean over all
      rollouts, groups, responses, pairs or tokens of the first pass; for ``tokens``,
      ``text_tokens`` and ``pairs`` the sum.
    - ``sampler_*`` and ``ref_kl``: from the first minibatch, before any update of the batch.
    - ``approx_kl``: from the last minibatch; ``ratio_max``: the maximum; ``updates``, ``skipped``
      and ``withheld``: the sum.
    - All others, such as ``loss``, ``grad_norm`` and ``clip_fraction``: the mean over all steps.

    A minibatch of texts alone counts only in the metrics of texts and of the optimizer step.
    """
    responds = trains & (history["tokens"] > 0) if "tokens" in history else trains
    first, last = jnp.argmax(responds), trains.size - 1 - jnp.argmax(responds[::-1])
    picked = dict.fromkeys(_BEFORE_UPDATE, first) | {"approx_kl": last}
    counts = history | sizes

    def summarize(name: str, x: Array) -> Array:
        unit = _MEANS_OF.get(name)
        trained = trains if name in (*_OF_STEP, *_SUMS) else responds
        count = trained if unit is None else counts[unit]
        if unit not in ("rollouts", "groups"):
            count = jnp.where(trains, count, 0)
        x = jnp.where(count > 0, x, 0.0)
        if name in picked:
            return x[picked[name]]
        if name in ("updates", "skipped", "withheld"):
            return jnp.sum(x)
        if name == "ratio_max":
            return jnp.max(x)
        if name in _SUMS:
            return jnp.sum(x[:minibatches])
        if unit is not None:
            count, x = count[:minibatches], x[:minibatches]
        return jnp.sum(count * x) / jnp.maximum(jnp.sum(count), 1)

    return {name: summarize(name, x) for name, x in history.items()}


def run_passes(
    passes: Passes,
    update: Callable,
    carry: Any,
    batch: Batch,
    *,
    of_pass: Callable[[Batch, Array], Batch] | None = None,
) -> tuple[Any, tuple[dict[str, Array], Array | None]]:
    """Runs ``update(carry, minibatch, trains) -> (carry, (metrics, logp))`` for each step.

    ``trains`` tells whether the minibatch has a token to train on: after a rule has dropped most
    groups, it may have none, and must then not move the parameters. ``update`` makes no step either
    if all its tokens have weight 0. The returned log-probabilities are None, or those of all groups
    in batch order, each from the first step that trained on the group. ``of_pass(minibatch,
    number)`` returns the minibatch as pass ``number`` reads it.
    """

    def update_part(carry, part: Batch):
        carry, (metrics, logp) = update(carry, part, jnp.any(part.mask))
        return carry, (metrics, logp, took_part(metrics), batch_sizes(part))

    if passes.updates == 1:
        part = batch if of_pass is None else of_pass(batch, jnp.int32(0))
        carry, (metrics, logp, *_) = update_part(carry, part)
        return carry, (metrics, logp)

    count = passes.minibatches
    minibatches = split_microbatches(batch, count)

    def one(carry, step):
        part = (
            batch
            if count == 1
            else jax.tree.map(lambda x: keep_apart(x[step % count]), minibatches)
        )
        return update_part(carry, part if of_pass is None else of_pass(part, step // count))

    carry, (history, logp, trains, sizes) = jax.lax.scan(one, carry, jnp.arange(passes.updates))
    if logp is not None:
        logp = join_microbatches(logp[:count])
    return carry, (summarize_updates(history, count, trains, sizes), logp)


def took_part(metrics: dict[str, Array]) -> Array:
    """Whether an update had anything to train on: its step was then made, skipped or withheld."""
    return metrics["updates"] + metrics["skipped"] + metrics.get("withheld", 0.0) > 0


def batch_sizes(part: Batch) -> dict[str, Array]:
    """Numbers of rollouts and groups that take part, and of responses with a token to train on."""
    present = {
        "rollouts": part.where,
        "groups": jnp.any(part.where, axis=-1),
        "responses": part.where & jnp.any(part.mask, axis=-1),
    }
    return {name: jnp.sum(x, dtype=jnp.float32) for name, x in present.items()}


def split_microbatches(batch: ArrayTree, microbatches: int) -> ArrayTree:
    """``[P, ...] -> [M, P / M, ...]``: prompt ``i`` goes to microbatch ``i % M``.

    The split is strided, so that on a mesh each microbatch still has prompts on every device.
    """
    return jax.tree.map(
        lambda x: jnp.swapaxes(x.reshape(-1, microbatches, *x.shape[1:]), 0, 1), batch
    )


def join_microbatches(batches: ArrayTree) -> ArrayTree:
    """The inverse of :func:`split_microbatches`."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), batches)


def trained_first(mask: Array, microbatches: int) -> Array:
    """An order ``[P / M, M]`` within every M neighbors: groups with a token to train on come first.

    :func:`split_microbatches` gives each microbatch one of every M neighbors. If few groups train,
    the last microbatches have no token to train on, and :func:`accumulate_gradients` skips them.
    Neighbors are on the same device of a mesh.
    """
    trains = jnp.any(mask, axis=tuple(range(1, mask.ndim))).reshape(-1, microbatches)
    return jnp.argsort(~trains, axis=1, stable=True)


def reorder(batch: ArrayTree, order: Array) -> ArrayTree:
    """Rearranges the neighbors of arrays ``[P, ...]`` by an order ``[P / M, M]``."""

    def of_leaf(x: Array) -> Array:
        neighbors = x.reshape(*order.shape, *x.shape[1:])
        index = order.reshape(*order.shape, *(1,) * (x.ndim - 1))
        return jnp.take_along_axis(neighbors, index, axis=1).reshape(x.shape)

    return jax.tree.map(of_leaf, batch)


def map_microbatches(function: Callable, batch: Batch, microbatches: int) -> ArrayTree:
    """Applies ``function`` to the full batch, one microbatch after the other."""
    if microbatches == 1:
        return function(batch)
    parts = split_microbatches(batch, microbatches)
    _, out = jax.lax.scan(lambda _, part: (None, function(part)), None, parts)
    return join_microbatches(out)


def accumulate_gradients(
    loss: Callable, params: ArrayTree, batch: Batch, microbatches: int
) -> tuple[Array, Any, ArrayTree]:
    """Value, auxiliary output and float32 gradient of a loss, summed over microbatches.

    Args:
      loss: ``(params, batch) -> (value, aux)``.
      params: The parameters to differentiate with respect to.
      batch: ``[P, ...]``.
      microbatches: Number of sets of full groups that are processed one after the other. A set in
        which no token trains costs almost nothing; groups are ordered to make such sets common,
        unless a flat packing has ordered them already.
    """
    grad = jax.value_and_grad(loss, has_aux=True)
    if microbatches == 1:
        (value, aux), grads = grad(params, batch)
        return value, aux, trees.cast(spread_update(grads), jnp.float32)
    grad = jax.jit(grad, inline=True)  # traced once for its values and for their shapes

    def add(total, part):
        def trained(total):
            (value, aux), grads = grad(params, part)
            added = jax.tree.map(
                lambda a, g: a + g.astype(jnp.float32), total[1], spread_update(grads)
            )
            return (total[0] + value, added), aux

        def untrained(total):
            (_, aux), _ = jax.eval_shape(grad, params, part)
            return total, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), aux)

        return jax.lax.cond(jnp.any(part.mask), trained, untrained, total)

    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
    start = (jnp.float32(0), spread_update(zeros))
    if isinstance(batch.packing, FlatPacking):  # whose rows belong to the microbatch of the plan
        (value, grads), aux = jax.lax.scan(add, start, split_microbatches(batch, microbatches))
        return value, join_microbatches(aux), grads
    order = trained_first(batch.mask, microbatches)
    parts = split_microbatches(reorder(batch, order), microbatches)
    (value, grads), aux = jax.lax.scan(add, start, parts)
    return value, reorder(join_microbatches(aux), jnp.argsort(order, axis=1)), grads


def pack_batch(
    batch: Batch,
    packing: str,
    *,
    model: Model,
    passes: Passes | None = None,
    shards: int = 1,
    shared_prefix_len: int = 0,
    tokens_per_microbatch: int | None = None,
    least_saved: int = LEAST_SAVED,
) -> tuple[Batch, dict[str, float]]:
    """Packs the batch into as few rows as its tokens need, if that saves enough.

    The choice depends on the arguments alone, so a run resumed with as many steps packs as before.

    Args:
      batch: On the host, not sharded.
      packing: How rows are shared:

        - "flat": by prompts and responses of any groups, where what begins alike is stored once.
        - "always": by the responses to one prompt.
        - "tree": by the responses to one prompt, whose common beginnings are stored once.
        - "never": not at all, one row for each response.
        - "auto": as "flat" if the model reads trees of prompts, else as "always"; not at all if
          more than 0.8 of the cells remain, fewer than 512 cells are saved ("flat"; else 4,096
          cells of responses), or the model cannot tell apart what shares a row. With a
          ``shared_prefix_len`` on one device, "flat" whatever it saves: without it a step has three
          passes over the layers, of the beginning, the prompts and the responses.

        A batch that already has a packing, such as one with rewritten responses, is unchanged.
      model: The model being trained.
      passes: How the batch becomes optimizer steps; None for one step.
      shards: Number of devices that the groups are split over.
      shared_prefix_len: Number of first tokens that all prompts share; see
        :func:`~jaxrl_llm.train.models.score.score`.
      tokens_per_microbatch: The maximum number of cells of a microbatch on each device. Rows are
        then flat, and ``passes`` says only how many minibatches there are: a minibatch is divided
        into the smallest number of microbatches of equally many groups that do not exceed it.
      least_saved: The fewest cells for which flat rows take a smaller size, which is compiled; see
        :func:`least_saved_in`.

    Returns:
      The batch, with its ``packing`` or unchanged; and metrics by their names in metrics.jsonl:

      - ``padding``: share of the cells, of prompts and responses, that hold no token.
      - ``packed``: number of cells relative to one row for each response; 1 without packing.

    Raises:
      ValueError: If ``packing`` is unknown, ``tokens_per_microbatch`` is below the cells of a
        group, or the batch already has a packing that microbatches of tokens cannot replace.

    Example:
      >>> import numpy as np
      >>> import jaxrl_llm as jr
      >>> mask = np.arange(4) < np.array([[[4], [1], [2], [1]]])
      >>> batch = jr.recipes.Batch(
      ...     tokens=np.ones(mask.shape, int), mask=mask, rewards=np.zeros((1, 4)),
      ...     where=np.ones((1, 4), bool), prompt_tokens=np.ones((1, 2), int),
      ...     prompt_mask=np.ones((1, 2), bool))
      >>> model, _ = jr.testing.tiny_model()
      >>> batch, numbers = jr.train.pack_batch(batch, "always", model=model)
      >>> batch.packing.members.tolist(), numbers
      ([[[0, 0, 0, 0], [2, 2, 1, 3]]], {'padding': 0.0, 'packed': 0.5555555555555556})
    """
    checks.check_option("pack_batch", "packing", packing, PACKING)
    passes = Passes() if passes is None else passes
    mask, prompt_mask = np.asarray(batch.mask), np.asarray(batch.prompt_mask)
    plan: Layout | None = batch.packing
    rows = _FlatRows(shards, shared_prefix_len, least_saved)
    if tokens_per_microbatch is not None:
        if plan is not None:
            raise ValueError(
                "pack_batch: tokens_per_microbatch cannot be used with responses whose earlier "
                "turns a chat template or an environment rewrites; use microbatches."
            )
        plan = _plan_by_tokens(batch, model, passes, rows, tokens_per_microbatch)
    elif plan is None and packing != "never":
        plan = _plan(batch, packing, model, passes, rows)
    full, prompt_cells = mask.size + prompt_mask.size, prompt_mask.sum()
    # Count cells up to the last token of the mask: the model reads those in between.
    tokens = np.maximum.accumulate(mask[..., ::-1], axis=-1).sum()
    cells = full
    if isinstance(plan, FlatPacking):
        cells = plan.num_cells
        prompt_cells, tokens = ((x >= 0).sum() for x in (plan.prompt_sources, plan.sources))
    elif plan is not None:
        cells = plan[0].size + prompt_mask.size
        if isinstance(plan, Tree) and plan.parents is None:
            tokens = (plan.sources >= 0).sum()
    numbers = {"padding": float(1 - (tokens + prompt_cells) / cells), "packed": cells / full}
    return batch.replace(packing=plan), numbers


def least_saved_in(steps: int) -> int:
    """The fewest cells that a smaller shape of flat rows must save in a run of so many steps.

    Each shape is compiled once, so the fewer steps there are, the more it must save in each:
    ``8192 / steps``, at least 128.

    Example:
      >>> from jaxrl_llm.train.batches import least_saved_in
      >>> [least_saved_in(steps) for steps in (8, 40, 1000)]
      [1024, 205, 128]
    """
    return max(LEAST_SAVED, math.ceil(_SAVED_IN_A_RUN / steps))


class _FlatRows(NamedTuple):
    """The arguments of :func:`pack_batch` that shape flat rows."""

    shards: int
    shared_prefix_len: int
    least_saved: int


def _plan(
    batch: Batch, packing: str, model: Model, passes: Passes, rows: _FlatRows
) -> Layout | None:
    """The layout that ``packing`` gives a batch without one; see :func:`pack_batch`."""
    mask, tokens = np.asarray(batch.mask), np.asarray(batch.tokens)
    prompts = np.asarray(batch.prompt_tokens), np.asarray(batch.prompt_mask)
    same = None  # must be equal besides the tokens
    if (sets := batch.support) is not None:
        same = np.asarray(sets.bits) if sets.ids is None else np.sort(sets.ids, axis=-1)
    if batch.experts is not None:
        experts = np.asarray(batch.experts, np.int64).reshape(*mask.shape, -1)
        same = experts if same is None else np.concatenate([np.int64(same), experts], axis=-1)
    if packing == "flat" or (packing == "auto" and model.reads_prompt_trees):
        full, most = mask.size + prompts[1].size, np.inf
        three_passes = rows.shared_prefix_len > 0 and rows.shards == 1
        if packing == "auto" and not three_passes:
            most = min(_MAX_SHARE, 1 - _MIN_SAVED_FLAT / full)
        if most <= 0:
            return None
        return plan_flat(
            tokens,
            mask,
            *prompts,
            same=same,
            span=_span(model),
            microbatches=passes.minibatches * passes.accumulated,
            most=most,
            shards=rows.shards,
            shared_prefix_len=rows.shared_prefix_len,
            least_saved=rows.least_saved,
        )
    if packing == "tree":
        return plan_tree(tokens, mask, same=same)
    most = 1.0
    if packing == "auto":
        most = min(_MAX_SHARE, 1 - MIN_SAVED / mask.size) if model.reads_segments else 0.0
    return plan_packing(mask, most=most) if most > 0 else None


def _plan_by_tokens(
    batch: Batch, model: Model, passes: Passes, rows: _FlatRows, budget: int
) -> FlatPacking:
    """Flat rows in the smallest number of microbatches within a budget of cells on each device."""
    groups, cells = batch.tokens.shape[0] // (passes.minibatches * rows.shards), 0
    for count in (n for n in range(1, groups + 1) if groups % n == 0):
        parts = passes._replace(microbatches=passes.minibatches * count)
        flat = cast("FlatPacking", _plan(batch, "flat", model, parts, rows))
        cells = flat.num_cells // (flat.microbatches * rows.shards)
        if cells <= budget:
            return dataclasses.replace(flat, budget=budget)
    raise ValueError(
        f"pack_batch: a microbatch of one group on each device takes {cells} cells, more than "
        f"tokens_per_microbatch {budget}."
    )


def check_group_fits(
    function: str, model: Model, budget: int, sizes: tuple[int, int, int], shards: int
) -> None:
    """Raises ValueError unless each group ``(Lp, G, T)`` fits in a microbatch of so many cells."""
    length, group_size, response = sizes
    mask = np.ones((shards, group_size, response), bool)
    distinct = np.arange(mask.size, dtype=np.int64).reshape(mask.shape)
    prompts = np.arange(shards * length, dtype=np.int64).reshape(shards, length)
    present = np.ones(prompts.shape, bool)
    flat = plan_flat(
        distinct, mask, prompts, present, span=_span(model), shards=shards, most=np.inf
    )
    needed = cast("FlatPacking", flat).num_cells // shards
    if needed > budget:
        raise ValueError(
            f"{function}: tokens_per_microbatch must be at least the {needed} cells of a prompt of "
            f"{length} tokens and {group_size} responses of {response}; got {budget}."
        )


def _span(model: Model) -> int:
    """Number of keys for which attention costs about as much as the other products of a token.

    With H heads of d and a width of H d, a layer takes about 24 (H d)^2 operations per token and
    4 H d per token and key, which is 6 H d keys. Scores are slower than products: a third of it.
    """
    config = model.config
    heads = getattr(config, "num_heads", config.num_kv_heads)
    return max(256, 2 * heads * config.head_dim)


def check_reads_rows(function: str, model: Model, packing: str, *, what: str = "model") -> None:
    """Raises ValueError unless a model can read the rows that ``packing`` always makes."""
    needs = {"always": "reads_segments", "tree": "reads_trees", "flat": "reads_prompt_trees"}
    for name, needed in needs.items():
        if packing == name and not getattr(model, needed):
            raise ValueError(f'{function}: packing "{name}" needs a {what} whose {needed} is True.')


def check_rows(config: Any, recipe: Any) -> None:
    """Raises ValueError for options of rows and microbatches that exclude one another."""
    width = width_of(recipe.collector, config.sampling.group_size)
    if config.packing in ("always", "tree") and width == 1:
        raise ValueError(
            f'config: packing "{config.packing}" has no effect with one rollout per prompt.'
        )
    if config.tokens_per_microbatch is None:
        return
    if config.microbatches != 1:
        raise ValueError(
            "config: microbatches has no effect with tokens_per_microbatch, which chooses "
            "their number for each batch."
        )
    if config.packing not in ("auto", "flat"):
        raise ValueError(
            "config: tokens_per_microbatch needs flat rows; got packing "
            f'"{config.packing}", use "auto" or "flat".'
        )
