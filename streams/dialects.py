"""The proposals, as tables over one vocabulary.

A dialect says how a client opts in, under which methods it asks for what (its *intents*), and how a
stream is announced and ended. The rest of the house knows intents and streams only. The wire's
camelCase stops here.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from streams import messages
from streams.errors import INVALID_PARAMS, Refusal
from streams.messages import RequestId, Run

EXTENSION: Final = "mcp-streams/v1"
POSITION: Final = "notifications/stream/position"
ACK: Final = "notifications/stream/ack"
CREATE: Final = "notifications/stream/create"
END: Final = "notifications/stream/end"
RESUME: Final = "stream/resume"
POLL: Final = "stream/poll"
POLL_ALL: Final = "stream/poll/all"


# What a client may want


class Resume(msgspec.Struct, frozen=True):
    """Send me this stream, from `after` on, or from what I am not known to have."""

    stream: str
    token: str | None
    after: int | None


class Poll(msgspec.Struct, frozen=True):
    """Tell me how this stream stands."""

    stream: str
    token: str | None
    after: int | None


class PollAll(msgspec.Struct, frozen=True):
    """Tell me how my streams stand, a page at a time."""

    cursor: str | None


class Ack(msgspec.Struct, frozen=True):
    """I have this stream up to `seq`."""

    stream: str
    seq: int


class Announcement(msgspec.Struct, frozen=True):
    """What a client needs to come back to a stream."""

    stream: str
    token: str
    request_id: RequestId
    min_s: float
    max_s: float


class Standing(msgspec.Struct, frozen=True, rename="camel"):
    """How a stream stands: the proposal's StreamStatus, all of it required."""

    stream_id: str
    status: str
    pending_messages: bool
    has_request: bool
    has_error: bool


class Dialect(msgspec.Struct, frozen=True):
    """One proposal: how its words are read and written."""

    capability: str
    resumes: Mapping[str, Callable[[msgspec.Raw], Resume]]
    questions: Mapping[str, Callable[[msgspec.Raw], Poll | PollAll]]
    announce: Callable[[Announcement], bytes]
    end: Callable[[str], bytes]


# Streams, pull request 899


class _Named(msgspec.Struct, rename="camel"):
    stream_id: str
    resume_token: str | None = None
    after: int | None = None

    def __post_init__(self) -> None:
        if self.after is not None and self.after < 0:
            raise ValueError("after must be 0 or more - at `$.after`")


class _Page(msgspec.Struct):
    cursor: str | None = None


class _Acked(msgspec.Struct, rename="camel"):
    stream_id: str
    seq: int


def _read(params: msgspec.Raw, shape: type[Any]) -> Any:
    try:
        return messages.decode(params, shape)
    except ValueError as error:
        raise Refusal(INVALID_PARAMS, f"Bad params: {error}; see the method's schema.") from None


def _resume(params: msgspec.Raw) -> Resume:
    named = _read(params, _Named)
    return Resume(named.stream_id, named.resume_token, named.after)


def _poll(params: msgspec.Raw) -> Poll:
    named = _read(params, _Named)
    return Poll(named.stream_id, named.resume_token, named.after)


def _poll_all(params: msgspec.Raw) -> PollAll:
    return PollAll(_read(params, _Page).cursor)


def _announce(made: Announcement) -> bytes:
    stream = {
        "streamId": made.stream,
        "requestId": made.request_id,
        "resumeInterval": {"min": _number(made.min_s), "max": _number(made.max_s)},
        "resumeToken": made.token,
    }
    return messages.notification(CREATE, {"stream": stream})


def _number(seconds: float) -> float:
    """Whole seconds as the page prints them: 5, not 5.0."""
    return int(seconds) if float(seconds).is_integer() else seconds


def _end(stream: str) -> bytes:
    return messages.notification(END, {"streamId": stream})


STREAMS: Final = Dialect(
    capability="streams",
    resumes={RESUME: _resume},
    questions={POLL: _poll, POLL_ALL: _poll_all},
    announce=_announce,
    end=_end,
)

DIALECTS: Final[dict[str, Dialect]] = {"streams": STREAMS}

RESUMES: Final[dict[str, Callable[[msgspec.Raw], Resume]]] = {
    method: read for dialect in DIALECTS.values() for method, read in dialect.resumes.items()
}
QUESTIONS: Final[dict[str, Callable[[msgspec.Raw], Poll | PollAll]]] = {
    method: read for dialect in DIALECTS.values() for method, read in dialect.questions.items()
}


def speakers_of(method: str) -> tuple[Dialect, ...]:
    """The dialects that resume by this method: who uses it speaks them, declared or not."""
    return tuple(dialect for dialect in DIALECTS.values() if method in dialect.resumes)


def resumed(request_id: RequestId, ended: str, response: bytes | None = None) -> bytes:
    """The reply to a resume, which says why this delivery is over.

    `response` is the stream's final response, where that is not sent on its own.
    """
    meta: dict[str, Any] = {"mcp-streams/ended": ended}
    if response is not None:
        meta["mcp-streams/response"] = msgspec.Raw(response.rstrip(b"\n"))
    return messages.result(request_id, {"_meta": meta})


# Our own extension


class Settings(msgspec.Struct, frozen=True):
    """What a client opted in to. A plain MCP client opted in to nothing."""

    dialects: tuple[Dialect, ...] = ()
    positions: bool = False
    replay_response: bool = False


class _Extension(msgspec.Struct, rename="camel"):
    dialects: tuple[str, ...] = ("streams",)
    positions: bool = False
    replay_response: bool = False


def settings_of(capabilities: Mapping[str, Any]) -> Settings:
    """What these client `capabilities` opt in to. Raises `Refusal` where they do not fit."""
    names = [name for name, dialect in DIALECTS.items() if dialect.capability in capabilities]
    positions = replay_response = False
    for place in ("experimental", "extensions"):
        extensions = capabilities.get(place)
        if isinstance(extensions, dict) and EXTENSION in extensions:
            try:
                chosen = msgspec.convert(extensions[EXTENSION], _Extension)
            except msgspec.ValidationError as error:
                where = f"capabilities.{place}[{EXTENSION!r}]"
                raise Refusal(INVALID_PARAMS, f"Bad settings in {where}: {error}.") from None
            names += chosen.dialects
            positions |= chosen.positions
            replay_response |= chosen.replay_response
    # A dialect that this server does not speak is not an error: the client sees what is announced.
    known = tuple(dialect for name, dialect in DIALECTS.items() if name in names)
    return Settings(known, positions, replay_response)


def advertisement() -> dict[str, Any]:
    """What the server says of itself, under `extensions` and `experimental`."""
    return {EXTENSION: {"dialects": list(DIALECTS), "positions": True}}


def position(stream: str, run: Run) -> bytes:
    """The header that goes ahead of a run."""
    return messages.notification(POSITION, {"streamId": stream, "seq": run.seq, "count": run.count})


def ack(params: msgspec.Raw) -> Ack:
    """What a client confirms."""
    acked = _read(params, _Acked)
    return Ack(acked.stream_id, acked.seq)
