"""What a journal keeps of each stream, and what a change does to it.

A journal keeps a `Record` for each stream, and its lines as `Run`s. What a change does to a record
is decided in `apply`, so that no backend repeats it. Applying a change a second time changes
nothing, so a commit whose outcome is unknown may be repeated.

Only the process that holds a stream's lease (its record's `fence`) may change it.
"""

import enum
from typing import Final

import msgspec

from streams.errors import Conflict, Ended, Fenced, Gone
from streams.journal.sessions import SessionChange
from streams.messages import Run


class Outcome(enum.Enum):
    """How far a stream has come, as it is stored."""

    LIVE = "live"
    COMPLETED = "completed"
    FAILED = "failed"
    ABANDONED = "abandoned"
    CANCELLED = "cancelled"

    # Members are one of a kind, and Enum's own hash is a call of Python's for every message.
    __hash__ = object.__hash__

    def __init__(self, word: str) -> None:
        # Attributes, since these are read several times for every message.
        self.is_end = word in ("completed", "failed")  # the final response is among the lines
        self.is_tombstone = word in ("abandoned", "cancelled")  # nothing but the record is kept


# Looking a member up costs as much as the rest of an append's checks.
_LIVE: Final = Outcome.LIVE


class Restart(msgspec.Struct, frozen=True, gc=False):  # it can be part of no cycle
    """What a call goes on from that is run again when its server has died.

    `seq` and `state` are of its last checkpoint: 0 and None before the first. `answers` are those
    to its requests since then, by the seqs of the requests.
    """

    seq: int = 0
    state: bytes | None = None  # JSON
    answers: dict[int, bytes] = {}
    attempts: int = 0  # how often it was run again without getting any further
    reached: int = 0  # the stream's `last` when that was counted


class Record(msgspec.Struct, frozen=True, gc=False):  # it can be part of no cycle
    """What is known of one stream, its lines apart.

    Times are wall-clock seconds since 1970. The lines above `trimmed` are kept; `last` is 0 before
    the first.
    """

    stream: str
    principal: str
    origin: bytes  # the originating request, as it came or as `extension.marked`
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
    restart: Restart | None = None  # None where the call is not run again, or has ended

    @property
    def trimmed(self) -> int:
        """The lines up to this one are kept no more.

        What was sent since a checkpoint is held against what is sent by who begins there again.
        """
        return self.acked if self.restart is None else min(self.acked, self.restart.seq)

    @property
    def is_wanted(self) -> bool:
        """Whether it runs, or its client is not known to have all of it."""
        is_drained = self.outcome.is_end and self.acked == self.last
        return not (self.outcome.is_tombstone or is_drained)


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
    """The client has everything up to `acked`: what lies below may be deleted, unless the call may
    be run again from before that.
    """

    stream: str
    fence: int
    acked: int


class Checkpoint(msgspec.Struct, frozen=True):
    """Who runs the call again begins behind the line `seq`, with this state. That line may come
    later in the same commit.
    """

    stream: str
    fence: int
    seq: int
    state: bytes


class Answered(msgspec.Struct, frozen=True):
    """The client's answer to the request at `seq`, for a call that may be run again."""

    stream: str
    fence: int
    seq: int
    line: bytes


class Restarted(msgspec.Struct, frozen=True):
    """The call is about to be run again, the `attempts`th time since it got any further, which was
    to the line `reached`.
    """

    stream: str
    fence: int
    attempts: int
    reached: int


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


class Evict(msgspec.Struct, frozen=True):
    """The stream has ended and leaves memory: from now on it is found by `Lookups`
    alone.

    It is to be looked at when `due_at` is past, in wall time. `is_read` tells that all of it was
    written to a client that confirms nothing. It may be asked for by its `names`, 16 bytes each. A
    later one takes the place of this one, but for the names: those that were given stay.
    """

    stream: str
    fence: int
    due_at: float
    is_read: bool = False
    names: tuple[bytes, ...] = ()


OfRestart = Checkpoint | Answered | Restarted
StreamChange = Create | Append | Ack | OfRestart | Close | Forget | Evict
Change = StreamChange | SessionChange


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
                restart=None,
            )
        case Evict():
            if record.outcome is Outcome.LIVE or record.pages is not None:
                raise Conflict(f"stream {record.stream[:8]}… must be looked after")
            return msgspec.structs.replace(record, due_at=change.due_at, is_read=change.is_read)
        case Forget():
            return None
        case _:
            return _restarting(record, change)


def _restarting(record: Record, change: OfRestart) -> Record:
    restart = record.restart
    if restart is None:
        return record  # it has ended since
    match change:
        case Checkpoint():
            if change.seq < restart.seq:
                return record
            later = {seq: line for seq, line in restart.answers.items() if seq > change.seq}
            restart = Restart(change.seq, change.state, later)
        case Answered():
            if change.seq <= restart.seq:
                return record
            answers = restart.answers | {change.seq: change.line}
            restart = msgspec.structs.replace(restart, answers=answers)
        case Restarted():
            restart = msgspec.structs.replace(
                restart, attempts=change.attempts, reached=change.reached
            )
    return msgspec.structs.replace(record, restart=restart)


def _owned(
    record: Record | None, change: Append | Ack | OfRestart | Close | Forget | Evict
) -> Record:
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
        restart=record.restart if change.outcome is _LIVE else None,
    )
