"""State of Transforms that learn from the results of an update."""

from jaxrl_llm.core.axes import Array
from jaxrl_llm.recipes import Recipe
from jaxrl_llm.train.optimizer import keep, stays_finite
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.train.update.learned import next_state
from jaxrl_llm.train.update.part import At, Done, Part, Setup


def part(recipe: Recipe, setup: Setup) -> Part | None:
    """The part of a recipe with a Transform that learns."""
    del setup
    return Part("learned_state", after=_after, reads_logp=True) if recipe.learns else None


def _after(state: TrainState, done: Done, at: At) -> tuple[TrainState, dict[str, Array]]:
    batch = at.recipe.responses(done.batch)
    new = at.recipe.learn(batch, state.algo_state, logp=done.logp)
    new = next_state(at.recipe, new, at.state.algo_state)
    new = keep(stays_finite(state.algo_state, new), new, state.algo_state)
    return state._replace(algo_state=new), {}
