"""Composition: ``bind`` fixes options; ``Transform`` carries state from step to step."""

import dataclasses
import difflib
import enum
import functools
import inspect
import re
import reprlib
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec

import jax
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.core.secrets import MASK, is_ours, is_secret
from jaxrl_llm.core.traits import Traits, traits_of

_P = ParamSpec("_P")


def accepted(function: Callable) -> dict[str, inspect.Parameter]:
    """The parameters of ``function`` by name, without those already bound."""
    return dict(inspect.signature(function).parameters)


def call_with(function: Callable, *args, context: Mapping[str, Any]) -> Any:
    """Calls ``function(*args)`` with those entries of ``context`` that it names, and no others."""
    parameters = accepted(function)
    filled = list(parameters)[: len(args)]
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = {k for k, p in parameters.items() if p.kind in by_keyword}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    taken = {k: v for k, v in context.items() if (takes_all or k in known) and k not in filled}
    return function(*args, **taken)


def _check_callable(name: str, function: Any) -> None:
    if not callable(function):
        raise TypeError(f"{name}: expected a function; got {type(function).__name__} {function!r}.")


@reprlib.recursive_repr()
def stable_repr(value: Any) -> str:
    """``repr`` of a value, equal in every process: no memory addresses, functions by name.

    A resumed run compares this text of its recipe with the text in the checkpoint. The text is
    written to files, so options with the name of a secret are masked. An object of another package
    is shown by its type and plain options, since its own repr may contain anything.
    """
    kind = type(value)
    if isinstance(value, functools.partial):
        function = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value.func))
        first = [function, *map(stable_repr, value.args)]
        return f"functools.partial({', '.join([*first, *_options(value.keywords)])})"
    if isinstance(value, types.MethodType):
        return f"{stable_repr(value.__self__)}.{value.__name__}"
    if kind in (tuple, list):
        text = ", ".join(map(stable_repr, value))
        return f"({text}{',' * (len(value) == 1)})" if kind is tuple else f"[{text}]"
    if kind in (set, frozenset):
        text = ", ".join(sorted(map(stable_repr, value)))  # the order of a set is of its process
        return f"{kind.__name__}({{{text}}})" if text else f"{kind.__name__}()"
    if kind is dict:
        shown = (f"{name!r}: {_option(str(name), each)}" for name, each in value.items())
        return f"{{{', '.join(shown)}}}"
    if hasattr(kind, "_fields") and isinstance(value, tuple) and not is_ours(kind):
        return (
            f"{kind.__name__}({', '.join(_options(dict(zip(kind._fields, value, strict=True))))})"
        )
    generated = not is_ours(kind) or hasattr(kind.__repr__, "__wrapped__")
    if dataclasses.is_dataclass(kind) and generated:
        shown = [field.name for field in dataclasses.fields(value) if field.repr]
        options = _options({name: getattr(value, name) for name in shown})
        return f"{kind.__qualname__}({', '.join(options)})"
    if not is_ours(kind) and kind.__repr__ not in (object.__repr__, enum.Enum.__repr__):
        return with_options(value)
    text = repr(value)
    if " at 0x" in text:
        text = getattr(value, "__name__", text)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def with_options(value: Any) -> str:
    """Text of an object: its type, and the numbers and texts passed to its constructor.

    These are its attributes with the names of the constructor's parameters; secrets are masked.

    Example:
      >>> class Judge:
      ...     def __init__(self, model, api_key):
      ...         self.model, self.api_key = model, api_key
      >>> with_options(Judge("small", api_key="abc"))
      "Judge(model='small', api_key='***')"
    """
    attributes = getattr(value, "__dict__", {})
    try:
        names = list(accepted(type(value)))
    except (TypeError, ValueError):  # a constructor without a signature
        names = []
    plain = {
        name: attributes[name]
        for name in names
        if isinstance(attributes.get(name), bool | int | float | str)
    }
    name = type(value).__qualname__
    return f"{name}({', '.join(_options(plain))})" if plain else name


def in_full(value: Any) -> str:
    """The full text of a function or an object, with its options.

    An object whose name is shorter, such as that of a sum, has this text as its attribute
    ``in_full``.

    Example:
      >>> from jaxrl_llm import rewards
      >>> reward = rewards.weighted_sum({"right": (rewards.last_integer, 1.0)})
      >>> reward.__qualname__, in_full(reward)
      ('right', 'right=last_integer')
    """
    text, name = (getattr(value, each, None) for each in ("in_full", "__qualname__"))
    if isinstance(text, str):
        return text
    if isinstance(value, functools.partial):
        args = [*map(in_full, value.args), *_options(value.keywords, show=in_full)]
        return f"{in_full(value.func)}({', '.join(args)})"
    if isinstance(value, Bound):
        options = _options(dict(value.options), show=in_full)
        return f"{in_full(value.function)}({', '.join(options)})"
    if isinstance(value, types.MethodType):
        return f"{in_full(value.__self__)}.{value.__name__}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(in_full, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(_options(value, show=in_full))}}}"
    if isinstance(name, str):
        return name
    plain = type(value).__repr__ is object.__repr__  # an address in memory differs in each process
    return with_options(value) if plain else stable_repr(value)


def changed_options(function: Callable, options: Mapping[str, Any]) -> list[str]:
    """Those options that differ from the defaults of a function, as arguments."""
    defaults = {name: parameter.default for name, parameter in accepted(function).items()}

    def changed(name: str, value: Any) -> bool:
        # Within jit an option may be traced: nobody knows its value, and an array has several.
        return isinstance(value, jax.Array | np.ndarray) or value != defaults[name]

    return _options({name: value for name, value in options.items() if changed(name, value)})


def _options(options: Mapping[str, Any], *, show: Callable[[Any], str] = stable_repr) -> list[str]:
    """Options as arguments."""
    return [f"{name}={_option(name, value, show=show)}" for name, value in options.items()]


def _option(name: str, value: Any, *, show: Callable[[Any], str] = stable_repr) -> str:
    """The text of an option; that of a secret is masked."""
    return repr(MASK) if is_secret(name, value) else show(value)


def _typed(value: Any) -> Any:
    """A value together with its type, since 1 == 1.0 == True although they trace differently."""
    return type(value), tuple(map(_typed, value)) if isinstance(value, tuple) else value


class _Left:
    """The signature of a Bound: the parameters that are not bound."""

    def __get__(self, bound, owner) -> inspect.Signature | None:
        if bound is None:
            return None  # the class itself has the usual signature
        signature, taken = inspect.signature(bound.function), dict(bound.options)
        left = [p for name, p in signature.parameters.items() if name not in taken]
        return signature.replace(parameters=left)


@dataclasses.dataclass(frozen=True, eq=False)
class Bound:
    """A function with some keyword options fixed; made by :func:`bind`."""

    function: Callable
    options: tuple[tuple[str, Any], ...]

    def __eq__(self, other) -> bool:
        if not isinstance(other, Bound):
            return NotImplemented
        return (self.function, _typed(self.options)) == (other.function, _typed(other.options))

    def __hash__(self) -> int:
        return hash((self.function, self.options))

    __signature__ = _Left()

    def __call__(self, *args, **kwargs):
        """Calls the function; an option of the call wins over the bound one."""
        return self.function(*args, **{**dict(self.options), **kwargs})

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", None) or stable_repr(self.function)

    def __repr__(self) -> str:
        return f"{self.__name__}({', '.join(_options(dict(self.options)))})"


def bind(function: Callable, **options) -> Bound:
    """Fixes keyword options of a function: a partial with equality by value and a readable repr.

    Two binds with the same function and options are equal and have the same hash, so as static
    arguments of a compiled function they do not cause a new trace, unlike ``functools.partial``.
    Equal options have equal types: 1, 1.0 and True are different.

    Args:
      function: Any function, or the result of an earlier ``bind``.
      **options: Keyword options. Values must be hashable: numbers, strings, tuples, functions.
        Arrays belong in state, not in options.

    Returns:
      A callable with the remaining arguments of ``function``.

    Raises:
      TypeError: If ``function`` cannot be called or has no option of a given name, or a value is
        not hashable, or is a bool where a number is expected.
      ValueError: If a number is NaN, or finite and beyond 1e18.

    Example:
      >>> import jaxrl_llm as jr
      >>> gate = jr.bind(jr.surrogates.ppo_clip, eps_high=0.28)
      >>> gate
      ppo_clip(eps_high=0.28)
      >>> gate == jr.bind(jr.surrogates.ppo_clip, eps_high=0.28)
      True
    """
    _check_callable("bind", function)
    inner = function.function if isinstance(function, Bound) else function
    name = getattr(function, "__name__", repr(function))
    try:
        known = inspect.signature(inner).parameters
    except ValueError as error:
        raise TypeError(
            f"bind: the signature of {name} cannot be read; wrap it in a function that names its "
            "options."
        ) from error
    names = [k for k, p in known.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in known.values())
    for option, value in options.items():
        if option not in names and not open_ended:
            near = difflib.get_close_matches(option, names, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" It takes: {', '.join(names)}."
            raise TypeError(f"bind: {name} has no option {option!r}.{hint}")
        try:
            hash(value)
        except TypeError as error:
            raise TypeError(
                f"bind: option {option!r} of {name} must be hashable; got {type(value).__name__}. "
                "Arrays belong in state, not in options."
            ) from error
    checks.check_bound(name, known, options)
    if isinstance(function, Bound):
        options = {**dict(function.options), **options}
    return Bound(inner, tuple(sorted(options.items())))


@dataclasses.dataclass(frozen=True)
class _Connected:
    """A function that takes parameters under other names; made by :func:`connect`."""

    function: Callable
    names: tuple[tuple[str, str], ...]

    def __post_init__(self):
        parameters, taken, renamed = [], dict(self.names), []
        for name, parameter in accepted(self.function).items():
            place = parameter.kind is not parameter.KEYWORD_ONLY
            if name in taken:
                entry = parameter.replace(name=taken[name], kind=parameter.KEYWORD_ONLY)
                renamed.append(entry.replace(default=parameter.empty))
                # The slot's argument at this place is ignored; its name may be that of the entry.
                parameter = parameter.replace(name=f"_{name}")
            if place or name not in taken:
                parameters.append(parameter)
        rest = [p for p in parameters if p.kind is p.VAR_KEYWORD]
        parameters = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
        signature = inspect.Signature([*parameters, *renamed, *rest])
        object.__setattr__(self, "__signature__", signature)

    def __call__(self, *args, **kwargs):
        """Calls the function; an argument with a new name replaces that of the parameter."""
        mapped = {old: kwargs.pop(new) for old, new in self.names if new in kwargs}
        places = list(accepted(self.function))
        args = [mapped.pop(places[i], x) if i < len(places) else x for i, x in enumerate(args)]
        return self.function(*args, **mapped, **kwargs)

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", None) or stable_repr(self.function)

    def __repr__(self) -> str:
        names = ", ".join(f"{old}={new!r}" for old, new in self.names)
        return f"connect({stable_repr(self.function)}, {names})"


def connect(function: Callable, **names: str) -> Callable:
    """A function that reads parameters from context entries with other names.

    A slot of a Recipe passes a function the context entries that its parameters name. If an entry
    and a parameter have different names, this function connects them; the entry is then required.
    A connected first parameter ignores the positional argument of the slot.

    Args:
      function: Any function, or the result of ``bind``.
      **names: For each parameter of ``function`` to connect, the name of a context entry.

    Returns:
      A callable that compares by value and prints itself.

    Raises:
      TypeError: If ``function`` has no parameter of a given name.

    Example:
      >>> import jaxrl_llm as jr
      >>> def scaled(x, *, factor):
      ...     return x * factor
      >>> jr.connect(scaled, factor="kl_coef")(2.0, kl_coef=3.0)
      6.0
    """
    known = accepted(function)
    for name in names:
        if name not in known:
            raise TypeError(
                f"connect: {getattr(function, '__name__', repr(function))} has no parameter "
                f"{name!r}. It takes: {', '.join(known)}."
            )
    return _Connected(function, tuple(sorted(names.items())))


def given(function: Callable, **names: str) -> Callable:
    """The deprecated name of :func:`connect`."""
    warnings.warn("given is deprecated; use connect.", DeprecationWarning, stacklevel=2)
    return connect(function, **names)


class Transform(NamedTuple):
    """A pure update and its first state, as in optax.

    Attributes:
      init: ``init() -> state``; a pytree of arrays, checkpointed with the train state.
      update: ``update(x, state, **context) -> (x, state)``. It takes context entries by keyword and
        ignores the others. It names those that cost something, such as ``last_kl``, ``ref_logp`` or
        ``key``: they are computed only for a function whose signature has them.
      learn: ``learn(state, **context) -> state``, called after the optimizer step that used ``x``,
        with its results, such as the losses; None for a state that only ``update`` changes.
      call: The call that made it, as text, by which a recipe prints it; see :func:`prints_as_call`.
    """

    init: Callable[[], ArrayTree]
    update: Callable[..., tuple[Any, ArrayTree]]
    learn: Callable[..., ArrayTree] | None = None
    call: str | None = None

    def __repr__(self) -> str:
        """The call that makes it, as a recipe prints it."""
        if (parts := parts_of(self)) is not None:
            return f"chain({', '.join(map(repr, parts))})"
        if functions := functions_of(self):
            return f"stateless({stable_repr(functions[0])})"
        return self.call or f"Transform({stable_repr(self.update)})"


def prints_as_call(make: Callable[_P, Transform]) -> Callable[_P, Transform]:
    """Decorates a function that makes a Transform, which then prints as the call that made it.

    The text has those options that differ from their defaults. A resumed run compares it with that
    of the run before, so a changed option is noticed.

    Args:
      make: ``make(**options) -> Transform``; functions among its options print by name.

    Returns:
      The function, whose Transforms have the text as ``call``.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.advantages.spo_tracker(num_prompts=3, eps=1e-8).call
      'spo_tracker(num_prompts=3)'
    """
    signature = inspect.signature(make)
    rest = [name for name, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD]

    @functools.wraps(make)
    def made(*args: _P.args, **options: _P.kwargs) -> Transform:
        transform = make(*args, **options)
        given = dict(signature.bind(*args, **options).arguments)
        free = {name: value for each in rest for name, value in given.pop(each, {}).items()}
        shown = [*changed_options(make, given), *_options(free)]
        return transform._replace(call=f"{make.__name__}({', '.join(shown)})")

    return made


@dataclasses.dataclass(frozen=True)
class _Stateless:
    """The update half of :func:`stateless`; a value, so that equal transforms compare equal."""

    function: Callable

    def __call__(self, x, state, **context):
        return call_with(self.function, x, context=context), state


def stateless(function: Callable, **options) -> Transform:
    """Lifts a plain function into a Transform whose state is the empty tuple.

    Args:
      function: ``function(x, **options)``; of the context it receives only the keywords it names.
      **options: Fixed with :func:`bind`, which rejects unknown names.

    Raises:
      TypeError: If ``function`` cannot be called or has no option of a given name.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> center = jr.stateless(jr.advantages.dr_grpo)
      >>> advantages, _ = center.update(jnp.array([1.0, 0.0]), center.init(), step=3)
      >>> advantages.tolist()
      [0.5, -0.5]
    """
    _check_callable("stateless", function)
    return Transform(tuple, _Stateless(bind(function, **options) if options else function))


@dataclasses.dataclass(frozen=True)
class _ChainInit:
    """The init half of :func:`chain`."""

    transforms: tuple[Transform, ...]

    def __call__(self):
        return tuple(t.init() for t in self.transforms)


@dataclasses.dataclass(frozen=True)
class _ChainUpdate:
    """The update half of :func:`chain`; a value, so that equal chains compare equal."""

    transforms: tuple[Transform, ...]

    def __call__(self, x, state, **context):
        count = len(state) if isinstance(state, tuple) else 1
        if not isinstance(state, tuple) or count != len(self.transforms):
            raise ValueError(
                f"chain: {len(self.transforms)} transforms but {count} states; the state must come "
                "from init() of this chain."
            )
        states = []
        for transform, old in zip(self.transforms, state, strict=True):
            x, new = call_with(transform.update, x, old, context=context)
            states.append(new)
        return x, tuple(states)


@dataclasses.dataclass(frozen=True)
class _ChainLearn:
    """The learn part of :func:`chain`, for a chain in which a transform learns."""

    transforms: tuple[Transform, ...]

    def __call__(self, state, **context):
        pairs = zip(self.transforms, state, strict=True)
        return tuple(
            x if t.learn is None else call_with(t.learn, x, context=context) for t, x in pairs
        )


@dataclasses.dataclass(frozen=True)
class _Piped:
    """Functions applied one after the other; made by :func:`pipe`."""

    functions: tuple[Callable, ...]

    def __post_init__(self):
        first, rest = next(iter(accepted(self.functions[0]).values())), {}
        for function in self.functions:
            for parameter in list(accepted(function).values())[1:]:
                parameter = parameter.replace(kind=parameter.KEYWORD_ONLY)
                # A parameter that one function requires is required by the pipe.
                required = parameter.name not in rest or parameter.default is parameter.empty
                if required and parameter.name != first.name:
                    rest[parameter.name] = parameter
        object.__setattr__(self, "__signature__", inspect.Signature([first, *rest.values()]))

    def __call__(self, *args, **context):
        first = next(iter(accepted(self)))
        (x,) = args or (context[first],)
        context[first] = x
        for function in self.functions:
            x = call_with(function, x, context=context)
        return x

    @property
    def __traits__(self) -> Traits:
        first, last = traits_of(self.functions[0]), traits_of(self.functions[-1])
        return dataclasses.replace(last, reward_range=first.reward_range)

    def __repr__(self) -> str:
        return f"pipe({', '.join(map(stable_repr, self.functions))})"


def pipe(*functions: Callable) -> Callable:
    """Composes functions: each gets the result of the previous one.

    Keyword arguments are passed to every function that names them, and so is the array that the
    first function gets. For Transforms use :func:`chain`.

    Args:
      *functions: At least one, in the order of their application. Each takes one array by position
        and other arguments by name.

    Returns:
      A callable that compares by value and prints itself.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> returns = jr.pipe(jr.advantages.terminal_rewards, jr.advantages.reward_to_go)
      >>> returns(jnp.array([1.0]), mask=jnp.ones((1, 2), bool), gamma=0.5).tolist()
      [[0.5, 1.0]]
    """
    if not functions:
        raise ValueError("pipe: there must be at least one function.")
    return _Piped(functions)


def functions_of(transform: Transform | None) -> tuple[Callable, ...]:
    """The functions inside ``stateless``, also in a ``chain``; empty for other transforms.

    Their signatures name the entries that the transform reads; other Transforms are opaque.
    """
    update = None if transform is None else transform.update
    if isinstance(update, _ChainUpdate):
        return tuple(f for part in update.transforms for f in functions_of(part))
    return (update.function,) if isinstance(update, _Stateless) else ()


def parts_of(transform: Transform) -> tuple[Transform, ...] | None:
    """The transforms of a ``chain``; None for any other."""
    update = transform.update
    return update.transforms if isinstance(update, _ChainUpdate) else None


def chain(*transforms: Transform) -> Transform:
    """Applies transforms one after the other; the state is the tuple of their states.

    Args:
      *transforms: In the order of their application; each gets the result of the previous one, and
        all get the same context.

    Returns:
      A Transform. Without arguments it is the identity.

    Raises:
      TypeError: If an argument is no Transform.
      ValueError: On update, if the state was not made by ``init()`` of the same chain.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> both = jr.chain(jr.stateless(jr.advantages.dr_grpo), jr.stateless(jnp.negative))
      >>> both.update(jnp.array([1.0, 0.0]), both.init())[0].tolist()
      [-0.5, 0.5]
    """
    for i, transform in enumerate(transforms):
        if not isinstance(transform, Transform):
            raise TypeError(
                f"chain: argument {i} must be a Transform; got {transform!r}. "
                "Lift a function with jaxrl_llm.stateless(function, **options)."
            )
    learns = any(transform.learn is not None for transform in transforms)
    learn = _ChainLearn(transforms) if learns else None
    return Transform(_ChainInit(transforms), _ChainUpdate(transforms), learn)
