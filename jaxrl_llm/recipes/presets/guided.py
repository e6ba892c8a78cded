"""GRPO with help where a group fails: hints, parts of solutions, repaired rollouts.

The help comes from columns of the data, named by ``column``: ``hints``, a list of texts from the
weakest to the strongest, each of which may be a list of parts; or ``demonstration``, a right
solution. No help is given at test time. Options that these presets share:

    threshold: Largest reward of a failure.
    metric: Name of the reward component that is compared with it; None for the reward.
    eps_low, eps_high: See the package.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm import advantages, curation, regularizers, surrogates
from jaxrl_llm.core import Array, bind, chain, checks, connect, stateless
from jaxrl_llm.recipes.presets.base import from_base
from jaxrl_llm.recipes.recipe import Recipe

__all__ = ["adhint", "cog_rethinker", "ghpo", "nurl", "prefix_rl", "sage", "scaf_grpo", "scope"]


def nurl(
    *,
    column: str = "hints",
    plain: int = 1,
    threshold: float = 0.0,
    metric: str | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """If no rollout is right, all but one are sampled again with a hint in the prompt.

    The hint is the first of the prompt's ``hints``. The paper writes it before training, from the
    question and its answer, and first trains without hints to convergence.

    Args:
      column: The column with the hint.
      plain: Number of rollouts without a hint that are retained.

    References:
      NuRL (arXiv:2509.25666), PAPER.
    """
    clue = bind(curation.tier_messages, column=column, most=1)
    policy = curation.ladder(clue, plain=plain, threshold=threshold, metric=metric)
    return from_base(
        name="nurl",
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        collector=curation.hinted(policy),
        paper="arXiv:2509.25666",
    )


def sage(
    *,
    light: bool = False,
    column: str | None = None,
    attempts: int | None = None,
    threshold: float = 0.0,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
) -> Recipe:
    """If no rollout is right, the policy writes three hints, which are tried one by one.

    The policy sees the prompt's ``demonstration`` when it writes them. The last group replaces the
    first, even if it fails. The hints change the prompt but never the reward.

    Args:
      light: Instead, the level of a prompt's hint changes between visits with its accuracy: up at
        0.1 or below, down above 0.35. The hints are then the ``hints`` of the data.
      column: The column with the solution, or with the hints; None for the names above.
      attempts: Maximum attempts to get hints that can be parsed; None for 3. Only if not ``light``.

    References:
      SAGE (arXiv:2602.03143) and its released code, with the two minibatches of its script. The
      code also writes new hints in SAGE-light.
    """
    if light:
        checks.check_no_effect("sage", "with light=True", attempts=attempts)
        hints = bind(curation.tier_messages, column=column or "hints")
        collector = curation.hint_levels(hints, threshold=threshold)
    else:
        policy = curation.self_hints(
            column=column or "demonstration",
            attempts=3 if attempts is None else attempts,
            threshold=threshold,
        )
        collector = curation.hinted(policy)
    return from_base(
        name="sage",
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        collector=collector,
        minibatches=2,
        paper="arXiv:2602.03143",
    )


def scaf_grpo(
    *,
    column: str = "hints",
    after: Literal["hint", "plain", "both"] = "hint",
    warmup: int = 50,
    threshold: float = 0.0,
    metric: str | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """If no rollout is right, the success with the least help replaces the first rollout.

    The ``hints`` are tiers from abstract to concrete, with four parts each in the paper. Each
    attempt shows one more part, to one rollout.

    Args:
      column: The column with the tiers.
      after: "hint" trains the success after the message that it was sampled from, "plain" after the
        plain message, "both" once each, replacing two rollouts.
      warmup: Number of batches before the first hint.

    References:
      Scaf-GRPO (arXiv:2510.19807) and its released code with its four minibatches; its planning
      tier is disabled.
    """
    policy = curation.scaffold(
        bind(curation.tier_messages, column=column),
        after=after,
        warmup=warmup,
        threshold=threshold,
        metric=metric,
    )
    return from_base(
        name="scaf_grpo",
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        collector=curation.hinted(policy),
        minibatches=4,
        paper="arXiv:2510.19807",
    )


def ghpo(
    *,
    column: str = "demonstration",
    shares: tuple[float, ...] = (0.25, 0.5, 0.75),
    threshold: float = 0.0,
    metric: str | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """If no rollout is right, all are sampled again with more and more of a solution in the prompt.

        A = (r - mean_group r) / (std_group r + 1e-4)

    If the reward also includes the format, ``metric`` names the accuracy; the paper adds 1 for a
    right answer and 0.5 for the format.

    Args:
      column: The column with the solution, a text.
      shares: Shares of the solution, in characters.

    References:
      GHPO (arXiv:2507.10628) and its released code.
    """
    shown = bind(curation.share_messages, column=column, shares=tuple(shares))
    policy = curation.ladder(shown, threshold=threshold, metric=metric)
    return from_base(
        name="ghpo",
        advantage=stateless(advantages.grpo, eps=1e-4),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        collector=curation.hinted(policy),
        paper="arXiv:2507.10628",
    )


def adhint(
    *,
    column: str = "demonstration",
    plain: float = 0.5,
    low: float = 0.0,
    high: float = 0.8,
    noise: float = 0.05,
    kappa: float = 1.0,
    metric: str | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Half of a group begins with a part of a solution, which is longer for harder prompts.

        A as GRPO's times exp(+-kappa (mean hinted reward - mean plain reward))
        A on a token of the hint: less, the more its entropy differs from the continuation's
        A on a token of the hint: 0 where it is negative

    Args:
      column: The column with the solution.
      plain: Share of the group without a hint.
      low, high: Share of the solution for a prompt that is always, and never, solved.
      noise: Half-width of the noise that is added to the share.
      kappa: Strength of the factor.

    References:
      ADHint (arXiv:2512.13095), PAPER for the share and the masking; see
      :func:`jaxrl_llm.advantages.adhint` for what is ours.
    """
    policy = curation.hint_share(
        column=column, plain=plain, low=low, high=high, noise=noise, metric=metric
    )
    return from_base(
        name="adhint",
        advantage=chain(
            stateless(connect(bind(advantages.adhint, kappa=kappa), hinted="steered")),
            stateless(advantages.hint_consistency),
            stateless(advantages.hint_preservation),
        ),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        collector=curation.hinted(policy),
        paper="arXiv:2512.13095",
    )


def prefix_rl(
    *, column: str = "demonstration", cuts: int = 3, low: float = 0.4, high: float = 0.8
) -> Recipe:
    """Each prompt, plain and after several prefixes of a right response, which do not train.

        A = r - mean_group r,   token loss = -A logp

    Args:
      column: The column with the response; a prompt without one is only used plain.
      cuts: Number of prefixes per response.
      low, high: Range of their shares of the response, drawn once.

    References:
      PrefixRL (arXiv:2601.18795), PAPER; its responses are right samples of the base model.
    """
    return from_base(
        name="prefix_rl",
        advantage=stateless(advantages.dr_grpo),
        surrogate=surrogates.reinforce,
        collector=curation.prefixed(column=column, cuts=cuts, low=low, high=high),
        paper="arXiv:2601.18795",
    )


def scope(
    *,
    judge: Callable[[str, Sequence[str]], Sequence[float]] | None = None,
    teacher: Callable[[str, str], str] | None = None,
    most: int = 1,
    gamma: float = 0.1,
    threshold: float = 0.0,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """A wrong rollout is rewritten from its first wrong step on, and trains if the result is right.

        token loss = -A x / (x + gamma), x = exp(logp), on the continuation

    Args:
      judge: ``(question, steps) -> scores`` of a process reward model; None to read the number of
        right steps from the reward component ``right_steps``.
      teacher: ``(question, beginning) -> continuation``; None for the policy with the prompt's
        ``demonstration`` before it.
      most: Maximum rollouts of a group that are repaired.
      gamma: The likelihood at which a token of the continuation has the largest gradient.

    References:
      SCOPE (arXiv:2602.24110), ABSTRACT; the loss of the continuation, and the policy as its own
      teacher, are ours.
    """
    policy = curation.repair(judge=judge, teacher=teacher, most=most, threshold=threshold)
    loss = bind(surrogates.luffy_shaping, gamma=gamma, eps_low=eps_low, eps_high=eps_high)
    return from_base(
        name="scope",
        surrogate=connect(loss, steered="hint_mask"),
        collector=curation.hinted(policy),
        paper="arXiv:2602.24110",
    )


def cog_rethinker(
    *,
    imitation: float = 0.1,
    threshold: float = 0.0,
    metric: str | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
) -> Recipe:
    """Failed groups decompose the problem, then refine a wrong answer; right answers are imitated.

        loss = mean over tokens of (token loss - imitation logp on right answers of the two stages)

    The imitated answers are conditioned on the plain prompt. Rollouts of a group whose rewards are
    equal at its last stage do not count in the mean.

    Args:
      imitation: Coefficient of the likelihood; 0 to exclude those answers.

    References:
      Cog-Rethinker (arXiv:2510.15979), ABSTRACT, next to DAPO; the coefficient is ours.
    """
    checks.check_non_negative("cog_rethinker", finite=True, imitation=imitation)
    distill = imitation > 0
    policy = curation.rethink(distill=distill, threshold=threshold, metric=metric)
    term = bind(regularizers.imitation, coef=imitation)
    return from_base(
        name="cog_rethinker",
        advantage=stateless(advantages.grpo_imitating if distill else advantages.grpo),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        regularizers=(term,) if distill else (),
        selection=_differing_or_imitated if distill else _differing,
        collector=curation.hinted(policy),
        paper="arXiv:2510.15979",
    )


def _differing(advantages: Array, mask: Array) -> Array:
    """Tokens of the groups in which an advantage is not 0: the filter of accuracies 0 and 1."""
    return mask & jnp.any(advantages != 0.0, axis=-1, keepdims=True)[..., None]


def _differing_or_imitated(advantages: Array, mask: Array, *, imitated: Array) -> Array:
    """:func:`_differing`, and tokens of the imitated responses."""
    return _differing(advantages, mask) | (mask & imitated[..., None])
