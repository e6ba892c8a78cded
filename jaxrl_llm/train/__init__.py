"""Layer 4: a run. State, step, loop, mesh, checkpoints, metrics and held-out evaluation."""

from jaxrl_llm.train.mesh import make_mesh
from jaxrl_llm.train.score import score
from jaxrl_llm.train.state import TrainState, init_state
from jaxrl_llm.train.step import make_scorer, make_step

__all__ = [
    "TrainState",
    "init_state",
    "make_mesh",
    "make_scorer",
    "make_step",
    "score",
]
