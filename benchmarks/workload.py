"""The inputs of the benchmarks: random token ids, the same for every worker."""

import numpy as np

# Left out: the control tokens at the start, and the last one, which pads in tunix.
_FIRST_ID = 32


def prompt_ids(prompts: int, tokens: int, *, vocab_size: int, seed: int = 0) -> list:
    """Token ids [prompts, tokens]."""
    rng = np.random.default_rng(seed)
    return rng.integers(_FIRST_ID, vocab_size - 1, (prompts, tokens)).tolist()


def response_ids(prompts: int, rollouts: int, tokens: int, *, vocab_size: int) -> list:
    """Token ids [prompts, rollouts, tokens]."""
    rng = np.random.default_rng(1)
    return rng.integers(_FIRST_ID, vocab_size - 1, (prompts, rollouts, tokens)).tolist()


def rewards(prompts: int, rollouts: int) -> np.ndarray:
    """Rewards [prompts, rollouts] of 0 and 1, different within every group."""
    return (np.arange(rollouts) % 3 == 0)[None].repeat(prompts, 0).astype(np.float32)


def group_advantages(rewards: np.ndarray) -> list:
    """(r - mean) / (std + 1e-6) with the sample deviation, as every peer computes it."""
    centered = rewards - rewards.mean(-1, keepdims=True)
    return (centered / (rewards.std(-1, ddof=1, keepdims=True) + 1e-6)).tolist()
