"""For tests: a tiny model, a byte tokenizer, checks of recipes and of models, black boxes."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxrl_llm.testing.battery import CHECKS, assert_recipe_ok
    from jaxrl_llm.testing.blackbox import evolve, quadratic, rastrigin
    from jaxrl_llm.testing.cases import Case, make_case
    from jaxrl_llm.testing.control import control_returns, mlp, mlp_init
    from jaxrl_llm.testing.loop_checks import assert_loop_runs_whole
    from jaxrl_llm.testing.model import tiny_config, tiny_model
    from jaxrl_llm.testing.protocol_checks import MODEL_CHECKS, assert_model_ok
    from jaxrl_llm.testing.tokenizer import ByteTokenizer

# The battery needs the sampler and the train step; a byte tokenizer does not.
_HOMES = {
    "ByteTokenizer": "tokenizer",
    "CHECKS": "battery",
    "Case": "cases",
    "MODEL_CHECKS": "protocol_checks",
    "assert_loop_runs_whole": "loop_checks",
    "assert_model_ok": "protocol_checks",
    "assert_recipe_ok": "battery",
    "control_returns": "control",
    "evolve": "blackbox",
    "make_case": "cases",
    "mlp": "control",
    "mlp_init": "control",
    "quadratic": "blackbox",
    "rastrigin": "blackbox",
    "tiny_config": "model",
    "tiny_model": "model",
}

__all__ = [
    "CHECKS",
    "MODEL_CHECKS",
    "ByteTokenizer",
    "Case",
    "assert_loop_runs_whole",
    "assert_model_ok",
    "assert_recipe_ok",
    "control_returns",
    "evolve",
    "make_case",
    "mlp",
    "mlp_init",
    "quadratic",
    "rastrigin",
    "tiny_config",
    "tiny_model",
]


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"jaxrl_llm.testing.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'jaxrl_llm.testing' has no attribute {name!r}.")


def __dir__():
    return sorted(__all__)
