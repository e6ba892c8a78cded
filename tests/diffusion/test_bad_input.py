"""Bad options and arrays raise one sentence that names function and argument."""

import jax
import jax.numpy as jnp
from bad_calls import bad_calls, raises
from rows import for_each

from jaxrl_llm import diffusion

KEY, OLD_KEY, VALID = jax.random.key(0), jnp.zeros(2, jnp.uint32), jnp.ones((3, 6), bool)
# Three draws of two responses with five tokens.
LOGP, MASKED, T = -jnp.ones((3, 2, 5)), jnp.ones((3, 2, 5), bool), jnp.full((3, 2), 0.5)
ROWS, D = jnp.ones((2, 5), bool), jnp.ones(3)
# Two levels of three latents with four numbers.
X, LEVEL, NONE, ALL, TWO = jnp.ones((3, 2, 4)), T, jnp.zeros(3), jnp.ones((3, 2), bool), jnp.ones(2)


def step(sigma=0.8, sigma_next=0.6, v=X, **options):
    given = options or {"eps": X}
    return diffusion.flow_sde_step(X, v, sigma, sigma_next, **{"sigma_1": 0.9} | given)


def nft(old, level, advantages, mask=ALL, **options):
    given = {"velocity": X, "ref_velocity": old, "target_velocity": X, "level": level}
    return diffusion.diffusion_nft(LEVEL, None, advantages, mask, **given, **options)


NAMES = vars(diffusion) | {"jnp": jnp} | globals()
BAD = r"""
ValueError:
mask_tokens(KEY, VALID, 1.5)  # t must be in
mask_tokens(KEY, VALID, jnp.ones((2, 2)))  # t must be a number, \(J,\)
mask_blocks(KEY, VALID, block=0, samples=2)  # block must be an integer above 0
mask_blocks(KEY, VALID, block=3, samples=2, p=-0.1)  # p must be in \[0, 1\]
mask_counts(KEY, VALID, samples=2, least=2)  # least must be one of
noise_levels(KEY, (), samples=3, draws="antithetic")  # samples must be even
noise_levels(KEY, (), samples=3, draws="anti")  # draws must be one of
complementary(VALID, VALID)  # masked must have shape
quadrature_levels(0)  # samples must be an integer
elbo(LOGP, MASKED, T[:2])  # t must have shape
elbo(LOGP, MASKED, T, weights=TWO)  # weights must have shape
elbo(LOGP[:0], MASKED[:0], T[:0])  # !.*at least one draw
coupled(LOGP[0], LOGP, MASKED, T, ROWS)  # !.*pairs of draws
eubo(LOGP, MASKED, T, ROWS, beta=0.0)  # beta must be above 0
sandwiched(LOGP, MASKED, T, TWO, ROWS, mix=1.5)  # mix must be in
sandwiched(LOGP, MASKED, T, D, ROWS)  # advantages must have shape
elbo_likelihood(samples=2, draws="stratified", masks="quadrature")
    # !.*draws has no effect with 'quadrature'
coupled_likelihood(low=0.8, high=0.2)  # !.*low 0\.8 is above high 0\.2
sandwiched_likelihood(p=1.5)  # p must be in \[0, 1\]
bgpo_terms(D, D, D)  # advantages must have shape
bgpo_terms(D, D, jnp.array(1.0), cap=0.0)  # cap must be above 0
elbo_kl(D, D[:2], D > 0)  # these must have the same shape
elbo_kl(D, D, D > 0, coef=-0.1)  # coef must not be negative
wd1_weights(D, scale=0.0)  # scale must be above 0
wd1(T.T, None, D, T.T > 0)  # advantages must have shape
hint_chunks(KEY, VALID[0], shortest=4, longest=3)  # shortest 4 is above longest 3
hint_chunks(KEY, VALID[0], shortest=0)  # shortest must be an integer
hint_mask(KEY, jnp.zeros(6, int), 1.5)  # share must be in
hint_mask(KEY, jnp.zeros((2, 6), int), D)  # share must have shape
igpo_replace(jnp.zeros(4), D)  # these must have the same shape
igpo_replace(D, D, share=-0.1)  # share must be in
draw_hints(KEY, VALID[0], low=0.5, high=0.2)  # low 0\.5 is above high 0\.2
step(sigma_1=0.9)  # !.*give either eps
step(noise=0.0, eps=X)  # !.*noise must be above 0
step(0.6, 0.8)  # !.*sigma_next 0.8 must be below sigma 0.6
step(sigma_next=-0.1)  # !.*sigma_next must be in
step(D, 0.5)  # !.*sigma must have shape
step(v=X[:2])  # !.*these must have the same shape
branch_sde_step(X, X, 0.8, 0.6, noise_scale=4.0, x_next=X)  # !.*has no effect without eps
latent_kl(X, X, 1.0, reduce="max")  # reduce must be one of
flow_tree(3, (0, 3))  # splits must be ascending
flow_tree(3, (0,), children=1)  # children must be at least 2
joint_loss(TWO, TWO, TWO, gamma=0.1)  # text must have 0 axes
flow_mse(X, X, ALL, reduce="max")  # reduce must be one of
nft(X, LEVEL, NONE, beta=0.0)  # !diffusion_nft: beta must be above 0
nft(X, LEVEL, NONE, bound=0.0)  # !diffusion_nft: bound must be above 0
nft(X[:2], LEVEL, NONE)  # !diffusion_nft: .*ref_velocity
nft(X, LEVEL[:2], NONE)  # !diffusion_nft: .*
nft(X, LEVEL[0], NONE)  # !diffusion_nft: .*level
nft(X, LEVEL, TWO)  # !diffusion_nft: advantages must have the shape
TypeError:
mask_tokens(OLD_KEY, VALID, 0.5)  # key must be one typed key
mask_blocks(OLD_KEY, VALID, block=2, samples=1)  # key must be one typed key
mask_tokens(KEY, VALID.astype(int), 0.5)  # valid must be bool
mask_exact(KEY, VALID, 0.5)  # counts must hold integers
elbo(LOGP, MASKED.astype(int), T)  # masked must be bool
hint_mask(KEY, VALID[0], 0.5)  # chunk_ids must hold integers
nft(X, LEVEL, NONE, ALL.astype(int))  # !diffusion_nft: mask must be bool
"""


@for_each("error, call, message", bad_calls(BAD))
def test_bad_input(error, call, message):
    raises(error, call, message, NAMES)
