"""Notifications to all clients, and tools that come and go while the server runs."""

import math
import threading

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Call, Limits, Server, SyncCall
from streams.engine.notices import NOTICES_BYTES_MAX
from streams.exchange import Caller
from streams.keys import Keyring
from tests.rigs.server import PLAIN, STREAMS, Talker, open_house, text_of
from tests.rigs.web import EVENTS, Answer, browsing

TOOLS_CHANGED = "notifications/tools/list_changed"


@pytest.fixture
def server() -> Server:
    server = Server("tested", page_size=2)

    @server.tool
    async def one() -> str:
        return "1"

    return server


async def two() -> str:
    return "2"


def methods_of(answer: Answer) -> list[str]:
    return [message["method"] for _, message in answer.events if message]


async def noticed(talker: Talker) -> list[str]:
    """The notifications before the answer to a ping."""
    talker.seen.clear()
    assert await talker.request("ping", "ping") == {}
    return [m["method"] for m in talker.seen if "method" in m]


# To all clients


async def test_a_notification_reaches_every_client(
    server: Server, autojump_clock: MockClock
) -> None:
    async with (
        open_house(server) as house,
        browsing(house, PLAIN) as browser,
        browsing(house, PLAIN) as absent,
    ):
        talkers = [await house.dial(PLAIN), await house.dial(STREAMS)]
        silent = Talker((cable := house.cable()).near, cable)  # has not initialized
        standing = await browser.fetch("GET", accept=EVENTS)
        await house.running.notify_all("acme/news", {"n": 1})
        await server.notify_all("acme/news", {"n": 2})
        for talker in talkers:
            heard = [await talker.read(), await talker.read()]
            assert [m["params"]["n"] for m in heard] == [1, 2]
            assert not any("id" in m for m in heard)
        await wait_all_tasks_blocked()
        assert [m["params"]["n"] for _, m in standing.events if m] == [1, 2]
        assert await noticed(silent) == []
        late = await absent.fetch("GET", accept=EVENTS)
        await trio.sleep(1)
        assert late.body == b":\n\n", "it is not kept for a client that was not there"


async def test_a_standing_stream_stays_open_between_notifications(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        standing = await browser.fetch("GET", accept=EVENTS)
        for n in range(3):
            await trio.sleep(100)
            await house.running.notify_all("acme/news", {"n": n})
        await wait_all_tasks_blocked()
        assert methods_of(standing) == ["acme/news"] * 3
        assert standing.body.count(b":\n\n") > 3
        other = await browser.fetch("GET", accept=EVENTS)
        await house.running.notify_all("acme/news")
        await wait_all_tasks_blocked()
        assert methods_of(standing) == ["acme/news"] * 3, "the newest one has it"
        assert methods_of(other) == ["acme/news"]


async def test_what_cannot_be_sent_is_an_error() -> None:
    server = Server("tested", limits=Limits(message_bytes_max=1_000))
    async with open_house(server) as house:
        with pytest.raises(TypeError):
            await house.running.notify_all("acme/news", object())
        with pytest.raises(ValueError, match="of which there may be 1000"):
            await house.running.notify_all("acme/news", {"text": "x" * 1_000})


async def test_a_client_that_does_not_read_costs_a_bounded_amount(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        talker = await house.dial(PLAIN, capacity=128)
        session = next(iter(house.running.engine._connections)).session
        await browser.fetch("GET", accept=EVENTS)
        text = "x" * 10_000
        for n in range(1_000):
            await house.running.notify_all("acme/news", {"n": n, "text": text})
        waiting = session.notices.take()
        assert 0 < sum(map(len, waiting)) <= NOTICES_BYTES_MAX
        first = await talker.read()
        assert first["params"]["n"] == 0
        talker.seen.clear()
        server.add_tool(two)
        await talker.find(lambda m: m.get("method") == TOOLS_CHANGED)


# Tools that come and go


async def test_a_client_is_told_that_the_tools_have_changed(server: Server) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        talker = await house.dial(PLAIN)
        standing = await browser.fetch("GET", accept=EVENTS)
        server.add_tool(two, title="Two")
        assert (await talker.read())["method"] == TOOLS_CHANGED
        listed = (await talker.request(1, "tools/list"))["tools"]
        assert [(tool["name"], tool.get("title")) for tool in listed] == [
            ("one", None),
            ("two", "Two"),
        ]
        await talker.call(2, "two")
        assert text_of(await talker.answer(2)) == "2"
        server.remove_tool("two")
        assert (await talker.read())["method"] == TOOLS_CHANGED
        assert (await talker.request(3, "tools/call", name="two"))["code"] == -32602
        await wait_all_tasks_blocked()
        assert methods_of(standing) == [TOOLS_CHANGED] * 2


async def test_many_changes_at_once_are_told_once(server: Server) -> None:
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        for n in range(10):
            server.tool(name=f"t{n}")(two)
        await wait_all_tasks_blocked()
        assert await noticed(talker) == [TOOLS_CHANGED]


async def test_a_change_is_kept_once_for_a_client_that_is_not_there(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        server.add_tool(two)
        await trio.sleep(1)
        server.remove_tool("two")
        await trio.sleep(1)
        standing = await browser.fetch("GET", accept=EVENTS)
        await trio.sleep(1)
        assert methods_of(standing) == [TOOLS_CHANGED]
        await standing.hang_up()
        again = await browser.go_on(standing.ids[-1])
        await trio.sleep(1)
        assert methods_of(again) == []


@pytest.mark.parametrize("is_thread", [False, True])
async def test_a_tool_may_add_tools(server: Server, is_thread: bool) -> None:
    if is_thread:

        @server.tool
        def learn(call: SyncCall) -> str:
            server.add_tool(two)
            return "learned"

    else:

        @server.tool(name="learn")
        async def learn_async(call: Call) -> str:
            server.add_tool(two)
            await server.notify_all("acme/news")
            return "learned"

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "learn")
        assert text_of(await talker.answer(1)) == "learned"
        while not (told := [m for m in talker.seen if m.get("method") == TOOLS_CHANGED]):
            await talker.request("ping", "ping")
        assert len(told) == 1
        await talker.call(3, "two")
        assert text_of(await talker.answer(3)) == "2"


async def test_a_running_call_of_a_removed_tool_goes_on(server: Server) -> None:
    go_on = trio.Event()

    @server.tool
    async def wait() -> str:
        await go_on.wait()
        return "done"

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "wait")
        await wait_all_tasks_blocked()
        server.remove_tool("wait")
        go_on.set()
        assert text_of(await talker.answer(1)) == "done"


async def test_scopes_of_a_removed_tool_guard_its_calls(autojump_clock: MockClock) -> None:
    server = Server("tested", announce_after_s=0)

    @server.tool(scopes=["admin"])
    async def wait() -> str:
        await trio.sleep(1000)
        return "done"

    may, may_not = (
        Caller("bearer(tokens, ada)", lambda: math.inf, frozenset(scopes))
        for scopes in (["admin"], ["other"])
    )
    async with (
        open_house(server) as house,
        browsing(house, STREAMS, caller=may) as first,
        browsing(house, STREAMS, caller=may_not) as second,
    ):
        call = await first.call(1, "wait")
        stream = call.events[1][1]["params"]["stream"]["streamId"]
        server.remove_tool("wait")
        refused = await second.post(1, "stream/resume", streamId=stream)
        assert refused.status == 403
        assert (await first.post(2, "stream/resume", streamId=stream)).status == 200


def names(server: Server, cursor: str | None) -> tuple[list[str], str | None]:
    tools, following = server.tools.page(cursor, 2)
    return [tool["name"] for tool in tools], following


def test_a_cursor_survives_the_removal_of_tools() -> None:
    server = Server("tested")
    for name in "abcdef":
        server.tool(name=name)(two)
    first, cursor = names(server, None)
    assert first == ["a", "b"]
    for gone in ("b", "a", "e"):
        server.remove_tool(gone)
    following, cursor = names(server, cursor)
    assert following == ["c", "d"]
    assert names(server, cursor) == (["f"], None)
    server.tool(name="b")(two)
    assert names(server, cursor) == (["f", "b"], None)
    with pytest.raises(ValueError, match="unknown cursor"):
        names(server, "x")


def test_removing_tools_for_ever_keeps_few_cursors() -> None:
    server = Server("tested")
    for n in range(3_000):
        server.tool(name=f"t{n}")(two)
        server.remove_tool(f"t{n}")
    assert len(server.tools._positions) <= 1_001
    assert len(server.tools) == 0


def test_a_tool_that_is_not_there_cannot_be_removed(server: Server) -> None:
    with pytest.raises(ValueError, match="there is no tool 'two' to remove"):
        server.remove_tool("two")
    with pytest.raises(ValueError, match="there is a tool one already"):
        server.add_tool(two, name="one")


def test_threads_may_change_the_tools_at_once() -> None:
    server = Server("tested")

    def change(prefix: str) -> None:
        for n in range(100):
            server.add_tool(two, name=f"{prefix}{n}")
            if n % 2:
                server.remove_tool(f"{prefix}{n}")

    threads = [threading.Thread(target=change, args=[prefix]) for prefix in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.tools) == 200


async def test_a_change_after_the_end_of_the_server_is_no_error(server: Server) -> None:
    async with open_house(server):
        pass
    server.add_tool(two)
    await server.notify_all("acme/news")


async def test_a_session_that_came_back_after_a_restart_is_told(
    server: Server, autojump_clock: MockClock
) -> None:
    keyring = Keyring.load(None)
    async with open_house(server, keyring=keyring) as house, browsing(house, PLAIN) as browser:
        journal, session = house.as_after_a_crash(), browser.session
    async with (
        open_house(server, journal=journal, keyring=keyring) as house,
        browsing(house, PLAIN) as browser,
    ):
        browser.session = session
        server.add_tool(two)
        await trio.sleep(1)
        standing = await browser.fetch("GET", accept=EVENTS)
        await trio.sleep(1)
        assert methods_of(standing) == [TOOLS_CHANGED]
