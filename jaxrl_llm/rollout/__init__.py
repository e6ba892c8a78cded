"""Layer 3: from prompts to rollouts with log-probabilities that can be trusted."""

from jaxrl_llm.core.lazy import lazy

_HOMES = {
    "Completion": "requests",
    "Engine": "engine",
    "filter_logits": "sampling",
    "FinishedGroup": "requests",
    "Generation": "generation",
    "Group": "requests",
    "make_engine": "engine",
    "make_sampler": "sampler",
    "Rollout": "rollout",
    "sample_from": "sampling",
    "sampled_logprobs": "sampling",
    "Slots": "slots",
    "to_rollout": "requests",
}

__all__ = sorted(_HOMES)

# What is heavy loads where it is used.
__getattr__, __dir__ = lazy(__name__, _HOMES)
