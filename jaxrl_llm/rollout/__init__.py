"""Layer 3: from prompts to rollouts with log-probabilities that can be trusted."""

from jaxrl_llm.core.runtime.lazy import lazy

_HOMES = {
    "add_seen": "penalties",
    "admit": "schedule",
    "Completion": "requests",
    "draw_tokens": "sampling",
    "Drawn": "sampling",
    "Engine": "engine",
    "filter_logits": "filters",
    "FinishedGroup": "requests",
    "first_g_finished": "ahead",
    "future_peak": "schedule",
    "Generation": "generation",
    "Group": "requests",
    "longest_first": "schedule",
    "make_engine": "engine",
    "make_population_sampler": "population",
    "make_sampler": "sampler",
    "off_policy_fraction": "partial",
    "only_allowed": "penalties",
    "penalize_repetition": "penalties",
    "pick_groups": "partial",
    "pick_next": "grid",
    "predict_remaining": "schedule",
    "resume_budget": "partial",
    "roll_budget": "ahead",
    "Rollout": "rollout",
    "sample_from": "sampling",
    "sample_round": "rounds",
    "sampled_logprobs": "sampling",
    "seen_tokens": "penalties",
    "segment_status": "partial",
    "Slots": "slots",
    "spec_accept": "speculative",
    "Split": "partial",
    "split_round": "partial",
    "Starts": "grid",
    "Support": "rollout",
    "to_rollout": "pack",
    "trim": "rollout",
    "usable": "ahead",
}

__all__ = sorted(_HOMES)

# What is heavy loads where it is used.
__getattr__, __dir__ = lazy(__name__, _HOMES)
