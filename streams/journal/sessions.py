"""Records and grants of sessions over HTTP, which outlive connections and the server.

Each session has a `SessionRecord`, and a `Grant` for each delivery that it may continue.
`apply_to_sessions` decides what a change does, so that no backend repeats it.
"""

from collections.abc import Callable
from typing import ClassVar, Protocol

import msgspec

from streams.messages import RequestId


class SessionRecord(msgspec.Struct, frozen=True):
    """One session over HTTP."""

    key: str  # a hash of the session's id, which is a secret and never stored
    principal: str
    revision: str  # of MCP
    capabilities: bytes  # JSON, from the client's `initialize`
    level: str  # the least severe log messages that the client wants
    seen_at: float  # wall time, seconds since 1970


class Grant(msgspec.Struct, frozen=True):
    """Allows a session to continue a delivery of a stream, by the event ids of that delivery.

    `delivery` identifies it within its session. The delivery is the response to the resume with the
    id `reply_id`, which keeps its JSON type: `"1"` is not `1`. The delivery began after `start`.
    """

    session: str  # the key of the session's record
    delivery: str
    stream: str
    reply_id: RequestId
    takes_over: bool = False  # the stream's own response is the answer to that resume
    start: int = 0


class _OfSession(msgspec.Struct, frozen=True):
    """A change of a session: its `stream` is None.

    One attribute tells it from a change of a stream; `isinstance` would slow down every append.
    """

    stream: ClassVar[None] = None


class SaveSession(_OfSession, frozen=True):
    """A new session, or a new record of a known one, whose grants stay."""

    record: SessionRecord


class DropSession(_OfSession, frozen=True):
    """The session and its grants are deleted."""

    key: str


class SaveGrant(_OfSession, frozen=True):
    """A new grant, or a new version of the session's grant of that delivery.

    It is not kept if the session or the stream is unknown: it would be of no use, and never
    deleted. A tombstone counts as known, so that the client can be told how the stream ended.
    """

    grant: Grant


class DropGrant(_OfSession, frozen=True):
    """The session may no longer continue this delivery."""

    session: str
    delivery: str


SessionChange = SaveSession | DropSession | SaveGrant | DropGrant


class SessionRows(Protocol):
    """Where a backend keeps sessions and grants.

    The rules are in `apply_to_sessions`. A backend itself calls only `drop_grants_of_stream`, for a
    forgotten stream.
    """

    def has_session(self, key: str) -> bool: ...

    def put_session(self, record: SessionRecord) -> None:
        """Replace the record with the same key, if any; the new one is last in order."""

    def drop_session(self, key: str) -> None: ...

    def put_grant(self, grant: Grant) -> None:
        """Replace the grant of the same delivery, if any; the new one is last in order."""

    def drop_grant(self, session: str, delivery: str) -> None: ...

    def drop_grants_of_session(self, key: str) -> None: ...

    def drop_grants_of_stream(self, stream: str) -> None: ...


def apply_to_sessions(
    rows: SessionRows, change: SessionChange, has_stream: Callable[[str], bool]
) -> None:
    """Apply `change` to `rows`. Deleting an unknown row changes nothing.

    `has_stream` tells whether a stream has a record, at this point of the commit.
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
