"""``traits``: properties of a function that a Recipe needs to combine it with others.

A sequence-level surrogate repeats one value over the tokens of a sequence; token weights would
count long sequences more, so the Recipe refuses them. It also refuses an advantage with a value for
each token where the surrogate would average that value away, a second update on a sampled batch
with a surrogate that does not compare the policy with ``old_logp``, unless its method makes several
passes over its samples, and an importance weight on a surrogate that is not a mean over samples.
Rewards outside an advantage's range stop a run, and so do others than 0 and 1 where
these are meant.
"""

import dataclasses
import math
import types
from collections.abc import Callable
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Traits:
    """Properties of a function; the defaults are those of a function without :func:`traits`.

    Attributes:
      level: ``"sequence"`` for a surrogate or correction with one value per sequence, and for a
        weighting under which that value keeps its meaning.
      has_ratio: Whether a surrogate compares the policy with ``old_logp``. Without a ratio the
        gradient is correct only for the sampling policy, so a sampled batch allows one update.
      reuses_samples: Whether a surrogate without a ratio is the loss of a method that makes several
        updates on a sampled batch nevertheless: a weighted likelihood of what the policy before the
        first of them sampled. No effect on a surrogate with a ratio.
      off_policy: Whether a surrogate without a ratio is the loss of a method for samples of any
        policy: of older or rounded weights, and of several updates. No effect with a ratio.
      token_values: Whether an advantage differs from token to token.
      token_advantages: Whether a sequence-level surrogate uses an advantage of each token.
      reads_sequence: Whether a surrogate or a regularizer reads a ratio, a mean or a length of the
        sequence of a token: of all tokens that the selection found in a sequence that still trains.
      supervised: Whether a surrogate or a regularizer learns from labels, demonstrations or a
        teacher whatever the advantages, so that a batch whose advantages are all 0 still has a
        signal.
      zero_if_equal: Whether an advantage is 0 in a group of equal rewards, whatever else it reads.
      policy_gradient: Whether the gradient of a surrogate at ``old_logp`` is that of
        ``-advantages * logp``.
      takes_correction: Whether an importance weight can correct a surrogate. It cannot if the loss
        is one number per group, or is over data that no policy sampled.
      orders_responses: Whether a surrogate orders the responses of a group by their advantages, as
        preference losses do.
      compares_extremes: Whether a surrogate that orders responses compares only the best and the
        worst of a group.
      reads_head: Whether a surrogate takes the values of a head, one per token, instead of
        log-probabilities: the trained model is then a reward model.
      needs_updates: Whether a function, or a term of it, is 0 under the policy at the start of a
        batch, so that it has no effect on a batch with one update.
      spends_budget: Whether an allocator of rollouts gives out its whole ``budget``, so that it has
        no choice if that is enough for all prompts.
      class_ids: The option of a statistic of the policy with ids of tokens that it trains as
        classes, also where a response ends, so a run refuses ids that end one. None if it has no
        such option.
      clip: What the options ``eps_low``, ``eps_high`` and ``dual_clip`` of a surrogate bound, for
        metrics: "ratio" for the ratio of its level, from ``1 - eps_low`` to ``1 + eps_high``;
        "log_ratio" for the log ratio of each token, from ``-eps_low`` to ``eps_high``; "dual" if
        only ``dual_clip`` bounds the ratio of its level. None if it has no such bounds.
      reward_range: The smallest and the largest reward for which an advantage is defined, or that a
        reward gives.
      binary_rewards: Whether an advantage, a rule of curation or an option of a collector means
        rewards of 0 and 1, and no others.
    """

    level: Literal["token", "sequence"] = "token"
    has_ratio: bool = True
    reuses_samples: bool = False
    off_policy: bool = False
    token_values: bool = False
    token_advantages: bool = False
    reads_sequence: bool = False
    supervised: bool = False
    zero_if_equal: bool = False
    policy_gradient: bool = True
    takes_correction: bool = True
    orders_responses: bool = False
    compares_extremes: bool = False
    reads_head: bool = False
    needs_updates: bool = False
    spends_budget: bool = False
    class_ids: str | None = None
    clip: Literal["ratio", "log_ratio", "dual"] | None = None
    reward_range: tuple[float, float] = (-math.inf, math.inf)
    binary_rewards: bool = False

    @property
    def takes_token_advantages(self) -> bool:
        """Whether a surrogate can use an advantage of each token: every token-level one can."""
        return self.level == "token" or self.token_advantages


@dataclasses.dataclass(frozen=True)
class _WithTraits:
    """A callable that cannot be copied, with traits."""

    function: Callable
    __traits__: Traits

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    @property
    def __wrapped__(self) -> Callable:
        """For ``inspect.signature``."""
        return self.function

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))

    def __repr__(self) -> str:
        return repr(self.function)


def traits(**changes: Any) -> Callable[[Callable], Callable]:
    """A decorator that states how a function differs from the defaults of :class:`Traits`.

    Args:
      **changes: Fields of :class:`Traits` by name.

    Returns:
      A decorator. For a function or another callable it returns a copy with the traits; a class is
      changed in place, so that its instances have them. Earlier traits are preserved.

    Raises:
      TypeError: If there is no field with a given name.

    Example:
      >>> from jaxrl_llm.aggregate import token_mean
      >>> traits_of(traits(level="sequence")(token_mean)).level, traits_of(token_mean).level
      ('sequence', 'token')
    """
    for name in changes:
        if name not in Traits.__dataclass_fields__:
            raise TypeError(f"traits: there is no field {name!r}.")

    def decorate(function: Callable) -> Callable:
        stated = dataclasses.replace(traits_of(function), **changes)
        if isinstance(function, type):
            function.__traits__ = stated  # pyrefly: ignore
            return function
        if not isinstance(function, types.FunctionType):
            return _WithTraits(function, stated)
        copy = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        for name in ("__kwdefaults__", "__annotations__", "__doc__", "__module__", "__qualname__"):
            setattr(copy, name, getattr(function, name))
        copy.__dict__.update(function.__dict__, __traits__=stated)
        return copy

    return decorate


def traits_of(function: Callable) -> Traits:
    """The traits of a function, also through ``bind``, ``functools.partial`` and ``jax.jit``.

    The defaults where none were stated.

    Example:
      >>> import jaxrl_llm as jr
      >>> traits_of(jr.bind(jr.surrogates.gspo, eps_low=3e-4)).level
      'sequence'
    """
    inner: Any = function
    while inner is not None:
        if isinstance(stated := getattr(inner, "__traits__", None), Traits):
            return stated
        # `function` is what a Bound holds, `func` a functools.partial.
        held = getattr(inner, "function", None)
        inner = getattr(inner, "func", None) if held is None else held
    return Traits()
