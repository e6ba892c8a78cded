"""Writes estimators/rstar.*: microsoft/rStar's resampling and its penalties."""

from types import SimpleNamespace

import numpy as np
import torch
from paper_code import peer, take

PATH = "rstar2_agent/down_sample/roc.py"


def groups():
    """Groups of eight with all numbers of right answers; penalties with ties."""
    rng = np.random.default_rng(3)
    rewards = np.stack([rng.permutation(np.arange(8) < k) for k in range(9)]).astype(np.float32)
    penalty = rng.integers(0, 5, (9, 8)).astype(np.float32) / 4
    return {"binary": {"rewards": rewards, "penalty": penalty}}


def traces():
    rng = np.random.default_rng(4)
    calls, answers = rng.integers(0, 4, 24), rng.integers(0, 4, 24)
    errors = np.minimum(rng.integers(0, 4, 24), calls)
    opened, closed = answers.copy(), answers.copy()
    opened[::5] += 1
    closed[3::7] += 1
    names = ("errors", "calls", "answers", "opened", "closed", "turns")
    return {
        "random": dict(
            zip(
                names, (errors, calls, answers, opened, closed, rng.integers(0, 4, 24)), strict=True
            )
        )
    }


def text(a, i):
    """A transcript with these counts."""
    tool = [
        f"<tool_response>{'Error' if k < a['errors'][i] else 'ok'}</tool_response>"
        for k in range(a["calls"][i])
    ]
    pairs = ["<answer>1</answer>"] * a["answers"][i]
    # Tags in excess, where no pattern of a pair begins or ends.
    before = "</answer>" * (a["closed"][i] - a["answers"][i])
    after = "<answer>" * (a["opened"][i] - a["answers"][i])
    turns = ["<|im_start|>assistant a<|im_end|>"] * a["turns"][i]
    return "".join([before, *tool, *pairs, *turns, after])


@peer("rstar", "rStar2", "microsoft/rStar")
def main(root, writer):
    writer.inputs("groups", groups())
    writer.inputs("traces", traces())

    def select(count, least):
        def compute(case, a):
            keep = []
            for rewards, penalty in zip(a["rewards"], a["penalty"], strict=True):
                (function,) = take(
                    root / PATH,
                    "resample_of_correct",
                    decode_prompt_response_str=lambda *_: (None, [""] * 8),
                    calc_error_ratio_penalty_weights=lambda _, p=penalty: (p, {}),
                    calc_format_penalty_weights=lambda _: (np.zeros(8), {}),
                    filter_by_mask=lambda batch, mask, _: mask,
                    List=list,
                    DataProto=None,
                    PreTrainedTokenizerFast=None,
                )
                batch = SimpleNamespace(
                    non_tensor_batch={"uid": np.zeros(8)},
                    batch={"token_level_scores": torch.from_numpy(rewards)[:, None]},
                )
                config = {
                    "roc_error_ratio": True,
                    "roc_answer_format": False,
                    "min_zero_reward_trace_num": least,
                    "min_non_zero_reward_trace_num": least,
                    "down_sample_to_n": count,
                }
                keep.append(function(batch, None, config)[0].numpy())
            return {"keep": np.stack(keep)}

        return compute

    for count, least in ((4, 1), (4, 2), (6, 2), (2, 1)):
        writer.add(f"select_{count}_{least}", select(count, least))
    tools, form = (
        take(root / PATH, name, re=__import__("re"), List=list)[0]
        for name in ("calc_error_ratio_penalty_weights", "calc_format_penalty_weights")
    )

    def penalties(case, a):
        texts = [text(a, i) for i in range(24)]
        return {"penalty": tools(texts)[0] + form(texts)[0]}

    writer.add("penalty", penalties)
