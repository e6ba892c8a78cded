"""The trained adapter of DOTS: success rates of prompts from embeddings of a frozen encoder.

It is fitted beforehand, to success rates of other prompts under several policies, and stays as it
is while the policy trains. ``embeddings`` are ``[N, D]``, floating point.

Every function raises TypeError for an array of the wrong dtype or a key that is not typed, and
ValueError for shapes that do not match, an option out of its range or a rate outside [0, 1].
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.core import Array, checks, masking
from jaxrl_llm.curation.prompts.similarity import RateCalibration, attention_rates, calibrate_rates

__all__ = [
    "RateAdapter",
    "RateProjection",
    "adapted_rates",
    "rate_adapter_fit",
    "rate_adapter_init",
]


class RateProjection(NamedTuple):
    """Weights of a network from embeddings to vectors whose products say how alike prompts are.

    Attributes:
      scale_in, shift_in: ``[D]``, of the layer norm of an embedding.
      weights: One matrix a layer, ``[D, H]`` the first and ``[H, H]`` the others.
      biases: ``[H]``, one a layer.
      scale_out, shift_out: ``[H]``, of the layer norm of the result.
    """

    scale_in: Array
    shift_in: Array
    weights: tuple[Array, ...]
    biases: tuple[Array, ...]
    scale_out: Array
    shift_out: Array


class RateAdapter(NamedTuple):
    """Parameters of :func:`adapted_rates`: a pytree of arrays, of JAX or NumPy.

    Attributes:
      queries: :class:`RateProjection` of the prompts.
      references: :class:`RateProjection` of the references.
      calibration: :class:`RateCalibration`.
    """

    queries: RateProjection
    references: RateProjection
    calibration: RateCalibration


def rate_adapter_init(key, *, size: int, hidden: int = 896, layers: int = 3) -> RateAdapter:
    """An adapter that is not fitted.

        weights and biases ~ U(-1 / sqrt(n), 1 / sqrt(n)),   n = inputs of the layer

    Layer norms start as the identity.

    Args:
      key: Typed key.
      size: D, the length of an embedding.
      hidden: H, the length of a projected embedding.
      layers: Number of matrices of a projection.

    Returns:
      :class:`RateAdapter`, float32.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> params = jr.curation.rate_adapter_init(jax.random.key(0), size=256, hidden=32)
      >>> [weight.shape for weight in params.queries.weights]
      [(256, 32), (32, 32), (32, 32)]

    References:
      DOTS (arXiv:2506.05316) and its released code: H = 896, 3 layers, embeddings of Qwen2.5-Math-
      1.5B-Instruct. The draw is that of PyTorch's linear layers.
    """
    name = "rate_adapter_init"
    checks.check_key(name, key)
    checks.check_count(name, size=size, hidden=hidden, layers=layers)
    query_key, reference_key, first_key, last_key = jax.random.split(key, 4)

    def projection(key) -> RateProjection:
        inputs = [size] + [hidden] * (layers - 1)
        pairs = [
            _linear(each, n, hidden)
            for each, n in zip(jax.random.split(key, layers), inputs, strict=True)
        ]
        weights, biases = zip(*pairs, strict=True)
        return RateProjection(
            jnp.ones(size), jnp.zeros(size), weights, biases, jnp.ones(hidden), jnp.zeros(hidden)
        )

    calibration = RateCalibration(*_linear(first_key, 2, 10), *_linear(last_key, 10, 2))
    return RateAdapter(projection(query_key), projection(reference_key), calibration)


def adapted_rates(
    queries: Array,
    references: Array,
    reference_rates: Array,
    params: RateAdapter,
    *,
    temperature: float = 1.0,
    top: int | None = None,
    where: Array | None = None,
) -> Array:
    """Success rates by a fitted adapter: projected embeddings, attention, calibration.

        f(x) = norm(W_L gelu(... gelu(W_1 norm(x) + b_1) ...) + b_L)
        calibrate_rates(attention_rates(f_q(query), f_k(references), rates), rates)

    Args:
      queries: ``[..., D]``, floating point: embeddings of the prompts.
      references: ``[R, D]``, floating point: embeddings of the references.
      reference_rates: ``[R]``, in [0, 1]: mean rewards of the references.
      params: :class:`RateAdapter`, such as from :func:`rate_adapter_fit`.
      temperature, top: As in :func:`attention_rates`.
      where: bool ``[R]``, True for references that take part; the rest may hold anything.

    Returns:
      ``[...]`` float32, in (0, 1).

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> params = jr.curation.rate_adapter_init(jax.random.key(0), size=2, hidden=4)
      >>> embeddings = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
      >>> jr.curation.adapted_rates(embeddings, embeddings[:2], jnp.array([0.2, 0.8]), params).shape
      (3,)

    References:
      DOTS (arXiv:2506.05316), the model of its released code with "group_logit_temp". Its norms
      have an epsilon of 1e-5.
    """
    name = "adapted_rates"
    checks.check_min_rank(name, 1, queries=queries)
    checks.check_rank(name, 2, references=references)
    checks.check_float(name, queries=queries, references=references)
    checks.check_bool(name, where=where)
    size = params.queries.weights[0].shape[0]
    for each, x in (("queries", queries), ("references", references)):
        if jnp.shape(x)[-1] != size:
            raise ValueError(
                f"{name}: the adapter takes embeddings of length {size}; {each} has shape "
                f"{jnp.shape(x)}."
            )
    if where is not None:
        checks.check_shape(name, "where", where, jnp.shape(references)[:1])
        references = masking.zero_masked(references, jnp.asarray(where)[:, None])
    rates = attention_rates(
        _projected(params.queries, queries),
        _projected(params.references, references),
        reference_rates,
        temperature=temperature,
        top=top,
        where=where,
    )
    return calibrate_rates(rates, reference_rates, params.calibration, where=where)


def rate_adapter_fit(
    params: RateAdapter,
    key,
    embeddings: Array,
    rates: Array,
    *,
    references: int = 256,
    batch: int = 256,
    steps: int = 1000,
    lr: float = 1e-3,
    dropout: float = 0.1,
    where: Array | None = None,
) -> RateAdapter:
    """Fits an adapter to success rates of prompts under one or several policies.

        loss = mean over a batch of  -y log p - (1 - y) log(1 - p)
        p = adapted_rates(a prompt, `references` other prompts, their rates under one policy)
        y = rate of the prompt under this policy

    Each step draws references, other prompts, and a policy for each of these prompts. Adam, with a
    learning rate that rises over the first min(100, steps / 10) steps and then falls to 0. The
    same arguments give the same parameters.

    Args:
      params: :class:`RateAdapter` to start from, such as of :func:`rate_adapter_init`.
      key: Typed key, of the draws and the dropout.
      embeddings: ``[N, D]``. See the module.
      rates: ``[S, N]``, floating point, in [0, 1]: mean rewards of N prompts under S policies.
      references: R, number of references of a step, below N.
      batch: Number of prompts of a step; R + batch is at most N.
      steps: Number of optimizer steps.
      lr: Largest learning rate.
      dropout: Share of hidden values that are dropped, in [0, 1).
      where: bool ``[S, N]``, True for measured rates; the rest may hold anything.

    Returns:
      :class:`RateAdapter`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> embeddings = jnp.repeat(jnp.eye(2), 8, axis=0)  # two kinds of prompts
      >>> rates = jnp.array([[0.9] * 8 + [0.2] * 8, [0.6] * 8 + [0.1] * 8])  # two policies
      >>> start_key, fit_key = jax.random.split(jax.random.key(0))
      >>> params = jr.curation.rate_adapter_init(start_key, size=2, hidden=8, layers=1)
      >>> params = jr.curation.rate_adapter_fit(
      ...     params, fit_key, embeddings, rates, references=8, batch=8, steps=100, lr=1e-2)
      >>> # A third policy, whose rates on two prompts are known:
      >>> measured = jnp.array([0.8, 0.1])
      >>> out = jr.curation.adapted_rates(jnp.eye(2), jnp.eye(2), measured, params)
      >>> [round(float(rate), 1) for rate in out]
      [0.8, 0.1]

    References:
      DOTS (arXiv:2506.05316) and its released script: cross entropy, Adam with 1e-3, batches of
      256, 20 epochs, 256 references, dropout 0.1. Its references come from a set of their own that
      never trains; here each step draws them, projected once for its prompts, with one dropout.
    """
    name = "rate_adapter_fit"
    checks.check_key(name, key)
    checks.check_rank(name, 2, embeddings=embeddings, rates=rates)
    checks.check_float(name, embeddings=embeddings, rates=rates)
    checks.check_bool(name, where=where)
    size, policies = jnp.shape(embeddings)[0], jnp.shape(rates)[0]
    checks.check_shape(name, "rates", rates, (policies, size))
    if jnp.shape(embeddings)[1] != (width := params.queries.weights[0].shape[0]):
        raise ValueError(
            f"{name}: embeddings must have vectors of the adapter's length {width}; got "
            f"{jnp.shape(embeddings)}."
        )
    checks.check_same_shape(name, rates=rates, where=where)
    checks.check_count(name, policies=policies, steps=steps)
    checks.check_count(name, most=size - 1, references=references)
    checks.check_count(name, most=size - references, batch=batch)
    checks.check_positive(name, finite=True, lr=lr)
    checks.check_share(name, one=False, dropout=dropout)
    valid = jnp.ones((policies, size), bool) if where is None else jnp.asarray(where)
    _check_rates(name, rates, valid)
    rates = masking.zero_masked(jnp.asarray(rates, jnp.float32), valid)
    embeddings = masking.zero_masked(
        jnp.asarray(embeddings, jnp.float32), valid.any(axis=0)[:, None]
    )
    warmup = min(100, steps // 10)

    def rate_of_step(step):
        rising = step / warmup if warmup else 1.0
        return lr * jnp.where(step < warmup, rising, (steps - step) / (steps - warmup))

    optimizer = optax.adam(rate_of_step)

    def loss(params: RateAdapter, key) -> Array:
        draw_key, policy_key, query_key, reference_key = jax.random.split(key, 4)
        drawn = jax.random.permutation(draw_key, size)[: references + batch]
        others, prompts = drawn[:references], drawn[references:]
        policy = jax.random.randint(policy_key, (batch,), 0, policies)
        keys = _projected(params.references, embeddings[others], reference_key, dropout)
        queries = _projected(params.queries, embeddings[prompts], query_key, dropout)

        def predicted(query: Array, row: Array, valid: Array) -> Array:
            rate = attention_rates(query, keys, row, where=valid)
            return calibrate_rates(rate, row, params.calibration, where=valid)

        cells = policy[:, None], others
        p = jnp.clip(jax.vmap(predicted)(queries, rates[cells], valid[cells]), 1e-6, 1 - 1e-6)
        y = rates[policy, prompts]
        entropy = -y * jnp.log(p) - (1 - y) * jnp.log(1 - p)
        return masking.masked_mean(entropy, valid[policy, prompts])

    def step(carry, key):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params, key), state)
        return (optax.apply_updates(params, updates), state), None

    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    start = params, optimizer.init(params)
    (params, _), _ = jax.lax.scan(step, start, jax.random.split(key, steps))
    return params


def _linear(key, inputs: int, outputs: int) -> tuple[Array, Array]:
    """Weights and biases of a layer, as drawn by PyTorch."""
    bound = 1 / math.sqrt(inputs)
    weight_key, bias_key = jax.random.split(key)
    weight = jax.random.uniform(weight_key, (inputs, outputs), minval=-bound, maxval=bound)
    return weight, jax.random.uniform(bias_key, (outputs,), minval=-bound, maxval=bound)


def _projected(params: RateProjection, x: Array, key=None, dropout: float = 0.0) -> Array:
    """``[..., D]`` to ``[..., H]``."""
    x = _norm(jnp.asarray(x, jnp.float32), params.scale_in, params.shift_in)
    last = len(params.weights) - 1
    for layer, (weight, bias) in enumerate(zip(params.weights, params.biases, strict=True)):
        x = x @ weight + bias
        if layer < last:
            x = jax.nn.gelu(x, approximate=False)
            if dropout:
                stays = jax.random.bernoulli(jax.random.fold_in(key, layer), 1 - dropout, x.shape)
                x = jnp.where(stays, x / (1 - dropout), 0.0)
    return _norm(x, params.scale_out, params.shift_out)


def _norm(x: Array, scale: Array, shift: Array) -> Array:
    mean, var = jnp.mean(x, axis=-1, keepdims=True), jnp.var(x, axis=-1, keepdims=True)
    return (x - mean) / jnp.sqrt(var + 1e-5) * scale + shift


def _check_rates(function: str, rates: Array, valid: Array) -> None:
    """Raises ValueError for a rate outside [0, 1], where the values are known."""
    if isinstance(rates, jax.core.Tracer) or isinstance(valid, jax.core.Tracer):
        return
    rates = np.asarray(rates)
    outside = np.asarray(valid) & ~((rates >= 0) & (rates <= 1))
    for policy, prompt in np.argwhere(outside)[:1]:
        raise ValueError(
            f"{function}: rates must be in [0, 1]; rates[{policy}, {prompt}] is "
            f"{rates[policy, prompt]:g}."
        )
