"""Layer 3: from prompts to rollouts with log-probabilities that can be trusted."""

from jaxrl_llm.core.runtime.lazy import lazy

_HOMES = {
    "add_seen": "sampling.penalties",
    "admit": "engine.admission",
    "Completion": "engine.requests",
    "draw_tokens": "sampling.draw",
    "Drawn": "sampling.draw",
    "Engine": "engine.engine",
    "filter_logits": "sampling.filters",
    "FinishedGroup": "engine.requests",
    "first_g_finished": "engine.ahead",
    "future_peak": "engine.admission",
    "Generation": "engine.generation",
    "Group": "engine.requests",
    "longest_first": "engine.admission",
    "make_engine": "engine.engine",
    "make_population_sampler": "population",
    "make_sampler": "sampler",
    "off_policy_fraction": "engine.partial",
    "only_allowed": "sampling.penalties",
    "penalize_repetition": "sampling.penalties",
    "pick_groups": "engine.partial",
    "pick_next": "engine.grid",
    "predict_remaining": "engine.admission",
    "resume_budget": "engine.partial",
    "roll_budget": "engine.ahead",
    "Rollout": "types",
    "sample_from": "sampling.draw",
    "sample_round": "engine.rounds",
    "sampled_logprobs": "sampling.draw",
    "seen_tokens": "sampling.penalties",
    "segment_status": "engine.partial",
    "Slots": "slots",
    "spec_accept": "sampling.speculative",
    "Split": "engine.partial",
    "split_round": "engine.partial",
    "Starts": "engine.grid",
    "Support": "types",
    "to_rollout": "engine.requests",
    "trim": "types",
    "usable": "engine.ahead",
}

__all__ = sorted(_HOMES)

# What is heavy loads where it is used.
__getattr__, __dir__ = lazy(__name__, _HOMES)
