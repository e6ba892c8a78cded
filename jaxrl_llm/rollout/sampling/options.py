"""Draw options: checked once and turned into a function that draws one token of every slot."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages.entropy import EntropyStats
from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array
from jaxrl_llm.models.protocol import EXPERT_DTYPE, Model, expert_shape
from jaxrl_llm.rollout.sampling.draw import Drawn, RowOptions, draw_rows, entropy_of
from jaxrl_llm.rollout.sampling.filters import GREEDY_BELOW, MAX_TEMPERATURE
from jaxrl_llm.rollout.sampling.penalties import seen_tokens
from jaxrl_llm.rollout.slots import Slots, Tokens

# Options that requests may set for themselves, with the value that turns each one off.
_PER_REQUEST = {
    "temperature": 1.0,
    "top_k": 0.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0.0,
}
# What requests set of a temperature that follows the entropy; without, it is the base temperature.
ENTROPY_STATS = tuple(f"entropy_{name}" for name in EntropyStats._fields)


@dataclass(frozen=True, kw_only=True, eq=False)
class DrawOptions:
    """How tokens are drawn; a filter that is None is off and costs nothing.

    Attributes:
      stop_ids: Tokens that end a response.
      temperature: 0 is greedy.
      top_k: See :func:`~jaxrl_llm.rollout.filter_logits`, as for ``top_p``, ``min_p``, ``order``.
      repetition_penalty: Makes tokens of the prompt and of the response so far less likely: see
        :func:`~jaxrl_llm.rollout.penalize_repetition`. Training does not penalize, so rollouts
        drawn with it are off-policy.
      allowed: bool ``[V]``, the tokens that may be drawn; None for all.
      min_new_tokens: No stop token is drawn before a response has this many tokens.
      vary: Options that requests may set for themselves, among temperature, top_k, top_p, min_p,
        repetition_penalty and min_new_tokens; their values here are then the defaults. ``top_k``,
        if it is not None, is also the maximum for requests, so that drawing is cheap and the
        recorded support small.
      entropy: Record the entropy of the distribution that each token was drawn from.
      model_entropy: Record the entropy of the plain model at temperature 1 instead.
      entropy_tau: The temperature of a token follows the plain model's entropy, with this strength
        in (0, 1): see :func:`~jaxrl_llm.advantages.signal_temperature`, with ``temperature`` as the
        base. Its statistics are settings of the requests: ``entropy_pivot``, ``entropy_scale``,
        ``entropy_high`` and ``entropy_low``; without them the temperature is the base.
      runner_up: Record the plain model's most likely token other than the drawn one.
    """

    stop_ids: Sequence[int] = ()
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    order: str = "hf"
    repetition_penalty: float | None = None
    allowed: np.ndarray | None = None
    min_new_tokens: int = 0
    vary: Sequence[str] = ()
    entropy: bool = False
    model_entropy: bool = False
    entropy_tau: float | None = None
    runner_up: bool = False

    def uses(self, option: str) -> bool:
        """Whether an option is on, or may be turned on by a request."""
        return option in self.vary or getattr(self, option) not in (None, 0)

    def check(self, function: str, vocab_size: int) -> None:
        """Raises ValueError for an option out of range or without effect."""
        if isinstance(self.vary, str):
            raise TypeError(f"{function}: vary must be a list of options; got {self.vary!r}.")
        for option in self.vary:
            checks.check_option(function, "vary", option, _PER_REQUEST)
        checks.check_numbers(function, self)
        checks.check_token_ids(function, stop_ids=self.stop_ids)
        filters = ("top_k", "top_p", "min_p")
        checks.check_non_negative(
            function, temperature=self.temperature, min_new_tokens=self.min_new_tokens
        )
        for option in (*filters, "repetition_penalty"):
            checks.check_positive(function, **{option: getattr(self, option)})
        for option in ("top_p", "min_p"):
            value = getattr(self, option)
            if value is not None and value >= 1:
                raise ValueError(
                    f"{function}: {option} must be below 1; got {value:g}. None is off."
                )
        for option, most in (("temperature", MAX_TEMPERATURE), ("repetition_penalty", 1e6)):
            value = getattr(self, option)
            if value is not None and value > most:
                raise ValueError(f"{function}: {option} must be at most {most:g}; got {value:g}.")
        if self.top_k is not None and self.top_k > vocab_size:
            raise ValueError(
                f"{function}: top_k must be at most the vocabulary of {vocab_size}; got "
                f"{self.top_k}."
            )
        enabled = [k for k in filters if getattr(self, k) is not None]
        if self.temperature < GREEDY_BELOW and enabled and "temperature" not in self.vary:
            raise ValueError(f"{function}: {', '.join(enabled)} has no effect at temperature 0.")
        if self.entropy and self.model_entropy:
            raise ValueError(f"{function}: entropy and model_entropy cannot both be on.")
        if self.entropy_tau is not None:
            checks.check_share(function, zero=False, one=False, entropy_tau=self.entropy_tau)
            if self.temperature < GREEDY_BELOW and "temperature" not in self.vary:
                raise ValueError(f"{function}: entropy_tau has no effect at temperature 0.")
        checks.check_option(function, "order", self.order, ("hf", "vllm"))
        if self.order != "hf" and "min_p" not in (*enabled, *self.vary):
            raise ValueError(f"{function}: order={self.order!r} has no effect without min_p.")
        if not len(self.stop_ids) and self.uses("min_new_tokens"):
            raise ValueError(f"{function}: min_new_tokens has no effect without stop_ids.")
        if self.allowed is not None:
            checks.check_bool(function, allowed=self.allowed)
            checks.check_shape(function, "allowed", self.allowed, (vocab_size,))
            if not np.any(self.allowed):
                raise ValueError(f"{function}: allowed has no tokens.")

    def check_request(self, start: str, settings: Mapping[str, float], vocab_size: int) -> None:
        """Raises ValueError for a setting of a request that is out of range."""
        most = {
            "temperature": MAX_TEMPERATURE,
            "repetition_penalty": 1e6,
            "top_k": self.top_k or vocab_size,
            "top_p": 1,
            "min_p": 1,
            "min_new_tokens": 2**31,
        } | dict.fromkeys(ENTROPY_STATS, float(np.finfo(np.float32).max))
        # Where top_k is bounded it is never off.
        above_zero = ("top_p", "repetition_penalty") + (("top_k",) if self.top_k else ())
        for option, value in settings.items():
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"{start} sets {option} to {value!r}; it must be a number.")
            low_end = -most[option] if option == "entropy_pivot" else 0  # a log-entropy
            if not low_end <= value <= most[option] or (value == 0 and option in above_zero):
                low = "above 0" if option in above_zero else "at least 0"
                huge = isinstance(value, int) and value.bit_length() > 1000  # no float
                shown = "a number of over 300 digits" if huge else f"{value:g}"
                raise ValueError(
                    f"{start} sets {option} to {shown}; it must be {low} and at most "
                    f"{most[option]:g}."
                )
            if option in ("top_k", "min_new_tokens") and value != int(value):
                raise ValueError(f"{start} sets {option} to {value:g}; it must be an integer.")


class Draw(NamedTuple):
    """How a token is drawn.

    Attributes:
      next_token: ``next_token(logits [R, W, V], uniform [R, W], slots) -> Tokens`` of ``[R, W]``.
      blank: The shapes and dtypes of one token's outputs.
      settings: Options that requests may set for themselves, with their defaults.
      fixed: The values of the options that they may not set.
      check: ``check(start, settings)`` raises ValueError, in a sentence that begins with ``start``,
        if a request sets one of them to a value out of its range.
    """

    next_token: Callable[[Array, Array, Slots], Tokens]
    blank: Tokens
    settings: dict[str, float]
    fixed: dict[str, float]
    check: Callable[[str, Mapping[str, float]], None]


def make_draw(function: str, options: DrawOptions, *, vocab_size: int) -> Draw:
    """Builds the function that draws one token of every slot; ``function`` is named in messages.

    Raises:
      ValueError: If an option is out of range or has no effect.
    """
    options.check(function, vocab_size)
    penalizes = options.uses("repetition_penalty")
    values = {
        name: default if (x := getattr(options, name)) is None else float(x)
        for name, default in _PER_REQUEST.items()
    }
    settings = {name: values.pop(name) for name in options.vary}
    if options.entropy_tau is not None:
        settings |= dict.fromkeys(ENTROPY_STATS, 0.0)
    fixed = RowOptions(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        order=options.order,
        max_top_k=options.top_k if "top_k" in options.vary else None,
        repetition_penalty=options.repetition_penalty,
        allowed=options.allowed,
        stop_ids=tuple(options.stop_ids) if options.uses("min_new_tokens") else (),
        entropy_tau=options.entropy_tau,
    )
    not_of_rows = ("min_new_tokens", *ENTROPY_STATS)

    def merge(settings: Mapping[str, Array], length: Array, seen: Array | None) -> RowOptions:
        """The options of each row, with the settings of its request."""
        rows = fixed._replace(
            seen=seen, **{k: x for k, x in settings.items() if k not in not_of_rows}
        )
        if options.entropy_tau is not None:
            rows = rows._replace(entropy_stats=EntropyStats(*(settings[k] for k in ENTROPY_STATS)))
        if not options.uses("min_new_tokens"):
            return rows
        return rows._replace(
            too_short=length < settings.get("min_new_tokens", options.min_new_tokens)
        )

    def record(drawn: Drawn, logits: Array) -> Tokens:
        entropy = drawn.entropy if options.entropy else None
        if options.model_entropy:
            entropy = entropy_of(jnp.asarray(logits, jnp.float32))
        return Tokens(
            tokens=drawn.tokens,
            behavior_logp=drawn.behavior_logp,
            model_logp=drawn.model_logp,
            log_kept=drawn.log_kept,
            version=jnp.zeros_like(drawn.tokens),  # The decode loop writes the version.
            entropy=entropy,
            support=drawn.support,
            runner_up=drawn.runner_up if options.runner_up else None,
            runner_up_logp=drawn.runner_up_logp if options.runner_up else None,
        )

    def next_token(logits: Array, uniform: Array, slots: Slots) -> Tokens:
        seen = None
        if penalizes:  # at each token, which costs no more than carrying it along
            prompts, out = slots.prompts, slots.out.tokens
            in_prompt = jnp.arange(prompts.tokens.shape[-1]) < prompts.length[:, None]
            in_response = jnp.arange(out.shape[-1]) < slots.length[..., None]
            before = seen_tokens(prompts.tokens, in_prompt, vocab_size=vocab_size)
            seen = before[:, None] | seen_tokens(out, in_response, vocab_size=vocab_size)
        rows = merge(slots.requests.settings, slots.length, seen)
        if rows.top_p is not None:
            # An idle slot must not cost the search for all the tokens that it would keep.
            rows = rows._replace(top_p=jnp.where(slots.active, rows.top_p, 1.0))
        return record(draw_rows(logits, uniform, rows), logits)

    def blank() -> Tokens:
        seen = jnp.zeros(-(-vocab_size // 32), jnp.uint32) if penalizes else None
        rows = merge({k: jnp.zeros(()) for k in settings}, jnp.zeros((), jnp.int32), seen)
        logits = jnp.zeros(vocab_size)
        return record(draw_rows(logits, jnp.zeros(()), rows), logits)

    check = partial(options.check_request, vocab_size=vocab_size)
    return Draw(next_token, jax.eval_shape(blank), settings, values, check)


def with_experts(function: str, draw: Draw, model: Model) -> Draw:
    """The draw with room for the experts that the model takes to read each token.

    Raises:
      ValueError: If the model has none, or does not record them.
    """
    shape = expert_shape(model)
    if shape is None:
        raise ValueError(
            f"{function}: record_experts needs a model with experts, which has apply_routed."
        )
    experts = jax.ShapeDtypeStruct(shape, EXPERT_DTYPE)
    return draw._replace(blank=draw.blank._replace(experts=experts))
