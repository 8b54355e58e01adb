"""Tools: Python functions as MCP tools, from their signatures to their results.

Each parameter is an argument. The annotations become the input schema, and arguments are checked
against them. The docstring becomes the description, but for the entries of parameters in it, which
describe these. `signatures` says which functions can be tools, `schemas` and `outputs` make the
schemas. The settings of a tool, its making and its results are in one file, because each setting is
read in all three.

`to_result` makes the result of a call from the value that the tool returns. With an output schema:

    an object in JSON                           structuredContent, and its JSON as a text block
    any other value                             the same of the object {"result": value}; the text
                                                block has the value alone, and None has no text;
                                                blocks in a list[Any] stay blocks

Without one, as where the annotation is a content block, `Any`, or absent:

    None                                        no content
    str, a content block, a list with blocks    these blocks; a str beside a block is a text block
    a value that is an object in JSON           structuredContent, and its JSON as a text block
    any other JSON (a list of str, a number)    its JSON as a text block

A `ToolResult`, or a `CallToolResult` of the official SDK, is the whole result.

NaN and the infinities become null, as in JavaScript. JSON cannot express them, and hours of work
should not be lost for one. Where the output schema requires a number, null is an error. Bytes
inside a value become base64, as their schema says. Bytes alone are an error, since they have no
type: return an `Image`, `Audio` or `EmbeddedResource` instead, or annotate with `bytes`.
"""

import base64
import inspect
import itertools
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import Any, Final, TypedDict, TypeVar, Unpack, get_args, get_type_hints

import msgspec

from streams.errors import InsufficientScope
from streams.exchange import Scopes, checked_scopes
from streams.faults import is_failure, log_failure, text_of
from streams.limits import Overflow
from streams.messages import as_builtin, uncollected
from streams.protocol.extension import EXPECTED
from streams.schemas import docstrings
from streams.schemas.content import Block, ToolResult, is_block_type, sdk_block, sdk_result
from streams.schemas.inputs import (
    Binder,
    GivenSchema,
    annotation_binder,
    for_models,
    given_binder,
    parameters_schema,
    patterned_arguments,
)
from streams.schemas.models import as_plain, is_model
from streams.schemas.outputs import Output, annotated_output, given_check
from streams.schemas.signatures import Signature, innermost, is_async, never_waits
from streams.schemas.validator import Schema
from streams.server.listing import require_json

# Values that become content blocks. A union made in each check takes longer than all of the rest.
_SHOWN: Final = (str, *get_args(Block))
_BYTES: Final = (bytes, bytearray, memoryview)

# SEP-986: "1 to 128 characters … A-Z, a-z, 0-9, underscore, dash, and dot".
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")


OLD_CURSORS_MAX: Final = 1_000  # cursors behind tools that were removed, and still lead on

_Function = TypeVar("_Function", bound=Callable[..., Any])


class ToolAnnotations(TypedDict, total=False):
    """MCP's hints about a tool, spelled as on the wire."""

    title: str
    readOnlyHint: bool
    destructiveHint: bool
    idempotentHint: bool
    openWorldHint: bool


class ToolSettings(TypedDict, total=False):
    """The settings of `Server.tool`, which shows this list; `DEFAULTS` has their defaults.

    name: told to clients in place of the function's name
    title: a name for people
    description: told to clients in place of the docstring
    input_schema: a JSON Schema in place of the annotations; arguments arrive as plain JSON
    output_schema: a JSON Schema in place of the return annotation
    structured_output: False: text alone; True: the return annotation must have a schema
    annotations: MCP's hints, such as `{"readOnlyHint": True}`
    resume_min_s: seconds before a client may resume; None: as for the server
    resume_max_s: seconds for which a detached stream is kept; None: as for the server
    overflow: when the client is too far behind, "block" makes the tool wait, "fail" ends the call
    pages: the function yields results, one a page
    pages_ahead: pages that are made before a client asks for them
    page_wait_s: seconds that a call waits for its page before it gets an empty one
    expected_s: seconds that a call is likely to take, told to clients
    restart: run the call again when its server has died
    scopes: scopes that a caller's bearer token needs
    timeout_s: seconds until the tool is cancelled: for each page, and for each run of a restart
    """

    name: str | None
    title: str | None
    description: str | None
    input_schema: Mapping[str, Any] | None
    output_schema: Mapping[str, Any] | None
    structured_output: bool | None
    annotations: ToolAnnotations | None
    resume_min_s: float | None
    resume_max_s: float | None
    overflow: Overflow
    pages: bool
    pages_ahead: int
    page_wait_s: float
    expected_s: float | None
    restart: bool
    scopes: Iterable[str]
    timeout_s: float | None


DEFAULTS: Final[ToolSettings] = {
    "name": None,
    "title": None,
    "description": None,
    "input_schema": None,
    "output_schema": None,
    "structured_output": None,
    "annotations": None,
    "resume_min_s": None,
    "resume_max_s": None,
    "overflow": "block",
    "pages": False,
    "pages_ahead": 1,
    "page_wait_s": 10.0,
    "expected_s": None,
    "restart": False,
    "scopes": (),
    "timeout_s": None,
}


def with_settings(function: _Function) -> _Function:
    """Let `help` show the settings that `function` takes as keywords: names, defaults, meanings."""
    kinds = get_type_hints(ToolSettings)
    settings = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kinds[name]
        )
        for name, default in DEFAULTS.items()
    ]
    signature = inspect.signature(function)
    others = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    vars(function)["__signature__"] = signature.replace(parameters=[*others, *settings])
    meanings = inspect.cleandoc(str(ToolSettings.__doc__)).partition("\n\n")[2]
    function.__doc__ = f"{inspect.cleandoc(str(function.__doc__))}\n\nSettings:\n\n{meanings}"
    return function


class Paged(msgspec.Struct, frozen=True):
    """The settings of a tool that gives pages."""

    ahead: int  # pages that are made before a call asks for them
    wait_s: float  # how long a call waits for a page before it gets an empty one


class Tool(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One tool. `resume_min_s` and `resume_max_s` are None for the server's defaults."""

    name: str
    function: Callable[..., Any]
    is_async: bool
    is_immediate: bool  # neither `function` nor the making of its result waits for anything
    takes_call: bool
    parameters: frozenset[str]
    is_variadic: bool  # has **kwargs, for other arguments that its input schema allows
    input_schema: Schema
    title: str | None
    description: str | None
    annotations: ToolAnnotations | None
    resume_min_s: float | None
    resume_max_s: float | None
    overflow: Overflow
    paged: Paged | None
    expected_s: float | None
    restart: bool
    scopes: tuple[str, ...]
    timeout_s: float | None
    binder: Binder
    input_given: GivenSchema | None  # checks arguments, besides `binder`
    output: Output | None
    is_structured: bool  # whether results may have structuredContent

    @property
    def output_schema(self) -> Schema | None:
        """The schema of structured content, if the tool promises any."""
        return None if self.output is None else self.output.schema

    @property
    def is_repeatable(self) -> bool:
        """Whether its hints say that a second run of the same call does no harm."""
        hints = self.annotations or {}
        return bool(hints.get("readOnlyHint") or hints.get("idempotentHint"))

    def check_scopes(self, granted: Scopes) -> None:
        """Raise `InsufficientScope` unless all scopes of the tool were granted."""
        if granted is None or not self.scopes:
            return
        if missing := [each for each in self.scopes if each not in granted]:
            raise InsufficientScope(self.name, self.scopes, missing)

    def is_costly(self, arguments: msgspec.Raw) -> bool:
        """Whether a worker process has to check these arguments, because that may take seconds."""
        return self.input_given is not None and self.input_given.is_costly(len(arguments))

    def bind(self, arguments_raw: bytes | msgspec.Raw) -> dict[str, Any]:
        """The keyword arguments for `function`, with defaults for those that are absent.

        They are not checked against `input_given` where that is costly.

        Raises `ValueError` with a sentence that names the argument: `rows: expected int, got str`.
        Other exceptions of the author's types (`__post_init__`, a default factory) are logged.
        """
        try:
            return self.binder(arguments_raw)
        except ValueError:
            raise
        except BaseException as error:
            if not is_failure(error):
                raise
            log_failure("the arguments of a tool cannot be made", error, tool=self.name)
            raise ValueError(text_of(error)) from error

    def takes(self, name: str) -> bool:
        """Whether the tool may have an argument of this name."""
        if name in self.input_schema.get("properties", {}):
            return True
        if not self.is_variadic:
            return name in self.parameters
        return self.input_schema.get("additionalProperties", True) is not False


def make_tool(function: Callable[..., Any], **given: Unpack[ToolSettings]) -> Tool:
    """Inspect a function once, and report here everything that is wrong with it.

    Raises `TypeError` for a function that cannot be a tool and for an unknown setting, `ValueError`
    for a name, a schema, a scope or a setting that cannot be used.
    """
    if unknown := given.keys() - DEFAULTS.keys():
        raise TypeError(f"unknown settings of a tool: {', '.join(sorted(unknown))}")
    settings: ToolSettings = {**DEFAULTS, **given}
    core = innermost(function)
    name = settings["name"]
    name = _checked_name(name if name is not None else getattr(core, "__name__", ""))
    what = f"tool {name}"
    _require_settings(settings, what)
    paged = _paged(settings, what)
    if settings["restart"]:
        _require_restartable(settings, what)
    accepted = Signature.of(function, what, pages=paged is not None)
    docstring, described = inspect.getdoc(core), dict[str, str]()
    if docstring is not None and settings["input_schema"] is None:
        docstring, described = docstrings.split(docstring, accepted.names)
    in_schema, binder, input_given = _input(accepted, settings["input_schema"], described, what)
    description = settings["description"]
    returns = inspect.Signature.empty if paged else accepted.returns
    output = _output(returns, settings, what)
    return Tool(
        name=name,
        function=function,
        is_async=is_async(function),
        is_immediate=(
            settings["timeout_s"] is None
            and (output is None or output.given is None)
            and never_waits(function)
        ),
        takes_call=accepted.call_name is not None,
        parameters=frozenset(parameter.name for parameter in accepted.parameters),
        is_variadic=accepted.variadic is not None,
        input_schema=in_schema,
        title=settings["title"],
        description=description if description is not None else docstring or None,
        annotations=_checked_annotations(settings["annotations"], what),
        resume_min_s=settings["resume_min_s"],
        resume_max_s=settings["resume_max_s"],
        overflow=settings["overflow"],
        paged=paged,
        expected_s=settings["expected_s"],
        restart=settings["restart"],
        scopes=_checked_scopes(settings["scopes"], what),
        timeout_s=settings["timeout_s"],
        binder=binder,
        input_given=input_given,
        output=output,
        is_structured=settings["structured_output"] is not False,
    )


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"tool name {name!r}: expected 1 to 128 characters of A-Z a-z 0-9 _ . - (give name=…)"
        )
    return name


def _require_settings(settings: ToolSettings, what: str) -> None:
    min_s, max_s = settings["resume_min_s"], settings["resume_max_s"]
    for name, seconds in (("resume_min_s", min_s), ("resume_max_s", max_s)):
        if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"{what}: {name}: expected seconds from 0, got {seconds}")
    # A max of 0 means "not resumable", whatever the min.
    if min_s is not None and max_s and min_s > max_s:
        raise ValueError(f"{what}: resume_min_s ({min_s}) is above resume_max_s ({max_s})")
    overflow = settings["overflow"]
    if overflow not in get_args(Overflow):
        raise ValueError(f"{what}: overflow: expected 'block' or 'fail', got {overflow!r}")


def _paged(settings: ToolSettings, what: str) -> Paged | None:
    ahead, wait_s = settings["pages_ahead"], settings["page_wait_s"]
    if ahead < 1:
        raise ValueError(f"{what}: pages_ahead: expected at least 1, got {ahead}")
    for name, seconds in (
        ("page_wait_s", wait_s),
        ("expected_s", settings["expected_s"]),
        ("timeout_s", settings["timeout_s"]),
    ):
        if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"{what}: {name}: expected seconds above 0, got {seconds}")
    if not settings["pages"]:
        return None
    if settings["resume_max_s"] == 0:
        raise ValueError(
            f"{what}: a later call asks for the next page: resume_max_s must be above 0"
        )
    if settings["output_schema"] is not None:
        raise ValueError(f"{what}: output_schema: pages cannot have one, since a page may be empty")
    return Paged(ahead, wait_s)


def _require_restartable(settings: ToolSettings, what: str) -> None:
    if settings["resume_max_s"] == 0:
        raise ValueError(f"{what}: no client can resume after a restart: resume_max_s must be > 0")
    if settings["pages"]:
        raise ValueError(f"{what}: a tool that gives pages cannot be restarted: drop restart")


def _checked_scopes(given: Iterable[str], what: str) -> tuple[str, ...]:
    try:
        return checked_scopes(given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{what}: {error}") from None


def _checked_annotations(given: ToolAnnotations | None, what: str) -> ToolAnnotations | None:
    if given is None:
        return None
    try:
        msgspec.convert(given, ToolAnnotations)
    except msgspec.ValidationError as error:
        raise ValueError(f"{what}: annotations: {error}") from error
    return given


def _input(
    accepted: Signature, given: Mapping[str, Any] | None, described: Mapping[str, str], what: str
) -> tuple[Schema, Binder, GivenSchema | None]:
    parameters = accepted.parameters
    if given is not None:
        schema = GivenSchema(given, f"{what}: input_schema")
        _require_accepted(schema.schema, accepted, what)
        has_variadic = accepted.variadic is not None
        binder = given_binder(
            schema, parameters, more_allowed=has_variadic, taken=accepted.call_name
        )
        return schema.schema, binder, schema
    if accepted.variadic is not None:
        raise TypeError(f"{what}: **{accepted.variadic}: describe its arguments by input_schema")
    try:
        models = for_models(parameters)
        made = parameters_schema(parameters, models, described)
    except (TypeError, ValueError, NameError) as error:
        raise TypeError(f"{what}: {error}") from error
    checked = patterned_arguments(parameters, models, f"{what}: parameters")
    return made, annotation_binder(parameters, models, checked), checked


def _require_accepted(schema: Schema, accepted: Signature, what: str) -> None:
    known = {parameter.name for parameter in accepted.parameters}
    for name in schema.get("properties", {}):
        if name == accepted.call_name or (name not in known and accepted.variadic is None):
            raise ValueError(f"{what}: input_schema: the function cannot take {name!r}")


def _output(returns: Any, settings: ToolSettings, what: str) -> Output | None:
    given, is_wanted = settings["output_schema"], settings["structured_output"]
    if is_wanted is False:
        if given is not None:
            raise ValueError(f"{what}: output_schema: drop it, or structured_output=False")
        return None
    if given is not None:
        schema = GivenSchema(given, f"{what}: output_schema")
        return Output(schema.schema, given_check(schema), schema)
    output = annotated_output(returns, f"{what}: return annotation")
    if output is None and is_wanted:
        raise TypeError(f"{what}: structured_output: annotate the result, or give output_schema")
    return output


def listing(tool: Tool) -> dict[str, Any]:
    """The tool's entry in the result of `tools/list`."""
    entry = {
        "name": tool.name,
        "title": tool.title,
        "description": tool.description,
        "inputSchema": tool.input_schema,
        "outputSchema": tool.output_schema,
        "annotations": tool.annotations,
        "_meta": None if tool.expected_s is None else {EXPECTED: tool.expected_s},
    }
    return {key: value for key, value in entry.items() if value is not None}


def to_result(value: Any, tool: Tool) -> dict[str, Any]:
    """The CallToolResult for the value that a tool returned; see the table above.

    Raises `TypeError` for a value that is not JSON, or not an object where the tool has an output
    schema; `ValueError` for an object that does not fit that schema.
    """
    output = tool.output
    if type(value) is str and value.isascii() and (output is None or output.is_text):
        content = [{"type": "text", "text": value}]
        is_data = output is not None
        return {"content": content} | ({"structuredContent": {"result": value}} if is_data else {})
    if isinstance(value, ToolResult):
        return _whole(value, tool)
    if (passed := sdk_result(value)) is not None:
        return _checked_whole(passed, tool)
    if output is not None:
        return _structured(value, tool, output)
    blocks = _content(value, tool)
    if blocks is not None:
        return {"content": blocks}
    encoded, plain = _as_json(value, tool)
    is_object = isinstance(plain, dict) and tool.is_structured
    return _with_text(encoded) | ({"structuredContent": plain} if is_object else {})


def _whole(given: ToolResult, tool: Tool) -> dict[str, Any]:
    content = given.content
    blocks = content if isinstance(content, list | tuple) else [content]
    result: dict[str, Any] = {"content": [_block(item, tool) for item in blocks]}
    if given.structured_content is not None:
        _, result["structuredContent"] = _as_json(given.structured_content, tool)
    if given.is_error:
        result["isError"] = True
    if given.meta is not None:
        _, result["_meta"] = _as_json(given.meta, tool)
    return _checked_whole(result, tool)


def _checked_whole(result: dict[str, Any], tool: Tool) -> dict[str, Any]:
    structured = result.get("structuredContent")
    if structured is not None and not isinstance(structured, dict):
        raise TypeError(f"tool {tool.name}: structured_content is no object in JSON")
    if tool.output is not None and not result.get("isError"):
        if structured is None:
            raise TypeError(f"tool {tool.name} has an output schema: give structured_content")
        _check_output(msgspec.json.encode(structured), structured, tool, tool.output)
    return result


def _structured(value: Any, tool: Tool, output: Output) -> dict[str, Any]:
    promised = value
    if isinstance(value, _BYTES) and "contentEncoding" not in repr(output.schema):
        raise _untyped(value, tool)
    if output.plain is not None:
        try:
            promised = output.plain(value)
        except ValueError as error:
            raise _broken(tool, error) from error
    if output.is_wrapped:
        promised = {"result": promised}
    encoded, plain = _as_json(promised, tool, value)
    if isinstance(value, Block) or not isinstance(plain, dict):
        raise TypeError(f"{_returned(value, tool)}, but its output schema promises an object")
    _check_output(encoded, plain, tool, output)
    if not output.is_wrapped:
        return _with_text(encoded) | {"structuredContent": plain}
    if (shown := _content(value, tool)) is not None:
        return {"content": shown, "structuredContent": plain}
    inner = encoded[len(b'{"result":') : -1]
    return _with_text(inner) | {"structuredContent": plain}


def _check_output(encoded: bytes, plain: Any, tool: Tool, output: Output) -> None:
    try:
        output.check(encoded, plain)
    except ValueError as error:
        raise _broken(tool, error) from error


def _broken(tool: Tool, error: ValueError) -> ValueError:
    return ValueError(f"tool {tool.name} broke its output schema: {error}")


def _with_text(encoded: bytes) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": encoded.decode()}]}


def error_result(message: str) -> dict[str, Any]:
    """The CallToolResult of a tool that failed. Accepts any `message`."""
    # The name of a file may have lone surrogates, which UTF-8 cannot encode.
    text = message.encode(errors="backslashreplace").decode()
    return {"content": [{"type": "text", "text": text}], "isError": True}


def _content(value: Any, tool: Tool) -> list[dict[str, Any]] | None:
    """The blocks of a value that is content; None for a value that is data."""
    if value is None:
        return []
    if isinstance(value, str) or is_block_type(type(value)):
        return [_block(value, tool)]
    if isinstance(value, list | tuple) and any(map(is_block_type, set(map(type, value)))):
        return [_block(item, tool) for item in value]
    return None


def _block(item: Any, tool: Tool) -> dict[str, Any]:
    if type(item) is str and item.isascii():
        return {"type": "text", "text": item}
    if (passed := sdk_block(item)) is not None:
        return passed
    if not isinstance(item, _SHOWN):
        raise TypeError(
            f"{_returned(item, tool)} in a list of content blocks; beside them only str"
        )
    _, plain = _as_json(item, tool)
    return plain if isinstance(plain, dict) else {"type": "text", "text": plain}


_NO_VALUE: Final = object()


def _as_json(value: Any, tool: Tool, returned: Any = _NO_VALUE) -> tuple[bytes, Any]:
    """The value as JSON, and the plain data that this JSON holds. An error names `returned`."""
    named = value if returned is _NO_VALUE else returned
    if isinstance(value, _BYTES):
        raise _untyped(value, tool)
    try:
        encoded = _encoder.encode(value)
        with uncollected(len(encoded)):
            return encoded, msgspec.json.decode(encoded)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{_returned(named, tool)}, which is not JSON: {error}") from error


def _untyped(value: Any, tool: Tool) -> TypeError:
    return TypeError(
        f"{_returned(value, tool)}; return an Image, Audio or EmbeddedResource, or decode them"
    )


def _plain(value: Any) -> Any:
    """A value that msgspec does not know, as plain data."""
    if isinstance(value, PurePath):
        return str(value)
    if is_model(value):
        return as_plain(value)
    return as_builtin(value)


_encoder: Final = msgspec.json.Encoder(enc_hook=_plain)


def _returned(value: Any, tool: Tool) -> str:
    return f"tool {tool.name} returned {type(value).__name__}"


class Tools:
    """The tools of a server, in the order in which they were added."""

    def __init__(self) -> None:
        # Threads of tools may change these while pages are made: each change makes new ones.
        self._tools: dict[str, Tool] = {}
        self._positions: dict[str, int] = {}  # by cursors: how many tools come before
        self._removed: dict[str, Tool] = {}  # those that need scopes: their calls go on
        self._changing = threading.Lock()
        self.scopes: tuple[str, ...] = ()  # those that any of the tools needs

    def __len__(self) -> int:
        return len(self._tools)

    def add(self, tool: Tool) -> None:
        """Add a tool. Raises `ValueError` where another has its name, or its entry is not JSON."""
        require_json(listing(tool), f"tool {tool.name}")
        with self._changing:
            if tool.name in self._tools:
                raise ValueError(f"there is a tool {tool.name} already; give this one another name")
            self._change({**self._tools, tool.name: tool})
            self._positions = {**self._positions, _cursor_after(tool): len(self._tools)}

    def remove(self, name: str) -> None:
        """Remove a tool. Raises `ValueError` for an unknown name."""
        with self._changing:
            if name not in self._tools:
                raise ValueError(f"there is no tool {name[:100]!r} to remove")
            tools = list(self._tools.values())
            index = tools.index(self._tools[name])
            removed = tools.pop(index)
            self._change({tool.name: tool for tool in tools})
            if removed.scopes:
                self._removed[name] = removed
            # A client may be between two pages. Its cursor then leads to the tools that follow.
            moved = {cursor: at - 1 if at > index else at for cursor, at in self._positions.items()}
            if len(moved) > len(tools) + OLD_CURSORS_MAX:
                moved = {_cursor_after(tool): at for at, tool in enumerate(tools, 1)}
            self._positions = moved

    def _change(self, tools: dict[str, Tool]) -> None:
        self._tools = tools
        self.scopes = tuple(dict.fromkeys(each for tool in tools.values() for each in tool.scopes))

    @property
    def may_need_scopes(self) -> bool:
        """Whether a call of any tool, or of one that was removed, needs scopes."""
        return bool(self.scopes or self._removed)

    def check_scopes(self, name: str, granted: Scopes) -> None:
        """Raise `InsufficientScope` unless a call of this tool may be resumed with these scopes."""
        tool = self._tools.get(name) or self._removed.get(name)
        if tool is not None:
            tool.check_scopes(granted)

    def get(self, name: str) -> Tool | None:
        """The tool of this name, or None."""
        return self._tools.get(name)

    def page(self, cursor: str | None, size: int) -> tuple[list[dict[str, Any]], str | None]:
        """Up to `size` listings from `cursor` on, and the next cursor; None is the first page.

        A cursor stays valid when tools are added. Raises `ValueError` for an unknown one.
        """
        if size < 1:
            raise ValueError(f"size: expected at least 1, got {size}")
        start = 0 if cursor is None else self._positions.get(cursor)
        if start is None:
            raise ValueError(
                "unknown cursor: send a nextCursor as received, or none for the first page"
            )
        found = list(itertools.islice(self._tools.values(), start, start + size))
        is_last = start + size >= len(self._tools)
        return [listing(tool) for tool in found], None if is_last else _cursor_after(found[-1])


def _cursor_after(tool: Tool) -> str:
    """The cursor behind a tool. It holds the tool's name, so that it is valid after a restart."""
    return base64.urlsafe_b64encode(tool.name.encode()).decode()
