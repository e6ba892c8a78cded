"""``last_kl``: the KL between the policies before and after an update, for the next one."""

import jax.numpy as jnp

from jaxrl_llm import diagnostics
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.train.batches import map_microbatches
from jaxrl_llm.train.optimizer import keep
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.train.update.part import POLICY, At, Done, Part, Read, Setup
from jaxrl_llm.train.update.parts.old_policy import reads_old_logp

_START = "start_logp"


def part(recipe: Recipe, setup: Setup) -> Part | None:
    """The part of a recipe that reads the KL of the previous update."""
    if not recipe.reads_last_kl:
        return None
    reads = None if setup.passes.updates == 1 else _reads
    return Part("last_kl", reads=reads, after=_after, cost="a pass of the policy after the update")


def _needs_start(batch: Batch, at: At) -> bool:
    """Whether ``old_logp`` is not of the policy before the step, or is not scored."""
    of_older = at.setup.stale and not at.recipe.reads_behavior
    return of_older or (batch.old_logp is None and not reads_old_logp(batch, at))


def _reads(batch: Batch, at: At) -> tuple[Read, ...]:
    likelihood = at.recipe.likelihood
    if likelihood is not None and likelihood.reads_advantages:  # known only once prepared
        return ()
    return (Read(POLICY, {_START: "logp"}),) if _needs_start(batch, at) else ()


def _after(state: TrainState, done: Done, at: At) -> tuple[TrainState, dict[str, Array]]:
    batch, scorer = at.recipe.responses(done.batch), at.setup.scorer

    def logp_of(policy: ArrayTree) -> Array:
        return map_microbatches(lambda rows: scorer(policy, rows).logp, batch, at.slices)

    if at.setup.passes.updates == 1:
        before = done.logp
    elif _START in batch.extras:
        before = batch.extras[_START]
    else:
        needed = _needs_start(batch, at)
        before = logp_of(at.state.policy) if needed else batch.old_logp
    kl = diagnostics.approx_kl(logp_of(state.policy), before, batch.mask, estimator="k3")
    kl = keep(jnp.isfinite(kl), kl, at.state.algo_state.last_kl)
    return state._replace(algo_state=state.algo_state._replace(last_kl=kl)), {}
