"""Which checkpoint of a run a command reads: the last, that of a step, or the best."""

from jaxrl_llm.cli import UsageError
from jaxrl_llm.train import Checkpoints, TrainConfig


def check_choice(name: str, config: TrainConfig | None, *, step: int | None, best: bool) -> None:
    """Raises UsageError if there is no such choice.

    Args:
      name: What the command was pointed at.
      config: The configuration of the run; None if that is no run.
      step: The checkpoint of this step; None for the last.
      best: The one that was kept as the best.
    """
    for option, given in (("--step", step is not None), ("--best", best)):
        if given and config is None:
            raise UsageError(f"{option} has no effect on {name!r}, which is not a run.")
    if best and step is not None:
        raise UsageError("--step has no effect with --best.")
    if best and config is not None and config.checkpoint.best is None:
        raise UsageError(f"The run {name!r} kept no best checkpoint; it has no checkpoint.best.")


def chosen(checkpoints: Checkpoints, name: str, *, step: int | None, best: bool) -> int | None:
    """The step that is meant; None for the last checkpoint that can be read."""
    if not best:
        return step
    found = checkpoints.best_step()
    if found is None:
        raise UsageError(f"The run {name!r} has no checkpoint yet that was rated.")
    return found
