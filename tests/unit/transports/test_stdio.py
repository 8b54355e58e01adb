"""stdio: standard streams and child processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from streams.exchange import Channel
from tests.rigs import ROOT
from tests.rigs.echo import echo
from transports import dial, stdio

# Run before anything else in a child process, whose standard streams the test has arranged.
CHILD = """
import os, sys, trio
from transports import stdio
fds = stdio.claim_standard_streams()
print("printed", flush=True)
os.system("echo from a grandchild")
async def main():
    async def handler(channel):
        try:
            while True:
                for line in await channel.receive():
                    await channel.send(b"got " + line + b"\\n")
        except trio.EndOfChannel:
            await channel.send(b"bye\\n")
    await stdio.serve(handler, fds)
trio.run(main)
"""


def child(*redirections: str, **keywords: Any) -> subprocess.CompletedProcess[bytes]:
    command = ["sh", "-c", 'exec "$0" -c "$1" ' + " ".join(redirections), sys.executable, CHILD]
    return subprocess.run(command, check=True, cwd=ROOT, timeout=60, **keywords)


def test_what_a_tool_prints_goes_to_stderr() -> None:
    done = child(input=b"one\ntwo\n", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.stdout == b"got one\ngot two\nbye\n"
    assert done.stderr == b"printed\nfrom a grandchild\n"


def test_regular_files_serve_as_well(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"one\n" * 100_000)
    child(f"< {tmp_path}/in", f"> {tmp_path}/out", f"2> {tmp_path}/err")
    assert (tmp_path / "out").read_bytes() == b"got one\n" * 100_000 + b"bye\n"


def test_appending_to_a_file_keeps_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"before\n")
    child(f">> {tmp_path}/out", f"2> {tmp_path}/err", input=b"one\n")
    assert (tmp_path / "out").read_bytes() == b"before\ngot one\nbye\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_standard_stream_that_is_closed_is_none(closed: str) -> None:
    done = child(closed, input=b"one\n", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    greeting = b"" if "<" in closed else b"got one\n"
    assert done.stdout == (b"" if closed.startswith((">", "<&- >")) else greeting + b"bye\n")


def test_socket_pairs_serve_as_well() -> None:
    """Node gives its children a Unix socket for each standard stream."""
    ours_in, theirs_in = socket.socketpair()
    ours_out, theirs_out = socket.socketpair()
    with ours_in, theirs_in, ours_out, theirs_out:
        ours_in.sendall(b"one\n")
        ours_in.shutdown(socket.SHUT_WR)
        child(stdin=theirs_in.fileno(), stdout=theirs_out.fileno(), stderr=subprocess.DEVNULL)
        theirs_out.close()
        assert ours_out.makefile("rb").read() == b"got one\nbye\n"


def test_standard_error_stays_as_it_was_when_it_shares_the_output_s_pipe() -> None:
    """A non-blocking pipe would make logging fail once it is full."""
    code = CHILD + "print(os.get_blocking(2), os.get_blocking(1), file=sys.stderr)"
    code = code.replace("await stdio.serve", "print(os.get_blocking(2)); await stdio.serve")
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=b"",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=True,
        cwd=ROOT,
        timeout=60,
    )
    assert b"False" not in done.stdout
    assert done.stdout.count(b"True") == 3


async def test_a_terminal_is_left_as_it_was() -> None:
    controller, terminal = os.openpty()
    process = await trio.lowlevel.open_process(
        [sys.executable, "-c", CHILD],
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    os.write(controller, b"one\n\x04")
    assert await process.wait() == 0
    assert os.get_blocking(terminal)
    os.close(terminal)
    assert b"got one\r\nbye\r\n" in os.read(controller, 1000)
    os.close(controller)


async def test_the_blocking_mode_is_given_back() -> None:
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    kept = os.dup(theirs_in), os.dup(theirs_out)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stdio.serve, echo, (theirs_in, theirs_out))
        os.write(ours_out, b"one\n")
        await trio.lowlevel.wait_readable(ours_in)
        assert not os.get_blocking(kept[0])
        os.close(ours_out)
    assert all(map(os.get_blocking, kept))
    for fd in (*kept, ours_in):
        os.close(fd)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


SAY_PID = "import os, sys; print(os.getpid(), flush=True);"


async def test_a_child_that_ends_with_its_input_is_not_killed(tmp_path: Path) -> None:
    witness = tmp_path / "ended"
    code = SAY_PID + f"sys.stdin.read(); open({str(witness)!r}, 'w').close()"
    async with stdio.connect([sys.executable, "-c", code]) as channel:
        (pid,) = await channel.receive()
    assert witness.exists()
    assert isinstance(pid, bytes)
    assert not is_alive(int(pid))


@pytest.mark.parametrize(
    "stubborn", ["", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"]
)
async def test_a_child_that_does_not_go_is_killed_and_reaped(
    stubborn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stdio, "GRACE_S", 0.05)
    code = stubborn + SAY_PID + "import time; time.sleep(1000)"
    with trio.CancelScope() as scope:
        async with stdio.connect([sys.executable, "-c", code]) as channel:
            (pid,) = await channel.receive()
            scope.cancel()
            await trio.sleep_forever()
    assert isinstance(pid, bytes)
    assert not is_alive(int(pid))


async def test_a_child_that_dies_is_the_end_of_the_channel() -> None:
    code = SAY_PID + "os.kill(os.getpid(), 9)"
    async with stdio.connect([sys.executable, "-c", code]) as channel:
        await channel.receive()
        with pytest.raises(trio.EndOfChannel, match="has ended by SIGKILL: see its standard error"):
            await channel.receive()
        with pytest.raises(trio.BrokenResourceError):
            # The kernel closes one pipe after the other.
            await send_for_ever(channel)


async def send_for_ever(channel: Channel) -> None:
    while True:
        await channel.send(b"{}\n")


async def test_the_terminal_s_ctrl_c_does_not_reach_the_child() -> None:
    code = "import os; print(os.getsid(0) == os.getpid(), flush=True)"
    async with stdio.connect([sys.executable, "-c", code]) as channel:
        assert await channel.receive() == [b"True"]


async def test_standard_error_can_be_sent_elsewhere(tmp_path: Path) -> None:
    code = "import sys; print('a log', file=sys.stderr)"
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    async with stdio.connect([sys.executable, "-c", code], stderr=log) as channel:
        with pytest.raises(trio.EndOfChannel):
            await channel.receive()
    os.close(log)
    assert (tmp_path / "log").read_bytes() == b"a log\n"


async def test_a_body_s_own_error_comes_out_as_it_is() -> None:
    with pytest.raises(KeyError):
        async with stdio.connect([sys.executable, "-c", "input()"], stderr=subprocess.DEVNULL):
            raise KeyError


async def test_a_command_that_cannot_be_started_is_an_os_error() -> None:
    with pytest.raises(FileNotFoundError):
        async with dial("stdio:/no/such/command --flag")():
            pytest.fail("there is nothing to talk to")


async def test_a_url_s_command_is_split_as_by_a_shell() -> None:
    code = "import sys; print(sys.argv[1:], flush=True)"
    async with dial(f"stdio:{sys.executable} -c '{code}' one 'two three'")() as channel:
        assert await channel.receive() == [b"['one', 'two three']"]


@pytest.mark.parametrize("url", ["stdio:", "stdio:  ", "ftp://host", "host:1", "ws:", "ws://", "x"])
def test_a_url_that_leads_nowhere_is_a_value_error(url: str) -> None:
    with pytest.raises(ValueError, match="write"):
        dial(url)
