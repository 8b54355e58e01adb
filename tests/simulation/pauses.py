"""Processes of the simulation that stand still for a while, as after a SIGSTOP.

All tasks of a process run in one context (`belong_to`). While it is paused its tasks are scheduled
as ever, but none of them runs; meanwhile time passes for it as for all others.
"""

from collections import deque
from contextvars import Context, ContextVar, copy_context

import trio

_process: ContextVar[object] = ContextVar("process", default=None)


def context_of(process: object) -> Context:
    """A context for the tasks of a process: tasks that they start are of the process, too."""
    context = copy_context()
    context.run(_process.set, process)
    return context


class Pauses(trio.abc.Instrument):
    """Keeps the tasks of paused processes from running; give it to `trio.run`."""

    def __init__(self) -> None:
        self._held: dict[object, deque[trio.lowlevel.Task]] = {}

    def pause(self, process: object) -> None:
        """Let no task of a process run from now on."""
        self._held.setdefault(process, deque())
        queue = _run_queue()
        for task in [task for task in queue if task.context.get(_process) is process]:
            queue.remove(task)
            self._held[process].append(task)

    def go_on(self, process: object) -> None:
        """Let the tasks of a process run again."""
        _run_queue().extend(self._held.pop(process, ()))

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        held = self._held.get(task.context.get(_process))
        if held is not None:
            assert _run_queue().pop() is task
            held.append(task)


def _run_queue() -> deque[trio.lowlevel.Task]:
    return trio._core._run.GLOBAL_RUN_CONTEXT.runner.runq
