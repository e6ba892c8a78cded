"""Responses of the data that are longer than those of a run."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.curation.collectors.protocol import Response, beginning
from jaxrl_llm.rollout.types import LENGTH


def cut_response(response: Response, tokens: Sequence[int], most: int, tokenizer: Any) -> Response:
    """The first tokens of a response, which then ends at the length limit, as a sampled one does.

    Steps that end behind the cut, and their rewards, are left out.

    Args:
      response: A response of the data; its ``turn_ends`` are characters of the decoded tokens.
      tokens: Its n tokens, with those that end it.
      most: Number of tokens, below n.
      tokenizer: Decodes them.

    Example:
      >>> import jaxrl_llm as jr
      >>> full = jr.curation.Response([72, 105, 33], reward=1.0)
      >>> cut = cut_response(full, [72, 105, 33], 2, jr.testing.ByteTokenizer())
      >>> cut.tokens.tolist(), cut.finish == LENGTH, cut.reward
      ([72, 105], True, 1.0)
    """
    full = response._replace(tokens=np.asarray(tokens, np.int32))
    cut = beginning(full, most)._replace(finish=LENGTH, reward=response.reward)
    if response.turn_ends is None:
        return cut
    ends = np.asarray(response.turn_ends)
    left = ends <= len(tokenizer.decode([int(x) for x in tokens[:most]]))
    rewards = response.turn_rewards
    return cut._replace(
        turn_ends=ends[left], turn_rewards=None if rewards is None else np.asarray(rewards)[left]
    )
