"""Requests of the server to the client: the user's handlers, each called once for a request.

A handler with a second parameter is given the call that asks: None if the request belongs to no
call, or the server does not tell to which of several.

A server repeats a request, under the same id, when a connection was lost before its answer. While
the handler runs, a repeat changes only the connection that the answer goes to. Later the answer is
sent once more, because it may have been lost with the connection.
"""

import inspect
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import trio

from streams import messages
from streams.client.call import RunningCall
from streams.errors import INTERNAL_ERROR, METHOD_NOT_FOUND, Refusal
from streams.faults import kind_of, log_failure, text_of
from streams.logs import Warnings
from streams.messages import Message, RequestId

AnswerHandler = (
    Callable[[dict[str, Any]], object] | Callable[[dict[str, Any], RunningCall | None], object]
)
"""Answers a request of the server: gets its params, and the call that asks if it has a second
parameter. Returns the result. It may be async or a plain function.
"""

Respond = Callable[[Message, RunningCall | None], Awaitable[bytes]]
"""Answers any request of the server by a whole response, as a line; by nothing if it is empty."""

RUNNING_MAX: Final = 1_000  # handlers that run; beyond it the server gets an error
TASKS_MAX: Final = 2_000  # with answers that are being sent; beyond it requests are ignored
KEPT_MAX: Final = 1_000  # answers that are kept for a repeat; the oldest are dropped


def takes_call(handler: Callable[..., Any]) -> bool:
    """Whether a handler has a second parameter for the call: one without a default, or `call`."""
    try:
        parameters = list(inspect.signature(handler).parameters.values())
    except (TypeError, ValueError):
        return False  # a function of C does not tell
    places = [each for each in parameters if each.kind in _BY_PLACE]
    if len(places) < 2:
        return False
    return places[1].default is inspect.Parameter.empty or places[1].name == "call"


_BY_PLACE: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Sender(Protocol):
    """A connection, as far as an answer needs it."""

    is_over: bool

    async def send(self, line: bytes) -> None:
        """Write a line, when there is room."""


class _Asked:
    __slots__ = ("answer", "sender")  # not the call, which may be large: answers are kept

    def __init__(self, sender: Sender | None) -> None:
        self.sender = sender
        self.answer: bytes | None = None


class Answers:
    """The handlers, and the requests that were passed to them.

    Where `respond` is given, it answers all requests but pings, in place of the handlers.
    """

    def __init__(self, handlers: dict[str, AnswerHandler], respond: Respond | None = None) -> None:
        self.handlers = dict(handlers)
        self._respond = respond
        self.warnings = Warnings()  # about the server
        self.nursery: trio.Nursery
        self._running: dict[RequestId, _Asked] = {}
        self._given: OrderedDict[RequestId, _Asked] = OrderedDict()
        self._tasks = 0

    def take(
        self,
        message: Message,
        request_id: RequestId,
        sender: Sender | None,
        call: RunningCall | None = None,
    ) -> None:
        """Answer a request of `call` over `sender`: None while the connection is down."""
        if self.repeat(request_id, sender):
            return
        if self._has_room(message.method):
            asked = self._running[request_id] = _Asked(sender)
            self.nursery.start_soon(self._answer, message, request_id, asked, call)

    def repeat(self, request_id: RequestId, sender: Sender | None) -> bool:
        """Answer a request that came before; False if it did not."""
        asked = self._running.get(request_id)
        if asked is not None:
            asked.sender = sender
            return True
        asked = self._given.get(request_id)
        if asked is None:
            return False
        if sender is not None and self._has_room("again"):
            asked.sender = sender
            self.nursery.start_soon(self._send, asked)
        return True

    def refuse(self, sender: Sender, size: int, refused: Refusal) -> None:
        """The server takes no answers of this size: it gets an error when it asks again."""
        for request_id, asked in self._given.items():
            if asked.sender is sender and asked.answer is not None and len(asked.answer) == size:
                asked.answer = messages.error(request_id, refused)

    def _has_room(self, what: object) -> bool:
        """Count one more task, unless there are too many: a server may not read its answers."""
        if self._tasks >= TASKS_MAX:
            self.warnings.warn(
                "too many requests of the server at once: this one is ignored", method=what
            )
            return False
        self._tasks += 1
        return True

    async def _answer(
        self, message: Message, request_id: RequestId, asked: _Asked, call: RunningCall | None
    ) -> None:
        try:
            asked.answer = await self._line(message, request_id, call)
        except BaseException:
            self._tasks -= 1
            raise
        finally:
            del self._running[request_id]
        if message.method != "ping":
            self._given[request_id] = asked
            if len(self._given) > KEPT_MAX:
                self._given.popitem(last=False)
        await self._send(asked)

    async def _line(
        self, message: Message, request_id: RequestId, call: RunningCall | None
    ) -> bytes:
        try:
            if self._respond is not None and message.method != "ping":
                self._check_room()
                return await self._respond(message, call)
            return messages.result(request_id, await self._value(message, call))
        except Refusal as refused:
            return messages.error(request_id, refused)
        except Exception as error:
            failed = "the handler for a request of the server failed"
            log_failure(failed, error, method=message.method)
            why = f"{kind_of(error)}: {text_of(error)}"
            return messages.error(request_id, Refusal(INTERNAL_ERROR, why))

    async def _value(self, message: Message, call: RunningCall | None) -> Any:
        assert isinstance(message.method, str)
        handler: Callable[..., Any] | None = self.handlers.get(message.method)
        if handler is not None:
            self._check_room()
            params = messages.decode(message.params, dict[str, Any])
            done = handler(params, call) if takes_call(handler) else handler(params)
            return await done if inspect.isawaitable(done) else done
        if message.method == "ping":
            return {}
        raise Refusal(METHOD_NOT_FOUND, f"This client does not answer {message.method}.")

    def _check_room(self) -> None:
        if len(self._running) > RUNNING_MAX:
            raise Refusal(INTERNAL_ERROR, "Too many requests at once.")

    async def _send(self, asked: _Asked) -> None:
        """Send the answer to where the request came from; if that is gone, a repeat comes."""
        try:
            if asked.answer is not None and asked.sender is not None and not asked.sender.is_over:
                await asked.sender.send(asked.answer)
        finally:
            self._tasks -= 1
