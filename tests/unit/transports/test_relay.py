"""The relay socket: which relays are accepted, the handover, and how either side ends."""

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from streams.exchange import Channel
from tests.rigs import ROOT
from tests.rigs.echo import echo
from tests.rigs.served import HELLO, pipes
from transports.relay import owner as unix
from transports.relay.handover import NoOwner, OwnerLost, RelayRefused, relay

HELLO_LINE = json.dumps(HELLO).encode() + b"\n"


def check(hello: dict[str, Any]) -> str | None:
    return None if hello == HELLO else f"this owner serves {HELLO['app']}, not {hello.get('app')}"


@asynccontextmanager
async def owner(path: Path, handler: Any = echo) -> AsyncIterator[None]:
    async def serve(*, task_status: trio.TaskStatus[None]) -> None:
        await unix.serve(handler, path, hello_check=check, task_status=task_status)

    async with trio.open_nursery() as nursery:
        await nursery.start(serve)
        yield
        nursery.cancel_scope.cancel()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sock"


@pytest.fixture(autouse=True)
def _no_leak() -> Iterator[None]:
    before = open_fds()
    yield
    assert open_fds() == before


def open_fds() -> set[str]:
    """The open descriptors, without those that the interpreter and its libraries may keep."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(("socket:", "pipe:")):
                found.add(target)
    return found


class Client:
    """The client of a relay: the other ends of what is handed over."""

    def __init__(self) -> None:
        (relay_in, ours_out), (ours_in, relay_out) = os.pipe(), os.pipe()
        self.relay_fds = (relay_in, relay_out)
        self.stream = pipes(ours_out, ours_in)

    def close_relay_fds(self) -> None:
        for fd in self.relay_fds:
            os.close(fd)


async def run_relay(path: Path, hello: dict[str, Any], fds: tuple[int, int]) -> None:
    await trio.to_thread.run_sync(relay, path, hello, fds, abandon_on_cancel=True)


async def knock(path: Path, hello: bytes, fds: list[int]) -> trio.SocketStream:
    """Say `hello` as a relay would."""
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(str(path))
    socket.send_fds(peer, [hello], fds)
    peer.setblocking(False)
    return trio.SocketStream(trio.socket.from_stdlib_socket(peer))


async def read_all(stream: trio.abc.ReceiveStream) -> bytes:
    read = b""
    with contextlib.suppress(trio.BrokenResourceError):
        while data := await stream.receive_some():
            read += data
    return read


async def test_the_owner_speaks_with_the_client_itself(path: Path) -> None:
    client = Client()
    async with owner(path), trio.open_nursery() as nursery:
        nursery.start_soon(run_relay, path, HELLO, client.relay_fds)
        await client.stream.send_all(b'"hello"\n')
        assert await client.stream.receive_some() == b'"hello"\n'
        await client.stream.send_stream.aclose()  # on which the handler ends, and so the relay
    assert await read_all(client.stream) == b""
    await client.stream.aclose()
    client.close_relay_fds()


async def test_a_relay_that_is_killed_disconnects_its_client(path: Path) -> None:
    ended = trio.Event()

    async def handler(channel: Channel) -> None:
        await echo(channel)
        ended.set()

    client = Client()
    async with owner(path, handler):
        relay_process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "tests.rigs.peer", "relay", str(path)],
            stdin=client.relay_fds[0],
            stdout=client.relay_fds[1],
            cwd=ROOT,
        )
        client.close_relay_fds()
        await client.stream.send_all(b'"hello"\n')
        assert await client.stream.receive_some() == b'"hello"\n'
        relay_process.send_signal(signal.SIGKILL)
        await ended.wait()
        assert await read_all(client.stream) == b""
        await relay_process.wait()
    await client.stream.aclose()


async def test_a_relay_fails_with_its_owner(path: Path) -> None:
    client = Client()

    async def relayed() -> None:
        with pytest.raises(OwnerLost):
            await run_relay(path, HELLO, client.relay_fds)

    async with trio.open_nursery() as nursery, owner(path):
        nursery.start_soon(relayed)
        await client.stream.send_all(b'"hello"\n')
        assert await client.stream.receive_some() == b'"hello"\n'
    assert await read_all(client.stream) == b""
    await client.stream.aclose()
    client.close_relay_fds()


def test_a_relay_that_was_handed_over_has_let_go(path: Path) -> None:
    """The client sees the end as soon as the owner closes, however long the relay lives on."""
    (relay_in, ours_out), (ours_in, relay_out) = os.pipe(), os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.rigs.peer", "relay", str(path)],
            stdin=relay_in,
            stdout=relay_out,
            cwd=ROOT,
        )
        os.close(relay_in)
        os.close(relay_out)
        taken, _ = listener.accept()
    with process, taken:
        hello, fds, _, _ = socket.recv_fds(taken, 4096, 2)
        assert json.loads(hello) == HELLO
        os.write(ours_out, b"for the owner")
        assert os.read(fds[0], 100) == b"for the owner"
        taken.sendall(b'{"ok": true}\n')
        for fd in fds:
            os.close(fd)
        assert os.read(ours_in, 100) == b""  # though the relay still runs
        assert process.poll() is None
        taken.sendall(b'{"ok": true}\n')  # the client has ended
        taken.close()
        assert process.wait() == 0
    os.close(ours_in)
    os.close(ours_out)


async def test_a_relay_of_another_app_is_refused_with_the_owner_s_words(path: Path) -> None:
    client = Client()
    async with owner(path):
        with pytest.raises(RelayRefused, match=r"serves file.py:server, not other.py:server"):
            await run_relay(path, {**HELLO, "app": "other.py:server"}, client.relay_fds)
        os.write(client.relay_fds[1], b"an error\n")  # still the relay's, to tell its client
        assert await client.stream.receive_some() == b"an error\n"
    await client.stream.aclose()
    client.close_relay_fds()


def test_nobody_listens_is_an_answer_of_its_own(path: Path) -> None:
    with pytest.raises(NoOwner):
        relay(path, HELLO, ())
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with pytest.raises(NoOwner):
        relay(path, HELLO, ())


@pytest.mark.parametrize("answer", [b"", b"{", b"[]\n", b"{}\n", b"\xff\n"])
def test_an_owner_that_does_not_answer_as_one_is_none(path: Path, answer: bytes) -> None:
    client_in, client_out = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX):
        listener.bind(str(path))
        listener.listen()
        child = os.fork()
        if child == 0:
            taken, _ = listener.accept()
            taken.recv(4096)
            taken.sendall(answer)
            os._exit(0)
        with pytest.raises(NoOwner):
            relay(path, HELLO, (client_in, client_out))
        os.waitpid(child, 0)
    os.close(client_in)  # untouched, to be handed to the next owner
    os.close(client_out)


@pytest.mark.parametrize(
    ("hello", "count", "why"),
    [
        (b"garbage\n", 2, "JSON"),
        (b"[" * 4000 + b"\n", 2, "JSON"),
        (b"\xff\n", 2, "JSON"),
        (b"[]\n", 2, "object"),
        (b'{"a":\n1}\n', 2, "one line"),
        (HELLO_LINE, 0, "two file descriptors"),
        (HELLO_LINE, 1, "two file descriptors"),
        (HELLO_LINE, 3, "two file descriptors"),
        (HELLO_LINE, 100, "two file descriptors"),
        (b'{"app": "' + b"x" * 5000 + b'"}\n', 2, "at most 4096 bytes"),
        (HELLO_LINE + HELLO_LINE, 2, "one line"),
    ],
)
async def test_garbage_ends_its_own_connection_and_leaks_nothing(
    path: Path, hello: bytes, count: int, why: str
) -> None:
    ours, theirs = os.pipe()
    async with owner(path):
        stream = await knock(path, hello, [theirs] * count)
        os.close(theirs)
        assert why in json.loads(await read_all(stream))["error"]
        # The other end of the pipe is closed everywhere.
        assert await trio.to_thread.run_sync(os.read, ours, 1) == b""
        os.close(ours)
        await stream.aclose()

        client = Client()
        stream = await knock(path, HELLO_LINE, list(client.relay_fds))
        assert await stream.receive_some() == b'{"ok": true}\n'
        await stream.aclose()
        await client.stream.aclose()
        client.close_relay_fds()


async def test_what_a_relay_says_later_ends_its_connection(path: Path) -> None:
    client = Client()
    async with owner(path):
        stream = await knock(path, HELLO_LINE, list(client.relay_fds))
        client.close_relay_fds()
        assert await stream.receive_some() == b'{"ok": true}\n'
        await stream.send_all(b"more")
        assert await read_all(client.stream) == b""
        await stream.aclose()
    await client.stream.aclose()


async def test_a_hello_that_does_not_come_is_not_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix, "HELLO_S", 0.05)
    ours, theirs = os.pipe()
    async with owner(path):
        stream = await knock(path, HELLO_LINE[:10], [theirs, theirs])
        assert await read_all(stream) == b""
        await stream.aclose()
    os.close(ours)
    os.close(theirs)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
async def test_another_user_is_not_listened_to(path: Path) -> None:
    async with owner(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o666)  # as if the file system did not care
        for folder in path.parents[: len(path.parents) - 2]:  # but / and that of all users
            folder.chmod(0o755)
        code = (
            "import os, socket, sys; os.setgid(65534); os.setuid(65534);"
            "peer = socket.socket(socket.AF_UNIX); peer.connect(sys.argv[1]);"
            f"socket.send_fds(peer, [{HELLO_LINE!r}], [0, 1]);"
            "print(peer.recv(100))"
        )
        done = await trio.run_process(
            [sys.executable, "-c", code, str(path)],
            capture_stdout=True,
            check=False,
            capture_stderr=True,
        )
    # Closed without a word, before or after it was sent the hello.
    assert b"ok" not in done.stdout
    assert done.stdout == b"b''\n" or b"reset" in done.stderr.lower() or b"pipe" in done.stderr


@pytest.mark.parametrize("depth", [1, 5])
async def test_the_path_may_be_as_long_as_the_file_system_allows(
    tmp_path: Path, depth: int
) -> None:
    folder = tmp_path.joinpath(*["x" * 100] * depth)
    folder.mkdir(parents=True)
    client = Client()
    async with owner(folder / "journal.sock"), trio.open_nursery() as nursery:
        nursery.start_soon(run_relay, folder / "journal.sock", HELLO, client.relay_fds)
        await client.stream.send_all(b'"hello"\n')
        assert await client.stream.receive_some() == b'"hello"\n'
        await client.stream.aclose()
    assert not (folder / "journal.sock").exists()
    client.close_relay_fds()


async def test_a_name_that_no_socket_can_have_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="too long"):
        await unix.serve(echo, tmp_path / ("x" * 120), hello_check=check)


async def test_what_is_left_of_an_owner_is_removed_but_no_other_file(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    async with owner(path):
        assert path.is_socket()
    assert not path.exists()

    path.write_text("precious")
    with pytest.raises(OSError, match="in use"):
        await unix.serve(echo, path, hello_check=check)
    assert path.read_text() == "precious"


def test_a_relay_starts_without_trio() -> None:
    """Its client waits for it."""
    code = (
        "import sys, transports.relay.handover; "
        "print([m for m in sys.modules if m in ('trio', 'msgspec')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, cwd=ROOT
    )
    assert done.stdout == b"[]\n"
