"""The routes of the token server, over starlette.

- ``POST /inference/v1/generate``: token ids in; token ids, log-probabilities and masks out
- ``POST /v1/chat/completions``: OpenAI's chat completions, optionally streamed
- ``GET /v1/models``: the served model
- ``POST /weights``: new weights from a path on the server's machine; only with a key
- ``GET /health``: whether the server is running, and the number of open requests
"""

import asyncio
import contextlib
import copy
import hmac
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.data import Renderer, Tokenizer
from jaxrl_llm.rollout import Completion
from jaxrl_llm.rollout.types import CANCELLED, FAILED, LENGTH, STOP
from jaxrl_llm.serve.chat import (
    ChatRequest,
    TextStream,
    TokenTexts,
    read_chat,
    text_to_stop,
    to_message,
    token_entries,
)
from jaxrl_llm.serve.requests import Fields, RequestError, SampleRequest, read_generate
from jaxrl_llm.serve.server import Reply, Ticket, TokenServer
from jaxrl_llm.train.models.teachers import TokenScores

# The names that vLLM uses.
_FINISH = {LENGTH: "length", STOP: "stop", CANCELLED: "abort"}
_CLOSED_REQUEST = 499  # The client has disconnected, so nobody reads the response.


def make_app(
    server: TokenServer,
    tokenizer: Tokenizer,
    *,
    name: str,
    renderer: Renderer | None = None,
    system: str | None = None,
    key: str | None = None,
    load_params: Callable[[str], ArrayTree] | None = None,
    max_body: int = 2**24,
    hosts: Sequence[str] = (),
) -> Starlette:
    """The ASGI application of a token server.

    Args:
      server: The server that decodes.
      tokenizer: The tokenizer of its model.
      name: Name of the model in requests and responses.
      renderer: Renders chat completions; None for a model without a chat template.
      system: System message of the chats that begin without one.
      key: Key that clients must send as ``Authorization: Bearer KEY``; None admits everyone.
      load_params: ``load_params(path) -> params`` for ``POST /weights``; it raises ValueError or
        OSError with a message for the client.
      max_body: Maximum size of a request body in bytes.
      hosts: Host names that clients may use for the server; empty for any. This rejects web pages
        that reach a local server under another name.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> from jaxrl_llm.serve import TokenServer, make_app
      >>> model, params = jr.testing.tiny_model()
      >>> engine = jr.rollout.make_engine(
      ...     model, rows=2, width=1, prompt_length=8, max_new_tokens=4)
      >>> with TokenServer(engine, params, key=jax.random.key(0)) as server:
      ...     app = make_app(server, jr.testing.ByteTokenizer(), name="tiny")
      >>> sorted(route.path for route in app.routes)[0]
      '/health'
    """
    api = Api(server, tokenizer, name, renderer, system, key, load_params, max_body, hosts)
    routes = [
        Route("/inference/v1/generate", api.generate, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/models", api.models, methods=["GET"]),
        Route("/weights", api.weights, methods=["POST"]),
        Route("/health", api.health, methods=["GET"]),
    ]
    return Starlette(
        routes=routes,
        exception_handlers={
            RequestError: _error_response,
            HTTPException: _error_response,
            ClientDisconnect: _error_response,
            Exception: _error_response,
        },
    )


class Api:
    """The endpoints; see :func:`make_app`."""

    def __init__(
        self,
        server: TokenServer,
        tokenizer: Tokenizer,
        name: str,
        renderer: Renderer | None,
        system: str | None,
        key: str | None,
        load_params: Callable[[str], ArrayTree] | None,
        max_body: int,
        hosts: Sequence[str],
    ):
        self._server, self._tokenizer, self._name = server, tokenizer, name
        self._renderer, self._system = renderer, system
        self._key, self._load_params = key, load_params
        self._max_body, self._hosts = max_body, tuple(hosts)
        self._started, self._scoring = int(time.time()), asyncio.Lock()

    async def health(self, request: Request) -> Response:
        """Whether the server is running; open to everyone."""
        failure = self._server.failure
        status = {"status": failure or "ok", "version": self._server.version}
        status["open_requests"] = self._server.open_requests
        return JSONResponse(status, 503 if failure else 200)

    async def models(self, request: Request) -> Response:
        """The served model, with vLLM's field for the longest context."""
        self._check_caller(request)
        spec = self._server.engine.spec
        card = {"id": self._name, "object": "model", "created": self._started}
        card |= {"owned_by": "jaxrl_llm", "max_model_len": spec.prompt_length + spec.max_new_tokens}
        return JSONResponse({"object": "list", "data": [card]})

    async def generate(self, request: Request) -> Response:
        """Tokens in, tokens out."""
        spec = self._server.engine.spec
        body = await self._read(request)
        asked = await run_in_threadpool(read_generate, body, spec, self._name)
        scores, version = None, self._server.version
        if asked.prompt_logprobs is not None:
            scored = await self._score(request, asked.sample.prompt, asked.prompt_logprobs)
            if scored is None:
                return Response(status_code=_CLOSED_REQUEST)
            scores, version = scored
        reply: Reply | None = Reply((), version)
        if asked.sample.max_tokens:
            reply = await self._answer(request, asked.sample)
        if reply is None:
            return Response(status_code=_CLOSED_REQUEST)

        def choice_of(index: int, each: Completion) -> dict[str, Any]:
            logps, versions = each.out.behavior_logp.tolist(), each.out.version.tolist()
            entries = [
                {"token": f"token_id:{token}", "logprob": logp, "bytes": None, "top_logprobs": []}
                for token, logp in zip(each.tokens.tolist(), logps, strict=True)
            ]
            return {
                "index": index,
                "token_ids": each.tokens.tolist(),
                # In the format of vLLM's token route.
                "logprobs": {"content": entries} if asked.logprobs else None,
                "finish_reason": _finish(each),
                "sampling_mask": _sampling_mask(each, asked.sample, spec.vocab_size),
                "seed": each.request,
                # One per token, if they differ.
                "versions": versions if len(set(versions)) > 1 else None,
            }

        def respond() -> Response:
            choices = [choice_of(index, each) for index, each in enumerate(reply.completions)]
            content = {"request_id": asked.id or _new_id("generate"), "choices": choices}
            content |= {"version": reply.version, "usage": _usage(asked.sample, reply.completions)}
            if asked.prompt_ids:
                content["prompt_token_ids"] = list(asked.sample.prompt)
            if scores is not None:
                content["prompt_logprobs"] = _prompt_logprobs(asked.sample.prompt, scores)
                # New weights may have come before the first token was sampled.
                content["prompt_logprobs_version"] = version
            return JSONResponse(content)

        return await run_in_threadpool(respond)

    async def chat(self, request: Request) -> Response:
        """Chat completions, in one response or as a stream."""
        # A renderer reads calls with the tools of its last prompt, which is that of this request.
        body, renderer = await self._read(request), copy.copy(self._renderer)
        if renderer is None:
            raise RequestError("The served model has no chat template; ask /inference/v1/generate.")
        spec = self._server.engine.spec
        asked = await run_in_threadpool(read_chat, body, spec, self._name, renderer, self._system)
        name = _new_id("chatcmpl")
        if asked.stream:
            # The first event is made here, so that a request which is refused has its own status.
            stream = self._stream(asked, renderer, name)
            events = _with_first(await anext(stream), stream)
            return StreamingResponse(events, media_type="text/event-stream")
        reply = await self._answer(request, asked.sample)
        if reply is None:
            return Response(status_code=_CLOSED_REQUEST)

        def respond() -> Response:
            choices = []
            for index, each in enumerate(reply.completions):
                tokens, finish = each.tokens.tolist(), _finish_of_text(each, asked, renderer)
                message = to_message(tokens, renderer, asked, f"{name}-{index}")
                if "tool_calls" in message and finish == "stop":
                    finish = "tool_calls"
                choice: dict[str, Any] = {"index": index, "message": message}
                choice["finish_reason"] = finish
                choice["logprobs"] = self._entries(asked, each) if asked.logprobs else None
                if asked.token_ids:
                    choice["token_ids"] = tokens
                choices.append(choice)
            content = self._head(name, "chat.completion") | {"choices": choices}
            content["usage"] = _usage(asked.sample, reply.completions)
            if asked.token_ids:
                content["prompt_token_ids"] = list(asked.sample.prompt)
            return JSONResponse(content | {"version": reply.version})

        return await run_in_threadpool(respond)

    async def weights(self, request: Request) -> Response:
        """Loads new weights from a path on this machine; responds once they are in use."""
        if self._key is None or self._load_params is None:
            raise RequestError(
                "Weights are taken only by a server that was started with a key.", 403
            )
        fields = Fields("The request", await self._read(request))
        path, server, load = fields.take("path", str, ""), self._server, self._load_params
        version = fields.take_integer("version", None, 0, 2**31 - 1)
        at_once = fields.take("at_once", bool, False)
        fields.end()
        if not path:
            raise RequestError("The request needs a path, the folder of a model or run.")

        def change() -> int:
            try:
                return server.update(load(path), version=version, at_once=at_once)
            except (ValueError, OSError) as error:
                raise RequestError(" ".join(str(error).split())) from error
            except RuntimeError as error:
                raise RequestError(" ".join(str(error).split()), 503) from error

        return JSONResponse({"version": await run_in_threadpool(change)})

    def _check_caller(self, request: Request) -> None:
        """Raises unless the request names this host and has the key, compared in constant time."""
        if self._hosts and request.url.hostname not in self._hosts:
            raise RequestError(f"This server is asked as {' or '.join(self._hosts)}.", 421)
        if self._key is None:
            return
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(sent.strip().encode(), self._key.encode())
        if scheme.lower() != "bearer" or not same:
            raise RequestError(
                "The request needs the server's key: Authorization: Bearer KEY.", 401
            )

    async def _read(self, request: Request) -> Any:
        """The JSON body of a request; raises if the key is wrong or the body is too long."""
        self._check_caller(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # A web page may post other types to this machine without a preflight request.
        if kind != "application/json":
            raise RequestError(f"The body must be application/json; got {kind[:40]!r}.", 415)
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_body:
                raise RequestError(f"The body is longer than {self._max_body:,} bytes.", 413)

        def refuse(constant: str) -> None:
            raise ValueError(f"{constant} is not a JSON number")

        try:
            return json.loads(bytes(body), parse_constant=refuse)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"The body is not JSON: {str(error)[:200]}.") from error

    async def _score(
        self, request: Request, prompt: Sequence[int], top: int
    ) -> tuple[TokenScores, int] | None:
        """The scores of a prompt and their version, or None if the client left before its turn."""
        with self._server.counted():
            # Requests are scored one at a time, and those that wait must hold no thread of the
            # pool, which chats need.
            async with self._scoring:
                if await request.is_disconnected():
                    return None
                return await run_in_threadpool(self._server.score_prompt, prompt, top)

    async def _answer(self, request: Request, sample: SampleRequest) -> Reply | None:
        """The reply, or None if the client has disconnected, which cancels its request."""
        ticket = self._server.submit(sample)
        reply = asyncio.wrap_future(ticket.reply)
        # If the client has disconnected, nothing else retrieves the exception.
        reply.add_done_callback(lambda each: each.cancelled() or each.exception())

        async def client_leaves() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        left = asyncio.ensure_future(client_leaves())
        try:
            await asyncio.wait({reply, left}, return_when=asyncio.FIRST_COMPLETED)
            return _checked(await reply) if reply.done() else None
        finally:
            left.cancel()
            self._server.cancel(ticket)

    async def _stream(
        self, asked: ChatRequest, renderer: Renderer, name: str
    ) -> AsyncGenerator[str]:
        """Server-sent events of a chat completion; a client that disconnects cancels it.

        A request that the server refuses raises before the first event.
        """
        sample, head = asked.sample, self._head(name, "chat.completion.chunk")
        texts = [TextStream(renderer, sample.stops, sample.least) for _ in range(sample.choices)]
        of_tokens = [TokenTexts(self._tokenizer) for _ in texts]
        begun = False
        try:
            async with self._tokens(sample) as (ticket, arrivals):
                for index in range(sample.choices):
                    start = _chunk(head, index, {"role": "assistant", "content": ""})
                    if asked.token_ids and index == 0:
                        start["prompt_token_ids"] = list(sample.prompt)
                    begun = True
                    yield _event(start)
                async for index, tokens, logps in arrivals:
                    # Tool calls are known only at the end.
                    delta = {} if asked.tools else {"content": texts[index].add(tokens)}
                    chunk = _chunk(head, index, delta)
                    if asked.logprobs:
                        chunk["choices"][0]["logprobs"] = token_entries(
                            tokens, logps, of_tokens[index], as_ids=asked.tokens_as_ids
                        )
                    if asked.token_ids:
                        chunk["choices"][0]["token_ids"] = tokens
                    yield _event(chunk)
                reply = _checked(await asyncio.wrap_future(ticket.reply))
            for index, each in enumerate(reply.completions):
                finish = _finish_of_text(each, asked, renderer)
                delta = {"content": texts[index].rest()}
                if asked.tools:
                    delta = to_message(each.tokens.tolist(), renderer, asked, f"{name}-{index}")
                    calls = delta.get("tool_calls", [])
                    finish = "tool_calls" if calls and finish == "stop" else finish
                    for number, call in enumerate(calls):
                        call["index"] = number
                yield _event(_chunk(head, index, delta, finish))
            if asked.usage:
                yield _event(head | {"choices": [], "usage": _usage(sample, reply.completions)})
        except RequestError as error:
            if not begun:
                raise
            yield _event(_error_content(str(error), error.status))
        yield "data: [DONE]\n\n"

    @contextlib.asynccontextmanager
    async def _tokens(self, sample: SampleRequest) -> AsyncIterator[tuple[Ticket, AsyncIterator]]:
        """A ticket and its new tokens ``(choice, tokens, logps)`` until the reply is complete."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()

        def put(*item: Any) -> None:
            with contextlib.suppress(RuntimeError):  # The event loop has closed.
                loop.call_soon_threadsafe(queue.put_nowait, item or None)

        async def arrivals() -> AsyncIterator[Any]:
            while (item := await queue.get()) is not None:
                yield item

        def on_tokens(choice: int, out: Any) -> None:
            put(choice, out.tokens.tolist(), out.behavior_logp.tolist())

        ticket = self._server.submit(sample, on_tokens=on_tokens)
        ticket.reply.add_done_callback(lambda _: put())
        try:
            yield ticket, arrivals()
        finally:
            self._server.cancel(ticket)

    def _head(self, name: str, kind: str) -> dict[str, Any]:
        created = int(time.time())
        return {"id": name, "object": kind, "created": created, "model": self._name}

    def _entries(self, asked: ChatRequest, each: Completion) -> dict[str, Any]:
        logps = each.out.behavior_logp.tolist()
        texts = TokenTexts(self._tokenizer)
        return token_entries(each.tokens.tolist(), logps, texts, as_ids=asked.tokens_as_ids)


async def _with_first(first: str, rest: AsyncGenerator[str]) -> AsyncIterator[str]:
    """An event that was made before, and those that follow it."""
    async with contextlib.aclosing(rest):
        yield first
        async for event in rest:
            yield event


def _checked(reply: Reply) -> Reply:
    if any(each.finish == FAILED for each in reply.completions):
        raise RequestError("The model's logits are non-finite.", 500)
    return reply


def _finish(completion: Completion) -> str:
    return _FINISH[completion.finish]


def _finish_of_text(completion: Completion, asked: ChatRequest, renderer: Renderer) -> str:
    """The finish reason of a chat's text, which a stop may cut that only the renderer spells."""
    finish, sample = _finish(completion), asked.sample
    if finish == "length" and sample.stops:
        _, cut = text_to_stop(completion.tokens.tolist(), renderer, sample.stops, sample.least)
        return "stop" if cut else finish
    return finish


def _sampling_mask(
    completion: Completion, sample: SampleRequest, vocab_size: int
) -> list[list[int]] | None:
    """The set of tokens that each token was drawn from; for a greedy token, only that token.

    None if the request truncates nothing and every set is the full vocabulary.
    """
    support = completion.out.support
    if support is None:
        return None
    if support.ids is not None:
        return [[i for i in row if i >= 0] for row in np.asarray(support.ids).tolist()]
    sets = []
    for words in np.asarray(support.bits):
        bits = np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")
        sets.append(np.flatnonzero(bits[:vocab_size]).tolist())
    off = {"top_k": 0, "top_p": 1, "min_p": 0}
    asked = any(sample.settings.get(option, value) != value for option, value in off.items())
    return sets if asked or any(len(ids) < vocab_size for ids in sets) else None


def _usage(sample: SampleRequest, completions: Sequence[Completion]) -> dict[str, int]:
    prompt, sampled = len(sample.prompt), sum(map(len, completions))
    usage = {"prompt_tokens": prompt, "completion_tokens": sampled}
    return usage | {"total_tokens": prompt + sampled}


def _new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def _chunk(
    head: dict[str, Any], index: int, delta: dict[str, Any], finish: str | None = None
) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    return head | {"choices": [choice]}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _error_content(message: str, status: int) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


async def _error_response(request: Request, error: Exception) -> Response:
    """An error as JSON with a one-sentence message, in the format that OpenAI's clients read."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_CLOSED_REQUEST)
    status, message = 500, f"The server failed: {type(error).__name__}."
    if isinstance(error, RequestError):
        status, message = error.status, str(error)
    elif isinstance(error, HTTPException):
        status, message = error.status_code, f"{error.detail}: {request.method} {request.url.path}."
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(_error_content(message, status), status, headers=headers)


def _prompt_logprobs(prompt: Sequence[int], scores: TokenScores) -> list[dict[str, Any] | None]:
    """Prompt log-probabilities in vLLM's format: None for the first token, then entries by id."""
    places: list[dict[str, Any] | None] = [None]
    rows = zip(prompt[1:], scores.logp, scores.top_ids, scores.top_logp, strict=True)
    for token, logp, ids, best in rows:
        top = zip(ids.tolist(), best.tolist(), strict=True)
        entry = {str(i): {"logprob": x, "rank": k} for k, (i, x) in enumerate(top, 1)}
        entry.setdefault(str(token), {"logprob": float(logp), "rank": None})
        places.append(entry)
    return places
