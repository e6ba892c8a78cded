"""``EngineSpec``: the sizes and draw options of an engine, as the host uses them."""

from dataclasses import dataclass

from jaxrl_llm.rollout.sampling.options import Draw


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The sizes of an engine and how it draws: arguments of :func:`~jaxrl_llm.rollout.make_engine`.

    ``vocab_size`` is V, ``shards`` is S, the number of devices over which the rows are spread, and
    ``draw`` is how a token is drawn.
    """

    vocab_size: int
    rows: int
    width: int
    prompt_length: int
    max_new_tokens: int
    chunk: int
    block: int
    stop_ids: tuple[int, ...]
    pad_id: int
    shards: int
    draw: Draw

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and width."""
        return self.rows, self.width

    @property
    def shard_rows(self) -> int:
        """Rows of each device."""
        return self.rows // self.shards
