"""Log-probabilities and entropies of tokens from hidden states, without the logits tensor.

The projection to the vocabulary, its log-sum-exp, the target's logit and the entropy are computed
over blocks of the vocabulary; the backward pass computes each block again. Memory grows with
``chunk_size * V``, or with the hidden states, instead of with all tokens times V.

- ``hidden``: ``[..., T, D]`` hidden states after the last norm, any floating dtype.
- ``output_matrix``: ``[V, D]``.
- ``targets``: Integers ``[..., T]``; under a mask that is False they may hold anything.
- ``temperature``: Divides the logits; above 0. The log-probabilities are those of a policy that was
  sampled at this temperature.
- ``logit_cap``: Soft cap of the logits of a model that has one (``Model.logit_cap``), which become
  ``logit_cap tanh(logits / logit_cap)`` before the temperature divides them; above 0, or None.
- ``mask``: bool ``[..., T]``, True = keep. Elsewhere all results are 0, and hidden states, targets
  and support are not read.
- ``support``: The tokens each target was drawn from, with leading axes ``[..., T]``; None for the
  full vocabulary. Tokens outside have logit -inf.

Both functions raise ValueError if shapes disagree, or temperature, logit_cap or chunk_size is not
above 0, and TypeError if ``targets`` are not integers, ``mask`` is not bool or ``support`` is not a
Support.
"""

import inspect
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from jaxrl_llm.core import call_with, checks
from jaxrl_llm.core.axes import Array
from jaxrl_llm.core.kernels.vocabulary import logp_and_entropy, scaled_logits
from jaxrl_llm.core.support import Support, check_support, keep_mask


def token_logprobs(
    hidden: Array,
    output_matrix: Array,
    targets: Array,
    *,
    temperature: float = 1.0,
    logit_cap: float | None = None,
    mask: Array | None = None,
    support: Support | None = None,
    chunk_size: int = 64,
) -> tuple[Array, Array]:
    """Log-probability of each target and entropy of its distribution, in blocks of the vocabulary.

    With logits ``z = hidden . output_matrix^T / temperature``:

        logp    = z[target] - log sum_v exp z_v
        entropy = log sum_v exp z_v - sum_v p_v z_v,    p = softmax(z)

    Both are differentiable in ``hidden`` and ``output_matrix``, with d logp / dz = onehot - p and d
    entropy / dz = -p (log p + entropy).

    With a ``logit_cap`` c, ``z = c tanh(hidden . output_matrix^T / c) / temperature``, and the
    gradient has the factor ``1 - (z temperature / c)^2``.

    With a ``support``, sums and softmax run only over its tokens: this is the policy of a sampler
    that truncates. Logits outside have no gradient, and a target outside has log-probability -inf.

    Args:
      hidden, output_matrix, targets, temperature, logit_cap, mask, support: See the module.
      chunk_size: Bounds the logits in memory at one time to ``chunk_size * V``, or to twice the
        size of the hidden states if that is larger, since narrower blocks would be slower without a
        benefit. At most three such blocks are in memory.

    Returns:
      ``(logp, entropy)``, each ``[..., T]`` float32 (float64 for float64 hidden states), in nats.
      ``logp`` of a target outside the vocabulary is NaN.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> hidden, matrix = jnp.ones((1, 2, 4)), jnp.zeros((8, 4))
      >>> logp, entropy = jr.logprobs.token_logprobs(hidden, matrix, jnp.array([[0, 7]]))
      >>> bool(jnp.allclose(logp, -jnp.log(8.0)) and jnp.allclose(entropy, jnp.log(8.0)))
      True

    References:
      DeepSeek-V3.2 (arXiv:2512.02556, ABSTRACT reading) keeps the sampler's mask in training.
    """
    name = "token_logprobs"
    hidden, targets = _checked(name, hidden, output_matrix, targets, mask, support)
    checks.check_positive(name, temperature=temperature, chunk_size=chunk_size)
    checks.check_positive(name, finite=True, logit_cap=logit_cap)
    flat = hidden.reshape(-1, hidden.shape[-1])
    # Statistics in float32; in float64 only where that is what came in (checks of exactness).
    temperature = jnp.asarray(temperature, jnp.promote_types(hidden.dtype, jnp.float32))
    logp, entropy = logp_and_entropy(
        flat, output_matrix, targets.reshape(-1), _flat(support), temperature, chunk_size, logit_cap
    )
    logp, entropy = logp.reshape(targets.shape), entropy.reshape(targets.shape)
    if mask is not None:
        logp, entropy = jnp.where(mask, logp, 0.0), jnp.where(mask, entropy, 0.0)
    return logp, entropy


def vocabulary_statistics(
    functions: Mapping[str, Callable],
    hidden: Array,
    output_matrix: Array,
    targets: Array,
    *,
    temperature: float = 1.0,
    logit_cap: float | None = None,
    mask: Array | None = None,
    chunk_size: int = 256,
    rows: Mapping[str, Array] | None = None,
    support: Support | None = None,
    teacher: tuple[Array, Array] | None = None,
    teacher_logit_cap: float | None = None,
) -> dict[str, Array]:
    """Statistics of each token's distribution over the vocabulary, in chunks of tokens.

        out[name][t] = functions[name](logits[t], targets[t], **rows[t]),
        logits = hidden . output_matrix^T / temperature, or with the ``logit_cap`` as above

    Use it for statistics that :func:`token_logprobs` does not return: the mean over the vocabulary,
    the sum of squared probabilities, a divergence on the most likely tokens. The backward pass
    recomputes the logits of a chunk, so the logits of all tokens never exist at once.

    Args:
      hidden, output_matrix, targets, temperature, logit_cap, mask, support: See the module.
      functions: ``function(logits [N, V], targets [N], **rows) -> [N, ...]`` by name; each gets the
        rows that it names.
      chunk_size: Number of tokens whose logits exist at one time.
      rows: Arrays ``[..., T, ...]`` that functions may name.
      teacher: Hidden states ``[..., T, D']`` and output matrix ``[V, D']`` of another model, whose
        logits, at the same temperature and support, functions may name as ``teacher_logits``.
      teacher_logit_cap: The ``logit_cap`` of the teacher.

    Returns:
      Arrays ``[..., T, ...]`` by name.

    Raises:
      ValueError: If a function requires a missing row or does not return one value per token.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> def top(logits, targets):
      ...     return jax.nn.softmax(logits).max(-1)
      >>> hidden, matrix = jnp.ones((2, 4)), jnp.zeros((8, 4))
      >>> targets = jnp.array([0, 7])
      >>> jr.logprobs.vocabulary_statistics({"top": top}, hidden, matrix, targets)["top"].tolist()
      [0.125, 0.125]
    """
    name = "vocabulary_statistics"
    hidden, targets = _checked(name, hidden, output_matrix, targets, mask, support)
    checks.check_positive(name, temperature=temperature, chunk_size=chunk_size)
    caps = {"logit_cap": logit_cap, "teacher_logit_cap": teacher_logit_cap}
    checks.check_positive(name, finite=True, **caps)
    if teacher is None:
        checks.check_no_effect(name, "without a teacher", teacher_logit_cap=teacher_logit_cap)
    lead = targets.shape
    temperature = jnp.asarray(temperature, jnp.promote_types(hidden.dtype, jnp.float32))
    rows = dict(rows or {})
    if teacher is not None:
        checks.check_shape(name, "teacher", teacher[0], (*lead, teacher[1].shape[-1]))
        rows["teacher_logits"] = jnp.asarray(teacher[0])
    selected = _rows_of(name, functions, rows, lead, mask)

    @jax.checkpoint
    def chunk(carry, arrays):
        h, target, keep, chunk_rows, chunk_support = arrays
        kept = None if chunk_support is None else keep_mask(chunk_support, len(output_matrix))

        def logits_of(h: Array, matrix: Array, cap: float | None) -> Array:
            logits = scaled_logits(h, matrix, temperature, cap)
            if kept is not None:
                logits = jnp.where(kept, logits, -jnp.inf)
            # A masked token gets gradient 0, even where the logits are non-finite.
            return jnp.where(keep[:, None], logits, 0.0)

        logits = logits_of(h, output_matrix, logit_cap)
        if teacher is not None and "teacher_logits" in chunk_rows:
            logits_there = logits_of(chunk_rows["teacher_logits"], teacher[1], teacher_logit_cap)
            chunk_rows = chunk_rows | {"teacher_logits": logits_there}
        values = {k: call_with(f, logits, target, context=chunk_rows) for k, f in functions.items()}
        for key, value in values.items():
            if jnp.shape(value)[:1] != target.shape:
                raise ValueError(
                    f"{name}: {key!r} must return one value a token, [N, ...] with N = "
                    f"{target.shape[0]}; it returns shape {jnp.shape(value)}."
                )
        return carry, values

    keep = jnp.ones(lead, bool) if mask is None else mask
    flat = (
        hidden.reshape(-1, hidden.shape[-1]),
        targets.reshape(-1),
        keep.reshape(-1),
        {k: x.reshape(-1, *x.shape[len(lead) :]) for k, x in selected.items()},
        _flat(support),
    )
    tokens = flat[0].shape[0]
    chunk_size = max(1, min(chunk_size, tokens))
    count = -(-tokens // chunk_size)

    def split(x):
        x = jnp.pad(x, [(0, count * chunk_size - tokens)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(count, chunk_size, *x.shape[1:])

    if count == 1:
        _, out = chunk((), flat)
    else:
        _, out = jax.lax.scan(chunk, (), jax.tree.map(split, flat))
        out = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:tokens], out)
    return {k: _zeroed(x.reshape(lead + x.shape[1:]), mask) for k, x in out.items()}


def _rows_of(name: str, functions, rows, lead: tuple[int, ...], mask) -> dict[str, Array]:
    """The rows that the functions name in their signatures, checked, 0 where masked."""
    selected = {}
    for key, function in functions.items():
        parameters = list(inspect.signature(function).parameters.values())[2:]
        for parameter in parameters:
            by_name = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            if by_name and parameter.default is parameter.empty and parameter.name not in rows:
                names = ", ".join(sorted(rows)) or "none"
                raise ValueError(
                    f"{name}: {key!r} needs row {parameter.name!r}; the rows [..., T, ...] passed: "
                    f"{names}."
                )
            if parameter.name in rows:
                selected[parameter.name] = jnp.asarray(rows[parameter.name])
    for row, value in selected.items():
        if value.shape[: len(lead)] != lead:
            raise ValueError(
                f"{name}: row {row!r} must have leading shape {lead}; got {value.shape}."
            )
        selected[row] = _zeroed(value, mask)
    return selected


def _zeroed(x: Array, mask: Array | None) -> Array:
    """``x [..., T, ...]`` with zeros where a mask ``[..., T]`` is False."""
    if mask is None:
        return x
    return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, jnp.zeros_like(x))


def _flat(support: Support | None) -> Support | None:
    """A support with all its leading axes in one."""
    return jax.tree.map(lambda x: jnp.reshape(x, (-1, jnp.shape(x)[-1])), support)


def _checked(name: str, hidden, output_matrix, targets, mask, support) -> tuple[Array, Array]:
    """Hidden states and targets, checked, 0 where masked."""
    checks.check_min_rank(name, 2, hidden=hidden)
    checks.check_rank(name, 2, output_matrix=output_matrix)
    checks.check_integer(name, targets=targets)
    checks.check_bool(name, mask=mask)
    checks.check_shape(name, "targets", targets, hidden.shape[:-1])
    checks.check_same_shape(name, targets=targets, mask=mask)
    check_support(name, support, jnp.shape(targets), output_matrix.shape[0])
    if hidden.shape[-1] != output_matrix.shape[-1]:
        raise ValueError(
            f"{name}: hidden {hidden.shape} and output_matrix {output_matrix.shape} must have one "
            "width."
        )
    if mask is None:
        return hidden, targets
    return jnp.where(mask[..., None], hidden, 0), jnp.where(mask, targets, 0)
