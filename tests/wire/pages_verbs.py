"""Helpers of the tests of paged tools: calls for pages, and page tokens."""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import islice
from typing import Any, Final

from tests.wire.conftest import Wire
from tests.wire.httppeer import HttpPeer
from tests.wire.process import Gate, ServerProcess
from tests.wire.raw import Id, Message, Peer
from tests.wire.verbs import KINDS, PLAIN, POSITIONS, STREAMS, opting_in, refused

TOKEN: Final = "mcp-streams/resumeToken"
NEXT: Final = "mcp-streams/nextResumeToken"
TTL: Final = "mcp-streams/resumeTtl"
EXPECTED: Final = "mcp-streams/expectedSeconds"
POLICY: Final = "notifications/requests/resumePolicy"

RESUMABLE: Final[dict[str, Any]] = {**PLAIN, "resumableRequests": {}}
# The capabilities of each kind of client; pages come to all of them.
CLIENTS: Final = {
    "plain": PLAIN,
    "streams": STREAMS,
    "positions": POSITIONS,
    "resumable": RESUMABLE,
}
# The number of requests that are sent before the first answer is read: they fit into a pipe.
_BATCH: Final = 100


def declaring(kind: str, client: str) -> dict[str, Any]:
    """The capabilities of one of these clients; the extension is for those of Streams alone."""
    capabilities = CLIENTS[client]
    is_of_streams = client in ("streams", "positions")
    return opting_in(kind, capabilities) if is_of_streams else capabilities


def page_params(tool: str, token: object = None, /, **arguments: Any) -> dict[str, Any]:
    """The params of a call for a page, with the page token beside them."""
    params: dict[str, Any] = {"name": tool, "arguments": arguments}
    return params if token is None else {**params, "resumeToken": token}


def meta_params(tool: str, token: object, /, **arguments: Any) -> dict[str, Any]:
    """The same with the page token in `_meta`."""
    return {"name": tool, "arguments": arguments, "_meta": {TOKEN: token}}


def request_page(
    peer: Peer, tool: str, token: object = None, /, id: Id | None = None, **arguments: Any
) -> Id:
    """Send a call for a page and return its id."""
    return peer.request("tools/call", page_params(tool, token, **arguments), id=id)


def ask_page(peer: Peer, tool: str, token: object = None, /, **arguments: Any) -> Message:
    """Call for a page; returns it."""
    return peer.response(request_page(peer, tool, token, **arguments))


def token_of(page: Message) -> str | None:
    """The page token for the next page; None on the last.

    WIRE §3: "in `params` / `result`, **and** in `_meta[…]`", with `resumeTtl` beside it.
    """
    meta = page.result.get("_meta", {})
    token: str | None = page.result.get("nextResumeToken")
    assert meta.get(NEXT) == token
    assert ("nextResumeToken" in page.result) == (NEXT in meta) == (TTL in meta) == bool(token)
    return token


def following(page: Message) -> str:
    """The page token of a page that is not the last."""
    token = token_of(page)
    assert token is not None, f"no token: {page}"
    return token


def text_of(page: Message) -> str:
    """The text that the tool has yielded; empty for a page without content."""
    content = page.result["content"]
    text: str = content[0]["text"] if content else ""
    return text


def rest_of(peer: Peer, tool: str, page: Message, /, **arguments: Any) -> list[Message]:
    """This page and all later ones."""
    taken = [page]
    while (token := token_of(taken[-1])) is not None:
        taken.append(ask_page(peer, tool, token, **arguments))
    return taken


def texts_of(pages: Iterable[Message]) -> list[str]:
    return [text_of(page) for page in pages]


def invalid(answer: Message) -> None:
    """WIRE §9: "`invalid_token` | -32602"; the error gives no reason."""
    assert set(answer) == {"jsonrpc", "id", "error"}
    assert set(answer.error) == {"code", "message", "data"}
    assert refused(answer, "invalid_token") == {"reason": "invalid_token"}


def under_one_id(message: Message) -> bytes:
    """The bytes of a response, with 0 for its id, so that two can be compared."""
    spelled = json.dumps(message["id"]).encode()
    head, found, tail = message.raw.partition(b'"id":' + spelled)
    assert found, message.raw
    return head + b'"id":0' + tail


def answers_to_all(peer: Peer, calls: Iterable[dict[str, Any]], batch: int = _BATCH) -> set[bytes]:
    """Send all of these calls; returns the answers, without their ids.

    They are sent in batches, and one answer is read for each; over HTTP each has its own response.
    """
    left = iter(calls)
    size = 1 if isinstance(peer, HttpPeer) else batch
    found = set()
    while ids := [peer.request("tools/call", params) for params in islice(left, size)]:
        found |= {under_one_id(peer.response(sent)) for sent in ids}
    return found


def all_invalid(answers: set[bytes]) -> None:
    """Check that all answers are equal, and `invalid_token`."""
    assert len(answers) == 1, answers
    invalid(Message(next(iter(answers))))


def held(gate: Gate, n: int = 3, free: int = 1) -> dict[str, Any]:
    """Arguments of a run of `pages` that waits at the gate after the first page, or after `free`.

    Several runs may wait at one gate; each release lets one of them through.
    """
    return {"n": n, "gate": gate.path, "free": free}


def held_run(peer: Peer, gate: Gate, n: int = 3, free: int = 1) -> str:
    """Call for the first page of such a run; returns the page token for the second."""
    first = ask_page(peer, "pages", **held(gate, n, free))
    gate.wait_for(f"at {free + 1}")
    assert text_of(first) == "page 1"
    return following(first)


def wire_of_each_kind(server: ServerProcess, stack: ExitStack) -> list[Wire]:
    """All ways to reach a server, for slow tests that can use all of them at once."""
    return [Wire(kind, server, stack) for kind in KINDS]
