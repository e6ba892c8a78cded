"""Checks of a recipe on arrays alone: no model, a few small compilations.

Each check raises an AssertionError that names the check, the recipe and the number that differs.
``extras`` are arrays that the recipe reads under names of its own, see ``cases.make_case``.
"""

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import Array, accepted, call_with, traits_of
from jaxrl_llm.models.sharding import batch_sharding
from jaxrl_llm.recipes import Batch, Recipe, wiring
from jaxrl_llm.recipes.inputs import EXTRAS
from jaxrl_llm.testing import cases
from jaxrl_llm.testing.cases import (
    Case,
    Extras,
    Result,
    compiled,
    evaluate,
    expect_close,
    expect_close_loss,
    fail,
    make_case,
)
from jaxrl_llm.testing.extras import PARAPHRASES
from jaxrl_llm.train.mesh import make_mesh

MeshSizes = Mapping[str, Any]  # numbers of devices by axis
# A mesh that needs more devices than exist is skipped.
MESHES: tuple[MeshSizes, ...] = (
    {"data": 8},
    {"fsdp": 8},
    {"tensor": 8},
    {"data": 4, "fsdp": 2},
    {"data": 2, "tensor": 4},
    {"data": 2, "fsdp": 2, "tensor": 2},
)
# The batch is split over 4 devices, which is neither the size of an axis nor that of the mesh.
CROSSED = MESHES[-1:]


def check_microbatches(recipe: Recipe, *, extras: Extras = None) -> None:
    """The gradient of a batch is the sum of those of 2 or 4 microbatches with unequal token counts.

    As in a train step, a microbatch holds every second or fourth prompt. The check fails if a loss
    divides by something that it computes from its microbatch.
    """
    case = make_case(recipe=recipe, extras=extras)
    full = evaluate(recipe, case)
    part_loss = compiled(recipe).loss_and_grad
    arrays = (case.logp, case.entropy, case.statistics, full.batch)
    arrays, full_grads = jax.tree.map(np.asarray, (arrays, full.grads))
    for count in (2, 4):
        total, where = 0.0, f"in {count} microbatches"
        for i in range(count):
            part, want = jax.tree.map(lambda x, i=i, n=count: x[i::n], (arrays, full_grads))
            logp, entropy, statistics, batch = part
            loss, grads = part_loss(logp, entropy, statistics, batch)
            expect_close("check_microbatches", recipe, f"gradient {where}", grads, want)
            total += loss
        expect_close_loss("check_microbatches", recipe, f"loss {where}", total, full.loss)


def meshes(sizes: Sequence[MeshSizes]) -> list[jax.sharding.Mesh]:
    """The meshes of these sizes for which enough devices exist; warns if there are none."""
    devices = jax.devices()
    available = [
        make_mesh(**axes, devices=devices[: math.prod(axes.values())])
        for axes in sizes
        if math.prod(axes.values()) <= len(devices)
    ]
    if not available:
        warnings.warn(
            "The battery's mesh checks need 8 devices and were left out; on a CPU set "
            "JAX_NUM_CPU_DEVICES=8 before jax is imported.",
            stacklevel=3,
        )
    return available


def check_devices(
    recipe: Recipe, *, sizes: Sequence[MeshSizes] = CROSSED, extras: Extras = None
) -> None:
    """Loss and gradient on eight devices, with the prompts split over them, equal those on one.

    ``sizes`` is :data:`MESHES` or a subset. The default mesh has two devices on three axes and
    splits the batch into four parts. A function that assumes a split over one axis, or over all
    devices, fails.
    """
    case = make_case(recipe=recipe, extras=extras)
    want = evaluate(recipe, case)
    for mesh in meshes(sizes):
        with jax.set_mesh(mesh):  # a function may read the mesh around it
            got = evaluate(recipe, jax.device_put(case, batch_sharding(mesh)))
        where = f"on the mesh {dict(mesh.shape)}"
        expect_same("check_devices", recipe, where, got, want, tolerance=1e-5)


def expect_same(
    check: str, recipe: Recipe, where: str, got: Result, want: Result, *, tolerance: float
) -> None:
    """Raises unless two results agree in the prepared batch, the loss, the gradient and the state.

    ``tolerance`` applies to the loss and the gradient. The output of ``prepare`` is compared at the
    default tolerance, since the order of its sums may differ.
    """
    expect_close(check, recipe, f"batch {where}", got.prepared(recipe), want.prepared(recipe))
    expect_close_loss(check, recipe, f"loss {where}", got.loss, want.loss, tolerance=tolerance)
    expect_close(check, recipe, f"gradient {where}", got.grads, want.grads, tolerance=tolerance)


def with_junk(case: Case, junk: float) -> Case:
    """The case with ``junk`` in masked cells, and ids outside the vocabulary as masked tokens.

    Of rollouts that take no part, and of turns and unit tests that do not exist, numbers are junk,
    ids are others and verdicts are reversed. Rollouts without an answer have other ids below 0.
    """
    batch = case.batch
    mask = batch.mask & batch.where[..., None]

    def fill(x):
        return jnp.where(mask, x, junk)

    components = batch.reward_components or {}
    components = {name: jnp.where(batch.where, x, junk) for name, x in components.items()}
    extras = {k: _junk_in(x, _existing(k, x, batch, mask), junk) for k, x in batch.extras.items()}
    answers = extras["answer_ids"]
    extras["answer_ids"] = jnp.where(answers < 0, answers - jnp.arange(cases.G), answers)
    # Its columns are the rollouts of all paraphrases of a question.
    columns = batch.where.reshape(-1, 1, PARAPHRASES * cases.G)
    columns = jnp.repeat(columns, PARAPHRASES, axis=0)
    extras["similarity"] = jnp.where(columns, extras["similarity"], junk)
    batch = batch.replace(
        old_logp=fill(batch.old_logp),
        behavior_logp=fill(batch.behavior_logp),
        ref_logp=fill(batch.ref_logp),
        rewards=jnp.where(batch.where, batch.rewards, junk),
        tokens=jnp.where(mask, batch.tokens, -1_000_000),
        prompt_tokens=jnp.where(batch.prompt_mask, batch.prompt_tokens, 1_000_000),
        reward_components=components,
        extras=extras,
    )
    statistics = {
        k: _junk_in(x, _existing(k, x, batch, mask), junk) for k, x in case.statistics.items()
    }
    return Case(batch, fill(case.logp), fill(case.entropy), statistics)


def _existing(name: str, x: Array, batch: Batch, mask: Array) -> Array | None:
    """Which cells of an extra or a statistic exist, on its first axes; None for all."""
    axes = EXTRAS[name].axes if name in EXTRAS else ""
    if x.shape[:2] != batch.where.shape:
        return None
    if axes.startswith("PGK") and name not in ("turn_where", "segment_where"):
        of_segments = name == "prefix_values"
        turns = batch.extras["segment_where" if of_segments else "turn_where"]
        there = batch.where[..., None] & turns
        if "U" in axes:
            there = there[..., None] & batch.extras["test_where"][:, None, None]
        return there
    if x.shape[:3] == mask.shape:
        return mask if jnp.issubdtype(x.dtype, jnp.floating) else None
    # Masks of other axes, and ids of tokens, are as a run makes them.
    described = axes in ("", "PG", "PGK") or jnp.issubdtype(x.dtype, jnp.floating)
    return batch.where if described else None


def _junk_in(x: Array, exists: Array | None, junk: float) -> Array:
    """An array with ``junk``, other integers or the opposite where its cells do not exist."""
    if exists is None:
        return x
    floating, logical = jnp.issubdtype(x.dtype, jnp.floating), x.dtype == jnp.bool_
    other = junk if floating else ~x if logical else x + 1
    return jnp.where(exists.reshape(exists.shape + (1,) * (x.ndim - exists.ndim)), x, other)


def check_junk(recipe: Recipe, *, extras: Extras = None) -> None:
    """1e4, NaN and infinities in masked cells do not change the loss, the gradient or the state.

    Nor do the ids and verdicts of rollouts and turns that do not exist; see :func:`with_junk`.
    """
    case = make_case(recipe=recipe, extras=extras)
    want = evaluate(recipe, case)
    masked = ~np.asarray(want.batch.mask)
    for junk in (1e4, np.nan, np.inf, -np.inf):
        got = evaluate(recipe, with_junk(case, junk))
        where = f"with {junk} in masked cells"
        expect_same("check_junk", recipe, where, got, want, tolerance=1e-6)
        if any(np.asarray(grad)[masked].any() for grad in jax.tree.leaves(got.grads)):
            fail("check_junk", recipe, "a masked cell has a gradient.")


def check_permutation(recipe: Recipe, *, extras: Extras = None) -> None:
    """Permuting the groups, or the members of each group, only permutes the result.

    The state does not depend on the order of the batch. A recipe that draws random numbers assigns
    them to positions. For such a recipe the property holds only in distribution and is not checked.
    A recipe that compares neighbors of a group, as ``recipes.polychromic(sets="disjoint")`` does,
    reads their order and fails this check; leave the check out with ``only``.
    """
    if recipe.draws:
        return
    case = make_case(recipe=recipe, extras=extras)
    before = evaluate(recipe, case)
    # On the host, where permuting a hundred small arrays is fast.
    case, before = jax.tree.map(np.asarray, (case, before))
    groups, members = np.array([3, 0, 6, 1, 7, 2, 5, 4]), np.array([2, 0, 3, 1])
    columns = np.arange(PARAPHRASES * cases.G).reshape(PARAPHRASES, cases.G)
    if wiring.prepare_names(recipe, "similarity"):
        groups = np.array([5, 4, 1, 0, 7, 6, 3, 2])  # the paraphrases of a question stay together

    def permute_groups(tree):
        return jax.tree.map(lambda x: x[groups], tree)

    def permute_members(tree):
        # A second axis of size G is the member axis; prompts have another length.
        return jax.tree.map(lambda x: x[:, members] if x.shape[1:2] == (cases.G,) else x, tree)

    ways = (
        ("groups", permute_groups, columns[::-1]),
        ("members", permute_members, columns[:, members]),
    )
    for what, permute, columns in ways:
        permuted = permute(case)
        extras = dict(permuted.batch.extras)
        extras["similarity"] = extras["similarity"][..., columns.ravel()]
        got = evaluate(recipe, permuted._replace(batch=permuted.batch.replace(extras=extras)))
        want = before._replace(batch=permute(before.batch), grads=permute(before.grads))
        where = f"after a permutation of {what}"
        expect_same("check_permutation", recipe, where, got, want, tolerance=1e-5)


def check_degenerate_groups(recipe: Recipe, *, extras: Extras = None) -> None:
    """Groups with equal rewards, one rollout or none, and empty batches, give finite numbers.

    The docstring of each method says what a group with equal rewards gets.
    """
    name = "check_degenerate_groups"
    case = make_case(recipe=recipe, extras=extras)
    one = jnp.zeros_like(case.batch.where).at[:, 2].set(True)
    none = jnp.zeros_like(case.batch.where)
    agree = jnp.full_like(case.batch.rewards, 0.1)
    variants = {
        "groups that agree": case.batch.replace(rewards=agree, where=~none),
        "groups that agree on 0": case.batch.replace(rewards=0 * agree, where=~none),
        "groups of one": case.batch.replace(where=one),
        "empty groups": case.batch.replace(where=none),
        "empty responses": case.batch.replace(mask=jnp.zeros_like(case.batch.mask)),
    }
    for what, batch in variants.items():
        result = evaluate(recipe, case._replace(batch=batch))
        expect_same(name, recipe, f"of {what}", result, result, tolerance=0.0)


def check_jit(recipe: Recipe, *, extras: Extras = None) -> None:
    """The compiled and the uncompiled functions agree, and a second step is not traced again."""
    fast, state = compiled(recipe), recipe.init()
    slow = cases.Functions(cases.prepare(recipe), cases.loss_and_grad(recipe))
    for seed in (0, 1):
        case = make_case(seed, recipe=recipe, extras=extras)
        got, want = (cases.step(functions, case, state) for functions in (fast, slow))
        where = "of the compiled step"
        expect_same("check_jit", recipe, where, got, want, tolerance=1e-5)
        types = [jax.tree.map(jax.typeof, x) for x in (state, got.state)]
        if types[0] != types[1]:
            fail("check_jit", recipe, "the second step compiles anew: the state changes its type.")
        state = got.state


def check_precision(recipe: Recipe, *, extras: Extras = None) -> None:
    """Bfloat16 inputs give float32 statistics, equal to those of the rounded inputs in float32."""
    name = "check_precision"

    def cast(tree, dtype):
        floating = jnp.floating
        return jax.tree.map(
            lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, floating) else x, tree
        )

    low = cast(make_case(recipe=recipe, extras=extras), jnp.bfloat16)
    got, want = evaluate(recipe, low), evaluate(recipe, cast(low, jnp.float32))
    prepared = got.batch
    statistics = {"loss": got.loss, "advantages": prepared.advantages, "weights": prepared.weights}
    for what, value in statistics.items():
        if jnp.result_type(value) != jnp.float32:
            fail(name, recipe, f"{what} is {jnp.result_type(value)}, not float32.")
    expect_close(name, recipe, "batch", got.prepared(recipe), want.prepared(recipe))
    expect_close_loss(name, recipe, "loss", got.loss, want.loss)
    # The gradient has the dtype of logp, so it is rounded once.
    expect_close(name, recipe, "gradient", got.grads, want.grads, tolerance=2**-7)


@functools.lru_cache(maxsize=4)
def _penalties(recipe: Recipe) -> Callable:
    """``(logp, values, mask, weights) -> (distance to the reference, gradient of all terms)``."""

    def terms(logp, values, mask, weights, called):
        losses = [call_with(term, context={**values, "logp": logp}) for term in called]
        return sum((jnp.sum(jnp.where(mask, x, 0) * weights) for x in losses), 0.0)

    @jax.jit
    def penalties(logp, values, mask, weights):
        distances = [term for term in recipe.regularizers if "ref_logp" in accepted(term)]
        gradient = jax.grad(terms)(logp, values, mask, weights, recipe.regularizers)
        return terms(logp, values, mask, weights, distances), gradient

    return penalties


def expect_policy_gradient(check: str, recipe: Recipe, case: Case, tolerance: float) -> None:
    """Raises unless the gradient is the plain policy gradient plus that of the regularizers.

    Of texts it is that of their likelihood.

    The case must be on policy: ``old_logp`` is None or equals ``logp``, and ``ref_logp`` equals
    ``logp``. A surrogate with another objective must only be finite.
    """
    result = evaluate(recipe, case)
    prepared, grad = result.batch, result.grads[0]
    if not traits_of(recipe.surrogate).policy_gradient:
        expect_same(check, recipe, "on policy", result, result, tolerance=0.0)
        return
    weights, advantages = jnp.asarray(prepared.weights), jnp.asarray(prepared.advantages)
    if prepared.correction is not None:
        weights = weights * prepared.correction
    advantages = advantages if advantages.ndim == 3 else advantages[..., None]

    want, responses = -weights * advantages, recipe.responses(prepared)
    if recipe.regularizers:
        values = wiring.context(responses, wiring.LOSS_CONTEXT) | dict(case.statistics)
        values |= {"entropy": case.entropy, "old_logp": case.logp}
        distance, gradient = _penalties(recipe)(case.logp, values, responses.mask, prepared.weights)
        if abs(distance) > tolerance:
            fail(check, recipe, f"the distance to an equal reference is {distance:.2g}, not 0.")
        want = want + gradient
    want = jnp.where(prepared.mask & ~responses.mask, -jnp.asarray(prepared.weights), want)
    expect_close(check, recipe, "on policy, the gradient", grad, want, tolerance=tolerance)


def check_on_policy(recipe: Recipe, *, extras: Extras = None) -> None:
    """For an unchanged policy: ratio 1, the plain policy gradient, no distance to the reference.

    Some token is trained, and a correction is 1 or drops a token; a recipe that compares larger
    sets than the four rollouts of a group fails. Checked with ``old_logp`` in the batch and, unless
    the recipe requires it, without.
    """
    case = make_case(recipe=recipe, extras=extras)
    batch = case.batch.replace(ref_logp=case.logp, behavior_logp=case.logp)
    present = case._replace(batch=batch.replace(old_logp=case.logp))
    expect_policy_gradient("check_on_policy", recipe, present, 1e-5)
    if "old_logp" not in recipe.required_fields:
        absent = case._replace(batch=batch.replace(old_logp=None))
        expect_policy_gradient("check_on_policy", recipe, absent, 1e-5)
    if traits_of(recipe.surrogate).policy_gradient:
        _expect_lesson("check_on_policy", recipe, evaluate(recipe, present).batch)


def _expect_lesson(check: str, recipe: Recipe, prepared: Batch) -> None:
    """Raises if an unchanged policy learns nothing, or the correction has something to correct."""
    lesson = np.asarray(prepared.weights)
    if prepared.correction is not None:
        correction = np.asarray(prepared.correction)
        read = correction[np.asarray(prepared.mask)]
        if (off := read[np.minimum(np.abs(read), np.abs(read - 1)) > 1e-5]).size:
            fail(check, recipe, f"on policy, the correction is {off[0]:.4g}, neither 1 nor 0.")
        lesson = lesson * correction
    advantages = np.asarray(prepared.advantages)
    lesson = lesson * (advantages if advantages.ndim == 3 else advantages[..., None])
    if not lesson.any():
        words = f"on policy, it trains nothing in groups of {cases.G}"
        fail(check, recipe, f"{words}: every token has weight or advantage 0.")
