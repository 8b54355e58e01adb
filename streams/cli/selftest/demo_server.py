"""The demo's server: one tool, which reads every file of a folder."""

import hashlib
import os
from pathlib import Path
from typing import TypedDict

import trio

from streams.server.call import Call
from streams.server.server import Server

# Python writes into the first at any time, and the second does not belong to it.
SKIPPED = frozenset({"__pycache__", "site-packages"})

server = Server("demo", version="1", resume_min_s=0)


class Digest(TypedDict):
    """The result for a folder."""

    files: int
    messages: int
    digest: str


def files_of(folder: Path) -> list[Path]:
    """The readable files, in order."""
    inside = (path for path in folder.rglob("*") if not SKIPPED & set(path.parts))
    return sorted(path for path in inside if path.is_file() and os.access(path, os.R_OK))


def digest_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@server.tool
async def digest(call: Call, folder: str) -> Digest:
    """Report the SHA-256 of every file in a folder, and one digest over all of them."""
    root = Path(folder)
    files = await trio.to_thread.run_sync(files_of, root)
    whole = hashlib.sha256()
    for number, path in enumerate(files, 1):
        found = await trio.to_thread.run_sync(digest_of, path)
        name = str(path.relative_to(root))
        whole.update(f"{found}  {name}\n".encode())
        await call.log("info", {"number": number, "file": name, "sha256": found})
        await call.progress(number, total=len(files), message=name)
    return Digest(files=len(files), messages=2 * len(files), digest=whole.hexdigest())
