"""Losses of pairs that need no reference.

The package describes the shared arguments. Each loss returns one value per pair, to be averaged
over the pairs. A negative log-likelihood is the mean over the tokens of a response; TRL takes the
mean over the tokens of a batch. All raise TypeError for a wrong dtype and ValueError for a wrong
shape or an option out of range.
"""

import math

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking
from jaxrl_llm.preferences import scores

# Tokens of probability 1 have infinite odds.
_MOST_LIKELY = -1e-6


def sft(
    chosen_logp: Array,
    *,
    per_token: bool = True,
    chosen_lengths: Array | None = None,
    where: Array | None = None,
) -> Array:
    """Negative log-likelihood of the chosen response, often added to a preference loss.

        loss = -chosen_logp / chosen_lengths

    Args:
      chosen_logp, chosen_lengths, where: See the package.
      per_token: Takes the mean over the tokens; False takes the sum, which needs no lengths.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.preferences.sft(jnp.array([-6.0]), chosen_lengths=jnp.array([3])).tolist()
      [2.0]

    References:
      Pang et al. (arXiv:2404.19733), who add it to DPO; TRL's ``sft``.
    """
    scores.check_rows("sft", where, chosen_logp=chosen_logp)
    chosen = masking.zero_masked(chosen_logp, where)
    return -scores.per_token("sft", chosen, chosen_lengths, where) if per_token else -chosen


def simpo(
    chosen_logp: Array,
    rejected_logp: Array,
    *,
    chosen_lengths: Array,
    rejected_lengths: Array,
    beta: float = 2.0,
    gamma: float = 1.0,
    alpha: float = 0.0,
    label_smoothing: float = 0.0,
    where: Array | None = None,
) -> Array:
    """Simple preference optimization: mean log-probabilities per token should differ by a margin.

        a = logp / lengths;   with alpha:  a = (1 - exp(-alpha logp / lengths)) / alpha
        z = beta (a_w - a_l) - gamma
        loss = -(1 - e) log sigmoid(z) - e log sigmoid(-z),   e = label_smoothing

    The authors report gamma as a share of beta.

    Args:
      chosen_logp, rejected_logp, chosen_lengths, rejected_lengths, where: See the package.
      label_smoothing: See the package.
      beta: Above 0.
      gamma: Margin, not negative.
      alpha: Shape of the rewards of AlphaPO; 0 for SimPO.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> chosen, rejected, lengths = jnp.array([-4.0]), jnp.array([-6.0]), jnp.array([4])
      >>> loss = jr.preferences.simpo(
      ...     chosen, rejected, chosen_lengths=lengths, rejected_lengths=lengths)
      >>> loss.round(4).tolist()
      [0.693...]

    References:
      Meng et al., SimPO (arXiv:2405.14734), beta 2 and gamma / beta 0.5 as for Llama-3-Base; Gupta
      et al., AlphaPO (arXiv:2501.03884).
    """
    function = "simpo"
    chosen, rejected = _policy(function, chosen_logp, rejected_logp, where)
    chosen, rejected = scores.both_per_token(
        function, chosen, rejected, chosen_lengths, rejected_lengths, where
    )
    checks.check_positive(function, finite=True, beta=beta)
    checks.check_non_negative(function, finite=True, gamma=gamma)
    scores.check_smoothing(function, label_smoothing)
    chosen, rejected = (scores.power_score(x, -alpha) for x in (chosen, rejected))
    loss = scores.logistic(beta * (chosen - rejected) - gamma, label_smoothing)
    return masking.zero_masked(loss, where)


def cpo(
    chosen_logp: Array,
    rejected_logp: Array,
    *,
    chosen_lengths: Array,
    beta: float = 0.1,
    likelihood: float = 1.0,
    label_smoothing: float = 0.0,
    where: Array | None = None,
) -> Array:
    """Contrastive preference optimization: a preference, and the likelihood of the chosen response.

        z = beta (chosen_logp - rejected_logp)
        loss = -(1 - e) log sigmoid(z) - e log sigmoid(-z) - likelihood chosen_logp / chosen_lengths

    Args:
      chosen_logp, rejected_logp, chosen_lengths, where: See the package.
      beta, label_smoothing: See the package.
      likelihood: Weight of the negative log-likelihood, not negative.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, lengths = jnp.array([-6.0]), jnp.array([3])
      >>> jr.preferences.cpo(logp, logp, chosen_lengths=lengths).round(4).tolist()
      [2.693...]

    References:
      Xu et al., CPO (arXiv:2401.08417), who sum the log-likelihood over tokens; TRL takes the mean.
    """
    function = "cpo"
    chosen, rejected = _policy(function, chosen_logp, rejected_logp, where)
    checks.check_positive(function, finite=True, beta=beta)
    checks.check_non_negative(function, finite=True, likelihood=likelihood)
    scores.check_smoothing(function, label_smoothing)
    loss = scores.logistic(beta * (chosen - rejected), label_smoothing)
    loss -= likelihood * scores.per_token(function, chosen, chosen_lengths, where)
    return masking.zero_masked(loss, where)


def orpo(
    chosen_logp: Array,
    rejected_logp: Array,
    *,
    chosen_lengths: Array,
    rejected_lengths: Array,
    beta: float = 0.1,
    chosen_nll: Array | None = None,
    where: Array | None = None,
) -> Array:
    """Odds ratio preference optimization: the likelihood and the odds of the chosen response.

        a = logp / lengths,   log odds = a - log(1 - exp(a))
        loss = -a_w - beta log sigmoid(log odds_w - log odds_l)

    ``a`` is at most -1e-6.

    Args:
      chosen_logp, rejected_logp, chosen_lengths, rejected_lengths, where: See the package.
      beta: lambda of the paper, above 0.
      chosen_nll: ``[...]``, floating point, replaces ``-a_w``, for example by the mean over the
        tokens of prompt and response, as in TRL.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> chosen, rejected, lengths = jnp.array([-4.0]), jnp.array([-6.0]), jnp.array([4])
      >>> loss = jr.preferences.orpo(
      ...     chosen, rejected, chosen_lengths=lengths, rejected_lengths=lengths)
      >>> loss.round(4).tolist()
      [1.040...]

    References:
      Hong et al., ORPO (arXiv:2403.07691).
    """
    function = "orpo"
    chosen, rejected = _policy(function, chosen_logp, rejected_logp, where)
    scores.check_rows(function, where, chosen_logp=chosen_logp, chosen_nll=chosen_nll)
    chosen, rejected = scores.both_per_token(
        function, chosen, rejected, chosen_lengths, rejected_lengths, where
    )
    checks.check_positive(function, finite=True, beta=beta)
    nll = -chosen if chosen_nll is None else masking.zero_masked(chosen_nll, where)
    loss = nll + beta * scores.logistic(_log_odds(chosen) - _log_odds(rejected))
    return masking.zero_masked(loss, where)


def slic(
    chosen_logp: Array,
    rejected_logp: Array,
    target_logp: Array | None = None,
    *,
    margin: float = 1.0,
    likelihood: float = 1.0,
    per_token: bool = False,
    chosen_lengths: Array | None = None,
    rejected_lengths: Array | None = None,
    target_lengths: Array | None = None,
    where: Array | None = None,
) -> Array:
    """Sequence likelihood calibration: a hinge, and the likelihood of a target.

        loss = max(0, margin - (chosen_logp - rejected_logp)) - likelihood target_logp

    With ``per_token`` each of the three log-probabilities is divided by its length. :func:`hinge`
    is the form with a reference.

    Args:
      chosen_logp, rejected_logp, where: See the package.
      chosen_lengths, rejected_lengths, per_token: See the package.
      target_logp: ``[...]``, floating point, for the response in the data; None for the chosen one.
      margin: Above 0.
      likelihood: Weight of the likelihood of the target, not negative.
      target_lengths: ``[...]``, numbers, tokens of the target response.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> chosen, rejected = jnp.array([-10.0]), jnp.array([-14.0])
      >>> jr.preferences.slic(chosen, rejected, margin=5.0, likelihood=0.0).tolist()
      [1.0]

    References:
      Zhao et al., SLiC-HF (arXiv:2305.10425). Confidence: ABSTRACT for the weights, which are ours.
    """
    function = "slic"
    chosen, rejected = _policy(function, chosen_logp, rejected_logp, where)
    scores.check_rows(function, where, chosen_logp=chosen_logp, target_logp=target_logp)
    checks.check_positive(function, finite=True, margin=margin)
    checks.check_non_negative(function, finite=True, likelihood=likelihood)
    if target_logp is None:
        checks.check_no_effect(function, "without target_logp", target_lengths=target_lengths)
    target = chosen if target_logp is None else masking.zero_masked(target_logp, where)
    if per_token:
        lengths = chosen_lengths if target_logp is None else target_lengths
        target = scores.per_token(function, target, lengths, where, "target_lengths")
        chosen, rejected = scores.both_per_token(
            function, chosen, rejected, chosen_lengths, rejected_lengths, where
        )
    loss = jax.nn.relu(margin - (chosen - rejected)) - likelihood * target
    return masking.zero_masked(loss, where)


def tpo(
    chosen_logp: Array,
    rejected_logp: Array,
    target_logp: Array,
    *,
    target_lengths: Array,
    beta: float = 0.01,
    gamma: float = 0.0,
    likelihood: float = 1.0,
    label_smoothing: float = 0.0,
    per_token: bool = False,
    chosen_lengths: Array | None = None,
    rejected_lengths: Array | None = None,
    where: Array | None = None,
) -> Array:
    """Triple preference optimization: a preference, and the likelihood of a third, gold response.

        z = beta (chosen_logp - rejected_logp) - gamma
        loss = -(1 - e) log sigmoid(z) - e log sigmoid(-z) - likelihood target_logp / target_lengths

    With ``per_token`` both log-probabilities in z are divided by their lengths; with ``gamma=0.5``
    this is TPO-L.

    Args:
      chosen_logp, rejected_logp, where, beta, label_smoothing: See the package.
      chosen_lengths, rejected_lengths, per_token: See the package.
      target_logp: ``[...]``, floating point, for the gold response.
      target_lengths: ``[...]``, numbers, tokens of the gold response.
      gamma: Margin, not negative.
      likelihood: Weight of the likelihood of the gold response, not negative.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, lengths = jnp.array([-6.0]), jnp.array([3])
      >>> jr.preferences.tpo(logp, logp, logp, target_lengths=lengths).round(4).tolist()
      [2.693...]

    References:
      Saeidi et al., TPO (arXiv:2405.16681); the defaults are TRL's.
    """
    function = "tpo"
    chosen, rejected = _policy(function, chosen_logp, rejected_logp, where)
    scores.check_rows(function, where, chosen_logp=chosen_logp, target_logp=target_logp)
    if per_token:
        chosen, rejected = scores.both_per_token(
            function, chosen, rejected, chosen_lengths, rejected_lengths, where
        )
    checks.check_positive(function, finite=True, beta=beta)
    checks.check_non_negative(function, finite=True, gamma=gamma, likelihood=likelihood)
    scores.check_smoothing(function, label_smoothing)
    target = masking.zero_masked(target_logp, where)
    loss = scores.logistic(beta * (chosen - rejected) - gamma, label_smoothing)
    loss -= likelihood * scores.per_token(function, target, target_lengths, where, "target_lengths")
    return masking.zero_masked(loss, where)


def _policy(function, chosen_logp, rejected_logp, where) -> tuple[Array, Array]:
    """Checks the arrays of pairs; returns them in float32, 0 where absent."""
    scores.check_rows(function, where, chosen_logp=chosen_logp, rejected_logp=rejected_logp)
    return masking.zero_masked(chosen_logp, where), masking.zero_masked(rejected_logp, where)


def _log_odds(logp: Array) -> Array:
    """``logp - log(1 - exp(logp))``, by the more accurate of two forms."""
    logp = jnp.minimum(logp, _MOST_LIKELY)
    likely = logp > -math.log(2.0)
    near = jnp.log(-jnp.expm1(jnp.where(likely, logp, -1.0)))
    far = jnp.log1p(-jnp.exp(jnp.where(likely, -1.0, logp)))
    return logp - jnp.where(likely, near, far)
