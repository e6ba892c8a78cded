"""A linear softmax policy over features that all prompts share, trained on a collector's batches.

256 prompts of eight answers, one right: the best by a noisy linear judgment. An offset of the right
answer's logit, normal with mean -1 and deviation 2.5, makes prompts hard or easy.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _simulated

PROMPTS, ANSWERS, WIDTH = 256, 8, 16
GROUPS, SIZE = 32, 8


class Task(NamedTuple):
    """Features ``[N, A, W]``, offsets of logits ``[N, A]`` and the right answers ``[N]``."""

    features: np.ndarray
    offsets: np.ndarray
    right: np.ndarray


def make_task(seed: int) -> Task:
    generator = np.random.default_rng((seed, 0))
    features = generator.normal(size=(PROMPTS, ANSWERS, WIDTH)) / np.sqrt(WIDTH)
    merit = features @ generator.normal(size=WIDTH)
    right = np.argmax(merit + 0.5 * generator.normal(size=merit.shape), axis=-1)
    offsets = np.zeros((PROMPTS, ANSWERS))
    offsets[np.arange(PROMPTS), right] = generator.normal(-1.0, 2.5, PROMPTS)
    return Task(features.astype(np.float32), offsets.astype(np.float32), right)


def chances(params: np.ndarray, task: Task) -> np.ndarray:
    """Of all answers ``[N, A]``."""
    logits = task.features @ params + task.offsets
    each = np.exp(logits - logits.max(-1, keepdims=True))
    return each / each.sum(-1, keepdims=True)


def success(params: np.ndarray, task: Task) -> np.ndarray:
    """The exact success rate of each prompt ``[N]``."""
    return chances(params, task)[np.arange(PROMPTS), task.right]


def policy(params: np.ndarray, task: Task, version: int) -> _simulated.Answer:
    """Answers by the policy, with their log-probabilities."""
    table = chances(params, task)

    def answer(generator, request, prompt):
        drawn = generator.choice(ANSWERS, request.rollouts, p=table[prompt])
        rewards = (drawn == task.right[prompt]).astype(np.float32)
        responses = []
        for token, reward in zip(drawn, rewards, strict=True):
            logp = np.log(table[prompt, [token]]).astype(np.float32)
            one = np.array([token], np.int32)
            of = np.array([version], np.int32)
            responses.append(
                jr.curation.Response(one, logp, logp, of, np.ones(1, bool), reward=float(reward))
            )
        return _simulated.Answers(rewards, tuple(responses))

    return answer


# (logp, behavior_logp, advantages, mask) -> token loss, all [P, G].
Loss = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def on_policy(logp, behavior, advantages, mask):
    return jr.surrogates.ppo_clip(logp, jax.lax.stop_gradient(logp), advantages, mask)


def clipped_by_sampler(logp, behavior, advantages, mask):
    return jr.surrogates.ppo_clip(logp, behavior, advantages, mask)


def decoupled(logp, behavior, advantages, mask):
    old = jax.lax.stop_gradient(logp)
    return jr.surrogates.decoupled_ppo(logp, old, advantages, mask, behavior_logp=behavior)


@functools.partial(jax.jit, static_argnames="loss")
def gradient(params, features, offsets, answers, behavior, advantages, where, *, loss: Loss):
    """Of the mean loss over the rollouts that take part."""

    def mean(params):
        logp = jax.nn.log_softmax(jnp.einsum("paw,w->pa", features, params) + offsets)
        taken = jnp.take_along_axis(logp, answers, axis=1)
        return jnp.sum(loss(taken, behavior, advantages, where)) / jnp.maximum(where.sum(), 1)

    return jax.grad(mean)(params)


class Curve(NamedTuple):
    """After each update: mean success rate, rollouts sampled so far, share of informative groups,
    and success rates of all prompts before and after the training."""

    accuracy: np.ndarray
    sampled: np.ndarray
    informative: np.ndarray
    before: np.ndarray
    after: np.ndarray


def train(
    collector,
    *,
    seed: int,
    steps: int,
    rollouts: int = 0,
    rate: float = 1.0,
    loss: Loss = on_policy,
    weigh=None,
) -> Curve:
    """Plain gradient steps with advantages of `grpo`.

    Args:
      rollouts: After all steps, more follow until so many are sampled.
      weigh: A Transform after the advantage that reads prompt_ids, rewards and where, and learns.
    """
    task = make_task(seed)
    params = np.zeros(WIDTH, np.float32)
    before = success(params, task)
    run = _simulated.Run(
        collector,
        prompts=PROMPTS,
        groups=GROUPS,
        size=SIZE,
        seed=seed,
        data=[{"text": ""}] * PROMPTS,
    )
    state = None if weigh is None else weigh.init()
    accuracy, sampled, informative = [], [], []
    while len(sampled) < steps or sum(sampled) < rollouts:
        batch = run.batch(policy(params, task, len(sampled)))
        answers = np.zeros(batch.rewards.shape, np.int32)
        behavior = np.zeros(batch.rewards.shape, np.float32)
        for p, row in enumerate(batch.responses()):
            for g, response in enumerate(row):
                answers[p, g] = response.tokens[0]
                behavior[p, g] = np.asarray(response.behavior_logp)[0]
        advantages = jr.advantages.grpo(jnp.asarray(batch.rewards), where=jnp.asarray(batch.where))
        ids = jnp.asarray(batch.prompts)
        fields = {"prompt_ids": ids, "rewards": batch.rewards, "where": batch.where}
        if weigh is not None:
            advantages, state = weigh.update(advantages, state, **fields)
        of = batch.prompts
        step_of = gradient(
            params, task.features[of], task.offsets[of], answers, behavior, advantages, batch.where,
            loss=loss,
        )  # fmt: skip
        params = params - rate * np.asarray(step_of)
        if weigh is not None:
            state = weigh.learn(state, **fields)
        accuracy.append(success(params, task).mean())
        sampled.append(batch.sampled)
        informative.append(batch.informative.mean())
    return Curve(
        np.array(accuracy),
        np.cumsum(sampled),
        np.array(informative),
        before,
        success(params, task),
    )


def cost(curve: Curve, accuracy: float, what: str = "sampled") -> tuple[float, bool]:
    """Rollouts, or updates, until an accuracy is reached, or all; and whether it is reached."""
    reached = np.flatnonzero(curve.accuracy >= accuracy)
    place = reached[0] if reached.size else len(curve.accuracy) - 1
    value = float(curve.sampled[place]) if what == "sampled" else float(place + 1)
    return value, bool(reached.size)
