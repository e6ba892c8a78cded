"""Two language models as one, whose next token is drawn from the mixture of both distributions.

The mixture samples but does not train: it has only the functions of a
:class:`~jaxrl_llm.models.Model` that decoding needs.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.kernels.soft_cap import soft_cap
from jaxrl_llm.models.denoising import check_causal
from jaxrl_llm.models.protocol import Cache, Model, empty_cache


@dataclass(frozen=True)
class MixtureConfig:
    """The configuration of a mixture.

    Attributes:
      vocab_size: Of both.
      max_length: The shorter context.
      dtype: The more precise of both.
    """

    vocab_size: int
    max_length: int
    dtype: str


def mix_models(first: Model, second: Model, *, weight: float) -> Model:
    """A model that samples from ``(1 - weight) first + weight second``, probability by probability.

        p(v | x) = (1 - weight) p_first(v | x) + weight p_second(v | x)

    Both models read all tokens, each with separate keys and values.

    Args:
      first: Its low-rank deltas, if any, are those of the call.
      second: The other model, such as a teacher.
      weight: Weight of the second model, above 0 and below 1.

    Returns:
      A model for samplers and engines, with ``params = {"first": ..., "second": ...}``.

    Raises:
      ValueError: If the vocabularies differ, a model denoises, or ``weight`` is out of its range.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> first, params = jr.testing.tiny_model()
      >>> second, others = jr.testing.tiny_model(seed=1)
      >>> model = jr.models.mix_models(first, second, weight=0.2)
      >>> sample = jr.rollout.make_sampler(model, max_new_tokens=4, group_size=2)
      >>> sample({"first": params, "second": others}, jax.random.key(0), [[1, 2]]).tokens.shape
      (1, 2, 4)

    References:
      Gu et al., MiniLLM (arXiv:2306.08543), sampling with a teacher at weight 0.2.
    """
    name = "mix_models"
    checks.check_share(name, zero=False, one=False, weight=weight)
    for model in (first, second):
        check_causal(name, model)
    sizes = [model.config.vocab_size for model in (first, second)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"{name}: the models must have the same vocabulary; got {sizes} tokens.")
    config = MixtureConfig(
        sizes[0],
        min(first.config.max_length, second.config.max_length),
        # Their weights are cast to it before they are cast to their own.
        jnp.promote_types(first.config.dtype, second.config.dtype).name,
    )
    layers = first.config.num_layers

    def init(key: Array) -> ArrayTree:
        keys = jax.random.split(key)
        return {"first": first.init(keys[0]), "second": second.init(keys[1])}

    def apply(params, tokens, positions, context, *, delta=None, remat="none"):
        def half(part: slice):
            prefix, cache = (x if x is None else x[part] for x in (context.prefix, context.cache))
            return context._replace(prefix=prefix, cache=cache)

        hidden, kv = first.apply(
            params["first"], tokens, positions, half(slice(layers)), delta=delta, remat=remat
        )
        others, other_kv = second.apply(
            params["second"], tokens, positions, half(slice(layers, None)), remat=remat
        )
        dtype = jnp.promote_types(hidden.dtype, others.dtype)
        both = jnp.concatenate([hidden.astype(dtype), others.astype(dtype)], axis=-1)
        return both, (*kv, *other_kv)

    def logits(params: ArrayTree, hidden: Array) -> Array:
        matrices = first.output_matrix(params["first"]), second.output_matrix(params["second"])
        width = matrices[0].shape[-1]

        def log_probs(x: Array, matrix: Array, cap: float | None) -> Array:
            raw = jnp.einsum("...d,vd->...v", x, matrix, preferred_element_type=jnp.float32)
            return jax.nn.log_softmax(soft_cap(raw, cap))

        of_first = log_probs(hidden[..., :width], matrices[0], first.logit_cap)
        of_second = log_probs(hidden[..., width:], matrices[1], second.logit_cap)
        return jnp.logaddexp(of_first + math.log1p(-weight), of_second + math.log(weight))

    def output_matrix(params: ArrayTree) -> Array:
        raise ValueError(
            f"{name}: a mixture can only sample; it has no output matrix and cannot be trained."
        )

    def cache(leading: tuple[int, ...], length: int) -> tuple[Cache, ...]:
        return (*empty_cache(first, leading, length), *empty_cache(second, leading, length))

    return Model(config, init, apply, output_matrix, logits=logits, empty_cache=cache)
