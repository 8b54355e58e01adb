"""The state of one stream: which events are allowed in it, and what each of them changes.

There is no input or output here, and no clock: time comes in as `now` (seconds, any origin), and
what must be made durable goes out as values. A method returns what it caused, or raises and has
changed nothing.

    lines offered ──► numbered, in a batch ──► durable ──► handed ──► delivered
                      `last`                   `durable`   `handed`   `delivered`

These four marks are seqs, and each is never above the one before it. A line is *handed* when a
connection has taken it for its next write, and *delivered* when its client is known to have it.
Lines up to `delivered` are no longer kept.

`position` is how far the delivery that is attached now has come, if there is one. `delivered` never
passes it, so a delivery always finds in the journal what follows its position. A new delivery may
stand far below `handed`: the replay of a backlog begins at `delivered`.
"""

import enum
from bisect import bisect_right
from collections import deque
from itertools import accumulate, takewhile
from typing import Final

import msgspec

from streams.errors import Ended
from streams.journal.contract import STORED_BYTES_MAX
from streams.journal.records import Append, Close, Outcome, Record
from streams.limits import Limits
from streams.messages import RequestId, Run

ProgressToken = RequestId


class Event(enum.Enum):
    """An event in the life of a stream."""

    APPEND = "a message"
    END = "the final response"
    FAIL = "an error as the final response"
    ABANDON = "no client came back in time"
    CANCEL = "the client cancelled"

    __hash__ = object.__hash__  # as in Outcome


LIVE, COMPLETED = Outcome.LIVE, Outcome.COMPLETED

TRANSITIONS: Final[dict[Outcome, dict[Event, Outcome]]] = {
    LIVE: {
        Event.APPEND: LIVE,
        Event.END: COMPLETED,
        Event.FAIL: Outcome.FAILED,
        Event.ABANDON: Outcome.ABANDONED,
        Event.CANCEL: Outcome.CANCELLED,
    },
    # A completed call cannot be cancelled any more: its response may be on its way already.
    COMPLETED: {Event.ABANDON: Outcome.ABANDONED},
    Outcome.FAILED: {Event.ABANDON: Outcome.ABANDONED},
    Outcome.ABANDONED: {},
    Outcome.CANCELLED: {},
}

# The sizes of handed lines are remembered in steps of at least this many bytes, so that the steps
# stay few.
MARK_BYTES: Final = 64 * 1024


class Question(msgspec.Struct):
    """A request to the client that has no answer yet."""

    seq: int
    line: bytes


class Flags(msgspec.Struct, frozen=True):
    """The answer to a poll. "pendingMessages: Whether there are unsent messages"."""

    is_live: bool
    has_failed: bool
    pending_messages: bool
    has_request: bool
    has_error: bool


class StreamState:
    """The marks, the outcome and the unsent batch of one stream."""

    __slots__ = (
        "_answered_at",
        "_batch",
        "_bytes_delivered",
        "_bytes_handed",
        "_bytes_numbered",
        "_last_error",
        "_last_request",
        "_limits",
        "_marks",
        "_record",
        "_restored",
        "_restored_handed",
        "_was_ended_at",
        "batch_bytes",
        "client_confirms",
        "delivered",
        "durable",
        "handed",
        "held_back",
        "idle_since",
        "is_paged",
        "last",
        "outcome",
        "pages",
        "position",
        "questions",
    )

    def __init__(self, record: Record, limits: Limits) -> None:
        self._record = record
        self._limits = limits
        self.outcome = record.outcome
        # Whether there may be responses before the final one, which only their page tokens confirm.
        self.is_paged = record.pages is not None
        self.pages = list(record.pages or ())  # the seqs of those that are kept
        self.last = self.durable = record.last
        self.delivered = record.acked
        self.handed = record.last if record.is_read else record.acked
        self.position: int | None = None
        self._last_request = record.last_request
        self._last_error = record.last_error
        self._was_ended_at = record.ended_at
        self._batch: list[bytes] = []
        self.batch_bytes = 0  # bytes that are numbered and wait for the next commit
        # Progress that there was no room for: the latest line of each token, without a number.
        self.held_back: dict[ProgressToken, bytes] = {}
        # Up to this seq the lines were numbered before this object was made, and their sizes are
        # not known.
        self._restored = record.last
        self._restored_handed = self.handed  # of these, the ones that are not measured any more
        self._bytes_numbered = self._bytes_handed = self._bytes_delivered = 0
        self._marks: deque[tuple[int, int]] = deque()  # (seq, bytes up to it), of what was handed
        self.questions: dict[RequestId, Question] = {}
        self.client_confirms = False  # the attached client, or the last one, sends cursors and acks
        self.idle_since: float | None = None  # None while a connection is attached
        self._answered_at: float | None = None  # when the last of all pages had been handed

    # Sending

    @property
    def has_room(self) -> bool:
        """Whether one more message may be numbered.

        "Servers should limit the number of unsent messages a disconnected stream may retain in
        order to prevent denial of service attacks".
        """
        return self._has_unsent_room and not (self.client_confirms and self._is_undelivered_full)

    @property
    def _has_unsent_room(self) -> bool:
        limits = self._limits
        has_place = self.last - self.handed < limits.unsent_entries_max
        return has_place and self._bytes_numbered - self._bytes_handed < limits.unsent_bytes_max

    @property
    def kept_bytes(self) -> int:
        """Bytes that were numbered since the stream came into memory, and are not delivered."""
        return max(0, self._bytes_numbered - self._bytes_delivered)

    @property
    def unmeasured(self) -> int:
        """How many undelivered lines `kept_bytes` leaves out: they came with the journal."""
        handed = max(0, self._restored_handed - self.delivered)
        return handed + max(0, self._restored - max(self.handed, self.delivered))

    def add(self, line: bytes, *, is_page: bool = False) -> bool:
        """Number a message; False, and nothing has changed, where there is no room for it.

        A page is a response that is not the last one. Undelivered lines take no room from it: the
        client confirms them by asking for the page that follows.
        """
        self._move(Event.APPEND)
        if not (self._has_unsent_room if is_page else self.has_room):
            return False
        if self.held_back:
            self._release_held()
        self._number(line)
        if is_page:
            self.pages.append(self.last)
        return True

    def add_progress(self, token: ProgressToken, line: bytes) -> bool:
        """Number a progress notification; without room the latest of its token is held back.

        A held line has no number yet, so the next one may replace it and leaves no gap.
        """
        self._move(Event.APPEND)
        if self.held_back or not self.has_room:
            self.held_back[token] = line
            return False
        self._number(line)
        return True

    def add_request(self, request_id: RequestId, line: bytes, *, is_forced: bool = False) -> bool:
        """Number a request to the client; False where there is no room and it is not forced."""
        self._move(Event.APPEND)
        if not (is_forced or self.has_room):
            return False
        self._release_held()
        self._number(line)
        self._last_request = self.last
        self.questions[request_id] = Question(self.last, line)
        return True

    def end(self, line: bytes, event: Event = Event.END, *, is_error: bool, at: float) -> None:
        """Number the final response; there is always room for it. `at` is wall time."""
        self.outcome = self._move(event)
        self._release_held()
        self._number(line)
        self._was_ended_at = at
        self.questions.clear()
        if is_error:
            self._last_error = self.last

    def release_held(self, *, is_forced: bool = False) -> bool:
        """Number what was held back where there is room again; returns whether anything was."""
        if not (self.held_back and self.outcome is LIVE and (is_forced or self.has_room)):
            return False
        self._release_held()
        return True

    def _release_held(self) -> None:
        for line in self.held_back.values():
            self._number(line)
        self.held_back.clear()

    def _number(self, line: bytes) -> None:
        self.last += 1
        self._batch.append(line)
        self.batch_bytes += len(line)
        self._bytes_numbered += len(line)

    def _move(self, event: Event) -> Outcome:
        try:
            return TRANSITIONS[self.outcome][event]
        except KeyError:
            raise Ended(f"{event.value}: the stream is {self.outcome.value} already") from None

    # Being written and delivered

    def take(self, fence: int) -> Append | None:
        """A change that makes the batch durable, or its first part; None where nothing is new.

        A long batch of messages that only follow each other comes in parts, as they are stored. So
        the journal need not copy it once more to split it.
        """
        batch = self._batch
        if not batch:
            return None
        first = self.last + 1 - len(batch)
        if self.batch_bytes > STORED_BYTES_MAX and self._is_plain_from(first):
            ends = accumulate(map(len, batch))
            count = sum(1 for _ in takewhile(STORED_BYTES_MAX.__ge__, ends)) or 1
            batch, self._batch = batch[:count], batch[count:]
        else:
            self._batch = []
        run = Run(first, len(batch), b"".join(batch))
        self.batch_bytes -= len(run.body)
        return Append(
            stream=self._record.stream,
            fence=fence,
            run=run,
            last_request=self._last_request,
            last_error=self._last_error,
            outcome=self.outcome,
            ended_at=self._was_ended_at,
            pages=tuple(seq for seq in self.pages if seq >= first),
        )

    def _is_plain_from(self, seq: int) -> bool:
        """Whether there is no request, page or final response from `seq` on."""
        has_page = bool(self.pages) and self.pages[-1] >= seq
        return self.outcome is LIVE and self._last_request < seq and not has_page

    def committed(self, seq: int) -> None:
        """Everything up to `seq` is durable."""
        if not self.is_tombstone:  # else the stream was closed while the commit was under way
            self.durable = max(self.durable, seq)

    def hand(self, run: Run) -> bool:
        """The run was handed to a sender; returns whether `delivered` has moved.

        It moves where a client that confirms nothing was sent more than is kept for it: then the
        oldest of that counts as delivered.
        """
        last = run.last
        self.committed(last)  # the journal may be ahead of its report of the commit
        if last <= self.handed:
            self.position = last
            return False
        news = run.after(self.handed)
        restored = news.until(self._restored).body if self.handed < self._restored else b""
        return self._hand(last, len(news.body), len(restored))

    def hand_elsewhere(self, last: int) -> bool:
        """As `hand`, where another replica has handed the lines: their size is estimated."""
        return self._hand(last, self._share_up_to(last), 0)

    def _hand(self, last: int, size: int, restored: int) -> bool:
        """Lines of `size` bytes more were handed.

        `restored` of these are of lines that were numbered before this object was made.
        """
        self.position = last
        if last <= self.handed:
            return False
        self._bytes_handed += size
        self._bytes_numbered += restored
        self.handed = last
        marks = self._marks
        if len(marks) > 1 and self._bytes_handed - marks[-2][1] < MARK_BYTES:
            marks.pop()
        marks.append((self.handed, self._bytes_handed))
        is_news = False
        while len(marks) > 1 and self._is_undelivered_full and not self.client_confirms:
            is_news |= self.deliver(marks[0][0])
        return is_news

    def follow(self, record: Record) -> None:
        """The owner of the stream, another replica, has changed its record to this one."""
        self._record = record
        self.outcome = record.outcome
        self.last = self.durable = max(self.durable, record.last)
        self._last_request, self._last_error = record.last_request, record.last_error
        self._was_ended_at = record.ended_at
        if record.pages is not None:
            self.pages = list(record.pages)
        if self.is_tombstone:
            self.position = None
        self.learn(record.acked)

    def learn(self, delivered: int, handed: int = 0) -> None:
        """The owner of the stream counts so much as delivered and as handed."""
        if self.position is None:
            self.delivered = max(self.delivered, delivered)
        self.handed = max(self.handed, handed, self.delivered)

    def deliver(self, seq: int) -> bool:
        """The client has everything up to `seq`; returns whether `delivered` has moved.

        It does not move past the attached delivery, whose messages must be kept.
        """
        if not self.delivered < seq <= (self.durable if self.position is None else self.position):
            return False
        if seq > self.handed:
            self._skip(seq)
        self.delivered = seq
        while self._marks and self._marks[0][0] <= seq:
            self._bytes_delivered = self._marks.popleft()[1]
        del self.pages[: bisect_right(self.pages, seq)]
        return True

    def _skip(self, seq: int) -> None:
        """Count lines as handed that were not: a store has lost them, and the client knows."""
        if size := self._share_up_to(seq):
            self._bytes_handed += size
            self._marks.append((seq, self._bytes_handed))
        self.handed = seq

    def _share_up_to(self, seq: int) -> int:
        """An estimate: the share of the lines up to `seq` in the unsent bytes."""
        first = max(self.handed, self._restored)
        if seq <= first:
            return 0
        unsent = self._bytes_numbered - self._bytes_handed
        return unsent * (seq - first) // (max(self.last, seq) - first)

    @property
    def bytes_numbered(self) -> int:
        """Bytes that were numbered since the stream came into memory."""
        return self._bytes_numbered

    @property
    def bytes_handed(self) -> int:
        """Bytes that were handed to senders since the stream came into memory."""
        return self._bytes_handed

    @property
    def _is_undelivered_full(self) -> bool:
        return self._bytes_handed - self._bytes_delivered >= self._limits.undelivered_bytes_max

    def close(self, event: Event, fence: int, *, at: float) -> Close:
        """Abandon or cancel: only a tombstone is kept. `at` is wall time."""
        self.outcome = self._move(event)
        self._batch.clear()
        self.batch_bytes = 0
        self.held_back.clear()
        self.pages.clear()
        self.questions.clear()
        self.position = None  # no lines are kept for the delivery
        self.delivered = self.handed = self.last = self.durable
        return Close(self._record.stream, fence, self.outcome, at)

    def restored(self, record: Record) -> Record:
        """The record as it is, where `record` is how it was when the stream came into memory."""
        return msgspec.structs.replace(
            record,
            outcome=self.outcome if self.durable == self.last else LIVE,
            last=self.durable,
            acked=self.delivered,
            last_request=min(self._last_request, self.durable),
            last_error=min(self._last_error, self.durable),
            ended_at=self._was_ended_at,
            pages=tuple(self.pages) if self.is_paged else None,
        )

    # Questions

    @property
    def is_ended(self) -> bool:
        """Whether the final response is numbered; it may still be on its way to disk or client."""
        return self.outcome.is_end

    @property
    def ended_at(self) -> float:
        """When the final response was numbered, in wall time; 0 before that."""
        return self._was_ended_at

    @property
    def has_failed(self) -> bool:
        """Whether the final response is an error, or a result that says `isError`."""
        return self.is_ended and self._last_error == self.last

    @property
    def is_tombstone(self) -> bool:
        """Whether only its outcome is kept: it was abandoned or cancelled."""
        return self.outcome.is_tombstone

    @property
    def is_drained(self) -> bool:
        """Whether the stream has ended and its client is known to have all of it."""
        return self.is_ended and self.delivered == self.last

    def is_finished(self, position: int) -> bool:
        """Whether a client that has everything up to `position` can stop waiting.

        Having ended is not enough: the last entries may still be on their way to disk.
        """
        return self.is_ended and position >= self.last

    def answer_after(self, position: int) -> int | None:
        """The seq of the first response behind `position`, a page or the final one. None before
        that was sent.
        """
        if self.is_paged and position < self.delivered:
            return self.delivered  # a page: nothing else moves the mark of such a stream
        page = next((seq for seq in self.pages if seq > position), None)
        return self.last if page is None and self.is_ended else page

    def flags(self, after: int | None = None) -> Flags:
        """The answer to a poll of a client that has everything up to `after` (or `delivered`).

        "hasRequest: Whether any pending messages include a server-to-client request"; a request
        that was delivered and not answered counts as well. "hasError: Whether any pending messages
        include an error result".
        """
        mark = self.delivered if after is None else after
        return Flags(
            # A final response that is not durable does not count, because a crash could take it
            # back: a client that is told "completed" and "nothing pending" expects nothing more.
            is_live=self.outcome is LIVE or self.durable < self.last,
            has_failed=self.outcome is Outcome.FAILED,
            pending_messages=self.durable > mark,
            has_request=(self.durable > mark and self._last_request > mark) or bool(self.questions),
            has_error=mark < self._last_error <= self.durable,
        )

    # Attached and detached

    def attach(self, position: int, *, confirms: bool) -> None:
        """A connection follows the stream from `position` on: the clock of `max` stands still."""
        self.position = position
        self.idle_since = None
        self.client_confirms = confirms

    def detach(self, now: float) -> None:
        """No connection follows the stream any more."""
        self.position = None
        self.fall_silent(now)

    def fall_silent(self, now: float) -> None:
        """The peer of the attached connection is silent: the clock of `max` runs again."""
        self.idle_since = now
        if self.is_paged and self._answered_at is None and self.is_finished(self.handed):
            self._answered_at = now

    def touch(self, now: float) -> None:
        """The client was heard of: the clock of `max` starts again."""
        if self.idle_since is not None:
            self.idle_since = now

    def early_s(self, now: float) -> float:
        """How many seconds longer the client should have waited before it resumed."""
        if self.idle_since is None:
            return 0.0
        return max(0.0, self.idle_since + self._record.min_s - now)

    @property
    def deadline(self) -> float | None:
        """When the stream expires unless a client uses it; None while a connection is attached.

        "max: Maximum seconds a client may wait before the server considers the stream abandoned".
        """
        if self.idle_since is None:
            return None
        limits = self._limits
        if self.is_tombstone:
            return self.idle_since + limits.tombstone_s
        if self._answered_at is not None:
            # "Clients MUST treat resume tokens from completed requests as expired."
            return min(self.idle_since + self._record.max_s, self._answered_at + limits.last_page_s)
        max_s = self._record.max_s
        return self.idle_since + (min(max_s, limits.drained_s) if self.is_drained else max_s)
