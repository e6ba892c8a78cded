"""A JAX-native functional kit of RL algorithms for language models.

The functions live in namespaces that load on first use, so that importing the package costs no more
than jax, numpy, optax and chex::

    import jaxrl_llm as jr
    jr.advantages.grpo(rewards)                        # rewards -> advantages
    jr.surrogates.ppo_clip(logp, old_logp, adv, mask)  # -> token loss
    jr.aggregate.token_mean(mask)                      # mask -> weights
"""

from jaxrl_llm.core import Transform, bind, chain, connect, given, pipe, stateless
from jaxrl_llm.core.runtime.lazy import load_module

__version__ = "0.2.0"

_NAMESPACES = (
    "advantages",
    "aggregate",
    "core",
    "corrections",
    "curation",
    "data",
    "diagnostics",
    "diffusion",
    "environments",
    "evolution",
    "logprobs",
    "models",
    "preferences",
    "recipes",
    "regularizers",
    "rewards",
    "rollout",
    "serve",
    "surrogates",
    "testing",
    "train",
)

__all__ = ["Transform", "bind", "chain", "connect", "given", "pipe", "stateless", *_NAMESPACES]


def __getattr__(name: str):
    if name in _NAMESPACES:
        return load_module(f"jaxrl_llm.{name}")
    raise AttributeError(f"module 'jaxrl_llm' has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
