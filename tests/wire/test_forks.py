"""A child that a tool forks does not disturb the server, and keeps no client's connection open."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.launch import Spawned, owner_pid, wait_for_end
from tests.wire.process import FAULTY_APP, ServerProcess, wait_until
from tests.wire.raw import Peer, PeerGone
from tests.wire.verbs import KINDS, POSITIONS, called

ENDS = {"sys.exit": 3, "os._exit": 3, "raise": 1, "BaseException": 1, "return": 0}


@pytest.fixture
def peer(faulty_server: ServerProcess, faulty_peer: Peer) -> Iterator[Peer]:
    yield faulty_peer
    # The event loop of the server still handles old connections and new ones.
    assert text(faulty_peer, "add", a=1, b=2) == "3"
    with faulty_server.connect("http-lines") as other:
        other.initialize(POSITIONS)
        assert text(other, "add", a=1, b=2) == "3"


def text(peer: Peer, tool: str, **arguments: object) -> str:
    result = called(peer, tool, **arguments).result
    assert not result.get("isError"), result
    found = result["content"][0]["text"]
    assert isinstance(found, str)
    return found


def sockets_of(pid: int) -> set[str]:
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            found.add(os.readlink(path))
    return {link for link in found if link.startswith("socket:")}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("tool", ["forking", "forking_in_loop"])
def test_a_child_ends_as_it_says_and_the_server_goes_on(peer: Peer, tool: str, how: str) -> None:
    for _ in range(3):
        assert text(peer, tool, how=how) == f"child: {ENDS[how]}"


@pytest.mark.parametrize("how", ["await", "call"])
def test_a_child_cannot_go_on_in_the_event_loop(
    faulty_server: ServerProcess, peer: Peer, how: str
) -> None:
    assert text(peer, "forking_in_loop", how=how) == "child: 1"
    faulty_server.hear("the event loop is not its")


def test_a_child_cannot_use_the_call(peer: Peer) -> None:
    assert text(peer, "forking_and_calling") == "child: 1"


def test_a_child_cannot_give_pages(peer: Peer) -> None:
    first = called(peer, "forking_page").result
    assert first["content"][0]["text"] == "a page"
    params = {"name": "forking_page", "resumeToken": first["nextResumeToken"]}
    assert peer.ask("tools/call", params).result["content"][0]["text"] == "child: 1"


@pytest.mark.parametrize("tool", ["pooled", "pooled_in_loop"])
def test_multiprocessing_works_with_forks(peer: Peer, tool: str) -> None:
    assert text(peer, tool) == "[0,1,4,9]"


def test_a_child_ends_for_a_signal(peer: Peer) -> None:
    """This holds also for a signal that comes as soon as the child exists."""
    for _ in range(20):
        assert text(peer, "terminated") == str(-signal.SIGTERM)


def test_a_child_that_runs_another_program_is_not_hindered(peer: Peer) -> None:
    assert text(peer, "with_subprocess") == "child\n"


@pytest.mark.needs_one_process("it looks at the sockets of the process")
@pytest.mark.parametrize("kind", KINDS)
def test_a_child_that_lives_on_keeps_no_connection_open(
    faulty_server: ServerProcess, kind: str
) -> None:
    with faulty_server.connect(kind) as peer:
        peer.initialize(POSITIONS)
        assert text(peer, "forking", how="sys.exit") == "child: 3"
        child = int(text(peer, "orphaning"))
    try:
        # Only the two socket pairs by which trio wakes itself are left. The tool may return before
        # its child has run.
        wait_until(
            "the child has let go of the server's connections",
            lambda: len(sockets_of(faulty_server.pid) & sockets_of(child)) <= 4,
        )
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_server_ends_and_comes_back_while_a_child_lives_on(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, app=FAULTY_APP) as server, server.connect("ws-streams") as peer:
        peer.initialize(POSITIONS)
        child = int(text(peer, "orphaning"))
        try:
            assert server.stop() == 0
            with contextlib.suppress(PeerGone):  # the client sees the end
                while True:
                    peer.receive()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", server.port))
            server.start()
            with server.connect("ws-streams") as again:
                again.initialize(POSITIONS)
                assert text(again, "add", a=1, b=2) == "3"
        finally:
            os.kill(child, signal.SIGKILL)


def test_an_owner_and_its_socket_outlive_the_children_of_its_tools(tmp_path: Path) -> None:
    journal = tmp_path / "journal.db"
    with Spawned(journal, "--linger", "0.2", app=FAULTY_APP) as peer:
        peer.initialize(POSITIONS)
        owner = owner_pid(journal)
        for tool in ("forking", "forking_in_loop"):
            for how, code in ENDS.items():
                assert text(peer, tool, how=how) == f"child: {code}"
        child = int(text(peer, "orphaning"))
        with Spawned(journal, "--linger", "0.2", app=FAULTY_APP) as other:
            other.initialize(POSITIONS)
            assert owner_pid(journal) == owner
            assert text(other, "add", a=1, b=2) == "3"
        # The client sees the end of its connection though the child has not ended.
        peer.half_close()
        peer.read_to_the_end()
    wait_for_end(owner)
    assert not Path(f"{journal}.sock").exists()
    os.kill(child, signal.SIGKILL)
