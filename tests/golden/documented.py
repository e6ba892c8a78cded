"""The examples of docs/same_name_different_number.md, computed from the golden data.

`python tests/golden/documented.py` writes their tables into the page; a test compares them.
"""

import functools
import re
import sys
from pathlib import Path

import golden_data
import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxrl_llm import advantages, aggregate, corrections, regularizers, surrogates

PAGE = Path(__file__).parents[2] / "docs" / "same_name_different_number.md"
TABLE = re.compile(r"(<!-- (\w+) -->\n\n)((?:\|.*\n)+)")


def stored(manifest, entry, case, output, index=()):
    """A number of a peer."""
    data = golden_data.load(manifest)
    return data.label, float(data.outputs(entry, case)[output][index])


def inputs(case, group="tokens"):
    return golden_data.load("verl_losses" if group == "tokens" else "verl_advantages").inputs[
        group
    ][case]


def ours(function, case, group="tokens"):
    """Our number: a function of the inputs of a case."""
    return "ours", float(jax.jit(function)(inputs(case, group)))


def of_group(function, index, **options):
    return lambda a: function(a["rewards"], where=a["where"], **options)[index]


def aggregated(weights, **options):
    return lambda a: aggregate.weighted_sum(a["token_advantages"], weights(a["mask"], **options))


def clipped(a, **options):
    return surrogates.ppo_clip(
        a["logp"], a["old_logp"], a["token_advantages"], a["mask"], **options
    )


def of_sequences(a):
    weights = aggregate.sequence_mean(a["mask"])
    return aggregate.weighted_sum(clipped(a, eps_low=0.2, eps_high=0.2), weights)


def geometric(a):
    loss = surrogates.gmpo(a["logp"], a["old_logp"], a["advantages"], a["mask"])
    return aggregate.weighted_sum(loss, aggregate.sequence_mean(a["mask"]))


def gspo(a):
    logps = (a["logp"], a["old_logp"], a["advantages"], a["mask"])
    loss = surrogates.gspo(*logps, eps_low=0.03, eps_high=0.04)
    return aggregate.weighted_sum(loss, aggregate.sequence_mean(a["mask"]))


def estimate(estimator, index):
    return lambda a: regularizers.kl_token(
        a["logp"], a["ref_logp"], a["mask"], estimator=estimator
    )[index]


def kept(**options):
    def count(a):
        keep = corrections.rejection_mask(a["old_logp"], a["behavior_logp"], a["mask"], **options)
        return keep.any(-1).sum() if options["level"] != "token" else keep.sum()

    return count


def rows_with(manifest, entry, case, output):
    """How many sequences of a peer's output have a number that is not 0."""
    data = golden_data.load(manifest)
    return data.label, float((data.outputs(entry, case)[output] != 0).any(-1).sum())


def to_go(a):
    shaped = advantages.kl_shaped_rewards(
        a["rewards"], a["mask"], old_logp=a["old_logp"], ref_logp=a["ref_logp"], kl_coef=0.1
    )
    return advantages.reward_to_go(shaped, a["mask"], gamma=0.9)[1, 2, 0]


def optimal(**options):
    def run(a):
        given = {"old_logp": a["old_logp"], "sum_pi_sq": a["sum_pi_sq"], "where": a["where"]}
        return advantages.otb(a["rewards"], a["mask"], **given, **options)[0, 0, 5]

    return run


def greedy(a):
    values = advantages.remax(a["rewards"], greedy_rewards=a["greedy_rewards"], where=a["where"])
    return jnp.where(a["mask"], values[..., None], 0.0)[1, 1, 2]


def switched(a):
    coef = 0.01
    for entropy in jnp.abs(a["advantages"][0, :2]):
        step = regularizers.entropy_controller(coef, entropy, target=0.8, high=0.02)
        coef = step.coef
    return step.applied


def named(label, row):
    """A row under another name: the setting, or the function within the package."""
    return f"{row[0]}, {label}", row[1]


@functools.cache
def examples():
    """For each example of the page its rows: who, and the number."""
    one, first, far = (0, 1), (0, 0), (0, 2, 1)
    wide = "log_ratio_30"
    return {
        "grpo_eps": [
            ours(of_group(advantages.grpo, first), "binary", "rewards"),
            stored("verl_advantages", "grpo", "binary", "advantages", (0, 0, 0)),
            stored("tunix_algorithms", "grpo", "binary", "advantages", first),
            stored("trl_advantages", "advantages_group", "binary", "advantages", first),
            named(
                "unbiased",
                stored("areal_trainer", "group_norm", "binary", "advantages", first),
            ),
            named(
                "biased",
                stored("areal_trainer", "group_norm_biased", "binary", "advantages", first),
            ),
        ],
        "grpo_singleton": [
            ours(of_group(advantages.grpo, one), "singleton", "rewards"),
            named(
                '`singleton="raw"`',
                ours(of_group(advantages.grpo, one, singleton="raw"), "singleton", "rewards"),
            ),
            stored("verl_advantages", "grpo", "singleton", "advantages", (0, 1, 0)),
            stored("trl_advantages", "advantages_group", "singleton", "advantages", one),
        ],
        "rloo_singleton": [
            ours(of_group(advantages.rloo, one), "singleton", "rewards"),
            named(
                "`rloo`", stored("verl_advantages", "rloo", "singleton", "advantages", (0, 1, 0))
            ),
            named(
                "`rloo_vectorized`",
                stored("verl_advantages", "rloo_vectorized", "singleton", "advantages", (0, 1, 0)),
            ),
            stored("trl_advantages", "rloo", "singleton", "advantages", one),
        ],
        "batch_scale": [
            ours(of_group(advantages.grpo, first, scale="batch", eps=1e-4), "full", "rewards"),
            stored("trl_advantages", "advantages_batch", "full", "advantages", first),
            stored("areal_trainer", "group_mean_batch_std", "full", "advantages", first),
        ],
        "equal_rewards": [
            ours(
                lambda a: advantages.opo(a["rewards"], a["mask"], where=a["where"])[first],
                "all_equal",
                "rewards",
            ),
            stored("verl_advantages", "opo", "all_equal", "advantages", (0, 0, 0)),
        ],
        "gpg": [
            ours(of_group(advantages.gpg, first), "binary", "rewards"),
            named(
                '`mode="nonzero_reward"`',
                ours(of_group(advantages.gpg, first, mode="nonzero_reward"), "binary", "rewards"),
            ),
            stored("verl_advantages", "gpg", "binary", "advantages", (0, 0, 0)),
        ],
        "gdpo": [
            stored("trl_advantages", "gdpo", "full", "advantages", first),
            stored("verl_advantages", "gdpo", "full", "advantages", (0, 0, 0)),
        ],
        "gae": [
            stored("verl_advantages", "gae", "full", "advantages", (0, 0, 0)),
            stored("tunix_algorithms", "gae", "full", "advantages", (0, 0, 0)),
            stored("slime_trainer", "gae", "full", "advantages", (0, 0, 0)),
            stored("rlax_pieces", "gae", "full", "advantages", (0, 0, 0)),
        ],
        "otb_tail": [
            ours(optimal(), "full", "rewards"),
            named("`zero_tail=True`", ours(optimal(zero_tail=True), "full", "rewards")),
            stored("verl_advantages", "otb", "full", "advantages", (0, 0, 5)),
        ],
        "discount": [
            ours(to_go, "holes", "rewards"),
            stored("slime_trainer", "reinforce_pp_discounted", "holes", "returns", (1, 2, 0)),
        ],
        "remax_masked": [
            ours(greedy, "holes", "rewards"),
            stored("verl_advantages", "remax", "holes", "advantages", (1, 1, 2)),
        ],
        "far_ratio": [
            ours(
                lambda a: (
                    surrogates.ppo_clip(a["logp"], a["old_logp"], a["advantages"], a["mask"])[far]
                    / a["mask"].sum()
                ),
                wide,
            ),
            stored("verl_losses", "vanilla", wide, "token_loss", far),
            stored("tunix_algorithms", "grpo_loss_token", wide, "token_loss", far),
            stored("trl_losses", "bnpo", wide, "token_loss", far),
        ],
        "empty_rows": [
            ours(of_sequences, "one_sequence"),
            named(
                "`seq-mean-token-mean`",
                stored("verl_losses", "vanilla_token", "one_sequence", "loss"),
            ),
            named('`loss_type="grpo"`', stored("trl_losses", "grpo_token", "one_sequence", "loss")),
        ],
        "empty_rows_gmpo": [
            ours(geometric, "one_sequence"),
            stored("verl_losses", "geo_mean", "one_sequence", "loss"),
            stored("trl_losses", "gmpo", "one_sequence", "loss"),
        ],
        "sum_norm": [
            named(
                "`sequence_sum_norm`",
                ours(aggregated(aggregate.sequence_sum_norm, length=10), "masked_row"),
            ),
            named(
                "`fixed_length`", ours(aggregated(aggregate.fixed_length, length=10), "masked_row")
            ),
            named(
                "`seq-mean-token-sum-norm`",
                stored("verl_losses", "agg_seq-mean-token-sum-norm_10", "masked_row", "loss"),
            ),
            named(
                "`sequence-mean-token-scale`",
                stored("tunix_algorithms", "agg_sequence-mean-token-scale", "masked_row", "loss"),
            ),
            named(
                "`sequence-mean-token-sum-norm`",
                stored(
                    "tunix_algorithms", "agg_sequence-mean-token-sum-norm", "masked_row", "loss"
                ),
            ),
        ],
        "gspo": [
            ours(gspo, "ragged"),
            stored("verl_losses", "gspo", "ragged", "loss"),
            stored("trl_losses", "gspo", "ragged", "loss"),
            stored("tunix_algorithms", "gspo_loss", "ragged", "loss"),
            stored("areal_trainer", "gspo", "ragged", "loss"),
        ],
        "gspo_clamp": [
            stored("verl_losses", "gspo", wide, "gradient", (0, 2, 0)),
            stored("trl_losses", "gspo", wide, "gradient", (0, 2, 0)),
            stored("tunix_algorithms", "gspo_loss", wide, "gradient", (0, 2, 0)),
        ],
        "cispo": [
            named("`clip_ratio_high=0.2`", stored("verl_losses", "cispo", "ragged", "loss")),
            named("`epsilon_high=1.2`", stored("trl_losses", "cispo", "ragged", "loss")),
        ],
        "k3": [
            ours(estimate("k3", (1, 1, 1)), wide),
            stored("verl_losses", "kl_k3", wide, "kl", (1, 1, 1)),
            stored("areal_trainer", "kl_k3", wide, "kl", (1, 1, 1)),
            stored("tunix_algorithms", "kl_low_var_kl", wide, "kl", (1, 1, 1)),
            named("`k3`", stored("slime_trainer", "kl_k3", wide, "kl", (1, 1, 1))),
            named("`low_var_kl`", stored("slime_trainer", "kl_low_var_kl", wide, "kl", (1, 1, 1))),
        ],
        "k1": [
            ours(estimate("k1", (0, 0, 1)), wide),
            stored("verl_losses", "kl_k1", wide, "kl", (0, 0, 1)),
            stored("areal_trainer", "kl_k1", wide, "kl", (0, 0, 1)),
            stored("tunix_algorithms", "kl_kl", wide, "kl", (0, 0, 1)),
        ],
        "rejection_k3": [
            ours(kept(statistic="k3", level="sequence_mean", upper=0.02), "ragged"),
            rows_with("verl_corrections", "reject_seq_mean_k3", "ragged", "keep"),
            rows_with("areal_trainer", "sequence_k3", "ragged", "gradient"),
        ],
        "rejection_k1": [
            ours(kept(statistic="k1", level="token", upper=1.3, lower=0.9), "ragged"),
            named(
                "`invert=True`",
                ours(
                    kept(statistic="k1", level="token", upper=1.3, lower=0.9, invert=True), "ragged"
                ),
            ),
            (
                golden_data.load("verl_corrections").label,
                float(
                    golden_data.load("verl_corrections")
                    .outputs("reject_token_k1", "ragged")["keep"]
                    .sum()
                ),
            ),
        ],
        "entropy_control": [
            ours(switched, "ragged"),
            stored("trl_losses", "entropy_controller", "ragged", "applied", 1),
        ],
    }


def table(rows):
    lines = [f"| {who} | {value:.5g} |" for who, value in rows]
    return "\n".join(["| | number |", "| --- | --- |", *lines]) + "\n"


def main():
    """Writes the tables into the page."""
    known = examples()
    text = TABLE.sub(lambda m: m[1] + table(known[m[2]]), PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
