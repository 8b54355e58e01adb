"""The journal's promises, kept outside of it: the changes it has acknowledged, and the rules for
them.

The ledger computes its state from the changes alone, by rules of its own: a mistake in the
journal's rules is not repeated here.
"""

from collections.abc import Mapping, Sequence

import msgspec
import trio

from streams.journal.contract import Journal
from streams.journal.records import (
    Ack,
    Append,
    Change,
    Close,
    Create,
    Forget,
    Outcome,
    Record,
    Restore,
)
from streams.messages import Run
from tests.simulation.world import Job, World

PLENTY = 1 << 24


class Known(msgspec.Struct):
    """A stream's durable state, from the acknowledged changes."""

    job: Job
    last: int = 0
    acked: int = 0
    outcome: Outcome = Outcome.LIVE
    has_ended: bool = False  # with its final response, whatever came later


class Ledger:
    """All streams that ever existed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.known: dict[str, Known] = {}
        self.forgotten: dict[str, Known] = {}  # as they were then
        self.filed: set[str] = set()  # streams whose records the journal was given
        self.vanished: set[str] = set()  # with all that the store has lost
        self.others: set[str] = set()  # streams of no job
        self.lines: dict[str, list[bytes]] = {}  # of each stream, all lines that ever had a number
        self.seqs: dict[str, dict[bytes, int]] = {}

    def asked(self, changes: Sequence[Change]) -> None:
        """The server asks for a commit of these changes."""
        for change in changes:
            match change:
                case Create():
                    self._check_create(change.record)
                case Ack():
                    self._check_ack(change)
                case Forget():
                    self._check_forget(change)

    def _check_create(self, record: Record) -> None:
        """A call whose requests are all answered leaves nothing behind."""
        self.filed.add(record.stream)
        job = self._job_of(record)
        if job is None:
            return
        if job.filed != record.stream:
            self._world.expect(
                job.open_requests, f"{job.key} is recorded after the answer to its request"
            )
        job.filed = record.stream
        self._world.reach(job, "asked")

    def _job_of(self, record: Record) -> Job | None:
        arguments = msgspec.json.decode(record.origin)["params"]["arguments"]
        return self._world.jobs[arguments["job"]] if "job" in arguments else None

    def _check_ack(self, change: Ack) -> None:
        known = self.known.get(change.stream)
        if known is not None:
            self._world.expect(
                change.acked <= known.job.handed,
                f"{known.job.key}: {change.acked} counts as delivered, {known.job.handed} were",
            )

    def _check_forget(self, change: Forget) -> None:
        self._world.expect(
            change.stream in self.filed, "a stream is forgotten that was never there"
        )
        known = self.known.get(change.stream)
        if known is None:
            return
        job = known.job
        is_fine = (
            not job.has_ticket
            or job.is_cancelled
            or job.max_s < 1_000
            or job.part.is_plain
            or (known.has_ended and job.handed == known.last)
        )
        self._world.expect(is_fine, f"{job.key} is forgotten: {job.handed} of {known.last}")

    def has(self, job: Job, line: bytes) -> bool:
        """Whether a message of a job is durable. A response may be under another request's id."""
        if job.stream is None:
            return False
        if line in self.seqs[job.stream]:
            return True
        *_, last = self.lines[job.stream] or [b"{}"]
        said, kept = msgspec.json.decode(line), msgspec.json.decode(last)
        names = ("method", "result", "error")
        return "method" not in said and all(said.get(name) == kept.get(name) for name in names)

    def is_news(self, stream: str, seq: int) -> bool:
        """Whether this line was not yet known to be durable."""
        known = self.known.get(stream)
        return known is not None and seq > known.last

    def done(self, changes: Sequence[Change]) -> None:
        """The journal acknowledges these changes."""
        for change in changes:
            if isinstance(change, Create):
                self._create(change.record)
            elif change.stream in self.known:
                self._do(change, self.known[change.stream])

    def _create(self, record: Record) -> None:
        if record.stream in self.known or record.stream in self.forgotten:
            return
        job = self._job_of(record)
        if job is None:
            self.others.add(record.stream)
            return
        is_too_late = job.max_s < 1_000 and not job.has_ticket
        if job.stream in self.forgotten and is_too_late:
            job.begin_anew()
        elif job.stream in self.forgotten and job.part.is_repeatable:
            job.stream = None
        elif job.has_lost and job.stream in self.vanished:
            job.begin_anew()
        self._world.expect(job.stream is None, f"{job.key} has two streams")
        job.stream = job.filed = record.stream
        job.is_recorded = True
        self._world.counts["records"] += 1
        self._world.reach(job, "durable")
        self.known[record.stream] = Known(job)
        self.lines[record.stream] = []
        self.seqs[record.stream] = {}

    def _do(self, change: Change, known: Known) -> None:
        match change:
            case Append():
                self._append(change, known)
            case Ack():
                known.acked = max(known.acked, min(change.acked, known.last))
            case Close():
                if not known.outcome.is_tombstone:
                    known.outcome, known.acked = change.outcome, known.last
            case Forget():
                self.forgotten[change.stream] = self.known.pop(change.stream)

    def _append(self, change: Append, known: Known) -> None:
        lines = self.lines[change.stream]
        expect = self._world.expect
        run = change.run
        expect(run.seq <= known.last + 1, f"{known.job.key}: {known.last}, then {run.seq}")
        self._check_lines(known.job, run, lines)
        for seq, line in enumerate(lines_of(run), run.seq):
            if seq == len(lines) + 1:
                lines.append(line)
                if self._world.plan.sharing is not None:
                    known.job.durable_at[seq] = trio.current_time()
                known_at = self.seqs[change.stream].setdefault(line, seq)
                is_same = known_at == seq or known.job.has_lost  # what was lost is sent again
                expect(is_same, f"{known.job.key}: {seq} says what {known_at} has said")
        if run.last > known.last:
            known.last = run.last
            known.outcome = change.outcome
            known.has_ended = change.outcome.is_end

    def _check_lines(self, job: Job, run: Run, lines: list[bytes]) -> None:
        """A number is never given to another line."""
        known = lines[run.seq - 1 : run.last]
        same = lines_of(run)[: len(known)]
        self._world.expect(same == known, f"{job.key}: {run.seq} to {run.last} were something else")

    # Of a store that replicas share

    def owned(self, record: Record) -> None:
        """A replica owns a stream, or has put its record back: no line has a lost number again."""
        known = self.known.get(record.stream)
        if known is None or record.lost is None:
            return
        self._world.counts["gaps"] += 1
        known.job.has_lost = True
        known.job.lost.append(record.lost)
        known.last = max(known.last, record.lost[1])
        lines = self.lines[record.stream]
        lines.extend([b""] * (known.last - len(lines)))

    def restored(self, change: Restore, record: Record) -> None:
        """An owner has put a record back, which is this one now."""
        known, its = self.known.get(change.stream), change.record
        if known is not None and known.last < its.last:
            known.last, known.acked, known.outcome = its.last, its.acked, its.outcome
            known.has_ended = its.outcome.is_end
        self.owned(record)

    def went_back(self, records: Mapping[str, Record]) -> None:
        """The store has these records now, and has lost what came after them."""
        for stream in records:
            if stream in self.forgotten:
                self.known[stream] = self.forgotten.pop(stream)
        for stream, known in list(self.known.items()):
            kept = records.get(stream)
            if kept is None:
                self.vanished.add(stream)
                known.last = known.acked = 0
                known.outcome, known.has_ended = Outcome.LIVE, False
            elif (kept.last, kept.acked, kept.outcome) == (known.last, known.acked, known.outcome):
                continue
            else:
                known.last, known.acked, known.outcome = kept.last, kept.acked, kept.outcome
                had_ended = known.has_ended and kept.outcome.is_tombstone
                known.has_ended = kept.outcome.is_end or had_ended
            known.job.has_lost = True
            self._world.counts["streams that lost something"] += 1

    def lost_server(self) -> None:
        """A server is gone, with all records that it had not stored."""
        for job in self._world.jobs.values():
            if not job.is_recorded:
                job.filed = None

    async def check(self, journal: Journal, in_flight: Sequence[Change]) -> None:
        """Check the journal after a crash: all is there, and of the commit in flight all or
        nothing.
        """
        self.lost_server()
        if in_flight and await self._has(journal, in_flight):
            self.done(in_flight)
        for stream, known in self.known.items():
            await self._check_stream(journal, stream, known)
        for stream in self.forgotten:
            self._world.expect(await journal.find(stream) is None, "what was forgotten is back")

    async def _has(self, journal: Journal, changes: Sequence[Change]) -> bool:
        """Whether a commit in flight was made."""
        for change in changes:
            if isinstance(change, Create):
                return await journal.find(change.stream) is not None
            known = self.known.get(change.stream or "")
            if known is None:
                continue
            assert change.stream is not None
            record = await journal.find(change.stream)
            match change:
                case Append() if change.run.last > known.last:
                    return record is not None and record.last >= change.run.last
                case Ack() if known.acked < change.acked <= known.last:
                    return record is not None and record.acked >= change.acked
                case Close() if not known.outcome.is_tombstone:
                    return record is not None and record.outcome.is_tombstone
                case Forget():
                    return record is None
        return True  # it changes nothing that can be seen

    async def _check_stream(self, journal: Journal, stream: str, known: Known) -> None:
        key, record = known.job.key, await journal.find(stream)
        if record is None:
            self._world.expect(stream in self.vanished, f"{key} is not in the journal any more")
            return
        found = (record.last, record.acked, record.outcome)
        expected = (known.last, known.acked, known.outcome)
        self._world.expect(found == expected, f"{key}: {expected} was durable, {found} is there")
        if known.job.has_lost:
            return
        lines: list[bytes] = []
        after = record.acked
        while runs := await journal.read(stream, after, bytes_max=PLENTY):
            self._world.expect(runs[0].seq == after + 1, f"{key}: {after + 1} is missing")
            lines += [line for run in runs for line in lines_of(run)]
            after = runs[-1].last
        self._world.expect(after == record.last, f"{key}: {after + 1} to {record.last} are missing")
        is_same = lines == self.lines[stream][record.acked : record.last]
        self._world.expect(is_same, f"{key}: other lines are in the journal than were put there")


def lines_of(run: Run) -> list[bytes]:
    """The messages in a run."""
    return run.body.splitlines(keepends=True)
