"""Paged tools: the contents of a page, and that all pages hold all that the tool yielded."""

import base64
import json
from typing import Any

import pytest

from tests.wire.conftest import Wire
from tests.wire.pages_verbs import (
    CLIENTS,
    EXPECTED,
    NEXT,
    POLICY,
    TTL,
    ask_page,
    declaring,
    following,
    meta_params,
    page_params,
    request_page,
    rest_of,
    text_of,
    texts_of,
    token_of,
)
from tests.wire.process import Gate
from tests.wire.raw import Peer, answers_to, method_is
from tests.wire.verbs import CREATE, END, counted


def test_a_page_leads_to_the_next(peer: Peer) -> None:
    """W§3: "each call returns what is there and a `nextResumeToken` unless complete"; "The token
    stands in `params` / `result`, **and** in […] `_meta["mcp-streams/nextResumeToken"]`";
    "`_meta["mcp-streams/resumeTtl"]` says for how long it holds"."""
    first = ask_page(peer, "pages", n=2)
    assert set(first) == {"jsonrpc", "id", "result"}
    assert set(first.result) - {"isError"} == {"content", "nextResumeToken", "_meta"}
    assert first.result["content"] == [{"type": "text", "text": "page 1"}]
    token = first.result["nextResumeToken"]
    assert isinstance(token, str)
    assert token
    assert first.result["_meta"] == {NEXT: token, TTL: 600}
    last = ask_page(peer, "pages", token, n=2)
    assert set(last.result) - {"isError"} == {"content"}
    assert last.result["content"] == [{"type": "text", "text": "page 2"}]
    for page in (first, last):
        assert page.result.get("isError", False) is False


def test_a_tool_with_one_page_gives_no_token(peer: Peer) -> None:
    """Page, Resume Token Flow: "The operation is considered complete when the server provides a
    response which does not contain a `nextResumeToken`", even the first."""
    page = ask_page(peer, "pages", n=1)
    assert text_of(page) == "page 1"
    assert token_of(page) is None


def test_a_tool_without_pages_gives_an_empty_one(peer: Peer) -> None:
    """W§3: "each call returns what is there": an empty page without a page token."""
    page = ask_page(peer, "pages", n=0)
    assert page.result["content"] == []
    assert token_of(page) is None


@pytest.mark.parametrize("client", CLIENTS)
def test_all_pages_together_are_what_the_tool_has_yielded(wire: Wire, client: str) -> None:
    """W§3: "the same call with `resumeToken` continues. No capability is needed"; "read from
    either", and from `params` where both are given."""
    peer = wire.opened(declaring(wire.kind, client))
    for in_meta in (False, True):
        pages = [ask_page(peer, "pages", n=5)]
        while (token := token_of(pages[-1])) is not None:
            params = (meta_params if in_meta else page_params)("pages", token, n=5)
            if not in_meta:
                params["_meta"] = {"mcp-streams/resumeToken": "nonsense"}
            pages.append(peer.ask("tools/call", params))
        assert texts_of(pages) == [f"page {number}" for number in range(1, 6)]
        tokens = [token_of(page) for page in pages]
        assert len(set(tokens)) == 5, "each page has a token of its own, and the last has none"


@pytest.mark.parametrize(
    ("client", "announcement", "ends"),
    [
        ("plain", None, 0),
        ("streams", CREATE, 1),
        ("positions", CREATE, 1),
        ("resumable", POLICY, 0),
    ],
)
def test_the_first_call_alone_is_announced(
    wire: Wire, client: str, announcement: str | None, ends: int
) -> None:
    """W§8: a client gets what it has declared: "A client that says nothing of these gets exactly
    what a plain MCP server would send (`nextResumeToken` of paged tools excepted)"; W§1: the stream
    is of "one originating request", and ends with the last page."""
    peer = wire.opened(declaring(wire.kind, client))
    call_id = request_page(peer, "pages", n=3)
    before = peer.read_until(answers_to(call_id))
    first = before.pop()
    announced = [message for message in before if message.method in (CREATE, POLICY)]
    assert [message.method for message in announced] == ([announcement] if announcement else [])
    for message in announced:
        about = message.params.get("stream", message.params)
        assert about["requestId"] == call_id
    second = ask_page(peer, "pages", following(first), n=3)
    assert not any(map(method_is(CREATE, POLICY, END), peer.settle())), "it goes on"
    ask_page(peer, "pages", following(second), n=3)
    after = peer.settle()
    assert not any(map(method_is(CREATE, POLICY), after))
    assert len([message for message in after if message.method == END]) == ends


def test_a_page_comes_under_the_id_of_the_call_that_asks_for_it(wire: Wire) -> None:
    """W§3: "the same call with `resumeToken` continues", and is a request of its own; W§2: "keeps
    its JSON type: `"1"` is not `1`"."""
    peer = wire.streams()
    pages = []
    token = None
    for call_id in (0, 1, "1", 1):
        pages.append(peer.response(request_page(peer, "pages", token, id=call_id, n=4)))
        token = token_of(pages[-1])
    assert texts_of(pages) == ["page 1", "page 2", "page 3", "page 4"]


def test_two_runs_of_one_call_are_two_runs(peer: Peer) -> None:
    """W§3: without a token the tool is called anew; each run has its own tokens."""
    runs = [ask_page(peer, "pages", n=3) for _ in range(2)]
    assert following(runs[0]) != following(runs[1])
    for run in runs:
        assert texts_of(rest_of(peer, "pages", run, n=3)) == ["page 1", "page 2", "page 3"]


def test_the_tool_is_called_once(peer: Peer, gate: Gate) -> None:
    """W§3: a call with a token "continues"; nothing is begun again."""
    gate.release(3)
    pages = rest_of(
        peer, "pages", ask_page(peer, "pages", n=3, gate=gate.path), gate=gate.path, n=3
    )
    assert len(pages) == 3
    made = [f"{what} {number}" for number in (1, 2, 3) for what in ("at", "said")]
    assert gate.marks() == [*made, "ended"]


def test_a_tool_does_not_run_far_ahead(peer: Peer, gate: Gate) -> None:
    """Page: resuming is "essential to load-balancing": the tool works one page ahead, and no
    further."""
    gate.release(50)
    ask_page(peer, "pages", n=50, gate=gate.path)
    gate.wait_for("said 2")
    peer.settle()
    assert "said 5" not in gate.marks()


@pytest.mark.parametrize("client", CLIENTS)
def test_messages_come_ahead_of_their_page(wire: Wire, gate: Gate, client: str) -> None:
    """W§1: the handler's messages are in one order; they go to the attached connection, and between
    two calls no connection is attached (W§5)."""
    peer = wire.opened(declaring(wire.kind, client))
    gate.release(3)
    arguments = {"n": 3, "notes": 2, "gate": gate.path}
    call_id = request_page(peer, "pages", **arguments)
    *notes, page = peer.read_until(answers_to(call_id))
    assert counted(notes) == [1, 2]
    gate.wait_for("said 2")
    assert counted(peer.settle()) == []
    for expected in ([3, 4], [5, 6]):
        call_id = request_page(peer, "pages", following(page), **arguments)
        *notes, page = peer.read_until(answers_to(call_id))
        assert counted(notes) == expected
    assert token_of(page) is None
    assert counted(peer.settle()) == []


def test_a_page_is_whatever_a_tool_may_return(peer: Peer) -> None:
    """MCP, Tools: content blocks, structured content and its text, as of a tool without pages."""
    pages = rest_of(peer, "mixed_pages", ask_page(peer, "mixed_pages"))
    text, table, blocks, array, nothing, end = [page.result for page in pages]
    assert text["content"] == [{"type": "text", "text": "a text"}]
    assert table["structuredContent"] == {"rows": 3}
    assert json.loads(table["content"][0]["text"]) == {"rows": 3}
    assert blocks["content"] == [
        {"type": "text", "text": "a picture:"},
        {"type": "image", "data": "aGVsbG8=", "mimeType": "image/png"},
    ]
    assert json.loads(array["content"][0]["text"]) == ["a", "b"]
    assert nothing["content"] == []
    assert end["content"][0]["text"] == "the end"


def test_a_plain_generator_is_a_paged_tool(peer: Peer, gate: Gate) -> None:
    """W§3: "For tools whose author asks for pages", in a thread too; it does not run far ahead
    either."""
    call_id = request_page(peer, "thread_pages", n=20, gate=gate.path)
    *notes, page = peer.read_until(answers_to(call_id))
    assert notes[0].params["data"] == {"n": 1}
    peer.settle()
    assert "past 4" not in gate.marks()
    pages = rest_of(peer, "thread_pages", page, n=20, gate=gate.path)
    assert texts_of(pages) == [f"page {number}" for number in range(1, 21)]


def test_nothing_there_in_time_is_an_empty_page(peer: Peer, gate: Gate) -> None:
    """W§3: "each call returns what is there and a `nextResumeToken`": nothing, here; the next call
    goes on, and "the same token gives the same page" even then."""
    arguments = {"n": 2, "gate": gate.path}
    empty = ask_page(peer, "slow_pages", **arguments)
    assert empty.result["content"] == []
    second = ask_page(peer, "slow_pages", following(empty), **arguments)
    assert second.result["content"] == []
    assert following(second) != following(empty)
    gate.release(2)
    gate.wait_for("said 1")
    again = ask_page(peer, "slow_pages", following(empty), **arguments)
    assert again.result == second.result
    pages = page_texts_without_empty(peer, following(second), arguments)
    assert pages == ["page 1", "page 2"]


def page_texts_without_empty(peer: Peer, token: str, arguments: dict[str, Any]) -> list[str]:
    """The pages from this page token on that are not empty.

    No rule says how many empty ones come before a slow page.
    """
    page = ask_page(peer, "slow_pages", token, **arguments)
    return [text for text in texts_of(rest_of(peer, "slow_pages", page, **arguments)) if text]


def test_an_end_that_comes_late_is_an_empty_page(peer: Peer, gate: Gate) -> None:
    """W§3: "unless complete": while the tool runs, the server does not know whether another page
    follows.
    """
    gate.release()
    arguments = {"n": 1, "gate": gate.path, "tail": True}
    page = ask_page(peer, "pages", **arguments)
    assert text_of(page) == "page 1"
    call_id = request_page(peer, "pages", following(page), **arguments)
    peer.arrived()
    gate.release()
    last = peer.response(call_id)
    assert last.result["content"] == []
    assert token_of(last) is None


def test_a_tool_may_say_how_long_it_takes(peer: Peer) -> None:
    """W§3: "A tool's listing may carry `_meta["mcp-streams/expectedSeconds"]`"."""
    tools = {tool["name"]: tool for tool in peer.ask("tools/list").result["tools"]}
    assert tools["timed_pages"]["_meta"] == {EXPECTED: 12.5}
    assert EXPECTED not in tools["pages"].get("_meta", {})
    assert tools["pages"]["inputSchema"]["required"] == ["n"]


def test_arguments_that_do_not_fit_get_no_token(peer: Peer) -> None:
    """W§3: "Never on a JSON-RPC error or a result with `isError: true`"."""
    misfits: list[dict[str, Any]] = [{}, {"n": "two"}, {"n": 2, "more": 1}]
    for arguments in misfits:
        answer = ask_page(peer, "pages", **arguments)
        assert answer.result["isError"] is True
        assert b"esumeT" not in answer.raw


def test_a_token_tells_nothing(peer: Peer) -> None:
    """W§3: "It is opaque"; page: tokens "MUST NOT expose internal or sensitive information"."""
    token = following(ask_page(peer, "anything", value="sesame"))
    decoded = base64.urlsafe_b64decode(f"{token}==")
    for secret in (b"sesame", b"anything", b"value", b"tools", b"uid"):
        assert secret not in token.encode()
        assert secret not in decoded
