"""A remote server of ours behind `RemoteBackend`: what a host's own connection would lose."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from streams import Server
from streams.client.client import Client
from streams.engine.lifecycle import LIVE
from streams.errors import CallFailed, CannotConnect, Full
from streams.journal.contract import Journal
from streams.journal.memory import MemoryJournal
from streams.journal.records import Record
from streams.messages import decode
from streams.protocol.ticket import Ticket
from streams.server.running import RunningServer
from tests.rigs import ROOT
from tests.rigs.doc_pages import free_port
from tests.rigs.outages import Network, network
from tests.rigs.remote import attached, served
from tests.rigs.server import PLAIN, STREAMS, Talker, greeted
from tests.rigs.troubled import Troubled
from tests.wire.process import ServerProcess
from tests.wire.remote_server import QUESTION, server
from transports import dial
from transports.memory import Cable

Json = dict[str, Any]

APP: Final = f"{Path(__file__).parent / 'remote_server.py'}:server"
SCHEMES: Final = ("ws", "http")

# A bound for a test that hangs.
PATIENCE_S: Final = 60.0

# With the usual limits for silence, an outage without a reset is noticed after a minute.
NOTICED_S: Final = 30.0

every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


async def elicit(_: Json) -> Json:
    return {"action": "accept", "content": {"name": "x"}}


@asynccontextmanager
async def through_network(
    scheme: str, **given: Any
) -> AsyncIterator[tuple[Network, RunningServer]]:
    with trio.fail_after(PATIENCE_S):
        async with (
            served(server, scheme) as port,
            network(port) as net,
            attached(f"{scheme}://127.0.0.1:{net.port}", **given) as running,
        ):
            yield net, running


def steps(seen: list[Json]) -> list[int]:
    return [each["params"]["data"]["step"] for each in seen if "data" in each["params"]]


async def messages_of(call: Any) -> list[Json]:
    return [{"method": each.method, "params": decode(each.params, Json)} async for each in call]


@asynccontextmanager
async def talking(running: RunningServer, capabilities: Json = PLAIN) -> AsyncIterator[Talker]:
    async with trio.open_nursery() as nursery:
        cable = Cable(principal="alice", capacity=1 << 20)
        nursery.start_soon(running.serve, cable.far)
        yield await greeted(Talker(cable.near, cable), capabilities)
        nursery.cancel_scope.cancel()


# A server that is there


@every_scheme
async def test_everything_passes_as_the_remote_server_sends_it(scheme: str) -> None:
    async with through_network(scheme) as (_, running), talking(running) as host:
        await host.call(1, "count", token="mine", n=2)
        answer = await host.answer(1)
        assert answer["result"]["content"] == [{"type": "text", "text": "2 steps"}]
        progress = [
            each["params"] for each in host.seen if each.get("method", "").endswith("progress")
        ]
        assert progress == [
            {"progressToken": "mine", "progress": step, "total": 2, "message": f"step {step}"}
            for step in (1, 2)
        ]
        assert '"ratio":1.0' in json.dumps(host.seen, separators=(",", ":"))
        host.seen.clear()
        for method, params, found in (
            ("tools/list", {}, "count_again"),
            ("resources/read", {"uri": "memo://today"}, "a memo"),
            ("prompts/get", {"name": "greet", "arguments": {"name": "Ada"}}, "Hello Ada"),
            ("ping", {}, ""),
        ):
            assert found in str(await host.request(method, method, **params))
        unknown = await host.request("x", "vendor/unknown")
        assert unknown["code"] == -32601


@every_scheme
async def test_the_pages_of_a_remote_tool_are_turned(scheme: str) -> None:
    paged = Server("paged", resume_min_s=0)

    @paged.tool(pages=True)
    async def rows(count: int) -> AsyncIterator[str]:
        for row in range(count):
            yield f"row {row}"

    with trio.fail_after(PATIENCE_S):
        async with (
            served(paged, scheme) as port,
            network(port) as net,
            attached(f"{scheme}://127.0.0.1:{net.port}") as running,
            Client(running) as host,
        ):
            found = []
            async for page in host.pages("rows", {"count": 4}):
                found += [each["text"] for each in page["content"]]
                net.cut()
            assert found == [f"row {row}" for row in range(4)]


async def test_the_hello_is_that_of_the_remote_server() -> None:
    async with through_network("ws") as (_, running), Client(running) as host:
        assert host.server_info == {"name": "remote", "version": "7"}
        assert set(host.capabilities) >= {"tools", "resources", "prompts"}


@every_scheme
async def test_a_question_reaches_the_user_once(scheme: str) -> None:
    async with through_network(scheme) as (net, running):
        asked = []

        async def answer(params: Json) -> Json:
            asked.append(params)
            net.cut()  # the answer goes over the next connection
            return await elicit(params)

        async with Client(running, answers={"elicitation/create": answer}) as host:
            result = await host.call_tool("ask")
    assert asked == [QUESTION]
    assert "accept" in str(result.content)


async def test_a_host_without_the_capability_is_not_asked() -> None:
    async with through_network("ws") as (_, running), Client(running) as host:
        result = await host.call_tool("ask")
        assert result.is_error
        assert "elicitation" in str(result.content)


@every_scheme
async def test_a_cancel_reaches_the_remote_tool(scheme: str, tmp_path: Path) -> None:
    effects = tmp_path / "effects"
    async with through_network(scheme) as (_, running), Client(running) as host:
        arguments = {"n": 1, "until": str(tmp_path / "never"), "effects": str(effects)}
        async with host.call("count", arguments) as call:
            await anext(call)
            await call.cancel()
        while effects.read_text().split() != ["run", "cancelled"]:
            await trio.sleep(0.02)


async def test_two_hosts_do_not_disturb_each_other(tmp_path: Path) -> None:
    until = tmp_path / "until"
    async with through_network("http") as (_, running), talking(running) as first:
        await first.call("same", "count", token="same", n=1, until=str(until))
        await first.find(lambda each: each["method"] == "notifications/message")
        async with talking(running) as second:
            await second.call("same", "count", token="same", n=3)
            assert "3 steps" in str(await second.answer("same"))
            assert steps([m for m in second.seen if "method" in m]) == [1, 2, 3]
        until.touch()
        assert "1 steps" in str(await first.answer("same"))
        assert steps([m for m in first.seen if "method" in m]) == [1]


async def test_the_remote_session_ends_with_ours() -> None:
    async with through_network("ws") as (net, running):
        async with talking(running):
            assert net.is_used
        while net.is_used:
            await trio.sleep(0.02)


# Cuts and outages


@every_scheme
async def test_cuts_lose_nothing_and_repeat_nothing(scheme: str) -> None:
    async with through_network(scheme) as (net, running), Client(running) as host:
        async with host.call("count", {"n": 40, "pause_s": 0.01}) as call, trio.open_nursery() as n:

            async def cut() -> None:
                while True:
                    await trio.sleep(0.2)
                    net.cut()

            n.start_soon(cut)
            seen = await messages_of(call)
            result = await call.result()
            n.cancel_scope.cancel()
        assert steps(seen) == list(range(1, 41))
        assert len(seen) == 80
        assert result["content"][0]["text"] == "40 steps"


@every_scheme
async def test_a_dead_network_is_noticed_and_left_soon(scheme: str, tmp_path: Path) -> None:
    until = tmp_path / "until"
    async with (
        through_network(scheme) as (net, running),
        Client(running) as host,
        host.call("count", {"n": 1, "until": str(until)}) as call,
    ):
        await anext(call)
        net.go("dead")
        until.touch()
        await trio.sleep(8)
        net.go("up")
        with trio.fail_after(NOTICED_S):
            await call.result()


@every_scheme
async def test_an_outage_of_the_server_is_outlasted(scheme: str, tmp_path: Path) -> None:
    async with through_network(scheme) as (net, running), Client(running) as host:
        async with host.call("count", {"n": 30, "pause_s": 0.02}) as call:
            await anext(call)
            net.go("refusing")
            await trio.sleep(2)
            net.go("up")
            assert len(await messages_of(call)) == 59
        net.go("refusing")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(go_up_later, net)
            assert await host.call_tool("look", type=str) == "seen"  # it waits for the server


async def go_up_later(net: Network) -> None:
    await trio.sleep(1)
    net.go("up")


async def test_an_outage_beyond_the_limit_is_an_error() -> None:
    async with through_network("ws", give_up_s=1.0) as (net, running), Client(running) as host:
        net.go("refusing")
        with pytest.raises(CallFailed, match="No connection for 1 s") as raised:
            await host.call_tool("look")
        assert raised.value.data["reason"] == "unavailable"


async def test_a_call_outlives_a_host_that_restarts(tmp_path: Path) -> None:
    until = tmp_path / "until"
    async with through_network("ws") as (_, running):
        async with Client(running) as host:
            async with host.call("count", {"n": 2, "until": str(until)}) as call:
                for _ in range(4):
                    await anext(call)
                while call.ticket is None:
                    await trio.sleep(0.01)
            ticket = call.ticket
        until.touch()
        async with Client(running) as host, host.resume(ticket) as call:
            assert (await call.result())["content"][0]["text"] == "2 steps"


@every_scheme
async def test_a_response_that_no_journal_took_is_there_for_the_next_process(
    scheme: str, tmp_path: Path
) -> None:
    journal, until = Troubled(), tmp_path / "until"
    with trio.fail_after(PATIENCE_S):
        async with served(server, scheme) as port:
            url = f"{scheme}://127.0.0.1:{port}"
            async with attached(url, journal=journal) as running, talking(running, STREAMS) as host:
                announced = await host.begin(1, "count", n=2, pause_s=0.5, until=str(until))
                stream = announced["streamId"]
                while await checkpoint_of(journal, stream) < 2:
                    await trio.sleep(0.01)
                journal.trouble = Full("no room")
                until.touch()
                while not journal.refused:
                    await trio.sleep(0.01)
            journal.trouble = None
            async with attached(url, journal=journal):
                while (await record_of(journal, stream)).outcome is LIVE:
                    await trio.sleep(0.01)
            runs = await journal.read(stream, 0, bytes_max=1 << 20)
            assert b"2 steps" in runs[-1].body


@every_scheme
async def test_a_checkpoint_counts_no_message_that_the_journal_lacks(
    scheme: str, tmp_path: Path
) -> None:
    journal = MemoryJournal()
    async with (
        through_network(scheme, journal=journal) as (_, running),
        talking(running, STREAMS) as host,
    ):
        for number in range(20):
            stream = await host.begin(number, "count", n=1, until=str(tmp_path / "never"))
            while not (restart := (await record_of(journal, stream["streamId"])).restart) or (
                restart.state is None
            ):
                await trio.sleep(0.01)
            ticket = Ticket.parse(decode(restart.state, str))
            assert (ticket.after or 0) == restart.seq


async def test_a_call_that_another_client_takes_over_says_so(tmp_path: Path) -> None:
    journal, until = MemoryJournal(), tmp_path / "until"
    with trio.fail_after(PATIENCE_S):
        async with served(server, "ws") as port:
            url = f"ws://127.0.0.1:{port}"
            async with attached(url, journal=journal) as running, talking(running, STREAMS) as host:
                stream = await host.begin(1, "count", n=1, until=str(until))
                while await checkpoint_of(journal, stream["streamId"]) < 1:
                    await trio.sleep(0.01)
                restart = (await record_of(journal, stream["streamId"])).restart
                assert restart is not None
                assert restart.state is not None
                ticket = Ticket.parse(decode(restart.state, str))
                async with Client(dial(url)) as other, other.resume(ticket) as call:
                    refused = (await host.answer(1))["error"]
                    assert refused["data"]["reason"] == "superseded"
                    until.touch()
                    assert "1 steps" in str(await call.result())


async def record_of(journal: Journal, stream: str) -> Record:
    found = await journal.find(stream)
    assert found is not None
    return found


async def checkpoint_of(journal: Journal, stream: str) -> int:
    """The seq that a call restarts from."""
    restart = (await record_of(journal, stream)).restart
    return 0 if restart is None else restart.seq


# Processes that are killed


async def test_a_call_outlives_the_kill_of_the_remote_server(tmp_path: Path) -> None:
    until, effects = tmp_path / "until", tmp_path / "effects"
    with ServerProcess(tmp_path, app=APP) as far, trio.fail_after(PATIENCE_S):
        async with attached(far.url) as running, Client(running) as host:
            arguments = {"n": 3, "until": str(until), "effects": str(effects)}
            async with host.call("count_again", arguments) as call:
                first = [await anext(call) for _ in range(6)]
                far.kill()
                far.start()
                until.touch()
                assert len(first) == 6
                assert await messages_of(call) == []
                assert (await call.result())["content"][0]["text"] == "3 steps"
            assert effects.read_text().split() == ["run", "run"]
            # A tool that may not run twice ends with its server, and the host is told.
            until.unlink()
            async with host.call("count", {"n": 1, "until": str(until)}) as call:
                await anext(call)
                far.kill()
                far.start()
                with pytest.raises(CallFailed) as raised:
                    await call.result()
            assert raised.value.data["reason"] == "interrupted"
            assert await host.call_tool("look", type=str) == "seen"


@contextmanager
def owner(url: str, folder: Path, *rerun: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """The backend in a process of its own: its port, and the process."""
    words = [url, str(folder / "attached.db"), str(folder / "hello.json"), *rerun]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.rigs.remote", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline()), process
    finally:
        process.kill()
        process.communicate()


@every_scheme
async def test_a_call_outlives_the_kill_of_its_own_process(scheme: str, tmp_path: Path) -> None:
    until, effects = tmp_path / "until", tmp_path / "effects"
    with trio.fail_after(PATIENCE_S):
        async with served(server, scheme) as far:
            url = f"{scheme}://127.0.0.1:{far}"
            arguments = {"n": 20, "pause_s": 0.05, "until": str(until), "effects": str(effects)}
            with await trio.to_thread.run_sync(begun, url, tmp_path) as (port, process):
                async with (
                    Client(dial(f"ws://127.0.0.1:{port}")) as host,
                    host.call("count", arguments) as call,
                ):
                    first = [decode((await anext(call)).params, Json) for _ in range(15)]
                    while call.ticket is None:
                        await trio.sleep(0.01)
                    ticket = call.ticket
                    process.kill()
            until.touch()
            with await trio.to_thread.run_sync(begun, url, tmp_path) as (port, _):
                async with (
                    Client(dial(f"ws://127.0.0.1:{port}")) as host,
                    host.resume(ticket) as call,
                ):
                    rest = [each["params"] for each in await messages_of(call)]
                    assert (await call.result())["content"][0]["text"] == "20 steps"
    seen = [each["data"]["step"] for each in first + rest if "data" in each]
    assert seen == list(range(1, 21))
    assert effects.read_text().split() == ["run"]


def begun(url: str, folder: Path) -> Any:
    """`owner`, entered by the caller."""
    return owner(url, folder)


# A server that is not there


async def test_a_host_starts_without_the_server(tmp_path: Path) -> None:
    hello, port = tmp_path / "hello.json", free_port()
    url = f"ws://127.0.0.1:{port}"
    with trio.fail_after(PATIENCE_S):
        async with (
            served(server, "ws", port),
            attached(url, hello_path=hello) as running,
            Client(running) as host,
        ):
            listed = [tool.name for tool in await host.tools()]
            while not {"tools/list", "prompts/list"} <= set(kept(hello)["lists"]):
                await trio.sleep(0.02)
        assert hello.stat().st_mode & 0o777 == 0o600
        changed = trio.Event()
        async with attached(url, hello_path=hello) as running, talking(running) as host_talker:
            result = await host_talker.request(1, "tools/list")
            assert [tool["name"] for tool in result["tools"]] == listed
            assert result["_meta"]["mcp-streams/stale"] is True
            assert (await host_talker.request(2, "prompts/list"))["prompts"]
            await host_talker.call(3, "look")  # it waits
            newer = Server("remote", version="8")
            newer.tool(name="look")(lambda: "seen anew")
            async with served(newer, "ws", port):
                assert "seen anew" in str(await host_talker.answer(3))
                if not any(map(is_list_changed, host_talker.seen)):
                    await host_talker.find(is_list_changed)
                result = await host_talker.request(4, "tools/list")
                assert [tool["name"] for tool in result["tools"]] == ["look"]
                assert "_meta" not in result
            changed.set()


def is_list_changed(message: Json) -> bool:
    return message.get("method") == "notifications/tools/list_changed"


def kept(path: Path) -> Json:
    return json.loads(path.read_text()) if path.exists() else {"lists": {}}


async def test_a_first_start_without_the_server_is_an_error() -> None:
    url = f"ws://127.0.0.1:{free_port()}"
    with trio.fail_after(PATIENCE_S):
        async with attached(url, start_s=0.5) as running:
            with pytest.raises(CannotConnect, match="no server listens there"):
                async with Client(running):
                    pass


async def test_a_server_that_comes_within_the_limit_is_waited_for() -> None:
    port = free_port()
    with trio.fail_after(PATIENCE_S):
        async with attached(f"http://127.0.0.1:{port}") as running, trio.open_nursery() as nursery:

            async def start() -> None:
                await trio.sleep(1)
                async with served(server, "http", port):
                    await trio.sleep_forever()

            nursery.start_soon(start)
            async with Client(running) as host:
                assert await host.call_tool("look", type=str) == "seen"
            nursery.cancel_scope.cancel()


async def test_a_file_that_cannot_be_read_is_no_obstacle(tmp_path: Path) -> None:
    hello = tmp_path / "hello.json"
    hello.write_text('{"hello": [')
    async with through_network("ws", hello_path=hello) as (_, running), Client(running) as host:
        assert await host.call_tool("look", type=str) == "seen"
        while not hello.read_text().endswith("}"):
            await trio.sleep(0.02)
