"""Layer 3: from prompts to rollouts with log-probabilities that can be trusted."""

from jaxrl_llm.core.lazy import lazy

_HOMES = {
    "Rollout": "rollout",
    "filter_logits": "sampling",
    "make_sampler": "sampler",
    "sample_from": "sampling",
    "sampled_logprobs": "sampling",
}

__all__ = sorted(_HOMES)

# What is heavy loads where it is used.
__getattr__, __dir__ = lazy(__name__, _HOMES)
