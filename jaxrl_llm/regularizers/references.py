"""Reference policies other than the first checkpoint: moving averages, resets, earlier policies.

``reference`` and ``params`` are pytrees of parameters with equal structures and leaf shapes;
otherwise ValueError is raised. A rule works leaf by leaf, computes in float32, and returns a pytree
in the dtypes of ``reference``. A product of factors (:class:`jaxrl_llm.core.low_rank.Factors`), as
a run passes those of an adapter, is one leaf of an average. A rule with an argument ``key`` gets a
key of the run's seed, the same in every step.

A rule with ``init(params) -> state`` has a state in place of ``reference``: :class:`Anchored`,
:class:`StoredPolicies`, or :class:`Iterates` for one that also changes the policy and is called as
``rule(state, params, step) -> (state, params)``.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, ArrayTree, accepted, checks, low_rank, trees


def ema_reference(
    reference: ArrayTree,
    params: ArrayTree,
    step: int | Array | None = None,
    *,
    rate: float | Array = 0.05,
    every: int = 1,
) -> ArrayTree:
    """Moves a reference a little toward the policy: an exponential moving average.

        reference = (1 - rate) * reference + rate * params   if step % every == 0 else reference

    Store the reference in float32: in bfloat16 a small step is lost to rounding. A leaf that is not
    floating point is copied from the policy. Of ``Factors`` the products are averaged, at the rank
    of the reference (``core.low_rank.average``).

    Args:
      reference, params: See the module.
      step: Number of updates so far; may be traced. With ``every=1`` it is not used.
      rate: Share of the policy in the new reference, between 0 and 1.
      every: Steps between two moves, at least 1. With more than 1, step 0 is not a move.

    Returns:
      A pytree like ``reference``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.regularizers.ema_reference({"w": jnp.zeros(1)}, {"w": jnp.ones(1)}, rate=0.25)
      {'w': Array([0.25], dtype=float32)}

    References:
      The teacher of SDPO (arXiv:2601.20802): 0.05 per step, 0.01 with rich feedback. The Polyak
      average of SAFE's target critic is the same with 0.05. TR-DPO (arXiv:2404.09656), through
      TRL's ``sync_ref_model``: ``rate=0.6, every=512``.
    """
    checks.check_share("ema_reference", rate=rate)
    checks.check_count("ema_reference", every=every)
    trees.check_alike("ema_reference", "reference and params", reference, params)

    def mix(old, new):
        if low_rank.is_factors(old):
            return low_rank.average(old, new, rate)
        if not trees.is_floating(old):
            return new
        start = jnp.asarray(old, jnp.float32)
        return (start + rate * (jnp.asarray(new, jnp.float32) - start)).astype(jnp.result_type(old))

    mixed = jax.tree.map(mix, reference, params, is_leaf=low_rank.is_factors)
    if every == 1:
        return mixed
    if step is None:
        raise ValueError(f"ema_reference: every={every} needs step; got None.")
    return reset_reference(reference, mixed, step, every=every)


def ramped_reference(
    reference: ArrayTree,
    params: ArrayTree,
    step: int | Array,
    *,
    slope: float = 0.001,
    most: float = 0.5,
    flat: float = 0,
) -> ArrayTree:
    """A moving average of the policy whose memory grows: it follows closely at first, later less.

        decay = min(slope max(step - flat, 0), most)
        reference = decay * reference + (1 - decay) * params

    For the policy that samples: its samples are nearly those of the policy being trained while that
    improves fast, and come from a steadier one later. With ``slope=0`` it is the policy itself.

    Args:
      reference, params: See the module.
      step: Number of steps so far, in a run that of batches; may be traced.
      slope: Growth of the decay per step, not negative.
      most: Largest decay, in [0, 1).
      flat: Steps with a decay of 0, not negative.

    Returns:
      A pytree like ``reference``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old, new = {"w": jnp.ones(1)}, {"w": jnp.zeros(1)}
      >>> rule = jr.bind(jr.regularizers.ramped_reference, slope=0.125, flat=2)
      >>> [rule(old, new, n)["w"].item() for n in (2, 3, 4, 9)]
      [0.0, 0.125, 0.25, 0.5]

    References:
      Zheng et al., DiffusionNFT (arXiv:2509.16117), the released code: the defaults, or
      ``slope=0.0075, most=0.999, flat=75``. It moves the average once a batch too, but ``step``
      counts its optimizer steps. With n of them a batch, a run of ours has the same decays by
      ``n * slope`` and ``flat / n``.
    """
    function = "ramped_reference"
    checks.check_non_negative(function, finite=True, slope=slope, flat=flat)
    checks.check_share(function, one=False, most=most)
    steps = jnp.maximum(jnp.asarray(step) - flat, 0).astype(jnp.float32)
    decay = jnp.minimum(slope * steps, most)
    return ema_reference(reference, params, rate=1.0 - decay)


def reset_reference(
    reference: ArrayTree,
    params: ArrayTree,
    step: int | Array,
    *,
    every: int,
    times: int | None = None,
) -> ArrayTree:
    """Replaces the reference with the policy every ``every`` steps.

        reference = params if step > 0 and step % every == 0 and step <= times every else reference

    Args:
      reference, params: See the module.
      step: Number of updates so far; may be traced.
      every: Steps between resets, above 0.
      times: Number of resets; None for no limit.

    Returns:
      A pytree like ``reference``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old, new = {"w": jnp.zeros(1)}, {"w": jnp.ones(1)}
      >>> [jr.regularizers.reset_reference(old, new, n, every=3)["w"].item() for n in range(4)]
      [0.0, 0.0, 0.0, 1.0]

    References:
      Liang et al., ReMix (arXiv:2507.06892), once; Liu et al., ProRL (arXiv:2505.24864),
      repeatedly.
    """
    checks.check_positive("reset_reference", finite=True, every=every, times=times)
    trees.check_alike("reset_reference", "reference and params", reference, params)
    due = (jnp.asarray(step) > 0) & (jnp.asarray(step) % every == 0)
    if times is not None:
        due &= jnp.asarray(step) <= times * every
    return jax.tree.map(
        lambda old, new: jnp.where(due, jnp.asarray(new).astype(jnp.result_type(old)), old),
        reference,
        params,
    )


class StoredPolicies(NamedTuple):
    """State of :func:`random_reference`.

    Attributes:
      reference: Parameters of the reference of this iteration.
      policies: Parameters at the starts of iterations; until all places are used, the rest hold the
        first policy.
    """

    reference: ArrayTree
    policies: tuple[ArrayTree, ...]


@dataclasses.dataclass(frozen=True)
class _RandomReference:
    """Made by :func:`random_reference`."""

    every: int
    stored: int

    def init(self, params: ArrayTree) -> StoredPolicies:
        return StoredPolicies(params, (params,) * self.stored)

    def __call__(
        self, state: StoredPolicies, params: ArrayTree, step: int | Array, *, key: Array
    ) -> StoredPolicies:
        trees.check_alike("random_reference", "reference and params", state.reference, params)
        step = jnp.asarray(step)
        iteration = step // self.every
        due = (step > 0) & (step % self.every == 0)
        place_key, draw_key = jax.random.split(jax.random.fold_in(key, iteration))
        # A reservoir: each policy so far is one of the stored with equal probability.
        place = jax.random.randint(place_key, (), 0, iteration + 1)
        place = jnp.where(iteration < self.stored, iteration, place)
        drawn = jax.random.randint(draw_key, (), 0, jnp.minimum(iteration + 1, self.stored))

        def choose(condition: Array, new: ArrayTree, old: ArrayTree) -> ArrayTree:
            def leaf(x, y):
                return jnp.where(due & condition, jnp.asarray(x).astype(jnp.result_type(y)), y)

            return jax.tree.map(leaf, new, old)

        policies = tuple(choose(place == i, params, x) for i, x in enumerate(state.policies))
        reference = state.reference
        for i, policy in enumerate(policies):
            reference = choose(drawn == i, policy, reference)
        return StoredPolicies(reference, policies)

    def __repr__(self) -> str:
        return f"random_reference(every={self.every}, stored={self.stored})"


def random_reference(*, every: int, stored: int = 7) -> _RandomReference:
    """A reference drawn in each iteration from the policies at the starts of the iterations so far.

        iteration k begins at step k every:
            policy k = params, stored
            reference = policy j,   j uniform in 0 .. k, drawn again in each iteration

    The reference may thus return to an older policy. From iteration ``stored`` on, the stored
    policies are a random subset of all, each with the same probability, and so is the reference.

    The state has ``stored + 1`` copies of the trained parameters, which are saved with a
    checkpoint. With ``stored=1`` the reference is the one stored policy, which never returns.

    Args:
      every: Steps per iteration, above 0.
      stored: Number of policies that are stored, above 0.

    Returns:
      A rule for ``Recipe.reference`` that takes the run's ``key``; its state is
      :class:`StoredPolicies`.

    Raises:
      ValueError: If a number is out of its range.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rule = jr.regularizers.random_reference(every=1, stored=2)
      >>> state, key = rule.init({"w": jnp.zeros(1)}), jax.random.key(3)
      >>> for n in range(1, 5):
      ...     state = rule(state, {"w": jnp.full(1, float(n))}, n, key=key)
      >>> [policy["w"].item() for policy in state.policies], state.reference["w"].item()
      ([2.0, 1.0], 1.0)

    References:
      Zhang et al., SePPO (arXiv:2410.05255), which stores a policy every 30 updates, seven in all,
      and draws a new reference for each iteration (``preferences.sample_reference``). Storing a
      random subset of more is ours.
    """
    checks.check_count("random_reference", every=every, stored=stored)
    return _RandomReference(every, stored)


class Anchored(NamedTuple):
    """State of :func:`anchored`.

    Attributes:
      reference: Parameters of the moving reference.
      anchor: Those that it began with.
    """

    reference: ArrayTree
    anchor: ArrayTree


@dataclasses.dataclass(frozen=True)
class AnchoredReference:
    """Made by :func:`anchored`."""

    rule: Callable

    def init(self, params: ArrayTree) -> Anchored:
        """Both are the first policy."""
        return Anchored(params, params)

    def __call__(self, state: Anchored, params: ArrayTree, step: int | Array) -> Anchored:
        """The state after a step, in which only the moving one has moved."""
        return state._replace(reference=self.rule(state.reference, params, step))

    def __repr__(self) -> str:
        return f"anchored({self.rule!r})"


def anchored(rule: Callable) -> AnchoredReference:
    """A moving reference, and beside it the one that it began with, which does not move.

    For a method that samples from a moving average and penalizes the distance from the first
    policy. What the second says is an extra whose name begins with ``anchor_``.

    Args:
      rule: A rule of this module without ``init`` and ``key``.

    Returns:
      A rule for ``Recipe.reference``; its state is :class:`Anchored`.

    Raises:
      TypeError: If ``rule`` is not a function, or has a state or draws random numbers.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rule = jr.regularizers.anchored(jr.bind(jr.regularizers.ema_reference, rate=0.25))
      >>> state = rule(rule.init({"w": jnp.zeros(1)}), {"w": jnp.ones(1)}, 1)
      >>> state.reference["w"].item(), state.anchor["w"].item()
      (0.25, 0.0)

    References:
      Zheng et al., DiffusionNFT (arXiv:2509.16117), whose two are an adapter and none.
    """
    if not callable(rule) or hasattr(rule, "init") or "key" in accepted(rule):
        raise TypeError(
            "anchored: rule must be a function of reference, params and step without a state or a "
            f"key, such as ema_reference; got {rule!r}."
        )
    return AnchoredReference(rule)


class Iterates(NamedTuple):
    """State of :func:`extrapolated`.

    Attributes:
      reference: Parameters of the reference.
      previous: Parameters of the policy at the end of the last iteration.
    """

    reference: ArrayTree
    previous: ArrayTree


@dataclasses.dataclass(frozen=True)
class _Extrapolated:
    """Made by :func:`extrapolated`."""

    every: int
    alpha: float

    def init(self, params: ArrayTree) -> Iterates:
        return Iterates(params, params)

    def __call__(
        self, state: Iterates, params: ArrayTree, step: int | Array
    ) -> tuple[Iterates, ArrayTree]:
        due = (jnp.asarray(step) > 0) & (jnp.asarray(step) % self.every == 0)

        def beyond(new, old):
            if not trees.is_floating(new):
                return new
            x, y = jnp.asarray(new, jnp.float32), jnp.asarray(old, jnp.float32)
            return (x + self.alpha * (x - y)).astype(jnp.result_type(new))

        def choose(new: ArrayTree, old: ArrayTree) -> ArrayTree:
            return jax.tree.map(lambda x, y: jnp.where(due, x.astype(y.dtype), y), new, old)

        further = jax.tree.map(beyond, params, state.previous)
        state = Iterates(choose(further, state.reference), choose(params, state.previous))
        return state, choose(further, params)

    def __repr__(self) -> str:
        return f"extrapolated(every={self.every}, alpha={self.alpha:g})"


class Earlier(NamedTuple):
    """State of :func:`earlier_policies`.

    Attributes:
      policies: Parameters at the starts of the last iterations, the latest first; until there are
        that many, the rest hold the first policy.
      count: int32 ``[]``, number of policies so far.
    """

    policies: tuple[ArrayTree, ...]
    count: Array


@dataclasses.dataclass(frozen=True)
class EarlierPolicies:
    """Made by :func:`earlier_policies`."""

    weights: tuple[float, ...]
    every: int

    def init(self, params: ArrayTree) -> Earlier:
        """One policy, the first."""
        return Earlier((params,) * len(self.weights), jnp.ones((), jnp.int32))

    def __call__(self, state: Earlier, params: ArrayTree, step: int | Array) -> Earlier:
        """The policies after a step; where an iteration ends, its last one is the latest."""
        due = (jnp.asarray(step) > 0) & (jnp.asarray(step) % self.every == 0)
        moved = (params, *state.policies[:-1])
        policies = jax.tree.map(lambda x, y: jnp.where(due, x, y), moved, state.policies)
        count = jnp.minimum(state.count + due.astype(jnp.int32), len(self.weights))
        return Earlier(policies, count)

    def shares(self, state: Earlier) -> Array:
        """float32 ``[J]``: the weights of the policies so far, which add up to 1."""
        weights = jnp.asarray(self.weights, jnp.float32)
        weights = jnp.where(jnp.arange(len(self.weights)) < state.count, weights, 0.0)
        return weights / jnp.sum(weights)

    def __repr__(self) -> str:
        return f"earlier_policies(weights={self.weights}, every={self.every})"


def earlier_policies(*, weights: Sequence[float], every: int) -> EarlierPolicies:
    """The policies at the starts of the last iterations, for ``Recipe.earlier``.

        earlier_logp = sum_j w_j log pi_j / sum_j w_j        over the policies so far

    This is the log-probability of their geometric mean, up to a constant for each prefix. The
    policies are copies of the trained parameters (J adapters if an adapter trains) and are saved
    with the state.

    Args:
      weights: Weight of each policy, the latest first, above 0; one per stored policy.
      every: Steps per iteration, above 0.

    Returns:
      A rule with ``init(params)``, ``rule(state, params, step)`` and ``shares(state)``; its state
      is :class:`Earlier`.

    Raises:
      ValueError: If there is no weight, or a number is not above 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rule = jr.regularizers.earlier_policies(weights=(3.0, 1.0), every=2)
      >>> state = rule.init({"w": jnp.zeros(1)})
      >>> state = rule(state, {"w": jnp.ones(1)}, 2)
      >>> [policy["w"].item() for policy in state.policies], rule.shares(state).tolist()
      ([1.0, 0.0], [0.75, 0.25])

    References:
      Wu et al., MNPO (arXiv:2509.23102), whose opponents are the policies of earlier iterations.
    """
    function, weights = "earlier_policies", tuple(map(float, weights))
    if not weights:
        raise ValueError(f"{function}: weights must have a number for each policy; got none.")
    for weight in weights:
        checks.check_positive(function, finite=True, weights=weight)
    checks.check_count(function, every=every)
    return EarlierPolicies(weights, every)


def extrapolated(*, every: int, alpha: float = 0.3) -> _Extrapolated:
    """Starts a new iteration every ``every`` steps, from a policy extrapolated beyond the last.

        anchor = params + alpha (params - previous)
        previous = params;   reference = params = anchor

    The next iteration thus samples from the anchor, trains from it and uses it as the reference.
    With ``alpha=0`` it is :func:`reset_reference`. Each factor of an adapter is extrapolated
    separately.

    Args:
      every: Steps per iteration, above 0.
      alpha: Extrapolation coefficient, in [0, 1).

    Returns:
      A rule for ``Recipe.reference`` that also changes the policy; see the module.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rule = jr.regularizers.extrapolated(every=2, alpha=0.5)
      >>> state = rule.init({"w": jnp.array([1.0, 2.0])})
      >>> state, params = rule(state, {"w": jnp.array([1.5, 1.0])}, 2)
      >>> params["w"].tolist(), state.previous["w"].tolist()
      ([1.75, 0.5], [1.5, 1.0])

    References:
      He et al., accelerated preference optimization (arXiv:2410.06293), ABSTRACT reading;
      ``models.extrapolate`` is a single step.
    """
    checks.check_positive("extrapolated", finite=True, every=every)
    checks.check_share("extrapolated", one=False, alpha=alpha)
    return _Extrapolated(every, float(alpha))
