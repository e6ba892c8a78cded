"""Options of single layers of a decoder."""

from dataclasses import dataclass, replace

from jaxrl_llm.core import checks

# Sigmoid gain of the clamped activation of gpt-oss.
_ALPHA = 1.702
# Far beyond any released decoder: a number above is an error of the file, or a trap.
_MOST_EXPERTS = 4096


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What a layer has of its own; the plain one sees every token before it.

    Args:
      window: Number of tokens that a token sees, including itself: those with
        ``position - window < key's position <= position``. None for all before it.
      rotary: Whether queries and keys are rotated by their positions.
      rope_theta: Base of the rotary frequencies, which then are not scaled; None for base and
        scaling of the model.
      dense: In a model with experts, whether the layer has a plain MLP in their place.
      linear: Whether linear attention replaces attention; the model then has `linear_attention`.

    Example:
      >>> LayerKind(window=512, rope_theta=10000.0).rotary
      True
    """

    window: int | None = None
    rotary: bool = True
    rope_theta: float | None = None
    dense: bool = False
    linear: bool = False

    def __post_init__(self) -> None:
        checks.check_numbers("LayerKind", self)
        if self.linear and LayerKind(dense=self.dense) != replace(self, linear=False):
            raise ValueError(
                "LayerKind: `window`, `rotary` and `rope_theta` have no effect with `linear` True"
            )
        checks.check_positive("LayerKind", window=self.window, rope_theta=self.rope_theta)
        if self.rope_theta is not None and not self.rotary:
            raise ValueError("LayerKind: `rope_theta` has no effect with `rotary` False")


@dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig:
    """The sizes of linear attention by the gated delta rule, of the layers that have it.

    Args:
      key_heads: Hk, heads of queries and keys.
      value_heads: Hv, heads of values, a multiple of Hk.
      key_dim: dk, size of a query and a key.
      value_dim: dv, size of a value.
      conv_size: K, tokens of the causal convolution, at least 2.

    Raises:
      ValueError: If a number is not positive, the heads do not group, or `conv_size` is below 2.

    Example:
      >>> LinearAttentionConfig(key_heads=16, value_heads=32, key_dim=128, value_dim=128).conv_size
      4
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int = 4

    def __post_init__(self) -> None:
        name = "LinearAttentionConfig"
        checks.check_numbers(name, self)
        checks.check_positive(name, finite=True, **vars(self))
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"{name}: `key_heads` ({self.key_heads}) does not divide `value_heads` "
                f"({self.value_heads})"
            )
        if self.conv_size < 2:
            raise ValueError(f"{name}: `conv_size` must be at least 2, got {self.conv_size}")


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The mixture of experts of a layer: a router chooses a few of many small MLPs per token.

    Args:
      count: E, number of experts.
      active: k, number of experts that compute a token.
      width: M, hidden size of one expert.
      normalized: Whether the weights of the chosen experts sum to one. If not, they are their
        probabilities among all experts.
      bias: Whether the router and all matrices of the experts have a bias.
      shared: Hidden size of one more expert that computes every token, times a gate of its own,
        `sigmoid(w x)`; None for none.
      limit: Limit of the clamped activation of gpt-oss, see `clamped_swiglu`; None for the
        activation of the model.
      alpha: Sigmoid gain of the clamped activation.

    Raises:
      ValueError: If a number is not positive or `active` is above `count`, or `alpha` is set
        without a limit.

    Example:
      >>> ExpertsConfig(count=128, active=8, width=768).normalized
      True
    """

    count: int
    active: int
    width: int
    normalized: bool = True
    bias: bool = False
    shared: int | None = None
    limit: float | None = None
    alpha: float = _ALPHA

    def __post_init__(self) -> None:
        name = "ExpertsConfig"
        checks.check_numbers(name, self)
        checks.check_positive(
            name,
            finite=True,
            count=self.count,
            active=self.active,
            width=self.width,
            shared=self.shared,
            limit=self.limit,
            alpha=self.alpha,
        )
        if self.count > _MOST_EXPERTS:
            raise ValueError(
                f"{name}: `count` must be at most {_MOST_EXPERTS:,}, got {self.count:,}"
            )
        if self.active > self.count:
            raise ValueError(f"{name}: `active` ({self.active}) is above `count` ({self.count})")
        if self.limit is None and self.alpha != _ALPHA:
            raise ValueError(f"{name}: `alpha` has no effect without a `limit`")
