"""A tabular masked-diffusion policy learns a response by the losses of papers; its J is exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.diffusion_world import Denoiser
from jaxrl_llm import advantages, aggregate, diffusion, surrogates

L, V, GROUP, DRAWS = 3, 2, 32, 4
POWERS = (V + 1) ** np.arange(L)
TARGET = jnp.array([1, 0, 1])
VALID = jnp.ones((GROUP, L), bool)
MEAN = aggregate.sequence_mean(VALID)


def log_probs(params, tokens, masked):
    """``[..., L]`` of tokens by a denoiser that sees the rest."""
    row = jnp.where(masked, V, tokens) @ POWERS
    table = jax.nn.log_softmax(params)[row]
    return jnp.take_along_axis(table, jnp.broadcast_to(tokens, masked.shape)[..., None], -1)[..., 0]


def sample(params, key):
    """Responses ``[GROUP, L]``, one token at a time in a random order."""
    orders, draws = jax.random.split(key)
    order = jnp.argsort(jax.random.uniform(orders, (GROUP, L)))

    def unmask(seen, inputs):
        place, key = inputs
        logits = params[seen @ POWERS, place]
        token = jax.random.categorical(key, logits)
        return seen.at[jnp.arange(GROUP), place].set(token), None

    start = jnp.full((GROUP, L), V)
    return jax.lax.scan(unmask, start, (order.T, jax.random.split(draws, L)))[0]


def masks(key, least):
    one, two = jax.random.split(key)
    counts = diffusion.mask_counts(one, VALID, samples=DRAWS, draws="stratified", least=least)
    return diffusion.mask_exact(two, VALID, counts)


def espo(params, tokens, A, key):
    masked = diffusion.complementary(masks(key, 0), VALID)
    t = diffusion.count_levels(masked, VALID, least=0)
    bound = diffusion.elbo(log_probs(params, tokens, masked), masked, t)
    return aggregate.weighted_sum(surrogates.gspo(bound, None, A, VALID), MEAN)


def spg(params, tokens, A, key):
    masked = masks(key, 1)
    t = diffusion.count_levels(masked, VALID)
    bound = diffusion.sandwiched(log_probs(params, tokens, masked), masked, t, A, VALID)
    return aggregate.weighted_sum(surrogates.reinforce(bound, None, A, VALID), MEAN)


def bgpo(params, tokens, A, key):
    masked = masks(key, 1)
    t = diffusion.count_levels(masked, VALID)
    terms = diffusion.elbo_terms(log_probs(params, tokens, masked), masked, t)
    return -diffusion.bgpo_terms(terms, jax.lax.stop_gradient(terms), A).sum(0).mean() / L


@pytest.mark.of_many
@pytest.mark.parametrize("loss", [espo, spg, bgpo])
def test_the_target_becomes_likely(loss):
    def step(params, key):
        one, two = jax.random.split(key)
        tokens = sample(params, one)
        A = advantages.dr_grpo(jnp.all(tokens == TARGET, -1).astype(jnp.float32))
        return params - 6.0 * jax.grad(loss)(params, tokens, A, two), None

    start = jnp.zeros(((V + 1) ** L, L, V))
    keys = jax.random.split(jax.random.key(0), 80)
    params = jax.jit(lambda x: jax.lax.scan(step, x, keys)[0])(start)

    def chance(params):
        table = np.asarray(jax.nn.log_softmax(params), np.float64)
        return np.exp(Denoiser(table, V, L).exact(np.asarray(TARGET)).log_likelihood)

    np.testing.assert_allclose(chance(start), 1 / V**L, rtol=1e-6)
    assert chance(params) > 0.8
