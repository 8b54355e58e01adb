"""Idempotency keys over every transport: one run for any number of calls, also across a kill."""

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from tests.wire.conftest import Http, Wire
from tests.wire.process import Gate, ServerProcess
from tests.wire.raw import Id, Message, Peer, answers_to
from tests.wire.verbs import (
    CREATE,
    KINDS,
    PLAIN,
    POSITIONS,
    STREAMS,
    counted,
    opting_in,
    refused,
    up_to,
)

ANONYMOUS: Final = [kind for kind in KINDS if kind != "stdio"]
AT_ONCE: Final = 100


@pytest.fixture
def key(tmp_path: Path) -> str:
    """A key for each test, though the server is the same."""
    return f"{tmp_path.name}-{'0123456789abcdef' * 2}"


def params(key: Any, tool: str = "count", **arguments: object) -> dict[str, Any]:
    return {
        "name": tool,
        "arguments": arguments,
        "_meta": {"mcp-streams/idempotencyKey": key},
    }


def outcomes(answers: list[Message]) -> Counter[str]:
    """How often each answer came: a tool's text, or the reason of an error."""
    return Counter(
        answer["result"]["content"][0]["text"] if "result" in answer else str(answer.reason)
        for answer in answers
    )


def assert_one_run(answers: list[Message], gate: Gate) -> None:
    """Check for one run.

    A second run would have set another mark, and would wait at the gate.
    """
    found = outcomes(answers)
    assert found["superseded"] + found["counted 3"] == len(answers) == AT_ONCE
    assert found["counted 3"] >= 1  # and more where it was done before the last had asked
    assert gate.marks() == []


def opened(server: ServerProcess, stack: ExitStack, kind: str) -> Peer:
    peer = stack.enter_context(server.connect(kind))
    peer.initialize(opting_in(kind, STREAMS))
    return peer


def test_the_server_says_that_it_honours_keys_and_by_which_memory(server: ServerProcess) -> None:
    memories = set()
    for kind in KINDS:
        with server.connect(kind) as peer:
            capabilities = peer.initialize().result["capabilities"]
        for place in ("experimental", "extensions"):
            memories.add(capabilities[place]["mcp-streams/v1"]["idempotencyKeys"])
    assert len(memories) == 1
    assert len(memories.pop()) == 43


def test_a_hundred_at_once_over_one_connection_are_one_run(
    wire: Wire, gate: Gate, key: str
) -> None:
    peer = wire.streams()
    same = params(key, n=3, gate=gate.path)
    asked = [peer.request("tools/call", same) for _ in range(AT_ONCE)]
    gate.wait_for("sent")
    gate.release()
    assert_one_run([peer.response(each) for each in asked], gate)


def test_a_hundred_at_once_over_as_many_connections_are_one_run(
    server: ServerProcess, gate: Gate, key: str
) -> None:
    """Over every transport of anonymous clients: a long key is the same key on each of them."""
    with ExitStack() as stack:
        kinds = (ANONYMOUS * AT_ONCE)[:AT_ONCE]
        peers = [opened(server, stack, kind) for kind in kinds]
        same = params(key, n=3, gate=gate.path)
        asked = [peer.request("tools/call", same) for peer in peers]
        gate.wait_for("sent")
        gate.release()
        answers = [peer.response(each) for peer, each in zip(peers, asked, strict=True)]
    assert_one_run(answers, gate)


def test_at_once_over_several_processes_is_one_run(
    server: ServerProcess, gate: Gate, key: str
) -> None:
    """Over stdio all clients are the same user, so a short key is enough."""
    with ExitStack() as stack:
        peers = [opened(server, stack, "stdio") for _ in range(4)]
        same = params("short", n=3, gate=gate.path)
        asked = [[peer.request("tools/call", same) for _ in range(25)] for peer in peers]
        gate.wait_for("sent")
        gate.release()
        answers = [
            peer.response(each) for peer, ids in zip(peers, asked, strict=True) for each in ids
        ]
    assert_one_run(answers, gate)


@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "streams"])
def test_who_was_cut_off_before_anything_came_comes_back(
    wire: Wire, gate: Gate, key: str, is_plain: bool
) -> None:
    cut = wire.plain() if is_plain else wire.streams()
    cut.request("tools/call", params(key, n=3, gate=gate.path), id=7)
    gate.wait_for("sent")
    cut.cut()
    again = wire.plain() if is_plain else wire.streams()
    again.request("tools/call", params(key, n=3, gate=gate.path), id=7)
    gate.release()
    messages = again.read_until(answers_to(7))
    assert outcomes(messages[-1:]) == {"counted 3": 1}
    assert counted(messages) == up_to(3)
    created = [message for message in messages if message.method == CREATE]
    told = [message.params["stream"]["requestId"] for message in created]
    assert told == ([] if is_plain else [7])
    assert gate.marks() == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_changes_nothing(fresh: ServerProcess, gate: Gate, key: str, kind: str) -> None:
    """A result is kept, and a call that had not ended is `interrupted`: neither runs again."""

    def again(id: Id, **arguments: object) -> list[Message]:
        with fresh.connect(kind) as peer:
            peer.initialize(opting_in(kind, POSITIONS))
            peer.request("tools/call", params(f"{key}{id}", **arguments), id=id)
            return peer.read_until(answers_to(id))

    with fresh.connect(kind) as peer:
        peer.initialize(PLAIN)
        peer.request("tools/call", params(f"{key}1", n=2), id=1)
        peer.response(1)
        peer.request("tools/call", params(f"{key}2", n=2, gate=gate.path), id=2)
        gate.wait_for("sent")
        fresh.restart()
    done = again(1, n=2)
    assert (counted(done), outcomes(done[-1:])) == ([1, 2], {"counted 2": 1})
    killed = again(2, n=2, gate=gate.path)
    assert counted(killed) == [1, 2]
    refused(killed[-1], "interrupted", -32603)
    assert gate.marks() == []
    assert key.encode() not in b"".join(
        each.read_bytes() for each in fresh.journal.parent.glob("journal.db*") if each.is_file()
    ), "who copies the journal has no key"


def test_a_call_outlives_the_session_that_its_key_may_come_back_from_elsewhere(
    http: Http, gate: Gate, key: str
) -> None:
    client = http.opened()
    client.request("tools/call", params(key, n=1, gate=gate.path))
    gate.wait_for("sent")
    client.delete()
    other = http.opened()
    exchange = other.request("tools/call", params(key, n=1, gate=gate.path))
    gate.release()
    answer = exchange.events()[-1].message
    assert outcomes([answer]) == {"counted 1": 1}


def test_a_key_that_only_its_session_may_use_ends_with_it(http: Http, gate: Gate) -> None:
    client = http.opened()
    client.request("tools/call", params("short", n=1, gate=gate.path))
    gate.wait_for("sent")
    client.delete()
    gate.wait_for("cancelled")
