"""Models and tokenizers whose files are damaged: one ValueError that names a file, or success."""

import json
import random
import shutil
from pathlib import Path

import pytest
from capped import run_capped
from models.model_files import tokenizer_of_bytes
from tokenizers import processors

from jaxrl_llm.data import load_tokenizer, save_tokenizer
from jaxrl_llm.data.tokenizer import PretrainedTokenizer
from jaxrl_llm.models import load_model, save_safetensors
from jaxrl_llm.testing import tiny_model

HERE = Path(__file__).parent

FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "model.safetensors.index.json",
)
VALUES = (
    None, True, -1, 0, 3, 10**30, 2.5, 1e308, float("nan"), float("inf"), "", "x", "NaN", [], {},
    [None], ["x"], {"x": 1}, [[1]], -(2**63), 1e-320, "\u0000", "LlamaForCausalLM",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model whose weights lie in several files, and a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    model, params = tiny_model(num_layers=1)
    save_safetensors(params, folder, config=model.config, file_bytes=20_000)
    backend = tokenizer_of_bytes("<s>", "</s>")
    first, last = (backend.token_to_id(name) for name in ("<s>", "</s>"))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", first)]
    )
    tokenizer = PretrainedTokenizer(
        backend,
        eos_ids=[last],
        prefix_ids=[first],
        template="{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}",
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    )
    save_tokenizer(tokenizer, folder)
    (folder / "chat_template.jinja").unlink()  # the one in tokenizer_config.json is read then
    load_model(folder), load_tokenizer(folder)
    return folder


def places(value, path=()):
    """The paths of all values in a JSON document."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield (*path, key)
        yield from places(inner, (*path, key))


def with_another_value(text, rng):
    """A document with one value replaced, or taken out."""
    document = json.loads(text)
    *parents, key = rng.choice(list(places(document)))
    target = document
    for parent in parents:
        target = target[parent]
    if rng.random() < 0.2:
        del target[key]
    else:
        target[key] = rng.choice(VALUES)
    return json.dumps(document).encode()


def with_other_bytes(text, rng):
    """A document with a few bits flipped, or a part missing or doubled."""
    data = bytearray(text)
    start = rng.randrange(len(data))
    kind = rng.randrange(4)
    if kind == 0:
        data[start] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data[start] = rng.choice(b'[]{}",:0e-\x00\xff')
    elif kind == 2:
        del data[start : start + rng.randrange(1, 40)]
    else:
        data[start:start] = data[start : start + rng.randrange(1, 40)]
    return bytes(data)


def load(folder, name):
    if name in ("config.json", "model.safetensors.index.json"):
        return load_model(folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.decode(tokenizer.encode("abc </s>"))
    return tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("mutate", [with_another_value, with_other_bytes])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_a_value_error_that_names_it(folder, tmp_path, name, mutate):
    copy, text = tmp_path / "copy", (folder / name).read_bytes()
    shutil.copytree(folder, copy)
    leaks = []
    for seed in range(40):
        damaged = mutate(text, random.Random(f"{name} {seed}"))
        (copy / name).write_bytes(damaged)
        try:
            load(copy, name)
        except ValueError as error:
            if str(copy) not in str(error):
                leaks.append((seed, f"names no file: {error}"))
        except FileNotFoundError as error:  # of an index that names another file
            if name != "model.safetensors.index.json":
                leaks.append((seed, repr(error)))
        except BaseException as error:
            leaks.append((seed, repr(error)[:200]))
    assert not leaks


@pytest.mark.slow
def test_bombs_and_mutations_of_binary_files_are_refused(tmp_path):
    """In another process, whose memory is bounded: a bomb takes all there is."""
    results = dict(run_capped(HERE / "file_bombs.py", str(tmp_path), "60"))
    mutated = {name for name in results if "mutation" in name}
    assert len(mutated) == 120 and len(results) > 220
    leaks = {name: x for name, x in results.items() if x not in ("refused", "loaded")}
    assert not leaks
    harmless = ("padding to 2^40",)  # a tokenizer's padding is turned off
    loaded = {x for x in results if results[x] == "loaded"} - mutated
    assert {name for name in loaded if not name.endswith(harmless)} == set()
    assert sum(results[name] == "refused" for name in mutated) > 40
