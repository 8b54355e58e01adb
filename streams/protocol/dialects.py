"""The proposals as tables: no other module knows their methods and fields.

A dialect defines how a client opts in, the methods of its requests, how a stream is announced and
ended, and how a page leads to the next. The wire's camelCase stops here.
"""

from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec

from streams import messages
from streams.errors import INVALID_PARAMS, Refusal
from streams.messages import RequestId
from streams.protocol.vocabulary import (
    Announcement,
    Announcing,
    Dialect,
    Ending,
    Lead,
    Listing,
    Paging,
    Poll,
    PollAll,
    Polling,
    Report,
    Resume,
    Resuming,
    Standing,
    read_params,
)


def _number(seconds: float) -> float:
    """Seconds as the proposals print them: 5, not 5.0."""
    return int(seconds) if float(seconds).is_integer() else seconds


def _present(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


class _Cursor(msgspec.Struct):
    after: int | None = None

    def __post_init__(self) -> None:
        if self.after is not None and self.after < 0:
            raise ValueError("after must be 0 or more - at `$.after`")


# Streams, pull request 899


class _Named(_Cursor, rename="camel", kw_only=True):
    stream_id: str
    resume_token: str | None = None


class _Page(msgspec.Struct):
    cursor: str | None = None


# A client accepts an announcement that lacks some fields: the example in the proposal has neither
# request nor token. An absent field may also be written as null.


class _Interval(msgspec.Struct, frozen=True):
    min: float | None = None
    max: float | None = None


class _Create(msgspec.Struct, frozen=True, rename="camel"):
    stream_id: Annotated[str, msgspec.Meta(min_length=1)]
    request_id: RequestId | None = None
    resume_interval: _Interval | None = None
    resume_token: str | None = None


class _Ended(msgspec.Struct, frozen=True, rename="camel"):
    stream_id: str


class _Nested(msgspec.Struct, frozen=True):
    stream: _Create | None = None


def _tell_create(made: Announcement) -> Any:
    assert made.max_s is not None
    stream = {
        "streamId": made.stream,
        "requestId": made.request_id,
        "resumeInterval": {"min": _number(made.min_s), "max": _number(made.max_s)},
        "resumeToken": made.token,
    }
    return {"stream": stream}


def _hear_create(params: msgspec.Raw) -> Announcement:
    # Nested, as in the proposal's example, or flat, as in its schema.
    made = messages.decode(params, _Nested).stream or messages.decode(params, _Create)
    interval = made.resume_interval or _Interval()
    return Announcement(
        made.stream_id,
        made.resume_token or "",
        made.request_id,
        interval.min or 0.0,
        interval.max,
    )


def _ask_named(stream: str, token: str, after: int | None) -> Any:
    return _present(streamId=stream, resumeToken=token or None, after=after)


def _read_resume(params: msgspec.Raw) -> Resume:
    named = read_params(params, _Named)
    return Resume(named.stream_id, named.resume_token, named.after)


def _read_poll(params: msgspec.Raw) -> Poll:
    named = read_params(params, _Named)
    return Poll(named.stream_id, named.resume_token, named.after)


def _standing(report: Report) -> Standing:
    return Standing(
        stream_id=report.stream,
        status="live" if report.is_live else "completed",
        pending_messages=report.has_pending,
        has_request=report.has_request,
        has_error=report.has_error,
    )


STREAMS: Final = Dialect(
    capability="streams",
    announcing=Announcing("notifications/stream/create", _tell_create, _hear_create),
    resuming=Resuming("stream/resume", _ask_named, _read_resume),
    polling=Polling(
        "stream/poll",
        lambda stream, token, _, after: _ask_named(stream, token, after),
        _read_poll,
        tell=_standing,
        hear=lambda result: messages.decode(result, Standing),
    ),
    listing=Listing(
        "stream/poll/all",
        lambda params: PollAll(read_params(params, _Page).cursor),
        lambda reports, cursor: _present(statuses=list(map(_standing, reports)), nextCursor=cursor),
    ),
    ending=Ending(
        "notifications/stream/end",
        lambda stream: {"streamId": stream},
        lambda params: messages.decode(params, _Ended).stream_id,
    ),
)


# Resumable requests, pull request 925


class _Tokened(_Cursor, rename="camel", kw_only=True):
    resume_token: str


class _Asked(_Tokened, rename="camel", kw_only=True):
    request_id: RequestId


class _Policy(msgspec.Struct, frozen=True, rename="camel"):
    resume_token: Annotated[str, msgspec.Meta(min_length=1)]
    request_id: RequestId | None = None
    min_wait: float | None = None
    max_wait: float | None = None


class _Status(msgspec.Struct, frozen=True, rename="camel"):
    status: str
    has_pending_message: bool = False
    has_input_request: bool = False


def _tell_policy(made: Announcement) -> Any:
    assert made.max_s is not None
    return {
        "requestId": made.request_id,
        "resumeToken": made.token,
        "minWait": _number(made.min_s),
        "maxWait": _number(made.max_s),
    }


def _hear_policy(params: msgspec.Raw) -> Announcement:
    made = messages.decode(params, _Policy)
    return Announcement("", made.resume_token, made.request_id, made.min_wait or 0.0, made.max_wait)


def _read_tokened(params: msgspec.Raw) -> Resume:
    named = read_params(params, _Tokened)
    return Resume(None, named.resume_token, named.after)


def _read_asked(params: msgspec.Raw) -> Poll:
    asked = read_params(params, _Asked)
    return Poll(None, asked.resume_token, asked.after, asked.request_id)


def _tell_status(report: Report) -> Any:
    ended = "failed" if report.has_failed else "completed"
    return {
        "requestId": report.request_id,
        "status": "processing" if report.is_live else ended,
        "hasPendingMessage": report.has_pending,
        "hasInputRequest": report.has_request,
    }


def _hear_status(result: msgspec.Raw) -> Standing:
    told = messages.decode(result, _Status)
    return Standing(
        stream_id="",
        status="live" if told.status == "processing" else "completed",
        pending_messages=told.has_pending_message,
        has_request=told.has_input_request,
        has_error=told.status == "failed",
    )


RESUMABLE_REQUESTS: Final = Dialect(
    capability="resumableRequests",
    announcing=Announcing(
        "notifications/requests/resumePolicy", _tell_policy, _hear_policy, names_stream=False
    ),
    resuming=Resuming(
        "requests/resume",
        lambda _, token, after: _present(resumeToken=token, after=after),
        _read_tokened,
        takes_over=True,
    ),
    polling=Polling(
        "requests/getStatus",
        lambda _, token, asked, after: _present(requestId=asked, resumeToken=token, after=after),
        _read_asked,
        tell=_tell_status,
        hear=_hear_status,
    ),
)


# Resume tokens, pull request 1003 (page tokens here). One official SDK drops unknown fields from
# params and from results, but nothing from `_meta`. So the server puts a token into both, and reads
# it from either. The client "MUST only mutate the resumeToken field of a resumed request", so it
# changes `_meta` only for a token that came there alone.

_TOKEN: Final = "mcp-streams/resumeToken"
_NEXT: Final = "mcp-streams/nextResumeToken"
_TTL: Final = "mcp-streams/resumeTtl"


class _TokenMeta(msgspec.Struct):
    token: str | None = msgspec.field(name=_TOKEN, default=None)


class _PageCall(msgspec.Struct, rename="camel"):
    resume_token: str | None = None
    meta: _TokenMeta | None = msgspec.field(name="_meta", default=None)


def _read_page(params: msgspec.Raw) -> str | None:
    call = read_params(params, _PageCall)
    if call.resume_token is not None or call.meta is None:
        return call.resume_token
    return call.meta.token


class _Led(msgspec.Struct, rename="camel"):
    next_resume_token: str | None = None
    meta: dict[str, Any] = msgspec.field(name="_meta", default={})


def _hear_page(result: Any) -> Lead | None:
    led = msgspec.convert(result, _Led)
    if led.next_resume_token:
        return Lead(led.next_resume_token)
    token = led.meta.get(_NEXT)
    return Lead(msgspec.convert(token, str), is_in_meta=True) if token else None


RESUME_TOKENS: Final = Dialect(
    paging=Paging(
        ask=lambda token: {"resumeToken": token},
        ask_in_meta=lambda token: {_TOKEN: token},
        read=_read_page,
        argument="resumeToken",
        tell=lambda token, ttl_s: (
            {"nextResumeToken": token},
            {_NEXT: token, _TTL: _number(ttl_s)},
        ),
        hear=_hear_page,
    ),
)

# In the order of preference: the client takes the first one that the server knows as well.
DIALECTS: Final[dict[str, Dialect]] = {
    "streams": STREAMS,
    "resumableRequests": RESUMABLE_REQUESTS,
    "resumeTokens": RESUME_TOKENS,
}


def resumings() -> dict[str, Resuming]:
    """The requests for a delivery in all dialects, by their methods."""
    words = [dialect.resuming for dialect in DIALECTS.values()]
    return {word.method: word for word in words if word is not None}


def questions() -> dict[str, Polling | Listing]:
    """The requests for the status of streams in all dialects, by their methods."""
    words = [word for each in DIALECTS.values() for word in (each.polling, each.listing)]
    return {word.method: word for word in words if word is not None}


def method_names() -> set[str]:
    """The names of all requests and notifications of the dialects."""
    words = [
        word
        for each in DIALECTS.values()
        for word in (each.announcing, each.resuming, each.polling, each.listing, each.ending)
    ]
    return {word.method for word in words if word is not None}


def speakers_of(method: str) -> tuple[Dialect, ...]:
    """The dialects that resume by this method: a client that uses it need not declare them."""
    return tuple(d for d in DIALECTS.values() if d.resuming and d.resuming.method == method)


def pagings() -> list[Paging]:
    """The page tokens of all dialects."""
    return [dialect.paging for dialect in DIALECTS.values() if dialect.paging is not None]


def page_token_names() -> tuple[bytes, ...]:
    """The names of page tokens in calls: one of them is part of any other name that is used."""
    return tuple(word.argument.encode() for word in pagings())


def may_have_page_token(line: bytes, names: tuple[bytes, ...]) -> bool:
    """Whether a call may have a page token with one of the `page_token_names`.

    Most calls have none. A search for the names finds that out faster than decoding, unless there
    is a backslash, which may hide a letter of a name.
    """
    return b"\\" in line or any(map(line.__contains__, names))


def page_token(params: msgspec.Raw) -> str | None:
    """The page token in a call; None for a new call. Raises `Refusal`."""
    tokens = (word.read(params) for word in pagings())
    return next((token for token in tokens if token is not None), None)


def split_arguments(
    arguments: msgspec.Raw, takes: Callable[[str], bool]
) -> tuple[str | None, msgspec.Raw]:
    """The page token among the arguments of a call, and the arguments without it.

    A name that the tool `takes` is a parameter of the tool and stays. Raises `Refusal` for a token
    that is not a string.
    """
    token: str | None = None
    for name in (word.argument for word in pagings()):
        if name.encode() not in bytes(arguments) or takes(name):
            continue
        try:
            given = messages.decode(arguments, dict[str, msgspec.Raw])
        except ValueError:
            break  # not an object: the call will be refused
        if name in given:
            found = _token_in(given.pop(name))
            token = token if found is None else found
            arguments = msgspec.Raw(messages.encode(given))
    return token, arguments


def _token_in(value: msgspec.Raw) -> str | None:
    """A page token among arguments. A client may send null for the first page."""
    try:
        return messages.decode(value, str | None)  # type: ignore[arg-type]
    except ValueError:
        why = "Bad params: a token among the arguments must be a string."
        raise Refusal(INVALID_PARAMS, why) from None


def leading_on(result: msgspec.Raw, token: str, ttl_s: float) -> dict[str, Any]:
    """A result with the page token for the next page, which is valid for `ttl_s` seconds."""
    fields = messages.decode(result, dict[str, msgspec.Raw])
    meta = messages.decode(fields.get("_meta", msgspec.Raw(b"{}")), dict[str, Any])
    led: dict[str, Any] = dict(fields)
    for word in pagings():
        in_result, in_meta = word.tell(token, ttl_s)
        led |= in_result
        meta |= in_meta
    return led | {"_meta": meta}
