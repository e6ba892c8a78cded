"""How one token of every slot is drawn: what a decode step calls, put together once."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array
from jaxrl_llm.rollout.sampling.draw import draw_tokens
from jaxrl_llm.rollout.sampling.filters import GREEDY_BELOW
from jaxrl_llm.rollout.sampling.penalties import seen_tokens
from jaxrl_llm.rollout.slots import Slots, Tokens

# What requests may set for themselves, and the value that turns it off.
_MAY_VARY = {
    "temperature": 1.0,
    "top_k": 0.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0.0,
}


class Draw(NamedTuple):
    """How a token is drawn.

    Attributes:
      draw: ``draw(logits [R, W, V], uniform [R, W], slots) -> Tokens`` of ``[R, W]``.
      blank: The shapes and dtypes of one token's outputs.
      settings: Options that requests may set for themselves, with their defaults.
      check: ``check(start, settings)`` raises ValueError, in a sentence that begins with ``start``,
        if a request sets one of them to what is out of its range.
    """

    draw: Callable[[Array, Array, Slots], Tokens]
    blank: Tokens
    settings: dict[str, float]
    check: Callable[[str, Mapping[str, float]], None]


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
    repetition_penalty: float | None = None,
    allowed: np.ndarray | None = None,
    min_new_tokens: int = 0,
    vary: Sequence[str] = (),
    entropy: bool = False,
) -> Draw:
    """How tokens are drawn.

    Args:
      name: Who asks, for messages.
      vocab_size: V.
      stop_ids: Tokens that end a response.
      temperature: 0 is greedy.
      top_k: See :func:`~jaxrl_llm.rollout.filter_logits`, as for the next three.
      top_p: Likewise.
      min_p: Likewise.
      order: Likewise.
      repetition_penalty: Makes tokens of the prompt and of the response so far less likely: see
        :func:`~jaxrl_llm.rollout.penalize_repetition`. Training does not penalize, so rollouts
        drawn with it are off-policy.
      allowed: bool ``[V]``, the tokens that may be drawn at all.
      min_new_tokens: No stop token is drawn before a response has this many tokens.
      vary: Options that requests may set for themselves, of temperature, top_k, top_p, min_p,
        repetition_penalty and min_new_tokens; what is given for them here is then the default. If
        ``top_k`` is given it is also the most that a request may set, which keeps drawing cheap and
        the recorded support small.
      entropy: Record the entropy of the distribution that each token was drawn from.

    Raises:
      ValueError: If an option is out of range or has no effect.
    """
    numbers = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    numbers |= {"repetition_penalty": repetition_penalty, "min_new_tokens": min_new_tokens or None}
    for option in vary:
        checks.check_option(name, "vary", option, _MAY_VARY)
    _check(name, numbers, order, allowed, stop_ids, tuple(vary), vocab_size)
    fixed: dict[str, Any] = {"order": order, "allowed": allowed}
    fixed |= {k: x for k, x in numbers.items() if x is not None and k not in vary}
    fixed.pop("min_new_tokens", None)
    if "top_k" in vary:
        fixed["max_top_k"] = top_k
    settings = {k: _MAY_VARY[k] if (x := numbers[k]) is None else float(x) for k in vary}
    penalizes = repetition_penalty is not None or "repetition_penalty" in vary
    holds = min_new_tokens > 0 or "min_new_tokens" in vary

    def options(given: Mapping[str, Array], length: Array, seen: Array | None) -> dict[str, Any]:
        """The options of ``draw_tokens`` where requests have given theirs."""
        found = fixed | {k: given[k] for k in settings if k != "min_new_tokens"}
        if holds:
            short = length < given.get("min_new_tokens", min_new_tokens)
            found |= {"stop_ids": tuple(stop_ids), "too_short": short}
        return found | ({"seen": seen} if penalizes else {})

    def outputs(drawn) -> Tokens:
        logps = (drawn.behavior_logp, drawn.model_logp, drawn.log_kept)
        # Who decodes knows the version of the weights.
        version = jnp.zeros_like(drawn.tokens)
        recorded = drawn.entropy if entropy else None
        return Tokens(drawn.tokens, *logps, version, recorded, drawn.support)

    def draw(logits: Array, uniform: Array, slots: Slots) -> Tokens:
        seen = _seen(slots, vocab_size) if penalizes else None
        given = options(slots.requests.settings, slots.length, seen)
        if given.get("top_p") is not None:
            # A slot at rest must not cost the search for many tokens that it would keep.
            given["top_p"] = jnp.where(slots.active, given["top_p"], 1.0)
        return outputs(draw_tokens(logits, uniform, **given))

    def blank() -> Tokens:
        seen = jnp.zeros(-(-vocab_size // 32), jnp.uint32)
        given = options({k: jnp.zeros(()) for k in settings}, jnp.zeros((), jnp.int32), seen)
        return outputs(draw_tokens(jnp.zeros(vocab_size), jnp.zeros(()), **given))

    def check(start: str, asked: Mapping[str, float]) -> None:
        _check_asked(start, asked, top_k)

    return Draw(draw, jax.eval_shape(blank), settings, check)


def _seen(slots: Slots, vocab_size: int) -> Array:
    """The tokens of each slot's prompt and response: uint32 ``[R, W, ceil(V / 32)]``.

    Made anew for each token, which costs no more than carrying it along.
    """
    prompts, out = slots.prompts, slots.out.tokens
    there = jnp.arange(prompts.tokens.shape[-1]) < prompts.length[:, None]
    own = jnp.arange(out.shape[-1]) < slots.length[..., None]
    before = seen_tokens(prompts.tokens, there, vocab_size=vocab_size)
    return before[:, None] | seen_tokens(out, own, vocab_size=vocab_size)


def _check(name: str, numbers, order: str, allowed, stop_ids, vary, vocab_size: int) -> None:
    """Raises ValueError for an option out of range or without effect."""
    temperature, filters = numbers["temperature"], ("top_k", "top_p", "min_p")
    checks.check_non_negative(name, temperature=temperature)
    for option in (*filters, "repetition_penalty"):
        checks.check_positive(name, **{option: numbers[option]})
    checks.check_non_negative(name, min_new_tokens=numbers["min_new_tokens"])
    for option in ("top_p", "min_p"):
        if numbers[option] is not None and numbers[option] >= 1:
            raise ValueError(
                f"{name}: {option} must be below 1; got {numbers[option]:g}. None is off."
            )
    given = [k for k in filters if numbers[k] is not None]
    if temperature < GREEDY_BELOW and given and "temperature" not in vary:
        raise ValueError(f"{name}: {', '.join(given)} has no effect at temperature 0.")
    checks.check_option(name, "order", order, ("hf", "vllm"))
    if order != "hf" and "min_p" not in (*given, *vary):
        raise ValueError(f"{name}: order={order!r} has no effect without min_p.")
    if not len(stop_ids) and (numbers["min_new_tokens"] or "min_new_tokens" in vary):
        raise ValueError(f"{name}: min_new_tokens has no effect without stop_ids.")
    if allowed is not None:
        checks.check_bool(name, allowed=allowed)
        checks.check_shape(name, "allowed", allowed, (vocab_size,))
        if not np.any(allowed):
            raise ValueError(f"{name}: allowed has no token.")


def _check_asked(start: str, asked: Mapping[str, float], top_k: int | None) -> None:
    """Raises ValueError for a setting of a request that is out of range."""
    most = {"top_k": top_k or np.inf, "top_p": 1, "min_p": 1}
    # Where top_k is bounded it is never off.
    above_zero = ("top_p", "repetition_penalty") + (("top_k",) if top_k else ())
    for option, value in asked.items():
        high = most.get(option, np.inf)
        if not 0 <= value <= high or (value == 0 and option in above_zero):
            low = "above 0" if option in above_zero else "at least 0"
            end = "" if high == np.inf else f" and at most {high}"
            raise ValueError(f"{start} sets {option} to {value:g}; it must be {low}{end}.")
