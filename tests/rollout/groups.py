"""Groups that differ in all that groups can, and what they came to."""

import numpy as np

from jaxrl_llm.rollout import Group

G = 6  # the most requests of a group


def draw_groups(n, *, seed=0, first=0, most=24):
    """So many groups of 1 to 6 requests with prompts of 1 to 16 tokens."""
    rng, groups = np.random.default_rng(seed), []
    for i in range(n):
        size = int(rng.integers(1, G + 1))
        prompt = rng.integers(12, 259, int(rng.integers(1, 17))).tolist()
        asked = tuple(rng.integers(1, most + 1, size).tolist())
        groups.append(Group(f"g{i}", prompt, tuple(range(first, first + size)), asked))
        first += size
    return groups


def limits(group):
    """The most new tokens of each request."""
    most = group.max_new_tokens or 24
    each = most if isinstance(most, tuple) else (most,) * len(group.requests)
    return dict(zip(group.requests, each, strict=True))


def by_request(finished):
    """Completions of finished groups, each request there once."""
    completions = [c for done in finished for c in done.completions]
    result = {c.request: c for c in completions}
    assert len(result) == len(completions)
    for done in finished:
        assert tuple(c.request for c in done.completions) == done.group.requests
    return result


def assert_same(result, expected, *, atol=1e-5):
    """The same tokens and ends, and log-probabilities to 1e-5."""
    assert result.keys() == expected.keys()
    for request, ours in result.items():
        theirs = expected[request]
        assert ours.tokens.tolist() == theirs.tokens.tolist(), request
        assert ours.finish == theirs.finish, request
        for name in ("behavior_logp", "model_logp", "log_kept"):
            x, y = getattr(ours.out, name), getattr(theirs.out, name)
            np.testing.assert_allclose(x, y, atol=atol, err_msg=f"{name} of {request}")
