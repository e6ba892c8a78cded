"""Checkpoints of a run: written atomically, checked when read, restorable on any mesh."""

from jaxrl_llm.train.checkpoint.checkpoints import Checkpoints, restore, save
from jaxrl_llm.train.checkpoint.restore import CheckpointError

__all__ = ["CheckpointError", "Checkpoints", "restore", "save"]
