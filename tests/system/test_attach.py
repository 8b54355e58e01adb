"""`mcp-streams attach`, and `serve` of an object of the official SDK: real processes."""

import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from mcp import StdioServerParameters
from mcp.client.client import Client as SdkClient
from mcp.client.stdio import stdio_client

from streams import Client
from streams.journal.ownership import hello_path
from tests.acceptance.launch import owner_pid, wait_for_end
from tests.rigs import HERE
from tests.rigs.command import run
from tests.system.test_wrap import SERVER, begun, journals, patient, pid, states, text, wrapped
from tests.wire.process import CLI, ServerProcess
from tests.wire.raw import DEADLINE_S
from transports import dial, stdio

__all__ = ["states"]  # a fixture

APP = f"{HERE / 'stdio_server.py'}:server"


def attached(url: str, *options: str, **how: Any) -> Client:
    """A client that starts `attach` as a host does."""
    words = [*CLI, "attach", url, "--linger=0.5", *options]
    return patient(partial(stdio.connect, words, **how))


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_two_hosts_share_an_owner_and_not_a_session(states: Path, scheme: str) -> None:
    with wrapped("--name=remote") as server:
        url = getattr(server, scheme)
        async with attached(url) as one, attached(url) as two:
            assert one.server_info["name"] == "small"
            assert await text(one, "add", a=1, b=2) == "3"
            assert await pid(one) != await pid(two)
            [journal] = [path for path in journals(states) if path.name.startswith("127.0.0.1-")]
            owner = owner_pid(journal)
        wait_for_end(owner)


async def test_other_credentials_are_another_owner(states: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.jsonl"
    for name in ("ada", "bob"):
        token = run("token", "new", name, "--file", str(tokens)).stdout
        (tmp_path / name).write_text(token)
        (tmp_path / name).chmod(0o600)
    with wrapped(f"--auth-tokens={tokens}", "--name=remote") as server:
        ada = attached(server.http, f"--token-file={tmp_path / 'ada'}")
        env = {**os.environ, "MCP_STREAMS_TOKEN": (tmp_path / "bob").read_text().strip()}
        bearer = f"--header=Authorization: Bearer {(tmp_path / 'bob').read_text().strip()}"
        async with (
            ada,
            attached(server.http, env=env) as bob,
            attached(server.http, bearer) as third,
        ):
            for each in (ada, bob, third):
                assert await text(each, "add", a=1, b=2) == "3"
            assert await text(bob, "variable", name="MCP_STREAMS_TOKEN") == ""
    attaching = [path for path in journals(states) if path.name.startswith("127.0.0.1-")]
    assert len(attaching) == 3


async def test_it_starts_without_the_server_and_finds_it_later(
    tmp_path: Path, states: Path
) -> None:
    with trio.fail_after(3 * DEADLINE_S), ServerProcess(tmp_path) as server:
        url = f"http://127.0.0.1:{server.http_port}/mcp"
        async with attached(url) as one:
            tools = [tool.name for tool in await one.tools()]
            [journal] = journals(states)
            kept = hello_path(journal)
            while not (kept.exists() and b"tools/list" in kept.read_bytes()):
                await trio.sleep(0.01)
        server.kill()
        async with attached(url) as one:
            assert [tool.name for tool in await one.tools()] == tools
            server.start()
            assert "1" in await text(one, "count", n=1)


async def test_stdio_is_wrap(states: Path) -> None:
    command = " ".join(SERVER)
    async with attached(f"stdio:{command}") as one:
        assert await text(one, "add", a=1, b=2) == "3"
    assert [path.name.partition("-")[0] for path in journals(states)] == ["stdio_server"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "URL"),
        (["ftp://x"], "write http://HOST:PORT/PATH"),
        (["http://"], "write http://HOST:PORT/PATH"),
        (["stdio:"], "no command to start"),
        (["stdio:no-such-program"], "PATH has no program no-such-program"),
        (["stdio:'"], "No closing quotation"),
        (["stdio:true", "--header=A:b"], "--header are for URLs"),
        (["http://127.0.0.1:1", "--header=A"], "--header: write NAME:VALUE"),
        (["http://127.0.0.1:1", "--header=Host: x"], "the header Host is set by the client itself"),
        (["http://example.com", "--header=A: b"], "use TLS"),
        (["http://127.0.0.1:1", "--give-up=0"], "--give-up: write a time above 0"),
        (["http://127.0.0.1:1", "--give-up=1w"], "1w is no time"),
        (["http://127.0.0.1:1", "--token-file=/no/such"], "/no/such"),
        (["http://127.0.0.1:1", "--patience=-1"], "--patience: write seconds"),
    ],
)
def test_wrong_usage_says_what_to_do(words: list[str], why: str) -> None:
    done = run("attach", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert why in " ".join(done.stderr.replace("│", " ").split())


# Hosts that give up


@pytest.mark.parametrize("kind", ["wrap", "serve", "attach"])
async def test_an_interim_answer_comes_before_the_host_gives_up(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "go"
    patience = ("--patience=0.3", "--linger=0.5", "--once=wait")
    journal = f"--journal={tmp_path / 'served.db'}"
    with trio.fail_after(2 * DEADLINE_S), wrapped("--name=remote") as server:
        words = {
            "wrap": ["wrap", *patience, "--", *SERVER],
            "serve": ["serve", APP, journal, *patience],
            "attach": ["attach", server.http, *patience],
        }[kind]
        how = StdioServerParameters(command=CLI[0], args=[*CLI[1:], *words], env=dict(os.environ))
        async with SdkClient(stdio_client(how)) as one:  # a client that cannot resume

            async def said(tool: str, **arguments: Any) -> str:
                result = await one.call_tool(tool, arguments)
                return str(getattr(result.content[0], "text", ""))

            tools = {tool.name for tool in (await one.list_tools()).tools}
            assert {"wait_for_call", "list_calls"} <= tools
            interim = await said("wait", file=str(file))
            again = await said("wait", file=str(file))
            assert "wait_for_call" in interim
            assert len(await begun(file)) == 1, "it has not run twice"
            file.touch()
            [call] = re.findall(r"call=\W?([\w-]+)", again)
            while (answer := await said("wait_for_call", call=call)).startswith("Still running"):
                pass  # it looks for the file, and a busy machine takes its time
            assert answer == "waited"


# Objects of the official SDK


async def test_an_object_of_the_official_sdk_is_served_unchanged(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, app=APP) as server:
        for url in (server.url, f"http://127.0.0.1:{server.http_port}/mcp"):
            async with patient(dial(url)) as one:
                assert one.server_info["name"] == "small"
                assert await text(one, "add", a=40, b=2) == "42"
        assert server.stop(signal.SIGTERM) == 0


async def test_its_calls_outlive_their_host(tmp_path: Path) -> None:
    file = tmp_path / "go"
    words = [*CLI, "serve", APP, "--journal", str(tmp_path / "own.db"), "--linger=20"]
    with trio.fail_after(2 * DEADLINE_S):
        async with (
            patient(partial(stdio.connect, words)) as one,
            one.call("wait", {"file": str(file)}) as call,
        ):
            await begun(file)
            while (ticket := call.ticket) is None:
                await trio.sleep(0.01)
        file.touch()
        async with patient(partial(stdio.connect, words)) as two, two.resume(ticket) as call:
            result = await call.result()
        os.kill(owner_pid(tmp_path / "own.db"), signal.SIGTERM)
    assert result["content"][0]["text"] == "waited"


FASTMCP = """
class FastMCP:
    __module__ = "fastmcp.server.server"

server = FastMCP()
"""


def test_what_cannot_be_served_is_told_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "fast.py").write_text(FASTMCP)
    done = run("serve", f"{tmp_path / 'fast.py'}:server")
    assert done.returncode == 2
    assert "mcp-streams wrap -- fastmcp run" in done.stderr
    (tmp_path / "none.py").write_text("server = object()\n")
    assert "has no Server named 'server'" in run("serve", f"{tmp_path / 'none.py'}:server").stderr
    (tmp_path / "missing.py").write_text("raise ModuleNotFoundError('No mcp', name='mcp')\n")
    done = run("serve", f"{tmp_path / 'missing.py'}:server")
    assert "pip install 'mcp-streams[sdk]'" in done.stderr
