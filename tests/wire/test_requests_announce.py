"""The announcement of a call for `requests/resume`, sent to clients that opted in."""

import re
from typing import Any

import pytest

from tests.wire.conftest import Wire
from tests.wire.process import Gate
from tests.wire.raw import Message, answers_to, method_is
from tests.wire.requests_verbs import (
    BOTH_DIALECTS,
    BOTH_POSITIONS,
    POLICY,
    REQUESTS,
    REQUESTS_POSITIONS,
    ours,
    sole,
    text_of,
)
from tests.wire.verbs import CREATE, END, PLAIN, POSITION, STREAMS, Reader, counted, up_to

URL_SAFE_256_BITS = re.compile(r"[A-Za-z0-9_-]{43}")


def whole_call(wire: Wire, capabilities: dict[str, Any]) -> list[Message]:
    """All that comes from a call of `count(3)` and before the answer to a later ping."""
    peer = wire.opened(capabilities)
    call_id = peer.call("count", n=3)
    return [*peer.read_until(answers_to(call_id)), *peer.settle()]


def test_the_policy_has_its_fields_to_the_letter(wire: Wire) -> None:
    """W§3: "params {requestId, resumeToken, minWait?, maxWait?}"; "`minWait` / `maxWait` are
    `resumeInterval.min` / `.max`"; W§2: the token is "256 random bits […], url-safe"."""
    peer = wire.opened(REQUESTS)
    call_id = peer.call("count", n=1)
    policy = peer.receive()
    assert set(policy) == {"jsonrpc", "method", "params"}
    assert policy.method == POLICY
    token = policy.params["resumeToken"]
    assert URL_SAFE_256_BITS.fullmatch(token)
    waits = {"minWait": 2, "maxWait": 600}
    assert policy.params == {"requestId": call_id, "resumeToken": token, **waits}
    assert [type(policy.params[wait]) for wait in waits] == [int, int], "2, not 2.0"


def test_a_tool_may_have_its_own_limit(wire: Wire, gate: Gate) -> None:
    """W§3: "`maxWait` […] `resumeInterval.max`": here the tool's own."""
    peer = wire.opened(REQUESTS)
    peer.call("brief", gate=gate.path)
    params = peer.expect(method_is(POLICY)).params
    assert (params["minWait"], params["maxWait"]) == (2, 1)
    gate.release()


def test_the_request_id_keeps_its_type(wire: Wire) -> None:
    """W§2: "`requestId` is always sent and keeps its JSON type: `"1"` is not `1`"."""
    peer = wire.opened(REQUESTS)
    for chosen in (0, 1, "1", ""):
        peer.call("count", chosen, n=1)
        told = peer.expect(method_is(POLICY)).params["requestId"]
        assert (type(told), told) == (type(chosen), chosen)
        assert text_of(peer.response(chosen)) == "counted 1"


def test_the_policy_comes_first_and_no_end_comes_last(wire: Wire) -> None:
    """W§3: `resumePolicy` is all that the dialect announces: "before any entry" (W§2), and after
    the final response there is nothing left to say."""
    policy, *entries, response = whole_call(wire, REQUESTS)
    assert policy.method == POLICY
    assert counted(entries) == up_to(3)
    assert len(entries) == 3
    assert text_of(response) == "counted 3"


def test_who_speaks_both_is_told_in_both(wire: Wire) -> None:
    """W§3: "A client that declares both dialects gets both announcements and may use either";
    "the token is the stream's token"."""
    first, second, *entries, response, end = whole_call(wire, BOTH_DIALECTS)
    told = {message.method: message.params for message in (first, second)}
    assert set(told) == {CREATE, POLICY}
    stream, policy = told[CREATE]["stream"], told[POLICY]
    assert policy == {
        "requestId": stream["requestId"],
        "resumeToken": stream["resumeToken"],
        "minWait": stream["resumeInterval"]["min"],
        "maxWait": stream["resumeInterval"]["max"],
    }
    assert counted(entries) == up_to(3)
    assert text_of(response) == "counted 3"
    assert end.params == {"streamId": stream["streamId"]}


EXTENDED = {"dialects": ["resumableRequests"]}
BOTH_EXTENDED = {"dialects": ["resumableRequests", "streams"]}


@pytest.mark.parametrize(
    ("capabilities", "announcements"),
    [
        (PLAIN, set()),
        (STREAMS, {CREATE}),
        (ours(), {CREATE}),
        (ours(**EXTENDED), {POLICY}),
        (ours("extensions", **EXTENDED), {POLICY}),
        (ours(**BOTH_EXTENDED), {CREATE, POLICY}),
        ({**STREAMS, **ours(**EXTENDED)}, {CREATE, POLICY}),
        ({**REQUESTS, **ours()}, {CREATE, POLICY}),
    ],
    ids=[
        "plain",
        "streams",
        "extension alone",
        "experimental",
        "extensions",
        "both by extension",
        "one by each",
        "the other by each",
    ],
)
def test_each_way_of_opting_in_opts_in(
    wire: Wire, capabilities: dict[str, Any], announcements: set[str]
) -> None:
    """W§8: "`capabilities.resumableRequests` → `resumePolicy`", the extension's `dialects`, the
    default of which is `["streams"]`; "A client that says nothing of these gets exactly what a
    plain MCP server would send"."""
    messages = whole_call(wire, capabilities)
    told = [one.method for one in messages if one.method in (CREATE, POLICY)]
    assert sorted(told) == sorted(announcements)
    assert [one.method for one in messages[: len(told)]] == told, "before any entry"
    assert any(map(method_is(END), messages)) == (CREATE in announcements)
    assert not any(map(method_is(POSITION), messages)), "W§8: only with `positions: true`"


@pytest.mark.parametrize(
    "capabilities", [REQUESTS_POSITIONS, BOTH_POSITIONS], ids=["requests", "both"]
)
def test_positions_come_to_those_who_set_them(wire: Wire, capabilities: dict[str, Any]) -> None:
    """W§4: "one header ahead of each run of entries of one stream", whatever the dialect; W§1:
    announcements "have no seq", the final response has one."""
    peer = wire.opened(capabilities)
    call_id = peer.call("count", n=20)
    reader = Reader(peer)
    reader.response(call_id)
    entries = sole(reader)
    assert list(entries) == up_to(21)
    assert counted(list(entries.values())) == up_to(20)
    assert entries[21].answers(call_id)
    is_both = capabilities is BOTH_POSITIONS
    if is_both:
        reader.until(method_is(END))
    told = {message.method for message in reader.others}
    assert told == ({POLICY, CREATE, END} if is_both else {POLICY})
    assert all(map(method_is(POLICY, CREATE), reader.all[: 1 + is_both]))


def test_what_lasts_no_time_is_not_resumable(wire: Wire, gate: Gate) -> None:
    """W§2: "`max: 0` = not resumable, cancelled on disconnect". Whether it is announced is
    not said: where it is, `maxWait` says that it will not last."""
    maker = wire.opened(REQUESTS)
    maker.call("fleeting", gate=gate.path)
    gate.wait_for("sent")
    for policy in filter(method_is(POLICY), maker.settle()):
        assert policy.params["maxWait"] == 0
    maker.cut()
    gate.wait_for("cancelled")


def test_only_what_can_be_resumed_is_announced(wire: Wire) -> None:
    """W§2: "as soon as the server knows that the request is resumable"."""
    peer = wire.opened(REQUESTS)
    peer.ask("tools/list")
    peer.ask("ping")
    assert peer.settle() == []
