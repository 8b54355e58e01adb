"""See `streams.exchange.Departure`."""

import trio


class Departure:
    """Begins once; `settled` waits for all that has entered."""

    def __init__(self) -> None:
        self.has_begun = False  # see the protocol
        self._begun = trio.Event()
        self._present = 0
        self._changed = trio.lowlevel.ParkingLot()

    def begin(self) -> None:
        """From now on nothing new is accepted."""
        self.has_begun = True
        self._begun.set()

    async def begun(self) -> None:
        """See the protocol."""
        await self._begun.wait()

    def enter(self) -> None:
        """See the protocol."""
        self._present += 1

    def leave(self) -> None:
        """See the protocol."""
        self._present -= 1
        if not self._present and self._changed:
            self._changed.unpark_all()

    async def settled(self) -> None:
        """Wait until all listeners are closed, and a response to each request has begun."""
        await trio.lowlevel.checkpoint()
        while self._present:
            await self._changed.park()
