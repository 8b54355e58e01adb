"""Hosts that wait for two seconds: the official SDKs' clients, and the Inspector."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import mcp
import pytest
from mcp.client.stdio import StdioServerParameters

from tests.rigs import setups
from tests.rigs.setups import Place
from tests.sdk.stock import Node
from tests.wire.process import CLI, ServerProcess, wait_until
from tests.wire.raw import DEADLINE_S, PipePeer

CHILD: Final = Path(__file__).parent / "patient_child.py"
APP: Final = f"{Path(__file__).parent / 'patient_server.py'}:server"
# Much less than the two seconds that the clients wait.
IMPATIENT: Final = ("--patience", "0.5", "--once", "build", "--keep-cancelled", "timeout")
# No interim answers: the clients give up.
SLOW: Final = ("--patience", "600", "--once", "build", "--keep-cancelled", "timeout")

BUILT: Final = {"files": 40, "target": "all"}
SILENT: Final = "The server process that runs this call does not answer now."  # over a store
INTERIM: Final = "Still running (3/40 compiling). Call `wait_for_call` with call="

pytestmark = pytest.mark.timeout(120, func_only=True)

Json = dict[str, Any]


@contextmanager
def serving(
    kind: str, folder: Path, options: tuple[str, ...], at: Place | None = None
) -> Iterator[Json]:
    """How a client reaches the server: over HTTP, or by a process that it starts.

    That process is a relay to the owner of "relay", the server; of "wrap", a child process with a
    server of the official SDK; of "attach", a server over HTTP without patience.
    """
    if kind == "http":
        with ServerProcess(folder, app=APP, options=options) as server:
            yield {"url": f"http://127.0.0.1:{server.http_port}/mcp"}
        return
    # The journals of wrapped and attached servers are files.
    is_served = kind == "relay"
    at = at or (setups.current if is_served else setups.Setup()).place(folder)
    with ExitStack() as stack:
        if is_served:
            words = ["serve", APP, "--stdio", *options]
        elif kind == "wrap":
            words = ["wrap", *at.options, *options, "--", sys.executable, str(CHILD)]
        else:
            far = folder / "far"
            far.mkdir()
            server = stack.enter_context(ServerProcess(far, app=APP))
            words = ["attach", f"http://127.0.0.1:{server.http_port}/mcp", *at.options, *options]
        command, *words = at.command([*CLI, *words]) if is_served else [*CLI, *words]
        try:
            yield {"command": command, "args": words}
        finally:
            at.end_owner()


def play(node: Node, generation: str, place: Json, folder: Path, *steps: str) -> Json:
    """Run the client in patience.mjs."""
    given = place | {"folder": str(folder), "steps": steps}
    run = node.run("patience.mjs", generation, json.dumps(given))
    assert run.returncode == 0, run.stderr
    found: Json = json.loads(run.stdout)
    return found


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text().splitlines())


@pytest.mark.parametrize("generation", ["1", "2"])
@pytest.mark.parametrize("kind", ["relay", "http", "wrap", "attach"])
def test_a_host_that_gives_up_gets_the_result_of_one_run(
    node: Node, tmp_path: Path, kind: str, generation: str
) -> None:
    steps = ("build", "wait", "build", "list", "gate", "wait", "build", "wait")
    with serving(kind, tmp_path, IMPATIENT) as place:
        found = play(node, generation, place, tmp_path, *steps)
    first, waited, again, listed, _, *done = found["seen"]
    for answer in (first, waited, again):
        assert answer["text"].startswith(INTERIM), answer
    assert first["progress"] == [1, 2, 3]
    assert waited["progress"] == again["progress"] == [3]
    (kept,) = listed["structured"]["calls"]
    assert (kept["tool"], kept["state"], kept["progress"]) == ("build", "running", "3/40 compiling")
    assert [answer["structured"] for answer in done] == [BUILT] * 3
    assert found["problems"] == []
    assert runs(tmp_path) == 1
    assert [tool["name"] for tool in found["tools"]] == ["build", "wait_for_call", "list_calls"]
    assert not any("outputSchema" in tool for tool in found["tools"])


@pytest.mark.parametrize("generation", ["1", "2"])
@pytest.mark.parametrize("kind", ["relay", "http", "wrap", "attach"])
def test_a_host_that_times_out_and_calls_again_gets_the_result_of_one_run(
    node: Node, tmp_path: Path, kind: str, generation: str
) -> None:
    with serving(kind, tmp_path, SLOW) as place:
        found = play(node, generation, place, tmp_path, "build", "build", "gate", "build")
    first, second, _, last = found["seen"]
    for failed in (first, second):
        assert "timed out" in failed["message"].lower()
    assert last["structured"] == BUILT
    assert runs(tmp_path) == 1


@pytest.mark.parametrize("generation", ["1", "2"])
def test_a_new_conversation_finds_the_call(node: Node, tmp_path: Path, generation: str) -> None:
    steps = ("build", "leave", "list", "wait", "gate", "wait")
    with serving("relay", tmp_path, IMPATIENT) as place:
        found = play(node, generation, place, tmp_path, *steps)
    _, _, listed, waited, _, last = found["seen"]
    assert len(listed["structured"]["calls"]) == 1
    assert waited["text"].startswith(INTERIM)
    assert last["structured"] == BUILT
    assert runs(tmp_path) == 1


@pytest.mark.parametrize("is_done", [True, False])
def test_after_a_kill_the_result_or_interrupted(
    node: Node, tmp_path: Path, *, is_done: bool
) -> None:
    begin = ("build", "gate", "wait") if is_done else ("build",)
    at = setups.current.place(tmp_path)
    with serving("relay", tmp_path, IMPATIENT, at) as place:
        play(node, "1", place, tmp_path, *begin)
        at.end_owner()
        for _ in range(20):
            listed, *fetched = play(node, "1", place, tmp_path, "list", "wait", "wait")["seen"]
            (kept,) = listed["structured"]["calls"]
            is_silent = any(SILENT in answer.get("text", "") for answer in fetched)
            if not (is_silent or kept["state"] == "running"):
                break  # over a store it had to be taken over
        assert kept["state"] == ("done" if is_done else "failed")
        for answer in fetched:
            if is_done:
                assert answer["structured"] == BUILT
            else:
                assert answer["reason"] == "interrupted"
        assert runs(tmp_path) == 1
        (tmp_path / "gate").touch()
        assert play(node, "1", place, tmp_path, "build")["seen"][0]["structured"] == BUILT
        assert runs(tmp_path) == (1 if is_done else 2)


@pytest.mark.parametrize("has_begun_to_wait", [True, False])
def test_without_a_journal_the_process_ends_with_its_host(
    tmp_path: Path, *, has_begun_to_wait: bool
) -> None:
    host = PipePeer([*CLI, "serve", APP, "--stdio", *IMPATIENT])
    host.initialize()
    build = host.call("build", folder=str(tmp_path))
    wait_until("the tool runs", (tmp_path / "runs").exists)
    if has_begun_to_wait:
        assert "Still running" in str(host.response(build))
    host.half_close()
    host.close_output()
    assert host.process.wait(DEADLINE_S) == 0


# The Python SDK


Use = Callable[[mcp.Client], Awaitable[None]]


def use(place: Json, using: Use) -> None:
    """Let the official client use the server; it waits for two seconds."""
    server: Any = place.get("url") or StdioServerParameters(**place)

    async def main() -> None:
        async with asyncio.timeout(60), mcp.Client(server, read_timeout_seconds=2) as client:
            await client.list_tools()  # from now on it checks structured content
            await using(client)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["relay", "http"])
def test_the_python_sdk_gets_the_result_of_one_run(tmp_path: Path, kind: str) -> None:
    folder = {"folder": str(tmp_path)}

    async def give_up(client: mcp.Client) -> None:
        interim = await client.call_tool("build", folder)
        assert interim.content[0].text.startswith(INTERIM)  # type: ignore[union-attr]
        assert interim.meta is not None
        name = {"call": interim.meta["mcp-streams/call"]}
        again = await client.call_tool("build", folder)
        assert (again.meta or {})["mcp-streams/call"] == name["call"]
        (tmp_path / "gate").touch()
        for tool, arguments in (("wait_for_call", name), ("build", folder)):
            assert (await client.call_tool(tool, arguments)).structured_content == BUILT

    with serving(kind, tmp_path, IMPATIENT) as place:
        use(place, give_up)
    assert runs(tmp_path) == 1


@pytest.mark.parametrize("kind", ["relay", "http"])
def test_the_python_sdk_times_out_and_calls_again(tmp_path: Path, kind: str) -> None:
    folder = {"folder": str(tmp_path)}

    async def time_out(client: mcp.Client) -> None:
        for _ in range(2):
            with pytest.raises(mcp.MCPError, match="timed out"):
                await client.call_tool("build", folder)
        (tmp_path / "gate").touch()
        assert (await client.call_tool("build", folder)).structured_content == BUILT

    with serving(kind, tmp_path, SLOW) as place:
        use(place, time_out)
    assert runs(tmp_path) == 1


# The Inspector's command line: each run is a process of its own, as a new conversation.

INSPECTOR: Final = "@modelcontextprotocol/inspector/clients/launcher/build/index.js"


def test_the_inspector_fetches_in_a_new_process_what_was_left(node: Node, tmp_path: Path) -> None:
    def ask(server: Json, *call: str) -> Json:
        words = ("--cli", server["command"], *server["args"], "--method", "tools/call")
        run = node.run(str(node.modules / INSPECTOR), *words, *call, HOME=str(tmp_path))
        assert run.returncode == 0, run.stdout + run.stderr
        result: Json = json.loads(run.stdout)
        return result

    with serving("relay", tmp_path, IMPATIENT) as place:
        folder = ("--tool-arg", f"folder={tmp_path}")
        interim = ask(place, "--tool-name", "build", *folder)
        assert interim["content"][0]["text"].startswith("Still running")
        (tmp_path / "gate").touch()
        (kept,) = ask(place, "--tool-name", "list_calls")["structuredContent"]["calls"]
        assert kept["call"] == interim["_meta"]["mcp-streams/call"]
        call = ("--tool-arg", f"call={kept['call']}")
        assert ask(place, "--tool-name", "wait_for_call", *call)["structuredContent"] == BUILT
    assert runs(tmp_path) == 1
