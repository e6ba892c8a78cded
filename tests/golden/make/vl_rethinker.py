"""Writes estimators/vl_rethinker.*: how VL-Rethinker fills a batch without advantages.

It is the draw of the selective sample buffer of Skywork R1V2, whose code is not public.
"""

import random
from collections import deque
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from paper_code import peer, take

PATH = "openrlhf/trainer/ppo_utils/replay_buffer.py"
FRESH, STORED = 12, 6
FACTS = ("round0_correctness", *(f"round0_{x}" for x in ("ALLTrue", "ALLFalse", "Easy", "Medium")))


def item(name, advantage):
    info = dict.fromkeys((*FACTS, "round0_Hard"), 0.0) | {"reward": 0.0}
    return SimpleNamespace(name=name, advantages=torch.tensor([advantage]), info=info)


def drawn(sampling):
    """The probabilities of both draws by place, and which of the batch are stored ones."""

    def compute(case, a):
        fresh = [item(("fresh", i), x) for i, x in enumerate(a["advantages"])]
        buffer = SimpleNamespace(items=fresh, keep_items=deque(maxlen=STORED))
        # Fresh ones are stored before the draw: these places will be theirs.
        size = int((a["advantages"] != 0).sum())
        old = a["stored_advantages"][: STORED - size]
        buffer.keep_items.extend(item(("stored", i), x) for i, x in enumerate(old))
        calls, original = [], np.random.choice

        def choice(values, size, p):
            calls.append((np.asarray(p), size))
            return original(values, size=size, p=p)

        with mock.patch.object(np.random, "choice", choice):
            sampling(buffer, do_filter=True, do_ssr=True)
        effective = [i for i, x in enumerate(a["advantages"]) if x != 0]
        # The order in which the first draw has them; the seed is the released one.
        random.seed(42)
        random.shuffle(effective)
        probs = np.zeros(FRESH)
        probs[effective] = calls[0][0]
        return {
            "fresh": probs,
            "stored": calls[1][0],
            "fresh_count": np.array(calls[0][1]),
            "stored_count": np.array(calls[1][1]),
        }

    return compute


@peer("vl_rethinker", "VL-Rethinker", "TIGER-AI-Lab/VL-Rethinker")
def main(root, writer):
    (sampling,) = take(
        root / PATH, "active_sampling", deque=deque, random=random, print=lambda *_: None
    )
    rng = np.random.default_rng(62)
    cases = {}
    for name, size in (("two", 2), ("three", 3)):
        advantages = np.zeros(FRESH, np.float32)
        advantages[rng.permutation(FRESH)[:size]] = rng.normal(size=size)
        stored = rng.normal(size=STORED).astype(np.float32)
        stored[STORED - size :] = advantages[advantages != 0]
        cases[name] = {"advantages": advantages, "stored_advantages": stored}
    writer.inputs("buffers", cases)
    writer.add("sample", drawn(sampling))
