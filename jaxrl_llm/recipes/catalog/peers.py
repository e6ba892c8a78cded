"""Names that peers use for functions and options of this library, one row per name.

A name is listed only if it was read in the peer's source, at the version below:
`python tests/golden/make/peer_names.py` checks it against an installed package or a checkout.
"""

import difflib
from typing import NamedTuple

# The versions that were read; of prime-rl a commit.
VERSIONS = {
    "TRL": "1.16.0",
    "verl": "0.9.1",
    "tunix": "0.1.7",
    "OpenRLHF": "0.11.2",
    "rlax": "0.1.9",
    "slime": "0.3.1",
    "prime-rl": "559b447",
}

NONE = "none"
"""Stands for equivalent code where this library has none."""


class PeerName(NamedTuple):
    """A setting of a peer, and its equivalent here.

    Attributes:
      peer: Key of ``VERSIONS``.
      setting: The option, class or function, with the name of its owner.
      value: The value of the option; "" if it takes a number or a switch.
      ours: Equivalent code, with ``jr`` for ``jaxrl_llm``; for a number, the equivalent option;
        ``NONE`` if there is none.
      keys: The methods that it belongs to, by their keys in the catalog.
      differs: Other differences, including default values; "" if there are none.
    """

    peer: str
    setting: str
    value: str
    ours: str
    keys: tuple[str, ...] = ()
    differs: str = ""

    def __str__(self) -> str:
        """The name as a config or command line has it, such as ``GRPOConfig.loss_type=dapo``."""
        return f"{self.setting}={self.value}" if self.value else self.setting


# fmt: off
PEER_NAMES = (
    PeerName("TRL", "GRPOConfig.loss_type", "grpo",
        "jr.recipes.grpo(scale_eps=1e-4, kl_coef=0.0)", ("grpo",),
        "TRL divides by all rows of a batch, ours by the rows that contain a token. TRL's beta is "
        "0 by default; the preset's kl_coef is 0.001."),
    PeerName("TRL", "GRPOConfig.loss_type", "bnpo",
        "jr.recipes.grpo(scale_eps=1e-4, kl_coef=0.0).replace(weights=jr.aggregate.token_mean)",
        ("grpo", "aggregate"),
        "TRL's mean is over the tokens of a microbatch, ours over those of the minibatch."),
    PeerName("TRL", "GRPOConfig.loss_type", "dapo",
        "jr.recipes.grpo(scale_eps=1e-4, kl_coef=0.0).replace(weights=jr.aggregate.token_mean)",
        ("grpo", "aggregate", "dapo_clip"),
        "In TRL, the name stands only for the clipped loss and the mean over all tokens: "
        "epsilon_high is 0.2 unless set, and no group is replaced. jr.recipes.dapo() is the "
        "paper's method, without its penalty of long responses."),
    PeerName("TRL", "GRPOConfig.loss_type", "dr_grpo",
        "jr.recipes.dr_grpo(length=512)", ("dr_grpo",),
        "TRL still divides rewards by the deviation of their group unless scale_rewards='none'. "
        "The length is max_completion_length; the rows are those of a microbatch, ours of the "
        "minibatch."),
    PeerName("TRL", "GRPOConfig.loss_type", "cispo",
        "jr.recipes.cispo(w_min=0.0, w_max=5.0, dynamic_sampling=False).replace(minibatches=1)",
        ("cispo",),
        "epsilon_high is the largest weight itself, not its distance from 1. Its default is "
        "epsilon, 0.2. There is no lower bound."),
    PeerName("TRL", "GRPOConfig.loss_type", "sapo",
        "jr.recipes.sapo(tau_pos=1.0, tau_neg=1.05).replace(minibatches=1)", ("sapo",),
        "TRL divides by all rows of a batch, ours by those with a token."),
    PeerName("TRL", "GRPOConfig.loss_type", "luspo",
        "jr.recipes.luspo(eps_low=0.2, eps_high=0.2)", ("luspo",),
        "TRL's epsilon stays 0.2 unless set; the paper's are 0.002 and 0.0025. Meant for "
        "importance_sampling_level='sequence'. TRL divides by all rows."),
    PeerName("TRL", "GRPOConfig.loss_type", "vespo",
        "jr.recipes.vespo().replace(minibatches=1)", ("vespo",)),
    PeerName("TRL", "GRPOConfig.sapo_temperature_pos", "",
        "jr.bind(jr.surrogates.sapo, tau_pos=1.0)", ("sapo",)),
    PeerName("TRL", "GRPOConfig.sapo_temperature_neg", "",
        "jr.bind(jr.surrogates.sapo, tau_neg=1.05)", ("sapo",)),
    PeerName("TRL", "GRPOConfig.vespo_k_pos", "",
        "jr.bind(jr.surrogates.vespo, k_pos=2.0)", ("vespo",)),
    PeerName("TRL", "GRPOConfig.vespo_lambda_pos", "",
        "jr.bind(jr.surrogates.vespo, lambda_pos=3.0)", ("vespo",)),
    PeerName("TRL", "GRPOConfig.vespo_k_neg", "",
        "jr.bind(jr.surrogates.vespo, k_neg=3.0)", ("vespo",)),
    PeerName("TRL", "GRPOConfig.vespo_lambda_neg", "",
        "jr.bind(jr.surrogates.vespo, lambda_neg=2.0)", ("vespo",)),
    PeerName("TRL", "GRPOConfig.importance_sampling_level", "sequence",
        "jr.recipes.gspo(eps_low=0.2, eps_high=0.2).replace(minibatches=1)", ("gspo",),
        "With loss_type='grpo'. TRL's epsilon stays 0.2 unless set; the paper's are 0.0003 and "
        "0.0004."),
    PeerName("TRL", "GRPOConfig.scale_rewards", "group",
        "jr.bind(jr.advantages.grpo, eps=1e-4)", ("grpo",)),
    PeerName("TRL", "GRPOConfig.scale_rewards", "batch",
        "jr.bind(jr.advantages.grpo, scale='batch', eps=1e-4)", ("grpo",)),
    PeerName("TRL", "GRPOConfig.scale_rewards", "none", "jr.advantages.dr_grpo", ("dr_grpo",)),
    PeerName("TRL", "GRPOConfig.scale_rewards", "True",
        "jr.bind(jr.advantages.grpo, eps=1e-4)", ("grpo",), "The same as 'group'."),
    PeerName("TRL", "GRPOConfig.scale_rewards", "False",
        "jr.advantages.dr_grpo", ("dr_grpo",), "The same as 'none'."),
    PeerName("TRL", "GRPOConfig.multi_objective_aggregation", "normalize_then_sum",
        "jr.advantages.gdpo", ("gdpo",),
        "The weights of the rewards are an option of the recipe, not of weighted_sum: "
        "jr.recipes.gdpo(weights=(('right', 1.0), ('length', -0.05)))."),
    PeerName("TRL", "GRPOConfig.multi_objective_aggregation", "sum_then_normalize",
        "jr.rewards.weighted_sum"),
    PeerName("TRL", "GRPOConfig.reward_weights", "", "jr.rewards.weighted_sum"),
    PeerName("TRL", "GRPOConfig.delta", "",
        "jr.bind(jr.surrogates.ppo_clip, dual_clip=1.5)", ("ppo_dual_clip",)),
    PeerName("TRL", "GRPOConfig.epsilon", "",
        "jr.bind(jr.surrogates.ppo_clip, eps_low=0.2, eps_high=0.2)", ("ppo_clip",)),
    PeerName("TRL", "GRPOConfig.epsilon_high", "",
        "jr.bind(jr.surrogates.ppo_clip, eps_high=0.28)", ("ppo_clip",),
        "TRL does not clamp the log ratio, ours is clamped to +-20."),
    PeerName("TRL", "GRPOConfig.beta", "",
        "jr.bind(jr.regularizers.kl_unbiased, coef=0.04)", ("kl_estimators",),
        "This is use_bias_correction_kl=True, TRL's default; False is "
        "jr.regularizers.kl_to_reference. TRL does not clamp the log ratio."),
    PeerName("TRL", "GRPOConfig.use_bias_correction_kl", "True",
        "jr.bind(jr.regularizers.kl_unbiased, coef=0.04)", ("kl_estimators",),
        "TRL's default; coef is beta."),
    PeerName("TRL", "GRPOConfig.use_bias_correction_kl", "False",
        "jr.bind(jr.regularizers.kl_to_reference, estimator='k3', coef=0.04)", ("kl_estimators",),
        "coef is beta. TRL does not clamp the log ratio."),
    PeerName("TRL", "GRPOConfig.entropy_coef", "",
        "jr.regularizers.entropy_bonus", ("entropy_bonus",),
        "TRL averages the bonus over the tokens of a microbatch, whatever the denominator of the "
        "loss; ours has the weights of the loss."),
    PeerName("TRL", "GRPOConfig.use_adaptive_entropy", "",
        "jr.regularizers.adaptive_entropy", ("entropy_bonus",),
        "A controller of the coefficient: computed=(jr.recipes.Computed('entropy_coef', "
        "jr.regularizers.adaptive_entropy(), 'controller'),), for the regularizer "
        "jr.connect(jr.regularizers.entropy_bonus, coef='entropy_coef'). TRL switches the bonus by "
        "the entropy of the previous step, ours by that of the current step."),
    PeerName("TRL", "GRPOConfig.entropy_target", "",
        "jr.regularizers.adaptive_entropy(target=0.2)", ("entropy_bonus",),
        "In nats per token."),
    PeerName("TRL", "GRPOConfig.entropy_coef_delta", "",
        "jr.regularizers.adaptive_entropy(delta=0.005)", ("entropy_bonus",)),
    PeerName("TRL", "GRPOConfig.entropy_coef_min", "",
        "jr.regularizers.adaptive_entropy(low=0.0)", ("entropy_bonus",)),
    PeerName("TRL", "GRPOConfig.entropy_coef_max", "",
        "jr.regularizers.adaptive_entropy(high=1.0)", ("entropy_bonus",)),
    PeerName("TRL", "GRPOConfig.top_entropy_quantile", "",
        "jr.connect(jr.bind(jr.curation.top_fraction_token_mask, fraction=0.2), "
        "scores='old_entropy')", (),
        "TRL masks only the policy loss: the other tokens stay in its denominator and in the KL "
        "term. In the slot selection, ours leaves them out of both. With "
        "importance_sampling_level='sequence' the ratio and the denominator of a sequence are of "
        "all its tokens in both; ours leaves out sequences without one that trains. TRL's "
        "entropies are of the "
        "policy being trained; old_entropy is of the policy at the start of the step. TRL keeps "
        "the tokens that reach an interpolated quantile; ours keeps a rounded share of the "
        "tokens."),
    PeerName("TRL", "GRPOConfig.mask_truncated_completions", "",
        "jr.curation.truncation_mask", ("overlong_penalty",),
        "In the slot selection, or as the option overlong_filter of jr.recipes.dapo."),
    PeerName("TRL", "GRPOConfig.sync_ref_model", "",
        "jr.bind(jr.regularizers.ema_reference, rate=0.6, every=512)", ("salsa_soup_ref",),
        "rate is ref_model_mixup_alpha and every is ref_model_sync_steps. TRL counts optimizer "
        "steps, ours batches of rollouts."),
    PeerName("TRL", "GRPOConfig.ref_model_mixup_alpha", "",
        "jr.bind(jr.regularizers.ema_reference, rate=0.6, every=512)", ("salsa_soup_ref",),
        "The share of the policy, 0.6 unless set; ours is 0.05."),
    PeerName("TRL", "GRPOConfig.ref_model_sync_steps", "",
        "jr.bind(jr.regularizers.ema_reference, rate=0.6, every=512)", ("salsa_soup_ref",),
        "512 unless set; ours is 1. TRL counts optimizer steps, ours batches of rollouts: divide "
        "by the optimizer steps of a batch."),
    PeerName("TRL", "GRPOConfig.vllm_importance_sampling_mode", "token_truncate",
        "jr.bind(jr.corrections.importance_weights, level='token', cap=3.0)",
        ("rollout_correction",)),
    PeerName("TRL", "GRPOConfig.vllm_importance_sampling_mode", "token_mask",
        "jr.bind(jr.corrections.masked_importance_weights, level='token', lower=0.0, upper=3.0)",
        ("icepop",)),
    PeerName("TRL", "GRPOConfig.vllm_importance_sampling_mode", "sequence_truncate",
        "jr.bind(jr.corrections.importance_weights, level='sequence', cap=3.0)",
        ("rollout_correction",)),
    PeerName("TRL", "GRPOConfig.vllm_importance_sampling_mode", "sequence_mask",
        "jr.bind(jr.corrections.masked_importance_weights, level='sequence', lower=0.0, "
        "upper=3.0)", ("icepop",)),
    PeerName("TRL", "GRPOConfig.vllm_importance_sampling_clip_max", "",
        "jr.bind(jr.corrections.masked_importance_weights, level='sequence', lower=0.0, "
        "upper=3.0)", ("icepop",),
        "In the modes that mask it is upper; in those that truncate, cap of "
        "jr.corrections.importance_weights. 3 unless set; ours are 2."),
    PeerName("TRL", "GRPOConfig.vllm_importance_sampling_clip_min", "",
        "jr.bind(jr.corrections.masked_importance_weights, level='sequence', lower=0.5, "
        "upper=3.0)", ("icepop",),
        "In the modes that mask it is lower; in those that truncate, floor of "
        "jr.corrections.importance_weights. TRL has no lower bound unless it is set."),
    PeerName("TRL", "GRPOConfig.off_policy_mask_threshold", "",
        "jr.corrections.off_policy_sequence_mask", ("rollout_correction",),
        "TRL compares the sampler with the policy being trained, ours with the policy at the "
        "start of the step. TRL masks only the policy loss: dropped sequences stay in the "
        "denominator and in the KL term. In the slot selection, ours leaves them out of both. "
        "TRL has no threshold unless it is set; ours is 0.5."),
    PeerName("TRL", "GRPOConfig.num_generations", "", "jr.train.SamplingConfig.group_size"),
    PeerName("TRL", "GRPOConfig.num_generations_eval", "",
        "jr.train.EvaluationConfig.samples", (), "Both default to the size of a group."),
    PeerName("TRL", "GRPOConfig.max_completion_length", "",
        "jr.train.SamplingConfig.max_new_tokens"),
    PeerName("TRL", "GRPOConfig.temperature", "", "jr.train.SamplingConfig.temperature"),
    PeerName("TRL", "GRPOConfig.top_p", "",
        "jr.train.SamplingConfig.top_p", (),
        "TRL filters only the sampler. Here, the trained policy is also renormalized over the "
        "kept tokens. 1 switches it off in TRL, None here."),
    PeerName("TRL", "GRPOConfig.top_k", "",
        "jr.train.SamplingConfig.top_k", (),
        "TRL filters only the sampler. Here, the trained policy is also renormalized over the "
        "kept tokens. 0 switches it off in TRL, None here."),
    PeerName("TRL", "GRPOConfig.min_p", "",
        "jr.train.SamplingConfig.min_p", (),
        "TRL filters only the sampler. Here, the trained policy is also renormalized over the "
        "kept tokens."),
    PeerName("TRL", "GRPOConfig.repetition_penalty", "",
        NONE, (), "Only a request to `jaxrl-llm serve` has it, not a run."),
    PeerName("TRL", "GRPOConfig.generation_batch_size", "",
        "jr.train.TrainConfig.prompts_per_step", (),
        "TRL counts completions; here, prompts are counted."),
    PeerName("TRL", "GRPOConfig.steps_per_generation", "",
        "jr.train.TrainConfig.minibatches", (),
        "TRL counts microbatches: minibatches is steps_per_generation / "
        "gradient_accumulation_steps, which is 1 unless set."),
    PeerName("TRL", "GRPOConfig.gradient_accumulation_steps", "",
        "jr.train.TrainConfig.microbatches", (),
        "TRL counts the microbatches of an optimizer step, ours those of a batch of rollouts: "
        "microbatches is steps_per_generation. A microbatch has whole groups here."),
    PeerName("TRL", "GRPOConfig.per_device_train_batch_size", "",
        "jr.train.TrainConfig.microbatches", (),
        "TRL gives the completions of a microbatch on one device, here the number of microbatches "
        "is given."),
    PeerName("TRL", "GRPOConfig.max_steps", "",
        "jr.train.TrainConfig.steps", (),
        "TRL counts optimizer steps, ours batches of rollouts, each with epochs x minibatches "
        "optimizer steps."),
    PeerName("TRL", "GRPOConfig.num_iterations", "", "jr.train.TrainConfig.epochs"),
    PeerName("TRL", "GRPOConfig.num_train_epochs", "",
        "jr.train.TrainConfig.steps", (),
        "TRL counts passes over the data, ours batches: prompts / prompts_per_step make a pass."),
    PeerName("TRL", "GRPOConfig.learning_rate", "", "jr.train.OptimizerConfig.learning_rate"),
    PeerName("TRL", "GRPOConfig.lr_scheduler_type", "",
        "jr.train.OptimizerConfig.decay_steps", (),
        "TRL's is a linear decay to 0 unless set; ours is constant unless decay_steps is set."),
    PeerName("TRL", "GRPOConfig.warmup_steps", "", "jr.train.OptimizerConfig.warmup_steps"),
    PeerName("TRL", "GRPOConfig.weight_decay", "", "jr.train.OptimizerConfig.weight_decay"),
    PeerName("TRL", "GRPOConfig.max_grad_norm", "",
        "jr.train.OptimizerConfig.max_grad_norm", (), "1 unless set, as here."),
    PeerName("TRL", "GRPOConfig.gradient_checkpointing", "", "jr.train.TrainConfig.remat"),
    PeerName("TRL", "GRPOConfig.bf16", "",
        "jr.train.TrainConfig.dtype", (), "TRL's default is bfloat16, ours float32."),
    PeerName("TRL", "GRPOConfig.output_dir", "", "jr.train.TrainConfig.run_dir"),
    PeerName("TRL", "GRPOConfig.seed", "", "jr.train.TrainConfig.seed"),
    PeerName("TRL", "GRPOConfig.save_steps", "",
        "jr.train.CheckpointConfig.every", (),
        "TRL counts optimizer steps, ours batches of rollouts; ours is 50."),
    PeerName("TRL", "GRPOConfig.eval_steps", "",
        "jr.train.EvaluationConfig.every", (),
        "TRL counts optimizer steps, ours batches of rollouts. A run also evaluates before the "
        "first and after the last step."),
    PeerName("TRL", "GRPOConfig.report_to", "",
        "jr.train.ReportConfig.sinks", (),
        "A tuple of 'tensorboard', 'trackio', 'wandb' or functions. metrics.jsonl is always "
        "written."),
    PeerName("TRL", "GRPOTrainer.peft_config", "",
        "jr.train.LoRAConfig.rank", (),
        "TRL's is an object of peft: r is rank, lora_alpha is alpha and target_modules is targets, "
        "which are regular expressions of paths here."),
    PeerName("TRL", "RLOOTrainer", "",
        "jr.recipes.rloo(kl_coef=0.05)", ("rloo",),
        "TRL clips the ratio of full sequences (epsilon 0.2); the preset is REINFORCE with the "
        "same advantage and penalty."),
    PeerName("TRL", "GMPOTrainer", "",
        "jr.recipes.gmpo().replace(minibatches=1)", ("gmpo",),
        "TRL's mean counts rows without a token, with a ratio of 1."),
    PeerName("TRL", "DPOConfig.loss_type", "sigmoid", "jr.recipes.dpo(beta=0.1)", ("dpo",)),
    PeerName("TRL", "DPOConfig.loss_type", "robust",
        "jr.recipes.pairwise(jr.bind(jr.preferences.dpo, label_smoothing=0.1, robust=True))",
        ("dpo",)),
    PeerName("TRL", "DPOConfig.loss_type", "sigmoid_norm",
        "jr.recipes.pairwise(jr.bind(jr.preferences.dpo, per_token=True))", ("dpo",)),
    PeerName("TRL", "DPOConfig.loss_type", "ipo", "jr.recipes.ipo()", ("ipo",)),
    PeerName("TRL", "DPOConfig.loss_type", "hinge",
        "jr.recipes.pairwise(jr.preferences.hinge)", ("slic",)),
    PeerName("TRL", "DPOConfig.loss_type", "exo_pair", "jr.recipes.exo_pair()", ("exo_pair",)),
    PeerName("TRL", "DPOConfig.loss_type", "nca_pair", "jr.recipes.nca()", ("nca",)),
    PeerName("TRL", "DPOConfig.loss_type", "bco_pair",
        "jr.recipes.pairwise(jr.preferences.bco)", ("bco",)),
    PeerName("TRL", "DPOConfig.loss_type", "sppo_hard",
        "jr.bind(jr.preferences.sppo, beta=0.1)", ("sppo",),
        "TRL's is the sum of the two squares, ours half of it, as in the authors' code. TRL's "
        "beta stays 0.1 unless set; ours is 0.001, as in that code."),
    PeerName("TRL", "DPOConfig.loss_type", "aot",
        "jr.recipes.aot()", ("aot",), "TRL ranks each microbatch, the preset the batch."),
    PeerName("TRL", "DPOConfig.loss_type", "aot_unpaired",
        "jr.preferences.aot_unpaired", ("aot",),
        "For a loop of your own; no recipe has it, since its ranks are over all pairs of a batch. "
        "TRL ranks each microbatch."),
    PeerName("TRL", "DPOConfig.loss_type", "apo_zero", "jr.recipes.apo(variant='zero')", ("apo",)),
    PeerName("TRL", "DPOConfig.loss_type", "apo_down", "jr.recipes.apo(variant='down')", ("apo",)),
    PeerName("TRL", "DPOConfig.loss_type", "discopop", "jr.recipes.discopop()", ("discopop",)),
    PeerName("TRL", "DPOConfig.loss_type", "sft",
        "jr.recipes.pairwise(jr.preferences.sft)", ("cpo",),
        "TRL's is the mean over all tokens of a batch, ours over the tokens of each response, "
        "then over the pairs."),
    PeerName("TRL", "DPOConfig.beta", "", "jr.recipes.dpo(beta=0.1)", ("dpo",)),
    PeerName("TRL", "DPOConfig.f_divergence_type", "reverse_kl",
        "jr.recipes.pairwise(jr.bind(jr.preferences.dpo, divergence='reverse_kl'))", ("dpo",)),
    PeerName("TRL", "DPOConfig.f_divergence_type", "forward_kl",
        "jr.recipes.pairwise(jr.bind(jr.preferences.dpo, divergence='forward_kl'))", ("dpo",),
        "Our exponential is bounded."),
    PeerName("TRL", "DPOConfig.f_divergence_type", "js_divergence",
        "jr.recipes.pairwise(jr.bind(jr.preferences.dpo, divergence='js'))", ("dpo",)),
    PeerName("TRL", "DPOConfig.f_divergence_type", "alpha_divergence",
        "jr.recipes.pairwise(jr.bind(jr.preferences.dpo, divergence='alpha'))", ("dpo",)),
    PeerName("TRL", "DPOConfig.loss_weights", "1.0, 1.0",
        "jr.recipes.dpo(likelihood=1.0)", ("dpo",),
        "With loss_type=['sigmoid', 'sft'] (RPO). TRL's likelihood is a mean over all tokens of a "
        "batch, ours over the tokens of each response, then over the pairs."),
    PeerName("TRL", "DPOConfig.ld_alpha", "", "jr.recipes.ld_dpo(alpha=0.5)", ("ld_dpo",)),
    PeerName("TRL", "DPOConfig.use_weighting", "",
        "jr.recipes.wpo(cap=None)", ("wpo",),
        "TRL computes the weights of each microbatch as it trains; the preset computes them "
        "before the step."),
    PeerName("TRL", "DPOConfig.precompute_ref_log_probs", "",
        "jr.train.TrainConfig.reference_logp", (),
        "The path of a file that later runs read."),
    PeerName("TRL", "KTOConfig.loss_type", "kto",
        "jr.recipes.kto().replace(collector=jr.curation.offline_labels())", ("kto",)),
    PeerName("TRL", "KTOConfig.loss_type", "apo_zero_unpaired",
        "jr.recipes.unpaired(jr.preferences.apo_zero_unpaired)", ("apo",)),
    PeerName("TRL", "CPOConfig.loss_type", "sigmoid",
        "jr.recipes.cpo()", ("cpo",), "TRL's likelihood is the mean over all tokens of a batch."),
    PeerName("TRL", "CPOConfig.loss_type", "hinge",
        "jr.recipes.slic(likelihood=0.0, per_token=False)", ("slic",),
        "With beta=1 and cpo_alpha=0; TRL's defaults are 0.1 and 1. TRL adds the log-probabilities "
        "of tokens; the preset takes their mean by default."),
    PeerName("TRL", "CPOConfig.loss_type", "simpo",
        "jr.recipes.simpo()", ("simpo",),
        "With cpo_alpha=0. TRL's beta is 0.1 and its simpo_gamma, which it divides by beta, 0.5."),
    PeerName("TRL", "CPOConfig.loss_type", "alphapo",
        "jr.recipes.pairwise(jr.bind(jr.preferences.simpo, alpha=0.25))", ("simpo",),
        "alpha is 0 unless set."),
    PeerName("TRL", "TPOConfig.loss_type", "sigmoid", "jr.recipes.tpo()", ("tpo",)),
    PeerName("TRL", "TPOConfig.loss_type", "tpo-l",
        "jr.recipes.tpo(gamma=0.5, per_token=True)", ("tpo",)),
    PeerName("TRL", "ORPOTrainer", "",
        "jr.recipes.orpo()", ("orpo",), "TRL's likelihood is also of the prompt."),
    PeerName("TRL", "OnlineDPOTrainer", "", "jr.recipes.online_dpo()", ("online_pref",)),
    PeerName("TRL", "RewardTrainer", "",
        "jr.recipes.reward_model()", ("rm_losses",),
        "TRL's center_rewards_coefficient is off unless set, the preset's centering is 0.01."),
    PeerName("TRL", "SFTTrainer", "",
        "jr.recipes.sft(column='completion')", ("sft",),
        "A row has one response: set group_size=1, and a reward or no evaluation. TRL also trains "
        "on whole texts and on the assistant's turns of conversations."),
    PeerName("TRL", "SFTConfig.loss_type", "dft",
        "jr.recipes.dft(column='completion')", ("dft", "otr"),
        "A row has one response: set group_size=1, and a reward or no evaluation."),
    PeerName("TRL", "GKDTrainer", "",
        "jr.recipes.gkd()", ("gkd",),
        "TRL takes data in place of samples with probability 1 - lmbda; the preset does so for a "
        "fixed number of rollouts."),
    PeerName("TRL", "IWOPDTrainer", "", "jr.recipes.iw_opd()", ("iw_opd",)),
    PeerName("TRL", "SDPOTrainer", "",
        "jr.recipes.sdpo(success=1.0).replace(surrogate=jr.surrogates.sdpo_sampled, "
        "weights=jr.aggregate.sequence_mean, computed=(jr.recipes.sdpo(success=1.0).computed[0], "
        "jr.recipes.Computed('teacher_token_logp', jr.surrogates.target_log_probs, 'teacher')))",
        ("sdpo",),
        "TRL's defaults: the sampled token alone, alpha 1, and a smallest reward of 1 for a "
        "solution. The preset jr.recipes.sdpo() has those of the authors: the top 100 tokens, "
        "alpha 0.5 and 0.5. TRL divides by all rows, ours by those with a teacher. TRL reads "
        "feedback only with include_environment_feedback, the preset whenever the reward has it "
        "and there is no solution."),
    PeerName("TRL", "SDPOConfig.distillation_mode", "topk_logits",
        "jr.recipes.sdpo(alpha=1.0, top=100, success=1.0).replace("
        "weights=jr.aggregate.sequence_mean)", ("sdpo",),
        "top is distillation_topk, which TRL requires. TRL renormalizes over the top tokens unless "
        "distillation_add_tail; ours adds their tail unless jr.surrogates.sdpo has "
        "rest='renormalize'. Its top tokens are of the policy being trained, ours of the policy "
        "at the start of the step."),
    PeerName("verl", "algorithm.adv_estimator", "gae",
        "jr.recipes.ppo(lam=1.0, value_eps=0.5, dual_clip=3.0).replace(epochs=1)",
        ("ppo_clip", "gae", "gae_token", "adaptive_kl"),
        "verl's defaults. jr.train.TrainConfig.critic is the optimizer of the critic. kl_coef is "
        "the coefficient of use_kl_in_reward."),
    PeerName("verl", "algorithm.adv_estimator", "grpo",
        "jr.recipes.grpo()", ("grpo",),
        "A group of one keeps its reward in verl; here it is 0 unless singleton='raw'. The preset "
        "has the paper's weighting and a KL penalty besides."),
    PeerName("verl", "algorithm.adv_estimator", "grpo_vectorized",
        "jr.advantages.grpo", ("grpo",),
        "A group of one keeps its reward in verl; here it is 0 unless singleton='raw'."),
    PeerName("verl", "algorithm.adv_estimator", "grpo_passk",
        "jr.recipes.grpo_passk()", ("grpo_passk",)),
    PeerName("verl", "algorithm.adv_estimator", "reinforce_plus_plus",
        "jr.recipes.reinforce_pp()", ("reinforce_pp",)),
    PeerName("verl", "algorithm.adv_estimator", "reinforce_plus_plus_baseline",
        "jr.recipes.reinforce_pp_baseline()", ("reinforce_pp_baseline",)),
    PeerName("verl", "algorithm.adv_estimator", "remax",
        "jr.recipes.remax(kl_coef=0.0)", ("remax",),
        "On masked positions verl leaves the bare return, ours is 0."),
    PeerName("verl", "algorithm.adv_estimator", "rloo",
        "jr.recipes.rloo()", ("rloo",),
        "A group of one keeps its reward in verl; here it is 0 unless singleton='raw'. The "
        "preset's surrogate is REINFORCE, verl's is the clipped ratio unless loss_mode says "
        "otherwise."),
    PeerName("verl", "algorithm.adv_estimator", "rloo_vectorized", "jr.advantages.rloo", ("rloo",)),
    PeerName("verl", "algorithm.adv_estimator", "opo",
        "jr.recipes.opo()", ("opo",),
        "A group of one keeps its reward in verl; here it is 0 unless singleton='raw'."),
    PeerName("verl", "algorithm.adv_estimator", "gpg",
        "jr.recipes.gpg(mode='nonzero_reward')", ("gpg",),
        "The paper's factor, mode='informative', is our default. A group of one keeps its reward "
        "in verl; here it is 0 unless singleton='raw'."),
    PeerName("verl", "algorithm.adv_estimator", "optimal_token_baseline",
        "jr.recipes.otb(zero_tail=True)", ("otb",)),
    PeerName("verl", "algorithm.adv_estimator", "tir_optimal_token_baseline",
        "jr.recipes.otb(zero_tail=True, compact=True)", ("otb",)),
    PeerName("verl", "algorithm.adv_estimator", "gdpo",
        "jr.advantages.gdpo_token", ("gdpo",),
        "The last normalization is over tokens; that of the preset gdpo, as in TRL, over "
        "rollouts."),
    PeerName("verl", "algorithm.norm_adv_by_std_in_grpo", "False",
        "jr.advantages.dr_grpo", ("dr_grpo",),
        "A group of one keeps its reward in verl; here it is 0 unless singleton='raw'."),
    PeerName("verl", "algorithm.use_kl_in_reward", "True",
        "jr.bind(jr.advantages.kl_shaped_rewards, kl_coef=0.001)", ("reinforce_pp",),
        "Rewards of tokens, for reward_to_go and gae. An estimator of whole responses reads their "
        "sum: jr.recipes.rloo(kl_coef=0.001); docs/coming_from/verl.md has that of grpo."),
    PeerName("verl", "algorithm.kl_ctrl.kl_coef", "",
        "jr.bind(jr.advantages.kl_shaped_rewards, kl_coef=0.001)", ("reinforce_pp",),
        "Only with use_kl_in_reward."),
    PeerName("verl", "algorithm.kl_penalty", "",
        "jr.bind(jr.advantages.kl_shaped_rewards, kl_coef=0.001, estimator='k1')",
        ("reinforce_pp",),
        "Only with use_kl_in_reward. 'kl' is k1, 'mse' k2 and 'low_var_kl' k3, which verl bounds "
        "by 10 here too. verl clamps the difference only in k3, ours is clamped to +-20."),
    PeerName("verl", "algorithm.kl_ctrl.type", "adaptive",
        "jr.regularizers.adaptive_kl", ("adaptive_kl",),
        "A controller of the coefficient: computed=(jr.recipes.Computed('kl_coef', "
        "jr.regularizers.adaptive_kl(), 'controller'),), for the advantage "
        "jr.connect(jr.advantages.kl_shaped_rewards, kl_coef='kl_coef') and what follows it in a "
        "chain. verl reads it only with use_kl_in_reward."),
    PeerName("verl", "algorithm.filter_groups.enable", "True",
        "jr.curation.refill(jr.curation.informative_groups)", ("dynamic_sampling", "dapo_clip"),
        "max_rounds is max_num_gen_batches, where 0 is no limit."),
    PeerName("verl", "algorithm.gamma", "",
        "jr.bind(jr.advantages.gae, gamma=1.0)", ("gae",),
        "The returns of the critic, jr.advantages.gae_returns, need the same number."),
    PeerName("verl", "algorithm.lam", "",
        "jr.bind(jr.advantages.gae, lam=1.0)", ("gae",),
        "Our default is 0.95, verl's 1. The returns of the critic, jr.advantages.gae_returns, need "
        "the same number."),
    PeerName("verl", "algorithm.rollout_correction.rollout_is", "token",
        "jr.bind(jr.corrections.importance_weights, level='token', cap=2.0)",
        ("rollout_correction",),
        "A threshold 'lower_upper' is jr.corrections.masked_importance_weights."),
    PeerName("verl", "algorithm.rollout_correction.rollout_is", "sequence",
        "jr.bind(jr.corrections.importance_weights, level='sequence', cap=2.0)",
        ("rollout_correction",),
        "A threshold 'lower_upper' is jr.corrections.masked_importance_weights."),
    PeerName("verl", "algorithm.rollout_correction.rollout_is_threshold", "",
        "jr.bind(jr.corrections.importance_weights, cap=2.0)", ("rollout_correction",),
        "A threshold 'lower_upper' is jr.corrections.masked_importance_weights."),
    PeerName("verl", "algorithm.rollout_correction.rollout_is_batch_normalize", "True",
        "jr.bind(jr.corrections.importance_weights, normalize=True)", ("rollout_correction",)),
    PeerName("verl", "algorithm.rollout_correction.rollout_rs_threshold", "",
        "jr.bind(jr.corrections.rejection_mask, statistic='k3', level='token', upper=0.1)",
        ("rollout_correction",),
        "Of k2 and k3 it is upper; of k1 'lower_upper' is both, and a number gives 1 / upper for "
        "lower. verl's default trainer still counts rejected tokens in its mean over tokens, as "
        "keep_denominator=True of jr.corrections.rollout_correction does."),
    PeerName("verl", "algorithm.rollout_correction.bypass_mode", "True",
        "jr.recipes.grpo(kl_coef=0.0).replace(surrogate=jr.connect(jr.bind(jr.surrogates.ppo_clip, "
        "dual_clip=3.0), old_logp='behavior_logp'), weights=jr.aggregate.token_mean)",
        ("rollout_correction",),
        "As loss_type='ppo_clip' has it: the old policy is the one that sampled. The dual clip is "
        "clip_ratio_c. verl's default trainer keeps loss_mode and neither weighs nor rejects; the "
        "older one (trainer.use_v1=False) sets loss_mode='bypass_mode', which rejects."),
    PeerName("verl", "algorithm.rollout_correction.loss_type", "reinforce",
        "jr.recipes.grpo(kl_coef=0.0).replace(surrogate=jr.connect(jr.bind(jr.surrogates.cispo, "
        "w_min=0.0, w_max=2.0), old_logp='behavior_logp'), weights=jr.aggregate.token_mean)", (),
        "With bypass_mode=True and rollout_is='token'; w_max is rollout_is_threshold. Without "
        "rollout_is it is jr.surrogates.reinforce. verl's default trainer does not read it, the "
        "older one (trainer.use_v1=False) does."),
    PeerName("verl", "algorithm.use_pf_ppo", "True",
        "jr.recipes.pf_ppo(rule='power').replace(minibatches=1)", (),
        "verl draws over the batch after its advantages (gae alone), ours over each group before "
        "them. reweight_method='max_min' is 'best_worst' and 'max_random' 'best_random'."),
    PeerName("verl", "algorithm.rollout_correction.rollout_rs", "token_k1",
        "jr.bind(jr.corrections.rejection_mask, statistic='k1', level='token', lower=0.5, "
        "upper=2.0, invert=True)", ("rollout_correction",),
        "verl's text speaks of old / behavior, its code tests the inverse, as invert=True does."),
    PeerName("verl", "algorithm.rollout_correction.rollout_rs", "token_k2",
        "jr.bind(jr.corrections.rejection_mask, statistic='k2', level='token', upper=0.1)",
        ("rollout_correction",)),
    PeerName("verl", "algorithm.rollout_correction.rollout_rs", "token_k3",
        "jr.bind(jr.corrections.rejection_mask, statistic='k3', level='token', upper=0.1)",
        ("rollout_correction",)),
    PeerName("verl", "algorithm.rollout_correction.rollout_rs", "seq_sum_k1",
        "jr.bind(jr.corrections.rejection_mask, statistic='k1', level='sequence_sum', lower=0.5, "
        "upper=2.0, invert=True)", ("rollout_correction",),
        "verl's text speaks of old / behavior, its code tests the inverse, as invert=True does."),
    PeerName("verl", "algorithm.rollout_correction.rollout_rs", "seq_sum_k2",
        "jr.bind(jr.corrections.rejection_mask, statistic='k2', level='sequence_sum', upper=0.1)",
        ("rollout_correction",)),
    PeerName("verl", "algorithm.rollout_correction.rollout_rs", "seq_sum_k3",
        "jr.bind(jr.corrections.rejection_mask, statistic='k3', level='sequence_sum', upper=0.1)",
        ("rollout_correction",)),
    PeerName("verl", "algorithm.rollout_correction.rollout_rs", "seq_mean_k1",
        "jr.bind(jr.corrections.rejection_mask, statistic='k1', level='sequence_mean', lower=0.5, "
        "upper=2.0, invert=True)", ("rollout_correction",),
        "verl's text speaks of old / behavior, its code tests the inverse, as invert=True does."),
    PeerName("verl", "algorithm.rollout_correction.rollout_rs", "seq_mean_k2",
        "jr.bind(jr.corrections.rejection_mask, statistic='k2', level='sequence_mean', upper=0.1)",
        ("rollout_correction",)),
    PeerName("verl", "algorithm.rollout_correction.rollout_rs", "seq_mean_k3",
        "jr.bind(jr.corrections.rejection_mask, statistic='k3', level='sequence_mean', upper=0.1)",
        ("rollout_correction",)),
    PeerName("verl", "algorithm.rollout_correction.rollout_rs", "seq_max_k2",
        "jr.bind(jr.corrections.rejection_mask, statistic='k2', level='sequence_max', upper=0.1)",
        ("rollout_correction",)),
    PeerName("verl", "algorithm.rollout_correction.rollout_rs", "seq_max_k3",
        "jr.bind(jr.corrections.rejection_mask, statistic='k3', level='sequence_max', upper=0.1)",
        ("rollout_correction",)),
    PeerName("verl", "actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla",
        "jr.bind(jr.surrogates.ppo_clip, dual_clip=3.0)", ("ppo_clip", "ppo_dual_clip"),
        "verl has a dual clip of 3 unless clip_ratio_c says otherwise; ours has none by default."),
    PeerName("verl", "actor_rollout_ref.actor.policy_loss.loss_mode", "dppo_tv",
        "jr.recipes.dppo_tv()", ("dppo_tv",),
        "The bounds are clip_ratio_low and clip_ratio_high, 0.2 unless set, and the ratio is "
        "bounded by clip_ratio_c, 3 unless set; ours are those of verl's example, with its "
        "centered advantages and 8 minibatches. verl's ratio is to the policy at the start of the "
        "step unless bypass_mode, ours to the policy that sampled."),
    PeerName("verl", "actor_rollout_ref.actor.policy_loss.loss_mode", "dppo_kl",
        "jr.recipes.dppo_kl()", ("dppo_kl",),
        "The bounds are clip_ratio_low and clip_ratio_high, 0.2 unless set, and the ratio is "
        "bounded by clip_ratio_c, 3 unless set; ours are those of verl's example, with its "
        "centered advantages and 8 minibatches. verl's ratio is to the policy at the start of the "
        "step unless bypass_mode, ours to the policy that sampled."),
    PeerName("verl", "actor_rollout_ref.actor.policy_loss.loss_mode", "gspo",
        "jr.recipes.gspo().replace(minibatches=1)", ("gspo",),
        "The bounds are clip_ratio_low and clip_ratio_high, 0.2 unless set, and the mean is over "
        "tokens unless loss_agg_mode='seq-mean-token-mean'."),
    PeerName("verl", "actor_rollout_ref.actor.policy_loss.loss_mode", "sapo",
        "jr.recipes.sapo().replace(minibatches=1)", ("sapo",),
        "The mean is over sequences, whatever loss_agg_mode is. verl's trainer divides by all rows "
        "of a minibatch, ours by those with a token."),
    PeerName("verl", "actor_rollout_ref.actor.tau_pos", "",
        "jr.bind(jr.surrogates.sapo, tau_pos=1.0)", ("sapo",)),
    PeerName("verl", "actor_rollout_ref.actor.tau_neg", "",
        "jr.bind(jr.surrogates.sapo, tau_neg=1.05)", ("sapo",)),
    PeerName("verl", "actor_rollout_ref.actor.policy_loss.loss_mode", "gpg",
        "jr.surrogates.reinforce", ("reinforce", "gpg")),
    PeerName("verl", "actor_rollout_ref.actor.policy_loss.loss_mode", "clip_cov",
        "jr.recipes.clip_cov().replace(minibatches=1)", ("clip_cov",),
        "verl does not clamp the log ratio here; its clip_ratio is 0.2 unless set, the preset's "
        "1, as in the paper's script."),
    PeerName("verl", "actor_rollout_ref.actor.policy_loss.loss_mode", "kl_cov",
        "jr.recipes.kl_cov(ratio=0.0002, coef=0.1).replace(minibatches=1)", ("kl_cov",),
        "verl's defaults, ours are the paper's 0.002 and 1. verl does not clamp the log ratio "
        "here."),
    PeerName("verl", "actor_rollout_ref.actor.policy_loss.loss_mode", "geo_mean",
        "jr.recipes.gmpo(eps_low=0.2, eps_high=0.2).replace(minibatches=1)", ("gmpo",),
        "The bounds are of the log ratio, 0.2 unless set; the paper's are 0.4. verl's mean is over "
        "all rows of a microbatch, whatever loss_agg_mode is, and its microbatches add up. Ours is "
        "over the rows of the minibatch with a token."),
    PeerName("verl", "actor_rollout_ref.actor.policy_loss.loss_mode", "cispo",
        "jr.recipes.cispo(dynamic_sampling=False, **jr.surrogates.cispo_bounds(eps_low=0.2, "
        "eps_high=0.2)).replace(minibatches=1)", ("cispo",),
        "verl's bounds are distances from 1."),
    PeerName("verl", "actor_rollout_ref.actor.policy_loss.loss_mode", "dro",
        "jr.recipes.grpo().replace(surrogate=jr.bind(jr.surrogates.cispo, w_min=1.0, w_max=1.0), "
        "regularizers=(jr.bind(jr.regularizers.kl_to_reference, estimator='k2', coef=1.0),), "
        "reference=jr.bind(jr.regularizers.reset_reference, every=1), "
        "weights=jr.aggregate.token_mean)", (),
        "coef is dro_beta, which verl requires. The reference is the policy at the start of the "
        "step: the square of the log ratio to it is k2. The term acts from a batch's second update "
        "on: set minibatches. With both bounds 1, cispo is the plain policy gradient. verl does "
        "not clamp the log ratio."),
    PeerName("verl", "actor_rollout_ref.actor.loss_agg_mode", "token-mean",
        "jr.aggregate.token_mean", ("aggregate",)),
    PeerName("verl", "actor_rollout_ref.actor.loss_agg_mode", "seq-mean-token-mean",
        "jr.aggregate.sequence_mean", ("aggregate",),
        "verl's trainer divides by all rows of a minibatch, ours by those with a token, as verl's "
        "function does without the trainer."),
    PeerName("verl", "actor_rollout_ref.actor.loss_agg_mode", "seq-mean-token-sum",
        "jr.aggregate.sequence_sum", ("aggregate",),
        "verl's trainer divides by all rows of a minibatch, ours by those with a token, as verl's "
        "function does without the trainer."),
    PeerName("verl", "actor_rollout_ref.actor.loss_agg_mode", "seq-mean-token-sum-norm",
        "jr.bind(jr.aggregate.fixed_length, length=512)", ("aggregate",),
        "verl's constant is loss_scale_factor, or the padded length. Its trainer divides by all "
        "rows of a minibatch, as ours does. Its function without the trainer divides by the rows "
        "with a token, as jr.aggregate.sequence_sum_norm does."),
    PeerName("verl", "actor_rollout_ref.actor.loss_agg_mode", "token-sum",
        "jr.aggregate.token_sum", ("aggregate",)),
    PeerName("verl", "actor_rollout_ref.actor.loss_scale_factor", "",
        "jr.bind(jr.aggregate.fixed_length, length=512)", ("aggregate",),
        "Only with loss_agg_mode='seq-mean-token-sum-norm'; the padded length unless set."),
    PeerName("verl", "actor_rollout_ref.actor.use_kl_loss", "True",
        "jr.bind(jr.regularizers.kl_to_reference, estimator='k3', cap=10.0, coef=0.001)",
        ("kl_estimators",),
        "verl's defaults. A preset's kl_coef is the same term without the bound of 10."),
    PeerName("verl", "actor_rollout_ref.actor.kl_loss_type", "kl",
        "jr.bind(jr.regularizers.kl_to_reference, estimator='k1')", ("kl_estimators",),
        "verl does not clamp the difference, ours is clamped to +-20."),
    PeerName("verl", "actor_rollout_ref.actor.kl_loss_type", "k1",
        "jr.bind(jr.regularizers.kl_to_reference, estimator='k1')", ("kl_estimators",),
        "verl does not clamp the difference, ours is clamped to +-20."),
    PeerName("verl", "actor_rollout_ref.actor.kl_loss_type", "abs",
        "jr.bind(jr.regularizers.kl_to_reference, estimator='abs')", ("kl_estimators",),
        "verl does not clamp the difference, ours is clamped to +-20."),
    PeerName("verl", "actor_rollout_ref.actor.kl_loss_type", "mse",
        "jr.bind(jr.regularizers.kl_to_reference, estimator='k2')", ("kl_estimators",),
        "verl does not clamp the difference, ours is clamped to +-20."),
    PeerName("verl", "actor_rollout_ref.actor.kl_loss_type", "k2",
        "jr.bind(jr.regularizers.kl_to_reference, estimator='k2')", ("kl_estimators",),
        "verl does not clamp the difference, ours is clamped to +-20."),
    PeerName("verl", "actor_rollout_ref.actor.kl_loss_type", "low_var_kl",
        "jr.bind(jr.regularizers.kl_to_reference, estimator='k3', cap=10.0)", ("kl_estimators",),
        "verl bounds the estimate by 10, as cap=10.0 does."),
    PeerName("verl", "actor_rollout_ref.actor.kl_loss_type", "k3",
        "jr.bind(jr.regularizers.kl_to_reference, estimator='k3', cap=10.0)", ("kl_estimators",),
        "verl bounds the estimate by 10, as cap=10.0 does."),
    PeerName("verl", "actor_rollout_ref.actor.kl_loss_type", "k1+",
        "jr.bind(jr.regularizers.kl_to_reference, estimator='k1+')", ("kl_estimators",),
        "verl does not clamp the difference, ours is clamped to +-20."),
    PeerName("verl", "actor_rollout_ref.actor.kl_loss_type", "k3+",
        "jr.bind(jr.regularizers.kl_to_reference, estimator='k3+', cap=10.0)", ("kl_estimators",),
        "verl bounds the estimate by 10, as cap=10.0 does."),
    PeerName("verl", "actor_rollout_ref.actor.kl_loss_coef", "",
        "jr.bind(jr.regularizers.kl_to_reference, coef=0.001)", ("kl_estimators",)),
    PeerName("verl", "actor_rollout_ref.actor.entropy_coeff", "",
        "jr.regularizers.entropy_bonus", ("entropy_bonus",)),
    PeerName("verl", "actor_rollout_ref.actor.clip_ratio", "",
        "jr.bind(jr.surrogates.ppo_clip, eps_low=0.2, eps_high=0.2)", ("ppo_clip",),
        "In verl it has an effect only where clip_ratio_low or clip_ratio_high is null; both are "
        "0.2 unless set."),
    PeerName("verl", "actor_rollout_ref.actor.clip_ratio_low", "",
        "jr.bind(jr.surrogates.ppo_clip, eps_low=0.2)", ("ppo_clip",)),
    PeerName("verl", "actor_rollout_ref.actor.clip_ratio_high", "",
        "jr.bind(jr.surrogates.ppo_clip, eps_high=0.2)", ("ppo_clip",)),
    PeerName("verl", "actor_rollout_ref.actor.clip_ratio_c", "",
        "jr.bind(jr.surrogates.ppo_clip, dual_clip=3.0)", ("ppo_dual_clip",),
        "3 unless set; ours has none by default."),
    PeerName("verl", "actor_rollout_ref.actor.ppo_epochs", "", "jr.train.TrainConfig.epochs"),
    PeerName("verl", "actor_rollout_ref.actor.ppo_mini_batch_size", "",
        "jr.train.TrainConfig.minibatches", (),
        "verl gives the prompts of a minibatch, here their number is given."),
    PeerName("verl", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "",
        "jr.train.TrainConfig.microbatches", (),
        "verl gives the rollouts of a microbatch on one device, here the number of microbatches of "
        "a batch is given."),
    PeerName("verl", "actor_rollout_ref.actor.use_dynamic_bsz", "True",
        "jr.train.TrainConfig.tokens_per_microbatch"),
    PeerName("verl", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "",
        "jr.train.TrainConfig.tokens_per_microbatch", (),
        "Only with use_dynamic_bsz; 16384 unless set."),
    PeerName("verl", "actor_rollout_ref.actor.optim.lr", "",
        "jr.train.OptimizerConfig.learning_rate"),
    PeerName("verl", "actor_rollout_ref.actor.optim.weight_decay", "",
        "jr.train.OptimizerConfig.weight_decay", (), "0.01 unless set; ours is 0."),
    PeerName("verl", "actor_rollout_ref.actor.optim.clip_grad", "",
        "jr.train.OptimizerConfig.max_grad_norm", (), "1 unless set, as here."),
    PeerName("verl", "actor_rollout_ref.actor.grad_clip", "",
        "jr.train.OptimizerConfig.max_grad_norm", (),
        "verl's engines read optim.clip_grad, and not this option."),
    PeerName("verl", "actor_rollout_ref.rollout.n", "",
        "jr.train.SamplingConfig.group_size", (), "1 unless set; ours is 8."),
    PeerName("verl", "actor_rollout_ref.rollout.temperature", "",
        "jr.train.SamplingConfig.temperature"),
    PeerName("verl", "actor_rollout_ref.rollout.top_p", "",
        "jr.train.SamplingConfig.top_p", (),
        "verl filters only the sampler. Here, the trained policy is also renormalized over the "
        "kept tokens. 1 switches it off in verl, None here."),
    PeerName("verl", "actor_rollout_ref.rollout.top_k", "",
        "jr.train.SamplingConfig.top_k", (),
        "verl filters only the sampler. Here, the trained policy is also renormalized over the "
        "kept tokens. -1 switches it off in verl, None here."),
    PeerName("verl", "data.train_batch_size", "", "jr.train.TrainConfig.prompts_per_step"),
    PeerName("verl", "data.max_response_length", "", "jr.train.SamplingConfig.max_new_tokens"),
    PeerName("verl", "data.max_prompt_length", "",
        NONE, (),
        "The model's context is the limit: a prompt that leaves no room for max_new_tokens ends "
        "the run before its first step. verl leaves longer prompts out with "
        "filter_overlong_prompts."),
    PeerName("verl", "critic.optim.lr", "",
        "jr.train.TrainConfig.critic", (),
        "Its jr.train.OptimizerConfig; None has the options of the policy's. 1e-5 unless set."),
    PeerName("verl", "trainer.critic_warmup", "",
        "jr.bind(jr.recipes.Critic, warmup=9)", (),
        "As for critic_warmup=10: verl counts steps from 1 and updates the policy from step "
        "critic_warmup on. It also updates the coefficient of the KL in these steps."),
    PeerName("verl", "actor_rollout_ref.model.lora_rank", "",
        "jr.train.LoRAConfig.rank", (),
        "0 switches it off in verl, None here. lora_alpha is alpha: 16 unless set, ours 32."),
    PeerName("verl", "trainer.save_freq", "",
        "jr.train.CheckpointConfig.every", (),
        "-1 unless set, which saves nothing; ours is 50, and 0 saves only the last step."),
    PeerName("verl", "trainer.test_freq", "",
        "jr.train.EvaluationConfig.every", (),
        "-1 switches it off in verl, 0 here. A run also evaluates before the first and after the "
        "last step."),
    PeerName("verl", "trainer.logger", "",
        "jr.train.ReportConfig.sinks", (),
        "A tuple of 'tensorboard', 'trackio', 'wandb' or functions. The console and metrics.jsonl "
        "are always written."),
    PeerName("verl", "trainer.total_epochs", "",
        "jr.train.TrainConfig.steps", (),
        "verl counts passes over the data, ours batches: prompts / prompts_per_step make a pass."),
    PeerName("verl", "trainer.total_training_steps", "", "jr.train.TrainConfig.steps"),
    PeerName("verl", "critic.cliprange_value", "",
        "jr.bind(jr.surrogates.value_loss, eps=0.5)", ("value_loss",),
        "verl's default is 0.5, ours 0.2."),
    PeerName("tunix", "GRPOConfig.advantage_estimator", "grpo", "jr.advantages.grpo", ("grpo",)),
    PeerName("tunix", "GRPOConfig.advantage_estimator", "rloo", "jr.advantages.rloo", ("rloo",)),
    PeerName("tunix", "GRPOConfig.advantage_estimator", "drgrpo",
        "jr.advantages.dr_grpo", ("dr_grpo",)),
    PeerName("tunix", "GRPOConfig.policy_loss_fn", "grpo",
        "jr.surrogates.ppo_clip", ("ppo_clip", "grpo")),
    PeerName("tunix", "GRPOConfig.policy_loss_fn", "ppo", "jr.surrogates.ppo_clip", ("ppo_clip",)),
    PeerName("tunix", "GRPOConfig.loss_algo", "gspo-token",
        "jr.recipes.gspo(eps_low=0.2, eps_high=0.2).replace(minibatches=1)", ("gspo_token", "gspo"),
        "tunix clamps the log ratio of each token before the mean, ours the mean. Its epsilon "
        "stays 0.2 unless set."),
    PeerName("tunix", "GRPOConfig.loss_agg_mode", "token-mean",
        "jr.aggregate.token_mean", ("aggregate",)),
    PeerName("tunix", "GRPOConfig.loss_agg_mode", "sequence-mean-token-mean",
        "jr.aggregate.sequence_mean", ("aggregate",)),
    PeerName("tunix", "GRPOConfig.loss_agg_mode", "sequence-mean-token-scale",
        "jr.bind(jr.aggregate.sequence_sum_norm, length=512)", ("aggregate",),
        "The name differs from verl's for the same number."),
    PeerName("tunix", "GRPOConfig.loss_agg_mode", "seq-mean-token-sum",
        "jr.aggregate.sequence_sum", ("aggregate",)),
    PeerName("tunix", "GRPOConfig.loss_agg_mode", "sequence-mean-token-sum-norm",
        "jr.aggregate.token_sum", ("aggregate",),
        "Divided by a constant, or the rows with a token; verl's mode of this name divides by the "
        "rows and a length."),
    PeerName("tunix", "GRPOConfig.kl_loss_mode", "kl",
        "jr.bind(jr.regularizers.kl_to_reference, estimator='k1', coef=0.04)", ("kl_estimators",),
        "tunix clamps the estimate by kl_clamp_value alone, ours the difference to +-20."),
    PeerName("tunix", "GRPOConfig.kl_loss_mode", "mse_kl",
        "jr.bind(jr.regularizers.kl_to_reference, estimator='k2', coef=0.04)", ("kl_estimators",),
        "tunix clamps the estimate by kl_clamp_value alone, ours the difference to +-20."),
    PeerName("tunix", "GRPOConfig.kl_loss_mode", "low_var_kl",
        "jr.bind(jr.regularizers.kl_to_reference, estimator='k3', coef=0.04)", ("kl_estimators",),
        "tunix clamps the estimate by kl_clamp_value alone, ours the difference to +-20."),
    PeerName("tunix", "GRPOConfig.beta", "",
        "jr.bind(jr.regularizers.kl_to_reference, estimator='k1', coef=0.04)", ("kl_estimators",),
        "tunix's default is k1, whose expected gradient on policy is zero; that of the preset "
        "grpo is k3 with 0.001."),
    PeerName("tunix", "GRPOConfig.epsilon", "",
        "jr.bind(jr.surrogates.ppo_clip, eps_low=0.2, eps_high=0.2)", ("ppo_clip",)),
    PeerName("tunix", "GRPOConfig.num_generations", "",
        "jr.train.SamplingConfig.group_size", (), "2 unless set; ours is 8."),
    PeerName("tunix", "GRPOConfig.num_iterations", "", "jr.train.TrainConfig.epochs"),
    PeerName("tunix", "GRPOConfig.sampler_is", "token",
        "jr.bind(jr.corrections.importance_weights, level='token', cap=2.0)",
        ("rollout_correction",)),
    PeerName("tunix", "GRPOConfig.degenerate_group_masking", "",
        "jr.curation.informative_groups", ("dynamic_sampling",)),
    PeerName("tunix", "GRPOLearner", "",
        "jr.recipes.grpo(kl_coef=0.04, kl_estimator='k1')", ("grpo",),
        "tunix's KL is k1, whose expected gradient on policy is zero; ours is k3 by default."),
    PeerName("tunix", "DrGRPOLearner", "",
        "jr.recipes.dr_grpo(length=512).replace(weights=jr.bind(jr.aggregate.sequence_sum_norm, "
        "length=512))", ("dr_grpo",),
        "tunix divides by the rows with a token, the preset by all rows. Its config keeps "
        "beta=0.04."),
    PeerName("tunix", "DAPOLearner", "",
        "jr.recipes.dapo(dual_clip=None, dynamic_sampling=False).replace(minibatches=1)",
        ("dapo_clip",),
        "tunix replaces no group yet, and counts its overlong buffer in characters; the preset "
        "does replace groups, with a dual clip of 10."),
    PeerName("tunix", "PPOLearner", "",
        "jr.recipes.ppo(kl_coef=0.04, kl_estimator='k3').replace(epochs=1)",
        ("ppo_clip", "gae", "gae_token", "adaptive_kl"),
        "jr.train.TrainConfig.critic is the optimizer of the critic. tunix clamps the estimate of "
        "the KL by kl_clamp_value alone, ours the difference to +-20."),
    PeerName("OpenRLHF", "--algo.advantage.estimator", "gae",
        "jr.recipes.ppo(kl_coef=0.01, lam=1.0, value_eps=0.5).replace(epochs=1)",
        ("ppo_clip", "gae", "gae_token", "adaptive_kl"),
        "jr.train.TrainConfig.critic is the optimizer of the critic. OpenRLHF whitens by the "
        "variance over n tokens, clips rewards to +-10, and counts masked tokens inside a response "
        "as steps."),
    PeerName("OpenRLHF", "--algo.advantage.estimator", "reinforce",
        "jr.recipes.reinforce_pp(kl_coef=0.01)", ("reinforce_pp",),
        "OpenRLHF whitens by the variance over n tokens, ours over n - 1. Its default KL "
        "coefficient is 0.01, the preset's 0."),
    PeerName("OpenRLHF", "--algo.advantage.estimator", "rloo",
        "jr.recipes.rloo(kl_coef=0.01)", ("rloo",),
        "OpenRLHF clips the ratio, the preset is REINFORCE. The penalty is off its rewards with "
        "--algo.kl.use_loss."),
    PeerName("OpenRLHF", "--algo.advantage.estimator", "reinforce_baseline",
        "jr.recipes.reinforce_pp_baseline()", ("reinforce_pp_baseline",),
        "OpenRLHF whitens by the variance over n tokens, ours over n - 1, and takes 0.01 times k1 "
        "off the rewards of tokens unless --algo.kl.use_loss."),
    PeerName("OpenRLHF", "--algo.advantage.estimator", "group_norm",
        "jr.bind(jr.advantages.grpo, eps=1e-9)", ("grpo",),
        "OpenRLHF gives a group of equal rewards its rounding over 1e-9; ours is 0."),
    PeerName("OpenRLHF", "--algo.advantage.estimator", "dr_grpo",
        "jr.advantages.dr_grpo", ("dr_grpo",),
        "OpenRLHF's name is the advantage alone; the constant length is not in its weightings."),
    PeerName("OpenRLHF", "--algo.advantage.estimator", "flash_reinforce", "jr.advantages.center"),
    PeerName("OpenRLHF", "--actor.policy_loss_type", "ppo",
        "jr.surrogates.ppo_clip", ("ppo_clip",)),
    PeerName("OpenRLHF", "--actor.policy_loss_type", "gspo",
        "jr.recipes.gspo(eps_low=0.2, eps_high=0.2).replace(minibatches=1)", ("gspo",),
        "The bounds are --actor.eps_clip, 0.2 unless set; the paper's are 0.0003 and 0.0004."),
    PeerName("OpenRLHF", "--actor.loss_agg_mode", "token-mean",
        "jr.aggregate.token_mean", ("aggregate",)),
    PeerName("OpenRLHF", "--actor.loss_agg_mode", "seq-mean-token-mean",
        "jr.aggregate.sequence_mean", ("aggregate",)),
    PeerName("OpenRLHF", "--algo.kl.estimator", "k1",
        "jr.bind(jr.regularizers.kl_to_reference, estimator='k1', coef=0.01)", ("kl_estimators",),
        "OpenRLHF bounds every estimate by 10, ours the difference by 20."),
    PeerName("OpenRLHF", "--algo.kl.estimator", "k2",
        "jr.bind(jr.regularizers.kl_to_reference, estimator='k2', coef=0.01)", ("kl_estimators",),
        "OpenRLHF bounds every estimate by 10, ours the difference by 20."),
    PeerName("OpenRLHF", "--algo.kl.estimator", "k3",
        "jr.bind(jr.regularizers.kl_to_reference, estimator='k3', cap=10.0, coef=0.01)",
        ("kl_estimators",),
        "OpenRLHF bounds every estimate by 10, ours the difference by 20; cap=10.0 is the same "
        "number."),
    PeerName("OpenRLHF", "--algo.kl.unbiased_gradient", "",
        "jr.regularizers.kl_unbiased", ("kl_estimators",),
        "OpenRLHF's gradient is that of k2 times the ratio, which it bounds by 10."),
    PeerName("OpenRLHF", "--algo.kl.init_coef", "",
        "jr.bind(jr.advantages.kl_shaped_rewards, kl_coef=0.01)", ("reinforce_pp",),
        "With --algo.kl.use_loss it is the coefficient of jr.regularizers.kl_to_reference."),
    PeerName("OpenRLHF", "--algo.kl.target", "",
        "jr.regularizers.adaptive_kl", ("adaptive_kl",),
        "A controller of the coefficient: computed=(jr.recipes.Computed('kl_coef', "
        "jr.regularizers.adaptive_kl(), 'controller'),), for the advantage "
        "jr.connect(jr.advantages.kl_shaped_rewards, kl_coef='kl_coef') and what follows it in a "
        "chain."),
    PeerName("OpenRLHF", "--actor.eps_clip_low_high", "",
        "jr.bind(jr.surrogates.ppo_clip, eps_low=0.2, eps_high=0.28)", ("ppo_clip",)),
    PeerName("OpenRLHF", "--actor.dual_clip", "",
        "jr.bind(jr.surrogates.ppo_clip, dual_clip=3.0)", ("ppo_dual_clip",)),
    PeerName("OpenRLHF", "--algo.advantage.is_correction_mode", "clip",
        "jr.bind(jr.corrections.importance_weights, cap=5.0, floor=0.5)", ("rollout_correction",)),
    PeerName("OpenRLHF", "--algo.advantage.is_correction_mode", "mask",
        "jr.bind(jr.corrections.masked_importance_weights, lower=0.5, upper=5.0)", ("icepop",),
        "At level token with gating ratio."),
    PeerName("OpenRLHF", "--algo.dynamic_filtering_enable", "",
        "jr.curation.refill(jr.curation.informative_groups)", ("dynamic_sampling", "dapo_clip"),
        "OpenRLHF keeps groups whose mean lies inside --algo.dynamic_filtering_range, ours those "
        "whose rewards differ: the same for rewards of 0 and 1."),
    PeerName("OpenRLHF", "--reward.overlong_buffer_len", "",
        "jr.bind(jr.rewards.overlong_rewards, max_length=2048, buffer=512)", ("overlong_penalty",)),
    PeerName("OpenRLHF", "--rollout.n_samples_per_prompt", "",
        "jr.train.SamplingConfig.group_size", (), "1 unless set; ours is 8."),
    PeerName("OpenRLHF", "--rollout.max_new_tokens", "", "jr.train.SamplingConfig.max_new_tokens"),
    PeerName("OpenRLHF", "--rollout.temperature", "", "jr.train.SamplingConfig.temperature"),
    PeerName("OpenRLHF", "--rollout.batch_size", "", "jr.train.TrainConfig.prompts_per_step"),
    PeerName("OpenRLHF", "--train.batch_size", "",
        "jr.train.TrainConfig.minibatches", (),
        "OpenRLHF gives the completions of a minibatch, here their number is given."),
    PeerName("OpenRLHF", "--train.max_epochs", "", "jr.train.TrainConfig.epochs"),
    PeerName("OpenRLHF", "--critic.freezing_steps", "",
        "jr.bind(jr.recipes.Critic, warmup=11)", (),
        "As for freezing_steps=10: OpenRLHF counts steps from 0 and updates the policy after step "
        "freezing_steps, -1 unless set."),
    PeerName("OpenRLHF", "--actor.adam.lr", "", "jr.train.OptimizerConfig.learning_rate"),
    PeerName("OpenRLHF", "--actor.adam.betas", "",
        "jr.train.OptimizerConfig.b2", (), "0.9 and 0.95 unless set; b1 and b2 are 0.9 and 0.999."),
    PeerName("slime", "--advantage-estimator", "grpo", "jr.recipes.grpo(kl_coef=0.0)", ("grpo",)),
    PeerName("slime", "--advantage-estimator", "gspo",
        "jr.recipes.gspo(eps_low=0.2, eps_high=0.2).replace(minibatches=1)", ("gspo",),
        "--eps-clip stays 0.2 unless set; the paper's are 0.0003 and 0.0004."),
    PeerName("slime", "--advantage-estimator", "cispo",
        "jr.recipes.cispo(dynamic_sampling=False, **jr.surrogates.cispo_bounds(eps_low=0.2, "
        "eps_high=0.2)).replace(minibatches=1)", ("cispo",),
        "slime's bounds are distances from 1."),
    PeerName("slime", "--advantage-estimator", "reinforce_plus_plus",
        "jr.recipes.reinforce_pp()", ("reinforce_pp",),
        "slime discounts for every position, ours for every token that the mask keeps."),
    PeerName("slime", "--advantage-estimator", "reinforce_plus_plus_baseline",
        "jr.recipes.reinforce_pp_baseline()", ("reinforce_pp_baseline",)),
    PeerName("slime", "--advantage-estimator", "ppo",
        "jr.recipes.Recipe(name='ppo', advantage=jr.chain(jr.stateless("
        "jr.advantages.terminal_rewards), jr.stateless(jr.advantages.gae, lam=1.0)), "
        "surrogate=jr.surrogates.ppo_clip, weights=jr.aggregate.sequence_mean, "
        "critic=jr.recipes.Critic(returns=jr.pipe(jr.advantages.terminal_rewards, "
        "jr.bind(jr.advantages.gae_returns, lam=1.0)), loss=jr.surrogates.value_loss, "
        "weights=jr.aggregate.sequence_mean), group_relative=False)", ("gae", "gae_token"),
        "jr.train.TrainConfig.critic is the optimizer of the critic. slime whitens with "
        "--normalize-advantages alone; it adds jr.stateless(jr.advantages.whiten) to the chain. "
        "slime's loss of the critic is twice ours."),
    PeerName("slime", "--disable-grpo-std-normalization", "",
        "jr.advantages.dr_grpo", ("dr_grpo",)),
    PeerName("slime", "--eps-clip-c", "",
        "jr.bind(jr.surrogates.ppo_clip, dual_clip=3.0)", ("ppo_dual_clip",)),
    PeerName("slime", "--calculate-per-token-loss", "",
        "jr.aggregate.token_mean", ("aggregate",),
        "Without it the mean is over sequences: jr.aggregate.sequence_mean."),
    PeerName("slime", "--kl-loss-type", "low_var_kl",
        "jr.bind(jr.regularizers.kl_to_reference, estimator='k3', cap=10.0)", ("kl_estimators",),
        "slime bounds the estimate by 10 under this name, and not under 'k3'."),
    PeerName("slime", "--kl-loss-type", "k1",
        "jr.bind(jr.regularizers.kl_to_reference, estimator='k1')", ("kl_estimators",),
        "slime does not clamp the difference, ours is clamped to +-20."),
    PeerName("slime", "--kl-loss-type", "k2",
        "jr.bind(jr.regularizers.kl_to_reference, estimator='k2')", ("kl_estimators",),
        "slime does not clamp the difference, ours is clamped to +-20."),
    PeerName("slime", "--kl-loss-type", "k3",
        "jr.bind(jr.regularizers.kl_to_reference, estimator='k3')", ("kl_estimators",),
        "slime does not clamp the difference, ours is clamped to +-20."),
    PeerName("slime", "--use-unbiased-kl", "", "jr.regularizers.kl_unbiased", ("kl_estimators",)),
    PeerName("slime", "--use-tis", "",
        "jr.bind(jr.corrections.importance_weights, cap=2.0)", ("rollout_correction",)),
    PeerName("slime", "--use-opsm", "",
        "jr.bind(jr.corrections.off_policy_sequence_mask, threshold=1e-4)",
        ("rollout_correction",),
        "slime compares the policy being trained with the one at the start of the step, or with "
        "the sampler if --use-rollout-logprobs. Ours compares the latter two. slime masks only the "
        "policy loss: dropped sequences stay in the denominator and in the KL term. In the slot "
        "selection, ours leaves them out of both. --opsm-delta is 0.0001 unless set; our threshold "
        "is 0.5."),
    PeerName("slime", "--n-samples-per-prompt", "",
        "jr.train.SamplingConfig.group_size", (), "1 unless set; ours is 8."),
    PeerName("slime", "--num-steps-per-rollout", "", "jr.train.TrainConfig.minibatches"),
    PeerName("slime", "--num-critic-only-steps", "",
        "jr.bind(jr.recipes.Critic, warmup=10)", (), "As for --num-critic-only-steps=10."),
    PeerName("prime-rl", "algo.type", "grpo",
        "jr.advantages.dr_grpo", ("dr_grpo",),
        "prime-rl's grpo takes off the group's mean and divides by nothing."),
    PeerName("prime-rl", "algo.type", "max_rl",
        "jr.recipes.maxrl()", ("maxrl",),
        "prime-rl's loss is its default one, the preset's the clipped ratio."),
    PeerName("prime-rl", "loss.type", "default",
        "jr.recipes.dppo_tv(delta_low=0.2, delta_high=0.2).replace(minibatches=1)", ("dppo_tv",),
        "prime-rl adds kl_tau = 0.001 times the squared log ratio; the preset's weight is bounded "
        "by w_max = 1e4."),
    PeerName("rlax", "truncated_generalized_advantage_estimation", "",
        "jr.advantages.gae", ("gae",),
        "rlax takes one trajectory [T] with discounts per step, ours batches [..., T] with a "
        "mask."),
    PeerName("rlax", "lambda_returns", "",
        "jr.advantages.gae_returns", ("gae",),
        "rlax takes one trajectory [T] with discounts per step, ours batches [..., T] with a "
        "mask."),
    PeerName("rlax", "discounted_returns", "",
        "jr.advantages.reward_to_go", ("reinforce_pp",),
        "rlax takes one trajectory [T] with discounts per step, ours batches [..., T] with a "
        "mask."),
    PeerName("rlax", "n_step_bootstrapped_returns", "",
        "jr.bind(jr.advantages.n_step_returns, n=3)", ("n_step",),
        "rlax takes one trajectory [T] with discounts per step, ours batches [..., T] with a "
        "mask."),
    PeerName("rlax", "vtrace", "",
        "jr.advantages.vtrace_returns", ("vtrace",),
        "rlax returns the targets less the values, ours the targets."),
    PeerName("rlax", "vtrace_td_error_and_advantage", "",
        "jr.advantages.vtrace", ("vtrace",),
        "rlax takes one trajectory [T] with discounts per step, ours batches [..., T] with a "
        "mask."),
    PeerName("rlax", "general_off_policy_returns_from_q_and_v", "",
        "jr.advantages.retrace_returns", ("retrace",),
        "rlax takes one trajectory [T] with discounts per step, ours batches [..., T] with a "
        "mask."),
    PeerName("rlax", "retrace", "",
        "jr.advantages.retrace_returns", ("retrace",),
        "rlax returns the targets less the action values, ours the targets."),
    PeerName("rlax", "policy_gradient_loss", "",
        "jr.surrogates.reinforce", ("reinforce",),
        "rlax takes logits and returns a mean over time, ours log-probabilities of the tokens and "
        "one loss a token."),
    PeerName("rlax", "clipped_surrogate_pg_loss", "",
        "jr.surrogates.ppo_clip", ("ppo_clip",),
        "rlax takes the ratio and returns a mean over time, ours log-probabilities and one loss a "
        "token."),
    PeerName("rlax", "entropy_loss", "",
        "jr.regularizers.entropy_from_logits", ("entropy_bonus",),
        "rlax returns minus the weighted mean."),
    PeerName("rlax", "categorical_kl_divergence", "",
        "jr.surrogates.distillation_divergence", ("sdpo",),
        "rlax takes logits, ours log-probabilities; alpha says the direction."),
    PeerName("rlax", "huber_loss", "",
        "jr.bind(jr.surrogates.value_loss, huber=0.5)", ("value_loss",)),
)
# fmt: on


def find_peer_names(text: str) -> tuple[PeerName, ...]:
    """The rows that match a peer's name.

    Args:
      text: ``PEER``, ``PEER:SETTING``, ``PEER:SETTING=VALUE`` or ``PEER:VALUE``, in any case; the
        last part of a setting is enough, and a class such as ``DPOConfig`` or ``DPOTrainer`` stands
        for all of its settings. Without ``PEER:``, names of all peers are searched. A setting that
        takes a number matches any value.

    Raises:
      ValueError: If the peer or the name is unknown; the message suggests the nearest names.

    Example:
      >>> from jaxrl_llm.recipes import catalog
      >>> [row.ours for row in catalog.find_peer_names("verl:adv_estimator=opo")]
      ['jr.recipes.opo()']
      >>> [str(row) for row in catalog.find_peer_names("TRL:delta=1.5")]
      ['GRPOConfig.delta']
    """
    peer, colon, name = text.strip().partition(":")
    rows = tuple(row for row in PEER_NAMES if row.peer.lower() == peer.strip().lower())
    if not rows and (colon or not peer):
        raise ValueError(f"methods: no library is named {peer!r}, only {', '.join(VERSIONS)}.")
    if rows and not name:
        return rows
    of, more = "", f"--like with one of {', '.join(VERSIONS)} lists all of its names."
    if rows:
        of, more = f" of {rows[0].peer}", f"--like {peer} lists them all."
    else:
        rows, name = PEER_NAMES, peer
    setting, _, value = (part.strip() for part in name.partition("="))
    paths = [_path(setting)]
    if setting.lower().endswith("trainer") and paths[0] not in [_path(row.setting) for row in rows]:
        paths.append([setting.lower().removesuffix("trainer") + "config"])  # as TRL names them

    def is_within(path: list[str], of_row: list[str]) -> bool:
        shared = min(len(path), len(of_row))
        return path[-shared:] == of_row[-shared:] or path == of_row[:shared]

    def matches(row: PeerName) -> bool:
        if any(is_within(path, _path(row.setting)) for path in paths):
            return not value or not row.value or row.value.lower() == value.strip("\"'").lower()
        return not value and row.value.lower() == setting.lower()

    found = tuple(row for row in rows if matches(row))
    if not found:
        known = {str(row): None for row in rows} | {_path(r.setting)[-1]: None for r in rows}
        known |= {f"{_path(r.setting)[-1]}={r.value}": None for r in rows if r.value}
        known |= {row.value: None for row in rows if row.value}
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"Did you mean {' or '.join(near)}?" if near else more
        raise ValueError(f"methods: no name{of} matches {name!r}. {hint}")
    return found


def _path(setting: str) -> list[str]:
    """The parts of a setting, such as those of ``--algo.kl.estimator``."""
    return setting.lower().lstrip("-").replace("-", "_").split(".")
