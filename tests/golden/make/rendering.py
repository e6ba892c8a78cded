"""Writes tests/golden/tokenizer/renderers.json: conversations as the package renderers writes them.

Its renderers of Qwen3 and Llama 3 are written by hand and held to the models' published chat
templates. They run on a small vocabulary with the models' special tokens, which is stored as well.
"""

import json
from pathlib import Path

import renderers
from renderers.base import create_renderer
from renderers.configs import Llama3RendererConfig, Qwen3RendererConfig
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

TARGET = Path(__file__).parents[1] / "tokenizer" / "renderers.json"
SPECIAL = [
    f"<|{name}|>"
    for name in (
        *("im_start", "im_end", "endoftext", "begin_of_text", "end_of_text"),
        *("start_header_id", "end_header_id", "eot_id", "eom_id", "python_tag"),
    )
]
PLAIN = [f"<{end}{name}>" for name in ("tool_call", "tool_response", "think") for end in ("", "/")]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "\n What is 2 + 3?"}
ANSWERS = [
    [{"role": "tool", "content": "5"}],
    [{"role": "tool", "content": "5\n"}, {"role": "tool", "content": '{"sum": "\u00e9"}'}],
    [{"role": "user", "content": "Are you sure? "}],
]
CALL = '{"name": "add", "arguments": {"a": 2, "b": 3}}'
TURNS = {
    "qwen3": [
        "It is 5.",
        f"<tool_call>\n{CALL}\n</tool_call>",
        f"<think>\nHm.\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>",
        f"Two: <tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>",
        '<tool_call>\n{"name": "add", "arguments": {\n</tool_call>',
        f"<tool_call>\n{CALL}",
    ],
    "llama-3": ["It is 5.", CALL.replace("arguments", "parameters"), '{"name": "add", "par'],
}


def make_backend():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("\u010a", "\u010a"), ("h", "i"), ("s", "s"), ("\u0120", "W")]
    vocabulary = {token: n for n, token in enumerate([*alphabet, *map("".join, merges)])}
    backend = Backend(models.BPE(vocabulary, merges))
    # As Llama 3 and Qwen, and unlike GPT-2, it keeps the line breaks before a word together.
    pattern = Regex(r"\s*[\r\n]+|\s?[^\s\d]+|\d|\s+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t in PLAIN])
    return backend


class Tokenizer:
    name_or_path, unk_token_id, eos_token_id = "small", None, None

    def __init__(self, backend):
        self.backend = backend

    def encode(self, text, add_special_tokens=False, **_):
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids, skip_special_tokens=False, **_):
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens):
        if isinstance(tokens, str):
            return self.backend.token_to_id(tokens)
        return [self.backend.token_to_id(token) for token in tokens]


def conversation(renderer, tokenizer, messages, tools, turn, answer, end):
    prompt = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
    tokens = tokenizer.encode(turn)
    bridged = [
        renderer.bridge_to_next_turn(prompt, completion, answer, tools=tools)
        for completion in ([*tokens, end], tokens)
    ]
    follows = [None if b is None else b.token_ids[len(prompt) + len(tokens) :] for b in bridged]
    parsed = renderer.parse_response([*tokens, end])
    return {
        "messages": messages,
        "tools": tools or [],
        "turn": turn,
        "answer": answer,
        "prompt": prompt,
        # After the turn's stop token, and where the turn was cut off before it.
        "stopped": follows[0] and follows[0][1:],
        "cut": follows[1],
        "text": parsed.content,
        "reasoning": parsed.reasoning_content,
        "calls": [[c.status.value, c.name, c.arguments] for c in parsed.tool_calls],
    }


def main():
    backend = make_backend()
    tokenizer = Tokenizer(backend)
    configs = {
        "qwen3": (Qwen3RendererConfig(), "<|im_end|>"),
        "llama-3": (Llama3RendererConfig(), "<|eot_id|>"),
    }
    rows = {}
    for name, (config, end) in configs.items():
        renderer = create_renderer(tokenizer, config)
        starts = [([USER], None), ([SYSTEM, USER], [TOOL])]
        rows[name] = [
            conversation(
                renderer,
                tokenizer,
                *starts[n % 2],
                turn,
                ANSWERS[n % 3],
                backend.token_to_id(end),
            )
            for n, turn in enumerate([*TURNS[name], *TURNS[name][:2]])
        ]
    provenance = {
        "what": "prompts, what follows a turn, and parsed turns of renderers' Qwen3 and Llama 3",
        "script": "tests/golden/make/rendering.py",
        "versions": {"renderers": renderers.__version__},
    }
    value = {
        "provenance": provenance,
        "tokenizer": json.loads(backend.to_str()),
        "conversations": rows,
    }
    TARGET.write_text(json.dumps(value, ensure_ascii=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
