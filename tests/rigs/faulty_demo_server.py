"""The demo's server with a fault. The folder's first file names the fault."""

import hashlib
from pathlib import Path

from streams import Call, Server
from streams.cli.selftest.demo_server import Digest, digest_of, files_of

server = Server("faulty-demo", version="1", resume_min_s=0)


@server.tool
async def digest(call: Call, folder: str) -> Digest:
    """Lose the third file's messages, repeat the fifth's and corrupt the seventh's; or fail."""
    files = files_of(Path(folder))
    if files[0].read_text() == "fails":
        raise OSError("the disk is gone")
    whole = hashlib.sha256()
    for number, path in enumerate(files, 1):
        found = digest_of(path)
        if number == 7:
            found = found[::-1]
        whole.update(f"{found}  {path.relative_to(folder)}\n".encode())
        for _ in range({3: 0, 5: 2}.get(number, 1)):
            await call.log("info", {"number": number})
            await call.progress(number, total=len(files))
    return Digest(files=len(files), messages=2 * len(files), digest=whole.hexdigest())
