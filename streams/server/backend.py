"""Backends answer MCP behind a peer: our `Server` is one, a child process is another.

A peer keeps what belongs to the connection and to streams: `initialize`, `ping`, the methods of the
proposals, cancels and acks. Every other message goes to the session's guest. The messages that a
guest sends for a request go into the stream of that request.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec

from streams import messages
from streams.engine.connection import Session
from streams.engine.engine import StreamHandler
from streams.engine.lifecycle import ProgressToken
from streams.engine.stream import Stream
from streams.exchange import Scopes
from streams.limits import Overflow
from streams.messages import Message, RequestId
from streams.protocol.clients import ClientInfo
from streams.protocol.extension import KEY, WEBHOOK
from streams.protocol.revisions import REVISIONS
from streams.server.caller import CallerInfo


class SessionInfo(msgspec.Struct, frozen=True):
    """The client of a session, as it has declared itself in `initialize`."""

    principal: str
    revision: str  # of MCP, as the client asked for it
    client_info: msgspec.Raw
    capabilities: Mapping[str, msgspec.Raw]  # without those of the proposals and our extension
    more: Mapping[str, msgspec.Raw] = {}  # the other params, such as `_meta`

    @classmethod
    def of(cls, session: Session) -> "SessionInfo":
        """The client of a session, as far as that is known after a restart."""
        client = session.client or ClientInfo()
        return cls(
            principal=session.principal,
            revision=session.revision or REVISIONS[0],
            client_info=msgspec.Raw(messages.encode(client.info)),
            capabilities=messages.decode(client.declared, dict[str, msgspec.Raw]),
        )


class Standing(Protocol):
    """Sends one client the messages that belong to no request. A `Session` is one."""

    def notify(self, line: bytes, *, key: str | None = None) -> None:
        """Send a notification. Of several with one key, the client may get only the latest."""

    @property
    def is_listening(self) -> bool:
        """Whether a notification would be sent now. Else only those with a key are kept."""

    async def ask(
        self, method: str, params: Any, *, on_sent: Callable[[RequestId], object] | None = None
    ) -> Message:
        """Send a request, over whichever connection comes, and wait for the answer.

        `on_sent` is called with the id that the client sees.
        """


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A request that runs as a stream. Its handler returns the response and if that is an error."""

    handler: StreamHandler
    progress_token: ProgressToken | None = None
    min_s: float = 0.0  # a client waits so long before it resumes
    max_s: float = 0.0  # the stream is kept so long without a client; 0: ends with its connection
    overflow: Overflow = "block"
    is_paged: bool = False  # the handler sends several responses, and page tokens lead to them
    is_restartable: bool = False  # it begins again after our process died, if its client can resume
    is_rerunnable: bool = False  # the same for any client, and in a live process (`run_again`)
    is_repeatable: bool = False  # a second run does no harm, so its key need not be durable first
    is_findable: bool = False  # a client that was told nothing can find it (`wait_for_call`)


class Received(msgspec.Struct, frozen=True):
    """A message for a guest: parsed, and the line as it was received."""

    message: Message
    line: bytes
    session: Session
    caller: CallerInfo


class Meta(msgspec.Struct, rename="camel"):
    """The `_meta` of a call, as far as a peer reads it."""

    progress_token: ProgressToken | None = None
    key: Any = msgspec.field(name=KEY, default=msgspec.UNSET)
    webhook: Any = msgspec.field(name=WEBHOOK, default=msgspec.UNSET)


class CallTool(msgspec.Struct):
    """The params of `tools/call`."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")
    meta: Meta = msgspec.field(default_factory=Meta, name="_meta")

    @property
    def given(self) -> bytes:
        """The arguments as the text of a JSON object. Raises `ValueError` for any other JSON."""
        given = bytes(self.arguments).strip()
        if given == b"null":
            return b"{}"
        if not given.startswith(b"{"):
            raise ValueError("arguments must be an object")
        return given


class ToolTraits(Protocol):
    """Properties of a tool that a peer needs before it begins a call."""

    def takes(self, name: str) -> bool:
        """Whether it has an argument of this name, which then is no page token."""

    def check_scopes(self, granted: Scopes) -> None:
        """Raise `InsufficientScope` unless a caller with these scopes may call it."""

    def is_costly(self, arguments: msgspec.Raw) -> bool:
        """Whether it may take seconds to check these arguments."""


class Guest(Protocol):
    """The conversation of a backend with one session. Several sessions may share one guest."""

    @property
    def hello(self) -> Mapping[str, Any]:
        """The members of the result of `initialize`, for this session."""

    def tool(self, name: str) -> ToolTraits | None:
        """The properties of this tool that a peer needs; None where it needs none."""

    def check_resume(self, request: bytes, granted: Scopes) -> None:
        """Raise `InsufficientScope` unless a caller with these scopes may resume this request.

        `request` is the line of the original request, whose principal is the caller's.
        """

    async def call(self, received: Received, params: CallTool) -> Run | Any:
        """Begin a call of a tool: how it runs, or its result at once. Raises `Refusal`."""

    async def request(self, received: Received) -> Run | Any:
        """Begin any other request: how it runs, or its result at once. Raises `Refusal`.

        It runs only if the backend `delivers` its method.
        """

    async def notify(self, received: Received) -> None:
        """Take a notification. Raises `Refusal` where the client is to be told of its mistake."""

    def close(self) -> None:
        """The session has ended. Streams that it began may go on."""


class Backend(Protocol):
    """The server behind all sessions of one engine."""

    @property
    def running_tools(self) -> Sequence[str]:
        """The names of the tools that run in this process, which can delay its shutdown."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Run it for the length of a block, in which all of its streams begin and end."""

    @property
    def passes_page_tokens(self) -> bool:
        """Whether calls with page tokens go to its guests, because it makes such tokens itself.

        All page tokens of any other backend are those of runs that are paged.
        """

    def delivers(self, method: str) -> bool:
        """Whether a request of this method may run as a stream. `tools/call` always does."""

    async def open(self, session: SessionInfo, standing: Standing) -> Guest:
        """Begin the conversation of a client that initializes. Raises `Refusal`."""

    def reopen(self, session: SessionInfo, standing: Standing) -> Guest:
        """The conversation of a client that has initialized before a restart, or never will."""

    def restart_handler(self, stream: Stream) -> StreamHandler | None:
        """The handler of a call that was running when the server died; None to end the call."""
