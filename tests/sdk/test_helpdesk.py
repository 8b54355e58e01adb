"""One helpdesk with the official SDK, FastMCP and mcp-streams: the table in docs/use/helpdesk.md.

The official client uses each of the three, in its default mode and in the mode "legacy", where it
agrees on revision 2025-11-25. A cell of the table must be what the client gets.
"""

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal

import pytest
from mcp import Client, MCPError, types

from tests.rigs import ROOT, setups
from tests.rigs.doc_pages import free_port
from tests.sdk.cutting import Cut, Cutter
from tests.wire.process import CLI, wait_until

PAGE: Final = ROOT / "docs" / "use" / "helpdesk.md"
FOLDER: Final = ROOT / "docs" / "examples" / "helpdesk"
SERVERS: Final = ("with_sdk", "with_fastmcp", "with_streams")
ALL: Final = [*range(1, 21)]  # copies, 0.1 s each
BEFORE_CUT: Final = ALL[:3]
PATIENCE_S: Final = 60

Mode = Literal["auto", "legacy"]
# The rows that depend on the mode end with this.
MODES: Final[dict[Mode, str]] = {"auto": "", "legacy": ", 2025-11-25"}
Check = Callable[[Client], Awaitable[None]]

# The installation of FastMCP has a bound of its own.
pytestmark = pytest.mark.timeout(120, func_only=True)


class Desk:
    """The server of one of the three files, with its printer, in a folder of its own."""

    def __init__(self, name: str, python: Path, folder: Path) -> None:
        self.port = free_port()
        file = str(FOLDER / f"{name}.py")
        if name == "with_streams":
            where = ("--http", f"127.0.0.1:{self.port}", *setups.current.place(folder).options)
            self._command = [*CLI, "serve", f"{file}:server", *where]
        else:
            self._command = [str(python), file, str(self.port)]
        self._folder = folder
        self._log = folder / "log"
        self._printer = folder / "printer.txt"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        wait_until("the helpdesk listens", self._is_listening)

    def kill(self) -> None:
        """SIGKILL, and reap."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _is_listening(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", self.port)).close()
            return True
        return False

    def printed(self) -> list[int]:
        """The numbers of the copies that the printer has printed."""
        return [int(copy) for copy in re.findall(r"^copy (\d+):", self._printer.read_text(), re.M)]

    def tear_off(self) -> None:
        """Remove the copies that the printer has printed."""
        os.truncate(self._printer, 0)  # the server appends to the file


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> tuple[str, Path]:
    """The name of a server, and the interpreter that runs it."""
    needs_fastmcp = request.param == "with_fastmcp"
    python = request.getfixturevalue("fastmcp") if needs_fastmcp else Path(sys.executable)
    return request.param, python


@pytest.fixture(scope="module")
def desk(server: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    desk = Desk(*server, tmp_path_factory.mktemp("desk"))
    try:
        desk.start()
        yield desk
    finally:
        desk.kill()


def cell(row: str, server: str) -> str:
    """The cell of the page's table for this server."""
    (line,) = re.findall(rf"^\| {re.escape(row)} \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    said: str = line.split(" | ")[SERVERS.index(server)]
    return said


# Features


async def agree(_: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
    assert params.message == "Close “The printer is on fire”?"
    return types.ElicitResult(action="accept", content={"sure": True, "reason": "out"})


async def called(client: Client, tool: str, **arguments: Any) -> Any:
    """The structured content of a call that succeeds."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    return result.structured_content


async def refused(client: Client, tool: str, because: str, **arguments: Any) -> None:
    """A call that fails, with a text that says why."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    (content,) = result.content
    assert isinstance(content, types.TextContent)
    assert because in content.text


async def arguments_and_results(client: Client) -> None:
    tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert list(tools) == ["open_ticket", "search", "close_ticket", "export"]
    subject = tools["open_ticket"].input_schema["properties"]["subject"]
    assert (subject["minLength"], subject["description"]) == (3, "what is wrong")
    assert '["low", "normal", "urgent"]' in json.dumps(tools["open_ticket"].input_schema)
    ticket = await called(client, "open_ticket", subject="No tea", priority="low")
    number = ticket.pop("number")
    assert ticket == {"subject": "No tea", "priority": "low", "is_closed": False}
    found = (await called(client, "search", words="tea"))["result"]
    assert [each["number"] for each in found] == [*range(2, number + 1)]
    await refused(client, "open_ticket", "subject", subject="x")
    await refused(client, "open_ticket", "priority", subject="No tea", priority="x")


async def unknown_tickets(client: Client) -> None:
    await refused(client, "close_ticket", "There is no ticket 99.", number=99)
    with pytest.raises(MCPError):
        await client.read_resource("ticket://99")


async def resources_and_prompts(client: Client) -> None:
    (template,) = (await client.list_resource_templates()).resource_templates
    assert (template.uri_template, template.mime_type) == ("ticket://{number}", "application/json")
    (content,) = (await client.read_resource("ticket://1")).contents
    assert isinstance(content, types.TextResourceContents)
    assert json.loads(content.text)["subject"] == "The printer is on fire"
    (prompt,) = (await client.list_prompts()).prompts
    assert prompt.arguments is not None
    assert [(each.name, each.required) for each in prompt.arguments] == [
        ("subject", True),
        ("tone", False),
    ]
    got = await client.get_prompt("reply", {"subject": "tea", "tone": "formal"})
    (message,) = got.messages
    assert isinstance(message.content, types.TextContent)
    assert message.content.text == "Write a formal reply to: tea"
    with pytest.raises(MCPError):
        await client.get_prompt("reply", {"subject": "tea", "tone": "rude"})


async def completion(client: Client) -> None:
    ref = types.PromptReference(type="ref/prompt", name="reply")
    for typed, values in (("f", ["formal", "friendly"]), ("fo", ["formal"]), ("x", [])):
        found = await client.complete(ref, {"name": "tone", "value": typed})
        assert sorted(found.completion.values) == values


async def question(client: Client) -> None:
    assert await called(client, "close_ticket", number=1) == {"result": "Closed: out"}
    (content,) = (await client.read_resource("ticket://1")).contents
    assert isinstance(content, types.TextResourceContents)
    assert json.loads(content.text)["is_closed"]


async def progress(client: Client) -> None:
    reports = []

    async def report(progress: float, total: float | None, message: str | None) -> None:
        reports.append((progress, total))

    result = await client.call_tool("export", {"copies": 2}, progress_callback=report)
    assert result.structured_content == {"result": "2 copies"}
    assert reports == [(1, 2), (2, 2)]


FEATURES: Final[dict[str, Check]] = {
    "constraint, enum, dataclass, list": arguments_and_results,
    "lifespan, `ToolError`": unknown_tickets,
    "resource template, prompt": resources_and_prompts,
    "completion of `tone`": completion,
    "progress": progress,
}


def talk(desk: Desk, mode: Mode, check: Check) -> None:
    async def main() -> None:
        url = f"http://127.0.0.1:{desk.port}/mcp"
        async with (
            asyncio.timeout(PATIENCE_S),
            Client(url, elicitation_callback=agree, mode=mode) as client,
        ):
            await check(client)

    asyncio.run(main())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", FEATURES)
def test_all_three_have_the_features(
    server: tuple[str, Path], desk: Desk, row: str, mode: Mode
) -> None:
    assert cell(row, server[0]) in {"yes", "yes, a function", "yes, from its type"}
    talk(desk, mode, FEATURES[row])


@pytest.mark.parametrize("mode", MODES)
def test_a_question_reaches_a_person_where_the_page_says_so(
    server: tuple[str, Path], desk: Desk, mode: Mode
) -> None:
    async def check(client: Client) -> None:
        said = cell(f"question to a person{MODES[mode]}", server[0])
        if said == "yes":
            await question(client)
        else:
            await refused(client, "close_ticket", said.removeprefix("error: "), number=1)

    talk(desk, mode, check)


def test_the_client_agrees_on_the_revision_of_the_page(
    server: tuple[str, Path], desk: Desk
) -> None:
    async def check(client: Client) -> None:
        assert client.protocol_version == cell("revision", server[0])

    talk(desk, "auto", check)


@pytest.mark.parametrize("name", SERVERS)
def test_the_page_counts_the_lines_of_the_files(name: str) -> None:
    assert cell("file", name) == f"[{name}.py](../examples/helpdesk/{name}.py)"
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    assert cell("lines, without empty ones", name) == str(sum(map(bool, lines)))


def test_the_page_names_the_versions_that_are_compared() -> None:
    pins = (Path(__file__).parent / "fastmcp.txt").read_text()
    (fastmcp,) = re.findall(r"^fastmcp==(.*)$", pins, re.MULTILINE)
    assert f"| | official SDK {version('mcp')} | FastMCP {fastmcp} |" in PAGE.read_text()
    peers = (ROOT / "benchmarks" / "peers" / "requirements.txt").read_text()
    assert f"\nfastmcp=={fastmcp}\n" in peers, "benchmarks compare with the same version"


# Cuts and kills


@dataclass
class Seen:
    """The outcome of an export that was cut, and of a call after it, for the client; the copies
    that were printed before a kill, and in all.
    """

    export: str = ""
    reports: list[float] = field(default_factory=list)
    next: str = ""
    printed_before: list[int] = field(default_factory=list)
    printed: list[int] = field(default_factory=list)


def export_cut(desk: Desk, mode: Mode, *, is_killed: bool) -> Seen:
    """Export through a connection that is reset after the third report.

    If the server is killed then, another one listens before the client notices.
    """
    desk.tear_off()
    seen = Seen()

    def on_cut(_: int) -> None:
        if is_killed:
            desk.kill()
            seen.printed_before = desk.printed()
            desk.start()
            cutter.resume()  # other requests of the client were refused meanwhile, and wait

    async def report(progress: float, total: float | None, message: str | None) -> None:
        seen.reports.append(progress)

    async def told(client: Client, tool: str, arguments: dict[str, Any]) -> str:
        """The words of the page for what the client gets."""
        try:
            result = await client.call_tool(tool, arguments, progress_callback=report)
        except MCPError as error:
            return f"error: {error.message}"
        assert not result.is_error, result.content
        return "the result"

    async def main() -> None:
        url = f"http://127.0.0.1:{cutter.port}/mcp"
        async with asyncio.timeout(PATIENCE_S), Client(url, mode=mode) as client:
            seen.export = await told(client, "export", {"copies": len(ALL)})
            seen.next = await told(client, "search", {})

    with contextlib.closing(Cutter(desk.port, [Cut(3, is_reset=True)], on_cut=on_cut)) as cutter:
        asyncio.run(main())
        assert cutter.cuts_left == 0
    seen.printed = desk.printed()
    return seen


@pytest.mark.parametrize("mode", MODES)
def test_a_cut_is_what_the_page_says(server: tuple[str, Path], desk: Desk, mode: Mode) -> None:
    seen = export_cut(desk, mode, is_killed=False)
    assert seen.export == cell(f"cut: `export`{MODES[mode]}", server[0])
    assert seen.next == "the result"
    if server[0] == "with_streams":
        assert (seen.reports, seen.printed) == (ALL, ALL)
    elif seen.export == "the result":  # the SDK can lose a report while it replays others
        assert seen.reports == sorted(set(seen.reports))
    else:
        assert seen.reports == BEFORE_CUT


@pytest.mark.parametrize("mode", MODES)
def test_a_kill_is_what_the_page_says(server: tuple[str, Path], desk: Desk, mode: Mode) -> None:
    seen = export_cut(desk, mode, is_killed=True)
    assert seen.export == cell(f"killed: `export`{MODES[mode]}", server[0])
    assert seen.next == cell(f"killed: the next call{MODES[mode]}", server[0])
    assert seen.reports == (ALL if seen.export == "the result" else BEFORE_CUT)
    assert printed(seen) == cell("killed: copies printed afterwards", server[0])


def printed(seen: Seen) -> str:
    """The words of the page for what the printer printed after the kill."""
    if seen.printed == seen.printed_before:
        return "none"
    assert sorted(set(seen.printed)) == ALL
    assert len(seen.printed) <= len(ALL) + 1, "more than the copy before the next checkpoint"
    return "the rest, at most one twice"
