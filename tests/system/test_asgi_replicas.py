"""ASGI applications in several processes, on one store."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rigs.asgi import AsgiServer, MountedClient
from tests.wire.test_asgi import counting, first_id, opened

ROWS = 500


@pytest.fixture
def url(store_url: Callable[[str], str], tmp_path: Path) -> str:
    return f"{store_url('redis')}?prefix={tmp_path.name}"


@pytest.fixture(params=["uvicorn", "hypercorn-trio"])
def servers(
    url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[AsgiServer, AsgiServer]]:
    pair = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        server = AsgiServer(tmp_path / name, host=request.param)
        server.environment["JOURNAL"] = url
        pair.append(server)
    with pair[0] as one, pair[1] as other:
        yield one, other


def at(server: AsgiServer, client: MountedClient) -> MountedClient:
    """The same client, at another server."""
    elsewhere = MountedClient(server.port)
    elsewhere.session, elsewhere.revision = client.session, client.revision
    return elsewhere


def continued(client: MountedClient, last: str) -> list[int]:
    """The numbers that the rest of a call of `count` reports.

    A replica may end the event stream, as on a machine so busy that its lease is late.
    """
    seen: list[int] = []
    while True:
        for event in client.get(last).events():
            if event.data and "result" in event.message:
                return seen
            if event.data:
                seen.append(event.message.params["progress"])
            last = event.id or last


@pytest.mark.parametrize("fault", ["cut", "kill", "stop"])
def test_a_call_in_one_process_is_continued_in_the_other(
    servers: tuple[AsgiServer, AsgiServer], fault: str
) -> None:
    """The event stream is cut; or the process is killed; or it is told to end."""
    one, other = servers
    with opened(one) as client, at(other, client) as elsewhere:
        call = counting(client, ROWS)
        last = first_id(call)
        assert call.next_event().id
        match fault:
            case "cut":
                client.close()
            case "kill":
                one.end(signal.SIGKILL)
            case "stop":
                assert one.end() in (0, -signal.SIGTERM)
        assert continued(elsewhere, last) == list(range(1, ROWS + 1))
