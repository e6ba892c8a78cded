"""Lets the tests of this folder use the tiny run of the tests of training."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "train"))
