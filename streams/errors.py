"""Every error this project raises, in one tree.

    StreamsError
    ├── Refusal              a request that is refused: becomes a JSON-RPC error
    │   ├── InsufficientScope  the caller's token lacks a scope
    │   ├── ResourceNotFound   there is no resource of this URI
    │   └── Overtaken        the same client has asked again since: this request ends unanswered
    ├── JournalError         an error of the journal
    │   ├── Gone             no such stream (unknown, abandoned or cancelled)
    │   ├── Fenced           another process has claimed the stream since
    │   ├── Ended            an append after the final response: a bug in this project
    │   ├── Conflict         an append that leaves a gap: a bug in this project
    │   ├── Unavailable      busy: written wholly or not at all; retry the same call
    │   │   ├── StoreAway    the store that replicas share is away: retry the same call soon
    │   │   │   └── StoreDown  it is away for all replicas
    │   │   │       └── StoreUnsafe  it answers, and may delete messages
    │   │   └── Full         the disk is full; retry the same call when there is room
    │   └── JournalUnusable  corrupt, foreign, newer, read-only, owned or failing: fatal
    │       └── Missing      the journal lacks lines that it should have
    ├── UnsafeFile           a file or folder that another user owns, may read or may change
    ├── ToolError            a failure that a tool reports to its client, in the tool's own words
    ├── InvalidAnswer        the client's answer to a question of a tool does not fit
    ├── LifespanFailed       the author's `Server(lifespan=…)` has failed
    ├── ServerRefused        the server's answer will be the same the next time: do not retry
    └── ClientError          an error that a user of `Client` may have to handle
        ├── CannotConnect    no connection within the time allowed
        ├── CallFailed       the peer answered a request with a JSON-RPC error
        │   └── MissingCapability  a tool's question needs what the client does not offer
        ├── ToolFailed       the tool failed, and a value was asked for
        ├── CallLost         the connection broke before the server announced a stream; to call
        │                    again could run the tool twice
        ├── StreamGone       the stream, or a part of it, can no longer be resumed
        └── Superseded       another connection has resumed the stream; this one must not

Any other exception is a bug of this project or of a tool.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603
RESOURCE_NOT_FOUND: Final = -32002


class StreamsError(Exception):
    """The root of the tree."""


class Refusal(StreamsError):
    """A JSON-RPC error in answer to a request.

    `message` is one sentence with what to do next; `data` is the error's `data` member.
    """

    def __init__(self, code: int, message: str, data: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data

    @property
    def reason(self) -> str:
        """Its reason in the table of errors; its code, if it has none of these."""
        # A backend passes errors of its server on, whose `data` may be anything.
        reason = self.data.get("reason") if isinstance(self.data, dict) else None
        return reason if isinstance(reason, str) and reason in _REASONS else str(self.code)

    def saying(self, message: str) -> "Refusal":
        """The same refusal with another message, where the usual one does not say what to do."""
        return Refusal(self.code, message, self.data)


_REASONS: Final[dict[str, tuple[int, str]]] = {
    "stream_not_found": (
        INVALID_PARAMS,
        "No such stream for you: check streamId, and send the resumeToken that came with it.",
    ),
    "abandoned": (
        INVALID_PARAMS,
        "This stream was not resumed in time and was deleted: make the call again.",
    ),
    "cancelled": (INVALID_PARAMS, "The call was cancelled: make it again if you still want it."),
    "messages_gone": (
        INVALID_PARAMS,
        "Messages after this cursor are deleted: resume from earliestSeq - 1, or without a cursor.",
    ),
    "cursor_ahead": (
        INVALID_PARAMS,
        "The cursor is beyond the last message: resume from lastSeq or below.",
    ),
    "superseded": (
        INVALID_PARAMS,
        "A newer connection has resumed this stream: do not resume it from here.",
    ),
    "released": (INVALID_PARAMS, "The server let go of this stream: resume it again."),
    "id_in_use": (
        INVALID_PARAMS,
        "The stream's final response will come under an id that is in use on this connection: "
        "wait for that request, or resume over another connection.",
    ),
    "too_early": (INVALID_PARAMS, "Too early: wait for retryAfter seconds, then resume."),
    "invalid_token": (
        INVALID_PARAMS,
        "This resumeToken does not lead to a page of this call: make the call again without it.",
    ),
    "too_many_streams": (
        INVALID_PARAMS,
        "Too many streams are running or undelivered: resume or cancel some, then try again.",
    ),
    "too_large": (INVALID_PARAMS, "The message is longer than the limit: send a shorter one."),
    "too_slow": (
        INVALID_PARAMS,
        "The client read too slowly and the stream is full: make the call again and read faster.",
    ),
    "webhook_refused": (
        INVALID_PARAMS,
        "This server sends you no webhooks there: leave out _meta['mcp-streams/webhook'].",
    ),
    "unsupported_revision": (
        INVALID_PARAMS,
        "Unsupported protocol version: initialize with one of those that are supported.",
    ),
    "unauthorized": (
        INVALID_REQUEST,
        "This server needs authentication: send a bearer token that it accepts, in Authorization.",
    ),
    "insufficient_scope": (
        INVALID_REQUEST,
        "The tool needs scopes that your bearer token lacks: send one that has them.",
    ),
    "too_many_connections": (
        INVALID_REQUEST,
        "Too many connections of yours are open: close some, then try again.",
    ),
    "too_many_requests": (
        INVALID_REQUEST,
        "Too many requests of yours in too short a time: try again in retryAfter seconds.",
    ),
    "too_many_bytes": (
        INVALID_PARAMS,
        "Too many bytes of your calls are undelivered: resume or cancel some, then try again.",
    ),
    "journal_full": (
        INTERNAL_ERROR,
        "The journal has no room for new calls: resume or cancel some, or try again later.",
    ),
    "unavailable": (INTERNAL_ERROR, "The journal cannot be read now: try again later."),
    "draining": (
        INTERNAL_ERROR,
        "This server takes no new calls, because it is about to end: try again soon.",
    ),
    "too_many_children": (
        INTERNAL_ERROR,
        "All children are at work: end other sessions, or try again later.",
    ),
    "start_failed": (
        INTERNAL_ERROR,
        "The wrapped server did not start: see the log, and try its command by hand.",
    ),
    "backend_down": (
        INTERNAL_ERROR,
        "The wrapped server ended and is not started again: see the log, and open a new session.",
    ),
    "unreadable": (
        INTERNAL_ERROR,
        "The answer of the server behind this one cannot be read: see that server's log.",
    ),
    "interrupted": (
        INTERNAL_ERROR,
        "The server stopped before the call was done: make it again if that is safe.",
    ),
}


def refusal(reason: str, **details: Any) -> Refusal:
    """The refusal for a `data.reason` of the wire's error table, with its other fields."""
    code, message = _REASONS[reason]
    return Refusal(code, message, {"reason": reason, **details})


def code_of(reason: str) -> int:
    """The code of a reason, or of one that is told by its code."""
    return _REASONS[reason][0] if reason in _REASONS else int(reason)


class InsufficientScope(Refusal):
    """The caller lacks scopes that a tool needs; over HTTP a 403 with a challenge."""

    def __init__(self, tool: str, needed: Sequence[str], missing: Sequence[str]) -> None:
        usual = refusal("insufficient_scope", scope=" ".join(needed), missing=list(missing))
        what, them = ("scope", "it") if len(missing) == 1 else ("scopes", "them")
        super().__init__(
            usual.code,
            f"Tool {tool} needs the {what} {' and '.join(missing)}, not granted to you: send a "
            f"bearer token that has {them}.",
            usual.data,
        )
        self.needed = needed


class ResourceNotFound(Refusal):
    """There is no resource of this URI. The reader of a template raises it, too."""

    def __init__(self, message: str = "", *, uri: str | None = None) -> None:
        usual = f"Resource not found: {(uri or '')[:200]!r}: see resources/list."
        super().__init__(
            RESOURCE_NOT_FOUND, message or usual, None if uri is None else {"uri": uri}
        )


# Modules of Python that Windows lacks.
_POSIX_ONLY: Final = frozenset({"fcntl", "grp", "pwd", "resource", "termios"})


class Overtaken(Refusal):
    """The client has asked again under the same id, or continues the same response, since then.

    It would take an error for the answer to what it waits for. So it gets none to this request.
    """


def explained(error: ImportError, what: str) -> ImportError:
    """The error for `what`, which cannot be imported: it says if that is for want of POSIX."""
    if error.name not in _POSIX_ONLY:
        return error
    return ImportError(
        f"{what} needs POSIX (Linux or macOS): without it, only a client works, over ws:// and http://",
        name=error.name,
    )


def first_of(error: BaseException) -> BaseException:
    """The first of the errors that groups hold, however deep; any other error is its own."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class JournalError(StreamsError):
    """An error of the journal; see the tree above."""


class Gone(JournalError):
    """No such stream: unknown, abandoned or cancelled."""


class Fenced(JournalError):
    """Another process has claimed the stream since."""


class Ended(JournalError):
    """An append after the final response."""


class Conflict(JournalError):
    """An append whose seq does not follow the last."""


class Unavailable(JournalError):
    """The outcome is unknown: retry the same call, which is idempotent."""


class StoreAway(Unavailable):
    """A store that replicas share is away, or a call changes its replica: try again soon."""


class StoreDown(StoreAway):
    """A store that says itself that it is not ready, or whose port refuses connections.

    So it is most likely away for the other replicas, too.
    """


class StoreUnsafe(StoreDown):
    """A store that answers, and may delete messages as it is set now."""


class Full(Unavailable):
    """No room on the disk: nothing was written."""


class JournalUnusable(JournalError):
    """The journal cannot be used; the message says why and what to do."""


class Missing(JournalUnusable):
    """The journal lacks lines `first` to `last` of a stream."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__(
            f"lines {first} to {last} of a stream are missing: see mcp-streams verify, and restore "
            "a backup"
        )
        self.first, self.last = first, last


class UnsafeFile(StreamsError, OSError):
    """A file or folder that another user owns, may change, or may read though it is secret.

    Like the messages of other `OSError`s, the message is a sentence without a full stop. It has the
    path, what is wrong with it, and the command that repairs it.
    """


class ToolError(StreamsError):
    """A failure that a tool reports: the text is the `isError` result of its call, as it stands."""


class InvalidAnswer(StreamsError, ValueError):
    """The client's answer to a question of a tool does not fit what was asked for."""


class LifespanFailed(StreamsError):
    """The lifespan of a server has failed; `__cause__` is the author's exception."""


class ServerRefused(StreamsError, ConnectionRefusedError):
    """The server has answered with an error that will be the same the next time.

    It speaks another protocol, for instance, or serves nothing at this path. `data` is that of the
    error, if the server gave any.
    """

    def __init__(self, why: str, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(why)
        self.data = data or {}


class ClientError(StreamsError):
    """An error that a user of `Client` may have to handle."""


class CannotConnect(ClientError):
    """No connection to the server within the time allowed."""


class CallFailed(ClientError):
    """The peer answered with a JSON-RPC error: `code`, `message` and `data` as it sent them."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(f"{message} (code {code})")
        self.code = code
        self.message = message
        self.data = data


class MissingCapability(CallFailed):
    """The client has not declared a capability that a question needs, so it was not asked."""

    def __init__(self, method: str, capability: str) -> None:
        super().__init__(
            METHOD_NOT_FOUND,
            f"The client cannot answer {method}: it has not declared the capability {capability}",
            {"capability": capability},
        )


class ToolFailed(ClientError):
    """The tool failed (`isError`) and its value was asked for; `result` is a `CallToolResult`."""

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class CallLost(ClientError):
    """The connection was lost before a stream was announced. The call may or may not have run; the
    server that answers now does not know.
    """


class StreamGone(ClientError):
    """The stream cannot be resumed; `reason` is the wire's (`abandoned`, `messages_gone`, …).

    `earliest` is the seq of the first message that is left, if the server has told that: a ticket
    with `after=earliest - 1` goes on with it.
    """

    def __init__(self, message: str, reason: str, earliest: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.earliest = earliest


class Superseded(ClientError):
    """Another connection has resumed the stream."""
