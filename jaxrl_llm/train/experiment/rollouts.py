"""Batches of graded rollouts, collected when the loop asks for them or ahead of time in a thread.

With ``max_staleness=0`` the loop alternates between sampling and training (:class:`SyncRollouts`).
Otherwise a thread samples and grades while the loop trains (:class:`AsyncRollouts`). Batch n
trains the weights of version n. Its sampling may start once version n - max_staleness is published,
and uses the newest version. Batches are trained on in order, so no token is more than max_staleness
versions old. Each question is used once, in the order of the cursor::

    sampler   0 | 1 |   2   | 3 | ...        max_staleness=1: batch 2 waits for version 1
    trainer       0 | 1 |     2 | 3 | ...

Shared arguments: ``experiment``, the run; ``state``, the state that it starts from; ``questions``,
P of them; ``pending``, batches from a checkpoint, numbered from ``state.step``.
"""

import atexit
import dataclasses
import functools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.packing import Tree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.core.runtime.threads import SIGNAL_SECONDS
from jaxrl_llm.core.support import Support
from jaxrl_llm.curation import TEXT
from jaxrl_llm.data import Cursor, take
from jaxrl_llm.data.questions import Question
from jaxrl_llm.diffusion import FlowLikelihood
from jaxrl_llm.models.lora import merge_adapter
from jaxrl_llm.models.sharding import batch_shards, param_shardings
from jaxrl_llm.recipes import Batch, validate_batch
from jaxrl_llm.rewards.scoring import check_answered
from jaxrl_llm.rollout import Rollout, trim
from jaxrl_llm.rollout.backends import EngineBackend, SamplerBackend, texts_of
from jaxrl_llm.rollout.collect import Collected, Limits, collect
from jaxrl_llm.rollout.subagent import SubagentPlayer
from jaxrl_llm.rollout.types import FAILED, STOP
from jaxrl_llm.train.batches import MIN_SAVED
from jaxrl_llm.train.checkpoint import Checkpoints
from jaxrl_llm.train.checkpoint.serialization import Extras
from jaxrl_llm.train.config import TrainConfig
from jaxrl_llm.train.data.fields import Texts, attach_fields
from jaxrl_llm.train.data.grading import check_finite, sample_rows, spread_rows
from jaxrl_llm.train.data.halves import Halves, sample_halves, with_roles
from jaxrl_llm.train.evaluation.evaluate import play_groups
from jaxrl_llm.train.experiment.experiment import Experiment
from jaxrl_llm.train.experiment.run_data import teacher_room
from jaxrl_llm.train.logging.settings import changed_settings, settings
from jaxrl_llm.train.mesh import replicated
from jaxrl_llm.train.metrics import rollout_metrics, task_metrics
from jaxrl_llm.train.models.denoising import check_unmasked, draw_masks
from jaxrl_llm.train.models.flows import draw_noise
from jaxrl_llm.train.models.teachers import host_scores
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.train.subagent import alignment_key, mean_calls, subagent_batch
from jaxrl_llm.train.update.part import Teacher

# Seconds that a run that ends early waits for the batch in progress, which no step will use. The
# shorter time applies after a second Ctrl-C.
_PATIENCE, _AT_ONCE = 5.0, 1.0
_THREAD = "rollouts"
# Folded into the batch's key to make the collector's key; above all request numbers.
_COLLECTOR = 2**32 - 1
# The same for the key of a likelihood's masks.
_MASKS = 2**32 - 2


class RolloutBatch(NamedTuple):
    """A batch of graded rollouts; all arrays are on the host."""

    number: int  # index in the run, from 0; the batch trains the weights of this version
    version: int  # version of the weights that sampled it
    begin: Cursor  # position of its first question in the data order
    cursor: Cursor  # position of the next batch's first question
    collector_state: ArrayTree  # state of the recipe's collector after this batch
    batch: Batch  # what the algorithm trains on
    metrics: dict[str, float]  # computed on the host, by their names in metrics.jsonl
    rows: list[dict]  # completions to show, one record each
    seconds: dict[str, float]  # time spent, by the names "sample" and "reward"


def next_questions(experiment: Experiment, cursor: Cursor, count: int) -> tuple[list[int], Cursor]:
    """The indices of the next questions, and the cursor after them."""
    if not count:
        return [], cursor
    return take(cursor, count, size=len(experiment.train), seed=experiment.config.data.seed)


def learned_of(experiment: Experiment, state: TrainState) -> ArrayTree | None:
    """What the recipe's collector follows of a state, on the host; None if it follows nothing."""
    follows = getattr(experiment.collector, "follows", None)
    if follows is None:
        return None
    return jax.tree.map(np.array, processes.to_host(follows(state.algo_state)))


def collect_rollouts(
    experiment: Experiment,
    params: ArrayTree,
    key: Array,
    cursor: Cursor,
    collector_state: ArrayTree = (),
    *,
    number: int,
    version: int,
    learned: ArrayTree | None = None,
    subagent: ArrayTree | None = None,
) -> RolloutBatch:
    """Samples and grades a batch, which depends on its number, the key, the weights and the states.

    Args:
      experiment: See the module.
      params: The weights of the policy that samples; see ``Experiment.behavior``.
      key: The key of the run's state.
      cursor: Position of the batch's first question in the data order.
      collector_state: State of the recipe's collector.
      number: Index of the batch, from 0.
      version: Version of the weights.
      learned: What the collector follows: :func:`learned_of` for the state of these weights.
      subagent: Parameters of the subagent, for a recipe that has one.

    Raises:
      ValueError: If a value cannot be trained on; the message names the prompt.
      RewardError: If the reward fails; the message names the prompt.
    """
    config, recipe = experiment.config, experiment.recipe
    params, key = experiment.on_rollout_mesh((experiment.behavior(params), key))
    state_before = collector_state
    follow = getattr(experiment.collector, "follow", None)
    if learned is not None and follow is not None:
        collector_state = follow(collector_state, learned)
    player = None
    if subagent is not None:
        player = experiment.subagent_player(subagent, key, number)
    collected = _play_collector(
        experiment,
        params,
        key,
        cursor,
        collector_state,
        number=number,
        version=version,
        subagent=player,
    )
    check_answered([collected.scores], f" of step {number + 1}")
    next_state = _next_state(experiment.collector, state_before, collected.state)
    start, sampled = time.perf_counter(), collected.seconds["sample"]
    begin, (_, cursor) = cursor, next_questions(experiment, cursor, collected.in_order)
    if recipe.needs.likelihood is None:
        collected = collected._replace(rollout=trim(collected.rollout, least=MIN_SAVED))
    else:  # a denoiser sees all cells of a response, including those after its end
        collected = with_width(collected, config.sampling.max_new_tokens)
    batch = _graded_batch(experiment, collected)
    if recipe.needs.drops_failed:  # a population without its broken members
        collected = collected._replace(where=np.asarray(batch.where))
    batch = _with_host_scores(experiment, collected, batch)
    if recipe.needs.reads_extras:
        collected, batch = _with_fields(
            experiment, collected, batch, params, key, number=number, subagent=player
        )
    if player is not None:
        drawn, where = alignment_key(key, number), np.asarray(batch.where)
        method = recipe.needs.subagent
        called = subagent_batch(method, collected.scores, batch.rewards, where, drawn)
        batch = batch.replace(called=called)
    rows = _shown_rows(config, collected) if number % config.samples_every == 0 else []
    seconds = dict(collected.seconds)
    baselines = seconds["sample"] - sampled
    seconds["reward"] += time.perf_counter() - start - baselines
    ages = None  # of a reference that samples: when it last moved is not recorded
    if recipe.needs.sampled_by == "policy":
        ages = number - np.asarray(collected.rollout.version)
    metrics = rollout_metrics(collected, collected.rollout, ages=ages, reward=config.reward)
    metrics |= task_metrics(recipe, collected)
    if player is not None:
        metrics["calls"] = mean_calls(collected.scores, np.asarray(batch.where))
    return RolloutBatch(
        number=number,
        version=version,
        begin=begin,
        cursor=cursor,
        collector_state=next_state,
        batch=batch,
        metrics=metrics,
        rows=rows,
        seconds=seconds,
    )


def _next_state(collector: Any, before: ArrayTree, after: ArrayTree) -> ArrayTree:
    """The next state of a collector as arrays, if a checkpoint with it can be restored.

    Raises:
      ValueError: If its structure, a shape or a dtype is not that of the state before.
    """
    after = jax.tree.map(np.asarray, after)
    old, new = (
        {trees.path_str(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}
        for leaves in map(jax.tree_util.tree_leaves_with_path, (before, after))
    )
    changed = [name for name in old | new if old.get(name) != new.get(name)]
    if not changed and jax.tree.structure(before) == jax.tree.structure(after):
        return after
    what, was, became = "it", jax.tree.structure(before), jax.tree.structure(after)
    if changed:
        what, was, became = repr(changed[0]), old.get(changed[0]), new.get(changed[0])
    raise ValueError(
        f"collector {collector!r}: its state must keep the structure, shapes and dtypes of `init`, "
        f"since checkpoints store it; {what} changed from {was} to {became}."
    )


def _graded_batch(experiment: Experiment, collected: Collected) -> Batch:
    """What the collector collected as a batch of tokens and rewards."""
    recipe = experiment.recipe
    batch = to_batch(
        collected.rollout,
        collected.scores.rewards,
        collected.questions,
        where=collected.where,
        vocab_size=experiment.model.config.vocab_size,
        drop_failed=recipe.needs.drops_failed,
        known=collected.known,
    )
    extras = dict(batch.extras)
    known = extras.pop("behavior_known", None)
    if known is not None:  # texts are compared with no policy
        known = known[batch.mask & (collected.roles != TEXT)[..., None]]
    likelihood, reads = recipe.needs.likelihood, recipe.needs.reads_behavior
    nobody = known is not None and not known.any() and not reads
    if nobody or (likelihood is not None and likelihood.draws):
        # No behavior_logp is known, or what sampled has none: nothing to compare.
        return batch.replace(behavior_logp=None, extras=extras)
    return batch.replace(extras=extras) if known is not None and known.all() else batch


def _with_host_scores(experiment: Experiment, collected: Collected, batch: Batch) -> Batch:
    """The batch with stored log-probabilities of a reference, and scores of a teacher on the host.

    A teacher on the devices scores the batch in its step.
    """
    if experiment.references is not None:
        batch = experiment.references.attach(batch)
    teacher = experiment.teacher
    if teacher is None or isinstance(teacher, Teacher):
        return batch
    scores = host_scores(
        teacher,
        experiment.recipe,
        batch,
        collected.questions,
        collected.messages,
        encoder=dataclasses.replace(experiment.encoder, room=sys.maxsize),
        vocab_size=experiment.model.config.vocab_size,
    )
    return batch.with_extras(scores)


class _Baselines(NamedTuple):
    """Rewards of the greedy response, or episode, to each of P questions; 0 for a text."""

    rewards: np.ndarray
    failed: np.ndarray
    tokens: int  # that were sampled
    seconds: float  # spent on sampling


def _baselines(
    experiment: Experiment,
    collected: Collected,
    params: ArrayTree,
    key: Array,
    *,
    number: int,
    subagent: SubagentPlayer | None,
) -> _Baselines:
    """Samples and grades a greedy response, or episode, to each question.

    A text answers no question, so its group has none.
    """
    config, tokenizer = experiment.config, experiment.tokenizer
    start = time.perf_counter()
    if config.environment is None:
        groups = np.flatnonzero((collected.roles != TEXT).any(axis=-1))
        rewards, failed = np.zeros(len(collected.questions)), np.zeros(len(collected.roles), bool)
        if not groups.size:
            return _Baselines(rewards, failed, 0, 0.0)
        questions = [collected.questions[p] for p in groups]
        tokens = [question.tokens for question in questions]
        # The last ones are repeated, so that each device has an equal number.
        apart, mesh = experiment.sampler_mesh, experiment.rollout_mesh
        shards = batch_shards(mesh if apart is None else apart)
        tokens += [tokens[-1]] * (-len(tokens) % shards)
        likely = processes.to_host(experiment.samplers.baseline(params, key, tokens))
        likely = jax.tree.map(lambda x: x[: groups.size], likely)
        check_finite("greedy baseline", likely.finish, questions)
        seconds = time.perf_counter() - start
        scores = experiment.grader(questions, texts_of(likely, tokenizer.decode))
        rewards[groups], failed[groups] = scores.rewards, scores.failed
        return _Baselines(rewards, failed, _num_sampled([likely]), seconds)
    groups = play_groups(
        experiment.samplers.engine,
        params,
        key,
        experiment.train,
        experiment.episodes((number,), subagent),  # that begin as those of the batch
        places=collected.places,
        decode=tokenizer.decode,
        samples=1,
        temperature=0.0,
        max_new_tokens=config.sampling.max_new_tokens,
        pad_id=tokenizer.pad_id,
    )
    return _Baselines(
        np.concatenate([group.scores.rewards for group in groups]),
        np.concatenate([group.scores.failed for group in groups]),
        _num_sampled([group.rollout for group in groups]),
        time.perf_counter() - start,
    )


def _num_sampled(rollouts: Sequence[Rollout]) -> int:
    """How many tokens the policy sampled; those that an environment wrote have no version."""
    return sum(int((rollout.version[rollout.mask] >= 0).sum()) for rollout in rollouts)


def _with_fields(
    experiment: Experiment,
    collected: Collected,
    batch: Batch,
    params: ArrayTree,
    key: Array,
    *,
    number: int,
    subagent: SubagentPlayer | None,
) -> tuple[Collected, Batch]:
    """The batch with the fields that its recipe reads; some are sampled here.

    A group whose greedy baseline fails does not take part, which ``collected`` counts, as it does
    the tokens of baselines and the seconds of their sampling.
    """
    questions = collected.questions
    sampled: list[_Baselines] = []

    def greedy_rewards() -> np.ndarray:
        sampled.append(
            _baselines(experiment, collected, params, key, number=number, subagent=subagent)
        )
        return sampled[-1].rewards

    batch = attach_fields(
        batch,
        experiment.recipe,
        scores=collected.scores,
        rollout=collected.rollout,
        step=number,
        indices=collected.places,
        roles=collected.roles,
        nodes=_nodes(experiment, collected),
        segments=collected.segments,
        questions=questions,
        texts=texts_of_batch(experiment, collected),
        greedy=greedy_rewards,
        draws=_draws(
            experiment, batch, questions, key, number=number, latents=collected.rollout.latents
        ),
        sums=getattr(experiment.config.reward, "weights_of_sum", None) is not None,
    )
    for each in sampled:
        seconds = {**collected.seconds, "sample": collected.seconds["sample"] + each.seconds}
        collected = collected._replace(tokens=collected.tokens + each.tokens, seconds=seconds)
        if each.failed.any():  # such a group would train as if its baseline were 0
            where = collected.where & ~each.failed[:, None]
            failures = collected.failures + int(each.failed.sum())
            collected = collected._replace(where=where, failures=failures)
            batch = batch.replace(where=where)
    return collected, batch


def _nodes(experiment: Experiment, collected: Collected) -> np.ndarray | None:
    """The nodes of the collector's trees; those of a flow policy are its likelihood's."""
    likelihood, rollout = experiment.recipe.likelihood, collected.rollout
    if not isinstance(likelihood, FlowLikelihood):
        return collected.nodes
    if rollout.latents is None:
        raise ValueError(
            f"recipe {experiment.recipe.name!r} trains a flow policy, but "
            f"{experiment.collector!r} provides responses, which have no latents."
        )
    return likelihood.node_ids(
        rollout.mask.shape[-1],
        experiment.config.sampling.group_size,
        members=collected.members,
    )


def _draws(
    experiment: Experiment,
    batch: Batch,
    questions: Sequence[Question],
    key: Array,
    *,
    number: int,
    latents: np.ndarray | None,
) -> Any:
    """What the scores of a likelihood are computed at, on the host; None if it draws nothing.

    The masks of a denoiser's, or the noise of a flow's forward process.
    """
    likelihood = experiment.recipe.likelihood
    if likelihood is None or not likelihood.draws:
        return None
    drawn = jax.random.fold_in(jax.random.fold_in(key, number), _MASKS)
    drawn = jax.random.wrap_key_data(processes.to_host(jax.random.key_data(drawn)))
    if isinstance(likelihood, FlowLikelihood):
        return processes.to_host(draw_noise(drawn, latents))
    check_unmasked(batch, experiment.model, [q.prompt.name for q in questions])
    return processes.to_host(draw_masks(likelihood, drawn, batch))


def _shown_rows(config: TrainConfig, collected: Collected) -> list[dict]:
    """Completions to show, one record each; a text completes no prompt."""
    present = collected.rollout.mask.any(axis=-1)
    answered = (collected.roles != TEXT).any(axis=-1)
    records = sample_rows(
        collected.questions, collected.texts, collected.scores, collected.messages
    )
    groups = np.arange(len(records)).reshape(present.shape)[answered]
    if not groups.size:
        return []
    shown = spread_rows(groups.reshape(-1), len(groups), config.samples_shown)
    return [records[i] for i in shown if present.flat[i]]


def with_width(collected: Collected, length: int) -> Collected:
    """Pads or cuts all responses to ``length`` cells, for a model that sees all of them.

    Raises:
      ValueError: If there is context among the responses, which such a model does not read.
    """
    if collected.context.any():
        name = collected.questions[int(np.argmax(collected.context))].prompt.name
        raise ValueError(
            f"collect: a response to prompt {name!r} has tokens that are read and do not train, "
            "such as the end of a prompt that is not the same in its row; a denoising or flow "
            "model cannot read them."
        )

    def resize(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x)[:, :, :length]
        return np.pad(x, [(0, 0), (0, 0), (0, length - x.shape[2]), *[(0, 0)] * (x.ndim - 3)])

    unchanged = {"prompt_tokens", "prompt_mask", "finish"}
    resized = {
        name: value if name in unchanged else jax.tree.map(resize, value)
        for name, value in collected.rollout._asdict().items()
    }
    known = None if collected.known is None else resize(collected.known)
    return collected._replace(rollout=Rollout._make(resized.values()), known=known)


def texts_of_batch(experiment: Experiment, collected: Collected) -> Texts:
    """The responses of a batch as text, with the run's conversions between text and tokens."""
    encoder = dataclasses.replace(experiment.encoder, room=sys.maxsize)

    def encode(message: str) -> list[int]:
        return encoder.prompt(message, "of the teacher")

    room = teacher_room(experiment.config, experiment.model, experiment.encoder.room)
    return Texts(
        collected.texts,
        collected.messages,
        encode,
        experiment.tokenizer.decode,
        room,
        write=encoder.response,
        context=experiment.model.config.max_length - experiment.config.sampling.max_new_tokens,
    )


def _play_collector(
    experiment: Experiment,
    params: ArrayTree,
    key: Array,
    cursor: Cursor,
    collector_state: ArrayTree,
    *,
    number: int,
    version: int,
    subagent: SubagentPlayer | None = None,
) -> Collected:
    """Collects what the collector requests, with a sampler, slots or a population."""
    config, recipe, sampling = experiment.config, experiment.recipe, experiment.config.sampling
    # The noise of a population is drawn from the run's key itself.
    run_key, key = key, jax.random.fold_in(key, number)
    params = experiment.behavior_params(params)
    group_size = sampling.group_size * recipe.needs.tries
    episodes = None
    if config.environment is not None:
        episodes = experiment.episodes((number,), subagent, trains=True)
    backend: EngineBackend | SamplerBackend
    if experiment.samplers.engine is not None:
        backend = EngineBackend(
            experiment.samplers.engine,
            params,
            key,
            experiment.train,
            version=version,
            decode=experiment.tokenizer.decode,
            grade=experiment.grader.local,
            max_new_tokens=sampling.max_new_tokens,
            pad_id=experiment.tokenizer.pad_id,
            episodes=episodes,
        )
    else:
        backend = SamplerBackend(
            _batch_sampler(experiment, params, key, run_key, version=version),
            experiment.train,
            decode=experiment.tokenizer.decode,
            grade=experiment.grader,
            num_groups=config.prompts_per_step,
            group_size=group_size,
        )
    collected = collect(
        experiment.collector,
        collector_state,
        jax.random.fold_in(key, _COLLECTOR),
        backend,
        experiment.train,
        next_places=lambda count: next_questions(experiment, cursor, count)[0],
        num_groups=config.prompts_per_step,
        group_size=group_size,
        step=number,
        version=version,
        seed=config.data.seed,
        limits=Limits(
            experiment.encoder,
            sampling.max_new_tokens,
            experiment.model.config.vocab_size,
            episodes,
        ),
        pad_id=experiment.tokenizer.pad_id,
        rows=experiment.rows,
    )
    if recipe.needs.keeps_places:
        _check_members(experiment, collected, group_size)
    if isinstance(params, Halves):
        collected = with_roles(collected, recipe.sampled_by, group_size)
    return collected


def _check_members(experiment: Experiment, collected: Collected, group_size: int) -> None:
    """Raises ValueError unless the rollouts of a population are in the order of its members.

    An update draws the noise of a member again by its place in the batch. Members that all prompts
    share may answer the prompts in any order.
    """
    first, place = np.moveaxis(collected.members, -1, 0)
    numbers, expected = first + place, np.arange(len(place) * group_size).reshape(-1, group_size)
    if experiment.recipe.shared:
        numbers, expected = place, expected % group_size
    if not np.array_equal(numbers, expected):
        raise ValueError(
            f"recipe {experiment.recipe.name!r} draws the noise of members again by their places "
            f"in a batch, but {experiment.collector!r} drops, repeats or rearranges members; its "
            "rows must hold all rollouts of each request in the order of their numbers."
        )


def _batch_sampler(
    experiment: Experiment, params: ArrayTree, key: Array, run_key: Array, *, version: int
) -> Callable[..., Rollout]:
    """The function of a :class:`SamplerBackend`: ``(prompts, ids, fixed, draft) -> Rollout``.

    A population draws its noise from ``run_key``, everything else from the batch's ``key``.
    """
    recipe, samplers = experiment.recipe, experiment.samplers
    of_drafts = functools.cache(lambda: experiment.rounded(params))

    def sample(
        prompts: list[list[int]],
        ids: np.ndarray,
        fixed: np.ndarray | None = None,
        draft: bool = False,
    ) -> Rollout:
        sampler = samplers.rollouts
        if draft and samplers.drafts:
            rollout = samplers.drafts(of_drafts(), key, prompts, request_ids=ids, version=version)
        elif fixed is not None:
            length = experiment.config.sampling.max_new_tokens
            more = ((0, 0), (0, 0), (0, length - fixed.shape[-1]))
            fixed = np.pad(fixed, more, constant_values=-1)
            rollout = sampler(params, key, prompts, request_ids=ids, version=version, fixed=fixed)
        elif isinstance(params, Halves):
            rollout = sample_halves(
                sampler, params, recipe.sampled_by, key, prompts, request_ids=ids, version=version
            )
        elif not recipe.needs.samples_members:
            rollout = sampler(params, key, prompts, request_ids=ids, version=version)
        elif np.array_equal(ids.reshape(-1), np.arange(ids.size)):
            rollout = sampler(params, run_key, prompts, version=version)
        else:
            raise ValueError(
                f"recipe {recipe.name!r} samples {ids.shape[1]} rollouts of each of "
                f"{len(prompts)} prompts once per step; {experiment.collector!r} asks for others."
            )
        return processes.to_host(rollout)

    return sample


def to_batch(
    rollout: Rollout,
    rewards: np.ndarray,
    questions: Sequence[Question],
    *,
    vocab_size: int,
    where: np.ndarray | None = None,
    drop_failed: bool = False,
    known: np.ndarray | None = None,
) -> Batch:
    """A training batch of graded rollouts, as host arrays; validated if any rollout takes part.

    Args:
      rollout: P groups of G.
      rewards: float ``[P * G]`` or ``[P, G]``.
      questions: See the module.
      vocab_size: Size of the vocabulary; all tokens are below it.
      where: bool ``[P, G]``, True for rollouts that take part; None for all.
      drop_failed: Clear ``where`` for rollouts that failed or have a non-finite reward, instead of
        raising an error: for a population, which may have broken members.
      known: bool ``[P, G, T']``, T' at least T, where ``behavior_logp`` is known; None for all.

    Raises:
      ValueError: If a value is unusable; the message names the prompt.
    """
    host = processes.to_host(rollout)
    shape = host.mask.shape[:2]
    ids = [q.prompt.name for q in questions]
    rewards = np.asarray(rewards, np.float32).reshape(shape)
    where = np.ones(shape, bool) if where is None else where
    if drop_failed:
        where = where & np.isfinite(rewards) & (host.finish != FAILED)
        rewards = np.where(where, rewards, 0.0)
    else:
        check_finite("to_batch", np.where(where, host.finish, STOP), questions)
    batch = Batch.from_rollout(host, rewards, where=where)
    if known is not None:
        known = known[..., : batch.tokens.shape[-1]]
        batch = batch.replace(extras={"behavior_known": known})
    if not where.any():
        return batch
    return validate_batch(batch, vocab_size=vocab_size, prompt_ids=ids)


def may_start(number: int, version: int, *, max_staleness: int) -> bool:
    """Whether weights of this version may sample a batch.

    This is :func:`~jaxrl_llm.corrections.staleness_capacity` counted in batches, with one batch in
    progress at a time. It uses host integers, so the calling thread does not wait for the device.
    """
    return number <= version + max_staleness


def sampling_params(experiment: Experiment, state: TrainState) -> ArrayTree:
    """The parameters that sample, of the kind of ``state.params``."""
    by_reference = experiment.recipe.needs.sampled_by == "reference"  # one that moves
    return state.reference_params if by_reference else state.params


class SyncRollouts:
    """Batches that are sampled on request, with the weights that they train."""

    def __init__(self, experiment: Experiment, state: TrainState):
        self._experiment, self._state = experiment, state
        self._prepared: RolloutBatch | None = None

    def prepare(self) -> RolloutBatch:
        """Samples and grades the first batch in the caller's thread; ``next`` then returns it."""
        self._prepared = self.next()
        return self._prepared

    def __enter__(self) -> "SyncRollouts":
        return self

    def __exit__(self, *error) -> None:
        return None

    def next(self) -> RolloutBatch:
        """The batch that the newest state trains on."""
        state, number = self._state, int(self._state.step)
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared.number == number:
            return prepared
        return collect_rollouts(
            self._experiment,
            state.with_base(sampling_params(self._experiment, state)),
            state.key,
            state.data_cursor,
            state.collector_state,
            number=number,
            version=number,
            learned=learned_of(self._experiment, state),
            subagent=state.subagent.params if state.subagent else None,
        )

    def publish(self, state: TrainState) -> None:
        """Receives the state after a step."""
        self._state = state

    def pending(self, step: int) -> list[RolloutBatch]:
        """Finished batches that no step has trained on: none."""
        del step
        return []


class AsyncRollouts:
    """Batches that a thread samples and grades while others are trained on.

    Enter the context before the first ``next``. If the thread raises an error, ``next`` returns the
    batches finished before and then raises the error.
    """

    def __init__(
        self, experiment: Experiment, state: TrainState, pending: Sequence[RolloutBatch] = ()
    ):
        self._experiment, self._mesh = experiment, experiment.sampler_mesh
        self._key, self._base = state.key, state.base
        if self._mesh is not None:
            self._key = jax.device_put(state.key, replicated(self._mesh))
            self._base = self._copy(state.base)
        self._base = experiment.behavior(self._base)
        self._finished = deque(pending)  # in order; a batch stays until it has been trained on
        self._number = int(state.step) + len(pending)
        self._cursor, self._collector_state = state.data_cursor, state.collector_state
        if pending:
            self._cursor, self._collector_state = pending[-1].cursor, pending[-1].collector_state
        self._changed = threading.Condition()
        self._stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)
        self.publish(state)

    def prepare(self) -> RolloutBatch:
        """Samples and grades the first batch in the caller's thread; call it before entering."""
        if not self._finished:
            self._collect(self._weights)
        return self._finished[0]

    def __enter__(self) -> "AsyncRollouts":
        self._thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        at_once = kind is not None and not issubclass(kind, Exception)
        self._thread.join(_AT_ONCE if at_once else _PATIENCE)
        if self._thread.is_alive() and not at_once:
            # A device call cannot be stopped, and Python aborts if it exits during one.
            atexit.register(self._thread.join)

    def next(self) -> RolloutBatch:
        """The batch that the newest state trains on, as soon as it is finished."""
        with self._changed:
            while not (self._finished or self._error is not None):
                self._changed.wait(SIGNAL_SECONDS)
            if not self._finished and self._error is not None:
                raise self._error
            return self._finished[0]

    def publish(self, state: TrainState) -> None:
        """Hands the weights after a step to the sampler, and drops the batch of that step."""
        version = int(state.step)
        params = self._copy(sampling_params(self._experiment, state))
        params = merge_adapter(self._base, self._experiment.behavior(params))
        learned = learned_of(self._experiment, state)
        with self._changed:
            self._weights = (version, params, learned)
            self._finished = deque(self._from(version))
            self._changed.notify_all()

    def pending(self, step: int) -> list[RolloutBatch]:
        """Finished batches that no step up to ``step`` has trained on; a checkpoint saves them."""
        with self._changed:
            return self._from(step)

    def _from(self, step: int) -> list[RolloutBatch]:
        return [batch for batch in self._finished if batch.number >= step]

    def _copy(self, params: ArrayTree) -> ArrayTree:
        """A copy of the weights for the sampler, since the next step donates its input."""
        if self._mesh is None:
            return jax.tree.map(jnp.copy, params)
        rules = self._experiment.model.sharding_rules
        return jax.device_put(params, param_shardings(params, self._mesh, rules))

    def _run(self) -> None:
        """The thread: collects each batch as soon as it may start."""
        config = self._experiment.config
        most = config.asynchrony.max_staleness

        def may_go_on() -> bool:
            return self._stopped or may_start(self._number, self._weights[0], max_staleness=most)

        def admitted() -> tuple[int, ArrayTree, ArrayTree | None] | None:
            """The newest weights, once the next batch may start; None if there is no next batch."""
            if self._number >= config.steps:
                return None
            with self._changed:
                self._changed.wait_for(may_go_on)
                return None if self._stopped else self._weights

        try:
            while (weights := admitted()) is not None:
                self._collect(weights)
                del weights  # hold no old weights while waiting for new ones
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _collect(self, weights: tuple[int, ArrayTree, ArrayTree | None]) -> None:
        """Collects the next batch with ``(version, params, learned)``."""
        version, params, learned = weights
        batch = collect_rollouts(
            self._experiment,
            params,
            self._key,
            self._cursor,
            self._collector_state,
            number=self._number,
            version=version,
            learned=learned,
        )
        with self._changed:
            self._finished.append(batch)
            self._number, self._cursor = batch.number + 1, batch.cursor
            self._collector_state = batch.collector_state
            self._changed.notify_all()


def make_rollouts(
    experiment: Experiment, state: TrainState, pending: Sequence[RolloutBatch] = ()
) -> SyncRollouts | AsyncRollouts:
    """The rollouts of a run, as configured."""
    for thread in threading.enumerate():
        # An earlier run in this process may have ended during a batch. Two threads that sample at
        # once take twice the memory and, on several devices, wait for each other.
        if thread.name == _THREAD:
            thread.join()
    if not experiment.config.asynchrony.max_staleness:
        return SyncRollouts(experiment, state)
    return AsyncRollouts(experiment, state, pending)


def pack_pending(experiment: Experiment, batches: Sequence[RolloutBatch]) -> Extras | None:
    """Pending batches as a checkpoint stores them; None if there are none."""
    if not batches:
        return None
    arrays, notes = [], []
    for each in batches:
        fields = {f.name: getattr(each.batch, f.name) for f in dataclasses.fields(Batch)}
        leaves = dict(enumerate(jax.tree.leaves(each.collector_state)))
        collector = {f"collector_state/{i}": np.asarray(x) for i, x in leaves.items()}
        arrays.append(_without_none(fields) | collector)
        host = ("number", "version", "begin", "cursor", "metrics", "rows", "seconds")
        notes.append({name: getattr(each, name) for name in host})
    return Extras(arrays, {"settings": settings(experiment.config), "batches": notes})


def unpack_pending(
    arrays: dict[str, Any], notes: dict[str, Any], collector_state: ArrayTree = ()
) -> RolloutBatch:
    """The inverse of :func:`pack_pending`, for one batch.

    Args:
      arrays: Arrays of the batch.
      notes: All other fields of the batch.
      collector_state: A state with the structure of the saved state.

    Raises:
      LookupError: If a field is absent.
      ValueError: If shapes disagree.
      TypeError: If a field is unknown or of a wrong dtype.
    """
    arrays, structure = dict(arrays), jax.tree.structure(collector_state)
    leaves = [arrays.pop(f"collector_state/{i}") for i in range(structure.num_leaves)]
    if "support" in arrays:
        arrays["support"] = Support(**arrays["support"])
    if "packing" in arrays:
        arrays["packing"] = Tree(**arrays["packing"])
    return RolloutBatch(
        number=notes["number"],
        version=notes["version"],
        begin=Cursor(*notes["begin"]),
        cursor=Cursor(*notes["cursor"]),
        collector_state=jax.tree.unflatten(structure, leaves),
        batch=Batch(**arrays).check(),
        metrics=notes["metrics"],
        rows=notes["rows"],
        seconds=notes["seconds"],
    )


# Settings that a batch of rollouts does not depend on, besides those that any resume may change.
_LATER = ("optimizer.", "asynchrony.", "epochs", "minibatches")


def restore_pending(
    checkpoints: Checkpoints, experiment: Experiment, state: TrainState, log: Callable[[str], Any]
) -> list[RolloutBatch]:
    """The batches in the checkpoint of a state, if this run would have made the same ones.

    The first batch that this run would not have made is dropped with all later ones, and their
    questions are sampled again. Such a batch may come from another recipe or from weights that are
    now too old.

    Args:
      checkpoints: The checkpoints that the state was restored from; without a restore the result is
        empty.
      experiment, state: See the module.
      log: Called with a message on how many batches are dropped.
    """
    stored = checkpoints.restore_extras()
    if stored is None:
        return []
    total = len(stored.notes["batches"])
    most = experiment.config.asynchrony.max_staleness
    changed = changed_settings(stored.notes.get("settings", {}), settings(experiment.config))
    same_run = most > 0 and all(name.startswith(_LATER) for name in changed)
    pending: list[RolloutBatch] = []
    cursor = state.data_cursor
    for arrays, notes in zip(stored.arrays, stored.notes["batches"], strict=True):
        try:
            batch = unpack_pending(arrays, notes, state.collector_state)
        except (LookupError, TypeError, ValueError):
            break
        fresh = batch.number - batch.version <= most
        expected = (int(state.step) + len(pending), cursor)
        if (batch.number, batch.begin) != expected or not same_run or not fresh:
            break
        pending.append(batch)
        cursor = batch.cursor
    if dropped := total - len(pending):
        log(
            f"{dropped} of {total} batches of rollouts in the checkpoint do not fit this "
            "configuration; their questions are sampled anew."
        )
    return pending


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields that are not None, with support and packing as dicts."""
    plain = {
        k: _without_none(x._asdict()) if isinstance(x, Support | Tree) else x
        for k, x in fields.items()
    }
    return {name: x for name, x in plain.items() if x is not None}
