"""Our corrections for another sampler against the numbers of verl's own code."""

from golden_data import Difference, Ours

from golden_ours import graded, replaced
from jaxrl_llm import aggregate, corrections, diagnostics, surrogates
from jaxrl_llm.core import bind

token_mean = aggregate.token_mean


def weights(function, **options):
    def run(a):
        made = function(a["old_logp"], a["behavior_logp"], a["mask"], **options)
        return {"weights": made, "ess": diagnostics.weight_metrics(made, a["mask"]).ess}

    return run


def reject(*rules):
    def run(a):
        keep = a["mask"]
        for rule in rules:
            keep &= rule(a["old_logp"], a["behavior_logp"], a["mask"])
        return {"keep": keep}

    return run


def rule(statistic, level, upper, lower=None):
    more = {} if lower is None else {"lower": lower, "invert": True}
    options = {"statistic": statistic, "level": level, "upper": upper} | more
    return bind(corrections.rejection_mask, **options)


def mismatch(a):
    seen = diagnostics.mismatch_metrics(a["old_logp"], a["behavior_logp"], a["mask"])
    return {
        "kl": seen.kl,
        "k3_kl": seen.k3,
        "log_ppl_diff": seen.log_perplexity_gap,
        "ppl_ratio": seen.perplexity_ratio,
        "chi2_token": seen.chi2_token,
        "chi2_seq": seen.chi2_sequence,
    }


def bypass(level):
    """What sampled takes the place of the old policy; no proximal policy between."""

    def run(a):
        def total(logp):
            if level is None:
                keep = rule("k2", "token", 0.05)(logp, a["behavior_logp"], a["mask"])
                each = surrogates.ppo_clip(
                    logp, a["behavior_logp"], a["token_advantages"], keep, dual_clip=3.0
                )
                return aggregate.weighted_sum(each, token_mean(keep))
            weight = corrections.importance_weights(
                logp, a["behavior_logp"], a["mask"], level=level, cap=1.5
            )
            each = surrogates.reinforce(logp, None, a["token_advantages"], a["mask"], weight=weight)
            return aggregate.weighted_sum(each, token_mean(a["mask"]))

        return graded(total, a["logp"])

    return run


def rejected(a):
    rules = rule("k1", "token", 1.25, 0.8), rule("k3", "sequence_mean", 0.03)
    pair = (a["old_logp"], a["behavior_logp"])
    shares = diagnostics.rejection_metrics(*pair, a["mask"], rules=rules)
    names = ("tokens", "sequences", "any_tokens")
    return {name: getattr(shares, name) for name in names}


tis, icepop = corrections.importance_weights, corrections.masked_importance_weights
TABLE = {
    f"{kind}_{level}{suffix}": Ours(weights(function, level=level, normalize=normalize, **bounds))
    for kind, function, bounds in (
        ("tis", tis, {"cap": 1.3}),
        ("icepop", icepop, {"lower": 0.5, "upper": 2.0}),
    )
    for level in ("token", "sequence")
    for suffix, normalize in (("", False), ("_normalized", True))
}
ROUNDED = {
    "bfloat16": replaced(
        "exp(d) - 1 - d cancels in verl's bfloat16, 0.0166 comes out above the bound of 0.02",
        keep={(0, 3, 0): True},
    )
}


def without_empty(inputs, theirs):
    filled = inputs["mask"].any(-1)
    factor = filled.size / filled.sum()
    changed = {name: theirs[name] * factor for name in ("log_ppl_diff", "chi2_seq")}
    return changed | {"ppl_ratio": 1 + (theirs["ppl_ratio"] - 1) * factor}


EMPTY = Difference("verl's means over sequences count the empty ones", without_empty)
TABLE |= {
    "reject_token_k1": Ours(reject(rule("k1", "token", 1.3, 0.9))),
    "reject_token_k2": Ours(reject(rule("k2", "token", 0.02))),
    "reject_token_k3": Ours(reject(rule("k3", "token", 0.02)), ROUNDED),
    "reject_seq_sum_k1": Ours(reject(rule("k1", "sequence_sum", 1.2, 0.7))),
    "reject_seq_sum_k2": Ours(reject(rule("k2", "sequence_sum", 0.1))),
    "reject_seq_sum_k3": Ours(reject(rule("k3", "sequence_sum", 0.1))),
    "reject_seq_mean_k1": Ours(reject(rule("k1", "sequence_mean", 1.1, 0.95))),
    "reject_seq_mean_k2": Ours(reject(rule("k2", "sequence_mean", 0.02))),
    "reject_seq_mean_k3": Ours(reject(rule("k3", "sequence_mean", 0.02)), ROUNDED),
    "reject_seq_max_k2": Ours(reject(rule("k2", "sequence_max", 0.05))),
    "reject_seq_max_k3": Ours(reject(rule("k3", "sequence_max", 0.05))),
    "reject_token_k1_and_seq_mean_k3": Ours(
        reject(rule("k1", "token", 1.25, 0.8), rule("k3", "sequence_mean", 0.03))
    ),
    "rejected": Ours(rejected),
    "mismatch": Ours(mismatch, {case: EMPTY for case in ("masked_row", "one_sequence")}),
    "bypass_reinforce_token": Ours(bypass("token")),
    "bypass_reinforce_sequence": Ours(bypass("sequence")),
    "bypass_ppo_clip": Ours(bypass(None)),
}
TABLES = {"verl_corrections": TABLE}
