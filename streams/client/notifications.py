"""Notifications of the server: the user's handlers, called in the order in which they came.

The connection's reader must wait for nothing, so it leaves notifications to a task of their own.
One that belongs to a call is handled where the call is read, by `Client.call_tool`.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import trio

from streams import messages
from streams.client.answers import takes_call
from streams.client.call import RunningCall
from streams.faults import log_failure
from streams.logs import Warnings, log
from streams.messages import Message

NotificationHandler = (
    Callable[[dict[str, Any]], object] | Callable[[dict[str, Any], RunningCall | None], object]
)
"""Gets the params of a notification, and the call that it belongs to if it has a second parameter.
It may be a plain function or async.
"""

# Notifications that wait for their handlers; beyond it, further ones are dropped with a warning.
WAITING_MAX: Final = 1_000

_FAILED: Final = "the handler of a notification failed"

_Waiting = tuple[Callable[..., Any], dict[str, Any]]


class Notifications:
    """The handlers by method, and what waits for them."""

    def __init__(self, hear_all: Callable[[Message], object] | None) -> None:
        self._hear_all = hear_all
        self._handlers: dict[str, Callable[..., Any]] = {}
        self._warnings = Warnings()
        self._send, self._waiting = trio.open_memory_channel[_Waiting](WAITING_MAX)

    def on(self, method: str, handler: NotificationHandler) -> None:
        """Call `handler` for the notifications of `method` from now on."""
        self._handlers[method] = handler

    def take(self, message: Message) -> None:
        """Take a notification that belongs to no call, without waiting."""
        if self._hear_all is not None:
            self._tell(self._hear_all, message)
        handler = self._handlers.get(str(message.method))
        if handler is None:
            log.debug("a notification that belongs to no call", method=message.method)
            return
        params = self._params_of(message)
        if params is not None:
            self._put(message, handler, params)

    def _tell(self, hear_all: Callable[[Message], object], message: Message) -> None:
        """Call the handler of all notifications at once; if it is async, its rest runs later."""
        try:
            done = hear_all(message)
        except Exception as error:
            log_failure(_FAILED, error)
            return
        if inspect.isawaitable(done) and not self._put(message, lambda _: done, {}):
            getattr(done, "close", int)()

    def _put(self, message: Message, handler: Callable[..., Any], params: dict[str, Any]) -> bool:
        try:
            self._send.send_nowait((handler, params))
        except trio.WouldBlock:
            self._warnings.warn(
                "notifications come faster than their handlers run: this one is dropped",
                method=message.method,
            )
            return False
        return True

    async def handle(self, message: Message, call: RunningCall) -> None:
        """Handle a notification of a call, and wait for its handler."""
        handler = self._handlers.get(str(message.method))
        params = None if handler is None else self._params_of(message)
        if handler is not None and params is not None:
            await _run(handler, params, call)

    async def run(self) -> None:
        """Run the handlers of what was taken, one after the other."""
        async for handler, params in self._waiting:
            await _run(handler, params, None)

    def _params_of(self, message: Message) -> dict[str, Any] | None:
        try:
            return messages.decode(message.params, dict[str, Any])
        except ValueError as error:
            self._warnings.warn(
                "a notification cannot be read", method=message.method, why=str(error)
            )
            return None


async def _run(
    handler: Callable[..., Any], params: Mapping[str, Any], call: RunningCall | None
) -> None:
    """Run a handler; a failure is logged, and harms nothing else."""
    try:
        done = handler(params, call) if takes_call(handler) else handler(params)
        if inspect.isawaitable(done):
            await done
    except Exception as error:
        log_failure(_FAILED, error)
