"""Cancel scopes and nurseries that an author's function has entered and not left.

Mostly an async generator has entered them and yields within, and the function leaves its loop
early: `async for row in rows(): return row`. trio raises a `RuntimeError` where the next scope
around the function is left, or where its task ends. Both is in code of the server, so one such call
would end the server with all other calls.
"""

from types import TracebackType
from typing import Final

import trio

from streams.logs import log

# Whether `Leftovers` can do its work with this version of trio, by names that are not public.
_CAN_LEAVE: Final = all(
    hasattr(trio.lowlevel.Task, name)
    for name in ("_cancel_status", "_activate_cancel_status", "_child_nurseries")
)
_ADVICE: Final = (
    "leave it in the function that has entered it; an async generator that yields within one is "
    "closed by `async with contextlib.aclosing(rows()) as opened:`"
)


class Leftovers:
    """A block that awaits a function of the author's, and leaves what the function has not left.

    The tasks of a nursery are cancelled. A scope has no effect on the task any more.
    """

    __slots__ = ("_name", "_nurseries", "_scopes", "_task")

    def __init__(self, name: str) -> None:
        """`name` is the function's, for the log."""
        self._name = name

    def __enter__(self) -> None:
        if _CAN_LEAVE:
            task = self._task = trio.lowlevel.current_task()
            self._scopes, self._nurseries = task._cancel_status, len(task._child_nurseries)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not _CAN_LEAVE:
            return
        task, known = self._task, self._nurseries
        if task._cancel_status is self._scopes and len(task._child_nurseries) == known:
            return
        for nursery in task._child_nurseries[known:]:
            nursery.cancel_scope.cancel()
            # As trio does where a task ends: else a late `__aexit__` would wait for this task.
            nursery._closed = True
        del task._child_nurseries[known:]
        task._activate_cancel_status(self._scopes)
        log.warning("a cancel scope or a nursery was left open", tool=self._name, advice=_ADVICE)
