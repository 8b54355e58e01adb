"""What a tool is given besides its arguments: the call, to talk to the client meanwhile."""

from typing import Any

import msgspec
import trio

from streams import messages
from streams.errors import CallFailed
from streams.keys import new_request_id
from streams.messages import RequestId
from streams.session import LEVELS, LogLevel, Session
from streams.stream import Stream


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
        *,
        tool: str,
        session: Session,
    ) -> None:
        self._stream = stream
        self._tool = tool
        self._session = session

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
        if stream.progress_token is not None and stream.ahead_of_messages is not None:
            await stream.ahead_of_messages()  # after which nobody may wait for this any more
        token = stream.progress_token
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
        if LEVELS.index(level) < LEVELS.index(self._session.level):
            await trio.lowlevel.checkpoint()
            return
        params = {"level": level, "logger": logger or self._tool, "data": data}
        await self.notify("notifications/message", params)

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
        request_id = new_request_id()
        line = messages.request(request_id, method, {} if params is None else params)
        answer = await self._stream.ask(request_id, line)
        if isinstance(answer.result, msgspec.Raw):
            return messages.decode(answer.result, Any)
        assert isinstance(answer.error, msgspec.Raw)
        error = messages.decode(answer.error, _ErrorBody)
        raise CallFailed(error.code, error.message, error.data)

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

    @property
    def request_id(self) -> RequestId:
        """The JSON-RPC id of the `tools/call` request."""
        return self._call.request_id

    def progress(
        self, progress: float, total: float | None = None, message: str | None = None
    ) -> None:
        """See `Call.progress`."""
        trio.from_thread.run(self._call.progress, progress, total, message)

    def log(self, level: LogLevel, data: Any, *, logger: str | None = None) -> None:
        """See `Call.log`."""

        async def log() -> None:
            await self._call.log(level, data, logger=logger)

        trio.from_thread.run(log)

    def notify(self, method: str, params: Any = None) -> None:
        """See `Call.notify`."""
        trio.from_thread.run(self._call.notify, method, params)

    def flush(self) -> None:
        """See `Call.flush`."""
        trio.from_thread.run(self._call.flush)

    def request(self, method: str, params: Any = None) -> Any:
        """See `Call.request`."""
        return trio.from_thread.run(self._call.request, method, params)

    def disconnect(self) -> bool:
        """See `Call.disconnect`."""
        return trio.from_thread.run(self._call.disconnect)
