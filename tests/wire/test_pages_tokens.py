"""Page tokens: the same one brings the same page, and only the same call may use it."""

import json
import secrets
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

from tests.wire.conftest import Wire
from tests.wire.httppeer import HttpPeer
from tests.wire.pages_verbs import (
    all_invalid,
    answers_to_all,
    ask_page,
    following,
    invalid,
    meta_params,
    page_params,
    rest_of,
    text_of,
    texts_of,
    token_of,
    under_one_id,
    wire_of_each_kind,
)
from tests.wire.process import Gate, ServerProcess
from tests.wire.raw import Message, Peer
from tests.wire.verbs import MIB, PLAIN, UNKNOWN

ARGUMENTS: dict[str, Any] = {
    "value": {"a": 1, "b": [1, {"c": 2, "d": "é"}], "e": {}},
    "other": [100, 0],
}


def test_the_same_token_brings_the_same_page(wire: Wire) -> None:
    """W§3: "Stable: the same token gives the same page until a later one was used", content and
    next token, over this connection or another; to have been given a later one is not to use it."""
    peer = wire.plain()
    first = ask_page(peer, "pages", n=4)
    token = following(first)
    second = ask_page(peer, "pages", token, n=4)
    assert text_of(second) == "page 2"
    for one in (peer, peer, wire.positions()):
        assert ask_page(one, "pages", token, n=4).result == second.result
    pages = rest_of(peer, "pages", second, n=4)
    assert texts_of(pages) == ["page 2", "page 3", "page 4"]


def test_the_last_token_repeats_the_last_page(wire: Wire) -> None:
    """W§3: "the last token repeats the last page for 120 s after completion"."""
    peer = wire.plain()
    token = following(ask_page(peer, "pages", n=2))
    for one in (peer, peer, wire.streams()):
        last = ask_page(one, "pages", token, n=2)
        assert text_of(last) == "page 2"
        assert token_of(last) is None


def test_an_earlier_token_is_void_when_a_later_one_was_used(wire: Wire) -> None:
    """W§3: "the same page until a later one was used", the last one included."""
    peer = wire.plain()
    pages = rest_of(peer, "pages", ask_page(peer, "pages", n=5), n=5)
    tokens = [following(page) for page in pages[:-1]]
    other = wire.plain()
    for one in (peer, other):
        all_invalid(answers_to_all(one, [page_params("pages", old, n=5) for old in tokens[:-1]]))
    assert ask_page(other, "pages", tokens[-1], n=5).result == pages[-1].result


def test_each_use_voids_what_came_before(peer: Peer) -> None:
    """W§3: as above, one by one while the run goes on."""
    page = ask_page(peer, "pages", n=6)
    tokens = [following(page)]
    for _ in range(4):
        page = ask_page(peer, "pages", tokens[-1], n=6)
        tokens.append(following(page))
    used = [old for old, _ in pairwise(tokens)]
    for old in used[:-1]:
        invalid(ask_page(peer, "pages", old, n=6))
    assert ask_page(peer, "pages", used[-1], n=6).result == page.result
    assert text_of(ask_page(peer, "pages", tokens[-1], n=6)) == "page 6"


def calling(token: str, arguments: str, more: str = "") -> bytes:
    """A call of `anything` with exactly these bytes as arguments, under the id 7."""
    body = f'{{"name":"anything","arguments":{arguments},"resumeToken":{json.dumps(token)}{more}}}'
    return f'{{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{body}}}'.encode()


def asked_raw(peer: Peer, data: bytes) -> Message:
    peer.send_raw(data)
    return peer.response(7)


SAME = [
    '{"value":{"a":1,"b":[1,{"c":2,"d":"é"}],"e":{}},"other":[100,0]}',
    '{"other":[100,0],"value":{"a":1,"b":[1,{"c":2,"d":"é"}],"e":{}}}',
    '{"other":[100,0],"value":{"e":{},"b":[1,{"d":"é","c":2}],"a":1}}',
    '{"value":{"a":1.0,"b":[1.00,{"c":2e0,"d":"é"}],"e":{}},"other":[100.0,0.0]}',
    '{"value":{"a":1,"b":[1,{"c":2,"d":"\\u00e9"}],"e":{}},"other":[1e2,0]}',
    '{"value":{"\\u0061":1,"b":[10E-1,{"c":2,"d":"\\u00E9"}],"e":{}},"other":[1E+2,-0]}',
    '{ "value" : {"a":1, "b":[1, {"c":2 ,"d":"é"}], "e":{ }},\t"other": [100, 0] }',
]

CHANGED = [
    '{"value":{"a":true,"b":[1,{"c":2,"d":"é"}],"e":{}},"other":[100,0]}',
    '{"value":{"a":"1","b":[1,{"c":2,"d":"é"}],"e":{}},"other":[100,0]}',
    '{"value":{"a":1,"b":[1,{"c":2,"d":"é"}],"e":{}},"other":[100,false]}',
    '{"value":{"a":1,"b":[1,{"c":2,"d":"é"}],"e":{}},"other":[0,100]}',
    '{"value":{"a":1,"b":[1,{"c":2,"d":"é"}],"e":{}},"other":[100]}',
    '{"value":{"a":1,"b":[1,{"c":2,"d":"é"}],"e":{}},"other":[100,0,0]}',
    '{"value":{"a":1,"b":[1,{"c":2,"d":"é"}],"e":{}},"other":[100,null]}',
    '{"value":{"a":1,"b":[1,{"c":2,"d":"é"}],"e":{}},"other":"[100,0]"}',
    '{"value":{"a":1,"b":[1,{"c":2,"d":"é"}],"e":{}}}',
    '{"value":{"a":1,"b":[1,{"c":2,"d":"é"}],"e":{}},"other":null}',
    '{"value":{"a":1,"b":[1,{"c":2,"d":"e\\u0301"}],"e":{}},"other":[100,0]}',
    '{"value":{"a":1,"b":[1,{"c":2,"d":"É"}],"e":{}},"other":[100,0]}',
    '{"value":{"a":1,"b":[1,{"c":2,"d":"é"}],"e":[]},"other":[100,0]}',
    '{"value":{"a":1,"b":[1,{"c":2,"d":"é"}],"e":null},"other":[100,0]}',
    '{"value":{"a":1,"b":[1,{"c":2,"d":"é"}]},"other":[100,0]}',
    '{"value":{"a":1,"b":[1,{"c":2,"d":"é","f":0}],"e":{}},"other":[100,0]}',
    '{"value":{"A":1,"b":[1,{"c":2,"d":"é"}],"e":{}},"other":[100,0]}',
    '{"value":{"a":1.0000001,"b":[1,{"c":2,"d":"é"}],"e":{}},"other":[100,0]}',
    '{"other":{"a":1,"b":[1,{"c":2,"d":"é"}],"e":{}},"value":[100,0]}',
    "{}",
    "null",
]


def test_a_call_is_the_same_however_it_is_spelled(peer: Peer) -> None:
    """W§3: "arguments (as JSON values: key order ignored, `1` = `1.0` […]; `_meta` not
    compared)"."""
    token = following(ask_page(peer, "anything", **ARGUMENTS))
    second = ask_page(peer, "anything", token, **ARGUMENTS)
    for arguments in SAME:
        assert asked_raw(peer, calling(token, arguments)).result == second.result, arguments
    for more in ('"_meta":{}', '"_meta":{"progressToken":1,"x":{"y":2}}'):
        assert asked_raw(peer, calling(token, SAME[0], f",{more}")).result == second.result


def test_changed_arguments_are_another_call(peer: Peer) -> None:
    """W§3: "Changed params […]: -32602 `invalid_token`"; `true` is not 1, null is not the same as
    absent, and the refusals change nothing."""
    token = following(ask_page(peer, "anything", **ARGUMENTS))
    garbage = asked_raw(peer, calling("nonsense", SAME[0]))
    for arguments in CHANGED:
        assert asked_raw(peer, calling(token, arguments)).raw == garbage.raw, arguments
    assert text_of(ask_page(peer, "anything", token, **ARGUMENTS)) == "page 2"


LOOK_ALIKES: list[tuple[object, object]] = [
    (2**53 + 1, 2**53),
    (1, True),
    (0, False),
    (0, None),
    ("", None),
    ([], {}),
    ("1", 1),
    (0, ""),
]


def test_what_only_looks_alike_is_another_call(peer: Peer) -> None:
    """W§3: "arguments (as JSON values […])"."""
    for pair in LOOK_ALIKES:
        for mine, other in (pair, pair[::-1]):
            token = following(ask_page(peer, "anything", value=mine))
            invalid(ask_page(peer, "anything", token, value=other))
            assert text_of(ask_page(peer, "anything", token, value=mine)) == "page 2"


def test_no_arguments_may_be_spelled_in_three_ways(peer: Peer) -> None:
    """W§3: "absent = `{}`"; null is as good."""
    spellings: list[dict[str, Any]] = [{}, {"arguments": {}}, {"arguments": None}]
    for spelled in spellings:
        first = peer.ask("tools/call", {"name": "anything", **spelled})
        for again in spellings:
            params = {"name": "anything", "resumeToken": following(first), **again}
            assert text_of(peer.ask("tools/call", params)) == "page 2"
        for added in ({"value": None}, {"value": {}}):
            invalid(ask_page(peer, "anything", following(first), **added))


def test_another_tool_is_another_call(peer: Peer, gate: Gate) -> None:
    """W§3: the token is bound to the name; a tool without pages has no token that would fit."""
    token = following(ask_page(peer, "anything"))
    answers = {
        under_one_id(ask_page(peer, "anything_else", token)),
        under_one_id(ask_page(peer, "pages", token, n=3)),
        under_one_id(ask_page(peer, "add", token, a=1, b=2)),
        under_one_id(ask_page(peer, "count", token, n=1, gate=gate.path)),
        under_one_id(ask_page(peer, "count", "nonsense", n=1, gate=gate.path)),
        under_one_id(peer.ask("tools/call", meta_params("add", token, a=1, b=2))),
        under_one_id(ask_page(peer, "anything", "nonsense")),
    }
    all_invalid(answers)
    assert gate.marks() == [], "no tool was called"
    assert text_of(ask_page(peer, "anything", token)) == "page 2"


def test_the_tokens_of_others_open_nothing_here(wire: Wire) -> None:
    """W§3: bound to this call: not a stream's token, not another run's page."""
    peer = wire.streams()
    call_id = peer.call("count", n=1)
    created = peer.expect(lambda message: message.method == "notifications/stream/create")
    peer.response(call_id)
    stream = created.params["stream"]
    calls = [
        page_params("count", stream["resumeToken"], n=1),
        page_params("pages", stream["resumeToken"], n=1),
        page_params("pages", stream["streamId"], n=1),
    ]
    all_invalid(answers_to_all(peer, calls))


def garbled(token: str) -> list[str]:
    """Changes of this token, each of one kind."""
    half = len(token) // 2
    return [
        "",
        " ",
        token + " ",
        " " + token,
        token + "\n",
        token + "=",
        token + "\x00",
        token + "A",
        "A" + token,
        token + token,
        token[:-1],
        token[1:],
        token[:half],
        token[half:] + token[:half],
        token[::-1],
        token.swapcase(),
        token[:half] + "é" + token[half + 1 :],
        token[:half] + "\U0001f511" + token[half + 1 :],
        "null",
        "nonsense",
        UNKNOWN,
        "A" * len(token),
        "%00",
        "../../etc/passwd",
        "' OR 1=1 --",
    ]


def test_a_garbled_token_is_told_nothing(peer: Peer) -> None:
    """W§3: "garbled: -32602 `invalid_token`", one answer to every fault, in either place."""
    token = following(ask_page(peer, "pages", n=3))
    wrong = garbled(token)
    assert token not in wrong
    calls = [params("pages", one, n=3) for params in (page_params, meta_params) for one in wrong]
    for half in (token, "x"):
        calls.append(page_params("pages", (half * MIB)[:MIB], n=3))
    answers = answers_to_all(peer, calls, batch=1)
    assert answers == {under_one_id(ask_page(peer, "pages", "nonsense", n=3))}
    all_invalid(answers)
    assert text_of(ask_page(peer, "pages", token, n=3)) == "page 2"


def test_half_a_character_is_no_token(peer: Peer) -> None:
    """W§7: "Bad UTF-8 or JSON in a line: -32700, and on with the next": a lone surrogate has no
    UTF-8; either of the two errors is right."""
    token = following(ask_page(peer, "pages", n=3))
    for wrong in ("\ud800", "\udfff\ud800", f"{token}\udc00", f"{token[:9]}\ud800{token[9:]}"):
        for params in (page_params, meta_params):
            peer.request("tools/call", params("pages", wrong, n=3))
            answer = peer.expect(lambda message: "error" in message)
            assert answer.error["code"] in (-32700, -32602)
            assert peer.settle() == []
    assert text_of(ask_page(peer, "pages", token, n=3)) == "page 2"


def test_no_bit_of_a_token_may_be_another(peer: Peer) -> None:
    """W§3: "bound by keyed hash": each bit counts, also those that base64 does not use."""
    token = following(ask_page(peer, "pages", n=3))
    flipped = [
        token[:at] + chr(ord(token[at]) ^ 1 << bit) + token[at + 1 :]
        for at in range(len(token))
        for bit in range(8)
    ]
    if isinstance(peer, HttpPeer):
        flipped = flipped[::7]  # each has its own request, and it is the same server
    all_invalid(answers_to_all(peer, [page_params("pages", one, n=3) for one in flipped]))
    assert text_of(ask_page(peer, "pages", token, n=3)) == "page 2"


def test_a_token_is_a_string(peer: Peer, gate: Gate) -> None:
    """W§9: "bad params" -32602; no tool is called for it."""
    no_tokens: list[object] = [7, 0, 1.5, True, False, [], ["token"], {}]
    for token in no_tokens:
        for params in (page_params, meta_params):
            call = params("pages", token, n=1, gate=gate.path)
            assert peer.ask("tools/call", call).error["code"] == -32602
    assert gate.marks() == []


def test_the_token_in_params_wins(peer: Peer) -> None:
    """W§3: "read from either"; where both are given, the one in `params` is the proposal's own."""
    token = following(ask_page(peer, "pages", n=2))
    both = page_params("pages", "nonsense", n=2)
    invalid(peer.ask("tools/call", {**both, "_meta": {"mcp-streams/resumeToken": token}}))
    both = page_params("pages", token, n=2)
    page = peer.ask("tools/call", {**both, "_meta": {"mcp-streams/resumeToken": "nonsense"}})
    assert text_of(page) == "page 2"


def over_each_kind(server: ServerProcess, stack: ExitStack) -> dict[str, Peer]:
    return {wire.kind: wire.plain() for wire in wire_of_each_kind(server, stack)}


def test_an_anonymous_clients_token_is_the_authority(server: ServerProcess) -> None:
    """W§3: bound to "the principal where that is authenticated or stdio's; elsewhere the token is
    the authority", over every transport."""
    with ExitStack() as stack:
        peers = over_each_kind(server, stack)
        for kind, maker in peers.items():
            if kind == "stdio":
                continue
            token = following(ask_page(maker, "pages", n=3))
            pages = [ask_page(peer, "pages", token, n=3).result for peer in peers.values()]
            assert pages[0]["content"][0]["text"] == "page 2"
            assert all(page == pages[0] for page in pages), kind


def test_a_users_token_is_void_for_others(server: ServerProcess) -> None:
    """W§3: "another principal […]: -32602 `invalid_token`"; W§10: "`os(uid)` over stdio"."""
    with ExitStack() as stack:
        peers = over_each_kind(server, stack)
        user = peers.pop("stdio")
        token = following(ask_page(user, "pages", n=3))
        calls = [page_params("pages", one, n=3) for one in (token, "nonsense")]
        for peer in peers.values():
            all_invalid(answers_to_all(peer, calls))
        with server.connect("stdio") as other:
            other.initialize(PLAIN)
            assert text_of(ask_page(other, "pages", token, n=3)) == "page 2"


def test_a_token_may_stand_among_the_arguments(wire: Wire) -> None:
    """W§3: "Where a tool has no parameter of that name, `arguments.resumeToken` is read as well":
    it is no argument of the tool, and the token is not bound to it. 1003: "it specifies an optional
    string-typed `resumeToken` parameter": for the first page it may be null.
    """
    peer = wire.plain()
    first = peer.response(peer.call("pages", n=4, resumeToken=None))
    assert text_of(first) == "page 1"
    token = following(first)
    second = peer.response(peer.call("pages", n=4, resumeToken=token))
    assert text_of(second) == "page 2"
    assert text_of(ask_page(peer, "pages", token, n=4)) == "page 2"
    later = following(second)
    both = {**page_params("pages", later, n=4, resumeToken=token)}
    third = peer.ask("tools/call", both)
    assert text_of(third) == "page 3", "the token in params wins"
    meta = meta_params("pages", following(third), n=4, resumeToken=later)
    assert text_of(peer.ask("tools/call", meta)) == "page 4", "and so does that in _meta"


def test_a_token_among_the_arguments_is_checked_like_any_other(peer: Peer) -> None:
    token = following(ask_page(peer, "pages", n=3))
    invalid(peer.response(peer.call("pages", n=4, resumeToken=token)))
    invalid(peer.response(peer.call("pages", n=3, resumeToken="x" * 72)))
    invalid(peer.response(peer.call("pages", n=3, resumeToken="")))
    assert peer.response(peer.call("pages", n=3, resumeToken=5)).error["code"] == -32602
    assert text_of(peer.response(peer.call("pages", n=3, resumeToken=token))) == "page 2"


def test_a_parameter_of_that_name_is_the_tools_own(peer: Peer) -> None:
    """W§3: only "where a tool has no parameter of that name"."""
    first = peer.response(peer.call("own_token", resumeToken="mine"))
    assert text_of(first) == "mine 1"
    token = following(first)
    second = ask_page(peer, "own_token", token, resumeToken="mine")
    assert text_of(second) == "mine 2"
    invalid(ask_page(peer, "own_token", token, resumeToken="yours"))


def test_a_page_token_beats_an_idempotency_key(wire: Wire) -> None:
    """1003: clients "MUST only mutate the `resumeToken` field": the key of the first call comes
    with each page, and stands for the first call alone."""
    peer = wire.plain()
    params = page_params("pages", n=3)
    key = secrets.token_urlsafe(32)
    params["_meta"] = {"progressToken": "p", "mcp-streams/idempotencyKey": key}
    first = peer.ask("tools/call", params)
    token = following(first)
    assert text_of(peer.ask("tools/call", params)) == "page 1", "the same call again"
    second = peer.ask("tools/call", {**params, "resumeToken": token})
    assert text_of(second) == "page 2"
    assert text_of(peer.ask("tools/call", {**params, "resumeToken": token})) == "page 2"
    invalid(peer.ask("tools/call", {**params, "resumeToken": token[:-1]}))
    third = peer.ask("tools/call", {**params, "resumeToken": following(second)})
    assert text_of(third) == "page 3"
