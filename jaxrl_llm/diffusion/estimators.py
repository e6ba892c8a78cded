"""``Likelihood``: how masks are drawn for a batch, and how a denoiser's outputs become an estimate.

It fills the slot of a recipe for a model that is not causal. Masks are drawn once per batch. The
policy being trained, the old policy and the reference are all scored on the same masks, so the
noise of a difference nearly cancels. A function that draws is ``(key, valid, prompt) -> Draws``;
one that estimates is ``(logp, draws, valid, *, advantages) -> [..., T]``. Both are bound with
their options::

    jr.diffusion.elbo_likelihood(samples=4, draws="stratified")

``samples`` and ``draws`` are described in :mod:`jaxrl_llm.diffusion.levels`.

Raises: see :mod:`jaxrl_llm.diffusion`, TypeError and ValueError.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, bind, checks
from jaxrl_llm.diffusion.bounds import sandwiched
from jaxrl_llm.diffusion.levels import mask_counts, noise_levels, quadrature_levels
from jaxrl_llm.diffusion.likelihood import coupled, elbo, mean_field
from jaxrl_llm.diffusion.masks import (
    complementary,
    count_levels,
    mask_blocks,
    mask_exact,
    mask_tokens,
)


class Draws(NamedTuple):
    """J draws of the tokens that are hidden from the denoiser.

    Attributes:
      masked: bool ``[J, ..., T]``, tokens of the response.
      t: float32 ``[J, ...]``, the levels.
      prompt: bool ``[J, ..., S]``, tokens of the prompt.
    """

    masked: Array
    t: Array
    prompt: Array


class Likelihood(NamedTuple):
    """An estimator of log-likelihoods, see the module; equal options make equal estimators.

    Attributes:
      draw: ``(key, valid [..., T], prompt [..., S]) -> Draws``; both masks are bool.
      estimate: ``(logp [J, ..., T], draws, valid, *, advantages) -> [..., T]``, one value for each
        token. The advantages are ``[...]``, or None before they are known.
      reads_advantages: Whether the estimate depends on the advantages. The old policy and the
        reference are scored before advantages are known, so such an estimate is not compared with
        theirs.
      passes: How many sets of draws there are; each pass over a batch uses one. With 1, all passes
        use the same draws.
    """

    draw: Callable
    estimate: Callable
    reads_advantages: bool = False
    passes: int = 1

    # What a batch holds for it; and what its scorer returns of each token besides, 1[masked] logp /
    # t of each draw, with the number of axes behind [P, G, T].
    fields = ("masked", "masked_prompt", "noise", "written")
    statistics = (("draw_logp", 1),)
    # Its estimates are on draws of a batch, so the sampler's log-probabilities are not comparable.
    draws = True


def mean_field_likelihood(*, p: float = 0.15, samples: int = 1, passes: int = 1) -> Likelihood:
    """One step of denoising that hides the complete response and a share p of the prompt.

    See :func:`mean_field` and :func:`diffu_mask`.

    Args:
      p: Share of the prompt's tokens, in [0, 1].
      samples: See the module.
      passes: How many passes over a batch hide different tokens of the prompt. In each, the old
        policy and the reference are scored on the same masks. 1 hides the same tokens in all.

    Returns:
      A :class:`Likelihood`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> likelihood = jr.diffusion.mean_field_likelihood(p=0.0)
      >>> valid, prompt = jnp.ones((2, 3), bool), jnp.ones((2, 4), bool)
      >>> draws = likelihood.draw(jax.random.key(0), valid, prompt)
      >>> draws.masked.shape, draws.prompt.any().item()
      ((1, 2, 3), False)
      >>> likelihood.estimate(-jnp.ones((1, 2, 3)), draws, valid).tolist()
      [[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]]

    References:
      Zhao et al., d1 (arXiv:2504.12216), diffu-GRPO.
    """
    checks.check_share("mean_field_likelihood", p=p)
    checks.check_count("mean_field_likelihood", samples=samples, passes=passes)
    draw = bind(_draw_all, p=p, samples=samples * passes)
    return Likelihood(draw, bind(_of_mean_field), passes=passes)


def coupled_likelihood(
    *, pairs: int = 1, low: float = 0.2, high: float = 0.8, passes: int = 1
) -> Likelihood:
    """One forward with the response hidden, and pairs with complementary masks: :func:`coupled`.

    Args:
      pairs: How many pairs of masks, at least 1.
      low, high: Levels are uniform between these, in (0, 1).
      passes: How many passes over a batch have masks of their own; with 1, all have the same.

    Returns:
      A :class:`Likelihood`.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.diffusion.coupled_likelihood().draw
      _draw_coupled(high=0.8, low=0.2, pairs=1)

    References:
      Gong et al., DiffuCoder's coupled-GRPO (arXiv:2506.20639).
    """
    name = "coupled_likelihood"
    checks.check_count(name, pairs=pairs, passes=passes)
    checks.check_share(name, zero=False, one=False, low=low, high=high)
    if low > high:
        raise ValueError(f"{name}: low {low} is above high {high}.")
    one = Likelihood(bind(_draw_coupled, pairs=pairs, low=low, high=high), bind(_of_coupled))
    return _in_passes(one, passes, count=2 * pairs + 1)


def elbo_likelihood(
    *, samples: int = 1, draws: str = "independent", masks: str = "exact", passes: int = 1
) -> Likelihood:
    """The evidence lower bound, :func:`elbo`.

    ===================  =====================================================================
    ``masks``            what is hidden
    ===================  =====================================================================
    "independent"        each token with the chance of a level from U[0.001, 1] (LLaDA)
    "exact"              a count from 1 to L, of less variance (LLaDA, VRPO)
    "complementary"      a count from 0 to L, and the other tokens: two forwards a sample (ESPO)
    "quadrature"         each token with the chance of a fixed level (GDPO)
    ===================  =====================================================================

    Args:
      samples: See the module.
      draws: See the module; with "quadrature", whose levels are fixed, only the default.
      masks: See the table.
      passes: As of :func:`coupled_likelihood`.

    Returns:
      A :class:`Likelihood`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> likelihood = jr.diffusion.elbo_likelihood(samples=2, masks="complementary")
      >>> valid, prompt = jnp.ones(3, bool), jnp.ones(4, bool)
      >>> likelihood.draw(jax.random.key(0), valid, prompt).masked.sum(0).tolist()
      [2, 2, 2]

    References:
      Nie et al., LLaDA (arXiv:2502.09992); Zhu et al., VRPO (arXiv:2505.19223); Ou et al., ESPO
      (arXiv:2512.03759); Rojas et al., GDPO (arXiv:2510.08554).
    """
    name = "elbo_likelihood"
    checks.check_count(name, samples=samples, passes=passes)
    checks.check_option(name, "masks", masks, tuple(_DRAW))
    if masks == "quadrature":
        if draws != "independent":
            raise ValueError(f"{name}: draws has no effect with 'quadrature'; got {draws!r}.")
        one = Likelihood(bind(_draw_quadrature, samples=samples), bind(_of_quadrature))
    else:
        one = Likelihood(bind(_DRAW[masks], samples=samples, draws=draws), bind(_of_elbo))
    return _in_passes(one, passes, count=samples * (2 if masks == "complementary" else 1))


def sandwiched_likelihood(
    *,
    samples: int = 2,
    block: int | None = None,
    p: float = 0.0,
    beta: float = 1.5,
    mix: float = 0.5,
    passes: int = 1,
) -> Likelihood:
    """The lower bound for good responses, an upper bound for bad ones: :func:`sandwiched`.

    Before advantages are known it is the lower bound. A recipe that compares with a reference, or
    with the old policy over several optimizer steps, must therefore use another likelihood. One
    without a ratio may make several passes if its surrogate says so, see
    :class:`jaxrl_llm.core.Traits`.

    Args:
      samples: See the module.
      block: Tokens per block of the sampler, see :func:`mask_blocks`; None masks over the complete
        response. Use None for a block-causal model, which always sees the earlier blocks.
      p: Share of the prompt's tokens that are hidden, and with ``block`` of the tokens of earlier
        blocks, in [0, 1]. Those of the response are estimated like all that are masked.
      beta, mix: As in :func:`sandwiched`.
      passes: As of :func:`coupled_likelihood`.

    Returns:
      A :class:`Likelihood`.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.diffusion.sandwiched_likelihood(mix=1.0).estimate
      _of_sandwiched(beta=1.5, mix=1.0)

    References:
      Wang et al., SPG (arXiv:2510.09541), whose released settings use p = 0.15.
    """
    name = "sandwiched_likelihood"
    checks.check_count(name, samples=samples, passes=passes)
    checks.check_positive(name, finite=True, beta=beta)
    checks.check_share(name, p=p, mix=mix)
    draw = bind(_draw_exact, samples=samples, draws="independent", p=p)
    if block is not None:
        checks.check_count(name, block=block)
        draw = bind(_draw_blocks, samples=samples, block=block, p=p)
    one = Likelihood(draw, bind(_of_sandwiched, beta=beta, mix=mix), reads_advantages=True)
    return _in_passes(one, passes, count=samples)


def _in_passes(likelihood: Likelihood, passes: int, *, count: int) -> Likelihood:
    """The likelihood, of ``count`` draws, with other masks in each pass over a batch."""
    if passes == 1:
        return likelihood
    return likelihood._replace(
        draw=bind(_draw_passes, draw=likelihood.draw, passes=passes),
        estimate=bind(_mean_of_passes, estimate=likelihood.estimate, count=count),
        passes=passes,
    )


def _draw_passes(key: Array, valid: Array, prompt: Array, *, draw: Callable, passes: int) -> Draws:
    each = [draw(k, valid, prompt) for k in jax.random.split(key, passes)]
    return Draws(*map(jnp.concatenate, zip(*each, strict=True)))


def _mean_of_passes(
    logp: Array,
    draws: Draws,
    valid: Array,
    *,
    advantages: Array | None = None,
    estimate: Callable,
    count: int,
) -> Array:
    """The mean estimate over the draws of one pass, or of all."""
    parts = [slice(i, i + count) for i in range(0, len(logp), count)]
    each = [
        estimate(logp[x], Draws(*(y[x] for y in draws)), valid, advantages=advantages)
        for x in parts
    ]
    return jnp.mean(jnp.stack(each), axis=0)


def _nothing(prompt: Array, samples: int) -> Array:
    return jnp.zeros((samples, *jnp.shape(prompt)), bool)


def _share_of(key: Array, prompt: Array, samples: int, p: float) -> Array:
    return mask_tokens(key, prompt, jnp.full(samples, p, jnp.float32))


def _draw_all(key: Array, valid: Array, prompt: Array, *, p: float, samples: int) -> Draws:
    shape = (samples, *jnp.shape(valid))
    hidden = _share_of(key, prompt, samples, p)
    return Draws(jnp.broadcast_to(valid, shape), jnp.ones(shape[:-1], jnp.float32), hidden)


def _draw_coupled(
    key: Array, valid: Array, prompt: Array, *, pairs: int, low: float, high: float
) -> Draws:
    of_level, of_mask = jax.random.split(key)
    rows = jnp.shape(valid)[:-1]
    t = low + (high - low) * jax.random.uniform(of_level, (pairs, *rows))
    masked = complementary(mask_tokens(of_mask, valid, t), valid)
    masked = jnp.concatenate([valid[None], masked], axis=0)
    t = jnp.concatenate([jnp.ones((1, *rows)), t, 1.0 - t], axis=0)
    return Draws(masked, t, _nothing(prompt, 2 * pairs + 1))


def _draw_independent(
    key: Array, valid: Array, prompt: Array, *, samples: int, draws: str
) -> Draws:
    of_level, of_mask = jax.random.split(key)
    t = noise_levels(of_level, jnp.shape(valid)[:-1], samples=samples, draws=draws)
    return Draws(mask_tokens(of_mask, valid, t), t, _nothing(prompt, samples))


def _draw_exact(
    key: Array, valid: Array, prompt: Array, *, samples: int, draws: str, p: float = 0.0
) -> Draws:
    of_count, of_mask, of_prompt = jax.random.split(key, 3)
    counts = mask_counts(of_count, valid, samples=samples, draws=draws)
    masked = mask_exact(of_mask, valid, counts)
    return Draws(masked, count_levels(masked, valid), _share_of(of_prompt, prompt, samples, p))


def _draw_complementary(
    key: Array, valid: Array, prompt: Array, *, samples: int, draws: str
) -> Draws:
    of_count, of_mask = jax.random.split(key)
    counts = mask_counts(of_count, valid, samples=samples, draws=draws, least=0)
    masked = complementary(mask_exact(of_mask, valid, counts), valid)
    return Draws(masked, count_levels(masked, valid, least=0), _nothing(prompt, 2 * samples))


def _draw_quadrature(key: Array, valid: Array, prompt: Array, *, samples: int) -> Draws:
    t, _ = quadrature_levels(samples)
    rows = jnp.shape(valid)[:-1]
    t = jnp.broadcast_to(t.reshape(samples, *(1,) * len(rows)), (samples, *rows))
    return Draws(mask_tokens(key, valid, t), t, _nothing(prompt, samples))


def _draw_blocks(
    key: Array, valid: Array, prompt: Array, *, samples: int, block: int, p: float
) -> Draws:
    of_mask, of_prompt = jax.random.split(key)
    masked = mask_blocks(of_mask, valid, block=block, samples=samples, p=p)
    return Draws(masked, count_levels(masked, valid), _share_of(of_prompt, prompt, samples, p))


_DRAW: dict[str, Callable] = {
    "independent": _draw_independent,
    "exact": _draw_exact,
    "complementary": _draw_complementary,
    "quadrature": _draw_quadrature,
}


def _of_mean_field(
    logp: Array, draws: Draws, valid: Array, *, advantages: Array | None = None
) -> Array:
    del draws, advantages
    return mean_field(logp, valid)


def _of_coupled(
    logp: Array, draws: Draws, valid: Array, *, advantages: Array | None = None
) -> Array:
    del advantages
    return coupled(logp[0], logp[1:], draws.masked[1:], draws.t[1:], valid)


def _of_elbo(logp: Array, draws: Draws, valid: Array, *, advantages: Array | None = None) -> Array:
    del valid, advantages
    return elbo(logp, draws.masked, draws.t)


def _of_quadrature(
    logp: Array, draws: Draws, valid: Array, *, advantages: Array | None = None
) -> Array:
    del valid, advantages
    _, weights = quadrature_levels(jnp.shape(logp)[0])
    return elbo(logp, draws.masked, draws.t, weights=weights)


def _of_sandwiched(
    logp: Array,
    draws: Draws,
    valid: Array,
    *,
    advantages: Array | None = None,
    beta: float,
    mix: float,
) -> Array:
    if advantages is None:
        return elbo(logp, draws.masked, draws.t)
    return sandwiched(logp, draws.masked, draws.t, advantages, valid, beta=beta, mix=mix)
