"""Inputs of the battery: small batches with every kind of group, and functions to compare them."""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import Array, ArrayTree
from jaxrl_llm.diffusion import FlowLikelihood
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.recipes.inputs import EXTRAS
from jaxrl_llm.recipes.wiring import (
    ANSWER_TEXTS,
    COMPUTED_BEFORE,
    DRAW_LOGP,
    STATISTICS,
    TEACHER_TEXTS,
    Reader,
    statistic_shapes,
    unfilled,
)
from jaxrl_llm.testing.extras import G, P, T, make_extras

# For the random numbers that a recipe draws while it prepares a batch.
KEY = jax.random.key(7)

Extras = Mapping[str, Array] | None
"""Arrays that a recipe reads under names of its own, see :func:`make_case`."""


class Case(NamedTuple):
    """A batch before ``prepare``, and the outputs of a model for it.

    The batch holds all optional log-probabilities. ``logp`` (of the policy being trained) and
    ``entropy`` are float32 ``[P, G, T]``. ``statistics`` maps names to values for the recipe's
    statistics of the vocabulary.
    """

    batch: Batch
    logp: Array
    entropy: Array
    statistics: Mapping[str, Array] = {}


def make_case(
    seed: int = 0,
    *,
    vocab_size: int = 259,
    recipe: Recipe | None = None,
    extras: Extras = None,
) -> Case:
    """Eight groups of four, six tokens: ratios on both sides of every clip, unequal lengths.

    The best and the worst rollout of four groups have one ratio of about 13 or 1/13 each: of
    ``logp`` to ``old_logp`` in groups 4 and 7, of ``old_logp`` to ``behavior_logp`` in 1 and 3.
    Group 2 has equal rewards. ``where`` keeps three rollouts of group 4, one of group 5 and none of
    group 6. Group 7 has an empty response. The batch can be split into 2 or 4 parts, either of
    neighbors or (as in a train step) of every second or fourth prompt: no two parts have the same
    number of tokens, and the largest has at least 1.5 times as many as the smallest. Masked cells
    hold ordinary numbers.

    Args:
      seed: Seed of the random numbers.
      vocab_size: Tokens are below this number.
      recipe: Recipe that determines the number of critic heads and the statistics: those of the
        policy, and in the batch those of the old policy, the reference and the teacher.
      extras: Arrays that the recipe reads under names of its own: ``[8, ...]``, ``[8, 4, ...]``
        with one value per rollout, or ``[8, 4, 6, ...]`` per token.

    Raises:
      ValueError: If the recipe reads a name of its own that ``extras`` lacks, or does not read one
        that it has.
    """
    heads = 1 if recipe is None or recipe.critic is None else recipe.critic.heads
    case, extras = jax.device_put(_host_case(seed, vocab_size, heads)), extras or {}
    if recipe is None:
        return case._replace(batch=_with_extras(case.batch, extras))
    case = case._replace(batch=_with_own_extras(recipe, case.batch, extras, seed))
    return case._replace(statistics=made_up_statistics(recipe, case.batch, seed))


def own_names(recipe: Recipe) -> frozenset[str]:
    """The names of extras that only the recipe defines and that ``prepare`` does not compute."""
    names = {*recipe.inputs, *recipe.computed_from(*COMPUTED_BEFORE)}
    return frozenset(names - {*EXTRAS, TEACHER_TEXTS, ANSWER_TEXTS})


def _with_extras(batch: Batch, extras: Mapping[str, Array]) -> Batch:
    """The batch with more extras. Raises ValueError if one has not an entry for each prompt."""
    more = {name: jnp.asarray(x) for name, x in extras.items()}
    return batch.with_extras(more).check() if more else batch


def _with_own_extras(recipe: Recipe, batch: Batch, extras: Mapping[str, Array], seed: int) -> Batch:
    """The batch with the extras of the recipe's own names: ``extras``, and random statistics."""
    names = own_names(recipe)
    if unknown := sorted(set(extras) - names):
        raise ValueError(
            f"make_case: extras has {unknown[0]!r}, which is not an input of recipe "
            f"{recipe.name!r} under a name of its own; it has {sorted(names) or 'none'}."
        )
    batch, rng = _with_extras(batch, extras), np.random.default_rng(seed + 3)
    statistics = recipe.computed_from(*STATISTICS).keys()
    if missing := sorted((names & recipe.required_fields) - statistics - batch.extras.keys()):
        raise ValueError(
            f"Recipe {recipe.name!r} reads {missing[0]!r}, which the battery cannot make up; pass "
            f"extras={{{missing[0]!r}: array}} of shape [{P}, ...], such as [{P}, {G}] for "
            f"rollouts or [{P}, {G}, {T}] for tokens."
        )
    for source in STATISTICS:  # in this order, since one may read another
        if absent := recipe.computed_from(source).keys() - batch.extras.keys():
            shapes = statistic_shapes(recipe, batch, source)
            made = {name: _made_up(rng, shapes[name]) for name in sorted(absent)}
            batch = _with_extras(batch, made)
    return batch


def _made_up(rng: np.random.Generator, shape: jax.ShapeDtypeStruct) -> Array:
    """Random numbers of a shape and dtype: like log-probabilities, token ids or choices."""
    if jnp.issubdtype(shape.dtype, jnp.floating):
        values = -rng.uniform(1.5, 4.0, shape.shape)
    else:
        values = rng.integers(0, 2 if shape.dtype == jnp.bool_ else 100, shape.shape)
    return jnp.asarray(values, shape.dtype)


@functools.lru_cache(maxsize=32)
def _host_case(seed: int, vocab_size: int, heads: int) -> Case:
    """The case of :func:`make_case` without statistics, in NumPy; a battery asks for few."""
    rng = np.random.default_rng(seed)
    least = np.array([T - 1, 1, T - 1, 2, T - 2, 1, 1, 1])[:, None]
    lengths = rng.integers(least, least + 2, (P, G))
    lengths[7, 1] = 0
    rewards = rng.uniform(0.0, 1.0, (P, G))
    rewards[2] = 0.1
    rewards[3] = [1.0, 0.0, 0.0, 1.0]
    where = np.ones((P, G), bool)
    where[4, 3] = False
    where[5, 1:] = False
    where[6] = False
    prompt_lengths = rng.integers(2, 6, (P, 1))
    logp = rng.normal(-1.5, 0.5, (P, G, T))
    of_old, of_behavior = far_shifts(rewards, where & (lengths > 0))
    logp -= np.maximum(of_behavior, 0)  # so that the log-probabilities above it are below 0 too

    def near(shift: float | np.ndarray = 0.0) -> np.ndarray:
        return np.asarray(logp + shift + rng.normal(0.0, 0.3, logp.shape), np.float32)

    batch = Batch(
        tokens=np.asarray(rng.integers(0, vocab_size, (P, G, T)), np.int32),
        mask=np.arange(T) < lengths[..., None],
        rewards=np.asarray(rewards, np.float32),
        where=where,
        prompt_tokens=np.asarray(rng.integers(0, vocab_size, (P, 5)), np.int32),
        prompt_mask=np.arange(5) < prompt_lengths,
        old_logp=near(of_old),
        behavior_logp=near(of_behavior),
        ref_logp=near(),
    )
    entropy = np.asarray(rng.uniform(0.5, 2.0, logp.shape), np.float32)
    components = {
        "correct": np.asarray(rewards > 0.5, np.float32),
        "format": np.asarray(rng.uniform(0.0, 1.0, (P, G)), np.float32),
    }
    of_plans = np.random.default_rng(seed + 2).uniform(0.0, 1.0, (3, P, G))
    names = ("task", "grounding", "history")
    components |= {k: np.float32(x) for k, x in zip(names, of_plans, strict=True)}
    batch = batch.replace(
        reward_components=components, extras=make_extras(batch, seed=seed, heads=heads)
    )
    return Case(batch, np.asarray(logp, np.float32), entropy)


def far_shifts(rewards: np.ndarray, where: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What to add to ``old_logp`` and ``behavior_logp``, ``[P, G, T]``, for ratios far from 1.

    ``where`` are the rollouts that take part and have a token. Both move where the policy has, so
    that a rule that compares them keeps these tokens. Some of ``behavior_logp`` move alone, as
    those of a sampler that disagrees with the trainer.
    """
    old, behavior = np.zeros((2, P, G, T))
    far = ((7, 0, 2.6, True), (4, 1, -2.6, True), (1, 0, 2.6, False), (3, 1, -2.6, False))
    for group, token, shift, both in far:
        best = np.argmax(np.where(where[group], rewards[group], -np.inf))
        worst = np.argmin(np.where(where[group], rewards[group], np.inf))
        behavior[group, [best, worst], token] = shift
        old[group, [best, worst], token] = shift if both else 0.0
    return old, behavior


def made_up_statistics(recipe: Recipe, batch: Batch, seed: int = 0) -> dict[str, Array]:
    """Random numbers, like log-probabilities, for the statistics of a recipe."""
    rng = np.random.default_rng(seed + 1)
    statistics = {
        name: _made_up(rng, shape)
        for name, shape in statistic_shapes(recipe, with_computed(recipe, batch)).items()
    }
    if "old_draw_logp" in recipe.required_fields:
        old = np.asarray(batch.extras["old_draw_logp"])
        moved = np.where(old == 0, 0.0, old + rng.normal(0.0, 0.3, old.shape))
        statistics[DRAW_LOGP] = jnp.asarray(moved, jnp.float32)
    if isinstance(recipe.likelihood, FlowLikelihood):
        after, flat = np.asarray(batch.extras["latents"])[..., 1, :], batch.mask.shape
        for name, axes in recipe.likelihood.statistics:
            made = after + rng.normal(0.0, 0.3, after.shape) if axes else np.full(flat, 0.8)
            statistics[name] = jnp.asarray(made, jnp.float32)
    return statistics


def with_computed(recipe: Recipe, batch: Batch, prepared: Batch | None = None) -> Batch:
    """The batch with the entries that ``prepare`` computes and a statistic of the policy reads.

    ``prepared`` is the batch as prepared before, for another key than that of these checks.
    """
    readers = [
        Reader("", f, ("logits", "targets")) for f in recipe.computed_from("policy").values()
    ]
    read = {p.name for reader in readers for p in unfilled(reader)}
    names = read & set(recipe.computed_from("controller", "batch", "update"))
    if not names:
        return batch
    if prepared is None:
        prepared, _ = compiled(recipe).prepare(batch.replace(packing=None), recipe.init())
    return batch.with_extras({x: prepared.extras[x] for x in names})


class Functions(NamedTuple):
    """A recipe's :func:`prepare` and :func:`loss_and_grad`, compiled or not."""

    prepare: Callable
    loss_and_grad: Callable


def loss_and_grad(recipe: Recipe) -> Callable:
    """``(logp, entropy, statistics, prepared batch) -> (loss, gradients in the first three)``."""

    def loss(logp, entropy, statistics, batch):
        return recipe.loss(logp, batch, entropy=entropy, statistics=statistics)

    return jax.value_and_grad(loss, argnums=(0, 1, 2))


def prepare(recipe: Recipe) -> Callable:
    """``(batch, state) -> (batch, state)``, not compiled; random draws always use the same key."""
    key = KEY if recipe.draws else None
    return lambda batch, state: recipe.prepare(batch, state, key=key)


@functools.lru_cache(maxsize=64)
def compiled(recipe: Recipe) -> Functions:
    """The functions of a recipe, compiled once for all checks."""
    return Functions(jax.jit(prepare(recipe)), jax.jit(loss_and_grad(recipe)))


class Result(NamedTuple):
    """The results of a recipe on a case.

    ``batch`` is prepared. ``grads`` are with respect to logp, entropy and statistics. ``state`` is
    the state after ``prepare``.
    """

    batch: Batch
    loss: Array
    grads: tuple[Array, Array, dict[str, Array]]
    state: ArrayTree

    def prepared(self, recipe: Recipe) -> dict[str, ArrayTree]:
        """Everything that ``prepare`` of the recipe computed, including the state."""
        fields = ("where", "mask", "advantages", "weights", "correction")
        arrays = {name: getattr(self.batch, name) for name in fields}
        # The extras of the input batch may hold junk.
        inputs = {*EXTRAS, *own_names(recipe)}
        extras = {name: x for name, x in self.batch.extras.items() if name not in inputs}
        return arrays | {"state": self.state, "extras": extras}


def step(functions: Functions, case: Case, state: ArrayTree) -> Result:
    """Prepared batch, loss, gradients and next state of a case, from a state."""
    prepared, state = functions.prepare(case.batch, state)
    loss, grads = functions.loss_and_grad(case.logp, case.entropy, case.statistics, prepared)
    return Result(prepared, loss, grads, state)


def evaluate(recipe: Recipe, case: Case) -> Result:
    """The result of a compiled step from the initial state."""
    return step(compiled(recipe), case, recipe.init())


def fail(check: str, recipe: Recipe, words: str) -> None:
    """Raises the AssertionError of a check."""
    raise AssertionError(f"{check}: recipe {recipe.name!r}: {words}")


def expect_close(
    check: str,
    recipe: Recipe,
    what: str,
    got: ArrayTree,
    want: ArrayTree,
    *,
    tolerance: float = 1e-5,
    least_scale: float = 0.0,
) -> None:
    """Raises unless two trees agree within ``tolerance`` times the largest value of each leaf.

    ``least_scale`` replaces a smaller largest value, since a sum of terms that cancel has an error
    of the size of its terms.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(got)
    for (path, a), b in zip(flat, jax.tree.leaves(want), strict=True):
        a, b = _numbers(a), _numbers(b)
        where = f"{what}{jax.tree_util.keystr(path)}"
        if a.shape != b.shape:
            fail(check, recipe, f"{where} has shape {a.shape} instead of {b.shape}.")
        if not np.isfinite(a).all():
            fail(check, recipe, f"{where} holds {a[~np.isfinite(a)][0]}.")
        scale = np.abs(b).max(initial=0.0)
        gap = np.abs(a - b).max(initial=0.0)
        if not gap <= tolerance * max(scale, least_scale) + 1e-7:
            fail(check, recipe, f"{where} differs by {gap:.2g}, of values up to {scale:.2g}.")


def expect_close_loss(
    check: str, recipe: Recipe, what: str, got: Array, want: Array, *, tolerance: float = 1e-5
) -> None:
    """Raises unless two losses agree; a loss sums terms of about the size of the advantages."""
    expect_close(check, recipe, what, got, want, tolerance=tolerance, least_scale=0.1)


def _numbers(x) -> np.ndarray:
    """A leaf as float64; for a random key, its bits."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x, np.float64)
