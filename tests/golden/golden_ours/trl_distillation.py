"""Our distillation, from another model and from the policy itself, against TRL's numbers."""

import jax
import jax.numpy as jnp
from golden_data import Ours

from jaxrl_llm import advantages, surrogates


def chosen(logits, targets):
    return jnp.take_along_axis(
        jax.nn.log_softmax(logits.astype(jnp.float32)), targets[..., None], axis=-1
    )[..., 0]


def distilled(each):
    def run(a):
        def total(logits):
            value = each(logits, a)
            return value.sum(), value

        (_, value), gradient = jax.value_and_grad(total, has_aux=True)(a["logits"])
        return {"loss": value, "gradient": gradient}

    return run


def support(alpha, rest, count):
    """Over the student's most probable tokens, which may be all."""

    def each(logits, a):
        tokens = surrogates.top_tokens(logits, count=count)
        logp = chosen(logits, a["targets"])
        return surrogates.sdpo(
            logp,
            None,
            jnp.zeros(logp.shape),
            jnp.ones(logp.shape, bool),
            student_logp=surrogates.support_log_probs(logits, support=tokens),
            teacher_logp=surrogates.support_log_probs(a["teacher_logits"], support=tokens),
            alpha=alpha,
            rest=rest,
            cap=None,
        )

    return distilled(each)


def sampled(cap):
    def each(logits, a):
        logp = chosen(logits, a["targets"])
        return surrogates.sdpo_sampled(
            logp,
            a["old_logp"],
            jnp.zeros(logp.shape),
            jnp.ones(logp.shape, bool),
            teacher_token_logp=chosen(a["teacher_logits"], a["targets"]),
            cap=cap,
        )

    return distilled(each)


def whole(alpha):
    """Over the full vocabulary, as a loss of the divergence."""

    def each(logits, a):
        logp = chosen(logits, a["targets"])
        divergence = surrogates.teacher_divergence(
            logits, teacher_logits=a["teacher_logits"], alpha=alpha
        )
        mask = jnp.ones(logp.shape, bool)
        return surrogates.gkd(logp, None, jnp.zeros(logp.shape), mask, divergence=divergence)

    return distilled(each)


def sent(rest):
    """Over the tokens that a server sends, the teacher's most probable ones."""

    def each(logits, a):
        tokens = surrogates.top_tokens(a["teacher_logits"], count=3)
        logp = chosen(logits, a["targets"])
        loss = surrogates.sdpo(
            logp,
            None,
            jnp.zeros(logp.shape),
            jnp.ones(logp.shape, bool),
            student_logp=surrogates.support_log_probs(logits, support=tokens),
            teacher_logp=surrogates.top_log_probs(a["teacher_logits"], count=3),
            alpha=0.0,
            rest=rest,
            cap=None,
        )
        return loss.mean()

    return distilled(each)


def earned(a, **options):
    """What the teacher gives the sampled tokens."""
    of_teacher = surrogates.target_log_probs(a["teacher_logits"], a["targets"])
    mask = jnp.ones(of_teacher.shape, bool)
    return advantages.teacher_advantages(
        jnp.zeros(of_teacher.shape),
        mask,
        old_logp=a["old_logp"],
        teacher_token_logp=of_teacher,
        **options,
    )


def prefix(gamma):
    def each(logits, a):
        logp = chosen(logits, a["targets"])
        mask = jnp.ones(logp.shape, bool)
        weighted = advantages.prefix_weighted(earned(a), mask, gamma=gamma)
        return surrogates.reinforce(logp, None, weighted, mask).mean()

    return distilled(each)


SELF = {
    "sdpo_full_0.0": Ours(support(0.0, "none", 5)),
    "sdpo_full_0.3": Ours(support(0.3, "none", 5)),
    "sdpo_full_0.5": Ours(support(0.5, "none", 5)),
    "sdpo_full_1.0": Ours(support(1.0, "none", 5)),
    "sdpo_top_tail": Ours(support(0.5, "tail", 3)),
    "sdpo_top_renormalized": Ours(support(0.5, "renormalize", 3)),
    "sdpo_sampled": Ours(sampled(None)),
    "sdpo_sampled_clipped": Ours(sampled(2.0)),
}


TEACHERS = {
    "gkd_0.0": Ours(whole(0.0)),
    "gkd_0.3": Ours(whole(0.3)),
    "gkd_0.5": Ours(whole(0.5)),
    "gkd_1.0": Ours(whole(1.0)),
    "distillation_0.0": Ours(whole(0.0)),
    "distillation_0.3": Ours(whole(0.3)),
    "distillation_1.0": Ours(whole(1.0)),
    "server_tail": Ours(sent("tail")),
    "server_renormalized": Ours(sent("renormalize")),
    "iw_opd_0.0": Ours(prefix(0.0)),
    "iw_opd_0.5": Ours(prefix(0.5)),
}

MINILLM = {
    "minillm_0.0": Ours(lambda a: {"advantages": earned(a)}),
    "minillm_0.9": Ours(lambda a: {"advantages": earned(a, discount=0.9, normalize=True)}),
    "minillm_1.0": Ours(lambda a: {"advantages": earned(a, discount=1.0, normalize=True)}),
}

TABLES = {"trl_distillation": SELF, "trl_teachers": TEACHERS, "trl_minillm": MINILLM}
