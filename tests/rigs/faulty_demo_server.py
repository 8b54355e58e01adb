"""The demo's server with a fault, which the folder's first file names; and one that is slow."""

from pathlib import Path

import trio

from streams import Call, Server
from streams.cli.selftest.demo import KILL
from streams.cli.selftest.demo_server import FILES_MAX, Digest, chained, digest_of, files_of

server = Server("faulty-demo", version="1", resume_min_s=0)


async def digest(call: Call, folder: str) -> Digest:
    """Lose the third file's messages, repeat the fifth's and corrupt the seventh's; or fail."""
    files = files_of(Path(folder))
    if files[0].read_text() == "fails":
        raise OSError("the disk is gone")
    whole = ""
    for number, path in enumerate(files, 1):
        found = digest_of(path)
        if number == 7:
            found = found[::-1]
        whole = chained(whole, found, path.relative_to(folder))
        for _ in range({3: 0, 5: 2}.get(number, 1)):
            await report(call, number, len(files))
    return Digest(files=len(files), messages=2 * len(files), digest=whole, continued_at=None)


async def slow(call: Call, folder: str) -> Digest:
    """Make no mistake, but wait for the kill."""
    files = files_of(Path(folder))
    continued_at = call.restored
    whole = ""
    for number, path in enumerate(files, 1):
        whole = chained(whole, digest_of(path), path.relative_to(folder))
        if number > (continued_at or 0):
            await report(call, number, len(files))
        if continued_at is None and number > KILL * len(files):
            await call.checkpoint(number)
            await trio.sleep_forever()
    return Digest(
        files=len(files), messages=2 * len(files), digest=whole, continued_at=continued_at
    )


async def slow_once(call: Call, folder: str) -> Digest:
    """Wait for the kill."""
    for number, _ in enumerate(files_of(Path(folder)), 1):
        await report(call, number, FILES_MAX)
    await trio.sleep_forever()
    raise AssertionError


async def report(call: Call, number: int, files: int) -> None:
    """Send the two messages of a file."""
    await call.log("info", {"number": number})
    await call.progress(number, total=files)


server.tool(digest, name="digest", restart=True)
server.tool(digest, name="digest_once")

slow_server = Server("slow-demo", version="1", resume_min_s=0)
slow_server.tool(slow, name="digest", restart=True)
slow_server.tool(slow_once, name="digest_once")
