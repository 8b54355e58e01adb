"""A journal in memory: for tests, and for a server that is told no file.

It is bounded by what the engine lets go of, and by nothing else. All is durable as soon as it is
written, for as long as the process lives.
"""

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter

import msgspec
import trio

from streams.errors import JournalError
from streams.journal import (
    STORED_BYTES_MAX,
    Append,
    Change,
    Create,
    Grant,
    Record,
    SessionRecord,
    StreamChange,
    apply,
    apply_to_sessions,
    joined,
)
from streams.messages import Run

_last = attrgetter("last")


class MemoryJournal:
    """`streams.journal.Journal`, in memory."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}  # in the order of creation
        self._runs: dict[str, list[Run]] = {}
        self._rows = _Rows()

    async def claim(self) -> Sequence[Record]:
        await trio.lowlevel.checkpoint()
        for stream, record in self._records.items():
            self._records[stream] = msgspec.structs.replace(record, fence=record.fence + 1)
        return list(self._records.values())

    async def commit(self, changes: Sequence[Change]) -> Sequence[JournalError | None]:
        await trio.lowlevel.checkpoint()  # first: who is cancelled here has written nothing
        return [self._commit_one(change) for change in changes]

    async def sessions(self) -> tuple[Sequence[SessionRecord], Sequence[Grant]]:
        await trio.lowlevel.checkpoint()
        return list(self._rows.sessions.values()), list(self._rows.grants.values())

    async def read(self, stream: str, after: int, *, bytes_max: int) -> Run | None:
        await trio.lowlevel.checkpoint()
        runs = self._runs.get(stream, [])
        first = bisect_right(runs, after, key=_last)
        return joined((runs[i] for i in range(first, len(runs))), after, bytes_max)

    async def aclose(self) -> None:
        """Nothing to let go of: another engine may take the same journal over, as if restarted."""
        await trio.lowlevel.checkpoint()

    def _commit_one(self, change: Change) -> JournalError | None:
        if change.stream is None:
            apply_to_sessions(self._rows, change, self._records.__contains__)
            return None
        before = self._records.get(change.stream)
        try:
            record = apply(before, change)
        except JournalError as error:
            return error
        if record is before:
            return None
        if record is None:
            del self._records[change.stream], self._runs[change.stream]
            self._rows.drop_grants_of_stream(change.stream)
            return None
        self._records[change.stream] = record
        self._store(change, record)
        return None

    def _store(self, change: StreamChange, record: Record) -> None:
        if isinstance(change, Create):
            self._runs[change.stream] = []
            return
        runs = self._runs[change.stream]
        if isinstance(change, Append):
            runs.extend(change.run.split(STORED_BYTES_MAX))
        else:
            del runs[: bisect_right(runs, record.acked, key=_last)]


_At = tuple[str, str]  # a session's key and a delivery


class _Rows:
    """`streams.journal.SessionRows`; whoever was put last is last."""

    def __init__(self) -> None:
        self.sessions: dict[str, SessionRecord] = {}
        self.grants: dict[_At, Grant] = {}
        # Streams are forgotten often, and must not look through the grants of all the others.
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
