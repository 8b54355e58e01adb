"""What a tool yields, as pages: each is the answer to one call, and leads to the next.

The tool is not hurried: it makes no more pages than were asked for, and a few ahead. A page is sent
when something, or the end, is known to follow, since the last one has to say that it is the last.
Where that takes long, it is sent without knowing, and the end may have to be an empty page.
"""

from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, closing
from functools import partial
from typing import Any, Final

import trio

from streams import messages
from streams.engine.stream import Stream
from streams.errors import Ended, StreamsError
from streams.faults import let_pass, run_in_thread
from streams.forks import Confined
from streams.server.tools import Paged

# Every call for a page may be kept waiting as long as this, just to know whether it is the last.
HOLD_S: Final = 0.25
EMPTY: Final[dict[str, Any]] = {"content": []}

Pages = AsyncGenerator[Any, None] | Generator[Any, None, None]


class PagedCall:
    """The pages of one stream, from what a tool yields; `to_result` makes each a result.

    At most `paged.ahead` pages are made before they are asked for. A call is answered with an empty
    page when there is none for `paged.wait_s` seconds.
    """

    def __init__(
        self,
        stream: Stream,
        to_result: Callable[[Any], dict[str, Any]],
        paged: Paged,
    ) -> None:
        self._stream = stream
        self._to_result = to_result
        self._paged = paged
        self._made: deque[dict[str, Any]] = deque()  # and not sent
        self._failure: BaseException | None = None
        self._confined = Confined()
        self._is_over = False
        self._is_followed = False  # what was made: by a message of the tool, which waits for it
        self._since = (0, 0), trio.current_time()

    async def run(self, pages: Pages, limiter: trio.CapacityLimiter) -> dict[str, Any]:
        """Send all pages but the last one, which is returned.

        A plain generator runs in one thread, from its beginning to its end. Raises what it raises.
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
            self._is_over = True  # a thread that was abandoned hears it when it comes back
            self._stream.notify()
        if self._failure is not None:
            raise self._failure
        return self._made.popleft() if self._made else EMPTY

    # What the tool does

    async def _make(self, pages: Pages, limiter: trio.CapacityLimiter) -> None:
        try:
            if isinstance(pages, AsyncGenerator):
                async with aclosing(pages):
                    async for page in pages:
                        await self._take(page)
            else:
                work = partial(self._make_in_thread, pages)
                await run_in_thread(work, limiter)
        except BaseException as error:
            await let_pass(error)
            self._failure = error
        self._is_over = True
        self._stream.notify()

    def _make_in_thread(self, pages: Generator[Any, None, None]) -> None:
        with self._confined, closing(pages):
            for page in pages:
                self._confined.check()
                trio.from_thread.run(self._take, page)

    async def _take(self, page: Any) -> None:
        """Take what was yielded, and wait until more is wanted."""
        if self._is_over:
            raise Ended("nobody wants more pages")
        self._made.append(self._to_result(page))
        self._is_followed = False
        self._stream.notify()
        while self._kept + len(self._made) > self._paged.ahead:
            await self._stream.change()
            if self._is_over:
                raise Ended("nobody wants more pages")

    # What its callers get

    @property
    def _has_more(self) -> bool:
        """Whether there is a page to come that is not the last response."""
        is_last = 0 if self._failure else 1
        return not self._is_over or len(self._made) > is_last

    @property
    def _kept(self) -> int:
        """Pages that were sent behind the place that was asked for: all but the first are ahead."""
        asked = self._stream.asked
        return sum(seq > asked for seq in self._stream.state.pages)

    async def _send_next(self) -> None:
        """Send a page, if there is one to be sent; else wait for something to change."""
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
            self._is_followed = True  # nobody knows by what
        else:
            await self._send(EMPTY)

    async def _send_made(self) -> None:
        """Wait until what was made is sent: a message of the tool comes behind it."""
        while self._made and not self._is_over:
            self._is_followed = True
            self._stream.notify()
            await self._stream.change()

    def _deadline(self) -> float:
        """Until when a page that is asked for may wait for what follows, or a caller for a page."""
        now, situation = trio.current_time(), (self._kept, len(self._made))
        if situation != self._since[0]:
            self._since = situation, now
        if self._kept:
            return float("inf")
        return self._since[1] + (HOLD_S if self._made else self._paged.wait_s)

    async def _send(self, result: dict[str, Any]) -> None:
        await self._stream.send_page(messages.result(self._stream.request_id, result))
