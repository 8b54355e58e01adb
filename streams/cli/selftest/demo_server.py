"""The demo's server: its tools read every file of a folder."""

import hashlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypedDict

import trio

from streams.server.call import Call
from streams.server.server import Server

# Python may change the first at any time, and the second is not part of it.
SKIPPED = frozenset({"__pycache__", "site-packages"})

# After so many files the tool waits for the disk. So it takes some seconds, as real work does, and
# the demo can kill its server meanwhile.
STORED_FILES: Final = 2

FILES_MAX: Final = 600  # for a demo of seconds, where each file has two messages

server = Server("demo", version="1", resume_min_s=0)


class Digest(TypedDict):
    """The result for a folder."""

    files: int
    messages: int
    digest: str
    continued_at: int | None  # the files that were done at the last restart; None without one


def files_of(folder: Path) -> list[Path]:
    """The first readable files, in order. Messages cannot name a file whose name is not UTF-8."""
    inside = (path for path in folder.rglob("*") if not SKIPPED & set(path.parts))
    inside = (path for path in inside if str(path) == str(path).encode(errors="ignore").decode())
    readable = sorted(path for path in inside if path.is_file() and os.access(path, os.R_OK))
    return readable[:FILES_MAX]


def digest_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def chained(whole: str, found: str, name: Path) -> str:
    """The digest over all files so far, after one more. Unlike a hash object it can be stored."""
    return hashlib.sha256(f"{whole}{found}  {name}\n".encode()).hexdigest()


@server.tool(restart=True)
async def digest(call: Call, folder: str) -> Digest:
    """Report the SHA-256 of every file in a folder, and one digest over all of them."""
    if call.restored is None:
        await call.checkpoint((0, ""))
    continued_at, whole = call.restored or (None, "")
    return await _digest(call, Path(folder), call.checkpoint, continued_at, whole)


@server.tool
async def digest_once(call: Call, folder: str) -> Digest:
    """The same, as a tool that cannot be run again."""

    async def store(_: object) -> None:
        await call.flush()

    return await _digest(call, Path(folder), store, None, "")


async def _digest(
    call: Call,
    root: Path,
    store: Callable[[tuple[int, str]], Awaitable[None]],
    continued_at: int | None,
    whole: str,
) -> Digest:
    files = await trio.to_thread.run_sync(files_of, root)
    for number, path in enumerate(files[continued_at:], 1 + (continued_at or 0)):
        found = await trio.to_thread.run_sync(digest_of, path)
        name = path.relative_to(root)
        whole = chained(whole, found, name)
        await call.log("info", {"number": number, "file": str(name), "sha256": found})
        await call.progress(number, total=len(files), message=str(name))
        if number % STORED_FILES == 0:
            await store((number, whole))
    return Digest(
        files=len(files), messages=2 * len(files), digest=whole, continued_at=continued_at
    )
