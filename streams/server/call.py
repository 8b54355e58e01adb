"""What a tool is given besides its arguments: the call, to talk to the client meanwhile."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import trio

from streams import messages
from streams.engine.stream import Stream
from streams.errors import CallFailed
from streams.forks import Confined
from streams.messages import LEVELS, LogLevel, RequestId
from streams.server.tools import Tool

_T = TypeVar("_T")


class _ErrorBody(msgspec.Struct):
    code: int = 0
    message: str = ""
    data: Any = None


class Call:
    """One running call, for an async tool.

    What is sent is kept until the client has it, so a tool does not care whether anybody is
    connected. A method returns when its message is accepted in order; it waits while the client is
    too far behind.
    """

    def __init__(
        self,
        stream: Stream,
        tool: Tool,
    ) -> None:
        self._stream = stream
        self._tool = tool

    @property
    def request_id(self) -> RequestId:
        """The JSON-RPC id of the `tools/call` request."""
        return self._stream.request_id

    async def progress(
        self, progress: float, total: float | None = None, message: str | None = None
    ) -> None:
        """Report progress, in a unit of the tool's own; it must grow with every report.

        Nothing is sent to a client that did not ask for progress. Where the client is too far
        behind only the latest report is kept.
        """
        stream = self._stream
        token = stream.progress_token
        if token is not None and stream.ahead_of_messages is not None:
            await stream.ahead_of_messages()
            token = stream.progress_token  # the page that it is for may have been sent meanwhile
        if token is None:
            await trio.lowlevel.checkpoint()
            return
        params: dict[str, Any] = {"progressToken": token, "progress": progress}
        if total is not None:
            params["total"] = total
        if message is not None:
            params["message"] = message
        line = messages.notification("notifications/progress", params)
        await stream.send_progress(token, line)

    async def log(self, level: LogLevel, data: Any, *, logger: str | None = None) -> None:
        """Send a log message; `data` is any JSON. Levels below the client's choice are not sent."""
        stream = self._stream
        is_wanted = LEVELS.index(level) >= LEVELS.index(stream.level)
        if not (is_wanted or stream.is_rerunning):  # it may have been wanted when it was sent first
            await trio.lowlevel.checkpoint()
            return
        params = {"level": level, "logger": logger or self._tool.name, "data": data}
        line = messages.notification("notifications/message", params)
        await stream.send(line, is_droppable=True)

    async def notify(self, method: str, params: Any = None) -> None:
        """Send any notification."""
        await self._stream.send(messages.notification(method, params))

    async def flush(self) -> None:
        """Wait until everything sent so far is durable: no crash can take it back."""
        await self._stream.flush()

    async def request(self, method: str, params: Any = None) -> Any:
        """Ask the client (elicitation, sampling, roots) and return the result of its answer.

        The answer may come after a reconnect, over another transport; there is no timeout but your
        own (`trio.move_on_after`). Raises `CallFailed` where the client answers with an error.
        """
        answer = await self._stream.ask(method, {} if params is None else params)
        if isinstance(answer.result, msgspec.Raw):
            return messages.decode(answer.result, Any)
        assert isinstance(answer.error, msgspec.Raw)
        error = messages.decode(answer.error, _ErrorBody)
        raise CallFailed(error.code, error.message, error.data)

    @property
    def restored(self) -> Any:
        """The state of the last checkpoint, where this call began before its server died; else
        None.
        """
        rerun = self._stream.rerun
        return None if rerun is None or rerun.state is None else messages.decode(rerun.state, Any)

    async def checkpoint(self, state: Any) -> None:
        """Begin here, with this state, should the server die: for a tool with `restart=True`.

        The tool is then run from its beginning, `restored` is the state (any JSON, at most
        `checkpoint_bytes_max`), and it must do what it did behind this point once more, in the same
        order: what it had sent is not sent again, what it had asked has its answer. Returns when
        that is durable; what was done before is not done again from then on. What is done between
        two checkpoints may be done more than once.

        Raises `TypeError` for what is no JSON, `ValueError` where it is too long, `RuntimeError`
        where the tool is never run again.
        """
        if not self._tool.restart:
            raise RuntimeError(f"tool {self._tool.name} has no restart=True: nothing is run again")
        encoded = messages.encode(state)
        if self._stream.rerun is None:  # nobody could come back
            await trio.lowlevel.checkpoint()
        else:
            await self._stream.checkpoint(encoded)

    async def disconnect(self) -> bool:
        """Let go of the client, once it was given what was sent so far; it comes back when it
        likes.

        Returns False, and does nothing, where somebody on that connection could not come back.
        """
        stream = self._stream
        seq = stream.state.last
        await stream.flush()
        await stream.written(seq)
        return stream.delivery is None or stream.delivery.let_go()


class SyncCall:
    """The same for a tool that is a plain function: it runs in a thread, and so its calls block."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._confined = Confined()

    def _wait_for(self, send: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        self._confined.check()  # in a forked child no event loop runs
        return trio.from_thread.run(send, *args)

    @property
    def request_id(self) -> RequestId:
        """The JSON-RPC id of the `tools/call` request."""
        return self._call.request_id

    def progress(
        self, progress: float, total: float | None = None, message: str | None = None
    ) -> None:
        """See `Call.progress`."""
        self._wait_for(self._call.progress, progress, total, message)

    def log(self, level: LogLevel, data: Any, *, logger: str | None = None) -> None:
        """See `Call.log`."""

        async def log() -> None:
            await self._call.log(level, data, logger=logger)

        self._wait_for(log)

    def notify(self, method: str, params: Any = None) -> None:
        """See `Call.notify`."""
        self._wait_for(self._call.notify, method, params)

    def flush(self) -> None:
        """See `Call.flush`."""
        self._wait_for(self._call.flush)

    def request(self, method: str, params: Any = None) -> Any:
        """See `Call.request`."""
        return self._wait_for(self._call.request, method, params)

    @property
    def restored(self) -> Any:
        """See `Call.restored`."""
        return self._call.restored

    def checkpoint(self, state: Any) -> None:
        """See `Call.checkpoint`."""
        self._wait_for(self._call.checkpoint, state)

    def disconnect(self) -> bool:
        """See `Call.disconnect`."""
        return self._wait_for(self._call.disconnect)
