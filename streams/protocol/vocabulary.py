"""The common vocabulary of the proposals: the intents of a client, the reports of a server.

A dialect (`streams.protocol.dialects`) is one proposal's way to write these, word by word. All
other code, of the server and of the client, knows intents, reports and streams only.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from streams import messages
from streams.errors import INVALID_PARAMS, Refusal
from streams.messages import RequestId

# Intents of a client


class Resume(msgspec.Struct, frozen=True):
    """Deliver a stream: what follows `after`, or what is not known to be delivered."""

    stream: str | None  # None where the token alone tells the stream
    token: str | None
    after: int | None


class Poll(msgspec.Struct, frozen=True):
    """Report the status of a stream."""

    stream: str | None
    token: str | None
    after: int | None
    request_id: RequestId | None = None  # if given, it must be the original request's


class PollAll(msgspec.Struct, frozen=True):
    """Report the status of all streams of the principal, one page at a time."""

    cursor: str | None


class Ack(msgspec.Struct, frozen=True):
    """The client has this stream up to `seq`."""

    stream: str
    seq: int


# Reports of a server


class Announcement(msgspec.Struct, frozen=True):
    """All that a client needs to resume a stream; `stream` is "" where the token is enough.

    Other servers may send no token, and not name the original request.
    """

    stream: str
    token: str
    request_id: RequestId | None
    min_s: float
    max_s: float | None


class Report(msgspec.Struct, frozen=True):
    """The status of a stream, in the words of no dialect."""

    stream: str
    request_id: RequestId
    is_live: bool
    has_failed: bool
    has_pending: bool
    has_request: bool
    has_error: bool


class Standing(msgspec.Struct, frozen=True, rename="camel"):
    """The status of a stream, as the StreamStatus of Streams: all of it is required."""

    stream_id: str
    status: str
    pending_messages: bool
    has_request: bool
    has_error: bool


# The words of a dialect. Each has functions with which one side writes it and the other reads it:
# `ask` and `hear` are the client's, `read` and `tell` the server's. `read` raises `Refusal`, `hear`
# raises `ValueError`.


class Announcing(msgspec.Struct, frozen=True):
    """The notification that tells a client how to resume."""

    method: str
    tell: Callable[[Announcement], Any]
    hear: Callable[[msgspec.Raw], Announcement]
    names_stream: bool = True  # without the stream's id, positions are of no use


class Resuming(msgspec.Struct, frozen=True):
    """The request for a delivery.

    A request that `takes_over` replaces the original request: the stream's response is the
    answer to it. Any other request has a reply of its own, which comes last.
    """

    method: str
    ask: Callable[[str, str, int | None], Any]  # streamId, token, cursor
    read: Callable[[msgspec.Raw], Resume]
    takes_over: bool = False


class Polling(msgspec.Struct, frozen=True):
    """The request for the status of a stream."""

    method: str
    ask: Callable[[str, str, RequestId, int | None], Any]  # streamId, token, its request, cursor
    read: Callable[[msgspec.Raw], Poll]
    tell: Callable[[Report], Any]
    hear: Callable[[msgspec.Raw], Standing]


class Listing(msgspec.Struct, frozen=True):
    """The request for the status of all streams."""

    method: str
    read: Callable[[msgspec.Raw], PollAll]
    tell: Callable[[list[Report], str | None], Any]


class Ending(msgspec.Struct, frozen=True):
    """The notification that a stream is over."""

    method: str
    tell: Callable[[str], Any]
    hear: Callable[[msgspec.Raw], str] = lambda _: ""  # the stream, "" where it is not named


class Lead(msgspec.Struct, frozen=True):
    """The page token for the next page, and whether it came in the result's `_meta` alone."""

    token: str
    is_in_meta: bool = False


class Paging(msgspec.Struct, frozen=True):
    """Page tokens: in a result for the next page, in a call for the page that it asks for.

    Both may have the token among their own fields and in their `_meta`.
    """

    ask: Callable[[str], dict[str, Any]]  # fields of the params of a call
    ask_in_meta: Callable[[str], dict[str, Any]]  # fields of their `_meta` instead
    read: Callable[[msgspec.Raw], str | None]  # the params of a call
    argument: str  # the token's name among a call's arguments; part of all its other names
    tell: Callable[
        [str, float], tuple[dict[str, Any], dict[str, Any]]
    ]  # token, its seconds to live
    hear: Callable[[Any], Lead | None]  # a result


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """One proposal, with those of the words that it has."""

    capability: str | None = None  # None where a client need not declare the dialect
    announcing: Announcing | None = None
    resuming: Resuming | None = None
    polling: Polling | None = None
    listing: Listing | None = None
    ending: Ending | None = None
    paging: Paging | None = None

    def announce(self, made: Announcement) -> bytes:
        """The line that tells a client how to resume; b"" in a dialect without that word."""
        word = self.announcing
        return b"" if word is None else messages.notification(word.method, word.tell(made))

    def end(self, stream: str) -> bytes:
        """The line that says that a stream is over; b"" in a dialect without that word."""
        word = self.ending
        return b"" if word is None else messages.notification(word.method, word.tell(stream))


_T = TypeVar("_T")


def read_params(params: msgspec.Raw, shape: type[_T]) -> _T:
    """Decode the params of a client's request. Raises `Refusal` where they do not fit."""
    try:
        return messages.decode(params, shape)
    except ValueError as error:
        raise Refusal(INVALID_PARAMS, f"Bad params: {error}; see the method's schema.") from None
