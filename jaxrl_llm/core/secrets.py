"""Masking of secrets in the output of a program. Secrets are recognized by their names.

A name is that of a secret if it contains a word such as secret, password or credential, or ends in
key or token after a word for its owner, as in ``api_key`` and ``HF_TOKEN``. Any other name that
ends in key or token is one if its value reads like a secret: long, without whitespace, and not
plain words. Only texts are secrets, so ``max_new_tokens`` is shown. Names of vocabulary tokens
(``pad_token``), columns (``answer_key``), files and variables (``api_key_env``) are not secret.
"""

import functools
import itertools
import os
import re
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

MASK = "***"

_STRONG = ("secret", "password", "passwd", "passphrase", "credential")
_WEAK = ("key", "keys", "token", "tokens")
# Words before key or token: owners of a secret, then words for what is not a secret.
_OWNERS = (
    "access", "account", "admin", "anthropic", "api", "auth", "aws", "azure", "bearer", "bot",
    "client", "deploy", "encryption", "gcp", "github", "gitlab", "google", "hf", "hub",
    "huggingface", "jwt", "license", "login", "oauth", "openai", "personal", "private", "refresh",
    "service", "session", "signing", "slack", "user", "wandb",
)  # fmt: skip
_PLAIN = (
    "pad", "eos", "bos", "unk", "mask", "sep", "cls", "stop", "start", "end", "think", "special",
    "image", "audio", "tool", "answer", "prompt", "question", "response", "completion", "text",
    "message", "column", "sort", "group", "max", "min", "new", "num", "primary", "foreign",
    "public", "cache",
)  # fmt: skip
_PLACE = ("env", "variable", "file", "path", "dir", "folder", "name", "count", "length", "limit")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_QUOTED = (
    r"(?P<prefix>[bBfFrRuU]{0,2})(?P<quoted>"
    r"""\"{3}(?s:.+?)\"{3}|'{3}(?s:.+?)'{3}|"(?:\\.|[^"\\\n])+"|'(?:\\.|[^'\\\n])+')"""
)
_HINT = r"(?i:key|token|secret|passw|passphrase|credential)"
_NAME = rf"(?<![\w.-])(?P<name>[\w.-]{{0,60}}{_HINT}[\w.-]{{0,60}})"
_NAMED = re.compile(
    # name = "...", name: str = "...", {'name': '...'}, variables["name"] = "..."
    _NAME + r"""['"]?\]?[ \t]*(?::[\w.\[\] |]{1,40})?[=:][ \t]*""" + _QUOTED
)
# setdefault("name", "..."), and arguments of a command: "--name", "..."
_PAIRED = re.compile(
    rf"""(?:(?:setdefault|setenv|putenv)\(\s*['"]|['"](?=--)){_NAME}['"]\s*,\s*{_QUOTED}"""
)
_ADDRESS = re.compile(r"(\b\w+://)[^/\s@'\"]+@")
_QUERY = re.compile(r"((?:[?&]|--)([\w.-]{1,120})=)[^&\s'\"<>]+")
# Tokens in a format that identifies the issuer, and those of HTTP headers.
_ISSUED = re.compile(
    r"\b(?:sk-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|AKIA[A-Z0-9]{16}|AIza[\w-]{30,}|xox[abps]-[\w-]{10,}|(?<=Bearer )[\w.~+/=-]{8,})"
)
_WORDS = re.compile(r"[a-z_.,:;'/-]*|[A-Z]?[a-z]*|[A-Z_]*")
_OURS = ("jaxrl_llm", "numpy", "jax", "jaxlib", "optax", "chex", "flax", "orbax")
_SHORTEST = 8  # a shorter text occurs in too many words to be replaced everywhere
_DEPTH, _MOST, _ROWS = 6, 20_000, 1000  # limits of the search through objects

_known: set[str] = set()  # a process has one terminal, and secrets last as long as the process


def is_secret(name: str, value: Any = "") -> bool:
    """Whether a value with this name is masked.

    Example:
      >>> from jaxrl_llm.core.secrets import is_secret
      >>> is_secret("api_key", "abc"), is_secret("pad_token", "<pad>"), is_secret("token", 7)
      (True, False, False)
    """
    if isinstance(value, dict | list | tuple | set | frozenset):
        texts = (each for each in _elements(value) if isinstance(each, str | bytes))
        return any(is_secret(name, each) for each in texts)
    if not isinstance(value, str | bytes):
        return False
    words = ["", *(word.lower() for word in _WORD.findall(name))]
    last = words[-1]
    if last in _PLACE:
        return False
    if any(strong in word for word in words for strong in _STRONG):
        return True
    if len(words) > 2 and last in ("id", "value"):
        words.pop()
    before, last = words[-2:] if len(words) > 1 else ("", last)
    if last not in _WEAK:  # such as hftoken
        return any(last.removesuffix(weak) in _OWNERS for weak in _WEAK if last.endswith(weak))
    if before in _OWNERS or (name.isupper() and before and before not in _PLAIN):
        return True
    return before not in _PLAIN and _reads_like_one(value)


def _reads_like_one(value: str | bytes) -> bool:
    """Whether a text alone reads like a secret: long, without whitespace, and not plain words."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return len(text) >= _SHORTEST and not re.search(r"\s", text) and not _WORDS.fullmatch(text)


def _elements(value: Any) -> Iterable[Any]:
    elements = value.values() if isinstance(value, dict) else value
    return itertools.islice(elements, _ROWS)


def find_secrets(value: Any) -> set[str]:
    """Texts with the names of secrets in an object and its contents.

    The contents are entries of mappings, fields, attributes and bound options. Those of a function
    are the variables that it reads from its module and from enclosing functions.
    """
    secrets: set[str] = set()
    seen: set[int] = set()
    waiting = deque([("", value, 0)])
    while waiting and len(seen) < _MOST:
        name, each, depth = waiting.popleft()
        if isinstance(each, bytes) and is_secret(name, each):
            each = each.decode(errors="replace")
        if isinstance(each, str):
            if is_secret(name, each):
                secrets.add(each)
            continue
        if depth == _DEPTH or id(each) in seen or isinstance(each, types.ModuleType):
            continue
        seen.add(id(each))
        if is_secret(name, each):
            waiting.extend((name, x, depth + 1) for x in _elements(each))
        else:
            waiting.extend((inner, x, depth + 1) for inner, x in _entries(each))
    return secrets


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """The contents of an object with their names; elements of a sequence have no name."""
    if isinstance(value, dict):
        yield from ((str(name), x) for name, x in itertools.islice(value.items(), _ROWS))
    elif isinstance(value, list | tuple | set | frozenset):
        names = getattr(value, "_fields", ())
        if len(value) == len(names):
            yield from zip(names, value, strict=True)
        elif len(value) == 2 and isinstance(value[0] if isinstance(value, tuple) else None, str):
            yield value  # type: ignore[misc]  # a pair of name and value
        else:
            yield from (("", x) for x in itertools.islice(value, _ROWS))
    elif isinstance(value, functools.partial):
        yield from (("", x) for x in (value.func, *value.args))
        yield from value.keywords.items()
    elif isinstance(value, types.MethodType):
        yield from (("", value.__self__), ("", value.__func__))
    elif isinstance(value, types.FunctionType):
        yield from _variables(value)
    elif not is_ours(value) or not isinstance(value, type):
        try:
            attributes = dict(vars(value))
        except TypeError:  # no attributes, or slots
            attributes = {}
        for cls in type(value).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if isinstance(member := cls.__dict__.get(name), types.MemberDescriptorType):
                    try:
                        attributes[name] = member.__get__(value)
                    except AttributeError:  # not set
                        continue
        yield from (
            (k, x)
            for k, x in attributes.items()
            if not k.startswith("__") or isinstance(x, types.FunctionType)
        )
        if not isinstance(value, type) and not is_ours(value):
            yield "", type(value)


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables that a function reads, and its defaults."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            continue
    defaults = function.__defaults__ or ()
    places = code.co_varnames[: code.co_argcount]
    yield from zip(places[len(places) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    if not is_ours(function):
        names = (name for name in code.co_names if name in function.__globals__)
        yield from ((name, function.__globals__[name]) for name in names)


def is_ours(value: Any) -> bool:
    """Whether a function, class or object comes from this package, its dependencies or Python."""
    named = value if isinstance(value, type | types.FunctionType) else type(value)
    top = str(named.__module__).partition(".")[0]
    return top in sys.stdlib_module_names or top in _OURS


def remember(secrets: Iterable[str]) -> None:
    """Adds texts that :func:`mask` and :func:`mask_known` replace from now on."""
    _known.update(secrets)


def mask_known(text: str) -> str:
    """A text without the secrets that were remembered or are in environment variables."""
    variables = {x for name, x in os.environ.items() if is_secret(name, x)}
    for secret in sorted(_known | variables, key=len, reverse=True):
        if _reads_like_one(secret):  # a plain word may be a secret, but occurs in any sentence
            text = text.replace(secret, MASK)
    return text


def mask(text: str) -> str:
    """Masks known secrets, and texts after the name of a secret, as in code, JSON and a repr.

    Example:
      >>> from jaxrl_llm.core.secrets import mask
      >>> mask("Judge(api_key='abc', url='https://me:abc@x.org?token=abc&k=2')")
      "Judge(api_key='***', url='https://***@x.org?token=***&k=2')"
    """

    def named(match: re.Match) -> str:
        quoted = match["quoted"]
        if "f" in match["prefix"].lower() and "{" in quoted:  # the value is computed
            return match[0]
        size = 3 if quoted[:3] in ('"""', "'''") else 1
        if not is_secret(match["name"], quoted[size:-size]):
            return match[0]
        return f"{match[0].removesuffix(quoted)}{quoted[:size]}{MASK}{quoted[:size]}"

    def asked(match: re.Match) -> str:
        value = match[0].removeprefix(match[1])
        # In a URL or a command, a bare key is that of an account.
        return f"{match[1]}{MASK}" if is_secret(f"api_{match[2]}", value) else match[0]

    text = _PAIRED.sub(named, _NAMED.sub(named, mask_known(text)))
    text = _QUERY.sub(asked, _ADDRESS.sub(rf"\1{MASK}@", text))
    return _ISSUED.sub(MASK, text)
