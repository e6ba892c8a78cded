"""Lets the tests of this folder use the helpers that all tests share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
