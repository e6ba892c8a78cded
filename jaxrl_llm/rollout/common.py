"""What all prompts of a run begin with: the chat template, its system message, the task."""

import os
from collections.abc import Sequence

# A second pass over what differs costs more than so few tokens.
_WORTH = 8


def common_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """How many first tokens all prompts share, less than any has; 0 where it is not worth it."""
    shared = len(os.path.commonprefix([list(p) for p in prompts]))
    shared = min([shared, *(len(p) - 1 for p in prompts)])
    return shared if shared >= _WORTH else 0


def check_common(function: str, prompts: Sequence[Sequence[int]], common: int) -> None:
    """Raises ValueError unless all prompts share so many first tokens and are longer."""
    if not common:
        return
    first = list(prompts[0][:common])
    for i, prompt in enumerate(prompts):
        if len(prompt) <= common or list(prompt[:common]) != first:
            raise ValueError(
                f"{function}: prompt {i} does not begin with the {common} tokens that all prompts "
                "are said to have in common, or has no more."
            )
