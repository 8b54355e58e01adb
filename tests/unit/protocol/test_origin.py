"""The original request of a call is read whatever its client has written."""

import pytest

from streams.exchange import TraceHeaders
from streams.protocol.origin import METHOD_LETTERS_MAX, Origin, tool_in

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_call_names_its_tool_and_its_trace() -> None:
    line = (
        b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"build","arguments":'
        b'{"name":1},"_meta":{"traceparent":"%s","baggage":"a=b"}}}' % PARENT.encode()
    )
    origin = Origin.of(line)
    assert (origin.method, origin.target, origin.tool) == ("tools/call", "build", "build")
    assert origin.trace == TraceHeaders(PARENT, "", "a=b")


def test_a_call_names_the_receiver_of_its_webhooks() -> None:
    line = b'{"method":"tools/call","params":{"name":"x","_meta":{"mcp-streams/webhook":%s}}}'
    assert Origin.of(line % b'"https://a/b"').webhook == "https://a/b"
    assert Origin.of(line % b"[1]").webhook == ""


def test_a_request_that_calls_no_tool_counts_by_its_method() -> None:
    read = Origin.of(b'{"method":"resources/read","params":{"uri":"a://b","name":"x"}}')
    assert (read.tool, read.uri, read.target) == ("resources/read", "a://b", "")
    prompt = Origin.of(b'{"method":"prompts/get","params":{"name":"x"}}')
    assert (prompt.tool, prompt.target) == ("prompts/get", "x")


@pytest.mark.parametrize(
    "line",
    [
        b'{"method":"tools/call","params":{"name":1,"_meta":{"traceparent":[]}}}',
        b'{"method":"tools/call","params":{"name":null,"_meta":null}}',
        b'{"method":"tools/call","params":null}',
        b'{"method":"tools/call"}',
        b'{"method":"tools/call","params":[1]}',
    ],
)
def test_what_is_not_as_mcp_has_it_counts_as_absent(line: bytes) -> None:
    assert Origin.of(line) == Origin("tools/call")


@pytest.mark.parametrize("line", [b"", b"[]", b'{"method":1}', b'{"params":{"_meta":5}}', b"\xff"])
def test_what_is_no_request_names_nothing(line: bytes) -> None:
    assert Origin.of(line) == Origin("")


def test_a_request_that_is_nested_too_deeply_names_nothing() -> None:
    line = b'{"method":"tools/call","params":{"name":"x","y":%s}}' % (b"[" * 5000 + b"]" * 5000)
    assert Origin.of(line) == Origin("")
    assert tool_in(line) == ""


def test_a_method_is_short() -> None:
    assert len(Origin.of(b'{"method":"%s"}' % (b"x" * 5000)).method) == METHOD_LETTERS_MAX


@pytest.mark.parametrize(
    "line",
    [
        b'{"method":"tools/call","params":{"name":"build"}}',
        b'{"method":"tools/call","params":{"name":7}}',
        b'{"method":"tools/call"}',
        b'{"method":"resources/read","params":{"name":"x"}}',
        b'{"method":"%s","params":{}}' % (b"x" * 5000),
        b"[]",
    ],
)
def test_the_quick_way_to_a_tool_says_the_same(line: bytes) -> None:
    assert tool_in(line) == Origin.of(line).tool


@pytest.mark.parametrize(
    ("line", "tool"),
    [
        (b'{"method":"tools/call","params":{"name":"add"}}', "add"),
        (b'{"method":"tools/call","params":{"name":7}}', "tools/call"),
        (b'{"method":"tools/call"}', "tools/call"),
        (b'{"method":"resources/read","params":{"name":"x"}}', "resources/read"),
        (b"\xff", ""),
    ],
)
def test_the_tool_is_read_alike_by_both_ways(line: bytes, tool: str) -> None:
    assert (Origin.of(line).tool, tool_in(line)) == (tool, tool)
