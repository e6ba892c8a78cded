"""One tiny model and a few engines for all tests of the engine: each compiles once."""

import functools

import jax
import numpy as np
import pytest
from rollout.groups import G, limits

import jaxrl_llm as jr
from jaxrl_llm.rollout import Completion
from jaxrl_llm.rollout.slots import Tokens
from jaxrl_llm.rollout.types import LENGTH, STOP

# One token in twenty stops, so about two responses in three do before their end.
DRAW = {"stop_ids": tuple(range(12)), "temperature": 0.7}
SIZES = {"rows": 2, "width": 3, "prompt_length": 16, "max_new_tokens": 24, "chunk": 4, "block": 7}


@pytest.fixture(scope="session")
def tiny():
    return jr.testing.tiny_model(num_layers=1)


@pytest.fixture(scope="session")
def make(tiny):
    @functools.cache
    def make(**options):
        return jr.rollout.make_engine(tiny[0], **{**SIZES, **DRAW, **options})

    return make


@pytest.fixture(scope="session")
def engine(make):
    return make(entropy=True)


@pytest.fixture(scope="session")
def reference(tiny):
    """``reference(groups)``: the completions that the whole-batch sampler gives, by request."""
    model, ours = tiny

    @functools.cache
    def sampler(most):
        options = {"max_new_tokens": most, "group_size": G, "buckets": (16,)}
        return jr.rollout.make_sampler(model, **options, **DRAW)

    def reference(groups, params=ours, *, size=32, most=24):
        result, sample = {}, sampler(most)
        for begin in range(0, len(groups), size):
            part = groups[begin : begin + size]
            part += [part[0]] * (size - len(part))
            ids = [[*g.requests, *[0] * (G - len(g.requests))] for g in part]
            prompts = [g.prompt for g in part]
            rollout = sample(params, jax.random.key(0), prompts, request_ids=ids)
            rollout = jax.tree.map(np.asarray, rollout)
            for p, group in enumerate(part):
                for g, (request, limit) in enumerate(limits(group).items()):
                    n = min(int(rollout.mask[p, g].sum()), limit)
                    stopped = rollout.tokens[p, g, n - 1] in DRAW["stop_ids"]
                    names = Tokens._fields[:5]
                    out = Tokens(*(getattr(rollout, name)[p, g, :n] for name in names))
                    result[request] = Completion(request, out, STOP if stopped else LENGTH)
        return result

    return reference


@pytest.fixture(scope="session")
def generate(tiny):
    """``generate(engine, *groups, **options)``: a Generation that has them in its queue."""

    def generate(engine, *groups, params=tiny[1], **options):
        generation = jr.rollout.Generation(engine, params, **{"key": jax.random.key(0), **options})
        generation.submit(*groups)
        return generation

    return generate
