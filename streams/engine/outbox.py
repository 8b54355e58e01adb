"""The posts of this replica to others: about streams, and notifications for all clients."""

import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

import trio

from streams.clock import backoff_s
from streams.engine import posts
from streams.engine.notices import NOTICES_MAX
from streams.engine.posts import Look, Moved, ToOwner, ToReplica
from streams.errors import StoreAway, Unavailable
from streams.journal.contract import Journal
from streams.logs import log

# A post is sent again after this time where the journal takes nothing.
RETRY_FIRST_S: Final = 0.02
RETRY_LAST_S: Final = 0.2
SENT_S: Final = 5.0  # how long a client waits until the journal has what it has told

_ALL: Final = "*"

# Handles posts for a stream that has no owner; False where it has one by now.
HandleOwn = Callable[[str, Sequence[bytes]], Awaitable[bool]]


class _Unsent(NamedTuple):
    """A post that the journal does not have yet."""

    number: int
    body: bytes
    is_kept: bool


class Outbox:
    """Sends posts, those to one place in their order. `run` it in a task of its own."""

    def __init__(self, journal: Journal, handle_own: HandleOwn) -> None:
        self._journal = journal
        self._handle_own = handle_own
        self._numbers = itertools.count(1)
        self._send_later, self._posts = trio.open_memory_channel[tuple[str, str, _Unsent]](math.inf)
        # By the places that are sent to now.
        self._unsent: dict[tuple[str, str], list[_Unsent]] = {}
        self._sending: dict[int, None] = {}  # the numbers of posts that the journal does not have
        self._has_sent = trio.lowlevel.ParkingLot()
        self._notices: dict[str | int, posts.Notice] = {}  # by their keys, or else by a number
        self._has_notices = trio.Event()
        self._nursery: trio.Nursery

    async def run(self) -> None:
        """Send what there is, for ever."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._send_notices)
            async for replica, stream, unsent in self._posts:
                place = replica, stream
                if place not in self._unsent:
                    self._unsent[place] = []
                    self._nursery.start_soon(self._send_waiting, *place)
                self._unsent[place].append(unsent)

    def post(self, stream: str, post: ToOwner) -> None:
        """Tell the owner of a stream."""
        is_kept = post.is_kept if isinstance(post, Look | Moved) else True
        self._send("", stream, post, is_kept=is_kept)

    def tell(self, replica: str, stream: str, post: ToReplica, *, is_kept: bool = True) -> None:
        """Tell a replica something about a stream. `is_kept`: see `Journal.send`."""
        self._send(replica, stream, post, is_kept=is_kept)

    def broadcast(self, post: ToReplica) -> None:
        """Tell all other replicas."""
        self._send(_ALL, "", post)

    async def broadcast_surely(self, post: ToReplica) -> None:
        """Tell all other replicas, even if the caller is cancelled; return once they are told."""
        is_told = trio.Event()

        async def tell() -> None:
            await self._send_to(_ALL, "", [posts.encode(post)])
            is_told.set()

        self._nursery.start_soon(tell)
        await is_told.wait()

    def notify(self, notice: posts.Notice) -> None:
        """Send a notification to the clients of all other replicas.

        While the store is away, the latest of each key waits, and the oldest are dropped.
        """
        name = next(self._numbers) if notice.key is None else notice.key
        self._notices.pop(name, None)
        self._notices[name] = notice
        if len(self._notices) > NOTICES_MAX:
            del self._notices[next(iter(self._notices))]
        self._has_notices.set()

    async def _send_notices(self) -> None:
        while True:
            await self._has_notices.wait()
            self._has_notices = trio.Event()
            bodies = [posts.encode(each) for each in self._notices.values()]
            self._notices.clear()
            await self._send_to(_ALL, "", bodies)

    async def sent(self) -> None:
        """Wait until the journal has all posts of before, so that no death of ours loses them.

        Raises `StoreAway` after `SENT_S`.
        """
        last = next(reversed(self._sending), None)
        with trio.move_on_after(SENT_S) as waiting:
            while last is not None and self._sending and next(iter(self._sending)) <= last:
                await self._has_sent.park()
        if waiting.cancelled_caught:
            raise StoreAway("the message could not be handed to the replica that runs its call")

    def _send(
        self, replica: str, stream: str, post: ToOwner | ToReplica, *, is_kept: bool = True
    ) -> None:
        number = next(self._numbers)
        self._sending[number] = None
        unsent = _Unsent(number, posts.encode(post), is_kept)
        self._send_later.send_nowait((replica, stream, unsent))

    async def _send_waiting(self, replica: str, stream: str) -> None:
        """Send all that waits for one place, which waits for no other place."""
        await trio.lowlevel.checkpoint()
        while waiting := self._unsent[replica, stream]:
            self._unsent[replica, stream] = []
            # In one call, and so kept if one of them must be.
            is_kept = any(each.is_kept for each in waiting)
            bodies = [each.body for each in waiting]
            await self._send_to(replica, stream, bodies, is_kept=is_kept)
            for each in waiting:
                del self._sending[each.number]
            self._has_sent.unpark_all()
        del self._unsent[replica, stream]

    async def _send_to(
        self, replica: str, stream: str, bodies: Sequence[bytes], *, is_kept: bool = True
    ) -> None:
        for attempt in itertools.count():
            try:
                if replica:
                    to = "" if replica == _ALL else replica
                    await self._journal.send(to, stream, *bodies, is_kept=is_kept)
                    return
                if await self._journal.post(stream, *bodies, is_kept=is_kept):
                    return
                if await self._handle_own(stream, bodies):
                    return
            except Unavailable as trouble:
                log.debug("a post waits", why=str(trouble))
            await trio.sleep(backoff_s(RETRY_FIRST_S, attempt, RETRY_LAST_S))
