"""Chat templates from a model's files: untrusted programs, run with resource limits.

A template runs in jinja2's immutable sandbox, which blocks access to files and attributes, but not
infinite loops or unbounded texts. Here every loop, call, operator and filter counts as a step, and
every value and the output have a maximum length, checked before a value is created. A template that
exceeds a limit raises TemplateError.
"""

import json
import re
import time
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    ValuesView,
)
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000
MAX_SECONDS = 30.0
MAX_LENGTH = 2**23
"""Characters of a value or of the text; an item of a list or dict counts as eight."""
MAX_SOURCE = 2**20
_MAX_INTEGER = 100_000  # of widths and counts, as jinja2 bounds a range
_MAX_BITS = 4096
# Text filters of web pages, whose time or length has no simple bound.
_REMOVED = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
# Methods without a use in a template; the results of two grow with a table or a number.
_REFUSED = ("encode", "maketrans", "to_bytes", "translate")
_GROWING = ("%", "expandtabs", "format", "format_map", "indent", "replace")
_GROWING += ("rfind", "rindex", "rpartition", "rsplit")
_ANY_NUMBER = ("%", "d", "default", "format", "format_map")
# What every rendering gives a template.
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "tool_call"}
_GIVEN |= {f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls")}
_MANY = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


def render(source: str, values: Mapping[str, Any], *, date: datetime | None = None) -> str:
    """The text of a template, which takes ``date`` for now; None for the present.

    Raises:
      TemplateError: If the template is broken, raises, or exceeds a limit.
    """
    token = _budget.set(_Budget(date))
    try:
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"it is longer than {MAX_SOURCE:,} characters")
        return _compile(source).render(values)
    except TemplateError:
        raise
    except Exception as error:  # whatever an expression may raise, such as TypeError
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise TemplateError(text) from error
    finally:
        _budget.reset(token)


def read_variables(source: str) -> tuple[str, ...]:
    """The names of the variables by which a user may steer a template, sorted.

    They are the names that the template reads from outside, without those that it only sets itself
    in some branch, and without what each rendering gives it, such as the messages.

    Raises:
      TemplateError: If the template is broken.

    Example:
      >>> read_variables("{% if enable_thinking is defined %}{{ messages[0].content }}{% endif %}")
      ('enable_thinking',)
    """
    tree = _environment()._parse(source, None, None)
    stored = {x.name for x in tree.find_all(nodes.Name) if x.ctx != "load"}
    parameters = {x.name for x in tree.find_all(nodes.Name) if x.ctx == "param"}
    # A variable that is set only if it is not defined is steered from outside.
    tested = {
        x.node.name
        for x in tree.find_all((nodes.Test, nodes.Filter))
        if x.name in ("defined", "undefined", "default", "d") and isinstance(x.node, nodes.Name)
    }
    tested |= {  # x = x or 0
        x.node.left.name
        for x in tree.find_all(nodes.Assign)
        if isinstance(x.node, nodes.Or) and isinstance(x.node.left, nodes.Name)
    }
    return tuple(
        sorted(find_undeclared_variables(tree) - (stored - (tested - parameters)) - _GIVEN)
    )


class _Budget:
    """What one rendering has used, and the date that it writes."""

    def __init__(self, date: datetime | None):
        self.date = date
        self.steps = self.written = 0
        self.end = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TemplateError(f"it takes more than {MAX_STEPS:,} steps")
        if time.monotonic() > self.end:
            raise TemplateError(f"it takes more than {MAX_SECONDS:g} seconds")

    def write(self, text: str) -> None:
        self.written += len(text)
        _check_length(self.written // 8)  # a part may be written into variables first


_budget: ContextVar[_Budget] = ContextVar("budget of a chat template")


def _check_length(length: float) -> None:
    if length > MAX_LENGTH:
        raise TemplateError(f"it makes a value or a text longer than {MAX_LENGTH:,}")


def _sized(value: Any) -> Any:
    """The value, unless writing it out would pass the bound: lists may hold one list many times."""
    length, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str | bytes):
            length += len(each)
        elif isinstance(each, Mapping):
            length += 8 * len(each)
            waiting += (*each.keys(), *each.values())
        elif isinstance(each, _MANY):
            length += 8 * len(each)
            waiting += each
        elif isinstance(each, Namespace):
            waiting.append(each._Namespace__attrs)  # it hides its dict
        else:
            length += 8
            if isinstance(each, int) and each.bit_length() > _MAX_BITS:
                raise TemplateError(f"it makes a number of more than {_MAX_BITS} bits")
        _check_length(length)
    return value


def _check_growth(name: str, text: Any, args: tuple, options: Mapping[str, Any]) -> None:
    """Raises for a filter, or a method of a text, whose result would be too long."""
    values = (*args, *options.values())
    numbers = [abs(x) for x in values if isinstance(x, int)]
    if name not in _ANY_NUMBER and max(numbers, default=0) > _MAX_INTEGER:
        raise TemplateError(f"{name} has a number above {_MAX_INTEGER:,}")
    longest = max([len(x) for x in values if isinstance(x, str)], default=0)
    if name == "join":
        items = args[0] if isinstance(text, str) and args else text
        separator = len(text) if isinstance(text, str) else longest
        _check_length(separator * len(items) if hasattr(items, "__len__") else 0)
        return
    if name not in _GROWING:
        return
    text = str(text)
    if name == "replace":
        old = values[0] if values and not options and isinstance(values[0], str) else ""
        _check_length(len(text) + text.count(old) * longest)
    elif name == "expandtabs":
        _check_length(len(text) + text.count("\t") * max(numbers, default=8))
    elif name == "indent":
        _check_length(len(text) + (text.count("\n") + 1) * max(longest, *numbers, 4))
    elif name in ("%", "format", "format_map"):
        if re.search(r"\d{6}", text) or ("*" in text and max(numbers, default=0) > _MAX_INTEGER):
            raise TemplateError(f"a format has a width above {_MAX_INTEGER:,}")
        _sized(values)
        length = 8 * len(values) + sum(len(str(x)) for x in values)
        _check_length(len(text) + (text.count("%") + text.count("{")) * length)
    else:  # a search from the right, which is slow where much repeats
        _check_length(len(text) * longest // 256)


def _bounded(name: str, function: Callable) -> Callable:
    """A filter that counts as a step, checked before and after."""
    first = int(getattr(function, "jinja_pass_arg", None) is not None)

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        _budget.get().step()
        if name == "join" and len(args) > first and isinstance(args[first], Iterator):
            args = (*args[:first], list(args[first]), *args[first + 1 :])
        for value in (*args[first:], *options.values()):
            _sized(value)
        _check_growth(name, args[first] if len(args) > first else None, args[first + 1 :], options)
        return _sized(function(*args, **options))

    return call


def _counted(values: Iterable) -> Iterator:
    """The items of a loop, each a step."""
    for value in values:
        _budget.get().step()
        yield value


def _concatenated(values: list) -> str:
    """What ``~`` makes of its operands."""
    return "".join(str(x) for x in _sized(values))


@pass_context  # so that nothing is written when the template is compiled
def _written(context: Any, value: Any) -> str:
    """A value as text, counted."""
    del context
    budget, text = _budget.get(), value if isinstance(value, str) else str(_sized(value))
    budget.step()
    budget.write(text)
    return text


class _Counting(NodeTransformer):
    """Puts the counting functions into the tree of a template."""

    @staticmethod
    def _through(name: str, node: nodes.Expr) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = self._through("_counted", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return self._through("_concatenated", nodes.List(node.nodes, lineno=node.lineno))

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Const:
        return nodes.Const(node.data, lineno=node.lineno)  # which goes through `_written`

    def visit_List(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        stored = getattr(node, "ctx", "load") != "load"  # a target of an assignment
        return node if stored else self._through("_sized", node)

    visit_Tuple = visit_Dict = visit_List


class _Generation(Extension):
    """`{% generation %}` marks the tokens of the assistant for a training mask; ignored."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with the bounds of this module."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_written,
            optimized=False,  # nothing is computed before its bounds are checked
        )
        # Published templates need this filter and the two functions.
        self.filters["tojson"] = _to_json
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.globals.pop("lipsum")
        for name in _REMOVED:
            del self.filters[name]
        self.filters.update({name: _bounded(name, f) for name, f in self.filters.items()})
        self.filters.update(_counted=_counted, _concatenated=_concatenated, _sized=_sized)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Counting().visit(super()._parse(source, name, filename))

    def call(self, context: Any, obj: Any, /, *args: Any, **options: Any) -> Any:
        _budget.get().step()
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        if getattr(method, "__name__", "") in _REFUSED and hasattr(method, "__self__"):
            raise TemplateError(f"the method {method.__name__} is not supported")
        if isinstance(text := getattr(method, "__self__", None), str):
            if method.__name__ == "join" and args and isinstance(args[0], Iterator):
                args = (list(args[0]), *args[1:])
            _sized(args)
            _check_growth(method.__name__, text, args, options)
        return _sized(super().call(context, obj, *args, **options))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _budget.get().step()
        integers = isinstance(left, int) and isinstance(right, int)
        if operator == "%" and isinstance(left, str):
            values = right if isinstance(right, tuple) else (right,)
            _check_growth("%", left, values, {})
        elif operator == "**" and integers:
            _check_length(left.bit_length() * right)
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | bytes | list | tuple) and isinstance(times, int):
                    _check_length(max(len(value), 1) * times)
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            _check_length(len(left) + len(right))
        return _sized(super().call_binop(context, operator, left, right))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int) and indent > 64:
        raise TemplateError("tojson has an indent above 64")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > 100 or re.search(r"%[-_^#]*\d", form):  # a width fills any memory
        raise TemplateError("strftime_now has a width or a long format")
    return (_budget.get().date or datetime.now()).strftime(form)


@lru_cache(maxsize=16)
def _compile(source: str) -> Any:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    return _Environment()
