"""Layer 3: from prompts to rollouts with log-probabilities that can be trusted."""

import importlib

_WHERE = {
    "Rollout": "rollout",
    "filter_logits": "sampling",
    "make_sampler": "sampler",
    "sample_from": "sampling",
    "sampled_logprobs": "sampling",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str):
    if name in _WHERE:
        return getattr(importlib.import_module(f"jaxrl_llm.rollout.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'jaxrl_llm.rollout' has no attribute {name!r}.")


def __dir__():
    return __all__
