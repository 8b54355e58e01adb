"""The contents of one commit: Python applies the rules of records, the store compares and sets.

`Known` is a record as the store has it. `Batch` applies changes to those, and gives the operations
of `library.lua` that make the store follow.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from streams.errors import Fenced, JournalError
from streams.exchange import authenticated
from streams.journal.contract import STORED_BYTES_MAX
from streams.journal.records import (
    Append,
    Change,
    Create,
    Evict,
    Outcome,
    Record,
    Restore,
    StreamChange,
    apply,
)
from streams.journal.redis import codec
from streams.journal.sessions import DropGrant, DropSession, SaveGrant, SaveSession, SessionChange
from streams.journal.webhooks import DropWebhook, SaveWebhook, Webhook, WebhookChange
from streams.messages import Run

ABSENT: Final = b""  # the mark of a stream without a record
# Bytes of runs that are counted together: they count until the last of them is confirmed.
COUNTED_BYTES: Final = 16 * 1024
COUNTS_AIM: Final = 32


class Known(msgspec.Struct, frozen=True):
    """A stream as the store has it: `record` is None, and `mark` empty, if it has none."""

    record: Record | None = None
    mark: bytes = ABSENT
    # The bytes of the stored runs up to a seq, each since the one before: of a few runs together,
    # and of all those that were there when the stream was claimed.
    kept: tuple[tuple[int, int], ...] = ()

    @property
    def size(self) -> int:
        """The bytes that count for the limits."""
        if self.record is None:
            return 0
        return codec.STREAM_BYTES + len(self.record.origin) + sum(size for _, size in self.kept)


class Staged:
    """A stream in a commit."""

    def __init__(self, stream: str, known: Known) -> None:
        self.stream = stream
        self.known = known
        self.now = known.record
        self.is_new = False  # all that is stored of it, if anything, is deleted first
        self.runs: list[Run] = []
        self.lost: tuple[int, int] | None = None  # a new gap in the lines
        self.names: list[bytes] = []
        self.turn = b""  # without which it is not created
        self.webhooks: list[Webhook] = []
        self.after = known  # as the store will have it


class Batch:
    """The changes of one commit, applied in order to what is known of their streams."""

    def __init__(self, replica: str, known: Mapping[str, Known], session_idle_s: float) -> None:
        """`known` has every stream of the changes. The store forgets a session that is not saved
        for `session_idle_s`.
        """
        self._replica = replica
        self._known = known
        self._staged: dict[str, Staged] = {}
        self._of_sessions: list[list[Any]] = []  # and of webhooks by themselves
        self._session_idle_s = session_idle_s

    def apply(self, change: Change) -> JournalError | None:
        """Apply one change. Returns its error if the record does not allow it."""
        if change.stream is None:
            if isinstance(change, SaveWebhook | DropWebhook):
                self._of_sessions.append(_webhook(change))
            else:
                self._of_sessions.append(self._session(change))
            return None
        staged = self._stage(change.stream)
        before = staged.now
        try:
            now = apply(before, self._owned(before, change))
        except JournalError as error:
            return error
        if isinstance(change, Create | Evict):
            staged.names += change.names
        if isinstance(change, Create) and before is None:
            staged.turn = change.turn
        if now is staged.now:
            return None
        staged.now = now
        if now is None:
            staged.is_new = True
            staged.runs, staged.names, staged.lost, staged.turn = [], [], None, b""
            self._of_sessions.append(["Y", change.stream])
        elif isinstance(change, Append):
            staged.runs += change.run.split(STORED_BYTES_MAX)
            staged.webhooks += change.webhooks
        elif isinstance(change, Restore) and now.lost != (before and before.lost):
            staged.lost = now.lost
        return None

    def replace(self, record: Record) -> None:
        """Set a record, whatever the rules say: it has another owner now, or lost lines."""
        staged = self._stage(record.stream)
        before, staged.now = staged.now, record
        if before is not None and record.lost != before.lost:
            staged.lost = record.lost

    def _stage(self, stream: str) -> Staged:
        staged = self._staged.get(stream)
        if staged is None:
            staged = self._staged[stream] = Staged(stream, self._known[stream])
        return staged

    def _owned(self, record: Record | None, change: StreamChange) -> StreamChange:
        """The change as this replica may make it; raises `Fenced` if it may not."""
        if isinstance(change, Restore) or (record is None and isinstance(change, Create)):
            if change.record.owner not in ("", self._replica):
                raise Fenced(f"{change.record.owner} was claimed, and is {self._replica} now")
            return replace(change, record=replace(change.record, owner=self._replica))
        if record is None or isinstance(change, Create):
            return change
        # A stream that is evicted and has no owner may be postponed or forgotten by any replica.
        is_free = not record.owner and record.due_at is not None
        if record.owner == self._replica or is_free:
            return change
        raise Fenced(
            f"stream {record.stream[:8]}… is owned by {record.owner or 'no replica'}, not by "
            f"{self._replica}"
        )

    def _session(self, change: SessionChange) -> list[Any]:
        match change:
            case SaveSession(record):
                whose = codec.principal_key(record.principal)
                body = codec.session_bytes(record)
                return ["S", record.key, body, whose, str(self._session_idle_s)]
            case DropSession(key):
                return ["E", key]
            case SaveGrant(grant):
                staged = self._staged.get(grant.stream)
                if staged is not None and staged.now is None:
                    return []
                is_known = "0" if staged is None else "1"  # else the store looks
                body = codec.grant_bytes(grant)
                return ["V", grant.session, grant.delivery, grant.stream, body, is_known]
            case DropGrant(session, delivery):
                return ["W", session, delivery]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be written."""
        return not self._of_sessions and not any(map(_is_changed, self._staged.values()))

    def parts(self, bytes_max: int) -> Sequence[Sequence[Staged]]:
        """The changed streams in groups, for one call of the store each."""
        groups: list[list[Staged]] = [[]]
        room = bytes_max
        for staged in filter(_is_changed, self._staged.values()):
            size = codec.STREAM_BYTES + sum(len(run.body) for run in staged.runs)
            size += sum(len(each.body) for each in staged.webhooks)
            if groups[-1] and size > room:
                groups.append([])
                room = bytes_max
            groups[-1].append(staged)
            room -= size
        return groups

    def of_sessions(self) -> list[Any]:
        """The operations of sessions and webhooks, in the order of the changes."""
        return [each for it in self._of_sessions if self._is_in_order(it) for each in it]

    def _is_in_order(self, operation: list[Any]) -> bool:
        """Whether it is no grant of a stream that was created after it in this commit.

        The store writes the streams of a commit first.
        """
        if not operation or operation[0] != "V" or operation[-1] == "1":
            return True
        staged = self._staged.get(operation[3])
        return staged is None or staged.known.record is not None


def _webhook(change: WebhookChange) -> list[Any]:
    match change:
        case SaveWebhook(webhook):
            return ["H", webhook.id, repr(webhook.due_at), codec.webhook_bytes(webhook)]
        case DropWebhook(id):
            return ["Q", id]


def _is_changed(staged: Staged) -> bool:
    return bool(staged.names or staged.lost) or staged.now is not staged.known.record


def arguments(
    group: Sequence[Staged], epoch: int, next_version: Callable[[], bytes]
) -> tuple[list[Any], list[Any]]:
    """The streams with the marks that the store must have, and the operations, of one call.

    Sets `Staged.after` of each stream.
    """
    marks: list[Any] = []
    operations: list[Any] = []
    size = anonymous = 0
    for staged in group:
        marks += [staged.stream, staged.known.mark]
        operations += _operations(staged, epoch, next_version)
        # In the same call as the lines that they tell of: another call may not be made any more.
        operations += (
            each for webhook in staged.webhooks for each in _webhook(SaveWebhook(webhook))
        )
        grown = staged.after.size - staged.known.size
        size += grown
        record = staged.now or staged.known.record
        if record is not None and not authenticated(record.principal):
            anonymous += grown
    if size or anonymous:
        operations += ["B", size, anonymous]
    return marks, operations


def _operations(staged: Staged, epoch: int, next_version: Callable[[], bytes]) -> list[Any]:
    stream, known, now = staged.stream, staged.known, staged.now
    operations = codec.index_changes(known.record, now)
    if staged.is_new and known.record is not None:
        operations += ["D", stream]
    if now is None:
        staged.after = Known()
        return operations
    is_created = known.record is None or staged.is_new
    kept = () if is_created else known.kept
    if staged.lost is not None:
        kept = tuple(each for each in kept if each[0] < staged.lost[0])
    runs = [run for run in staged.runs if run.last > now.trimmed and not _is_lost(run, staged)]
    kept = tuple(each for each in kept if each[0] > now.trimmed)
    kept = _with_runs(kept, runs)
    if not is_created:
        operations += _trimming(staged, now)
    gap: list[Any] = []
    if staged.lost is not None and staged.lost[1] > now.trimmed:
        gap = ["G", stream, max(staged.lost[0], now.trimmed + 1), staged.lost[1]]
    for run in runs:
        if gap and run.seq > gap[3]:
            operations += gap
            gap = []
        operations += ["L", stream, codec.line_id(run.last, run.count), run.body]
    operations += gap
    mark = codec.mark(next_version(), now.fence, epoch, now.owner)
    progress = codec.progress_of(now, sum(size for _, size in kept))
    if is_created:
        operations += ["C", stream, mark, progress, codec.identity_of(now), now.origin]
    else:
        operations += ["R", stream, mark, progress]
    for name in staged.names:
        operations += ["N", stream, name]
    staged.after = Known(now, mark, kept)
    return operations


def _is_lost(run: Run, staged: Staged) -> bool:
    """Whether a run was appended in this commit, and then counted as lost."""
    return staged.lost is not None and run.last >= staged.lost[0] and run.seq <= staged.lost[1]


def _with_runs(
    kept: tuple[tuple[int, int], ...], runs: Sequence[Run]
) -> tuple[tuple[int, int], ...]:
    """Add runs to the counts of bytes. Small ones are counted together, so there are few counts."""
    counts = list(kept)
    least = max(COUNTED_BYTES, sum(size for _, size in kept) // COUNTS_AIM)
    for run in runs:
        size = len(run.body) + codec.RUN_BYTES
        if counts and counts[-1][1] + size <= least:
            size += counts.pop()[1]
        counts.append((run.last, size))
    return tuple(counts)


def _trimming(staged: Staged, now: Record) -> list[Any]:
    known = staged.known.record
    assert known is not None
    if not staged.known.kept and known.lost is None:
        return []
    if now.outcome is not Outcome.LIVE and now.outcome.is_tombstone:
        return ["X", staged.stream]
    if now.trimmed <= known.trimmed:
        return []
    # Not the last run as long as its last line is the stream's: its id keeps the order of the ids.
    if now.trimmed >= known.last:
        return ["X", staged.stream]
    return ["T", staged.stream, now.trimmed + 1]
