"""Our losses of single papers against the numbers and gradients of the authors' own code."""

import jax
import jax.numpy as jnp
import numpy as np
from golden_data import Difference, Ours

from golden_ours import far_from_old, graded, replaced, spread
from jaxrl_llm import advantages, aggregate, curation, rewards, surrogates

token_mean, sequence_mean = aggregate.token_mean, aggregate.sequence_mean


def constant(mask):
    """The sum over the tokens of all rollouts over the length of the padding."""
    return mask / mask.shape[-1]


def loss(surrogate, weights, *names, **options):
    """`names` are more inputs that the surrogate takes by name."""

    def run(a):
        weight = weights(a["mask"])

        def total(logp):
            given = options | {name: a[name] for name in names}
            each = surrogate(logp, a["old_logp"], a["advantages"], a["mask"], **given)
            return aggregate.weighted_sum(each, weight)

        return graded(total, a["logp"])

    return run


def gvpo(beta):
    def run(a):
        weight, centered = aggregate.group_mean(a["mask"]), advantages.dr_grpo(a["rewards"])

        def total(logp):
            each = surrogates.gvpo(logp, a["old_logp"], centered, a["mask"], beta=beta)
            return len(each) * aggregate.weighted_sum(each, weight)  # theirs adds up the groups

        return graded(total, a["logp"])

    return run


def drpo(tau=10.0, lam=0.1, beta=0.0, estimator="k1"):
    def run(a):
        mask, side = a["mask"], advantages.dr_grpo(a["rewards"])

        def total(logp):
            old_logp, length = a["old_logp"], mask.shape[-1]
            each = surrogates.drpo_len(logp, old_logp, side, mask, length=length, lam=lam, tau=tau)
            weight = aggregate.group_mean(mask)
            terms = surrogates.kl_from_old(logp, old_logp, mask, estimator=estimator)
            kl = aggregate.weighted_sum(terms, token_mean(mask))
            coef = jax.lax.stop_gradient(surrogates.kl_barrier(kl, beta=beta))
            return aggregate.weighted_sum(each, weight) + coef * kl

        return graded(total, a["logp"])

    def logarithm(inputs, theirs):
        """Theirs has tau where we have tau times a logarithm of the wrong answers' mean."""
        count = inputs["mask"].sum(-1)
        scores = np.where(inputs["mask"], np.float64(inputs["logp"]), 0.0).sum(-1) / count
        found = 0.0
        for score, right in zip(scores, inputs["rewards"] > 0, strict=True):
            if right.any() and not right.all():
                found += tau * (np.log(np.mean(np.exp(score[~right] / tau))) - 1)
        return {"loss": theirs["loss"] + found / len(scores)}

    reason = "the authors put a sum over itself, detached, in the place of its logarithm"
    cases = ["ragged", "on_policy", "holes", "length_one"] + ["bfloat16"] * (tau < 1)
    return Ours(run, dict.fromkeys(cases, Difference(reason, logarithm)))


def bounds(a):
    low, high = surrogates.dcpo_bounds(a["old_logp"], a["mask"])
    return {"low": low, "high": high}


def visits(a):
    transform = advantages.smooth_standardization(num_prompts=3)
    state, found = transform.init(), []
    for visit in a["rewards"]:
        values, state = transform.update(visit, state, prompt_ids=jnp.arange(3))
        found.append(values)
    return {"advantages": jnp.stack(found), "mean": state.mean, "std": jnp.sqrt(state.var)}


def dcpo_distribution(a):
    names = ("rewards", "old_logp", "hot_logp", "cold_logp", "policy_entropy")
    given = {name: a[name] for name in names}
    return {"advantages": advantages.dcpo_distribution(a["advantages"], a["mask"], **given)}


def split(a):
    values = advantages.grpo_split(a["rewards"], steered=a["steered"], where=a["where"])
    return {"advantages": spread(values, a)}


def own_alone(inputs, theirs):
    """The one own rollout of the last group is its own mean, and that of the guide's."""
    values = np.array(theirs["advantages"])
    own, guide = inputs["rewards"][2, [1, 3]]
    tokens = inputs["mask"][2]
    values[2, 1], values[2, 3] = 0.0, np.where(tokens[3], guide - own, 0.0)
    return {"advantages": values}


def bonus(a):
    """Each row at a step of its own."""

    def each(correct, steered, step):
        factor = curation.icpo_bonus(step)
        return rewards.steered_bonus(correct[None], steered=steered[None], bonus=factor)[0]

    return {"rewards": jax.vmap(each)(a["correct"], a["steered"], a["step"])}


def comprehension(a):
    return {"score": curation.comprehension_score(a["logp"], a["mask"])}


def sdpo(**options):
    def run(a):
        weight = token_mean(a["mask"] & a["has_teacher"][..., None])
        given = {name: a[name] for name in ("teacher_logp", "has_teacher")} | options

        def total(student):
            rows = (a["logp"], a["old_logp"], a["logp"][..., 0], a["mask"])
            each = surrogates.sdpo(*rows, student_logp=student, **given)
            return aggregate.weighted_sum(each, weight)

        return graded(total, a["student_logp"])

    return Ours(run)


def sdpo_sampled(**options):
    def run(a):
        weight = token_mean(a["mask"] & a["has_teacher"][..., None])
        given = {"teacher_token_logp": a["ref_logp"], "has_teacher": a["has_teacher"]} | options

        def total(logp):
            rows = (logp, a["old_logp"], a["logp"][..., 0], a["mask"])
            return aggregate.weighted_sum(surrogates.sdpo_sampled(*rows, **given), weight)

        return graded(total, a["logp"])

    return Ours(run)


dcpo = surrogates.dcpo_dynamic_clip
narrow = {"eps_low": 0.01, "eps_high": 0.02}
valued = ("mean_log_probs", "old_mean_log_probs")
open_clip = {"eps_low": np.inf, "eps_high": np.inf, "dual_clip": None}
clip = {"eps_low": 0.2, "eps_high": 0.2}
ampo, luffy, icpo = surrogates.ampo, surrogates.luffy_shaping, surrogates.icpo
ON_A_BOUND = {
    "bfloat16": replaced(
        "the authors' ratio, rounded to bfloat16, falls on the other side of a bound",
        gradient={(0, 0, 0): 0.0},
    )
}
TABLES = {
    "verl_gvpo": {"beta_0.1": Ours(gvpo(0.1)), "beta_1": Ours(gvpo(1.0))},
    "drpo": {
        "objective": drpo(),
        "sharp": drpo(tau=0.5, lam=0.5),
        "kl": drpo(beta=10.0),
        "low_var_kl": drpo(beta=10.0, estimator="k3"),
    },
    "dcpo_dynamic": {
        "bounds": Ours(bounds),
        "only-token-mean_0.16": Ours(loss(dcpo, token_mean), ON_A_BOUND),
        "only-token-mean_0.01": Ours(loss(dcpo, token_mean, **narrow)),
        "seq-mean-token-mean_0.16": Ours(loss(dcpo, sequence_mean), ON_A_BOUND),
        "seq-mean-token-mean_0.01": Ours(loss(dcpo, sequence_mean, **narrow)),
        "visits": Ours(visits),
    },
    "dcpo_distribution": {"advantages": Ours(dcpo_distribution)},
    "rover": {
        "loss": Ours(loss(surrogates.rover, token_mean, *valued)),
        "scaled": Ours(loss(surrogates.rover, token_mean, *valued, rho=0.5, beta=0.7)),
        "no_continuation": Ours(loss(surrogates.rover, token_mean, *valued, rho=2.0, beta=0.0)),
        "mean_log_probs": Ours(
            lambda a: {"mean_log_probs": surrogates.mean_log_probs(a["logits"])}
        ),
    },
    "luffy": {
        "script": Ours(loss(luffy, constant, "steered"), far_from_old("LUFFY")),
        "clipped": Ours(loss(luffy, token_mean, "steered", **clip), far_from_old("LUFFY")),
        "wider": Ours(loss(luffy, token_mean, "steered", gamma=0.5, **clip), far_from_old("LUFFY")),
    },
    "ampo": {
        f"{part}_{mode}": Ours(loss(ampo, weights, "steered", **options))
        for part in ("tokens", "sequences")
        for mode, weights, options in (
            ("token-mean", token_mean, {}),
            ("seq-mean-token-mean", sequence_mean, {}),
            ("constant", constant, {}),
            ("no_clip", token_mean, open_clip),
        )
    }
    | {
        "comprehension": Ours(comprehension),
        "split": Ours(
            split,
            {"ragged": Difference("a single own rollout has mean 0 in the code", own_alone)},
        ),
    },
    "sdpo": {
        "to_student": sdpo(alpha=0.0, cap=None),
        "to_teacher": sdpo(alpha=1.0, cap=None),
        "mixture": sdpo(alpha=0.5, cap=2.0),
        "uneven_mixture": sdpo(alpha=0.2, cap=None),
        "renormalized": sdpo(alpha=0.5, cap=None, rest="renormalize"),
        "sampled": sdpo_sampled(cap=None),
        "sampled_weighted": sdpo_sampled(cap=2.0),
    },
    "icpo": {
        "token-mean": Ours(loss(icpo, token_mean, "steered")),
        "seq-mean-token-mean": Ours(loss(icpo, sequence_mean, "steered")),
        "bonus": Ours(bonus),
    },
}
