"""``EngineSpec``: what the host needs to know of an engine to fill its slots."""

from dataclasses import dataclass

from jaxrl_llm.rollout.sampling.options import Draw


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The sizes of an engine and how it draws; see :func:`~jaxrl_llm.rollout.make_engine`.

    Attributes:
      vocab_size: V.
      rows: R, prompts that decode at one time.
      width: W, slots of a row.
      prompt_length: L, the longest prompt.
      max_new_tokens: T, the longest response.
      chunk: Tokens a slot decodes before the host collects what has ended.
      block: Tokens of a prompt or a resumed response that are read in one pass.
      stop_ids: Tokens that end a response.
      pad_id: Fills prompts.
      shards: S, the number of devices over which the rows are spread.
      draw: How a token is drawn.
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
