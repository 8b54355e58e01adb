"""Exceptions from the code of a tool.

Each of them, `SystemExit` included, is the failure of one call: a signal ends the process, a tool
does not. Two exceptions are not the tool's own and pass through: the cancellation of the task that
it runs in, and the `KeyboardInterrupt` that trio raises for a real Ctrl-C, in any code.
"""

import math
from collections.abc import Iterator
from typing import Final

import trio

_KI_MODULE: Final = "trio._core._ki"  # whose signal handler raises a real KeyboardInterrupt


async def let_pass(error: BaseException) -> None:
    """Raise `error` again where it is not the tool's own. Await this where it was caught.

    A `trio.Cancelled` proves nothing, since a tool can keep one and raise it later. So trio is
    asked whether this task is cancelled, and raises that itself.
    """
    if any(map(_is_signal, leaves_of(error))):
        raise error
    await trio.lowlevel.checkpoint_if_cancelled()


def is_failure(error: BaseException) -> bool:
    """Whether `error`, or an error of the group that it is, is the tool's own."""
    is_cancelled = trio.current_effective_deadline() == -math.inf
    return not all(
        (is_cancelled and isinstance(leaf, trio.Cancelled)) or _is_signal(leaf)
        for leaf in leaves_of(error)
    )


def text_of(error: BaseException) -> str:
    """The text of an error, for the client; its `__str__` may fail as well."""
    kind = type(error).__name__
    try:
        text = str(error)
    except BaseException:  # an author's own class
        return kind
    if isinstance(error, Exception):
        return text or kind
    return f"{kind}: {text}" if text else kind


def leaves_of(error: BaseException) -> Iterator[BaseException]:
    """The errors that groups hold, however deep; any other error is its own."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves_of(inner)
    else:
        yield error


def _is_signal(error: BaseException) -> bool:
    if not isinstance(error, KeyboardInterrupt):
        return False
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and traceback.tb_frame.f_globals.get("__name__") == _KI_MODULE
