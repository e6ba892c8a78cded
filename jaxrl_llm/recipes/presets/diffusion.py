"""Methods for masked-diffusion models: an estimate replaces the likelihood.

They train a model with ``causal=False``. The policy, the old policy and the reference are scored on
the same masks. With several passes over a batch each has masks of its own; the number of passes is
an option of the preset, since the masks are drawn for it.
"""

from jaxrl_llm import advantages, aggregate, curation, diffusion, regularizers, surrogates
from jaxrl_llm.core import Array, ArrayTree, bind, checks, stateless, traits
from jaxrl_llm.recipes.presets.base import from_base, nonzero_term
from jaxrl_llm.recipes.recipe import Recipe

__all__ = [
    "bgpo",
    "coupled_grpo",
    "diffu_grpo",
    "elbo_grpo",
    "espo",
    "gdpo_elbo",
    "igpo_inpainting",
    "spg",
    "wd1",
]


def diffu_grpo(
    *, p: float = 0.15, eps: float = 0.5, kl_coef: float = 0.04, epochs: int = 12
) -> Recipe:
    """GRPO on the log-probabilities of one step of denoising.

    Advantages are rewards minus the mean of their group; the mean is over all tokens.

    Args:
      p: Share of the prompt that is hidden.
      eps: Clip range of a token's ratio.
      kl_coef: Weight of k3 to the reference.
      epochs: Passes over a batch, each with other masks of the prompt and an update.

    References:
      Zhao et al., d1 (arXiv:2504.12216), with the 12 passes of the released scripts for GSM8K and
      MATH, where those for Countdown and Sudoku have 8; ``epochs=1`` is much cheaper. The code also
      moves the reference every 64 steps, which has no effect there, since it trains an adapter,
      whose reference is the model below.
    """
    return from_base(
        name="diffu_grpo",
        advantage=stateless(advantages.dr_grpo),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps, eps_high=eps),
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef, estimator="k3"),
        likelihood=diffusion.mean_field_likelihood(p=p, passes=epochs),
        epochs=epochs,
        paper="arXiv:2504.12216",
    )


def coupled_grpo(
    *,
    pairs: int = 1,
    eps: float = 0.5,
    kl_coef: float = 0.01,
    epochs: int = 2,
    sync_every: int | None = 32,
) -> Recipe:
    """GRPO on log-probabilities from pairs of complementary masks.

    Advantages are rewards minus the mean of the others of their group.

    Args:
      pairs: Number of mask pairs; two forward passes each, and one with all tokens masked.
      eps: Clip of a token's ratio.
      kl_coef: Weight of k3 to the reference.
      epochs: Passes over a batch, each with other masks and an update.
      sync_every: Batches after which the reference moves to 0.6 of the policy and 0.4 of itself;
        None for a frozen one, as with ``kl_coef`` 0.

    References:
      Gong et al., DiffuCoder (arXiv:2506.20639), and the released config: two passes over a batch,
      and a reference that moves every 64 updates, which are 32 batches. The share of 0.6 is TRL's.
    """
    checks.check_positive("coupled_grpo", sync_every=sync_every)
    moved = None
    if kl_coef and sync_every is not None:
        moved = bind(_synchronized, every=sync_every, share=0.6)
    return from_base(
        name="coupled_grpo",
        advantage=stateless(advantages.rloo),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps, eps_high=eps),
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef, estimator="k3"),
        likelihood=diffusion.coupled_likelihood(pairs=pairs, passes=epochs),
        reference=moved,
        epochs=epochs,
        paper="arXiv:2506.20639",
    )


def espo(*, samples: int = 2, eps: float = 0.2, kl_coef: float = 3e-3, epochs: int = 8) -> Recipe:
    """One ratio of lower bounds per response, to the power 1 / L, and k2 to the reference.

    Advantages are rewards minus the mean of the others of their group.

    Args:
      samples: Number of masks, each with its complement: two forward passes.
      eps: Clip of the ratio.
      kl_coef: Weight of the penalty.
      epochs: Passes over a batch, each with other masks and an update.

    References:
      Ou et al., ESPO (arXiv:2512.03759), with the advantages, samples and 8 passes of the released
      code. The weight of the penalty is that of its Countdown script, whose ``eps`` is 0, the
      tightest clip; those of GSM8K and MATH have 1e-3, those of code and Sudoku 1e-2. That for code
      trains all weights, and its reference follows the policy every 64 updates; here it is frozen.
    """
    return from_base(
        name="espo",
        advantage=stateless(advantages.rloo),
        surrogate=bind(surrogates.gspo, eps_low=eps, eps_high=eps),
        weights=aggregate.sequence_mean,
        regularizers=nonzero_term(diffusion.elbo_kl, coef=kl_coef),
        likelihood=diffusion.elbo_likelihood(
            samples=samples, draws="stratified", masks="complementary", passes=epochs
        ),
        epochs=epochs,
        paper="arXiv:2512.03759",
    )


def elbo_grpo(*, samples: int = 4, eps: float = 0.2, masks: str = "exact") -> Recipe:
    """A clipped ratio of lower bounds per response, with the mask samples of LLaDA and VRPO.

    The ratio is 1 unless the run makes several updates on a batch (``minibatches``).

    Args:
      samples: Forward passes per response.
      eps: Clip of the ratio.
      masks: As of :func:`jaxrl_llm.diffusion.elbo_likelihood`.

    References:
      Nie et al., LLaDA (arXiv:2502.09992); Zhu et al., VRPO (arXiv:2505.19223), who compare pairs:
      ``dpo().replace(likelihood=...)``.
    """
    return from_base(
        name="elbo_grpo",
        surrogate=bind(surrogates.gspo, eps_low=eps, eps_high=eps),
        weights=aggregate.sequence_mean,
        likelihood=diffusion.elbo_likelihood(samples=samples, masks=masks),
        paper="arXiv:2502.09992",
    )


def gdpo_elbo(
    *, samples: int = 3, eps: float = 0.5, kl_coef: float = 0.0, epochs: int = 12
) -> Recipe:
    """One ratio of lower bounds per response, by quadrature over the noise level.

    Advantages are rewards minus the mean of their group. The power of the ratio is 1 / L.

    Args:
      samples: Number of noise levels, with a forward pass each.
      eps: Clip of the ratio.
      kl_coef: Weight of :func:`jaxrl_llm.diffusion.elbo_kl` to the reference.
      epochs: Passes over a batch, each with other masks and an update.

    References:
      Rojas et al., GDPO (arXiv:2510.08554), with the settings of the released script. The paper's
      loss has a divergence from the reference, whose weight is 0 in that script; its k3 of complete
      bounds overflows for long responses. Unlike here, L counts padding there, and the old policy
      is scored on other masks than the policy.
    """
    return from_base(
        name="gdpo_elbo",
        advantage=stateless(advantages.dr_grpo),
        surrogate=bind(surrogates.gspo, eps_low=eps, eps_high=eps),
        weights=aggregate.sequence_mean,
        regularizers=nonzero_term(diffusion.elbo_kl, coef=kl_coef),
        likelihood=diffusion.elbo_likelihood(samples=samples, masks="quadrature", passes=epochs),
        epochs=epochs,
        paper="arXiv:2510.08554",
    )


def spg(
    *,
    samples: int = 2,
    block: int | None = None,
    p: float = 0.15,
    beta: float = 1.5,
    mix: float = 0.5,
    epochs: int = 4,
) -> Recipe:
    """Policy gradient on a lower bound for good responses and an upper bound for bad ones.

    Advantages are rewards minus the mean of their group. The loss of each pass over a batch is that
    of the first, without a ratio, so the old policy is not scored.

    Args:
      samples: Forward passes per response.
      block: Tokens per block of the sampler; None masks over the full response.
      p: Share of the prompt that is hidden, and with ``block`` of the blocks before the masked one,
        whose hidden tokens are estimated too.
      beta, mix: Power of the upper bound, and its weight.
      epochs: Passes over a batch, each with other masks and an update.

    References:
      Wang et al., SPG (arXiv:2510.09541), with the four passes of the released scripts, which mask
      block by block (``block=32``). ``block=None`` is ours. Their index of a pass counts parts of a
      batch, of which a step has two, so a part has two sets of masks, each in two passes (of four
      parts for Sudoku, each has one set); here each pass has masks of its own.
    """
    return from_base(
        name="spg",
        advantage=stateless(advantages.dr_grpo),
        surrogate=_reinforce_in_passes,
        likelihood=diffusion.sandwiched_likelihood(
            samples=samples, block=block, p=p, beta=beta, mix=mix, passes=epochs
        ),
        epochs=epochs,
        paper="arXiv:2510.09541",
    )


def wd1(*, scale: float = 1.0, p: float = 0.15, epochs: int = 12) -> Recipe:
    """Weighted likelihood of one denoising step: no ratio, no old policy.

    The loss is the paper's loss divided by the size of a group. It is the same in each pass over a
    batch, whose responses and weights are those of the policy before the first.

    Args:
      scale: Scale of the advantages in the weights; they are rewards minus their group mean.
      p: Share of the prompt that is hidden.
      epochs: Passes over a batch, each with other masks of the prompt and an update.

    References:
      Tang et al., wd1 (arXiv:2507.08838), with the 12 passes of the released scripts, which make 8
      for Sudoku; ``epochs=1`` is much cheaper. Their index of a pass counts parts of a batch, of
      which a step has two, so a part has six masks of its prompts, each in two passes; here each
      pass has masks of its own.
    """
    return from_base(
        name="wd1",
        advantage=stateless(advantages.dr_grpo),
        surrogate=bind(diffusion.wd1, scale=scale),
        weights=aggregate.sequence_sum,
        likelihood=diffusion.mean_field_likelihood(p=p, passes=epochs),
        epochs=epochs,
        paper="arXiv:2507.08838",
    )


def bgpo(*, samples: int = 16, cap: float | None = None) -> Recipe:
    """A lower bound of the ratio of lower bounds that is a sum over forward passes.

    Args:
      samples: Forward passes per response.
      cap: Largest log-ratio of a sample of a bad response; None for no cap.

    References:
      Lin et al., BGPO (arXiv:2510.11683); confidence PAPER.
    """
    return from_base(
        name="bgpo",
        surrogate=bind(diffusion.bgpo, cap=cap),
        weights=aggregate.sequence_mean,
        likelihood=diffusion.elbo_likelihood(samples=samples, masks="independent"),
        paper="arXiv:2510.11683",
    )


def igpo_inpainting(
    *,
    share: float = 0.5,
    hint_share: float = 0.2,
    shortest: int = 5,
    longest: int = 10,
    low: float = 0.2,
    high: float = 0.6,
    column: str = "demonstration",
    answer: str | None = "answer",
    threshold: float = 0.0,
    metric: str | None = None,
    p: float = 0.0,
    eps: float = 0.2,
    kl_coef: float = 0.01,
    epochs: int = 4,
) -> Recipe:
    """If no response is right, all are sampled again around chunks of a reference answer.

    The chunks stay fixed in their positions while the rest is denoised. Right responses from this
    round replace wrong ones, and only the most uncertain tokens of a hint train. Advantages are
    rewards minus the mean of their group. The ratio is one per response, of one step of denoising,
    and the mean is over all tokens that train.

    Args:
      share: Largest share of a group that is replaced.
      hint_share: Share of a response's hint tokens that train, by entropy.
      shortest, longest: Bounds of the tokens of a chunk.
      low, high: Range of the share of the chunks that a response gets.
      column: The column with the reference answer, a text.
      answer: The column with its final answer, which is never shown; None for none.
      threshold, metric: Largest reward of a failure, and the name of the reward component that is
        compared with it.
      p: Share of the prompt that is hidden; above 0, each pass hides other tokens.
      eps: Clip of the ratio.
      kl_coef: Weight of k3 to the reference.
      epochs: Passes over a batch, with an update each.

    References:
      Zhao et al., IGPO (arXiv:2509.10396), with the loss and the settings of the released script.
      Hints are those of the paper; see :func:`jaxrl_llm.diffusion.hint_mask`. In the released code
      the cells after the end of a response train too.
    """
    policy = curation.inpainted(
        bind(diffusion.draw_hints, shortest=shortest, longest=longest, low=low, high=high),
        bind(diffusion.igpo_replace, share=share),
        column=column,
        answer=answer,
        threshold=threshold,
        metric=metric,
    )
    return from_base(
        name="igpo_inpainting",
        advantage=stateless(advantages.dr_grpo),
        surrogate=bind(surrogates.gspo, eps_low=eps, eps_high=eps),
        weights=_by_tokens,
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef, estimator="k3"),
        selection=bind(_uncertain_hints, share=hint_share),
        likelihood=diffusion.mean_field_likelihood(p=p, passes=epochs if p else 1),
        collector=curation.hinted(policy),
        epochs=epochs,
        paper="arXiv:2509.10396",
    )


@traits(level="sequence")
def _by_tokens(sequences: Array, *, mask: Array) -> Array:
    """:func:`aggregate.token_mean` for one value per response, over the tokens that train."""
    del sequences  # with the tokens that the selection drops
    return aggregate.token_mean(mask)


@traits(has_ratio=False, reuses_samples=True)
def _reinforce_in_passes(
    logp: Array, old_logp: Array | None, advantages: Array, mask: Array
) -> Array:
    """The plain policy gradient in each of several passes over a batch, without a ratio.

        loss[t] = -A[t] * logp[t]

    The samples and the advantages are those of before the first pass.
    """
    return surrogates.reinforce(logp, old_logp, advantages, mask)


def _uncertain_hints(
    advantages_: Array, mask: Array, *, old_entropy: Array, hint_mask: Array, share: float
) -> Array:
    del advantages_  # which every selection gets
    return diffusion.entropy_top_mask(old_entropy, hint_mask, mask, share=share)


def _synchronized(
    reference: ArrayTree, params: ArrayTree, step: Array, *, every: int, share: float
) -> ArrayTree:
    mixed = regularizers.ema_reference(reference, params, rate=share)
    return regularizers.reset_reference(reference, mixed, step, every=every)
