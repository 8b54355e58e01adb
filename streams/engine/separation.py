"""Keeps the response to a call out of the read that brings the progress ahead of it.

The official TypeScript SDK hands a notification on in a microtask and a response at once, and with
the response it forgets the call's progress handler. Node.js runs microtasks between two reads, not
between two messages of one read. So progress that shares a read with the response is lost, and the
last progress nearly always does. A separate write does not help, since the reader joins all that
waits for it. So the server holds a response until the client's program has read the progress ahead:

- WebSocket: until the pong to a ping that was sent after the progress. No frame that is sent then
  can share a read with it, however busy the machine.
- stdio: until the kernel's queue shows that the progress was read, and `PAUSE_S` more for that read
  to return. This sees one reader: a program in between that passes lines on may join them again.

Only that response waits. Replies, other streams and the messages ahead of it go out as ever, and
nothing waits for clients with positions, for calls without progress, or over HTTP.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import trio

from streams.exchange import Channel
from streams.messages import Run

if TYPE_CHECKING:
    from streams.engine.delivery import Delivery

# As `messages.notification` writes it. In a text the quotes would be escaped. Where the data of
# another message has it, that costs a wait, no more.
PROGRESS: Final = b'"method":"notifications/progress"'

# Less than 0.1 ms pass between the kernel giving out a byte and the return of the read. The rest is
# for a reader that loses its processor there.
PAUSE_S: Final = 0.001
LOOK_S: Final = 0.001  # until the queue is looked at again; doubled each time
LOOK_S_MAX: Final = 0.05

# A client may be busy for seconds, and then cannot use the response either. The limit is for peers
# that answer no ping: the first response waits so long, later ones do not wait.
PATIENCE_S: Final = 5.0
HURRY_S: Final = 0.2  # the same at a shutdown, which writes for 0.5 s and then hangs up


class Separation:
    """Of one connection: the responses that wait, and for what."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._nursery: trio.Nursery | None = None
        self._written_bytes = 0
        self._gathered: list[Delivery] = []  # what goes ahead of the response is not out yet
        self._held: list[Delivery] = []  # it is
        self._patience = trio.CancelScope()  # of the responses that wait now
        self._patience_s = PATIENCE_S
        self._is_asking = False
        self._is_deaf = False  # the peer has not answered in time, and has not since

    def begin(self, nursery: trio.Nursery) -> None:
        """From here on responses may wait, in tasks of `nursery`."""
        self._nursery = nursery

    def hold(self, delivery: "Delivery", runs: Sequence[Run]) -> Sequence[Run]:
        """The part of `runs` to write now: all, or all but the response at their end."""
        if self._nursery is None or not (runs and delivery.may_lose_progress):
            return runs
        ahead = runs
        if runs[-1].last == delivery.stop:
            rest, _ = runs[-1].without_last()
            ahead = [*runs[:-1], rest] if rest.count else runs[:-1]
        if not delivery.has_progress:
            # Not in the response: its own content would hold it again after each release.
            delivery.has_progress = any(PROGRESS in run.body for run in ahead)
        if ahead is runs or self._is_deaf or not delivery.has_progress:
            return runs
        delivery.is_held = True
        self._gathered.append(delivery)
        return ahead

    def wrote(self, size: int) -> None:
        """A write is out, with all that goes ahead of the responses held since the last one."""
        self._written_bytes += size
        self._held += self._gathered
        self._gathered.clear()
        if self._held and not self._is_asking and self._nursery is not None:
            self._is_asking = True
            self._nursery.start_soon(self._release, self._nursery)

    def hurry(self) -> None:
        """The server shuts down: no response waits longer than `HURRY_S` from here on."""
        self._patience_s = HURRY_S
        self._patience.deadline = min(self._patience.deadline, trio.current_time() + HURRY_S)

    async def _release(self, nursery: trio.Nursery) -> None:
        while self._held:
            held, self._held = self._held, []
            if not self._is_deaf:
                taken = trio.Event()
                nursery.start_soon(self._ask, taken)
                with trio.move_on_after(self._patience_s) as self._patience:
                    await taken.wait()
                self._is_deaf = not taken.is_set()
            for delivery in held:
                delivery.is_held = delivery.has_progress = False
                delivery.connection.wake(delivery)
        self._is_asking = False

    async def _ask(self, taken: trio.Event) -> None:
        """Set `taken` once the client's program has read all that was written until now.

        Never cancelled by impatience, since a ping that is cut short would end the connection.
        """
        written = self._written_bytes
        try:
            if not await self._channel.ping():
                await self._wait_until_read(written)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the sender finds out as well, when it writes what was held
        self._is_deaf = False
        taken.set()

    async def _wait_until_read(self, written: int) -> None:
        look_s = LOOK_S
        # The rest of what was written since may still be there, where other streams go on.
        while self._written_bytes - (self._channel.unsent_bytes() or 0) < written:
            await trio.sleep(look_s)
            look_s = min(2 * look_s, LOOK_S_MAX)
        await trio.sleep(PAUSE_S)
