"""Lists, win rates, reward models and merges, against the code of others."""

import jax
import jax.numpy as jnp
import numpy as np
from golden_data import Ours

from jaxrl_llm import curation, models, preferences


def of_lists(loss, scale=None):
    """rax has a discount in base 2, and multiplies it by the size of the list."""

    def run(a):
        def total(scores):
            losses = loss(scores, a["labels"], where=a["where"])
            losses = losses * (1.0 if scale is None else scale)
            return losses.sum(), losses

        (_, losses), gradient = jax.value_and_grad(total, has_aux=True)(a["scores"])
        return {"loss": losses, "gradient": gradient}

    return Ours(run)


def mean_of_pairs(scores, labels, where):
    return preferences.pair_logistic(scores, labels, where=where, reduce="mean")


def brain(a):
    def total(logp):
        ref, behavior, rewards = a["ref_logp"], a["behavior_logp"], a["rewards"]
        return preferences.brain(logp, ref, behavior, rewards, temperature=0.5).sum()

    log_posterior = a["ref_logp"] + a["rewards"] / 0.5 - a["behavior_logp"]
    return {
        "weights": -jax.grad(total)(a["logp"]),
        "posterior": preferences.snis_weights(log_posterior),
    }


def p3o(clip):
    def run(a):
        def total(logp):
            return preferences.p3o(
                logp,
                a["old_logp"],
                a["rewards"],
                ref_logp=a["ref_logp"],
                kl_coef=0.05,
                clip=clip,
            ).mean()

        loss, gradient = jax.value_and_grad(total)(a["logp"])
        return {"gradient": gradient} | ({} if clip == "joint" else {"loss": loss})

    return Ours(run)


def rates(a):
    matrix = curation.win_rate_matrix(a["scores"])
    rate = curation.mean_win_rate(matrix)
    pairs = curation.select_pairs(a["scores"]).indices[..., 0, :]
    two = jnp.take_along_axis(rate, pairs, axis=-1)
    return {
        "matrix": matrix,
        "chosen_rate": two[:, 0],
        "rejected_rate": two[:, 1],
        "pairs": pairs,
    }


def merged(function):
    def run(a):
        trees = [{"w": a[name]} for name in ("base", "model0", "model1", "model2")]
        return {"merged": function(*trees)["w"]}

    return Ours(run)


def vectors(base, *others):
    return [models.task_vector(tree, base) for tree in others]


def iso_c(a):
    base = {"w": jnp.zeros((4, 6)), "b": jnp.zeros(5)}
    taus = [{"w": a["matrices"][i], "b": a["vectors"][i]} for i in range(3)]
    made = models.iso_c(base, taus)
    return {"matrix": made["w"], "vector": made["b"]}


def reward_model(margin=False, **options):
    def run(a):
        def total(chosen, rejected):
            more = {"margin": a["margin"]} if margin else {}
            return preferences.bradley_terry(chosen, rejected, **more, **options).mean()

        loss, slopes = jax.value_and_grad(total, argnums=(0, 1))(a["chosen"], a["rejected"])
        return {
            "loss": loss,
            "chosen_gradient": slopes[0],
            "rejected_gradient": slopes[1],
            "accuracy": (a["chosen"] > a["rejected"]).mean(),
        }

    return Ours(run)


def process(last_only):
    def run(a):
        marks = preferences.step_marks(a["step_ids"], a["step_ids"] >= 0, last_only=last_only)

        def total(logits):
            z = logits[..., 1] - logits[..., 0]
            return preferences.process_reward(z, a["labels"], marks).sum() / marks.sum()

        loss, gradient = jax.value_and_grad(total)(a["logits"])
        return {"marks": marks, "loss": loss, "gradient": gradient}

    return Ours(run)


TABLES = {
    "rax_lists": {
        "lambda": of_lists(preferences.lipo_lambda, 5 * np.log(2)),
        "logistic": of_lists(preferences.pair_logistic),
        "logistic_mean": of_lists(mean_of_pairs),
        "hinge": of_lists(preferences.pair_hinge),
        "softmax": of_lists(preferences.list_softmax),
        "listmle": of_lists(preferences.plackett_luce),
    },
    "brain": {"weights": Ours(brain)},
    "p3o_joint": {"joint": p3o("joint")},
    "p3o_separate": {"separate": p3o("separate")},
    "sppo_rates": {"rates": Ours(rates)},
    "mergekit": {
        "ties": merged(lambda b, *x: models.ties_merge(b, vectors(b, *x))),
        "ties_weighted": merged(
            lambda b, *x: models.ties_merge(
                b, vectors(b, *x), density=0.5, scale=0.7, weights=(0.5, 0.2, 0.3)
            )
        ),
        "slerp": merged(lambda b, x, *_: models.slerp(b, x, t=0.3)),
        "model_stock": merged(lambda b, *x: models.model_stock(b, x)),
    },
    "iso_merging": {"iso_c": Ours(iso_c)},
    "trl_reward": {
        "plain": reward_model(),
        "margin": reward_model(margin=True),
        "centered": reward_model(centering=0.01),
    },
    "trl_prm": {"every": process(False), "last": process(True)},
}
