"""Hints, stored rollouts, tasks for judges and admission, against the papers' own released code."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from golden_data import Difference, Ours

from jaxrl_llm import advantages, curation, rollout

SHARES = (0.25, 0.5, 0.75)


def guided(a):
    """GHPO: each stage is sampled for the prompts that are still hard."""
    rewards, stage = a["rewards"][0], jnp.zeros(a["rewards"].shape[1], jnp.int32)
    for tried in a["rewards"][1:]:
        hard = curation.needs_hint(rewards)
        stage = curation.guidance_stage(stage, hard)
        rewards = jnp.where(hard[:, None], tried, rewards)
    return {"stage": stage, "rewards": rewards}


def shown(a):
    return {"shown": jnp.stack([curation.prefix_length(a["length"], s) for s in SHARES])}


def graded(a):
    return {"advantages": advantages.grpo(a["rewards"] + 0.5 * a["format"], eps=1e-4)}


def stored(a):
    """The probabilities that the two draws are made with."""
    probs, fresh = [], a["advantages"]

    def draw(key, logits, shape):
        probs.append(jax.nn.softmax(logits))
        return jnp.zeros(shape, jnp.int32)

    with mock.patch.object(jax.random, "categorical", draw):
        sample = curation.ssb_sample(
            jax.random.key(0), fresh, a["stored_advantages"], count=fresh.shape[0] // 2
        )
    counts = {"fresh_count": ~sample.stored, "stored_count": sample.stored}
    return {"fresh": probs[0], "stored": probs[1]} | {k: x.sum() for k, x in counts.items()}


def tasks(a):
    """Which tasks ever occur, over many keys."""
    keys = jax.random.split(jax.random.key(3), 2048)
    prompts, size = a["rewards"].shape
    made = jax.vmap(
        lambda key: curation.judge_items(key, a["rewards"], answered=a["answered"])
    )(keys)  # fmt: skip
    row = jnp.broadcast_to(jnp.arange(prompts), made.kind.shape)

    def seen(where, first, second):
        empty = jnp.zeros((prompts, size + 1, size + 1), bool)
        places = (row, jnp.where(where, first, size), jnp.where(where, second, size))
        return empty.at[places].set(True)[:, :size, :size]

    one, two = made.kind == 1, made.kind == 2
    wrong = made.reflect >= 0
    return {
        "right": seen(one & (made.label == 1), made.first, made.first),
        "wrong": seen(one & (made.label == 0), made.first, made.first),
        "good_bad": seen(two & (made.label == 0), made.first, made.second),
        "bad_good": seen(two & (made.label == 1), made.first, made.second),
        "reflect": seen(wrong, made.reflect, made.reflect),
    }


def other_tasks(a, theirs):
    """All right: the first answer there is. Reflection: on any wrong rollout."""
    right, reflect = theirs["right"].copy(), theirs["reflect"].copy()
    for p in range(len(right)):
        if (a["rewards"][p] > 0).all():
            first = int(np.argmax(a["answered"][p]))
            right[p] = False
            right[p, first, first] = True
        wrong = np.flatnonzero(a["rewards"][p] == 0)
        reflect[p, wrong, wrong] = True
    return {"right": right, "reflect": reflect}


SPARK = Difference(
    "of a group that is all right, theirs shows the first rollout or nothing, ours the first with "
    "an answer; in the second half of a batch theirs reflects on answers alone and so on wrong "
    "rollouts that have one, ours on any wrong rollout.",
    other_tasks,
)


def library(a):
    """The texts of a library, in order, as numbers."""
    kinds, rows = ("add", "update", "delete"), []
    for plan in zip(a["kinds"], a["ids"], a["texts"], strict=True):
        operations = [
            curation.Operation(kinds[k], str(t) if t else "", None if i < 0 else f"G{i}")
            for k, i, t in zip(*plan, strict=True)
        ]
        made = curation.apply_operations({f"G{i}": str(100 + i) for i in range(5)}, operations)
        values = [int(text) for text in made.values()]
        rows.append(values + [-1] * (5 + len(operations) - len(values)))
    return {"library": np.array(rows, np.float32)}


def admitted(a):
    counts, peaks = [], []
    for used, remaining, queue, rest, capacity in zip(
        *(a[x] for x in ("used", "remaining", "queue_used", "queue_remaining", "capacity")),
        strict=True,
    ):
        free = 8 - len(used)
        count = rollout.admit(used, remaining, queue, rest, capacity=capacity, free_slots=free)
        first = np.append(used, queue[0]), np.append(remaining, rest[0])
        counts.append(count)
        peaks.append(rollout.future_peak(*first) if count else -1)
    return {"admitted": np.array(counts), "peak": np.array(peaks)}


TABLES = {
    "ghpo": {"stages": Ours(guided), "shares": Ours(shown), "advantages": Ours(graded)},
    "vl_rethinker": {"sample": Ours(stored)},
    "spark": {"tasks": Ours(tasks, {"random": SPARK})},
    "youtu_agent": {"library": Ours(library, host=True)},
    "lightllm": {"admitted": Ours(admitted, host=True)},
}
