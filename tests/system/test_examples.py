"""The examples of the documentation run as their docstrings say, and keep their promises."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import trio
from trio.testing import MockClock

from streams import Client, Ticket
from tests.rigs import ROOT
from tests.rigs.clients import at_home
from tests.rigs.doc_pages import COMMAND_S, Block, Stage
from tests.rigs.proxy import Proxy
from tests.wire.pages_verbs import PLAIN, ask_page, request_page, token_of
from tests.wire.process import ServerProcess
from tests.wire.verbs import KINDS, STREAMS
from transports import dial

FOLDER: Final = ROOT / "docs" / "examples"
EXAMPLES: Final = sorted(FOLDER.glob("*.py"))
LOG: Final = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d .*\n", re.MULTILINE)
LINES_MAX: Final = 90
HOUR_S: Final = 3600.0

every_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
# An event stream and lines are two readings of the same answers: what is long goes over one.
lasting_kinds = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ws-mcp"])


def docstring_of(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def load(name: str) -> Any:
    """An example as a module, to be called piece by piece."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class QuietStage(Stage):
    """A stage where what a program logs is no part of what it prints."""

    def _run(self, command: str) -> str:
        return LOG.sub("", super()._run(command))


@every_example
def test_an_example_runs_as_its_docstring_says(path: Path, tmp_path: Path) -> None:
    shutil.copy(path, tmp_path)
    indented = re.findall(r"^    (.*\n?)", docstring_of(path), re.MULTILINE)
    stage = QuietStage(tmp_path)
    try:
        stage.play(Block("console", "".join(indented) + "\n"))
    finally:
        stage.close()


@every_example
def test_an_example_is_one_file_that_can_be_read_at_once(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LINES_MAX
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).split(".")[0])
    allowed = {"streams", "transports", "trio"} | sys.stdlib_module_names
    if path.name == "official_sdk.py":
        allowed |= {"mcp", "mcp_types", "anyio", "pydantic"}  # those of the extra `sdk`
    assert imported <= allowed


@every_example
def test_an_example_is_linked_from_a_page(path: Path) -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert f"examples/{path.name})" in pages


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where an example keeps its files."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def serving(name: str, folder: Path) -> ServerProcess:
    return ServerProcess(folder, app=f"{FOLDER / name}.py:server")


# official_sdk.py


async def test_a_program_of_the_official_sdk_survives_cuts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load("official_sdk")
    with serving("official_sdk", folder) as server:
        async with trio.open_nursery() as nursery:
            proxy = Proxy(server.port)
            await nursery.start(proxy.serve)

            async def cut_often() -> None:
                for _ in range(3):
                    await trio.sleep(0.15)
                    proxy.cut()

            nursery.start_soon(cut_often)
            await example.main(f"ws://127.0.0.1:{proxy.port}")
            nursery.cancel_scope.cancel()
    printed = capsys.readouterr().out.splitlines()
    assert printed == [*(f"{row} of 5" for row in range(1, 6)), "Built 5 targets for Ada."]


# paging.py


@pytest.fixture
def paging(folder: Path) -> Any:
    example = load("paging")
    example.fill()
    return example


@pytest.fixture
def table(paging: Any, folder: Path) -> Iterator[ServerProcess]:
    with serving("paging", folder) as server:
        yield server


@pytest.mark.parametrize("scheme", ["ws", "http"])
async def test_every_row_comes_once_and_in_order_over_a_connection_that_is_cut(
    paging: Any, table: ServerProcess, scheme: str
) -> None:
    proxy = Proxy(table.port if scheme == "ws" else table.http_port)
    with trio.fail_after(COMMAND_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(proxy.serve)

            async def cut_now_and_then() -> None:
                while True:
                    await proxy.cut_after(300_000)

            nursery.start_soon(cut_now_and_then)
            url = f"{scheme}://127.0.0.1:{proxy.port}"
            first, token = await paging.read(url, rows_max=paging.ROWS // 2)
            second, end = await paging.read(url, token=token)
            nursery.cancel_scope.cancel()
    assert first + second == list(range(1, paging.ROWS + 1))
    assert end is None
    assert proxy.passed_bytes > 1_000_000, "there were cuts"


@lasting_kinds
def test_a_client_that_knows_the_proposal_alone_reads_the_same_rows(
    paging: Any, table: ServerProcess, kind: str
) -> None:
    with table.connect(kind) as peer:
        peer.initialize(PLAIN)
        page = ask_page(peer, "readings", **paging.QUERY)
        ids = ids_on(page)
        while token := token_of(page):
            if len(ids) == paging.ROWS // 2:
                break
            page = ask_page(peer, "readings", token, **paging.QUERY)
            ids += ids_on(page)
        request_page(peer, "readings", token, **paging.QUERY)
        peer.cut()  # and its answer is lost
    with table.connect(kind) as peer:
        peer.initialize(PLAIN)
        while token:
            page = ask_page(peer, "readings", token, **paging.QUERY)
            ids += ids_on(page)
            token = token_of(page)
    assert ids == list(range(1, paging.ROWS + 1))


def ids_on(page: Any) -> list[int]:
    return [row[0] for row in page.result["structuredContent"]["rows"]]


# rollout.py


async def test_who_looks_in_every_hour_for_days_sees_every_status_once(
    autojump_clock: MockClock,
) -> None:
    rollout = load("rollout")
    arguments = {"service": "shop", "replicas": 10, "each_takes_s": 6.25 * HOUR_S}
    seen: list[list[str]] = []
    async with at_home(rollout.server) as memory:
        began_at, token = trio.current_time(), None
        for visit in range(100):
            async with Client(memory.connect) as client:
                (tool,) = await client.list_tools()
                statuses, token = await rollout.look_in(client, arguments, token)
            seen.append(statuses)
            if token is None:
                break
            await trio.sleep((20 if visit == 25 else 1) * HOUR_S)
        took_s = trio.current_time() - began_at
    assert list(chain(*seen)) == [f"shop: {n} of 10 replicas are ready." for n in range(1, 11)]
    assert max(map(len, seen)) == 3, "what happened while nobody looked in has waited"
    assert seen.count([]) > 20
    assert 2 * rollout.DAY_S < took_s < tool.meta["mcp-streams/expectedSeconds"]


# approval.py


def test_a_question_waits_for_another_process_and_is_answered_once(folder: Path) -> None:
    def run(*words: str) -> str:
        program = [sys.executable, str(FOLDER / "approval.py"), *words]
        done = subprocess.run(
            program, capture_output=True, text=True, timeout=COMMAND_S, check=True
        )
        return LOG.sub("", done.stdout)

    with serving("approval", folder) as server:
        url = f"http://127.0.0.1:{server.http_port}/mcp"
        assert run("call", url) == "A question waits.\n"
        ticket = Ticket.parse((folder / "approval.ticket").read_text())
        named = {"streamId": ticket.stream, "resumeToken": ticket.token}
        with server.connect("ws-mcp") as other:
            other.initialize(STREAMS)
            waiting = other.ask("stream/poll", named).result
            assert (waiting["status"], waiting["hasRequest"]) == ("live", True)
            other.request("stream/resume", named)
            question = other.expect(lambda message: message.method == "elicitation/create")
            said = run("answer", f"ws://127.0.0.1:{server.port}", "accept")
            assert said == "Pay 1250 cents for A-17?\npaid\n"
            other.answer(question["id"], {"action": "decline"})
            other.settle()
            answered = other.ask("stream/poll", named).result
            assert (answered["status"], answered["hasRequest"]) == ("completed", False)
        assert run("answer", url, "decline") == "Too late (delivered).\n"


# roaming.py


async def test_no_message_is_lost_or_comes_twice_between_two_devices(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roaming = load("roaming")
    server = await trio.to_thread.run_sync(serving("roaming", folder).start)
    try:
        ticket = await roaming.laptop(f"ws://127.0.0.1:{server.port}")
        assert re.fullmatch(r"[A-Za-z0-9_-]+", ticket)
        assert printed(capsys) == list(range(1, roaming.LINES // 2 + 1))
        await roaming.phone(f"http://127.0.0.1:{server.http_port}/mcp", ticket)
        assert printed(capsys) == list(range(roaming.LINES // 2 + 1, roaming.LINES + 1))
        async with Client(dial(f"ws://127.0.0.1:{server.port}")) as client:
            standing = await client.poll(msgspec.structs.replace(Ticket.parse(ticket), after=None))
        assert (standing.status, standing.pending_messages) == ("completed", False)
    finally:
        await trio.to_thread.run_sync(server.kill)


def printed(capsys: pytest.CaptureFixture[str]) -> list[int]:
    return [int(line) for line in capsys.readouterr().out.splitlines() if line.isdecimal()]
