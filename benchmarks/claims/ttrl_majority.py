"""Agreement with the majority raises accuracy, though no answer is shown.

Questions of eight answers under a tabular softmax policy, one logit an answer, drawn from a normal
distribution and raised for the right answer, so that the most likely answer is right for a share
of the questions and a sampled one for less. Groups of 16 are drawn, `majority_rewards` in place of
answers, `grpo`, and a plain gradient step on each question, 200 times. Many sets of questions give
the rise of the exact accuracy of one sampled answer, where most questions' most likely answer is
right (a raise of 2) and where it is not for most (a raise of 0.5); 0 or below refutes the claim.

The paper also reports a policy above the vote that it began with. Here questions share nothing, and
training can only sharpen what is most likely: the accuracy after training less that of the vote of
64 before (`maj@64` of the policy before) is measured too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import harness

PAPER = "2504.16084"
ANSWERS, QUESTIONS, GROUP, VOTES = 8, 64, 16, 64
STEPS, RATE = 200, 0.5
RAISES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
KINDS = {2.0: "most votes right", 0.5: "most votes wrong"}


def step(logits, key):
    """One update of every question from a group that votes."""
    answers = jax.random.categorical(key, logits[:, None], shape=(QUESTIONS, GROUP))
    rewards = jr.rewards.majority_rewards(jnp.zeros(answers.shape), answer_ids=answers)
    advantages = jr.advantages.grpo(rewards)
    scores = jax.nn.one_hot(answers, ANSWERS) - jax.nn.softmax(logits)[:, None]
    return logits + RATE * jnp.mean(advantages[..., None] * scores, axis=1), None


@functools.partial(jax.jit, static_argnames="votes")
def measure(keys, raised, *, votes: int):
    """Accuracy of one answer before and after, and of the vote before, ``[draws]`` each."""

    def draw(key):
        first, second, third = jax.random.split(key, 3)
        logits = jax.random.normal(first, (QUESTIONS, ANSWERS)).at[:, 0].add(raised)
        trained, _ = jax.lax.scan(step, logits, jax.random.split(second, STEPS))
        cast = jax.random.categorical(third, logits[:, None], shape=(QUESTIONS, votes))
        vote = jr.rewards.majority_label(cast).label == 0
        right = (jax.nn.softmax(x)[:, 0].mean() for x in (logits, trained))
        return (*right, vote.mean())

    return jax.lax.map(draw, keys, batch_size=20)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """All raises; the quick form takes those that the claim is about, and fewer draws."""
    draws, raises = (8, tuple(KINDS)) if quick else (200, RAISES)
    keys = jax.random.split(jax.random.key(seed), draws)
    curves = {x: [np.asarray(y) for y in measure(keys, x, votes=VOTES)] for x in raises}
    measures, facts = [], {}
    for raised, kind in KINDS.items():
        before, after, vote = curves[raised]
        words = f"accuracy after training less before, {kind}"
        measures.append(harness.Measure(words, harness.mean(after - before, "draws"), "above", 0.0))
        words = f"accuracy after training less that of a vote of {VOTES} before, {kind}"
        measures.append(harness.Measure(words, harness.mean(after - vote, "draws"), "above", 0.0))
        facts[f"accuracy before, {kind}"] = before.mean()
        facts[f"accuracy of a vote of {VOTES} before, {kind}"] = vote.mean()
    labels = ("one answer, before", "one answer, after", f"vote of {VOTES}, before")
    series = [
        harness.Series(label, raises, [curves[x][place].mean() for x in raises])
        for place, label in enumerate(labels)
    ]
    plot = harness.Plot("raise of the right answer's logit", "accuracy", series)
    return harness.Claim(measures, plot, facts)
