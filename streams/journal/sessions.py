"""What a journal keeps of sessions over HTTP, which outlive connections and the server.

Each has a `SessionRecord`, and `Grant`s of what it may continue. What a change does is decided in
`apply_to_sessions`, so that no backend repeats it.
"""

from collections.abc import Callable
from typing import ClassVar, Protocol

import msgspec

from streams.messages import RequestId


class SessionRecord(msgspec.Struct, frozen=True):
    """What is known of one session over HTTP."""

    key: str  # a hash of the session's id, which is a secret and never stored
    principal: str
    revision: str  # of MCP
    capabilities: bytes  # JSON, from the client's `initialize`
    level: str  # the least severe log messages that the client wants
    seen_at: float  # wall time, seconds since 1970


class Grant(msgspec.Struct, frozen=True):
    """That a session may continue a delivery of a stream, by the event ids of that delivery.

    `delivery` tells it from the others of its session. It is the response to the resume whose id is
    `reply_id`, and keeps that id's JSON type: `"1"` is not `1`. It began behind `start`.
    """

    session: str  # the key of the session's record
    delivery: str
    stream: str
    reply_id: RequestId
    takes_over: bool = False  # the stream's own response is the answer to that resume
    start: int = 0


class _OfSession(msgspec.Struct, frozen=True):
    """What tells changes of sessions from those of streams, at the cost of one look: `isinstance`
    would slow down every append.
    """

    stream: ClassVar[None] = None


class SaveSession(_OfSession, frozen=True):
    """A new session, or the record that takes the place of its former one; its grants stay."""

    record: SessionRecord


class DropSession(_OfSession, frozen=True):
    """Nothing of the session is kept, nor are its grants."""

    key: str


class SaveGrant(_OfSession, frozen=True):
    """A new grant, or what takes the place of the session's former grant of that delivery.

    Nothing is kept where the session or the stream is not there: nobody could use it, and nothing
    would ever drop it. A tombstone is there: who comes for its delivery is told how it ended.
    """

    grant: Grant


class DropGrant(_OfSession, frozen=True):
    """The session has no such delivery to continue any more."""

    session: str
    delivery: str


SessionChange = SaveSession | DropSession | SaveGrant | DropGrant


class SessionRows(Protocol):
    """Where a backend keeps sessions and grants. It has no rules: they are `apply_to_sessions` and,
    for a forgotten stream, `drop_grants_of_stream`.
    """

    def has_session(self, key: str) -> bool: ...

    def put_session(self, record: SessionRecord) -> None:
        """Put it last; the one of the same key goes."""

    def drop_session(self, key: str) -> None: ...

    def put_grant(self, grant: Grant) -> None:
        """Put it last; the one of the same session and delivery goes."""

    def drop_grant(self, session: str, delivery: str) -> None: ...

    def drop_grants_of_session(self, key: str) -> None: ...

    def drop_grants_of_stream(self, stream: str) -> None: ...


def apply_to_sessions(
    rows: SessionRows, change: SessionChange, has_stream: Callable[[str], bool]
) -> None:
    """Do to `rows` what `change` says. To drop what is not there changes nothing.

    `has_stream` tells whether there is a record of a stream, at this point of the commit.
    """
    match change:
        case SaveSession():
            rows.put_session(change.record)
        case DropSession():
            rows.drop_grants_of_session(change.key)
            rows.drop_session(change.key)
        case SaveGrant():
            grant = change.grant
            if rows.has_session(grant.session) and has_stream(grant.stream):
                rows.put_grant(grant)
        case DropGrant():
            rows.drop_grant(change.session, change.delivery)
