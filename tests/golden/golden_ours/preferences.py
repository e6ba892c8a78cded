"""Our losses of preferences against TRL's, torchtune's, gemma's, and the authors' own."""

import jax
import jax.numpy as jnp
from golden_data import Ours

from golden_ours import graded
from jaxrl_llm import preferences
from jaxrl_llm.core import bind, call_with


def sums(x, mask):
    return jnp.sum(jnp.where(mask, x, 0.0), axis=-1)


def of_pairs(function, *, mean=True, weigh=lambda lengths: 1.0, **arrays):
    """A loss of pairs with what it names, as TRL's mean or as one number a pair.

    `arrays` are functions of the inputs, by the name of the argument.
    """

    def run(a):
        lengths, ref = jnp.sum(a["mask"], axis=-1), sums(a["ref_logp"], a["mask"])
        context = {
            "chosen_ref_logp": ref[0],
            "rejected_ref_logp": ref[1],
            "chosen_lengths": lengths[0],
            "rejected_lengths": lengths[1],
            "policy_chosen": a["policy_chosen"],
            # The gold response of TPO.
            "target_logp": ref[0],
            "target_lengths": lengths[0],
        } | {name: make(a) for name, make in arrays.items()}

        def total(tokens):
            logp = sums(tokens, a["mask"])
            more = {"chosen_logp": logp[0], "rejected_logp": logp[1]}
            value = weigh(lengths) * call_with(function, context=context | more)
            return (value.mean(), value.mean()) if mean else (value.sum(), value)

        (_, value), gradient = jax.value_and_grad(total, has_aux=True)(a["logp"])
        return {"loss": value, "gradient": gradient}

    return Ours(run)


def of_responses(loss):
    """`loss(tokens, a)`, one number a response, as a mean."""

    def run(a):
        return graded(lambda tokens: loss(tokens, a).mean(), a["logp"])

    return Ours(run)


def kto(**options):
    def loss(tokens, a):
        kl = preferences.kto_kl(sums(a["kl_logp"], a["mask"]), sums(a["kl_ref_logp"], a["mask"]))
        logp, ref = sums(tokens, a["mask"]), sums(a["ref_logp"], a["mask"])
        return preferences.kto(logp, ref, a["desirable"], kl=kl, beta=0.3, **options)

    return of_responses(loss)


def apo_zero_unpaired(tokens, a):
    logp, ref = sums(tokens, a["mask"]), sums(a["ref_logp"], a["mask"])
    return preferences.apo_zero_unpaired(logp, ref, a["desirable"], beta=0.3)


def bco(a):
    """Two batches of which the first has half the reference."""
    transform = preferences.running_reward(beta=0.3)
    state, where = transform.init(), jnp.ones(a["desirable"].shape, bool)
    for share in (0.5, 1.0):
        arrays = {"old_logp": a["logp"], "ref_logp": share * a["ref_logp"], "mask": a["mask"]}
        center, state = transform.update(None, state, where=where, **arrays)

    def total(tokens):
        logp, ref = sums(tokens, a["mask"]), sums(a["ref_logp"], a["mask"])
        options = {"center": center, "beta": 0.3}
        return preferences.bco_unpaired(logp, ref, a["desirable"], **options).mean()

    value, gradient = jax.value_and_grad(total)(a["logp"])
    return {"loss": value, "gradient": gradient, "center": center}


def nash_md(tokens, a):
    return preferences.nash_md(tokens, a["ref_logp"], a["mask"], a["win_rate"], beta=0.3)


def mnpo(count):
    return of_pairs(
        bind(preferences.mnpo, eta=0.25),
        mean=False,
        weights=lambda a: jnp.array([1.0, 3.0]),
        history_where=lambda a: jnp.arange(2) < count,
        chosen_history_logp=lambda a: a["history_logp"][0],
        rejected_history_logp=lambda a: a["history_logp"][1],
    )


def of_bad_responses(beta):
    """NPO, one number a response: what a bad one is to BCO without a center."""

    def run(a):
        bad = jnp.zeros(a["desirable"].shape, bool)

        def total(tokens):
            logp, ref = sums(tokens, a["mask"]), sums(a["ref_logp"], a["mask"])
            value = preferences.bco_unpaired(logp, ref, bad, beta=beta)
            return value.sum(), value

        (_, value), gradient = jax.value_and_grad(total, has_aux=True)(a["logp"])
        return {"loss": value, "gradient": gradient}

    return Ours(run)


def sppo(rejected):
    return of_pairs(
        bind(preferences.sppo, beta=0.3),
        mean=False,
        chosen_win_rate=lambda a: a["win_rates"][0],
        rejected_win_rate=rejected,
    )


def dpo(**options):
    return of_pairs(bind(preferences.dpo, beta=0.3, **options))


def desensitized(a):
    """DPO in which the tokens beyond the length of the other response count 0.4."""
    lengths = jnp.sum(a["mask"], axis=-1)

    def of_both(tokens):
        rule = bind(preferences.desensitized_logp, alpha=0.4)
        return [rule(tokens[i], a["mask"][i], lengths[1 - i]) for i in (0, 1)]

    def total(tokens):
        return preferences.dpo(*of_both(tokens), *of_both(a["ref_logp"]), beta=0.3).mean()

    return graded(total, a["logp"])


def weighted(a):
    """DPO of pairs that count by their alignment; the reference's numbers stand for the energy."""

    def total(tokens):
        energy = jnp.exp(a["ref_logp"])
        weights = preferences.alignment_weights(tokens, energy, a["mask"])
        logp, ref = sums(tokens, a["mask"]), sums(a["ref_logp"], a["mask"])
        return (preferences.dpo(*logp, *ref, beta=0.3) * weights[0] * weights[1]).mean()

    return graded(total, a["logp"])


def at(beta, function, **options):
    return of_pairs(bind(function, beta=beta, **options))


def xpo(loss):
    return of_pairs(bind(preferences.xpo, alpha=0.01, loss=bind(loss, beta=0.3)))


def share_of_tokens(lengths):
    """Makes the mean over responses of a mean over tokens one over the tokens of the batch."""
    return lengths[0] / jnp.mean(lengths[0])


def orpo(a):
    """The likelihood is of all tokens of the batch."""
    lengths = jnp.sum(a["mask"], axis=-1)

    def total(tokens):
        logp = sums(tokens, a["mask"])
        nll = jnp.broadcast_to(-jnp.sum(logp[0]) / jnp.sum(lengths[0]), logp[0].shape)
        options = {"chosen_lengths": lengths[0], "rejected_lengths": lengths[1]}
        return preferences.orpo(*logp, beta=0.3, chosen_nll=nll, **options).mean()

    return graded(total, a["logp"])


inpo = of_pairs(
    bind(preferences.inpo, eta=0.25),
    mean=False,
    chosen_previous_logp=lambda a: a["history_logp"][0, :, 0],
    rejected_previous_logp=lambda a: a["history_logp"][1, :, 0],
)
TABLES = {
    "trl_preferences": {
        "sigmoid": dpo(),
        "sigmoid_forward_kl": dpo(divergence="forward_kl"),
        "sigmoid_js": dpo(divergence="js"),
        "sigmoid_alpha": dpo(divergence="alpha"),
        "sigmoid_alpha_2": dpo(divergence="alpha", alpha=2.0),
        "sigmoid_norm": dpo(per_token=True),
        "sigmoid_norm_js": dpo(per_token=True, divergence="js"),
        "sigmoid_desensitized": Ours(desensitized),
        "sigmoid_weighted": Ours(weighted),
        "robust": dpo(robust=True, label_smoothing=0.1),
        "ipo": at(0.3, preferences.ipo, per_token=True),
        "ipo_js": at(0.3, preferences.ipo, per_token=True, divergence="js"),
        "hinge": at(0.3, preferences.hinge),
        "exo_pair": at(0.3, preferences.exo_pair),
        "nca_pair": at(0.3, preferences.nca_pair),
        "bco_pair": at(0.3, preferences.bco),
        # The sum of the two squares, not their half.
        "sppo_hard": of_pairs(bind(preferences.sppo, beta=0.3), weigh=lambda lengths: 2.0),
        "aot": at(0.3, preferences.aot, label_smoothing=0.1),
        "aot_unpaired": at(0.3, preferences.aot_unpaired),
        "apo_zero": at(0.3, preferences.apo_zero),
        "apo_down": at(0.3, preferences.apo_down),
        "discopop": at(0.3, preferences.discopop),
        "sft": of_pairs(preferences.sft, weigh=share_of_tokens),
        "mpo": at(0.3, preferences.mpo),
        "kto": kto(),
        "kto_weighted": kto(desirable_weight=1.3, undesirable_weight=0.7),
        "apo_zero_unpaired": of_responses(apo_zero_unpaired),
        "cpo": at(0.3, preferences.cpo, label_smoothing=0.1),
        "simpo": at(2.0, preferences.simpo, gamma=0.5),
        "alphapo": at(2.0, preferences.simpo, gamma=0.5, alpha=0.25),
        "slic": of_pairs(bind(preferences.slic, likelihood=0.0)),
        "orpo": Ours(orpo),
        "tpo": at(0.3, preferences.tpo),
        "tpo_l": at(2.0, preferences.tpo, gamma=0.5, per_token=True),
    },
    "trl_removed": {
        "bco": Ours(bco),
        "nash_md": of_responses(nash_md),
        "xpo_sigmoid": xpo(preferences.dpo),
        "xpo_ipo": xpo(preferences.ipo),
    },
    "sppo": {
        "sppo": sppo(lambda a: a["win_rates"][1]),
        "sppo_single": sppo(lambda a: 1 - a["win_rates"][0]),
        "sigmoid": of_pairs(bind(preferences.dpo, beta=0.3, label_smoothing=0.1), mean=False),
        "ipo": of_pairs(bind(preferences.ipo, beta=0.3), mean=False),
    },
    "spin": {"sigmoid": of_pairs(bind(preferences.dpo, beta=0.3), mean=False)},
    "gemma": {
        "dpo": of_pairs(preferences.dpo, mean=False),
        "dpo_smoothed": of_pairs(bind(preferences.dpo, beta=0.3, label_smoothing=0.1), mean=False),
        "npo": of_bad_responses(1.0),
        "npo_weaker": of_bad_responses(0.3),
    },
    "torchtune": {
        f"{name}{inputs}": of_pairs(loss, mean=False)
        for inputs in ("", "_test")
        for name, loss in {
            "dpo": preferences.dpo,
            "dpo_smoothed": bind(preferences.dpo, beta=0.3, label_smoothing=0.1),
            "rso": preferences.hinge,
        }.items()
    },
    "mnpo": {"inpo": inpo, "mnpo": mnpo(2), "first_iteration": mnpo(0)},
    "simpo": {
        "simpo": of_pairs(preferences.simpo, mean=False),
        "smoothed": of_pairs(bind(preferences.simpo, label_smoothing=0.1), mean=False),
    },
}
