"""Losses of pairs that judge the two responses one by one, each against the reference.

    x = beta (logp - ref_logp)

The package describes the shared arguments. Each loss returns one value per pair, to be averaged
over the pairs. No gradient flows into the reference. All raise TypeError for a wrong dtype and
ValueError for a wrong shape or an option out of range.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking
from jaxrl_llm.preferences import scores


def bco(
    chosen_logp: Array,
    rejected_logp: Array,
    chosen_ref_logp: Array,
    rejected_ref_logp: Array,
    *,
    beta: float = 0.1,
    center: float | Array = 0.0,
    where: Array | None = None,
) -> Array:
    """Binary classification of the two responses, one by one.

        loss = -log sigmoid(x_w - d) - log sigmoid(-(x_l - d)),   x = beta (logp - ref_logp)

    Args:
      chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where, beta: See the package.
      center: ``[]``, d: a running mean of the implicit rewards, treated as a constant.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> zero = jnp.zeros(1)
      >>> jr.preferences.bco(zero, zero, zero, zero).round(4).tolist()
      [1.386...]

    References:
      Jung et al., binary classifier optimization (arXiv:2404.04656), as a loss of pairs; TRL uses
      ``center=0``.
    """
    chosen, rejected = _implicit(
        "bco", chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, beta, where
    )
    checks.check_rank("bco", 0, center=center)
    d = jax.lax.stop_gradient(jnp.asarray(center, jnp.float32))
    loss = jax.nn.softplus(d - chosen) + jax.nn.softplus(rejected - d)
    return masking.zero_masked(loss, where)


def nca_pair(
    chosen_logp: Array,
    rejected_logp: Array,
    chosen_ref_logp: Array,
    rejected_ref_logp: Array,
    *,
    beta: float = 0.1,
    where: Array | None = None,
) -> Array:
    """Noise contrastive alignment of a pair: the chosen response does not become less likely.

        loss = -log sigmoid(x_w) - log sigmoid(-x_w) / 2 - log sigmoid(-x_l) / 2

    Args:
      chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where, beta: See the package.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> zero = jnp.zeros(1)
      >>> jr.preferences.nca_pair(zero, zero, zero, zero).round(4).tolist()
      [1.386...]

    References:
      Chen et al., NCA (arXiv:2402.05369), of two responses with rewards 1 and 0; as in TRL.
    """
    chosen, rejected = _implicit(
        "nca_pair", chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, beta, where
    )
    softplus = jax.nn.softplus
    loss = softplus(-chosen) + (softplus(chosen) + softplus(rejected)) / 2
    return masking.zero_masked(loss, where)


def apo_zero(
    chosen_logp: Array,
    rejected_logp: Array,
    chosen_ref_logp: Array,
    rejected_ref_logp: Array,
    *,
    beta: float = 0.1,
    where: Array | None = None,
) -> Array:
    """Anchored preference optimization, for chosen responses that are better than the model's own.

        loss = 1 - sigmoid(x_w) + sigmoid(x_l)

    The likelihood of the chosen response rises and that of the rejected one falls.

    Args:
      chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where, beta: See the package.

    Returns:
      ``[...]`` float32, in (0, 2).

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> zero = jnp.zeros(1)
      >>> jr.preferences.apo_zero(zero, zero, zero, zero).tolist()
      [1.0]

    References:
      D'Oosterlinck et al., APO-zero (arXiv:2408.06266), equation 7.
    """
    chosen, rejected = _implicit(
        "apo_zero", chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, beta, where
    )
    loss = jax.nn.sigmoid(-chosen) + jax.nn.sigmoid(rejected)
    return masking.zero_masked(loss, where)


def apo_down(
    chosen_logp: Array,
    rejected_logp: Array,
    chosen_ref_logp: Array,
    rejected_ref_logp: Array,
    *,
    beta: float = 0.1,
    where: Array | None = None,
) -> Array:
    """Anchored preference optimization, for chosen responses that are worse than the model's own.

        loss = sigmoid(x_w) + 1 - sigmoid(x_w - x_l)

    Both likelihoods fall, and the likelihood of the rejected response falls further.

    Args:
      chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where, beta: See the package.

    Returns:
      ``[...]`` float32, in (0, 2).

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> zero = jnp.zeros(1)
      >>> jr.preferences.apo_down(zero, zero, zero, zero).tolist()
      [1.0]

    References:
      D'Oosterlinck et al., APO-down (arXiv:2408.06266), equation 8.
    """
    chosen, rejected = _implicit(
        "apo_down", chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, beta, where
    )
    loss = jax.nn.sigmoid(chosen) + jax.nn.sigmoid(rejected - chosen)
    return masking.zero_masked(loss, where)


def mpo(
    chosen_logp: Array,
    rejected_logp: Array,
    chosen_ref_logp: Array,
    rejected_ref_logp: Array,
    *,
    chosen_lengths: Array,
    beta: float = 0.1,
    preference: float = 0.8,
    quality: float = 0.2,
    likelihood: float = 1.0,
    center: float | Array = 0.0,
    where: Array | None = None,
) -> Array:
    """Mixed preference optimization: preference, quality and likelihood of the chosen response.

        loss = preference dpo + quality bco - likelihood chosen_logp / chosen_lengths

    With ``preference=1``, ``quality=0`` and ``likelihood=5`` it is CGPO's CODPO, on the pairs of
    ``curation.constrained_pairs``.

    Args:
      chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where, beta: See the package.
      chosen_lengths: See the package.
      preference: Weight of :func:`dpo`, not negative.
      quality: Weight of :func:`bco`, not negative.
      likelihood: Weight of the mean negative log-likelihood per token, not negative.
      center: As in :func:`bco`.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> zero, lengths = jnp.zeros(1), jnp.array([4])
      >>> jr.preferences.mpo(zero, zero, zero, zero, chosen_lengths=lengths).round(4).tolist()
      [0.831...]

    References:
      Wang et al., MPO (arXiv:2411.10442), with the weights of TRL's documentation; used with GRPO
      by Skywork R1V2 (arXiv:2504.16656). CODPO: CGPO (arXiv:2409.20370). TRL and the paper average
      the log-likelihood over the tokens of a batch; we average over the tokens of each response.
    """
    function = "mpo"
    chosen, rejected = _implicit(
        function, chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, beta, where
    )
    checks.check_non_negative(
        function, finite=True, preference=preference, quality=quality, likelihood=likelihood
    )
    checks.check_rank(function, 0, center=center)
    d = jax.lax.stop_gradient(jnp.asarray(center, jnp.float32))
    logp = masking.zero_masked(chosen_logp, where)
    loss = (
        preference * scores.logistic(chosen - rejected)
        + quality * (jax.nn.softplus(d - chosen) + jax.nn.softplus(rejected - d))
        - likelihood * scores.per_token(function, logp, chosen_lengths, where)
    )
    return masking.zero_masked(loss, where)


def _implicit(
    function, chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, beta, where
) -> tuple[Array, Array]:
    """Checks the arrays of pairs; returns the implicit rewards."""
    chosen, rejected = scores.log_ratios(
        function, chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where
    )
    checks.check_positive(function, finite=True, beta=beta)
    return beta * chosen, beta * rejected
