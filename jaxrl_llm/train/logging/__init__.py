"""The output of a run: its folder, its report, and other sinks for its metrics."""

from jaxrl_llm.train.logging.report import write_report
from jaxrl_llm.train.logging.run_folder import OccupiedError, RunFolder, TrainingError

__all__ = ["OccupiedError", "RunFolder", "TrainingError", "write_report"]
