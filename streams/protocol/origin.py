"""The original request of a call, for all that tell of calls: logs, metrics, traces, webhooks.

The words are a client's: they may be of any length and any type.
"""

from typing import Any, Final

import msgspec

from streams.exchange import TraceHeaders
from streams.protocol.extension import WEBHOOK

CALL: Final = "tools/call"
PROMPT: Final = "prompts/get"
METHOD_LETTERS_MAX: Final = 100

# The second: a request that was read once may be nested too deeply for a reader with more callers.
_UNREADABLE: Final = (ValueError, RecursionError)


class _Meta(msgspec.Struct):
    traceparent: Any = None
    tracestate: Any = None
    baggage: Any = None
    webhook: Any = msgspec.field(default=None, name=WEBHOOK)


class _Params(msgspec.Struct):
    name: Any = None
    uri: Any = None
    meta: _Meta | None = msgspec.field(default=None, name="_meta")


class _Method(msgspec.Struct):
    method: str = ""


class _Request(_Method):
    params: _Params | None = None


class Origin(msgspec.Struct, frozen=True):
    """The original request of a call."""

    method: str
    target: str = ""  # the name of a tool or prompt
    uri: str = ""  # of a resource
    trace: TraceHeaders | None = None  # `params._meta` has W3C's names without a prefix (SEP-414)
    webhook: str = ""  # the URL that the caller has given, not checked yet

    @property
    def tool(self) -> str:
        """The tool; for a request that names no tool, its method."""
        return (self.target if self.method == CALL else "") or self.method

    @classmethod
    def of(cls, line: bytes) -> "Origin":
        """Read the line of a request. Params that are not as MCP has them count as absent."""
        try:
            request = _decode(line)
        except _UNREADABLE:
            return cls(_method_in(line))
        params, method = request.params or _Params(), request.method[:METHOD_LETTERS_MAX]
        return cls(
            method,
            _text(params.name) if method in (CALL, PROMPT) else "",
            _text(params.uri),
            _trace(params.meta),
            "" if params.meta is None else _text(params.meta.webhook),
        )


class _Named(msgspec.Struct, gc=False):
    name: str = ""


class _Call(msgspec.Struct, gc=False):
    method: str
    params: _Named


_decode: Final = msgspec.json.Decoder(_Request).decode
_decode_method: Final = msgspec.json.Decoder(_Method).decode
_decode_call: Final = msgspec.json.Decoder(_Call).decode


def tool_in(line: bytes) -> str:
    """`Origin.of(line).tool`, at a third of the cost for a call that is as MCP has it."""
    try:
        call = _decode_call(line)
    except _UNREADABLE:
        return Origin.of(line).tool
    name = call.params.name if call.method == CALL else ""
    return name or call.method[:METHOD_LETTERS_MAX]


def _method_in(line: bytes) -> str:
    try:
        return _decode_method(line).method[:METHOD_LETTERS_MAX]
    except _UNREADABLE:
        return ""


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _trace(meta: _Meta | None) -> TraceHeaders | None:
    if meta is None or not isinstance(meta.traceparent, str):
        return None
    return TraceHeaders(meta.traceparent, _text(meta.tracestate), _text(meta.baggage))
