"""The command of a wrapped torture run: an MCP server over stdio that knows nothing of streams.

    python -S torture_child.py NOTES

It starts in some milliseconds, since it is killed all the time: it imports the standard library
only. Its tools are those of the torture's server, and write down the same in the folder NOTES. It
also leaves a file with its process id there, so that it can be found and killed.
"""

import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

CHILDREN: Final = "children"  # the folder, among the notes, of the process ids
RUNS: Final = "runs"  # the file of the runs, among the notes
LAST_WORDS: Final = "torture child, from its start to its end"  # on standard error

_OUT: Final = 1
_writing: Final = threading.Lock()
_HELLO: Final = {
    "capabilities": {"tools": {}, "logging": {}},
    "serverInfo": {"name": "torture-child", "version": "1"},
}
_TOOLS: Final = [
    {"name": name, "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": may_rerun}}
    for name, may_rerun in (("work", False), ("short", False), ("lasting", True), ("reading", True))
]


def proof_of(name: str, number: int) -> str:
    """The hash that proves a message's call and number."""
    return hashlib.sha256(f"{name} {number}".encode()).hexdigest()


def note_run(notes: Path, name: str) -> None:
    """Write down that a tool was run. A process that is killed leaves this in the file."""
    with (notes / RUNS).open("a") as file:
        file.write(f"{name}\n")


def serve(notes: Path) -> None:
    """Answer each request, the calls of tools each in a thread, until standard input ends."""
    (notes / CHILDREN / str(os.getpid())).touch()
    print(LAST_WORDS, file=sys.stderr, flush=True)
    for line in sys.stdin.buffer:
        message = json.loads(line)
        if "id" not in message or "method" not in message:
            continue
        if message["method"] == "tools/call":
            threading.Thread(target=_call, args=(message, notes), daemon=True).start()
        else:
            _answer(message, _result(message))


def _result(request: Any) -> Any:
    match request["method"]:
        case "initialize":
            return {**_HELLO, "protocolVersion": request["params"]["protocolVersion"]}
        case "tools/list":
            return {"tools": _TOOLS}
    return {}


def _call(request: Any, notes: Path) -> None:
    """Send `count` numbered messages at a pace, and the result."""
    tool, given = request["params"]["name"], request["params"]["arguments"]
    name, count, per_second = given["name"], given["count"], given["per_second"]
    if tool not in ("lasting", "reading"):
        note_run(notes, name)
    began_at = time.monotonic()
    for number in range(1, count + 1):
        if tool in ("work", "lasting"):
            time.sleep(max(0.0, began_at + number / per_second - time.monotonic()))
        entry = {"call": name, "number": number, "proof": proof_of(name, number)}
        params = {"level": "info", "data": entry}
        _send({"jsonrpc": "2.0", "method": "notifications/message", "params": params})
    if tool in ("short", "reading") and per_second:
        time.sleep(1 / per_second)
    text = {"type": "text", "text": f"{count} messages"}
    _answer(request, {"content": [text], "structuredContent": {"messages": count}})


def _answer(request: Any, result: Any) -> None:
    _send({"jsonrpc": "2.0", "id": request["id"], "result": result})


def _send(message: Any) -> None:
    line = memoryview(json.dumps(message).encode() + b"\n")
    with _writing:
        while line:
            line = line[os.write(_OUT, line) :]


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
