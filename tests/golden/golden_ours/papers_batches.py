"""What reads the whole batch, or a step on each token, against the papers' own released code."""

import jax
import jax.numpy as jnp
import numpy as np
from golden_data import Difference, Ours

from golden_ours import advantage, graded
from jaxrl_llm import advantages, aggregate, corrections, curation, regularizers, surrogates


def gdpo(*weights):
    def run(a):
        columns = {f"r{i}": x for i, x in enumerate(a["columns"])}
        given = {f"r{i}": w for i, w in enumerate(weights)}
        return {"advantages": advantages.gdpo(columns, weights=given)}

    def left_out(inputs, theirs):
        """Statistics of the rewards that are numbers; the others add nothing."""
        total = np.zeros((3, 4))
        for column, weight in zip(np.float64(inputs["columns"]), weights, strict=True):
            mean, std = np.nanmean(column, -1), np.nanstd(column, -1, ddof=1)
            total += weight * np.nan_to_num((column - mean[:, None]) / (std[:, None] + 1e-4))
        return {"advantages": (total - total.mean()) / (total.std(ddof=1) + 1e-4)}

    reason = "the authors take 0 for a reward that is not a number; we, as TRL, leave it out"
    return Ours(run, {"missing": Difference(reason, left_out)})


def gdpo_token(a):
    columns = {f"r{i}": x for i, x in enumerate(a["columns"][:2])}
    return {"advantages": advantages.gdpo_token(columns, a["mask"])}


def opob(weighted=True, by_length=False):
    def run(a):
        norms = a["grad_norms"] ** 2
        norms = norms / a["lengths"] ** 2 if by_length else norms
        weights = a["log_weights"] if weighted else jnp.zeros_like(norms)
        return {"baseline": advantages.opob(a["rewards"], weights, norms)}

    return Ours(run)


def sample_size(a):
    weights = jnp.exp(a["log_weights"])
    rows = {"old_logp": a["log_weights"][..., None], "mask": jnp.ones((3, 4, 1), bool)}
    rows["behavior_logp"] = jnp.zeros((3, 4, 1))

    def scale(power):
        return corrections.ess_lr_scale(a["rewards"], rho_base=0.9, power=power, **rows)

    return {"ess": corrections.ess(weights), "sqrt": scale(0.5), "linear": scale(1.0)}


def capo(adam=False):
    def run(a):
        moments = curation.CapoMoments(a["mu"], a["nu"], a["count"]) if adam else None
        rows = (a["hidden"], a["probs"], a["actions"], a["advantages"], a["mask"])
        found = curation.capo_scores(*rows, learning_rate=0.01, moments=moments)
        return {"objective": found.objective, "policy": found.policy}

    return Ours(run)


def capo_path(a):
    rule = curation.capo_adam(top=3)
    state, rows = rule.init(5, 4), []
    mask, rate = a["mask"].reshape(-1), a["lr"]
    for step in range(len(rate)):
        hidden, logits = (a[k][step].reshape(72, -1) for k in ("hidden", "logits"))
        values = jnp.repeat(a["advantages"][step].reshape(-1), 6)
        context = {"advantages": values, "mask": mask, "learning_rate": rate[step]}
        actions = a["actions"][step].reshape(-1)
        effects, sums = rule(state, hidden, logits, actions, **context)
        state = rule.learn(state, sums)
        keep = curation.capo_bounds(values, mask, step_effects=effects)
        columns = {"objective": effects[:, 0], "policy": effects[:, 1], "keep": keep}
        row = {name: x.reshape(3, 4, 6) for name, x in columns.items()}
        rows.append(row | {"mu": state.mu, "nu": state.nu})
    return {name: jnp.stack([row[name] for row in rows]) for name in rows[0]}


def keep(symmetric):
    def run(a):
        scores = curation.CapoScores(a["objective"], a["policy"])
        bounds = {"tau_h": 0.01, "tau_f": 1e-4, "symmetric": symmetric}
        return {"keep": curation.capo_mask(scores, a["mask"], **bounds)}

    return Ours(run)


def gpg(scale):
    def run(a):
        values = advantages.gpg(a["rewards"], scale=scale)
        weight = aggregate.token_mean(a["mask"])

        def total(logp):
            each = surrogates.reinforce(logp, None, values, a["mask"])
            return aggregate.weighted_sum(each, weight)

        return graded(total, a["old_logp"])

    return Ours(run)


def xrpo(**options):
    def run(a):
        base = advantages.grpo(a["rewards"], eps=1e-8)
        mask = jnp.ones(a["old_logp"].shape, bool)
        given = {"old_logp": a["old_logp"]} | options
        return {"advantages": advantages.novelty_sharpening(base, mask, **given)}

    def right_alone(inputs, theirs):
        """Rollouts at or below the mean keep their advantage."""
        rewards = np.float64(inputs["rewards"])
        centered = rewards - rewards.mean(-1, keepdims=True)
        plain = centered / (rewards.std(-1, keepdims=True, ddof=1) + 1e-8)
        return {"advantages": np.where(centered > 0, theirs["advantages"], plain)}

    reason = "there wrong answers are raised too, up to a share of their advantage's size"
    return Ours(run, dict.fromkeys(("full", "binary"), Difference(reason, right_alone)))


def llds(a):
    """By response, without a tolerance, over the tokens that are penalized."""
    options = {"level": "response", "coef": 1.0, "tolerance": 0.0}

    def penalty(logp):
        return regularizers.llds(logp, a["old_logp"], a["mask"], a["advantages"], **options)

    chosen = penalty(a["logp"]) > 0
    count = jnp.maximum(jnp.sum(chosen), 1)
    loss, gradient = jax.value_and_grad(lambda logp: penalty(logp).sum() / count)(a["logp"])
    return {"loss": loss, "gradient": gradient, "chosen": chosen}


TABLES = {
    "gpg": {"loss": gpg("none"), "scaled": gpg("group")},
    "grpo_composer": {
        "paper": xrpo(bonus=2.5, cap=0.5),
        "free": xrpo(bonus=1.0, cap=100.0),
    },
    "qgre_engine": {"displacement": Ours(llds)},
    "gdpo": {
        "sequences": gdpo(1.0, 1.0, 1.0),
        "weighted": gdpo(1.0, 0.5, 2.0),
        "tokens": Ours(gdpo_token),
    },
    "jspo": {
        "binary": Ours(advantage(advantages.jspo)),
        "rewards": Ours(advantage(advantages.jspo)),
    },
    "vcpo": {
        "baseline": opob(),
        "unweighted": opob(weighted=False),
        "by_length": opob(by_length=True),
        "sample_size": Ours(sample_size),
    },
    "stable_pg": {
        "ascent": capo(),
        "adam": capo(adam=True),
        "path": Ours(capo_path),
        "keep_symmetric": keep(True),
        "keep_rising": keep(False),
    },
}
