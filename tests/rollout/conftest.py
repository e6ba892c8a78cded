"""One tiny model and a few engines for all tests of the engine: each compiles once."""

import functools

import jax
import numpy as np
import pytest

import jaxrl_llm as jr
from jaxrl_llm.rollout import Completion, Group
from jaxrl_llm.rollout.slots import Tokens
from jaxrl_llm.rollout.types import LENGTH, STOP

# One token in twenty stops, so about two responses in three do before their end.
DRAW = {"stop_ids": tuple(range(12)), "temperature": 0.7}
SIZES = {"rows": 2, "width": 3, "prompt_length": 16, "max_new_tokens": 24, "chunk": 4, "block": 7}
G = 6


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
def draw_groups():
    """``draw_groups(n, seed=0, first=0)``: groups of 1 to 6 requests with prompts of 1 to 16."""

    def draw_groups(n, *, seed=0, first=0, most=24):
        rng, groups = np.random.default_rng(seed), []
        for i in range(n):
            size = int(rng.integers(1, G + 1))
            prompt = rng.integers(12, 259, int(rng.integers(1, 17))).tolist()
            asked = tuple(rng.integers(1, most + 1, size).tolist())
            requests = tuple(range(first, first + size))
            groups.append(Group(f"g{i}", prompt, requests, max_new_tokens=asked))
            first += size
        return groups

    return draw_groups


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


def limits(group):
    most = group.max_new_tokens or 24
    each = most if isinstance(most, tuple) else (most,) * len(group.requests)
    return dict(zip(group.requests, each, strict=True))


@pytest.fixture(scope="session")
def generate(tiny):
    """``generate(engine, *groups, **options)``: a Generation that has them in its queue."""

    def generate(engine, *groups, params=tiny[1], **options):
        generation = jr.rollout.Generation(engine, params, **{"key": jax.random.key(0), **options})
        generation.submit(*groups)
        return generation

    return generate


@pytest.fixture(scope="session")
def by_request():
    """``by_request(finished)``: completions of finished groups, each request there once."""

    def by_request(finished):
        completions = [c for done in finished for c in done.completions]
        result = {c.request: c for c in completions}
        assert len(result) == len(completions)
        for done in finished:
            assert tuple(c.request for c in done.completions) == done.group.requests
        return result

    return by_request


@pytest.fixture(scope="session")
def assert_same():
    """``assert_same(result, expected)``: the same tokens and ends, log-probabilities to 1e-5."""

    def assert_same(result, expected, *, atol=1e-5):
        assert result.keys() == expected.keys()
        for request, ours in result.items():
            theirs = expected[request]
            assert ours.tokens.tolist() == theirs.tokens.tolist(), request
            assert ours.finish == theirs.finish, request
            for name in ("behavior_logp", "model_logp", "log_kept"):
                x, y = getattr(ours.out, name), getattr(theirs.out, name)
                np.testing.assert_allclose(x, y, atol=atol, err_msg=f"{name} of {request}")

    return assert_same
