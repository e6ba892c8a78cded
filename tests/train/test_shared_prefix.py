"""What all prompts begin with is computed once, and nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jr
from jaxrl_llm.rollout.sampler import count_shared_prefix
from jaxrl_llm.train import score

COMMON = 6
PROMPTS = [[7, 8, 9, 10, 11, 12, *rest] for rest in ([1], [2, 3, 4], [5, 6])]


@pytest.fixture(scope="module")
def tiny():
    return jr.testing.tiny_model()


def _padded():
    width = max(map(len, PROMPTS)) + 2
    tokens = np.zeros((len(PROMPTS), width), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    return jnp.asarray(tokens), jnp.arange(width) < np.array([[len(p)] for p in PROMPTS])


def test_scores_and_gradients_are_those_of_whole_prompts(tiny):
    model, params = tiny
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 200, (3, 2, 5))
    mask = np.arange(5) < rng.integers(0, 6, (3, 2, 1))
    weights = rng.normal(size=mask.shape)

    def loss(params, shared_prefix_len, remat):
        logp, entropy = score(
            model,
            params,
            *_padded(),
            tokens,
            mask,
            shared_prefix_len=shared_prefix_len,
            remat=remat,
        )
        return jnp.sum(weights * (logp + entropy)), (logp, entropy)

    grad = jax.jit(jax.grad(loss, has_aux=True), static_argnums=(1, 2))
    wanted, out = grad(params, 0, "none")
    for remat in ("none", "full"):
        got, found = grad(params, COMMON, remat)
        np.testing.assert_allclose(found, out, rtol=1e-5, atol=1e-5)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.max(jnp.abs(b))) + 1e-8)


def test_fewer_tokens_pass_through_the_layers(tiny):
    model, params = tiny
    seen = []

    def apply(params, tokens, *rest, **options):
        seen.append(tokens.size)
        return model.apply(params, tokens, *rest, **options)

    tokens = jnp.zeros((3, 1, 2), int)
    for shared_prefix_len in (0, COMMON):
        score(
            model._replace(apply=apply),
            params,
            *_padded(),
            tokens,
            tokens == 0,
            shared_prefix_len=shared_prefix_len,
        )
    width = _padded()[0].shape[1]
    assert seen == [3 * (width + 2), COMMON, 3 * (width - COMMON), 3 * 2]


def test_samples_the_same_responses(tiny):
    model, params = tiny
    key = jax.random.key(3)
    whole, shared = (
        jr.rollout.make_sampler(
            model, max_new_tokens=6, group_size=2, shared_prefix_len=shared_prefix_len
        )(params, key, PROMPTS)
        for shared_prefix_len in (0, COMMON)
    )
    np.testing.assert_array_equal(whole.tokens, shared.tokens)
    np.testing.assert_allclose(whole.model_logp, shared.model_logp, atol=1e-5)


def test_how_many_tokens_prompts_share():
    ten = list(range(10))
    assert count_shared_prefix([[*ten, 1], [*ten, 2, 3]]) == 10
    assert count_shared_prefix([ten, [*ten, 2]]) == 9  # each has one more
    assert count_shared_prefix([ten]) == 9
    assert count_shared_prefix([np.arange(12), np.arange(12)]) == 11
    assert count_shared_prefix([[*ten[:5], 1], [*ten[:5], 2]]) == 0  # not worth a pass of its own


@pytest.mark.parametrize("prompts", [[PROMPTS[0], [1, 2, 3, 4, 5, 6, 7]], [PROMPTS[0][:6]]])
def test_a_prompt_without_the_shared_prefix_is_named(tiny, prompts):
    model, params = tiny
    sample = jr.rollout.make_sampler(
        model, max_new_tokens=2, group_size=1, shared_prefix_len=COMMON
    )
    with pytest.raises(ValueError, match=rf"prompt {len(prompts) - 1} does not begin with the 6"):
        sample(params, jax.random.key(0), prompts)


def test_as_many_as_a_prompt_has_are_refused(tiny):
    with pytest.raises(ValueError, match="shared_prefix_len must be below the 11 tokens"):
        score(
            *tiny,
            *_padded(),
            jnp.zeros((3, 1, 2), int),
            jnp.ones((3, 1, 2), bool),
            shared_prefix_len=11,
        )
    with pytest.raises(ValueError, match="shared_prefix_len must not be negative"):
        jr.rollout.make_sampler(tiny[0], max_new_tokens=2, group_size=1, shared_prefix_len=-1)
