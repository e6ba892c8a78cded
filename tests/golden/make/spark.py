"""Writes estimators/spark.*: the tasks that SPARK can make of a group of rollouts.

The released function draws at random, so that what is compared is which of its draws ever occur.
"""

import json
import random
from types import SimpleNamespace

import numpy as np
import torch
from paper_code import peer, take

PATH = "Lmm_XC/openrlhf/trainer/ppo_utils/new_data_gen.py"
PROMPTS, SIZE, RUNS = 64, 8, 3000
TEMPLATE = {"template": "one {question} {answer}", "label_type": "yesno"}
PAIR = {"template": "two {question} {answer_a} {answer_b}"}
# Of the items: one answer called right, or wrong; first and second of a pair; and a reflection.
KINDS = ("right", "wrong", "good_bad", "bad_good", "reflect")


def tasks(root):
    chance = random.Random(65)
    names = {name: getattr(chance, name) for name in ("random", "choice")}
    given = {
        "PROMPT_TEMPLATES_SINGLE": [TEMPLATE],
        "PROMPT_TEMPLATES_DOUBLE": [PAIR],
        "PROMPT_TEMPLATES_SELF_REFLECTION": ["reflect {question} {cot}"],
        "PROMPT_TEMPLATES_SELF_REFLECTION_ANS": ["reflect {question} {answer}"],
        "random": SimpleNamespace(sample=lambda items, count: items, **names),
        "json": json,
        # In these minutes of an hour it writes no file.
        "datetime": SimpleNamespace(
            datetime=SimpleNamespace(now=lambda: SimpleNamespace(minute=30, strftime=str))
        ),
        "print": lambda *_: None,
    }
    *_, function = take(
        root / PATH,
        "extract_boxed_answer",
        "extract_question_segment",
        "single_judge_with_answer",
        "double_judge_with_answer",
        "gen_self_reflectoin_data",
        "new_data_gen",
        **given,
    )
    tokenizer = SimpleNamespace(batch_decode=lambda ids, **_: [texts[int(ids[0, 0])]])
    texts = {}

    def compute(case, a):
        experiences = []
        for i, (rewards, answered) in enumerate(zip(a["rewards"], a["answered"], strict=True)):
            for j, there in enumerate(answered):
                answer = f"\\boxed{{r{j}}}" if there else f"r{j}"
                texts[SIZE * i + j] = f"user\nq{i}\nassistant\n{answer}"
            ids = torch.arange(SIZE * i, SIZE * (i + 1))[:, None]
            info = {"reward": torch.from_numpy(rewards)}
            experiences.append(SimpleNamespace(sequences=ids, info=info))
        seen = {kind: np.zeros((PROMPTS, SIZE, SIZE), bool) for kind in KINDS}
        rest = ([""] * PROMPTS, [None] * PROMPTS, tokenizer)
        for _ in range(RUNS):
            made = function(experiences, *rest, SimpleNamespace(info=lambda *_: None))
            for message, answer in zip(*made, strict=True):
                text = json.loads(message)[0]["content"][0]["text"]
                form, question, *shown = text.replace("\\boxed{", "").replace("}", "").split(" ")
                kind = {
                    "one": {"Yes": "right", "No": "wrong"},
                    "two": dict(A="good_bad", B="bad_good"),
                }
                kind = "reflect" if form == "reflect" else kind[form][answer]
                first, last = (int(x.removeprefix("r")) for x in (shown[0], shown[-1]))
                seen[kind][int(question.removeprefix("q")), first, last] = True
        return seen

    return compute


@peer("spark", "Spark", "InternLM/Spark")
def main(root, writer):
    rng = np.random.default_rng(66)
    rewards = rng.integers(0, 2, (PROMPTS, SIZE)).astype(np.float32)
    rewards[:8], rewards[8:16] = 0.0, 1.0
    answered = rng.random((PROMPTS, SIZE)) < 0.8
    answered[7] = False
    writer.inputs("groups", {"random": {"rewards": rewards, "answered": answered}})
    writer.add("tasks", tasks(root))
