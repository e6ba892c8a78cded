"""How well a policy or a reward model ranks held-out responses from the data."""

from collections.abc import Callable

import numpy as np

from jaxrl_llm import diagnostics
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.curation.collectors.protocol import width_of
from jaxrl_llm.recipes import Batch
from jaxrl_llm.train.evaluate import Accuracy, accuracy
from jaxrl_llm.train.experiment import Experiment
from jaxrl_llm.train.fields import attach_fields
from jaxrl_llm.train.mesh import place_batch
from jaxrl_llm.train.metrics import ScoredItems, scored_items
from jaxrl_llm.train.policy_gradient import make_scorer
from jaxrl_llm.train.rollouts import texts_of_batch

Score = Callable[[Batch], ScoredItems]
"""Scores the items of a host batch: implicit rewards, or the rewards of a reward model."""


def make_score(experiment: Experiment, params: ArrayTree, reference: ArrayTree) -> Score:
    """A score by implicit rewards under a policy, relative to the reference if the recipe uses one.

    For a recipe that trains a reward model, the scores are the rewards of that model.

    Args:
      experiment: The run.
      params: Parameters of the policy.
      reference: Parameters of the reference.
    """
    config, mesh = experiment.config, experiment.mesh
    scorer = make_scorer(
        experiment.model,
        microbatches=config.microbatches,
        temperature=config.sampling.temperature,
        shared_prefix_len=experiment.shared_prefix_len,
        mesh=mesh,
    )

    def score(batch: Batch) -> ScoredItems:
        batch = place_batch(batch, mesh)
        recipe = experiment.recipe
        ref_logp = scorer(reference, batch) if recipe.uses_reference else None
        return scored_items(recipe, scorer(params, batch), ref_logp, batch)

    return score


def evaluate_pairs(
    experiment: Experiment, score: Score, *, check: Callable[[], None] = lambda: None
) -> Accuracy:
    """The share of pairs of held-out responses that the rewards rank as the data do.

    A tie counts one half, as in :func:`~jaxrl_llm.diagnostics.pair_order`, so an untrained policy
    that is also the reference has 0.5. All rows have equal weight, however many pairs they have.
    The interval treats rows of one prompt as correlated, like completions of one question.

    For a reward model the result includes the calibration
    (:func:`~jaxrl_llm.diagnostics.pair_calibration`), in which all pairs have equal weight. For a
    process reward model a pair is two steps of a row.

    Args:
      experiment: A run whose collector is ``offline``.
      score: See :func:`make_score`.
      check: Called before each batch; an exception from this call ends the evaluation.

    Raises:
      ValueError: If no row has responses with different rewards.
    """
    rows: dict[int, ScoredItems] = {}
    check()
    for places, batch, collected in experiment.offline_batches(
        experiment.held_out, experiment.train
    ):
        if experiment.references is not None:
            batch = experiment.references.attach(batch)
        if experiment.recipe.head is not None:  # attaches the labels of steps
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
            rows.setdefault(place, ScoredItems(*(x[p] for x in items)))
        check()
    of_prompt: dict[str, list[float]] = {}
    for place, items in sorted(rows.items()):
        order = diagnostics.pair_order(items.scores, items.rewards, where=items.where)
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
    if not experiment.recipe.head:
        return result
    pairs = np.concatenate([_pairs(x) for x in rows.values()])
    seen = diagnostics.pair_calibration(pairs[:, 0], pairs[:, 1])
    return result._replace(calibration_error=float(seen.error), brier=float(seen.brier))


def _pairs(items: ScoredItems) -> np.ndarray:
    """Scores ``[n, 2]`` of the better and the worse item in each pair of a row."""
    scores, rewards = items.scores[items.where], items.rewards[items.where]
    better, worse = np.nonzero(rewards[:, None] > rewards[None, :])
    return np.stack([scores[better], scores[worse]], axis=-1)


def _unavailable() -> np.ndarray:
    raise ValueError("A reward model samples no greedy responses.")
