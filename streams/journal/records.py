"""Records of streams, and the rules for changing them.

A journal keeps a `Record` for each stream, and its lines as `Run`s. `apply` decides how a change
affects a record, so that no backend repeats the rules. Applying a change a second time changes
nothing, so a commit whose outcome is unknown may be repeated.

Only the process that holds a stream's lease (its record's `fence`) may change it.
"""

import enum
from typing import Final

import msgspec

from streams.errors import Conflict, Ended, Fenced, Gone
from streams.journal.sessions import SessionChange
from streams.journal.webhooks import SaveWebhook, Webhook, WebhookChange
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
    """Where a call restarts from after its server has died.

    `seq` and `state` are those of its last checkpoint: 0 and None before the first. `answers` are
    the client's answers since then, by the seqs of the requests.
    """

    seq: int = 0
    state: bytes | None = None  # JSON
    answers: dict[int, bytes] = {}
    attempts: int = 0  # restarts since the call last made progress
    reached: int = 0  # the stream's `last` when `attempts` was counted
    caller: bytes = b""  # what the server keeps of the caller for its tool


class Record(msgspec.Struct, frozen=True, gc=False):  # it can be part of no cycle
    """All that a journal keeps of one stream, apart from its lines.

    Times are wall-clock seconds since 1970. The lines above `trimmed` are kept; `last` is 0 before
    the first line.
    """

    stream: str
    principal: str
    origin: bytes  # the originating request, as received or as `extension.marked` made it
    min_s: float
    max_s: float
    created_at: float
    fence: int
    is_announced: bool  # whether the client was told how to resume it
    outcome: Outcome = Outcome.LIVE
    last: int = 0
    acked: int = 0
    last_request: int = 0  # seq of the last request to the client
    last_error: int = 0  # seq of a final response that is an error or says isError
    ended_at: float = 0.0
    # The seqs of the pages that are kept, without the final response; None unless the tool gives
    # pages.
    pages: tuple[int, ...] | None = None
    number: int = 0  # streams are numbered in the order of creation
    # Of an evicted stream, see `Evict`; None and False before its first eviction.
    due_at: float | None = None
    is_read: bool = False
    restart: Restart | None = None  # None if the call cannot restart, or has ended
    owner: str = ""  # the replica that owns it; "" without one, as in a journal that is not shared
    # The first and last seq that a store has lost by a failover: no line has them ever again.
    lost: tuple[int, int] | None = None

    @property
    def trimmed(self) -> int:
        """The seq of the last line that is no longer kept.

        Lines after a checkpoint are kept even when they are acked: the restarted call sends them
        a second time, and they are compared.
        """
        return self.acked if self.restart is None else min(self.acked, self.restart.seq)

    def has_lost(self, seq: int) -> bool:
        """Whether the line `seq` was lost by a store."""
        return self.lost is not None and self.lost[0] <= seq <= self.lost[1]

    def losing(self, last: int) -> "Record":
        """The record once all lines above its own last one, up to `last`, are lost as well.

        It knows one range of lost lines. If lines before are lost that a client may ask for, those
        between count as lost, too.
        """
        lost = self.lost
        first = self.last + 1 if lost is None or lost[1] <= self.trimmed else lost[0]
        return msgspec.structs.replace(self, last=last, lost=(first, last))

    @property
    def is_wanted(self) -> bool:
        """Whether the call still runs, or its client may lack some of its lines."""
        is_drained = self.outcome.is_end and self.acked == self.last
        return not (self.outcome.is_tombstone or is_drained)


class Create(msgspec.Struct, frozen=True):
    """A new stream, with a number of its own. If it exists, nothing changes.

    In a shared journal the replica that creates a stream owns it, and `names` find it at once. With
    a `turn`, the name of one, it is refused (`Fenced`) unless the replica still has that.
    """

    record: Record
    names: tuple[bytes, ...] = ()
    turn: bytes = b""

    @property
    def stream(self) -> str:
        return self.record.stream


class Append(msgspec.Struct, frozen=True, gc=False):
    """More lines.

    If the final response is among them, `outcome` and `ended_at` say how and when (in wall time)
    the stream has ended. `pages` are the seqs of the lines that are pages. `webhooks`, which tell
    of these lines, are added to those that wait.
    """

    stream: str
    fence: int
    run: Run
    last_request: int
    last_error: int
    outcome: Outcome = Outcome.LIVE
    ended_at: float = 0.0
    pages: tuple[int, ...] = ()
    webhooks: tuple[Webhook, ...] = ()


class Ack(msgspec.Struct, frozen=True, gc=False):
    """The client has every line up to `acked`.

    These lines may be deleted, unless the call may restart from a line before that.
    """

    stream: str
    fence: int
    acked: int


class Checkpoint(msgspec.Struct, frozen=True):
    """A restart of the call continues after the line `seq`, with this state.

    The line may come later in the same commit.
    """

    stream: str
    fence: int
    seq: int
    state: bytes


class Answered(msgspec.Struct, frozen=True):
    """The client's answer to the request at `seq`, for a call that may restart."""

    stream: str
    fence: int
    seq: int
    line: bytes


class Restarted(msgspec.Struct, frozen=True):
    """The call is about to restart, for the `attempts`th time since its last line was `reached`."""

    stream: str
    fence: int
    attempts: int
    reached: int


class Close(msgspec.Struct, frozen=True):
    """The stream is abandoned or cancelled. Its lines are deleted; its record is a tombstone."""

    stream: str
    fence: int
    outcome: Outcome
    at: float


class Forget(msgspec.Struct, frozen=True):
    """Everything of the stream is deleted, its record included."""

    stream: str
    fence: int


class Evict(msgspec.Struct, frozen=True):
    """The stream has ended and leaves memory: from now on `Lookups` finds it.

    The engine looks at it again once `due_at`, in wall time, is past. `is_read` tells that all of
    it was written to a client that confirms nothing. `names`, of 16 bytes each, find it as well. A
    later `Evict` replaces `due_at` and `is_read`, and adds its names to those that were given. In a
    shared journal the stream has no owner from then on, unless it `stays` in its owner's memory.
    """

    stream: str
    fence: int
    due_at: float
    is_read: bool = False
    names: tuple[bytes, ...] = ()
    stays: bool = False


class Restore(msgspec.Struct, frozen=True):
    """A shared store has lost changes of the stream by a failover: its owner puts the record back.

    `record` is as the owner knows it. The lines up to its `last` that the store does not have any
    more become `lost`, so that no line has their numbers ever again. If the stored record has as
    many lines or more, nothing changes.
    """

    fence: int
    record: Record

    @property
    def stream(self) -> str:
        return self.record.stream


OfRestart = Checkpoint | Answered | Restarted
StreamChange = Create | Append | Ack | OfRestart | Close | Forget | Evict | Restore
Change = StreamChange | SessionChange | WebhookChange


def bytes_in(change: Change) -> int:
    """The bytes in a change that peers and tools may make as many as limits allow."""
    match change:
        case Append():
            return len(change.run.body) + sum(len(each.body) for each in change.webhooks)
        case Create() | Restore():
            return len(change.record.origin)
        case Checkpoint():
            return len(change.state)
        case Answered():
            return len(change.line)
        case SaveWebhook():
            return len(change.webhook.body)
        case _:
            return 0


def apply(record: Record | None, change: StreamChange) -> Record | None:
    """Return `record` as it is after `change`; None if it is deleted.

    A change that was applied before returns the record as it is. Raises `Gone`, `Fenced`, `Ended`
    or `Conflict` if the record does not allow the change.
    """
    if isinstance(change, Append):  # first, since almost all are
        return _appended(_owned(record, change), change)
    if isinstance(change, Create):
        return change.record if record is None else record
    if record is None and isinstance(change, Forget):
        return None
    if isinstance(change, Restore):
        return _restored(record, change)
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
                raise Conflict(f"stream {record.stream[:8]}… runs or gives pages: not evicted")
            owner = record.owner if change.stays else ""
            return msgspec.structs.replace(
                record, due_at=change.due_at, is_read=change.is_read, owner=owner
            )
        case Forget():
            return None
        case _:
            return _restarting(record, change)


def _restarting(record: Record, change: OfRestart) -> Record:
    restart = record.restart
    if restart is None:
        return record  # the stream has ended since
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


def _restored(record: Record | None, change: Restore) -> Record:
    known = change.record
    if record is None:
        lost = (known.trimmed + 1, known.last) if known.last > known.trimmed else None
        return msgspec.structs.replace(known, fence=change.fence, lost=lost)
    # A claim may have been lost as well: then an older fence is stored.
    if change.fence < record.fence or (
        change.fence == record.fence and known.owner != record.owner
    ):
        raise Fenced(f"stream {change.stream[:8]}… is owned by another process")
    if record.last >= known.last:
        return msgspec.structs.replace(record, fence=change.fence, owner=known.owner)
    lost = record.losing(known.last).lost
    return msgspec.structs.replace(known, fence=change.fence, lost=lost)


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
