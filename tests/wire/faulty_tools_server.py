"""A server whose tools raise unusual exceptions, never end, or fork."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NoReturn

import msgspec
import trio

from streams import Call, Server, SyncCall

server = Server("faults", resume_min_s=0, resume_max_s=600)


class OwnError(BaseException):
    pass


class WordlessError(BaseException):
    def __str__(self) -> str:
        raise SystemExit(7)


class NamelessKind(type):
    """A class that fails when it is asked for its name."""

    def __getattribute__(cls, name: str) -> Any:
        if name in ("__name__", "__qualname__", "__module__"):
            raise SystemExit(7)
        return super().__getattribute__(name)


class NamelessError(Exception, metaclass=NamelessKind):
    pass


class OpaqueError(Exception):
    """Fails when any attribute is read, `__class__` included, so `isinstance` fails too."""

    def __getattribute__(self, name: str) -> Any:
        raise ValueError(name)


class EndingError(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(7)


class OpaqueValueError(ValueError):
    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(7)

    def __str__(self) -> str:
        raise SystemExit(7)


class OddText(str):
    __slots__ = ()

    def __bool__(self) -> bool:
        raise SystemExit(7)


class OddlyWordedError(Exception):
    def __str__(self) -> str:
        return OddText("odd")


def deep_group() -> BaseException:
    error: Exception = ValueError("at the bottom")
    for _ in range(3000):
        error = ExceptionGroup("of one", [error])
    return error


# A `trio.Cancelled` whose scope no longer exists.
CANCELLED: list[BaseException] = []


async def keep_cancelled() -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled as cancelled:
            CANCELLED.append(cancelled)
            raise


KINDS: dict[str, Callable[[], BaseException]] = {
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "OwnError": lambda: OwnError("of the author"),
    "WordlessError": WordlessError,
    "CancelledError": asyncio.CancelledError,
    "Cancelled": lambda: CANCELLED[-1],
    "group": lambda: BaseExceptionGroup("some", [ValueError("one"), SystemExit(1)]),
    "nested": lambda: BaseExceptionGroup(
        "outer", [BaseExceptionGroup("inner", [KeyboardInterrupt()])]
    ),
    # Python's own `traceback` raises for this one: the offset is no number.
    "SyntaxError": lambda: SyntaxError("wrong", ("file", 1, "a", "text")),  # type: ignore[arg-type]
    "NamelessError": lambda: NamelessError("nameless"),
    "OpaqueError": lambda: OpaqueError("opaque"),
    "EndingError": lambda: EndingError("ending"),
    "OpaqueValueError": OpaqueValueError,
    "OddlyWordedError": OddlyWordedError,
    "deep": deep_group,
}


@server.tool
async def raising(kind: str) -> None:
    await keep_cancelled()
    raise KINDS[kind]()


@server.tool
async def raising_in_child_task(kind: str) -> None:
    await keep_cancelled()

    async def child() -> None:
        raise KINDS[kind]()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(child)
        nursery.start_soon(child)


@server.tool
def raising_in_thread(call: SyncCall, kind: str) -> None:
    call.log("info", "in a thread")
    trio.from_thread.run(keep_cancelled)
    raise KINDS[kind]()


@server.tool(restart=True)
async def raising_with_restart(call: Call, kind: str) -> None:
    await keep_cancelled()
    await call.checkpoint({"kind": kind})
    raise KINDS[kind]()


@server.tool(pages=True)
async def raising_page(kind: str) -> AsyncIterator[str]:
    await keep_cancelled()
    yield "a page"
    raise KINDS[kind]()


@server.tool(pages=True)
def raising_page_in_thread(kind: str) -> Iterator[str]:
    trio.from_thread.run(keep_cancelled)
    yield "a page"
    raise KINDS[kind]()


class Faulty(msgspec.Struct):
    kind: str

    def __post_init__(self) -> None:
        raise KINDS[self.kind]()


@server.tool
async def raising_argument(argument: Faulty) -> str:
    return argument.kind


class FaultyResult:
    """A result that raises while it is encoded."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @property
    def __class__(self) -> Any:
        raise KINDS[self.kind]()

    @__class__.setter
    def __class__(self, _: Any) -> None:
        raise AttributeError


@server.tool
async def raising_result(kind: str) -> Any:
    await keep_cancelled()
    return FaultyResult(kind)


@server.tool
async def raising_when_cancelled(kind: str) -> None:
    await keep_cancelled()
    try:
        await trio.sleep_forever()
    finally:
        raise KINDS[kind]()


# Tools that never end


@server.tool
async def shielded(call: Call) -> NoReturn:
    with trio.CancelScope(shield=True):
        await call.log("info", "started")
        await trio.sleep_forever()


@server.tool(restart=True)
async def shielded_with_restart(call: Call) -> NoReturn:
    with trio.CancelScope(shield=True):
        await call.log("info", "started")
        await trio.sleep_forever()


@server.tool
async def deaf(call: Call) -> NoReturn:
    await call.log("info", "started")
    while True:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.01)


@server.tool
async def spinning(call: Call) -> NoReturn:
    await call.log("info", "started")
    await call.flush()
    await trio.sleep(0.05)
    while True:
        pass


@server.tool
async def sleeping(call: Call) -> NoReturn:
    await call.log("info", "started")
    await call.flush()
    await trio.sleep(0.05)
    while True:
        time.sleep(1000)  # noqa: ASYNC251 # what a tool must not do


@server.tool
def endless_thread(call: SyncCall) -> NoReturn:
    call.log("info", "started")
    while True:
        time.sleep(1000)


@server.tool
def spinning_thread(call: SyncCall) -> NoReturn:
    call.log("info", "started")
    while True:
        pass


@server.tool
def leaving_a_thread(call: SyncCall) -> str:
    threading.Thread(target=time.sleep, args=[1000]).start()
    call.log("info", "started")
    return "left"


@server.tool
def leaving_a_process(call: SyncCall) -> str:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=[1000])
    child.start()
    call.log("info", "started")
    return str(child.pid)


# Tools that fork


def end_child(how: str) -> None:
    if how == "sys.exit":
        sys.exit(3)
    if how == "os._exit":
        os._exit(3)
    if how == "raise":
        raise ValueError("in the child")
    if how == "BaseException":
        raise OwnError("in the child")


def ended(child: int) -> str:
    _, status = os.waitpid(child, 0)
    return f"child: {os.waitstatus_to_exitcode(status)}"


@server.tool
def forking(how: str) -> str:
    child = os.fork()
    if child == 0:
        end_child(how)
        return "of the child"
    return ended(child)


@server.tool
async def forking_in_loop(call: Call, how: str) -> str:
    child = os.fork()
    if child == 0:
        if how == "await":
            await trio.lowlevel.checkpoint()
        if how == "call":
            await call.log("info", "of the child")
            await call.flush()
        end_child(how)
        return "of the child"
    return await trio.to_thread.run_sync(ended, child)


@server.tool
def forking_and_calling(call: SyncCall) -> str:
    child = os.fork()
    if child == 0:
        call.progress(1)
        call.log("info", "of the child")
    return ended(child)


@server.tool(pages=True)
def forking_page() -> Iterator[str]:
    yield "a page"
    child = os.fork()
    if child == 0:
        yield "of the child"
    yield ended(child)


@server.tool
def orphaning() -> str:
    """Leave a child that lives until it is told to end, and report its process id."""
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)  # which the test reads to its end
        signal.pause()
    return str(child)


def square(number: int) -> int:
    return number * number


@server.tool
def pooled() -> list[int]:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(square, range(4))


@server.tool
async def pooled_in_loop() -> list[int]:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(square, range(4))


@server.tool
def terminated() -> int:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=[60])
    process.start()
    process.terminate()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


@server.tool
def with_subprocess() -> str:
    return subprocess.run(
        [sys.executable, "-c", "print('child')"],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=os.getpid,
    ).stdout


@server.tool
async def add(a: int, b: int) -> int:
    return a + b
