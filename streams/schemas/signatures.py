"""Signatures: which functions can be tools, and which arguments they take.

Every argument of a tool has a name, so `*args` and positional-only parameters are refused. The
first parameter is the running call, and no argument, if its annotation is `Call` or `SyncCall`, or
if it is named `call` and has no annotation. Annotations may be strings.
"""

import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import (
    Annotated,
    Any,
    Final,
    ForwardRef,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

_CALL_NAMES: Final = frozenset({"Call", "SyncCall"})

_SEND: Final = dis.opmap.get("SEND")  # in the code of every `await`


class Signature(msgspec.Struct, frozen=True):
    """The parameters of a function, and its return annotation."""

    parameters: list[inspect.Parameter]  # those that are arguments
    call_name: str | None  # of the parameter for the running call
    variadic: str | None  # the name of its `**kwargs`
    returns: Any

    @property
    def names(self) -> set[str]:
        """The names of all parameters, which a docstring may describe."""
        others = {name for name in (self.call_name, self.variadic) if name is not None}
        return others | {parameter.name for parameter in self.parameters}

    @classmethod
    def of(cls, function: Callable[..., Any], what: str, *, pages: bool = False) -> "Signature":
        """The signature of a function, which must be a generator function if `pages` is set.

        Raises `TypeError`, beginning with `what`, for a function that cannot be a tool.
        """
        core = innermost(function)
        _require_yield(function, core, what, pages)
        signature = _resolved(function, core, what)
        found = list(signature.parameters.values())
        call_name = None
        if found and _takes_call(found[0]):
            call = found.pop(0)
            call_name = call.name
            if is_async(core) and _is_only_for_plain(call.annotation):
                raise TypeError(
                    f"{what}: {call_name}: an async function is given a Call; "
                    "a SyncCall is for plain functions"
                )
        variadic = None
        parameters = []
        for parameter in found:
            _require_named(parameter, what)
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                variadic = parameter.name
            else:
                parameters.append(_annotated(parameter))
        return cls(parameters, call_name, variadic, signature.return_annotation)


def innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function below `partial` and `functools.wraps`, which has the name and the docstring.

    Raises `TypeError` for an object that cannot be called.
    """
    while isinstance(function, functools.partial):
        function = function.func
    if not callable(function):
        raise TypeError(f"a tool is a function, not {type(function).__name__}")
    core: Callable[..., Any] = inspect.unwrap(function)
    return core


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call of `function` returns an awaitable or an async generator."""
    written = (function, type(function).__call__)  # the second for an instance with `__call__`
    return _is_any(written, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def never_waits(function: Callable[..., Any]) -> bool:
    """Whether `function` is an `async def` without `await`, `async for` and `async with`."""
    if _SEND is None or not isinstance(function, types.FunctionType):
        return False
    code = function.__code__
    is_coroutine = bool(code.co_flags & inspect.CO_COROUTINE)
    return is_coroutine and all(each.opcode != _SEND for each in dis.get_instructions(code))


def _is_any(written: Iterable[Callable[..., Any]], *kinds: Callable[[Any], bool]) -> bool:
    return any(is_kind(each) for each in written for is_kind in kinds)


def _require_yield(
    function: Callable[..., Any], core: Callable[..., Any], what: str, pages: bool
) -> None:
    written = (function, core, type(core).__call__)
    has_yield = _is_any(written, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if has_yield and not pages:
        raise TypeError(
            f"{what}: a tool returns its result; set pages=True for a function that yields pages"
        )
    if pages and not has_yield:
        raise TypeError(f"{what}: pages=True is for a function that yields pages")


def _resolved(
    function: Callable[..., Any], core: Callable[..., Any], what: str
) -> inspect.Signature:
    written = core if hasattr(core, "__globals__") else type(core).__call__
    # A module that imports `Call` under TYPE_CHECKING only may annotate with it.
    stand_in = type("Call", (), {"__module__": __name__})
    names = dict.fromkeys(_CALL_NAMES, stand_in) | getattr(written, "__globals__", {})
    try:
        signature = inspect.signature(function, globals=names, eval_str=True)
        return _without_forward_references(signature, names)
    except (NameError, AttributeError, SyntaxError, TypeError) as error:
        raise TypeError(
            f"{what}: cannot resolve an annotation: {error}; import it at run time and define it "
            "outside of functions"
        ) from error
    except ValueError as error:
        raise TypeError(f"{what}: {error}") from error


def _without_forward_references(
    signature: inspect.Signature, names: dict[str, Any]
) -> inspect.Signature:
    """The signature with the types that strings within an annotation name: `list["Report"]`."""
    annotations = {each.name: each.annotation for each in signature.parameters.values()}
    annotations["return"] = signature.return_annotation
    open_ones = {name: each for name, each in annotations.items() if _has_forward_reference(each)}
    if not open_ones:
        return signature
    holder = type("holder", (), {"__annotations__": open_ones})
    annotations |= get_type_hints(holder, globalns=names, include_extras=True)
    returns = annotations.pop("return")
    parameters = [
        each.replace(annotation=annotations[each.name]) for each in signature.parameters.values()
    ]
    return signature.replace(parameters=parameters, return_annotation=returns)


def _has_forward_reference(annotation: Any) -> bool:
    if isinstance(annotation, str | ForwardRef):
        return True
    if get_origin(annotation) is Annotated:
        return _has_forward_reference(annotation.__origin__)
    inner = () if get_origin(annotation) is Literal else get_args(annotation)
    return any(map(_has_forward_reference, inner))


def _takes_call(first: inspect.Parameter) -> bool:
    is_positional = first.kind in {
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    }
    if first.annotation is inspect.Parameter.empty:
        return is_positional and first.name == "call"
    return is_positional and _is_call(first.annotation)


def _is_call(annotation: Any) -> bool:
    if get_origin(annotation) in {Union, types.UnionType, Annotated}:
        return any(_is_call(inner) for inner in get_args(annotation))
    # By name, because `streams.server.call` imports this module. A class `Call` of the author's is
    # another class.
    return isinstance(annotation, type) and any(
        base.__name__ in _CALL_NAMES and base.__module__.partition(".")[0] == "streams"
        for base in annotation.__mro__
    )


def _is_only_for_plain(annotation: Any) -> bool:
    """Whether this is `SyncCall`. Nothing would await the methods of the `Call` in its place."""
    inner = get_args(annotation) or (annotation,)
    return any(getattr(each, "__name__", "") == "SyncCall" for each in inner) and not any(
        getattr(each, "__name__", "") == "Call" for each in inner
    )


def _require_named(parameter: inspect.Parameter, what: str) -> None:
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        raise TypeError(f"{what}: *{parameter.name}: arguments of MCP have names; use a list")
    if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
        raise TypeError(f"{what}: {parameter.name}: arguments of MCP have names; remove the slash")
    if _is_call(parameter.annotation):
        raise TypeError(f"{what}: {parameter.name}: the call must be the first parameter")


def _annotated(parameter: inspect.Parameter) -> inspect.Parameter:
    if parameter.annotation is inspect.Parameter.empty:
        return parameter.replace(annotation=Any)
    return parameter
