"""Preferences between the policy's samples, or samples of an earlier or mixed policy."""

from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp

from jaxrl_llm import advantages, aggregate, curation, preferences, regularizers
from jaxrl_llm.core import Array, bind, checks, connect, masking, stateless
from jaxrl_llm.recipes.presets.base import from_base
from jaxrl_llm.recipes.presets.preferences import online_dpo, with_loss
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed

__all__ = [
    "accelerated_po",
    "inpo",
    "lspo",
    "mnpo",
    "nash_md",
    "seppo",
    "spin",
    "sppo",
    "vlm_spo",
    "xpo",
]


def sppo(*, beta: float = 1e-3) -> Recipe:
    """Self-play preference optimization: log-ratios regressed to win rates.

        loss = mean over both of (logp - ref_logp - (win rate - 1/2) / beta)^2 / 2

    The win rate of a rollout is its mean probability of beating a rollout of its group, itself
    included (1/2), under a Bradley-Terry model of the rewards. The reference is the policy that
    sampled.

    Args:
      beta: 1 / eta, the inverse step size.

    References:
      Wu et al. (arXiv:2405.00675). The paper samples all pairs of an iteration beforehand; here an
      iteration is a step.
    """
    return with_loss(
        "sppo",
        bind(preferences.paired, reference="behavior", loss=bind(preferences.sppo, beta=beta)),
        reads=("behavior_logp",),
        paper="arXiv:2405.00675",
        computed=(Computed("win_rates", win_rates, "batch"),),
    )


def inpo(*, eta: float = 0.0075, ratio: float = 1 / 3) -> Recipe:
    """Iterative Nash policy optimization: self-play toward the Nash equilibrium of preferences.

        loss = (h - 1 / (2 eta))^2
        h = of w minus of l: logp - ratio ref_logp - (1 - ratio) behavior_logp

    Args:
      eta: Step size of mirror descent.
      ratio: tau / eta, the weight of the fixed reference against the policy that sampled.

    References:
      Zhang et al. (arXiv:2407.00617). The paper samples all pairs of an iteration beforehand; here
      an iteration is a step. In :func:`mnpo` with ``weights=(1.0,)`` and ``every=N`` an iteration
      is N steps, in which the policy samples as it learns.
    """
    loss = bind(preferences.inpo, eta=eta, ratio=ratio)
    surrogate, reads = bind(preferences.paired, loss=loss), ("ref_logp", "behavior_logp")
    return with_loss("inpo", surrogate, reads=reads, paper="arXiv:2407.00617")


def mnpo(
    *,
    eta: float = 0.0075,
    ratio: float = 1 / 3,
    weights: Sequence[float] = (1.0, 1.0, 1.0),
    every: int = 100,
) -> Recipe:
    """Multiplayer Nash preference optimization: :func:`inpo` against several earlier policies.

        loss = (h - 1 / (2 eta))^2
        h = of w minus of l: logp - ratio ref_logp - (1 - ratio) mean of the earlier policies' logp

    The earlier policies are those at the starts of the last iterations, including the current one;
    with one policy and ``every=1`` it is :func:`inpo`.

    Args:
      eta: Step size of mirror descent.
      ratio: tau / eta, the weight of the fixed reference against the earlier policies.
      weights: Weights of the earlier policies, the latest first; one per stored policy.
      every: Steps per iteration.

    References:
      Wu et al. (arXiv:2509.23102), whose iterations sample their pairs beforehand; here the policy
      samples as it learns. The number of policies and their weights are ours.
    """
    loss = bind(preferences.inpo, eta=eta, ratio=ratio)
    surrogate = connect(bind(preferences.paired, loss=loss), behavior_logp="earlier_logp")
    earlier = regularizers.earlier_policies(weights=weights, every=every)
    return with_loss(
        "mnpo", surrogate, reads=("ref_logp",), paper="arXiv:2509.23102", earlier=earlier
    )


def win_rates(advantages: Array, *, rewards: Array, where: Array) -> Array:
    """Mean Bradley-Terry probabilities ``[P, G]`` of beating a rollout of the group."""
    del advantages
    return curation.mean_win_rate(curation.win_rate_matrix(rewards), where=where)


def nash_md(*, beta: float = 0.1, mixture: float = 0.5) -> Recipe:
    """Nash mirror descent: wins against a mixture of policy and reference, with a KL penalty.

        loss = -(p - 1/2) sum of logp + beta sum of sg(logp - ref_logp) logp
        p = win rate against policy^(1 - mixture) ref^mixture

    The opponents of a rollout are the others of its group, weighted by
    :func:`jaxrl_llm.preferences.mixture_win_rates` as if the mixture had sampled them; wins follow
    a Bradley-Terry model of the rewards.

    Args:
      beta: Weight of the penalty.
      mixture: Weight of the reference in the opponent.

    References:
      Munos et al. (arXiv:2312.00886). The paper and TRL sample the opponent from mixed token
      distributions.
    """
    rates = Computed("win_rates", bind(against_mixture, mixture=mixture), "batch")
    return from_base(
        name="nash_md",
        advantage=stateless(advantages.dr_grpo),
        surrogate=bind(preferences.played, beta=beta),
        weights=aggregate.sequence_mean,
        computed=(rates,),
        paper="arXiv:2312.00886",
    )


def against_mixture(
    advantages: Array,
    *,
    rewards: Array,
    where: Array,
    mask: Array,
    old_logp: Array,
    ref_logp: Array,
    mixture: float,
) -> Array:
    """Win rates ``[P, G]`` for :func:`nash_md`."""
    del advantages
    logp, ref = (jnp.sum(masking.zero_masked(x, mask), axis=-1) for x in (old_logp, ref_logp))
    wins = curation.win_rate_matrix(masking.zero_masked(rewards, where))
    return preferences.mixture_win_rates(wins, logp, ref, mixture=mixture, where=where)


def xpo(*, beta: float = 0.1, alpha: float = 1e-5, column: str | None = None) -> Recipe:
    """Exploratory preference optimization: DPO plus a bonus for leaving the reference.

        loss = -log sigmoid(x_w - x_l) + alpha (sum of logp of the response of the reference)

    A pair is a rollout of the policy and a rollout of the frozen reference, both graded. In each
    step each of them samples half of every group, and all pairs across the halves are compared; the
    paper's group is of 2. A group whose rewards are all equal has neither a pair nor the bonus; in
    TRL the policy wins a tie.

    Args:
      beta: Scale of the implicit rewards.
      alpha: Weight of the optimism term.
      column: Column with responses that the reference sampled before the run; the first response of
        a row joins the rollouts of the policy in its group. None samples them in each step.

    References:
      Xie et al. (arXiv:2405.21046), as in TRL.
    """
    loss = bind(preferences.xpo, alpha=alpha, loss=bind(preferences.dpo, beta=beta))
    recipe = with_loss(
        "xpo",
        connect(bind(preferences.paired, loss=loss), from_reference="steered"),
        reads=("ref_logp",),
        paper="arXiv:2405.21046",
        collector=None if column is None else curation.demonstrations(column=column),
    )
    return recipe.replace(sampled_by=("policy", "reference")) if column is None else recipe


def accelerated_po(*, beta: float = 0.1, alpha: float = 0.3, every: int = 100) -> Recipe:
    """Accelerated preference optimization: iterations of online DPO with an extrapolation step.

        loss = that of online_dpo, against the policy at the start of the iteration
        every ``every`` steps: policy = reference = params + alpha (params - previous params)

    Args:
      beta: Scale of the implicit rewards.
      alpha: Extrapolation coefficient, in [0, 1).
      every: Steps per iteration.

    References:
      He et al. (arXiv:2410.06293), ABSTRACT reading. An iteration of the paper samples its pairs
      beforehand; here the policy samples as it learns.
    """
    return online_dpo(beta=beta).replace(
        name="accelerated_po",
        reference=regularizers.extrapolated(every=every, alpha=alpha),
        paper="arXiv:2410.06293",
    )


def seppo(
    *,
    beta: float = 0.1,
    every: int = 30,
    stored: int = 7,
    column: str = "demonstration",
    tolerance: float = 1e-5,
) -> Recipe:
    """Semi-policy preference optimization: responses of the data against samples of a past policy.

        loss = -log sigmoid(x_w - s x_l),   s = 1 where logp_w >= ref_logp_w, else -1
        w = a response of the data,   l = a sample of the reference
        reference = the policy at the beginning of one of the iterations so far, drawn in each

    Where the response of the data is likelier under the reference than under the policy, the
    reference's sample is raised instead of lowered. The data have no rejected responses, and
    rewards are not read.

    Args:
      beta: Scale of the implicit rewards.
      every: Steps per iteration.
      stored: Number of policies that are stored; see ``regularizers.random_reference``.
      column: Column with a response in each row.
      tolerance: Log-probabilities that differ by less, relative to their size, count as equal, as
        of a policy and a reference of the same weights; in bfloat16 about 1e-2.

    References:
      Zhang et al. (arXiv:2410.05255), who train diffusion models, with seven policies, one every 30
      updates; the form for language models and the treatment of ties are ours. Confidence: PAPER.
    """
    return with_loss(
        "seppo",
        bind(preferences.paired, loss=bind(preferences.seppo, beta=beta, tolerance=tolerance)),
        reads=("ref_logp",),
        paper="arXiv:2410.05255",
        collector=curation.demonstrations(column=column),
    ).replace(
        advantage=stateless(data_first),
        curation=None,
        reference=regularizers.random_reference(every=every, stored=stored),
        sampled_by="reference",
    )


def spin(*, beta: float = 0.1, every: int = 100, column: str = "demonstration") -> Recipe:
    """Self-play fine-tuning: responses of the data against samples of the last iteration's policy.

        loss = -log sigmoid(x_w - x_l)
        w = a response of the data,   l = a sample of the reference
        reference = the policy at the beginning of the iteration

    It ends where samples and data cannot be told apart. The data have no rejected responses, and
    rewards are not read. Each response of the data is paired with all samples of its group.

    Args:
      beta: Scale of the implicit rewards, lambda in the paper.
      every: Steps per iteration.
      column: Column with a response in each row.

    References:
      Chen et al. (arXiv:2401.01335), with the logistic loss and the beta of the authors' code. They
      sample all pairs of an iteration beforehand, and from the second iteration on also train on
      those of the one before; here the reference samples during the iteration. The recipe "spin"
      of verl pairs two samples of the policy by their rewards instead, as :func:`online_dpo` does.
    """
    return with_loss(
        "spin",
        bind(preferences.paired, loss=bind(preferences.dpo, beta=beta)),
        reads=("ref_logp",),
        paper="arXiv:2401.01335",
        collector=curation.demonstrations(column=column),
    ).replace(
        advantage=stateless(data_first),
        curation=None,
        reference=bind(regularizers.reset_reference, every=every),
        sampled_by="reference",
    )


def data_first(rewards: Array, *, steered: Array) -> Array:
    """1 for responses of the data and 0 for samples ``[P, G]``."""
    return jnp.where(steered, 1.0, jnp.zeros_like(rewards))


def lspo(
    *, num_prompts: int, beta: float = 0.1, clusters: int = 4, size: int = 32, every: int = 100
) -> Recipe:
    """Latent space policy optimization: DPO toward the strategies that solve a game.

        strategy of an utterance = its cluster;  policy over strategies by regret matching
        loss = that of online_dpo, for the likeliest strategy of a group against the least likely

    See ``curation.latent_policy``. A prompt is a state of the game, and the reward is the payoff of
    an utterance in that state. Clusters use words (``curation.hashed_responses``), or the
    ``embeddings`` of the batch.

    Args:
      num_prompts: Number of states of the game.
      beta: Scale of the implicit rewards.
      clusters, size, every: See ``curation.latent_policy``; an iteration of ``every`` steps begins
        with clusters of the policy's current utterances.

    References:
      Xu et al. (arXiv:2502.04686), ABSTRACT reading. There the players of Werewolf move in turns
      and the pairs of an iteration follow its solution; here a state has one decision, the reward
      includes the other players, and policy and solution are updated together.
    """
    game = curation.latent_policy(
        num_prompts=num_prompts, clusters=clusters, size=size, every=every
    )
    return online_dpo(beta=beta).replace(
        name="lspo",
        advantage=game,
        curation=None,  # the game learns from equal payoffs too
        selection=curation.differing_values,
        computed=(Computed("embeddings", curation.hashed_responses, "responses"),),
        paper="arXiv:2502.04686",
    )


def vlm_spo(
    *,
    beta: float = 0.1,
    min_gap: float = 0.1,
    task_weight: float = 1 / 3,
    grounding_weight: float = 1 / 3,
    history_weight: float = 1 / 3,
    boundaries: tuple[int, ...] = (100, 200),
) -> Recipe:
    """Structured preference optimization of plans: DPO by a score of three criteria, easy first.

        score = task_weight task + grounding_weight grounding + history_weight history
        loss = that of online_dpo, for the largest score of a group against the smallest

    The reward returns a mapping with "task", "grounding" and "history", as a judge grades a chain
    of reasoning; the data have a column "stage", from 0 for the easiest.

    Args:
      beta: Scale of the implicit rewards.
      min_gap: Smallest gap between the scores of a pair; other groups leave the batch.
      task_weight: Weight of the criterion, not negative; the same for the two below.
      grounding_weight: See ``task_weight``.
      history_weight: See ``task_weight``.
      boundaries: Steps at which the next stage opens.

    References:
      Structured preference optimization (arXiv:2502.20742), ABSTRACT: weights, gap and stages are
      ours, and so is sampling the pairs as the policy learns.
    """
    checks.check_non_negative("vlm_spo", finite=True, min_gap=min_gap)
    score = bind(
        plan_scores,
        task_weight=task_weight,
        grounding_weight=grounding_weight,
        history_weight=history_weight,
    )
    apart = bind(groups_apart, score=score, min_gap=min_gap)
    return online_dpo(beta=beta).replace(
        name="vlm_spo",
        advantage=stateless(connect(score, rewards="reward_components")),
        curation=stateless(connect(apart, rewards="reward_components")),
        collector=curation.staged(boundaries),
        paper="arXiv:2502.20742",
    )


def plan_scores(
    rewards: Mapping[str, Array],
    *,
    where: Array,
    task_weight: float,
    grounding_weight: float,
    history_weight: float,
) -> Array:
    """Scores ``[P, G]`` of the criteria of :func:`vlm_spo`, 0 where masked."""
    names = ("task", "grounding", "history")
    if absent := [name for name in names if name not in rewards]:
        raise ValueError(
            f"vlm_spo: the reward must return {', '.join(map(repr, names))}; it has no "
            f"{', '.join(map(repr, absent))}."
        )
    task, grounding, history = (masking.zero_masked(rewards[name], where) for name in names)
    return curation.structured_score(
        task,
        grounding,
        history,
        task_weight=task_weight,
        grounding_weight=grounding_weight,
        history_weight=history_weight,
    )


def groups_apart(
    rewards: Mapping[str, Array], *, where: Array, score: Callable, min_gap: float
) -> Array:
    """The groups ``[P, G]`` whose best and worst scores differ enough to form a pair."""
    values = score(rewards, where=where)
    pairs = curation.select_pairs(values, where=where, min_gap=min_gap)
    return where & jnp.any(pairs.where, axis=-1, keepdims=True)
