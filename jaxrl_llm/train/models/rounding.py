"""A policy that is rounded to 8 bits where it samples: which runs and models can have one."""

from typing import Any

from jaxrl_llm.models.protocol import Model, check_rounds


def check_rounding(config: Any, recipe: Any) -> None:
    """Raises ValueError for a quantization of the sampler without effect, or with a bias."""
    own, mode = config.sampling.quantization, config.sampler_quantization
    if own == "off" and recipe.needs.sampler_quantization is None:
        raise ValueError(
            f"sampling: quantization 'off' has no effect: recipe {recipe.name!r} does not ask "
            "for a sampler in 8 bits; use None."
        )
    if mode is None:
        return
    if config.quantization is not None:
        whose = "sampling.quantization" if own else f"recipe {recipe.name!r}"
        remedy = "leave one of them out" if own else "set sampling.quantization to 'off'"
        raise ValueError(
            f"config: quantization {config.quantization!r} rounds sampling and training alike, "
            f"but {whose} asks for a sampler in {mode} beside a trainer in full precision; "
            f"{remedy}."
        )
    recipe.check_quantization(mode)


def check_rounded_model(config: Any, model: Model) -> None:
    """Raises if the policy is to be rounded where it samples, and its model cannot be.

    It is not called where nothing trains, so evaluations need neither such a model nor qwix.
    """
    if (mode := config.sampler_quantization) is None:
        return
    function = "sampling: quantization"
    if config.sampling.quantization is None:
        function = f"recipe {config.resolved_recipe.name!r}: sampler_quantization"
    check_rounds(function, model, mode)
