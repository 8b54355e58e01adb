"""The limit of short calls over HTTP: servers that parse a request and answer it, and no more.

    python -m benchmarks.bare trio        h11 and trio
    python -m benchmarks.bare uvicorn     an ASGI app under uvicorn, with httptools

Their answers have the bytes of ours: the result of `echo`, as JSON.
"""

import sys
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any, Final

import h11
import msgspec
import trio
import uvicorn

READ_BYTES: Final = 64 * 1024
_HEADERS: Final = [(b"content-type", b"application/json")]


class _Arguments(msgspec.Struct):
    text: str


class _Params(msgspec.Struct):
    arguments: _Arguments


class _Call(msgspec.Struct):
    id: int
    params: _Params


_decode: Final = msgspec.json.Decoder(_Call).decode


def answer(body: bytes) -> bytes:
    """The result of `echo`, as a line."""
    call = _decode(body)
    content = [{"type": "text", "text": call.params.arguments.text}]
    result = {"jsonrpc": "2.0", "id": call.id, "result": {"content": content}}
    return msgspec.json.encode(result) + b"\n"


async def serve_trio() -> None:
    """Serve on a free port of loopback, and print the address."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    print(f"http://127.0.0.1:{port}", flush=True)
    await trio.serve_listeners(_serve, listeners)


async def _serve(stream: trio.SocketStream) -> None:
    http = h11.Connection(h11.SERVER)
    async with stream:
        while (body := await _body(stream, http)) is not None:
            said = answer(body)
            headers = [*_HEADERS, (b"content-length", b"%d" % len(said))]
            events = [
                h11.Response(status_code=200, headers=headers, reason=b"OK"),
                h11.Data(data=said),
                h11.EndOfMessage(),
            ]
            await stream.send_all(b"".join(http.send(event) or b"" for event in events))
            http.start_next_cycle()


async def _body(stream: trio.SocketStream, http: h11.Connection) -> bytes | None:
    """The body of the next request, or None where the client has gone."""
    body = b""
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await stream.receive_some(READ_BYTES))
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return body
        elif isinstance(event, h11.ConnectionClosed):
            return None


_Event = MutableMapping[str, Any]


async def app(
    scope: _Event,
    receive: Callable[[], Awaitable[_Event]],
    send: Callable[[_Event], Awaitable[None]],
) -> None:
    """The same as an ASGI app."""
    assert scope["type"] == "http"
    body, is_more = b"", True
    while is_more:
        event = await receive()
        body += event.get("body", b"")
        is_more = event.get("more_body", False)
    said = answer(body)
    headers = [*_HEADERS, (b"content-length", b"%d" % len(said))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": said})


serve_uvicorn: Final = partial(
    uvicorn.run,
    app,
    host="127.0.0.1",
    port=0,
    http="httptools",
    loop="asyncio",
    lifespan="off",
    access_log=False,
)

if __name__ == "__main__":
    if sys.argv[1] == "trio":
        trio.run(serve_trio)
    else:
        serve_uvicorn()
