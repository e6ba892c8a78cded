"""How well a policy or a reward model ranks held-out responses from the data."""

from collections.abc import Callable

import jax
import numpy as np

from jaxrl_llm import diagnostics
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.curation.collectors.protocol import width_of
from jaxrl_llm.diffusion import Likelihood
from jaxrl_llm.models.sharding import batch_shards, on_mesh
from jaxrl_llm.recipes import Batch
from jaxrl_llm.train.batches import Passes, least_saved_in, map_microbatches, pack_batch
from jaxrl_llm.train.data.fields import attach_fields
from jaxrl_llm.train.data.offline import OfflineRows
from jaxrl_llm.train.evaluation.evaluate import Accuracy, accuracy
from jaxrl_llm.train.experiment.experiment import Experiment
from jaxrl_llm.train.experiment.rollouts import texts_of_batch, with_width
from jaxrl_llm.train.mesh import place_batch
from jaxrl_llm.train.metrics import ScoredItems, scored_items
from jaxrl_llm.train.models.denoising import check_unmasked, draw_masks, scorer_of

Score = Callable[[Batch], ScoredItems]
"""Scores the items of a host batch: implicit rewards, or the rewards of a reward model."""


def place_rows(experiment: Experiment, batch: Batch, *, count: int) -> Batch:
    """A host batch on the devices; packed, if ``tokens_per_microbatch`` bounds its microbatches.

    Args:
      experiment: The run.
      batch: Rows of the data.
      count: The number of rows that are scored in all, for what is worth compiling.
    """
    config, mesh = experiment.config, experiment.mesh
    if config.tokens_per_microbatch is not None:
        batch, _ = pack_batch(
            batch,
            config.layout,
            model=experiment.model,
            shards=batch_shards(mesh),
            shared_prefix_len=experiment.shared_prefix_len,
            tokens_per_microbatch=config.tokens_per_microbatch,
            least_saved=least_saved_in(-(-count // config.prompts_per_step)),
        )
    return place_batch(batch, mesh)


def make_logp(experiment: Experiment) -> Callable[[ArrayTree, Batch], Array]:
    """A compiled ``logp(params, batch) -> [P, G, T]`` of a batch on the devices, packed or not.

    For a recipe that trains a reward model, these are the values of its head; for one with a
    likelihood, its estimates on the masks of the batch.
    """
    config = experiment.config
    scorer = scorer_of(
        experiment.recipe,
        experiment.model,
        temperature=config.sampling.temperature,
        shared_prefix_len=experiment.shared_prefix_len,
    )

    def logp(params: ArrayTree, batch: Batch) -> Array:
        slices = Passes(microbatches=config.microbatches).of(batch.packing).microbatches
        return map_microbatches(lambda part: scorer(params, part).logp, batch, slices)

    return jax.jit(on_mesh(logp, experiment.mesh))


def make_score(experiment: Experiment, params: ArrayTree, reference: ArrayTree) -> Score:
    """A score by implicit rewards under a policy, relative to the reference if the recipe uses one.

    For a recipe that trains a reward model, the scores are the rewards of that model; for one with
    a likelihood, its estimates on the masks of the batch, the same for policy and reference.

    Args:
      experiment: The run.
      params: Parameters of the policy.
      reference: Parameters of the reference.
    """
    recipe, logp_of = experiment.recipe, make_logp(experiment)

    def score(batch: Batch) -> ScoredItems:
        batch = place_rows(experiment, batch, count=len(experiment.held_out))
        ref_logp = logp_of(reference, batch) if recipe.needs.uses_reference else None
        return scored_items(recipe, logp_of(params, batch), ref_logp, batch)

    return score


def evaluate_pairs(
    experiment: Experiment, score: Score, *, check: Callable[[], None] = lambda: None
) -> Accuracy:
    """The share of pairs of held-out responses that the rewards rank as the data do.

    A tie counts one half, as in :func:`~jaxrl_llm.diagnostics.pair_order`, so an untrained policy
    that is also the reference has 0.5. All rows have equal weight, however many pairs they have.
    The interval treats rows of one prompt as correlated, like completions of one question. A
    likelihood has the same masks in every evaluation, so what differs is the policy.

    For a reward model the result includes the calibration
    (:func:`~jaxrl_llm.diagnostics.pair_calibration`), in which all pairs have equal weight. For a
    process reward model a pair is two steps of a row.

    Args:
      experiment: A run whose collector is ``offline``.
      score: See :func:`make_score`.
      check: Called before each batch; an exception from this call ends the evaluation.

    Raises:
      ValueError: If no row has responses with different rewards, or a denoising model is to score a
        text with its mask id.
    """
    rows: dict[tuple[int, int], ScoredItems] = {}  # by their place and the collector's part
    check()
    batches = experiment.offline_batches(experiment.held_out, experiment.train)
    for number, read in enumerate(batches):
        places, batch, collected, part = read
        if isinstance(experiment.recipe.needs.likelihood, Likelihood):
            batch = _masked(experiment, read, number)
        if experiment.references is not None:
            batch = experiment.references.attach(batch)
        if experiment.recipe.needs.head == "step":  # attaches their labels
            batch = attach_fields(
                batch,
                experiment.recipe,
                scores=collected.scores,
                rollout=collected.rollout,
                step=0,
                indices=places,
                questions=collected.questions,
                texts=texts_of_batch(experiment, collected),
                greedy=_unavailable,
            )
        items = ScoredItems(*map(np.asarray, processes.to_host(tuple(score(batch)))))
        for p, place in enumerate(places):
            rows.setdefault((place, part), ScoredItems(*(x[p] for x in items)))
        check()
    of_prompt: dict[str, list[float]] = {}
    for (place, _), items in sorted(rows.items()):
        order = diagnostics.pair_order(
            items.scores, items.rewards, where=items.where, sides=items.sides
        )
        if float(order.pairs) > 0:
            content = experiment.held_out[place].prompt.content
            of_prompt.setdefault(content, []).append(float(order.accuracy))
    if not of_prompt:
        raise ValueError(
            "evaluation: no held-out row has two responses of different rewards; turn the "
            "evaluation off, or pass evaluation prompts with pairs."
        )
    sizes = np.array([len(each) for each in of_prompt.values()])
    where = np.arange(sizes.max()) < sizes[:, None]
    values = np.zeros(where.shape)
    values[where] = np.concatenate(list(of_prompt.values()))
    group_size = experiment.config.sampling.group_size
    width = width_of(experiment.collector, group_size)
    result = accuracy(values, where)._replace(samples=width, failed=0)
    if not experiment.recipe.needs.head:
        return result
    pairs = np.concatenate([_pairs(x) for x in rows.values()])
    seen = diagnostics.pair_calibration(pairs[:, 0], pairs[:, 1])
    return result._replace(calibration_error=float(seen.error), brier=float(seen.brier))


def _masked(experiment: Experiment, rows: OfflineRows, number: int) -> Batch:
    """Batch ``number`` with masks, and with all cells of a response, as in a step of the run."""
    wide = with_width(rows.collected, experiment.config.sampling.max_new_tokens).rollout
    batch = Batch.from_rollout(wide, rows.batch.rewards, where=rows.batch.where)
    batch = batch.replace(behavior_logp=None)  # of no order, so of no estimate
    names = [x.prompt.name for x in rows.collected.questions]
    check_unmasked(batch, experiment.model, names)
    key = jax.random.fold_in(jax.random.key(0), number)
    draws = processes.to_host(draw_masks(experiment.recipe.likelihood, key, batch))
    return batch.with_extras(draws).check()


def _pairs(items: ScoredItems) -> np.ndarray:
    """Scores ``[n, 2]`` of the better and the worse item in each pair of a row."""
    scores, rewards = items.scores[items.where], items.rewards[items.where]
    better, worse = np.nonzero(rewards[:, None] > rewards[None, :])
    return np.stack([scores[better], scores[worse]], axis=-1)


def _unavailable() -> np.ndarray:
    raise ValueError("A process reward model samples no greedy responses.")
