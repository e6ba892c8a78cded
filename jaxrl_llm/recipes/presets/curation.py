"""Selection of rollouts and tokens, group weights and reward shaping by flaws or budgets."""

from typing import Literal

from jaxrl_llm import advantages, aggregate, curation, regularizers, rewards, surrogates
from jaxrl_llm.core import bind, chain, checks, stateless
from jaxrl_llm.recipes.presets.base import from_base, nonzero_term, overlong
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed

__all__ = ["capo", "d3s", "dars", "fapo", "hbpo", "llds", "prompt_gdro", "ps_grpo"]


def d3s(
    *,
    steps: int = 1000,
    rollouts: tuple[float, float] = (0.25, 0.75),
    tokens: tuple[float, float] = (0.2, 1.0),
    scope: Literal["batch", "group"] = "batch",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Trains on a part of the rollouts and tokens, a small part first.

        train on the share N of the rollouts with the largest variance of A, and in those on the
        share K of the tokens with the largest |A| entropy;  N, K linear in the step

    The entropy is that of the policy at the start of the step.

    Args:
      steps: Batches over which the shares go from the first to the second value.
      rollouts: Shares of the rollouts that train.
      tokens: Shares of their tokens that train.
      scope: The set that the variance is over: the "batch", or each "group" separately.

    References:
      D3S (arXiv:2509.22115), PAPER, read through a note. The shares and the steps are ours.
    """
    progress = curation.scheduled(curation.training_progress, steps=steps)
    return from_base(
        name="d3s",
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        computed=(Computed("progress", progress, "controller"),),
        selection=bind(curation.d3s_selection, rollouts=rollouts, tokens=tokens, scope=scope),
        paper="arXiv:2509.22115",
    )


def prompt_gdro(
    *,
    num_prompts: int,
    edges: tuple[float, ...] = (0.4, 0.75),
    eta: float = 0.65,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    kl_coef: float = 0.001,
) -> Recipe:
    """GRPO with adversarial weights, which emphasize the bins of prompts with the largest loss.

        A = grpo(rewards) times the weight of the prompt's bin
        loss = mean over tokens of (clipped loss + kl_coef k3(logp, ref_logp))

    A batch holds ``prompt_ids``.

    Args:
      edges: Edges of the bins: ``curation.difficulty_bins``.
      eta: Sharpness of the adversary: ``curation.exponential_weights``.

    References:
      Prompt-GDRO (arXiv:2601.19280), and the settings of the released script for three bins,
      including four minibatches: the loss of a bin is under the policy before each minibatch.
    """
    return from_base(
        name="prompt_gdro",
        advantage=chain(
            stateless(advantages.grpo),
            curation.prompt_gdro(
                num_prompts=num_prompts, edges=edges, eta=eta, eps_low=eps_low, eps_high=eps_high
            ),
        ),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef),
        minibatches=4,
        paper="arXiv:2601.19280",
    )


def dars(
    *,
    max_rollouts: int = 32,
    schedule: Literal["equal", "hardness"] = "equal",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Policy optimization with larger groups for harder prompts.

        A = r - mean_group r, over the first and the extra rollouts of a prompt
        groups that are all right or all wrong take no part

    :func:`jaxrl_llm.curation.dars_extra_rollouts` gives the number of extra rollouts. Rewards are 0
    or 1; others end a run before its first update. The width of a batch is ``max_rollouts``.

    Args:
      max_rollouts: Maximum rollouts of a prompt, above G; released: 32 for "equal", 64 for
        "hardness".
      schedule: "equal" (equal treatment) or "hardness" (hardness weighted).

    References:
      DARS (arXiv:2508.13755) and its released trainer, with the two epochs of two minibatches of
      its scripts for batches of 128 prompts. The form with breadth (DARS-B) has batches of 3072 and
      two epochs, each over the full batch: set ``minibatches=1``.
    """
    allocate = bind(curation.dars_extra_rollouts, schedule=schedule)
    return from_base(
        name="dars",
        advantage=stateless(advantages.dr_grpo),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        curation=stateless(curation.informative_groups),
        collector=curation.two_phase(allocate, max_rollouts=max_rollouts),
        epochs=2,
        minibatches=2,
        paper="arXiv:2508.13755",
    )


def capo(
    *,
    direction: Literal["adam", "ascent"] = "adam",
    learning_rate: float | None = None,
    hidden_sq: float | None = None,
    tau_h: float = 0.01,
    tau_f: float = 1e-4,
    symmetric: bool = True,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """GRPO without the tokens whose curvature makes a large step unsafe.

        u = change of a token's logits by Adam's step on that token alone
        m_F = lr^2 / 2 ((onehot - pi).u)^2;  m_H = lr A (onehot - pi).u + lr^2 / 2 * curvature
        train on the tokens with m_F < tau_f and |m_H| < tau_h
        loss = mean over responses of the mean over the remaining tokens of token loss

    It is designed for a large learning rate, 1.5e-5 with a warmup and a decay, and rejects few
    tokens. The state of :func:`jaxrl_llm.curation.capo_adam` takes two float32 matrices of the
    output matrix's shape on each device.

    Args:
      direction: "adam"; or "ascent", A |h|^2 (onehot - pi), from two sums over the vocabulary.
      learning_rate: lr, that of the scores; None for that of the update, with "adam".
      hidden_sq: |h / T|^2 with "ascent" and temperature T, one number for all tokens; None uses
        that of each token, which the train step computes.
      tau_h: Bound of the change of the objective.
      tau_f: Bound of the change of the policy.
      symmetric: Whether a step that lowers the objective by less than ``tau_h`` trains.

    References:
      CAPO (arXiv:2510.00819) and its released trainer, in the recipe of its main result. There a
      response without remaining tokens counts in the mean. The bounds are those of its GRPO base;
      5e-4 and 1e-3 belong to Dr. GRPO.
    """
    checks.check_option("capo", "direction", direction, ("adam", "ascent"))
    if direction == "adam":
        checks.check_no_effect("capo", 'with direction "adam"', hidden_sq=hidden_sq)
        selection = bind(curation.capo_bounds, tau_h=tau_h, tau_f=tau_f, symmetric=symmetric)
        rule = curation.capo_adam(
            learning_rate=learning_rate, tau_h=tau_h, tau_f=tau_f, symmetric=symmetric
        )
        computed = (Computed("step_effects", rule, "optimizer"),)
    else:
        if learning_rate is None:
            raise ValueError('capo: direction "ascent" takes learning_rate.')
        selection = bind(
            curation.capo_selection,
            learning_rate=learning_rate,
            tau_h=tau_h,
            tau_f=tau_f,
            symmetric=symmetric,
        )
        if hidden_sq is not None:
            selection = bind(selection, hidden_sq=hidden_sq)
        computed = (
            Computed("sum_pi_sq", advantages.sum_pi_squared, "old_policy"),
            Computed("sum_pi_cubed", curation.sum_pi_cubed, "old_policy"),
        )
    return from_base(
        name="capo",
        advantage=stateless(advantages.grpo, eps=1e-4),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.sequence_mean,
        selection=selection,
        computed=computed,
        paper="arXiv:2510.00819",
    )


def fapo(
    *,
    lam: float = 1.0,
    length: float | None = None,
    buffer_share: float = 0.5,
    overlong_factor: float = 1.0,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = 10.0,
) -> Recipe:
    """Rewards flawed right answers while right answers are rare, and penalizes them later.

        R = 1 for a right answer, 1 - lam for a right one with a flaw, -1 for a wrong one
        R += overlong_penalty                     over the last tokens of the budget
        A = (R - mean_group R) / (std_group R + 1e-6)

    An answer is right if its reward is above 0. The flaws are a judge's verdict, in the batch as
    ``flawed``; the judge's training reward is ``rewards.genrm_step_reward``.

    Args:
      lam: Cost of a flaw.
      length: None for no penalty of long responses.

    References:
      Flawed-aware policy optimization (arXiv:2510.22543) and its released script (verl-recipe),
      with a buffer of 4096 of 8192 tokens, verl's dual clip at 10 and 16 updates per batch.
    """
    penalty = overlong(
        "fapo",
        length=length,
        buffer_share=buffer_share,
        usual=0.5,
        overlong_factor=overlong_factor,
    )
    return from_base(
        name="fapo",
        advantage=chain(
            stateless(rewards.fapo_reward, lam=lam), *penalty, stateless(advantages.grpo)
        ),
        surrogate=bind(
            surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        ),
        minibatches=16,
        paper="arXiv:2510.22543",
    )


def hbpo(
    *,
    length: float,
    budgets: tuple[int, ...] | None = None,
    intra_weight: float = 1.0,
    floor: float | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Hierarchical budget policy optimization.

        R = the reward of a right answer by its length and budget, 0 for a wrong one
        A = (R - mean R) / (std R + 1e-6) + intra_weight (mean of R at this budget - its ideal)

    A reward of the batch above 0 means right, 0 wrong, below 0 not parsed. The rollouts of a group
    are told different budgets (``curation.budgeted``).

    Args:
      length: The limit in tokens, 4096 in the paper; a longer right answer counts as wrong.
      budgets: Budgets of the parts of a group; None for the paper's shares of ``length``, an
        eighth, a quarter, a half and five eighths.
      intra_weight: Weight of the comparison with the ideal: 1 is the paper, 2 the released code.
      floor: Smallest reward of a right answer; None for no bound.

    References:
      HBPO (arXiv:2507.15844), and the reward and advantage of the released code, with the four
      minibatches of its script. The clip and the weighting are the defaults of the trainer that it
      uses.
    """
    if budgets is None:
        shares = (1 / 8, 1 / 4, 1 / 2, 5 / 8)
        budgets = tuple(sorted({max(round(share * length), 1) for share in shares}))
    told = bind(curation.told_budgets, budgets=tuple(budgets), unlimited=float(length))
    return from_base(
        name="hbpo",
        collector=curation.budgeted(budgets),
        computed=(Computed("budgets", told, "responses"),),
        advantage=chain(
            stateless(rewards.hbpo_rewards, max_length=length, floor=floor),
            stateless(advantages.hbpo, max_length=length, intra_weight=intra_weight),
        ),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        minibatches=4,
        paper="arXiv:2507.15844",
    )


def ps_grpo(
    *, agreement: float = 1.0, accuracy: float = 1.0, eps_low: float = 0.2, eps_high: float = 0.2
) -> Recipe:
    """GRPO on agreement with the other paraphrases, and on accuracy.

        R = agreement * mean similarity to the rollouts of the other paraphrases + accuracy * r
        A = (R - mean_group R) / (std_group R + 1e-6), in the rollouts of each paraphrase
        loss = mean over responses of the mean over tokens of token loss

    The paraphrases come from the data's column ``paraphrases``, one prompt of the batch each, and
    agreement is measured by ``rewards.bleu``; see :func:`jaxrl_llm.curation.paraphrased`.

    Args:
      agreement: Weight of the agreement.
      accuracy: Weight of the batch's reward; 0 for long answers without a reward.

    References:
      Con-RAG, PS-GRPO (arXiv:2510.04392), PAPER, with six paraphrases of four rollouts; the weights
      are ours.
    """
    shaped = stateless(rewards.paraphrase_rewards, agreement=agreement, accuracy=accuracy)
    return from_base(
        name="ps_grpo",
        collector=curation.paraphrased(),
        computed=(Computed("similarity", rewards.paraphrase_similarity, "responses"),),
        advantage=chain(shaped, stateless(advantages.grpo)),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.sequence_mean,
        paper="arXiv:2510.04392",
    )


def llds(
    *,
    coef: float = 0.1,
    level: str = "action",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    kl_coef: float = 1e-3,
) -> Recipe:
    """GRPO with a penalty for lost likelihood where the advantage is not negative.

        token loss + kl_coef KL
            + coef max(0, old_logp - logp) where A >= 0 and the action lost in total

    The penalty is 0 until the policy has changed, so a batch has several updates. Actions are the
    contiguous runs of the mask, or the extra ``chunk_ids`` if the batch holds it.

    Args:
      coef: Weight of the penalty.
      level: Unit whose total likelihood must have decreased: each "action" or the full "response".

    References:
      Deng et al. (arXiv:2512.04220); the code's coefficient is 0.2. The two minibatches are from
      the scripts of Search-R1, whose training the paper fixes.
    """
    penalty = bind(regularizers.llds, coef=coef, level=level)
    if level == "response":
        penalty = bind(penalty, chunk_ids=None)
    kl = bind(regularizers.kl_to_reference, estimator="k3", coef=kl_coef)
    return from_base(
        name="llds",
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        regularizers=(penalty, kl) if kl_coef else (penalty,),
        minibatches=2,
        paper="arXiv:2512.04220",
    )
