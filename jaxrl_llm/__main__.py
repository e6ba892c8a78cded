"""``python -m jaxrl_llm`` is ``jaxrl-llm``."""

import sys

from jaxrl_llm.cli import main

if __name__ == "__main__":
    sys.exit(main())
