"""Handlers of calls: each runs a tool for one stream, and makes the tool's result a response.

A restarted call gets its handler from the originating request, which the journal has stored.
"""

from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from types import FrameType
from typing import Any, Final

import msgspec
import trio

from streams import messages
from streams.engine.engine import ImmediateHandler, StreamHandler
from streams.engine.stream import Stream
from streams.errors import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    Refusal,
    ResourceNotFound,
    StreamsError,
    ToolError,
)
from streams.faults import (
    is_caused_by_failure,
    is_failure,
    is_kind,
    let_pass,
    let_signal_pass,
    log_failure,
    run_in_thread,
    text_of,
    told_of,
)
from streams.forks import Confined
from streams.keys import new_id
from streams.logs import STREAM_LETTERS, log
from streams.schemas.arguments import Callee
from streams.schemas.inputs import GivenSchema
from streams.schemas.workers import Workers
from streams.server.backend import CallTool
from streams.server.call import Call, Context, SyncCall
from streams.server.caller import CallerInfo
from streams.server.features import Work
from streams.server.leftovers import Leftovers
from streams.server.methods import Method
from streams.server.pages import PagedCall
from streams.server.timeouts import TimeLimit
from streams.server.tools import Tool, Tools, error_result, to_result
from streams.turns import LARGE_BYTES, large_work

# Threads for plain functions, apart from the threads for everything else.
THREADS_MAX: Final = 40
# More, since a plain generator keeps its thread from the first page to the last, and mostly sleeps.
PAGING_THREADS_MAX: Final = 1_000


class Handlers:
    """Makes the handlers of one server's calls, and has the threads and workers that they share."""

    def __init__(self, tools: Tools, *, masks_errors: bool = False, state: Any = None) -> None:
        """`state` is what the server's lifespan has yielded."""
        self._tools = tools
        self._masks_errors = masks_errors
        self._state = state
        self._limiter = trio.CapacityLimiter(THREADS_MAX)
        self._paging_limiter = trio.CapacityLimiter(PAGING_THREADS_MAX)
        self._confined = Confined()
        self._workers = Workers()
        self._running: dict[Stream, str] = {}

    @property
    def running_tools(self) -> list[str]:
        """The names of the tools whose calls have not ended, sorted."""
        return sorted(set(self._running.values()))

    async def arguments(self, tool: Tool | Callee, given: bytes, principal: str) -> dict[str, Any]:
        """The checked arguments of a call. Raises `ValueError` that says what does not fit."""
        schema = tool.input_given
        if schema is not None and schema.is_costly(len(given)):
            await self._workers.check(schema.encoded, given, "arguments", principal)
        try:
            if len(given) < LARGE_BYTES:
                return tool.bind(given)
            return await large_work().do(principal, partial(tool.bind, given))
        except ValueError as error:
            if self._masks_errors and is_caused_by_failure(error):
                raise ValueError("they cannot be read") from error  # `bind` has logged the cause
            raise

    async def params(self, method: Method, given: msgspec.Raw, principal: str) -> None:
        """Check the params of a method where that is costly. Raises `Refusal`."""
        await method.check(given, self._workers, principal)

    async def aclose(self) -> None:
        """End the worker processes that check arguments and results."""
        await self._workers.aclose()

    def handler(
        self, tool: Tool, arguments: Mapping[str, Any], caller: CallerInfo
    ) -> StreamHandler:
        """The handler that runs the tool with these arguments."""
        if tool.is_immediate:
            return ImmediateHandler(
                lambda stream: _response(
                    stream, self._immediate_result(tool, arguments, stream, caller)
                )
            )

        async def handle(stream: Stream) -> tuple[bytes, bool]:
            return _response(stream, await self._result(tool, arguments, stream, caller))

        return handle

    def method_handler(self, method: Method, params: Any, caller: CallerInfo) -> StreamHandler:
        """The handler of a request that MCP does not know."""

        async def handle(stream: Stream) -> tuple[bytes, bool]:
            call = Call(stream, method.name, caller, self._state)
            self._running[stream] = method.name
            try:
                with self._confined, Leftovers(method.name):
                    value = await method.run(call, params)
                return messages.result(stream.request_id, value), False
            except BaseException as error:
                refused = self._refused(method.name, error)
                await let_pass(error)
                messages.error(stream.request_id, refused)  # raises if its data is no JSON
                raise refused from None
            finally:
                self._ended(stream, call)

        return handle

    def _refused(self, name: str, error: BaseException) -> Refusal:
        """The JSON-RPC error for an exception of a method's handler."""
        told = told_of(error)
        first = told[0]
        if len(told) == 1 and is_kind(first, Refusal):
            assert isinstance(first, Refusal)
            return first
        return Refusal(INTERNAL_ERROR, self.failure("a method", error, name))

    def context(self, caller: CallerInfo) -> Context:
        """The context of a message that is no call."""
        return Context(caller, self._state)

    async def notify(self, method: Method, params: Any, caller: CallerInfo) -> None:
        """Run the handler of a notification. Its errors are only logged."""
        try:
            with self._confined:
                await method.run(self.context(caller), params)
        except BaseException as error:
            self.failure("a notification", error, method.name)
            await let_pass(error)

    def restart_handler(self, stream: Stream) -> StreamHandler | None:
        """The handler of a call that is restarted; None where it cannot be restarted."""
        if stream.record.restart is None:
            return None
        try:
            origin = messages.parse(stream.record.origin)
            if origin.method != "tools/call":
                return None  # a read or a prompt: its client asks again
            params = messages.decode(origin.params, CallTool)
            tool = self._tools.get(params.name)
            if tool is None or not tool.restart:
                return None
            arguments = tool.bind(params.given)  # checked when the call began
        except ValueError as error:
            log.warning(
                "a call cannot be restarted", stream=stream.id[:STREAM_LETTERS], why=str(error)
            )
            return None
        stream.progress_token = params.meta.progress_token
        stream.overflow = tool.overflow
        caller = CallerInfo.kept_as(stream.record.principal, stream.record.restart.caller)
        return self.handler(tool, arguments, caller)

    def request_handler(self, work: Work, caller: CallerInfo) -> StreamHandler:
        """The handler that runs the function of a request that is no call."""

        async def handle(stream: Stream) -> tuple[bytes, bool]:
            try:
                return messages.result(
                    stream.request_id, await self._answer(work, stream, caller)
                ), False
            except ResourceNotFound as unknown:
                named = unknown if unknown.data else ResourceNotFound(str(unknown), uri=work.uri)
                return messages.error(stream.request_id, named), True
            except Refusal as refused:
                return messages.error(stream.request_id, refused), True

        return handle

    async def _answer(self, work: Work, stream: Stream, caller: CallerInfo) -> msgspec.Raw:
        """The result of a request, encoded. Raises `Refusal`; a failure is logged."""
        callee, call = work.callee, None
        self._running[stream] = work.what
        try:
            arguments = await self._bound(work, stream)
            run = partial(callee.function, *work.positional, **arguments)
            if callee.takes_call:
                call = Call(stream, callee.name, caller, self._state)
                first = call if callee.is_async else SyncCall(call)
                run = partial(callee.function, first, *work.positional, **arguments)
            with self._confined, Leftovers(work.what):
                value = await (run() if callee.is_async else self._in_thread(run))
                return msgspec.Raw(messages.encode(work.result(value)))
        except BaseException as error:
            if is_kind(error, Refusal):
                raise
            told = self.failure("a request", error, f"the {work.what}")
            await let_pass(error)
            text = told.encode(errors="backslashreplace").decode()
            raise Refusal(INTERNAL_ERROR, f"The {work.what} failed: {text}") from None
        finally:
            self._ended(stream, call)

    async def _bound(self, work: Work, stream: Stream) -> dict[str, Any]:
        """The arguments of a request by name. Raises `Refusal` where they do not fit."""
        if work.values is None:
            return {}
        assert isinstance(work.callee, Callee)
        try:
            encode = partial(work.callee.encoded, work.values)
            if sum(map(len, work.values.values())) < LARGE_BYTES:
                given = encode()
            else:
                given = await large_work().do(stream.record.principal, encode)
            return await self.arguments(work.callee, given, stream.record.principal)
        except ValueError as error:
            raise Refusal(INVALID_PARAMS, f"Bad arguments for {work.what}: {error}") from None

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        def confined_work() -> Any:
            with self._confined:
                return work()

        return await run_in_thread(confined_work, self._limiter)

    async def _result(
        self, tool: Tool, arguments: Mapping[str, Any], stream: Stream, caller: CallerInfo
    ) -> dict[str, Any]:
        """The tool's result. An exception becomes an error result, and its traceback is logged."""
        call, work = self._began(tool, arguments, stream, caller)
        try:
            with self._confined, Leftovers(tool.name):
                return await self._run(tool, work, stream)
        except BaseException as error:
            told = self._told(tool, stream, error)
            await let_pass(error)
            return error_result(told)
        finally:
            self._ended(stream, call)

    def _immediate_result(
        self, tool: Tool, arguments: Mapping[str, Any], stream: Stream, caller: CallerInfo
    ) -> dict[str, Any]:
        """As `_result`, for a tool that is immediate."""
        call, work = self._began(tool, arguments, stream, caller)
        try:
            with self._confined:
                return to_result(_value_of(work()), tool)
        except BaseException as error:
            told = self._told(tool, stream, error)
            let_signal_pass(error)
            return error_result(told)
        finally:
            self._ended(stream, call)

    def _began(
        self, tool: Tool, arguments: Mapping[str, Any], stream: Stream, caller: CallerInfo
    ) -> tuple[Call | None, Callable[[], Any]]:
        """The call that the tool takes, if it takes any, and what runs the tool."""
        self._running[stream] = tool.name
        work = partial(tool.function, **arguments)
        if not tool.takes_call:
            return None, work
        call = Call(stream, tool.name, caller, self._state, restarts=tool.restart)
        return call, partial(work, call if tool.is_async else SyncCall(call))

    def _ended(self, stream: Stream, call: Call | None) -> None:
        del self._running[stream]
        if call is not None:
            call.end()

    def _told(self, tool: Tool, stream: Stream, error: BaseException) -> str:
        return self.failure("a tool", error, tool.name, stream=stream.id[:STREAM_LETTERS])

    def failure(self, what: str, error: BaseException, name: str, **details: str) -> str:
        """Log an exception of the author's code; returns what its client is told.

        With `mask_errors` the client is told the text of each `ToolError`. For all other exceptions
        it is told one neutral sentence, with an id that the log has too. The line of the log has
        `details`, such as the stream of a call.
        """
        told = told_of(error)
        named = [each for each in told if is_kind(each, ToolError)]
        is_masked = self._masks_errors and len(named) < len(told)
        number = {"id": new_id()[:8]} if is_masked else {}
        if len(named) == len(told):
            log.info(f"{what} reports an error", tool=name, why=text_of(error), **details)
        elif not is_masked and all(is_kind(each, StreamsError) for each in told):
            log.warning(f"{what} gave up", tool=name, why=text_of(error), **details)
        elif is_failure(error):
            log_failure(f"{what} failed", error, tool=name, **number, **details)
        if not is_masked:
            return text_of(error)
        masked = f"{name} failed: the log of the server says why, under the id {number['id']}."
        return "; ".join([*map(text_of, named), masked])

    async def _run(self, tool: Tool, work: Callable[[], Any], stream: Stream) -> dict[str, Any]:
        time = None if tool.timeout_s is None else TimeLimit(tool.name, tool.timeout_s)
        if tool.paged is not None:
            paging = PagedCall(stream, partial(to_result, tool=tool), tool.paged, time)
            return await paging.run(work(), self._paging_limiter)
        if tool.is_async:
            value = await (work() if time is None else time.keep(work))
        else:
            run = partial(self._in_thread, work)
            value = await (run() if time is None else time.keep(run))
        result = to_result(value, tool)
        schema = None if tool.output is None else tool.output.given
        if schema is not None and not result.get("isError"):
            await self._check_result(result, tool, schema, stream)
        return result

    async def _check_result(
        self, result: dict[str, Any], tool: Tool, schema: GivenSchema, stream: Stream
    ) -> None:
        """Let a worker check the result where that is costly.

        `to_result` has checked it against the output schema otherwise.
        """
        encoded = msgspec.json.encode(result["structuredContent"])
        if schema.is_costly(len(encoded)):
            principal = stream.record.principal
            try:
                await self._workers.check(schema.encoded, encoded, "result", principal)
            except ValueError as error:
                raise ValueError(f"tool {tool.name} broke its output schema: {error}") from None


def _value_of(coroutine: Coroutine[Any, None, Any]) -> Any:
    """The value of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise RuntimeError("a coroutine without await has waited")


def _response(stream: Stream, result: dict[str, Any]) -> tuple[bytes, bool]:
    return messages.result(stream.request_id, result), bool(result.get("isError"))


def tool_at(frame: FrameType) -> str | None:
    """The name of the tool or method that runs in this frame; None for any other frame."""
    if frame.f_code is Handlers._answer.__code__:
        return str(frame.f_locals["work"].what)
    if frame.f_code is Method.run.__code__:
        method = frame.f_locals["self"]
        return method.name if isinstance(method, Method) else None
    if frame.f_code not in (Handlers._result.__code__, Handlers._immediate_result.__code__):
        return None
    tool = frame.f_locals["tool"]
    return tool.name if isinstance(tool, Tool) else None
