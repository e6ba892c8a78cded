"""Layer 2: complete methods. A preset is a function named by the method's short key."""

from jaxrl_llm.recipes.batch import Batch, validate_batch
from jaxrl_llm.recipes.catalog import EVOLUTION_PRESETS, PRESETS
from jaxrl_llm.recipes.evolution import EvolutionRecipe
from jaxrl_llm.recipes.parts import Critic, ProcessRewardModel, RecipePart, Subagent, TurnUpdates
from jaxrl_llm.recipes.presets import *
from jaxrl_llm.recipes.presets import __all__ as _PRESET_NAMES
from jaxrl_llm.recipes.presets.constrained import CgpoTask
from jaxrl_llm.recipes.presets.evolution import eggroll, es_qiu, open_es
from jaxrl_llm.recipes.presets.preferences import listwise, pairwise, unpaired
from jaxrl_llm.recipes.recipe import AlgoState, Recipe
from jaxrl_llm.recipes.wiring import Computed

__all__ = [
    "EVOLUTION_PRESETS",
    "PRESETS",
    "AlgoState",
    "Batch",
    "CgpoTask",
    "Computed",
    "Critic",
    "EvolutionRecipe",
    "ProcessRewardModel",
    "Recipe",
    "RecipePart",
    "Subagent",
    "TurnUpdates",
    "eggroll",
    "es_qiu",
    "listwise",
    "open_es",
    "pairwise",
    "unpaired",
    "validate_batch",
    *_PRESET_NAMES,
]
