"""What the scripts for TRL's golden data share: a trainer that was never initialized.

TRL's losses and advantages are methods of its trainers. They run here on an object that has the
settings they read; the one method that would call the model returns the log-probabilities of the
case, and those for generation and rewards return its tokens and rewards.
"""

from collections import defaultdict
from types import SimpleNamespace

import torch
from torch_arrays import array, tensor, tokens
from trl import GRPOTrainer

__all__ = ["array", "tensor", "tokens"]

GRPO = "trl.GRPOTrainer."
SCORE = GRPO + "_generate_and_score_completions"
VERSIONS = ["trl", "transformers", "torch", "numpy"]


ACCELERATOR = SimpleNamespace(
    num_processes=1,
    process_index=0,
    device=torch.device("cpu"),
    sync_gradients=True,
    is_main_process=True,
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    reduce=lambda x, reduction="sum": x,
    pad_across_processes=lambda x, dim=0, pad_index=0: x,
)
DEFAULTS = {
    "accelerator": ACCELERATOR,
    "aux_loss_enabled": False,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "importance_sampling_level": "token",
    "beta": 0.0,
    "loss_type": "grpo",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_clip_max": 3.0,
    "current_gradient_accumulation_steps": 1,
    "max_completion_length": 6,
    "_entropy_bonus_enabled": False,
    "use_adaptive_entropy": False,
    "entropy_coef": 0.0,
    "_last_world_entropy": float("inf"),
    "_entropy_window_stats": None,
    "environment_factories": None,
    "environments": None,
    "tools": None,
    "pad_to_multiple_of": None,
    "mask_truncated_completions": False,
    "num_iterations": 1,
    "num_generations": 4,
    "multi_objective_aggregation": "sum_then_normalize",
    "scale_rewards": "group",
    "ref_model": None,
    "log_multimodal": False,
    "normalize_advantages": False,
    "reward_clip_range": None,
}
ARGUMENTS = {
    "use_bias_correction_kl": False,
    "delta": None,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "steps_per_generation": 1,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing_kwargs": None,
    "per_device_train_batch_size": 12,
    "entropy_target": 0.2,
    "entropy_coef_delta": 0.005,
    "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
}


def trainer(kind=GRPOTrainer, **options):
    """A trainer without initialization, with the settings that its methods read."""
    made = object.__new__(kind)
    arguments = {name: options.pop(name, value) for name, value in ARGUMENTS.items()}
    vars(made).update(DEFAULTS | options)
    made.args = SimpleNamespace(**arguments)
    made.model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    made._metrics = {"train": defaultdict(list)}
    return made
