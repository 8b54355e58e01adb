"""The official Python SDK over stdio: it knows nothing of us, and gets all that MCP promises."""

import asyncio
import contextlib
import shlex
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from mcp import Client, MCPError, types
from mcp.client import advertise
from mcp.client.stdio import StdioServerParameters

from tests.acceptance.launch import LINGER, wait_for_end
from tests.rigs import setups
from tests.rigs.setups import Place
from tests.wire.process import CLI

APP: Final = f"{Path(__file__).parent / 'sdk_server.py'}:server"
LATEST: Final = "2025-11-25"  # of the revisions that have a handshake

Talk = Callable[[Client], Awaitable[None]]


class Host:
    """A host that spawns the server as the SDK does."""

    def __init__(self, folder: Path, options: tuple[str, ...], place: Place | None) -> None:
        self.logs: list[Any] = []
        self.questions: list[str] = []
        self._exit_code = folder / "exit-code"
        words = [*CLI, "serve", APP, "--stdio", *options]
        serve = shlex.join(words if place is None else place.command(words))
        # The shell leads the process group; it reports how the server has ended.
        script = f"{serve}; echo $? > {shlex.quote(str(self._exit_code))}"
        self._server = StdioServerParameters(command="sh", args=["-c", script])

    def talk(self, talk: Talk, **settings: Any) -> None:
        """Spawn the server, run `talk`, and end the server as the SDK does."""

        async def main() -> None:
            async with asyncio.timeout(60):
                async with Client(
                    self._server,
                    logging_callback=self._log,
                    elicitation_callback=self._elicit,
                    **settings,
                ) as client:
                    await talk(client)

        asyncio.run(main())

    async def _log(self, params: types.LoggingMessageNotificationParams) -> None:
        self.logs.append(params.data)

    async def _elicit(self, context: object, params: Any) -> types.ElicitResult:
        self.questions.append(params.message)
        return types.ElicitResult(action="accept", content={"name": "python"})

    def exit_code(self) -> int | None:
        """The server's exit code; None where a signal ended the whole process group."""
        return int(self._exit_code.read_text()) if self._exit_code.exists() else None


def text_of(result: types.CallToolResult) -> str:
    content = result.content[0]
    assert isinstance(content, types.TextContent)
    return content.text


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = setups.current.place(tmp_path)
    yield place
    place.end_owner()


@pytest.fixture(params=("no journal", "foreground", "relay"))
def host(request: pytest.FixtureRequest, tmp_path: Path, place: Place) -> Host:
    options = {"no journal": (), "foreground": ("--foreground", *LINGER), "relay": LINGER}
    return Host(tmp_path, options[request.param], None if request.param == "no journal" else place)


@pytest.mark.parametrize("settings", [{}, {"mode": "legacy"}])
def test_the_client_finds_the_newest_revision_that_both_know(
    host: Host, settings: dict[str, str]
) -> None:
    async def talk(client: Client) -> None:
        assert client.protocol_version == LATEST
        assert client.server_info is not None
        assert (client.server_info.name, client.server_info.version) == ("sdk-tests", "1.0")
        tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} == {"work", "ask", "fail", "measure", "outlast"}

    host.talk(talk, **settings)
    assert host.exit_code() == 0


def test_progress_and_logs_reach_their_callbacks(host: Host) -> None:
    reported = []

    async def report(progress: float, total: float | None, message: str | None) -> None:
        reported.append((progress, total, message))

    async def talk(client: Client) -> None:
        result = await client.call_tool("work", {"steps": 20}, progress_callback=report)
        assert not result.is_error
        assert text_of(result) == "20 steps"

    host.talk(talk)
    assert reported == [(step, 20, f"step {step}") for step in range(1, 21)]
    assert host.logs == [{"step": step} for step in range(1, 21)]


def test_an_elicitation_is_answered_by_its_callback(host: Host) -> None:
    async def talk(client: Client) -> None:
        result = await client.call_tool("ask", {})
        answer = {"action": "accept", "content": {"name": "python"}}
        assert result.structured_content == answer

    host.talk(talk)
    assert host.questions == ["Who is it?"]


def test_failures_are_results_that_say_why(host: Host) -> None:
    async def talk(client: Client) -> None:
        failed = await client.call_tool("fail", {})
        assert failed.is_error
        assert text_of(failed) == "the tool says no"
        misused = await client.call_tool("work", {"steps": "many"})
        assert misused.is_error
        assert "steps" in text_of(misused)
        with pytest.raises(MCPError, match="nobody") as unknown:
            await client.call_tool("nobody", {})
        assert unknown.value.code == -32602

    host.talk(talk)


def test_structured_content_fits_its_schema(host: Host) -> None:
    async def talk(client: Client) -> None:
        await client.list_tools()  # the SDK checks results against the schemas that it knows
        result = await client.call_tool("measure", {"values": [1, 2.5]})
        assert result.structured_content == {"sum": 3.5, "largest": 2.5}

    host.talk(talk)


def test_many_calls_at_once_are_told_apart(host: Host) -> None:
    async def talk(client: Client) -> None:
        calls = [client.call_tool("work", {"steps": steps}) for steps in range(40)]
        texts = [text_of(result) for result in await asyncio.gather(*calls)]
        assert texts == [f"{steps} steps" for steps in range(40)]

    host.talk(talk)


async def _leave_in_the_middle(client: Client, host: Host, folder: Path) -> None:
    """Leave while a call runs; the SDK's host then ends the server with signals."""
    call = asyncio.ensure_future(client.call_tool("outlast", {"directory": str(folder)}))
    while not host.logs:
        await asyncio.sleep(0.01)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call


def test_a_host_that_leaves_a_call_ends_the_server(host: Host, tmp_path: Path) -> None:
    """The SDK cancels the call, and then no answer is due."""

    async def talk(client: Client) -> None:
        await _leave_in_the_middle(client, host, tmp_path)

    host.talk(talk)
    assert host.exit_code() == 0
    assert not (tmp_path / "done").exists()


def test_a_call_of_a_client_that_opted_in_outlives_the_sdks_signals(
    tmp_path: Path, place: Place
) -> None:
    host = Host(tmp_path, LINGER, place)

    async def talk(client: Client) -> None:
        # The host leaves without a cancellation, as one that just ends.
        call = asyncio.ensure_future(client.call_tool("outlast", {"directory": str(tmp_path)}))
        while not host.logs:
            await asyncio.sleep(0.01)
        call.add_done_callback(lambda done: done.cancelled() or done.exception())

    host.talk(talk, extensions=[advertise("mcp-streams/v1", {})])
    owner = place.owner()
    assert owner is not None
    (tmp_path / "go").touch()
    wait_for_end(owner)
    assert (tmp_path / "done").read_text() == str(owner)
