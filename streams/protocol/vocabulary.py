"""What the proposals have in common: what a client may want, what a server has to say.

A dialect (`streams.protocol.dialects`) is a proposal's way to say these things, word by word. The
rest of the house knows intents, reports and streams only, whichever side it is on.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from streams import messages
from streams.errors import INVALID_PARAMS, Refusal
from streams.messages import RequestId

# What a client may want


class Resume(msgspec.Struct, frozen=True):
    """Send me a stream, from `after` on, or from what I am not known to have."""

    stream: str | None  # None where the token alone says which
    token: str | None
    after: int | None


class Poll(msgspec.Struct, frozen=True):
    """Tell me how a stream stands."""

    stream: str | None
    token: str | None
    after: int | None
    request_id: RequestId | None = None  # which must be the originating request's, where it is told


class PollAll(msgspec.Struct, frozen=True):
    """Tell me how my streams stand, a page at a time."""

    cursor: str | None


class Ack(msgspec.Struct, frozen=True):
    """I have this stream up to `seq`."""

    stream: str
    seq: int


# What a server has to say


class Announcement(msgspec.Struct, frozen=True):
    """What a client needs to come back to a stream; `stream` is "" where the token is enough.

    Other servers may give no token, and not say of which request the stream is.
    """

    stream: str
    token: str
    request_id: RequestId | None
    min_s: float
    max_s: float | None


class Report(msgspec.Struct, frozen=True):
    """How a stream stands, in nobody's words."""

    stream: str
    request_id: RequestId
    is_live: bool
    has_failed: bool
    has_pending: bool
    has_request: bool
    has_error: bool


class Standing(msgspec.Struct, frozen=True, rename="camel"):
    """How a stream stands: the StreamStatus of Streams, all of it required."""

    stream_id: str
    status: str
    pending_messages: bool
    has_request: bool
    has_error: bool


# The words of a dialect. Each knows how one side writes it and the other one reads it: `read` is
# the server's and raises `Refusal`, `hear` the client's and raises `ValueError`.


class Announcing(msgspec.Struct, frozen=True):
    """The notification that tells how to come back."""

    method: str
    tell: Callable[[Announcement], Any]
    hear: Callable[[msgspec.Raw], Announcement]
    names_stream: bool = True  # else numbers are of no use, as they go by the stream's id


class Resuming(msgspec.Struct, frozen=True):
    """The request for a delivery.

    One that `takes_over` stands in for the originating request: the original response is the answer
    to it. Any other has a reply of its own, which comes last.
    """

    method: str
    ask: Callable[[str, str, int | None], Any]  # streamId, token, cursor
    read: Callable[[msgspec.Raw], Resume]
    takes_over: bool = False


class Polling(msgspec.Struct, frozen=True):
    """The request for how a stream stands."""

    method: str
    ask: Callable[[str, str, RequestId, int | None], Any]  # streamId, token, its request, cursor
    read: Callable[[msgspec.Raw], Poll]
    tell: Callable[[Report], Any]
    hear: Callable[[msgspec.Raw], Standing]


class Listing(msgspec.Struct, frozen=True):
    """The request for how all streams stand."""

    method: str
    read: Callable[[msgspec.Raw], PollAll]
    tell: Callable[[list[Report], str | None], Any]


class Ending(msgspec.Struct, frozen=True):
    """The notification that a stream is over."""

    method: str
    tell: Callable[[str], Any]
    hear: Callable[[msgspec.Raw], str] = lambda _: ""  # the stream, "" where it is not named


class Lead(msgspec.Struct, frozen=True):
    """What leads from a page to the next, and whether it came in the result's `_meta` alone."""

    token: str
    is_in_meta: bool = False


class Paging(msgspec.Struct, frozen=True):
    """How a result leads to the next page, and a call to the page that it is for.

    Both may say it among their own fields and in their `_meta`.
    """

    ask: Callable[[str], dict[str, Any]]  # fields of the params of a call
    ask_in_meta: Callable[[str], dict[str, Any]]  # fields of their `_meta` instead
    read: Callable[[msgspec.Raw], str | None]  # the params of a call
    argument: str  # the token's name among a call's arguments; it is part of each other name
    tell: Callable[[str, float], tuple[dict[str, Any], dict[str, Any]]]  # token, seconds it holds
    hear: Callable[[Any], Lead | None]  # a result


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """One proposal, in as many of these words as it has."""

    capability: str | None = None  # None where clients need not say that they know it
    announcing: Announcing | None = None
    resuming: Resuming | None = None
    polling: Polling | None = None
    listing: Listing | None = None
    ending: Ending | None = None
    paging: Paging | None = None

    def announce(self, made: Announcement) -> bytes:
        """The line that tells a client how to come back; nothing in a dialect without a word."""
        word = self.announcing
        return b"" if word is None else messages.notification(word.method, word.tell(made))

    def end(self, stream: str) -> bytes:
        """The line that says that a stream is over; nothing in a dialect without a word for it."""
        word = self.ending
        return b"" if word is None else messages.notification(word.method, word.tell(stream))


_T = TypeVar("_T")


def read_params(params: msgspec.Raw, shape: type[_T]) -> _T:
    """What a client sent, as the server reads it. Raises `Refusal` where it does not fit."""
    try:
        return messages.decode(params, shape)
    except ValueError as error:
        raise Refusal(INVALID_PARAMS, f"Bad params: {error}; see the method's schema.") from None
