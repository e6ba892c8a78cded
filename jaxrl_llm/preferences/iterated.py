"""Self-play losses: pairs of samples, against the policy of an earlier iteration.

An iteration samples from its initial policy, judges the samples and trains on them; its final
policy starts the next iteration. Each loss reads, besides the policy:

============  ======================================================================================
sppo          the previous policy as the reference, and win rates of both responses
inpo          a fixed reference and the previous policy
mnpo          a fixed reference and several earlier policies
nash_md       the reference, token by token, and the win rate against a mixed policy, which
              mixture_win_rates estimates from the policy's samples
xpo           the reference, which samples one of the two responses
seppo         a random earlier policy as the reference, which samples the rejected response
============  ======================================================================================

The package describes the shared arguments. Each loss returns one value per pair (nash_md one per
response), to be averaged. Gradients flow only into the policy being trained. All raise TypeError
for a wrong dtype and ValueError for a wrong shape or an option out of range.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, call_with, checks, masking
from jaxrl_llm.preferences import scores
from jaxrl_llm.preferences.listwise import snis_weights
from jaxrl_llm.preferences.pairwise import dpo


def sppo(
    chosen_logp: Array,
    rejected_logp: Array,
    chosen_ref_logp: Array,
    rejected_ref_logp: Array,
    *,
    chosen_win_rate: float | Array = 1.0,
    rejected_win_rate: float | Array = 0.0,
    beta: float = 1e-3,
    where: Array | None = None,
) -> Array:
    """Self-play preference optimization: each log-ratio is regressed to the win rate.

        loss = ((r_w - (p_w - 1/2) / beta)^2 + (r_l - (p_l - 1/2) / beta)^2) / 2
        r = logp - ref_logp,   p = win rate against the previous policy

    The default win rates, 1 and 0, are hard labels. Win rates of p and 1 - p mean that the chosen
    response beats the rejected one with probability p.

    Args:
      chosen_logp, rejected_logp, where: See the package.
      chosen_ref_logp, rejected_ref_logp: As in the package, under the previous policy.
      chosen_win_rate: A number or ``[...]``, in [0, 1].
      rejected_win_rate: The same for the rejected response.
      beta: 1 / eta of the paper, above 0.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp = jnp.array([[-10.0], [-14.0], [-11.0], [-13.0]])
      >>> jr.preferences.sppo(*logp, chosen_win_rate=0.5, beta=1.0).tolist()
      [0.625]

    References:
      Wu et al., SPPO (arXiv:2405.00675). TRL's ``sppo_hard`` is the sum of the two squares, without
      the half.
    """
    function = "sppo"
    chosen, rejected = scores.log_ratios(
        function, chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where
    )
    checks.check_positive(function, finite=True, beta=beta)
    win = scores.per_pair(function, "chosen_win_rate", chosen_win_rate, chosen, where)
    loss = scores.square_to_target(chosen, (win - 0.5) / beta)
    win = scores.per_pair(function, "rejected_win_rate", rejected_win_rate, rejected, where)
    loss += scores.square_to_target(rejected, (win - 0.5) / beta)
    return masking.zero_masked(loss / 2, where)


def inpo(
    chosen_logp: Array,
    rejected_logp: Array,
    chosen_ref_logp: Array,
    rejected_ref_logp: Array,
    chosen_previous_logp: Array,
    rejected_previous_logp: Array,
    *,
    eta: float = 0.0075,
    ratio: float = 1 / 3,
    preference: float | Array | None = None,
    where: Array | None = None,
) -> Array:
    """Iterative Nash policy optimization: a step from the previous policy, near a reference.

        h = (logp_w - logp_l) - ratio (ref_logp_w - ref_logp_l)
            - (1 - ratio) (previous_logp_w - previous_logp_l)
        loss = (h - 1 / (2 eta))^2
        preference:  loss = p (h - 1 / (2 eta))^2 + (1 - p) (h + 1 / (2 eta))^2

    With ``ratio=1`` it is :func:`ipo` against the reference, with ``ratio=0`` against the previous
    policy.

    Args:
      chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where: See the package.
      chosen_previous_logp, rejected_previous_logp: ``[...]``, floating point, under the policy that
        sampled both responses.
      eta: Step size, above 0.
      ratio: tau / eta, the strength of the pull toward the reference, in [0, 1].
      preference: p, a number or ``[...]``: the probability that the chosen response wins; None for
        hard labels.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp = jnp.array([[-10.0], [-14.0], [-11.0], [-13.0], [-10.5], [-13.0]])
      >>> jr.preferences.inpo(*logp, eta=0.25).round(4).tolist()
      [0.111...]

    References:
      Zhang et al., INPO (arXiv:2407.00617), in the form of MNPO's code and with its defaults.
    """
    function = "inpo"
    scores.check_rows(
        function,
        where,
        chosen_logp=chosen_logp,
        rejected_logp=rejected_logp,
        chosen_ref_logp=chosen_ref_logp,
        rejected_ref_logp=rejected_ref_logp,
        chosen_previous_logp=chosen_previous_logp,
        rejected_previous_logp=rejected_previous_logp,
    )
    checks.check_positive(function, finite=True, eta=eta)
    checks.check_share(function, ratio=ratio)
    if preference is not None:
        scores.per_pair(function, "preference", preference, chosen_logp, where)
    return mnpo(
        chosen_logp,
        rejected_logp,
        chosen_ref_logp,
        rejected_ref_logp,
        jnp.expand_dims(chosen_previous_logp, -1),
        jnp.expand_dims(rejected_previous_logp, -1),
        eta=eta,
        ratio=ratio,
        preference=preference,
        where=where,
    )


def mnpo(
    chosen_logp: Array,
    rejected_logp: Array,
    chosen_ref_logp: Array,
    rejected_ref_logp: Array,
    chosen_history_logp: Array,
    rejected_history_logp: Array,
    *,
    weights: Array | None = None,
    history_where: Array | None = None,
    eta: float = 0.0075,
    ratio: float = 1 / 3,
    preference: float | Array | None = None,
    where: Array | None = None,
) -> Array:
    """Multiplayer Nash preference optimization: a step from several earlier policies.

        h = (logp_w - logp_l) - ratio (ref_logp_w - ref_logp_l)
            - (1 - ratio) sum_j weights_j (history_logp_w,j - history_logp_l,j) / sum_j weights_j
        loss = (h - 1 / (2 eta))^2

    Without an earlier policy the last term is 0.

    Args:
      chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where: See the package.
      chosen_history_logp, rejected_history_logp: ``[..., J]``, floating point, under J policies.
      weights: ``[J]``, floating point, not negative; None for equal weights.
      history_where: bool ``[J]``, True for valid policies; None for all.
      eta, ratio, preference: As in :func:`inpo`.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp = jnp.array([[-10.0], [-14.0], [-11.0], [-13.0]])
      >>> history = jnp.array([[[-10.5, -10.0]], [[-13.0, -12.5]]])
      >>> jr.preferences.mnpo(*logp, *history, eta=0.25).round(4).tolist()
      [0.111...]

    References:
      Wu et al., MNPO (arXiv:2509.23102), as released.
    """
    function = "mnpo"
    scores.check_rows(
        function,
        where,
        chosen_logp=chosen_logp,
        rejected_logp=rejected_logp,
        chosen_ref_logp=chosen_ref_logp,
        rejected_ref_logp=rejected_ref_logp,
    )
    checks.check_float(
        function,
        chosen_history_logp=chosen_history_logp,
        rejected_history_logp=rejected_history_logp,
    )
    history = {"chosen_history_logp": chosen_history_logp}
    history |= {"rejected_history_logp": rejected_history_logp}
    count = jnp.shape(chosen_history_logp)[-1:]
    for name, x in history.items():
        checks.check_shape(function, name, x, (*jnp.shape(chosen_logp), *count))
    checks.check_bool(function, history_where=history_where)
    checks.check_positive(function, finite=True, eta=eta)
    checks.check_share(function, ratio=ratio)
    present = jnp.ones(count, bool) if history_where is None else jnp.asarray(history_where)
    checks.check_shape(function, "history_where", present, count)
    share = jnp.ones(count, jnp.float32) if weights is None else weights
    checks.check_shape(function, "weights", share, count)
    share = masking.zero_masked(share, present)
    share = share / jnp.maximum(jnp.sum(share), jnp.finfo(jnp.float32).tiny)

    taken = present if where is None else present & jnp.asarray(where)[..., None]
    earlier = masking.safe_log_ratio(chosen_history_logp, rejected_history_logp, taken)
    ref = masking.safe_log_ratio(chosen_ref_logp, rejected_ref_logp, where)
    anchor = jax.lax.stop_gradient(ratio * ref + (1 - ratio) * jnp.sum(share * earlier, axis=-1))
    h = masking.safe_log_ratio(chosen_logp, rejected_logp, where) - anchor
    loss = scores.square_to_target(h, 0.5 / eta)
    if preference is not None:
        p = scores.per_pair(function, "preference", preference, h, where)
        loss = p * loss + (1 - p) * scores.square_to_target(h, -0.5 / eta)
    return masking.zero_masked(loss, where)


def nash_md(
    logp: Array, ref_logp: Array, mask: Array, win_rate: Array, *, beta: float = 0.1
) -> Array:
    """The objective of Nash mirror descent: win against a mixed policy, near the reference.

        loss = -(p - 1/2) sum_t logp_t + beta sum_t sg(logp_t - ref_logp_t) logp_t

    The opponent samples from a geometric mixture of policy and reference; :func:`mixture_win_rates`
    estimates p from the policy's samples alone. Only the gradient of this loss has a meaning: it
    is REINFORCE with a baseline of 1/2 and a penalty per token.

    Args:
      logp, ref_logp: ``[..., T]``, floating point, log-probabilities (nats) of the tokens that the
        policy sampled, under policy and reference.
      mask: bool ``[..., T]``, True for tokens of the response.
      win_rate: ``[...]``, floating point, p: the probability that the response wins.
      beta: Weight of the penalty, not negative.

    Returns:
      ``[...]`` float32, one value per response.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.full((1, 2), -1.0), jnp.ones((1, 2), bool)
      >>> jr.preferences.nash_md(logp, logp, mask, jnp.array([1.0])).tolist()
      [1.0]

    References:
      Munos et al., Nash-MD (arXiv:2312.00886), with TRL's penalty.
    """
    function = "nash_md"
    masking.check_tokens(function, mask, logp=logp, ref_logp=ref_logp)
    checks.check_float(function, win_rate=win_rate)
    checks.check_shape(function, "win_rate", win_rate, jnp.shape(logp)[:-1])
    checks.check_non_negative(function, finite=True, beta=beta)
    ratio = jax.lax.stop_gradient(masking.safe_log_ratio(logp, ref_logp, mask))
    logp = masking.zero_masked(logp, mask)
    win = masking.zero_masked(win_rate, jnp.any(mask, axis=-1))
    score = masking.product(jax.lax.stop_gradient(win) - 0.5, jnp.sum(logp, axis=-1))
    return masking.product(beta, jnp.sum(masking.product(ratio, logp), axis=-1)) - score


def mixture_win_rates(
    probabilities: Array,
    logp: Array,
    ref_logp: Array,
    *,
    mixture: float = 0.5,
    where: Array | None = None,
) -> Array:
    """How often a sample of the policy beats one of a geometric mixture of policy and reference.

        w_j ~ exp(mixture (ref_logp_j - logp_j))        over the other samples of its group
        p_i = sum_j w_j P_ij

    The weights turn samples of the policy into samples of ``policy^(1 - mixture) ref^mixture``, so
    no further samples are needed. In a group of two the opponent is the other sample.

    Args:
      probabilities: ``[..., G, G]``, floating point, in [0, 1]: the probability that i beats j,
        such as :func:`jaxrl_llm.curation.win_rate_matrix`.
      logp, ref_logp: ``[..., G]``, floating point, log-probabilities (nats) of complete responses
        under the policy that sampled them and under the reference.
      mixture: Weight of the reference, in [0, 1]; 0 is the policy against itself.
      where: bool ``[..., G]``, True for valid samples; None for all.

    Returns:
      ``[..., G]`` float32, without a gradient; 1/2 if a group has no other sample, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> wins = jnp.array([[0.5, 1.0, 0.0], [0.0, 0.5, 0.0], [1.0, 1.0, 0.5]])
      >>> logp = jnp.array([-1.0, -1.0, -3.0])
      >>> jr.preferences.mixture_win_rates(wins, logp, jnp.full(3, -1.0)).round(3).tolist()
      [0.269..., 0.0, 1.0]

    References:
      Munos et al., Nash-MD (arXiv:2312.00886), section 6. The weights are ours: the paper and TRL
      mix the distributions of each token, sample the opponent and take one comparison.
    """
    function = "mixture_win_rates"
    scores.check_rows(function, where, logp=logp, ref_logp=ref_logp)
    checks.check_float(function, probabilities=probabilities)
    size = jnp.shape(logp)[-1]
    shape = (*jnp.shape(logp), size)
    checks.check_shape(function, "probabilities", probabilities, shape)
    checks.check_share(function, mixture=mixture)
    there = jnp.ones(jnp.shape(logp), bool) if where is None else jnp.asarray(where)
    others = there[..., :, None] & there[..., None, :] & ~jnp.eye(size, dtype=bool)
    score = mixture * masking.safe_log_ratio(ref_logp, logp, there)
    weights = snis_weights(jnp.broadcast_to(score[..., None, :], shape), where=others)
    rate = jnp.sum(weights * masking.zero_masked(probabilities, others), axis=-1)
    rate = jnp.where(jnp.any(others, axis=-1), rate, 0.5)
    return jax.lax.stop_gradient(masking.zero_masked(rate, there))


def xpo(
    chosen_logp: Array,
    rejected_logp: Array,
    chosen_ref_logp: Array,
    rejected_ref_logp: Array,
    policy_chosen: Array,
    *,
    alpha: float = 1e-5,
    loss: Callable = dpo,
    where: Array | None = None,
) -> Array:
    """Exploratory preference optimization: a preference loss, and less weight on reference samples.

        loss = dpo + alpha logp of the response that the reference sampled

    The policy samples the other response. The extra term drives it to explore responses that the
    reference would not sample.

    Args:
      chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where: See the package.
      policy_chosen: bool ``[...]``, True where the policy sampled the chosen response and the
        reference the rejected one, False for the reverse.
      alpha: Optimism, not negative.
      loss: The loss of the pair: :func:`dpo`, or ``bind(preferences.ipo, beta=0.1)``.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, ours = jnp.full((4, 1), -2.0), jnp.array([True])
      >>> jr.preferences.xpo(*logp, ours, alpha=0.1).round(4).tolist()
      [0.493...]

    References:
      Xie et al., XPO (arXiv:2405.21046), as in TRL.
    """
    function = "xpo"
    checks.check_bool(function, policy_chosen=policy_chosen)
    checks.check_same_shape(function, chosen_logp=chosen_logp, policy_chosen=policy_chosen)
    checks.check_non_negative(function, finite=True, alpha=alpha)
    context = {"where": where}
    value = call_with(
        loss, chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, context=context
    )
    sampled = jnp.where(policy_chosen, rejected_logp, chosen_logp)
    return value + alpha * masking.zero_masked(sampled, where)


def seppo(
    chosen_logp: Array,
    rejected_logp: Array,
    chosen_ref_logp: Array,
    rejected_ref_logp: Array,
    *,
    beta: float = 0.1,
    scale: float | Array = 1.0,
    tolerance: float = 1e-5,
    where: Array | None = None,
) -> Array:
    """Semi-policy preference optimization: push away or learn a sample of an earlier policy.

        loss = -log sigmoid(beta scale ((logp_w - ref_logp_w) - s (logp_l - ref_logp_l)))
        s = seppo_sign(chosen_logp, chosen_ref_logp, tolerance=tolerance)

    The rejected response is a sample of the reference, an earlier policy drawn by
    :func:`sample_reference`. For diffusion models the log-probabilities are negative squared errors
    of the predicted noise at one noise level, and ``beta scale`` is beta T w(t).

    Args:
      chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where, beta: See the package.
      scale: A number or ``[...]``, not negative, the weight of a noise level.
      tolerance: As in :func:`seppo_sign`.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> errors = jnp.array([[0.30], [0.50], [0.40], [0.45]])
      >>> jr.preferences.seppo(*-errors, beta=1.0).tolist()
      [0.62...]

    References:
      Zhang et al., SePPO (arXiv:2410.05255), for diffusion models; using it for language models is
      ours. Confidence: PAPER.
    """
    function = "seppo"
    chosen, rejected = scores.log_ratios(
        function, chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where
    )
    checks.check_positive(function, finite=True, beta=beta)
    weight = scores.per_pair(function, "scale", scale, chosen, where)
    sign = seppo_sign(
        masking.zero_masked(chosen_logp, where),
        masking.zero_masked(chosen_ref_logp, where),
        tolerance=tolerance,
    )
    return masking.zero_masked(scores.logistic(beta * weight * (chosen - sign * rejected)), where)


def seppo_sign(chosen_logp: Array, chosen_ref_logp: Array, *, tolerance: float = 1e-5) -> Array:
    """Whether the sample of the reference is pushed away (+1) or learned (-1).

        +1 where chosen_logp >= chosen_ref_logp - tolerance |chosen_ref_logp|, else -1

    A reference that predicts the chosen response better than the policy is likely to sample good
    responses too. Two programs round the log-probabilities of one policy differently; the tolerance
    counts such differences as ties.

    Args:
      chosen_logp, chosen_ref_logp: ``[...]``, floating point.
      tolerance: Relative difference that counts as a tie, not negative; a model that computes in
        bfloat16 rounds more coarsely and needs about 1e-2.

    Returns:
      ``[...]`` float32, without a gradient.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.preferences.seppo_sign(jnp.array([-1.0, -3.0]), jnp.array([-2.0, -2.0])).tolist()
      [1.0, -1.0]

    References:
      Zhang et al., SePPO (arXiv:2410.05255); the tolerance and +1 for ties are ours.
      Confidence: PAPER.
    """
    function = "seppo_sign"
    scores.check_rows(function, None, chosen_logp=chosen_logp, chosen_ref_logp=chosen_ref_logp)
    checks.check_non_negative(function, finite=True, tolerance=tolerance)
    ref_logp = jnp.asarray(chosen_ref_logp, jnp.float32)
    least = ref_logp - tolerance * jnp.abs(ref_logp)
    sign = jnp.where(jnp.asarray(chosen_logp, jnp.float32) >= least, 1.0, -1.0)
    return jax.lax.stop_gradient(sign)


def sample_reference(key: Array, count: int | Array) -> Array:
    """Draws an earlier policy uniformly, as the reference of an iteration.

    Args:
      key: Typed PRNG key.
      count: How many earlier policies are stored, above 0; may be traced.

    Returns:
      ``[]`` int32, from 0 to ``count - 1``.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> int(jr.preferences.sample_reference(jax.random.key(0), 1))
      0

    References:
      Zhang et al., SePPO (arXiv:2410.05255), who report that it works better than the first or the
      latest policy. Confidence: PAPER.
    """
    checks.check_positive("sample_reference", count=count)
    return jax.random.randint(key, (), 0, count, jnp.int32)
