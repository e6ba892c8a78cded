"""What models compute of a batch before its update, for loops of one's own.

:func:`score_batch` adds the numbers of the policy at the start of the step, a moving reference, a
teacher and a critic; :func:`score_reference` those of a frozen reference; :func:`score_visits`
those of the last visits to the prompts; :func:`apply_rules` those of the step that each token alone
would make. Entries that a batch already has stay unchanged. Shared arguments are those of
:mod:`~jaxrl_llm.train.policy_gradient`.
"""

from typing import Any

import optax

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.recipes import AlgoState, Batch, Recipe
from jaxrl_llm.train.models.denoising import PolicyScorer
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.train.update.part import At, Part, Setup, Teacher
from jaxrl_llm.train.update.parts import last_visit, parts_of, reference, token_steps
from jaxrl_llm.train.update.reads import read_batch, read_entries

_SEPARATE = (last_visit.part, token_steps.part)  # have functions of their own here


def score_batch(
    batch: Batch,
    recipe: Recipe,
    scorer: PolicyScorer,
    *,
    state: TrainState,
    microbatches: int = 1,
    score_old: bool = False,
    stale: bool = False,
    critic_model: Model | None = None,
    teacher: Teacher | None = None,
) -> Batch:
    """Adds to a batch every number that a model computes before the update.

    These are the entries that the parts of the recipe's step read and amend, each described in its
    file of :mod:`jaxrl_llm.train.update.parts`, but those of :func:`score_visits` and
    :func:`apply_rules`. Entries that the batch already has stay unchanged.

    - ``old_logp``, of the proximal policy: under the policy at the start of the step, if
      ``score_old`` is True or ``recipe.prepare`` requires it. If older weights may have sampled
      (``stale``) and the recipe does not read ``behavior_logp``, ``old_logp`` is ``behavior_logp``:
      the ratio then compares the policy with the weights that sampled.
    - ``behavior_logp`` of tokens for which it is unknown (extra ``behavior_known``), if anything
      reads it: under the policy at the start of the step.
    - ``ref_logp`` and statistics of a moving reference. For a frozen one, see
      :func:`score_reference`.

    Args:
      batch, recipe, scorer, microbatches, critic_model, teacher: See the module.
      state: The state before the update.
      score_old: Whether ``old_logp`` is needed regardless of what the recipe reads.
      stale: Whether older weights may have sampled the batch.

    Returns:
      The batch that ``recipe.prepare`` takes.

    Raises:
      ValueError: If the recipe needs teacher prompts or reference answers, and the batch has
        neither those nor the numbers computed from them.
      TypeError: If ``scorer`` is not a :class:`~jaxrl_llm.train.Scorer` or one like it.

    Example:
      >>> import jax, optax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> recipe = jr.recipes.dr_grpo(length=6)
      >>> state = jr.train.init_state(params, optax.sgd(0.1), recipe, key=jax.random.key(0))
      >>> batch = jr.testing.make_case().batch.replace(old_logp=None)
      >>> batch = jr.train.score_batch(
      ...     batch, recipe, jr.train.Scorer(model), state=state, score_old=True)
      >>> bool((batch.old_logp[batch.mask] < 0).all())
      True
    """
    if not hasattr(scorer, "model"):
        raise TypeError(f"score_batch: scorer must be a train.Scorer; got {scorer!r}.")
    setup = Setup(
        recipe=recipe,
        scorer=scorer,
        stale=stale,
        score_old=score_old,
        second_model=critic_model or scorer.model,
    )
    at = At(setup, state, microbatches, teacher=teacher)
    return read_batch(parts_of(setup, without=_SEPARATE), state, batch, at)[1]


def score_visits(
    batch: Batch, recipe: Recipe, scorer: PolicyScorer, *, state: TrainState, microbatches: int = 1
) -> tuple[Batch, AlgoState]:
    """The batch with numbers computed from the last visits to its prompts, and the next state.

    The policy at the start of the step scores the responses that the recipe recalls, over the full
    vocabulary. Numbers that the batch already has stay unchanged, and no visit is recorded.

    Args:
      batch, recipe, scorer, microbatches: See the module.
      state: The state before the update.

    Raises:
      ValueError: If the batch has no ``prompt_ids``, or turns that the chat template or the
        environment rewrites.

    Example:
      >>> import jax, optax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> recipe = jr.recipes.spo_tracker(num_prompts=8, length=6)
      >>> state = jr.train.init_state(params, optax.sgd(0.1), recipe, key=jax.random.key(0))
      >>> batch = jr.testing.make_case().batch.replace(extras={"prompt_ids": jax.numpy.arange(8)})
      >>> batch, algo_state = jr.train.score_visits(
      ...     batch, recipe, jr.train.Scorer(model), state=state)
      >>> batch.extras["policy_shift"].tolist()  # 0 at the first visits
      [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    setup = Setup(recipe=recipe, scorer=scorer)
    at = At(setup, state, microbatches)
    state, batch = read_batch(_present(last_visit.part(recipe, setup)), state, batch, at)
    return batch, state.algo_state


def apply_rules(
    batch: Batch,
    recipe: Recipe,
    scorer: PolicyScorer,
    *,
    state: TrainState,
    key: Array | None = None,
    learning_rate: float | optax.Schedule | None = None,
    microbatches: int = 1,
) -> tuple[Batch, dict[str, ArrayTree]]:
    """Adds the numbers computed from "optimizer"; returns the batch and the rules' next states.

    The selection reads these numbers, and the rules read the advantages. The advantages are
    therefore prepared for the rules first, without the selection.

    Args:
      batch, recipe, scorer, microbatches: See the module; the batch comes from ``score_batch``.
      state: The state before the update.
      key: The key of ``recipe.prepare``.
      learning_rate: See :func:`make_step`.

    Raises:
      ValueError: If the state of a rule is absent, or a rule reads the learning rate and it is
        None.

    Example:
      >>> import jax, optax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> recipe, shape = jr.recipes.capo(), model.output_matrix(params).shape
      >>> state = jr.train.init_state(
      ...     params, optax.adam(1e-3), recipe, key=jax.random.key(0), output_shape=shape)
      >>> batch = jr.testing.make_case().batch.replace(extras={})
      >>> batch, rules = jr.train.apply_rules(
      ...     batch, recipe, jr.train.Scorer(model), state=state, learning_rate=1e-3)
      >>> batch.extras["step_effects"].shape, list(rules)  # two numbers for each token
      ((8, 4, 6, 2), ['step_effects'])
    """
    setup = Setup(recipe=recipe, scorer=scorer, learning_rate=learning_rate)
    at = At(setup, state, microbatches, key)
    state, batch = read_batch(_present(token_steps.part(recipe, setup)), state, batch, at)
    return batch, state.algo_state.rules


def score_reference(
    batch: Batch, recipe: Recipe, scorer: PolicyScorer, params: ArrayTree, *, microbatches: int = 1
) -> Batch:
    """The batch with ``ref_logp``, ``kl_ref_logp`` and statistics with source "reference".

    Only those that the recipe reads are added. ``params`` are the reference's parameters.
    """
    no_state: Any = None
    at = At(Setup(recipe=recipe, scorer=scorer), no_state, microbatches, reference=params)
    return read_entries((Part("reference", reads=reference.reads),), batch, at)


def _present(part: Part | None) -> tuple[Part, ...]:
    return () if part is None else (part,)
