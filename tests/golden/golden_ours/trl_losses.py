"""Our losses and terms against the numbers of TRL's trainers."""

import jax
import jax.numpy as jnp
import numpy as np
from golden_data import Difference, Ours

from golden_ours import clamped_ratio, empty_rows_count, loss
from jaxrl_llm import (
    aggregate,
    bind,
    connect,
    corrections,
    curation,
    recipes,
    regularizers,
    stateless,
    surrogates,
)

token_mean, sequence_mean = aggregate.token_mean, aggregate.sequence_mean
clip = {"eps_low": 0.2, "eps_high": 0.2}
narrow = {"eps_low": 0.03, "eps_high": 0.04}
ppo = surrogates.ppo_clip


ALL_ROWS = empty_rows_count("TRL divides by all rows, we by those with a token")


def with_term(term):
    """The clipped loss with a term of its own weights beside it."""

    def run(a):
        weight = token_mean(a["mask"])

        def total(logp):
            each = ppo(logp, a["old_logp"], a["advantages"], a["mask"], **clip)
            value = aggregate.weighted_sum(each + term(logp, a), weight)
            return value, each * weight

        (value, each), gradient = jax.value_and_grad(total, has_aux=True)(a["logp"])
        return {"loss": value, "gradient": gradient, "token_loss": each}

    return run


def clamped(term=None):
    """Our numbers, with a term of a divergence of e^30 that is added to the loss."""

    def expected(inputs, theirs):
        changed = clamped_ratio(inputs, theirs)
        if term is not None:
            d = {
                name: np.clip(np.float64(inputs["logp"]) - inputs[name], -20, 20)
                for name in ("old_logp", "ref_logp")
            }
            each = 0.3 * (np.expm1(-d["ref_logp"]) + d["ref_logp"])
            each = each * np.exp(d["old_logp"]) if term == "corrected" else each
            changed["loss"] = changed["loss"] + each[inputs["mask"]].mean()
        return changed

    return {"log_ratio_30": Difference("TRL does not clamp the log ratio", expected)}


def kl(logp, a):
    return regularizers.kl_to_reference(logp, a["ref_logp"], a["mask"], coef=0.3)


def kl_corrected(logp, a):
    return regularizers.kl_unbiased(logp, a["old_logp"], a["ref_logp"], a["mask"], coef=0.3)


def entropy_bonus(logp, a):
    return regularizers.entropy_bonus(a["entropy"], a["mask"], coef=0.1)


def selected(select):
    """The clipped loss of the tokens that `select` keeps, over the count of all."""

    def surrogate(a):
        keep = select(a)

        def of(logp, old_logp, advantages, mask):
            each = ppo(logp, old_logp, advantages, mask, **clip)
            return jnp.where(keep, each, 0.0)

        return of

    return lambda a: loss(surrogate(a), token_mean)(a)


def off_policy(a):
    return corrections.off_policy_sequence_mask(
        a["advantages"],
        a["mask"],
        old_logp=a["logp"],
        behavior_logp=a["behavior_logp"],
        threshold=0.1,
    )


def entropy_controller(a):
    coef, kept, applied = jnp.float32(0.01), [], []
    for entropy in jnp.abs(a["advantages"]).reshape(-1):
        step = regularizers.entropy_controller(coef, entropy, target=0.8, high=0.02)
        coef = step.coef
        kept.append(step.coef)
        applied.append(step.applied)
    return {"coef": jnp.stack(kept), "applied": jnp.stack(applied)}


FAR = clamped()


def with_empty_rows(inputs, theirs):
    """The mean over rows with a token; in TRL's an empty one adds -A, for a ratio of 1."""
    filled = inputs["mask"].any(-1)
    added = inputs["advantages"][~filled].sum()
    return {
        "loss": (theirs["loss"] * filled.size + added) / filled.sum(),
        "gradient": theirs["gradient"] * filled.size / filled.sum(),
    }


GMPO_ROWS = {
    case: Difference("TRL's mean of GMPO counts empty rows, with the ratio 1", with_empty_rows)
    for case in ("masked_row", "one_sequence")
}


def of_this_step(inputs, theirs):
    before = np.concatenate([[0.01], theirs["coef"][:-1]])
    return {"applied": np.where(np.abs(inputs["advantages"]).reshape(-1) <= 0.8, before, 0.0)}


DELAYED = Difference("TRL switches the bonus by the entropy of the step before", of_this_step)


def highest(a):
    return curation.top_fraction_token_mask(a["entropy"], a["mask"], 0.4)


def of_highest(surrogate, **options):
    """The loss of a recipe whose selection takes the tokens of most entropy."""
    top = connect(bind(curation.top_fraction_token_mask, fraction=0.4), scores="old_entropy")
    recipe = recipes.Recipe(
        name="highest",
        advantage=stateless(lambda rewards: rewards),
        surrogate=bind(surrogate, **options),
        weights=sequence_mean,
        selection=top,
        group_relative=False,
    )

    def run(a):
        mask = a["mask"]
        batch = recipes.Batch(
            tokens=jnp.zeros(mask.shape, int),
            mask=mask,
            rewards=a["advantages"],
            where=jnp.ones(mask.shape[:-1], bool),
            prompt_tokens=jnp.zeros((len(mask), 1), int),
            prompt_mask=jnp.ones((len(mask), 1), bool),
            old_logp=a["old_logp"],
            extras={"old_entropy": a["entropy"]},
        )
        prepared, _ = recipe.prepare(batch, recipe.init())
        value, gradient = jax.value_and_grad(recipe.loss)(a["logp"], prepared)
        each = recipe.surrogate(a["logp"], a["old_logp"], prepared.advantages, prepared.mask)
        return {"loss": value, "gradient": gradient, "token_loss": each * prepared.weights}

    return run


def over_trained_rows(inputs, theirs):
    """The mean over rows with a token that trains; TRL's is over all rows."""
    highest = curation.top_fraction_token_mask(inputs["entropy"], inputs["mask"], 0.4)
    factor = inputs["mask"][..., 0].size / np.asarray(highest).any(-1).sum()
    return {name: theirs[name] * factor for name in ("loss", "gradient", "token_loss")}


TRAINED_ROWS = {
    case: Difference("TRL divides by all rows, we by those that train", over_trained_rows)
    for case in ("ragged", "holes", "masked_row")
}


def rounded(inputs, theirs):
    """Without the last of the tokens that TRL keeps."""
    entropy = np.where(inputs["mask"], inputs["entropy"], -np.inf)
    count = round(0.4 * inputs["mask"].sum())
    keep = entropy >= np.sort(entropy, axis=None)[::-1][count - 1]
    changed = {name: np.where(keep, theirs[name], 0.0) for name in ("gradient", "token_loss")}
    return changed | {"loss": changed["token_loss"].sum()}


ROUNDED = Difference(
    "we keep a share; whether TRL keeps the token at its quantile is up to rounding", rounded
)


TABLE = {
    "grpo": Ours(loss(ppo, sequence_mean, **clip), ALL_ROWS | FAR),
    "grpo_token": Ours(loss(ppo, sequence_mean, by="token_advantages", **clip), ALL_ROWS | FAR),
    "bnpo": Ours(loss(ppo, token_mean, **clip), FAR),
    "dr_grpo": Ours(loss(ppo, lambda mask: aggregate.fixed_length(mask, length=10), **clip), FAR),
    "dapo": Ours(loss(surrogates.dapo_clip, token_mean, dual_clip=None), FAR),
    "delta": Ours(loss(ppo, token_mean, dual_clip=1.5, **clip)),
    "gspo": Ours(loss(surrogates.gspo, sequence_mean, **narrow), ALL_ROWS),
    "gspo_delta": Ours(loss(surrogates.gspo, sequence_mean, dual_clip=1.1, **narrow), ALL_ROWS),
    "sapo_sequence": Ours(loss(surrogates.sapo_sequence, sequence_mean), ALL_ROWS),
    "luspo": Ours(loss(surrogates.luspo, sequence_mean, **narrow), ALL_ROWS),
    "sapo": Ours(loss(surrogates.sapo, sequence_mean), ALL_ROWS),
    "cispo": Ours(loss(surrogates.cispo, token_mean, w_max=1.2)),
    "cispo_token": Ours(loss(surrogates.cispo, token_mean, by="token_advantages", w_max=5.0)),
    "vespo": Ours(loss(surrogates.vespo, token_mean, token_loss=False)),
    "weighted": Ours(loss(ppo, token_mean, weighted=True, **clip), FAR),
    "kl": Ours(with_term(kl), clamped("kl")),
    "kl_corrected": Ours(with_term(kl_corrected), clamped("corrected")),
    "off_policy_mask": Ours(selected(off_policy), FAR),
    "top_entropy": Ours(selected(highest), {case: ROUNDED for case in ("on_policy", "bfloat16")}),
    "gspo_top_entropy": Ours(of_highest(surrogates.gspo, **narrow), TRAINED_ROWS),
    "sapo_sequence_top_entropy": Ours(of_highest(surrogates.sapo_sequence), TRAINED_ROWS),
    "luspo_top_entropy": Ours(of_highest(surrogates.luspo, **narrow), TRAINED_ROWS),
    "entropy_bonus": Ours(with_term(entropy_bonus), FAR),
    "gmpo": Ours(loss(surrogates.gmpo, sequence_mean, token_loss=False), GMPO_ROWS),
    "gmpo_narrow": Ours(
        loss(surrogates.gmpo, sequence_mean, token_loss=False, eps_low=0.1, eps_high=0.2),
        GMPO_ROWS,
    ),
    "entropy_controller": Ours(entropy_controller, {case: DELAYED for case in ("ragged", "holes")}),
}
TABLES = {"trl_losses": TABLE}
