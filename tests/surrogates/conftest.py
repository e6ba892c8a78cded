"""Tests of this folder call the library as a step does, and import `surrogate_cases`."""

import sys
from pathlib import Path

from cheap import one_program_a_call  # noqa: F401

sys.path.insert(0, str(Path(__file__).parent))
