"""The documentation is true: examples run, links lead somewhere, defaults are the code's."""

import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from html import unescape
from pathlib import Path

import msgspec
import pytest
import trio

from docs import record
from streams import Client, Limits, Server
from streams.cli import base
from streams.errors import refusal
from streams.server import prompts, resources
from streams.server.tools import DEFAULTS
from tests.rigs import ROOT
from tests.rigs.diagram import state_diagram
from tests.rigs.doc_pages import PAGES, Stage, blocks
from transports import stdio

README = ROOT / "README.md"
REFERENCE = ROOT / "docs" / "use" / "reference.md"

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    try:
        yield stage
    finally:
        stage.close()


@every_page
def test_the_examples_run_as_they_stand(page: Path, stage: Stage) -> None:
    for block in blocks(page):
        stage.play(block)


@every_page
def test_messages_on_a_page_are_json(page: Path) -> None:
    for block in blocks(page, "json"):
        message = msgspec.json.decode(block.text)
        assert message.get("jsonrpc") == "2.0" or list(message) in (["mcpServers"], ["servers"])


def test_the_first_block_of_the_readme_can_be_pasted(stage: Stage) -> None:
    first = next(block for block in blocks(README, "sh") if "serve" in block.text)
    [result] = re.findall(r"It prints `(.*?)`", README.read_text())
    assert result in stage.paste(first).splitlines()


async def test_the_configuration_of_a_host_starts_a_server(tmp_path: Path) -> None:
    block, _ = blocks(README, "json")
    program = re.search(r"<<'END'\n(.*?)^END$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert program
    (tmp_path / "reports.py").write_text(program[1])
    here = block.text.replace("/home/ada/.venv/bin", str(Path(sys.executable).parent))
    [server] = msgspec.json.decode(here.replace("/home/ada", str(tmp_path)))["mcpServers"].values()
    command = [server["command"], *server["args"]]
    with trio.fail_after(60):
        async with (
            Client(partial(stdio.connect, command, cwd="/"), connect_timeout_s=60) as client,
            client.call("build", {"rows": 1}) as call,
        ):
            result = await call.result()
    assert result["content"][0]["text"] == "yearly: 1 rows"


WRAPPING = [
    pytest.param(ROOT / page, number, id=f"{Path(page).name}-{number}")
    for page, number in (
        ("README.md", 1),
        ("docs/use/existing.md", 0),
    )
]


@pytest.mark.parametrize(("page", "number"), WRAPPING)
async def test_the_configurations_of_hosts_wrap_a_server(
    tmp_path: Path, page: Path, number: int
) -> None:
    """With a server of the tests in place of the one that `npx` would fetch."""
    config = msgspec.json.decode(blocks(page, "json")[number].text)
    server = next(iter(next(iter(config.values())).values()))
    assert Path(server["command"]).name == "mcp-streams"
    place = server["args"].index("--")
    wrap, *options = server["args"][:place]
    assert (wrap, server["args"][place + 1]) == ("wrap", "npx")
    ours = [sys.executable, "-m", "streams.cli", wrap, "--journal", str(tmp_path / "journal.db")]
    command = [*ours, *options, "--", sys.executable, "-m", "tests.rigs.stdio_server"]
    with trio.fail_after(60):
        connect = partial(stdio.connect, command, cwd=ROOT)
        async with Client(connect, connect_timeout_s=60) as client:
            names = [tool.name for tool in await client.list_tools()]
    assert "add" in names
    assert ("wait_for_call" in names) == ("--patience" in options)


def test_the_recording_is_of_the_server_in_the_readme() -> None:
    shown = unescape(re.sub(r"<[^>]*>", "\n", (ROOT / "docs" / "recording.svg").read_text()))
    for step in record.STEPS:
        assert f"$ {step.command}\n" in shown, "make recording"
    assert "yearly: " in shown


def test_the_state_diagram_is_the_transition_table() -> None:
    drawn = [block.text for block in blocks(ROOT / "docs" / "inside" / "design.md", "mermaid")]
    assert drawn == [state_diagram()], "python -m tests.rigs.diagram prints the current one"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.is_file(), target
        assert not anchor or anchor in anchors(linked), target


# Made when a tool runs, and not under version control.
MADE = {"benchmarks/results"}


@every_page
def test_files_and_modules_that_a_page_names_exist(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = re.findall(r"`((?:streams|transports|tests|benchmarks|docs)[./][\w./*]+)`", prose)
    for name in named:
        if "/" in name:
            assert any(ROOT.glob(name.rstrip("/"))) or name.startswith(tuple(MADE)), name
        else:
            pkgutil.resolve_name(name)  # raises for neither a module nor a name in one


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached = {ROOT / "README.md"}
    to_do = list(reached)
    while to_do:
        page = to_do.pop()
        for target in re.findall(r"\]\(([^)\s#]+\.md)[^)]*\)", page.read_text()):
            linked = (page.parent / target).resolve()
            if "://" not in target and linked not in reached:
                reached.add(linked)
                to_do.append(linked)
    assert reached >= set(PAGES)


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"^make (\w+)|`make (\w+)`", page.read_text(), re.MULTILINE):
            name = "".join(target)
            assert re.search(rf"^{name}:", makefile, re.MULTILINE), name


def table(page: Path, heading: str) -> dict[str, str]:
    """The first two columns of the table whose first heading is `heading`, without backticks."""
    _, found, rest = page.read_text().partition(f"\n| {heading} |")
    assert found, heading
    body = rest.split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip().strip("`") for cell in line.split("|")[1:3]] for line in body]
    return dict(rows)


def keyword_defaults(function: Callable[..., object]) -> dict[str, str]:
    parameters = inspect.signature(function).parameters.values()
    return {
        parameter.name: repr(parameter.default)
        for parameter in parameters
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def test_documented_settings_are_those_of_the_server_and_the_client() -> None:
    assert table(REFERENCE, "`Server(…)`") == keyword_defaults(Server)
    assert table(REFERENCE, "`@server.tool(…)`") == {
        name: repr(default) for name, default in DEFAULTS.items()
    }
    for decorator, defaults in (
        ("resource(uri, …)", resources.DEFAULTS),
        ("prompt(…)", prompts.DEFAULTS),
    ):
        assert table(REFERENCE, f"`@server.{decorator}`") == {
            name: repr(default) for name, default in defaults.items()
        }
    assert table(REFERENCE, '`server.asgi(path="/mcp", …)`') == keyword_defaults(Server.asgi)
    assert table(REFERENCE, "`Client(dialer, …)`") == keyword_defaults(Client)


def test_documented_limits_are_all_limits() -> None:
    defaults = msgspec.structs.asdict(Limits())
    documented = {name: float(value) for name, value in table(REFERENCE, "limit").items()}
    assert documented == defaults


def test_documented_reasons_have_their_codes() -> None:
    reasons = table(REFERENCE, "`reason`")
    assert reasons == {reason: str(refusal(reason).code) for reason in reasons}


def test_tests_that_the_page_on_attackers_names_exist() -> None:
    page = (ROOT / "docs" / "inside" / "attackers.md").read_text()
    named = set(re.findall(r"`((?:\w+/)*test_\w+\.py)`", page))
    assert named
    for name in named:
        assert list((ROOT / "tests").rglob(name)), name


def test_documented_exit_codes_are_those_of_the_commands() -> None:
    codes = {int(code) for code in table(REFERENCE, "exit code")}
    assert codes == {
        base.DONE,
        base.FAILED,
        base.USAGE,
        base.CANNOT_CONNECT,
        base.GONE,
        base.TIMED_OUT,
        base.DETACHED,
        base.BROKEN_PIPE,
    }
