"""Sources of a group's rollouts: stored policies, teachers, demonstrations in the prompt.

- ``key``: a typed PRNG key.
- ``rewards``: floating point ``[..., G]``, one per rollout.
- ``where``: bool ``[..., G]``, True for rollouts that take part; None for all.
- A wrong dtype raises TypeError; shapes that do not match, and an option that is unknown, missing,
  out of its range or without effect, raise ValueError.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, stats

__all__ = [
    "Replacement",
    "ampo_select",
    "best_teachers",
    "comprehension_score",
    "icpo_merge",
    "mix_source_mask",
]

# The roles OWN, DEMONSTRATION and JUDGE of a request.
_OWN_TEACHER_PROBE = (0, 2, 4)


def mix_source_mask(key: Array, *, prompts: int, probability: float | Array = 0.4) -> Array:
    """Draws the prompts whose rollouts come from a stored past policy.

        stored_p = u_p < probability,   u_p uniform in [0, 1)

    Args:
      key: See the module.
      prompts: P, number of prompts.
      probability: Expected share of stored prompts, in [0, 1]. After reincarnation it is 0.

    Returns:
      bool ``[P]``, True for stored, False for fresh rollouts.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> jr.curation.mix_source_mask(jax.random.key(0), prompts=3, probability=0.0).tolist()
      [False, False, False]

    References:
      ReMix (arXiv:2507.06892), with 0.4 and policies up to two updates old. PAPER reading.
    """
    checks.check_non_negative("mix_source_mask", finite=True, prompts=prompts)
    checks.check_share("mix_source_mask", probability=probability)
    return jax.random.uniform(key, (prompts,)) < probability


def comprehension_score(answer_logp: Array, answer_mask: Array) -> Array:
    """The mean probability of the reference answer after a teacher's reasoning.

        mean over the tokens of the reference answer of exp(logp[t])

    Args:
      answer_logp: ``[..., T]`` log-probabilities (nats) of the reference answer under the policy
        being trained, after the prompt and the teacher's reasoning.
      answer_mask: bool ``[..., T]``, True for the tokens of the answer.

    Returns:
      ``[...]`` float32 in [0, 1]; 0 without a token.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.log(jnp.array([0.5, 0.25, 0.9])), jnp.array([True, True, False])
      >>> round(float(jr.curation.comprehension_score(logp, mask)), 4)
      0.375

    References:
      AMPO (SII-Enigma/AMPO, about arXiv:2510.02227), its default of four scores.
    """
    function = "comprehension_score"
    checks.check_mask(function, answer_mask, name="answer_mask")
    checks.check_float(function, answer_logp=answer_logp)
    checks.check_same_shape(function, answer_logp=answer_logp, answer_mask=answer_mask)
    probs = jnp.exp(masking.zero_masked(answer_logp, answer_mask))
    return masking.masked_mean(probs, answer_mask, axis=-1)


class Replacement(NamedTuple):
    """Which teacher answers replace which rollouts.

    Attributes:
      rollouts: int32 ``[..., k_max]``, places in the group; -1 for none.
      teachers: int32 ``[..., k_max]``, places among the teacher answers; -1 for none.
    """

    rollouts: Array
    teachers: Array


def ampo_select(
    rewards: Array,
    scores: Array,
    *,
    k_max: int = 2,
    where: Array | None = None,
    available: Array | None = None,
    mode: Literal["adaptive", "hybrid", "always"] = "adaptive",
    key: Array | None = None,
    probability: float | None = None,
) -> Replacement:
    """Replaces wrong rollouts by teacher answers, where the group needs them.

        k = min(k_max, wrong rollouts, available answers), if
            no rollout is right                "adaptive"
            u < probability, u uniform         "hybrid"
            always                             "always"
        the first k wrong rollouts give way to the k answers of the highest scores

    A rollout is wrong if its reward is not above 0. Among equal scores the earlier answer comes
    first. A teacher's answer gets at least reward 1; the group's mean is over the policy's
    rollouts.

    Args:
      rewards: See the module.
      scores: ``[..., M]``, floating point, scores of the teacher answers, such as
        :func:`comprehension_score`.
      k_max: Maximum number of teacher answers in a group, from 1 to the smaller of G and M.
      where: As in the module; the other rollouts are not replaced.
      available: bool ``[..., M]``, True for answers that exist.
      mode: When a group takes answers.
      key: Typed PRNG key; only in mode "hybrid", which needs one.
      probability: Probability that a group takes answers, in [0, 1]; only in mode "hybrid". None
        means 0.3.

    Returns:
      :class:`Replacement`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
      >>> scores = jnp.array([[0.2, 0.9], [0.2, 0.9]])
      >>> swap = jr.curation.ampo_select(rewards, scores, k_max=1)
      >>> swap.rollouts.tolist(), swap.teachers.tolist()
      ([[0], [-1]], [[1], [-1]])

    References:
      AMPO (SII-Enigma/AMPO, about arXiv:2510.02227). The choice among the wrong rollouts is ours.
    """
    function = "ampo_select"
    stats.check_group(function, rewards, where)
    checks.check_min_rank(function, 1, scores=scores)
    checks.check_float(function, scores=scores)
    checks.check_bool(function, available=available)
    checks.check_same_shape(function, scores=scores, available=available)
    checks.check_option(function, "mode", mode, ("adaptive", "hybrid", "always"))
    lead, most = jnp.shape(rewards)[:-1], min(jnp.shape(rewards)[-1], jnp.shape(scores)[-1])
    checks.check_shape(function, "scores", scores, (*lead, jnp.shape(scores)[-1]))
    if not 1 <= k_max <= most:
        raise ValueError(f"{function}: k_max must be from 1 to {most}; got {k_max}.")
    if mode != "hybrid" and probability is not None:
        raise ValueError(f"{function}: probability has no effect with mode={mode!r}; leave it out.")
    probability = 0.3 if probability is None else probability
    checks.check_share(function, probability=probability)
    if (mode == "hybrid") != (key is not None):
        has = "needs a key" if key is None else f"has no use for a key, mode={mode!r}"
        raise ValueError(f"{function}: mode='hybrid' alone draws; this call {has}.")
    valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
    there = jnp.ones(jnp.shape(scores), bool) if available is None else available
    wrong = valid & ~(masking.zero_masked(rewards, where) > 0)
    takes = jnp.ones(lead, bool)
    if mode == "adaptive":
        takes = ~jnp.any(valid & ~wrong, axis=-1)
    elif mode == "hybrid":
        takes = jax.random.uniform(key, lead) < probability
    count = jnp.minimum(jnp.sum(wrong, axis=-1), jnp.sum(there, axis=-1))
    used = (jnp.arange(k_max) < count[..., None]) & takes[..., None]
    ranked = jnp.where(there, -masking.zero_masked(scores, there), jnp.inf)
    teachers = jnp.argsort(ranked, axis=-1, stable=True)[..., :k_max]
    rollouts = jnp.argsort(~wrong, axis=-1, stable=True)[..., :k_max]
    return Replacement(*(jnp.where(used, x, -1).astype(jnp.int32) for x in (rollouts, teachers)))


def best_teachers(
    rewards: Array,
    *,
    roles: Array,
    mask: Array,
    old_logp: Array,
    where: Array | None = None,
    k_max: int = 2,
) -> Array:
    """:func:`ampo_select` for a batch that holds the answers of teachers and their probes.

        score of a teacher = mean over its probe's mask of exp(old_logp)
        where no rollout of the policy is right, the k_max answers of the highest scores stay, each
        in the place of a wrong rollout; all other answers and all probes leave

    The first demonstration of a row belongs to the first probe, and so on
    (:func:`~jaxrl_llm.curation.demonstrations`).

    Args:
      rewards, where: See the module.
      roles: Integers ``[..., G]``: ``OWN``, ``DEMONSTRATION`` and, for probes, ``JUDGE``.
      mask: bool ``[..., G, T]``; of a probe, the tokens of the reference answer.
      old_logp: ``[..., G, T]`` log-probabilities (nats) under the policy at the start of the step.
      k_max: Maximum number of answers that are kept, from 1 to G.

    Returns:
      bool ``[..., G]``, for the slot ``curation``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> roles = jnp.array([0, 0, 2, 2, 4, 4])
      >>> logp = jnp.log(jnp.array([[0.5], [0.5], [0.5], [0.5], [0.1], [0.9]]))
      >>> jr.curation.best_teachers(
      ...     jnp.zeros(6), roles=roles, mask=jnp.ones((6, 1), bool), old_logp=logp, k_max=1
      ... ).tolist()  # the second teacher in the place of the first rollout
      [False, True, False, True, False, False]

    References:
      AMPO (arXiv:2510.02227) and its released code, which picks the wrong rollouts at random.
    """
    function = "best_teachers"
    stats.check_group(function, rewards, where)
    checks.check_integer(function, roles=roles)
    checks.check_same_shape(function, rewards=rewards, roles=roles)
    valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
    own, teacher, probe = (jnp.asarray(roles) == role for role in _OWN_TEACHER_PROBE)
    # Which probe belongs to which teacher is told by all of them, those without a reward included.
    places, first = (jnp.argsort(~x, axis=-1, stable=True) for x in (teacher, probe))
    own, teacher, probe = valid & own, valid & teacher, valid & probe
    scores = comprehension_score(old_logp, mask & probe[..., None])
    size = jnp.shape(rewards)[-1]
    chosen = ampo_select(
        rewards,
        jnp.take_along_axis(scores, first, axis=-1),
        k_max=k_max,
        where=own,
        available=jnp.take_along_axis(teacher, places, axis=-1),
    )
    answers = jnp.take_along_axis(places, jnp.maximum(chosen.teachers, 0), axis=-1)
    answers = jnp.where(chosen.teachers < 0, -1, answers)
    enters, leaves = (
        jnp.any(x[..., None] == jnp.arange(size), axis=-2) for x in (answers, chosen.rollouts)
    )
    return (own & ~leaves) | enters


def icpo_merge(
    rewards: Array,
    *,
    steered: Array,
    key: Array,
    where: Array | None = None,
    delta: float = 1.0,
) -> Array:
    """Keeps good steered rollouts; each one replaces a rollout of the plain prompt.

        a steered rollout stays iff reward >= delta
        for each that stays, one rollout of the plain prompt, drawn at random, leaves its group

    A group thus has as many rollouts as there are plain ones. Without a good steered rollout it is
    the plain rollouts.

    Args:
      rewards, key, where: See the module.
      steered: bool ``[..., G]``, True for rollouts sampled with demonstrations in the prompt.
      delta: Smallest reward of a steered rollout that is kept.

    Returns:
      bool ``[..., G]``, for the slot ``curation``.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]])
      >>> steered = jnp.array([[False, False, False, True]] * 2)
      >>> where = jr.curation.icpo_merge(rewards, steered=steered, key=jax.random.key(0))
      >>> where.sum(-1).tolist(), where[:, 3].tolist()
      ([3, 3], [True, False])

    References:
      ICPO (arXiv:2510.26519). PAPER reading: the released trainer keeps every steered rollout.
    """
    function = "icpo_merge"
    stats.check_group(function, rewards, where)
    checks.check_min_rank(function, 1, steered=steered)
    checks.check_bool(function, steered=steered)
    checks.check_same_shape(function, rewards=rewards, steered=steered)
    valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
    good = valid & steered & (masking.zero_masked(rewards, where) >= delta)
    plain = valid & ~steered
    leaving = jnp.sum(good, axis=-1, keepdims=True)
    lots = jnp.where(plain, jax.random.uniform(key, jnp.shape(rewards)), 2.0)
    _, rank = stats.order_and_ranks(lots)
    return good | (plain & (rank >= leaving))
