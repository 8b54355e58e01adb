"""The raw clients of the benchmarks: they take everything, and notice what is not there."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from benchmarks import rawclient
from benchmarks.numbered import Lost, lines_of
from benchmarks.rawcheck import check_runs
from benchmarks.rawclient import Resumed
from benchmarks.servers import (
    APP,
    http_server,
    stdio_command,
    stdio_server,
    websocket_server,
)
from streams.messages import POSITION
from tests.rigs import HERE

COUNT, SIZE = 3_000, 200
FAULTY = HERE / "faulty_fill.py"

Client = Callable[[int, int], Resumed]


async def resume(name: str, app: str, folder: Path) -> Resumed:
    journal = folder / "journal.db"
    if name == "stdio":
        async with stdio_server(app, journal):
            return await run(partial(rawclient.stdio, stdio_command(app, journal)))
    server = websocket_server if name.startswith("websocket") else http_server
    async with server(app, journal) as served:
        return await run(partial(getattr(rawclient, name), served.url))


async def run(client: Client) -> Resumed:
    return await trio.to_thread.run_sync(client, COUNT, SIZE)


every_client = pytest.mark.parametrize(
    "name", ["stdio", "websocket_lines", "websocket_messages", "http_lines", "sse"]
)


@every_client
async def test_all_that_follows_the_first_message_is_there(name: str, tmp_path: Path) -> None:
    resumed = await resume(name, APP, tmp_path)
    assert resumed.messages == COUNT
    assert resumed.bytes == (COUNT - 1) * SIZE
    assert resumed.seconds > 0


@every_client
async def test_a_message_that_is_missing_is_noticed(name: str, tmp_path: Path) -> None:
    with pytest.raises(Lost):
        await resume(name, f"{FAULTY}:lossy", tmp_path)


async def again(url: str, times: int) -> list[Resumed]:
    """So many resumes of the same call."""

    def run() -> list[Resumed]:
        resumes = rawclient.websocket_again(url, COUNT, SIZE)
        return [next(resumes) for _ in range(times)]

    return await trio.to_thread.run_sync(run)


async def test_the_same_call_is_resumed_again_and_again(tmp_path: Path) -> None:
    async with websocket_server(APP, tmp_path / "journal.db") as served:
        resumes = await again(served.url, 3)
    assert [resumed.messages for resumed in resumes] == [COUNT] * 3


@pytest.mark.parametrize("mistake", ["lossy", "twisted", "curt"])
async def test_a_mistake_in_a_call_that_is_resumed_again_is_noticed(
    mistake: str, tmp_path: Path
) -> None:
    async with websocket_server(f"{FAULTY}:{mistake}", tmp_path / "journal.db") as served:
        with pytest.raises(Lost):
            await again(served.url, 1)


_HEADER = (
    b'{"jsonrpc":"2.0","method":"%b","params":{"streamId":"a","seq":%%d,"count":%%d}}\n'
    % POSITION.encode()
)
_RESULT = b'{"jsonrpc":"2.0","id":1,"result":{}}\n'


def runs(*counts: int, result: bytes = _RESULT) -> bytes:
    """Messages 2 and on in runs of these sizes, and the result in a run of its own."""
    lines = list(lines_of(sum(counts) + 1, SIZE))
    parts, seq = [], 2
    for count in counts:
        parts += [_HEADER % (seq, count), *lines[seq - 1 : seq - 1 + count]]
        seq += count
    return b"".join([*parts, _HEADER % (seq, 1), result])


def test_runs_are_compared_with_all_messages() -> None:
    whole = b"".join(list(lines_of(6, SIZE))[1:])
    check_runs(runs(2, 3), whole, SIZE)
    check_runs(runs(5), whole, SIZE)
    together = runs(5).replace(_HEADER % (7, 1), b"").replace(_HEADER % (2, 5), _HEADER % (2, 6))
    check_runs(together, whole, SIZE)
    wrong = {
        "a message is missing": runs(2, 2),
        "a message is another": runs(5).replace(b"1000000003", b"1000000004"),
        "a run is missing": runs(2, 3).replace(_HEADER % (2, 2), _HEADER % (1, 2)),
        "there is no result": runs(5, result=b""),
        "the result is an error": runs(5, result=b'{"id":1,"result":{"isError":true}}\n'),
    }
    for came in wrong.values():
        with pytest.raises(Lost):
            check_runs(came, whole, SIZE)
