"""A costly check against a schema holds up its sender only, and has a time limit."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.wire.process import ServerProcess
from tests.wire.raw import Message, PipePeer, answers_to

APP = f"{Path(__file__).with_name('checked_server.py')}:server"
TOO_LONG = "checking this takes too long: send less, or nest it less deeply"
MANY = [{"a": 9_999}] * 100_000


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), app=APP) as server:
        yield server
        tasks = [Path(f"/proc/{pid}/task/{pid}/children") for pid in server.pids]
        children = [child for task in tasks for child in task.read_text().split()]
        states = [Path(f"/proc/{child}/stat").read_text().split()[2] for child in children]
        assert "Z" not in states


def nested(depth: int) -> Any:
    found: Any = "x"
    for _ in range(depth):
        found = {"of": found}
    return found


def told(message: Message) -> tuple[bool, str]:
    result = message.result
    return bool(result.get("isError")), result["content"][0]["text"]


@pytest.mark.parametrize(
    ("tool", "arguments", "sentence"),
    [
        ("tree", {"tree": nested(100)}, "does not fit the schema (see tools/list)"),
        ("many", {"items": MANY}, TOO_LONG),
        ("returned", {"count": 100_000}, TOO_LONG),
    ],
)
def test_a_check_that_does_not_end_is_given_up_and_others_are_served_meanwhile(
    server: ServerProcess, tool: str, arguments: Any, sentence: str
) -> None:
    peers = server.connect("ws-mcp"), server.connect("ws-mcp")
    with peers[0] as greedy, peers[1] as other, ThreadPoolExecutor(1) as threads:
        greedy.initialize({})
        other.initialize({})
        answer = threads.submit(greedy.response, greedy.call(tool, **arguments))
        pings = 0
        while not answer.done():
            assert other.ask("ping").result == {}
            pings += 1
        is_error, text = told(answer.result())
        assert is_error
        assert sentence in text
        assert pings > 10


@pytest.mark.parametrize(
    ("tool", "arguments", "sentence"),
    [
        ("word", {"word": "a" * 25 + "!"}, 'word: "aaaaaaaaaaaaaaaaaaaaaaaaa!" does not match'),
        ("word", {"word": "a" * 1_000_000 + "!"}, 'word: "aaaaaaa'),
        ("annotated", {"word": "a" * 30 + "!"}, 'word: "aaaaaaa'),
        ("annotated", {"word": "a" * 1_000_000 + "!"}, 'word: "aaaaaaa'),
        ("echoed", {"word": "a" * 30 + "!"}, 'broke its output schema: word: "aaaaaaa'),
        ("echoed", {"word": "a" * 1_000_000 + "!"}, 'broke its output schema: word: "aaaaaaa'),
        ("unique", {"items": [*range(100_000), 5]}, "items: "),
        ("numbers", {"items": [*range(200_000), "5"]}, "items[200000]: "),
        ("tree", {"tree": nested(1)}, "tree.of: "),
    ],
)
def test_a_mismatch_is_told_in_one_sentence_however_large(
    server: ServerProcess, tool: str, arguments: Any, sentence: str
) -> None:
    with server.connect("ws-mcp") as peer:
        peer.initialize({})
        is_error, text = told(peer.response(peer.call(tool, **arguments)))
        assert is_error
        assert sentence in text
        assert len(text) < 500


@pytest.mark.parametrize("kind", ["stdio", "ws-streams", "http-sse"])
def test_what_fits_gets_through_over_each_transport(server: ServerProcess, kind: str) -> None:
    with server.connect(kind) as peer:
        peer.initialize({})
        for tool, arguments in [
            ("numbers", {"items": list(range(200_000))}),
            ("unique", {"items": [{"k": number} for number in range(20_000)]}),
            ("tree", {"tree": {"of": {"of": 5}}}),
            ("word", {"word": "a" * 1_000_000}),
        ]:
            assert told(peer.response(peer.call(tool, **arguments))) == (False, tool)
        assert json.loads(told(peer.response(peer.call("returned", count=1)))[1]) == {
            "items": [{"a": 9_999}]
        }


STALLING = {"tree": nested(100)}


@pytest.mark.parametrize("kind", ["stdio", "ws-mcp", "ws-streams"])
def test_what_follows_a_check_on_the_same_connection_does_not_wait_for_it(
    server: ServerProcess, kind: str
) -> None:
    """Pings and other calls are answered first; then the call is, with its error."""
    with server.connect(kind) as peer:
        peer.initialize({})
        first = peer.call("tree", **STALLING)
        ping = peer.request("ping")
        word = peer.call("word", word="aaa")
        arrived = peer.read_until(answers_to(first))
        assert [message["id"] for message in arrived if "id" in message] == [ping, word, first]
        assert told(arrived[-1])[0]


@pytest.mark.parametrize("kind", ["stdio", "ws-mcp", "ws-streams"])
def test_the_id_of_a_call_that_is_checked_is_taken(server: ServerProcess, kind: str) -> None:
    """W§5: an id is taken on a connection while in flight there."""
    with server.connect(kind) as peer:
        peer.initialize({})
        checked = peer.call("tree", **STALLING)
        for method, params in (
            ("ping", {}),
            ("tools/call", {"name": "word", "arguments": {"word": "a"}}),
            ("tools/call", {"name": "tree", "arguments": STALLING}),
        ):
            peer.request(method, params, id=checked)
            assert peer.response(checked).error["code"] == -32600
        assert told(peer.response(checked))[0]
        assert peer.ask("ping", id=checked).result == {}


def given_up(server: ServerProcess) -> int:
    return sum("a check against a schema took too long" in line for line in server.log)


@pytest.mark.parametrize("kind", ["stdio", "ws-mcp", "ws-streams"])
def test_a_call_that_is_checked_can_be_cancelled(server: ServerProcess, kind: str) -> None:
    """It gets no answer, and its id is free."""
    before = given_up(server)
    with server.connect(kind) as peer:
        peer.initialize({})
        cancelled = [peer.call("tree", **STALLING) for _ in range(3)]
        for each in cancelled:
            peer.notify("notifications/cancelled", {"requestId": each})
        after = peer.call("numbers", items=list(range(200_000)))
        arrived = peer.read_until(answers_to(after))
        assert told(arrived[-1]) == (False, "numbers")
        assert not any(message.get("id") in cancelled for message in arrived)
        assert peer.ask("ping", id=cancelled[0]).result == {}
    assert given_up(server) == before


def test_a_connection_that_ends_takes_its_checks_with_it(server: ServerProcess) -> None:
    before = given_up(server)
    for _ in range(6):
        with server.connect("ws-mcp") as peer:
            peer.initialize({})
            peer.call("tree", **STALLING)
            peer.settle()
    with server.connect("ws-mcp") as peer:  # two checks run at a time: this call waits behind them
        peer.initialize({})
        answer = peer.response(peer.call("numbers", items=list(range(200_000))))
        assert told(answer) == (False, "numbers")
    assert given_up(server) == before


def test_at_the_end_of_input_a_call_that_is_checked_is_still_answered(
    server: ServerProcess,
) -> None:
    """W§7: "what is owed is still written until output fails"."""
    with server.connect("stdio") as peer:
        assert isinstance(peer, PipePeer)
        peer.initialize({})
        call = peer.call("numbers", items=list(range(200_000)))
        peer.half_close()
        assert told(peer.response(call)) == (False, "numbers")
