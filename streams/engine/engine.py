"""The engine: streams, who follows them, and when they end.

It owns every stream of one journal and runs their handlers, which go on while nobody is attached.
It knows no transport (a connection is a channel of lines) and no MCP beyond what a dialect's
intents need.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import trio

from streams.clock import wall
from streams.engine.committer import Committer
from streams.engine.connection import Connection, CursorOf, no_cursor
from streams.engine.delivery import Delivery
from streams.engine.framing import Framing
from streams.engine.idempotency import KeyedCalls
from streams.engine.operations import Access
from streams.engine.rates import Rates
from streams.engine.session import Session
from streams.engine.stream import Stream
from streams.engine.streams import Holding
from streams.errors import INTERNAL_ERROR, JournalUnusable, Refusal
from streams.exchange import Channel
from streams.faults import let_pass, log_failure
from streams.forks import end_child, in_child
from streams.journal.contract import Create, Journal, Outcome, Record, Restart
from streams.keys import Keyring, new_id
from streams.limits import Limits, Overflow
from streams.messages import Message
from streams.protocol.extension import Mark

# What a handler gives: its final response as a line, and whether that is an error.
Handler = Callable[[Stream], Awaitable[tuple[bytes, bool]]]
# Finds the handler of a stream whose former one has died; None where there is none.
Again = Callable[[Stream], Handler | None]

FENCE_FIRST: Final = 1  # a claim gives a record the next one
RESTORE_S: Final = 5.0  # a journal that takes nothing does not keep the server from starting
# The steps of a shutdown: 4 s together with the channels' own farewells.
COMMIT_S: Final = 1.5
DELIVER_S: Final = 0.5
RELEASE_S: Final = 0.25
CLOSE_S: Final = 1.25
SHUTDOWN_S: Final = COMMIT_S + DELIVER_S + RELEASE_S + CLOSE_S


_engines: Final[set["Engine"]] = set()  # that are open in this process


class _LastStep(trio.abc.Instrument):
    """In a child that the task of a tool has forked: the step in which it was is the last one.

    The child has the event loop as well, and an epoll set that it shares with the server.
    """

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        end_child(RuntimeError("a forked child cannot await anything: the event loop is not its"))


def _leave_event_loop() -> None:
    if _engines and trio.lowlevel.in_trio_run():
        trio.lowlevel.add_instrument(_LastStep())
    _engines.clear()


in_child(_leave_event_loop)


class Engine:
    """Made by `open_engine`."""

    def __init__(
        self,
        journal: Journal,
        keyring: Keyring,
        limits: Limits,
        *,
        enforce_min: bool,
        require_token: bool,
        again: Again,
    ) -> None:
        self._journal = journal
        self._again = again
        self._committer = Committer(journal)
        # Whoever cancels the engine from outside still gets the shutdown that was promised.
        self._committing = trio.CancelScope(shield=True)
        self.failure: BaseException | None = None  # what has ended it
        self._held = Holding(journal, self._committer, keyring, limits)
        self._streams = self._held.streams
        self.sessions = self._held.sessions
        self.access = Access(
            self._streams,
            self._held.resting,
            keyring,
            self._held.answers,
            enforce_min=enforce_min,
            require_token=require_token,
            on_cancel=self._held.cancel,
        )
        self.rates = Rates(limits.requests_per_principal_max)
        self.keyed = KeyedCalls(self._held.resting, keyring)
        self._connections: dict[Connection, None] = {}  # in the order of their arrival
        self._is_closing = False
        self._running = 0  # handlers
        self._stirred = trio.Event()  # handlers and connections come and go
        self._nursery: trio.Nursery

    # A new stream

    def begin(
        self,
        connection: Connection,
        request: bytes,
        handler: Handler,
        *,
        min_s: float,
        max_s: float,
        overflow: Overflow = "block",
        is_paged: bool = False,
        is_rerun: bool = False,
        mark: Mark | None = None,
        origin: Message | None = None,
    ) -> Stream:
        """Start a handler for an originating request, and deliver what it sends.

        One that `is_paged` may send several responses: the tokens of the pages lead to the others.
        One that `is_rerun` is begun again when the server has died, if its client can come back.
        `mark` is what the request has in the place of its idempotency key.
        `origin` is the request, where that was parsed already.
        There is room for it if nothing was waited for since `make_room`.
        """
        principal = connection.session.principal
        # "max: 0" is not resumable, so there is nothing to announce.
        dialects = connection.session.settings.dialects if max_s > 0 else ()
        is_told = max_s > 0 and (bool(dialects) or connection.has_event_ids)
        # Pages are, once their client has a token.
        is_reachable = is_told or (mark is not None and not mark.is_own)
        record = Record(
            stream=new_id(),
            principal=principal,
            origin=request,
            min_s=min_s,
            max_s=max_s,
            created_at=wall(),
            fence=FENCE_FIRST,
            is_announced=is_told or is_paged or mark is not None,
            pages=() if is_paged else None,
            number=self._streams.next_number(),
            restart=Restart() if is_rerun and is_reachable else None,
        )
        stream = self._held.hold(record, overflow, origin)
        stream.is_reachable = is_reachable
        self._committer.add(Create(record))
        self._committer.mark(stream, 0)  # to be told when it is there
        preamble = self.access.announcements(stream, dialects)
        connection.attach(
            Delivery(stream, connection, after=0, preamble=preamble, speaks=dialects, is_call=True)
        )
        self._start(stream, handler)
        return stream

    def _start(self, stream: Stream, handler: Handler) -> None:
        self._running += 1
        self._nursery.start_soon(self._run, stream, handler)

    async def make_room(self, principal: str) -> None:
        """See to it that this principal may have one more stream.

        Raises `Refusal` where there is a limit, or the journal takes nothing now.
        """
        if self._is_closing:
            raise Refusal(INTERNAL_ERROR, "The server is shutting down: try again later.")
        self._committer.check(principal)
        await self._held.make_room(principal)

    async def _run(self, stream: Stream, handler: Handler) -> None:
        final: tuple[bytes, bool] | None = None
        failure = Refusal(INTERNAL_ERROR, "The server failed: see its log.")
        # Outermost: what fails while it is cancelled becomes an exception only behind the scope.
        try:
            with stream.scope:
                if stream.mark is not None:  # a crash must not make who comes again run it twice
                    await stream.recorded()
                final = await handler(stream)
        except Refusal as refused:
            failure = refused
        except BaseException as error:
            await let_pass(error)
            log_failure("a handler failed", error, stream=stream.id[:8])
        if stream.state.outcome is Outcome.LIVE and not (final is None and stream.is_suspended):
            if final is None:
                stream.fail(failure)
            else:
                line, is_error = final
                stream.finish(line, is_error=is_error)
        self._held.resting.note(stream)
        self._running -= 1
        self._stir()

    # The engine's own life

    @asynccontextmanager
    async def connect(self, channel: Channel) -> AsyncIterator[Connection]:
        """A connection, for the length of a block; then what is owed is written, and it is closed.

        The block is cancelled when the connection fails.
        """
        async with (
            self._connected(Connection(channel, self._journal)) as connection,
            trio.open_nursery() as nursery,
        ):
            connection.run(nursery)
            yield connection
            await connection.drained()
            nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def response(
        self,
        channel: Channel,
        session: Session,
        framing: Framing,
        *,
        cursor_of: CursorOf = no_cursor,
    ) -> AsyncIterator[Connection]:
        """A connection for the response to one request: what the block has begun is sent, and then
        it is closed. `Connection` says what the rest is for.
        """
        connection = Connection(
            channel, self._journal, session, framing=framing, cursor_of=cursor_of
        )
        async with self._connected(connection):
            yield connection
            await connection.respond()

    @asynccontextmanager
    async def _connected(self, connection: Connection) -> AsyncIterator[Connection]:
        self._connections[connection] = None
        self._stir()
        try:
            yield connection
        finally:
            self._connections.pop(connection, None)
            connection.close()
            self._stir()
            with trio.CancelScope(shield=True):
                await connection.channel.aclose()

    async def rest(self, linger_s: float) -> None:
        """Wait until no connection is there and no handler runs, for so many seconds on end."""
        while True:
            if self._connections or self._running:
                await self._stirred.wait()
                continue
            with trio.move_on_after(linger_s):
                await self._stirred.wait()
                continue
            return

    def _stir(self) -> None:
        self._stirred.set()
        self._stirred = trio.Event()

    async def run(self, nursery: trio.Nursery) -> None:
        """Take over what the journal has, and begin to work."""
        self._nursery = nursery
        for stream in await self._held.restore():
            handler = self._again(stream)
            if handler is None:
                self._held.interrupt(stream)
            else:
                self._start(stream, partial(self._rerun, handler))
        nursery.start_soon(self._commit)
        nursery.start_soon(self._held.run)
        # Whoever asks first shall hear how it ended, not that it still runs.
        with trio.move_on_after(RESTORE_S):
            await self._committer.settle()

    async def _rerun(self, handler: Handler, stream: Stream) -> tuple[bytes, bool]:
        assert stream.rerun is not None
        await stream.rerun.begin()
        return await handler(stream)

    async def _commit(self) -> None:
        with self._committing:
            try:
                await self._committer.run()
            except JournalUnusable as error:
                self.failure = error
                raise

    async def shut_down(self) -> None:
        """End everything in good order, within 4 s: running calls end as `interrupted`."""
        self._is_closing = True
        for stream in self._streams:
            if stream.state.outcome is Outcome.LIVE:
                self._held.leave_off(stream)
        with trio.move_on_after(COMMIT_S):
            await self._committer.settle()
        for connection in self._connections:
            connection.separation.hurry()
        await self._wait_for_connections(DELIVER_S)
        for connection in self._connections:
            for delivery in list(connection.deliveries.values()):
                delivery.end("released")
        await self._wait_for_connections(RELEASE_S)
        for connection in self._connections:
            connection.hang_up()
        with trio.move_on_after(CLOSE_S):
            while self._connections:
                await self._stirred.wait()

    def fail(self, error: BaseException) -> None:
        """Nobody can be served any more: end with this error, whoever has met it."""

        self.failure = error

        async def fail() -> None:
            raise error

        self._nursery.start_soon(fail)

    def stop(self) -> None:
        """Commit no more: the last thing there is to do."""
        self._committing.cancel()

    async def _wait_for_connections(self, patience_s: float) -> None:
        with trio.move_on_after(patience_s):
            for connection in list(self._connections):
                await connection.drained()


@asynccontextmanager
async def open_engine(
    journal: Journal,
    keyring: Keyring,
    limits: Limits | None = None,
    *,
    enforce_min: bool = False,
    require_token: bool = False,
    again: Again = lambda _: None,
) -> AsyncIterator[Engine]:
    """An engine on this journal, for the length of a block; leaving it shuts down in good order.

    `enforce_min` refuses a client that comes back before `min` instead of serving it.
    `require_token` refuses a streamId alone to any caller but the stream's own principal. `again`
    finds the handlers of streams that are to be run again. Raises `JournalUnusable` when memory and
    disk have parted for good.
    """
    engine = Engine(
        journal,
        keyring,
        limits or Limits(),
        enforce_min=enforce_min,
        require_token=require_token,
        again=again,
    )
    _engines.add(engine)
    async with trio.open_nursery() as nursery:
        try:
            await engine.run(nursery)
            try:
                yield engine
            finally:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + SHUTDOWN_S):
                    await engine.shut_down()
        finally:
            _engines.discard(engine)
            engine.stop()  # also where it is cancelled before it has begun to serve
            nursery.cancel_scope.cancel()
