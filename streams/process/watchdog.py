"""Notices a handler that keeps everybody else waiting.

All handlers take turns on one thread: one that computes for long, or waits without `await`, holds
up all connections. A thread of its own asks for a turn now and then, and looks where the other one
stands when it is not given one.
"""

import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import trio

import streams
from streams.clock import steady
from streams.logs import log

LOOKS: Final = 4  # for a turn, in the time that one may take
GRACE_S: Final = 0.05  # a process that was stopped and goes on is not to blame

# Where nobody looks for the reason: in our own code, and in what it and everybody's runs on.
_OURS: Final = tuple(
    f"{folder}{os.sep}"
    for folder in (
        Path(streams.__file__).parent,
        Path(streams.__file__).parent.with_name("transports"),
        Path(trio.__file__).parent,
    )
)
_LIBRARY: Final = f"{sysconfig.get_path('stdlib')}{os.sep}"
_PACKAGES: Final = ("site-packages", "dist-packages")


@contextmanager
def watched(patience_s: float, name_of: Callable[[FrameType], str | None]) -> Iterator[None]:
    """Watch the trio program that this block is in: what takes longer than `patience_s` is logged,
    and again when it is over. 0 watches nothing.

    `name_of` knows which tool a frame belongs to, if it is one that tells.
    """
    if not patience_s:
        yield
        return
    watchdog = _Watchdog(patience_s, name_of)
    threading.Thread(target=watchdog.run, name="mcp-streams watchdog", daemon=True).start()
    try:
        yield
    finally:
        watchdog.is_over.set()


class _Watchdog:
    def __init__(self, patience_s: float, name_of: Callable[[FrameType], str | None]) -> None:
        self.is_over = threading.Event()
        self._patience_s = patience_s
        self._name_of = name_of
        self._token = trio.lowlevel.current_trio_token()
        self._watched = threading.get_ident()

    def run(self) -> None:
        while not self.is_over.wait(self._patience_s / LOOKS):
            turn = threading.Event()
            asked_at = steady()
            try:
                self._token.run_sync_soon(turn.set)
            except trio.RunFinishedError:
                return
            if not (turn.wait(self._patience_s) or turn.wait(GRACE_S)):
                self._report(turn, asked_at)

    def _report(self, turn: threading.Event, asked_at: float) -> None:
        found = self._found()
        log.warning("a handler holds up everybody else", **found, for_s=self._patience_s)
        while not turn.wait(self._patience_s):
            if self.is_over.is_set():
                return
        took_s = round(steady() - asked_at, 1)
        log.warning("nobody is held up any more", **found, took_s=took_s)

    def _found(self) -> dict[str, str]:
        """Which tool it is, where that can be told, and where it stands."""
        frame = sys._current_frames().get(self._watched)
        frames = []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        named = next(filter(None, map(self._name_of, frames)), None)
        blamed = next((each for each in frames if _is_tool_code(each)), frames[0])
        code = blamed.f_code
        where = f"{code.co_filename}:{blamed.f_lineno} in {code.co_name}"
        return {"at": where} if named is None else {"tool": named, "at": where}


def _is_tool_code(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    is_library = path.startswith(_LIBRARY) and not any(part in path for part in _PACKAGES)
    return not (is_library or path.startswith((*_OURS, "<")))
