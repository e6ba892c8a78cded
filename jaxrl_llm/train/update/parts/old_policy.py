"""The policy at the start of the step: ``old_logp``, ``old_entropy`` and statistics of it.

It also scores tokens whose ``behavior_logp`` is unknown (extra ``behavior_known``), such as those
of a demonstration, so that ratios and corrections treat them as on-policy.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.recipes.parts.denoiser import of_likelihood
from jaxrl_llm.train.models.score import HIDDEN_STATISTICS
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.train.update.part import POLICY, At, Part, Read, Setup, absent

_FILL = "fill_logp"  # of tokens whose behavior_logp is unknown; not in the prepared batch


def part(recipe: Recipe, setup: Setup) -> Part:
    """The part of every recipe."""
    del recipe, setup
    return Part("old_policy", reads=_reads, amend=_amend)


def reads_old_logp(batch: Batch, at: At) -> bool:
    """Whether the policy at the start of the step scores ``old_logp``."""
    needed = at.setup.score_old or "old_logp" in at.recipe.required_fields
    return needed and batch.old_logp is None and not _is_of_sampler(batch, at)


def _is_of_sampler(batch: Batch, at: At) -> bool:
    """Whether ``old_logp`` is ``behavior_logp``: older weights may have sampled (``stale``).

    The ratio then compares the policy with the weights that sampled, unless the recipe does.
    """
    older = at.setup.stale and not at.recipe.reads_behavior
    return older and batch.old_logp is None and batch.behavior_logp is not None


def _fills(batch: Batch, at: At) -> bool:
    """Whether something reads ``behavior_logp`` of tokens for which it is unknown."""
    read = at.recipe.reads_behavior or _is_of_sampler(batch, at)
    return read and "behavior_known" in batch.extras and batch.behavior_logp is not None


def _reads(batch: Batch, at: At) -> tuple[Read, ...]:
    recipe, needs = at.recipe, at.recipe.required_fields
    statistics, entries = absent(batch, recipe, "old_policy"), dict[str, str]()
    if reads_old_logp(batch, at):
        entries["old_logp"] = "logp"
    elif _fills(batch, at) and batch.old_logp is None:
        entries[_FILL] = "logp"
    known = {*batch.extras, *statistics}  # a recipe's own statistic may have one of these names
    if "old_entropy" in needs and "old_entropy" not in known:
        entries["old_entropy"] = "entropy"
    of_hidden = tuple(x for x in HIDDEN_STATISTICS if x in needs and x not in known)
    likelihood = of_likelihood(recipe, "old").items()
    entries |= {entry: name for entry, name in likelihood if entry not in batch.extras}
    entries |= {name: name for name in (*statistics, *of_hidden)}
    return (Read(POLICY, entries, statistics, of_hidden),) if entries else ()


def _amend(state: TrainState, batch: Batch, at: At) -> tuple[TrainState, Batch]:
    of_sampler = _is_of_sampler(batch, at)
    if _fills(batch, at):
        extras = dict(batch.extras)
        logp = extras.pop(_FILL, None)
        logp = jax.lax.stop_gradient(batch.old_logp) if logp is None else logp
        logp = jnp.where(extras["behavior_known"], batch.behavior_logp, logp)
        batch = batch.replace(behavior_logp=logp, extras=extras)
    if of_sampler:
        batch = batch.replace(old_logp=batch.behavior_logp)
    return state, batch
