"""`RedisJournal`: the contract of journals, over the store."""

import hashlib
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeVar

import msgspec
import trio

from streams.clock import StoreClock, steady, wall
from streams.errors import Full, JournalError, JournalUnusable, StoreAway, StoreUnsafe
from streams.journal.contract import News, Shortage, Totals, Wanted
from streams.journal.newest import NewestRuns
from streams.journal.records import Change, Record
from streams.journal.redis import codec
from streams.journal.redis.damage import UNREADABLE, WHAT_TO_DO
from streams.journal.redis.lines import Lines
from streams.journal.redis.link import Link, Servers
from streams.journal.redis.news import Listener
from streams.journal.redis.settings import described, why_unsafe
from streams.journal.redis.writer import Writer, fetch
from streams.journal.sessions import Grant, SessionRecord
from streams.journal.webhooks import Webhook
from streams.keys import new_name
from streams.limits import MIB, Durability
from streams.logs import log
from streams.messages import Run

SCANNED_AT_ONCE: Final = 1000  # keys
LOOKED_UP_AT_ONCE: Final = 200  # records of one round trip
MEMBERS_AT_ONCE: Final = 5_000  # of an index, in one round trip
TURN_FIRST_S: Final = 0.005  # between two tries to have a turn that another replica has
TURN_LAST_S: Final = 0.1
TURNS_AT_ONCE: Final = 1000  # that are renewed by one call
TURN_LEASES: Final = 2
MEMORY_S: Final = 0.25  # between two looks at the memory of the store
IDLE_S: Final = 1.0  # the same while nothing is written
# Room that is kept for calls to end, as with a disk.
RESERVE_BYTES: Final = 64 * MIB
RESERVE_PART: Final = 8

_T = TypeVar("_T")
_settings: Final = msgspec.json.Decoder(dict[str, str]).decode


class RedisJournal:
    """`streams.journal.contract.Journal`, shared; `open_redis_journal` makes it."""

    def __init__(
        self,
        servers: Servers,
        *,
        lease_s: float,
        durability: Durability,
        replicas_acked: int,
        bytes_max: int | None,
        anonymous_bytes_max: int | None,
        cache_bytes_max: int,
        session_idle_s: float,
    ) -> None:
        self._servers = servers
        self._lease_s = lease_s
        self._durability: Durability = durability
        self._replicas_acked = replicas_acked
        self._bytes_max = bytes_max
        self._anonymous_bytes_max = anonymous_bytes_max
        self._prefix = f"{{{servers.address.prefix}}}:"
        self._reader = Link(servers)
        newest = NewestRuns(cache_bytes_max)
        self._turns: dict[bytes, str] = {}  # that this replica has, with the holder
        self._lines = Lines(self._reader, self._prefix, newest)
        self._writer = Writer(
            servers,
            durability=durability,
            replicas_acked=replicas_acked,
            session_idle_s=session_idle_s,
            lease_s=lease_s,
            newest=newest,
            turns=self._turns,
            renamed=self._renamed,
            moved=self._moved,
        )
        self.listener = Listener(servers, self._reader, lambda: self.replica)
        # Of turns. No locks, which only the task releases that has acquired them.
        self._locks: dict[bytes, trio.Semaphore] = {}
        self._posted = 0
        self._post_base = new_name(4)
        self._is_closed = False
        self._known_keys: bytes | None = None
        self._used_beside: int | None = None  # bytes of the store's memory beside the streams
        self._maxmemory: int | None = None
        self._policy: str | None = None
        self._has_written = trio.Event()
        self._clock = StoreClock()

    async def open(self, *, copies: bool, only_existing: bool) -> None:
        """Connect, and refuse a store that is not safe, or holds a part of a copy, or no journal.

        Without `only_existing` a new journal begins there.
        """
        if only_existing:
            [is_there] = await self._calls((b"EXISTS", self._servers.key))
            if not is_there:
                raise JournalUnusable(
                    f"{self._servers.address} has no journal under the prefix "
                    f"{self._servers.address.prefix}: name its prefix with ?prefix=NAME."
                )
        await self._writer.link.connection()
        await self._look_at_clock()
        [marker] = await self._calls((b"EXISTS", self._prefix + "copying"))
        if marker and not copies:
            raise JournalUnusable(
                f"The journal in {self._servers.address} is an unfinished copy: run mcp-streams "
                "copy again, or choose another prefix."
            )
        await self._look_at_memory()

    def _renamed(self) -> None:
        self.listener.listen_anew()

    def _moved(self) -> None:
        """The other connections may be to a server that is no primary any more, and lags."""
        self._reader.drop()
        self.listener.listen_anew()

    async def listen(self, nursery: trio.Nursery) -> None:
        """Begin to hear of other replicas. Raises what keeps it from that."""
        nursery.start_soon(self.listener.run)
        nursery.start_soon(self.watch_memory)
        with trio.move_on_after(2 * self._servers.call_s):
            await self.listener.is_listening.wait()
            self.listener.check()
            return
        raise StoreAway(f"{self._servers.address}: its channels do not answer")

    def describe(self) -> str:
        """One line for the log: where the store is, and what a crash of the store, or of its
        machine, may cost."""
        settings = self._writer.settings
        assert settings is not None
        return described(settings, self._servers.address, self._durability, self._replicas_acked)

    @property
    def is_volatile(self) -> bool:
        """Whether a crash of the store loses all since its last snapshot."""
        settings = self._writer.settings
        return settings is not None and settings.is_append_only is False

    # Room

    @property
    def shortage(self) -> Shortage | None:
        if self._used_beside is not None and self._maxmemory:
            used = self._used_beside + self._writer.bytes  # which each commit tells
            found = _shortage(used, self._maxmemory, "of the store's maxmemory are free")
            if found is not None:
                return found
        return self._limited(self._writer.bytes, self._bytes_max, "of the journal's limit are free")

    @property
    def anonymous_shortage(self) -> Shortage | None:
        return self._limited(
            self._writer.anonymous_bytes,
            self._anonymous_bytes_max,
            "are left of what anonymous callers may have in it together",
        )

    @property
    def sizes(self) -> Mapping[str, int]:
        """See `Journal.sizes`: of the streams of all replicas, as the last commit told."""
        return {"streams": self._writer.bytes}

    def _limited(self, used: int, limit: int | None, where: str) -> Shortage | None:
        return _shortage(used, limit, where) if limit else None

    async def watch_memory(self) -> None:
        """Look at the memory of the store and at its policy: soon after commits, else at times."""
        while True:
            with trio.move_on_after(IDLE_S):
                await self._has_written.wait()
            self._has_written = trio.Event()
            try:
                await self._look_at_memory()
            except JournalError:
                # The calls that need the store tell what is wrong with it.
                self._has_written.set()
            await trio.sleep(MEMORY_S)

    async def _look_at_memory(self) -> None:
        streams = self._writer.bytes  # before the look: what is committed meanwhile counts twice
        answer: bytes | None = await self._reader.if_allowed(b"INFO", b"memory")
        if answer is None:
            return  # `bytes_max` still holds
        found = dict(line.split(":", 1) for line in answer.decode().splitlines() if ":" in line)
        self._used_beside = int(found.get("used_memory", 0)) - streams
        self._maxmemory = int(found.get("maxmemory", 0))
        policy, self._policy = self._policy, found.get("maxmemory_policy")
        if policy != self._policy and (why := why_unsafe(self._policy, self._servers.address)):
            log.warning("the journal takes nothing until its store is mended", why=why)

    async def _look_at_clock(self) -> None:
        asked_at = steady()
        [(seconds, microseconds)] = await self._calls((b"TIME",))
        self._clock.tells(int(seconds) + int(microseconds) / 1e6, asked_at)

    # Writing

    async def commit(self, changes: Sequence[Change]) -> Sequence[JournalError | None]:
        """See `Journal.commit`. If cancelled meanwhile, it may still be made: repeat it."""
        self._check_safe()
        try:
            return await self._writer.commit(changes)
        finally:
            self._has_written.set()

    async def claim(self, owner: str = "", wanted: Wanted | None = None) -> Sequence[Record]:
        self._check_safe()
        return await self._writer.claim(owner, wanted)

    async def take(self, stream: str) -> Record | None:
        self._check_safe()
        return await self._writer.take(stream)

    async def release(self) -> None:
        self._check_open()
        await self._writer.release()

    @property
    def replica(self) -> str:
        return self._writer.replica

    @property
    def lease_s(self) -> float:
        return self._lease_s

    async def renew(self) -> Mapping[str, int] | None:
        self._check_safe()
        await self._look_at_clock()
        await self._renew_turns()
        if self._writer.has_gone_back:
            await self._put_keys_back()
        return await self._writer.renew(self._reader)  # last: its answer must not get lost

    async def running(self, replicas: Sequence[str]) -> Mapping[str, int]:
        indexes = [f"{self._prefix}o:{each}" for each in replicas]
        ends = (b"[" + codec.RUNS, b"(" + codec.ENDED)
        found = await self._calls(*((b"ZLEXCOUNT", index, *ends) for index in indexes))
        return dict(zip(replicas, map(int, found), strict=True))

    # Reading

    async def read(self, stream: str, after: int, *, bytes_max: int) -> Sequence[Run]:
        self._check_open()
        return await self._lines.read(stream, after, bytes_max)

    def expect(self, stream: str, after: int, *, bytes_max: int) -> None:
        self._lines.expect(stream, after, bytes_max)

    async def totals(self) -> Totals:
        evicted, newest = await self._calls(
            (b"ZCARD", self._prefix + "e"), (b"ZRANGE", self._prefix + "n", -1, -1)
        )
        return Totals(evicted, codec.number_in(newest[0]) if newest else 0)

    async def find(self, stream: str) -> Record | None:
        [record] = await self._records([stream])
        return record

    async def principal_of(self, stream: str) -> str | None:
        key = f"{self._prefix}r:{stream}"
        [found] = await self._reads((b"HGET", key, b"i"))
        return None if found is None else self._decoded(key, codec.principal_of, found)

    async def named(self, name: bytes, *, is_secret: bool = False) -> str | None:
        key = self._prefix.encode() + b"m:" + name
        [found] = await self._reads((b"GET", key))
        return None if found is None else self._decoded(key, bytes.decode, found)

    async def grants(self, stream: str) -> Sequence[Grant]:
        return await self._grants([stream])

    async def _grants(self, streams: Sequence[str]) -> list[Grant]:
        keys = [f"{self._prefix}g:{each}" for each in streams]
        found = await self._reads(*((b"HVALS", key) for key in keys))
        saved = [
            grant
            for key, of_stream in zip(keys, found, strict=True)
            for each in of_stream or ()
            if (grant := self._decoded(key, codec.grant_of, each)) is not None
        ]
        return [grant for _, grant in sorted(saved, key=lambda each: each[0])]

    async def owned(self, *, after: int, limit: int) -> Sequence[Record]:
        index = f"o:{self.replica}"
        running = await self._members(index, after, limit, codec.RUNS)
        ended = await self._members(index, after, limit, codec.ENDED)
        found = sorted(each[1:] for each in (*running, *ended))[:limit]
        records = await self._records(list(map(codec.stream_in, found)))
        return [each for each in records if each is not None and each.owner == self.replica]

    async def _members(
        self, index: str, after: int, limit: int, before: bytes = b""
    ) -> list[bytes]:
        """The members of an index with numbers above `after`, which begin with `before`."""
        low = b"(" + before + codec.number_bytes(after) + b"\xff"
        high = b"(" + before + b"\xff" * 8 if before else b"+"
        key = self._prefix + index
        members: list[bytes]
        [members] = await self._calls((b"ZRANGE", key, low, high, b"BYLEX", b"LIMIT", 0, limit))
        return members

    async def listed(
        self, principal: str, *, after: int, limit: int, only_read: bool = False
    ) -> Sequence[Record]:
        index = f"{self._prefix}{'v' if only_read else 'w'}:{codec.principal_key(principal)}"
        low = b"(" + codec.number_bytes(after) + b"\xff"
        found: list[Record] = []
        while len(found) < limit:
            [members] = await self._calls(
                (b"ZRANGE", index, low, b"+", b"BYLEX", b"LIMIT", 0, LOOKED_UP_AT_ONCE)
            )
            records = await self._records(list(map(codec.stream_in, members)))
            found += (each for each in records if each is not None and each.is_wanted)
            if len(members) < LOOKED_UP_AT_ONCE:
                break
            low = b"(" + members[-1]
        return found[:limit]

    async def count(self, principal: str) -> int:
        index = f"{self._prefix}w:{codec.principal_key(principal)}"
        [found] = await self._calls((b"ZCARD", index))
        return max(0, int(found) - self._writer.wanted[principal])

    async def due(self, *, limit: int, only_unwanted: bool = False) -> Sequence[Record]:
        index = self._prefix + ("u" if only_unwanted else "e")
        [members] = await self._calls((b"ZRANGE", index, 0, limit - 1))
        records = await self._records(list(map(codec.stream_in, members)))
        return [each for each in records if each is not None and each.due_at is not None]

    async def _records(self, streams: Sequence[str]) -> list[Record | None]:
        self._check_open()
        found: list[Record | None] = []
        for first in range(0, len(streams), LOOKED_UP_AT_ONCE):
            some = streams[first : first + LOOKED_UP_AT_ONCE]
            found += (known.record for known in await fetch(self._reader, some))
        return found

    async def _calls(self, *commands: Sequence[Any]) -> list[Any]:
        self._check_open()
        return await self._reader.calls(commands) if commands else []

    async def _reads(self, *commands: Sequence[Any]) -> list[Any]:
        """As `_calls`, of keys of one stream or session each: see `Link.read`."""
        self._check_open()
        return await self._reader.read(commands) if commands else []

    def _decoded(self, key: str | bytes, decode: Callable[..., _T], *stored: object) -> _T | None:
        return self._servers.complaints.decoded(key, decode, *stored)

    # Sessions

    async def sessions(self) -> tuple[Sequence[SessionRecord], Sequence[Grant]]:
        [keys] = await self._calls((b"ZRANGE", self._prefix + "sessions", 0, -1))
        keys = [key.decode(errors="replace") for key in keys]
        found = await self._reads(
            *((b"HMGET", f"{self._prefix}s:{key}", b"n", b"r") for key in keys)
        )
        saved = [
            session
            for key, each in zip(keys, found, strict=True)
            if each is not None and None not in each
            if (session := self._decoded(f"{self._prefix}s:{key}", _in_order, key, *each))
        ]
        saved.sort(key=lambda each: each[0])
        fields = await self._reads(*((b"HKEYS", f"{self._prefix}sg:{key}") for key in keys))
        streams = {
            stream
            for key, of_session in zip(keys, fields, strict=True)
            for each in of_session or ()
            if (stream := self._decoded(f"{self._prefix}sg:{key}", codec.granted_stream, each))
        }
        records = await self._records(sorted(streams))
        resident = [each.stream for each in records if each is not None and each.due_at is None]
        return [record for _, record in saved], await self._grants(resident)

    async def session(self, key: str) -> SessionRecord | None:
        name = f"{self._prefix}s:{key}"
        [found] = await self._reads((b"HGET", name, b"r"))
        return None if found is None else self._decoded(name, codec.session_of, key, found)

    async def count_sessions(self, principal: str | None = None) -> int:
        name = "sessions" if principal is None else f"sp:{codec.principal_key(principal)}"
        # Those that have expired are dropped only with the next one that is saved.
        alive = f"({int(1000 * wall())}"
        [found] = await self._calls((b"ZCOUNT", self._prefix + name, alive, b"+inf"))
        return int(found)

    # Webhooks

    async def webhooks(self, *, limit: int) -> Sequence[Webhook]:
        due = (b"ZRANGE", self._prefix + "webhooks_due", 0, limit - 1, b"WITHSCORES")
        [pairs] = await self._calls(due)
        if not pairs:
            return []
        key = self._prefix + "webhooks"
        [bodies] = await self._calls((b"HMGET", key, *(each for each, _ in pairs)))
        return [
            webhook
            for (its_id, due_at), body in zip(pairs, bodies, strict=True)
            if body is not None
            if (webhook := self._decoded(key, codec.webhook_of, its_id, due_at, body)) is not None
        ]

    async def count_webhooks(self) -> int:
        [found] = await self._calls((b"HLEN", self._prefix + "webhooks"))
        return int(found)

    async def take_webhooks(self, now: float, until: float, *, limit: int) -> Sequence[Webhook]:
        self._check_open()
        key, times = self._prefix + "webhooks", (repr(now), repr(until))
        found = await self._reader.function("take_webhooks", *times, limit)
        taken, unreadable = [], []
        for its_id, body in zip(found[::2], found[1::2], strict=True):
            try:
                taken.append(codec.webhook_of(its_id, until, body))
            except UNREADABLE as error:
                shown, why = ascii(its_id), str(error)
                log.warning("a webhook that cannot be read is dropped", webhook=shown, why=why)
                unreadable.append(its_id)
        if unreadable:
            due = self._prefix + "webhooks_due"
            await self._calls((b"HDEL", key, *unreadable), (b"ZREM", due, *unreadable))
        return taken

    # Other replicas

    async def tell(self, settings: Mapping[str, str]) -> None:
        """Tell other replicas the settings of this one."""
        encoded = msgspec.json.encode(settings)
        await self._calls((b"HSET", self._prefix + "settings", self.replica.encode(), encoded))

    async def told(self) -> Mapping[str, Mapping[str, str]]:
        """The settings of each other replica that lives, and has told them."""
        key, ours = self._prefix + "settings", self.replica.encode()
        told, known = await self._calls((b"HGETALL", key), (b"HKEYS", self._prefix + "replicas"))
        if gone := [each for each in told if each not in known and each != ours]:
            await self._calls((b"HDEL", key, *gone))
        return {
            each.decode(): theirs
            for each, body in told.items()
            if each in known and each != ours
            if (theirs := self._decoded(key, _settings, body)) is not None
        }

    async def follow(self, stream: str) -> Record | None:
        self._check_open()
        return await self.listener.follow(stream)

    async def unfollow(self, stream: str) -> None:
        self._check_open()
        await self.listener.unfollow(stream)

    async def news(self) -> News:
        self._check_open()
        return await self.listener.news()

    async def post(self, stream: str, *bodies: bytes, is_kept: bool = True) -> bool:
        self._check_open()
        place = stream, self.replica, self._next_post()
        return bool(await self._reader.function("post", *place, int(is_kept), *bodies))

    async def send(self, replica: str, stream: str, *bodies: bytes, is_kept: bool = True) -> None:
        self._check_open()
        place = replica, self.replica, self._next_post(), stream
        await self._reader.function("send", *place, int(is_kept), *bodies)

    def _next_post(self) -> str:
        self._posted += 1
        return f"{self._post_base}{self._posted}"

    @asynccontextmanager
    async def turn(self, name: bytes) -> AsyncIterator[None]:
        """See `Journal.turn`. Raises `Unavailable` before the block, if at all."""
        self._check_open()
        lock = self._locks.setdefault(name, trio.Semaphore(1))
        try:
            async with lock:  # tasks of this replica wait here, without asking the store
                holder = f"{self.replica}.{new_name()}"
                try:
                    await self._have_turn(name, holder)
                    self._turns[name] = holder
                    yield
                finally:
                    self._turns.pop(name, None)
                    await self._end_turn(name, holder)
        finally:
            if lock.value:
                self._locks.pop(name, None)

    async def _have_turn(self, name: bytes, holder: str) -> None:
        pause_s = TURN_FIRST_S
        while not await self._ask_turn(name, holder):
            await trio.sleep(pause_s)
            pause_s = min(TURN_LAST_S, 2 * pause_s)

    async def _ask_turn(self, name: bytes, holder: str) -> bool:
        return bool(await self._reader.function("turn", name, holder, self._turn_ms))

    async def _renew_turns(self) -> None:
        turns = list(self._turns.items())
        calls = [
            self._reader.function_command(
                "renew_turns", self._turn_ms, *(each for turn in some for each in turn)
            )
            for first in range(0, len(turns), TURNS_AT_ONCE)
            if (some := turns[first : first + TURNS_AT_ONCE])
        ]
        if calls:
            await self._reader.calls(calls)

    @property
    def _turn_ms(self) -> int:
        """Until a turn ends that is not renewed: after the streams of its replica were claimed."""
        return max(1, int(1000 * TURN_LEASES * self._lease_s))

    async def _end_turn(self, name: bytes, holder: str) -> None:
        with trio.move_on_after(self._servers.call_s) as scope:
            scope.shield = True
            with suppress(JournalError):  # it ends by itself after a lease
                await self._reader.function("end_turn", name, holder)

    # Besides the contract: keys of tokens, and copies

    @property
    def keys_name(self) -> str:
        """The name under which the store has the keys."""
        return f"{self._prefix}keys"

    async def keys(self) -> bytes | None:
        """The content of a key file that `save_keys` has kept; None before."""
        [found] = await self._calls((b"GET", self.keys_name))
        return None if found is None else bytes(found)

    async def save_keys(self, content: bytes) -> bytes:
        """Keep the content of a key file, unless the store has one. Returns what it has then."""
        self._check_open()
        return bytes(await self._writer.link.function("save_keys", content))

    def know_keys(self, content: bytes) -> None:
        """This replica has these keys. It puts them back if the store loses them, and warns if the
        store has others.
        """
        self._known_keys = content
        # The store compares it with its own at each renewal.
        self._writer.keys_mark = hashlib.sha1(content, usedforsecurity=False).hexdigest()

    async def await_keys(self) -> None:
        """Wait until the replicas that live have put back keys which the store has lost.

        For two leases: they may all be gone, or have their keys in files.
        """
        with trio.move_on_after(2 * self._lease_s):
            while await self.keys() is None and await self._are_keys_told():
                await trio.sleep(self._lease_s / 10)

    async def _are_keys_told(self) -> bool:
        """Whether another replica that lives has told its keys."""
        told, known = await self._calls(
            (b"HKEYS", self._prefix + "settings"), (b"HKEYS", self._prefix + "replicas")
        )
        return bool({*told} & {*known} - {self.replica.encode()})

    async def _put_keys_back(self) -> None:
        """Give the keys to a store that has lost them, before one that starts makes others."""
        if (ours := self._known_keys) is not None:
            with suppress(Full):
                await self._writer.link.function("save_keys", ours)
        self._writer.has_gone_back = False

    async def streams(self, after: int, limit: int) -> Sequence[tuple[Record, Sequence[bytes]]]:
        """The records of all streams with numbers above `after`, in that order, with their names.

        Returns at most `limit` of them.
        """
        streams = list(map(codec.stream_in, await self._members("n", after, limit)))
        names = await self._calls(*((b"HGET", f"{self._prefix}r:{each}", b"n") for each in streams))
        found = await fetch(self._reader, streams)
        for stream, each in zip(streams, found, strict=True):
            if each.record is None and each.mark:  # it must not be missing in a copy
                raise JournalUnusable(
                    f"{self._prefix}r:{stream} cannot be read: {WHAT_TO_DO}, with its lines in "
                    f"{self._prefix}l:{stream}."
                )
        return [
            (each.record, codec.names_in(given or b""))
            for each, given in zip(found, names, strict=True)
            if each.record is not None
        ]

    async def newest(self, *, before: int | None = None, limit: int) -> Sequence[Record]:
        members = await self._newest_members(before, limit)
        records = await self._records(list(map(codec.stream_in, members)))
        return [each for each in records if each is not None]

    async def beginning_with(self, prefix: str, *, limit: int) -> Sequence[str]:
        """See `Lookups.beginning_with`. It goes through the index of all streams."""
        found: list[str] = []
        before: int | None = None
        while len(found) < limit:
            members = await self._newest_members(before, MEMBERS_AT_ONCE)
            found += [each for each in map(codec.stream_in, members) if each.startswith(prefix)]
            if len(members) < MEMBERS_AT_ONCE:
                break
            before = codec.number_in(members[-1])
        return found[:limit]

    async def _newest_members(self, before: int | None, limit: int) -> list[bytes]:
        high = b"+" if before is None else b"(" + codec.number_bytes(before)
        key = self._prefix + "n"
        members: list[bytes]
        [members] = await self._calls(
            (b"ZRANGE", key, high, b"-", b"BYLEX", b"REV", b"LIMIT", 0, limit)
        )
        return members

    async def begin_copy(self) -> None:
        """Mark the journal as an unfinished copy, and empty it if it was one.

        Raises `JournalUnusable` if it has anything else.
        """
        marker, streams, sessions, keys = await self._calls(
            (b"EXISTS", self._prefix + "copying"),
            (b"ZCARD", self._prefix + "n"),
            (b"ZCARD", self._prefix + "sessions"),
            (b"EXISTS", self.keys_name),
        )
        if not marker and (streams or sessions or keys):
            raise JournalUnusable(
                f"{self._servers.address} has a journal there already, with {streams} streams and "
                f"{sessions} sessions: copy into a new one with ?prefix=NAME, or delete the keys "
                f"that begin with {self._prefix}."
            )
        await self._calls((b"SET", self._prefix + "copying", b"1"))
        await self._delete_all(besides=self._prefix + "copying")
        await self._writer.begin_anew()

    async def delete(self) -> None:
        """Delete the whole journal, and close it."""
        await self.aclose()
        await self._delete_all()

    async def _delete_all(self, besides: str = "") -> None:
        """Delete all keys but one."""
        pattern = re.sub(r"([][*?\\^])", r"\\\1", self._prefix) + "*"
        cursor = b"0"
        while True:
            scan = (b"SCAN", cursor, b"MATCH", pattern, b"COUNT", SCANNED_AT_ONCE)
            [(cursor, found)] = await self._reader.calls([scan])
            gone = [key for key in found if key != besides.encode()]
            if gone:
                await self._reader.calls([(b"UNLINK", *gone)])
            if cursor == b"0":
                break

    async def finish_copy(self) -> None:
        """The copy is whole."""
        await self._calls((b"DEL", self._prefix + "copying"))

    # The end

    async def aclose(self) -> None:
        """Release all streams, so that other replicas may claim them at once, and leave."""
        if self._is_closed:
            await trio.lowlevel.checkpoint()
            return
        self._is_closed = True
        self._clock.close()
        if not self._writer.has_entered:
            await trio.lowlevel.checkpoint()
            return
        with trio.move_on_after(self._servers.call_s, shield=True):
            with suppress(JournalError):  # without the store, others wait for the end of the lease
                await self._writer.release()
                await self._writer.leave()

    def _check_open(self) -> None:
        if self._is_closed:
            raise JournalUnusable("the journal is closed")

    def _check_safe(self) -> None:
        self._check_open()
        if why := why_unsafe(self._policy, self._servers.address):
            raise StoreUnsafe(why)


def _in_order(key: str, order: bytes, body: bytes) -> tuple[int, SessionRecord]:
    return int(order), codec.session_of(key, body)


def _shortage(used: int, limit: int, where: str) -> Shortage | None:
    reserve = min(RESERVE_BYTES, limit // RESERVE_PART)
    free = limit - used
    if free >= reserve:
        return None
    return Shortage(f"less than {reserve / MIB:.3g} MiB {where}", free < reserve // 2, limit, used)
