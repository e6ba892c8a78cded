"""For users' own tests: a tiny model, a byte tokenizer and the battery of every recipe."""

from jaxrl_llm.testing.model import tiny_config, tiny_model
from jaxrl_llm.testing.tokenizer import ByteTokenizer

__all__ = ["ByteTokenizer", "tiny_config", "tiny_model"]
