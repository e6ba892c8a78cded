"""Bad input raises one sentence that names function and argument."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from bad_calls import bad_calls, raises
from rows import for_each

from jaxrl_llm import evolution as es
from jaxrl_llm import testing

KEY, F = jax.random.key(0), jnp.array([1.0, 3.0, 2.0, 6.0])
TWO, THREE, S, R = map(jnp.ones, (2, 3, (2, 2), (2, 3)))
Q, X = jnp.array([5, -127, 127, 5], jnp.int8), jnp.ones((1, 4), jnp.int8)
A, B = X[0, :3, None], X[0, :2, None]
PARAMS = {
    "embed": {"embedding": jnp.ones((7, 4))},
    "up": {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)},
}
CLASSES = es.leaf_classes(PARAMS, rules=[("embed/*", "embedding"), ("*bias", "full")])


def classes(*rules, **options):
    return es.leaf_classes({**PARAMS, "n": jnp.zeros(2, int)}, rules=rules, **options)


def delta(classes=CLASSES, key=KEY, members=np.arange(2), sigma=0.1, **options):  # noqa: B008
    return es.model_delta(PARAMS, classes, key, 0, members, sigma=sigma, **options)


def member(n=0, **options):
    return es.perturb(PARAMS, CLASSES, KEY, 0, n, sigma=0.1, **options)


def grad(fitness=F, classes=CLASSES, sigma=0.1, **options):
    return es.eggroll_grad(PARAMS, classes, KEY, 3, fitness, sigma=sigma, **options)


def evolve(**options):
    options = {"steps": 1, "optimizer": optax.sgd(1.0)} | options
    return testing.evolve({"x": S}, KEY, lambda m, step: m["x"].sum((1, 2)), **options)


NAMES = {
    **{name: getattr(testing, name) for name in ("mlp", "mlp_init", "quadratic", "rastrigin")},
    **{name: getattr(es, name) for name in es.__all__},
    **{name: value for name, value in globals().items() if not name.startswith("_")},
    "M": jnp.arange(2),
    "INTS": jnp.arange(3),
    "W": jnp.ones((2, 4), jnp.int8),
    "NOISE": es.sparse_noise(KEY, 0, jnp.arange(2), (3, 5)),
    "SMALL": es.egg_init(KEY, vocab=5, width=4, layers=1),
    "TABLE": es.int8_table(KEY, size=4096),
}
BAD = r"""
ValueError:
antithetic(M, baseline=1)  # must not split a pair
apply_quantized({"w": F}, {"w": F}, tau=1.0)  # no leaf is int8
apply_quantized({"w": Q}, F, tau=1.0)  # the form of params
baseline_fitness(R)  # even number of members, at least 4
best_of(S, k=0)  # k must be at least 1
best_of(S, k=5)  # k must be at most the number of tries, 2; got 5
centered_ranks(F, ties="first")  # ties must be one of
egg_gru(X, X[:, :2], None)  # must have the same shape
egg_init(KEY, layers=10 ** 9)  # .* layers 1,000,000,000
egg_init(KEY, width=0)  # width must be at least 1
egg_init(KEY, width=10 ** 9)  # .* width 1,000,000,000
egg_log_likelihood(jnp.zeros(3000, jnp.int8), jnp.array(0))  # 3000 logits
egg_matmul(X, W, None, shift=-1)  # shift must be at least 0
egg_matmul(X[:, :3], W, None)  # does not match w
egg_norm(X, W[:, :2])  # does not match w
egg_scores(SMALL, INTS, jnp.zeros((2, 4), jnp.int8))  # state must have shape \(1, 4\); got \(2, 4\)
egg_scores(SMALL, jnp.array([1]))  # at least two
egg_threshold(0.0)  # alpha must be in \(0, 1\]
egg_update(W, TABLE, KEY, 0, X[0, :0], threshold=0)  # at least one pair
es_qiu_grad(PARAMS, CLASSES, KEY, 0, jnp.ones(0))  # !.*at least one member
full_noise(KEY, 0, M, (3,), noise_reuse=-1)  # at least 0
full_rank({"w": "dense"})  # !.*class must be one of
graded(F, where=THREE > 0)  # must have the same shape
graded(F[:3])  # scores must be of an even number
int8_noise(TABLE, KEY, 0, M, (4000, 200))  # reads 4200 entries; table has 4096
int8_noise(TABLE, KEY, 0, M, (7, 1, 1))  # that of a matrix or vector
int8_noise(TABLE, KEY, 0, M, (7,), rank=2)  # rank=2 has no effect on a vector
int8_table(KEY, size=1000)  # power of two; got 1000
lowrank_noise(KEY, 0, M, (3, 2), rank=0)  # at least 1
lowrank_noise(KEY, 0, M, (3,))  # that of a matrix
mean_fitness(F)  # scores must have 2 axes
mlp(mlp_init(KEY, (4, 2)), THREE)  # \(3,\) does not match
mlp_init(KEY, (4, 0))  # sizes must be at least 1
mlp_init(KEY, (4,))  # sizes must be of input and output
moving({"w": "thawed"})  # class must be one of
open_es_grad(PARAMS, CLASSES, KEY, 0, THREE, sigma=0.1)  # !.*fitness must be of an even number
open_es_grad(PARAMS, CLASSES, KEY, 0, TWO)  # !.*needs the sigma
pair_sign(F[:3])  # scores must be of an even number
quadratic(jnp.array(1.0))  # x must have at least 1 axis
quantize_int8(S, axis=2)  # axis must be one of
quantize_int8(TWO)  # w must have 2 axes
quantized_step(Q, F, tau=-1.0)  # tau must not be negative
quantized_step(Q, F[:3], tau=1.0)  # must have the same shape
question_fitness(F)  # scores must have 2 axes
sparse_grad(KEY, 0, THREE, (3, 5), sigma=0.1)  # even number of members
sparse_grad(KEY, 0, TWO, (3, 5), sigma=0.0)  # sigma must be above 0
sparse_grad(KEY, 0, TWO, (3, 5), sigma=0.1, scale="mean")  # scale must be one of 'step', 'gradient'
sparse_matmul(jnp.ones((1, 3)), jnp.ones((3, 5)), NOISE, sigma=0.1)  # x \(1, 3\) needs the members
sparse_matmul(jnp.ones((1, 4)), jnp.ones((3, 5)), NOISE, sigma=0.1)  # does not match
sparse_noise(KEY, 0, M, (3, 2), noise_reuse=-1)  # at least 0
sparse_noise(KEY, 0, M, (3,))  # must be that of a matrix
unpack_ternary(jnp.ones(2, jnp.uint8), 11)  # do not hold 11
zscore(F, deviation="groups")  # Did you mean 'group'
zscore(F, eps=-1.0)  # eps must not be negative
zscore(F, where=THREE > 0)  # must have the same shape
classes(("layer/*", "frozen"))  # !.*rule 'layer/\*' matches no leaf; leaves are embed/embedding,
classes(("up/*", "full"), ("*/bias", "frozen"))  # !.*rule '\*/bias' is behind a rule that matches
classes(("*", "low_rank"))  # !.*Did you mean 'lowrank'
classes(("*bias", "lowrank"))  # !.*'up/bias' has shape \(3,\), .* cannot be 'lowrank'
classes(("n", "full"))  # !.*'n' is int32, so it cannot be 'full'
classes(others="lowrank")  # !.*others must be one of
leaf_table(PARAMS, {"w": "frozen"})  # classes must have the form of params
leaf_table({"w": S}, {"w": "frozen"})  # every leaf is frozen
leaf_table(PARAMS, CLASSES, rank=4)  # .*smaller side of leaf 'up/kernel' \(4, 3\); got 4
lowrank_noise(KEY, 0, M, (3, 2), rank=3)  # rank must be at most the smaller side of shape \(3, 2\)
delta(sigma=-0.1)  # !model_delta: sigma must not be negative
delta(rank=5)  # !.*got 5\. Lower the rank, or freeze the leaf by a rule\.
delta(classes={"w": "full"})  # !.*classes must have the form of params
delta(baseline=1)  # !.*baseline must not split a pair
delta(members=jnp.arange(2), share_pairs=True)  # !.*share_pairs needs members .* side by
delta(members=np.arange(3), share_pairs=True)  # !.*share_pairs needs members .* side by
delta(members=np.array([1, 2]), share_pairs=True)  # !.*share_pairs needs members .* side by
delta(members=np.array([0, 2]), share_pairs=True)  # !.*share_pairs needs members .* side by
delta(members=np.arange(4).reshape(2, 2), share_pairs=True)  # !.*share_pairs needs members .* side
delta(share_pairs=True, pairs=False)  # !.*share_pairs needs members .* side by
delta(classes=classes(("up/kernel", "full"), ("n", "frozen")))  # !.*classes must have the form
delta(classes=leaf_classes(PARAMS, rules=[("up/kernel", "full")]))
    # !.*no model .* 'up/kernel' as 'full'; it can be 'frozen' or 'lowrank'
member(rank=4)  # !.*got 4\. Lower the rank, freeze the leaf by a rule, or give it full noise\.
member(jnp.arange(2))  # !.*member must have 0 axes
eggroll_matmul(R[:1], R.T, LowRank(A, B, 1.0), sigma=-1.0)  # .*negative
eggroll_matmul(S[:1], R.T, LowRank(A, B, 1.0), sigma=0.1)  # .*does not match
eggroll_matmul(R[:1], R.T, LowRank(B, A, 1.0), sigma=0.1)  # factors \(2, 1\) and \(3, 1\) do
grad(F[:3])  # !eggroll_grad: .*even number .* got shape \(3,\), so that one has no
grad(R)  # !eggroll_grad: .*\(2, 3\), so that a group would end inside
grad(F[:0])  # !eggroll_grad: .*at least one member
grad(sigma=0.0)  # !eggroll_grad: sigma must be above 0; got 0
grad(sigma=None)  # !eggroll_grad: .*scale='step' needs the sigma
grad(scale="mean")  # !eggroll_grad: sigma=0.1 has no effect with scale='mean'
grad(scale="rms")  # !eggroll_grad: scale must be one of 'step', 'gradient', 'mean'
grad(chunk=0)  # !eggroll_grad: chunk must be at least 1
grad(rank=5)  # !eggroll_grad: .*smaller side of leaf 'embed/embedding' \(7, 4\); got 5
grad(draws=INTS)  # !eggroll_grad: draws must have shape \(2,\); got \(3,\)
grad(classes={"w": "full"})  # !eggroll_grad: classes must have the form of params
grad(classes=full_rank(CLASSES), sign=True)  # !eggroll_grad: .*sign has no effect where no leaf
evolve(population=7)  # !.*population must be even
evolve(sigma=0.0)  # !.*sigma must be above 0
evolve(rank=3)  # !.*smaller side
egg_matmul(X, W, LowRank(X.T, X[:, :2].T, jnp.array(1)))  # .*factors \(4, 1\), \(2, 1\) do
TypeError:
delta(key=jax.random.PRNGKey(0))  # !.*key must be one typed key
delta(members=TWO)  # !.*members must hold integers
delta(noise_reuse=1.5)  # !.*noise_reuse must be an integer
eggroll_embed(TWO, R.T, LowRank(A, B, 1.0), sigma=0.1)  # .*hold integers
grad(jnp.arange(4))  # !eggroll_grad: fitness must be floating point
grad(draws=TWO)  # !eggroll_grad: draws must hold integers
evolve(steps=1.5)  # !.*steps must be an integer
apply_quantized({"q": Q, "n": M}, {"q": F, "n": TWO}, tau=1.0)  # params must be floating point
best_of(S, k=1.5)  # k must be an integer
distillation_fitness(R, R, TWO)  # mask must be bool
egg_embed(TWO, W, None)  # tokens must hold integers
egg_matmul(X.astype(int), W, None)  # x must be int8; got int32
egg_scores(SMALL, INTS, jnp.zeros((1, 4)))  # state must be int8
egg_scores(SMALL, THREE)  # tokens must hold integers
egg_update(W, TABLE, KEY, 0, TWO, threshold=0)  # signs must hold integers
graded(F, where=F)  # where must be bool
leaf_key(jax.random.PRNGKey(0), "w")  # key must be one typed key
leaf_key(jax.random.split(KEY), "w")  # key must be one typed key
lowrank_noise(KEY, 0, TWO, (3, 2))  # !.*members must hold int
mean_fitness(jnp.ones((2, 4), int))  # must be floating point
pack_ternary(jnp.ones(5))  # values must hold integers
quantize_int8(jnp.ones((2, 2), int))  # w must be floating point
quantized_step(F, F, tau=1.0)  # q must be int8; got float32
rastrigin(INTS)  # x must be floating point
saturate(TWO)  # x must hold integers
unpack_ternary(X, 5)  # packed must be uint8
zscore(jnp.arange(4))  # scores must be floating point
"""


@for_each("error, call, message", bad_calls(BAD))
def test_bad_input(error, call, message):
    raises(error, call, message, NAMES)
