"""The token server over HTTP on this machine: what it answers, to whom, and what it turns away."""

import contextlib
import dataclasses
import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
import uvicorn
from rows import for_each
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

import jaxrl_llm as jr
from jaxrl_llm.core.support import keep_mask
from jaxrl_llm.data.messages import Parsed, ToolCall
from jaxrl_llm.data.rendering import ChatRenderer
from jaxrl_llm.data.tokenizer import PretrainedTokenizer
from jaxrl_llm.rollout.types import CANCELLED
from jaxrl_llm.serve import RequestError, SampleRequest, TokenServer, make_app
from jaxrl_llm.serve.chat import (
    ChatRequest,
    TextStream,
    TokenTexts,
    read_chat,
    to_message,
    token_entries,
)
from jaxrl_llm.serve.requests import read_generate
from jaxrl_llm.train.models.teachers import ModelTeacher, ServerTeacher

TOKENIZER = jr.testing.ByteTokenizer()
MODEL, PARAMS = jr.testing.tiny_model(num_layers=1)
OTHER = jr.testing.tiny_model(num_layers=1, seed=1)[1]
KEY, SECRET = jax.random.key(7), "a key"
RENDERER = jr.data.make_renderer(TOKENIZER)
TOKENS, LONGEST = 12, 40
GENERATE, CHAT = "/inference/v1/generate", "/v1/chat/completions"
ENGINE = jr.rollout.make_engine(
    MODEL,
    rows=3,
    width=2,
    prompt_length=LONGEST,
    max_new_tokens=TOKENS,
    stop_ids=TOKENIZER.eos_ids,
    pad_id=TOKENIZER.pad_id,
    chunk=4,
    vary=("temperature", "top_k", "top_p", "min_p"),
)


class Service(threading.Thread):
    """A token server behind uvicorn on a free port of this machine."""

    def __init__(self, *, key=None, hosts=(), load_params=None, renderer=None, **options):
        super().__init__(daemon=True)
        self.tokens = TokenServer(ENGINE, PARAMS, key=KEY, decode_text=TOKENIZER.decode, **options)
        app = make_app(
            self.tokens,
            TOKENIZER,
            name="tiny",
            renderer=renderer or jr.data.make_renderer(TOKENIZER),
            key=key,
            load_params=load_params,
            max_body=20_000,
            hosts=hosts,
        )
        config = uvicorn.Config(app, log_level="critical", lifespan="off", ws="none")
        self._http = uvicorn.Server(config)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.start()

    def run(self):
        self._http.run(sockets=[self._socket])

    def ask(self, path, body=None, *, key=None, **headers):
        """The status and the JSON of a response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Content-Type": "application/json"} | headers
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        with contextlib.closing(connection):
            connection.request("GET" if body is None else "POST", path, data, headers)
            response = connection.getresponse()
            text = response.read()
            assert response.getheader("content-type", "").startswith("application/json"), text
            return response.status, json.loads(text)

    def events(self, body):
        """The events of a stream."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request("POST", CHAT, json.dumps(body | {"stream": True}), headers)
            text = connection.getresponse().read().decode()
        *events, last, rest = text.split("\n\n")
        assert last == "data: [DONE]" and rest == ""
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def stop(self):
        self.tokens.close()
        self._http.should_exit = True
        self.join(30)
        assert not self.is_alive()
        self._socket.close()


@pytest.fixture(scope="module")
def service():
    service = Service()
    yield service
    assert service.tokens.open_requests == 0
    service.stop()


@pytest.fixture
def held(service):
    """A request whose first chunk waits for ``held.release()``; so does the engine."""

    class Held:
        def __init__(self):
            self.reached, self._go = threading.Event(), threading.Event()
            request = SampleRequest([1, 2], 1, TOKENS, {"temperature": 1.0}, seed=500)
            self.ticket = service.tokens.submit(request, on_tokens=self._wait)
            assert self.reached.wait(60)

        def _wait(self, choice, out):
            self.reached.set()
            assert self._go.wait(60)

        def release(self):
            self._go.set()

    held = Held()
    yield held
    held.release()
    held.ticket.reply.result()


def direct(prompt, requests, *, params=PARAMS, max_tokens=TOKENS, **settings):
    """The same requests, alone in a generation."""
    generation = jr.rollout.Generation(ENGINE, params, key=KEY)
    generation.submit(
        jr.rollout.Group("direct", prompt, requests, max_new_tokens=max_tokens, settings=settings)
    )
    (done,) = generation
    return done.completions


def generate(service, prompt, **params):
    status, reply = service.ask(GENERATE, {"token_ids": prompt, "sampling_params": params})
    assert status == 200, reply
    return reply


def http_post(path, body):
    """The bytes of a request, for a client that may leave before the response."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.5, "temperature": 1.5},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
]


def test_what_is_served_is_what_a_generation_samples_alone(service):
    prompts = [list(range(3 + i, 9 + 3 * i)) for i in range(len(SETTINGS))]

    def ask(i):
        return generate(
            service,
            prompts[i],
            n=1 + i % 3,
            seed=10 * i,
            logprobs=1,
            max_tokens=5 + i,
            **SETTINGS[i],
        )

    with ThreadPoolExecutor(len(SETTINGS)) as pool:
        replies = list(pool.map(ask, range(len(SETTINGS))))
    for i, reply in enumerate(replies):
        numbers = tuple(range(10 * i, 10 * i + 1 + i % 3))
        completions = direct(prompts[i], numbers, max_tokens=5 + i, **SETTINGS[i])
        assert reply["version"] == 0 and len(reply["choices"]) == len(completions)
        for index, (choice, each) in enumerate(zip(reply["choices"], completions, strict=True)):
            assert choice["index"] == index and choice["seed"] == each.request
            assert choice["token_ids"] == each.tokens.tolist()
            assert choice["finish_reason"] == ("stop" if each.finish else "length")
            content = choice["logprobs"]["content"]
            assert [e["token"] for e in content] == [f"token_id:{t}" for t in choice["token_ids"]]
            logps = np.array([e["logprob"] for e in content], np.float32)
            np.testing.assert_array_equal(logps, each.out.behavior_logp)
            sets = np.asarray(keep_mask(each.out.support, 259))
            if SETTINGS[i]:
                assert choice["sampling_mask"] == [np.flatnonzero(row).tolist() for row in sets]
                assert all(
                    t in s
                    for t, s in zip(choice["token_ids"], choice["sampling_mask"], strict=True)
                )
            else:
                assert choice["sampling_mask"] is None and sets.all()
        assert reply["usage"]["completion_tokens"] == sum(map(len, completions))


def test_requests_without_a_seed_differ_and_name_the_seed_that_repeats_them(service):
    first, second = (generate(service, [5, 6, 7])["choices"][0] for _ in range(2))
    assert first["token_ids"] != second["token_ids"] and first["seed"] != second["seed"]
    assert first["logprobs"] is None
    assert generate(service, [5, 6, 7], seed=second["seed"])["choices"][0] == second


def test_a_seed_that_decodes_already_waits_and_gives_the_same(service, held):
    params = {"seed": 500, "temperature": 1.0}
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(generate, service, [1, 2], **params)
        wait_until(lambda: service.tokens.open_requests == 2)
        held.release()
        tokens = reply.result()["choices"][0]["token_ids"]
    assert tokens == held.ticket.reply.result().completions[0].tokens.tolist()


def test_stops_of_a_request_end_it_at_the_first(service):
    (whole,) = direct([1, 2, 3], (40,))
    tokens = whole.tokens.tolist()
    stop = tokens[6]
    end = tokens.index(stop) + 1
    reply = generate(service, [1, 2, 3], seed=40, stop_token_ids=[stop, 257], logprobs=0)
    (choice,) = reply["choices"]
    assert choice["token_ids"] == tokens[:end] and choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["content"]) == end
    text = chr(next(t for t in tokens if 32 <= t < 127))  # of one byte
    end = tokens.index(ord(text)) + 1
    (choice,) = generate(service, [1, 2, 3], seed=40, stop=text)["choices"]
    assert choice["token_ids"] == tokens[:end] and choice["finish_reason"] == "stop"


def test_stop_texts_need_a_decoder():
    with TokenServer(ENGINE, PARAMS, key=KEY) as server:
        with pytest.raises(RequestError, match="stop texts are not served"):
            server.submit(SampleRequest([1], 1, 2, stops=("x",)))
        assert server.open_requests == 0
        server.submit(SampleRequest([1], 1, 2, stop_ids=frozenset([5]))).reply.result()


def test_a_stop_text_counts_only_behind_the_minimum(service):
    request = SampleRequest([1], 1, 9, {"min_new_tokens": 3}, stops=("bc", "d"))
    cases = {"abcd": 4, "abdx": None, "axbc": 4, "abxbcd": 5, "abcbc": 5}
    for text, length in cases.items():
        tokens = list(text.encode())
        assert service.tokens._stop_length(request, tokens, 0) == length
        asked = ChatRequest(request, False, False, False, False, False, False)
        content = to_message(tokens, RENDERER, asked, "x")["content"]
        end = {"abcd": "abc", "axbc": "ax", "abxbcd": "abx", "abcbc": "abc"}.get(text, text)
        assert content == end
        stream = TextStream(RENDERER, request.stops, 3)
        assert "".join([*(stream.add([token]) for token in tokens), stream.rest()]) == end


def test_a_text_that_is_cut_at_a_stop_has_stopped(service, monkeypatch):
    prompt = TOKENIZER.encode(TOKENIZER.chat(MESSAGES))
    (whole,) = direct(prompt, (3,))
    assert len(whole) == TOKENS and not whole.finish
    asked = {"messages": MESSAGES, "seed": 3, "stop": TOKENIZER.decode(whole.tokens.tolist())[-1]}
    # As with a stop that only the renderer's text has, such as a special token that it spells.
    monkeypatch.setattr(service.tokens, "_stop_length", lambda *_: None)
    assert service.ask(CHAT, asked)[1]["choices"][0]["finish_reason"] == "stop"
    assert service.events(asked)[-1]["choices"][0]["finish_reason"] == "stop"


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]


def test_chat_answers_with_text_token_ids_and_logprobs(service):
    asked = {"messages": MESSAGES, "seed": 3, "n": 2, "logprobs": True, "return_token_ids": True}
    status, reply = service.ask(CHAT, asked | {"model": "tiny", "max_completion_tokens": 9})
    assert status == 200 and reply["object"] == "chat.completion" and reply["model"] == "tiny"
    prompt = TOKENIZER.encode(TOKENIZER.chat(MESSAGES))
    assert reply["prompt_token_ids"] == prompt
    for choice, each in zip(reply["choices"], direct(prompt, (3, 4), max_tokens=9), strict=True):
        tokens = each.tokens.tolist()
        assert choice["token_ids"] == tokens
        assert choice["message"] == {"role": "assistant", "content": TOKENIZER.decode(tokens)}
        entries = choice["logprobs"]["content"]
        logps = np.array([e["logprob"] for e in entries], np.float32)
        np.testing.assert_array_equal(logps, each.out.behavior_logp)
        assert all(bytes(e["bytes"]).decode() == e["token"] for e in entries if e["bytes"])
    assert reply["usage"]["prompt_tokens"] == len(prompt)


def test_a_stream_adds_up_to_the_response(service):
    asked = {"messages": MESSAGES, "seed": 3, "n": 2, "logprobs": True, "return_token_ids": True}
    _, reply = service.ask(CHAT, asked)
    events = service.events(asked | {"stream_options": {"include_usage": True}})
    assert events[0]["prompt_token_ids"] == reply["prompt_token_ids"]
    assert events[-1]["usage"] == reply["usage"] and len(events) > 6
    for choice in reply["choices"]:
        chunks = [
            e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == choice["index"]
        ]
        text = "".join(c["delta"].get("content") or "" for c in chunks)
        assert text == choice["message"]["content"]
        assert sum((c.get("token_ids", []) for c in chunks), []) == choice["token_ids"]
        entries = sum((c["logprobs"]["content"] for c in chunks if c["logprobs"]), [])
        assert entries == choice["logprobs"]["content"]
        assert chunks[-1]["finish_reason"] == choice["finish_reason"]


def test_a_stream_holds_back_what_may_be_a_stop_or_half_a_character():
    stream = TextStream(jr.data.make_renderer(TOKENIZER), ("END",))
    pieces = [stream.add(list(part)) for part in ("é1 E".encode()[:1], "é1 E".encode()[1:], b"Nx")]
    assert pieces == ["", "é1"[:2], " E"]
    assert stream.add(list(b"ENDmore")) == "" and stream.rest() == "Nx"


def test_texts_of_tokens_add_up_to_the_text():
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words += ["▁", "▁Hello", "▁world", "!", "▁2", "✓"]
    backend = Backend(models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>"))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    of_pieces = PretrainedTokenizer(backend, eos_ids=[2])
    said = ["▁Hello", "▁world", "!", "▁2", "▁", "▁", "▁2", "<0xE2>", "<0x9C>", "<0x93>", "✓"]
    said += ["</s>", *(f"<0x{i:02X}>" for i in "é€🦀".encode()), "▁world"]
    rng = np.random.default_rng(0)
    random = rng.integers(0, 259, 300).tolist()
    for tokenizer, tokens in [
        (of_pieces, [words.index(word) for word in said]),
        (of_pieces, [words.index(word) for word in said * 9]),
        (TOKENIZER, [*"é€🦀".encode(), 257]),
        (TOKENIZER, [*random, 65]),
        (TOKENIZER, [*[255] * 90, 65]),
    ]:
        logps = [-1.0] * len(tokens)

        def entries(of, texts, logps=logps):
            return token_entries(of, logps[: len(of)], texts, as_ids=False)["content"]

        whole = entries(tokens, TokenTexts(tokenizer))
        joined = b"".join(bytes(e["bytes"]) for e in whole if e["bytes"] is not None)
        assert joined.decode() == tokenizer.decode(tokens)
        names = "".join(e["token"] for e in whole)
        assert names.replace("<bos>", "").replace("<pad>", "").replace("<eos>", "").replace(
            "</s>", ""
        ) == tokenizer.decode(tokens)
        texts = TokenTexts(tokenizer)  # of a stream
        parts = [entries(tokens[n : n + 3], texts) for n in range(0, len(tokens), 3)]
        assert sum(parts, []) == whole
    whole = [e["token"] for e in entries_of(of_pieces, words, said)]
    assert whole[:5] == ["Hello", " world", "!", " 2", " "] and whole[7:12] == [
        "",
        "",
        "✓",
        "✓",
        "</s>",
    ]
    # A long text costs as much a token as a short one.
    longest = []

    class Counting(jr.testing.ByteTokenizer):
        def decode(self, ids, **options):
            longest.append(len(ids))
            return super().decode(ids, **options)

    token_entries(random * 3, [0.0] * 900, TokenTexts(Counting()), as_ids=False)
    assert max(longest) <= 40


def entries_of(tokenizer, words, said):
    tokens = [words.index(word) for word in said]
    return token_entries(tokens, [0.0] * len(tokens), TokenTexts(tokenizer), as_ids=False)[
        "content"
    ]


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"name": "add", "arguments": '{"a": 1}'}


def test_tools_go_into_the_prompt_and_calls_come_out(service):
    said = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": CALL}]}
    messages = [MESSAGES[1], said, {"role": "tool", "tool_call_id": "1", "content": "3"}]
    asked = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    status, reply = service.ask(CHAT, asked)
    assert status == 400 and "at most 40" in reply["error"]["message"]
    asked["messages"] = MESSAGES[1:]
    without, with_tools = (service.ask(CHAT, asked | x)[1] for x in ({}, {"tools": TOOLS}))
    text = TOKENIZER.decode(with_tools["prompt_token_ids"])
    assert "add" in text and "add" not in TOKENIZER.decode(without["prompt_token_ids"])
    request = ChatRequest(SampleRequest([1], 1, 1), True, False, False, False, False, False)
    text = 'Hm.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><eos>'
    renderer = jr.data.make_renderer(TOKENIZER)
    message = to_message(TOKENIZER.encode(text), renderer, request, "x")
    assert message["content"] == "Hm." and message["tool_calls"][0]["function"] == CALL
    assert to_message(TOKENIZER.encode("<tool_call>{"), renderer, request, "x") == {
        "role": "assistant",
        "content": "<tool_call>{",
    }
    two = TOKENIZER.encode(text.replace("<eos>", text))
    assert len(to_message(two, renderer, request, "x")["tool_calls"]) == 2
    one = to_message(two, renderer, request._replace(parallel=False), "x")["tool_calls"]
    assert [call["function"] for call in one] == [CALL]
    stopped = TOKENIZER.encode(text.replace("<eos>", " Now:"))
    request = request._replace(sample=SampleRequest([1], 1, 1, stops=("Now:",)))
    message = to_message(stopped, renderer, request, "x")
    assert message["content"] == "Hm." and len(message["tool_calls"]) == 1
    # What stands before the minimum, or is joined around a call, is no stop.
    early = request._replace(sample=SampleRequest([1], 1, 9, {"min_new_tokens": 9}, stops=("Hm",)))
    assert to_message(TOKENIZER.encode(text), renderer, early, "x")["content"] == "Hm."
    joined = TOKENIZER.encode(text.replace("Hm.", "Hm.\n").replace("<eos>", "\nNow<eos>"))
    around = request._replace(sample=SampleRequest([1], 1, 9, stops=("\n\n",)))
    assert to_message(joined, renderer, around, "x")["content"] == "Hm.\n\nNow"


class LastTools(ChatRenderer):
    """Reads calls with the tools of the last prompt, as those of the package do."""

    both = threading.Barrier(2)

    def prompt(self, messages, tools=()):
        self.names = [tool.name for tool in tools]
        self.both.wait(60)
        return super().prompt(messages)

    def parse(self, tokens):
        return Parsed("", calls=(ToolCall(self.names[0], {}),))


def test_calls_are_read_with_the_tools_of_their_request():
    service = Service(renderer=LastTools(TOKENIZER))

    def called(name):
        body = tool_of(name=name) | {"messages": MESSAGES[1:], "max_completion_tokens": 2}
        status, reply = service.ask(CHAT, body)
        assert status == 200, reply
        return reply["choices"][0]["message"]["tool_calls"][0]["function"]["name"]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(called, ["add", "sub"])) == ["add", "sub"]
    service.stop()


def test_the_reasoning_of_a_call_comes_back_as_it_was_written():
    request = ChatRequest(SampleRequest([1], 1, 1), True, False, False, False, False, False)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    for text in (
        f"<think>\nHm.\n</think>\n\n{call}",
        f"<think>\nHm.\n</think>\n\nSo:\n{call}",
        call,
    ):
        said = to_message(TOKENIZER.encode(f"{text}<eos>"), RENDERER, request, "x")
        assert said.get("reasoning_content", "") == ("Hm." if "Hm." in text else "")
        for name in ("reasoning_content", "reasoning"):
            back = {name if k == "reasoning_content" else k: x for k, x in said.items()}
            asked = {"messages": [MESSAGES[1], back, {"role": "tool", "content": "3"}]}
            spec = dataclasses.replace(ENGINE.spec, prompt_length=400)
            prompt = read_chat(asked, spec, "tiny", RENDERER).sample.prompt
            assert f"<bos>assistant\n{text}<eos>" in TOKENIZER.decode(prompt, skip_special=False)


def test_clients_may_send_the_values_that_the_server_has():
    """Some always send all options, at values that switch them off."""

    def settings(spec, **params):
        body = {"token_ids": [1], "sampling_params": params}
        return read_generate(body, spec, "tiny").sample.settings

    off = {"min_tokens": 0, "repetition_penalty": 1.0, "top_k": -1}
    assert settings(ENGINE.spec, **off) == {"top_k": 0}
    sizes = {"rows": 1, "width": 1, "prompt_length": 8, "max_new_tokens": 4}
    bounded = jr.rollout.make_engine(MODEL, **sizes, top_k=64, vary=("top_k",))
    assert settings(bounded.spec, **off) == {"top_k": 64}
    fixed = jr.rollout.make_engine(MODEL, **sizes, temperature=0.5, top_k=3).spec
    assert settings(fixed, temperature=0.5, top_k=3, top_p=1, min_p=0) == {}
    for params in ({"temperature": 1.0}, {"min_tokens": False}, {"top_k": 4}, {"top_k": -1}):
        with pytest.raises(RequestError, match="is fixed on this server|must be a number"):
            settings(fixed, **params)


def test_a_chat_begins_with_the_system_message_of_the_run():
    hello, own = {"role": "user", "content": "hi"}, {"role": "system", "content": "Short."}

    def prompt(messages, system=None):
        body = {"messages": messages}
        return read_chat(body, ENGINE.spec, "tiny", RENDERER, system).sample.prompt

    assert prompt([hello], "Short.") == prompt([own, hello]) != prompt([hello])
    assert prompt([own, hello], "Long.") == prompt([own, hello])


def test_fields_that_change_nothing_are_taken(service):
    call = {"id": "1", "type": "function", "index": 0, "function": CALL}
    function = TOOLS[0]["function"] | {"strict": False, "description": "Adds."}
    parts = [{"type": "text", "text": "2"}, {"type": "text", "text": "+2?"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": [call]}]
    asked = {"messages": [*messages, {"role": "tool", "content": "4", "tool_call_id": "1"}]}
    asked |= {"tools": [{"type": "function", "function": function}]}
    spec = dataclasses.replace(ENGINE.spec, prompt_length=400)
    for value in (True, None):
        read = read_chat(asked | {"parallel_tool_calls": value}, spec, "tiny", RENDERER)
        assert read.parallel
    assert "<bos>user\n2+2?<eos>" in TOKENIZER.decode(read.sample.prompt, skip_special=False)
    assert not read_chat(asked | {"parallel_tool_calls": False}, spec, "tiny", RENDERER).parallel


def of_params(**params):
    return GENERATE, {"token_ids": [1], "sampling_params": params}


def tool_of(**function):
    return {"messages": MESSAGES, "tools": [{"type": "function", "function": function}]}


def call_of(**call):
    return {"messages": [{"role": "assistant", "tool_calls": [call]}, MESSAGES[1]]}


def said(content, role="user", **fields):
    return {"messages": [{"role": role, "content": content, **fields}]}


DEEP = {"name": "f", "arguments": "[" * 5_000}
WRONG = {
    "not JSON": (GENERATE, b"{", 400, "not JSON"),
    "NaN": (GENERATE, b'{"token_ids": [NaN]}', 400, "NaN"),
    "a list": (GENERATE, [1], 400, "must be a JSON object"),
    "no tokens": (GENERATE, {}, 400, "token_ids must be a list of at least one"),
    "empty": (GENERATE, {"token_ids": []}, 400, "at least one"),
    "outside": (GENERATE, {"token_ids": [1, 259]}, 400, "token_ids[1] must be an integer from 0"),
    "negative": (GENERATE, {"token_ids": [-1]}, 400, "token_ids[0]"),
    "a flag": (GENERATE, {"token_ids": [True]}, 400, "token_ids[0]"),
    "too long": (GENERATE, {"token_ids": [1] * 41}, 400, "has 41 tokens"),
    "body": (GENERATE, {"token_ids": [1] * 20_000}, 413, "20,000 bytes"),
    "model": (GENERATE, {"token_ids": [1], "model": "gpt"}, 404, "no model 'gpt'"),
    "unknown": (GENERATE, {"token_ids": [1], "sampling_param": {}}, 400, "'sampling_params'?"),
    "stream": (GENERATE, {"token_ids": [1], "stream": True}, 400, "stream True is not served"),
    "param": (*of_params(tempreature=1), 400, "did you mean 'temperature'?"),
    "most": (*of_params(max_tokens=13), 400, "max_tokens must be from 1 to 12"),
    "n": (*of_params(n=0), 400, "n must be from 1"),
    "type": (*of_params(temperature="1"), 400, "temperature must be a number; got '1'"),
    "huge": (*of_params(top_k=10**400), 400, "a number of over 300 digits"),
    "flag": (*of_params(top_k=True), 400, "top_k must be a number"),
    "range": (*of_params(top_p=1.5), 400, "top_p to 1.5"),
    "fixed": (*of_params(repetition_penalty=1.1), 400, "repetition_penalty is fixed"),
    "fixed flag": (*of_params(min_tokens=False), 400, "min_tokens must be a number"),
    "logprobs": (*of_params(logprobs=5), 400, "logprobs must be from 0 to 1"),
    "seed": (*of_params(seed=2**31), 400, "seed must be from 0"),
    "stop id": (*of_params(stop_token_ids=[300]), 400, "stop_token_ids must be integers"),
    "stop": (*of_params(stop=[""]), 400, "stop must be a string"),
    "penalty": (*of_params(presence_penalty=0.5), 400, "presence_penalty 0.5 is not served"),
    "no messages": (CHAT, {"messages": []}, 400, "at least one"),
    "role": (CHAT, said("", role="x"), 400, "Message 0 must have a role"),
    "deep": (CHAT, call_of(function=DEEP), 400, "The arguments of a call of 'f' are not JSON"),
    "last": (CHAT, said("", role="assistant"), 400, "nothing to answer"),
    "image": (CHAT, said([{"type": "image_url"}]), 400, "not of type text"),
    "tool": (CHAT, {"messages": MESSAGES, "tools": [{"type": "x"}]}, 400, "type 'x' is not served"),
    "tool field": (
        CHAT,
        {"messages": MESSAGES, "tools": [TOOLS[0] | {"functoin": {}}]},
        400,
        "Tool 0 has an unknown field 'functoin'; did you mean 'function'?",
    ),
    "schema": (CHAT, tool_of(name="add", parmeters={}), 400, "did you mean 'parameters'?"),
    "strict": (CHAT, tool_of(name="add", strict=True), 400, "strict True is not served"),
    "parallel": (CHAT, {"messages": MESSAGES, "parallel_tool_calls": 1}, 400, "true or false"),
    "part": (CHAT, said([{"type": "text", "txt": "2"}]), 400, "'txt'; did you mean 'text'?"),
    "call": (CHAT, call_of(type="x", function=CALL), 400, "type 'x' is not served"),
    "call field": (CHAT, call_of(function=CALL, name="add"), 400, "unknown field 'name'"),
    "call of": (CHAT, call_of(function=CALL | {"args": 1}), 400, "unknown field 'args'"),
    "thought": (CHAT, said("", reasoning_content="Hm."), 400, "of role user has reasoning_content"),
    "top": (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, 400, "top_logprobs 2 is not served"),
    "weights": ("/weights", {"path": "x"}, 403, "started with a key"),
    "path": ("/v1/nothing", {}, 404, "Not Found"),
    "method": (GENERATE, None, 405, "Method Not Allowed"),
}


@for_each("case", WRONG)
def test_wrong_requests_get_one_sentence(service, case):
    path, body, status, words = WRONG[case]
    found, reply = service.ask(path, body)
    assert found == status and words in reply["error"]["message"], reply
    assert reply["error"]["message"].endswith((".", "?")) and "\n" not in reply["error"]["message"]


def test_a_body_of_another_type_is_turned_away(service):
    status, reply = service.ask(GENERATE, {"token_ids": [1]}, **{"Content-Type": "text/plain"})
    assert status == 415 and "application/json" in reply["error"]["message"]


def test_health_and_models_tell_what_is_served(service):
    assert service.ask("/health") == (200, {"status": "ok", "version": 0, "open_requests": 0})
    _, models = service.ask("/v1/models")
    assert models["data"][0]["id"] == "tiny"
    assert models["data"][0]["max_model_len"] == LONGEST + TOKENS


def test_a_client_that_leaves_cancels_its_request(service, held, monkeypatch):
    tickets, cancelled = [], []
    submit, cancel = service.tokens.submit, service.tokens.cancel
    monkeypatch.setattr(
        service.tokens, "submit", lambda *a, **k: tickets.append(submit(*a, **k)) or tickets[-1]
    )
    monkeypatch.setattr(service.tokens, "cancel", lambda x: (cancel(x), cancelled.append(x)))
    for path, body in ((GENERATE, {"token_ids": [1]}), (CHAT, {"messages": MESSAGES})):
        body = json.dumps(body | {"stream": True} if path == CHAT else body)
        with socket.create_connection(("127.0.0.1", service.port)) as connection:
            before = len(tickets)  # Read before the request goes out: its ticket may come at once.
            connection.sendall(http_post(path, body))
            wait_until(lambda before=before: len(tickets) > before)
    wait_until(lambda: set(map(id, tickets)) <= set(map(id, cancelled)))
    held.release()
    for ticket in tickets:
        (completion,) = ticket.reply.result(60).completions
        assert completion.finish == CANCELLED and len(completion) < TOKENS


def test_requests_for_scores_wait_counted_and_without_a_thread(monkeypatch):
    service, go, calls = Service(max_waiting=2), threading.Event(), []
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 0, "prompt_logprobs": 0}}
    score = service.tokens.score_prompt

    def scores(*args):
        calls.append(args)
        assert go.wait(60)
        return score(*args)

    monkeypatch.setattr(service.tokens, "score_prompt", scores)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(service.ask, GENERATE, body)
        wait_until(lambda: calls)
        with socket.create_connection(("127.0.0.1", service.port)) as connection:
            connection.sendall(http_post(GENERATE, json.dumps(body)))
            wait_until(lambda: service.tokens.open_requests == 2)
            for path, other in ((GENERATE, body), (CHAT, {"messages": MESSAGES})):
                status, reply = service.ask(path, other)
                assert status == 503 and "2 requests wait already" in reply["error"]["message"]
        # Only the first client's connection is left once the server sees that the second is gone.
        wait_until(lambda: len(service._http.server_state.connections) == 1)
        go.set()
        assert first.result(60)[0] == 200
    wait_until(lambda: service.tokens.open_requests == 0)
    assert len(calls) == 1
    service.stop()
    with pytest.raises(RequestError, match="the server has been closed"), service.tokens.counted():
        pass


def test_the_key_lets_in_and_weights_come_in():
    def load(path):
        if path != "other":
            raise ValueError("There is no such model.")
        return OTHER

    service = Service(key=SECRET, load_params=load)
    try:
        body = {"token_ids": [1, 2], "sampling_params": {"seed": 1}}
        for key in (None, "another", SECRET + " "):
            status, reply = service.ask(GENERATE, body, key=key)
            assert (status == 401) == (key != SECRET + " ")
        assert service.ask("/v1/models")[0] == 401 and service.ask("/health")[0] == 200
        assert reply["choices"][0]["token_ids"] == direct([1, 2], (1,))[0].tokens.tolist()
        status, error = service.ask("/weights", {"path": "x"}, key=SECRET)
        assert status == 400 and error["error"]["message"] == "There is no such model."
        assert service.ask("/weights", {"path": "other"})[0] == 401
        assert service.ask("/weights", {"path": "other"}, key=SECRET) == (200, {"version": 1})
        _, reply = service.ask(GENERATE, body, key=SECRET)
        assert reply["version"] == 1 and reply["choices"][0]["versions"] is None
        new = direct([1, 2], (1,), params=OTHER)[0].tokens.tolist()
        assert reply["choices"][0]["token_ids"] == new != direct([1, 2], (1,))[0].tokens.tolist()
        assert service.ask("/health")[1]["version"] == 1
    finally:
        service.stop()


def test_a_page_in_a_browser_cannot_name_this_machine_otherwise():
    service = Service(hosts=("localhost", "127.0.0.1"), max_waiting=1)
    try:
        assert service.ask("/v1/models", Host="127.0.0.1:80")[0] == 200
        status, reply = service.ask("/v1/models", Host="evil.example")
        assert status == 421 and "localhost or 127.0.0.1" in reply["error"]["message"]
        go = threading.Event()
        request = SampleRequest([1], 1, 2)
        ticket = service.tokens.submit(request, on_tokens=lambda *_: go.wait(60))
        status, reply = service.ask(GENERATE, {"token_ids": [1]})
        assert status == 503 and "ask again later" in reply["error"]["message"]
        status, reply = service.ask(CHAT, {"messages": MESSAGES, "stream": True})
        assert status == 503 and "ask again later" in reply["error"]["message"]
        go.set()
        ticket.reply.result()
    finally:
        service.stop()


def test_new_weights_come_between_requests_or_at_once(service, held):
    tokens = service.tokens
    with ThreadPoolExecutor(2) as pool:
        # Between requests: the held one ends with the old weights, the next begins with the new.
        update = pool.submit(tokens.update, OTHER, version=1)
        wait_until(lambda: tokens._commands.qsize() == 1)
        after = tokens.submit(SampleRequest([1, 2], 1, TOKENS, seed=500))
        held.release()
        assert held.ticket.reply.result().version == 0
        update.result()
        reply = after.reply.result()
        assert reply.version == 1
        (new,) = direct([1, 2], (500,), params=OTHER)
        np.testing.assert_array_equal(reply.completions[0].tokens, new.tokens)
        # At once: one response has tokens of both.
        reached, go = threading.Event(), threading.Event()
        request = SampleRequest([1, 2], 1, TOKENS, seed=500)
        ticket = tokens.submit(request, on_tokens=lambda *_: reached.set() or go.wait(60))
        assert reached.wait(60)
        update = pool.submit(tokens.update, PARAMS, version=2, at_once=True)
        wait_until(lambda: tokens._commands.qsize() == 1)
        go.set()
        update.result()
        reply = ticket.reply.result()
        assert reply.version == 1 and set(reply.completions[0].out.version.tolist()) == {1, 2}
    assert tokens.update(OTHER) == 3 and tokens.version == 3  # by default the next
    with pytest.raises(ValueError, match="other names or shapes"):
        tokens.update({"x": np.zeros(3)}, version=3)
    tokens.update(PARAMS, version=0)


def test_a_request_that_waits_for_its_seed_is_older_than_a_later_update(service, held):
    tokens, request = service.tokens, SampleRequest([1, 2], 1, TOKENS, seed=500)
    with ThreadPoolExecutor(1) as pool:
        before = [tokens.submit(request) for _ in range(2)]
        update = pool.submit(tokens.update, OTHER, version=1)
        wait_until(lambda: tokens._commands.qsize() == 3)
        after = [tokens.submit(request._replace(seed=seed)) for seed in (500, 501)]
        held.release()
        assert [ticket.reply.result(60).version for ticket in before] == [0, 0]
        assert update.result() == 1
        assert [ticket.reply.result(60).version for ticket in after] == [1, 1]
    tokens.update(PARAMS, version=0)


def test_scores_name_the_version_of_their_weights(service, monkeypatch):
    tokens, body = service.tokens, {"token_ids": [5, 6, 7]}
    body["sampling_params"] = {"max_tokens": 0, "prompt_logprobs": 0}
    want = [ModelTeacher(MODEL, x).score([[5]], [[6, 7]])[0].logp for x in (PARAMS, OTHER)]
    with ThreadPoolExecutor(1) as pool:
        # A request that waits for another to be scored reads the weights only when its turn comes.
        with tokens._scoring:
            asked = pool.submit(tokens.score_prompt, [5, 6, 7], 0)
            time.sleep(0.2)
            tokens.update(OTHER, version=4)
        scores, version = asked.result(60)
        np.testing.assert_allclose(scores.logp, want[1], atol=1e-5)
        assert version == 4
    # New weights may come between the scores and the response.
    score = tokens.score_prompt

    def then_updated(*args):
        found = score(*args)
        tokens.update(PARAMS, version=5)
        return found

    monkeypatch.setattr(tokens, "score_prompt", then_updated)
    _, reply = service.ask(GENERATE, body)
    assert reply["version"] == reply["prompt_logprobs_version"] == 4
    logps = [reply["prompt_logprobs"][n][str(5 + n)]["logprob"] for n in (1, 2)]
    np.testing.assert_allclose(logps, want[1], atol=1e-5)
    body["sampling_params"]["max_tokens"] = 1
    monkeypatch.undo()
    _, reply = service.ask(GENERATE, body)
    assert reply["version"] == reply["prompt_logprobs_version"] == 5
    tokens.update(PARAMS, version=0)


def test_two_weights_at_once_have_two_versions():
    barrier = threading.Barrier(2)

    def load(path):
        barrier.wait(60)
        return OTHER

    service = Service(key=SECRET, load_params=load)
    try:
        with ThreadPoolExecutor(2) as pool:
            asked = [
                pool.submit(service.ask, "/weights", {"path": "x"}, key=SECRET) for _ in range(2)
            ]
            replies = [each.result() for each in asked]
        assert sorted(reply["version"] for _, reply in replies) == [1, 2]
        assert service.tokens.version == 2
    finally:
        service.stop()


def test_an_error_of_the_engine_fails_what_ran_and_no_more(service, monkeypatch):
    def step(self):
        raise MemoryError("There is no room.")

    with monkeypatch.context() as patch:
        patch.setattr(jr.rollout.Generation, "step", step)
        status, reply = service.ask(GENERATE, {"token_ids": [1]})
    assert status == 500 and "There is no room" in reply["error"]["message"]
    generate(service, [1])


def test_an_update_that_fails_leaves_the_weights_as_they_were(monkeypatch):
    with TokenServer(ENGINE, PARAMS, key=KEY) as server:
        go, reached = threading.Event(), threading.Event()
        request = SampleRequest([1], 1, TOKENS, seed=0)
        runs = server.submit(request, on_tokens=lambda *_: reached.set() or go.wait(60))
        assert reached.wait(60)

        def fill(*_):
            raise MemoryError("There is no room.")

        with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
            patch.setattr(jr.rollout.Generation, "_fill", fill)
            asked = pool.submit(server.update, OTHER, version=7, at_once=True)
            wait_until(lambda: server._commands.qsize() == 1)
            go.set()
            with pytest.raises(RuntimeError, match="There is no room"):
                asked.result(60)
        with pytest.raises(RequestError, match="There is no room"):
            runs.reply.result(60)
        assert server.version == 0
        (done,) = server.submit(request).reply.result(60).completions
        (want,) = direct([1], (0,))
        np.testing.assert_array_equal(done.out.behavior_logp, want.out.behavior_logp)
        assert (done.out.version == 0).all()


def test_a_failing_listener_fails_its_request_alone(service):
    def fail(choice, out):
        raise RuntimeError("gone")

    ticket = service.tokens.submit(SampleRequest([1], 1, TOKENS), on_tokens=fail)
    with pytest.raises(RuntimeError, match="gone"):
        ticket.reply.result(60)
    generate(service, [1])


def test_closing_ends_what_runs_and_turns_away_the_rest():
    go, reached = threading.Event(), threading.Event()
    server = TokenServer(ENGINE, PARAMS, key=KEY)
    request = SampleRequest([1], 2, TOKENS, seed=0)
    runs = server.submit(request, on_tokens=lambda *_: reached.set() or go.wait(60))
    assert reached.wait(60)
    waits = server.submit(request)
    server.close(wait=False)
    go.set()
    server.close()
    for ticket in (runs, waits):
        finishes = {each.finish for each in ticket.reply.result().completions}
        assert finishes == {CANCELLED}
    assert any(len(each) for each in runs.reply.result().completions)
    with pytest.raises(RequestError, match="closed"):
        server.submit(request)
    with pytest.raises(RuntimeError, match="closed"):
        server.update(PARAMS, version=1)


def test_a_teacher_is_asked_for_the_log_probabilities_of_a_text(service):
    teacher = ServerTeacher(f"http://127.0.0.1:{service.port}")
    prompts, responses = [[5, 6, 7], [8]], [[9, 10], list(range(1, LONGEST + TOKENS))]
    want = ModelTeacher(MODEL, PARAMS).score(prompts, responses, top=3)
    for ours, theirs in zip(teacher.score(prompts, responses, top=3), want, strict=True):
        np.testing.assert_allclose(ours.logp, theirs.logp, atol=1e-5)
        np.testing.assert_array_equal(ours.top_ids, theirs.top_ids)
        np.testing.assert_allclose(ours.top_logp, theirs.top_logp, atol=1e-5)
    assert service.tokens._teacher.params == ()  # weights that are updated are not kept here
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}
    status, reply = service.ask(GENERATE, body)
    assert status == 200 and len(reply["choices"]) == 1
    assert reply["prompt_logprobs"][0] is None and list(reply["prompt_logprobs"][1]) == ["6"]
    with pytest.raises(ValueError, match=f"takes prompts of at most {LONGEST + TOKENS}"):
        teacher.score([[1]], [[2] * (LONGEST + TOKENS)])
