"""Exceptions from the code of a tool.

Each of them, `SystemExit` included, is the failure of one call: a tool cannot end the process. Two
exceptions are not the tool's own and pass through: the cancellation of the tool's task, and the
`KeyboardInterrupt` that trio raises for a real Ctrl-C, in any code.

The author may also have written the exception's class: `__str__`, `__getattribute__` and the
metaclass may raise. So this module reads classes and attributes without running their code. The
text and the traceback cannot be had without it, so there each error is caught.
"""

import math
import traceback
from collections.abc import Callable, Iterator
from types import CoroutineType
from typing import Any, Final, TypeVar

import trio

from streams.errors import ToolError
from streams.logs import log

_T = TypeVar("_T")

# Read as C code reads them: without the `__getattribute__` of the exception's class.
_name_of: Final[Callable[[type], str]] = type.__dict__["__name__"].__get__
_traceback_of: Final[Callable[[BaseException], Any]] = BaseException.__dict__[
    "__traceback__"
].__get__
_cause_of: Final[Callable[[BaseException], BaseException | None]] = BaseException.__dict__[
    "__cause__"
].__get__
_errors_of: Final[Callable[[BaseException], tuple[BaseException, ...]]] = (
    BaseExceptionGroup.__dict__["exceptions"].__get__
)

TOLD_MAX: Final = 20  # errors of one group, so that the result stays short enough to be read

_KI_MODULE: Final = "trio._core._ki"  # its signal handler raises the real KeyboardInterrupt


async def let_pass(error: BaseException) -> None:
    """Raise `error` once more if it is not the tool's own. Await this where it was caught.

    A `trio.Cancelled` proves nothing, since a tool can keep one and raise it later. So this checks
    whether the task is cancelled, and lets trio raise.
    """
    let_signal_pass(error)
    await trio.lowlevel.checkpoint_if_cancelled()


def let_signal_pass(error: BaseException) -> None:
    """Raise `error` once more if it holds a real Ctrl-C. Call this where it was caught."""
    if any(map(_is_signal, leaves_of(error))):
        raise error


def is_failure(error: BaseException) -> bool:
    """Whether `error`, or an error in the group, is the tool's own."""
    is_cancelled = trio.current_effective_deadline() == -math.inf
    return not all(
        (is_cancelled and is_kind(leaf, trio.Cancelled)) or _is_signal(leaf)
        for leaf in leaves_of(error)
    )


def is_kind(error: BaseException, kind: type[BaseException]) -> bool:
    """Like `isinstance`, but ignores an overridden `__class__`."""
    return type.__subclasscheck__(kind, type(error))


def is_caused_by_failure(error: ValueError) -> bool:
    """Whether an error of another kind than `ValueError` has become this one."""
    cause = _cause_of(error)
    return cause is not None and not is_kind(cause, ValueError)


def kind_of(error: BaseException) -> str:
    """The name of an error's class."""
    return _name_of(type(error))


def text_of(error: BaseException) -> str:
    """The text of an error, for the client: of a group, the errors that it holds."""
    if not is_kind(error, BaseExceptionGroup):
        return _own_text(error)
    told = told_of(error)
    if len(told) == 1:
        return _own_text(told[0])
    texts = map(_named_text, told[:TOLD_MAX])
    more = f"; and {len(told) - TOLD_MAX} more" if len(told) > TOLD_MAX else ""
    return f"{len(told)} errors: {'; '.join(texts)}{more}"


def told_of(error: BaseException) -> list[BaseException]:
    """The errors that a client is told of: without cancellations, where there is anything else."""
    leaves = list(leaves_of(error))
    return [leaf for leaf in leaves if not is_kind(leaf, trio.Cancelled)] or leaves


def _named_text(error: BaseException) -> str:
    kind, text = kind_of(error), _own_text(error)
    is_named = text == kind or text.startswith(f"{kind}: ")
    return text if is_named or is_kind(error, ToolError) else f"{kind}: {text}"


def _own_text(error: BaseException) -> str:
    """The text of one error. Its `__str__` may fail."""
    kind = kind_of(error)
    try:
        text = str.__str__(str(error))  # `str` may return an instance of the author's subclass
    except BaseException as trouble:
        _raise_signal(trouble)
        return kind
    if is_kind(error, Exception):
        return text or kind
    return f"{kind}: {text}" if text else kind


def log_failure(event: str, error: BaseException, **details: Any) -> None:
    """Log an error with its traceback. Raises only a real Ctrl-C.

    Rendering a traceback runs code of the error's class. Python's `traceback` also fails for some
    errors: a `SyntaxError` whose offset is not a number, groups 1,000 deep. Then the log gets the
    frames and the name of the class.
    """
    try:
        log.error(event, exc_info=(type(error), error, _traceback_of(error)), **details)
    except BaseException as trouble:
        _raise_signal(trouble)
        try:
            log.error(event, exception=_plain_traceback(error, trouble), **details)
        except BaseException as worse:
            _raise_signal(worse)  # the log itself fails, so any other error cannot be logged


def _plain_traceback(error: BaseException, trouble: BaseException) -> str:
    frames = "".join(traceback.format_tb(_traceback_of(error)))
    return f"{frames}{kind_of(error)} (it cannot be shown: {kind_of(trouble)})"


async def run_in_thread(work: Callable[[], _T], limiter: trio.CapacityLimiter) -> _T:
    """Run a tool's function in a thread, which is abandoned when the task is cancelled.

    Raises the function's exception. It leaves the thread as a value: trio would examine it with the
    code of its class. If that failed, the thread would end without a result and never return its
    token to the limiter.
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
            del done  # its traceback refers to this frame: a reference cycle
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
