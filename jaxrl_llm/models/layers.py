"""Options of single layers of a decoder."""

from dataclasses import dataclass

from jaxrl_llm.core import checks


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """How a layer attends; the plain one sees every token before it.

    Args:
      window: Number of tokens that a token sees, including itself: those with
        ``position - window < key's position <= position``. None for all before it.
      rotary: Whether queries and keys are rotated by their positions.
      rope_theta: Base of the rotary frequencies, which then are not scaled; None for base and
        scaling of the model.

    Example:
      >>> LayerKind(window=512, rope_theta=10000.0).rotary
      True
    """

    window: int | None = None
    rotary: bool = True
    rope_theta: float | None = None

    def __post_init__(self) -> None:
        checks.check_numbers("LayerKind", self)
        checks.check_positive("LayerKind", window=self.window, rope_theta=self.rope_theta)
        if self.rope_theta is not None and not self.rotary:
            raise ValueError("LayerKind: `rope_theta` has no effect with `rotary` False")
