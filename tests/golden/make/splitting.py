"""Writes tests/golden/tokenizer/splitting.json: where each pre-tokenizer cuts the golden strings.

The cuts are those of transformers' own Qwen2Tokenizer, GPT2Tokenizer and, for Llama 3, the
expression of its TikTokenConverter. Stored are the lengths of the pieces in UTF-8 bytes.
"""

import inspect
import json
from pathlib import Path

import tokenizers
import transformers
from strings import STRINGS
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import GPT2Tokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

FILE = Path(__file__).parents[1] / "tokenizer" / "splitting.json"


def of_class(kind):
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    backend = kind(vocab={t: i for i, t in enumerate(tokens)}, merges=[]).backend_tokenizer
    return backend.normalizer or normalizers.Sequence([]), backend.pre_tokenizer


def of_llama3():
    pattern = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    steps = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return normalizers.Sequence([]), pre_tokenizers.Sequence(steps)


def main():
    sources = {
        "gpt-2": of_class(GPT2Tokenizer),
        "qwen2": of_class(Qwen2Tokenizer),
        "llama-bpe": of_llama3(),
    }
    lengths = {}
    for name, (normalizer, splitter) in sources.items():
        pieces = [splitter.pre_tokenize_str(normalizer.normalize_str(text)) for text in STRINGS]
        lengths[name] = [[len(piece) for piece, _ in row] for row in pieces]
    provenance = {
        "what": "lengths of the pieces of each string of smollm2.json, by pre-tokenizer",
        "script": "tests/golden/make/splitting.py",
        "versions": {
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
    text = json.dumps({"provenance": provenance, "lengths": lengths}) + "\n"
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
