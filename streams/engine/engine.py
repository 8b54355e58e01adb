"""The engine: it begins streams, runs their handlers, opens connections, and shuts all down.

It owns every stream of one journal. A handler runs on while no connection is attached. The engine
knows no transport (a connection is a channel of lines) and nothing of MCP beyond the intents of the
dialects.

This is one file because a drain and a shutdown wait for what begins here: handlers and connections.
"""

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import trio

from streams.clock import wall
from streams.engine.committer import CommitListener, Committer
from streams.engine.connection import YOUNG_S, Connection, Delivery, EventIds, Session
from streams.engine.departure import Departure
from streams.engine.events import Events, ResumeRefused
from streams.engine.framing import Framing
from streams.engine.hooks import Hooks
from streams.engine.idempotency import KeyedCalls
from streams.engine.index import Registry
from streams.engine.lifecycle import ProgressToken
from streams.engine.operations import Operations
from streams.engine.outbox import SENT_S
from streams.engine.posts import Cancelled, Notice
from streams.engine.rates import Rates
from streams.engine.replicas import Replicas
from streams.engine.sessions import HttpSession
from streams.engine.slots import CAN_RUN_HERE, Slots
from streams.engine.stream import Stream
from streams.engine.streams import Streams
from streams.errors import INTERNAL_ERROR, Refusal, Unavailable, refusal
from streams.exchange import Channel, ResponseChannel
from streams.faults import is_failure, let_pass, let_signal_pass, log_failure
from streams.forks import end_child, in_child
from streams.journal.contract import Journal
from streams.journal.records import Outcome, Record, Restart
from streams.keys import Keyring, new_stream_id
from streams.limits import STORE_RETRY_S, Limits, Overflow
from streams.logs import STREAM_LETTERS
from streams.messages import Message, RequestId
from streams.protocol.extension import Mark

# Returns the final response as a line, and whether that is an error.
StreamHandler = Callable[[Stream], Awaitable[tuple[bytes, bool]]]


class ImmediateHandler:
    """A `StreamHandler` that waits for nothing, so that it needs no task of its own."""

    def __init__(self, run: Callable[[Stream], tuple[bytes, bool]]) -> None:
        """`run` is the handler, as a plain function."""
        self.run = run

    async def __call__(self, stream: Stream) -> tuple[bytes, bool]:
        """Run it in a task of its own, where it must wait for something before."""
        return self.run(stream)


# Finds the handler of a restarted call by its stream; None where the call cannot be restarted.
RestartHandler = Callable[[Stream], StreamHandler | None]

FENCE_FIRST: Final = 1  # each claim of the journal adds one
RESTORE_S: Final = 5.0  # the server starts after this time even if the journal takes no commit
# The steps of a shutdown: 4 s, together with the closing of the channels.
COMMIT_S: Final = 1.5
DELIVER_S: Final = 0.5
RELEASE_S: Final = 0.25
CLOSE_S: Final = 1.25
# A drain waits so long for the responses to requests that came just before it.
SETTLE_S: Final = 2.0
RETURN_S: Final = 0.5  # when a client that was refused by a drain tries again
SHUTDOWN_S: Final = COMMIT_S + DELIVER_S + RELEASE_S + CLOSE_S


_engines: Final[set["Engine"]] = set()  # those that are open in this process


class _LastStep(trio.abc.Instrument):
    """Ends a child process that a tool has forked, after the task step in which it was forked.

    The child has a copy of the event loop, with an epoll set that it shares with the server.
    """

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        end_child(RuntimeError("a forked child cannot await anything: the event loop is not its"))


def _leave_event_loop() -> None:
    if _engines and trio.lowlevel.in_trio_run():
        trio.lowlevel.add_instrument(_LastStep())
    _engines.clear()


in_child(_leave_event_loop)


async def _at_once(grace_s: float) -> None:
    await trio.lowlevel.checkpoint()


class Engine:
    """Streams, sessions and connections over one journal. `open_engine` runs it."""

    def __init__(
        self,
        journal: Journal,
        keyring: Keyring,
        limits: Limits,
        *,
        enforce_min: bool,
        require_token: bool,
        restart_handler: RestartHandler,
        deferral_s: float,
        events: Events,
        hooks: Hooks | None,
    ) -> None:
        """`enforce_min` refuses a client that resumes before `min` instead of serving it.

        `require_token` refuses a streamId without its resume token to any caller but the stream's
        own principal. `restart_handler` finds the handlers of restarted calls. A call that ends
        within `deferral_s` seconds is not stored. `events` may have listeners already, which then
        hear of the calls that a restart has interrupted. `hooks` makes webhooks.
        """
        self._journal = journal
        self.events = events
        self._restart_handler = restart_handler
        self._committer = Committer(journal)
        self._committer.hooks = self._hooks = hooks
        self._failure: BaseException | None = None
        self._streams = Streams(
            journal, self._committer, keyring, limits, events=events, deferral_s=deferral_s
        )
        self.sessions = self._streams.sessions
        self.operations = Operations(
            journal, self._streams, keyring, enforce_min=enforce_min, require_token=require_token
        )
        self.rates = Rates(limits.requests_per_principal_max)
        self.keyed = KeyedCalls(self._streams.cache, keyring, journal, self._start_soon)
        self._replicas: Replicas | None = None
        if journal.replica:
            self._replicas = Replicas(
                journal, self._streams, self._committer, keyring, limits, self
            )
        self._connections: dict[Connection, None] = {}  # in the order of their arrival
        self._arrived = 0  # connections, since the start
        # What another replica has to say of `notifications/cancelled`: see `Peer`.
        self.on_cancelled: Callable[[Session, RequestId, Any], None] = (
            self.operations.cancel_plainly
        )
        self._young: dict[Connection, None] = {}  # those not watched yet, in the same order
        self._has_young = trio.lowlevel.ParkingLot()
        self._is_closing = False
        # Begins with a drain, and with a shutdown that other replicas go on after: no connection
        # must be accepted from then on, so that balancers send clients to other processes.
        self.departure = Departure()
        # Called before a drain with its seconds, while connections are still accepted. No deadline
        # of a drain ends it, so it must be bounded by itself.
        self.before_departure: Callable[[float], Awaitable[None]] = _at_once
        self._grace: trio.CancelScope | None = None  # of a drain
        self.ended = trio.Event()  # set once `shut_down` is over
        self._is_moving = False  # clients are sent to other replicas
        self._running = 0  # handlers
        self._changed: trio.Event | None = None  # while a task waits in `_change`
        self._nursery: trio.Nursery
        self._slots: Slots  # for handlers

    async def use_new_keys(self) -> None:
        """The keyring has other keys now. Tokens of running calls are made with these."""
        await self._streams.index.rename()

    # New streams

    def begin(
        self,
        connection: Connection,
        request: bytes,
        handler: StreamHandler,
        *,
        min_s: float,
        max_s: float,
        overflow: Overflow = "block",
        is_paged: bool = False,
        is_restartable: bool = False,
        is_rerunnable: bool = False,
        caller: Callable[[], bytes] = bytes,
        is_repeatable: bool = False,
        is_findable: bool = False,
        mark: Mark | None = None,
        origin: Message | None = None,
        progress_token: ProgressToken | None = None,
    ) -> None:
        """Start a handler for an original request, and deliver what it sends.

        With `is_paged` the handler may send several responses: a page token leads from each to the
        next. With `is_restartable` the call is restarted after the server died, if its client can
        resume it; the journal then keeps what `caller` returns. With `is_rerunnable` it is
        restartable, and may `run_again` for any client while the server lives. With `is_repeatable`
        a second run of the call does no harm, so an idempotency key need not be durable before the
        first. An `is_findable` call can be found again by a client that was told nothing. `mark`
        stands in the request in place of its idempotency key. `origin` is the request, where that
        was parsed already.

        The caller must have called `make_room`, and must not have waited for anything since.
        """
        principal = connection.session.principal
        # "max: 0" is not resumable, so there is nothing to announce.
        dialects = connection.session.settings.dialects if max_s > 0 else ()
        is_told = max_s > 0 and (bool(dialects) or connection.has_event_ids)
        # A stream with pages becomes reachable later, when its client has a page token.
        is_once = mark is not None and mark.is_once
        is_findable = is_findable or is_once
        is_reachable = is_told or is_findable or (mark is not None and not mark.is_own)
        now = wall()
        record = Record(
            stream=new_stream_id(now),
            principal=principal,
            origin=request,
            min_s=min_s,
            max_s=max_s,
            created_at=now,
            fence=FENCE_FIRST,
            owner=self._journal.replica,
            is_announced=is_reachable or is_paged or mark is not None,
            pages=() if is_paged else None,
            number=self._streams.index.next_number(),
            restart=(
                Restart(caller=caller())
                if is_rerunnable or (is_restartable and is_reachable)
                else None
            ),
        )
        stream = self._streams.hold(record, overflow, origin)
        stream.is_reachable, stream.is_findable = is_reachable, is_findable
        if self.events.is_heard:
            self.events.began(stream, connection)
        preamble = partial(self.operations.announcements, stream, dialects)
        self._streams.defer(
            stream,
            is_urgent=(
                is_paged
                or is_once
                or (mark is not None and not is_repeatable)
                or (self._hooks is not None and self._hooks.wants(record))
            ),
            # An HTTP response begins after a while, so that proxies and clients see it live.
            is_needless=not (is_reachable or mark is not None or connection.is_response),
        )
        connection.attach(
            Delivery(stream, connection, after=0, preamble=preamble, speaks=dialects, is_call=True)
        )
        if progress_token is not None:
            stream.progress_token = progress_token
        self._start(stream, handler)

    def check_webhook(self, url: Any, principal: str) -> None:
        """Raise `Refusal` unless this caller may have its call's events sent to `url`."""
        if self._hooks is None:
            raise refusal("webhook_refused").saying(
                "This server sends no webhooks: leave out _meta['mcp-streams/webhook']."
            )
        self._hooks.check(url, principal)

    def _start_soon(self, run: Callable[..., Awaitable[object]], *given: Any) -> None:
        self._nursery.start_soon(run, *given)

    def _start(self, stream: Stream, handler: StreamHandler) -> None:
        self._running += 1
        # A record that is stored already can be committed while the handler holds up this thread.
        # With an idempotency key the handler even waits for that: see `_run`.
        if CAN_RUN_HERE and stream.is_deferred and isinstance(handler, ImmediateHandler):
            self._slots.run_here(partial(self._run_immediate, stream, handler))
        else:
            stream.scope = self._slots.start(partial(self._run, stream, handler))

    def _run_immediate(self, stream: Stream, handler: ImmediateHandler) -> None:
        """The same as `_run`, in the task that has read the request."""
        final: tuple[bytes, bool] | None = None
        if (enter := self.events.enter_handler) is not None:
            enter(stream)
        try:
            final = handler.run(stream)
        except BaseException as error:
            if is_failure(error):
                log_failure("a handler failed", error, stream=stream.id[:STREAM_LETTERS])
            let_signal_pass(error)
        self._ran(stream, final, None)

    @property
    def is_draining(self) -> bool:
        """Whether `drain` was called."""
        return self._grace is not None

    @property
    def is_closing(self) -> bool:
        """Whether `shut_down` was called."""
        return self._is_closing

    async def make_room(self, session: Session) -> None:
        """Make room for one more stream of this session's principal.

        Raises `Refusal` where a limit is reached, or the journal takes nothing new now.
        """
        # A request over HTTP was accepted before the departure, and is the last of its connection.
        is_late = self._is_closing or not isinstance(session, HttpSession)
        if self.departure.has_begun and is_late:
            raise refusal("draining", retryAfter=RETURN_S)
        if self._is_closing:
            raise Refusal(INTERNAL_ERROR, "The server is shutting down: try again later.")
        principal = session.principal
        self._committer.check(principal)
        if self._why_late:
            # Another replica may be about to claim, and would end the call as interrupted.
            raise refusal("unavailable", retryAfter=STORE_RETRY_S).saying(
                "This server waits for the store of its journal: try again later."
            )
        await self._streams.make_room(principal)

    async def _run(self, stream: Stream, handler: StreamHandler) -> None:
        final: tuple[bytes, bool] | None = None
        failure: Refusal | None = None
        if (enter := self.events.enter_handler) is not None:
            enter(stream)
        try:
            if stream.mark is not None and not stream.is_deferred:
                await stream.recorded()  # else a retry after a crash would run the tool twice
            await trio.lowlevel.checkpoint_if_cancelled()  # by the client, before it began
            final = await handler(stream)
        except Refusal as refused:
            failure = refused
        except BaseException as error:
            if is_failure(error):
                log_failure("a handler failed", error, stream=stream.id[:STREAM_LETTERS])
            try:
                await let_pass(error)
            except trio.Cancelled:
                assert stream.scope is not None
                if stream.scope.cancel_called:  # the call was cancelled, and not the engine
                    self._ran(stream, None, None)
                raise
        self._ran(stream, final, failure)

    def _ran(
        self, stream: Stream, final: tuple[bytes, bool] | None, failure: Refusal | None
    ) -> None:
        """The handler of a stream has ended."""
        stream.scope = None
        if stream.state.outcome is Outcome.LIVE and not (final is None and stream.is_suspended):
            if final is None:
                stream.fail(failure or Refusal(INTERNAL_ERROR, "The server failed: see its log."))
            else:
                line, is_error = final
                stream.finish(line, is_error=is_error)
        self._streams.cache.used(stream)
        self._running -= 1
        self._notify()

    # Connections

    @asynccontextmanager
    async def connect(self, channel: Channel) -> AsyncIterator[Connection]:
        """Open a connection for the length of a block.

        At the end of the block everything that is owed is written before the connection is closed.
        The block is cancelled when the connection fails.
        """
        connection = self._opened(Connection(channel, self._journal, self.events))
        try:
            async with trio.open_nursery() as nursery:
                connection.run(nursery)
                self._young[connection] = None
                self._has_young.unpark()
                yield connection
                await connection.drained()
                nursery.cancel_scope.cancel()
        finally:
            self._young.pop(connection, None)
            await self._close(connection)
            connection.session.end()

    async def respond(
        self,
        channel: ResponseChannel,
        session: Session,
        framing: Framing,
        begin: Callable[[Connection], Awaitable[None]],
        *,
        event_ids: EventIds,
        asked_at: float,
    ) -> None:
        """Open a connection for the response to one HTTP request, and send what `begin` begins.

        The request came at `asked_at`, in trio's time.
        """
        response = Connection(
            channel,
            self._journal,
            self.events,
            session,
            framing=framing,
            event_ids=event_ids,
            asked_at=asked_at,
        )
        connection = self._opened(response)
        try:
            await begin(connection)
            await connection.respond(channel)
        finally:
            await self._close(connection, is_over=channel.is_over)

    @property
    def journal(self) -> Journal:
        """The journal, for those that look."""
        return self._journal

    @property
    def index(self) -> Registry:
        """The streams in memory, for those that look."""
        return self._streams.index

    @property
    def connections(self) -> Collection[Connection]:
        """The open connections in the order of their arrival. Over HTTP these are responses."""
        return self._connections.keys()

    def here(self, stream_id: str) -> Stream | None:
        """The stream of this id, if it is in memory: of this replica, or followed for a client."""
        return self._streams.here(stream_id)

    async def ask_owner(self, record: Record) -> Stream | None:
        """The stream of another replica's call, as that one knows it now; None if it has no owner.

        Raises `Unavailable` where the owner or the store is silent.
        """
        if self._replicas is None or record.owner in ("", self._journal.replica):
            return None
        return await self._replicas.follow(record)

    def tell_refused(self, refused: Refusal, transport: str) -> None:
        """A resume over this transport was refused: tell those that listen to events."""
        if self.events.is_heard:
            self.events.tell(ResumeRefused(refused.reason, transport))

    def clients(self) -> list[Session]:
        """The sessions of all clients that have initialized, over every transport."""
        alone = [each.session for each in self._connections if not each.is_response]
        return [each for each in (*alone, *self.sessions) if each.revision is not None]

    def _opened(self, connection: Connection) -> Connection:
        self._connections[connection] = None
        self._arrived += 1
        connection.number = self._arrived
        if self.events.is_heard:
            self.events.opened(connection)
        self._notify()
        if self._is_moving and not connection.is_response:
            connection.hang_up()
        return connection

    async def _close(self, connection: Connection, *, is_over: bool = False) -> None:
        self._connections.pop(connection, None)
        connection.close()
        if self.events.is_heard:
            self.events.closed(connection)
        self._notify()
        if not is_over:
            with trio.CancelScope(shield=True):
                await connection.channel.aclose()

    def _notify(self) -> None:
        if self._changed is not None:  # for each call three times, and nearly always in vain
            self._changed.set()
            self._changed = None

    async def _change(self) -> None:
        """Wait until a handler or a connection begins or ends."""
        if self._changed is None:
            self._changed = trio.Event()
        await self._changed.wait()

    async def _watch_young(self) -> None:
        """Watch each connection from the age of `YOUNG_S` on, for ever."""
        while True:
            if not self._young:
                await self._has_young.park()
            for connection in list(self._young):
                await trio.sleep_until(connection.opened_at + YOUNG_S)
                if self._young.pop(connection, connection) is None:
                    connection.watch()

    def tell_all(self, notice: Notice) -> None:
        """Send a notification to all clients that have initialized, at all replicas."""
        self.tell_here(notice)
        if self._replicas is not None:
            self._replicas.outbox.notify(notice)

    def tell_here(self, notice: Notice) -> None:
        """As `tell_all`, to the clients of this replica."""
        if notice.key is not None and notice.resource is None:
            self.sessions.changed_lists[notice.key] = notice.line
        for session in self.clients():
            if notice.resource is None or notice.resource in session.subscriptions:
                session.notify(notice.line, key=notice.key)

    async def wait_idle(self, linger_s: float) -> None:
        """Wait until there was no connection and no running handler for `linger_s` seconds."""
        while True:
            if self._connections or self._running:
                await self._change()
                continue
            with trio.move_on_after(linger_s):
                await self._change()
                continue
            return

    # Start and shutdown

    async def run(self, nursery: trio.Nursery) -> None:
        """Take over the streams of the journal, restart their calls, and start all tasks."""
        self._nursery, self._slots = nursery, Slots(nursery)
        for stream in await self._streams.take_over():
            self.go_on(stream)
        nursery.start_soon(self._committer.run_until_stopped)
        if self._replicas is not None:
            nursery.start_soon(self._replicas.run)
        nursery.start_soon(self._streams.run)
        nursery.start_soon(self._watch_young)
        # The first client must see that interrupted calls have ended, not that they still run.
        with trio.move_on_after(RESTORE_S):
            await self._committer.settle()

    def go_on(self, stream: Stream) -> None:
        """Restart the call of a stream that was taken over, or end it as interrupted."""
        handler = self._restart_handler(stream)
        if handler is None:
            self._streams.interrupt(stream)
        else:
            if self.events.is_heard:
                self.events.restarted(stream)
            self._start(stream, partial(self._restart, handler))

    async def _restart(self, handler: StreamHandler, stream: Stream) -> tuple[bytes, bool]:
        assert stream.rerun is not None
        await stream.rerun.begin()
        return await handler(stream)

    async def drain(self, grace_s: float) -> None:
        """Take no new calls, wait up to `grace_s` seconds for those that run, and shut down.

        A call that the next process continues is not waited for. If a drain is under way, this one
        may end its wait earlier, and never later.
        """
        deadline = trio.current_time() + grace_s
        if self._grace is not None or self._is_closing:
            if self._grace is not None:
                self._grace.deadline = min(self._grace.deadline, deadline)
            await self.ended.wait()
            return
        self._grace = trio.CancelScope(deadline=deadline)
        # Not within the grace, which may be 0: the next process must listen before this one leaves.
        await self.before_departure(grace_s)
        self.departure.begin()
        with self._grace:
            if self._replicas is not None:
                self._send_away_idle()
            with trio.move_on_after(SETTLE_S):
                await self.departure.settled()
            while any(map(self._streams.ends_with_process, self._streams.index)):
                await self._change()
        await self.shut_down()

    def _send_away_idle(self) -> None:
        """Close the connections without a call: their clients go to another replica."""
        for connection in list(self._connections):
            if not (connection.is_response or connection.deliveries):
                connection.hang_up()

    async def shut_down(self) -> None:
        """Shut down within 4 s. Running calls end as `interrupted`, or are restarted later.

        In a shared journal they go on elsewhere at once, and so do their clients.
        """
        self._is_closing = True
        if self._replicas is not None:
            self.departure.begin()
        for stream in self._streams.index:
            if stream.state.outcome is Outcome.LIVE:
                self._streams.suspend(stream)
        if self._replicas is None:
            with trio.move_on_after(COMMIT_S):
                await self._committer.settle()
            await self._end_connections()
        else:
            await self._hand_over(self._replicas)
        with trio.move_on_after(CLOSE_S):
            while self._connections:
                await self._change()
        self.ended.set()

    async def _end_connections(self) -> None:
        """Send what is there, and close all connections."""
        for connection in self._connections:
            connection.hurry()
        await self._wait_for_connections(DELIVER_S)
        for connection in self._connections:
            connection.release()
        await self._wait_for_connections(RELEASE_S)
        for connection in self._connections:
            connection.hang_up()

    async def _hand_over(self, replicas: Replicas) -> None:
        """Give up all streams, and send the clients to the replicas that take them over."""
        # The next owner repeats work that is not committed in time, and must not wait for it.
        with trio.move_on_after(COMMIT_S / 2):
            await self._committer.settled()  # and not what clients go on to confirm
            await self._catch_up([each for each in self._connections if each.has_unannounced])
        with trio.move_on_after(COMMIT_S / 2):
            await replicas.release()
        self._is_moving = True
        async with trio.open_nursery() as nursery:
            for connection in self._connections:
                nursery.start_soon(self._move, connection)

    async def _move(self, connection: Connection) -> None:
        """Close a connection, once all is written that is durable."""
        await self._catch_up([connection])
        connection.release()
        with trio.move_on_after(RELEASE_S):
            await connection.drained()
        connection.hang_up()

    async def _catch_up(self, connections: Iterable[Connection]) -> None:
        """Wait until these have written all that is durable."""
        with trio.move_on_after(DELIVER_S):
            for connection in connections:
                connection.hurry()
                await connection.caught_up()

    @property
    def replica(self) -> str:
        """The id of this process among those that share the journal; "" where none do."""
        return self._journal.replica

    @property
    def unready(self) -> str:
        """Why this process should get no new connections now; "" where it should."""
        if self._is_closing:
            return "it is shutting down"
        if self.is_draining:
            return "it is draining: it takes no new calls"
        return self._why_late or self._committer.why_not

    @property
    def why_no_commits(self) -> str:
        """Why the journal takes nothing now; "" while it takes changes."""
        return self._why_late or self._committer.trouble

    @property
    def _why_late(self) -> str:
        return "" if self._replicas is None else self._replicas.leases.why_late

    @property
    def replicas_alive(self) -> int:
        """How many replicas live, this one included."""
        return 1 if self._replicas is None else self._replicas.leases.lives

    def on_commit(self, listener: CommitListener) -> None:
        """Call this after each commit."""
        self._committer.listeners = (*self._committer.listeners, listener)

    def hang_up(self, part: float = 1.0) -> None:
        """Close this part of the connections. Clients come back, perhaps to another replica."""
        connections = list(self._connections)
        for connection in connections[: math.ceil(part * len(connections))]:
            connection.hang_up()

    def share(self, replicas: int) -> None:
        """So many replicas share the limits on a principal's requests and bytes."""
        self.rates.divide(replicas)
        self._streams.lives = replicas

    def cancel(
        self,
        session: Session,
        request_id: RequestId,
        reason: Any,
        *,
        detaches: Callable[[Stream], bool],
    ) -> None:
        """`notifications/cancelled`. Over HTTP another replica may have the request."""
        is_here = self.operations.cancel(session, request_id, reason, detaches=detaches)
        if not is_here and self._replicas is not None and isinstance(session, HttpSession):
            self._replicas.cancel(Cancelled(session.key, request_id, reason))

    async def handed_on(self, *, is_told_once: bool) -> None:
        """Wait until a message of a client cannot get lost, here or on the way to another replica.

        An answer and a cancel are told once: a client that goes on by an event id is not asked
        again, and one that has cancelled does not come back. Raises `Unavailable`.
        """
        if is_told_once:
            with trio.move_on_after(SENT_S) as waiting:
                await self._committer.settled()
            if waiting.cancelled_caught:
                raise Unavailable("the journal does not take the message now")
        if self._replicas is not None:
            await self._replicas.outbox.sent()

    def cancel_here(self, cancelled: Cancelled) -> None:
        """The client of a session has cancelled a request at another replica."""
        if (session := self.sessions.held(cancelled.session)) is not None:
            self.on_cancelled(session, cancelled.request_id, cancelled.reason)

    @property
    def failure(self) -> BaseException | None:
        """The error that has ended the engine, if any."""
        return self._failure or self._committer.failure

    def fail(self, error: BaseException) -> None:
        """End the engine with this error, because it can serve no client any more."""
        self._failure = error

        async def fail() -> None:
            raise error

        self._nursery.start_soon(fail)

    def stop(self) -> None:
        """Commit nothing more, and end the waits of handlers that are shielded from cancellation.

        This is the last step of a shutdown.
        """
        self._committer.stop()
        for stream in self._streams.index:
            stream.notify()

    async def _wait_for_connections(self, patience_s: float) -> None:
        with trio.move_on_after(patience_s):
            for connection in list(self._connections):
                await connection.drained()


@asynccontextmanager
async def open_engine(engine: Engine) -> AsyncIterator[None]:
    """Open an engine for the length of a block; leaving the block shuts it down.

    Raises `JournalUnusable` where the journal cannot be used any more.
    """
    _engines.add(engine)
    async with trio.open_nursery() as nursery:
        try:
            await engine.run(nursery)
            try:
                yield
            finally:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + SHUTDOWN_S):
                    await engine.shut_down()
        finally:
            _engines.discard(engine)
            nursery.cancel_scope.cancel()
            engine.stop()  # also where `run` was cancelled
