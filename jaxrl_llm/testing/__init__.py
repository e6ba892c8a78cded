"""Test helpers: a tiny model, a byte tokenizer, and checks of recipes, models and environments."""

from jaxrl_llm.core.runtime.lazy import lazy

# The battery needs the sampler and the train step; a byte tokenizer does not.
_HOMES = {
    "ByteTokenizer": "tokenizer",
    "CHECKS": "battery",
    "Case": "cases",
    "MODEL_CHECKS": "protocol_checks",
    "assert_loop_runs_whole": "loop_checks",
    "assert_model_ok": "protocol_checks",
    "assert_recipe_ok": "battery",
    "check_env": "env_checks",
    "control_returns": "control",
    "evolve": "blackbox",
    "make_case": "cases",
    "mlp": "control",
    "mlp_init": "control",
    "quadratic": "blackbox",
    "rastrigin": "blackbox",
    "tiny_config": "model",
    "tiny_flow_model": "model",
    "tiny_text_flow_model": "model",
    "tiny_model": "model",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazy(__name__, _HOMES)
