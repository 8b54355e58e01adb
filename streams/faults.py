"""Exceptions from the code of a tool.

Each of them, `SystemExit` included, is the failure of one call: a signal ends the process, a tool
does not. Two exceptions are not the tool's own and pass through: the cancellation of the task that
it runs in, and the `KeyboardInterrupt` that trio raises for a real Ctrl-C, in any code.

The class of such an exception is the author's as well: `__str__`, `__getattribute__` and the
metaclass may raise. So kinds and attributes are read here without the author's code, and what has
to run that code (the text, the traceback) is guarded.
"""

import math
import traceback
from collections.abc import Callable, Iterator
from types import CoroutineType
from typing import Any, Final, TypeVar

import trio

from streams.logs import log

_T = TypeVar("_T")

# Read as C code does: no attribute of an author's class is asked.
_name_of: Final[Callable[[type], str]] = type.__dict__["__name__"].__get__
_traceback_of: Final[Callable[[BaseException], Any]] = BaseException.__dict__[
    "__traceback__"
].__get__
_errors_of: Final[Callable[[BaseException], tuple[BaseException, ...]]] = (
    BaseExceptionGroup.__dict__["exceptions"].__get__
)

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
        (is_cancelled and is_kind(leaf, trio.Cancelled)) or _is_signal(leaf)
        for leaf in leaves_of(error)
    )


def is_kind(error: BaseException, kind: type[BaseException]) -> bool:
    """What `isinstance` says where `__class__` is not overridden; it does not ask `__class__`."""
    return type.__subclasscheck__(kind, type(error))


def kind_of(error: BaseException) -> str:
    """The name of an error's class."""
    return _name_of(type(error))


def text_of(error: BaseException) -> str:
    """The text of an error, for the client; its `__str__` may fail as well."""
    kind = kind_of(error)
    try:
        text = str.__str__(str(error))  # the second may return an instance of an author's subclass
    except BaseException as trouble:
        _raise_signal(trouble)
        return kind
    if is_kind(error, Exception):
        return text or kind
    return f"{kind}: {text}" if text else kind


def log_failure(event: str, error: BaseException, **details: Any) -> None:
    """Log an error with its traceback. Raises nothing but a real Ctrl-C.

    To render a traceback runs code of the error's class, and Python's own `traceback` fails for
    some errors: a `SyntaxError` with an offset that is no number, groups 1,000 deep. Then the log
    has the frames and the name of the class.
    """
    try:
        log.error(event, exc_info=(type(error), error, _traceback_of(error)), **details)
    except BaseException as trouble:
        _raise_signal(trouble)
        try:
            log.error(event, exception=_plain_traceback(error, trouble), **details)
        except BaseException as worse:
            _raise_signal(worse)  # any other: the log itself fails, so it cannot be told there


def _plain_traceback(error: BaseException, trouble: BaseException) -> str:
    frames = "".join(traceback.format_tb(_traceback_of(error)))
    return f"{frames}{kind_of(error)} (it cannot be shown: {kind_of(trouble)})"


async def run_in_thread(work: Callable[[], _T], limiter: trio.CapacityLimiter) -> _T:
    """Run an author's function in a thread, which is abandoned where the task is cancelled.

    Raises what it raises. The exception leaves the thread as a value: trio examines an exception
    with the code of its class, and where that fails the thread ends without a report, and its
    token of the limiter is lost.
    """

    def run() -> tuple[_T] | _Raised:
        try:
            value: Any = work()
        except BaseException as error:
            return _Raised(error)
        if type(value) is CoroutineType:
            value.close()
            return _Raised(TypeError("a plain function returned a coroutine: use async def"))
        return (value,)

    done = await trio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=limiter)
    if isinstance(done, _Raised):
        try:
            raise done.error
        finally:
            del done  # it refers to this frame by its traceback, and would keep it alive
    return done[0]


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def leaves_of(error: BaseException) -> Iterator[BaseException]:
    """The errors that groups hold, however deep, each once; any other error is its own."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        error = waiting.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        if is_kind(error, BaseExceptionGroup):
            waiting.extend(reversed(_errors_of(error)))
        else:
            yield error


def _raise_signal(error: BaseException) -> None:
    if _is_signal(error):
        raise error


def _is_signal(error: BaseException) -> bool:
    if not is_kind(error, KeyboardInterrupt):
        return False
    frames = _traceback_of(error)
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    return frames is not None and frames.tb_frame.f_globals.get("__name__") == _KI_MODULE
