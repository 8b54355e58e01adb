"""Any exception of a tool ends one call only: the server goes on, and the log gives the reason."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from streams.server.handlers import THREADS_MAX
from tests.wire.process import FAULTY_APP, ServerProcess, wait_until
from tests.wire.raw import Message, Peer
from tests.wire.verbs import KINDS, POSITIONS, called, start

RAISED = (
    "SystemExit",
    "KeyboardInterrupt",
    "GeneratorExit",
    "OwnError",
    "WordlessError",
    "CancelledError",
    "Cancelled",
    "group",
    "nested",
)
# Python's `traceback`, and any code that reads an attribute, fails for these.
UNREADABLE = (
    "SyntaxError",
    "NamelessError",
    "OpaqueError",
    "EndingError",
    "OpaqueValueError",
    "OddlyWordedError",
    "deep",
)
TOOLS = (
    "raising",
    "raising_in_child_task",
    "raising_in_thread",
    "raising_with_restart",
    "raising_result",
)
PAGED = ("raising_page", "raising_page_in_thread")


def text_of(message: Message) -> str:
    assert message.result["isError"] is True
    text = message.result["content"][0]["text"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("kind", RAISED)
@pytest.mark.parametrize("tool", TOOLS)
def test_what_a_tool_raises_is_the_result_of_its_call(
    faulty_server: ServerProcess, faulty_peer: Peer, tool: str, kind: str
) -> None:
    if tool == "raising_in_child_task" and kind == "Cancelled":
        # A nursery with a failed child takes every cancellation for its own.
        result = called(faulty_peer, tool, kind=kind).result
        assert result == {"content": [], "structuredContent": {"result": None}}
        return
    seen = len(faulty_server.log)
    text = text_of(called(faulty_peer, tool, kind=kind))
    if tool == "raising" and kind not in ("group", "nested", "Cancelled"):
        assert text.startswith(kind)
    wait_until(
        "the log says it",
        lambda: any("a tool failed" in line and tool in line for line in faulty_server.log[seen:]),
    )
    assert called(faulty_peer, "add", a=1, b=2).result["content"][0]["text"] == "3"


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("tool", [tool for tool in TOOLS if tool != "raising_in_child_task"])
def test_what_cannot_be_shown_is_the_result_of_its_call_as_well(
    faulty_server: ServerProcess, faulty_peer: Peer, tool: str, kind: str
) -> None:
    seen = len(faulty_server.log)
    text_of(called(faulty_peer, tool, kind=kind))
    wait_until(
        "the log says it, and where it was raised",
        lambda: (
            f"tool={tool}" in (said := "".join(faulty_server.log[seen:])) and "raise KINDS" in said
        ),
    )
    assert called(faulty_peer, "add", a=1, b=2).result["content"][0]["text"] == "3"


@pytest.mark.parametrize("kind", ["OpaqueError", "EndingError"])
def test_the_threads_for_plain_functions_outlast_what_cannot_be_shown(
    faulty_peer: Peer, kind: str
) -> None:
    for request in [
        faulty_peer.call("raising_in_thread", kind=kind) for _ in range(THREADS_MAX + 1)
    ]:
        text_of(faulty_peer.response(request))
    assert called(faulty_peer, "with_subprocess").result["content"][0]["text"] == "child\n"


@pytest.mark.parametrize("kind", [*RAISED, *UNREADABLE])
@pytest.mark.parametrize("tool", PAGED)
def test_what_a_tool_raises_between_its_pages_comes_behind_them(
    faulty_peer: Peer, tool: str, kind: str
) -> None:
    first = called(faulty_peer, tool, kind=kind).result
    assert first["content"][0]["text"] == "a page"
    last = faulty_peer.ask(
        "tools/call",
        {"name": tool, "arguments": {"kind": kind}, "resumeToken": first["nextResumeToken"]},
    )
    text_of(last)


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_an_argument_raises_and_cannot_be_shown_ends_nothing_else(
    faulty_peer: Peer, kind: str
) -> None:
    text = text_of(called(faulty_peer, "raising_argument", argument={"kind": kind}))
    assert text.startswith("Bad arguments for raising_argument: ")
    assert faulty_peer.ask("ping").result == {}


@pytest.mark.parametrize("kind", [kind for kind in RAISED if kind != "Cancelled"])
def test_what_an_argument_raises_is_the_result_of_the_call(
    faulty_server: ServerProcess, faulty_peer: Peer, kind: str
) -> None:
    text = text_of(called(faulty_peer, "raising_argument", argument={"kind": kind}))
    assert text.startswith("Bad arguments for raising_argument: ")
    faulty_server.hear("the arguments of a tool cannot be made")


@pytest.mark.parametrize("kind", [*RAISED, *UNREADABLE])
def test_what_a_cancelled_tool_raises_ends_nothing_else(
    faulty_server: ServerProcess, faulty_peer: Peer, kind: str
) -> None:
    request = faulty_peer.call("raising_when_cancelled", kind=kind)
    faulty_peer.notify("notifications/cancelled", {"requestId": request})
    assert faulty_peer.ask("ping").result == {}
    assert called(faulty_peer, "add", a=1, b=2).result["content"][0]["text"] == "3"


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_so_over_every_transport(faulty_server: ServerProcess, kind: str) -> None:
    with faulty_server.connect(kind) as peer:
        peer.initialize(POSITIONS)
        assert text_of(called(peer, "raising", kind="SystemExit")) == "SystemExit: 3"
        assert text_of(called(peer, "raising_in_thread", kind="KeyboardInterrupt"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt", "Cancelled", "OwnError"])
def test_a_signal_ends_a_server_whose_tools_raise_then(
    tmp_path: Path, number: signal.Signals, kind: str
) -> None:
    with ServerProcess(tmp_path, app=FAULTY_APP) as server:
        with server.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            started = start(peer, "raising_when_cancelled", kind=kind)
            assert server.stop(number) == 0
            assert peer.response(started.id).reason == "interrupted"
        assert not any("Traceback" in line and "streams.cli" in line for line in server.log)
        assert not any("ends at its deadline" in line for line in server.log)


def test_ctrl_c_of_a_program_that_minds_it_itself_goes_through_a_tool(tmp_path: Path) -> None:
    """trio raises KeyboardInterrupt at the point that the signal interrupts."""
    program = tmp_path / "own_program.py"
    program.write_text(OWN_PROGRAM)
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == ["interrupted"], done.stderr
    assert not done.stderr  # it is no failure of the tool
    assert done.returncode == 0


OWN_PROGRAM = """
import os, signal
import trio
from streams import Server
from streams.keys import Keyring
from streams.journal.memory import MemoryJournal
from transports.memory import Cable

server = Server("own")

@server.tool
async def interrupted() -> str:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(10_000_000):
        pass
    return "went on"

async def main():
    async with server.open(MemoryJournal(), Keyring.load(None)) as running:
        async with trio.open_nursery() as nursery:
            cable = Cable()
            nursery.start_soon(running.serve, cable.far)
            await cable.near.send(b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":'
                b'{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{}}}\\n')
            await cable.near.send(b'{"jsonrpc":"2.0","id":2,"method":"tools/call","params":'
                b'{"name":"interrupted"}}\\n')
            await trio.sleep_forever()

try:
    trio.run(main)
except* KeyboardInterrupt:
    print("interrupted")
"""
