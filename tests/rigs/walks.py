"""Traces the server's work for a client, from function to function and from file to file.

`sys.setprofile` traces a walk, in trio's thread and in those of the journal. A crossing is a call
from one file of the product into another. Frames between them (trio, the standard library) do not
count. A coroutine that continues counts as no new call.
"""

import dis
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import streams
import transports
from tests.rigs import ROOT

_FOLDERS: Final = tuple(str(Path(file).parent) for file in (streams.__file__, transports.__file__))


class Walk:
    """The functions that were called, as `package/module.py Class.function`, one entry a call."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.crossings = 0

    @property
    def files(self) -> set[str]:
        """The files of the walk."""
        return {step.partition(" ")[0] for step in self.steps}

    def follow(self, frame: FrameType, event: str, _: Any) -> None:
        """For `sys.setprofile`."""
        if event != "call" or not frame.f_code.co_filename.startswith(_FOLDERS):
            return
        if frame.f_code.co_name.startswith("<") or frame.f_lasti > _start_of(frame.f_code):
            return
        self.steps.append(f"{_file_of(frame)} {frame.f_code.co_qualname}")
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(_FOLDERS):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != frame.f_code.co_filename:
            self.crossings += 1

    def __str__(self) -> str:
        return f"{len(self.files)} files, {self.crossings} crossings, {len(self.steps)} calls"


@cache
def _start_of(code: CodeType) -> int:
    """The offset at which a call begins. A coroutine that continues is beyond that."""
    return next(each.offset for each in dis.get_instructions(code) if each.opname == "RESUME")


def _file_of(frame: FrameType) -> str:
    return str(Path(frame.f_code.co_filename).relative_to(ROOT))


class Guide:
    """Traces the threads that start from now on, while a walk is set."""

    def __init__(self) -> None:
        self._walk: Walk | None = None

    def _follow(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._walk is not None:
            self._walk.follow(frame, event, argument)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Enter this before the journal opens, so that the journal's threads are traced too."""
        threading.setprofile(self._follow)
        try:
            yield
        finally:
            threading.setprofile(None)

    @contextmanager
    def walk(self) -> Iterator[Walk]:
        """Trace the calls inside the block."""
        walk = self._walk = Walk()
        sys.setprofile(self._follow)
        try:
            yield walk
        finally:
            sys.setprofile(None)
            self._walk = None
