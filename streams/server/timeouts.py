"""The time limit of a tool: `@server.tool(timeout_s=…)`."""

import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from streams.errors import ToolError
from streams.faults import is_failure, let_pass, log_failure
from streams.server.leftovers import Leftovers

_T = TypeVar("_T")


class TimeLimit:
    """Cancels a tool that runs for too long. For a tool with pages the time is that of each page.

    The thread of a plain function cannot be stopped: it is abandoned, and its call ends. A tool
    that is shielded from cancellation ends when its shield does.
    """

    def __init__(self, tool: str, limit_s: float) -> None:
        self._tool = tool
        self._limit_s = limit_s
        self._scope = trio.CancelScope()

    async def keep(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Run the tool. Raises `ToolError` when its time is over, otherwise as the tool does."""
        self.begin()
        try:
            with self._scope, Leftovers(self._tool):
                return await work()
        except BaseException as error:
            if not self._scope.cancel_called:
                raise
            if is_failure(error):  # in a `finally` of the cancelled tool
                log_failure("a tool failed while it was stopped", error, tool=self._tool)
            await let_pass(error)
        raise ToolError(f"{self._tool} was stopped: it ran for longer than {self._limit_s:g} s")

    def begin(self) -> None:
        """The tool begins, or goes on to its next page."""
        self._scope.deadline = trio.current_time() + self._limit_s

    def pause(self) -> None:
        """The tool waits until its next page is wanted."""
        self._scope.deadline = math.inf
