"""Open nurseries for handlers: each runs one handler at a time, one after the other.

Each handler needs a cancel scope, and to enter and leave one takes a tenth of a short call. An open
nursery has a scope already. Only a handler that is cancelled uses it up. Each handler still has a
task of its own, so whatever a tool leaves behind in its task does not reach the next one.

A handler that waits for nothing needs no task of its own: see `run_here`.
"""

from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Final

import trio

# An open nursery takes 6 KB. Handlers beyond that number enter scopes of their own.
SLOTS_MAX: Final = 64

# Whether `run_here` can do its work with this version of trio, by names that are not public.
CAN_RUN_HERE: Final = all(
    hasattr(trio.lowlevel.Task, name) for name in ("_cancel_status", "_activate_cancel_status")
)


class Slots:
    """The open nurseries of one engine."""

    def __init__(self, nursery: trio.Nursery) -> None:
        """They are within `nursery`."""
        self._nursery = nursery
        self._number = 0
        self._idle: list[trio.Nursery] = []

    def start(self, run: Callable[[], Awaitable[None]]) -> trio.CancelScope:
        """Start a task that runs this, and return the scope around it.

        The scope belongs to others once `run` has ended: then it must not be cancelled any more.
        """
        # With a name given, trio need not make one.
        if self._idle:
            slot = self._idle.pop()
            slot.start_soon(self._run_in, slot, run, name="a call")
            return slot.cancel_scope
        if self._number < SLOTS_MAX:
            self._number += 1
            self._nursery.start_soon(self._keep_open)
        scope = trio.CancelScope()
        self._nursery.start_soon(self._run_alone, scope, run, name="a call")
        return scope

    @staticmethod
    def run_here(run: Callable[[], None]) -> None:
        """Run this to its end, with context variables of its own.

        A cancel scope that it has entered and not left is taken off the task. One more scope around
        each handler would do that too, for a twelfth of a short call over HTTP.
        """
        task = trio.lowlevel.current_task()
        scopes = task._cancel_status
        try:
            copy_context().run(run)
        finally:
            if task._cancel_status is not scopes:
                task._activate_cancel_status(scopes)

    async def _run_in(self, slot: trio.Nursery, run: Callable[[], Awaitable[None]]) -> None:
        await run()
        if not slot.cancel_scope.cancel_called:
            self._idle.append(slot)

    @staticmethod
    async def _run_alone(scope: trio.CancelScope, run: Callable[[], Awaitable[None]]) -> None:
        with scope:
            await run()

    async def _keep_open(self) -> None:
        """Keep a nursery open until it is cancelled together with its handler."""
        async with trio.open_nursery() as slot:
            self._idle.append(slot)
            try:
                await trio.sleep_forever()
            finally:
                self._number -= 1
                if slot in self._idle:
                    self._idle.remove(slot)
