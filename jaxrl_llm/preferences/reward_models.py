"""Losses of reward models: of pairs, of soft labels, and of the steps of a response.

Shared arguments:
  ``chosen_rewards``, ``rejected_rewards``: ``[...]``, floating point, the output of the reward
    model for the preferred response and for the other one.
  ``where``: bool ``[...]``, True for valid pairs; the others are ignored and get a loss of 0.
    None for all.

For a ranked group use :func:`pair_logistic` or :func:`plackett_luce`, with the rewards as scores.
All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option out of range.

In a recipe the surrogates are :func:`paired_rewards`, :func:`listed_rewards` and
:func:`step_rewards`. They read the values of a head instead of log-probabilities:
  ``values``: ``[..., G, T]``, floating point, the output of the head for the text up to and
    including each token.
  ``old_logp``: Not used.
  ``advantages``: ``[..., G]``; only their order matters.
  ``mask``: bool ``[..., G, T]``, True for the tokens of a response; a response without tokens does
    not belong to its group.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, call_with, checks, masking, traits
from jaxrl_llm.preferences.groups import best_and_worst
from jaxrl_llm.preferences.listwise import pair_logistic


def bradley_terry(
    chosen_rewards: Array,
    rejected_rewards: Array,
    *,
    margin: float | Array = 0.0,
    centering: float = 0.0,
    label_smoothing: float = 0.0,
    where: Array | None = None,
) -> Array:
    """The logistic loss of a reward model on pairs.

        d = r_w - r_l - margin
        loss = -(1 - e) log sigmoid(d) - e log sigmoid(-d) + centering (r_w + r_l)^2

    Pairs determine rewards only up to a constant per prompt; centering pulls their mean to 0.

    Args:
      chosen_rewards, rejected_rewards, where: See the module.
      margin: Not negative: a number, or ``[...]`` from the strength of each label.
      centering: Not negative.
      label_smoothing: e, the share of labels that are wrong, in [0, 0.5).

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> one, half = jnp.array([1.0]), jnp.array([0.5])
      >>> jr.preferences.bradley_terry(one, half).round(4).tolist()
      [0.4740...]

    References:
      Christiano et al. (arXiv:1706.03741) for the model; the margin of Llama 2 (arXiv:2307.09288);
      the centering of Eisenstein et al. (arXiv:2312.09244), who use 0.01. TRL's reward trainer.
    """
    function = "bradley_terry"
    _check(function, where, chosen_rewards=chosen_rewards, rejected_rewards=rejected_rewards)
    if jnp.ndim(margin):
        checks.check_shape(function, "margin", margin, jnp.shape(chosen_rewards))
    checks.check_non_negative(function, finite=True, margin=margin, centering=centering)
    checks.check_share(function, one=False, label_smoothing=label_smoothing)
    if isinstance(label_smoothing, (int, float)) and label_smoothing >= 0.5:
        raise ValueError(f"{function}: label_smoothing must be below 0.5; got {label_smoothing:g}.")
    chosen, rejected = (masking.zero_masked(x, where) for x in (chosen_rewards, rejected_rewards))
    margin = jnp.broadcast_to(jnp.asarray(margin, jnp.float32), chosen.shape)
    d = chosen - rejected - masking.zero_masked(margin, where)
    loss = (1.0 - label_smoothing) * jax.nn.softplus(-d) + label_smoothing * jax.nn.softplus(d)
    return masking.zero_masked(loss + centering * (chosen + rejected) ** 2, where)


def soft_bradley_terry(
    first_rewards: Array,
    second_rewards: Array,
    probabilities: Array,
    *,
    where: Array | None = None,
) -> Array:
    """The cross-entropy of a reward model with soft labels, the probability of a preference.

        loss = -p log sigmoid(r_1 - r_2) - (1 - p) log sigmoid(r_2 - r_1)

    The minimum is at ``sigmoid(r_1 - r_2) = p``; with p = 1 it is :func:`bradley_terry`.

    Args:
      first_rewards: ``[...]``, floating point.
      second_rewards: ``[...]``, floating point.
      probabilities: ``[...]``, floating point, p in [0, 1]: such as the share of the judges that
        prefer the first.
      where: See the module.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> zero, p = jnp.zeros(1), jnp.array([0.7])
      >>> jr.preferences.soft_bradley_terry(zero, zero, p).round(4).tolist()
      [0.693...]

    References:
      Bradley and Terry (1952), with a soft label; the cross-entropy of DPO's labels
      (arXiv:2305.18290) with a share of votes.
    """
    function = "soft_bradley_terry"
    _check(
        function,
        where,
        first_rewards=first_rewards,
        second_rewards=second_rewards,
        probabilities=probabilities,
    )
    first, second = (masking.zero_masked(x, where) for x in (first_rewards, second_rewards))
    p, d = masking.zero_masked(probabilities, where), first - second
    return masking.zero_masked(jax.nn.softplus(d) - p * d, where)


def process_reward(logits: Array, labels: Array, marks: Array) -> Array:
    """The loss of a process reward model: whether each step is correct, read at its last token.

        loss[t] = -y log sigmoid(z[t]) - (1 - y) log sigmoid(-z[t])     at marks, else 0

    A model with two classes has ``z = logit of right - logit of wrong``. The mean over the marks of
    a batch is the loss of a token classifier.

    Args:
      logits: ``[..., T]``, floating point, z.
      labels: ``[..., T]``, y: bool, or numbers in [0, 1], such as the share of rollouts from that
        step that succeed; read only at the marks.
      marks: bool ``[..., T]``, True at the last token of each step that has a label, see
        :func:`step_marks`.

    Returns:
      Token loss ``[..., T]``, float32, 0 elsewhere.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> marks = jnp.array([False, True, False, True])
      >>> labels = jnp.array([False, True, False, False])
      >>> jr.preferences.process_reward(jnp.zeros(4), labels, marks).round(3).tolist()
      [0.0, 0.693..., 0.0, 0.693...]

    References:
      Lightman et al. (arXiv:2305.20050); Uesato et al. (arXiv:2211.14275). The PRM trainer of TRL
      1.13, the last version to have one.
    """
    function = "process_reward"
    checks.check_mask(function, marks, name="marks")
    checks.check_min_rank(function, 1, logits=logits)
    checks.check_float(function, logits=logits)
    checks.check_same_shape(function, logits=logits, labels=labels, marks=marks)
    z, y = masking.zero_masked(logits, marks), masking.zero_masked(labels, marks)
    return masking.zero_masked(jax.nn.softplus(z) - y * z, marks)


def step_marks(step_ids: Array, mask: Array, *, last_only: bool = False) -> Array:
    """Marks the last token of each step of a response, where a process reward model is read.

        mark[t] = mask[t]  and  the next unmasked token is of another step, or there is none

    Args:
      step_ids: integers ``[..., T]``, the step of each token, nondecreasing; below 0 for none.
      mask: bool ``[..., T]``, True = keep.
      last_only: Whether only the last step of a response is marked.

    Returns:
      bool ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> steps = jnp.array([0, 0, 1, 1, 1])
      >>> jr.preferences.step_marks(steps, jnp.arange(5) < 4).tolist()
      [False, True, False, True, False]

    References:
      TRL 1.13's PRM trainer labels the separator that ends a step; ``last_only`` is its
      ``train_on_last_step_only``.
    """
    function = "step_marks"
    checks.check_mask(function, mask)
    checks.check_min_rank(function, 1, mask=mask)
    checks.check_integer(function, step_ids=step_ids)
    checks.check_same_shape(function, step_ids=step_ids, mask=mask)
    taken = jnp.asarray(mask) & (jnp.asarray(step_ids) >= 0)
    if last_only:
        return masking.last_token(taken)
    # The step of the next token that counts; none is later than any step.
    none = jnp.iinfo(jnp.int32).max
    ids = jnp.where(taken, step_ids, none).astype(jnp.int32)
    later = jax.lax.cummin(ids, axis=ids.ndim - 1, reverse=True)
    later = jnp.concatenate([later[..., 1:], jnp.full_like(later[..., :1], none)], axis=-1)
    return taken & (later > ids)


def last_token_value(values: Array, mask: Array) -> Array:
    """The output of a reward model at the last token of each response.

        r = values[t],  t the last token with mask[t]

    Args:
      values: ``[..., T]``, floating point, one a token.
      mask: bool ``[..., T]``, True for the tokens of the response; gaps are allowed.

    Returns:
      ``[...]`` float32; 0 for an empty response.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> values, mask = jnp.array([[1.0, 2.0, 3.0]] * 2), jnp.array([[1, 1, 0], [0, 0, 0]], bool)
      >>> jr.preferences.last_token_value(values, mask).tolist()
      [2.0, 0.0]

    References:
      The sequence classifiers of transformers and TRL's ``get_reward`` read the same token.
    """
    masking.check_tokens("last_token_value", mask, values=values)
    return masking.masked_sum(values, masking.last_token(jnp.asarray(mask)), axis=-1)


def step_values(values: Array, step_ids: Array, mask: Array, *, steps: int) -> Array:
    """The output of a process reward model at the end of each step.

        r[k] = values[t],  t the last token with mask[t] of step k

    Args:
      values: ``[..., T]``, floating point, one a token.
      step_ids, mask: As in :func:`step_marks`.
      steps: K, at least 1; steps from K on are dropped.

    Returns:
      ``[..., K]`` float32; 0 for a step without a token.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> values, ids = jnp.array([1.0, 2.0, 3.0]), jnp.array([0, 0, 1])
      >>> jr.preferences.step_values(values, ids, jnp.ones(3, bool), steps=2).tolist()
      [2.0, 3.0]

    References:
      Lightman et al. (arXiv:2305.20050).
    """
    function = "step_values"
    masking.check_tokens(function, mask, values=values)
    checks.check_count(function, steps=steps)
    marks = step_marks(step_ids, mask)
    ends = marks[..., None] & (jnp.asarray(step_ids)[..., None] == jnp.arange(steps))
    return masking.masked_sum(jnp.asarray(values)[..., None], ends, axis=-2)


@traits(
    takes_correction=False,
    policy_gradient=False,
    level="sequence",
    orders_responses=True,
    compares_extremes=True,
    reads_head=True,
)
def paired_rewards(
    values: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    margins: Array | None = None,
    loss: Callable = bradley_terry,
) -> Array:
    """The loss of a reward model on the pairs of a group: its best responses against its worst.

        loss[i, t] = mean over w and l of loss(r_w, r_l)        at every token of the group
        r = values at the last token;   w, l = of the greatest and of the least advantage

    Args:
      values, old_logp, advantages, mask: See the module.
      margins: ``[...]``, one per group, the ``margin`` of the loss; None for its default.
      loss: ``(chosen_rewards, rejected_rewards, where=...) -> [...]``, such as
        ``bind(preferences.bradley_terry, margin=1.0)``.

    Returns:
      Token loss ``[..., G, T]``, float32, 0 where masked or without a pair.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> values, mask = jnp.array([[9.0, 1.0], [9.0, 0.5]]), jnp.ones((2, 2), bool)
      >>> loss = jr.preferences.paired_rewards(values, None, jnp.array([1.0, -1.0]), mask)
      >>> loss[:, 0].round(4).tolist()
      [0.4740..., 0.4740...]

    References:
      Stiennon et al. (arXiv:2009.01325); TRL's reward trainer reads the same token.
    """
    del old_logp
    rewards, there = _of_responses("paired_rewards", values, advantages, mask)
    best, worst = best_and_worst(advantages, there)
    shares = best[..., :, None] * worst[..., None, :]
    shape, compared = jnp.shape(shares), shares > 0
    # Pairs that are not compared may have an infinite loss.
    chosen = masking.zero_masked(rewards[..., :, None], compared)
    rejected = masking.zero_masked(rewards[..., None, :], compared)
    context = {"where": compared}
    if margins is not None:
        checks.check_shape("paired_rewards", "margins", margins, shape[:-2])
        context["margin"] = jnp.broadcast_to(jnp.asarray(margins)[..., None, None], shape)
    losses = masking.zero_masked(call_with(loss, chosen, rejected, context=context), compared)
    return _over_tokens(jnp.sum(shares * losses, axis=(-1, -2))[..., None], mask)


@traits(
    takes_correction=False,
    policy_gradient=False,
    level="sequence",
    orders_responses=True,
    reads_head=True,
)
def listed_rewards(
    values: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    rewards: Array,
    loss: Callable = pair_logistic,
) -> Array:
    """A listwise loss of a reward model, over all responses of a group at once.

        loss[i, t] = loss(r, rewards)        at every token of the group;   r as in paired_rewards

    Args:
      values, old_logp, advantages, mask: See the module.
      rewards: ``[..., G]``, from the data; greater is better.
      loss: ``(scores, labels, where=...) -> [...]``, a listwise loss such as :func:`pair_logistic`
        or :func:`plackett_luce`.

    Returns:
      Token loss ``[..., G, T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> values, mask = jnp.array([[9.0, 1.0], [9.0, 0.5]]), jnp.ones((2, 2), bool)
      >>> labels = jnp.array([1.0, 0.0])
      >>> loss = jr.preferences.listed_rewards(values, None, labels, mask, rewards=labels)
      >>> loss[:, 0].round(4).tolist()
      [0.4740..., 0.4740...]

    References:
      Ouyang et al., InstructGPT (arXiv:2203.02155), all pairs of a ranked group.
    """
    del old_logp
    function = "listed_rewards"
    checks.check_float(function, rewards=rewards)
    scores, there = _of_responses(function, values, advantages, mask)
    checks.check_same_shape(function, rewards=rewards, advantages=advantages)
    labels = masking.zero_masked(rewards, there)
    losses = call_with(loss, scores, labels, context={"where": there})
    return _over_tokens(losses[..., None], mask)


@traits(
    takes_correction=False,
    policy_gradient=False,
    orders_responses=True,
    reads_head=True,
    supervised=True,
)
def step_rewards(
    values: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    turn_rewards: Array,
    turn_where: Array,
    turn_ids: Array,
) -> Array:
    """The loss of a process reward model on the labels of the steps of each response.

        loss[t] = process_reward(values[t], turn_rewards[turn_ids[t]])   at the end of each step

    Args:
      values, old_logp, mask: See the module; ``mask`` may mark only the last tokens of steps.
      advantages: Not used.
      turn_rewards: ``[..., G, K]``, the label of each step, in [0, 1].
      turn_where: bool ``[..., G, K]``, True for the steps that have a label.
      turn_ids: integers ``[..., G, T]``, the step of each token, nondecreasing; below 0 for none.
        An id of K or more is an error and gives NaN, as in
        :func:`~jaxrl_llm.advantages.turns_to_tokens`.

    Returns:
      Token loss ``[..., G, T]``, float32, 0 elsewhere.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> values, ids = jnp.zeros((1, 3)), jnp.array([[0, 0, 1]])
      >>> jr.preferences.step_rewards(
      ...     values, None, jnp.zeros(1), jnp.ones((1, 3), bool),
      ...     turn_rewards=jnp.array([[1.0, 0.0]]), turn_where=jnp.ones((1, 2), bool),
      ...     turn_ids=ids).round(3).tolist()
      [[0.0, 0.693..., 0.693...]]

    References:
      Lightman et al. (arXiv:2305.20050).
    """
    del old_logp, advantages
    function = "step_rewards"
    masking.check_tokens(function, mask, values=values)
    checks.check_float(function, turn_rewards=turn_rewards)
    checks.check_bool(function, turn_where=turn_where)
    checks.check_same_shape(function, turn_rewards=turn_rewards, turn_where=turn_where)
    marks, steps = step_marks(turn_ids, mask), jnp.shape(turn_rewards)[-1]
    place = jnp.clip(turn_ids, 0, steps - 1)
    there = jnp.take_along_axis(jnp.asarray(turn_where), place, axis=-1)
    labels = jnp.take_along_axis(jnp.asarray(turn_rewards, jnp.float32), place, axis=-1)
    loss = process_reward(values, labels, marks & there & (turn_ids < steps))
    return jnp.where(marks & (turn_ids >= steps), jnp.nan, loss)


def _of_responses(
    function: str, values: Array, advantages: Array, mask: Array
) -> tuple[Array, Array]:
    """The reward of each response ``[..., G]``, and whether it is there."""
    checks.check_min_rank(function, 2, values=values)
    checks.check_float(function, advantages=advantages)
    checks.check_shape(function, "advantages", advantages, jnp.shape(values)[:-1])
    return last_token_value(values, mask), jnp.any(mask, axis=-1)


def _over_tokens(value: Array, mask: Array) -> Array:
    """A loss of each group at every token of its responses."""
    return masking.zero_masked(jnp.broadcast_to(value[..., None], jnp.shape(mask)), mask)


def _check(function: str, where: Array | None, **arrays: Array) -> None:
    checks.check_bool(function, where=where)
    checks.check_alike(function, arrays, where=where)
