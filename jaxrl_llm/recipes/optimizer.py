"""``OptimizerConfig``: the options of an optimizer, of a run or of a recipe that brings its own."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from jaxrl_llm.core import Bound, accepted, checks
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.recipes.records import format_fields

_ADAM_ALONE = {"b2": 0.999, "eps": 1e-8}


@dataclass(frozen=True, kw_only=True, repr=False)
class OptimizerConfig:
    """AdamW, SGD or any optax transformation, with warmup, decay and a bound on the gradient norm.

    Attributes:
      name: "adamw", or "sgd".
      transform: In place of ``name``, any function of optax that takes a ``learning_rate``; its
        options are bound: ``bind(optax.contrib.muon, beta=0.9)``. The options of AdamW and SGD then
        have no effect, and raise.
      learning_rate: Step size after the warmup.
      b1: Decay rate of the mean of gradients; with "sgd" the momentum, 0 for none.
      b2: Decay rate of the mean of squared gradients.
      eps: Added to the square root of that mean.
      weight_decay: Strength of the decay toward zero; it is multiplied by the step size.
      max_grad_norm: Gradients with a larger norm are scaled down to this norm; None for no bound.
      warmup_steps: Steps of a run, each of one batch, over which the step size rises from zero; of
        a recipe that updates turn by turn, each turn counts as a step. A step without an update
        does not count; of several updates a step, those that are skipped or withheld do not.
      decay_steps: Steps after warmup over which the step size falls to zero; None for no decay.
      moment_dtype: Dtype of the mean of gradients: "bfloat16" halves its size and saves a quarter
        of the optimizer's memory. The mean of squares stays float32: with b2 of 0.999 the change
        in one step is below the precision of bfloat16.
    """

    name: str = "adamw"
    learning_rate: float = 1e-6
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    warmup_steps: int = 0
    decay_steps: int | None = None
    moment_dtype: str = "float32"
    transform: Callable | None = None

    def __post_init__(self):
        name = "optimizer"
        checks.check_numbers(name, self)
        if self.transform is not None:
            _check_transform(self)
        checks.check_option(name, "name", self.name, ("adamw", "sgd"))
        if self.name == "sgd":
            for option, default in _ADAM_ALONE.items():
                if getattr(self, option) != default:
                    raise ValueError(f"optimizer: {option} has no effect with sgd.")
            if not self.b1 and self.moment_dtype != "float32":
                raise ValueError("optimizer: moment_dtype has no effect without momentum (b1).")
        checks.check_option(name, "moment_dtype", self.moment_dtype, ("float32", "bfloat16"))
        checks.check_positive(name, learning_rate=self.learning_rate, eps=self.eps)
        checks.check_positive(name, max_grad_norm=self.max_grad_norm)
        checks.check_non_negative(name, weight_decay=self.weight_decay, b1=self.b1, b2=self.b2)
        checks.check_non_negative(name, warmup_steps=self.warmup_steps)
        checks.check_positive(name, decay_steps=self.decay_steps)
        for option in ("b1", "b2"):
            if getattr(self, option) >= 1:
                raise ValueError(
                    f"optimizer: {option} must be below 1; got {getattr(self, option):g}."
                )

    @classmethod
    def of(cls, value: Any) -> Any:
        """A function of optax as a config; any other value as it is.

        A ``learning_rate`` that the function has bound is that of the config.

        Example:
          >>> import optax
          >>> import jaxrl_llm as jr
          >>> jr.train.OptimizerConfig.of(jr.bind(optax.lion, b1=0.95, learning_rate=1e-4))
          OptimizerConfig(learning_rate=0.0001, transform=lion(b1=0.95))
        """
        if not callable(value):
            return value
        if not (isinstance(value, Bound) and "learning_rate" in (options := dict(value.options))):
            return cls(transform=value)
        rate = options.pop("learning_rate")
        return cls(transform=Bound(value.function, tuple(options.items())), learning_rate=rate)

    @property
    def shown_name(self) -> str:
        """The name of the optimizer, for a user."""
        return self.name if self.transform is None else stable_repr(self.transform)

    def __repr__(self) -> str:
        """The fields that differ from their defaults."""
        return f"OptimizerConfig({format_fields(self)})"


_OF_ANY = ("learning_rate", "max_grad_norm", "warmup_steps", "decay_steps", "transform")


def _check_transform(config: OptimizerConfig) -> None:
    function = config.transform
    if not callable(function) or "learning_rate" not in accepted(function):
        raise TypeError(
            "optimizer: transform must be a function with a learning_rate that returns an optax "
            f"transformation, such as optax.contrib.muon; got {function!r}."
        )
    for field in fields(config):
        if field.name not in _OF_ANY and getattr(config, field.name) != field.default:
            raise ValueError(
                f"optimizer: {field.name} has no effect with transform {stable_repr(function)}, "
                "which has options of its own; bind them to it."
            )
