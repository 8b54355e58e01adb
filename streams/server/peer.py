"""The conversation of a server with one MCP client: every message, from the line to the reply.

Messages are handled one after another. Handlers of calls run in the engine, and nothing here waits
for them. A message may wait for the journal, to look up its stream, and then the next message of
the same connection waits too. A call whose arguments a worker process has to check waits in a task
of its own, so that the next message does not wait for the check.

This is one file because every method of MCP shares the same steps: parse, rate, revision, request
id, and errors that become replies.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import trio

from streams import messages
from streams.engine.connection import Connection, EventIds, Session
from streams.engine.engine import Engine
from streams.engine.identity import call_digest
from streams.engine.lifecycle import ProgressToken
from streams.engine.operations import check_free
from streams.engine.retry import patiently
from streams.engine.stream import Stream
from streams.errors import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    InsufficientScope,
    Overtaken,
    Refusal,
    StoreAway,
    Unavailable,
    refusal,
)
from streams.exchange import Caller, Channel, Scopes
from streams.limits import STORE_RETRY_S
from streams.logs import log
from streams.messages import Incoming, Kind, Message, RequestId, TooLarge
from streams.protocol import dialects, extension
from streams.protocol.clients import described
from streams.protocol.extension import Mark
from streams.protocol.revisions import REVISIONS
from streams.protocol.vocabulary import Listing, Polling, Resuming, read_params
from streams.server.backend import Backend, CallTool, Guest, Received, Run, SessionInfo
from streams.server.caller import CallerInfo
from streams.server.methods import log_dropped
from streams.server.patience import Patience
from streams.turns import (
    LARGE_BYTES,
    LargeWork,
    RateLimit,
    Turns,
    large_work,
    units_of,
    work_on,
)

# Revision 2026-07-28 has no handshake. Each request names its revision under this key; over HTTP a
# header names it as well.
_REVISION_KEY: Final = "io.modelcontextprotocol/protocolVersion"

# Request ids and progress tokens are stored with a stream, and each progress message repeats the
# token.
NAME_LETTERS_MAX: Final = 1024

# How many calls of one connection may be checked by workers, or wait for a worker, in tasks of
# their own. Workers check one value of a principal at a time, for up to 2.5 s each: the last of
# four begins after 7.5 s, and may wait for 20 s. With a fifth call the reader itself waits.
CHECKS_MAX: Final = 4

# How many refusals are logged at once, and per second in the long run. Logging a refusal
# costs more than sending it, and a flood of them must not fill the disk.
REFUSALS_LOGGED: Final = 100
REFUSALS_LOGGED_PER_S: Final = 10.0
GONE_S: Final = 0.25  # how late it is noticed that a client goes while it initializes

_T = TypeVar("_T")

_log_limit: Final = trio.lowlevel.RunVar[RateLimit]("the limit on log lines about refusals")


class Guests:
    """The guests of all sessions of one backend, and the words that every session may use."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.patience = backend if isinstance(backend, Patience) else None
        self.passes_page_tokens = backend.passes_page_tokens
        self._guests: dict[Session, Guest] = {}
        # The words of all dialects: their requests by their methods, and the names of page tokens.
        self.polls: dict[str, Polling | Listing] = dialects.questions()
        self.resumes: dict[str, Resuming] = dialects.resumings()
        self.page_token_names: tuple[bytes, ...] = dialects.page_token_names()

    def delivers(self, method: str) -> bool:
        """Whether this method answers with a delivery: messages, and the response last."""
        return method in self.resumes or (
            not self.answers(method) and self._backend.delivers(method)
        )

    def answers(self, method: str) -> bool:
        """Whether the peer itself answers this method at once."""
        return method in (_INITIALIZE, _PING) or method in self.polls

    async def open(self, session: Session, info: SessionInfo) -> Guest:
        """Begin the conversation of a client that initializes. Raises `Refusal`."""
        return self._keep(session, await self._backend.open(info, session))

    def of(self, session: Session) -> Guest:
        """The guest of a session."""
        guest = self._guests.get(session)
        if guest is None and session.is_over:  # a request of before its end waited
            raise Refusal(INVALID_REQUEST, "The session has ended: initialize again.")
        return guest or self._keep(session, self._backend.reopen(SessionInfo.of(session), session))

    def detaches(self, session: Session, reason: Any, stream: Stream) -> bool:
        """Whether a call that its client cancels for this reason goes on without it."""
        return self.patience is not None and self.patience.detaches(stream, session, reason)

    def _keep(self, session: Session, guest: Guest) -> Guest:
        if (former := self._guests.get(session)) is not None:
            former.close()  # of a client that has sent a call ahead of `initialize`
        self._guests[session] = guest
        session.on_end = partial(self._close, session)
        return guest

    def _close(self, session: Session) -> None:
        self._guests.pop(session).close()


class _Initialize(msgspec.Struct, rename="camel"):
    protocol_version: str
    capabilities: dict[str, msgspec.Raw] = {}
    client_info: msgspec.Raw = msgspec.Raw(b"{}")


class _Envelope(msgspec.Struct):
    revision: Any = msgspec.field(name=_REVISION_KEY, default=None)


class _Enveloped(msgspec.Struct):
    meta: _Envelope = msgspec.field(name="_meta", default_factory=_Envelope)


class _Cancelled(msgspec.Struct, rename="camel"):
    request_id: RequestId
    reason: Any = None


class Peer:
    """The conversation with one client, over one connection or several in succession."""

    def __init__(
        self,
        guests: Guests,
        engine: Engine,
        session: Session,
        caller: Caller | None = None,
    ) -> None:
        """`caller` is the authenticated caller of one HTTP request."""
        self.session = session
        self._caller = caller
        self._connection: Connection | None = None  # None over HTTP
        self._guests = guests
        self._guest_known: Guest | None = None
        self._engine = engine
        self._large: LargeWork  # for the messages of the connection
        self._tasks: trio.Nursery | None = None  # of the connection; None over HTTP
        self._check_slots: trio.Semaphore  # for those tasks

    def delivers(self, method: str) -> bool:
        """Whether this method answers with a delivery: messages, and the response last."""
        return method == _CALL or self._guests.delivers(method)

    def caller(self) -> CallerInfo:
        """The caller of the message that is handled now."""
        if self._connection is not None:
            return CallerInfo.of(self._connection)
        return CallerInfo.of_message(self.session, self._caller)

    async def run(self, connection: Connection) -> None:
        """Handle the messages of a connection until the client stops sending."""
        self._check_slots = trio.Semaphore(CHECKS_MAX)
        self._large = large_work()
        self._connection = connection
        async with trio.open_nursery() as self._tasks:
            await self._listen(connection)
            if not connection.channel.is_writable():
                self._tasks.cancel_scope.cancel()  # calls that have not begun lost their client

    async def _listen(self, connection: Connection) -> None:
        turns = Turns()
        while True:
            try:
                received = await connection.channel.receive()
            except (trio.EndOfChannel, trio.ClosedResourceError):
                return
            connection.heard()
            for incoming in received:
                if incoming is received[-1]:
                    connection.attend()
                await self._receive(incoming, connection)
                await connection.send_caused()
                if turns.spend(_units(incoming)):
                    await turns.wait()
            await connection.wait_for_room()

    async def _receive(self, incoming: Incoming, connection: Connection) -> None:
        reply = await self._answer(incoming, connection)
        if reply is not None:
            connection.reply(reply)

    async def _answer(self, incoming: Incoming, connection: Connection) -> bytes | None:
        if isinstance(incoming, TooLarge):
            return error_line(incoming.id, refusal("too_large", limit=incoming.limit))
        try:
            message = await self._parse(incoming)
        except Refusal as refused:
            request_id = await self._work(incoming, partial(messages.salvage_id, incoming))
            return error_line(request_id, refused)
        try:
            if message.kind is Kind.REQUEST:
                self._engine.rates.check(self.session.principal)
            return await self.handle(message, incoming, connection)
        except Refusal as refused:
            return error_line(id_of(message), refused)

    async def _parse(self, line: bytes) -> Message:
        if len(line) < LARGE_BYTES:
            self._large.note(self.session.principal, trio.current_time())
            return messages.parse_bounded(line)
        return await self._work(line, partial(messages.parse_bounded, line))

    def _work(self, line: bytes, work: Callable[[], _T]) -> Awaitable[_T]:
        """See `work_on`."""
        return work_on(line, self.session.principal, work)

    async def handle(
        self,
        message: Message,
        line: bytes,
        connection: Connection | None = None,
        *,
        event_ids: EventIds | None = None,
    ) -> bytes | None:
        """Handle a message. Returns the reply; None for a notification and for a delivery.

        `line` is the message as it was received. A request whose method `delivers` needs a
        connection. A poll over HTTP needs `event_ids`, which hold the position that its
        `Last-Event-ID` names. Raises `InsufficientScope` before anything is begun or sent.
        """
        try:
            match message.kind:
                case Kind.REQUEST:
                    return await self._request(message, line, connection, event_ids)
                case Kind.NOTIFICATION:
                    await self._notification(message, line)
                case Kind.RESULT | Kind.ERROR:
                    load = partial(self._engine.operations.load_question, message)
                    await patiently(load)  # an answer that was read must not get lost
                    answer = partial(self._engine.operations.answer, self.session, message)
                    await self._work(line, answer)
        except InsufficientScope:
            raise
        except Overtaken:
            pass
        except (Refusal, Unavailable) as error:
            return error_line(id_of(message), error)
        return None

    async def _request(
        self,
        message: Message,
        line: bytes,
        connection: Connection | None,
        event_ids: EventIds | None,
    ) -> bytes | None:
        request_id, method = message.id, str(message.method)
        assert isinstance(request_id, int | str)
        if self._connection is not None:  # over HTTP the endpoint has checked it
            check_revision(await self._work(line, partial(revision_in, message, line)))
        if request_id in self.session.checking:  # a resume cannot displace such a call
            check_free(self.session, request_id)
        if self.delivers(method):  # they check the id, since a resume may displace its holder
            _check_length(request_id, "id")
            assert connection is not None
            # The line as it was received, because the journal stores it.
            if method == _CALL:
                await self._call_tool(message, line, connection)
            elif method in self._guests.resumes:
                await self._resume(message, line, connection)
            else:
                await self._run(message, line, connection)
            return None
        check_free(self.session, request_id)
        if method in self._guests.polls:
            answer = await self._poll(message, line, event_ids)
        elif method == _INITIALIZE:
            answer = await self._initialize(message, line)
        elif method == _PING:
            answer = {}
        else:
            answer = await self._guest.request(self._received(message, line))
        return messages.result(request_id, answer)

    @property
    def _guest(self) -> Guest:
        # Not a `cached_property`, which has a lock until Python 3.12.
        if self._guest_known is None:
            self._guest_known = self._guests.of(self.session)
        return self._guest_known

    def _kept_caller(self) -> bytes:
        return self.caller().kept()

    def _received(self, message: Message, line: bytes) -> Received:
        return Received(message, line, self.session, self.caller())

    async def _notification(self, message: Message, line: bytes) -> None:
        method = str(message.method)
        guests = self._guests
        if guests.answers(method) or method == _CALL or method in guests.resumes:
            raise Refusal(INVALID_REQUEST, f"{method} is a request: send it with an id.")
        if method not in _NOTIFICATIONS:
            await self._guest.notify(self._received(message, line))
            return
        try:
            await self._work(line, partial(_NOTIFICATIONS[method], self, message))
        except Refusal as refused:  # a notification has no answer
            log_dropped(method, refused)

    # Plain MCP

    async def _initialize(self, message: Message, line: bytes) -> dict[str, Any]:
        session = self.session
        if session.revision is not None:
            raise Refusal(INVALID_REQUEST, "Already initialized: open another connection.")
        params = await self._work(line, partial(read_params, message.params, _Initialize))
        settings, capabilities = extension.declared(params.capabilities)
        is_known = params.protocol_version in REVISIONS
        info = SessionInfo(
            principal=session.principal,
            revision=params.protocol_version if is_known else REVISIONS[0],
            client_info=params.client_info,
            capabilities=extension.without_ours(params.capabilities),
            more=await self._work(line, partial(_more, message.params)),
        )
        self._guest_known = await self._opened(info)
        hello = dict(self._guest.hello)
        session.settings, session.capabilities = settings, capabilities
        session.revision = _spoken(hello.get("protocolVersion", info.revision))
        session.client = described(params.client_info, params.capabilities, session.revision)
        ours = extension.advertisement(self._engine.keyed.memory)
        merged = extension.merged(hello.get("capabilities", {}), ours)
        return (
            {"protocolVersion": session.revision}
            | hello
            | {"protocolVersion": session.revision, "capabilities": merged}
        )

    async def _opened(self, info: SessionInfo) -> Guest:
        """Begin the conversation, unless the client goes meanwhile. Raises `Refusal`.

        The start of a wrapped server takes its time. This task, which would read of the client's
        end, waits for it.
        """
        if self._tasks is None or self._connection is None:  # over HTTP its session may go on
            return await self._guests.open(self.session, info)
        watching = trio.CancelScope()
        with trio.CancelScope() as opening:
            self._tasks.start_soon(_watch, self._connection.channel, watching, opening)
            try:
                return await self._guests.open(self.session, info)
            finally:
                watching.cancel()
        raise Refusal(INTERNAL_ERROR, "The client has gone.")

    async def _run(self, message: Message, line: bytes, connection: Connection) -> None:
        """Begin a request of the guest, other than a call."""
        assert isinstance(message.id, int | str)
        check_free(self.session, message.id)
        received = self._received(message, line)
        begun = await self._guest.request(received)
        if not isinstance(begun, Run):
            connection.reply(messages.result(message.id, begun))
            return
        _check_length(begun.progress_token, "_meta.progressToken")
        await self._engine.make_room(self.session)
        check_free(self.session, message.id)  # another request may have taken it meanwhile
        self._start(begun, line, connection, origin=message)

    def _start(
        self,
        run: Run,
        line: bytes,
        connection: Connection,
        *,
        mark: Mark | None = None,
        origin: Message | None = None,
    ) -> None:
        self._engine.begin(
            connection,
            line,
            run.handler,
            min_s=run.min_s,
            max_s=run.max_s,
            overflow=run.overflow,
            is_paged=run.is_paged,
            is_restartable=run.is_restartable,
            is_rerunnable=run.is_rerunnable,
            caller=self._kept_caller,
            is_repeatable=run.is_repeatable,
            is_findable=run.is_findable,
            mark=mark,
            origin=origin,
            progress_token=run.progress_token,
        )

    async def _call_tool(self, message: Message, line: bytes, connection: Connection) -> None:
        read = partial(self._read_call, message, line, connection.channel.scopes)
        message, line, params, token = await self._work(line, read)
        key = extension.key_in(params.meta.key)
        if token is not None:
            if not self._guests.passes_page_tokens:
                await self._deliver_page(message, token, params.meta.progress_token, connection)
                return
            key = None  # it names the call whose page this is, and not this request
        if params.meta.webhook is not msgspec.UNSET:
            self._engine.check_webhook(params.meta.webhook, self.session.principal)
        patience = self._guests.patience
        if patience is not None:
            received = self._received(message, line)
            if await patience.answers(self._guest, received, params, connection):
                return
        if key is not None:
            begin = partial(self._call_with_key, message, params, line, key, connection)
        elif (
            patience is not None
            and token is None  # each page is another result of the same call
            and await patience.is_once(self._guest, received, params.name)
        ):
            begin = partial(self._call_that_runs_once, message, params, line, connection)
        else:
            begin = partial(self._begin, message, params, line, connection)
        tool = self._guest.tool(params.name)
        if tool is not None and tool.is_costly(params.arguments):
            await self._begin_in_task(message, connection, begin)
        else:
            await begin()

    def _read_call(
        self, message: Message, line: bytes, scopes: Scopes
    ) -> tuple[Message, bytes, CallTool, str | None]:
        """A call, its line, its params, and its page token.

        A page token among the arguments is removed from the message, the line and the params.
        """
        params = read_params(message.params, CallTool)
        _check_length(params.meta.progress_token, "_meta.progressToken")
        tool = self._guest.tool(params.name)
        if tool is not None:
            tool.check_scopes(scopes)
        if not dialects.may_have_page_token(line, self._guests.page_token_names):
            return message, line, params, None
        token = dialects.page_token(message.params)
        if tool is not None:
            token_in_arguments, arguments = dialects.split_arguments(params.arguments, tool.takes)
            token = token_in_arguments if token is None else token
            if arguments is not params.arguments:
                params = msgspec.structs.replace(params, arguments=arguments)
                message, line = _with_arguments(message, arguments)
        return message, line, params, token

    async def _begin_in_task(
        self, message: Message, connection: Connection, begin: Callable[[], Awaitable[None]]
    ) -> None:
        """Begin a call whose arguments take long to check, in a task beside the reader.

        Its request id is reserved meanwhile. A cancel ends it without a reply, like a running call.
        """
        assert isinstance(message.id, int | str)
        request_id, checking = message.id, self.session.checking
        scope = trio.CancelScope()

        async def run() -> None:
            try:
                with scope:
                    await begin()
            except Overtaken:
                pass
            except (Refusal, Unavailable) as error:
                connection.reply(error_line(request_id, error))
            finally:
                if checking.get(request_id) is scope:
                    del checking[request_id]

        async def run_in_slot() -> None:
            try:
                await run()
            finally:
                self._check_slots.release()

        if self._tasks is None:  # over HTTP no other message waits for this one
            checking[request_id] = scope
            await run()
        else:
            await self._check_slots.acquire()
            checking[request_id] = scope
            self._tasks.start_soon(run_in_slot)

    async def _call_with_key(
        self, message: Message, params: CallTool, line: bytes, key: str, connection: Connection
    ) -> None:
        """Begin a call, or deliver the call that was begun before with the same key."""
        assert isinstance(message.id, int | str)
        async with self._engine.keyed.looked_up(key, self.session.principal) as called:
            if called.stream is None:
                mark = partial(extension.marked, message, called.mark)
                marked = await self._work(line, mark)
                await self._begin(message, params, marked, connection, called.mark)
                return
            operations, stream = self._engine.operations, called.stream
            self.session.checking.pop(message.id, None)
            operations.retry(connection, stream, message.params, reply_id=message.id)
            stream.progress_token = params.meta.progress_token

    async def _call_that_runs_once(
        self, message: Message, params: CallTool, line: bytes, connection: Connection
    ) -> None:
        """Begin a call, or join the same call of this principal that was begun before."""
        assert isinstance(message.id, int | str)
        principal, patience = self.session.principal, self._guests.patience
        assert patience is not None
        digest = await self._work(line, partial(call_digest, message.params, ""))
        async with self._engine.keyed.looked_up(digest.hex(), principal, is_once=True) as called:
            if called.stream is not None:
                self.session.checking.pop(message.id, None)
                joined = called.stream, connection, message.id, params.meta.progress_token
                if (run := patience.following(*joined)) is not None:
                    check_free(self.session, message.id)
                    await self._start_run(run, message, line, connection)
                    return
                if await patience.joins(*joined):
                    return
            marked = await self._work(line, partial(extension.marked, message, called.mark))
            await self._begin(message, params, marked, connection, called.mark)

    async def _begin(
        self,
        message: Message,
        params: CallTool,
        line: bytes,
        connection: Connection,
        mark: Mark | None = None,
    ) -> None:
        """Begin a call. The journal stores `line` as its request, which includes `mark`."""
        assert isinstance(message.id, int | str)
        checking = self.session.checking
        if message.id not in checking:  # else `_begin_in_task` has reserved it for this call
            check_free(self.session, message.id)
        received = self._received(message, line)
        begun = await self._guest.call(received, params)
        if not isinstance(begun, Run):
            connection.reply(messages.result(message.id, begun))
            return
        await self._start_run(begun, message, line, connection, mark)

    async def _start_run(
        self,
        run: Run,
        message: Message,
        line: bytes,
        connection: Connection,
        mark: Mark | None = None,
    ) -> None:
        assert isinstance(message.id, int | str)
        await self._engine.make_room(self.session)
        self.session.checking.pop(message.id, None)
        check_free(self.session, message.id)  # another request may have taken it meanwhile
        if mark is not None:
            self._engine.keyed.check_turn(mark)
        # With a mark, `line` differs from `message`.
        origin = message if mark is None else None
        self._start(run, line, connection, mark=mark, origin=origin)

    async def _deliver_page(
        self, message: Message, token: str, progress: ProgressToken | None, connection: Connection
    ) -> None:
        assert isinstance(message.id, int | str)
        operations = self._engine.operations
        loaded = await operations.load_page(token)
        stream = operations.deliver_page(
            connection, loaded, token, message.params, reply_id=message.id
        )
        stream.progress_token = progress

    def _cancelled(self, message: Message) -> None:
        cancelled = read_params(message.params, _Cancelled)
        detaches = partial(self._guests.detaches, self.session, cancelled.reason)
        self._engine.cancel(self.session, cancelled.request_id, cancelled.reason, detaches=detaches)

    # Resume, poll and ack

    async def _resume(self, message: Message, line: bytes, connection: Connection) -> None:
        method, request_id = str(message.method), message.id
        assert isinstance(request_id, int | str)
        word = self._guests.resumes[method]
        intent = await self._work(line, partial(word.read, message.params))
        try:
            stream = await self._engine.operations.find(self.session, intent)
            if intent.token is None:
                # The same principal may have bearer tokens with fewer scopes than the call needed.
                # A resume token needs no scopes: having it is enough.
                self._guest.check_resume(stream.record.origin, connection.channel.scopes)
            self._engine.operations.resume(
                connection,
                stream,
                intent,
                reply_id=request_id,
                speaks=self.session.settings.dialects or dialects.speakers_of(method),
                takes_over=word.takes_over,
            )
        except Refusal as refused:
            self._engine.tell_refused(refused, connection.transport)
            # Its cursor counts as an ack, and the client may resume at another replica next.
            await self._engine.handed_on(is_told_once=False)
            raise

    async def _poll(self, message: Message, line: bytes, event_ids: EventIds | None) -> Any:
        word = self._guests.polls[str(message.method)]
        operations = self._engine.operations
        if isinstance(word, Polling):
            intent = await self._work(line, partial(word.read, message.params))
            return word.tell(await operations.poll(self.session, intent, event_ids))
        asked = await self._work(line, partial(word.read, message.params))
        return word.tell(*await operations.poll_all(self.session, asked))

    def _ack(self, message: Message) -> None:
        acked = extension.ack(message.params)
        self._engine.operations.ack(self.session, acked.stream, acked.seq)


def _more(params: msgspec.Raw) -> dict[str, msgspec.Raw]:
    """The params of `initialize` that this server itself does not read."""
    given = messages.decode(params, dict[str, msgspec.Raw])
    known = {each.encode_name for each in msgspec.structs.fields(_Initialize)}
    return {name: raw for name, raw in given.items() if name not in known}


async def _watch(channel: Channel, watching: trio.CancelScope, opening: trio.CancelScope) -> None:
    """Cancel `opening` when the client can read no answer, unless `watching` is cancelled first."""
    with watching:
        while channel.is_writable():
            await trio.sleep(GONE_S)
        opening.cancel()


_CALL: Final = "tools/call"
_INITIALIZE: Final = "initialize"
_PING: Final = "ping"
CANCELLED: Final = "notifications/cancelled"
_NOTIFICATIONS: Final[dict[str, Callable[[Peer, Message], None]]] = {
    CANCELLED: Peer._cancelled,
    extension.ACK: Peer._ack,
}


def _spoken(theirs: Any) -> str:
    """The revision that a client is told: the backend's, or the newest before it that we speak."""
    named = messages.decode(theirs, str) if isinstance(theirs, msgspec.Raw) else str(theirs)
    return next((each for each in REVISIONS if each <= named), REVISIONS[-1])


def _units(incoming: Incoming) -> int:
    """The work of a message in units of `Turns`."""
    if isinstance(incoming, TooLarge):
        return 1  # the transport has counted its bytes
    return units_of(incoming)


def _check_length(name: RequestId | ProgressToken | None, what: str) -> None:
    """Refuse a longer name than clients need, since it would be stored and repeated."""
    if isinstance(name, str) and len(name) > NAME_LETTERS_MAX:
        raise Refusal(
            INVALID_REQUEST,
            f"{what} has {len(name)} characters: send at most {NAME_LETTERS_MAX}.",
        )


def journal_unavailable(error: Unavailable) -> Refusal:
    """The refusal of a request while the journal cannot be read."""
    if isinstance(error, StoreAway):  # its text may have an address, which no client needs
        return refusal("unavailable", retryAfter=STORE_RETRY_S)
    message = f"The journal cannot be read now ({error}): try again later."
    return refusal("unavailable").saying(message)


def revision_in(message: Message, line: bytes) -> Any:
    """The revision in the `_meta` of a message; None without one, and for `initialize`.

    `line` is the message as it was received. To search it is faster than to decode the params.
    """
    if message.method == "initialize" or b"protocolVersion" not in line:
        return None
    try:
        return messages.decode(message.params, _Enveloped).meta.revision
    except ValueError:
        return None  # the method itself refuses params of another shape


def check_revision(named: Any) -> None:
    """Raise `Refusal` for a revision that this server does not speak.

    Clients that try 2026-07-28 first recognize an older server by this error, and initialize. For
    that the error must not have the code -32022 (the Rust SDK stops), must not contain the words
    Mcp-Session-Id (C#), and must have the request's id (Rust).
    """
    if named is None or named in REVISIONS:
        return
    requested = str(named)[:100]
    raise refusal("unsupported_revision", supported=REVISIONS, requested=requested).saying(
        f"Unsupported protocol version {requested!r}: initialize with {', '.join(REVISIONS)}."
    )


def id_of(message: Message) -> RequestId | None:
    """The id for the reply to a message; None without an id."""
    return message.id if isinstance(message.id, int | str) else None


def error_line(request_id: RequestId | None, error: Refusal | Unavailable) -> bytes:
    """The error response to a request. It is logged, within a limit."""
    refused = journal_unavailable(error) if isinstance(error, Unavailable) else error
    try:
        budget = _log_limit.get()
    except LookupError:
        budget = RateLimit(REFUSALS_LOGGED, REFUSALS_LOGGED_PER_S)
        _log_limit.set(budget)
    if budget.spend():
        log.info("refused", code=refused.code, why=refused.message[:200])
    return messages.error(request_id, refused)


def _with_arguments(message: Message, arguments: msgspec.Raw) -> tuple[Message, bytes]:
    """The same call with other arguments, and its line."""
    assert isinstance(message.id, int | str)
    params = messages.decode(message.params, dict[str, msgspec.Raw]) | {"arguments": arguments}
    changed = msgspec.structs.replace(message, params=msgspec.Raw(messages.encode(params)))
    line = messages.request(message.id, str(message.method), changed.params)
    return changed, line.rstrip(b"\n")
