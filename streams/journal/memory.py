"""A journal in memory: for tests, and for a server without a journal file.

It has no limit of its own: the engine's limits bound it. A commit is durable at once, for as long
as the process lives.
"""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import islice
from operator import attrgetter

import msgspec
import trio

from streams.errors import JournalError
from streams.journal.alone import Alone
from streams.journal.contract import STORED_BYTES_MAX, Shortage, Totals, Wanted
from streams.journal.records import (
    Append,
    Change,
    Create,
    Evict,
    Outcome,
    Record,
    StreamChange,
    apply,
)
from streams.journal.runs import joined
from streams.journal.sessions import Grant, SessionRecord, apply_to_sessions
from streams.journal.webhooks import DropWebhook, SaveWebhook, Webhook, apply_to_webhooks
from streams.messages import Run

_last = attrgetter("last")
_number = attrgetter("number")
_due_at = attrgetter("due_at")


class MemoryJournal(Alone):
    """`streams.journal.contract.Journal`, in memory."""

    shortage: Shortage | None = None  # memory is not measured
    anonymous_shortage: Shortage | None = None

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._runs: dict[str, list[Run]] = {}
        self._names: dict[bytes, str] = {}
        self._names_of: dict[str, set[bytes]] = {}
        self._evicted = _Evicted()
        self._rows = _Rows()
        self._webhooks = _Webhooks()

    async def claim(self, owner: str = "", wanted: Wanted | None = None) -> Sequence[Record]:
        await trio.lowlevel.checkpoint()
        for stream, record in self._records.items():
            self._records[stream] = msgspec.structs.replace(record, fence=record.fence + 1)
        resident = (record for record in self._records.values() if record.due_at is None)
        return sorted(resident, key=_number)

    async def commit(self, changes: Sequence[Change]) -> Sequence[JournalError | None]:
        await trio.lowlevel.checkpoint()  # first: a cancelled commit has written nothing
        return [self._commit_one(change) for change in changes]

    async def sessions(self) -> tuple[Sequence[SessionRecord], Sequence[Grant]]:
        await trio.lowlevel.checkpoint()
        grants = self._rows.grants.values()
        resident = [grant for grant in grants if self._records[grant.stream].due_at is None]
        return list(self._rows.sessions.values()), resident

    async def read(self, stream: str, after: int, *, bytes_max: int) -> Sequence[Run]:
        await trio.lowlevel.checkpoint()
        runs = self._runs.get(stream, [])
        first = bisect_right(runs, after, key=_last)
        return joined((runs[i] for i in range(first, len(runs))), after, bytes_max)

    async def totals(self) -> Totals:
        await trio.lowlevel.checkpoint()
        last_number = max((record.number for record in self._records.values()), default=0)
        return Totals(len(self._evicted), last_number)

    async def streams(self, after: int, limit: int) -> Sequence[tuple[Record, Sequence[bytes]]]:
        """See `streams.journal.copying.Whole.streams`."""
        await trio.lowlevel.checkpoint()
        later = (record for record in self._records.values() if record.number > after)
        found = heapq.nsmallest(limit, later, key=_number)
        return [(record, sorted(self._names_of.get(record.stream, ()))) for record in found]

    async def newest(self, *, before: int | None = None, limit: int) -> Sequence[Record]:
        await trio.lowlevel.checkpoint()
        earlier = (r for r in self._records.values() if before is None or r.number < before)
        return heapq.nlargest(limit, earlier, key=_number)

    async def beginning_with(self, prefix: str, *, limit: int) -> Sequence[str]:
        await trio.lowlevel.checkpoint()
        return list(islice((each for each in self._records if each.startswith(prefix)), limit))

    async def find(self, stream: str) -> Record | None:
        await trio.lowlevel.checkpoint()
        return self._records.get(stream)

    async def principal_of(self, stream: str) -> str | None:
        record = await self.find(stream)
        return None if record is None else record.principal

    async def named(self, name: bytes, *, is_secret: bool = False) -> str | None:
        await trio.lowlevel.checkpoint()
        return self._names.get(name)

    async def grants(self, stream: str) -> Sequence[Grant]:
        await trio.lowlevel.checkpoint()
        return [grant for grant in self._rows.grants.values() if grant.stream == stream]

    async def listed(
        self, principal: str, *, after: int, limit: int, only_read: bool = False
    ) -> Sequence[Record]:
        await trio.lowlevel.checkpoint()
        records = map(self._records.__getitem__, self._evicted.wanted(principal, after))
        return list(islice((r for r in records if r.is_read or not only_read), limit))

    async def count(self, principal: str) -> int:
        await trio.lowlevel.checkpoint()
        return len(self._evicted.wanted(principal, 0))

    async def due(self, *, limit: int, only_unwanted: bool = False) -> Sequence[Record]:
        await trio.lowlevel.checkpoint()
        return [self._records[stream] for stream in self._evicted.due(limit, only_unwanted)]

    async def webhooks(self, *, limit: int) -> Sequence[Webhook]:
        await trio.lowlevel.checkpoint()
        return heapq.nsmallest(limit, self._webhooks.kept.values(), key=_due_at)

    async def count_webhooks(self) -> int:
        await trio.lowlevel.checkpoint()
        return len(self._webhooks.kept)

    async def aclose(self) -> None:
        """Nothing to close. Another engine may take over the same journal, as after a restart."""
        await trio.lowlevel.checkpoint()

    def _commit_one(self, change: Change) -> JournalError | None:
        if change.stream is None:
            if isinstance(change, SaveWebhook | DropWebhook):
                apply_to_webhooks(self._webhooks, change)
            else:
                apply_to_sessions(self._rows, change, self._records.__contains__)
            return None
        before = self._records.get(change.stream)
        try:
            record = apply(before, change)
        except JournalError as error:
            return error
        if isinstance(change, Create | Evict) and change.names:
            self._name(change)
        if record is before:
            return None
        if before is not None:
            self._evicted.remove(before)
        if record is None:
            self._drop(change.stream)
            return None
        self._evicted.add(record)
        self._records[change.stream] = record
        self._store(change, record)
        return None

    def _name(self, change: Create | Evict) -> None:
        for name in change.names:
            self._names[name] = change.stream
        self._names_of.setdefault(change.stream, set()).update(change.names)

    def _drop(self, stream: str) -> None:
        del self._records[stream], self._runs[stream]
        for name in self._names_of.pop(stream, ()):
            if self._names.get(name) == stream:
                del self._names[name]
        self._rows.drop_grants_of_stream(stream)

    def _store(self, change: StreamChange, record: Record) -> None:
        runs = self._runs.setdefault(change.stream, [])
        if isinstance(change, Append):
            runs.extend(change.run.split(STORED_BYTES_MAX))
            for webhook in change.webhooks:
                self._webhooks.put_webhook(webhook)
        if record.outcome is not Outcome.LIVE or not isinstance(change, Append):
            del runs[: bisect_right(runs, record.trimmed, key=_last)]


class _Evicted:
    """The evicted streams, in the orders in which lookups return them."""

    def __init__(self) -> None:
        self._due: dict[bool, list[tuple[float, int, str]]] = {True: [], False: []}  # by is_wanted
        self._wanted: dict[str, list[tuple[int, str]]] = {}  # of each principal

    def __len__(self) -> int:
        return sum(map(len, self._due.values()))

    def add(self, record: Record) -> None:
        """Add a stream, if it is evicted."""
        if record.due_at is not None:
            insort(self._due[record.is_wanted], (record.due_at, record.number, record.stream))
            if record.is_wanted:
                wanted = self._wanted.setdefault(record.principal, [])
                insort(wanted, (record.number, record.stream))

    def remove(self, record: Record) -> None:
        """Remove a stream, if it is evicted; `record` must be the one that was added."""
        if record.due_at is not None:
            due = self._due[record.is_wanted]
            del due[bisect_left(due, (record.due_at, record.number, record.stream))]
            if record.is_wanted:
                wanted = self._wanted[record.principal]
                del wanted[bisect_left(wanted, (record.number, record.stream))]
                if not wanted:
                    del self._wanted[record.principal]

    def wanted(self, principal: str, after: int) -> list[str]:
        """A principal's streams that are still wanted, with numbers above `after`."""
        wanted = self._wanted.get(principal, [])
        return [stream for _, stream in wanted[bisect_left(wanted, (after + 1, "")) :]]

    def due(self, limit: int, only_unwanted: bool) -> list[str]:
        """Up to `limit` streams, those that are due first."""
        kinds = [self._due[False]] if only_unwanted else self._due.values()
        return [stream for _, _, stream in islice(heapq.merge(*kinds), limit)]


class _Webhooks:
    """`streams.journal.webhooks.WebhookRows`."""

    def __init__(self) -> None:
        self.kept: dict[str, Webhook] = {}

    def put_webhook(self, webhook: Webhook) -> None:
        self.kept[webhook.id] = webhook

    def drop_webhook(self, id: str) -> None:
        self.kept.pop(id, None)


_At = tuple[str, str]  # a session's key and a delivery


class _Rows:
    """`streams.journal.sessions.SessionRows`, in the order in which rows were last put."""

    def __init__(self) -> None:
        self.sessions: dict[str, SessionRecord] = {}
        self.grants: dict[_At, Grant] = {}
        # Streams are forgotten often, which must not search the grants of all other streams.
        self._of_session: dict[str, set[_At]] = {}
        self._of_stream: dict[str, set[_At]] = {}

    def has_session(self, key: str) -> bool:
        return key in self.sessions

    def put_session(self, record: SessionRecord) -> None:
        self.drop_session(record.key)
        self.sessions[record.key] = record

    def drop_session(self, key: str) -> None:
        self.sessions.pop(key, None)

    def put_grant(self, grant: Grant) -> None:
        at = (grant.session, grant.delivery)
        self.drop_grant(*at)
        self.grants[at] = grant
        self._of_session.setdefault(grant.session, set()).add(at)
        self._of_stream.setdefault(grant.stream, set()).add(at)

    def drop_grant(self, session: str, delivery: str) -> None:
        at = (session, delivery)
        grant = self.grants.pop(at, None)
        if grant is None:
            return
        for index, of in ((self._of_session, session), (self._of_stream, grant.stream)):
            index[of].remove(at)
            if not index[of]:
                del index[of]

    def drop_grants_of_session(self, key: str) -> None:
        for at in list(self._of_session.get(key, ())):
            self.drop_grant(*at)

    def drop_grants_of_stream(self, stream: str) -> None:
        for at in list(self._of_stream.get(stream, ())):
            self.drop_grant(*at)
