"""Members side by side in one batch answer as each does alone."""

import functools

import jax
import numpy as np
import pytest
from rows import for_each

from jaxrl_llm.evolution import leaf_classes, model_delta, perturb
from jaxrl_llm.models.sharding import batch_sharding, param_shardings, shard
from jaxrl_llm.rollout import make_population_sampler, make_sampler, population
from jaxrl_llm.rollout.types import LENGTH, STOP
from jaxrl_llm.testing import tiny_model
from jaxrl_llm.train import make_mesh

KEY = jax.random.key(9)
NOISE = {"sigma": 0.2, "rank": 2}
N, T = 8, 6
# One token in four stops: some responses do at once, some later, some never.
STOPS = {"stop_ids": tuple(range(0, 64)), "max_new_tokens": T, "pad_id": 7}
ALIKE = [[80, 60, 17, 20], [80, 60, 19], [80, 60, 200, 31, 77, 12, 90], [80, 60, 3, 3]]
UNLIKE = [[90], [80, 60, 19], [4, 5, 200, 31, 77, 12, 90], [3, 3]]


@pytest.fixture(scope="module")
def tiny():
    """A model with biases and norms of heads; the biases begin at zero, which would hide them."""
    options = {"architecture": "qwen3", "qk_norm": True, "attention_bias": True}
    model, params = tiny_model(num_layers=1, **options)
    return model, jax.tree.map(lambda x: x + 0.05, params)


@pytest.fixture(scope="module")
def noise(tiny):
    """``noise(others=..., count=N)``: the deltas of so many members, and one member's weights."""
    _, params = tiny

    @functools.cache
    def noise(*, others="frozen", count=N, **options):
        classes, options = leaf_classes(params, others=others), {**NOISE, **options}
        members = np.arange(count)  # known, so that each pair is drawn once
        deltas = jax.jit(lambda: model_delta(params, classes, KEY, 3, members, **options))()
        options = {k: x for k, x in options.items() if k != "share_pairs"}
        return deltas, jax.jit(functools.partial(perturb, params, classes, KEY, 3, **options))

    return noise


@pytest.fixture(scope="module")
def alone(tiny):
    """``alone(member, prompts, ids, **options)``: what the plain sampler gives with its weights."""
    made = {}

    def alone(member, prompts, ids, **options):
        P, tries = ids.shape
        sample = made.setdefault(
            (tries, *options.items()),
            make_sampler(tiny[0], group_size=tries, buckets=(8,), **STOPS, **options),
        )
        return sample(member, jax.random.key(5), prompts, request_ids=ids, version=4)

    return alone


def assert_alike(result, expected, message="", *, atol=2e-4):
    """Tokens, masks and ends are the same, log-probabilities close."""
    for name in ("tokens", "mask", "finish", "version"):
        np.testing.assert_array_equal(getattr(result, name), getattr(expected, name), message)
    for name in ("behavior_logp", "model_logp", "log_kept"):
        x, y = getattr(result, name), getattr(expected, name)
        np.testing.assert_allclose(x, y, atol=atol, err_msg=f"{name} {message}")


def cut(rollout, index):
    """Some responses, without their prompts."""
    bare = rollout._replace(prompt_tokens=None, prompt_mask=None)
    return jax.tree.map(lambda x: np.asarray(x)[index], bare)


def check_members(result, prompts, one, alone, *, shared=True, tries=1, **options):
    """Each response ``[P, G tries]`` is that of its member alone, by its request."""
    P, width = result.tokens.shape[:2]
    G = width // tries
    for n in range(G if shared else P * G):
        asked = range(P) if shared else [n // G]
        g = n if shared else n % G
        first = (np.arange(P) * G + g)[:, None] * tries
        expected = alone(one(n), prompts, first + np.arange(tries), **options)
        columns = slice(g * tries, (g + 1) * tries)
        for p in asked:
            assert_alike(cut(result, (p, columns)), cut(expected, p), f"member {n}, prompt {p}")


CASES = {
    "shared": (True, 0, UNLIKE, "frozen"),
    "shared, shared prefix, every leaf": (True, 2, ALIKE, "full"),
    "dealt out": (False, 0, UNLIKE, "full"),
    "dealt out, shared prefix": (False, 2, ALIKE, "frozen"),
}


# All with -m slow.
FEW_CASES = [
    case if case == "dealt out" else pytest.param(case, marks=pytest.mark.slow) for case in CASES
]


@pytest.mark.parametrize("case", FEW_CASES)
def test_members_in_one_batch_are_members_one_by_one(tiny, noise, alone, case):
    shared, shared_prefix_len, prompts, others = CASES[case]
    deltas, one = noise(others=others)
    sample = make_population_sampler(
        tiny[0], shared=shared, shared_prefix_len=shared_prefix_len, **STOPS
    )
    result = sample(tiny[1], deltas, jax.random.key(5), prompts, version=4)
    G = N if shared else N // len(prompts)
    assert result.tokens.shape == (len(prompts), G, T)
    assert result.prompt_mask.sum(-1).tolist() == [len(p) for p in prompts]
    check_members(result, prompts, one, alone, shared=shared, temperature=0.0)
    # Members differ, some stop and some do not; what is behind the end is filled.
    assert len({tuple(row) for row in result.tokens.reshape(-1, T).tolist()}) > N / 2
    assert set(result.finish.reshape(-1).tolist()) == {STOP, LENGTH}
    assert set(result.tokens[~result.mask].tolist()) <= {7}
    # Other prompts of these lengths compile nothing.
    other = [prompt[:2] + [9] * (len(prompt) - 2) for prompt in prompts]
    sample(tiny[1], jax.tree.map(lambda x: -x, deltas), jax.random.key(1), other, version=2)
    assert sample.compiled._cache_size() == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dealt out", "shared, shared prefix, every leaf"])
def test_pairs_with_shared_factors_give_the_same(tiny, noise, case):
    shared, shared_prefix_len, prompts, others = CASES[case]
    sample = make_population_sampler(
        tiny[0], shared=shared, shared_prefix_len=shared_prefix_len, **STOPS
    )
    each, once = (noise(others=others, share_pairs=share)[0] for share in (False, True))
    a, b, scale = once["layers"]["0"]["mlp"]["up"][:3]
    assert len(a) == len(b) == N // 2 and len(scale) == N
    result, expected = (sample(tiny[1], deltas, KEY, prompts, version=4) for deltas in (once, each))
    assert_alike(result, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [ALIKE, [[5], [80]]], ids=["blocks", "one token"])
def test_how_prompts_are_read_changes_nothing(tiny, noise, alone, monkeypatch, prompts):
    monkeypatch.setattr(population, "_READ_TOKENS", 64)  # two tokens of 32 slots at a time
    deltas, one = noise()
    shared_prefix_len = 2 if prompts == ALIKE else 0
    sample = make_population_sampler(tiny[0], shared_prefix_len=shared_prefix_len, **STOPS)
    result = sample(tiny[1], deltas, KEY, prompts, version=4)
    check_members(result, prompts, one, alone, temperature=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_tries_are_drawn_by_their_request(tiny, noise, alone, shared):
    drawn = {"temperature": 0.8, "top_k": 20}
    deltas, one = noise()
    shared_prefix_len = 2 if shared else 0
    options = {**STOPS, **drawn, "shared": shared, "tries": 3}
    options["shared_prefix_len"] = shared_prefix_len
    sample = make_population_sampler(tiny[0], **options)
    result = sample(tiny[1], deltas, jax.random.key(5), ALIKE, version=4)
    check_members(result, ALIKE, one, alone, shared=shared, tries=3, **drawn)
    tries = result.tokens.reshape(4, -1, 3, T)
    assert (tries[:, :, 0] != tries[:, :, 1]).any()
    # The first prompt's responses are the same with fewer prompts and members beside them.
    count = 4 if shared else N // 4
    few = sample(tiny[1], noise(count=count)[0], jax.random.key(5), ALIKE[:1], version=4)
    assert_alike(cut(few, 0), cut(result, (0, slice(0, 3 * count))))
    other = sample(tiny[1], deltas, jax.random.key(6), ALIKE, version=4)
    assert (other.tokens != result.tokens).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "shared", "shared_prefix_len", "pairs"),
    [
        ({"data": 8}, False, 0, False),
        ({"fsdp": 4, "tensor": 2}, True, 2, False),
        ({"data": 2, "tensor": 4}, True, 2, True),
    ],
)
def test_devices_change_nothing(tiny, noise, sizes, shared, shared_prefix_len, pairs):
    model, params = tiny
    deltas, _ = noise(others="full", share_pairs=pairs)
    options = {**STOPS, "shared": shared, "shared_prefix_len": shared_prefix_len}
    expected = make_population_sampler(model, **options)(params, deltas, KEY, ALIKE)
    mesh = make_mesh(**sizes)
    placed = shard(params, param_shardings(params, mesh))
    spread = jax.device_put(deltas, batch_sharding(mesh))
    result = make_population_sampler(model, mesh=mesh, **options)(placed, spread, KEY, ALIKE)
    assert_alike(result, expected, atol=1e-4)


@for_each(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be above 0"),
        ({"max_new_tokens": 256}, "max_new_tokens 256 leaves no room for a prompt"),
        ({"tries": 0}, "tries must be above 0"),
        ({"tries": 2}, "tries=2 has no effect at temperature 0"),
        ({"tries": 2, "temperature": 1e-6}, "tries=2 has no effect at temperature 0"),
        ({"shared_prefix_len": -1}, "shared_prefix_len must not be negative"),
        ({"temperature": -1.0}, "make_population_sampler: temperature must not be negative"),
        ({"top_k": 3}, "no effect"),
    ],
)
def test_bad_options_are_named(tiny, options, message):
    with pytest.raises(ValueError, match=message):
        make_population_sampler(tiny[0], **{**STOPS, **options})


@for_each(
    ("options", "prompts", "count", "message"),
    [
        ({}, ALIKE, None, "a population needs deltas; see evolution.model_delta"),
        ({"shared": False}, ALIKE, 6, "6 members cannot be divided evenly among 4 prompts"),
        ({"shared_prefix_len": 2}, UNLIKE, N, "prompt 0 must begin with the 2 tokens"),
        ({"shared_prefix_len": 3}, ALIKE, N, "prompt 1 must begin with the 3 tokens"),
        ({}, [], N, "there are no prompts"),
        ({}, [[1], []], N, "prompt 1 is empty"),
        ({}, [[1], [259]], N, "prompt 1 holds token 259"),
        ({}, [[1] * 251], N, "prompt 0 has 251 tokens, but .* room for 250"),
        ({"shared_prefix_len": 2, "mesh": {"data": 8}}, ALIKE, 6, "6 rows of members cannot be"),
    ],
)
def test_bad_inputs_are_named(tiny, noise, options, prompts, count, message):
    if "mesh" in options:
        options = {**options, "mesh": make_mesh(**options["mesh"])}
    sample = make_population_sampler(tiny[0], **STOPS, **options)
    deltas = None
    if count is not None:
        deltas = jax.tree.map(lambda x: x[:count], noise(others="full")[0])
    with pytest.raises(ValueError, match=message):
        sample(tiny[1], deltas, KEY, prompts)


@for_each("share", [False, True])
@for_each("part", [slice(0, 2), slice(0, 3), slice(2, 3)])
def test_deltas_of_unequal_numbers_of_members(tiny, noise, part, share):
    """Factors of some modules, or scales, are half as many as those of the others."""
    sample = make_population_sampler(tiny[0], **STOPS)
    deltas = jax.tree.map(lambda x: x, noise(others="full", share_pairs=share)[0])
    module = deltas["layers"]["0"]["mlp"]
    up = list(module["up"])
    up[part] = [x[: len(x) // 2] for x in up[part]]
    module["up"] = tuple(up)
    with pytest.raises(ValueError, match="sample: deltas"):
        sample(tiny[1], deltas, KEY, ALIKE)
