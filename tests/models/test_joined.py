"""Joined kernels: the same parameters back, and the same samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jr
from jaxrl_llm.models import joined
from jaxrl_llm.models.joined import decoding_params, join_kernels, split_kernels


def _equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert all(jnp.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


@pytest.mark.parametrize("change", [{}, {"attention_bias": True}, {"mlp_bias": True}])
def test_split_is_the_inverse_of_join(change):
    _, params = jr.testing.tiny_model(**change)
    _equal(split_kernels(params), params)
    _equal(split_kernels(join_kernels(params)), params)


def test_kernels_lie_side_by_side():
    _, params = jr.testing.tiny_model()
    layer, was = join_kernels(params)["layers"]["0"], params["layers"]["0"]
    for part, names in (("attention", "qkv"), ("mlp", ("gate", "up"))):
        first, *rest = (layer[part][name]["kernel"] for name in names)
        whole = np.concatenate([was[part][name]["kernel"] for name in names], axis=1)
        np.testing.assert_array_equal(first, whole)
        assert all(x.shape[0] == 0 for x in rest)
    assert layer["mlp"]["down"] is was["mlp"]["down"] or jnp.array_equal(
        layer["mlp"]["down"]["kernel"], was["mlp"]["down"]["kernel"]
    )


def test_kernels_of_other_shapes_are_left_alone():
    x = jnp.ones((2, 3, 4))
    params = {"a": {"gate": {"kernel": x}, "up": {"kernel": x}}, "b": {"q": {"kernel": x[0]}}}
    _equal(join_kernels(params), params)


def test_processors_keep_them_apart():
    model, params = jr.testing.tiny_model()
    _equal(decoding_params(model, params), jr.models.cast_params(model, params))


def _samplers(model):
    yield jr.rollout.make_sampler(model, max_new_tokens=6, group_size=2)

    def by_engine(params, key, prompts):
        engine = jr.rollout.make_engine(
            model, rows=2, width=2, prompt_length=8, max_new_tokens=6, chunk=3
        )
        generation = jr.rollout.Generation(engine, params, key=key)
        generation.submit(
            *(
                jr.rollout.Group(id=i, prompt=p, requests=(2 * i, 2 * i + 1))
                for i, p in enumerate(prompts)
            )
        )
        done = sorted(generation, key=lambda group: group.id)
        return [[c.tokens for c in group.completions] for group in done]

    yield by_engine


@pytest.mark.parametrize("which", [0, 1])
def test_samples_are_the_same(monkeypatch, which):
    """Of the sampler and of the engine, whose other programs split them too."""
    prompts, found = [[1, 2, 3], [4, 5, 6, 7, 8]], []
    for join in (False, True):
        model, params = jr.testing.tiny_model()
        if join:
            monkeypatch.setattr(joined, "_on_one_gpu", lambda: True)
        found.append(list(_samplers(model))[which](params, jax.random.key(0), prompts))
    if which == 0:
        found = [x.tokens for x in found]
    for parts in zip(*found, strict=True):
        np.testing.assert_array_equal(*parts)
