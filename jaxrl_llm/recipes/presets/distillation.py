"""Learning from another model: its distributions, or its log-probabilities of the policy's tokens.

The teacher is ``TrainConfig.teacher``. Rewards are used for reports and evaluation; of these
methods only ``minillm(rewards=True)`` also trains on them.
"""

from jaxrl_llm import advantages, aggregate, curation, surrogates
from jaxrl_llm.core import Array, bind, chain, checks, connect, masking, stateless, traits
from jaxrl_llm.recipes.presets.base import from_base, nonzero_term, with_texts
from jaxrl_llm.recipes.presets.teachers import no_advantages
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed
from jaxrl_llm.surrogates.divergence import Rest

__all__ = ["gkd", "iw_opd", "minillm", "on_policy_distillation", "span_distillation"]

# The teacher's log-probability of the token that the policy drew.
_OF_TOKENS = Computed("teacher_token_logp", surrogates.target_log_probs, "teacher")


def gkd(
    *,
    beta: float = 0.5,
    top: int | None = None,
    rest: Rest = "tail",
    demonstrations: int = 0,
    offline: bool = False,
    column: str = "demonstration",
) -> Recipe:
    """Generalized knowledge distillation.

        loss = mean over tokens of the divergence between policy and teacher; beta
        beta = 0: KL(teacher || policy);  1: KL(policy || teacher);  between: Jensen-Shannon

    The responses come from the policy or the data. The logits of both models exist only for a chunk
    of tokens at a time. With ``top`` the divergence is over that many most probable tokens of the
    teacher, as token servers and stored logits provide them.

    Args:
      beta: Interpolation of the divergence; 0.5 is the symmetric Jensen-Shannon divergence.
      top: Size of the support; None for the full vocabulary.
      rest: "tail" makes the other tokens one event; "renormalize" makes the probabilities of the
        support add up to 1, for a ``top`` of at least 2.
      demonstrations: Number of responses of each group that come from the data (divided by the size
        of the group it is the paper's 1 - lambda).
      offline: Whether all responses come from the data and nothing is sampled.
      column: Column of the data with the responses.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.gkd(beta=1.0, top=20).surrogate
      sdpo(alpha=1.0, cap=None, rest='tail')

    References:
      Agarwal et al., on-policy distillation of language models (arXiv:2306.13649); the options are
      those of TRL's GKD, distillation and server-distillation trainers, see docs/distillation.md.
    """
    if offline and demonstrations:
        raise ValueError("gkd: demonstrations has no effect if all responses come from the data.")
    if column != "demonstration" and not (offline or demonstrations):
        raise ValueError("gkd: column has no effect if no response comes from the data.")
    if top is None:
        if rest != "tail":
            raise ValueError("gkd: rest has no effect without top.")
        divergence = bind(surrogates.teacher_divergence, alpha=beta)
        surrogate, computed = surrogates.gkd, (Computed("divergence", divergence, "policy"),)
    else:
        checks.check_option("gkd", "rest", rest, ("tail", "renormalize"))
        if rest == "renormalize" and top == 1:
            raise ValueError(
                "gkd: with top=1, rest='renormalize' gives one token probability 1 in both models, "
                "and nothing is distilled; take rest='tail' or a larger top."
            )
        log_probs = connect(surrogates.support_log_probs, support="top_ids")
        surrogate = bind(surrogates.sdpo, alpha=beta, rest=rest, cap=None)
        computed = (
            Computed("student_logp", log_probs, "policy"),
            Computed("top_ids", bind(surrogates.top_tokens, count=top), "teacher"),
            Computed("teacher_logp", bind(surrogates.top_log_probs, count=top), "teacher"),
        )
    collector = None
    if offline:
        collector = curation.only_demonstrations(column=column, reward=0.0)
    elif demonstrations:
        collector = curation.demonstrations(count=demonstrations, column=column, reward=0.0)
    return from_base(
        name="gkd",
        advantage=stateless(no_advantages),
        surrogate=surrogate,
        computed=computed,
        collector=collector,
        paper="arXiv:2306.13649",
        group_relative=False,
    )


def on_policy_distillation(
    *, coef: float = 1.0, discount: float = 0.0, gamma: float | None = None
) -> Recipe:
    """The reverse KL to a teacher by policy gradient, from the sampled tokens only.

        A[t] = coef (teacher_token_logp[t] - old_logp[t])
        loss = mean over tokens of -A[t] times the clipped ratio

    On policy its gradient is, in expectation, that of KL(policy || teacher) of the next token. The
    teacher provides one number per token.

    Args:
      coef: Weight of the teacher, above 0.
      discount: Discount of later tokens' log-ratios in a token's advantage; 0 excludes them.
      gamma: Extra weight of the first token over the last (IW-OPD), above 0; None for no such
        weight.

    References:
      Reverse KL as the reward: MiniLLM (arXiv:2306.08543); with ``gamma``, on the position bias of
      on-policy distillation (arXiv:2606.22600), 0.5 in TRL.
    """
    checks.check_positive("on_policy_distillation", finite=True, coef=coef, gamma=gamma)
    teacher = bind(advantages.teacher_advantages, coef=coef, discount=discount)
    advantage = chain(stateless(no_advantages), stateless(teacher))
    if gamma is not None:
        weights = stateless(bind(advantages.prefix_weighted, gamma=gamma))
        advantage = chain(stateless(no_advantages), stateless(teacher), weights)
    return from_base(
        name="on_policy_distillation",
        advantage=advantage,
        computed=(_OF_TOKENS,),
        paper="arXiv:2306.08543",
        group_relative=False,
    )


def iw_opd(*, gamma: float = 0.5) -> Recipe:
    """Importance-weighted on-policy distillation: early tokens have larger weights.

        A[t] = w[t] (teacher_token_logp[t] - old_logp[t])
        w[t] = 1 + gamma (1 - share of the response's |log-ratio| before t)

    Args:
      gamma: Extra weight of the first token over the last.

    References:
      On the Position Bias of On-Policy Distillation (arXiv:2606.22600), as in TRL 1.16.
    """
    recipe = on_policy_distillation(gamma=gamma)
    return recipe.replace(name="iw_opd", paper="arXiv:2606.22600")


def minillm(
    *,
    mixture: float = 0.2,
    coef: float = 1.0,
    discount: float = 1.0,
    single_step: float = 1.0,
    text_coef: float = 1.0,
    text_share: float = 0.5,
    column: str = "pretraining",
    eps: float = 0.2,
    rewards: bool = False,
    epochs: int = 4,
) -> Recipe:
    """Reverse KL of the full response, sampled, and the exact divergence of the next token.

        y ~ (1 - mixture) policy + mixture teacher, token by token
        A[t] = coef (mean over u >= t of teacher_token_logp[u] - old_logp[u]), discounted
        token loss = clipped ratio to the sampler times -A[t], + single_step KL(policy || teacher)
        loss = its mean over sampled tokens - text_coef mean of logp over tokens of texts

    Args:
      mixture: Weight of the teacher in the sampling distribution; 0 for only the policy.
      coef: Weight of the teacher in the advantages.
      discount: Discount of later tokens; with 0 only the current token counts.
      single_step: Weight of the exact divergence of the next token.
      text_coef: Weight of the loss on pretraining texts; 0 for no texts.
      text_share: Share of the groups of a batch that are texts.
      column: Column of the data with a text in each row.
      eps: Distance of the clip bounds from 1.
      rewards: Whether the task's rewards also train, by GRPO's advantage, as in TRL.
      epochs: Passes over a batch.

    References:
      Gu et al., MiniLLM (arXiv:2306.08543). In its decomposition the sampled sum begins after the
      next token; here, as in TRL, it begins with it, so with ``single_step`` above 0 the divergence
      of the next token counts in both terms. The released code normalizes the advantages over the
      batch, scales and clips the log-ratios, and also learns from the teacher on texts.
    """
    if not (coef or single_step or rewards):
        raise ValueError(
            "minillm: nothing learns from the responses with coef=0, single_step=0 and "
            "rewards=False."
        )
    first = advantages.grpo if rewards else no_advantages
    teacher = bind(
        advantages.teacher_advantages, coef=coef, discount=discount, normalize=discount > 0
    )
    divergence = bind(surrogates.teacher_divergence, alpha=1.0)
    return from_base(
        name="minillm",
        advantage=chain(stateless(first), stateless(teacher)),
        surrogate=bind(surrogates.minillm, eps=eps),
        computed=(
            _OF_TOKENS,
            *([Computed("divergence", divergence, "policy")] if single_step else []),
        ),
        regularizers=nonzero_term(next_token_divergence, coef=single_step),
        text_coef=text_coef,
        collector=with_texts("minillm", text_coef=text_coef, text_share=text_share, column=column),
        teacher_mixture=mixture,
        epochs=epochs,
        paper="arXiv:2306.08543",
        group_relative=rewards,
    )


@traits(supervised=True)
def next_token_divergence(*, divergence: Array, mask: Array, coef: float = 1.0) -> Array:
    """``coef divergence[t]``, the exact term next to a policy gradient."""
    return coef * masking.zero_masked(divergence, mask)


def span_distillation(*, coef: float = 1.0) -> Recipe:
    """On-policy distillation from a teacher with another tokenizer.

        A[t] = coef (log-probability of t's span under the teacher - sum of old_logp over the span)
        span = the shortest piece of text that ends at a token boundary of both tokenizers

    The teacher is a ``train.AlignedTeacher``, which reads the text of prompt and response.

    Args:
      coef: Weight of the teacher, above 0.

    References:
      Spans as in TRL's GOLD trainer (Universal Logit Distillation, arXiv:2402.12030), which
      compares sorted distributions; one number per span is ours.
    """
    checks.check_positive("span_distillation", finite=True, coef=coef)
    teacher = bind(advantages.span_advantages, coef=coef)
    return from_base(
        name="span_distillation",
        advantage=chain(stateless(no_advantages), stateless(teacher)),
        paper="arXiv:2402.12030",
        group_relative=False,
        weights=aggregate.token_mean,
    )
