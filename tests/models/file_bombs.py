"""Loads models and tokenizers whose files are damaged or built to do harm.

python file_bombs.py FOLDER COUNT: prints a line for each case, and what it came to: "refused" for
one ValueError that names the file, "loaded" where a changed number makes another model.
"""

import json
import random
import struct
import sys
from pathlib import Path

from safetensors.numpy import load_file

from jaxrl_llm.data import load_tokenizer
from jaxrl_llm.models import load_model, load_reward_model, save_safetensors
from jaxrl_llm.models.gguf import open_gguf
from jaxrl_llm.testing import tiny_model
from tests.models.model_files import LETTERS, tokenizer_of_bytes, write

HUGE = 2**40


def write_models(folder: Path) -> None:
    """A tiny model as a folder of safetensors with a tokenizer, and as a GGUF file with one."""
    model, params = tiny_model(num_layers=1)
    config = model.config
    save_safetensors(params, folder / "model", config=config)
    tokenizer_of_bytes("</s>").save(str(folder / "model" / "tokenizer.json"))
    settings = {"eos_token": "</s>", "chat_template": "{{ messages[0].content }}"}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    vocabulary = [*LETTERS, "ab", "</s>"]
    tokenizer = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": vocabulary,
        "token_type": [1] * (len(vocabulary) - 1) + [3],
        "merges": ["a b"],
        "eos_token_id": len(vocabulary) - 1,
    }
    extra = {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    tensors = load_file(folder / "model" / "model.safetensors")
    write(folder / "model.gguf", config, tensors, extra=extra)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(entries=(), tensors=(), *, num_entries=None, num_tensors=None) -> bytes:
    """A GGUF header of entries and tensors as bytes; their numbers may lie."""
    counts = [len(tensors) if num_tensors is None else num_tensors]
    counts += [len(entries) if num_entries is None else num_entries]
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join(entries) + b"".join(tensors)


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return text(b"a") + struct.pack("<IIQ", 9, kind, count) + content


def tensor(name=b"a", sizes=(4,), kind=0, offset=0, axes=None) -> bytes:
    packed = struct.pack(f"<{len(sizes)}Q", *sizes) + struct.pack("<IQ", kind, offset)
    return text(name) + struct.pack("<I", len(sizes) if axes is None else axes) + packed


NESTED = b"".join(struct.pack("<IQ", 9, 1) for _ in range(3_000)) + struct.pack("<IQ", 4, 0)
ALIGNED = text(b"general.alignment") + struct.pack("<II", 4, 0)
GGUF_BOMBS = {
    "an array of 2^40 numbers in 49 bytes": header([array(4, HUGE, b"1234")]),
    "an array of 2^40 texts": header([array(8, HUGE)]),
    "an array of 2^63 arrays": header([array(9, 2**63)]),
    "an array of 2^40 values of no type": header([array(77, HUGE)]),
    "arrays in arrays": header([text(b"a") + struct.pack("<I", 9) + NESTED]),
    "a text of 2^63 bytes": header([text(b"a") + struct.pack("<IQ", 8, 2**63)]),
    "a key of 2^64 - 1 bytes": header([struct.pack("<Q", 2**64 - 1)]),
    "2^64 - 1 entries": header(num_entries=2**64 - 1),
    "2^40 entries": header([array(4, 0)], num_entries=HUGE),
    "2^40 tensors": header(num_tensors=HUGE),
    "2^40 tensors after entries": header([array(4, 0)], [tensor()], num_tensors=HUGE),
    "an entry twice": header([array(4, 0), array(4, 0)]),
    "a tensor twice": header([], [tensor(), tensor()]) + bytes(99),
    "2^31 axes": header([], [tensor(axes=2**31)]),
    "a tensor of 2^80 numbers": header([], [tensor(sizes=(HUGE, HUGE))]) + bytes(99),
    "a tensor of 2^160 and of no numbers": header([], [tensor(sizes=(HUGE, HUGE, HUGE, 0))]),
    "a tensor at 2^63": header([], [tensor(offset=2**63)]) + bytes(99),
    "a tensor of no kind": header([], [tensor(kind=999)]) + bytes(99),
    "an odd row of blocks": header([], [tensor(sizes=(31,), kind=2)]) + bytes(99),
    "alignment 0": header([ALIGNED]),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "version 99": b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
    "nothing": b"",
    "the magic alone": b"GGUF",
    "a text that is not UTF-8": header([text(b"\xff") + struct.pack("<IB", 0, 1)]),
}

CONFIG_BOMBS = {
    f"{name} {value}": {name: value}
    for name in (
        "num_hidden_layers", "vocab_size", "hidden_size", "num_attention_heads", "head_dim",
        "num_key_value_heads", "intermediate_size",
    )
    for value in (3_000_000, 2**31 - 2, 10**30, float("inf"), True, -1, 0)
}  # fmt: skip
CONFIG_BOMBS |= {
    "a context of 2^40": {"max_position_embeddings": HUGE},
    "a norm of 1e39": {"rms_norm_eps": 1e39},
    "a mask of 2^63": {"mask_token_id": 2**63},
}
CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"]}
HEAD_BOMBS = {
    "3,000,000 layers": CLASSIFIER | {"num_hidden_layers": 3_000_000},
    "2,000,000,000 layers": CLASSIFIER | {"num_hidden_layers": 2_000_000_000},
    "no vocabulary": CLASSIFIER | {"vocab_size": None},
    "a width of 2^40": CLASSIFIER | {"hidden_size": HUGE},
}
HEAD_BOMBS |= {f"the class {x!r}": {"architectures": x} for x in (5, {"a": 1}, [[]], [None], "x")}
DEEP = b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
JSON_BOMBS = {
    "brackets": DEEP,
    "an open list": b"[" * 1_000_000,
    "a number of a million digits": b'{"vocab_size": ' + b"9" * 1_000_000 + b"}",
    "other bytes": bytes(range(256)),
    "nothing": b"",
}


def tensors(**entries) -> bytes:
    """A safetensors file of these entries, with a hundred bytes of data."""
    return text(json.dumps(entries).encode()) + bytes(100)


SAFETENSORS_BOMBS = {
    "a header of 2^63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "a header of 99 MB": struct.pack("<Q", 99_000_000) + b"{}",
    "brackets": text(DEEP),
    "a tensor of 2^60": tensors(a={"dtype": "F32", "shape": [2**60], "data_offsets": [0, 100]}),
    "a tensor of 2^120": tensors(
        a={"dtype": "F32", "shape": [2**60, 2**60], "data_offsets": [0, 100]}
    ),
    "data at 2^60": tensors(a={"dtype": "F32", "shape": [1], "data_offsets": [2**60, 2**60 + 4]}),
    "data backwards": tensors(a={"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}),
    "another dtype": tensors(a={"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}),
    "nothing": b"",
}


def grown(kind: str, growing: dict, count: int = 60) -> dict:
    """The settings of a tokenizer that makes a character 2^60 long."""
    steps = [growing] * count
    return {
        kind: {"type": "Sequence", "normalizers" if kind == "normalizer" else "decoders": steps}
    }


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
TOKENIZER_BOMBS = {
    "doubling normalizers": grown("normalizer", REPLACE),
    "a normalizer that doubles by a pattern": grown(
        "normalizer", REPLACE | {"pattern": {"Regex": "a"}}
    ),
    "an expression that backtracks": {"pre_tokenizer": {
        "type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False,
    }},
    "prepending normalizers": grown("normalizer", {"type": "Prepend", "prepend": "a" * 99_999}),
    "doubling decoders": grown("decoder", REPLACE),
    "a token of 2^63": {"added_tokens": [{
        "id": 2**63, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": True,
    }]},
    "padding to 2^40": {"padding": {
        "strategy": {"Fixed": HUGE}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "</s>",
    }},
    "a merge of no token": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]}},
}  # fmt: skip


def flipped(data: bytes, rng: random.Random, within: int) -> bytes:
    """A file with a few bits flipped, a number changed, or a part missing, in its first bytes."""
    out = bytearray(data)
    place, kind = rng.randrange(min(within, len(out))), rng.randrange(4)
    if kind == 0:
        out[place] ^= 1 << rng.randrange(8)
    elif kind == 1:
        out[place : place + 8] = struct.pack(
            "<Q", rng.choice([0, 1, 2**31, HUGE, 2**63, 2**64 - 1])
        )
    elif kind == 2:
        del out[place : place + rng.randrange(1, 40)]
    else:
        del out[place:]
    return bytes(out)


def cases(folder: Path, count: int):
    """Names of cases, the file of each, its content, and what loads it."""
    model, weights = folder / "model", folder / "model" / "model.safetensors"
    whole = (folder / "model.gguf").read_bytes()
    both = [load_model, load_tokenizer]
    for name, content in GGUF_BOMBS.items():
        yield f"GGUF: {name}", folder / "model.gguf", content, [open_gguf]
    for n in range(count):
        content = flipped(whole, random.Random(f"gguf {n}"), 6_000)
        yield f"GGUF: mutation {n}", folder / "model.gguf", content, both
    config = json.loads((model / "config.json").read_text())
    for name, changes in CONFIG_BOMBS.items():
        content = json.dumps(config | changes).encode()
        yield f"config.json: {name}", model / "config.json", content, [load_model]
    for name, changes in HEAD_BOMBS.items():
        content = json.dumps(config | changes).encode()
        yield f"classifier: {name}", model / "config.json", content, [load_reward_model]
    for name, content in JSON_BOMBS.items():
        for file, loaders in (("config.json", [load_model]), ("tokenizer.json", [load_tokenizer])):
            yield f"{file}: {name}", model / file, content, loaders
    for name, content in SAFETENSORS_BOMBS.items():
        yield f"safetensors: {name}", weights, content, [load_model]
    whole = weights.read_bytes()
    for n in range(count):
        content = flipped(whole, random.Random(f"safetensors {n}"), 2_500)
        yield f"safetensors: mutation {n}", weights, content, [load_model]
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    for name, changes in TOKENIZER_BOMBS.items():
        content = json.dumps(tokenizer | changes).encode()
        yield f"tokenizer.json: {name}", model / "tokenizer.json", content, [load_tokenizer]


def main() -> None:
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    write_models(folder)
    for name in ("model", "model.gguf"):
        load_model(folder / name)
        tokenizer = load_tokenizer(folder / name)
        assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    for name, path, content, loaders in cases(folder, count):
        print(json.dumps([name, "died"]), flush=True)
        before = path.read_bytes()
        path.write_bytes(content)
        target = path if path.suffix == ".gguf" else path.parent
        results = []
        for loader in loaders:
            try:
                tokenizer = loader(target)
                if loader is load_tokenizer:
                    tokenizer.decode(tokenizer.encode("abc </s>"))
                results.append("loaded")
            except ValueError as error:
                clear = str(path.parent) in str(error) and len(str(error)) < 1_000
                results.append("refused" if clear else repr(error)[:300])
            except BaseException as error:
                results.append(repr(error)[:300])
        path.write_bytes(before)
        print(json.dumps([name, max(results, key=lambda x: x not in ("loaded", "refused"))]))


if __name__ == "__main__":
    main()
