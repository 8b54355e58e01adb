"""What an MCP peer sees of a server: one connection's conversation.

Nothing here waits for a handler: every message is dealt with at once, and what takes time goes on
in the engine.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog
import trio

from streams import dialects, messages
from streams.call import LEVELS, Audience
from streams.connection import Connection
from streams.dialects import Poll, PollAll, Resume
from streams.engine import Engine, Handler
from streams.errors import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    Refusal,
    refusal,
)
from streams.lifecycle import ProgressToken
from streams.messages import Incoming, Kind, Message, RequestId, TooLarge
from streams.tools import Tool, error_result

if TYPE_CHECKING:
    from streams.server import Server

log = structlog.get_logger()

# Newest first: it is offered to a client that asks for one that we do not know.
REVISIONS: Final = ("2025-11-25", "2025-06-18", "2025-03-26")

MakeHandler = Callable[[Tool, Mapping[str, Any], Audience, ProgressToken | None], Handler]


class _Initialize(msgspec.Struct, rename="camel"):
    protocol_version: str
    capabilities: dict[str, Any] = {}


class _List(msgspec.Struct):
    cursor: str | None = None


class _SetLevel(msgspec.Struct):
    level: str


class _Cancelled(msgspec.Struct, rename="camel"):
    request_id: RequestId


class _Meta(msgspec.Struct, rename="camel"):
    progress_token: ProgressToken | None = None


class _CallTool(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")
    meta: _Meta = msgspec.field(default_factory=_Meta, name="_meta")


class Peer:
    """The conversation with one client."""

    def __init__(
        self, server: "Server", engine: Engine, connection: Connection, handler: MakeHandler
    ) -> None:
        self._server = server
        self._engine = engine
        self._connection = connection
        self._handler = handler
        self._audience = Audience()
        self._is_initialized = False
        self._requests: dict[str, Callable[[Message], Any]] = {
            "initialize": self._initialize,
            "ping": lambda _: {},
            "tools/list": self._list_tools,
            "logging/setLevel": self._set_level,
        }
        # These answer when they are done, and need the message as it came.
        self._deliveries: dict[str, Callable[[Message, bytes], None]] = {
            "tools/call": self._call_tool,
            **dict.fromkeys(dialects.INTENTS, self._serve_intent),
        }
        self._notifications: dict[str, Callable[[Message], None]] = {
            "notifications/cancelled": self._cancelled,
            dialects.ACK: self._ack,
        }

    async def run(self) -> None:
        """Listen until the client will send no more."""
        connection = self._connection
        while True:
            try:
                received = await connection.channel.receive()
            except (trio.EndOfChannel, trio.ClosedResourceError):
                return
            connection.heard()
            for incoming in received:
                self._take(incoming)
            await connection.has_room()

    def _take(self, incoming: Incoming) -> None:
        if isinstance(incoming, TooLarge):
            self._refuse(None, refusal("too_large", limit=incoming.limit))
            return
        try:
            message = messages.parse(incoming)
        except Refusal as refused:
            self._refuse(messages.salvage_id(incoming), refused)
            return
        match message.kind:
            case Kind.REQUEST:
                self._request(message, incoming)
            case Kind.NOTIFICATION:
                self._notification(message)
            case Kind.RESULT | Kind.ERROR:
                self._engine.access.answer(self._connection, message)

    def _request(self, message: Message, line: bytes) -> None:
        request_id = message.id
        assert isinstance(request_id, int | str)
        try:
            self._serve(request_id, str(message.method), message, line)
        except Refusal as refused:
            self._refuse(request_id, refused)

    def _serve(self, request_id: RequestId, method: str, message: Message, line: bytes) -> None:
        if request_id in self._connection.taken:
            raise Refusal(INVALID_REQUEST, "This id is in use on this connection: use a new one.")
        if method in self._deliveries:
            self._deliveries[method](message, line)
        elif method in self._requests:
            self._reply(request_id, self._requests[method](message))
        else:
            known = ", ".join(sorted([*self._requests, *self._deliveries]))
            raise Refusal(METHOD_NOT_FOUND, f"No method {method[:100]!r} here: there are {known}.")

    def _notification(self, message: Message) -> None:
        method = str(message.method)
        if method in self._deliveries or method in self._requests:
            misplaced = Refusal(INVALID_REQUEST, f"{method} is a request: send it with an id.")
            self._refuse(None, misplaced)
        elif method in self._notifications:
            try:
                self._notifications[method](message)
            except Refusal as refused:  # nobody waits for an answer to a notification
                log.info("a notification was dropped", method=method, why=refused.message[:200])

    def _reply(self, request_id: RequestId, value: Any) -> None:
        self._connection.reply(messages.result(request_id, value))

    def _refuse(self, request_id: RequestId | None, refused: Refusal) -> None:
        log.info("refused", code=refused.code, why=refused.message[:200])
        self._connection.reply(messages.error(request_id, refused))

    # Plain MCP

    def _initialize(self, message: Message) -> dict[str, Any]:
        if self._is_initialized:
            raise Refusal(INVALID_REQUEST, "Initialized already: open another connection.")
        params = _params(message, _Initialize)
        self._connection.settings = dialects.settings_of(params.capabilities)
        self._audience.capabilities = params.capabilities
        self._is_initialized = True
        ours = dialects.advertisement()
        server = self._server
        answer = {
            "protocolVersion": params.protocol_version
            if params.protocol_version in REVISIONS
            else REVISIONS[0],
            "capabilities": {
                "tools": {"listChanged": False},
                "logging": {},
                "extensions": ours,
                "experimental": ours,
            },
            "serverInfo": {"name": server.name, "version": server.version},
        }
        if server.instructions is not None:
            answer["instructions"] = server.instructions
        return answer

    def _list_tools(self, message: Message) -> dict[str, Any]:
        try:
            tools, cursor = self._server.tools.page(
                _params(message, _List).cursor, self._server.page_size
            )
        except ValueError as error:
            raise Refusal(INVALID_PARAMS, f"{error}.") from None
        return {"tools": tools} if cursor is None else {"tools": tools, "nextCursor": cursor}

    def _set_level(self, message: Message) -> dict[str, Any]:
        level = _params(message, _SetLevel).level
        if level not in LEVELS:
            raise Refusal(
                INVALID_PARAMS, f"No level {level[:40]!r}: there are {', '.join(LEVELS)}."
            )
        self._audience.level = level
        return {}

    def _call_tool(self, message: Message, line: bytes) -> None:
        params = _params(message, _CallTool)
        assert isinstance(message.id, int | str)
        tool = self._server.tools.get(params.name)
        if tool is None:
            raise Refusal(INVALID_PARAMS, f"No tool {params.name[:100]!r} here: see tools/list.")
        try:
            arguments = tool.bind(_object(params.arguments))
        except ValueError as error:
            # SEP-1303: a model can mend its arguments where it sees what is wrong with them.
            self._reply(message.id, error_result(f"Bad arguments for {tool.name}: {error}"))
            return
        server = self._server
        min_s = server.resume_min_s if tool.resume_min_s is None else tool.resume_min_s
        max_s = server.resume_max_s if tool.resume_max_s is None else tool.resume_max_s
        self._engine.begin(
            self._connection,
            line,
            self._handler(tool, arguments, self._audience, params.meta.progress_token),
            min_s=min_s,
            max_s=max_s,
            overflow=tool.overflow,
        )

    def _cancelled(self, message: Message) -> None:
        self._engine.access.cancel(self._connection, _params(message, _Cancelled).request_id)

    # The proposals

    def _serve_intent(self, message: Message, _: bytes) -> None:
        method, request_id = str(message.method), message.id
        assert isinstance(request_id, int | str)
        intent = dialects.INTENTS[method](message.params)
        match intent:
            case Resume():
                speaks = self._connection.settings.dialects or dialects.speakers_of(method)
                self._engine.access.resume(
                    self._connection, intent, reply_id=request_id, speaks=speaks
                )
            case Poll():
                self._reply(request_id, self._engine.access.poll(self._connection, intent))
            case PollAll():
                standings, cursor = self._engine.access.poll_all(self._connection, intent)
                page: dict[str, Any] = {"statuses": standings}
                self._reply(request_id, page if cursor is None else page | {"nextCursor": cursor})

    def _ack(self, message: Message) -> None:
        acked = dialects.ack(message.params)
        self._engine.access.ack(self._connection, acked.stream, acked.seq)


def _object(arguments: msgspec.Raw) -> bytes:
    given = bytes(arguments).strip()
    if given == b"null":
        return b"{}"
    if not given.startswith(b"{"):
        raise Refusal(INVALID_PARAMS, "Bad params: arguments must be an object.")
    return given


def _params(message: Message, shape: type[Any]) -> Any:
    try:
        return messages.decode(message.params, shape)
    except ValueError as error:
        raise Refusal(INVALID_PARAMS, f"Bad params for {message.method}: {error}.") from None
