"""The child of the suite `wrapped`: an MCP server over stdio, written by hand to be fast.

    python -m benchmarks.wrapped_app

`echo` returns its text. `fill` sends `count` numbered log messages of `size` bytes, and returns
their number. Each message is encoded and written by itself, as servers do. With a slower child the
suite would measure the child.
"""

import os
from typing import Any, Final

import msgspec

from benchmarks.numbered import FIRST, METHOD, params, text_for
from streams.messages import notification

_IN, _OUT = 0, 1
_READ_BYTES: Final = 64 * 1024

_SCHEMA: Final = {"type": "object"}
_HELLO: Final = {
    "capabilities": {"tools": {}, "logging": {}},
    "serverInfo": {"name": "benchmarks", "version": "1"},
}
_TOOLS: Final = [{"name": name, "inputSchema": _SCHEMA} for name in ("echo", "fill")]


class _Request(msgspec.Struct):
    method: str = ""
    id: int | str | None = None
    params: dict[str, Any] = {}


def _result(request: _Request) -> dict[str, Any]:
    match request.method:
        case "initialize":
            return {**_HELLO, "protocolVersion": request.params["protocolVersion"]}
        case "tools/list":
            return {"tools": _TOOLS}
        case "tools/call":
            return {"content": [{"type": "text", "text": _called(request.params)}]}
    return {}


def _called(called: dict[str, Any]) -> str:
    arguments = called["arguments"]
    if called["name"] == "echo":
        text: str = arguments["text"]
        return text
    count, text = arguments["count"], text_for(arguments["size"])
    for number in range(FIRST, FIRST + count):
        _write(notification(METHOD, params(number, text)))
    return str(count)


def _write(line: bytes) -> None:
    while line:
        line = line[os.write(_OUT, line) :]


def main() -> None:
    """Serve until standard input ends."""
    decode = msgspec.json.Decoder(_Request).decode
    encode = msgspec.json.Encoder().encode
    rest = b""
    while data := os.read(_IN, _READ_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        for line in filter(None, lines):
            request = decode(line)
            if request.method and request.id is not None:
                result = _result(request)
                _write(encode({"jsonrpc": "2.0", "id": request.id, "result": result}) + b"\n")


if __name__ == "__main__":
    main()
