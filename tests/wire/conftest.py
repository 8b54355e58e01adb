"""One server for each module of tests; a new one for a test that kills it or counts its streams."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.wire.httpclient import HttpClient
from tests.wire.process import FAULTY_APP, Gate, ServerProcess, gate_in
from tests.wire.raw import Peer
from tests.wire.rawhttp import BOTH
from tests.wire.verbs import KINDS, PLAIN, POSITIONS, STREAMS, opting_in


class Wire:
    """One way to reach a server; opens connections and closes them when the test is over."""

    def __init__(self, kind: str, server: ServerProcess, stack: ExitStack) -> None:
        self.kind = kind
        self.server = server
        self._stack = stack

    @property
    def is_one_principal(self) -> bool:
        """Whether all connections are one principal's.

        WIRE §10: "`session(hash)` over HTTP; `os(uid)` over stdio […]; `conn(256 random bits)` for
        an anonymous WebSocket".
        """
        return self.kind == "stdio"

    def connect(self) -> Peer:
        """A connection without any message yet."""
        return self._stack.enter_context(self.server.connect(self.kind))

    def opened(self, capabilities: dict[str, Any]) -> Peer:
        peer = self.connect()
        peer.initialize(capabilities)
        return peer

    def plain(self) -> Peer:
        return self.opened(PLAIN)

    def streams(self) -> Peer:
        return self.opened(opting_in(self.kind, STREAMS))

    def positions(self) -> Peer:
        return self.opened(opting_in(self.kind, POSITIONS))


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def faulty_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with faulty tools, which must still end in good order."""
    with ServerProcess(tmp_path_factory.mktemp("faults"), app=FAULTY_APP) as server:
        yield server
        assert server.stop() == 0


@pytest.fixture
def faulty_peer(faulty_server: ServerProcess) -> Iterator[Peer]:
    """A client of that server, with positions."""
    with faulty_server.connect("ws-streams") as peer:
        peer.initialize(POSITIONS)
        yield peer


@pytest.fixture
def server(module_server: ServerProcess) -> Iterator[ServerProcess]:
    """The module's server; a test that kills it fails, and the next one gets a new one."""
    yield module_server
    if not module_server.is_alive():
        module_server.restart()
        pytest.fail("the server died:\n" + "".join(module_server.log[-50:]))


@pytest.fixture(scope="module", params=KINDS)
def shared(request: pytest.FixtureRequest, module_server: ServerProcess) -> Iterator[Peer]:
    """A connection that declares nothing, for all tests that need no other."""
    with module_server.connect(request.param) as peer:
        peer.initialize(PLAIN)
        yield peer


@pytest.fixture
def peer(shared: Peer, server: ServerProcess) -> Iterator[Peer]:
    """The module's shared connection; no message of this test is left for the next one."""
    yield shared
    shared.settle()


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of this test's own."""
    folder = tmp_path / "server"
    folder.mkdir()
    with ServerProcess(folder) as server:
        yield server


@pytest.fixture(params=KINDS)
def wire(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Wire]:
    with ExitStack() as stack:
        yield Wire(request.param, server, stack)


@pytest.fixture(params=[kind for kind in KINDS if kind != "stdio"])
def anonymous(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Wire]:
    with ExitStack() as stack:
        yield Wire(request.param, server, stack)


class Http:
    """Sessions of one server, with the test's own settings; closed when the test is over."""

    def __init__(self, server: ServerProcess, stack: ExitStack) -> None:
        self.server = server
        self._stack = stack

    def unopened(self, accept: str = BOTH) -> HttpClient:
        """A client that has not sent any message yet."""
        return self._stack.enter_context(HttpClient(self.server.http_port, accept))

    def opened(
        self,
        capabilities: dict[str, Any] | None = None,
        *,
        accept: str = BOTH,
        revision: str = "2025-11-25",
    ) -> HttpClient:
        """A client that knows nothing of streams, unless its capabilities say so."""
        client = self.unopened(accept)
        client.initialize(PLAIN if capabilities is None else capabilities, revision=revision)
        return client


@pytest.fixture
def http(server: ServerProcess) -> Iterator[Http]:
    with ExitStack() as stack:
        yield Http(server, stack)


@pytest.fixture
def fresh_http(fresh: ServerProcess) -> Iterator[Http]:
    """Sessions of a server of this test's own."""
    with ExitStack() as stack:
        yield Http(fresh, stack)


@pytest.fixture
def stdio(server: ServerProcess) -> Iterator[Wire]:
    with ExitStack() as stack:
        yield Wire("stdio", server, stack)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with gate_in(tmp_path / "gate") as gate:
        yield gate


@pytest.fixture
def gate2(tmp_path: Path) -> Iterator[Gate]:
    with gate_in(tmp_path / "gate2") as gate:
        yield gate
