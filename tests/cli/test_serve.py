"""``jaxrl-llm serve``: what it refuses, and a server in a process of its own until Ctrl-C."""

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
import weakref
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.cli import UsageError, main, options, serve
from jaxrl_llm.data.questions import TextEncoder
from jaxrl_llm.train import DataConfig, LoRAConfig

ROOT = Path(__file__).resolve().parents[2]
# The command with the tiny model in place of a named one.
PROGRAM = """
import sys
import jaxrl_llm as jr
from jaxrl_llm.cli import main
jr.models.load_model = lambda name, *, dtype: jr.testing.tiny_model(dtype=dtype)
jr.data.load_tokenizer = lambda name: jr.testing.ByteTokenizer()
sys.exit(main(["serve", "tiny", "--port", "0", "--max-new-tokens", "192", *sys.argv[1:]]))
"""


@for_each(
    ("arguments", "part"),
    [
        (["--slots", "0"], "--slots must be at least 1; got 0"),
        (["--slots", "4", "--width", "3"], "--width 3 must divide --slots 4"),
        (["--port", "70000"], "--port must be from 0 to 65535"),
        (["--key", ""], "--key must not be empty"),
        (["--key", " \n"], "--key must be printable ASCII, and not empty"),
        (["--key", "schlüssel"], "--key must be printable ASCII, and not empty"),
        (["--name", ""], "--name must not be empty"),
        (["--vary", "top_k", "top_k"], "--vary names one twice: top_k top_k"),
        (["--host", "0.0.0.0"], "needs a key: set JAXRL_LLM_KEY, or --key"),
        (["--host", "256.0.0.1", "--key", "x"], "Cannot listen at 256.0.0.1:8000"),
        (["--port", "BUSY"], "Address already in use"),
    ],
)
def test_wrong_words_are_refused_before_a_model_is_loaded(arguments, part, capsys, monkeypatch):
    monkeypatch.delenv("JAXRL_LLM_KEY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        words = [port if word == "BUSY" else word for word in arguments]
        assert main(["serve", "tiny", *words]) == 2
    err = capsys.readouterr().err
    assert part in " ".join(err.split()) and "Traceback" not in err


def test_a_key_of_a_file_is_without_its_last_newline(monkeypatch):
    """A client's header has none."""
    monkeypatch.setenv("JAXRL_LLM_KEY", "a secret\n")
    assert serve._read_key(serve.Serve(model="m")) == "a secret"
    assert serve._read_key(serve.Serve(model="m", key="other ")) == "other"
    monkeypatch.setenv("JAXRL_LLM_KEY", "")
    with pytest.raises(UsageError, match="JAXRL_LLM_KEY must be printable ASCII, and not empty"):
        serve._read_key(serve.Serve(model="m"))


def test_a_run_without_a_chat_template_is_asked_as_it_was_trained(monkeypatch):
    tokenizer, question = jr.testing.ByteTokenizer(), [{"role": "user", "content": "2+2"}]
    data, prompts = DataConfig(prompts="questions.jsonl", chat=False), []

    def make_app(*args, renderer, **options):
        prompts.append(renderer.prompt(question))

    monkeypatch.setattr("jaxrl_llm.serve.make_app", make_app)
    monkeypatch.setattr(serve, "_start", lambda *args: None)
    monkeypatch.setattr(serve, "_serve", lambda app, server, listener: listener.close() or 0)
    for environment in (None, object()):
        config = SimpleNamespace(data=data, environment=environment, lora=LoRAConfig())
        policy = options.Policy(*jr.testing.tiny_model(num_layers=1), tokenizer, config)
        monkeypatch.setattr(options, "load_policy", lambda *args, policy=policy, **kwargs: policy)
        assert main(["serve", "run", "--port", "0"]) == 0
    asked = TextEncoder(tokenizer, 100, chat=False).prompt("2+2", "p")
    # An environment's messages are lines.
    assert prompts == [asked, tokenizer.encode("2+2\n")]


@pytest.mark.of_many
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_were_replaced_are_not_kept(dtype, monkeypatch):
    known = []

    def load_model(name, *, dtype):
        # Float32, as a run has them, whatever the dtype of the products.
        model, params = jr.testing.tiny_model(num_layers=1, dtype=dtype, seed=len(known))
        known.append([weakref.ref(x) for x in jax.tree.leaves(params) if x.ndim > 1])
        return model, params

    def alive(n):
        gc.collect()
        return sum(ref() is not None for ref in known[n])

    def serving(app, server, listener):
        try:
            counts.append(alive(0))
            server.update(loaders[0]("tiny"), version=1)
            counts.append(alive(0))
        finally:
            server.close()
            listener.close()
        return 0

    counts, loaders = [], []
    monkeypatch.setattr("jaxrl_llm.models.load_model", load_model)
    monkeypatch.setattr("jaxrl_llm.data.load_tokenizer", lambda name: jr.testing.ByteTokenizer())
    monkeypatch.setattr(
        "jaxrl_llm.serve.make_app", lambda *_, load_params, **__: loaders.append(load_params)
    )
    monkeypatch.setattr(serve, "_serve", serving)
    words = ["--slots", "1", "--max-new-tokens", "4", "--prompt-length", "8", "--vary", "top_k"]
    assert main(["serve", "tiny", "--port", "0", "--dtype", dtype, *words]) == 0
    # In float32 the server uses the arrays themselves, until they are replaced.
    assert (counts[0] == 0) == (dtype == "bfloat16") and counts[1] == 0 and len(known) == 2


@pytest.mark.slow
def test_it_serves_until_ctrl_c_and_then_answers_with_what_there_is():
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "--slots", "2"],
        cwd=ROOT,
        env=os.environ | {"JAXRL_LLM_KEY": "secret"},
        stderr=subprocess.PIPE,
        text=True,
    )
    replies = []

    def ask(url, tokens, choices):
        params = {"max_tokens": tokens, "n": choices, "min_p": 0.0}
        body = json.dumps({"token_ids": [1, 2], "sampling_params": params}).encode()
        headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
        request = urllib.request.Request(f"{url}/inference/v1/generate", body, headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            replies.append(json.load(response)["choices"])

    def open_requests(url):
        with urllib.request.urlopen(f"{url}/health", timeout=120) as response:
            return json.load(response)["open_requests"]

    try:
        lines = iter(process.stderr.readline, "")
        url = next(m[0] for line in lines if (m := re.search(r"http://\S+", line)))
        ask(url, 3, 1)
        assert len(replies[0][0]["token_ids"]) <= 3
        threads = [threading.Thread(target=ask, args=(url, 192, 64)) for _ in range(4)]
        for thread in threads:
            thread.start()
        while open_requests(url) < 4:
            threads[0].join(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        for thread in threads:
            thread.join(60)
        assert process.stderr.read().endswith("Stopped.\n")
    finally:
        process.kill()
        process.stderr.close()
    finishes = {choice["finish_reason"] for choices in replies for choice in choices}
    assert len(replies) == 5 and "abort" in finishes <= {"abort", "stop", "length"}
