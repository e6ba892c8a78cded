"""Layer 3: sampling of rollouts, with exact log-probabilities of the sampling distribution."""

from jaxrl_llm.core.runtime.lazy import lazy

_HOMES = {
    "add_seen": "sampling.penalties",
    "admit": "engine.admission",
    "Completion": "engine.requests",
    "DenoisingOptions": "denoising",
    "DrawOptions": "sampling.options",
    "draw_tokens": "sampling.draw",
    "Drawn": "sampling.draw",
    "Engine": "engine.engine",
    "EngineSpec": "engine.spec",
    "EpisodeOptions": "episodes",
    "Episodes": "episodes",
    "filter_logits": "sampling.filters",
    "FinishedGroup": "engine.requests",
    "first_g_finished": "engine.rounds",
    "future_peak": "engine.admission",
    "Generation": "engine.generation",
    "Group": "engine.requests",
    "longest_first": "engine.scheduler",
    "make_denoising_sampler": "denoising",
    "make_engine": "engine.engine",
    "make_flow_sampler": "flows",
    "make_population_sampler": "population",
    "make_sampler": "sampler",
    "NextTurn": "engine.requests",
    "off_policy_fraction": "engine.rounds",
    "only_allowed": "sampling.penalties",
    "penalize_repetition": "sampling.penalties",
    "pick_next": "engine.scheduler",
    "predict_remaining": "engine.admission",
    "resume_budget": "engine.request_arrays",
    "roll_budget": "engine.rounds",
    "Rollout": "types",
    "sample_from": "sampling.draw",
    "sample_round": "engine.rounds",
    "sampled_logprobs": "sampling.draw",
    "seen_tokens": "sampling.penalties",
    "Slots": "slots",
    "spec_accept": "sampling.speculative",
    "Starts": "engine.scheduler",
    "Support": "types",
    "to_rollout": "engine.requests",
    "trim": "types",
    "usable": "engine.rounds",
}

__all__ = sorted(_HOMES)

# Heavy modules load on first use.
__getattr__, __dir__ = lazy(__name__, _HOMES)
