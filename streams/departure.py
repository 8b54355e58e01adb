"""The end of a server as its listeners see it: they accept nothing more, and answer what has come.

A balancer sends a request to another process only if this one has not accepted the connection. So
what was accepted is answered, and the server waits for that (`settled`) before it ends.
"""

import trio


class Departure:
    """Begins once. Until it has `settled`, listeners are open or requests are without a response.

    Listeners and requests `enter`, and `leave` when they are closed and answered.
    """

    def __init__(self) -> None:
        self._begun = trio.Event()
        self._present = 0
        self._changed = trio.lowlevel.ParkingLot()

    @property
    def has_begun(self) -> bool:
        """Whether nothing new is accepted any more."""
        return self._begun.is_set()

    def begin(self) -> None:
        """From now on nothing new is accepted."""
        self._begun.set()

    async def begun(self) -> None:
        """Wait until it begins."""
        await self._begun.wait()

    def enter(self) -> None:
        """One more listener, or request, that the server must wait for."""
        self._present += 1

    def leave(self) -> None:
        """The opposite of `enter`."""
        self._present -= 1
        if not self._present and self._changed:
            self._changed.unpark_all()

    async def settled(self) -> None:
        """Wait until all listeners are closed, and a response to each request has begun."""
        await trio.lowlevel.checkpoint()
        while self._present:
            await self._changed.park()
