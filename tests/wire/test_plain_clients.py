"""A client without any of our extensions gets exactly what any MCP server would send."""

from typing import Any

import pytest

from tests.wire.conftest import Wire
from tests.wire.process import Gate
from tests.wire.raw import Message, answers_to
from tests.wire.verbs import counted, up_to


def whole_call(wire: Wire, params: dict[str, Any]) -> list[Message]:
    peer = wire.plain()
    call_id = peer.request("tools/call", params)
    messages = peer.read_until(answers_to(call_id))
    assert peer.settle() == []
    return messages


def called(name: str, meta: dict[str, Any] | None = None, /, **arguments: object) -> dict[str, Any]:
    params: dict[str, Any] = {"name": name, "arguments": arguments}
    return {**params, "_meta": meta} if meta else params


def test_a_plain_client_sees_no_stream(wire: Wire) -> None:
    """W§8: "A client that says nothing of these gets exactly what a plain MCP server would
    send"."""
    *notes, response = whole_call(wire, called("count", n=5))
    assert [set(note) for note in notes] == [{"jsonrpc", "method", "params"}] * 5
    assert counted(notes) == up_to(5)
    assert set(response) == {"jsonrpc", "id", "result"}
    assert set(response.result) <= {"content", "isError", "structuredContent"}
    assert response.result["content"] == [{"type": "text", "text": "counted 5"}]
    assert response.result.get("isError", False) is False


@pytest.mark.parametrize("token", [1, "one"])
def test_progress_comes_to_who_asked_for_it(wire: Wire, token: int | str) -> None:
    """W§8, and MCP, Progress: only with a `progressToken`, and with that token."""
    *notes, response = whole_call(wire, called("progress", {"progressToken": token}, total=3))
    assert response.result["content"][0]["text"] == "arrived"
    assert notes, "the last progress at least is sent"
    for note in notes:
        assert note.method == "notifications/progress"
        assert note.params["progressToken"] == token
        assert type(note.params["progressToken"]) is type(token)
        assert note.params["total"] == 3
    values = [note.params["progress"] for note in notes]
    assert values == sorted(set(values)), "the progress value MUST increase"
    assert notes[-1].params == {
        "progressToken": token,
        "progress": 3,
        "total": 3,
        "message": "step 3",
    }


def test_no_progress_without_a_token(wire: Wire) -> None:
    """MCP, Progress: notifications "MUST only reference tokens that were provided"."""
    assert len(whole_call(wire, called("progress", total=3))) == 1


def test_a_sync_tool_is_a_tool(wire: Wire) -> None:
    """W§8: a tool in a thread is seen as any other."""
    *notes, response = whole_call(wire, called("add", a=2, b=3))
    assert response.result["content"] == [{"type": "text", "text": "5"}]
    assert [note.method for note in notes] == ["notifications/message"]
    assert notes[0].params["level"] == "warning"


def test_structured_content_comes_with_its_text(wire: Wire) -> None:
    """MCP 2025-06-18, Tools: structured content and, for older clients, its serialized JSON."""
    (response,) = whole_call(wire, called("table"))
    assert response.result["structuredContent"] == {"rows": 3}
    assert response.result["content"][0]["type"] == "text"


def test_content_blocks_are_passed_on(wire: Wire) -> None:
    """MCP, Tools: a result may hold content of several types."""
    (response,) = whole_call(wire, called("blocks"))
    assert response.result["content"] == [
        {"type": "text", "text": "a picture:"},
        {"type": "image", "data": "aGVsbG8=", "mimeType": "image/png"},
    ]


def test_a_failing_tool_says_why(wire: Wire) -> None:
    """MCP, Tools: errors of a tool are results with `isError: true`, so that the model sees them;
    no traceback goes over the wire."""
    response = whole_call(wire, called("fail"))[-1]
    assert response.result["isError"] is True
    text = response.result["content"][0]["text"]
    assert "the tool says no" in text
    assert "Traceback" not in text


def test_a_plain_clients_work_ends_with_its_connection(wire: Wire, gate: Gate) -> None:
    """W§5: "A stream that was never announced, on a transport without event ids (plain stdio or
    WebSocket client), can never be resumed: it is cancelled at disconnect"; newline framing over
    HTTP has no event ids either (W§6), an event stream has (see `test_http_events`)."""
    if wire.kind == "http-sse":
        pytest.skip("W§8: over HTTP it is safe from its first event id on")
    peer = wire.plain()
    peer.call("count", n=1, gate=gate.path)
    gate.wait_for("sent")
    before = {status["streamId"] for status in everything_listed(wire)}
    peer.cut()
    gate.wait_for("cancelled")
    assert {status["streamId"] for status in everything_listed(wire)} <= before


def everything_listed(wire: Wire) -> list[dict[str, Any]]:
    statuses: list[dict[str, Any]] = wire.plain().ask("stream/poll/all").result["statuses"]
    return statuses


def test_an_announced_call_goes_on_without_its_connection(wire: Wire, gate: Gate) -> None:
    """Page, Introduction: "Ability for clients and servers to disconnect and reconnect without
    losing progress": the counterpart of the test above."""
    peer = wire.streams()
    peer.call("count", n=1, gate=gate.path)
    gate.wait_for("sent")
    peer.cut()
    again = wire.streams()
    again.settle()
    assert gate.marks() == [], "not cancelled"
    gate.release()
