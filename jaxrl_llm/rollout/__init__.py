"""Layer 3: from prompts to rollouts with log-probabilities that can be trusted."""

from jaxrl_llm.core.lazy import lazy

_HOMES = {
    "admit": "schedule",
    "Completion": "requests",
    "Engine": "engine",
    "draw_tokens": "sampling",
    "Drawn": "sampling",
    "filter_logits": "filters",
    "FinishedGroup": "requests",
    "first_g_finished": "ahead",
    "future_peak": "schedule",
    "Generation": "generation",
    "Group": "requests",
    "longest_first": "schedule",
    "make_engine": "engine",
    "make_sampler": "sampler",
    "off_policy_fraction": "partial",
    "pick_groups": "partial",
    "pick_next": "grid",
    "predict_remaining": "schedule",
    "resume_budget": "partial",
    "roll_budget": "ahead",
    "Rollout": "rollout",
    "sample_from": "sampling",
    "sample_round": "rounds",
    "sampled_logprobs": "sampling",
    "trim": "rollout",
    "segment_status": "partial",
    "Slots": "slots",
    "spec_accept": "speculative",
    "Split": "partial",
    "split_round": "partial",
    "Starts": "grid",
    "to_rollout": "pack",
    "usable": "ahead",
}

__all__ = sorted(_HOMES)

# What is heavy loads where it is used.
__getattr__, __dir__ = lazy(__name__, _HOMES)
