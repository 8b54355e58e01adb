"""`Call` and `SyncCall`: what a tool uses to exchange messages with the client while it runs."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar, Unpack, overload

import msgspec
import trio

from streams import messages
from streams.engine.connection import Session
from streams.engine.lifecycle import LIVE
from streams.engine.stream import Stream
from streams.errors import CallFailed, Ended, MissingCapability
from streams.forks import Confined
from streams.messages import LEVELS, LogLevel, RequestId
from streams.protocol.clients import ClientInfo
from streams.server import questions
from streams.server.caller import CallerInfo, Principal
from streams.server.questions import ElicitationResult, Prompt, Root, Sample, SampleOptions

_T = TypeVar("_T")


class _ErrorBody(msgspec.Struct):
    code: int = 0
    message: str = ""
    data: Any = None


class Context:
    """The surroundings of a request: the server's state, and the caller that made the request."""

    def __init__(self, caller: CallerInfo, state: Any) -> None:
        self._caller = caller
        self._state = state

    @property
    def state(self) -> Any:
        """The value that the server's `lifespan` has yielded; None without one."""
        return self._state

    @property
    def principal(self) -> Principal:
        """The identity of the caller that made the request, whoever resumes it."""
        return self._caller.principal

    @property
    def client(self) -> ClientInfo:
        """The client that made the request, as it declared itself: `info`, `capabilities`,
        `revision`.
        """
        return self._caller.client


class Call(Context):
    """One running call, for an async tool.

    Messages are kept until the client has them, so a tool can send at any time, also while no
    client is connected. A method returns once its message is accepted, in order. It waits while the
    client is too far behind.
    """

    def __init__(
        self, stream: Stream, name: str, caller: CallerInfo, state: Any, *, restarts: bool = False
    ) -> None:
        """`name` is that of the tool; `restarts` tells whether it has `restart=True`."""
        super().__init__(caller, state)
        self._stream = stream
        self._name = name
        self._restarts = restarts
        self._is_over = False

    @property
    def request_id(self) -> RequestId:
        """The JSON-RPC id of the `tools/call` request."""
        return self._stream.request_id

    async def progress(
        self, progress: float, total: float | None = None, message: str | None = None
    ) -> None:
        """Report progress, in any unit. Each report must be greater than the one before.

        Nothing is sent to a client that did not ask for progress. While the client is too far
        behind, only the latest report is kept.
        """
        stream = self._stream
        token = stream.progress_token
        if token is not None and stream.ahead_of_messages is not None:
            await stream.ahead_of_messages()
            token = stream.progress_token  # by now it may be the token of the next page
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
        """Send a log message; `data` is any JSON. Below the client's level nothing is sent."""
        stream = self._stream
        if level not in LEVELS:
            raise ValueError(f"level: expected one of {', '.join(LEVELS)}, got {level!r}")
        is_wanted = LEVELS.index(level) >= LEVELS.index(stream.level)
        # A restarted call sends the same messages as before; the level may have been lower then.
        if not (is_wanted or stream.is_rerunning):
            await trio.lowlevel.checkpoint()
            return
        params = {"level": level, "logger": logger or self._name, "data": data}
        line = messages.notification("notifications/message", params)
        await stream.send(line, is_droppable=True)

    async def notify(self, method: str, params: Any = None) -> None:
        """Send any notification. `params` are an object in JSON, or None.

        Raises `TypeError` for other params.
        """
        await self._stream.send(messages.notification(method, messages.checked_params(params)))

    async def flush(self) -> None:
        """Wait until everything sent so far is durable, so that no crash can lose it."""
        await self._stream.flush()

    @overload
    async def elicit(self, message: str) -> ElicitationResult[None]: ...
    @overload
    async def elicit(self, message: str, response_type: type[_T]) -> ElicitationResult[_T]: ...

    async def elicit(self, message: str, response_type: Any = None) -> Any:
        """Ask the user to fill in a form, or only to agree.

        `response_type` is a dataclass, a msgspec Struct, a TypedDict or a pydantic model. Its
        fields are strings, numbers, booleans, enums of strings, or lists of such enums: MCP allows
        nothing else. Returns an `AcceptedElicitation` with `data` of that type, a
        `DeclinedElicitation` or a `CancelledElicitation`; each has its `action`.

        Raises `TypeError` for another type, `MissingCapability` if the client cannot ask its user,
        `InvalidAnswer` for an answer that does not fit, else as `request` does.
        """
        params = questions.form_params(message, response_type)
        answer = await self._ask(questions.ELICIT, params, questions.FORM)
        return questions.elicited(answer, response_type)

    async def elicit_url(
        self, message: str, url: str, elicitation_id: str
    ) -> ElicitationResult[None]:
        """Ask the user to open a URL, for what must not pass through the client (a password).

        `AcceptedElicitation` says that the user agreed, not that anything was done there. When it
        was, send `notifications/elicitation/complete` with this `elicitationId` by `notify`.
        Raises as `elicit` does.
        """
        params = questions.url_params(message, url, elicitation_id)
        answer = await self._ask(questions.ELICIT, params, questions.URL)
        return questions.elicited(answer, None)

    async def sample(
        self,
        messages: Prompt | Sequence[Prompt],
        *,
        max_tokens: int = questions.SAMPLE_TOKENS,
        **options: Unpack[SampleOptions],
    ) -> Sample:
        """Have a model of the client answer. A `str` is a message of the user.

        Other messages are dicts with `role` and `content`, as on the wire. Raises `TypeError` or
        `ValueError` for what cannot be sent, `MissingCapability` if the client has no model,
        `InvalidAnswer` for an answer that does not fit, else as `request` does.
        """
        params = questions.sample_params(messages, max_tokens, options)
        return questions.sampled(await self._ask(questions.SAMPLE, params, "sampling"))

    async def roots(self) -> list[Root]:
        """The folders and files that the client opens to the server. Raises as `sample` does."""
        return questions.roots(await self._ask(questions.ROOTS, {}, "roots"))

    async def request(self, method: str, params: Any = None) -> Any:
        """Send the client any request and return the result; `elicit`, `sample` and `roots` have
        types.

        The answer may come after a reconnect, and over another transport. There is no timeout but
        your own (`trio.move_on_after`). Raises `CallFailed` where the client answers with an error,
        `TypeError` for params that are no object in JSON.
        """
        given = {} if params is None else messages.checked_params(params)
        return messages.decode(await self._answer(method, given), Any)

    async def _ask(self, method: str, params: Any, capability: str) -> msgspec.Raw:
        if not await self._can_ask(method, capability):
            raise MissingCapability(method, capability)
        return await self._answer(method, params)

    async def _can_ask(self, method: str, capability: str) -> bool:
        """Whether the client that made the call can answer, or the one that is attached now.

        A call that was restarted asks what it asked the first time, and nothing else.
        """
        stream, maker = self._stream, self._caller.client_known
        if maker is None or maker.has(capability):
            return True
        if stream.rerun is not None and stream.is_rerunning:
            return await stream.rerun.expects(method)
        reader = None if stream.delivery is None else stream.delivery.reader
        client = reader.client if isinstance(reader, Session) else None
        return client is not None and client.has(capability)

    async def _answer(self, method: str, params: Any) -> msgspec.Raw:
        answer = await self._stream.ask(method, params)
        if isinstance(answer.result, msgspec.Raw):
            return answer.result
        assert isinstance(answer.error, msgspec.Raw)
        error = messages.decode(answer.error, _ErrorBody)
        raise CallFailed(error.code, error.message, error.data)

    @property
    def restored(self) -> Any:
        """The state of the last checkpoint, if this call was restarted after it; else None."""
        rerun = self._stream.rerun
        return None if rerun is None or rerun.state is None else messages.decode(rerun.state, Any)

    async def checkpoint(self, state: Any) -> None:
        """Store the state from which a restart continues, for a tool with `restart=True`.

        After the server died, the tool is run from its beginning, and `restored` is the state of
        the last checkpoint: any JSON, at most `checkpoint_bytes_max`. The tool must then send and
        ask the same as before, in the same order, from this checkpoint on. Messages that were sent
        before are not sent twice, and questions that were answered have their answers at once.

        Returns when the state is durable. Work before a checkpoint is not done again from then on.
        Work between two checkpoints may be done more than once.

        Raises `TypeError` for a state that is not JSON, `ValueError` for one that is too long,
        `RuntimeError` for a tool without `restart=True`.
        """
        if not self._restarts:
            raise RuntimeError(f"tool {self._name} has no restart=True: it is never restarted")
        encoded = messages.encode(state)
        if self._stream.rerun is None:  # no client could resume this stream after a restart
            await trio.lowlevel.checkpoint()
        else:
            await self._stream.checkpoint(encoded)

    async def disconnect(self) -> bool:
        """Detach the client, once everything sent so far is written to it. It may resume later.

        Returns False, and does nothing, where a client on that connection could not resume.
        """
        stream = self._stream
        seq = stream.state.last
        await stream.flush()
        await stream.written(seq)
        return stream.delivery is None or stream.delivery.let_go()

    def end(self) -> None:
        """The call has ended, though a thread may still run for it."""
        self._is_over = True

    @property
    def outcome(self) -> str:
        """How the call has ended, in a word."""
        state = self._stream.state
        return "ended" if state.outcome is LIVE else state.outcome.value


class SyncCall:
    """A `Call` for a plain function, which runs in a thread: the methods block that thread.

    Other threads of the function's may use it as well.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._confined = Confined()
        self._trio = trio.lowlevel.current_trio_token()  # for threads that trio has not made

    def _wait_for(self, send: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        self._confined.check()  # in a forked child no event loop runs
        if self.is_over:
            raise Ended(f"a message: the stream is {self._call.outcome} already")
        return trio.from_thread.run(send, *args, trio_token=self._trio)

    @property
    def is_over(self) -> bool:
        """Whether the call has ended, because it was cancelled or its time is over.

        No thread can be stopped from outside. So a long loop looks at this, and returns. All
        methods that send raise `Ended` from then on.
        """
        return self._call._is_over

    @property
    def state(self) -> Any:
        """See `Context.state`."""
        return self._call.state

    @property
    def principal(self) -> Principal:
        """See `Context.principal`."""
        return self._call.principal

    @property
    def client(self) -> ClientInfo:
        """See `Context.client`."""
        return self._call.client

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

    @overload
    def elicit(self, message: str) -> ElicitationResult[None]: ...
    @overload
    def elicit(self, message: str, response_type: type[_T]) -> ElicitationResult[_T]: ...

    def elicit(self, message: str, response_type: Any = None) -> Any:
        """See `Call.elicit`."""
        return self._wait_for(self._call.elicit, message, response_type)

    def elicit_url(self, message: str, url: str, elicitation_id: str) -> ElicitationResult[None]:
        """See `Call.elicit_url`."""
        return self._wait_for(self._call.elicit_url, message, url, elicitation_id)

    def sample(
        self,
        messages: Prompt | Sequence[Prompt],
        *,
        max_tokens: int = questions.SAMPLE_TOKENS,
        **options: Unpack[SampleOptions],
    ) -> Sample:
        """See `Call.sample`."""
        sample = partial(self._call.sample, messages, max_tokens=max_tokens, **options)
        return self._wait_for(sample)

    def roots(self) -> list[Root]:
        """See `Call.roots`."""
        return self._wait_for(self._call.roots)

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
