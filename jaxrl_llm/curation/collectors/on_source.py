"""What collectors share that are built on a source, the collector that proposes their prompts."""

from collections.abc import Callable
from typing import Any

from jaxrl_llm.curation.collectors.needs import needs_of
from jaxrl_llm.curation.collectors.protocol import Collector, in_order


def prompt_source(name: str, source: Collector | None) -> Collector:
    """A source that provides only prompts to another collector; :func:`in_order` for None.

    Raises:
      TypeError: If it is not a collector.
      ValueError: If it requests more after groups have finished, or selects among their rollouts.
    """
    source = in_order() if source is None else source
    if not all(callable(getattr(source, f, None)) for f in ("init", "propose", "observe")):
        raise TypeError(f"{name}: source must be a collector; got {source!r}.")
    if needs_of(source).asks_again:
        raise ValueError(
            f"{name}: source must ask for each group once, as in_order and prioritized do; "
            f"{source!r} also decides what becomes of groups that have finished."
        )
    return source


def evaluation_text_of(source: Any) -> Callable:
    """``evaluation_text`` of a collector whose prompts are those of ``source``.

    The state of the collector has that of the source as its ``source``. Raises AttributeError if
    the source sets no message, so that as a property it is absent then as well.
    """
    of_source = source.evaluation_text
    return lambda state, takes_text: of_source(state.source, takes_text)
