"""The last answers of a remote server to `initialize` and to requests for lists, in a file.

A host drops a server that is not there when the host starts. With this file it gets an answer.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from streams import messages
from streams.files import write_whole
from streams.logs import log
from streams.protocol.listings import TOOLS, tools_on

# A larger file is not read, and not written: usual ones have some kilobytes.
FILE_BYTES_MAX: Final = 16 * 1024 * 1024

STALE: Final = "mcp-streams/stale"  # in the `_meta` of a result that was kept

Pages = dict[str, msgspec.Raw]
"""The pages of one list by their cursors; the first page has the cursor ""."""

Members = Mapping[str, msgspec.Raw]


class _File(msgspec.Struct):
    hello: dict[str, msgspec.Raw] | None = None
    lists: dict[str, Pages] = {}


# Pages of one list that are read to be kept.
PAGES_MAX: Final = 100


class Kept:
    """The hello and the lists. They are shared by all sessions with the server."""

    def __init__(self, path: Path | None) -> None:
        """Without a path, nothing outlives the process."""
        self.path = path
        self._kept = _File()
        self._saving = trio.Lock()
        self._is_changed = False
        self._told: Pages = {}  # the tools as a host was told them, since they were kept
        self._hints: dict[str, bool] | None = None  # of the tools on all these pages
        if path is not None:
            self._kept = _read(path)

    @property
    def hello(self) -> Members | None:
        """The members of the last answer to `initialize`; None if there was none."""
        return self._kept.hello

    def pages(self, method: str) -> Pages | None:
        """The pages of a list; None if it was never read."""
        return self._kept.lists.get(method)

    def is_hinted(self, tool: str) -> bool:
        """Whether the server says of a tool that a second run does no harm."""
        if self._hints is None:
            self._hints = {}
            for page in [*self._told.values(), *(self.pages(TOOLS) or {}).values()]:
                for each in tools_on(page):
                    self._hints.setdefault(each.name, each.is_hinted)
        return self._hints.get(tool, False)

    def note_tools(self, cursor: str, page: msgspec.Raw) -> None:
        """A host was told this page, perhaps before the list is kept."""
        if len(self._told) < PAGES_MAX or cursor in self._told:
            self._told[cursor] = page
            self._hints = None

    async def keep_hello(self, hello: dict[str, msgspec.Raw]) -> None:
        """Keep the answer to `initialize`."""
        await self._keep(self._kept.hello != hello, lambda: setattr(self._kept, "hello", hello))

    async def keep_pages(self, method: str, pages: Pages) -> None:
        """Keep all pages of a list."""
        if method == TOOLS:
            self._told.clear()
            self._hints = None
        is_new = self._kept.lists.get(method) != pages
        await self._keep(is_new, lambda: self._kept.lists.__setitem__(method, pages))

    async def _keep(self, is_new: bool, keep: Any) -> None:
        if not is_new:
            return
        keep()
        self._is_changed = True
        async with self._saving:
            if self._is_changed and self.path is not None:
                self._is_changed = False
                content = messages.encode(self._kept)
                await trio.to_thread.run_sync(_write, self.path, content)


def stale(result: bytes | Members) -> dict[str, Any]:
    """A kept result, with the mark of one in its `_meta`."""
    members: Members = (
        messages.decode(result, dict[str, msgspec.Raw]) if isinstance(result, bytes) else result
    )
    try:
        meta = messages.decode(members.get("_meta", b"{}"), dict[str, msgspec.Raw])
    except ValueError:
        meta = {}  # not an object
    return {**members, "_meta": {**meta, STALE: True}}


def _read(path: Path) -> _File:
    try:
        if path.stat().st_size <= FILE_BYTES_MAX:
            return messages.decode(path.read_bytes(), _File)
    except FileNotFoundError:
        pass  # the first start
    except (OSError, ValueError) as error:
        log.warning("what the server said last cannot be read", file=str(path), why=str(error))
    return _File()


def _write(path: Path, content: bytes) -> None:
    try:
        if len(content) <= FILE_BYTES_MAX:
            write_whole(path, content, os.replace)
    except OSError as error:  # the server itself answers, as long as it is there
        log.warning("what the server says cannot be kept", file=str(path), why=str(error))
