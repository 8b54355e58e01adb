"""Keeps a client connected, and its calls attached to the connection of the moment.

The `Reconnector` dials a new connection when the last one is lost, and repeats requests that may be
repeated. It tells a `ConnectionListener` of each change. The `Resumer` is that listener: it begins
calls, and resumes them over each new connection.

They are one file because neither is understood alone: which calls wait decides how soon the next
attempt is made, and which connection is up decides what a call does next.

A call is attached to one connection at a time (`call.connection`):

- to the first one by its original request,
- to a later one by a resume request, if the server has announced a ticket,
- else by its original request once more, if that has an idempotency key: the server finds the call
  by it.

The response to a resume request comes last. It tells how the delivery ended, or it is the call's
own response, if the resume took over from the original request.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import msgspec
import trio

from streams import messages
from streams.client import wire
from streams.client.answers import Answers
from streams.client.call import RunningCall
from streams.client.connection import Calls, ClientConnection
from streams.client.wire import PAUSE_MAX_S, Hello
from streams.clock import backoff_s
from streams.errors import (
    CallLost,
    CannotConnect,
    ClientError,
    ServerRefused,
    StreamGone,
    Superseded,
)
from streams.exchange import ClientChannel, Dialer
from streams.keys import new_request_id
from streams.logs import log
from streams.messages import Kind, Message, RequestId
from streams.protocol.revisions import REVISIONS

# The next attempt is made after a random part of this, doubled each time, up to the maximum. So the
# clients of a server that was restarted do not all come at once.
BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MAX_S: Final = 30.0

# While a call waits, an attempt that has no answer yet gets another one beside it. The network that
# it went through may be dead, and the next one may be through a network that is back.
BESIDE_S: Final = 2.0

# The maximum while a call waits, so that it is resumed soon after an outage. The pauses then double
# at each second attempt, so that none is much longer than the outage was before it.
BACKOFF_WAITED_MAX_S: Final = 2.0

# The pause between attempts to make the first connection, to a server that may be starting.
STARTING_S: Final = 0.2

# A server that is not ours is given up after `silence_s`, and its calls are resumed. The next
# time it has so many times as long, so that a call that is only quiet is not disturbed often.
SILENCE_AGAIN: Final = 1.5

# The time doubles after each connection over which nothing came, up to this.
SILENCE_MAX_S: Final = 300.0

# The pause before a request is repeated, unless the server names another one.
RETRY_S: Final = 1.0

# After `released` the pause is a random part of this, doubled each time, up to `RETRY_S`.
RELEASED_FIRST_S: Final = 0.2


_CLOSED: Final = "The client was closed: enter another one."

_CLOSED_CALL: Final = "The client was closed: resume the call's ticket with another one."

_HELD: Final = (
    "This client still receives the stream: read the running call, or use another client."
)


class ConnectionListener(Protocol):
    """Is told what happens to the connection."""

    def up(self, connection: ClientConnection, nursery: trio.Nursery) -> None:
        """The server has answered `initialize`. The nursery lasts as long as the connection."""

    def down(self, connection: ClientConnection) -> None:
        """The connection is lost."""

    def surrender(self, error: CannotConnect) -> None:
        """There was no connection for `patience_s`."""


class _Attempts:
    """Attempts to connect, side by side. The first with an answer decides."""

    def __init__(self) -> None:
        self.error: OSError | None = None
        self._scopes: list[trio.CancelScope] = []
        self._winner: trio.CancelScope | None = None

    @property
    def is_decided(self) -> bool:
        return self._winner is not None or self.error is not None

    def begin(self) -> trio.CancelScope:
        """One more attempt, which runs in this scope."""
        self._scopes.append(trio.CancelScope())
        return self._scopes[-1]

    def claim(self, scope: trio.CancelScope) -> bool:
        """Whether this attempt is the first to connect. The others end."""
        if self._winner is None:
            self._winner = scope
            for each in self._scopes:
                if each is not scope:
                    each.cancel()
        return self._winner is scope

    def is_last_word(self, scope: trio.CancelScope, error: OSError) -> bool:
        """Whether this attempt, which has ended, decides."""
        if self._winner is not None and self._winner is not scope:
            return False
        self.error = error
        return True


class Reconnector:
    """Makes the connections of a client, one after the other."""

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
        is_first_awaited: bool = False,
        is_watchful: bool = False,
    ) -> None:
        """With `is_first_awaited` the first connection is tried for `patience_s`, as any other.
        With `is_watchful` a server of ours that is silent while a call waits is given up soon.
        """
        self.hello = Hello("")
        self.greeted = msgspec.Raw(b"{}")  # the server's answer to `initialize`, as it came
        self.error: OSError | None = None  # why there is no connection
        self.level: str | None = None  # of log messages, as the server was told
        self.subscribed: dict[str, None] = {}  # the URIs of resources, as the server was told
        self.connection: ClientConnection | None = None
        self._listener: ConnectionListener
        self._calls = calls
        self._dialer = dialer
        self._answers = answers
        self._greeting = greeting
        self._on_notification = on_notification
        self._connect_s = connect_s
        self._is_first_awaited = is_first_awaited
        self._is_watchful = is_watchful
        self._connect_timeout_s = connect_timeout_s
        self._patience_s = patience_s
        self._silence_s = silence_s  # for the next connection
        self._usual_silence_s = SILENCE_AGAIN * silence_s
        # Random, because a call keeps its request id when another process resumes it: that id must
        # not be one of this process.
        self._prefix = new_request_id()
        self._ids = 0
        self._was_useful = False  # something that was waited for came over the last connection
        self._asked_s = 0.0  # the pause that the server has asked for when it refused the last one
        self._changed = trio.Event()
        self._wanted = trio.Event()
        self._call_came = trio.Event()
        self._calls_waiting = 0  # calls that begin or are cancelled
        self._surrender: CannotConnect | None = None
        self._is_running = False
        self.is_closed = False
        self._listens = False  # to notifications that belong to no call

    def new_id(self) -> str:
        """A new id for a request and its progress."""
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

        Raises `CannotConnect` if that fails. Later errors are raised by the methods that wait
        for a connection.
        """
        self._listener = listener
        self._is_running = True
        try:
            await self._run(task_status)
        finally:
            self._is_running = False

    async def _run(self, task_status: trio.TaskStatus[None]) -> None:
        error = await self._first_connection(task_status)
        if not (self.hello.protocol_version or self._is_first_awaited):
            raise CannotConnect(f"No connection: {_with_advice(error)}.") from error
        attempt, since = 0, trio.current_time()
        while True:
            left_s = since + self._patience_s - trio.current_time()
            if left_s <= 0 or isinstance(error, PermissionError):  # waiting does not help
                self._give_up(error)
                await self._wanted.wait()
                self._surrender = None
                attempt, since = 0, trio.current_time()
            else:
                await self._pause(attempt, left_s)
            connected_at = trio.current_time()
            self._was_useful = False
            error = await self._connect()
            attempt += 1
            if self._was_useful or trio.current_time() - connected_at > BACKOFF_MAX_S:
                attempt, since = 0, trio.current_time()

    async def _first_connection(self, task_status: trio.TaskStatus[None]) -> OSError:
        """Like `_connect_once`, repeated for `connect_s`: the server may be about to listen."""
        give_up_at = trio.current_time() + self._connect_s
        while True:
            error = await self._connect_once(task_status)
            is_refused = isinstance(error, PermissionError | ServerRefused)
            is_enough = self._is_first_awaited or trio.current_time() >= give_up_at
            if self.hello.protocol_version or is_refused or is_enough:
                return error
            await trio.sleep(min(STARTING_S, give_up_at - trio.current_time()))

    async def _pause(self, attempt: int, left_s: float) -> None:
        """Wait before the next attempt; not for long if a call waits for it."""
        share = random.uniform(0, 1)  # nosec B311 # jitter, not a secret
        waited_s = share * backoff_s(BACKOFF_FIRST_S, attempt // 2, BACKOFF_WAITED_MAX_S)
        if self._asked_s:  # the server lives, and says when to come again
            waited_s = (0.5 + share) * self._asked_s
        self._call_came = trio.Event()
        pause_s = share * backoff_s(BACKOFF_FIRST_S, attempt, BACKOFF_MAX_S)
        with trio.move_on_after(min(left_s, pause_s)):
            if not self._is_waited_for:
                await self._call_came.wait()
            await trio.sleep(waited_s)

    @property
    def _is_waited_for(self) -> bool:
        return self._calls_waiting > 0 or any(call.is_running for call in self._calls)

    async def _connect(self) -> OSError:
        """Like `_connect_once`, with attempts side by side while a call waits."""
        if not (self._is_watchful and self._is_waited_for):
            return await self._connect_once()
        attempts = _Attempts()
        async with trio.open_nursery() as nursery:

            async def attempt(scope: trio.CancelScope) -> None:
                with scope:
                    error = await self._connect_once(claim=lambda: attempts.claim(scope))
                    if attempts.is_last_word(scope, error):
                        nursery.cancel_scope.cancel()

            while not attempts.is_decided:
                nursery.start_soon(attempt, attempts.begin())
                await trio.sleep(BESIDE_S)
        assert attempts.error is not None
        return attempts.error

    async def _connect_once(
        self,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
        claim: Callable[[], bool] = lambda: True,
    ) -> OSError:
        """Connect once, and use the connection until it is lost. Returns the reason.

        A connection that may not `claim` to be the one is closed at once.
        """
        self._asked_s = 0.0
        with trio.CancelScope() as timeout:
            timeout.deadline = trio.current_time() + self._connect_timeout_s
            try:
                async with self._dialer() as channel:
                    error = await self._use(channel, timeout, task_status, claim)
            except OSError as failure:
                error = failure
        if timeout.cancelled_caught:
            error = TimeoutError(f"no answer within {self._connect_timeout_s:g} s")
        log.info("not connected", why=str(error))
        self.error = error
        self.stir()
        return error

    async def _use(
        self,
        channel: ClientChannel,
        timeout: trio.CancelScope,
        task_status: trio.TaskStatus[None],
        claim: Callable[[], bool],
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
                if refused is None and claim():
                    timeout.deadline = float("inf")
                    self._up(connection, nursery)
                    task_status.started()
                    await trio.sleep_forever()
                nursery.cancel_scope.cancel()
        finally:
            self._down(connection)
        return refused or ConnectionError("the connection was lost")

    async def _greet(self, connection: ClientConnection) -> OSError | None:
        """Send `initialize`; return what is wrong with the server, if anything."""
        greeting = self._greeting()
        reply = await connection.ask(wire.INITIALIZE, greeting)
        if reply is None:
            return ConnectionError(connection.ended_by or "the server closed the connection")
        if reply.kind is Kind.ERROR:
            error = wire.error_of(reply)
            why = f"the server said: {error.message}"
            is_unauthorized = error.reason == "unauthorized"
            if error.reason in wire.RETRIED:
                self._asked_s = error.retry_after_s
                return ConnectionError(why)
            data = error.data if isinstance(error.data, dict) else None
            return PermissionError(why) if is_unauthorized else ServerRefused(why, data)
        try:
            hello = messages.decode(wire.result_of(reply), Hello)
        except ValueError as unfit:
            return ServerRefused(f"the server's answer to initialize does not fit: {unfit}")
        version = hello.protocol_version
        if version not in REVISIONS:
            return ServerRefused(f"the server speaks MCP {version}, which this client does not")
        connection.hello = self.hello = hello
        self.greeted = wire.result_of(reply)
        self.error = None
        connection.is_numbering = hello.has_positions and wire.wants_positions(greeting)
        if self._listens:
            connection.listen()
        connection.post(messages.notification(wire.INITIALIZED))
        self._repeat_settings(connection)
        return None

    def _repeat_settings(self, connection: ClientConnection) -> None:
        """Tell the server what it was told over the last connection.

        A resource may have been updated meanwhile, so its subscriber is told that it was.
        """
        if self.level is not None:
            connection.post(
                messages.request(self.new_id(), "logging/setLevel", {"level": self.level})
            )
        for uri in self.subscribed:
            connection.post(messages.request(self.new_id(), wire.SUBSCRIBE, {"uri": uri}))
            updated = messages.notification(wire.UPDATED, {"uri": uri})
            self._on_notification(messages.look(updated))

    def _up(self, connection: ClientConnection, nursery: trio.Nursery) -> None:
        self.connection = connection
        connection.was_useful = False  # the answer to `initialize` does not count
        log.info("connected", server=self.hello.server_info.get("name"))
        nursery.start_soon(
            connection.watch, self._silence_s, self._usual_silence_s, self._is_watchful
        )
        self._listener.up(connection, nursery)
        self.stir()

    def _down(self, connection: ClientConnection) -> None:
        # A server that refuses `initialize` has answered it.
        self._was_useful = connection.was_useful and self.connection is connection
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
            why = f"No connection any more: {_with_advice(error)}."
        self._surrender = CannotConnect(why)
        self._wanted = trio.Event()
        self._listener.surrender(self._surrender)
        self.stir()

    def listen(self) -> None:
        """Listen to notifications that belong to no call, over this and every later connection."""
        self._listens = True
        if self.connection is not None:
            self.connection.listen()

    def close(self) -> None:
        """The client is closed: wake the tasks of others that still wait for a connection."""
        self.is_closed = True
        self.stir()

    async def connected(self) -> ClientConnection:
        """Wait for a connection. Raises `CannotConnect` after `patience_s`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._is_running:
            raise RuntimeError("the client is not open: use it within `async with Client(…)`")
        self._wanted.set()
        surrender = self._surrender  # a failure before this call does not count
        while self.connection is None or self.connection.is_over:
            if self._surrender is not None and self._surrender is not surrender:
                raise self._surrender
            if self.is_closed:
                raise CannotConnect(_CLOSED)
            await self._changed.wait()
        return self.connection

    async def connected_for_call(self) -> ClientConnection:
        """Like `connected`, for a call: attempts are then made more often."""
        self._calls_waiting += 1
        self._call_came.set()
        try:
            return await self.connected()
        finally:
            self._calls_waiting -= 1

    async def change(self) -> None:
        """Wait until a connection comes or goes, or a call is attached."""
        await self._changed.wait()

    def stir(self) -> None:
        """Wake the tasks that wait for a change."""
        self._changed.set()
        self._changed = trio.Event()

    async def farewell(self) -> None:
        """Wait until all is written."""
        if self.connection is not None:
            await self.connection.drained()

    # Requests

    async def ask(
        self,
        method: str,
        params: Mapping[str, Any],
        about: RunningCall | None = None,
        *,
        may_repeat: bool = True,
    ) -> Message:
        """Send a request and return its response. With `may_repeat`, the request is sent again if
        the connection is lost.

        `about` is the call that the request asks about, if this client has it.

        Raises `CannotConnect`, `CallLost` if the response is lost and the request may not be
        repeated, or if responses are lost for `patience_s`, or the error that the server answers
        with.
        """
        give_up_at = trio.current_time() + self._patience_s
        while True:
            connection = await self.connected()
            reply = await connection.ask(method, params, about)
            if reply is None:
                if may_repeat:
                    continue
                raise CallLost(f"The connection was lost: {method} may or may not have run.")
            if reply.kind is not Kind.ERROR:
                return reply
            error = wire.error_of(reply)
            is_lost = error.reason in (wire.LOST, wire.UNTAKEN)
            is_again = error.reason in wire.RETRIED or (is_lost and may_repeat)
            if not is_again or trio.current_time() >= give_up_at:
                raise wire.as_error(error)
            await trio.sleep(error.retry_after_s or RETRY_S)


class Resumer:
    """Begins calls, resumes them, and detaches them: the `CallOwner` of a client's calls."""

    def __init__(
        self, reconnector: Reconnector, calls: Calls, answers: Answers, *, patience_s: float
    ) -> None:
        self._reconnector = reconnector
        self._calls = calls
        self._answers = answers
        self._patience_s = patience_s
        self._nursery: trio.Nursery | None = None  # of the connection
        self._has_warned = False  # of a pause above the maximum

    # As a listener

    def up(self, connection: ClientConnection, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        for call in self._calls:
            nursery.start_soon(self._resume, call, connection)

    def down(self, connection: ClientConnection) -> None:
        self._nursery = None
        for call in self._calls:
            if not call.is_resumable:
                call.fail(_lost(connection.ended_by))
            if not call.is_running:
                self._calls.remove(call)
            elif call.connection is connection:
                call.not_before = trio.current_time() + self._min_s(call)

    def surrender(self, error: CannotConnect) -> None:
        for call in self._calls:
            call.fail(error)
            self._calls.remove(call)

    def close(self) -> None:
        """The client is closed: end the calls that tasks of others still read."""
        for call in self._calls:
            call.fail(_lost() if call.ticket is None else CannotConnect(_CLOSED_CALL))
            self._calls.remove(call)

    # Beginning a call

    async def begin(self, call: RunningCall) -> None:
        """Send the call's request, or resume the call.

        Raises `CannotConnect`, or `StreamGone` if this client receives the stream already.
        """
        try:
            connection = await self._reconnector.connected_for_call()
        except BaseException:
            call.is_left = True  # also after `rejoin`: its connection must not wait for a reader
            raise
        if call in self._calls or call.is_complete or call.has_failed:
            return  # the caller left this call earlier, and its messages still arrive
        if call.request is None:
            await self._wait_for_earlier(call, connection)
            self._calls.add(call)
            if self._reconnector.is_closed:  # during that wait
                self.close()
            newest = self._reconnector.connection  # `connection` may be lost by now
            if self._nursery is not None and newest is not None and not newest.is_over:
                self._nursery.start_soon(self._resume, call, newest)
            return
        call.attach(connection)
        call.key_memory = connection.hello.key_memory if call.has_key else ""
        self._calls.add(call)
        try:
            await connection.send(call.request)
        except BaseException:
            self._calls.remove(call)
            raise

    async def _wait_for_earlier(self, call: RunningCall, connection: ClientConnection) -> None:
        """Wait until the last messages of an earlier delivery of the same stream have come.

        Raises `StreamGone` if that delivery is still in use.
        """
        assert call.ticket is not None
        earlier = self._calls.of(call.ticket)
        if earlier is None:
            return
        if earlier.has_failed or (earlier.is_left and earlier.resume_id is not None):
            await self._forget_after_ping(earlier, connection)
        else:
            raise StreamGone(_HELD, "id_in_use")

    async def _forget_after_ping(self, call: RunningCall, connection: ClientConnection) -> None:
        """Forget a detached call, once its last messages have come.

        They come ahead of the answer to this ping.
        """
        await connection.ask("ping", {})
        self._calls.remove(call)

    # Resuming it

    async def _resume(self, call: RunningCall, connection: ClientConnection) -> None:
        """Attach a call to this connection, and retry until either of them ends."""
        is_known = call.key_memory == connection.hello.key_memory
        if call.ticket is None and not (is_known or call.is_refused):
            call.fail(_lost())  # a second request might run it twice
        with trio.CancelScope() as call.resuming:
            await trio.sleep_until(call.not_before)
            give_up_at = trio.current_time() + self._patience_s
            failures = 0
            while call.is_running and call.connection is not connection:
                reply = await self._deliver(call, connection)
                if reply is None:
                    return  # the connection is lost
                if call.has_progressed:
                    give_up_at = trio.current_time() + self._patience_s
                    failures = 0
                pause_s = self._judge(call, reply, failures)
                failures += 1
                if pause_s is None:
                    break
                if trio.current_time() + pause_s > give_up_at:
                    call.fail(_as_error(reply))
                    break
                await trio.sleep(pause_s)
        # `_forget_after_ping` forgets a call that was detached.
        if not (call.is_running or call.resuming.cancelled_caught):
            self._calls.remove(call)
            self._reconnector.stir()  # `cancel` may wait for the call

    async def _deliver(self, call: RunningCall, connection: ClientConnection) -> Message | None:
        ticket = call.ticket
        # A resume that takes over the original request has the same id.
        takes_over = ticket is None or wire.resuming(ticket).takes_over
        request_id = call.request_id if takes_over else self._reconnector.new_id()
        resume_id = None if takes_over else request_id
        call.attach(connection, resume_id)
        if ticket is not None:
            connection.prepare_resume(request_id, call, may_lack_reply=not takes_over)
            await connection.send(wire.resume(ticket, request_id, call.cursor))
        else:
            assert call.request is not None  # a call without a request has a ticket
            call.key_memory = connection.hello.key_memory if call.has_key else ""
            call.is_refused = False
            await connection.send(call.request)
        self._reconnector.stir()
        try:
            return await connection.reply_to(request_id, is_last=not takes_over)
        finally:
            if call.resume_id == resume_id and not (call.is_complete or connection.is_over):
                connection.note_event(call)
                call.connection = None

    def _judge(self, call: RunningCall, reply: Message, failures: int) -> float | None:
        """Seconds until the next attempt after this reply, or None if it ends the call."""
        pause_s = max(self._min_s(call), RETRY_S)
        if reply.kind is Kind.ERROR:
            error = wire.error_of(reply)
            if error.reason == wire.RELEASED:
                return self._released_s(call, failures)
            if error.reason in wire.RETRIED or error.reason == wire.LOST:
                return error.retry_after_s or pause_s
        elif wire.how_it_ended(reply) == wire.RELEASED:
            return self._released_s(call, failures)
        call.fail(_as_error(reply))  # does nothing if the final response has come
        return None

    def _released_s(self, call: RunningCall, failures: int) -> float:
        """The pause after `released`. It is short at first: another replica may have the call."""
        share = random.uniform(0, 1)  # nosec B311 # jitter, not a secret
        return max(self._min_s(call), share * backoff_s(RELEASED_FIRST_S, failures, RETRY_S))

    def _min_s(self, call: RunningCall) -> float:
        """Seconds for which the server wants no resume after a lost connection."""
        asked_s = 0.0 if call.ticket is None else call.ticket.min_s
        if asked_s > PAUSE_MAX_S and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the server asks for a longer pause before a resume than it is given",
                asked_s=asked_s,
                given_s=PAUSE_MAX_S,
            )
        return min(asked_s, PAUSE_MAX_S)

    # As the owner of calls

    def leave(self, call: RunningCall) -> None:
        """Detach the call if the server allows that; otherwise let its messages pass unread."""
        connection = self._reconnector.connection
        if connection is None or connection.is_over:
            self._calls.remove(call)
        elif call.connection is connection:
            self._leave_attached(call, connection)
        else:
            call.resuming.cancel()
            self._calls.remove(call)
            if call.wants_confirming:
                # The connection was lost before the last ack; a resume with a cursor acks too.
                assert call.ticket is not None
                connection.post(wire.resume(call.ticket, self._reconnector.new_id(), call.cursor))

    def _leave_attached(self, call: RunningCall, connection: ClientConnection) -> None:
        connection.post(call.ack())
        if call.resume_id is not None and not call.is_complete:
            connection.post(wire.cancelled(call.resume_id))
            call.resuming.cancel()
        elif not call.has_failed:
            return  # an original request cannot be detached: its last message removes it
        if self._nursery is not None:
            self._nursery.start_soon(self._forget_after_ping, call, connection)

    async def cancel(self, call: RunningCall) -> None:
        """Send the cancellation until the server has confirmed it.

        Raises `CannotConnect`.
        """
        while call.is_running:
            connection = await self._reconnector.connected_for_call()
            if call.connection is not connection:
                await self._reconnector.change()
                continue
            await connection.send(wire.cancelled(call.request_id, call.cancel_reason))
            # Another server may be too busy to answer, and cannot be asked later anyway.
            if not connection.hello.has_positions or await connection.ask("ping", {}) is not None:
                call.resuming.cancel()
                self._calls.remove(call)
                return

    def answer(self, message: Message, request_id: RequestId, call: RunningCall) -> None:
        """Answer a request of the server, which was handed out among the call's messages."""
        self._answers.take(message, request_id, self._reconnector.connection, call)

    def answer_repeated(self, request_id: RequestId) -> None:
        """Answer a request that was replayed, if its handler has begun."""
        self._answers.repeat(request_id, self._reconnector.connection)

    def want_ack(self, call: RunningCall, *, now: bool) -> None:
        """Send an ack for the call, if it is attached to the connection."""
        connection = self._reconnector.connection
        if connection is not None and call.connection is connection:
            connection.want_ack(call, now=now)

    def send_again(self, call: RunningCall, pause_s: float) -> None:
        """See `CallOwner.send_again`. The next connection does it, if this one is lost."""
        call.not_before = trio.current_time() + pause_s
        connection = self._reconnector.connection
        if self._nursery is not None and connection is not None and not connection.is_over:
            self._nursery.start_soon(self._resume, call, connection)

    def ended(self, call: RunningCall) -> None:
        """The final response has come, so no other reply has to be waited for."""
        call.resuming.cancel()
        self._calls.remove(call)


def _lost(why: str = "") -> CallLost:
    why = f" ({why})" if why else ""
    return CallLost(f"The connection was lost{why}: the call may or may not have run.")


def _as_error(reply: Message) -> ClientError:
    if reply.kind is Kind.ERROR:
        return wire.as_error(wire.error_of(reply))
    match wire.how_it_ended(reply):
        case "superseded":
            return Superseded("Another connection has resumed this stream.")
        case "released":
            return StreamGone("The server does not keep this stream.", "released")
        case _:
            why = "All of this stream was confirmed before: there is nothing left to resume."
            return StreamGone(why, "delivered")


def _with_advice(error: OSError) -> str:
    """The reason of an error, and what to do about a missing bearer token."""
    said = str(error).removesuffix(".")
    if isinstance(error, PermissionError) and error.errno is None:  # not of the operating system
        return f"{said} (dial with a token; the command takes MCP_STREAMS_TOKEN or --token-file)"
    return said


async def _run_until_over(connection: ClientConnection, scope: trio.CancelScope) -> None:
    await connection.run()
    scope.cancel()
