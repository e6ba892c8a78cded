"""Methods whose rollouts fork, or end early.

Options that these presets share: ``kl_coef``, ``eps_low``, ``eps_high``, see the package.
``packing="tree"`` of a run trains on the unique tokens of responses that fork.
"""

from typing import Literal

from jaxrl_llm import advantages, curation, regularizers, rewards, surrogates
from jaxrl_llm.core import bind, chain, checks, connect, stateless
from jaxrl_llm.recipes.presets.base import from_base, nonzero_term
from jaxrl_llm.recipes.recipe import Recipe

__all__ = ["arrol", "branch_grpo", "ettrl", "latr", "spo_tree"]


def ettrl(
    *,
    forks: int = 2,
    branches: int = 2,
    reshape: bool = True,
    bound: float | None = None,
    kl_coef: float = 0.001,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Majority votes over trees that fork at high entropy; less advantage for uncertain answers.

        r = 1 for the most common answer of the leaves, else 0;   A = grpo(r)
        A' = A (2 - mean entropy of the response / that of the group);   or clip(A, -bound, bound)

    A group of G has ``G // (1 + forks branches)`` trees. The reward returns the answer of a rollout
    as ``answer_ids``, see ``ttrl_majority``.

    Args:
      forks: Number of forks of a root, at the tokens of highest entropy.
      branches: Number of branches of a fork.
      reshape: Whether advantages are reshaped by entropy, which the paper prefers; else clipped.
      bound: Bound of the clipped advantages; None for 2.

    References:
      ETTRL (arXiv:2508.11356), NOTES reading: 12 roots, 2 forks of 2 branches, 60 leaves, which is
      a group of 60 here. Sampling the token at a fork again, and bounding the factor of an
      advantage below by 0, are ours.
    """
    if reshape:
        checks.check_no_effect("ettrl", "with reshape=True", bound=bound)
        shaped = advantages.entropy_reshaping
    else:
        shaped = bind(advantages.clip, bound=2.0 if bound is None else bound)
    return from_base(
        name="ettrl",
        advantage=chain(
            stateless(rewards.majority_rewards),
            stateless(advantages.grpo),
            stateless(shaped),
        ),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef),
        collector=curation.forked(curation.top_entropy_forks, forks=forks, branches=branches),
        paper="arXiv:2508.11356",
    )


def arrol(
    *,
    share: float = 0.5,
    balance: float = 0.5,
    limit: int | None = None,
    first: int | None = None,
    warmup: int = 20,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Stops about half of the rollouts early, to balance right and wrong ones among the others.

    The advantage is that of GRPO over the survivors. See ``curation.quality_survivors``.

    Args:
      share: Share of a group that continues.
      balance: Target share of right rollouts among them.
      limit: Tokens after which a rollout is scored; None for a quarter of the longest response.
      first: Rollouts of a group before any is stopped; None for G.
      warmup: Number of steps in which all rollouts continue.

    References:
      ARRoL (arXiv:2603.24840), ABSTRACT reading: scored at token 512, shares of 0.5, a warm-up of
      20 steps. The formula of survival and the inputs of the score are ours.
    """
    rule = curation.quality_survivors(share=share, balance=balance, warmup=warmup)
    return from_base(
        name="arrol",
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        collector=curation.pruned(rule, limit=limit, first=first),
        paper="arXiv:2603.24840",
    )


def latr(
    *,
    min_prob: float = 0.25,
    max_gap: float = 0.15,
    ages: tuple[int, ...] = (20, 30, 50),
    max_distance: float | None = 0.4,
    min_suffix: float | None = None,
    min_overlap: float | None = None,
    segment: int | None = None,
    limit: int | None = None,
    starts: tuple[int, ...] = (0, 10, 20, 80, 200),
    shares: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25, 0.0),
    kl_coef: float = 0.01,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Rollouts of a tree that branches at uncertain tokens and drops branches that become similar.

        loss = mean over tokens of (token loss + kl_coef KL)

    The advantage is that of GRPO over the leaves and the plain rollouts. The other options are
    those of ``curation.lookahead``.

    References:
      LATR (arXiv:2510.24302), the released class, and the settings of its script for countdown; the
      script for mathematics has ``min_prob=0.15, max_gap=0.25, max_distance=None, min_suffix=0.2,
      min_overlap=0.5, starts=(0, 100, 200, 300), shares=(1, 0.75, 0.5, 0.25)``. Rounds of segments
      are ours, see ``curation.lookahead``.
    """
    return from_base(
        name="latr",
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef),
        collector=curation.lookahead(
            min_prob=min_prob,
            max_gap=max_gap,
            ages=ages,
            max_distance=max_distance,
            min_suffix=min_suffix,
            min_overlap=min_overlap,
            segment=segment,
            limit=limit,
            starts=starts,
            shares=shares,
        ),
        paper="arXiv:2510.24302",
    )


def branch_grpo(
    *,
    splits: int | tuple[int, ...] | None = None,
    branches: int = 2,
    prune: Literal["width", "depth"] | None = "width",
    ratio: float | None = None,
    keep: Literal["best", "extremes"] | None = None,
    window: tuple[int, ...] | None = None,
    interval: int | None = None,
    stop: int | None = None,
    alpha: float | None = None,
    bound: float = 5.0,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Trees that split at scheduled depths; advantages by depth; pruned nodes do not train.

        R(node) = mean reward of its leaves;   A = R standardized among the nodes of its depth
        each node that is not pruned trains once, with its A

    Args:
      splits: See ``curation.branched``; None for as many as fit into a group.
      branches: Number of branches of a split.
      prune: "width" for a share of the leaves, "depth" for a window of depths, None for nothing.
      ratio: Share of the leaves that train, with "width"; None for 0.5.
      keep: Which leaves: the "best" of each last split, or the "extremes" of a group (None).
      window: Depths that do not train, with "depth"; None for the last of two splits, 1.
      interval: Steps after which the window moves up by one; None for a fixed window.
      stop: Depth at which the window stops.
      alpha: Weight of a child's log-probability in its parent's reward; None for the plain mean.
      bound: Bound of the advantages.

    References:
      BranchGRPO (arXiv:2509.06040), the released code: splits at 0, 3, 6, 9 of 20 steps of
      denoising, share 0.5, bound 5, a clip of 1e-3. Segments of a text instead of denoising steps,
      and the clip of 0.2, are ours; ``branch_grpo_flow`` is the form for flow policies.
    """
    if prune != "width":
        checks.check_no_effect("branch_grpo", f"with prune={prune!r}", ratio=ratio, keep=keep)
    if prune != "depth":
        because = f"with prune={prune!r}"
        checks.check_no_effect("branch_grpo", because, window=window, interval=interval, stop=stop)
    checks.check_option("branch_grpo", "prune", prune, ("width", "depth", None))
    selection, credit = curation.branch_tokens, bind(advantages.branch_advantages, bound=bound)
    if prune == "width":
        selection = bind(selection, ratio=0.5 if ratio is None else ratio, keep=keep)
    elif prune == "depth":
        selection = bind(selection, window=window or (1,), interval=interval, stop=stop)
    if interval is None:
        selection = bind(selection, current_version=None)
    else:  # which is then required
        selection = connect(selection, current_version="current_version")
    credit = bind(credit, old_logp=None) if alpha is None else bind(credit, alpha=alpha)
    return from_base(
        name="branch_grpo",
        advantage=stateless(credit),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        selection=selection,
        collector=curation.branched(splits=splits, branches=branches),
        paper="arXiv:2509.06040",
    )


def spo_tree(
    *,
    levels: int = 3,
    branches: int | tuple[int, ...] | None = None,
    segment: int = 30,
    scale: Literal["std"] | None = None,
    max_prob: float | None = 0.9,
    whiten: bool = True,
    kl_coef: float = 1e-4,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Segments of a tree, with the change in value as the advantage of their uncertain tokens.

        V(node) = reward of a leaf, else mean over its children of V;   A = V(node) - V(parent)
        A' = A scaled to mean 0 and variance 1 over the tokens that train
        loss = mean over tokens with A != 0 and exp(old_logp) < max_prob, each once, of
               (token loss + kl_coef KL)

    The group is the leaves of one tree: 216 for 6, 6 and 6 branches.

    Args:
      levels: Number of splits of a response, the first at its first token.
      branches: Branches of each split, one number or one for each; None for the widest tree that
        fits into a group.
      segment: Tokens of each segment but the last.
      scale: "std" to divide A by the deviation of the parent's children, None for no division.
      max_prob: Tokens that the old policy samples with this probability or more do not train; None
        for all tokens.
      whiten: Whether advantages are whitened.

    References:
      Guo et al., SPO (arXiv:2505.23564), the released code: 6-6-6, segments of 30 tokens for GSM8K,
      600 for MATH, a KL of 1e-4, there of the sum over a segment's tokens, here of the mean; "rloo"
      is no scale, "grpo" is "std". There each segment is a sample, and batches of 128 are drawn and
      whitened separately; here all segments of a batch share one step.
    """
    if isinstance(branches, tuple) and len(branches) != levels:
        raise ValueError(
            f"spo_tree: branches must have one number for each of {levels} levels; got {branches}."
        )
    segments = bind(advantages.spo_tree, scale=scale, max_depth=levels - 1)
    whitened = bind(advantages.whiten_segments, max_prob=max_prob)
    selection = bind(curation.segment_tokens, max_prob=max_prob)
    if max_prob is None:
        whitened, selection = bind(whitened, old_logp=None), bind(selection, old_logp=None)
    credit, scaled = stateless(segments), stateless(whitened)
    return from_base(
        name="spo_tree",
        advantage=chain(credit, scaled) if whiten else chain(credit),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef),
        selection=selection,
        collector=curation.branched(splits=levels, branches=branches, segment=segment),
        paper="arXiv:2505.23564",
    )
