"""Batches of collectors on any backend, and what backends of numbers share."""

import jax
import numpy as np

from jaxrl_llm.rollout import Rollout
from jaxrl_llm.rollout.collect import collect


def collected(collector, backend, *, questions, groups, state=None, first=0, **options):
    """A batch of ``groups``, as many groups of so many rollouts.

    Prompts that come in order do so from ``first`` on.
    """
    count, size = groups
    n = len(questions)
    defaults = {
        "next_places": lambda count: [(first + i) % n for i in range(count)],
        "num_groups": count,
        "group_size": size,
        "step": 0,
    }
    state, key = (
        collector.init(n) if state is None else state,
        options.pop("key", jax.random.key(0)),
    )
    return collect(collector, state, key, backend, questions, **defaults | options)


def rollout_of(prompt, tokens, mask=None, **fields):
    """A rollout ``[1, n, T]`` of numbers: zeros but for these fields."""
    prompt, tokens = np.int32([prompt]), np.int32([tokens])
    zeros = np.zeros(tokens.shape, np.float32)
    names = ("behavior_logp", "model_logp", "log_kept")
    defaults = {name: zeros for name in names} | {"finish": np.ones(tokens.shape[:-1], np.int32)}
    defaults |= {"version": zeros.astype(np.int32), "mask": zeros == 0 if mask is None else mask}
    arrays = {"prompt_mask": np.ones(prompt.shape, bool)} | defaults | fields
    return Rollout(prompt_tokens=prompt, tokens=tokens, **arrays)


class Numbers:
    """A backend that finishes one queued group at a time in a random order, by ``finish``.

    Without a ``seed`` it finishes all at once.
    """

    def __init__(self, seed=None, *, spare=0):
        self.random = None if seed is None else np.random.default_rng(seed)
        self.queue, self.seen, self.closed, self.most_spare = [], [], False, spare
        self.seconds = {"sample": 0.0, "reward": 0.0}

    def submit(self, asked):
        self.queue += asked
        self.seen += asked

    def spare(self):
        return max(self.most_spare - len(self.queue), 0)

    def wait(self):
        places = range(len(self.queue))
        if self.random is not None:
            places = [self.random.integers(len(self.queue))]
        done = [self.queue[i] for i in places]
        self.queue = [each for each in self.queue if each not in done]
        return {each: self.finish(each) for each in done}

    def close(self):
        self.closed = True
