"""How one token of every slot is drawn: what a decode step calls, put together once."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array
from jaxrl_llm.rollout.sampling import (
    GREEDY_BELOW,
    filter_logits,
    sample_from,
    sampled_logprobs,
)
from jaxrl_llm.rollout.slots import Slots, Tokens


class Draw(NamedTuple):
    """How a token is drawn.

    Attributes:
      draw: ``draw(logits [R, W, V], uniform [R, W], slots) -> Tokens`` of ``[R, W]``.
      blank: The shapes and dtypes of one token's outputs.
      settings: Options that requests may set for themselves, with their defaults.
    """

    draw: Callable[[Array, Array, Slots], Tokens]
    blank: Tokens
    settings: dict[str, float]


def make_draw(
    name: str,
    *,
    vocab_size: int,
    stop_ids: Sequence[int] = (),
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    order: str = "hf",
    entropy: bool = False,
) -> Draw:
    """How tokens are drawn."""
    del vocab_size, stop_ids
    filters = check_filters(name, temperature, top_k, top_p, min_p, order)
    plain = temperature == 1.0 and not filters

    def draw(logits: Array, uniform: Array, slots: Slots) -> Tokens:
        kept = logits if plain else filter_logits(logits, temperature=temperature, **filters)
        tokens = sample_from(kept, uniform)
        if plain:
            # At temperature 1 without filters the three log-probabilities are one.
            logp = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
            logp = logp - jax.nn.logsumexp(logits, axis=-1)
            found = (logp, logp, jnp.zeros_like(logp))
        else:
            found = sampled_logprobs(logits, kept, tokens, temperature=temperature)
        return Tokens(tokens, *found, jnp.zeros_like(tokens), None, None)

    number = jax.ShapeDtypeStruct((), jnp.float32)
    integer = jax.ShapeDtypeStruct((), jnp.int32)
    return Draw(draw, Tokens(integer, number, number, number, integer), {})


def check_filters(name: str, temperature, top_k, top_p, min_p, order: str) -> dict[str, Any]:
    """The options of ``filter_logits``; raises for one out of range or without effect."""
    checks.check_non_negative(name, temperature=temperature)
    checks.check_positive(name, top_k=top_k, top_p=top_p, min_p=min_p)
    for option, value in (("top_p", top_p), ("min_p", min_p)):
        if value is not None and value >= 1:
            raise ValueError(f"{name}: {option} must be below 1; got {value:g}. None is off.")
    checks.check_option(name, "order", order, ("hf", "vllm"))
    given = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    filters: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    if temperature < GREEDY_BELOW and filters:
        raise ValueError(f"{name}: {', '.join(filters)} has no effect at temperature 0.")
    if order != "hf":
        if min_p is None:
            raise ValueError(f"{name}: order={order!r} has no effect without min_p.")
        filters["order"] = order
    return filters
