"""Backends: what answers MCP behind a peer, such as our `Server`, or a child process.

A peer keeps what belongs to the connection and to streams: `initialize`, `ping`, the methods of the
proposals, cancels and acks. Every other message goes to the session's guest, and what a guest sends
for a request goes into the stream of that request.
"""

from collections.abc import Callable, Container, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec

from streams.engine.connection import Session
from streams.engine.engine import StreamHandler
from streams.engine.lifecycle import ProgressToken
from streams.engine.stream import Stream
from streams.exchange import Scopes
from streams.limits import Overflow
from streams.messages import Message, RequestId
from streams.server.caller import CallerInfo
from streams.server.handlers import CallTool


class SessionInfo(msgspec.Struct, frozen=True):
    """The client of a session, as it has declared itself in `initialize`."""

    principal: str
    revision: str  # of MCP, as the client asked for it
    client_info: msgspec.Raw
    capabilities: Mapping[str, msgspec.Raw]  # without those of the proposals and our extension
    is_resumed: bool = False  # the client has initialized before a restart, and will not do it again


class Standing(Protocol):
    """The place of messages to one client that belong to no request. A `Session` is one."""

    def notify(self, line: bytes, *, key: str | None = None) -> None:
        """Send a notification. Of several with one key, the client may get only the latest."""

    async def ask(self, method: str, params: Any) -> Message:
        """Send a request, over whichever connection comes, and wait for the answer."""


class Outlet(Protocol):
    """The stream of one request, as a guest sees it. A `Stream` is one."""

    request_id: RequestId  # of the client

    @property
    def progress_token(self) -> ProgressToken | None:
        """The client's token; None where it wants no progress."""

    async def send(self, line: bytes, *, is_droppable: bool = False) -> None:
        """Send a notification: it is journaled, then delivered. Waits while there is no room."""

    async def send_progress(self, token: ProgressToken, line: bytes) -> None:
        """Send progress. Where there is no room, only the latest of each token is kept."""

    async def ask(self, method: str, params: Any) -> Message:
        """Send a request and wait for the answer, whichever connection it comes over."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A request that runs as a stream. The handler returns the response, and if that is an error.

    The other members are those of `Engine.begin`. With a `max_s` of 0 the stream ends with its
    connection.
    """

    handler: StreamHandler
    progress_token: ProgressToken | None = None
    min_s: float = 0.0
    max_s: float = 0.0
    overflow: Overflow = "block"
    is_paged: bool = False
    is_restartable: bool = False
    is_repeatable: bool = False


class Received(msgspec.Struct, frozen=True):
    """A message for a guest: parsed, and the line as it was received."""

    message: Message
    line: bytes
    session: Session
    caller: CallerInfo


class ToolTraits(Protocol):
    """What a peer must know of a tool before it is called."""

    @property
    def takes(self) -> Container[str]:
        """The names of its arguments: a page token that has one of them is an argument."""

    def check_scopes(self, granted: Scopes) -> None:
        """Raise `InsufficientScope` unless the caller may call it."""

    def is_costly(self, arguments: msgspec.Raw) -> bool:
        """Whether it may take seconds to check these arguments."""


class Guest(Protocol):
    """The conversation of a backend with one session. Several sessions may share one guest."""

    @property
    def hello(self) -> Mapping[str, msgspec.Raw]:
        """The members of the result of `initialize`, as received from the backend."""

    def tool(self, name: str) -> ToolTraits | None:
        """What must be known of this tool before it is called; None where that is nothing."""

    async def call(self, received: Received, params: CallTool) -> Run | Any:
        """Begin a call of a tool: how it runs, or its result at once. Raises `Refusal`."""

    async def request(self, received: Received) -> Run | Any:
        """Begin any other request. A `Run` only where the backend `delivers` its method.

        Raises `Refusal`.
        """

    async def notify(self, received: Received) -> None:
        """Take a notification of the client. Raises `Refusal`, which is logged."""

    async def aclose(self) -> None:
        """The session has ended. Streams that it began go on."""


class Backend(Protocol):
    """What answers MCP for all sessions of one engine."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Run it for the length of a block: from before the first stream to after the last."""

    def delivers(self, method: str) -> bool:
        """Whether a request of this method may run as a stream. `tools/call` always does."""

    async def open(self, session: SessionInfo, standing: Standing) -> Guest:
        """Begin a conversation. Raises `Refusal` where that is not possible."""

    def restart_handler(self, stream: Stream) -> StreamHandler | None:
        """The handler of a call that was running when the server died; None to end it."""


