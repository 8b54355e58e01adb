"""Keeps a client connected: dials again when the connection goes, and resumes what was running.

One task dials, and tells `resuming` when a connection is there and when it is gone. Requests that
may be repeated are.
"""

import random
from collections.abc import Callable
from typing import Any, Final

import trio

from streams import messages
from streams.client import wire
from streams.client.answers import Answers
from streams.client.call import RunningCall
from streams.client.connection import Calls, Link
from streams.client.wire import Hello
from streams.clock import backoff_s
from streams.errors import CannotConnect
from streams.exchange import ClientChannel, Dialer
from streams.keys import new_request_id
from streams.logs import log
from streams.messages import Kind, Message

# A connection is tried again after a random part of this, doubled each time, up to the maximum:
# so a thousand clients of a server that was restarted do not all come at once.
BACKOFF_FIRST_S: Final = 0.25
BACKOFF_MAX_S: Final = 30.0

# The same while a call waits, so that it goes on soon after an outage.
BACKOFF_WAITED_MAX_S: Final = 2.0

# The first connection may wait for a server that is just starting: it is tried again after this.
STARTING_S: Final = 0.2

# A server that is not ours and was silent for `silence_s` is given up, and resumed. It has so many
# times that before it is given up again: a call that is just quiet is not disturbed often.
SILENCE_AGAIN: Final = 1.5

# It has twice as long each time that nothing came of it, up to this: it may need so long.
SILENCE_MAX_S: Final = 300.0

# What cannot be had at the moment is asked for again after this, or when the server says.
RETRY_S: Final = 1.0


class Refused(ConnectionError):
    """The server has answered, and what it says will be the same the next time."""


class Keeper:
    """Holds the connection. `on_up`, `on_down` and `on_surrender` are told what becomes of it."""

    def __init__(
        self,
        dialer: Dialer,
        answers: Answers,
        calls: Calls,
        *,
        greeting: Callable[[], dict[str, Any]],
        on_notification: Callable[[Message], None],
        connect_s: float,
        connect_timeout_s: float,
        patience_s: float,
        silence_s: float,
    ) -> None:
        self.hello = Hello("")
        self.level: str | None = None  # of the server's log messages
        self.link: Link | None = None
        self.on_up: Callable[[Link, trio.Nursery], None]
        self.on_down: Callable[[Link], None]
        self.on_surrender: Callable[[CannotConnect], None]
        self._calls = calls
        self._dialer = dialer
        self._answers = answers
        self._greeting = greeting
        self._on_notification = on_notification
        self._connect_s = connect_s
        self._connect_timeout_s = connect_timeout_s
        self._patience_s = patience_s
        self._silence_s = silence_s  # for the next connection
        self._usual_silence_s = SILENCE_AGAIN * silence_s
        # Unlike those of any other process: a resumed stream's id is never taken by one of ours.
        self._prefix = new_request_id()
        self._ids = 0
        self._was_useful = False  # the last connection
        self._changed = trio.Event()
        self._is_wanted = trio.Event()
        self._has_call = trio.Event()
        self._calls_waiting = 0  # which begin, or are cancelled
        self._surrender: CannotConnect | None = None

    def new_id(self) -> str:
        """An id for a request, and for its progress."""
        self._ids += 1
        return f"{self._prefix}-{self._ids}"

    # The connection

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Stay connected. Started with the first connection, which is tried for `connect_s`.

        Raises `CannotConnect` when that fails; later failures go to who waits for a connection.
        """
        error = await self._first_connection(task_status)
        if not self.hello.protocol_version:
            raise CannotConnect(f"No connection: {_told(error)}.") from error
        attempt, since = 0, trio.current_time()
        while True:
            left_s = since + self._patience_s - trio.current_time()
            if left_s <= 0 or isinstance(error, PermissionError):  # it is not a matter of time
                self._give_up(error)
                await self._is_wanted.wait()
                self._surrender = None
                attempt, since = 0, trio.current_time()
            else:
                await self._rest(attempt, left_s)
            connected_at = trio.current_time()
            self._was_useful = False
            error = await self._connection()
            attempt += 1
            if self._was_useful or trio.current_time() - connected_at > BACKOFF_MAX_S:
                attempt, since = 0, trio.current_time()

    async def _first_connection(self, task_status: trio.TaskStatus[None]) -> OSError:
        """As `_connection`, over again for `connect_s` where a server may be about to listen."""
        give_up_at = trio.current_time() + self._connect_s
        while True:
            error = await self._connection(task_status)
            is_refused = isinstance(error, PermissionError | Refused)
            if self.hello.protocol_version or is_refused or trio.current_time() >= give_up_at:
                return error
            await trio.sleep(min(STARTING_S, give_up_at - trio.current_time()))

    async def _rest(self, attempt: int, left_s: float) -> None:
        """Wait before the next attempt: not for long where a call waits for it."""
        share = random.uniform(0, 1)  # nosec B311 # jitter, not a secret
        waited_s = share * backoff_s(BACKOFF_FIRST_S, attempt, BACKOFF_WAITED_MAX_S)
        self._has_call = trio.Event()
        pause_s = share * backoff_s(BACKOFF_FIRST_S, attempt, BACKOFF_MAX_S)
        with trio.move_on_after(min(left_s, pause_s)):
            if not self._is_waited_for:
                await self._has_call.wait()
            await trio.sleep(waited_s)

    @property
    def _is_waited_for(self) -> bool:
        return self._calls_waiting > 0 or any(call.is_running for call in self._calls)

    async def _connection(
        self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> OSError:
        """One connection, until it is over; why it is, or why there was none."""
        with trio.CancelScope() as timeout:
            timeout.deadline = trio.current_time() + self._connect_timeout_s
            try:
                async with self._dialer() as channel:
                    error = await self._use(channel, timeout, task_status)
            except OSError as failure:
                error = failure
        if timeout.cancelled_caught:
            error = TimeoutError(f"no answer within {self._connect_timeout_s:g} s")
        log.info("not connected", why=str(error))
        return error

    async def _use(
        self, channel: ClientChannel, timeout: trio.CancelScope, task_status: trio.TaskStatus[None]
    ) -> OSError:
        link = Link(
            channel,
            self._calls,
            self._answers,
            new_id=self.new_id,
            on_notification=self._on_notification,
        )
        refused: OSError | None = ConnectionError("the server closed the connection")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_run_until_over, link, nursery.cancel_scope)
                refused = await self._greet(link)
                if refused is None:
                    timeout.deadline = float("inf")
                    self._up(link, nursery)
                    task_status.started()
                    await trio.sleep_forever()
                nursery.cancel_scope.cancel()
        finally:
            self._down(link)
        return refused or ConnectionError("the connection was lost")

    async def _greet(self, link: Link) -> OSError | None:
        """Say hello; what is wrong with the server, if anything."""
        greeting = self._greeting()
        reply = await link.ask(wire.INITIALIZE, greeting)
        if reply is None:
            return ConnectionError("the server closed the connection")
        if reply.kind is Kind.ERROR:
            error = wire.error_of(reply)
            why = f"the server said: {error.message}"
            is_stranger = error.reason == "unauthorized"
            if error.reason in wire.RETRIED:
                return ConnectionError(why)
            return PermissionError(why) if is_stranger else Refused(why)
        try:
            hello = messages.decode(wire.result_of(reply), Hello)
        except ValueError as unfit:
            return Refused(f"the server's answer to initialize does not fit: {unfit}")
        version = hello.protocol_version
        if version not in wire.PROTOCOL_VERSIONS:
            return Refused(f"the server speaks MCP {version}, which this client does not")
        link.hello = self.hello = hello
        link.is_numbering = hello.has_positions and wire.wants_positions(greeting)
        link.post(messages.notification(wire.INITIALIZED))
        if self.level is not None:
            link.post(messages.request(self.new_id(), "logging/setLevel", {"level": self.level}))
        return None

    def _up(self, link: Link, nursery: trio.Nursery) -> None:
        self.link = link
        link.was_useful = False  # saying hello is not enough
        log.info("connected", server=self.hello.server_info.get("name"))
        nursery.start_soon(link.watch, self._silence_s, self._usual_silence_s)
        self.on_up(link, nursery)
        self.stir()

    def _down(self, link: Link) -> None:
        self._was_useful = link.was_useful
        if link.was_useful:
            self._silence_s = min(self._silence_s, self._usual_silence_s)
            if link.was_silent:
                self._silence_s = self._usual_silence_s
        elif link.was_silent:
            most_s = max(SILENCE_MAX_S, self._usual_silence_s)
            self._silence_s = min(2 * self._silence_s, most_s)
        if self.link is link:
            self.link = None
            self.on_down(link)
            self.stir()

    def _give_up(self, error: OSError) -> None:
        why = f"No connection for {self._patience_s:g} s; at last: {error}."
        if isinstance(error, PermissionError):
            why = f"No connection any more: {_told(error)}."
        self._surrender = CannotConnect(why)
        self._is_wanted = trio.Event()
        self.on_surrender(self._surrender)
        self.stir()

    async def connected(self) -> Link:
        """The connection, when there is one. Raises `CannotConnect` when the patience is over."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._is_wanted.set()
        surrender = self._surrender  # that was before us: now it is tried again
        while self.link is None or self.link.is_over:
            if self._surrender is not None and self._surrender is not surrender:
                raise self._surrender
            await self._changed.wait()
        return self.link

    async def connected_for_call(self) -> Link:
        """The same for a call, which is in more of a hurry than a request that is repeated."""
        self._calls_waiting += 1
        self._has_call.set()
        try:
            return await self.connected()
        finally:
            self._calls_waiting -= 1

    async def change(self) -> None:
        """Wait for a connection to come or go, or a call to be attached."""
        await self._changed.wait()

    def stir(self) -> None:
        """Wake whoever waits for a change."""
        self._changed.set()
        self._changed = trio.Event()

    async def farewell(self) -> None:
        """Wait until the last words are written."""
        if self.link is not None:
            await self.link.drained()

    # Requests that may be repeated

    async def ask(
        self, method: str, params: dict[str, Any], about: RunningCall | None = None
    ) -> Message:
        """Send a request, again if need be on the next connection, and return its response.

        `about` is the call that it asks about, where that is here.

        Raises `CannotConnect`, `CallLost` where responses are lost for as long as the client is
        patient, or what an error response stands for.
        """
        give_up_at = trio.current_time() + self._patience_s
        while True:
            link = await self.connected()
            reply = await link.ask(method, params, about)
            if reply is None:
                continue
            if reply.kind is not Kind.ERROR:
                return reply
            error = wire.error_of(reply)
            is_lost = error.reason == wire.LOST and trio.current_time() < give_up_at
            if not (is_lost or error.reason in wire.RETRIED):
                raise wire.as_error(error)
            await trio.sleep(error.retry_after_s or RETRY_S)


def _told(error: OSError) -> str:
    """Why there is no connection, and what to do where it is for want of a token."""
    said = str(error).removesuffix(".")
    if isinstance(error, PermissionError):
        return f"{said} (dial with a token; the command takes MCP_STREAMS_TOKEN or --token-file)"
    return said


async def _run_until_over(link: Link, scope: trio.CancelScope) -> None:
    await link.run()
    scope.cancel()
