"""``jaxrl-llm methods``."""

import dataclasses
import json
from collections.abc import Sequence

from jaxrl_llm.cli import options
from jaxrl_llm.recipes import catalog


@dataclasses.dataclass(frozen=True, kw_only=True)
class Methods:
    """The methods this package holds, and what each was verified against.

    Attributes:
      json: Print a JSON list instead of a table.
    """

    json: bool = False


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    given = options.parse(Methods, arguments, command="methods")
    print(json.dumps(catalog.rows(), indent=1) if given.json else catalog.as_table())
    return 0
