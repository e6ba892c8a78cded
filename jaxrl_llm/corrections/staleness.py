"""Data sampled by several versions of the weights: bounds on its age, and a proximal policy.

- ``versions``: int ``[..., T]``, the version of the weights that sampled each token; negative where
  it is unknown or no weights of the run sampled, as in a demonstration. Such a token has no age.
- ``current_version``: Version of the weights being trained: one integer, or an integer array that
  has some of the leading axes of ``versions``, such as ``[P]``.
- ``max_staleness``: Largest age in versions, not negative.

Other shared arguments, TypeError and ValueError: see :mod:`jaxrl_llm.corrections`.
"""

import numbers
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking
from jaxrl_llm.corrections import _inputs


def staleness_mask(
    advantages: Array,
    mask: Array,
    *,
    versions: Array,
    current_version: Array | int,
    max_staleness: int,
    level: Literal["token", "sequence"] = "sequence",
) -> Array:
    """Keeps tokens that were sampled by weights that are not too old.

        age[t] = current_version - versions[t]
        level="token":     keep if age[t] <= max_staleness
        level="sequence":  keep if age <= max_staleness for all unmasked tokens of the sequence
        versions[t] < 0:   has no age and is not too old

    Use it in the ``selection`` slot of a Recipe, with ``versions`` and ``current_version`` in the
    extras of the batch: dropped rollouts still count in the baseline of their group.

    Args:
      advantages: Not read: the slot passes them first.
      mask: See the package.
      versions, current_version, max_staleness: See the module.
      level: Unit that is kept or dropped: "sequence" or "token".

    Returns:
      Keep ``[..., T]``, bool, False where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> versions, mask = jnp.array([[5, 6], [2, 6]]), jnp.ones((2, 2), bool)
      >>> jr.corrections.staleness_mask(
      ...     jnp.zeros(2), mask, versions=versions, current_version=6, max_staleness=1).tolist()
      [[True, True], [False, False]]

    References:
      Fu et al., AReaL (arXiv:2505.24298), bounds the age at admission, see
      :func:`staleness_capacity`; this function bounds the age of the data itself.
    """
    del advantages
    checks.check_non_negative("staleness_mask", max_staleness=max_staleness)
    checks.check_option("staleness_mask", "level", level, ("token", "sequence"))
    young = _age("staleness_mask", versions, mask, current_version) <= max_staleness
    if level == "sequence":
        young = jnp.all(young | ~mask, axis=-1, keepdims=True)
    return mask & young


def loglinear_prox(
    logp: Array, behavior_logp: Array, versions: Array, mask: Array, *, current_version: Array | int
) -> Array:
    """A proximal policy interpolated between sampler and trained policy, without a forward pass.

        a[t] = clip((v - 1 - versions[t]) / (v - versions[t]), 0, 1)       v = current_version
        a[t] = 0 where versions[t] >= v or versions[t] < 0
        prox[t] = (1 - a[t]) * behavior_logp[t] + a[t] * stop_gradient(logp[t])

    The previous version is assumed to lie on the straight line, in log-probability, from the
    version that sampled a token to the current one. For data of the previous version, the proximal
    policy is the policy that sampled it; the older the data, the closer the proximal policy is to
    the one being trained.

    Args:
      logp, behavior_logp, mask: See the package.
      versions, current_version: See the module.

    Returns:
      Log-probabilities ``[..., T]``, float32 nats, 0 where masked; no gradient flows through them.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, versions, mask = jnp.full(3, -1.0), jnp.array([3, 4, 5]), jnp.ones(3, bool)
      >>> jr.corrections.loglinear_prox(logp, logp - 1.0, versions, mask, current_version=5)
      Array([-1.5, -2. , -2. ], dtype=float32)

    References:
      AReaL (arXiv:2505.24298), ``prox_logp_method: loglinear`` of its code, CODE reading.
    """
    log_ratio = _inputs.log_ratio("loglinear_prox", logp, behavior_logp, mask)
    age = _age("loglinear_prox", versions, mask, current_version)
    share = (age - 1.0) / jnp.maximum(age, 1.0)
    share = jnp.where(age > 0, share, 0.0)
    prox = masking.zero_masked(behavior_logp, mask) + share * log_ratio
    return jax.lax.stop_gradient(masking.zero_masked(prox, mask))


def staleness_capacity(
    version: Array | int,
    accepted: Array | int,
    running: Array | int,
    *,
    batch_size: int,
    max_staleness: int,
    max_concurrent: int,
) -> Array:
    """The number of rollouts that may be started without exceeding the staleness bound.

        min((max_staleness + version + 1) * batch_size - (accepted + running),
            max_concurrent - running)

    The next batch has the version's number, so a rollout that starts now, after all accepted and
    running ones, is used at most ``max_staleness`` versions later; 0 is synchronous training. Start
    a rollout only while the result is above 0. After a resume ``accepted`` is ``version *
    batch_size``.

    Args:
      version: Version of the weights being trained, an integer from 0.
      accepted: Rollouts finished and accepted since version 0, an integer.
      running: Rollouts in progress, an integer.
      max_staleness: See the module.
      batch_size: Rollouts that one version consumes, above 0.
      max_concurrent: Largest number of rollouts in progress, above 0.

    Returns:
      int32, of the common shape of the three counts; negative if there are too many already.

    Example:
      >>> import jaxrl_llm as jr
      >>> int(jr.corrections.staleness_capacity(
      ...     0, 0, 4, batch_size=4, max_staleness=1, max_concurrent=64))
      4

    References:
      Fu et al., AReaL (arXiv:2505.24298), and its staleness manager, CODE reading. The paper's
      experiments allow ages of 4 to 8.
    """
    checks.check_integer("staleness_capacity", version=version, accepted=accepted, running=running)
    checks.check_positive(
        "staleness_capacity", batch_size=batch_size, max_concurrent=max_concurrent
    )
    checks.check_non_negative("staleness_capacity", max_staleness=max_staleness)
    version, accepted, running = (jnp.asarray(x, jnp.int32) for x in (version, accepted, running))
    fresh = (max_staleness + version + 1) * batch_size - (accepted + running)
    return jnp.minimum(fresh, max_concurrent - running)


def version_lags(
    versions: Array, mask: Array, *, current_version: Array | int
) -> tuple[Array, Array]:
    """The age in versions of the oldest and the latest token of each response.

        head lag = current_version - min over t of versions[t]
        tail lag = current_version - max over t of versions[t]

    Both are over the tokens with a version, ``versions[t] >= 0``. The two differ for a response
    during which the weights changed. A bound on staleness (:func:`staleness_capacity`) holds for
    the head lag.

    Args:
      mask: See the package.
      versions, current_version: See the module.

    Returns:
      Head lag and tail lag, both float32 ``[...]``; 0 without an unmasked token with a version.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> versions, mask = jnp.array([3, 4, 4, 0]), jnp.array([True, True, True, False])
      >>> head, tail = jr.corrections.version_lags(versions, mask, current_version=5)
      >>> int(head), int(tail)
      (2, 1)

    References:
      Fu et al., AReaL (arXiv:2505.24298), CODE reading.
    """
    age = _age("version_lags", versions, mask, current_version)
    known = mask & (jnp.asarray(versions) >= 0)
    head = jnp.max(age, axis=-1, where=known, initial=-jnp.inf)
    tail = jnp.min(age, axis=-1, where=known, initial=jnp.inf)
    valid = jnp.any(known, axis=-1)
    return jnp.where(valid, head, 0.0), jnp.where(valid, tail, 0.0)


def _age(function: str, versions: Array, mask: Array, current_version: Array | int) -> Array:
    """``current_version - versions`` in float32, 0 where masked or without a version, checked."""
    checks.check_mask(function, mask)
    checks.check_min_rank(function, 1, versions=versions)
    checks.check_integer(function, versions=versions, current_version=current_version)
    checks.check_same_shape(function, versions=versions, mask=mask)
    shape, target = jnp.shape(current_version), jnp.shape(mask)
    if shape != target[: len(shape)]:
        raise ValueError(
            f"{function}: current_version must be one integer or have leading axes of versions "
            f"{target}; got {shape}."
        )
    if not isinstance(current_version, numbers.Integral):
        trailing = (1,) * (len(target) - len(shape))
        current_version = jnp.reshape(current_version, (*shape, *trailing))
    versions = jnp.asarray(versions)
    return masking.zero_masked(current_version - versions, mask & (versions >= 0))
