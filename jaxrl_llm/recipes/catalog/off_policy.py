"""Data that another policy sampled: weights, rejection, staleness."""

from jaxrl_llm.recipes.catalog.method import NUMPY, Method

ROWS = (
    Method(
        key="rollout_correction",
        title="Truncated importance weights (TIS) and rejection of what is too far off policy",
        arxiv="",
        kind="correction",
        functions=(
            "corrections.importance_weights",
            "corrections.off_policy_sequence_mask",
            "corrections.rejection_mask",
            "corrections.rollout_correction",
            "corrections.sequence_rollout_correction",
            "corrections.veto_mask",
        ),
        preset="rollout_correction",
        verified_against=NUMPY,
    ),
    Method(
        key="icepop",
        title="IcePop, importance weights that are zero outside a range (MIS)",
        arxiv="2510.18855",
        kind="correction",
        functions=("corrections.masked_importance_weights", "corrections.rollout_correction"),
        preset="icepop",
        verified_against=NUMPY,
    ),
    Method(
        key="areal",
        title="AReaL, decoupled PPO on data of several versions of the weights",
        arxiv="2505.24298",
        kind="correction",
        functions=(
            "corrections.loglinear_prox",
            "corrections.rollout_correction",
            "corrections.staleness_capacity",
            "corrections.staleness_mask",
            "corrections.version_lags",
            "surrogates.decoupled_ppo",
        ),
        preset="areal",
        verified_against=NUMPY,
    ),
    Method(
        key="m2po",
        title="M2PO, a bound on the second moment of the log ratios of a batch",
        arxiv="2510.01161",
        kind="correction",
        functions=("corrections.m2_mask",),
        verified_against=NUMPY,
    ),
    Method(
        key="vespo",
        title="VESPO, a soft weight of the whole sequence",
        arxiv="2602.10693",
        kind="surrogate",
        functions=("surrogates.vespo", "surrogates.vespo_weights"),
        preset="vespo",
        verified_against=NUMPY,
    ),
    Method(
        key="vcpo",
        title="VCPO, the step and the baseline follow the effective sample size",
        arxiv="2602.17616",
        kind="correction",
        functions=(
            "advantages.opob",
            "advantages.vcpo_advantage",
            "corrections.ess",
            "corrections.ess_lr_scale",
            "corrections.sequence_rollout_correction",
        ),
        preset="vcpo",
        verified_against=NUMPY,
    ),
)
