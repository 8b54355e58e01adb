"""News for a replica: what has changed of the streams that it follows, and its posts.

The store publishes to a channel of each replica, and to one of all. It keeps nothing that it
publishes while the connection is lost. So after each reconnect the streams are followed anew, and
the news are `is_all`. Posts lie in the store until they were received, and the channel brings them,
unless they are long: then it tells of them, and they are fetched. Those that are not kept come by
the channel alone.
"""

import itertools
import math
import re
from collections import OrderedDict
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Final

import trio
from coredis.connection import BaseConnection

from streams.clock import backoff_s
from streams.errors import JournalError, JournalUnusable, StoreAway, Unavailable
from streams.journal.contract import News, Post
from streams.journal.records import Record
from streams.journal.redis import codec
from streams.journal.redis.link import LOST, Link, Moved, Servers, meaning
from streams.journal.redis.writer import look_up, looked_up

CHANNELS: Final = 2  # that of a replica, and that of all
POSTS_AT_ONCE: Final = 1000
FOLLOWED_AT_ONCE: Final = 1000  # streams of one call
# Posts are deleted in the store so long after the last news, or as soon as there are so many: each
# write is a sync.
DELETED_AFTER_S: Final = 0.02
UNDELETED_MAX: Final = 500
# Ids of received posts: a store that has gone back may show them once more.
REMEMBERED_MAX: Final = 10_000
PING_S: Final = 5.0  # between two looks whether the connection is alive
RETRY_FIRST_S: Final = 0.05
RETRY_LAST_S: Final = 0.2

# An entry of an inbox: see `hand` in library.lua.
_TOLD: Final = re.compile(rb"p(\d+-\d+)\0([^\0]*)\0([^\0]*)\0([^\0]*)\0(.*)", re.DOTALL)


class Listener:
    """Subscribes to the channels of a replica; `run` it in a task of its own."""

    def __init__(self, servers: Servers, link: Link, replica: Callable[[], str]) -> None:
        """`link` fetches posts; `replica` tells the name of this replica, which may change."""
        self._servers = servers
        self._link = link
        self._replica = replica
        self._prefix = f"{{{servers.address.prefix}}}:"
        self._following: set[str] = set()
        self._changed: set[str] = set()
        self._is_all = False
        self._released: set[str] = set()
        self._has_posts = False  # the store has some that are to be fetched
        self._is_fetching = False
        self._posts: list[Post] = []  # received, and not yet among the news
        self._unkept: list[Post] = []  # they follow all those that the store has now
        # The ids of received posts that are not yet deleted in the store, in order. So many of the
        # first were among the news: who waits for news again has acted upon them.
        self._received: dict[bytes, None] = {}
        self._handed = 0
        self._remembered: OrderedDict[tuple[bytes, bytes], None] = OrderedDict()
        self._wake = trio.Event()
        self._connection: BaseConnection | None = None
        self._failure: JournalUnusable | None = None
        self.is_listening = trio.Event()

    async def run(self) -> None:
        """Listen for ever, over one connection after the other."""
        failures = 0
        while True:
            try:
                await self._listen()
                failures = 0
            except Unavailable:
                failures += 1
            except JournalUnusable as error:
                self._failure = error
                self.is_listening.set()
                self._wake.set()
                return
            await trio.sleep(backoff_s(RETRY_FIRST_S, failures, RETRY_LAST_S))

    async def _listen(self) -> None:
        """Listen over one connection, until that is lost."""
        self._connection = connection = await self._servers.connect()
        lost: BaseExceptionGroup[Exception] | None = None
        try:
            for replica in ("", self._replica()):
                connection.send_command(b"SSUBSCRIBE", f"{self._prefix}c:{replica}")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_alive, connection)
                await self._hear(connection)
                nursery.cancel_scope.cancel()
        except* (*LOST, JournalError) as errors:
            lost = errors  # raised below: a cancellation beside it would make a group of both
        finally:
            connection.invalidate()
        if lost is not None:
            raise _unavailable(lost, self._servers) from None

    async def _hear(self, connection: BaseConnection) -> None:
        confirmed = 0
        async with aclosing(connection.push_messages) as messages:
            async for message in messages:
                found: Any = message
                if found[0] == b"ssubscribe":
                    confirmed += 1
                    if confirmed == CHANNELS:
                        await self._begin()
                elif found[0] == b"smessage":
                    self._take(found[2])
                elif found[0] == b"sunsubscribe":  # the slot moves to another node of the cluster
                    return

    async def _begin(self) -> None:
        """Everything from now on is heard; what was published before may be missing."""
        following = sorted(self._following)
        for first in range(0, len(following), FOLLOWED_AT_ONCE):
            some = following[first : first + FOLLOWED_AT_ONCE]
            await self._link.function("follow", self._replica(), *some)
        self._has_posts = True
        if self.is_listening.is_set():
            self._is_all = True
        self.is_listening.set()
        self._wake.set()

    async def _keep_alive(self, connection: BaseConnection) -> None:
        """Notice a connection that is dead, or whose subscription was refused."""
        while True:
            # A refused SSUBSCRIBE has its error where the answer to a PING is expected.
            await connection.create_request(b"PING", timeout=self._servers.call_s)
            await trio.sleep(PING_S)

    def _take(self, message: bytes) -> None:
        match message[:1]:
            case b"c":
                streams = message[1:].decode(errors="replace").split("\0")
                self._changed.update(self._following.intersection(streams))
            case b"p":
                told = None if self._has_posts or self._is_fetching else _TOLD.fullmatch(message)
                if told is None:  # those that the store has come first
                    self._has_posts = True
                else:
                    entry_id, sender, count, stream, body = told.groups()
                    self._receive(entry_id, [b"s", sender, b"c", count, b"t", stream, b"b", body])
            case b"d" if message.count(b"\0") >= 2:
                sender, stream, body = message[1:].split(b"\0", 2)
                self._unkept.append(Post(sender.decode(), stream.decode(), body))
            case b"r":
                self._released |= {message[1:].decode(errors="replace")} - {self._replica()}
        self._wake.set()

    def listen_anew(self) -> None:
        """This replica has a new name, or another server: its news come by another channel."""
        if self._connection is not None:
            self._connection.invalidate()

    def check(self) -> None:
        """Raise what has ended the listening, if anything."""
        if self._failure is not None:
            raise self._failure

    async def follow(self, stream: str) -> Record | None:
        """From now on the news have the changes of this stream. Returns its record of now."""
        was_followed = stream in self._following
        self._following.add(stream)  # news may come before the answer does
        follow = self._link.function_command("follow", self._replica(), stream)
        try:
            _, found = await self._link.read([follow, look_up(self._link, stream)])
        except BaseException:
            if not was_followed:
                self._following.discard(stream)
            raise
        self._following.add(stream)  # another call of this may have failed meanwhile
        return looked_up(self._link, stream, found).record

    async def unfollow(self, stream: str) -> None:
        """End `follow`."""
        self._following.discard(stream)
        self._changed.discard(stream)
        await self._link.function("unfollow", self._replica(), stream)

    async def news(self) -> News:
        """See `Journal.news`."""
        await trio.lowlevel.checkpoint()
        while True:
            self.check()
            self._wake = trio.Event()
            if self._has_posts or self._handed > UNDELETED_MAX:
                await self._fetch()
            if not self._has_posts:
                self._posts += self._unkept
                self._unkept = []
            if self._posts or self._changed or self._is_all or self._released:
                break
            if self._has_posts:
                continue
            with trio.move_on_after(DELETED_AFTER_S if self._handed else math.inf) as idle:
                await self._wake.wait()
            if idle.cancelled_caught:
                await self._fetch()
        found = News(frozenset(self._changed), self._posts, self._is_all, frozenset(self._released))
        self._changed, self._posts, self._released = set(), [], set()
        self._is_all, self._handed = False, len(self._received)
        return found

    async def _fetch(self) -> None:
        """Fetch posts, and delete those in the store that were acted upon.

        An heir of a replica that dies before gets these, too.
        """
        self._has_posts, self._is_fetching = False, True
        deleted = list(itertools.islice(self._received, self._handed))
        try:
            entries: list[Any] = await self._link.function(
                "receive", self._replica(), POSTS_AT_ONCE, *deleted
            )
        except Unavailable:
            self._has_posts = True
            if not self._posts:
                raise
        except BaseException:
            self._has_posts = True
            raise
        else:
            for entry_id in deleted:
                del self._received[entry_id]
            self._handed = 0
            for entry_id, fields in entries:
                self._receive(entry_id, fields)
            self._has_posts |= len(entries) == POSTS_AT_ONCE
        finally:
            self._is_fetching = False

    def _receive(self, entry_id: bytes, fields: list[bytes]) -> None:
        """Note the post of an entry, once."""
        if entry_id in self._received:
            return
        self._received[entry_id] = None
        found = self._servers.complaints.decoded(
            f"{self._prefix}in:{self._replica()}",
            codec.post_of,
            fields,
            part=f"entry {entry_id.decode()}",
        )
        if found is not None and found[0] not in self._remembered:
            self._remembered[found[0]] = None
            self._posts.append(found[1])
        while len(self._remembered) > REMEMBERED_MAX:
            self._remembered.popitem(last=False)


def _unavailable(errors: BaseExceptionGroup[Any], servers: Servers) -> JournalError:
    """The one error that a group of errors of a connection means."""
    found = errors.exceptions[0]
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    if isinstance(found, JournalError):
        return found
    meant = meaning(found, servers.address)
    if isinstance(meant, JournalUnusable):
        return servers.refused(meant)
    if isinstance(meant, Moved):
        servers.moved(meant.host)
    return meant if isinstance(meant, JournalError) else StoreAway(str(found))
