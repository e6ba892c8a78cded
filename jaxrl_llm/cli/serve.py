"""``jaxrl-llm serve``: serves a model over HTTP, tokens in and tokens out."""

import asyncio
import dataclasses
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import tyro

from jaxrl_llm.cli import UsageError, options
from jaxrl_llm.rollout import make_engine

KEY_VARIABLE = "JAXRL_LLM_KEY"
DrawOption = Literal[
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_new_tokens"
]
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve:
    """Serves token ids and chats over HTTP, many requests at a time, by default only locally.

    POST /inference/v1/generate takes token ids, POST /v1/chat/completions takes messages; GET
    /v1/models and GET /health describe the server. POST /weights takes new weights, with a key.

    Attributes:
      model: The name or path of a model, or the folder of a run for its last checkpoint.
      host: Address to listen on; any address other than the loopback needs a key.
      port: Port to listen on; 0 uses a free port, which is printed.
      key: Clients send it as "Authorization: Bearer KEY". Prefer the environment variable
        JAXRL_LLM_KEY, since other users of this machine can read command lines.
      name: Name of the model in requests; by default the argument ``model``.
      slots: Maximum number of responses sampled at one time.
      width: Number of slots that share a prompt; that many responses of a request decode at once.
      prompt_length: Maximum length of a prompt, in tokens; by default the context of the model
        minus the responses, at most 1024.
      max_new_tokens: Maximum length of a response, in tokens.
      vary: Draw options that requests may set; unused options still cost time.
      top_k: Keep the k most likely tokens; requests may use a smaller k. It makes drawing cheap.
      seed: Seed of the sampling; by default 0.
      step: The step of a run's checkpoint; by default the last.
      best: Use the checkpoint of a run that was saved as best.
      trust: Execute the config.py of a run that was not made here; read it first.
      dtype: Dtype of the model; by default float32, or that of the run.
      template_options: Variables of the chat template, such as enable_thinking=false; those of the
        run stay, unless they have the same name.
      max_waiting: Maximum number of requests that wait, decode or are scored; further ones are
        rejected.
      max_body: Maximum bytes of a request.
    """

    model: tyro.conf.Positional[str]
    host: str = "127.0.0.1"
    port: int = 8000
    key: str | None = None
    name: str | None = None
    slots: int = 16
    width: int = 1
    prompt_length: int | None = None
    max_new_tokens: int = 512
    vary: tuple[DrawOption, ...] = ("temperature", "top_k", "top_p", "min_p")
    top_k: int | None = None
    seed: int | None = None
    step: int | None = None
    best: bool = False
    trust: bool = False
    dtype: Literal["float32", "bfloat16"] | None = None
    template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    max_waiting: int = 1024
    max_body: int = 2**24

    def __post_init__(self):
        sizes = ("slots", "width", "prompt_length", "max_new_tokens", "max_waiting", "max_body")
        for name in sizes:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1; got {value}.")
        if self.slots % self.width:
            raise ValueError(f"--width {self.width} must divide --slots {self.slots}.")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"--port must be from 0 to 65535; got {self.port}.")
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"--seed must not be negative; got {self.seed}.")
        for name in ("key", "name"):
            if getattr(self, name) == "":
                raise ValueError(f"--{name} must not be empty.")
        if len(set(self.vary)) < len(self.vary):
            raise ValueError(f"--vary names one twice: {' '.join(self.vary)}.")


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    args = options.parse(Serve, arguments, command="serve")
    key = _read_key(args)
    if key is None and not _is_loopback(args.host):
        raise UsageError(
            f"--host {args.host} lets other machines in, which needs a key: set {KEY_VARIABLE}, or "
            "--key."
        )
    try:
        from jaxrl_llm.serve import make_app
    except ImportError as error:
        raise UsageError(
            f"Install the extra: pip install 'jaxrl_llm[train,serve]' ({error})."
        ) from error
    from jaxrl_llm.data import make_renderer
    from jaxrl_llm.data.rendering import QuestionRenderer, response_ends

    # Bound first: a port in use must not cost the loading of a model.
    listener = _listen(args.host, args.port)
    options.use_compilation_cache()
    _print(f"Loading {args.model} ...")
    choice = options.CheckpointChoice(args.model, args.step, args.best, args.trust)
    policy = options.load_policy(choice, dtype=args.dtype, template_options=args.template_options)
    chat, system, config = True, None, policy.config
    if config is not None:  # as the policy was trained
        chat, system = config.data.chat, config.data.system
    if system is not None:
        _print("Chats without a system message begin with that of the run.")
    try:
        if config is not None and not chat and config.environment is None:
            _print("A chat is one message of the user, since the run had no chat template.")
            renderer = QuestionRenderer(policy.tokenizer)
        else:
            renderer = make_renderer(policy.tokenizer, chat=chat)
    except ValueError as error:
        renderer = None
        _print(f"No chat completions: {error}.")
    server = _start(args, policy, response_ends(policy.tokenizer, chat=chat))
    # Only the server has the weights from now on, so that new ones replace them.
    policy = policy._replace(params=())
    function = policy.function()

    def load_params(path: str):
        choice = options.CheckpointChoice(path, None, False)
        try:
            other = options.load_policy(choice, dtype=args.dtype)
        except UsageError as error:
            raise ValueError(str(error)) from error
        if other.function() != function:
            raise ValueError(
                f"{path!r} is another model, or has another adapter, than {args.model!r}."
            )
        return other.params

    app = make_app(
        server,
        policy.tokenizer,
        name=args.name or args.model,
        renderer=renderer,
        system=system,
        key=key,
        load_params=load_params,
        max_body=args.max_body,
        # With a key, a page in a browser cannot ask in its user's name.
        hosts=tuple(dict.fromkeys((*_LOOPBACK, args.host))) if key is None else (),
    )
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    _print(f"Serving {args.name or args.model} at http://{host}:{port} (Ctrl-C ends)")
    return _serve(app, server, listener)


def _read_key(args: Serve) -> str | None:
    """The key of the server; without the white space around it, which no header keeps."""
    name, key = "--key", args.key
    if key is None:
        name, key = KEY_VARIABLE, os.environ.get(KEY_VARIABLE)
    if key is None:
        return None
    key = key.strip()
    if not (key and key.isascii() and key.isprintable()):
        raise UsageError(f"{name} must be printable ASCII, and not empty.")
    return key


def _start(args: Serve, policy: options.Policy, stop_ids: tuple[int, ...]):
    """The token server of a policy, everything compiled."""
    from jaxrl_llm.serve import TokenServer

    context, length = policy.model.config.max_length, args.prompt_length
    room = context - args.max_new_tokens
    if room < (length or 1):
        wanted = "a prompt" if length is None else f"--prompt-length {length}"
        raise UsageError(
            f"--max-new-tokens {args.max_new_tokens} leaves no room for {wanted} in the model's "
            f"context of {context}."
        )
    with options.usage_errors("make_engine: "):
        engine = make_engine(
            policy.model,
            rows=args.slots // args.width,
            width=args.width,
            prompt_length=length or min(room, 1024),
            max_new_tokens=args.max_new_tokens,
            stop_ids=stop_ids,
            pad_id=policy.tokenizer.pad_id,
            top_k=args.top_k,
            vary=args.vary,
        )
    _print("Compiling ...")
    try:
        engine.warm_up(policy.params, resumed=True)
        return TokenServer(
            engine,
            policy.params,
            key=jax.random.key(args.seed or 0),
            decode_text=policy.tokenizer.decode,
            max_waiting=args.max_waiting,
        )
    except MemoryError as error:
        raise UsageError(f"{error} Give fewer --slots or --max-new-tokens.") from error


def _serve(app, server, listener: socket.socket) -> int:
    """Serves until a signal: what decodes then ends as it is, and its clients get that."""
    import uvicorn

    class HttpServer(uvicorn.Server):
        def handle_exit(self, sig: int, frame) -> None:
            server.close(wait=False)
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=5,
    )
    code = 0
    try:
        asyncio.run(HttpServer(config).serve(sockets=[listener]))
    except KeyboardInterrupt:  # uvicorn raises the signal again once it has ended
        code = 128 + signal.SIGINT
    finally:
        server.close()
        listener.close()
    _print("Stopped.")
    return code


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise UsageError(f"Cannot listen at {host}:{port}: {error.strerror}.") from error
    return listener


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
