"""One-token rollouts: supervised data trained as a bandit over the next token.

- ``beta``: Reward of a token other than the target, whose reward is 1.
- ``tau``: Sampling temperature, above 0, in addition to any temperature already in the logits. The
  paper (Ming et al., One-Token Rollout, arXiv:2509.26313) states only that it is above 1; the value
  is ours.

Targets are the data's next tokens, and logits are teacher-forced on the data. Other shared
arguments, TypeError and ValueError: see :mod:`jaxrl_llm.surrogates`.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, traits
from jaxrl_llm.surrogates import _inputs


def otr_exact(logits: Array, targets: Array, *, beta: float = -0.1, tau: float = 1.3) -> Array:
    """Expected policy-gradient loss of one sampled token, in closed form.

        q = stop_gradient(softmax(logits / tau)),  p = softmax(logits)
        loss = -(q[x] log p[x] + beta sum_{a != x} q[a] log p[a])

    The limit of :func:`otr_sampled` for many samples. With tau = 1 its gradient is (1 - beta) times
    that of ``-stop_gradient(p[x]) log p[x]``, the loss of dynamic fine-tuning, which is beta = 0;
    for beta = 1 every token has the same reward and the gradient vanishes.

    Args:
      logits, targets: See the package.
      beta, tau: See the module.

    Returns:
      Loss ``[...]``, float32, one per token.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logits, target = jnp.array([1.0, 0.0, -1.0]), jnp.array(0)
      >>> round(float(jr.surrogates.otr_exact(logits, target, tau=1.0)), 6)
      0.215032

    References:
      Ming et al., One-Token Rollout (arXiv:2509.26313), PAPER reading. The closed form is ours.
    """
    log_p = _check("otr_exact", logits, targets, tau)
    q = jax.lax.stop_gradient(jax.nn.softmax(jnp.asarray(logits, jnp.float32) / tau, axis=-1))
    # A token that cannot be sampled has log-probability -inf, which must not meet its weight of 0.
    log_p = jnp.where(q > 0, log_p, 0.0)
    hit = jnp.arange(logits.shape[-1]) == targets[..., None]
    return -jnp.sum(jnp.where(hit, 1.0, beta) * q * log_p, axis=-1)


def otr_sampled(
    logits: Array,
    targets: Array,
    *,
    token_seeds: Array,
    samples: int = 256,
    beta: float = -0.1,
    tau: float = 1.3,
) -> Array:
    """Policy-gradient loss of tokens sampled at each position, rewarded if they match the data.

        a_k ~ softmax(logits / tau),  R_k = 1 if a_k = x else beta,  k = 1 .. samples
        loss = -(1 / samples) sum_k R_k log softmax(logits)[a_k]

    Its expected value and gradient are those of :func:`otr_exact`, which is not more expensive.

    Args:
      logits, targets: See the package.
      beta, tau: See the module.
      token_seeds: uint32 ``[...]``, one per token, so that the samples depend neither on the chunk
        nor on the microbatch: see :func:`token_seeds`.
      samples: Number of tokens drawn at each position, K in the paper, above 0.

    Returns:
      Loss ``[...]``, float32, one per token.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logits, targets = jnp.zeros((2, 4)), jnp.array([0, 3])
      >>> seeds = jax.random.bits(jax.random.key(0), (2,), jnp.uint32)
      >>> loss = jr.surrogates.otr_sampled(logits, targets, token_seeds=seeds, beta=1.0)
      >>> loss.round(4)  # all rewarded alike: log 4
      Array([1.3863, 1.3863], dtype=float32)

    References:
      Ming et al., One-Token Rollout (arXiv:2509.26313), PAPER reading. Tokens are drawn by
      inverting the cumulative distribution in float32.
    """
    name = "otr_sampled"
    checks.check_positive(name, samples=samples)
    log_p = _check(name, logits, targets, tau)
    checks.check_integer(name, token_seeds=token_seeds)
    checks.check_same_shape(name, targets=targets, token_seeds=token_seeds)
    scaled = jax.lax.stop_gradient(jnp.asarray(logits, jnp.float32)) / tau
    flat = scaled.reshape(-1, scaled.shape[-1])

    def draw(row: Array, seed: Array) -> Array:
        mass = jnp.cumsum(jnp.exp(row - jnp.max(row)))
        points = jax.random.uniform(jax.random.key(seed), (samples,)) * mass[-1]
        ids = jnp.searchsorted(mass, points, side="right")
        # A point that rounds up to the total would fall behind the last token with a probability.
        return jnp.minimum(ids, jnp.searchsorted(mass, mass[-1], side="left"))

    drawn = jax.vmap(draw)(flat, token_seeds.reshape(-1)).reshape(*targets.shape, samples)
    rewards = jnp.where(drawn == targets[..., None], 1.0, beta)
    return -jnp.mean(rewards * jnp.take_along_axis(log_p, drawn, axis=-1), axis=-1)


def token_seeds(advantages: Array, *, key: Array, mask: Array) -> Array:
    """A random seed for every token, which a Recipe computes from the batch.

    Args:
      advantages: Not used: every function computed from the batch receives them.
      key: Typed PRNG key of the step.
      mask: See the package; only its shape counts. More padding leaves the seeds as they are.

    Returns:
      uint32 ``[..., T]``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> key, short, padded = jax.random.key(0), jnp.ones((2, 3), bool), jnp.ones((2, 5), bool)
      >>> seeds = jr.surrogates.token_seeds(None, key=key, mask=short)
      >>> longer = jr.surrogates.token_seeds(None, key=key, mask=padded)
      >>> bool((longer[:, :3] == seeds).all())  # padding changes no seed
      True

    References:
      None: the seeds of the samples of :func:`otr_sampled`.
    """
    checks.check_mask("token_seeds", mask)
    # A key a position, so that padding behind a sequence changes no draw.
    keys = jax.vmap(lambda t: jax.random.fold_in(key, t))(jnp.arange(mask.shape[-1]))
    return jax.vmap(lambda k: jax.random.bits(k, mask.shape[:-1], jnp.uint32), out_axes=-1)(keys)


@traits(takes_correction=False, policy_gradient=False, has_ratio=False, supervised=True)
def otr(
    logp: Array, old_logp: Array | None, advantages: Array, mask: Array, *, one_token_loss: Array
) -> Array:
    """The loss of one-token rollouts, computed by a statistic of the logits.

        loss[t] = one_token_loss[t]

    The "rollouts" of the batch are demonstrations. Rewards and advantages have no influence; the
    gradient flows through the statistic, :func:`otr_exact` or :func:`otr_sampled`.

    Args:
      logp, old_logp, advantages, mask: See the package. All but the mask are checked and not used:
        every surrogate receives them.
      one_token_loss: ``[..., T]``, from the statistic.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.array([-1.0, -2.0]), jnp.array([True, False])
      >>> jr.surrogates.otr(logp, None, jnp.zeros(()), mask, one_token_loss=jnp.array([0.2, 9.0]))
      Array([0.2, 0. ], dtype=float32)

    References:
      Ming et al., One-Token Rollout (arXiv:2509.26313), PAPER reading; averaged over tokens
      (``aggregate.token_mean``).
    """
    _inputs.prepare("otr", logp, old_logp, advantages, mask)
    checks.check_float("otr", one_token_loss=one_token_loss)
    checks.check_same_shape("otr", logp=logp, one_token_loss=one_token_loss)
    return masking.zero_masked(one_token_loss, mask)


def _check(function: str, logits: Array, targets: Array, tau) -> Array:
    """Checks the arguments; returns the log-probabilities of all tokens."""
    checks.check_positive(function, tau=tau)
    checks.check_min_rank(function, 1, logits=logits)
    checks.check_float(function, logits=logits)
    checks.check_integer(function, targets=targets)
    checks.check_shape(function, "targets", targets, jnp.shape(logits)[:-1])
    return jax.nn.log_softmax(jnp.asarray(logits, jnp.float32), axis=-1)
