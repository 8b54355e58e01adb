"""Very many attached and idle connections on one server, half over HTTP, half over WebSocket.

Small by default; `SCALE=full pytest tests/acceptance/test_attached.py -s --timeout 900` opens
nearly as many as a server takes, and waits until each has been pinged. It needs 20,000 file
descriptors.
"""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import trio

from benchmarks.events import Response, Session
from benchmarks.servers import APP
from benchmarks.sockets import Socket
from tests.acceptance.load import Scale, rss_mib
from tests.wire.process import ServerProcess

T = TypeVar("T")

SCALE: Final = Scale.chosen()
AT_ONCE: Final = 20
PATIENCE_S: Final = 600.0
# Pings go out every 15 s; a round of so many takes some more.
ASKED_WITHIN_S: Final = 45.0
KEEP_ALIVE: Final = b":\n\n"
PING: Final = 0x89
CLOSE: Final = 0x88


async def test_thousands_that_wait_are_held_asked_for_life_and_let_go_in_good_order(
    tmp_path: Path,
) -> None:
    with ServerProcess(tmp_path, app=APP) as server, trio.fail_after(PATIENCE_S):
        http_url = f"http://127.0.0.1:{server.http_port}"
        responses = await _all(lambda: _wait_over_http(http_url))
        sockets = await _all(lambda: _wait_over_websocket(server.url))
        print({"attached": len(responses) + len(sockets), "mib": rss_mib(server.pid)})
        if SCALE.is_timed:
            await trio.sleep(ASKED_WITHIN_S)
        other = await Session.opened(http_url, {})
        assert await other.ask("ping", {}, request_id=1) == {}
        asked_at = time.perf_counter()
        assert await trio.to_thread.run_sync(server.stop) == 0
        print({"shutdown_s": time.perf_counter() - asked_at})
        for response in responses:
            with response:
                _check_response(await _to_the_end(response))
        for websocket in sockets:
            with websocket:
                await websocket.read_to_the_end()
                _check_websocket(websocket)


async def _all(attach: Callable[[], Awaitable[T]]) -> list[T]:
    limiter = trio.CapacityLimiter(AT_ONCE)
    attached: list[T] = []

    async def one() -> None:
        async with limiter:
            attached.append(await attach())

    async with trio.open_nursery() as nursery:
        for _ in range(SCALE.attached):
            nursery.start_soon(one)
    return attached


async def _wait_over_http(url: str) -> Response:
    session = await Session.opened(url, {})
    return await session.wait()


async def _wait_over_websocket(url: str) -> Socket:
    websocket = Socket(url)
    await websocket.open()
    await websocket.wait()
    return websocket


async def _to_the_end(response: Response) -> bytes:
    came = b""
    while data := await response.read():
        came += data
    return came


def _check_response(came: bytes) -> None:
    assert came.count(b'"reason":"interrupted"') == 1, came
    assert came.endswith(b"\n\n")
    assert not SCALE.is_timed or came.startswith(KEEP_ALIVE)


def _check_websocket(websocket: Socket) -> None:
    opcodes = websocket.opcodes()
    assert bytes(websocket.came).count(b'"reason":"interrupted"') == 1, websocket.came
    assert opcodes[-1] == CLOSE
    assert not SCALE.is_timed or PING in opcodes
