"""Where a handler waits for the client's answer to a request."""

from typing import TYPE_CHECKING

import trio

from streams.messages import Message

if TYPE_CHECKING:
    from streams.session import Session
    from streams.stream import Stream


class Answer:
    """The client's, to one request of a stream."""

    __slots__ = ("_is_here", "_message", "asked", "stream")

    def __init__(self, stream: "Stream") -> None:
        self.stream = stream
        self.asked: set[Session] = set()  # whom the request went to
        self._is_here = trio.Event()
        self._message: Message | None = None

    def give(self, message: Message) -> None:
        """Hand over the client's answer."""
        self._message = message
        self._is_here.set()

    async def wait(self) -> Message:
        """The client's answer, when it is here."""
        await self._is_here.wait()
        assert self._message is not None
        return self._message
