"""Metrics of a step, by their names in metrics.jsonl."""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import corrections, diagnostics, preferences
from jaxrl_llm.core import Array, masking, traits_of
from jaxrl_llm.curation import TEXT
from jaxrl_llm.curation.collectors.protocol import DEMONSTRATION, HINTED
from jaxrl_llm.diffusion import Likelihood
from jaxrl_llm.preferences.groups import best_and_worst
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.rewards.scoring import warn_of_absent
from jaxrl_llm.rollout.episodes import EPISODES
from jaxrl_llm.train.data.episode_fields import episode_metrics

# Indexed by the roles of curation.collectors.protocol.
_ROLES = ("own", "hinted", "demonstration", "replayed", "judge", "text")


def batch_metrics(recipe: Recipe, logp: Array, entropy: Array, batch: Batch) -> dict[str, Array]:
    """Float32 scalars that describe a prepared batch and the policy on it, before the update.

    - ``reward``: mean over the rollouts that take part; ``reward_std``: mean std within groups.
    - ``informative``: share of groups whose rewards differ; the others give no gradient.
    - ``length``: mean number of tokens per response; ``tokens``: number of tokens that train.
    - ``entropy``: nats per token.
    - ``text_loss``, ``text_tokens``: for a recipe with texts, mean of ``-logp`` over their tokens,
      and their number. Texts count in none of the others.
    - ``approx_kl``, ``ratio_max``, ``clip_fraction``, ``dual_clip_fraction``: relative to
      ``old_logp``, if the batch has it; the fractions only for surrogates with such a clip.
    - ``ref_kl``: an estimate of KL(policy || reference), if the batch has ``ref_logp``.
      Where a denoiser has one ratio per response, ``approx_kl``, ``ratio_max`` and ``ref_kl`` are
      of the means of its estimates over each response.
    - ``pair_accuracy``, ``pair_margin``, ``pair_chosen``, ``pair_rejected``, ``pairs``: for a
      surrogate that orders responses, :func:`~jaxrl_llm.diagnostics.pair_order` of its implicit
      rewards, in nats, or of the rewards of a head.
    - ``sampler_gap``, ``sampler_gap_max``, ``sampler_kl``, ``sampler_ess``: mean and maximum of
      ``|logp - behavior_logp|``, an estimate of KL(behavior || policy), and the effective sample
      size, over the tokens whose ``behavior_logp`` is known (extra ``behavior_known``), if the
      batch has it. Both log-probabilities are over the batch's support, so these metrics show older
      weights and numerical differences of the sampler, but not the effect of top-k, top-p or min-p.

    Args:
      recipe: The method, which sets the clip bounds.
      logp: ``[P, G, T]``, under the policy before the update.
      entropy: ``[P, G, T]``.
      batch: The prepared batch.
    """
    prepared, batch, sequences = batch, recipe.responses(batch), recipe.sequence_mask(batch)
    spread = diagnostics.group_spread(batch.rewards, where=batch.where)
    metrics = {
        "reward": masking.masked_mean(batch.rewards, batch.where),
        "reward_std": spread.mean_std,
        "informative": spread.informative,
        "length": masking.masked_mean(masking.lengths(batch.mask), jnp.any(batch.mask, axis=-1)),
        "tokens": jnp.sum(batch.mask, dtype=jnp.float32),
        "entropy": diagnostics.mean_entropy(entropy, batch.mask),
    }
    for part in recipe.parts:
        metrics |= part.metrics(logp, prepared)
    if batch.old_logp is not None and not recipe.head:
        new, old = (_as_compared(recipe, x, sequences) for x in (logp, batch.old_logp))
        metrics["approx_kl"] = diagnostics.approx_kl(new, old, batch.mask, estimator="k3")
        metrics["ratio_max"] = diagnostics.ratio_range(new, old, batch.mask).greatest
        metrics |= clip_metrics(recipe.surrogate, logp, batch, sequences)
    if batch.ref_logp is not None:
        # The policy sampled the tokens, so it comes first in KL(policy || reference).
        new, ref = (_as_compared(recipe, x, sequences) for x in (logp, batch.ref_logp))
        metrics["ref_kl"] = diagnostics.approx_kl(ref, new, batch.mask, estimator="k3")
    if traits_of(recipe.surrogate).orders_responses:
        ref_logp = batch.ref_logp if recipe.uses_reference else None
        scored = scored_items(recipe, logp, ref_logp, batch)
        order = diagnostics.pair_order(
            scored.scores, scored.rewards, where=scored.where, sides=scored.sides
        )
        metrics |= {f"pair_{name}": value for name, value in order._asdict().items()}
        metrics["pairs"] = metrics.pop("pair_pairs")
    if batch.behavior_logp is not None:
        known = batch.mask & batch.extras.get("behavior_known", True)
        gap = diagnostics.mismatch(logp, batch.behavior_logp, known)
        metrics["sampler_gap"], metrics["sampler_gap_max"] = gap.mean_abs, gap.max_abs
        metrics["sampler_kl"] = gap.kl
        metrics["sampler_ess"] = diagnostics.effective_sample_size(logp, batch.behavior_logp, known)
    return jax.tree.map(lambda x: jax.lax.stop_gradient(jnp.asarray(x, jnp.float32)), metrics)


def no_signal(recipe: Recipe, batch: Batch) -> Array:
    """1 if a prepared batch has nothing to learn from, else 0: a float32 scalar.

        signal = some token with a weight has an advantage that is not 0, or is of a text

    A penalty for moving away from the reference and a bonus for entropy are no signal, and neither
    is a decay of weights. A surrogate or a regularizer that learns from labels, demonstrations or a
    teacher (``core.traits(supervised=True)``) has one in every token with a weight.

    Args:
      recipe: The method.
      batch: The prepared batch.
    """
    signal = batch.weights != 0
    functions = (recipe.surrogate, *recipe.regularizers)
    if not any(traits_of(function).supervised for function in functions):
        advantages = jnp.asarray(batch.advantages)
        of_tokens = advantages if advantages.ndim == batch.mask.ndim else advantages[..., None]
        learns = of_tokens != 0
        for part in recipe.parts:
            if (others := part.others(batch)) is not None:
                learns |= others
        signal &= learns
    return 1.0 - jnp.any(signal).astype(jnp.float32)


def _as_compared(recipe: Recipe, logp: Array, mask: Array) -> Array:
    """``logp [P, G, T]`` as the surrogate compares it.

    A bound has no meaning token by token: the part of one is divided by its noise level, so the
    exponential of a difference overflows. A ratio per response takes the mean over its tokens.
    """
    of_responses = traits_of(recipe.surrogate).level == "sequence"
    if not (isinstance(recipe.likelihood, Likelihood) and of_responses):
        return logp
    mean = masking.masked_mean(logp, mask, axis=-1, keepdims=True)
    return jnp.broadcast_to(mean, mask.shape)


class ScoredItems(NamedTuple):
    """The N items per prompt that a method ranks: responses, or the steps of responses.

    Attributes:
      scores: float32 ``[P, N]``, from the model being trained.
      rewards: ``[P, N]``, from the data; or advantages, if the method ranks by advantages.
      where: bool ``[P, N]``, True for valid items.
      sides: int32 ``[P, N]``; items with equal numbers are not compared.
    """

    scores: Array
    rewards: Array
    where: Array
    sides: Array


def scored_items(recipe: Recipe, logp: Array, ref_logp: Array | None, batch: Batch) -> ScoredItems:
    """Scores responses by likelihood or with a reward model, and steps with a process reward model.

    Args:
      recipe: The method, whose surrogate ranks responses.
      logp: ``[P, G, T]``, under the policy, or the values of a head.
      ref_logp: ``[P, G, T]``, under the reference, or None.
      batch: The batch, with the extras that the method reads from the data. A prepared batch is
        ranked by advantages, any other by rewards. Only items that the loss compares take part.
    """
    present = batch.where & jnp.any(batch.mask, axis=-1)
    if recipe.head != "step":
        prepared = batch.advantages is not None and batch.advantages.shape == present.shape
        order = batch.advantages if prepared else batch.rewards
        _, options, names = _unbound(recipe.surrogate)
        sides = _apart(present.shape)
        if options.get("gold"):
            best = jnp.argmax(jnp.where(present, order, -jnp.inf), axis=-1)
            present &= jnp.arange(present.shape[-1]) != best[..., None]
        if "from_reference" in names:
            sides = batch.extras[names["from_reference"]].astype(jnp.int32)
        elif traits_of(recipe.surrogate).compares_extremes:
            best, worst = best_and_worst(order, present)
            present = (best > 0) | (worst > 0)
        if recipe.head is None:
            scores = diagnostics.response_scores(logp, ref_logp, batch.mask)
        else:
            scores = preferences.last_token_value(logp, batch.mask)
        return ScoredItems(scores, order, present, sides)
    labels, is_step = batch.extras["turn_rewards"], batch.extras["turn_where"]
    ids, steps = batch.extras["turn_ids"], labels.shape[-1]
    scores = preferences.step_values(logp, ids, batch.mask, steps=steps)
    # A step that begins and ends within a token has no value.
    read = preferences.step_values(jnp.ones_like(logp), ids, batch.mask, steps=steps) > 0
    flat = (labels.shape[0], -1)
    is_step = is_step & read & present[..., None]
    scores, labels, is_step = (x.reshape(flat) for x in (scores, labels, is_step))
    return ScoredItems(scores, labels, is_step, _apart(scores.shape))


def _apart(shape: tuple[int, ...]) -> Array:
    """A side of its own for each item of a prompt, so that all of them are compared."""
    return jnp.broadcast_to(jnp.arange(shape[-1], dtype=jnp.int32), shape)


def rejection_metrics(recipe: Recipe, batch: Batch, mask: Array) -> dict[str, Array]:
    """Shares of the sampled tokens and sequences that the rules of a correction reject.

    ``rejected_tokens`` and ``rejected_sequences`` are the shares that at least one rule rejects.
    With several rules, each rule also has its shares, such as ``rejected_tokens/RULE``. A recipe
    without rules has none.

    Args:
      recipe: The method; its rules are the ``reject`` of ``corrections.rollout_correction``.
      batch: The prepared batch.
      mask: bool ``[P, G, T]``, the tokens before any rejection.
    """
    known = (corrections.rollout_correction, corrections.sequence_rollout_correction)
    if getattr(recipe.correction, "function", None) not in known:
        return {}
    if not (rules := dict(getattr(recipe.correction, "options", ())).get("reject")):
        return {}
    shares = diagnostics.rejection_metrics(batch.old_logp, batch.behavior_logp, mask, rules=rules)
    metrics = {
        "rejected_tokens": shares.any_tokens,
        "rejected_sequences": shares.any_sequences,
    }
    names = [getattr(getattr(rule, "function", rule), "__name__", "rule") for rule in rules]
    for i, name in enumerate(names if len(names) > 1 else ()):
        label = name if names.count(name) == 1 else f"{name}_{i + 1}"
        metrics[f"rejected_tokens/{label}"] = shares.tokens[i]
        metrics[f"rejected_sequences/{label}"] = shares.sequences[i]
    return metrics


def rollout_metrics(
    collected, rollout, *, ages: np.ndarray | None, reward: Any = None
) -> dict[str, float]:
    """Metrics of a batch that only the host knows.

    - ``reward/NAME``: mean of each reward component over the responses to which it applies, NaN if
      there are none; ``reward_absent/NAME``: the number to which it does not apply, if there are
      any; ``reward_failures``: number of responses whose reward call failed.
    - ``truncated``: share of responses that reached the token limit.
    - ``staleness``, ``staleness_max``: age in updates of the weights that sampled a token, relative
      to the weights being trained: mean and maximum over training tokens with known weights. Left
      out if ``ages`` is None, as where a moving reference samples, whose age is not known.
    - ``groups_sampled``, ``rollouts_sampled``: number of groups and rollouts that began to be
      sampled for this batch; those that go on from an earlier one are not counted again.
      ``sampled_reward``: the mean reward of the policy's rollouts that were sampled (no judges,
      drafts or continuations that estimate a value), whereas ``reward`` is the mean of the batch;
      left out if none of them has ended.
    - ``tokens_sampled``: number of tokens of all rollouts that finished meanwhile, also of dropped
      groups and of those that were sampled ahead and then not needed, and of greedy baselines.
    - ``rollouts/ROLE``: number of rollouts in the batch with a role other than own, if any;
      ``hint_tokens``: tokens in the responses of its hinted rollouts that the data wrote, if any;
      ``tokens_continued``: tokens of continued responses sampled before this batch, if any.
    - ``no_signal``: 1 if no rollout of the batch takes part, so that the step makes no update; the
      step says whether the others have a signal.
    - ``reward``, if only texts take part: the ``sampled_reward``.
    - For episodes, the metrics of :func:`~jaxrl_llm.train.data.episode_fields.episode_metrics`.

    Those of rewards and responses are over the rollouts that take part and are no texts; if there
    are none, over those that have a reward.
    """
    where, scores = collected.where, collected.scores
    responses = where & (collected.roles != TEXT)
    present = responses.reshape(-1) if responses.any() else ~scores.failed
    present = present if present.any() else np.ones(where.size, bool)
    values = {}
    for name, x in scores.reward_components.items():
        if name == "reward":  # the reward itself, which has a metric of its own
            continue
        apply = x[present & ~np.isnan(x)]
        values[f"reward/{name}"] = float(apply.mean()) if apply.size else float("nan")
    graded = present & ~scores.unanswered
    absent = warn_of_absent(reward, scores.reward_components, graded)
    values |= {f"reward_absent/{name}": float(n) for name, n in absent.items() if n}
    values["reward_failures"] = float(collected.failures)
    values["truncated"] = float(np.mean(rollout.finish[present.reshape(where.shape)] == 0))
    if ages is not None:
        ages = ages[rollout.mask & where[..., None] & (np.asarray(rollout.version) >= 0)]
        known = ages if ages.size else np.zeros(1)
        values |= {"staleness": float(known.mean()), "staleness_max": float(known.max())}
    counts = np.bincount(collected.roles[where], minlength=len(_ROLES))
    named = zip(_ROLES, counts, strict=True)
    values |= {f"rollouts/{role}": float(n) for role, n in named if n and role != "own"}
    hinted = where & (collected.roles == HINTED)
    if fixed := np.sum(rollout.mask & hinted[..., None] & (np.asarray(rollout.version) < 0)):
        values["hint_tokens"] = float(fixed)
    if collected.continued:
        values["tokens_continued"] = float(collected.continued)
    values["groups_sampled"] = float(collected.groups)
    values["rollouts_sampled"] = float(collected.rollouts)
    values["tokens_sampled"] = float(collected.tokens)
    values["no_signal"] = float(not where.any())
    if where.any() and not responses.any():  # the step would say 0, as no reward is in its batch
        values["reward"] = collected.reward
    if EPISODES in scores.details:
        values |= episode_metrics(scores, where)
    if not np.isnan(collected.reward):
        values["sampled_reward"] = collected.reward
    return values


def task_metrics(recipe, collected) -> dict[str, float]:
    """Metrics of each task of a recipe, over the policy's rollouts that take part.

    - ``task_reward/NAME``: mean reward; NaN if the batch has none of the task, as is the next one.
    - ``task_satisfied/NAME``: share in which all judges agree, if the reward has this component.

    Empty for a recipe without tasks; see :class:`~jaxrl_llm.recipes.Computed`, "responses".

    Args:
      recipe: The method.
      collected: The rollouts of a batch and their scores.
    """
    values: dict[str, float] = {}
    where, scores = collected.where, collected.scores
    sampled = where & ~np.isin(collected.roles, (DEMONSTRATION, TEXT))
    satisfied = scores.reward_components.get("satisfied")

    def mean(column: np.ndarray, groups: np.ndarray) -> float:
        x = np.asarray(column).reshape(where.shape)[sampled & groups[:, None]]
        x = x[~np.isnan(x)]
        return float(x.mean()) if x.size else float("nan")

    for function in recipe.needs.computed_from("responses").values():
        if not (tasks := getattr(function, "tasks", ())):
            continue
        places = np.array([function.task_of(x.prompt.metadata) for x in collected.questions])
        for place, task in enumerate(tasks):
            values[f"task_reward/{task}"] = mean(scores.rewards, places == place)
            if satisfied is not None:
                values[f"task_satisfied/{task}"] = mean(satisfied, places == place)
    return values


def host_metrics(
    metrics: Mapping[str, Array], numbers: Mapping[str, float], *, seconds: Mapping[str, float]
) -> dict[str, float]:
    """The metrics of a step and its batch as Python floats.

    - ``seconds_sample``, ``seconds_reward``: time to sample and grade the batch, even if this
      happened during another step; with slots, grading time after the last response ended.
    - ``seconds_wait``: time that the loop waited for the batch; the sum of the previous two if
      sampling and training take turns.
    - ``seconds_score``: placing the batch and computing log-probabilities of a frozen reference.
    - ``seconds_train``: the step; ``tokens_per_second`` is over wait, score and train.
    - ``seconds_save``, ``seconds_evaluate``: checkpoints and evaluations since the previous step;
      ``seconds_total``: everything since the previous step.
    """
    values = {name: float(value) for name, value in jax.device_get(metrics).items()}
    of_step = values.get("no_signal", 0.0)
    values |= numbers
    values["no_signal"] = max(values.get("no_signal", 0.0), of_step)
    values |= {f"seconds_{name}": value for name, value in seconds.items()}
    busy = seconds["wait"] + seconds["score"] + seconds["train"]
    trained = values["tokens"] + values.get("text_tokens", 0.0)
    values["tokens_per_second"] = trained / max(busy, 1e-9)
    return values


def clip_metrics(
    surrogate, logp: Array, batch: Batch, sequence_mask: Array | None = None
) -> dict[str, Array]:
    """Shares of tokens or sequences that a surrogate clips; empty if it has no clip.

    ``clip_fraction`` requires the options ``eps_low`` and ``eps_high``, ``dual_clip_fraction`` the
    option ``dual_clip``; what they bound is the trait ``clip`` of the surrogate.

    Args:
      surrogate: A surrogate, bound or not.
      logp: ``[P, G, T]``, under the policy before the update.
      batch: The prepared batch, with ``old_logp``.
      sequence_mask: bool ``[P, G, T]``, the tokens of the ratio of a surrogate that reads
        sequences; None for those of the batch.
    """
    clip, level = traits_of(surrogate).clip, traits_of(surrogate).level
    if clip is None:
        return {}
    function, options, names = _unbound(surrogate)
    defaults = {k: p.default for k, p in inspect.signature(function).parameters.items()}
    # An option that the batch has under a name is not known here.
    options = {k: v for k, v in (defaults | options).items() if k not in names}
    name = names.get("old_logp", "old_logp")
    old_logp = getattr(batch, name) if hasattr(batch, name) else batch.extras[name]
    advantages, mask, metrics = batch.advantages, batch.mask, {}
    if sequence_mask is not None and traits_of(surrogate).reads_sequence:
        mask = sequence_mask
    low, high, dual = (options.get(option) for option in ("eps_low", "eps_high", "dual_clip"))
    if clip != "dual" and low is not None and high is not None:
        unit = level
        if clip == "log_ratio":
            low, high, unit = -jnp.expm1(-low), jnp.expm1(high), "token"
        metrics["clip_fraction"] = diagnostics.clip_fraction(
            logp, old_logp, advantages, mask, eps_low=low, eps_high=high, level=unit
        )
    if dual is not None:
        metrics["dual_clip_fraction"] = diagnostics.dual_clip_fraction(
            logp, old_logp, advantages, mask, dual_clip=dual, level=level
        )
    return metrics


def _unbound(surrogate: Any) -> tuple[Any, dict[str, Any], dict[str, str]]:
    """The function of a surrogate, its bound options, and parameters with the entries they read."""
    options: dict[str, Any] = {}
    names: dict[str, str] = {}
    function = surrogate
    while (inner := getattr(function, "function", None)) is not None:  # bound, or given other names
        options = dict(getattr(function, "options", ())) | options
        renamed = dict(getattr(function, "names", ()))
        outer = {k: v for k, v in names.items() if k not in renamed.values()}
        names = outer | {old: names.get(new, new) for old, new in renamed.items()}
        function = inner
    return function, options, names
