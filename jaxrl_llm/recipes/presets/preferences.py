"""Preference losses: on pairs of the data, or of the policy's rollouts."""

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm import advantages, aggregate, curation, preferences
from jaxrl_llm.core import Array, accepted, bind, checks, connect, masking, stateless
from jaxrl_llm.curation import Collector
from jaxrl_llm.preferences.groups import best_and_worst, pair_sums
from jaxrl_llm.recipes.presets.base import from_base
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed
from jaxrl_llm.regularizers import EarlierPolicies

__all__ = [
    "aot",
    "apo",
    "bco",
    "brain",
    "cpo",
    "discopop",
    "dpo",
    "exo_pair",
    "fspo",
    "ipo",
    "kto",
    "ld_dpo",
    "lipo_lambda",
    "mpo",
    "nca",
    "online_dpo",
    "orpo",
    "p3o",
    "plackett_luce",
    "simpo",
    "slic",
    "spo_degree",
    "tpo",
    "wpo",
]


def with_loss(
    name: str,
    surrogate: Callable,
    *,
    reads: tuple[str, ...],
    paper: str,
    collector: Collector | None = None,
    computed: tuple[Computed, ...] = (),
    earlier: EarlierPolicies | None = None,
    ties: bool = False,
) -> Recipe:
    """A recipe for a preference loss; ``reads`` names the log-probabilities besides ``logp``.

    Groups whose rewards are all equal are left out unless the loss trains on ``ties``.
    """
    if "ref_logp" in accepted(surrogate) and "ref_logp" not in reads:
        surrogate = bind(surrogate, ref_logp=None)
    if "behavior_logp" in accepted(surrogate) and "behavior_logp" not in reads:
        surrogate = bind(surrogate, behavior_logp=None)
    single = getattr(surrogate, "function", None) is preferences.single
    kept = _several if ties else curation.informative_groups
    return from_base(
        name=name,
        advantage=stateless(advantages.dr_grpo),
        surrogate=surrogate,
        weights=aggregate.sequence_mean if single else aggregate.group_mean,
        curation=None if single else stateless(kept),
        collector=collector,
        computed=computed,
        earlier=earlier,
        group_relative=not single,
        paper=paper,
    )


def _several(rewards: Array, *, where: Array) -> Array:
    """Groups of at least two responses."""
    del rewards
    return where & (jnp.sum(where, axis=-1, keepdims=True) > 1)


def pairwise(
    loss: Callable = preferences.dpo,
    *,
    offline: bool = True,
    name: str | None = None,
    paper: str = "",
) -> Recipe:
    """Any pairwise loss, such as hinge, bco, sft or your own.

        loss = mean over pairs of loss(chosen, rejected)

    Args:
      loss: A loss of pairs of :mod:`jaxrl_llm.preferences`, with its options bound.
      offline: Pairs from the columns "chosen" and "rejected" of the data; else of each group that
        the policy samples, the best rollouts against the worst.
      name: Name of the recipe; None for the name of the loss.
      paper: Its reference.

    Raises:
      ValueError: For ``aot`` and ``aot_unpaired``, which rank all pairs of a batch at once. A step
        computes its loss in parts, which would have ranks of their own.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.pairwise(jr.bind(jr.preferences.hinge, beta=0.05)).name
      'hinge'

    References:
      The losses of TRL's DPO trainer (arXiv:2305.18290).
    """
    function = getattr(loss, "function", loss)
    if function in (preferences.aot, preferences.aot_unpaired):
        remedies = {"aot": "use recipes.aot", "aot_unpaired": "use it in a loop of your own"}
        raise ValueError(
            f"pairwise: {function.__name__} ranks all pairs of a batch at once, but a step adds up "
            f"losses of microbatches and minibatches; {remedies[function.__name__]}."
        )
    return with_loss(
        name or function.__name__,
        bind(preferences.paired, loss=loss),
        reads=("ref_logp",) if "chosen_ref_logp" in accepted(loss) else (),
        paper=paper,
        collector=curation.offline_pairs() if offline else None,
    )


def dpo(
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    likelihood: float = 0.0,
    margins: bool = False,
) -> Recipe:
    """Direct preference optimization.

        loss = -log sigmoid(x_w - x_l - margin) - likelihood a_w
        x = beta (sum of logp - sum of ref_logp)

    Args:
      beta: Scale of the implicit rewards.
      label_smoothing: Assumed share of pairs with swapped labels (cDPO).
      likelihood: Weight of the mean log-probability of the chosen response (RPO, whose weight is
        1). Without it both responses of a pair may become less likely.
      margins: Whether the margin is the column "margin" of each row (ODPO); else it is 0.

    References:
      Rafailov et al., DPO (arXiv:2305.18290); with an offset, Amini et al. (arXiv:2402.10571); with
      the likelihood, Pang et al. (arXiv:2404.19733).
    """
    loss = bind(preferences.dpo, beta=beta, label_smoothing=label_smoothing, likelihood=likelihood)
    recipe = pairwise(loss, paper="arXiv:2305.18290")
    if not margins:
        return recipe
    return recipe.replace(surrogate=connect(recipe.surrogate, margins="margin"))


def spo_degree(
    *, beta: float = 0.1, degree_coef: float = 0.1, classes: tuple[int, ...] = (3, 4, 5, 6)
) -> Recipe:
    """Self-supervised preference optimization: DPO plus a classifier of the degree of degradation.

        loss = dpo(chosen, rejected) + degree_coef (mean over copies of -log softmax(z)[degree])
        z = rows of the output matrix times the last hidden state, one row per degree

    A copy of degree k is the chosen response without the share k / M of its tokens; M is the number
    of classes. Any other pairwise loss can use the same collector, computed entry and term.

    Args:
      beta: Scale of the implicit rewards.
      degree_coef: Weight of the degree term; 0 is :func:`dpo`.
      classes: Token ids whose rows of the output matrix are the head, such as rare symbols; not one
        that ends a response, which is where the head is read.

    References:
      Self-supervised preference optimization (arXiv:2409.17791). Confidence: ABSTRACT; the tokens
      that a copy loses, its degrees and the head are ours.
    """
    head = bind(preferences.degree_logits, classes=tuple(classes))
    return dpo(beta=beta).replace(
        name="spo_degree",
        computed=(Computed("degree_logits", head, "policy"),),
        regularizers=(bind(preferences.degree_term, coef=degree_coef),),
        collector=curation.degraded_pairs(preferences.degrade_mask, degrees=len(classes)),
        paper="arXiv:2409.17791",
    )


def online_dpo(*, beta: float = 0.1) -> Recipe:
    """DPO on samples of the policy: of each group, the best rollouts against the worst.

    Args:
      beta: Scale of the implicit rewards.

    References:
      Guo et al., direct language model alignment from online AI feedback (arXiv:2402.04792), who
      compare two samples.
    """
    return pairwise(
        bind(preferences.dpo, beta=beta), offline=False, name="online_dpo", paper="arXiv:2402.04792"
    )


def ipo(*, beta: float = 0.1, per_token: bool = True) -> Recipe:
    """Identity preference optimization: regresses the difference of log-ratios to a fixed margin.

        loss = (h_w - h_l - 1 / (2 beta))^2,   h = mean (or sum) of logp - ref_logp

    Args:
      beta: Inverse margin; a larger beta has a smaller margin.
      per_token: Whether to use means over tokens, as in TRL; False uses the paper's sums.

    References:
      Azar et al. (arXiv:2310.12036).
    """
    return pairwise(bind(preferences.ipo, beta=beta, per_token=per_token), paper="arXiv:2310.12036")


def slic(*, margin: float = 1.0, likelihood: float = 1.0, per_token: bool = True) -> Recipe:
    """Sequence likelihood calibration: a likelihood margin plus the chosen response's likelihood.

        loss = max(0, margin - (a_w - a_l)) - likelihood a_w,   a = mean (or sum) of logp

    Args:
      margin: Margin between the two responses.
      likelihood: Weight of the likelihood of the chosen response.
      per_token: Whether to use means over tokens; False uses sums.

    References:
      Zhao et al., SLiC-HF (arXiv:2305.10425), whose likelihood is of the supervised target.
    """
    loss = bind(preferences.slic, margin=margin, likelihood=likelihood, per_token=per_token)
    return pairwise(loss, paper="arXiv:2305.10425")


def orpo(*, beta: float = 0.1) -> Recipe:
    """Odds ratio preference optimization: likelihood and odds of the chosen response, no reference.

        loss = -a_w - beta log sigmoid(log odds(a_w) - log odds(a_l)),   a = mean of logp

    Args:
      beta: Weight of the odds.

    References:
      Hong et al. (arXiv:2403.07691). The likelihood is over the response; TRL's also includes the
      prompt.
    """
    return pairwise(bind(preferences.orpo, beta=beta), paper="arXiv:2403.07691")


def simpo(*, beta: float = 2.0, gamma: float = 1.0) -> Recipe:
    """Simple preference optimization: mean log-probabilities with a margin, no reference.

        loss = -log sigmoid(beta (a_w - a_l) - gamma),   a = mean of logp

    Args:
      beta: Scale of the means.
      gamma: Margin.

    References:
      Meng et al. (arXiv:2405.14734).
    """
    return pairwise(bind(preferences.simpo, beta=beta, gamma=gamma), paper="arXiv:2405.14734")


def cpo(*, beta: float = 0.1, likelihood: float = 1.0) -> Recipe:
    """Contrastive preference optimization: DPO without a reference, and the likelihood.

        loss = -log sigmoid(beta (sum of logp_w - sum of logp_l)) - likelihood a_w

    Args:
      beta: Scale of the sums.
      likelihood: Weight of the mean log-probability of the chosen response.

    References:
      Xu et al. (arXiv:2401.08417).
    """
    return pairwise(
        bind(preferences.cpo, beta=beta, likelihood=likelihood), paper="arXiv:2401.08417"
    )


def exo_pair(*, beta: float = 0.1, label_smoothing: float = 1e-3) -> Recipe:
    """Efficient exact optimization: the reverse KL of the policy's preference to the labels.

        loss = KL((q, 1 - q) || (1 - e, e)),   q = sigmoid(x_w - x_l),   e = label_smoothing

    Args:
      beta: Scale of the implicit rewards.
      label_smoothing: In (0, 0.5).

    References:
      Ji et al., EXO (arXiv:2402.00856).
    """
    loss = bind(preferences.exo_pair, beta=beta, label_smoothing=label_smoothing)
    return pairwise(loss, paper="arXiv:2402.00856")


def discopop(*, beta: float = 0.1, tau: float = 0.05) -> Recipe:
    """DiscoPOP: DPO's loss, blended into an exponential loss for pairs in the right order.

        z = x_w - x_l,   m = sigmoid(z / tau)
        loss = -(1 - m) log sigmoid(z) + m exp(-z)

    Args:
      beta: Scale of the implicit rewards.
      tau: Temperature of the blend.

    References:
      Lu et al. (arXiv:2406.08414).
    """
    return pairwise(bind(preferences.discopop, beta=beta, tau=tau), paper="arXiv:2406.08414")


def nca(*, beta: float = 0.1) -> Recipe:
    """Noise contrastive alignment of pairs: keeps the chosen response's likelihood from falling.

        loss = -log sigmoid(x_w) - log sigmoid(-x_w) / 2 - log sigmoid(-x_l) / 2

    Args:
      beta: Scale of the implicit rewards.

    References:
      Chen et al. (arXiv:2402.05369).
    """
    return pairwise(bind(preferences.nca_pair, beta=beta), name="nca", paper="arXiv:2402.05369")


def apo(*, beta: float = 0.1, variant: Literal["zero", "down"] = "zero") -> Recipe:
    """Anchored preference optimization: controls both likelihoods, not only their difference.

        zero:  loss = 1 - sigmoid(x_w) + sigmoid(x_l)
        down:  loss = sigmoid(x_w) + 1 - sigmoid(x_w - x_l)

    Args:
      beta: Scale of the implicit rewards.
      variant: "zero" if the chosen responses are better than the policy's own, "down" if they are
        worse.

    References:
      D'Oosterlinck et al. (arXiv:2408.06266).
    """
    checks.check_option("apo", "variant", variant, ("zero", "down"))
    function = preferences.apo_zero if variant == "zero" else preferences.apo_down
    return pairwise(bind(function, beta=beta), name="apo", paper="arXiv:2408.06266")


def aot(*, beta: float = 0.1, label_smoothing: float = 0.0, excess: float = 1.0) -> Recipe:
    """Alignment by optimal transport: the policy's margins dominate those of the reference.

        a = logp_w - logp_l,   b = ref_logp_w - ref_logp_l
        loss = -log sigmoid(beta (a of rank k - b of rank k))

    The ranks are over the pairs of the batch, by the policy before the step.

    Args:
      beta: Scale of the margins.
      label_smoothing: As in :func:`dpo`.
      excess: Weight of a token past the length of the other response, in [0, 1], as in
        :func:`ld_dpo`.

    References:
      Melnyk et al. (arXiv:2406.05882), of pairs.
    """
    checks.check_share("aot", excess=excess)
    loss = bind(preferences.dpo, beta=beta, label_smoothing=label_smoothing)
    margins = bind(transported_margins, beta=beta)
    return with_loss(
        "aot",
        _with_excess(bind(preferences.paired, loss=loss), excess),
        reads=("ref_logp",),
        paper="arXiv:2406.05882",
        collector=curation.offline_pairs(),
        computed=(Computed("margins", _with_excess(margins, excess), "batch"),),
    )


def _with_excess(function: Callable, excess: float) -> Callable:
    """The function with this option, unless it is the default, which earlier runs do not name."""
    return function if excess == 1.0 else bind(function, excess=excess)


def transported_margins(
    advantages: Array,
    *,
    old_logp: Array,
    ref_logp: Array,
    mask: Array,
    beta: float,
    excess: float = 1.0,
) -> Array:
    """Margins ``[P]`` of a batch's pairs for :func:`aot`, averaged over the pairs of a group."""
    best, worst = best_and_worst(advantages, jnp.any(mask, axis=-1))
    pairs = best[..., :, None] * worst[..., None, :]

    def means(tokens: Array) -> tuple[Array, Array]:
        first = pair_sums(tokens, mask, excess=excess)
        both = first, jnp.swapaxes(first, -1, -2)
        chosen, rejected = (jnp.sum(masking.product(pairs, x), axis=(-1, -2)) for x in both)
        return chosen, rejected

    return preferences.aot_margins(
        *means(old_logp), *means(ref_logp), beta=beta, where=jnp.any(best > 0, axis=-1)
    )


def ld_dpo(*, beta: float = 0.1, alpha: float = 0.5) -> Recipe:
    """Length-desensitized DPO: tokens beyond the length of the other response count less.

        x = beta (logp - ref_logp), summed over the first min(l_w, l_l) tokens
            + alpha times the sum over the tokens after them

    For any pairwise recipe use ``bind(recipe.surrogate, excess=alpha)`` as the surrogate. ``aot``
    and ``mpo``, which also compute margins and a center, take the option ``excess`` instead.

    Args:
      beta: Scale of the implicit rewards.
      alpha: In [0, 1]; 1 is :func:`dpo`.

    References:
      Liu et al. (arXiv:2409.06411), who tune alpha from 0.3 to 0.6 by model.
    """
    loss = bind(preferences.dpo, beta=beta)
    return with_loss(
        "ld_dpo",
        bind(preferences.paired, loss=loss, excess=alpha),
        reads=("ref_logp",),
        paper="arXiv:2409.06411",
        collector=curation.offline_pairs(),
    )


def wpo(*, beta: float = 0.1, cap: float | None = 1.0) -> Recipe:
    """Weighted preference optimization: DPO with larger weights for likely pairs.

        loss = -min(w_w w_l, cap) log sigmoid(x_w - x_l)
        w = exp(mean over tokens of (logp - log sum of pi^2)), by the policy before the step

    Args:
      beta: Scale of the implicit rewards.
      cap: Largest weight of a pair, above 0; None for no limit, as in TRL.

    References:
      Zhou et al. (arXiv:2406.11827), with the sampled alignment and the limit of the released code,
      whose configs have beta 0.01; its weights are of the policy as it trains.
    """
    return with_loss(
        "wpo",
        bind(preferences.paired, max_alignment=cap, loss=bind(preferences.dpo, beta=beta)),
        reads=("ref_logp",),
        paper="arXiv:2406.11827",
        collector=curation.offline_pairs(),
        computed=(
            Computed("sum_pi_sq", advantages.sum_pi_squared, "old_policy"),
            Computed("alignment", alignment, "batch"),
        ),
    )


def alignment(advantages: Array, *, old_logp: Array, sum_pi_sq: Array, mask: Array) -> Array:
    """Weights ``[P, G]`` of responses for :func:`wpo`."""
    del advantages
    return preferences.alignment_weights(old_logp, sum_pi_sq, mask)


def tpo(
    *,
    beta: float = 0.01,
    gamma: float = 0.0,
    likelihood: float = 1.0,
    per_token: bool = False,
    columns: tuple[str, str, str] = ("chosen", "rejected", "reference"),
) -> Recipe:
    """Triple preference optimization: a pair plus the likelihood of a gold response.

        loss = -log sigmoid(beta (sum of logp_w - sum of logp_l) - gamma) - likelihood a_gold

    a is the mean of logp. The gold response is the column "reference" of the data.

    Args:
      beta: Scale of the sums.
      gamma: Margin.
      likelihood: Weight of the likelihood of the gold response.
      per_token: Whether to use means instead of sums: with ``gamma=0.5`` it is TPO-L.
      columns: Names of the columns with the chosen, the rejected and the gold response.

    References:
      Saeidi et al. (arXiv:2405.16681), with TRL's defaults.
    """
    loss = bind(preferences.tpo, beta=beta, gamma=gamma, likelihood=likelihood, per_token=per_token)
    chosen, rejected, gold = columns
    return with_loss(
        "tpo",
        bind(preferences.paired, loss=loss, gold=True),
        reads=(),
        paper="arXiv:2405.16681",
        collector=curation.offline_triples(chosen=chosen, rejected=rejected, gold=gold),
    )


def fspo(*, beta: float = 0.01, shots: int = 4, user: str = "user") -> Recipe:
    """Few-shot preference optimization: IPO with other pairs of the same user in the prompt.

        loss = (h_w - h_l - 1 / (2 beta))^2,   h = sum of logp - ref_logp after the examples

    The examples come from the columns "user", "chosen" and "rejected" of the data; see
    :func:`jaxrl_llm.curation.few_shot_pairs`. The paper first trains on the chosen responses in the
    same format, and that model is the reference.

    Args:
      beta: Inverse margin; a larger beta has a smaller margin.
      shots: Maximum number of examples; 0 is :func:`ipo` of sums.
      user: The column with the user.

    References:
      Singh et al. (arXiv:2502.19312). The paper's chain, which first describes the user, is
      omitted.
    """
    return with_loss(
        "fspo",
        bind(preferences.paired, loss=bind(preferences.ipo, beta=beta)),
        reads=("ref_logp",),
        paper="arXiv:2502.19312",
        collector=curation.few_shot_pairs(shots=shots, user=user),
    )


def kto(
    *, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> Recipe:
    """Kahneman-Tversky optimization: single responses that are labeled good or bad.

        desirable:    loss = w_d (1 - sigmoid(x - z)),   x = beta (sum of logp - sum of ref_logp)
        undesirable:  loss = w_u (1 - sigmoid(z - x))
        z = beta max(0, mean of logp - ref_logp of responses after another row's prompt)

    The responses are the columns "chosen" and "rejected" of the data, each used separately;
    ``replace(collector=curation.offline_labels())`` reads "completion" and "label" instead.

    Args:
      beta: Scale of the implicit rewards.
      desirable_weight: Weight of the good responses.
      undesirable_weight: Weight of the bad ones.

    References:
      Ethayarajh et al. (arXiv:2402.01306).
    """
    loss = bind(
        preferences.kto,
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )
    return with_loss(
        "kto",
        bind(preferences.single, loss=loss),
        reads=("ref_logp",),
        paper="arXiv:2402.01306",
        collector=curation.offline_pairs(),
        computed=(Computed("kl", divergence, "batch"),),
    )


def bco(
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    density: bool = False,
) -> Recipe:
    """Binary classifier optimization: good responses above the mean reward so far, bad ones below.

        good:  loss = -w_d log sigmoid(x - d)
        bad:   loss = -w_u log sigmoid(d - x)
        d = mean of x over all responses so far, before each update

    The data are as of :func:`kto`.

    Args:
      beta: Scale of the implicit rewards.
      desirable_weight: Weight of the good responses.
      undesirable_weight: Weight of the bad ones.
      density: Whether the weight of a bad response also includes the column "density" of its row,
        from ``data.with_density``: how much more often good responses have such a prompt. Pairs
        have the same prompts, and a density of 1.

    References:
      Jung et al. (arXiv:2404.04656), which uses densities; TRL's default does not.
    """
    loss = bind(
        preferences.bco_unpaired,
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )
    center = preferences.running_reward(beta=beta)
    recipe = with_loss(
        "bco",
        bind(preferences.single, loss=loss),
        reads=("ref_logp",),
        paper="arXiv:2404.04656",
        collector=curation.offline_pairs(),
        computed=(Computed("center", center, "controller"),),
    )
    if not density:
        return recipe
    return recipe.replace(surrogate=connect(recipe.surrogate, density="density"))


def divergence(advantages: Array, *, kl_logp: Array, kl_ref_logp: Array, where: Array) -> Array:
    """The divergence z of KTO, over the responses that take part."""
    del advantages
    return preferences.kto_kl(kl_logp, kl_ref_logp, where=where)


def unpaired(
    loss: Callable = preferences.apo_zero_unpaired, *, name: str | None = None, paper: str = ""
) -> Recipe:
    """Any loss of single responses, such as apo_zero_unpaired or your own.

        loss = mean over responses of loss(response, whether it is good)

    The responses are the columns "completion" and "label" of the data;
    ``replace(collector=curation.offline_pairs())`` reads both sides of pairs instead. :func:`kto`
    and :func:`bco` also include the references that these losses compare a response with.

    Args:
      loss: A loss of single responses of :mod:`jaxrl_llm.preferences`, with its options bound.
      name: Name of the recipe; None for the name of the loss.
      paper: Its reference.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.unpaired().name
      'apo_zero_unpaired'

    References:
      The losses of TRL's KTO trainer (arXiv:2402.01306).
    """
    function = getattr(loss, "function", loss)
    return with_loss(
        name or function.__name__,
        bind(preferences.single, loss=loss),
        reads=("ref_logp",) if "ref_logp" in accepted(loss) else (),
        paper=paper,
        collector=curation.offline_labels(),
    )


def listwise(
    loss: Callable = preferences.lipo_lambda,
    *,
    beta: float = 0.05,
    size: int = 8,
    offline: bool = True,
    name: str | None = None,
    paper: str = "",
) -> Recipe:
    """Any listwise loss: lipo_lambda, plackett_luce, list_softmax, pair_logistic, pair_hinge.

        loss = mean over prompts of loss(beta (logp - ref_logp), rewards)

    Lists whose rewards are all equal are left out, except for list_softmax, which pulls their
    scores together.

    Args:
      loss: A loss of lists of :mod:`jaxrl_llm.preferences`, with its options bound.
      beta: Scale of the implicit rewards.
      size: Maximum responses in a row of the data.
      offline: Whether lists come from the columns "responses" and "rewards" of the data; else they
        are the groups that the policy samples.
      name: Name of the recipe; None for the name of the loss.
      paper: Its reference.

    References:
      Liu et al., LiPO (arXiv:2402.01878).
    """
    function = getattr(loss, "function", loss)
    return with_loss(
        name or function.__name__,
        bind(preferences.listed, beta=beta, loss=loss),
        reads=("ref_logp",),
        paper=paper,
        collector=curation.offline_lists(size) if offline else None,
        ties=function is preferences.list_softmax,
    )


def lipo_lambda(*, beta: float = 0.05, size: int = 8) -> Recipe:
    """LiPO: ranked lists, with each pair weighted by its change of the discounted cumulative gain.

    The gain of a response is 2^reward, so the rewards must be scaled to [0, 1], as in the paper.

    Args:
      beta, size: As in :func:`listwise`.

    References:
      Liu et al. (arXiv:2402.01878).
    """
    return listwise(beta=beta, size=size, paper="arXiv:2402.01878")


def plackett_luce(*, beta: float = 0.1, size: int = 8) -> Recipe:
    """DPO for rankings: the likelihood of a list's order under the implicit rewards.

    Args:
      beta, size: As in :func:`listwise`.

    References:
      Rafailov et al., DPO (arXiv:2305.18290), appendix A.3.
    """
    return listwise(preferences.plackett_luce, beta=beta, size=size, paper="arXiv:2305.18290")


def p3o(*, eps: float = 0.2, kl_coef: float = 0.05, clip: str = "joint") -> Recipe:
    """Pairwise PPO on the policy's samples: a clipped policy gradient on differences of rewards.

        loss = mean over pairs of max(c d, c clip(d, -eps, eps)) / 2
        d = change of logp_1 - logp_2 since sampling,   c = -(q_1 - q_2) R_1 R_2
        q = reward - kl_coef (sum of logp - sum of ref_logp)

    Args:
      eps: Half the width of the clip range.
      kl_coef: Penalty per nat from the reference; 0 for none.
      clip: "joint", or "separate" for each ratio.

    References:
      Wu et al. (arXiv:2310.00212) and the first author's fork of trlx, with two responses per
      prompt. The penalty and the four epochs of 16 minibatches are those of its script for the data
      HH; that for Mistral has a penalty of 0.01 and two epochs. There rewards are clipped to +-10
      and divided by their running deviation; here they are as given.
    """
    loss = bind(preferences.p3o, eps=eps, kl_coef=kl_coef, clip=clip)
    reads = ("ref_logp",) if kl_coef else ()
    surrogate = bind(preferences.listed, loss=loss)
    # Equal rewards leave the differences of the penalty.
    recipe = with_loss("p3o", surrogate, reads=reads, paper="arXiv:2310.00212", ties=kl_coef > 0)
    return recipe.replace(epochs=4, minibatches=16)


def brain(*, temperature: float = 1.0) -> Recipe:
    """BRAIn: distills the posterior of good responses from the policy's weighted samples.

        loss = KL(softmax(ref_logp + r / temperature - behavior_logp)
                  || softmax(logp - behavior_logp)) over a group

    Args:
      temperature: Temperature of the reward.

    References:
      Pandey et al. (arXiv:2402.02479), with the reference as the prior.
    """
    loss = bind(preferences.brain, temperature=temperature)
    surrogate, reads = bind(preferences.listed, loss=loss), ("ref_logp", "behavior_logp")
    # Of equal rewards the posterior is the prior, to which the policy returns.
    return with_loss("brain", surrogate, reads=reads, paper="arXiv:2402.02479", ties=True)


def mpo(
    *,
    beta: float = 0.1,
    preference: float = 0.8,
    quality: float = 0.2,
    likelihood: float = 1.0,
    excess: float = 1.0,
) -> Recipe:
    """Mixed preference optimization on the best and the worst rollouts of each group.

        x = beta (logp - ref_logp), summed over a rollout
        loss = -preference log sigmoid(x_w - x_l)
               -quality (log sigmoid(x_w - d) + log sigmoid(d - x_l))
               -likelihood (mean over tokens of logp_w)
        d = mean of (x_w + x_l) / 2 over all pairs so far, before each update

    The mean is over the groups whose rewards differ; the others do not train.

    Args:
      beta: Scale of the implicit rewards.
      preference: Weight of the first term; ``quality`` and ``likelihood`` weigh the others.
      excess: As in :func:`aot`.

    References:
      Wang et al. (arXiv:2411.10442), with the weights of TRL's documentation; Skywork R1V2
      (arXiv:2504.16656) trains with this mix and GRPO; its buffer is :func:`ssb`. The papers sample
      their pairs beforehand.
    """
    loss = bind(
        preferences.mpo,
        beta=beta,
        preference=preference,
        quality=quality,
        likelihood=likelihood,
    )
    center = preferences.running_center(beta=beta, excess=excess)
    surrogate = bind(preferences.paired, behavior_logp=None, loss=loss)
    return from_base(
        name="mpo",
        advantage=stateless(advantages.dr_grpo),
        computed=(Computed("center", center, "controller"),),
        surrogate=_with_excess(surrogate, excess),
        weights=aggregate.group_mean,
        curation=stateless(curation.informative_groups),
        paper="arXiv:2504.16656",
    )
