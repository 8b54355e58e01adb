"""All writing of a replica: commits, claims, and what it owns.

The writer has a connection of its own, and makes one commit at a time. It keeps the record of each
stream that this replica owns, with the mark that the store has; the store refuses a commit if a
mark differs, and the writer then reads and applies the changes anew. Changes may be applied twice
without harm, so a commit whose outcome is unknown is simply repeated.

Each commit has a number, and the store keeps the last one of each replica. A lower number than the
last confirmed one tells that the store has gone back: see `streams.journal.redis.replay`.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import trio
from msgspec.structs import replace

from streams.clock import wall
from streams.errors import Fenced, JournalError, JournalUnusable, StoreAway
from streams.journal.contract import Wanted
from streams.journal.newest import NewestRuns
from streams.journal.records import (
    Ack,
    Change,
    Close,
    Create,
    Evict,
    Forget,
    Outcome,
    Record,
    Restore,
)
from streams.journal.redis import codec
from streams.journal.redis.batch import Batch, Known, Staged, arguments
from streams.journal.redis.link import Link, Servers
from streams.journal.redis.replay import Recent
from streams.journal.redis.settings import Settings, check, look
from streams.journal.sessions import DropGrant, DropSession
from streams.journal.webhooks import DropWebhook
from streams.keys import new_name
from streams.limits import MIB, Durability
from streams.logs import log

CALL_BYTES_MAX: Final = 4 * MIB  # of one call: the store does nothing else for some milliseconds
STREAMS_AT_ONCE: Final = 100  # that are claimed or released by one call
# A commit is computed anew if another replica has changed one of its streams meanwhile, or if the
# store has gone back. Each is rare, so many in a row are a fault.
ATTEMPTS_MAX: Final = 20
# The numbers that a claim leaves out if the store may have lost some that clients know. More lines
# than this are never lost at once, and 2^53, which JSON holds, has room for a million such jumps.
JUMP: Final = 2**32
# How long a commit waits for replicas of the store, as a part of the time for a call.
WAIT_PART: Final = 0.8
CLAIMED: Final = -2  # the state of a replica whose streams are claimed
KEYS_GONE: Final = 1  # the state of the keys of tokens in the store
KEYS_DIFFER: Final = 2
NEVER: Final = 2**53  # a number of a commit that is never reached
_FREEING: Final = (Ack, Close, Forget, Evict, DropSession, DropGrant, DropWebhook)


class Writer:
    """Commits for one replica; its methods run one at a time."""

    def __init__(
        self,
        servers: Servers,
        *,
        durability: Durability,
        replicas_acked: int,
        session_idle_s: float,
        lease_s: float,
        newest: NewestRuns,
        turns: Mapping[bytes, str],
        renamed: Callable[[], None],
        moved: Callable[[], None],
    ) -> None:
        """All lines that it commits go to `newest`, too. `turns` are those that this replica has,
        with their holders. `renamed` is called when this replica gets a new name, `moved` when
        another server (or the same one, after a restart) takes the commits.
        """
        self._servers = servers
        self._durability: Durability = durability
        self._replicas_acked = replicas_acked
        self._session_idle_s = session_idle_s
        self._lease_s = lease_s
        self._newest = newest
        self._turns = turns
        self._lost_turns: set[bytes] = set()  # that a commit has found to be over
        self._owned: dict[str, Known] = {}
        self._renamed = renamed
        self._moved = moved
        self._prefix = f"{{{servers.address.prefix}}}:"
        self.link = Link(servers, self._greet)
        self.settings: Settings | None = None
        self.bytes = self.anonymous_bytes = 0  # of all streams in the store, as last told
        self.epoch = 0
        self.has_gone_back = False  # perhaps: what no commit brings back may be lost
        self.keys_mark = ""  # the hash of the keys of tokens that the store should have
        self.has_entered = False  # others may know this replica
        self.wanted: Counter[str] = Counter()  # the wanted streams that it owns, by principal
        self._turn = trio.StrictFIFOLock()
        self._counts: dict[str, int] = {}  # of all replicas, as last told
        self._counts_epoch = 0
        # Counts that the store has perhaps lost, and until when these replicas may show them again.
        self._lost_counts: dict[str, int] = {}
        self._lost_counts_until = -math.inf
        self._versions = bytes.fromhex(new_name(6)), 0
        self._be_new()

    def _be_new(self) -> None:
        """Take a new name, and own nothing."""
        self.replica = new_name()
        self.is_claimed = False  # its streams were claimed, which `renew` has yet to tell
        self._number = self._confirmed = 0
        self._forget_lines()
        self._owned.clear()
        self._doubtful: set[str] = set()  # of those, the ones to read again
        self._is_in_doubt = False  # the outcome of the last commit is unknown
        self._replay_since: int | None = None  # the store lacks our commits after this one
        self._is_torn = False  # and we have not kept all of those
        self._recent = Recent()
        self.wanted.clear()

    # The connection

    async def _greet(self, link: Link) -> None:
        """Look at the server of a new connection, and make this replica known there."""
        before, self.settings = self.settings, await look(link)
        if before is not None and before.server != self.settings.server:
            self._moved()
        try:
            check(self.settings, self._servers.address, self._durability, self._replicas_acked)
        except JournalUnusable as error:
            if before is None:
                raise
            raise StoreAway(str(error)) from error  # a replica that runs waits until it is mended
        server = self.settings.server or new_name()
        epoch, *counts = await link.function("open", codec.SCHEMA, server)
        self.epoch = int(epoch)
        self.bytes, self.anonymous_bytes = (int(count or 0) for count in counts)
        name = self.replica
        if await self._enter(link) == CLAIMED:
            if name == self.replica:  # else another answer has told so meanwhile
                self._disown()
            await self._enter(link)

    async def _enter(self, link: Link) -> int:
        """Make this replica known. Returns its state."""
        self.has_entered = True
        state, schema = await link.function("enter", self.replica, 0, codec.SCHEMA)
        if schema > codec.SCHEMA:
            raise JournalUnusable(
                f"The journal in {self._servers.address} has schema {schema}, and this version "
                f"knows {codec.SCHEMA}: upgrade mcp-streams here."
            )
        return int(state)

    def _disown(self) -> None:
        """The streams of this replica were claimed: it has a new name, and owns none."""
        log.warning("other replicas have claimed the streams of this one", replica=self.replica)
        self._be_new()
        self.is_claimed = True
        self._renamed()

    async def begin_anew(self) -> None:
        """All keys of the journal were deleted: enter it as a new replica."""
        async with self._turn:
            self._be_new()
            self._renamed()
            self.link.drop()
            await self.link.connection()

    # Leases

    async def renew(self, link: Link) -> Mapping[str, int] | None:
        """See `Journal.renew`."""
        for _ in range(ATTEMPTS_MAX):
            if self.is_claimed:
                self.is_claimed = False
                return None
            if (counts := await self._renew(link)) is not None:
                return counts
        raise StoreAway(f"{self._servers.address}: the store goes back all the time")

    async def _renew(self, link: Link) -> Mapping[str, int] | None:
        """Renew once. None if the store did not know this replica, or lacked commits of it."""
        name, confirmed, asked_at = self.replica, self._confirmed, trio.current_time()
        # An heir leaves no numbers out of streams that their owner vouches for.
        vouches = not self._is_torn and self._replay_since is None
        vouched = confirmed if vouches else NEVER
        state, stored, epoch, keys, *found = await link.function(
            "renew", name, vouched, self._promise(), codec.SCHEMA, self.keys_mark
        )
        self.epoch = max(self.epoch, int(epoch))
        self._look_at_keys(keys)
        is_behind = not state or stored < confirmed
        if is_behind or int(epoch) != self._counts_epoch:
            self._lost_counts |= self._counts
            self._lost_counts_until = asked_at + 2 * self._lease_s
            self._counts_epoch = int(epoch)
            self.has_gone_back = True
        if name != self.replica:
            return None
        self._number = max(self._number, stored)  # it is higher if another program has set it
        if state == CLAIMED:
            self._disown()
            await link.function("enter", self.replica, 0, codec.SCHEMA)  # others answer to it
            return None
        if is_behind or self._replay_since is not None:
            await self._mend()
            return None
        self._recent.drop_old(asked_at)
        self._counts = self._counts_in(found)
        return self._with_lost_counts()

    def _counts_in(self, found: Sequence[bytes]) -> dict[str, int]:
        """The counts of all replicas. One that is no number stays as it was, or is ignored."""
        counts: dict[str, int] = {}
        for field, stored in zip(found[::2], found[1::2], strict=True):
            replica = field.decode(errors="replace")
            count = self._servers.complaints.decoded(
                f"{self._prefix}replicas", int, stored, part=f"field {replica}"
            )
            count = self._counts.get(replica) if count is None else count
            if count is not None:
                counts[replica] = count
        return counts

    def _look_at_keys(self, found: int) -> None:
        """Whether the store has the keys of tokens that this replica uses."""
        self.has_gone_back |= found == KEYS_GONE
        if found == KEYS_DIFFER:
            event = (
                "the store has other keys of tokens than this replica: send it SIGHUP to read "
                "them, or restore its own"
            )
            key = f"{self._prefix}keys"
            self._servers.complaints.warn(event, key, key=key)

    def _with_lost_counts(self) -> Mapping[str, int]:
        """The counts, and those of replicas that a store which has gone back does not know.

        A replica that lives renews there soon. One that does not is gone after a lease.
        """
        if trio.current_time() >= self._lost_counts_until:
            self._lost_counts.clear()
        self._lost_counts = {
            replica: count
            for replica, count in self._lost_counts.items()
            if count >= 0 and replica not in self._counts
        }
        return self._lost_counts | self._counts

    def _promise(self) -> str:
        """Its commits survive: `replicas`, a failover of the store; `disk`, a restart."""
        if self._replicas_acked:
            return "replicas"
        return "disk" if self.settings is not None and self.settings.is_synced else ""

    async def _mend(self) -> None:
        """The store does not have our last commits: apply them again."""
        async with self._turn:
            self._is_in_doubt = True
            await self._commit(())

    async def claim(self, owner: str, wanted: Wanted | None = None) -> Sequence[Record]:
        """See `Journal.claim`."""
        async with self._turn:
            self._check_lease()
            verified = await self.link.function("begin_claim", owner) if owner else None
            failures, before = 0, dict[str, bytes]()
            while failures < ATTEMPTS_MAX:
                await self._replay()
                streams = await self._owned_by(owner, wanted)
                if not streams:
                    if owner:
                        await self.link.function("end_claim", owner)
                    return []
                known = await self._look_up(streams, is_fresh=True)
                claimed = await self._give(owner, streams, known, verified)
                if claimed:
                    return sorted(claimed, key=lambda record: record.number)
                failures += claimed is None or streams == before
                before = streams
            raise StoreAway(f"{self._servers.address}: other replicas claim the same streams")

    async def _owned_by(self, owner: str, wanted: Wanted | None = None) -> dict[str, bytes]:
        """Some streams of an owner that are wanted, with their members of its index.

        Those that run come first, then the others, in the order of numbers.
        """
        index = f"{self._prefix}o:{owner}"
        after = 0
        while True:
            members = await self.link.call(b"ZRANGE", index, after, after + STREAMS_AT_ONCE - 1)
            found = {codec.stream_in(each[1:]): each for each in members}
            streams = {each: found[each] for each in found if wanted is None or wanted(each)}
            if streams or not members:
                return streams
            after += STREAMS_AT_ONCE

    async def _give(
        self,
        owner: str,
        members: Mapping[str, bytes],
        known: Mapping[str, Known],
        verified: bytes | None,
    ) -> list[Record] | None:
        """Claim streams of an owner; those that are evicted have none from now on. None: again."""
        batch = self._batch(known)
        claimed = []
        for each in known.values():
            record = each.record
            if record is None or record.owner != owner:
                continue
            if record.due_at is not None or _may_rest(record):
                batch.replace(_freed(record))
                continue
            if record.outcome is Outcome.LIVE and self._may_lack_lines(each.mark, verified):
                record = _jumped(record)
            record = replace(record, owner=self.replica, fence=record.fence + 1)
            batch.replace(record)
            claimed.append(record)
        others = ["I", owner, *_unindexed(owner, members, known)]
        if not await self._write(batch, others, is_freeing=True):
            return None
        self._remember_claims(claimed)
        return claimed

    def _remember_claims(self, claimed: Sequence[Record]) -> None:
        """A store that goes back gets these claims again, before what was committed after them."""
        changes = [Restore(record.fence, record) for record in claimed]
        self._recent.add(self._number, trio.current_time(), changes)

    def _may_lack_lines(self, mark: bytes, verified: bytes | None) -> bool:
        """Whether the store may have lost lines of a stream that clients know.

        `verified` is the epoch in which its last owner has seen that the store has all of them.
        """
        if verified is None:
            epoch, promise = codec.parse_mark(mark).epoch, self._promise()
        else:
            found, _, promise = verified.decode(errors="replace").partition(":")
            epoch = int(found) if found.isdecimal() else -1
        if epoch == self.epoch or promise == "replicas":
            return False
        return not (promise == "disk" and self.settings and not self.settings.was_promoted)

    async def take(self, stream: str) -> Record | None:
        """See `Journal.take`."""
        async with self._turn:
            self._check_lease()
            for _ in range(ATTEMPTS_MAX):
                await self._replay()
                known = await self._look_up([stream], is_fresh=True)
                record = known[stream].record
                if record is None or record.owner not in ("", self.replica):
                    return record
                taken = self._taken(record, known[stream].mark)
                batch = self._batch(known)
                if taken is not record:
                    batch.replace(taken)
                # Also without a change: the answer tells whether the store has all our commits.
                if await self._write(batch, ("I", ""), is_freeing=True):
                    if taken is not record:
                        self._remember_claims([taken])
                    return taken
            raise StoreAway(f"{self._servers.address}: other replicas take the same stream")

    def _taken(self, record: Record, mark: bytes) -> Record:
        """The record of a stream without an owner, or of this replica, once it is taken."""
        if record.owner:
            is_torn = self._is_torn and codec.parse_mark(mark).epoch < self.epoch
            if not is_torn or record.outcome is not Outcome.LIVE:
                return record
            record = _jumped(record)
        elif record.outcome is Outcome.LIVE and self._may_lack_lines(mark, None):
            record = _jumped(record)
        return replace(record, owner=self.replica, fence=record.fence + 1)

    async def release(self) -> None:
        """See `Journal.release`."""
        async with self._turn:
            name, failures, is_told = self.replica, 0, False
            before: dict[str, bytes] = {}
            while streams := await self._owned_by(name):
                await self._replay()
                known = await self._look_up(streams)
                theirs = [r for each in known.values() if (r := each.record) and r.owner == name]
                if not is_told and not any(record.outcome is Outcome.LIVE for record in theirs):
                    is_told = True  # others need not wait for those that have ended
                    await self.link.function("released", name)
                batch = self._batch(known)
                for record in theirs:
                    batch.replace(_freed(record))
                others = ["I", name, *_unindexed(name, streams, known)]
                is_done = await self._write(batch, others, is_freeing=True)
                failures += not is_done or streams == before
                before = streams
                if self.replica != name:  # others have claimed the rest
                    return
                if failures == ATTEMPTS_MAX:
                    raise StoreAway(f"{self._servers.address}: others change the same streams")
            if not is_told:
                await self.link.function("released", name)

    async def leave(self) -> None:
        """This replica owns nothing any more, and ends."""
        async with self._turn:
            await self.link.function("leave", self.replica)

    def _check_lease(self) -> None:
        if self.is_claimed:
            raise StoreAway("the streams of this replica were claimed: renew first")

    # Commits

    async def commit(self, changes: Sequence[Change]) -> Sequence[JournalError | None]:
        """See `Journal.commit`."""
        async with self._turn:
            return await self._commit(changes)

    async def _commit(self, changes: Sequence[Change]) -> Sequence[JournalError | None]:
        is_freeing = all(isinstance(change, _FREEING) for change in changes)
        streams = {change.stream: None for change in changes if change.stream is not None}
        self._lost_turns.clear()
        for _ in range(ATTEMPTS_MAX):
            await self._replay()
            known = await self._look_up(streams)
            batch = self._batch(known)
            answers = [self._refused(change, known) or batch.apply(change) for change in changes]
            if batch.is_empty and not self._is_in_doubt:
                return answers
            if await self._write(batch, (), is_freeing=is_freeing, needs_turns=True):
                self._recent.add(self._number, trio.current_time(), tuple(changes))
                return answers
        raise StoreAway(f"{self._servers.address}: the same streams change all the time")

    def _refused(self, change: Change, known: Mapping[str, Known]) -> Fenced | None:
        """The error of a change that this replica may not make any more."""
        name = f"stream {(change.stream or '')[:8]}…"
        if self.is_claimed and change.stream:
            return Fenced(f"{name}: the streams of this replica were claimed")
        if not isinstance(change, Create) or known[change.stream].record is not None:
            return None
        is_over = change.turn not in self._turns or change.turn in self._lost_turns
        return Fenced(f"{name}: its turn is over") if change.turn and is_over else None

    async def _replay(self) -> None:
        """Apply again what the store has lost of our commits."""
        for _ in range(ATTEMPTS_MAX):
            since = self._replay_since
            if since is None:
                return
            changes, is_all = self._recent.since(since)
            log.warning(
                "the store has gone back: changes are applied again",
                changes=len(changes),
                is_all=is_all,
            )
            self._is_torn = self._is_torn or not is_all
            self._doubtful.update(self._owned)
            self._forget_lines()
            streams = {change.stream: None for change in changes if change.stream is not None}
            known = await self._look_up(streams)
            if self._replay_since is None:  # claimed meanwhile
                return
            batch = self._batch(known)
            for change in changes:
                batch.apply(change)  # a refused one is of a stream that others own by now
            if await self._write(batch, (), is_freeing=True):
                self._replay_since = None
                self._recent.renumber(since, self._number, trio.current_time())
        raise StoreAway(f"{self._servers.address}: the store goes back all the time")

    def _batch(self, known: Mapping[str, Known]) -> Batch:
        return Batch(self.replica, known, self._session_idle_s)

    async def _look_up(self, streams: Iterable[str], *, is_fresh: bool = False) -> dict[str, Known]:
        """The streams as the store has them, from memory if this replica owns them."""
        known: dict[str, Known] = {}
        missing = []
        for stream in streams:
            owned = self._owned.get(stream)
            if owned is None or is_fresh or stream in self._doubtful:
                missing.append(stream)
            else:
                known[stream] = owned
        if missing:
            for stream, found in zip(missing, await fetch(self.link, missing), strict=True):
                self._keep(stream, found)
                known[stream] = found
        return known

    def _keep(self, stream: str, known: Known) -> None:
        """Keep what the store has of a stream, if this replica owns it."""
        before = self._owned.pop(stream, None)
        self._doubtful.discard(stream)
        if before is not None and before.record is not None and before.record.is_wanted:
            self.wanted[before.record.principal] -= 1
            if not self.wanted[before.record.principal]:
                del self.wanted[before.record.principal]
        record = known.record
        if record is not None and record.owner == self.replica:
            self._owned[stream] = known
            if record.is_wanted:
                self.wanted[record.principal] += 1
        else:
            self._newest.drop(stream)

    def _keep_lines(self, staged: Staged) -> None:
        """Keep the committed lines of a stream that this replica owns in memory, too."""
        if staged.is_new or staged.lost is not None:
            self._newest.drop(staged.stream)
        record = staged.after.record
        if record is not None and record.owner == self.replica and staged.lost is None:
            self._newest.add(staged.stream, staged.runs)
            self._newest.drop(staged.stream, record.trimmed)

    def _forget_lines(self) -> None:
        """The store may have other lines of the streams that were owned here."""
        for stream in self._owned:
            self._newest.drop(stream)

    async def _write(
        self,
        batch: Batch,
        others: Sequence[Any],
        *,
        is_freeing: bool,
        needs_turns: bool = False,
    ) -> bool:
        """Write a batch. False if the store differs from what was known: apply it again."""
        parts = batch.parts(CALL_BYTES_MAX)
        name = "commit_freeing" if is_freeing else "commit"
        for part in parts:
            is_last = part is parts[-1]
            marks, operations = arguments(part, self.epoch, self._next_version)
            named = [staged.turn for staged in part if staged.turn and needs_turns]
            turns = [each for turn in named for each in (turn, self._turns.get(turn, ""))]
            if is_last:
                operations += [*batch.of_sessions(), *others]
            try:
                is_done = await self._call(name, marks, turns, operations, is_last=is_last)
            except BaseException:
                self._is_in_doubt = True
                self._doubtful.update(staged.stream for staged in part)
                raise
            if not is_done:
                return False
            for staged in part:
                self._keep(staged.stream, staged.after)
                self._keep_lines(staged)
        self._is_in_doubt = False
        return True

    async def _call(
        self,
        name: str,
        marks: list[Any],
        turns: list[Any],
        operations: list[Any],
        *,
        is_last: bool,
    ) -> bool:
        number = self._number = self._number + 1
        replica = self.replica
        commands: list[Sequence[Any]] = [
            self.link.function_command(
                name,
                replica,
                number,
                self._confirmed,
                len(marks) // 2,
                len(turns) // 2,
                *marks,
                *turns,
                *operations,
            )
        ]
        if self._replicas_acked and is_last:
            commands += self._waits()
        (status, *details), *waited = await self.link.calls(commands)
        if replica != self.replica:  # claimed meanwhile: the answer is not for the new name
            return False
        match status:
            case b"done":
                self.bytes, self.anonymous_bytes = details
                self._check_waited(waited)
                self._confirmed = number
                return True
            case b"changed":
                self._doubtful.update(each.decode() for each in details)
            case b"turned":
                self._lost_turns.update(details)
            case b"claimed":
                self._disown()
                await self._enter(self.link)
            case b"unknown":
                await self._enter(self.link)
            case b"back":
                self._confirmed = details[0]
                since = self._replay_since
                self._replay_since = details[0] if since is None else min(since, details[0])
            case _:  # late: a repeated commit of ours came first
                pass
        return False

    def _waits(self) -> list[Sequence[Any]]:
        """The commands that wait until replicas of the store have the commit.

        They follow the commit on the same connection, since they wait for the writes of that.
        WAITAOF alone takes a second: it asks the replicas where they are before they have synced
        the commit, and then not again until they tell by themselves. WAIT lets them sync first.
        """
        wait_ms = int(1000 * WAIT_PART * self._servers.call_s / 2)
        wait = (b"WAIT", self._replicas_acked, wait_ms)
        if self._durability == "process":
            return [wait]
        return [wait, (b"WAITAOF", 1, self._replicas_acked, wait_ms)]

    def _check_waited(self, waited: list[Any]) -> None:
        if not waited:
            return
        local, replicas = waited[-1] if self._durability == "power" else (1, waited[-1])
        if not local or replicas < self._replicas_acked:
            raise StoreAway(
                f"{self._servers.address}: {replicas} of {self._replicas_acked} replicas of the "
                "store have the last commit in time: look at its replication"
            )

    def _next_version(self) -> bytes:
        """A version that no other commit has."""
        base, count = self._versions
        self._versions = base, count + 1
        return base + count.to_bytes(codec.VERSION_BYTES - len(base))


async def fetch(link: Link, streams: Sequence[str]) -> list[Known]:
    """Streams as the store has them, in one round trip."""
    found = await link.read([look_up(link, stream) for stream in streams])
    return [looked_up(link, stream, each) for stream, each in zip(streams, found, strict=True)]


def look_up(link: Link, stream: str) -> Sequence[Any]:
    """The command that reads a stream's record; `looked_up` takes its answer."""
    return (b"HMGET", _key(link, stream), b"k", b"p", b"i", b"o")


def looked_up(link: Link, stream: str, answer: Sequence[bytes | None] | None) -> Known:
    """A stream as the store has it. An unreadable record counts as absent, but has its mark."""
    k, p, i, o = answer or (None, None, None, None)
    if k is None:
        return Known()
    fields = (stream, k, p or b"", i or b"", o or b"")
    found = link.servers.complaints.decoded(_key(link, stream), codec.record_of, *fields)
    if found is None:
        return Known(None, k)
    record, size = found
    return Known(record, k, ((record.last, size),) if size else ())


def _key(link: Link, stream: str) -> str:
    return f"{{{link.servers.address.prefix}}}:r:{stream}"


def _unindexed(
    owner: str, members: Mapping[str, bytes], known: Mapping[str, Known]
) -> Iterable[Any]:
    """The operations that remove members of an owner's index whose streams are not its own."""
    for stream, member in members.items():
        record, mark = known[stream].record, known[stream].mark
        if record is None and mark:  # it cannot be read, so no replica can own it
            yield from ("M", f"o:{owner}", member)
        elif record is None or record.owner != owner:
            yield from ("Z", owner, stream, member)


def _may_rest(record: Record) -> bool:
    """Whether a stream needs no owner, as after an `Evict`."""
    return record.outcome is not Outcome.LIVE and record.pages is None


def _freed(record: Record) -> Record:
    """The record without an owner. A stream that has ended waits for its client, or its deadline,
    so that no replica has to take it over.
    """
    due_at = wall() + record.max_s if record.due_at is None and _may_rest(record) else record.due_at
    return replace(record, owner="", due_at=due_at)


def _jumped(record: Record) -> Record:
    """The record of a stream of which the store may lack lines: these numbers are left out."""
    return record.losing(record.last + JUMP)
