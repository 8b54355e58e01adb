"""What the code of a tool may raise, and how far that reaches.

Whatever it is, `SystemExit` and its like included, it is the failure of one call: a process ends
for a signal, not because a tool says so. Two things are not the tool's and pass through: the
cancellation of what it runs in, and the `KeyboardInterrupt` that trio raises for a real Ctrl-C,
wherever that finds the program.
"""

import math
from collections.abc import Iterator
from typing import Final

import trio

_KI_MODULE: Final = "trio._core._ki"  # whose signal handler raises a real KeyboardInterrupt


async def let_pass(error: BaseException) -> None:
    """Raise what is not the tool's: to be awaited where `error` of a tool was caught.

    A `trio.Cancelled` by itself says nothing, for a tool can keep one and raise it later: so trio
    is asked whether this task is cancelled, and raises that itself.
    """
    if any(map(_is_signal, leaves_of(error))):
        raise error
    await trio.lowlevel.checkpoint_if_cancelled()


def is_failure(error: BaseException) -> bool:
    """Whether anything in it is the tool's own."""
    is_cancelled = trio.current_effective_deadline() == -math.inf
    return not all(
        (is_cancelled and isinstance(leaf, trio.Cancelled)) or _is_signal(leaf)
        for leaf in leaves_of(error)
    )


def text_of(error: BaseException) -> str:
    """What an error says, for the client; what makes its text may fail as well."""
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
