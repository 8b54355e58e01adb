"""The endpoint of MCP's Streamable HTTP: revision 2025-11-25 and the two before it.

A POST has one message. The HTTP response to a request is a `Connection` of its own, which ends with
the JSON-RPC response. After a cut, a GET with the id of the last event resumes that response.
"""

import math
from collections.abc import Awaitable, Callable, Set
from contextlib import suppress
from functools import lru_cache, partial
from typing import Final, TypeVar

import trio

from streams import messages
from streams.auth.bearer import challenge
from streams.engine.connection import Connection
from streams.engine.framing import Framing, Lone, Numbered, Plain
from streams.engine.notices import STANDING, Notices
from streams.engine.retry import patiently
from streams.engine.sessions import HttpSession, SessionEventIds, new_session
from streams.errors import (
    InsufficientScope,
    JournalUnusable,
    Overtaken,
    Refusal,
    StoreAway,
    Unavailable,
    first_of,
    refusal,
)
from streams.exchange import Head, Headers, HttpError, Request, Responder
from streams.messages import Kind, Message, RequestId
from streams.protocol.revisions import REVISIONS
from streams.server.http.events import (
    EVENTS,
    JSON,
    KEEP_ALIVE,
    LINES,
    Events,
    content,
    end_event,
    notice_event,
)
from streams.server.http.response import KEEP_ALIVE_S, ResponseChannel
from streams.server.peer import (
    CANCELLED,
    Peer,
    check_revision,
    error_line,
    id_of,
    journal_unavailable,
    revision_in,
)
from streams.server.running import RunningServer
from streams.turns import LARGE_BYTES, large_work

SESSION: Final = "mcp-session-id"
REVISION: Final = "mcp-protocol-version"
LAST_EVENT: Final = "last-event-id"
PRIMING_SINCE: Final = "2025-11-25"

# The body of a GET or a DELETE is ignored. Some clients send a short one.
IGNORED_BYTES_MAX: Final = 1024

# How long a GET waits while the store is away. The official SDKs try to resume a few times within
# 2 s, and give the call up then. Balancers wait for longer than this for any response.
HELD_S: Final = KEEP_ALIVE_S

_T = TypeVar("_T")
_Method = Callable[[Request, Responder, float], Awaitable[None]]  # with when it was asked

_ALLOW: Final = (("allow", "POST, GET, DELETE"),)


class HttpEndpoint:
    """Serves one server at one path: an `Endpoint` for a listener."""

    def __init__(
        self,
        running: RunningServer,
        path: str = "/mcp",
        *,
        metadata_url: Callable[[Head], str | None] = lambda head: None,
    ) -> None:
        """`metadata_url` tells where a client reads how to get a bearer token with more scopes."""
        self._running = running
        self._metadata_url = metadata_url
        self._engine = running.engine
        self._large = large_work()
        self._path = path
        self._methods = {"POST": self._post, "GET": self._get, "DELETE": self._delete}

    async def __call__(self, request: Request, responder: Responder) -> None:
        """Serve one request. Raises `trio.BrokenResourceError` when the peer is gone."""
        try:
            await self._answer(request, responder, trio.current_time())
        except* JournalUnusable as errors:
            self._engine.fail(first_of(errors))

    def screen(self, request: Request) -> int | None:
        """The `Screen` of this endpoint: refuses what can be refused without the body."""
        self._route(request)
        if request.method == "POST":
            _accepted(request)
        elif request.method == "GET":
            _check_events(request)
        # Another replica may have begun the session: then it is looked up with the body.
        is_here = SESSION not in request.headers or not self._engine.sessions.is_shared
        if is_here and (request.method != "POST" or _may_have_session(request)):
            self._session(request)
        return None if request.method == "POST" else IGNORED_BYTES_MAX

    async def _answer(self, request: Request, responder: Responder, asked_at: float) -> None:
        try:
            method = self._route(request)
            _check_ignored(request)
            if self._engine.sessions.is_shared:
                await self._fetch_session(request, responder, asked_at)
            await method(request, responder, asked_at)
        except HttpError as error:
            request_id = await self._work(request, partial(messages.salvage_id, request.body))
            body = error_line(request_id, error.refusal)
            await responder.respond(error.status, (*content(JSON), *error.headers), body)

    async def _fetch_session(self, request: Request, responder: Responder, asked_at: float) -> None:
        if (session_id := request.headers.get(SESSION)) is None:
            return
        try:
            await self._engine.sessions.fetch(session_id)
        except Unavailable as error:
            if request.method != "GET" or not isinstance(error, StoreAway):
                raise _not_now(error) from None
            fetch = partial(self._engine.sessions.fetch, session_id)
            await self._hold(responder, asked_at, fetch, error)

    async def _hold(
        self,
        responder: Responder,
        asked_at: float,
        ask: Callable[[], Awaitable[None]],
        trouble: StoreAway,
    ) -> None:
        """Hold the response to a GET until the store answers `ask`.

        Raises `HttpError` after `HELD_S`, or where the client has gone, or this replica ends.
        """
        is_answered = False

        async def give_up_after(event: Callable[[], Awaitable[None]]) -> None:
            await event()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.deadline = asked_at + HELD_S
            nursery.start_soon(give_up_after, responder.gone)
            nursery.start_soon(give_up_after, self._engine.departure.begun)
            await patiently(ask)
            is_answered = True
            nursery.cancel_scope.cancel()
        if not is_answered:
            raise _not_now(trouble)
        try:
            await ask()  # again, since other tasks have run since the answer
        except Unavailable as error:
            raise _not_now(error) from None

    def _route(self, request: Request) -> _Method:
        if request.path != self._path:
            raise HttpError(404, f"Unknown path: use {self._path}.")
        method = self._methods.get(request.method)
        if method is None:
            raise HttpError(405, "Use POST, GET or DELETE.", _ALLOW)
        return method

    # POST

    async def _post(self, request: Request, responder: Responder, asked_at: float) -> None:
        accepted = _accepted(request)
        message = await self._parse(request)
        is_request = message.kind is Kind.REQUEST
        if is_request and message.method == "initialize" and SESSION not in request.headers:
            await self._initialize(message, request, responder, accepted)
            return
        revision = await self._work(request, partial(revision_in, message, request.body))
        self._check_revision(revision)
        session = self._session(request)
        if len(request.body) < LARGE_BYTES:
            self._large.note(session.principal, asked_at)
        if is_request:
            self._check_rate(session.principal)
        peer = self._running.peer(session, request.caller)
        if is_request and peer.delivers(str(message.method)):
            await self._deliver(message, request, responder, peer, session, accepted, asked_at)
            return
        event_ids = self._event_ids(session, request)
        try:
            if not is_request:
                await self._engine.operations.load_question(message)
            line = await peer.handle(message, request.body, event_ids=event_ids)
            if line is None:
                is_told_once = message.kind is not Kind.NOTIFICATION or message.method == CANCELLED
                await self._engine.handed_on(is_told_once=is_told_once)
        except Unavailable as error:
            raise _not_now(error) from None
        if is_request:
            assert line is not None
            await self._engine.sessions.save_settings(session)
            await responder.respond(200, _single_content(accepted), line)
        elif line is None:
            await responder.respond(202)
        else:  # a request without an id
            await responder.respond(400, content(JSON), line)

    async def _parse(self, request: Request) -> Message:
        if len(request.body) < LARGE_BYTES:
            return _parse(request.body)
        if _may_have_session(request):
            self._session(request)  # a large body is parsed only for a valid session
        return await self._work(request, partial(_parse, request.body))

    async def _work(self, request: Request, work: Callable[[], _T]) -> _T:
        """Do one piece of work on the body. Work on a large body waits for its turn."""
        if len(request.body) < LARGE_BYTES:
            return work()
        principal = _principal(request) or ""
        if _may_have_session(request):
            with suppress(HttpError):
                principal = self._session(request).principal
        return await self._large.do(principal, work)

    async def _initialize(
        self, message: Message, request: Request, responder: Responder, accepted: str
    ) -> None:
        session_id, session = new_session(_principal(request))
        self._check_rate(session.principal)
        line = await self._running.peer(session).handle(message, request.body)
        assert line is not None
        headers = _single_content(accepted)
        if session.revision is not None:
            try:
                await self._engine.sessions.add(session)
            except (Refusal, Unavailable) as error:
                session.end()
                raise _not_now(error) from None
            headers = (*headers, (SESSION, session_id))
        await responder.respond(200, headers, line)

    async def _deliver(
        self,
        message: Message,
        request: Request,
        responder: Responder,
        peer: Peer,
        session: HttpSession,
        accepted: str,
        asked_at: float,
    ) -> None:
        framing = self._framing(session, accepted)
        channel = _channel(request, responder, session, accepted, framing, id_of(message))

        async def begin(connection: Connection) -> None:
            try:
                reply = await peer.handle(message, request.body, connection)
            except InsufficientScope as refused:
                line = error_line(id_of(message), refused)
                await channel.refuse(403, (self._scope_challenge(request, refused),), line)
                connection.hang_up()
                return
            if reply is not None:
                connection.reply(reply)

        event_ids = self._event_ids(session, request)
        await self._engine.respond(
            channel, session, framing, begin, event_ids=event_ids, asked_at=asked_at
        )

    def _event_ids(self, session: HttpSession, request: Request) -> SessionEventIds:
        return self._engine.sessions.event_ids(session, request.headers.get(LAST_EVENT))

    def _scope_challenge(self, request: Request, refused: InsufficientScope) -> tuple[str, str]:
        """The header that tells which scopes are missing.

        MCP, Authorization, "Runtime Insufficient Scope Errors": the client gets a bearer token with
        these scopes as well, and sends its request again.
        """
        return challenge(
            "insufficient_scope",
            refused.message,
            scopes=refused.needed,
            metadata_url=self._metadata_url(request),
        )

    def _framing(self, session: HttpSession, accepted: str, *, may_be_json: bool = True) -> Framing:
        if accepted == EVENTS:
            is_priming = (session.revision or "") >= PRIMING_SINCE
            return Events(is_priming=is_priming, may_be_json=may_be_json)
        if accepted == JSON:
            return Lone()
        return Numbered(b"\n") if session.settings.positions else Plain(b"\n")

    # GET

    async def _get(self, request: Request, responder: Responder, asked_at: float) -> None:
        _check_events(request)
        session = self._session(request)
        self._check_rate(session.principal)
        last_event = request.headers.get(LAST_EVENT)
        if last_event is None or last_event.startswith(STANDING):
            await self._open_standing(session, request, responder)
            return
        operations = self._engine.operations
        try:
            await operations.load(session, last_event)
        except StoreAway as error:
            load = partial(operations.load, session, last_event)
            await self._hold(responder, asked_at, load, error)
            session = self._session(request)  # it may be over
        except Unavailable as error:
            raise _not_now(error) from None
        try:
            event_id = self._engine.sessions.parse(session, last_event)
            has_more = operations.has_more(session, event_id)
        except Refusal as refused:
            self._engine.tell_refused(refused, ResponseChannel.transport)
            raise HttpError(400, refused) from None
        if not has_more:
            raise HttpError(405, "This response is complete: there is nothing to resume.", _ALLOW)
        framing = self._framing(session, EVENTS, may_be_json=False)
        channel = _channel(request, responder, session, EVENTS, framing, is_resumed=True)

        async def begin(connection: Connection) -> None:
            try:
                operations.resume_response(connection, event_id)
            except Overtaken:
                pass  # the response has no events: the newer one has them
            except Refusal as refused:
                self._engine.tell_refused(refused, channel.transport)
                line = error_line(operations.request_id(event_id), refused)
                await channel.send(end_event(last_event, line))

        event_ids = self._event_ids(session, request)
        await self._engine.respond(
            channel, session, framing, begin, event_ids=event_ids, asked_at=asked_at
        )

    async def _open_standing(
        self, session: HttpSession, request: Request, responder: Responder
    ) -> None:
        """Open the event stream for messages that belong to no request.

        It stays open all the time. A client that was cut off gets the messages it has missed.
        """
        position = session.notices.position(request.headers.get(LAST_EVENT))
        channel = ResponseChannel(responder, session.principal, EVENTS, caller=request.caller)
        scope = self._engine.sessions.listen(session)
        session.notices.has_stream = True
        try:
            with scope:
                await channel.send(KEEP_ALIVE[EVENTS])
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_send_notices, channel, session.notices, position)
                    with suppress(trio.EndOfChannel):
                        await channel.receive()
                    nursery.cancel_scope.cancel()
        finally:
            if session.standing is scope:
                session.standing = None
                session.notices.leave()
        await channel.aclose()

    # DELETE

    async def _delete(self, request: Request, responder: Responder, asked_at: float) -> None:
        session = self._session(request)
        try:
            await self._engine.sessions.close(session)
        except (Refusal, Unavailable) as error:
            raise _not_now(error) from None
        await responder.respond(200)

    # Common to several methods

    def _check_rate(self, principal: str) -> None:
        try:
            self._engine.rates.check(principal)
        except Refusal as refused:
            wait = ("retry-after", f"{(refused.data or {})['retryAfter']}")
            raise HttpError(429, refused, (wait,)) from None

    def _check_revision(self, named: str | None) -> None:
        try:
            check_revision(named)
        except Refusal as refused:
            raise HttpError(400, refused) from None

    def _session(self, request: Request) -> HttpSession:
        # First, since a client of an unknown revision has no session.
        self._check_revision(request.headers.get(REVISION))
        session_id = request.headers.get(SESSION)
        if session_id is None:
            raise HttpError(400, "Send Mcp-Session-Id, as the response to initialize has it.")
        session = self._engine.sessions.find(session_id, _principal(request))
        if session is None:
            raise HttpError(404, "Unknown session: initialize again.")
        return session


def _not_now(error: Refusal | Unavailable) -> HttpError:
    refused = journal_unavailable(error) if isinstance(error, Unavailable) else error
    wait_s = (refused.data or {}).get("retryAfter")
    headers = () if wait_s is None else (("retry-after", f"{math.ceil(wait_s)}"),)
    return HttpError(503, refused, headers)


async def _send_notices(channel: ResponseChannel, notices: Notices, position: int) -> None:
    """Send notices as events, for ever, and keep-alives between them."""
    while True:
        found: list[tuple[int, bytes]] = []
        with trio.move_on_after(KEEP_ALIVE_S):
            found = await notices.after(position)
        if not found:
            await channel.ping()
            continue
        await channel.send(*(notice_event(notices.event_id(each), line) for each, line in found))
        position = found[-1][0]
        notices.sent(position)


def _channel(
    request: Request,
    responder: Responder,
    session: HttpSession,
    media_type: str,
    framing: Framing,
    request_id: RequestId | None = None,
    *,
    is_resumed: bool = False,
) -> ResponseChannel:
    """The response to a request as a channel."""
    return ResponseChannel(
        responder,
        session.principal,
        media_type,
        framing,
        caller=request.caller,
        request_id=request_id,
        headers=request.headers,
        is_resumed=is_resumed,
    )


def _principal(request: Request) -> str | None:
    return None if request.caller is None else request.caller.principal


def _may_have_session(request: Request) -> bool:
    """Whether the session of a POST may be looked up before its body is read.

    False with an unknown revision: that error needs the id of the request, which is in the body.
    """
    revision = request.headers.get(REVISION)
    return SESSION in request.headers and (revision is None or revision in REVISIONS)


def _check_ignored(request: Request) -> None:
    """Refuse a long body that nothing reads. `screen` does not see one that came with its head."""
    if request.method != "POST" and len(request.body.rstrip(b"\r\n")) > IGNORED_BYTES_MAX:
        raise HttpError(413, refusal("too_large", limit=IGNORED_BYTES_MAX))


def _check_events(request: Request) -> None:
    if EVENTS not in _named(request.headers.get("accept", "*/*")):
        raise HttpError(406, f"Accept {EVENTS}: a GET has no other response.")


def _parse(body: bytes) -> Message:
    try:
        return messages.parse_bounded(body)
    except Refusal as refused:
        raise HttpError(400, refused) from None


def _media_type(value: str) -> str:
    return value.partition(";")[0].strip().lower()


def _named(accept: str) -> Set[str]:
    """The media types of an `Accept`. With */* those of MCP."""
    named = {_media_type(each) for each in accept.split(",")}
    if "*/*" in named:
        named |= {JSON, EVENTS}
    return named & {JSON, EVENTS, LINES}


def _accepted(request: Request) -> str:
    """The best media type for a delivery among those that the client of a POST accepts."""
    headers = request.headers
    return _best(headers.get("content-type", ""), headers.get("accept", "*/*"))


@lru_cache(maxsize=64)  # a client sends the same headers with each request
def _best(sent: str, accept: str) -> str:
    if _media_type(sent) != JSON:
        raise HttpError(415, f"Send the message as {JSON}.")
    for media_type in (LINES, EVENTS, JSON):
        if media_type in _named(accept):
            return media_type
    raise HttpError(406, f"Accept {JSON} and {EVENTS}.")


def _single_content(accepted: str) -> Headers:
    """The headers of a single message."""
    return content(LINES if accepted == LINES else JSON)
