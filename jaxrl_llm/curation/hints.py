"""Hints for prompts that the policy cannot solve: which prompts, how long a hint, which rollouts.

A hint is text before the response: a clue in the prompt, the start of a reference solution, or a
prefix of the response. A rule here takes the rewards of the present rollouts and decides what to
sample next. The caller samples, and computes log-probabilities after the prompt that the rollout
was sampled from. The methods differ in three choices.

=============  ======================  ===========================  ===============================
method         a group gets a hint if  how much                     which rollouts are sampled again
=============  ======================  ===========================  ===============================
NuRL           no rollout is right     one clue                     all but one (``hint_slots``)
SAGE           no rollout is right     three clues, one by one      all
SAGE-light     it was hard last time   ``hint_level``               all of this epoch
GHPO           no rollout is right     1/4, 1/2, 3/4 of a solution  all (``guidance_stage``)
Cog-Rethinker  no rollout is right     decompose, then refine       all (``guidance_stage``)
Scaf-GRPO      no rollout is right     the least that helps         one (``minimal_hint``)
ADHint         always                  ``adhint_ratio``             a fixed share
PrefixRL       by its data             ``prefix_cuts``              all
SCOPE          a rollout failed        to its first wrong step      that one (``splice``)
=============  ======================  ===========================  ===============================

Shared arguments:
  ``rewards``: ``[..., G]``, floating point, of the rollouts of a group.
  ``where``: bool of the shape of the first argument, True for the entries that take part; the
    others are not read. None keeps all.

All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option out of range.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, stats

__all__ = [
    "Spliced",
    "adhint_ratio",
    "continuation_mask",
    "distilled_where",
    "first_bad_step",
    "guidance_stage",
    "hint_level",
    "hint_slots",
    "minimal_hint",
    "needs_hint",
    "prefix_cuts",
    "prefix_length",
    "scaffold_slots",
    "splice",
]


def needs_hint(rewards: Array, *, where: Array | None = None, threshold: float = 0.0) -> Array:
    """Groups in which no rollout is correct.

        needs_hint = every reward that takes part <= threshold

    A group without rollouts needs no hint, since its accuracy is unknown. A NaN is not a failure.

    Args:
      rewards, where: See the module. Pass only the accuracy if a format is rewarded too.
      threshold: Largest reward that counts as a failure.

    Returns:
      bool ``[...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.needs_hint(jnp.array([[0.0, 0.0], [0.0, 1.0]])).tolist()
      [True, False]

    References:
      The trigger of NuRL (arXiv:2509.25666), GHPO (arXiv:2507.10628), Scaf-GRPO (arXiv:2510.19807)
      after its 50 steps of warm-up, SAGE (arXiv:2602.03143) and Cog-Rethinker (arXiv:2510.15979).
    """
    stats.check_group("needs_hint", rewards, where)
    valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
    failed = masking.zero_masked(rewards, where) <= threshold
    return jnp.all(failed | ~valid, axis=-1) & jnp.any(valid, axis=-1)


def hint_slots(trigger: Array, *, group_size: int, plain: int = 1) -> Array:
    """Which rollouts of a group are sampled again with the hint in the prompt.

        the last group_size - plain ones, where trigger

    Args:
      trigger: bool ``[...]``, :func:`needs_hint`.
      group_size: G, at least 1.
      plain: Number of rollouts that are not replaced, from 0 to G. NuRL keeps one.

    Returns:
      bool ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.hint_slots(jnp.array([True, False]), group_size=3).tolist()
      [[False, True, True], [False, False, False]]

    References:
      NuRL (arXiv:2509.25666), PAPER reading; ``plain=0`` for GHPO (arXiv:2507.10628) and SAGE
      (arXiv:2602.03143), which replace the complete group.
    """
    checks.check_bool("hint_slots", trigger=trigger)
    checks.check_positive("hint_slots", finite=True, group_size=group_size)
    if not 0 <= plain <= group_size:
        raise ValueError(f"hint_slots: plain must be from 0 to {group_size}; got {plain}.")
    return jnp.asarray(trigger)[..., None] & (jnp.arange(group_size) >= plain)


def hint_level(
    level: Array,
    accuracy: Array,
    *,
    low: float = 0.1,
    high: float = 0.35,
    max_level: int = 3,
) -> Array:
    """The level of detail of a prompt's next hint, from its accuracy at the last visit.

        level + 1, at most max_level    accuracy <= low
        level - 1, at least 0           accuracy > high
        level                           between
        0                               accuracy is NaN: the prompt was never seen

    Args:
      level: ``[...]`` integers, 0 for no hint.
      accuracy: ``[...]``, floating point, share of correct rollouts at that level.
      low: Largest accuracy of a prompt that gets more detail.
      high: Largest accuracy of a prompt that keeps its level, not below ``low``.
      max_level: The most detailed hint, at least 1.

    Returns:
      int32 ``[...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> level, accuracy = jnp.array([0, 3, 2, 1]), jnp.array([0.0, 0.05, 0.36, jnp.nan])
      >>> jr.curation.hint_level(level, accuracy).tolist()
      [1, 3, 1, 0]

    References:
      SAGE-light (arXiv:2602.03143). The released script has ``low=0.1``, its configuration 0.
    """
    function = "hint_level"
    checks.check_integer(function, level=level)
    checks.check_float(function, accuracy=accuracy)
    checks.check_same_shape(function, level=level, accuracy=accuracy)
    checks.check_positive(function, finite=True, max_level=max_level)
    if not low <= high:
        raise ValueError(f"{function}: low must not be above high; got {low:g} and {high:g}.")
    level, accuracy = jnp.asarray(level, jnp.int32), jnp.asarray(accuracy, jnp.float32)
    step = jnp.where(accuracy <= low, 1, jnp.where(accuracy > high, -1, 0))
    return jnp.where(jnp.isnan(accuracy), 0, jnp.clip(level + step, 0, max_level))


def guidance_stage(stage: Array, hard: Array, *, stages: int = 3) -> Array:
    """The next stage of guidance of prompts that are still unsolved.

        min(stage + 1, stages) where hard, else stage

    GHPO's stages are shares of a reference solution, 1/4, 1/2 and 3/4 (:func:`prefix_length`);
    Cog-Rethinker's two are templates, one that decomposes the problem and one that refines a wrong
    answer. A group whose stage changes is sampled again completely. A prompt that is hard at the
    last stage keeps its rollouts.

    Args:
      stage: ``[...]`` integers, 0 for the plain prompt.
      hard: bool ``[...]``, :func:`needs_hint` of the latest rollouts.
      stages: The last stage, at least 1.

    Returns:
      int32 ``[...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> stage, hard = jnp.array([0, 1, 3]), jnp.array([True, False, True])
      >>> jr.curation.guidance_stage(stage, hard).tolist()
      [1, 1, 3]

    References:
      GHPO (arXiv:2507.10628). Cog-Rethinker (arXiv:2510.15979), ABSTRACT reading, with
      ``stages=2``.
    """
    checks.check_integer("guidance_stage", stage=stage)
    checks.check_bool("guidance_stage", hard=hard)
    checks.check_same_shape("guidance_stage", stage=stage, hard=hard)
    checks.check_positive("guidance_stage", finite=True, stages=stages)
    stage = jnp.asarray(stage, jnp.int32)
    return jnp.where(hard, jnp.minimum(stage + 1, stages), stage)


def prefix_length(length: Array, ratio: float | Array) -> Array:
    """Number of tokens of a solution that a hint shows.

        round(length clip(ratio, 0, 1)), half to even

    Args:
      length: ``[...]`` integers, tokens of the solution.
      ratio: Share of the solution to show, a number or ``[...]``.

    Returns:
      int32, of the two shapes broadcast.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.prefix_length(jnp.array(101), jnp.array([0.25, 0.5, 0.75])).tolist()
      [25, 50, 76]

    References:
      GHPO (arXiv:2507.10628), whose released code counts characters; ADHint (arXiv:2512.13095).
    """
    checks.check_integer("prefix_length", length=length)
    checks.check_min_rank("prefix_length", 0, ratio=ratio)
    shown = jnp.round(jnp.asarray(length, jnp.float32) * jnp.clip(ratio, 0.0, 1.0))
    return shown.astype(jnp.int32)


def minimal_hint(rewards: Array, *, where: Array | None = None, threshold: float = 0.0) -> Array:
    """The lowest hint level that led to a correct answer.

        min {level: reward[level] > threshold}, else -1

    Args:
      rewards: ``[..., L]``, floating point, of one rollout a level, from abstract to concrete.
      where: See the module.
      threshold: Greatest reward of a failure.

    Returns:
      int32 ``[...]``, from 0; -1 where no level helped.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.minimal_hint(jnp.array([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]])).tolist()
      [1, -1]

    References:
      Scaf-GRPO (arXiv:2510.19807): knowledge, then solution, each in four cumulative steps (the
      planning tier is commented out in the released code). The rollout of that level replaces
      the group's first (:func:`scaffold_slots`).
    """
    stats.check_group("minimal_hint", rewards, where)
    right = masking.zero_masked(rewards, where) > threshold
    right = right if where is None else right & where
    level = jnp.argmax(right, axis=-1).astype(jnp.int32)
    return jnp.where(jnp.any(right, axis=-1), level, -1)


def scaffold_slots(
    level: Array, *, group_size: int, where: Array | None = None, count: int = 1
) -> Array:
    """Which rollouts of a failed group are replaced by the rollout that a hint solved.

        the first count that take part, where level >= 0

    With ``count=2`` the first place holds the response under the plain prompt, which makes it
    off-policy, and the second holds the hinted prompt and the response.

    Args:
      level: ``[...]`` integers, :func:`minimal_hint`.
      group_size: G, at least 1.
      where: bool ``[..., G]``, True for the rollouts that take part; None keeps all.
      count: Number of replaced rollouts, from 1 to G.

    Returns:
      bool ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.scaffold_slots(jnp.array([2, -1]), group_size=3).tolist()
      [[True, False, False], [False, False, False]]

    References:
      Scaf-GRPO (arXiv:2510.19807); two is its "6+1+1".
    """
    function = "scaffold_slots"
    checks.check_integer(function, level=level)
    checks.check_bool(function, where=where)
    if not 1 <= count <= group_size:
        raise ValueError(f"{function}: count must be from 1 to {group_size}; got {count}.")
    shape = (*jnp.shape(level), group_size)
    if where is None:
        where = jnp.ones(shape, bool)
    checks.check_shape(function, "where", where, shape)
    first = jnp.cumsum(where, axis=-1) <= count
    return where & first & (jnp.asarray(level) >= 0)[..., None]


def distilled_where(
    rewards: Array, stage: Array, *, where: Array | None = None, threshold: float = 0.0
) -> Array:
    """Correct answers that needed guidance, to be imitated under the plain prompt.

        reward > threshold  and  stage > 0

    Their loss is the negative log-likelihood after the plain prompt, added to the policy loss with
    a small coefficient. Training after the guided prompt would not help at test time, when there is
    no guidance.

    Args:
      rewards, where: See the module.
      stage: ``[...]`` integers, :func:`guidance_stage`.
      threshold: Greatest reward of a failure.

    Returns:
      bool ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[1.0, 0.0], [1.0, 0.0]])
      >>> jr.curation.distilled_where(rewards, jnp.array([0, 2])).tolist()
      [[False, False], [True, False]]

    References:
      Cog-Rethinker (arXiv:2510.15979), ABSTRACT reading; reviews confirm that the loss of
      fine-tuning is added to DAPO's with a coefficient lambda, whose value is not public.
    """
    stats.check_group("distilled_where", rewards, where)
    checks.check_integer("distilled_where", stage=stage)
    checks.check_shape("distilled_where", "stage", stage, jnp.shape(rewards)[:-1])
    right = masking.zero_masked(rewards, where) > threshold
    right = right if where is None else right & where
    return right & (jnp.asarray(stage) > 0)[..., None]


def adhint_ratio(
    rewards: Array,
    *,
    where: Array | None = None,
    key: Array | None = None,
    low: float = 0.0,
    high: float = 0.8,
    noise: float | None = None,
) -> Array:
    """Share of a solution to show, by the difficulty of the prompt without it.

        w = clip(low + (high - low) (1 - mean reward) + u, 0, 1),   u uniform in [-noise, noise)

    A prompt without rollouts gets ``low``.

    Args:
      rewards: ``[..., G]``, floating point, in [0, 1]; rewards of the rollouts without a hint.
      where: See the module.
      key: Typed PRNG key; None for no noise.
      low: Share for a prompt that is always solved, in [0, 1].
      high: Share for one that never is, from ``low`` to 1.
      noise: Half width of the noise, not negative; only with a key. None means 0.05.

    Returns:
      ``[...]`` float32 in [0, 1], for :func:`prefix_length`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([1.0, 0.0, 0.0, 0.0])
      >>> round(float(jr.curation.adhint_ratio(rewards, low=0.1, high=0.9)), 4)
      0.7

    References:
      ADHint (arXiv:2512.13095), PAPER reading of the formula through a note; ``low``, ``high`` and
      the noise are ours.
    """
    function = "adhint_ratio"
    stats.check_group(function, rewards, where)
    checks.check_share(function, low=low, high=high)
    checks.check_non_negative(function, finite=True, noise=noise)
    if not low <= high:
        raise ValueError(f"{function}: low must not be above high; got {low:g} and {high:g}.")
    if key is None:
        checks.check_no_effect(function, "without a key", noise=noise)
    rewards = masking.zero_masked(rewards, where)
    accuracy = masking.masked_mean(rewards, where, axis=-1)
    known = stats.group_count(rewards, where)[..., 0] > 0
    ratio = low + (high - low) * jnp.where(known, 1.0 - accuracy, 0.0)
    if key is not None:
        half = 0.05 if noise is None else noise
        ratio += jax.random.uniform(key, jnp.shape(ratio), minval=-half, maxval=half)
    return jnp.clip(ratio, 0.0, 1.0)


def prefix_cuts(
    key: Array, length: Array, *, cuts: int = 3, low: float = 0.4, high: float = 0.8
) -> Array:
    """Where to cut a correct trace of a hard prompt, to make easier prompts from it.

        h = floor(u length),   u uniform in [low, high)

    A prompt with the first h tokens of its trace is a separate prompt, with a separate group and
    baseline; no token of the prefix is trained (:func:`continuation_mask`). The cuts are
    drawn once, and the prompts without a prefix stay.

    Args:
      key: Typed PRNG key.
      length: ``[...]`` integers, tokens of the trace.
      cuts: Number of cuts, at least 1.
      low: Smallest share, in [0, 1].
      high: Largest share, from ``low`` to 1.

    Returns:
      int32 ``[..., cuts]``.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> cuts = jr.curation.prefix_cuts(jax.random.key(0), jnp.array([100, 10]))
      >>> cuts.shape, bool(((cuts[0] >= 40) & (cuts[0] < 80)).all())
      ((2, 3), True)

    References:
      PrefixRL (arXiv:2601.18795), PAPER reading: three cuts between 40% and 80%, so that three in
      four prompts have a prefix.
    """
    checks.check_integer("prefix_cuts", length=length)
    checks.check_positive("prefix_cuts", finite=True, cuts=cuts)
    checks.check_share("prefix_cuts", low=low, high=high)
    if not low <= high:
        raise ValueError(f"prefix_cuts: low must not be above high; got {low:g} and {high:g}.")
    share = jax.random.uniform(key, (*jnp.shape(length), cuts), minval=low, maxval=high)
    return jnp.floor(share * jnp.asarray(length, jnp.float32)[..., None]).astype(jnp.int32)


def continuation_mask(prefix: Array, length: Array, *, size: int) -> Array:
    """The tokens that the policy wrote after a prefix of the response.

        mask[..., t] = prefix <= t < length

    Args:
      prefix: ``[...]`` integers, tokens of the prefix.
      length: ``[...]`` integers, tokens of the response with its prefix.
      size: T.

    Returns:
      bool ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.continuation_mask(jnp.array(1), jnp.array(3), size=4).tolist()
      [False, True, True, False]

    References:
      PrefixRL (arXiv:2601.18795), which trains no token of a prefix.
    """
    checks.check_integer("continuation_mask", prefix=prefix, length=length)
    checks.check_positive("continuation_mask", finite=True, size=size)
    place = jnp.arange(size)
    return (place >= jnp.asarray(prefix)[..., None]) & (place < jnp.asarray(length)[..., None])


def first_bad_step(scores: Array, *, where: Array | None = None, threshold: float = 0.5) -> Array:
    """The first step of a response that a process reward model rejects.

        min {s: score[s] < threshold}, else S

    Args:
      scores: ``[..., S]``, floating point, one per step.
      where: See the module.
      threshold: Smallest score of a good step.

    Returns:
      int32 ``[...]``, from 0; S where no step is rejected.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.first_bad_step(jnp.array([[0.9, 0.8, 0.2, 0.7], [0.9] * 4])).tolist()
      [2, 4]

    References:
      SCOPE (arXiv:2602.24110), ABSTRACT reading; the threshold is ours.
    """
    stats.check_group("first_bad_step", scores, where, name="scores")
    bad = masking.zero_masked(scores, where) < threshold
    bad = bad if where is None else bad & where
    steps = jnp.shape(scores)[-1]
    return jnp.min(jnp.where(bad, jnp.arange(steps), steps), axis=-1, initial=steps)


class Spliced(NamedTuple):
    """Responses whose first tokens are kept and whose end is replaced.

    Attributes:
      tokens: ``[..., T]`` integers; 0 after the end.
      length: int32 ``[...]``.
      foreign: bool ``[..., T]``, True for the tokens of the continuation.
    """

    tokens: Array
    length: Array
    foreign: Array


def splice(tokens: Array, keep: Array, continuation: Array, length: Array) -> Spliced:
    """Replaces the end of a response, from its first wrong step.

        tokens[:keep] + continuation[:length], cut at T

    The first part keeps its sampling log-probabilities. The continuation is from another model: use
    ``surrogates.luffy_shaping`` with ``steered=foreign``, or do not train it. A repaired response
    replaces the failed one if the verifier accepts it.

    Args:
      tokens: ``[..., T]`` integers, the response.
      keep: ``[...]`` integers, tokens before the first wrong step, at most T.
      continuation: ``[..., C]`` integers.
      length: ``[...]`` integers, tokens of the continuation, at most C.

    Returns:
      :class:`Spliced`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> out = jr.curation.splice(
      ...     jnp.array([1, 2, 3, 4]), jnp.array(2), jnp.array([8, 9, 7]), jnp.array(1))
      >>> out.tokens.tolist(), int(out.length), out.foreign.tolist()
      ([1, 2, 8, 0], 3, [False, False, True, False])

    References:
      SCOPE (arXiv:2602.24110), ABSTRACT reading; the loss of the continuation is ours.
    """
    function = "splice"
    checks.check_integer(
        function, tokens=tokens, keep=keep, continuation=continuation, length=length
    )
    checks.check_min_rank(function, 1, tokens=tokens, continuation=continuation)
    lead, size = jnp.shape(tokens)[:-1], jnp.shape(tokens)[-1]
    checks.check_shape(function, "keep", keep, lead)
    checks.check_shape(function, "length", length, lead)
    checks.check_shape(function, "continuation", continuation, (*lead, jnp.shape(continuation)[-1]))
    if jnp.shape(continuation)[-1] == 0:
        raise ValueError(f"{function}: continuation must have at least one column; got none.")
    keep = jnp.clip(jnp.asarray(keep, jnp.int32), 0, size)
    total = jnp.minimum(keep + jnp.asarray(length, jnp.int32), size)
    place = jnp.arange(size)
    source = jnp.clip(place - keep[..., None], 0, jnp.shape(continuation)[-1] - 1)
    foreign = (place >= keep[..., None]) & (place < total[..., None])
    new = jnp.take_along_axis(jnp.asarray(continuation), source, axis=-1)
    tokens = jnp.where(place < keep[..., None], tokens, jnp.where(foreign, new, 0))
    return Spliced(tokens=tokens, length=total, foreign=foreign)
