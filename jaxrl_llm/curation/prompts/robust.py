"""Prompt-GDRO: an adversary weights bins of prompts by their loss.

Bins are those of :mod:`jaxrl_llm.curation.prompts.bins`, int32; -1 means none. ``where`` (bool,
True = takes part) excludes entries, which may hold anything.

Every function raises TypeError for an array of the wrong dtype, and ValueError for shapes that do
not match or an option out of its range.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp

from jaxrl_llm.core import Array, Traits, Transform, checks, masking, prints_as_call, stats
from jaxrl_llm.curation.prompts.bins import (
    BinScores,
    PassHistory,
    bin_means,
    bin_scores_update,
    difficulty_bins,
    exponential_weights,
    pass_history_init,
    pass_history_rate,
    pass_history_update,
)

__all__ = ["PromptGdroState", "bin_advantage_weights", "clipped_losses", "prompt_gdro"]

Signal = Literal["loss", "failure"]


def bin_advantage_weights(
    weights: Array, bins: Array, *, most: float = 15.0, where: Array | None = None
) -> Array:
    """Factors of the advantages of each sequence: the weight of its bin, with mean 1.

        w_j = min(q[bin_j] / mean of q[bin] over the batch, most)

    Args:
      weights: ``[Nb]``, floating point, as :func:`exponential_weights` returns them.
      bins: int ``[...]``, of prompts or of sequences. Entries without a bin (-1) get 1 and are
        not in the mean.
      most: Largest factor, above 0.
      where: ``[...]``. See the module.

    Returns:
      ``[...]`` float32; 1 where excluded.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> weights, bins = jnp.array([0.25, 0.75]), jnp.array([0, 0, 1, 1, -1])
      >>> jr.curation.bin_advantage_weights(weights, bins).tolist()
      [0.5, 0.5, 1.5, 1.5, 1.0]

    References:
      Prompt-GDRO (arXiv:2601.19280), and its released code; the paper multiplies by
      ``min(exp(eta s), most)``, of the same ratios between bins but for the exploration. In the
      released code the prompts without a bin are another bin.
    """
    name = "bin_advantage_weights"
    checks.check_rank(name, 1, weights=weights)
    checks.check_float(name, weights=weights)
    checks.check_integer(name, bins=bins)
    checks.check_bool(name, where=where)
    checks.check_same_shape(name, bins=bins, where=where)
    checks.check_positive(name, most=most)
    size = jnp.shape(weights)[0]
    valid = (bins >= 0) & (bins < size)
    if where is not None:
        valid &= where
    each = jnp.asarray(weights, jnp.float32)[jnp.clip(bins, 0, size - 1)]
    mean = masking.masked_mean(each, valid)
    scaled = jnp.minimum(each / jnp.where(mean > 0, mean, 1.0), most)
    return jnp.where(valid & (mean > 0), scaled, 1.0)


class PromptGdroState(NamedTuple):
    """State of :func:`prompt_gdro`.

    Attributes:
      history: :class:`PassHistory` over the N prompts.
      bins: int32 ``[N]``, the bin of each prompt at its last visit; -1 before.
      adversary: :class:`BinScores`.
    """

    history: PassHistory
    bins: Array
    adversary: BinScores


@dataclasses.dataclass(frozen=True)
class _GdroInit:
    num_prompts: int
    window: int
    num_bins: int

    def __call__(self) -> PromptGdroState:
        return PromptGdroState(
            pass_history_init(self.num_prompts, self.window),
            jnp.full(self.num_prompts, -1, jnp.int32),
            BinScores(jnp.zeros(self.num_bins, jnp.float32), jnp.zeros(self.num_bins, bool)),
        )


@dataclasses.dataclass(frozen=True)
class _Gdro:
    """The options of :func:`prompt_gdro`, and how a batch is weighed."""

    edges: tuple[float, ...]
    hysteresis: float
    extremes: bool
    signal: Signal
    eps_low: float
    eps_high: float
    eta: float
    explore: float
    rate: float
    most: float
    threshold: float

    def bins(self, state, prompt_ids, rewards, where):
        """The bin ``[P]`` of each prompt of a batch, -1 for none; and which rollouts take part."""
        name = "prompt_gdro"
        stats.check_group(name, rewards, where)
        checks.check_rank(name, 2, rewards=rewards)
        checks.check_integer(name, prompt_ids=prompt_ids)
        checks.check_shape(name, "prompt_ids", prompt_ids, jnp.shape(rewards)[:1])
        valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
        known = (prompt_ids >= 0) & (prompt_ids < state.bins.shape[0])
        at = jnp.where(known, prompt_ids, 0)
        bins = difficulty_bins(
            pass_history_rate(state.history)[at],
            edges=self.edges,
            last=state.bins[at],
            hysteresis=self.hysteresis,
            extremes=self.extremes,
        )
        return jnp.where(known & jnp.any(valid, axis=-1), bins, -1), valid

    def means(self, values, bins, valid):
        """Means ``[Nb]`` over the sequences of each bin, over its share, and which are present."""
        each = jnp.broadcast_to(bins[:, None], jnp.shape(values))
        return bin_means(values, each, num_bins=len(self.edges) + 1, by_share=True, where=valid)

    def factors(self, state, bins, valid):
        """What the advantages of each sequence ``[P, G]`` are multiplied by."""
        _, present = self.means(jnp.zeros(valid.shape), bins, valid)
        weights = exponential_weights(
            state.adversary.scores, eta=self.eta, explore=self.explore, present=present
        )
        each = jnp.broadcast_to(bins[:, None], valid.shape)
        return bin_advantage_weights(weights, each, most=self.most, where=valid)


def _of_tokens(factors: Array, values: Array) -> Array:
    """One factor a sequence, with an axis of tokens where the values have one."""
    return factors.reshape(factors.shape + (1,) * (jnp.ndim(values) - 2))


@dataclasses.dataclass(frozen=True)
class _GdroUpdate:
    options: _Gdro

    @property
    def __traits__(self) -> Traits:
        # The mean loss of a bin is 0 at a ratio of 1.
        return Traits(needs_updates=self.options.signal == "loss")

    def __call__(self, advantages, state, *, prompt_ids, rewards, where=None, **context):
        bins, valid = self.options.bins(state, prompt_ids, rewards, where)
        factors = self.options.factors(state, bins, valid)
        return advantages * _of_tokens(factors, advantages), state


@dataclasses.dataclass(frozen=True)
class _GdroLearn:
    options: _Gdro

    def __call__(
        self,
        state,
        *,
        prompt_ids,
        rewards,
        where=None,
        mask=None,
        logp=None,
        old_logp=None,
        advantages=None,
        **context,
    ):
        options = self.options
        bins, valid = options.bins(state, prompt_ids, rewards, where)
        rewards = masking.zero_masked(rewards, valid)
        if options.signal == "failure":
            signal = 1.0 - rewards
        else:
            plain = advantages / _of_tokens(options.factors(state, bins, valid), advantages)
            low, high = options.eps_low, options.eps_high
            signal = clipped_losses(logp, old_logp, plain, mask, eps_low=low, eps_high=high)
        means, present = options.means(signal, bins, valid)
        size = state.bins.shape[0]
        hit = jnp.any((rewards > options.threshold) & valid, axis=-1)
        visited = jnp.any(valid, axis=-1)
        return PromptGdroState(
            pass_history_update(state.history, prompt_ids, hit, where=visited),
            state.bins.at[jnp.where(bins >= 0, prompt_ids, size)].set(bins, mode="drop"),
            bin_scores_update(state.adversary, means, present, rate=options.rate),
        )


def clipped_losses(
    logp: Array,
    old_logp: Array,
    advantages: Array,
    mask: Array,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
) -> Array:
    """Mean over the tokens of each sequence of PPO's clipped loss.

        mean_t max(-A ratio, -A clip(ratio, 1 - eps_low, 1 + eps_high)),  ratio = exp(logp - old)

    Args:
      logp: ``[..., T]``, nats, of the policy before the update on the sequence.
      old_logp: ``[..., T]``, of the policy at the start of the step.
      advantages: ``[...]``, or ``[..., T]``.
      mask: bool ``[..., T]``.
      eps_low: Clip below 1.
      eps_high: Clip above 1.

    Returns:
      ``[...]`` float32; 0 for a sequence without tokens.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, old_logp = jnp.log(jnp.array([[0.75, 0.5]])), jnp.log(jnp.array([[0.5, 0.5]]))
      >>> advantages, mask = jnp.array([1.0]), jnp.ones((1, 2), bool)
      >>> jr.curation.clipped_losses(logp, old_logp, advantages, mask, eps_high=0.25).tolist()
      [-1.125]

    References:
      Prompt-GDRO (arXiv:2601.19280), the loss of its bins, in its released code.
    """
    name = "clipped_losses"
    masking.check_tokens(name, mask, logp=logp, old_logp=old_logp)
    checks.check_non_negative(name, eps_low=eps_low, eps_high=eps_high)
    values = masking.spread(name, "advantages", advantages, mask)
    ratio = jnp.exp(jnp.clip(masking.zero_masked(logp - old_logp, mask), -20.0, 20.0))
    bounded = jnp.clip(ratio, 1.0 - eps_low, 1.0 + eps_high)
    losses = jnp.maximum(-values * ratio, -values * bounded)
    return masking.masked_mean(losses, mask, axis=-1)


@prints_as_call
def prompt_gdro(
    *,
    num_prompts: int,
    edges: tuple[float, ...] = (0.4, 0.75),
    window: int = 50,
    hysteresis: float = 0.03,
    extremes: bool = False,
    signal: Signal = "loss",
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    eta: float = 0.65,
    explore: float = 0.01,
    rate: float = 0.12,
    most: float = 15.0,
    threshold: float = 0.5,
) -> Transform:
    """Weights advantages by an adversary that raises the bins with the largest loss.

        bin of a prompt       difficulty_bins of its last `window` groups
        weight of the batch   exponential_weights of the bins' scores, of mean 1, up to `most`
        after the update      score <- moving average of the bin's mean loss, over its share

    A batch uses the weights of the state before it. The loss of a sequence is
    :func:`clipped_losses` of its advantage without the weight, for the policy before the sequence's
    minibatch. With centered advantages the loss is 0 on average at a ratio of 1, so the scores
    change by the effect of the earlier minibatches of the same batch.

    Reads ``prompt_ids [P]``, ``rewards [P, G]`` and ``where`` from the batch, and after the update
    ``logp``, ``old_logp``, ``advantages`` and ``mask`` too. Put it after an advantage with
    :func:`jaxrl_llm.chain`, as the last one.

    Args:
      num_prompts: N, the prompts of the dataset.
      edges: As in :func:`difficulty_bins`.
      window: Groups of a prompt that are remembered.
      hysteresis: As in :func:`difficulty_bins`.
      extremes: Whether prompts of rate 0 or 1 have a bin; if not, their weight is 1.
      signal: "loss", or "failure" for the mean of 1 - reward.
      eps_low: As in :func:`clipped_losses`.
      eps_high: As in :func:`clipped_losses`.
      eta: As in :func:`exponential_weights`.
      explore: As in :func:`exponential_weights`.
      rate: As in :func:`bin_scores_update`.
      most: As in :func:`bin_advantage_weights`.
      threshold: A reward above it counts as a correct answer.

    Returns:
      A Transform ``advantages [P, G] or [P, G, T] -> the same`` with :class:`PromptGdroState`,
      which moves in ``learn``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> robust = jr.curation.prompt_gdro(num_prompts=4, extremes=True, signal="failure")
      >>> rewards, ids = jnp.array([[1.0, 0.0]]), jnp.array([2])
      >>> out, state = robust.update(
      ...     jnp.array([[0.5, -0.5]]), robust.init(), prompt_ids=ids, rewards=rewards)
      >>> state = robust.learn(state, prompt_ids=ids, rewards=rewards)
      >>> out.tolist(), state.adversary.scores.tolist()
      ([[0.5, -0.5]], [0.5, 0.0, 0.0])

    References:
      Prompt-GDRO (arXiv:2601.19280), and its released code, where prompts of rate 0 or 1 are one
      more bin. "failure" is ours.
    """
    name = "prompt_gdro"
    pass_history_init(num_prompts, window)
    difficulty_bins(jnp.zeros(1), edges=edges, last=jnp.zeros(1, jnp.int32), hysteresis=hysteresis)
    checks.check_option(name, "signal", signal, ("loss", "failure"))
    if signal == "failure":
        changed = {"eps_low": eps_low != 0.2, "eps_high": eps_high != 0.28}
        for option in (option for option, is_changed in changed.items() if is_changed):
            raise ValueError(f'{name}: {option} has no effect with signal "failure".')
    checks.check_non_negative(name, finite=True, eta=eta, eps_low=eps_low, eps_high=eps_high)
    checks.check_share(name, explore=explore)
    checks.check_share(name, zero=False, rate=rate)
    checks.check_positive(name, most=most)
    options = _Gdro(
        edges=edges,
        hysteresis=hysteresis,
        extremes=extremes,
        signal=signal,
        eps_low=eps_low,
        eps_high=eps_high,
        eta=eta,
        explore=explore,
        rate=rate,
        most=most,
        threshold=threshold,
    )
    first = _GdroInit(num_prompts, window, len(edges) + 1)
    return Transform(first, _GdroUpdate(options), _GdroLearn(options))
