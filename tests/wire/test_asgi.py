"""A server in an ASGI application: real ASGI servers, real sockets, real signals."""

import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from h2.connection import H2Connection

from tests.rigs.asgi import HOSTS, AsgiServer, MountedClient
from tests.wire.raw import DEADLINE_S
from tests.wire.rawhttp import Exchange

STREAMS = 200


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def server(host: str, tmp_path: Path) -> Iterator[AsgiServer]:
    with AsgiServer(tmp_path, host=host) as server:
        yield server


def opened(server: AsgiServer, prefix: str = "/tools") -> MountedClient:
    client = MountedClient(server.port, prefix)
    client.initialize({})
    return client


def first_id(exchange: Exchange) -> str:
    """The id of the first event."""
    event = exchange.head().next_event()
    assert event.id is not None
    return event.id


def progress(exchange: Exchange) -> list[int]:
    """The numbers that the rest of a call of `count` reports; its last event is the result."""
    found = [event.message for event in exchange.events() if event.data]
    assert found[-1].result["content"]
    return [message.params["progress"] for message in found[:-1]]


def begun(exchange: Exchange, count: int) -> tuple[list[int], str]:
    """The first numbers that a call of `count` reports, and the id of their last event."""
    last, seen = first_id(exchange), list[int]()
    while len(seen) < count:
        event = exchange.next_event()
        last, seen = str(event.id), [*seen, event.message.params["progress"]]
    return seen, last


def counting(client: MountedClient, rows: int, id: int | str = 1) -> Exchange:
    params = {"name": "count", "arguments": {"rows": rows}, "_meta": {"progressToken": 1}}
    return client.request("tools/call", params, id=id)


def test_calls_cuts_and_resumes(server: AsgiServer) -> None:
    with opened(server) as client:
        assert {tool["name"] for tool in client.ask("tools/list").result["tools"]} >= {"count"}
        call = counting(client, 100)
        seen, last = [], first_id(call)
        while len(seen) < 20:
            event = call.next_event()
            last, seen = str(event.id), [*seen, event.message.params["progress"]]
        call.cut()
        seen += progress(client.get(last).head())
        assert seen == list(range(1, 101))
        assert client.delete().head().status == 200


def test_what_the_asgi_server_took_does_not_count_as_delivered(server: AsgiServer) -> None:
    """The client reads nothing but the id; all was sent, and all comes again."""
    with opened(server) as client:
        call = counting(client, 50)
        last = first_id(call)
        assert progress(call) == list(range(1, 51))  # the server has sent it to the end
        server.end(signal.SIGKILL)
        server.start()
        assert progress(client.get(last).head()) == list(range(1, 51))


def test_a_kill_during_the_work_loses_nothing(server: AsgiServer) -> None:
    with opened(server) as client:
        call = counting(client, 300)
        seen, last = begun(call, 50)
        server.end(signal.SIGKILL)
        server.start()
        seen += progress(client.get(last).head())
        assert seen == list(range(1, 301))


def stalled(client: MountedClient) -> socket.socket:
    """A client that reads the head of a response, and nothing more of its megabytes."""
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.connect(("127.0.0.1", client.port))
    params = {"name": "flood", "arguments": {"lines": 3_000}}
    body = json.dumps({"jsonrpc": "2.0", "id": "f", "method": "tools/call", "params": params})
    reader.sendall(client.post_bytes(body.encode()))
    assert reader.recv(100)
    return reader


def test_sigterm_with_two_hundred_streams_and_a_stalled_reader(server: AsgiServer) -> None:
    with opened(server) as client:
        calls = [client.call("wait", id=number) for number in range(STREAMS)]
        ids = [first_id(call) for call in calls]
        for call in calls[::10]:
            call.cut()  # hang-ups
        with stalled(client):
            assert client.ask("ping", id="ping").result == {}
            assert counting(client, 3, id="count").head().status == 200
            # `end` bounds a hang. An ASGI server that waits for these clients has no end.
            assert server.end() in (0, -signal.SIGTERM)
        server.start()  # the journal is free: its lock was released
        for last in (ids[0], ids[1], ids[-1]):
            events = [event.message for event in client.get(last).head().events() if event.data]
            assert events[0].params["data"] == 1
            assert events[-1].error["data"]["reason"] == "interrupted"


def test_a_hang_up_detaches_the_call(server: AsgiServer) -> None:
    """A client that hangs up may use the id of its request again at once."""
    with opened(server) as client:
        for _ in range(5):
            call = client.call("wait", id=7)
            first_id(call)
            call.cut()
            time.sleep(0.2)


def test_a_tool_may_use_the_loop_of_the_host(tmp_path: Path) -> None:
    with AsgiServer(tmp_path) as server, opened(server) as client:
        result = client.read_one(client.call("in_asyncio")).result
        assert result["content"][0]["text"].partition(".")[0] in ("asyncio", "uvloop")


def test_without_asyncio_such_a_tool_says_so(tmp_path: Path) -> None:
    with AsgiServer(tmp_path, host="hypercorn-trio") as server, opened(server) as client:
        result = client.read_one(client.call("in_asyncio")).result
        assert result["isError"]
        assert "without asyncio" in result["content"][0]["text"]


@pytest.mark.parametrize("host", ["uvicorn", "hypercorn-trio"])
@pytest.mark.parametrize(("app", "prefix"), [("alone", ""), ("naive", "/tools")])
def test_alone_and_without_the_lifespan(host: str, app: str, prefix: str, tmp_path: Path) -> None:
    with AsgiServer(tmp_path, host=host, app=app) as server, opened(server, prefix) as client:
        call = client.call("wait")
        last = first_id(call)
        assert server.end() in (0, -signal.SIGTERM)
        assert ("starts with its first request" in server.log) is (app == "naive")
        server.start()
        assert client.get(last).head().events()


def test_the_framework_answers_its_own_routes(tmp_path: Path) -> None:
    with AsgiServer(tmp_path) as server, MountedClient(server.port) as client:
        assert json.loads(client.send(client.head("GET", path="/")).body()) == {"here": True}
        assert client.send(client.head("GET", path="/elsewhere/mcp")).head().status == 404
        assert client.send(client.head("GET", path="/tools/other")).head().status == 404


def refused(client: MountedClient, data: bytes) -> tuple[int, Any]:
    exchange = client.send(data).head()
    return exchange.status, json.loads(exchange.body())["error"]["message"]


def test_refusals(server: AsgiServer) -> None:
    with opened(server) as client:
        ping = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "ping"}).encode()
        status, why = refused(client, client.post_bytes(ping, {"Host": "attacker.example"}))
        assert (status, "allowed_hosts" in why) == (403, True)
        status, why = refused(client, client.post_bytes(ping, {"Origin": "http://evil.example"}))
        assert (status, "allowed_origins" in why) == (403, True)
        client.close()
        large = client.head("POST", {"Content-Type": "application/json", "Content-Length": "9" * 9})
        assert refused(client, large)[0] == 413
        fields: dict[str, str | None] = {f"X-{number}": "1" for number in range(130)}
        assert refused(client, client.post_bytes(ping, fields))[0] == 431
        assert refused(client, client.post_bytes(ping, {"X": "1" * 17_000}))[0] in (400, 431)
        assert client.ask("ping", id="ping").result == {}


def test_http_2_is_refused(tmp_path: Path) -> None:
    """With prior knowledge, as h2 clients that know the server do it."""
    with AsgiServer(tmp_path, host="hypercorn-trio") as server:
        connection = H2Connection()
        connection.initiate_connection()
        fields = [(":method", "POST"), (":scheme", "http"), (":path", "/tools/mcp")]
        fields += [(":authority", "127.0.0.1"), ("content-type", "application/json")]
        connection.send_headers(1, fields)
        connection.send_data(1, b"{}", end_stream=True)
        with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as peer:
            peer.sendall(connection.data_to_send())
            said = b""
            while b"HTTP/2" not in said:
                data = peer.recv(65536)
                assert data
                connection.receive_data(data)
                said += data
                peer.sendall(connection.data_to_send())
        assert b"a proxy may end HTTP/2" in said
