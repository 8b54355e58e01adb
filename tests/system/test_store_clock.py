"""Replicas on machines whose clocks differ tell the time by the store's clock."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

import pytest

from tests.rigs.redis_servers import running
from tests.wire.httpclient import HttpClient
from tests.wire.process import ServerProcess
from tests.wire.verbs import POSITIONS, Reader, start

APP: Final = '''
import time

time.time = lambda real=time.time: real() + {ahead_s}

import trio
from streams import Call, Server

server = Server("clocks", resume_min_s=0)


@server.tool(restart=True)
async def tick(call: Call) -> str:
    """Count."""
    for number in range(10_000):
        await call.log("info", number)
        await trio.sleep(0.02)
    return "done"
'''
AHEAD_S: Final = (0, 0, 3 * 86_400)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    """Three replicas. The clock of the last one is ahead."""
    with ExitStack() as stack:
        store = stack.enter_context(running("redis", tmp_path / "store", "--appendonly", "yes"))
        servers = []
        for number, ahead_s in enumerate(AHEAD_S):
            folder = tmp_path / str(number)
            folder.mkdir()
            app = folder / "app.py"
            app.write_text(APP.format(ahead_s=ahead_s))
            server = ServerProcess(
                folder, app=f"{app}:server", store=f"{store.url}/0", options=("--lease=0.5",)
            )
            servers.append(stack.enter_context(server))
        yield servers


def test_a_session_is_no_older_elsewhere(servers: list[ServerProcess]) -> None:
    here, _, ahead = servers
    client, elsewhere = HttpClient(here.http_port), HttpClient(ahead.http_port)
    with closing(client), closing(elsewhere):
        client.initialize(POSITIONS)
        elsewhere.session, elsewhere.revision = client.session, client.revision
        assert elsewhere.ask("ping").result == {}


def test_after_a_take_over_the_newest_client_wins(servers: list[ServerProcess]) -> None:
    owner, right, ahead = servers
    with owner.connect("ws-streams") as peer:
        peer.initialize(POSITIONS)
        call = start(peer, "tick")
    owner.kill()
    with ahead.connect("ws-streams") as older, right.connect("ws-streams") as newer:
        asked = []
        for last, peer in ((5, older), (100, newer)):
            peer.initialize(POSITIONS)
            asked.append(peer.request("stream/resume", call.with_token))
            Reader(peer).until_seq(call.stream, last)
        ended = older.response(asked[0]).result["_meta"]
        assert ended == {"mcp-streams/ended": "superseded"}
