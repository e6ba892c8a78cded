"""Learning from demonstrations, a teacher or a guide, in addition to rewards or instead of them."""

import jax.numpy as jnp

from jaxrl_llm import advantages, aggregate, curation, regularizers, rewards, surrogates
from jaxrl_llm.core import Array, bind, chain, connect, stateless
from jaxrl_llm.recipes.presets.base import from_base, nonzero_term
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import TEACHER_TEXTS, Computed

__all__ = ["ampo", "chord", "dft", "icpo", "luffy_shaping", "otr", "rlsd", "sdpo", "sft", "srpo"]


def no_advantages(rewards: Array) -> Array:
    """Zeros, for a method that does not learn from rewards."""
    return jnp.zeros(jnp.shape(rewards), jnp.float32)


def unit_advantages(rewards: Array) -> Array:
    """Ones, whatever the rewards: REINFORCE then is maximum likelihood."""
    return jnp.ones(jnp.shape(rewards), jnp.float32)


def sft(*, column: str = "demonstration") -> Recipe:
    """Supervised fine-tuning: maximum likelihood of demonstrations.

        loss = mean over tokens of the batch of -log p

    Nothing is sampled: a column of the data has the responses, see
    ``curation.only_demonstrations``. With one response a row, set ``group_size=1``. REINFORCE with
    advantage 1, so that it composes as others do:
    ``sft().replace(likelihood=jr.diffusion.elbo_likelihood())`` trains a denoiser.

    Args:
      column: Column of the data with a response, or with a list of them.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.sft().collector
      only_demonstrations(reward=1.0)

    References:
      Ouyang et al., InstructGPT (arXiv:2203.02155), step 1. The mean is over the tokens of all
      responses, as in TRL's SFTTrainer; tokens of the prompt do not train.
    """
    return from_base(
        name="sft",
        advantage=stateless(unit_advantages),
        surrogate=surrogates.reinforce,
        collector=curation.only_demonstrations(column=column, reward=1.0),
        paper="arXiv:2203.02155",
        group_relative=False,
    )


def dft(*, column: str = "demonstration") -> Recipe:
    """Dynamic fine-tuning: :func:`sft`, in which a token counts by its probability.

        loss = mean over tokens of the batch of -stop_gradient(p) log p

    Args:
      column: Column of the data with a response, or with a list of them.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.dft(column="completion").surrogate is jr.surrogates.dft
      True

    References:
      Wu et al., On the Generalization of SFT (arXiv:2508.05629), as TRL and ms-swift compute it.
    """
    return from_base(
        name="dft",
        advantage=stateless(unit_advantages),
        surrogate=surrogates.dft,
        collector=curation.only_demonstrations(column=column, reward=1.0),
        paper="arXiv:2508.05629",
        group_relative=False,
    )


def otr(*, beta: float = -0.1, tau: float = 1.3, samples: int | None = None) -> Recipe:
    """Each token of a demonstration is a bandit: the data's token has reward 1, others ``beta``.

        loss = mean over tokens of -(q[x] log p[x] + beta sum_{a != x} q[a] log p[a])
        q = softmax(logits / tau), a constant;  p = softmax(logits)

    Nothing is sampled: the "rollouts" of a batch are the prompts' demonstrations, one or more per
    group; their rewards have no effect. Train at temperature 1.

    Args:
      beta: Reward of a token other than the data's.
      tau: Sampling temperature.
      samples: None for the expectation over all tokens; a number to draw that many tokens at each
        position, as in the paper (256), which costs more and adds noise.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.otr().draws, jr.recipes.otr(samples=256).draws
      (False, True)

    References:
      Ming et al., One-Token Rollout (arXiv:2509.26313), PAPER; tau and the exact form are ours.
    """
    loss, seeds = bind(surrogates.otr_exact, beta=beta, tau=tau), ()
    if samples is not None:
        loss = bind(surrogates.otr_sampled, beta=beta, tau=tau, samples=samples)
        seeds = (Computed("token_seeds", surrogates.token_seeds, "batch"),)
    return from_base(
        name="otr",
        advantage=stateless(no_advantages),
        surrogate=surrogates.otr,
        computed=(*seeds, Computed("one_token_loss", loss, "policy")),
        collector=curation.only_demonstrations(reward=1.0),
        paper="arXiv:2509.26313",
        group_relative=False,
    )


def sdpo(
    *,
    alpha: float = 0.5,
    top: int = 100,
    cap: float | None = 2.0,
    teacher_rate: float = 0.05,
    success: float = 0.5,
) -> Recipe:
    """Self-distillation policy optimization.

        teacher = average of the policy's weights, after a prompt with a solution or feedback
        loss = mean over taught tokens of min(ratio, cap) divergence(student, teacher; alpha)

    The divergence is over the ``top`` most likely tokens of the policy at the start of the
    step, and their tail. The teacher reads a right response of the group, or else the text that the
    reward returns as ``feedback`` (``curation.solution_messages``). Rollouts without a teacher
    do not count, and neither do those whose teacher prompt does not fit into the model's context.

    Args:
      alpha: 0 for KL(teacher || student), 1 for KL(student || teacher), between for mixtures.
      top: Size of the support.
      cap: Largest ratio that weighs each token; None for no weights, so 1 each.
      teacher_rate: Share of the policy in the teacher's weights at each step.
      success: Smallest reward of a right response.

    Example:
      >>> import jaxrl_llm as jr
      >>> feedback = jr.recipes.sdpo(alpha=1.0, top=20, teacher_rate=0.01)
      >>> feedback.surrogate
      sdpo(alpha=1.0, cap=2.0)

    References:
      Hübotter et al., Reinforcement Learning via Self-Distillation (arXiv:2601.20802). The defaults
      are those for generalization from siblings' solutions; the example has those for rich
      feedback, where each prompt of a batch has an update of its own: set the run's ``minibatches``
      to its ``prompts_per_step``. The released configuration also weighs tokens for the mismatch of
      the sampler, capped at 2: pass that as ``correction``. The teacher that interpolates logits
      with a reference is omitted.
    """
    log_probs = connect(surrogates.support_log_probs, support="top_ids")
    messages = bind(curation.solution_messages, success=success)
    return from_base(
        name="sdpo",
        advantage=stateless(no_advantages),
        selection=surrogates.keep_taught,
        surrogate=bind(surrogates.sdpo, alpha=alpha, cap=cap),
        computed=(
            Computed(TEACHER_TEXTS, messages, "responses"),
            Computed("student_logp", log_probs, "policy"),
            Computed("top_ids", bind(surrogates.top_tokens, count=top), "old_policy"),
            Computed("teacher_logp", log_probs, "teacher"),
        ),
        reference=bind(regularizers.ema_reference, rate=teacher_rate),
        paper="arXiv:2601.20802",
        group_relative=False,
    )


def rlsd(
    *,
    lam: float = 0.5,
    decay: int | None = None,
    weight_eps: float = 0.2,
    negative_only: bool = False,
    column: str = "demonstration",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Self-distilled RLVR: GRPO whose advantages a self-teacher spreads over the tokens.

        w[t] = clip(exp(sign(A) (log p_teacher[t] - log p_old[t])), 1 - eps, 1 + eps)
        A[t] = A ((1 - lam) + lam w[t]),   A as in GRPO, eps = weight_eps

    The teacher is the policy itself at the start of the step, after a prompt that also holds the
    solution of the data (``curation.ReferenceMessages``). Where that prompt does not fit into the
    model's context, the advantages stay as they are.

    Args:
      lam: Share of the weights.
      decay: Steps in which ``lam`` falls in a straight line to 0; None for a constant.
      weight_eps: Largest distance of a weight from 1.
      negative_only: Whether only responses with a negative advantage are weighed.
      column: Column of the data with the solution, a text.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.rlsd().has_teacher, jr.recipes.rlsd().learns_from_model
      (True, False)

    References:
      Yang et al., Self-Distilled RLVR (arXiv:2604.03128), NOTES: the formula and the defaults are
      those of ms-swift 4.6, which also has a warmup of ``lam``, off by default.
    """
    weigh = bind(advantages.rlsd, lam=lam, eps=weight_eps, negative_only=negative_only)
    computed = (
        Computed(TEACHER_TEXTS, curation.ReferenceMessages(column), "responses"),
        Computed("teacher_token_logp", surrogates.target_log_probs, "teacher"),
    )
    if decay is not None:
        weigh = connect(
            bind(advantages.rlsd, eps=weight_eps, negative_only=negative_only), lam="teacher_share"
        )
        share = curation.scheduled(fading, start=lam, steps=decay)
        computed = (*computed, Computed("teacher_share", share, "controller"))
    return from_base(
        name="rlsd",
        advantage=chain(stateless(advantages.grpo), stateless(weigh)),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        computed=computed,
        paper="arXiv:2604.03128",
    )


def fading(step: Array, *, start: float, steps: int) -> Array:
    """From ``start`` in a straight line to 0."""
    progress = curation.training_progress(step, steps=steps)
    return curation.linear_schedule(progress, start=start, end=0.0)


def srpo(
    *,
    success: float = 1.0,
    beta: float = 1.0,
    alpha: float = 0.5,
    top: int = 100,
    cap: float | None = 2.0,
    teacher_rate: float = 0.05,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Sample-routed policy optimization: :func:`sdpo` for failed rollouts, GRPO for the others.

        routed = reward < success and there is a teacher
        token loss = w sdpo where routed
        w = exp(-beta H_teacher) over its mean over the routed tokens

    The advantages are over the full group. The teacher has the same prompt as in :func:`sdpo`.

    Args:
      success: Smallest reward of a correct rollout, which may teach its siblings.
      beta: Strength of the weight of a confident teacher; 0 weighs all tokens equally.
      alpha, top, cap, teacher_rate: As in :func:`sdpo`.

    References:
      Unifying Group-Relative and Self-Distillation Policy Optimization via Sample Routing
      (arXiv:2604.02288), PAPER; the clip is ours.
    """
    weights = bind(surrogates.srpo_weights, beta=beta, success=success)
    messages = bind(curation.solution_messages, success=success)
    log_probs = connect(surrogates.support_log_probs, support="top_ids")
    return from_base(
        name="srpo",
        surrogate=bind(
            surrogates.srpo,
            success=success,
            eps_low=eps_low,
            eps_high=eps_high,
            alpha=alpha,
            cap=cap,
        ),
        computed=(
            Computed(TEACHER_TEXTS, messages, "responses"),
            Computed("distillation_weights", weights, "batch"),
            Computed("student_logp", log_probs, "policy"),
            Computed("top_ids", bind(surrogates.top_tokens, count=top), "old_policy"),
            Computed("teacher_logp", log_probs, "teacher"),
            Computed("teacher_entropy", regularizers.entropy_from_logits, "teacher"),
        ),
        reference=bind(regularizers.ema_reference, rate=teacher_rate),
        paper="arXiv:2604.02288",
    )


def luffy_shaping(
    *,
    length: float,
    gamma: float = 0.1,
    entropy_coef: float = 1e-3,
    guided: int = 1,
    column: str = "demonstration",
) -> Recipe:
    """Learning with off-policy guidance: the ratio, and a shaped likelihood for guided rollouts.

        A = r - mean_group r
        token loss = -A ratio for the policy's rollouts
        token loss = -A x / (x + gamma), x = exp(logp), for guided ones
        loss = sum over tokens of (token loss - entropy_coef entropy), over rollouts * length

    There is no clip. The guide's rollouts are demonstrations of the data, graded like the others.

    Args:
      gamma: The likelihood at which a guided token has the largest gradient.
      guided: Number of the guide's rollouts in a group.
      column: The column of the data with them, a response or a list of several.

    References:
      Yan et al., LUFFY (arXiv:2504.14945), with the settings of the released scripts, including two
      minibatches. There the entropy is a mean over the tokens of the batch and not a sum over
      ``length``.
    """
    return from_base(
        name="luffy_shaping",
        advantage=stateless(advantages.dr_grpo),
        surrogate=bind(surrogates.luffy_shaping, gamma=gamma),
        weights=bind(aggregate.fixed_length, length=length),
        regularizers=nonzero_term(regularizers.entropy_bonus, coef=entropy_coef),
        collector=curation.demonstrations(count=guided, column=column),
        minibatches=2,
        paper="arXiv:2504.14945",
    )


def chord(
    *,
    phi: bool = True,
    peak: float | None = None,
    valley: float | None = None,
    warmup: int = 0,
    decay: int | None = None,
    experts: int = 1,
    column: str = "demonstration",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """GRPO and fine-tuning on an expert's responses, harmonized by a weight of each.

        loss = (1 - mu) mean over the policy's tokens of GRPO's loss
               + mu mean over the expert's tokens of -phi logp
        phi = p (1 - p), a constant, in CHORD-phi;   1 in CHORD-mu
        mu = from 0 up to peak in ``warmup`` steps, then down to valley in ``decay``

    The expert's responses, of the data, are beside the rollouts of their prompts. They have no
    part in the advantages, and their rewards no effect. The value of mu is the extra ``mu`` of a
    batch.

    Args:
      phi: True for CHORD-phi, whose mu is 0.1; False for CHORD-mu, whose mu falls from 0.9 to 0.05
        in 200 steps.
      peak, valley, decay: Other numbers for mu; None for those of the variant. CHORD-phi stays at
        its peak unless there is a valley.
      warmup: Steps in which mu rises.
      experts: Number of the expert's responses in a group.
      column: The column of the data with them, a response or a list of several.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.chord().surrogate, jr.recipes.chord(phi=False).surrogate
      (chord(eps_high=0.2, eps_low=0.2, phi=True), chord(eps_high=0.2, eps_low=0.2, phi=False))

    References:
      Zhang et al., CHORD (arXiv:2508.11408), with the settings of Trinity-RFT's ``mix_chord``: a
      quarter as many expert responses as rollouts, so 2 beside 8, whose prompts are others than
      those of the rollouts. ms-swift too draws them from a data set of its own. Trinity-RFT has a
      dual clip of 3, with which its loss was compared; no code confirmed the loss without one.
    """
    if peak is None:
        peak = 0.1 if phi else 0.9
    if valley is None:
        valley = peak if phi else 0.05
    if decay is None:
        decay = 0 if phi else 200
    mu = curation.scheduled(
        curation.warmup_cosine, peak=peak, valley=valley, warmup=warmup, decay=decay
    )
    return from_base(
        name="chord",
        advantage=stateless(connect(advantages.grpo_imitating, imitated="steered")),
        surrogate=bind(surrogates.chord, phi=phi, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.guided_token_mean,
        computed=(Computed("mu", mu, "controller"),),
        collector=curation.demonstrations(count=experts, column=column, reward=1.0),
        paper="arXiv:2508.11408",
    )


def ampo(
    *,
    length: float,
    gamma: float = 0.1,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = 10.0,
    entropy_coef: float = 1e-3,
    teachers: int = 4,
    k_max: int = 2,
    column: str = "demonstration",
    answer: str = "answer",
) -> Recipe:
    """Adaptive multi-guidance policy optimization.

        if no rollout is right, k_max answers of teachers replace as many rollouts
        A = r - mean over the group's rollouts of the policy of r
        token loss = -A x / (x + gamma), x = exp(logp), for the answers of teachers
        loss = sum over tokens of (token loss - entropy_coef entropy), over rollouts * length

    Rewards are at most 1, and a teacher's answer has reward 1. The selected answers are those after
    which the reference answer is most probable under the policy; to measure this, a row of a
    failed group holds each teacher's answer twice (``curation.demonstrations``).

    Args:
      gamma: The likelihood at which a teacher's token has the largest gradient.
      teachers: Number of teachers' answers that are compared.
      k_max: Maximum number of answers per group.
      column: The column of the data with the answers of teachers, texts.
      answer: The column with the reference answer.

    References:
      Yuan et al., AMPO (arXiv:2510.02227), with the settings of the released scripts, including two
      minibatches. There the entropy is a mean over the tokens of the batch and not a sum over
      ``length``.
    """
    return from_base(
        name="ampo",
        advantage=stateless(advantages.grpo_split),
        surrogate=bind(
            surrogates.ampo, gamma=gamma, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        ),
        weights=bind(aggregate.sequence_sum_norm, length=length),
        regularizers=nonzero_term(regularizers.entropy_bonus, coef=entropy_coef),
        curation=stateless(curation.best_teachers, k_max=k_max),
        collector=curation.demonstrations(
            count=teachers, column=column, when="failed", probe=answer, reward=1.0
        ),
        minibatches=2,
        paper="arXiv:2510.02227",
    )


def icpo(
    *,
    delta: float = 1.0,
    bonus: float = 1.0,
    anneal: int = 400,
    gamma: float = 0.1,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = 3.0,
    kl_coef: float = 1e-3,
    steered: int = 1,
    shots: int = 1,
    examples: tuple[tuple[str, str], ...] | None = None,
) -> Recipe:
    """In-context steered policy optimization.

        a steered rollout with reward >= delta replaces a random other; the rest are dropped
        rewards of steered rollouts times 1 + bonus max(0, 1 - step / anneal)
        token loss = -A x / (x + gamma), x = exp(logp), for steered rollouts
        loss = mean over tokens of (token loss + kl_coef KL)

    A steered rollout sees other questions with solutions, and trains after the plain prompt.

    Args:
      steered: Number of steered rollouts per group; 1 of 8 in the paper.
      shots: Number of examples in a prompt.
      examples: Pairs of question and solution to draw from; None for the other prompts of the data
        and their ``demonstration``. The paper's are of another data set.
      delta: Smallest reward of a steered rollout that takes part.
      bonus: Addition to the factor of its reward at the first step.
      anneal: Steps over which the bonus decreases to 0.
      gamma: The likelihood at which a steered token has the largest gradient.

    References:
      In-context steered policy optimization (arXiv:2510.26519), PAPER, except for the token loss
      and the two minibatches, which are those of the released code and its scripts for Qwen3-1.7B;
      those for 8B have four.
    """
    factor = bind(curation.icpo_bonus, beta=bonus, anneal=anneal)
    return from_base(
        name="icpo",
        computed=(Computed("steered_factor", curation.scheduled(factor), "controller"),),
        curation=stateless(curation.icpo_merge, delta=delta),
        advantage=chain(
            stateless(connect(rewards.steered_bonus, bonus="steered_factor")),
            stateless(advantages.grpo),
        ),
        surrogate=bind(
            surrogates.icpo, gamma=gamma, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        ),
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef, estimator="k3"),
        collector=curation.hinted(
            curation.examples_in_prompt(count=steered, shots=shots, examples=examples)
        ),
        minibatches=2,
        paper="arXiv:2510.26519",
    )
