"""Keeps a client connected: dials again when the connection goes, and resumes what was running.

One task dials, and tells `resuming` when a connection is there and when it is gone. Requests that
may be repeated are.
"""

import random
from collections.abc import Callable
from typing import Any, Final, Protocol

import trio

from streams import messages
from streams.client import wire
from streams.client.answers import Answers
from streams.client.call import RunningCall
from streams.client.connection import Calls, ClientConnection
from streams.client.wire import PAUSE_MAX_S, Hello
from streams.clock import backoff_s
from streams.errors import CallLost, CannotConnect, ClientError, StreamGone, Superseded
from streams.exchange import ClientChannel, Dialer
from streams.keys import new_request_id
from streams.logs import log
from streams.messages import Kind, Message, RequestId

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


_HELD: Final = (
    "This client still receives the stream: read it there, or resume over another client."
)


class Refused(ConnectionError):
    """The server has answered, and what it says will be the same the next time."""


class ConnectionListener(Protocol):
    """Is told what becomes of the connection."""

    def up(self, connection: ClientConnection, nursery: trio.Nursery) -> None:
        """The server has answered `initialize`. The nursery lives as long as the connection."""

    def down(self, connection: ClientConnection) -> None:
        """The connection is lost."""

    def surrender(self, error: CannotConnect) -> None:
        """There was no connection for as long as the client is patient."""


class Reconnector:
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
        self.connection: ClientConnection | None = None
        self._listener: ConnectionListener
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

    async def run(
        self,
        listener: ConnectionListener,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Stay connected. Started with the first connection, which is tried for `connect_s`.

        Raises `CannotConnect` when that fails; later failures go to who waits for a connection.
        """
        self._listener = listener
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
            error = await self._connect_once()
            attempt += 1
            if self._was_useful or trio.current_time() - connected_at > BACKOFF_MAX_S:
                attempt, since = 0, trio.current_time()

    async def _first_connection(self, task_status: trio.TaskStatus[None]) -> OSError:
        """As `_connect_once`, over again for `connect_s` where a server may be about to listen."""
        give_up_at = trio.current_time() + self._connect_s
        while True:
            error = await self._connect_once(task_status)
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

    async def _connect_once(
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
        connection = ClientConnection(
            channel,
            self._calls,
            self._answers,
            new_id=self.new_id,
            on_notification=self._on_notification,
        )
        refused: OSError | None = ConnectionError("the server closed the connection")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_run_until_over, connection, nursery.cancel_scope)
                refused = await self._greet(connection)
                if refused is None:
                    timeout.deadline = float("inf")
                    self._up(connection, nursery)
                    task_status.started()
                    await trio.sleep_forever()
                nursery.cancel_scope.cancel()
        finally:
            self._down(connection)
        return refused or ConnectionError("the connection was lost")

    async def _greet(self, connection: ClientConnection) -> OSError | None:
        """Say hello; what is wrong with the server, if anything."""
        greeting = self._greeting()
        reply = await connection.ask(wire.INITIALIZE, greeting)
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
        connection.hello = self.hello = hello
        connection.is_numbering = hello.has_positions and wire.wants_positions(greeting)
        connection.post(messages.notification(wire.INITIALIZED))
        if self.level is not None:
            connection.post(
                messages.request(self.new_id(), "logging/setLevel", {"level": self.level})
            )
        return None

    def _up(self, connection: ClientConnection, nursery: trio.Nursery) -> None:
        self.connection = connection
        connection.was_useful = False  # saying hello is not enough
        log.info("connected", server=self.hello.server_info.get("name"))
        nursery.start_soon(connection.watch, self._silence_s, self._usual_silence_s)
        self._listener.up(connection, nursery)
        self.stir()

    def _down(self, connection: ClientConnection) -> None:
        self._was_useful = connection.was_useful
        if connection.was_useful:
            self._silence_s = min(self._silence_s, self._usual_silence_s)
            if connection.was_silent:
                self._silence_s = self._usual_silence_s
        elif connection.was_silent:
            most_s = max(SILENCE_MAX_S, self._usual_silence_s)
            self._silence_s = min(2 * self._silence_s, most_s)
        if self.connection is connection:
            self.connection = None
            self._listener.down(connection)
            self.stir()

    def _give_up(self, error: OSError) -> None:
        why = f"No connection for {self._patience_s:g} s; at last: {error}."
        if isinstance(error, PermissionError):
            why = f"No connection any more: {_told(error)}."
        self._surrender = CannotConnect(why)
        self._is_wanted = trio.Event()
        self._listener.surrender(self._surrender)
        self.stir()

    async def connected(self) -> ClientConnection:
        """The connection, when there is one. Raises `CannotConnect` when the patience is over."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._is_wanted.set()
        surrender = self._surrender  # that was before us: now it is tried again
        while self.connection is None or self.connection.is_over:
            if self._surrender is not None and self._surrender is not surrender:
                raise self._surrender
            await self._changed.wait()
        return self.connection

    async def connected_for_call(self) -> ClientConnection:
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
        if self.connection is not None:
            await self.connection.drained()

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
            connection = await self.connected()
            reply = await connection.ask(method, params, about)
            if reply is None:
                continue
            if reply.kind is not Kind.ERROR:
                return reply
            error = wire.error_of(reply)
            is_lost = error.reason == wire.LOST and trio.current_time() < give_up_at
            if not (is_lost or error.reason in wire.RETRIED):
                raise wire.as_error(error)
            await trio.sleep(error.retry_after_s or RETRY_S)


class Resumer:
    """Begins calls, resumes them, and lets go of them."""

    def __init__(
        self, reconnector: Reconnector, calls: Calls, answers: Answers, *, patience_s: float
    ) -> None:
        self._reconnector = reconnector
        self._calls = calls
        self._answers = answers
        self._patience_s = patience_s
        self._nursery: trio.Nursery | None = None  # of the connection
        self._has_warned = False  # of a pause above the maximum

    # Connections come and go

    def up(self, connection: ClientConnection, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        for call in self._calls:
            nursery.start_soon(self._resume, call, connection)

    def down(self, connection: ClientConnection) -> None:
        self._nursery = None
        for call in self._calls:
            if not call.is_resumable:
                call.fail(_lost())
            if not call.is_running:
                self._calls.remove(call)
            elif call.connection is connection:
                call.not_before = trio.current_time() + self._min_s(call)

    def surrender(self, error: CannotConnect) -> None:
        for call in self._calls:
            call.fail(error)
            self._calls.remove(call)

    # A call begins

    async def begin(self, call: RunningCall) -> None:
        """Send the call's request, or have it resumed.

        Raises `CannotConnect`, or `StreamGone` where this client has the stream already.
        """
        try:
            connection = await self._reconnector.connected_for_call()
        except BaseException:
            call.is_left = True  # again: its connection must not wait for it to be read
            raise
        if call in self._calls or call.is_complete or call.has_failed:
            return  # it was left and is read on
        if call.request is None:
            await self._make_way(call, connection)
            self._calls.add(call)
            newest = self._reconnector.connection  # `connection` may be lost by now
            if self._nursery is not None and newest is not None and not newest.is_over:
                self._nursery.start_soon(self._resume, call, newest)
            return
        call.attach(connection)
        call.key_memory = connection.hello.key_memory
        self._calls.add(call)
        try:
            await connection.send(call.request)
        except BaseException:
            self._calls.remove(call)
            raise

    async def _make_way(self, call: RunningCall, connection: ClientConnection) -> None:
        """Let what is still under way of an earlier delivery pass."""
        assert call.ticket is not None
        earlier = self._calls.of(call.ticket)
        if earlier is None:
            return
        if earlier.has_failed or (earlier.is_left and earlier.resume_id is not None):
            await self._barrier(earlier, connection)
        else:
            raise StreamGone(_HELD, "id_in_use")

    async def _barrier(self, call: RunningCall, connection: ClientConnection) -> None:
        """Forget a call that was detached, once its last messages have come.

        They were sent before the answer to what is asked now.
        """
        await connection.ask("ping", {})
        self._calls.remove(call)

    # It is resumed

    async def _resume(self, call: RunningCall, connection: ClientConnection) -> None:
        """Have a call's messages come over this connection, until either ends."""
        if call.ticket is None and call.key_memory != connection.hello.key_memory:
            call.fail(_lost())  # sent again, it might run twice
        with trio.CancelScope() as call.resuming:
            await trio.sleep_until(call.not_before)
            give_up_at = trio.current_time() + self._patience_s
            while call.is_running and call.connection is not connection:
                reply = await self._deliver(call, connection)
                if reply is None:
                    return  # the connection is over
                pause_s = self._judge(call, reply)
                if pause_s is None:
                    break
                if call.has_progressed:
                    give_up_at = trio.current_time() + self._patience_s
                if trio.current_time() + pause_s > give_up_at:
                    call.fail(_as_error(reply))
                    break
                await trio.sleep(pause_s)
        # What was detached is forgotten behind its last messages (`_barrier`).
        if not (call.is_running or call.resuming.cancelled_caught):
            self._calls.remove(call)

    async def _deliver(self, call: RunningCall, connection: ClientConnection) -> Message | None:
        ticket = call.ticket
        # What takes over a request has its id, and cannot be told from it any more.
        takes_over = ticket is None or wire.resuming(ticket).takes_over
        request_id = call.request_id if takes_over else self._reconnector.new_id()
        resume_id = None if takes_over else request_id
        call.attach(connection, resume_id)
        if ticket is not None:
            connection.prepare_resume(request_id, call, may_lack_reply=not takes_over)
            await connection.send(wire.resume(ticket, request_id, call.cursor))
        else:
            assert call.request is not None  # who begins with a ticket keeps it
            await connection.send(call.request)
        self._reconnector.stir()
        try:
            return await connection.reply_to(request_id, is_last=not takes_over)
        finally:
            if call.resume_id == resume_id and not (call.is_complete or connection.is_over):
                connection.note_event(call)
                call.connection = None

    def _judge(self, call: RunningCall, reply: Message) -> float | None:
        """What the end of a delivery means: seconds until the next try, or None for no more."""
        pause_s = max(self._min_s(call), RETRY_S)
        if reply.kind is Kind.ERROR:
            error = wire.error_of(reply)
            if error.reason in wire.RETRIED or error.reason == wire.LOST:
                return error.retry_after_s or pause_s
        elif wire.how_it_ended(reply) == "released":
            return pause_s
        call.fail(_as_error(reply))  # which changes nothing where the final response is here
        return None

    def _min_s(self, call: RunningCall) -> float:
        """For how long to leave the call alone when its connection is lost."""
        asked_s = 0.0 if call.ticket is None else call.ticket.min_s
        if asked_s > PAUSE_MAX_S and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the server asks for a longer pause before a resume than it is given",
                asked_s=asked_s,
                given_s=PAUSE_MAX_S,
            )
        return min(asked_s, PAUSE_MAX_S)

    # The rest of what a call needs

    def leave(self, call: RunningCall) -> None:
        """Its caller listens no longer: detach where that can be, else let its messages pass."""
        connection = self._reconnector.connection
        if connection is None or connection.is_over:
            self._calls.remove(call)
        elif call.connection is connection:
            self._leave_attached(call, connection)
        else:
            call.resuming.cancel()
            self._calls.remove(call)
            if call.wants_confirming:
                # Its connection went before it could be confirmed: a cursor does that too.
                assert call.ticket is not None
                connection.post(wire.resume(call.ticket, self._reconnector.new_id(), call.cursor))

    def _leave_attached(self, call: RunningCall, connection: ClientConnection) -> None:
        connection.post(call.ack())
        if call.resume_id is not None and not call.is_complete:
            connection.post(wire.cancelled(call.resume_id))
            call.resuming.cancel()
        elif not call.has_failed:
            return  # an original request cannot be detached: it is forgotten with its last message
        if self._nursery is not None:
            self._nursery.start_soon(self._barrier, call, connection)

    async def cancel(self, call: RunningCall) -> None:
        """Tell the server to stop the work, until it has heard it.

        Raises `CannotConnect`.
        """
        while call.is_running:
            connection = await self._reconnector.connected_for_call()
            if call.connection is not connection:
                await self._reconnector.change()
                continue
            await connection.send(wire.cancelled(call.request_id))
            # A plain server may be too busy to answer, and cannot be asked again anyway.
            if not connection.hello.has_positions or await connection.ask("ping", {}) is not None:
                call.resuming.cancel()
                self._calls.remove(call)
                return

    def answer(self, message: Message, request_id: RequestId) -> None:
        """A request of the server was taken from a call's messages."""
        self._answers.take(message, request_id, self._reconnector.connection)

    def answer_repeated(self, request_id: RequestId) -> None:
        """A request of the server, that may have been taken, has come again."""
        self._answers.repeat(request_id, self._reconnector.connection)

    def want_ack(self, call: RunningCall, *, now: bool) -> None:
        """More was taken of a call: tell the server, where it can be told."""
        connection = self._reconnector.connection
        if connection is not None and call.connection is connection:
            connection.want_ack(call, now=now)

    def ended(self, call: RunningCall) -> None:
        """The final response is here: what asked for it may be answered by that alone."""
        call.resuming.cancel()
        self._calls.remove(call)


def _lost() -> CallLost:
    return CallLost("The connection was lost: the call may or may not have run.")


def _as_error(reply: Message) -> ClientError:
    if reply.kind is Kind.ERROR:
        return wire.as_error(wire.error_of(reply))
    match wire.how_it_ended(reply):
        case "superseded":
            return Superseded("Another connection has resumed this stream.")
        case "released":
            return StreamGone("The server does not keep hold of this stream.", "released")
        case _:
            why = "All of this stream was confirmed before: there is nothing left to resume."
            return StreamGone(why, "delivered")


def _told(error: OSError) -> str:
    """Why there is no connection, and what to do where it is for want of a token."""
    said = str(error).removesuffix(".")
    if isinstance(error, PermissionError):
        return f"{said} (dial with a token; the command takes MCP_STREAMS_TOKEN or --token-file)"
    return said


async def _run_until_over(connection: ClientConnection, scope: trio.CancelScope) -> None:
    await connection.run()
    scope.cancel()
