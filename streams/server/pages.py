"""Pages: each result that a generator yields is the response to one call.

The tool waits when it is a few pages ahead of the calls. A page is sent once it is known whether
another one follows, since the last page has no token for a next one. If that takes too long, the
page is sent with a token anyway, and the last page may then be empty.
"""

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing, closing
from functools import partial
from typing import Any, Final

import trio

from streams import messages
from streams.engine.stream import Stream
from streams.errors import Ended, StreamsError
from streams.faults import let_pass, run_in_thread
from streams.forks import Confined
from streams.server.timeouts import TimeLimit
from streams.server.tools import Paged

# How long a finished page may wait until it is known whether it is the last one.
HOLD_S: Final = 0.25
EMPTY: Final[dict[str, Any]] = {"content": []}

Pages = AsyncGenerator[Any, None] | Generator[Any, None, None]


class PagedCall:
    """The pages of one stream. `to_result` makes a result of each value that the tool yields.

    At most `paged.ahead` pages are made before a call asks for them. A call gets an empty page when
    none is ready within `paged.wait_s` seconds.
    """

    def __init__(
        self,
        stream: Stream,
        to_result: Callable[[Any], dict[str, Any]],
        paged: Paged,
        time: TimeLimit | None = None,
    ) -> None:
        self._stream = stream
        self._to_result = to_result
        self._paged = paged
        self._time = time
        self._made: deque[dict[str, Any]] = deque()  # pages that are not sent yet
        self._failure: BaseException | None = None
        self._confined = Confined()
        self._is_over = False
        # Whether the newest page is to be sent as one that is not the last.
        self._is_followed = False
        self._since = (0, 0), trio.current_time()  # pages kept and made, and since when

    async def run(self, pages: Pages, limiter: trio.CapacityLimiter) -> dict[str, Any]:
        """Send all pages but the last one, which is returned.

        A plain generator runs in one thread from its beginning to its end. Its exceptions are
        raised here.
        """
        self._stream.ahead_of_messages = self._send_made
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._make, pages, limiter)
                try:
                    while self._has_more:
                        await self._send_next()
                except StreamsError as error:  # a page that cannot be sent
                    self._failure = error
                    nursery.cancel_scope.cancel()
        finally:
            self._is_over = True  # ends an abandoned thread when it yields its next page
            self._stream.notify()
        if self._failure is not None:
            raise self._failure
        return self._made.popleft() if self._made else EMPTY

    # The tool makes pages

    async def _make(self, pages: Pages, limiter: trio.CapacityLimiter) -> None:
        work: Callable[[], Awaitable[None]]
        if isinstance(pages, AsyncGenerator):
            work = partial(self._make_in_task, pages)
        else:
            work = partial(run_in_thread, partial(self._make_in_thread, pages), limiter)
        try:
            await (work() if self._time is None else self._time.keep(work))
        except BaseException as error:
            await let_pass(error)
            self._failure = error
        self._is_over = True
        self._stream.notify()

    async def _make_in_task(self, pages: AsyncGenerator[Any, None]) -> None:
        async with aclosing(pages):
            async for page in pages:
                await self._take(page)

    def _make_in_thread(self, pages: Generator[Any, None, None]) -> None:
        with self._confined, closing(pages):
            for page in pages:
                self._confined.check()
                trio.from_thread.run(self._take, page)

    async def _take(self, page: Any) -> None:
        """Take a page that was yielded, and wait until another one is wanted."""
        if self._is_over:
            raise Ended("no more pages are wanted")
        self._made.append(self._to_result(page))
        self._is_followed = False
        self._stream.notify()
        if self._time is not None:
            self._time.pause()
        while self._kept + len(self._made) > self._paged.ahead:
            await self._stream.change()
            if self._is_over:
                raise Ended("no more pages are wanted")
        if self._time is not None:
            self._time.begin()

    # Calls get pages

    @property
    def _has_more(self) -> bool:
        """Whether there is, or may be, a page that is not the last response."""
        is_last = 0 if self._failure else 1
        return not self._is_over or len(self._made) > is_last

    @property
    def _kept(self) -> int:
        """Pages sent behind the last position that was asked for: the answer, then those ahead."""
        asked = self._stream.asked
        return sum(seq > asked for seq in self._stream.state.pages)

    async def _send_next(self) -> None:
        """Send a page if one is ready. Otherwise wait until something changes."""
        if len(self._made) > 1 or self._is_over or (self._made and self._is_followed):
            await self._send(self._made[0])
            self._made.popleft()
            self._stream.notify()
            return
        with trio.move_on_at(self._deadline()) as waiting:
            await self._stream.change()
        if not waiting.cancelled_caught:
            return
        if self._made:
            self._is_followed = True  # by an empty page, should the tool yield no more
        else:
            await self._send(EMPTY)

    async def _send_made(self) -> None:
        """Wait until all pages are sent, because a message of the tool has to come after them."""
        while self._made and not self._is_over:
            self._is_followed = True
            self._stream.notify()
            await self._stream.change()

    def _deadline(self) -> float:
        """When to send a page without knowing whether another follows, or an empty one."""
        now, situation = trio.current_time(), (self._kept, len(self._made))
        if situation != self._since[0]:
            self._since = situation, now
        if self._kept:
            return float("inf")
        return self._since[1] + (HOLD_S if self._made else self._paged.wait_s)

    async def _send(self, result: dict[str, Any]) -> None:
        await self._stream.send_page(messages.result(self._stream.request_id, result))
