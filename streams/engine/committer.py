"""Group commit: the changes of many streams go to the journal in one durable step.

While one commit is under way the next batch gathers. So a slower disk makes larger batches, not a
longer queue.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

import trio

from streams.clock import backoff_s
from streams.engine.hooks import Hooks
from streams.errors import (
    INTERNAL_ERROR,
    Full,
    JournalError,
    JournalUnusable,
    Refusal,
    StoreAway,
    StoreUnsafe,
    Unavailable,
    refusal,
)
from streams.exchange import authenticated
from streams.faults import log_failure
from streams.journal.contract import Journal, Shortage
from streams.journal.records import Ack, Append, Change, Evict, Forget, StreamChange
from streams.journal.sessions import SessionChange
from streams.journal.webhooks import WebhookChange
from streams.limits import MIB, STORE_RETRY_S
from streams.logs import log

BATCH_BYTES_MAX: Final = 16 * MIB  # that may wait for one commit
# The bytes of one stream that may wait for a commit, while as many are in the one under way. A
# commit delays all other streams, so a stream may have little in it while others send, and much,
# which is faster, while it is alone.
ALONE_BYTES_MAX: Final = 2000 * 1024  # not quite eight stored runs: a ninth would be a short one
SHARED_BYTES_MAX: Final = 32 * 1024
# A stream counts as alone when no other one was in a commit for this time. A stream that sends less
# often waits once for a large commit, some milliseconds, and a flood meanwhile is four times as
# fast.
SHARED_S: Final = 0.1
# Acks wait this long for other changes. A lost ack costs a repeated delivery and nothing else.
ACK_DELAY_S: Final = 1.0
RETRY_FIRST_S: Final = 0.05
RETRY_LAST_S: Final = 2.0
AWAY_LAST_S: Final = 0.2  # the same for a store that is away, which an attempt hardly troubles
FEW_BYTES: Final = 4 * 1024  # a batch of a stream that is committed even with little room left
LOOK_BYTES: Final = MIB  # of lines that are committed between two looks at the room
LOOK_S: Final = 0.25
SHORTAGE_S: Final = 0.25  # before streams that wait for room are tried again


# Called after each commit, with the seconds that it took and its changes.
CommitListener = Callable[[float, Sequence[Change]], None]


class Source(Protocol):
    """A stream with new lines, or anything else that waits until its changes are durable."""

    @property
    def can_wait(self) -> bool:
        """Whether its change may wait until there is room. A change that ends a stream may not."""

    @property
    def is_anonymous(self) -> bool:
        """Whether it is a stream of an anonymous caller, of a session or a connection."""

    def take(self) -> Sequence[Append | Evict]:
        """Its next changes, called when the commit begins."""

    def committed(self, seq: int) -> None:
        """The changes that were added before, and its lines up to `seq`, are durable."""


class _Waiter:
    """Has no change of its own, and calls a function when earlier changes are durable."""

    can_wait = False
    is_anonymous = False

    def __init__(self, on_durable: Callable[[], object]) -> None:
        self._on_durable = on_durable

    def take(self) -> Sequence[Append]:
        return ()

    def committed(self, seq: int) -> None:
        self._on_durable()


class Committer:
    """Collects changes and commits them; `run` it in a task of its own."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._changes: list[Change] = []
        self._acks: dict[str, Ack] = {}
        self._sources: dict[Source, int] = {}  # bytes
        self._wanted = trio.Event()
        self._pressed = trio.Event()  # and something of that may not wait
        self._taken = trio.Event()
        self._done = trio.Event()
        self._is_committing = False
        self.committed_at = -math.inf  # when the journal has taken changes last
        # Around `run_until_stopped`, so that a cancelled server still commits its shutdown.
        self._scope = trio.CancelScope(shield=True)
        self._is_stopped = False
        self.failure: JournalUnusable | None = None  # that has ended `run_until_stopped`
        self._trouble: Unavailable | None = None
        self._shortage: Shortage | None = None  # of room for anything
        self._anonymous_shortage: Shortage | None = None
        self._bytes_since_look = 0
        self._looked_at = -math.inf
        self._shared_at = -math.inf
        self.stream_bytes_max = ALONE_BYTES_MAX
        self.waiting_bytes = 0  # numbered, and not yet durable
        self._anonymous_bytes = 0  # besides, and waits for room of the anonymous callers
        self.listeners: tuple[CommitListener, ...] = ()
        # Of a shared journal: called with each change that it refuses. Returns what mends that.
        self.on_refused: Callable[[StreamChange, JournalError], Sequence[Change]] | None = None
        self.hooks: Hooks | None = None  # makes webhooks, if there are any

    def add(self, change: Change, *, may_wait: bool = False) -> None:
        """Make a change durable, after all that were added before it.

        If it `may_wait`, it waits for other changes as long as an ack does.
        """
        if isinstance(change, Forget):
            # Acks follow the changes of a commit, so this one would find no stream.
            self._acks.pop(change.stream, None)
        self._changes.append(change)
        self._want(may_wait=may_wait)

    def ack(self, change: Ack) -> None:
        """Make an ack durable within `ACK_DELAY_S`."""
        self._acks[change.stream] = change
        self._want(may_wait=True)

    def _want(self, *, may_wait: bool = False) -> None:
        self._wanted.set()
        if not may_wait:
            self._pressed.set()

    def mark(self, source: Source, size: int, *, may_wait: bool = False) -> None:
        """Take the change of `source` with the next commit: `size` bytes more than at the last
        mark. See `add`.
        """
        self._sources[source] = self._sources.get(source, 0) + size
        self.waiting_bytes += size
        self._want(may_wait=may_wait)
        if self.stream_bytes_max != SHARED_BYTES_MAX and len(self._sources) > 1:
            # Now, and not with the commit: forty streams that begin together have little each.
            self._note_sharing(len(self._sources))

    async def settled(self, *changes: Change) -> None:
        """Make changes durable. Waits until they and all earlier changes are.

        Raises `Unavailable` once the server has shut down.
        """
        is_durable = trio.Event()
        self.when_settled(is_durable.set, *changes)
        while not is_durable.is_set():
            await self.commit_done()

    def when_settled(
        self, do: Callable[[], object], *changes: Change, may_wait: bool = False
    ) -> None:
        """Make changes durable. Calls `do` when they and all earlier changes are. See `add`."""
        for change in changes:
            self.add(change, may_wait=may_wait)
        self.mark(_Waiter(do), 0, may_wait=may_wait)

    @property
    def trouble(self) -> str:
        """Why the journal takes nothing now; "" while it takes changes."""
        trouble = self._trouble
        return "" if trouble is None else f"the journal takes nothing new now ({trouble})"

    def store_told(self, trouble: StoreUnsafe | None) -> None:
        """The store takes nothing, or takes changes again, as the last look at it has shown.

        A commit that is under way finds that out by itself.
        """
        if not self._is_committing:
            self._trouble = trouble

    @property
    def why_not(self) -> str:
        """Why clients should go elsewhere; "" where they should not.

        A shortage of room is no reason: clients must come in to confirm what they have. Nor is a
        store that is away, which is away for all replicas: see `Leases.why_late`.
        """
        return "" if isinstance(self._trouble, StoreAway) else self.trouble

    def check(self, principal: str | None = None, *, is_freeing: bool = False) -> None:
        """Raise `Refusal` while the journal takes nothing new.

        With a principal the check is for a new call of that principal. Without, it is for a
        session, which needs little room, and may bring acks that make room. Its end needs none.
        """
        shortage = self._journal.shortage
        if principal is None and shortage is not None and (is_freeing or not shortage.is_severe):
            shortage = None
        if shortage is None and principal is not None:
            theirs = self._journal.anonymous_shortage
            if theirs is not None and not authenticated(principal):
                self._look_again_soon()
                raise refusal("too_many_bytes", limit=theirs.limit).saying(
                    "Too much waits for all callers without authentication together: resume or "
                    "cancel some calls, or try again later."
                )
        if shortage is not None and shortage.limit is not None:
            raise refusal("journal_full", limit=shortage.limit, used=shortage.used).saying(
                f"The journal has no room for new calls, {shortage.used} bytes of "
                f"{shortage.limit} are in use: resume or cancel some, or try again later."
            )
        trouble = self._trouble or shortage
        if trouble is not None:
            if isinstance(trouble, StoreAway):  # its text has an address that no client needs
                raise refusal("unavailable", retryAfter=STORE_RETRY_S).saying(
                    "The store of the journal cannot be used now: try again later."
                )
            message = f"The journal takes nothing new now ({trouble}): try again later."
            raise Refusal(INTERNAL_ERROR, message)

    def _look_again_soon(self) -> None:
        """Start a commit, even an empty one: only a commit updates the anonymous callers' share.

        While their calls are refused there may be no other commit.
        """
        if trio.current_time() - self._looked_at >= LOOK_S:
            self._want()

    def is_full(self, *, is_anonymous: bool) -> bool:
        """Whether a stream should wait for a commit before it sends more."""
        held = self._anonymous_bytes if is_anonymous else 0
        return self.waiting_bytes + held >= BATCH_BYTES_MAX

    async def commit_begun(self) -> None:
        """Wait until the next commit has taken what waits for it. Raises as `settled` does."""
        taken = self._taken
        await taken.wait()
        if taken is self._taken:
            await self.check_running()

    async def commit_done(self) -> None:
        """Wait for the end of the next commit, or of the one that is under way. Raises as `settled`
        does.
        """
        done = self._done
        await done.wait()
        if done is self._done:
            await self.check_running()

    async def check_running(self) -> None:
        """Raise `Unavailable` once nothing is committed any more."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._is_stopped:
            raise Unavailable("The server has shut down: nothing more is stored.")

    async def settle(self) -> None:
        """Wait until everything that was added so far is durable."""
        if self._changes or self._sources or self._acks:
            self._want()
        while self._changes or self._sources or self._acks or self._is_committing:
            await self.commit_done()

    async def run(self) -> None:
        """Commit for ever. Raises `JournalUnusable` where the journal cannot be used any more."""
        while True:
            await self._wanted.wait()
            if not self._pressed.is_set():
                with trio.move_on_after(ACK_DELAY_S):
                    await self._pressed.wait()
            self._wanted, self._pressed = trio.Event(), trio.Event()
            await self._commit_once()
            if self._sources and (self._shortage or self._anonymous_shortage) is not None:
                await self._wait_for_room()

    async def run_until_stopped(self) -> None:
        """As `run`, shielded from cancellation until `stop`."""
        with self._scope:
            try:
                await self.run()
            except JournalUnusable as error:
                self.failure = error
                raise

    def stop(self) -> None:
        """Commit nothing more. All that wait for a commit raise `Unavailable`."""
        self._scope.cancel()
        self._is_stopped = True
        self._taken.set()
        self._done.set()

    async def _wait_for_room(self) -> None:
        """Wait for acks, which make room, or for another program to free space on the disk."""
        with trio.move_on_after(SHORTAGE_S):
            await self._wanted.wait()
        self._want()

    async def _commit_once(self) -> None:
        self._look_for_room()
        changes = [*self._changes, *self._acks.values()]
        self._changes.clear()
        self._acks.clear()
        sources = list(self._take_sources())
        self._note_sharing(len(sources))
        taken: list[tuple[Source, Change | None]] = []
        for source in sources:
            found = source.take()
            changes += found
            taken += ((source, change) for change in found or (None,))
        self._taken.set()
        self._taken = trio.Event()
        self._is_committing = True
        began_at = trio.current_time()
        await self._commit(changes, taken)
        self._is_committing = False
        self._tell_listeners(trio.current_time() - began_at, changes)
        _tell(taken)
        if self.hooks is not None:
            self.hooks.committed()
        self._done.set()
        self._done = trio.Event()

    def _tell_listeners(self, took_s: float, changes: Sequence[Change]) -> None:
        for tell in self.listeners:
            try:
                tell(took_s, changes)
            except Exception as error:
                log_failure("a listener to commits failed", error)

    def _look_for_room(self) -> None:
        """Ask the journal for shortages, but not at each commit: that asks the disk.

        Between two looks the reserve that is kept for the ends of streams is enough.
        """
        now = trio.current_time()
        self._bytes_since_look += self.waiting_bytes
        is_due = self._bytes_since_look >= LOOK_BYTES or now - self._looked_at >= LOOK_S
        is_short = (self._shortage or self._anonymous_shortage) is not None
        if not (is_due or is_short):
            return
        self._bytes_since_look, self._looked_at = 0, now
        self._look_for_anonymous_room()
        shortage = self._journal.shortage
        if shortage is not None and self._shortage is None:
            log.warning("there is no room for new calls, and running ones wait", why=str(shortage))
        elif shortage is None and self._shortage is not None:
            log.info("there is room again")
        self._shortage = shortage

    def _look_for_anonymous_room(self) -> None:
        shortage, was = self._journal.anonymous_shortage, self._anonymous_shortage
        if shortage is not None and was is None:
            log.warning("anonymous callers wait for room, and begin no calls", why=str(shortage))
        elif shortage is None and was is not None:
            log.info("there is room for anonymous callers again")
        self._anonymous_shortage = shortage

    def _take_sources(self) -> Iterable[Source]:
        """The sources for this commit. With little room left, those with many bytes wait."""
        sources, self._sources = self._sources, {}
        self.waiting_bytes = self._anonymous_bytes = 0
        of_all, of_anonymous = _few(self._shortage), _few(self._anonymous_shortage)
        if of_all == of_anonymous == math.inf:
            return sources
        for source, size in sources.items():
            if not source.can_wait:
                continue
            if size > of_all:
                self._sources[source] = size
                self.waiting_bytes += size
            elif source.is_anonymous and size > of_anonymous:
                self._sources[source] = size
                self._anonymous_bytes += size
        return [source for source in sources if source not in self._sources]

    def _note_sharing(self, sources: int) -> None:
        now = trio.current_time()
        if sources > 1:
            self._shared_at = now
        is_shared = now - self._shared_at < SHARED_S
        self.stream_bytes_max = SHARED_BYTES_MAX if is_shared else ALONE_BYTES_MAX

    async def _commit(
        self, changes: list[Change], taken: list[tuple[Source, Change | None]]
    ) -> None:
        """Make changes durable, in smaller steps where there is no room for one step.

        The sources of each smaller step are told at once and removed from `taken`. Then their lines
        are delivered and confirmed, which makes room for the next step.
        """
        failures = 0
        steps = [changes]
        mended: set[int] = set()
        while steps:
            try:
                outcomes = await self._journal.commit(steps[0])
            except Unavailable as trouble:
                if self._trouble is None:
                    log.warning("the journal takes nothing; trying again", why=str(trouble))
                self._trouble = trouble
                if isinstance(trouble, Full) and len(steps[0]) > 1:
                    steps[:1] = _parts(steps[0])
                    continue
                last_s = AWAY_LAST_S if isinstance(trouble, StoreAway) else RETRY_LAST_S
                await trio.sleep(backoff_s(RETRY_FIRST_S, failures, last_s))
                failures += 1
                steps[0] = self._with_acks(steps[0])
                continue
            done = steps.pop(0)
            if done:
                self.committed_at = trio.current_time()
            again = self._mended(done, outcomes, taken, mended) if any(outcomes) else []
            if again:
                steps.insert(0, again)
            if steps:
                ids = set(map(id, done)).difference(map(id, again))
                _tell([(source, change) for source, change in taken if id(change) in ids])
                taken[:] = [each for each in taken if id(each[1]) not in ids]
        if self._trouble is not None:
            log.info("the journal takes messages again")
            self._trouble = None

    def _mended(
        self,
        changes: Sequence[Change],
        outcomes: Sequence[JournalError | None],
        taken: list[tuple[Source, Change | None]],
        mended: set[int],
    ) -> list[Change]:
        """Return the changes to commit in place of refused ones, whose sources are told nothing.

        Where one process owns the journal, every change comes from its memory. So a change that
        does not fit means that memory and journal differ, and only a restart can mend that.
        """
        again: list[Change] = []
        refused = set()
        for change, error in zip(changes, outcomes, strict=True):
            if error is None:
                continue
            if self.on_refused is None or isinstance(change, SessionChange | WebhookChange):
                raise error
            mend = self.on_refused(change, error)
            if mend and isinstance(change, Append) and id(change) not in mended:
                mended.add(id(change))
                again += [*mend, change]
            else:
                refused.add(id(change))
        taken[:] = [each for each in taken if id(each[1]) not in refused]
        return again

    def _with_acks(self, changes: list[Change]) -> list[Change]:
        """Put the acks that have come since ahead of the changes. A newer ack replaces an older one
        of the same stream.
        """
        acks, self._acks = self._acks, {}
        rest = (each for each in changes if not (isinstance(each, Ack) and each.stream in acks))
        return [*acks.values(), *rest]


def _tell(taken: list[tuple[Source, Change | None]]) -> None:
    """Tell sources that their changes are durable."""
    for source, change in taken:
        source.committed(change.run.last if isinstance(change, Append) else 0)


def _parts(changes: list[Change]) -> tuple[list[Change], list[Change]]:
    """Split changes into the acks, which make room, and the others; without acks into halves.

    An ack may go ahead of the others, because it is for lines that were durable before them.
    """
    acks: list[Change] = [change for change in changes if isinstance(change, Ack)]
    others: list[Change] = [change for change in changes if not isinstance(change, Ack)]
    if acks and others:
        return acks, others
    half = len(changes) // 2
    return changes[:half], changes[half:]


def _few(shortage: Shortage | None) -> float:
    """The largest batch of a stream that does not wait for room."""
    if shortage is None:
        return math.inf
    return 0 if shortage.is_severe else FEW_BYTES
