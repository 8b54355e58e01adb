"""`mcp-streams tools`, and what the command says when a call does not fit a tool."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.command import Following, run, run_as_printed
from tests.wire.process import ServerProcess

APP = '''
from typing import Literal
from streams import Server

server = Server("shop")

@server.tool
async def order(item: str, count: int, color: Literal["blue", "red"] = "red") -> str:
    """Order something.

    It is sent on the next day.
    """
    return f"{count} {color} {item}"

@server.tool
async def stock() -> dict[str, int]:
    """Count what is there."""
    return {"cups": 3}

@server.tool(input_schema={"type": "object", "properties": {"odd name": {"$ref": "#/$defs/x"}},
    "required": ["odd name"], "$defs": {"x": {"type": "array", "items": {"type": "number"}}}})
async def odd(**arguments: object) -> str:
    "\\x1b[2J[bold]Odd[/] :100:"
    return str(arguments)
'''


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "shop.py").write_text(APP)
    with ServerProcess(folder, app=f"{folder / 'shop.py'}:server") as server:
        yield server


@pytest.fixture(params=["ws", "http"])
def url(server: ServerProcess, request: pytest.FixtureRequest) -> str:
    return server.url if request.param == "ws" else f"http://127.0.0.1:{server.http_port}/mcp"


def test_the_tools_are_listed_a_line_each(url: str) -> None:
    done = run("tools", url)
    assert (done.returncode, done.stderr) == (0, "")
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["tool", "arguments", "description"]
    assert rows[0].split("  ")[0] == "order"
    assert "item: string, count: integer, [color: " in rows[0]
    assert rows[0].endswith("Order something. It is sent on the next day.")
    assert rows[1].split() == ["stock", "Count", "what", "is", "there."]
    assert "odd name: array of number" in rows[2]
    assert rows[2].endswith("\N{REPLACEMENT CHARACTER}[2J[bold]Odd[/] :100:")


def test_a_terminal_gets_a_table_of_its_width(server: ServerProcess) -> None:
    with Following("tools", server.url, on_terminal=True, out_on_terminal=True) as tools:
        assert tools.end()[0] == 0
    assert max(map(len, tools.said.splitlines())) <= 100
    assert "order" in tools.said


def test_with_json_the_tools_are_as_the_server_lists_them(server: ServerProcess) -> None:
    listed = json.loads(run("tools", server.url, "--json").stdout)
    assert [each["name"] for each in listed] == ["order", "stock", "odd"]
    assert listed[0]["inputSchema"]["required"] == ["item", "count"]
    assert json.loads(run("tools", server.url, "order", "--json").stdout) == listed[0]


def test_one_tool_is_described_with_a_call_that_can_be_pasted(url: str) -> None:
    for name in ("order", "stock", "odd"):
        done = run("tools", url, name)
        assert done.returncode == 0
        assert done.stdout.startswith(f"{name}\n")
        called = run_as_printed(done.stdout.splitlines()[-1])
        assert (called.returncode, called.stderr) == (0, ""), called.stderr
    order = run("tools", url, "order").stdout.splitlines()
    assert order[1:4] == ["Order something.", "", "It is sent on the next day."]
    assert order[5].split() == ["name", "type", "required", "default", "description"]
    assert order[6].split() == ["item", "string", "yes"]
    assert order[7].split() == ["count", "integer", "yes"]
    assert order[8].endswith('"red"')
    assert shlex.split(order[-1])[2:] == [url, "order", "item=text", "count:=1"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ordr", "No tool is called ordr; did you mean order?\n"),
        ("x", "No tool is called x; known are order, stock, odd.\n"),
    ],
)
def test_an_unknown_tool_is_told_with_the_nearest_one(url: str, name: str, why: str) -> None:
    done = run("tools", url, name)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", why)
    called = run("call", url, name)
    assert (called.returncode, called.stderr.endswith(why)) == (1, True)
    as_json = run("call", url, name, "--json")
    assert (as_json.returncode, as_json.stdout) == (1, "")
    error = json.loads(as_json.stderr)["error"]
    assert (error["code"], error["advice"]) == (-32602, why.strip())


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["item=cup", "cuont:=1"], "order has no argument cuont; did you mean count?"),
        (["item=cup"], "order needs count, for example: order item=text count:=1"),
        (["item=cup", "count=3"], "count is not text but integer, so write count:=JSON."),
    ],
)
def test_arguments_that_do_not_fit_are_told(url: str, words: list[str], hint: str) -> None:
    done = run("call", url, "order", *words)
    assert (done.returncode, done.shown[-1]) == (1, hint)
    as_json = run("call", url, "order", *words, "--json")
    assert json.loads(as_json.stdout)["isError"] is True
    assert json.loads(as_json.stderr) == {"advice": hint}


def test_a_limit_is_told_with_the_nearest_one(tmp_path: Path) -> None:
    done = run("serve", "app.py:server", "--limit", "steams_max=3")
    assert (done.returncode, len(done.shown)) == (2, 1)
    assert done.stderr.startswith("--limit: unknown steams_max; known are unsent_entries_max, ")
    assert done.stderr.endswith(". Did you mean streams_max?\n")
    for wrong in ("streams_max", "streams_max=many"):
        done = run("serve", "app.py:server", "--limit", wrong)
        assert (done.returncode, len(done.shown)) == (2, 1)
        assert "streams_max" in done.stderr


def test_the_usage_names_the_arguments_of_a_tool() -> None:
    for verb in ("call", "pages", "bench"):
        assert "[KEY=VALUE...]" in run(verb, "--help").stdout.splitlines()[0]
