"""The next child after one has died: what it is told, and which calls are sent to it again."""

import os
import signal
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
import trio

from streams.backends.child import ChildBackend
from streams.backends.conversation import Conversation
from streams.backends.supervision import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    DEATHS_MAX,
    DEATHS_S,
    PENDING_MAX,
    RESET_S,
    Restarts,
    listed_tools,
)
from streams.engine.stream import Stream
from streams.journal.memory import MemoryJournal
from streams.journal.records import Outcome
from streams.journal.sqlite import open_sqlite_journal
from streams.keys import Keyring
from streams.limits import Limits
from streams.server.running import open_backend
from tests.rigs.children import call, said, settings, state, surfing, text, until, wrapped
from tests.rigs.server import PLAIN, STREAMS, House, Json, Talker, greeted
from transports.memory import Cable

NEWS = "notifications/tools/list_changed"
ASK = "elicitation/create"


async def killed(talker: Talker) -> int:
    """Kill the child, and wait for the next one; returns the id of the first."""
    pid: int = (await state(talker))["pid"]
    os.kill(pid, signal.SIGKILL)
    await trio.sleep(0.05)
    return pid


def logs(seen: list[Json]) -> list[Any]:
    is_log = "notifications/message"
    return [each["params"]["data"] for each in seen if each.get("method") == is_log]


def live_of(streams: Iterable[Stream]) -> list[Stream]:
    return [each for each in streams if each.state.outcome is Outcome.LIVE]


# When


def test_pauses_double_until_a_child_has_lived_for_a_while() -> None:
    restarts, pauses = Restarts(), []
    for uptime_s in [*[0] * 11, RESET_S, 0]:
        now = len(pauses) * DEATHS_S
        restarts.died(now, uptime_s)
        pauses.append(round(restarts.next_at - now, 6))
    doubled = [BACKOFF_FIRST_S * 2**number for number in range(9)]
    assert pauses == [*doubled, *[BACKOFF_MAX_S] * 2, BACKOFF_FIRST_S, 2 * BACKOFF_FIRST_S]
    assert not restarts.is_over


def test_ten_deaths_in_five_minutes_are_enough() -> None:
    restarts = Restarts()
    for number in range(DEATHS_MAX - 1):
        restarts.died(number * (DEATHS_S / DEATHS_MAX), RESET_S)
    assert not restarts.is_over
    restarts.died(DEATHS_S - 1, RESET_S)
    assert restarts.is_over


async def test_the_next_child_starts_by_itself() -> None:
    async with wrapped() as (house, backend):
        talker = await house.dial(PLAIN)
        pid = await killed(talker)
        while not backend.children or backend.children == [pid]:
            await trio.sleep(0.01)
        assert backend.children == [(await state(talker))["pid"]]


async def test_a_child_that_has_ended_well_starts_with_the_next_message() -> None:
    async with wrapped() as (house, backend):
        talker = await house.dial(PLAIN)
        await call(talker, "leave", code=0)
        await trio.sleep(0.5)
        assert backend.children == []
        assert text(await call(talker, "echo", 2)) == "{}"


async def test_a_child_that_always_runs_starts_after_a_good_end_too() -> None:
    async with wrapped(restart="always") as (house, backend):
        talker = await house.dial(PLAIN)
        await call(talker, "leave", code=0)
        while not backend.children:
            await trio.sleep(0.01)


async def test_a_child_that_never_restarts_is_down() -> None:
    async with wrapped(restart="never") as (house, _):
        talker = await house.dial(PLAIN)
        await call(talker, "leave", code=4)
        error = await call(talker, "echo", 2)
        assert error["data"] == {
            "reason": "backend_down",
            "exitCode": 4,
            "stderrTail": "last words\n",
        }
        assert "exit code 4: 'last words'" in error["message"]
        assert text(await call(await house.dial(PLAIN), "echo")) == "{}"


async def test_a_child_that_dies_over_and_over_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streams.backends.supervision.BACKOFF_MAX_S", 0.02)
    downs = []
    async with wrapped(isolate="none") as (house, backend):
        backend.shared._on_down = lambda: downs.append(1)
        talker = await house.dial(PLAIN)
        for number in range(DEATHS_MAX):
            error = await call(talker, "leave", number, code=1)
            assert error["data"]["reason"] == "interrupted"
        error = await call(talker, "echo", 100)
        assert error["data"]["reason"] == "backend_down"
        assert downs == [1]


# Told to the next child


async def test_the_next_child_has_the_clients_hello_level_and_subscriptions() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial({"roots": {}})
        await talker.request(1, "logging/setLevel", level="error")
        for number, uri in enumerate(("a:1", "a:2", "a:3")):
            assert await talker.request(10 + number, "resources/subscribe", uri=uri) == {}
        await talker.request(20, "resources/unsubscribe", uri="a:2")
        before = await state(talker)
        await killed(talker)
        after = await until(talker, lambda found: len(found["subscribed"]) == 2)
        assert after["pid"] != before["pid"]
        assert after["client"] == before["client"]
        assert after["initialized"] == 1
        assert (after["level"], after["subscribed"]) == ("error", ["a:1", "a:3"])


async def test_a_child_of_the_next_process_is_told_all_of_it_too() -> None:
    journal, keyring = MemoryJournal(), Keyring.load(None)
    capabilities: Json = {"roots": {"listChanged": True}}
    async with (
        wrapped(journal=journal, keyring=keyring) as (house, _),
        surfing(house, capabilities) as web,
    ):
        await web.request("logging/setLevel", level="warning")
        await web.request("resources/subscribe", uri="a:1")
        stored, session = house.as_after_a_crash(), web.session
    async with wrapped(journal=stored, keyring=keyring) as (house, backend):
        assert backend.children == []
        async with surfing(house, {}) as web:
            web.session = session
            found = said(await web.call_tool("state"))
            assert found["client"]["clientInfo"] == {"name": "web", "version": "1"}
            assert found["client"]["capabilities"] == capabilities
            assert found["initialized"] == 1
            assert (found["level"], found["subscribed"]) == ("warning", ["a:1"])


async def test_a_change_of_the_lists_is_told(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    async with wrapped(does={"marker": marker}) as (house, _):
        talker = await house.dial(PLAIN)
        await talker.request(1, "tools/list")
        await killed(talker)
        await state(talker, 2)
        await trio.sleep(0.2)
        marker.touch()
        await killed(talker)
        told = await talker.find(lambda message: message.get("method") == NEWS)
        assert told == {"jsonrpc": "2.0", "method": NEWS}
        assert [each.get("method") for each in talker.seen].count(NEWS) == 1


async def test_notifications_wait_for_the_next_child_up_to_a_limit() -> None:
    line = b'{"jsonrpc":"2.0","method":"notifications/initialized"}\n'
    dropped = "notifications are dropped: a child has not started"
    async with wrapped() as (house, backend):
        talker = await house.dial(PLAIN)
        (guest,) = backend.guests
        for turn in (1, 2):
            await call(talker, "leave", turn, code=0)
            while backend.children:
                await trio.sleep(0.01)
            with structlog.testing.capture_logs() as logged:
                for _ in range(PENDING_MAX + 50):
                    guest.supervisor.tell(line)
                found = await state(talker)
            assert found["initialized"] == 1 + PENDING_MAX
            warnings = [each for each in logged if each["event"] == dropped]
            assert [each["limit"] for each in warnings] == [PENDING_MAX]


# Calls that are sent again


@pytest.mark.parametrize("capabilities", [PLAIN, STREAMS])
@pytest.mark.parametrize("rerun", [("onc*",), ("hinted",), ("x", "once")])
async def test_a_call_is_sent_again_and_says_nothing_twice(
    capabilities: Json, rerun: Any, tmp_path: Path
) -> None:
    async with wrapped(rerun=rerun) as (house, _):
        talker = await house.dial(capabilities)
        arguments = {"n": 20, "at": 10, "file": str(tmp_path / "file")}
        await talker.call(1, "once", token="t", **arguments)
        assert text((await talker.answer(1))["result"]) == "twice"
        assert logs(talker.seen) == [*range(20)]


async def test_hints_are_read_from_the_next_child_where_one_dies_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []

    async def listed(child: Conversation) -> list[msgspec.Raw]:
        if not killed:
            killed.append(child.pid)
            await child.killed("a test has killed it")
            return []
        return await listed_tools(child)

    monkeypatch.setattr("streams.backends.supervision.listed_tools", listed)
    async with wrapped(rerun=("hinted",)) as (house, _):
        talker = await house.dial(PLAIN)
        await talker.call(1, "once", n=20, at=10, file=str(tmp_path / "file"))
        assert text((await talker.answer(1))["result"]) == "twice"
    assert killed


async def test_a_call_that_was_delivered_and_confirmed_is_sent_again(tmp_path: Path) -> None:
    async with wrapped(rerun=("once",)) as (house, _):
        talker = await house.dial({"experimental": {"mcp-streams/v1": {"positions": True}}})
        await talker.call(1, "once", n=20, at=10, s=0.5, file=str(tmp_path / "file"))
        stream = await talker.announced()
        await talker.find(lambda message: message.get("params", {}).get("data") == 10)
        await talker.tell("notifications/stream/ack", streamId=stream["streamId"], seq=11)
        assert text((await talker.answer(1))["result"]) == "twice"
        assert logs(talker.seen) == [*range(20)]


async def test_a_tool_without_a_hint_is_not_sent_again(tmp_path: Path) -> None:
    async with wrapped(rerun=("hinted", "other*")) as (house, _):
        talker = await house.dial(PLAIN)
        error = await call(talker, "leave", code=9)
        assert error["data"]["reason"] == "interrupted"
        assert error["data"]["exitCode"] == 9


async def test_a_hint_that_is_not_true_is_no_hint(tmp_path: Path) -> None:
    async with wrapped(rerun=("hinted",)) as (house, _):
        talker = await house.dial(PLAIN)
        error = await call(talker, "other", file=str(tmp_path / "file"))
        assert error["data"]["reason"] == "interrupted"
        assert "did not repeat itself" not in error["message"]
        assert (await state(talker))["calls"] == 1


async def test_a_call_that_says_something_else_is_interrupted(tmp_path: Path) -> None:
    async with wrapped(rerun=("other",)) as (house, _):
        talker = await house.dial(PLAIN)
        error = await call(talker, "other", file=str(tmp_path / "file"))
        assert error["data"]["reason"] == "interrupted"
        assert "did not repeat itself" in error["message"]


async def test_a_call_that_kills_each_child_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streams.backends.supervision.BACKOFF_MAX_S", 0.02)
    monkeypatch.setattr("streams.engine.rerun.BACKOFF_MAX_S", 0.02)
    async with wrapped(rerun=("leave",)) as (house, _):
        talker = await house.dial(PLAIN)
        error = await call(talker, "leave", code=9)
        assert error["data"]["reason"] == "interrupted"


@pytest.mark.parametrize("early", [False, True])
async def test_an_answer_is_given_to_the_next_child_too(early: bool, tmp_path: Path) -> None:
    async with wrapped(rerun=("*",)) as (house, _):
        talker = await house.dial({"elicitation": {}})
        await talker.call(1, "once_asking", early=early, file=str(tmp_path / "file"))
        question = await talker.find(lambda message: message.get("method") == ASK)
        if early:
            await trio.sleep(0.6)
        await talker.say({"id": question["id"], "result": {"action": "accept"}})
        assert said((await talker.answer(1))["result"]) == {"action": "accept"}
        assert [each.get("method") for each in talker.seen].count(ASK) == 1


async def test_answers_at_any_moment_of_the_change_reach_the_next_child(tmp_path: Path) -> None:
    async with wrapped(rerun=("*",)) as (house, _):
        for number in range(12):
            talker = await house.dial({"elicitation": {}})
            file = str(tmp_path / f"{number}")
            await talker.call(1, "once_asking", early=True, file=file)
            question = await talker.find(lambda message: message.get("method") == ASK)
            await trio.sleep(0.17 + number * 0.01)
            await talker.say({"id": question["id"], "result": {"n": number}})
            assert said((await talker.answer(1))["result"]) == {"n": number}


@pytest.mark.parametrize("is_sqlite", [False, True])
async def test_a_call_goes_on_in_the_next_process(is_sqlite: bool, tmp_path: Path) -> None:
    """Its child died with this process; the client has a part of it, and gets the rest once.

    The first child of the next process does not start.
    """
    stumbles = ("/bin/sh", "-c", '[ -e "$0" ] || { : > "$0"; exit 3; }; exec "$@"')
    given: Json = {"rerun": ("once",), "keyring": Keyring.load(None)}
    arguments = {"n": 20, "at": 10, "s": 0.6, "file": str(tmp_path / "file")}
    memory = MemoryJournal()

    @asynccontextmanager
    async def serving() -> AsyncIterator[House]:
        path = tmp_path / "journal.db"
        async with (
            open_sqlite_journal(path) if is_sqlite else nullcontext(memory) as journal,
            wrapped(journal=journal, **given) as (house, _),
        ):
            yield house

    async with serving() as house:
        talker = await house.dial(STREAMS)
        stream = await talker.begin(1, "once", **arguments)
        await talker.find(lambda message: message.get("params", {}).get("data") == 10)
    has_stumbled = tmp_path / "has stumbled"
    given["command"] = (*stumbles, str(has_stumbled), *settings().command)
    async with serving() as house:
        while not has_stumbled.exists():
            await trio.sleep(0.01)
        rest = await (await house.dial(STREAMS)).resume(2, stream)
    assert logs(talker.seen) == [*range(11)]
    assert logs(rest)[-9:] == [*range(11, 20)]
    assert logs(rest) == [*range(20)][-len(logs(rest)) :]
    (result,) = (each["result"] for each in rest if "content" in each.get("result", {}))
    assert text(result) == "twice"


async def test_any_other_call_is_interrupted_in_the_next_process() -> None:
    keyring = Keyring.load(None)
    async with wrapped(keyring=keyring, rerun=("hinted",)) as (house, _):
        talker = await house.dial(STREAMS)
        stream = await talker.begin(1, "never")
        await talker.find(lambda message: message.get("method") == "notifications/message")
        stored = house.as_after_a_crash()
    async with wrapped(journal=stored, keyring=keyring, rerun=("hinted",)) as (house, _):
        rest = await (await house.dial(STREAMS)).resume(2, stream)
        (error,) = (each["error"] for each in rest if "error" in each)
        assert error["data"]["reason"] == "interrupted"


async def test_nothing_is_kept_of_calls_whose_restart_is_given_up() -> None:
    keyring, limits = Keyring.load(None), Limits(restarts_max=1)
    given: Json = {"rerun": ("*",), "keyring": keyring, "limits": limits}
    async with wrapped(**given) as (house, _):
        talker = await house.dial(STREAMS)
        for number in range(3):
            await talker.begin(number, "never")
        journal = house.as_after_a_crash()
    for _ in range(3):
        async with wrapped(journal=journal, **given) as (house, backend):
            supervisors, streams = backend.places.supervisors, house.running.engine.index
            while not len(supervisors) == len(backend.children) == len(live_of(streams)):
                await trio.sleep(0.01)
            journal = house.as_after_a_crash()
    assert not live_of(streams)


async def test_a_plain_client_hears_of_our_own_end() -> None:
    backend, keyring = ChildBackend(settings(rerun=("*",))), Keyring.load(None)
    async with trio.open_nursery() as nursery:
        async with open_backend(backend, MemoryJournal(), keyring) as running:
            cable = Cable(principal="alice")
            nursery.start_soon(running.serve, cable.far)
            talker = await greeted(Talker(cable.near, cable), PLAIN)
            await talker.call(1, "never")
            await talker.find(lambda message: message.get("method") == "notifications/message")
        (answer,) = await talker.end()
    assert answer["error"]["data"]["reason"] == "interrupted"
