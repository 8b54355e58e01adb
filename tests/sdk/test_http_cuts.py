"""The official clients over HTTP, through a network that cuts their connections.

The clients know nothing of this project: `Last-Event-ID` brings back the lost messages.
"""

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from streams import Limits
from tests.sdk.cutting import WAIT_S, Cut, Cutter, Seen
from tests.sdk.proxies import haproxy_before, nginx_before
from tests.sdk.stock import CLIENTS, Journey, Node, StockClient
from tests.wire.process import ServerProcess

APP: Final = f"{Path(__file__).parent / 'cut_server.py'}:server"
STEPS: Final = [1, 2, 3, 4]
ALL_MESSAGES: Final = 2 * len(STEPS)  # before the result
DOCUMENTED_HOST: Final = "mcp.example.com"
_STANDING: Final = Seen("GET", None, None)

# The places where the connections of a call are cut, one after another. The first event that a
# client gets has an id and no message. A call can be continued from there on, so "the first event"
# is the one after it.
CASES: Final[dict[str, tuple[Cut, ...]]] = {
    "nowhere": (),
    "before the first event": (Cut(0),),
    "between events": (Cut(1),),
    "between events, reset": (Cut(1, is_reset=True),),
    "in the middle of an event": (Cut(1, more=30),),
    "in the middle of the result": (Cut(ALL_MESSAGES, more=30),),
    "in the middle of the GET": (Cut(1), Cut(1, more=30)),
    "in the middle of the GET, reset": (Cut(1), Cut(1, more=30, is_reset=True)),
    "before the GET is answered": (Cut(1), Cut(is_refusal=True)),
    "three times in a row": (Cut(1), Cut(1), Cut(1)),
    "three times, twice for nothing": (Cut(1), Cut(0), Cut(0)),
}

# The Python SDK keeps the id of a GET's last event only where the GET ends in good order.
REPEATED: Final = {("python", "in the middle of the GET, reset")}

# The installation of the clients has a bound of its own.
pytestmark = pytest.mark.timeout(200, func_only=True)


@dataclass(frozen=True)
class Made:
    """A call, with the client's record and the network's."""

    seen: dict[str, Any]
    cutter: Cutter
    is_repeated: bool
    standing: int = 1  # how often the session's own stream may be opened

    def once(self, reported: list[Any]) -> list[Any]:
        """The reports, without the repeats that this client is known to make by itself."""
        return list(dict.fromkeys(reported)) if self.is_repeated else reported

    def restless(self) -> list[Seen]:
        """The client's requests after the result, except the DELETE of its session."""
        calm = [Seen("DELETE", None, None)]
        # The Python SDK asks for the tool's schema after the result, to check one against the
        # other.
        calm.append(Seen("POST", "tools/list", None))
        # The session's own stream is opened meanwhile, and may be late.
        if self.cutter.requests.count(_STANDING) <= self.standing:
            calm.append(_STANDING)
        return [seen for seen in self.cutter.requests_after_result if seen not in calm]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    options = ("--allow-host", DOCUMENTED_HOST)
    with ServerProcess(folder, app=APP, options=options) as server:
        yield server


@pytest.fixture(scope="module", params=("directly", "nginx", "haproxy"))
def port(
    request: pytest.FixtureRequest,
    server: ServerProcess,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[int]:
    """The server's port: its own, or that of a proxy in front of it."""
    if request.param == "directly":
        yield server.http_port
        return
    before = {"nginx": nginx_before, "haproxy": haproxy_before}[request.param]
    program = request.getfixturevalue(request.param)
    with before(server.http_port, program, tmp_path_factory.mktemp(request.param)) as port:
        yield port


@pytest.fixture(scope="module", params=CLIENTS)
def made(
    request: pytest.FixtureRequest, port: int, node: Node, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Made]:
    """A call for each case; one client makes all of them at once."""
    with contextlib.ExitStack() as stack:
        cutters, calls = [], []
        for cuts in CASES.values():
            journey = Journey(tmp_path_factory.mktemp("gates"))
            cutter = Cutter(port, cuts, on_cut=opening(journey, cuts))
            stack.callback(cutter.close)
            cutters.append(cutter)
            calls.append(journey.to(cutter.port))
        seen = stack.enter_context(StockClient(request.param, node, calls)).finish()
    repeated = [(request.param, case) in REPEATED for case in CASES]
    return dict(zip(CASES, map(Made, seen, cutters, repeated), strict=True))


def opening(journey: Journey, cuts: tuple[Cut, ...]) -> Callable[[int], None]:
    """The actions after each cut: they let the tool go on, so that more messages come.

    The tool takes one step for each connection, and the rest for the last one.
    """

    def after(made: int) -> None:
        journey.open(len(STEPS) if made == len(cuts) else made + 1)

    after(len(cuts) if cuts and cuts[0].events == ALL_MESSAGES else 0)
    return after


every_case = pytest.mark.parametrize("case", CASES)


@every_case
def test_the_result_comes_once(made: dict[str, Made], case: str) -> None:
    call = made[case]
    assert (call.seen["result"], call.seen["error"]) == (f"{len(STEPS)} steps", None)
    assert call.cutter.cuts_left == 0
    assert call.cutter.results == 1


@every_case
def test_notifications_come_once_and_in_order(made: dict[str, Made], case: str) -> None:
    call = made[case]
    assert call.once(call.seen["progress"]) == STEPS
    assert call.once([log["step"] for log in call.seen["logs"]]) == STEPS


@every_case
def test_a_client_that_has_its_result_is_at_peace(made: dict[str, Made], case: str) -> None:
    assert made[case].restless() == []


def test_the_name_that_a_client_calls_reaches_the_server(port: int) -> None:
    """The page says that the proxy must pass the name to the server."""
    assert _status(port, DOCUMENTED_HOST) == 200
    assert _status(port, "elsewhere.example.com") == 403


def test_a_message_may_be_as_long_as_without_a_proxy(port: int) -> None:
    almost = Limits().message_bytes_max - 1024
    assert _status(port, DOCUMENTED_HOST, padding="x" * almost) == 200


def _status(port: int, host: str, *, padding: str = "") -> int:
    """The status of an `initialize` request under this name."""
    info = {"name": "bare", "version": "1.0"}
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info}
    params["_meta"] = {"padding": padding}
    message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
    accept = "application/json, text/event-stream"
    headers = {"Host": host, "Accept": accept, "Content-Type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    with contextlib.closing(connection):
        connection.request("POST", "/mcp", json.dumps(message), headers)
        return connection.getresponse().status


@pytest.mark.parametrize("client", CLIENTS)
def test_what_was_done_outlives_the_server(client: str, node: Node, tmp_path: Path) -> None:
    """The server is killed once the result is in its journal, and is down when the client first
    comes back.
    """
    (tmp_path / "gates").mkdir()
    journey = Journey(tmp_path / "gates")
    journey.open(len(STEPS))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess(tmp_path, app=APP))
        cutter = Cutter(server.http_port, [Cut(1, is_held=True)])
        stack.callback(cutter.close)
        running = stack.enter_context(StockClient(client, node, [journey.to(cutter.port)]))
        assert cutter.held.wait(WAIT_S)
        server.kill()
        cutter.let_go()
        assert cutter.refused.wait(WAIT_S)
        server.start()
        cutter.resume()
        (seen,) = running.finish()
        call = Made(seen, cutter, is_repeated=False, standing=2)
    assert (seen["result"], seen["error"], cutter.results) == (f"{len(STEPS)} steps", None, 1)
    assert (seen["progress"], [log["step"] for log in seen["logs"]]) == (STEPS, STEPS)
    assert call.restless() == []
