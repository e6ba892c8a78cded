"""Losses of the difference between two responses, a chosen one and a rejected one.

    h = g(log-ratio of the chosen) - g(log-ratio of the rejected),   log-ratio = logp - ref_logp

If the policy equals its reference, h is 0. The package describes the shared arguments.
Two options change h:
  ``divergence``: The regularizer, which determines g: "reverse_kl" (g(x) = x),
    "forward_kl" (1 - exp(-x)), "js" (log 2 + log sigmoid(x)) or "alpha"
    ((exp((alpha - 1) x) - 1) / (alpha - 1), the exponent at most 80).
  ``alpha``: Order of the divergence "alpha", None for 0.5; 1 is the reverse KL, 0 the forward KL.

Each loss returns one value per pair, to be averaged over the pairs. No gradient flows into the
reference. All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option out
of range.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking
from jaxrl_llm.preferences import scores


def dpo(
    chosen_logp: Array,
    rejected_logp: Array,
    chosen_ref_logp: Array,
    rejected_ref_logp: Array,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    robust: bool = False,
    margin: float | Array = 0.0,
    likelihood: float = 0.0,
    divergence: str = "reverse_kl",
    alpha: float | None = None,
    per_token: bool = False,
    chosen_lengths: Array | None = None,
    rejected_lengths: Array | None = None,
    where: Array | None = None,
) -> Array:
    """Direct preference optimization: makes the chosen response likelier than the rejected one.

        z = beta h - margin
        loss = -(1 - e) log sigmoid(z) - e log sigmoid(-z),   e = label_smoothing
        robust:  loss = (-(1 - e) log sigmoid(z) + e log sigmoid(-z)) / (1 - 2 e)
        likelihood:  adds -likelihood chosen_logp / chosen_lengths

    With ``label_smoothing`` it is conservative DPO. The robust loss is unbiased if a share e of the
    labels is flipped, and it may be negative. With ``per_token`` it is TRL's ``sigmoid_norm``. With
    a ``margin`` it is DPO with an offset. With a ``likelihood`` it is RPO: without that term the
    difference may grow while the chosen response becomes less likely.

    Args:
      chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where: See the package.
      chosen_lengths, rejected_lengths, per_token, beta, label_smoothing: See the package.
      divergence, alpha: See the module.
      robust: Corrects for wrong labels; their share is ``label_smoothing``.
      margin: A number or ``[...]``, by how much the reward of the chosen response should exceed the
        reward of the rejected one, such as the difference of their grades.
      likelihood: Weight of the mean negative log-likelihood per token of the chosen response, not
        negative; it needs ``chosen_lengths``.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp = jnp.array([[-10.0], [-14.0], [-11.0], [-13.0]])
      >>> jr.preferences.dpo(*logp).round(4).tolist()
      [0.598...]

    References:
      Rafailov et al., DPO (arXiv:2305.18290); Chowdhury et al., robust DPO (arXiv:2403.00409); Wang
      et al., f-divergences (arXiv:2309.16240), alpha as in TRL; Amini et al., the offset
      (arXiv:2402.10571); Pang et al., RPO (arXiv:2404.19733).
    """
    function = "dpo"
    h = _difference(
        function,
        chosen_logp,
        rejected_logp,
        chosen_ref_logp,
        rejected_ref_logp,
        divergence,
        alpha,
        where,
        per_token,
        chosen_lengths,
        rejected_lengths,
    )
    checks.check_positive(function, finite=True, beta=beta)
    scores.check_smoothing(function, label_smoothing)
    checks.check_option(function, "robust", robust, (True, False))
    z = beta * h - scores.per_pair(function, "margin", margin, h, where)
    checks.check_non_negative(function, finite=True, likelihood=likelihood)
    if not robust:
        loss = scores.logistic(z, label_smoothing)
    elif label_smoothing == 0:
        raise ValueError("dpo: robust=True has no effect with label_smoothing=0; leave it out.")
    else:
        loss = scores.logistic(z) - label_smoothing / (1 - 2 * label_smoothing) * z
    if likelihood:
        logp = masking.zero_masked(chosen_logp, where)
        loss -= likelihood * scores.per_token(function, logp, chosen_lengths, where)
    return masking.zero_masked(loss, where)


def ipo(
    chosen_logp: Array,
    rejected_logp: Array,
    chosen_ref_logp: Array,
    rejected_ref_logp: Array,
    *,
    beta: float = 0.1,
    divergence: str = "reverse_kl",
    alpha: float | None = None,
    per_token: bool = False,
    chosen_lengths: Array | None = None,
    rejected_lengths: Array | None = None,
    where: Array | None = None,
) -> Array:
    """Identity preference optimization: regresses the difference to a margin.

        loss = (h - 1 / (2 beta))^2

    Args:
      chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where: See the package.
      chosen_lengths, rejected_lengths, per_token: See the package.
      divergence, alpha: See the module.
      beta: tau of the paper, above 0.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp = jnp.array([[-10.0], [-14.0], [-11.0], [-13.0]])
      >>> jr.preferences.ipo(*logp).round(4).tolist()
      [9.0]

    References:
      Azar et al., IPO (arXiv:2310.12036), with sums; TRL uses ``per_token``.
    """
    function = "ipo"
    h = _difference(
        function,
        chosen_logp,
        rejected_logp,
        chosen_ref_logp,
        rejected_ref_logp,
        divergence,
        alpha,
        where,
        per_token,
        chosen_lengths,
        rejected_lengths,
    )
    checks.check_positive(function, finite=True, beta=beta)
    return masking.zero_masked(scores.square_to_target(h, 0.5 / beta), where)


def hinge(
    chosen_logp: Array,
    rejected_logp: Array,
    chosen_ref_logp: Array,
    rejected_ref_logp: Array,
    *,
    beta: float = 0.1,
    margin: float = 1.0,
    divergence: str = "reverse_kl",
    alpha: float | None = None,
    where: Array | None = None,
) -> Array:
    """The hinge loss of the difference: no gradient once the margin is met.

        loss = max(0, margin - beta h)

    :func:`slic` is the form without a reference.

    Args:
      chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where, beta: See the package.
      divergence, alpha: See the module.
      margin: Above 0.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp = jnp.array([[-10.0], [-14.0], [-11.0], [-13.0]])
      >>> jr.preferences.hinge(*logp, beta=0.25).tolist()
      [0.5]

    References:
      Liu et al. (arXiv:2309.06657), who call it SLiC-norm; TRL's ``hinge``.
    """
    function = "hinge"
    h = _difference(
        function,
        chosen_logp,
        rejected_logp,
        chosen_ref_logp,
        rejected_ref_logp,
        divergence,
        alpha,
        where,
    )
    checks.check_positive(function, finite=True, beta=beta, margin=margin)
    return masking.zero_masked(jax.nn.relu(margin - beta * h), where)


def exo_pair(
    chosen_logp: Array,
    rejected_logp: Array,
    chosen_ref_logp: Array,
    rejected_ref_logp: Array,
    *,
    beta: float = 0.1,
    label_smoothing: float = 1e-3,
    divergence: str = "reverse_kl",
    alpha: float | None = None,
    where: Array | None = None,
) -> Array:
    """Efficient exact optimization of a pair: the reverse KL to smoothed labels.

        q = sigmoid(beta h)
        loss = q log(q / (1 - e)) + (1 - q) log((1 - q) / e),   e = label_smoothing

    DPO is the forward KL.

    Args:
      chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where, beta: See the package.
      divergence, alpha: See the module.
      label_smoothing: In (0, 0.5).

    Returns:
      ``[...]`` float32, not negative.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> zero = jnp.zeros(1)
      >>> jr.preferences.exo_pair(zero, zero, zero, zero).round(4).tolist()
      [2.7...]

    References:
      Ji et al., EXO (arXiv:2402.00856), equation 16.
    """
    function = "exo_pair"
    h = _difference(
        function,
        chosen_logp,
        rejected_logp,
        chosen_ref_logp,
        rejected_ref_logp,
        divergence,
        alpha,
        where,
    )
    checks.check_positive(function, beta=beta, label_smoothing=label_smoothing)
    scores.check_smoothing(function, label_smoothing)
    z = beta * h
    q, log_q, log_rest = jax.nn.sigmoid(z), -jax.nn.softplus(-z), -jax.nn.softplus(z)
    loss = q * (log_q - jnp.log1p(-label_smoothing))
    loss += jax.nn.sigmoid(-z) * (log_rest - jnp.log(label_smoothing))
    return masking.zero_masked(loss, where)


def discopop(
    chosen_logp: Array,
    rejected_logp: Array,
    chosen_ref_logp: Array,
    rejected_ref_logp: Array,
    *,
    beta: float = 0.1,
    tau: float = 0.05,
    divergence: str = "reverse_kl",
    alpha: float | None = None,
    where: Array | None = None,
) -> Array:
    """Discovered preference optimization: a logistic loss that turns into an exponential one.

        z = beta h,   m = sigmoid(z / tau)
        loss = -(1 - m) log sigmoid(z) + m exp(-z)

    It is not convex.

    Args:
      chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where, beta: See the package.
      divergence, alpha: See the module.
      tau: Temperature of the blend, in (0, 1].

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> zero = jnp.zeros(1)
      >>> jr.preferences.discopop(zero, zero, zero, zero).round(4).tolist()
      [0.846...]

    References:
      Lu et al., DiscoPOP (arXiv:2406.08414), equation 5.
    """
    function = "discopop"
    h = _difference(
        function,
        chosen_logp,
        rejected_logp,
        chosen_ref_logp,
        rejected_ref_logp,
        divergence,
        alpha,
        where,
    )
    checks.check_positive(function, finite=True, beta=beta)
    checks.check_share(function, zero=False, tau=tau)
    z = beta * h
    # As one exponential, since the two factors of its product may be 0 and infinite.
    exponential = jnp.exp(-jax.nn.softplus(-z / tau) - z)
    loss = jax.nn.sigmoid(-z / tau) * jax.nn.softplus(-z) + exponential
    return masking.zero_masked(loss, where)


def _difference(
    function,
    chosen_logp,
    rejected_logp,
    chosen_ref_logp,
    rejected_ref_logp,
    divergence,
    alpha,
    where,
    per_token=False,
    chosen_lengths=None,
    rejected_lengths=None,
) -> Array:
    """Checks the arrays of pairs; returns h."""
    chosen, rejected = scores.log_ratios(
        function, chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where
    )
    scores.check_divergence(function, divergence, alpha)
    chosen = scores.divergence_score(chosen, divergence, alpha)
    rejected = scores.divergence_score(rejected, divergence, alpha)
    checks.check_option(function, "per_token", per_token, (True, False))
    if per_token:
        chosen, rejected = scores.both_per_token(
            function, chosen, rejected, chosen_lengths, rejected_lengths, where
        )
    return chosen - rejected
