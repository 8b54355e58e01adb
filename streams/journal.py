"""What the engine needs from storage, and the rules that every storage shares.

A journal keeps a `Record` for each stream and its lines as `Run`s, and for each session over HTTP,
which outlives connections and the server, a `SessionRecord` and the `Grant`s of the session. All
writing is one verb, `commit`: many changes in one durable step. What a change does is decided here,
in `apply` and `apply_to_sessions`, so that no backend repeats it; a backend stores records, bodies
and grants. Repeating a commit whose outcome is unknown is always safe.

Only the process that holds a stream's lease (its record's `fence`) may change it. Sessions have no
lease: they belong to the process that owns the journal.
"""

import enum
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, Protocol

import msgspec

from streams.errors import Conflict, Ended, Fenced, Gone, JournalError
from streams.lookups import Lookups
from streams.messages import RequestId, Run

# Runs are stored in pieces of this size: one of them, and the header ahead of it, make one write of
# 256 KiB, so what is stored goes out without being copied together.
STORED_BYTES_MAX: Final = 252 * 1024


class Outcome(enum.Enum):
    """How far a stream has come, as it is stored."""

    LIVE = "live"
    COMPLETED = "completed"
    FAILED = "failed"
    ABANDONED = "abandoned"
    CANCELLED = "cancelled"

    # Members are one of a kind, and Enum's own hash is a call of Python's for every message.
    __hash__ = object.__hash__

    @property
    def is_end(self) -> bool:
        """Whether the final response is among the lines."""
        return self in (Outcome.COMPLETED, Outcome.FAILED)

    @property
    def is_tombstone(self) -> bool:
        """Whether all that is left is the memory of it."""
        return self in (Outcome.ABANDONED, Outcome.CANCELLED)


# Looking a member up costs as much as the rest of an append's checks.
_LIVE: Final = Outcome.LIVE


class Record(msgspec.Struct, frozen=True, gc=False):  # it can be part of no cycle
    """What is known of one stream, its lines apart.

    Times are wall-clock seconds since 1970. The lines above `acked` are kept; `last` is 0 before
    the first.
    """

    stream: str
    principal: str
    origin: bytes  # the originating request, as it came
    min_s: float
    max_s: float
    created_at: float
    fence: int
    is_announced: bool  # whether the client was told how to come back
    outcome: Outcome = Outcome.LIVE
    last: int = 0
    acked: int = 0
    last_request: int = 0  # seq of the last request to the client
    last_error: int = 0  # seq of a final response that is an error or says isError
    ended_at: float = 0.0
    # Of a stream whose tool gives pages: the seqs of those that are kept, the final response apart.
    pages: tuple[int, ...] | None = None
    number: int = 0  # in the order of creation, above that of every stream before it
    # Of a stream at rest, as `Rest` says.
    due_at: float | None = None
    is_read: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether it runs, or its client is not known to have all of it."""
        is_drained = self.outcome.is_end and self.acked == self.last
        return not (self.outcome.is_tombstone or is_drained)


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


class Create(msgspec.Struct, frozen=True):
    """A new stream, under a number of its own. A repeat changes nothing."""

    record: Record

    @property
    def stream(self) -> str:
        return self.record.stream


class Append(msgspec.Struct, frozen=True, gc=False):
    """More lines. Where the final response is among them, `outcome` says how the stream has ended,
    and `ended_at` when, in wall time. `pages` are the seqs of those that are pages.
    """

    stream: str
    fence: int
    run: Run
    last_request: int
    last_error: int
    outcome: Outcome = Outcome.LIVE
    ended_at: float = 0.0
    pages: tuple[int, ...] = ()


class Ack(msgspec.Struct, frozen=True, gc=False):
    """The client has everything up to `acked`: what lies below may be deleted."""

    stream: str
    fence: int
    acked: int


class Close(msgspec.Struct, frozen=True):
    """Abandoned or cancelled: the lines go, a tombstone stays."""

    stream: str
    fence: int
    outcome: Outcome
    at: float


class Forget(msgspec.Struct, frozen=True):
    """Nothing of the stream is kept, no tombstone either."""

    stream: str
    fence: int


class Rest(msgspec.Struct, frozen=True):
    """The stream has ended and leaves memory: from now on it is found by `streams.lookups` alone.

    It is to be looked at when `due_at` is past, in wall time. `is_read` tells that all of it was
    written to a client that confirms nothing. It may be asked for by its `names`, 16 bytes each. A
    later one takes the place of this one, but for the names: those that were given stay.
    """

    stream: str
    fence: int
    due_at: float
    is_read: bool = False
    names: tuple[bytes, ...] = ()


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


StreamChange = Create | Append | Ack | Close | Forget | Rest
SessionChange = SaveSession | DropSession | SaveGrant | DropGrant
Change = StreamChange | SessionChange


class Shortage(msgspec.Struct, frozen=True):
    """There is little room left: what is begun may be ended, and nothing new begun."""

    why: str
    is_severe: bool  # ended at once, and not with a few words more

    def __str__(self) -> str:
        return self.why


class Journal(Lookups, Protocol):
    """Storage for streams and sessions.

    All may raise `Unavailable` (repeat it) or `JournalUnusable` (fatal).
    """

    @property
    def shortage(self) -> Shortage | None:
        """What there is not enough of; None while there is."""

    async def claim(self) -> Sequence[Record]:
        """Take over every stream: each record is given a new fence, older leases are void.

        Returned are those that are not at rest, by their numbers.
        """

    async def commit(self, changes: Sequence[Change]) -> Sequence[JournalError | None]:
        """Apply the changes in order and make them durable, all in one step.

        A change that its stream's record does not allow changes nothing and is answered with its
        error (`Gone`, `Fenced`, `Ended`, `Conflict`); the others are applied. A change of a session
        is answered with None, always.
        """

    async def sessions(self) -> tuple[Sequence[SessionRecord], Sequence[Grant]]:
        """Every session, and every grant of a stream that is not at rest, each in the order in
        which they were last saved.
        """

    async def read(self, stream: str, after: int, *, bytes_max: int) -> Sequence[Run]:
        """The durable lines that follow `after`, as runs that follow each other; none where there
        are none.

        At most `bytes_max` bytes, or one line that is longer; less than would fit where that saves
        cutting a stored run. Short runs are joined, to `STORED_BYTES_MAX` at most. `after` must not
        lie below the record's `acked`.
        """

    async def aclose(self) -> None:
        """Finish what was begun and let go of the storage."""


def apply(record: Record | None, change: StreamChange) -> Record | None:
    """What `change` makes of `record`; None where nothing is left. A repeated change changes
    nothing.

    Raises `Gone`, `Fenced`, `Ended` or `Conflict` where the record does not allow it.
    """
    if isinstance(change, Append):  # first, since almost all are
        return _appended(_owned(record, change), change)
    if isinstance(change, Create):
        return change.record if record is None else record
    if record is None and isinstance(change, Forget):
        return None
    record = _owned(record, change)
    match change:
        case Ack():
            acked = min(max(record.acked, change.acked), record.last)
            pages = record.pages and tuple(seq for seq in record.pages if seq > acked)
            return msgspec.structs.replace(record, acked=acked, pages=pages)
        case Close():
            if record.outcome.is_tombstone:
                return record
            return msgspec.structs.replace(
                record,
                outcome=change.outcome,
                acked=record.last,
                ended_at=change.at,
                pages=record.pages and (),
            )
        case Rest():
            if record.outcome is Outcome.LIVE or record.pages is not None:
                raise Conflict(f"stream {record.stream[:8]}… must be looked after")
            return msgspec.structs.replace(record, due_at=change.due_at, is_read=change.is_read)
        case Forget():
            return None


def _owned(record: Record | None, change: Append | Ack | Close | Forget | Rest) -> Record:
    if record is None:
        raise Gone(f"no stream {change.stream[:8]}… in this journal")
    if change.fence != record.fence:
        raise Fenced(f"stream {change.stream[:8]}… is owned by another process")
    return record


def _appended(record: Record, change: Append) -> Record:
    run = change.run
    last = run.seq + run.count - 1
    outcome = record.outcome
    if outcome is not _LIVE and outcome.is_tombstone:
        raise Gone(f"stream {record.stream[:8]}… is {outcome.value}")
    if last <= record.last:
        return record
    if outcome is not _LIVE:
        raise Ended(f"stream {record.stream[:8]}… ended at {record.last}")
    if run.seq != record.last + 1:
        raise Conflict(f"stream {record.stream[:8]}… is at {record.last}, append at {run.seq}")
    return msgspec.structs.replace(
        record,
        last=last,
        last_request=change.last_request,
        last_error=change.last_error,
        outcome=change.outcome,
        ended_at=change.ended_at,
        pages=record.pages if record.pages is None else record.pages + change.pages,
    )


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
