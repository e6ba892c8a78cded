"""What the code of peers confirmed: which function, with which options.

Written by `python tests/golden/confirmed.py` from the comparisons with the golden data.
"""

from jaxrl_llm.recipes.catalog.method import Confirmed

# fmt: off
CONFIRMED: dict[str, tuple[Confirmed, ...]] = {
    "adaptive_kl": (
        Confirmed("verl 0.9.1", "regularizers.adaptive_kl_update",
            "horizon=1000; samples=64; target=0.8"),
    ),
    "aggregate": (
        Confirmed("TRL 1.16.0", "aggregate.fixed_length", "length=10"),
        Confirmed("TRL 1.16.0", "aggregate.sequence_mean", "defaults"),
        Confirmed("TRL 1.16.0", "aggregate.token_mean", "defaults"),
        Confirmed("TRL 1.16.0", "aggregate.weighted_sum", "defaults"),
        Confirmed("tunix 0.1.7", "aggregate.sequence_mean", "defaults"),
        Confirmed("tunix 0.1.7", "aggregate.sequence_sum", "defaults"),
        Confirmed("tunix 0.1.7", "aggregate.sequence_sum_norm", "length=10 or 6"),
        Confirmed("tunix 0.1.7", "aggregate.token_mean", "defaults"),
        Confirmed("tunix 0.1.7", "aggregate.weighted_sum", "defaults"),
        Confirmed("verl 0.9.1", "aggregate.sequence_mean", "defaults"),
        Confirmed("verl 0.9.1", "aggregate.sequence_sum", "defaults"),
        Confirmed("verl 0.9.1", "aggregate.sequence_sum_norm", "length=10 or 6"),
        Confirmed("verl 0.9.1", "aggregate.token_mean", "defaults"),
        Confirmed("verl 0.9.1", "aggregate.weighted_sum", "defaults"),
    ),
    "ampo": (
        Confirmed("AMPO b88d365", "advantages.grpo_split", "defaults"),
        Confirmed("AMPO b88d365", "curation.comprehension_score", "defaults"),
        Confirmed("AMPO b88d365", "surrogates.ampo",
            "defaults; dual_clip=None; eps_high=inf; eps_low=inf"),
    ),
    "areal": (
        Confirmed("AReaL 1.0.4", "corrections.loglinear_prox", "current_version=5"),
        Confirmed("AReaL 1.0.4", "corrections.staleness_capacity",
            "batch_size=4; max_concurrent=16; max_staleness=3"),
        Confirmed("AReaL 1.0.4", "surrogates.decoupled_ppo",
            "defaults; beyond_cap='clamp' or 'mask'; cap=1.1"),
    ),
    "capo": (
        Confirmed("stable-pg-llm 933fe01", "curation.capo_mask",
            "symmetric=False; tau_f=0.0001; tau_h=0.01"),
        Confirmed("stable-pg-llm 933fe01", "curation.capo_scores", "lr=0.01"),
    ),
    "cispo": (
        Confirmed("slime 0.3.1", "surrogates.cispo", "w_max=1.2; w_min=0.8"),
        Confirmed("TRL 1.16.0", "surrogates.cispo", "defaults; w_max=1.2"),
        Confirmed("verl 0.9.1", "surrogates.cispo", "w_max=1.2; w_min=0.8"),
    ),
    "clip_cov": (
        Confirmed("verl 0.9.1", "surrogates.clip_cov",
            "lower=0.2; ratio=1; selected=None; upper=1"),
    ),
    "d3s": (
        Confirmed("TRL 1.16.0", "curation.top_fraction_token_mask", "defaults"),
    ),
    "dapo_clip": (
        Confirmed("AReaL 1.0.4", "surrogates.dapo_clip", "defaults"),
        Confirmed("slime 0.3.1", "surrogates.dapo_clip", "defaults"),
        Confirmed("TRL 1.16.0", "surrogates.dapo_clip", "dual_clip=None"),
        Confirmed("tunix 0.1.7", "surrogates.dapo_clip", "defaults"),
        Confirmed("verl 0.9.1", "surrogates.dapo_clip", "defaults"),
    ),
    "dars": (
        Confirmed("DARS 9b21b71", "curation.dars_extra_rollouts",
            "max_rollouts=32 or 64; rollouts=8; scaled=True; schedule='hardness'"),
    ),
    "dcpo_distribution": (
        Confirmed("DCPO (distribution-centric) 33f8073", "advantages.dcpo_distribution",
            "defaults"),
    ),
    "dcpo_dynamic_clip": (
        Confirmed("DCPO (dynamic clipping) 01787b0", "advantages.prompt_stats_init", "defaults"),
        Confirmed("DCPO (dynamic clipping) 01787b0", "advantages.prompt_stats_update", "defaults"),
        Confirmed("DCPO (dynamic clipping) 01787b0", "advantages.smooth_advantage", "defaults"),
        Confirmed("DCPO (dynamic clipping) 01787b0", "advantages.smooth_standardization",
            "num_prompts=3"),
        Confirmed("DCPO (dynamic clipping) 01787b0", "surrogates.dcpo_bounds", "defaults"),
        Confirmed("DCPO (dynamic clipping) 01787b0", "surrogates.dcpo_dynamic_clip",
            "defaults; eps_high=0.02; eps_low=0.01"),
    ),
    "dppo_kl": (
        Confirmed("verl 0.9.1", "surrogates.dppo_kl", "delta_high=0.03; delta_low=0.02; w_max=1.2"),
    ),
    "dppo_tv": (
        Confirmed("verl 0.9.1", "surrogates.dppo_tv",
            "delta_high=0.075; delta_low=0.05; w_max=1.2"),
    ),
    "dr_grpo": (
        Confirmed("AReaL 1.0.4", "advantages.dr_grpo", "defaults"),
        Confirmed("TRL 1.16.0", "advantages.dr_grpo", "defaults"),
        Confirmed("tunix 0.1.7", "advantages.dr_grpo", "defaults"),
        Confirmed("verl 0.9.1", "advantages.dr_grpo", "singleton='raw'"),
    ),
    "drpo_len": (
        Confirmed("DRPO 405f702", "aggregate.group_mean", "defaults"),
        Confirmed("DRPO 405f702", "surrogates.drpo_len", "lam=0.5; length=6; tau=0.5"),
        Confirmed("DRPO 405f702", "surrogates.kl_barrier", "beta=0 or 10"),
        Confirmed("DRPO 405f702", "surrogates.kl_from_old", "defaults; estimator='k3'"),
    ),
    "dynamic_sampling": (
        Confirmed("slime 0.3.1", "curation.informative_groups", "defaults"),
        Confirmed("verl-recipe 48ea0a7", "curation.informative_groups", "keep_singletons=True"),
    ),
    "entropy_bonus": (
        Confirmed("rlax 0.1.9", "regularizers.entropy_from_logits", "defaults"),
        Confirmed("TRL 1.16.0", "regularizers.entropy_bonus", "coef=0.1"),
        Confirmed("TRL 1.16.0", "regularizers.entropy_controller", "high=0.02; target=0.8"),
        Confirmed("tunix 0.1.7", "regularizers.entropy_from_logits", "defaults"),
        Confirmed("verl 0.9.1", "regularizers.entropy_from_logits", "defaults"),
    ),
    "es_fitness": (
        Confirmed("evosax 0.3.2", "evolution.centered_ranks", "ties='mean'"),
        Confirmed("evosax 0.3.2", "evolution.zscore", "eps=1e-08"),
    ),
    "fapo": (
        Confirmed("verl-recipe 48ea0a7", "rewards.fapo_reward", "defaults"),
        Confirmed("verl-recipe 48ea0a7", "rewards.genrm_step_reward", "defaults"),
    ),
    "gae": (
        Confirmed("MOSS-RLHF 4865d82", "advantages.gae", "gamma=0.98"),
        Confirmed("MOSS-RLHF 4865d82", "advantages.gae_returns", "gamma=0.98"),
        Confirmed("rlax 0.1.9", "advantages.gae", "gamma=0.97; lam=0.9"),
        Confirmed("rlax 0.1.9", "advantages.gae_returns", "gamma=0.97; lam=0.9"),
        Confirmed("slime 0.3.1", "advantages.gae", "gamma=0.97; lam=0.9"),
        Confirmed("slime 0.3.1", "advantages.gae_returns", "gamma=0.97; lam=0.9"),
        Confirmed("tunix 0.1.7", "advantages.gae", "gamma=0.97; lam=0.9"),
        Confirmed("tunix 0.1.7", "advantages.gae_returns", "gamma=0.97; lam=0.9"),
        Confirmed("verl 0.9.1", "advantages.gae", "gamma=0.97; lam=0.9"),
        Confirmed("verl 0.9.1", "advantages.gae_returns", "gamma=0.97; lam=0.9"),
    ),
    "gdpo": (
        Confirmed("GDPO b080e63", "advantages.gdpo", "defaults"),
        Confirmed("GDPO b080e63", "advantages.gdpo_token", "defaults"),
        Confirmed("TRL 1.16.0", "advantages.gdpo", "defaults"),
        Confirmed("verl 0.9.1", "advantages.gdpo_token", "defaults"),
    ),
    "gmpo": (
        Confirmed("TRL 1.16.0", "surrogates.gmpo", "defaults; eps_high=0.2; eps_low=0.1"),
        Confirmed("verl 0.9.1", "surrogates.gmpo", "defaults; eps_high=0.2; eps_low=0.1"),
    ),
    "gpg": (
        Confirmed("GPG e096da8", "advantages.gpg", "defaults; scale='group'"),
        Confirmed("verl 0.9.1", "advantages.gpg", "mode='nonzero_reward'; singleton='raw'"),
        Confirmed("verl 0.9.1", "surrogates.reinforce", "defaults"),
    ),
    "grpo": (
        Confirmed("AReaL 1.0.4", "advantages.grpo", "ddof=0; eps=1e-05; scale='batch'"),
        Confirmed("TRL 1.16.0", "advantages.grpo", "eps=0.0001; scale='batch'"),
        Confirmed("tunix 0.1.7", "advantages.grpo", "defaults"),
        Confirmed("verl 0.9.1", "advantages.grpo", "defaults; singleton='raw'"),
    ),
    "grpo_passk": (
        Confirmed("verl 0.9.1", "advantages.grpo_passk", "defaults; scale='none'"),
    ),
    "gspo": (
        Confirmed("AReaL 1.0.4", "surrogates.gspo", "eps_high=0.04; eps_low=0.03"),
        Confirmed("slime 0.3.1", "surrogates.gspo", "eps_high=0.04; eps_low=0.03"),
        Confirmed("TRL 1.16.0", "surrogates.gspo", "dual_clip=1.1; eps_high=0.04; eps_low=0.03"),
        Confirmed("tunix 0.1.7", "surrogates.gspo", "eps_high=0.04; eps_low=0.03"),
        Confirmed("verl 0.9.1", "surrogates.gspo", "eps_high=0.04; eps_low=0.03"),
    ),
    "gspo_token": (
        Confirmed("tunix 0.1.7", "surrogates.gspo_token", "eps_high=0.04; eps_low=0.03"),
        Confirmed("verl 0.9.1", "surrogates.gspo_token", "eps_high=0.04; eps_low=0.03"),
    ),
    "hbpo": (
        Confirmed("HBPO 5c8991d", "advantages.hbpo", "intra_weight=2"),
        Confirmed("HBPO 5c8991d", "rewards.hbpo_reward", "defaults"),
    ),
    "icepop": (
        Confirmed("slime 0.3.1", "corrections.masked_importance_weights", "lower=0.8; upper=1.25"),
        Confirmed("TRL 1.16.0", "corrections.masked_importance_weights",
            "level='sequence'; lower=0.7 or 0.8; upper=1.25 or 1.4"),
        Confirmed("verl 0.9.1", "corrections.masked_importance_weights",
            "defaults; level='sequence'; normalize=True"),
    ),
    "icpo": (
        Confirmed("ICPO 287ac48", "curation.icpo_bonus", "defaults"),
        Confirmed("ICPO 287ac48", "rewards.steered_bonus", "defaults"),
        Confirmed("ICPO 287ac48", "surrogates.icpo", "defaults"),
    ),
    "jspo": (
        Confirmed("JSPO-Official 3f8539d", "advantages.jspo", "defaults"),
    ),
    "kl_cov": (
        Confirmed("verl 0.9.1", "surrogates.kl_cov", "coef=0.1; ratio=0.01 or 0.2; selected=None"),
    ),
    "kl_estimators": (
        Confirmed("AReaL 1.0.4", "regularizers.kl_token", "cap=10; estimator='k1' or 'k2'"),
        Confirmed("slime 0.3.1", "regularizers.kl_token",
            "defaults; cap=10; estimator='k1' or 'k2'"),
        Confirmed("slime 0.3.1", "regularizers.kl_unbiased", "coef=1; estimator='k1'"),
        Confirmed("TRL 1.16.0", "regularizers.kl_to_reference", "coef=0.3"),
        Confirmed("TRL 1.16.0", "regularizers.kl_unbiased", "coef=0.3"),
        Confirmed("tunix 0.1.7", "regularizers.kl_to_reference", "cap=10; coef=0.3"),
        Confirmed("tunix 0.1.7", "regularizers.kl_token",
            "defaults; cap=10; estimator='k1' or 'k2'"),
        Confirmed("verl 0.9.1", "regularizers.kl_token",
            "cap=10; estimator='abs' or 'k1' or 'k1+' or 'k2' or 'k3+'"),
    ),
    "llds": (
        Confirmed("qgre-engine e6e4005", "regularizers.llds",
            "coef=1; level='response'; tolerance=0"),
    ),
    "luffy_shaping": (
        Confirmed("LUFFY 01f4ae0", "surrogates.luffy_shaping",
            "defaults; eps_high=0.2; eps_low=0.2; gamma=0.5"),
    ),
    "luspo": (
        Confirmed("TRL 1.16.0", "surrogates.luspo", "eps_high=0.04; eps_low=0.03"),
    ),
    "m2po": (
        Confirmed("AReaL 1.0.4", "corrections.m2_mask", "threshold=0.01"),
    ),
    "maxrl": (
        Confirmed("maxrl c0698eb", "advantages.maclaurin", "defaults; order=1 or 2"),
        Confirmed("maxrl c0698eb", "advantages.maxrl", "defaults; scale='root'"),
    ),
    "mc_grpo": (
        Confirmed("MC-GRPO da07745", "advantages.mc_grpo", "defaults; rescale_nonzero=True"),
        Confirmed("MC-GRPO da07745", "advantages.mc_grpo_pivot", "defaults"),
    ),
    "mssr": (
        Confirmed("MSSR 3dd0f13", "advantages.sampled_entropy_shaping",
            "defaults; cap=0.5; scale=2"),
        Confirmed("MSSR 3dd0f13", "advantages.window_kl_discount", "defaults; count=0"),
    ),
    "open_es": (
        Confirmed("evosax 0.3.2", "evolution.open_es_grad", "defaults; pairs=False"),
    ),
    "opo": (
        Confirmed("verl 0.9.1", "advantages.opo", "singleton='raw'"),
    ),
    "ospo": (
        Confirmed("OSPO 02ed2da", "advantages.fleet_grpo",
            "gamma=0.9; norm='time'; punishment='none' or 'to_go'"),
        Confirmed("OSPO 02ed2da", "advantages.ospo", "defaults"),
    ),
    "otb": (
        Confirmed("verl 0.9.1", "advantages.otb", "defaults; compact=True; zero_tail=True"),
    ),
    "otr": (
        Confirmed("TRL 1.16.0", "surrogates.otr_exact", "beta=0; tau=1"),
    ),
    "overlong_penalty": (
        Confirmed("AReaL 1.0.4", "rewards.overlong_penalty", "buffer=3; factor=0.5; max_length=6"),
        Confirmed("TRL 1.16.0", "rewards.overlong_penalty", "buffer=3; max_length=5"),
        Confirmed("tunix 0.1.7", "rewards.overlong_penalty", "buffer=3; factor=0.5; max_length=6"),
    ),
    "passk_training": (
        Confirmed("Passk_Training c3ba575", "advantages.passk_training", "k=1 or 2 or 3"),
    ),
    "pkpo": (
        Confirmed("maxrl c0698eb", "advantages.pkpo", "k=1 or 2 or 3; loo=True"),
    ),
    "ppo_clip": (
        Confirmed("AReaL 1.0.4", "surrogates.ppo_clip", "defaults"),
        Confirmed("MOSS-RLHF 4865d82", "surrogates.ppo_clip", "defaults"),
        Confirmed("rlax 0.1.9", "surrogates.ppo_clip", "defaults"),
        Confirmed("slime 0.3.1", "surrogates.ppo_clip", "defaults"),
        Confirmed("TRL 1.16.0", "surrogates.ppo_clip", "defaults"),
        Confirmed("tunix 0.1.7", "surrogates.ppo_clip", "defaults"),
        Confirmed("verl 0.9.1", "advantages.grpo", "defaults"),
        Confirmed("verl 0.9.1", "surrogates.dapo_clip", "dual_clip=None; eps_high=0.2"),
        Confirmed("verl 0.9.1", "surrogates.ppo_clip", "defaults"),
    ),
    "ppo_dual_clip": (
        Confirmed("AReaL 1.0.4", "surrogates.ppo_clip", "dual_clip=1.5"),
        Confirmed("slime 0.3.1", "surrogates.ppo_clip", "dual_clip=1.5"),
        Confirmed("TRL 1.16.0", "surrogates.ppo_clip", "dual_clip=1.5"),
        Confirmed("tunix 0.1.7", "surrogates.ppo_clip", "dual_clip=1.5"),
        Confirmed("verl 0.9.1", "surrogates.ppo_clip", "dual_clip=1.2 or 3"),
    ),
    "ppo_max": (
        Confirmed("MOSS-RLHF 4865d82", "advantages.gae", "gamma=0.98"),
        Confirmed("MOSS-RLHF 4865d82", "advantages.gae_returns", "gamma=0.98"),
        Confirmed("MOSS-RLHF 4865d82", "advantages.kl_shaped_rewards", "kl_coef=0.02"),
        Confirmed("MOSS-RLHF 4865d82", "advantages.score_scaler",
            "defaults; center=True; clip=0.8"),
        Confirmed("MOSS-RLHF 4865d82", "advantages.update_moments", "defaults"),
        Confirmed("MOSS-RLHF 4865d82", "surrogates.ppo_clip", "defaults"),
        Confirmed("MOSS-RLHF 4865d82", "surrogates.value_loss", "defaults"),
        Confirmed("verl 0.9.1", "advantages.kl_shaped_rewards", "kl_coef=0.1"),
    ),
    "reinforce": (
        Confirmed("rlax 0.1.9", "surrogates.reinforce", "defaults"),
        Confirmed("verl 0.9.1", "surrogates.reinforce", "defaults"),
    ),
    "reinforce_pp": (
        Confirmed("rlax 0.1.9", "advantages.reward_to_go", "gamma=0.9"),
        Confirmed("rlax 0.1.9", "advantages.terminal_rewards", "defaults"),
        Confirmed("slime 0.3.1", "advantages.kl_shaped_rewards", "kl_coef=0.1"),
        Confirmed("slime 0.3.1", "advantages.reward_to_go", "defaults; gamma=0.9"),
        Confirmed("verl 0.9.1", "advantages.reinforce_pp", "defaults; gamma=0.9"),
        Confirmed("verl 0.9.1", "advantages.whiten", "defaults; shift_mean=False"),
    ),
    "reinforce_pp_baseline": (
        Confirmed("verl 0.9.1", "advantages.reinforce_pp_baseline", "defaults"),
    ),
    "remax": (
        Confirmed("verl 0.9.1", "advantages.remax", "defaults"),
    ),
    "rloo": (
        Confirmed("AReaL 1.0.4", "advantages.rloo", "defaults"),
        Confirmed("TRL 1.16.0", "advantages.rloo", "defaults"),
        Confirmed("tunix 0.1.7", "advantages.rloo", "defaults"),
        Confirmed("verl 0.9.1", "advantages.rloo", "defaults; singleton='raw'"),
    ),
    "rollout_correction": (
        Confirmed("AReaL 1.0.4", "corrections.rollout_correction",
            "keep_denominator=True; reject=rejection_mask; weights=importance_weights"),
        Confirmed("slime 0.3.1", "corrections.importance_weights", "cap=1.25"),
        Confirmed("slime 0.3.1", "corrections.off_policy_sequence_mask", "threshold=0.1"),
        Confirmed("TRL 1.16.0", "corrections.importance_weights",
            "cap=1.3; floor=0.8; level='sequence'"),
        Confirmed("TRL 1.16.0", "corrections.off_policy_sequence_mask", "threshold=0.1"),
        Confirmed("TRL 1.16.0", "surrogates.ppo_clip", "defaults"),
        Confirmed("verl 0.9.1", "corrections.importance_weights",
            "cap=1.3 or 1.5; level='sequence'; normalize=True"),
        Confirmed("verl 0.9.1", "corrections.rejection_mask",
            "invert=True; level='sequence_max' or 'sequence_mean' or 'sequence_sum' or "
            "'token'; lower=0.7 or 0.8 or 0.9 or 0.95; statistic='k1' or 'k2' or 'k3'; "
            "upper=0.02 or 0.03 or 0.05 or 0.1 or 1.1 or 1.2 or 1.25 or 1.3"),
    ),
    "rover": (
        Confirmed("ROVER b0fa587", "surrogates.mean_log_probs", "defaults"),
        Confirmed("ROVER b0fa587", "surrogates.rover", "defaults; beta=0 or 0.7; rho=0.5 or 2"),
    ),
    "safe": (
        Confirmed("SAFE 183daf7", "regularizers.asymmetric_init", "defaults"),
        Confirmed("SAFE 183daf7", "regularizers.asymmetric_step", "defaults"),
        Confirmed("SAFE 183daf7", "regularizers.pid_init", "defaults"),
        Confirmed("SAFE 183daf7", "regularizers.pid_step", "defaults"),
        Confirmed("SAFE 183daf7", "regularizers.safe_init", "defaults"),
        Confirmed("SAFE 183daf7", "regularizers.safe_step", "defaults"),
        Confirmed("SAFE 183daf7", "regularizers.step_scale", "defaults"),
        Confirmed("SAFE 183daf7", "surrogates.soft_min", "defaults; alpha=0.01 or 100"),
    ),
    "salsa_soup_ref": (
        Confirmed("TRL 1.16.0", "regularizers.ema_reference", "rate=0.6"),
    ),
    "sapo": (
        Confirmed("AReaL 1.0.4", "surrogates.sapo", "tau_neg=4; tau_pos=0.5"),
        Confirmed("TRL 1.16.0", "surrogates.sapo", "defaults"),
        Confirmed("TRL 1.16.0", "surrogates.sapo_sequence", "defaults"),
        Confirmed("verl 0.9.1", "surrogates.sapo", "defaults; tau_neg=4; tau_pos=0.5"),
    ),
    "sdpo": (
        Confirmed("rlax 0.1.9", "surrogates.distillation_divergence", "alpha=0 or 1"),
        Confirmed("SDPO 0e6d510", "surrogates.sdpo",
            "defaults; alpha=0 or 0.2 or 1; is_clip=None; rest='renormalize'"),
        Confirmed("SDPO 0e6d510", "surrogates.sdpo_sampled", "defaults; is_clip=None"),
        Confirmed("TRL 1.16.0", "surrogates.sdpo",
            "alpha=0 or 0.3 or 1; is_clip=None; rest='none' or 'renormalize'"),
        Confirmed("TRL 1.16.0", "surrogates.sdpo_sampled", "defaults; is_clip=None"),
        Confirmed("TRL 1.16.0", "surrogates.support_log_probs", "defaults"),
        Confirmed("TRL 1.16.0", "surrogates.top_tokens", "count=3 or 5"),
    ),
    "spo_tracker": (
        Confirmed("verl-recipe 48ea0a7", "advantages.beta_tracker_init", "defaults"),
        Confirmed("verl-recipe 48ea0a7", "advantages.beta_tracker_update", "defaults"),
        Confirmed("verl-recipe 48ea0a7", "advantages.beta_tracker_value", "defaults"),
        Confirmed("verl-recipe 48ea0a7", "advantages.kl_forgetting", "defaults"),
        Confirmed("verl-recipe 48ea0a7", "advantages.spo", "defaults"),
        Confirmed("verl-recipe 48ea0a7", "advantages.uncertainty_sampling_weights", "defaults"),
    ),
    "trloo": (
        Confirmed("KernelGYM 3a84417", "advantages.trloo", "defaults; gamma=0.9"),
        Confirmed("KernelGYM 3a84417", "curation.prs_keep_prob", "defaults"),
    ),
    "value_loss": (
        Confirmed("AReaL 1.0.4", "surrogates.value_loss", "defaults"),
        Confirmed("MOSS-RLHF 4865d82", "surrogates.value_loss", "defaults"),
        Confirmed("rlax 0.1.9", "surrogates.value_loss", "huber=0.5"),
        Confirmed("tunix 0.1.7", "surrogates.value_loss", "defaults"),
        Confirmed("verl 0.9.1", "surrogates.value_loss", "defaults"),
    ),
    "vcpo": (
        Confirmed("vcpo c7f030f", "advantages.opob", "defaults"),
        Confirmed("vcpo c7f030f", "corrections.ess", "defaults"),
        Confirmed("vcpo c7f030f", "corrections.ess_lr_scale", "power=1; rho_base=0.9"),
    ),
    "vespo": (
        Confirmed("TRL 1.16.0", "surrogates.vespo", "defaults"),
    ),
    "xrpo": (
        Confirmed("grpo-composer 2c98d7e", "advantages.novelty_sharpening",
            "defaults; bonus=1; cap=100"),
    ),
}
# fmt: on
