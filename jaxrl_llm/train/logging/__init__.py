"""What a run writes and shows: its folder, its report, and where its numbers go besides."""

from jaxrl_llm.train.logging.report import write_report
from jaxrl_llm.train.logging.run_folder import OccupiedError, RunFolder, TrainingError

__all__ = ["OccupiedError", "RunFolder", "TrainingError", "write_report"]
