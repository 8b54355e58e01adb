"""The proposals as tables: what clients may say, and what they are told."""

import ast
from collections.abc import Mapping
from typing import Any, TypeGuard

import msgspec
import pytest

from streams.errors import Refusal
from streams.protocol import dialects
from streams.protocol.dialects import RESUMABLE_REQUESTS, RESUME_TOKENS, STREAMS
from streams.protocol.vocabulary import (
    Announcement,
    Dialect,
    Lead,
    Listing,
    Poll,
    PollAll,
    Polling,
    Report,
    Resume,
    Standing,
)
from tests.rigs import ROOT


def raw(params: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(params))


def told(value: Any) -> Any:
    """The value as the other side reads it."""
    return msgspec.json.decode(msgspec.json.encode(value))


def read(line: bytes) -> Any:
    assert line.endswith(b"\n")
    return msgspec.json.decode(line)


def asked(method: str, params: Any) -> Any:
    """The intent that the server reads from a request."""
    return (dialects.resumings() | dialects.questions())[method].read(raw(params))


# Requests of a client


@pytest.mark.parametrize(
    ("method", "params", "intent"),
    [
        ("stream/resume", {"streamId": "s"}, Resume("s", None, None)),
        (
            "stream/resume",
            {"streamId": "s", "resumeToken": "t", "after": 3, "more": 1},
            Resume("s", "t", 3),
        ),
        ("stream/poll", {"streamId": "s", "after": 0}, Poll("s", None, 0)),
        ("stream/poll/all", {}, PollAll(None)),
        ("stream/poll/all", {"cursor": "c"}, PollAll("c")),
        ("requests/resume", {"resumeToken": "t"}, Resume(None, "t", None)),
        (
            "requests/resume",
            {"resumeToken": "t", "after": 0, "streamId": "s"},
            Resume(None, "t", 0),
        ),
        (
            "requests/getStatus",
            {"requestId": 1, "resumeToken": "t"},
            Poll(None, "t", None, 1),
        ),
        (
            "requests/getStatus",
            {"requestId": "1", "resumeToken": "t", "after": 7},
            Poll(None, "t", 7, "1"),
        ),
    ],
)
def test_what_a_client_asks_becomes_an_intent(
    method: str, params: Mapping[str, Any], intent: Any
) -> None:
    assert asked(method, params) == intent


@pytest.mark.parametrize(
    ("method", "params", "what"),
    [
        ("stream/resume", {}, "streamId"),
        ("stream/resume", {"streamId": 1}, "streamId"),
        ("stream/resume", {"streamId": "s", "after": -1}, "after"),
        ("stream/resume", {"streamId": "s", "after": "1"}, "after"),
        ("stream/resume", {"streamId": "s", "after": 1.5}, "after"),
        ("stream/poll", {"streamId": "s", "resumeToken": 5}, "resumeToken"),
        ("stream/poll/all", {"cursor": 5}, "cursor"),
        ("stream/poll", [], "object"),
        ("requests/resume", {}, "resumeToken"),
        ("requests/resume", {"resumeToken": None}, "resumeToken"),
        ("requests/resume", {"resumeToken": "t", "after": -1}, "after"),
        ("requests/getStatus", {"resumeToken": "t"}, "requestId"),
        ("requests/getStatus", {"requestId": 1}, "resumeToken"),
        ("requests/getStatus", {"requestId": 1.5, "resumeToken": "t"}, "requestId"),
        ("requests/getStatus", {"requestId": None, "resumeToken": "t"}, "requestId"),
        ("requests/getStatus", [1, "t"], "object"),
    ],
)
def test_bad_params_are_refused_with_what_is_wrong(method: str, params: Any, what: str) -> None:
    with pytest.raises(Refusal, match=what) as refused:
        asked(method, params)
    assert refused.value.code == -32602


@pytest.mark.parametrize("after", [None, 0, 5])
@pytest.mark.parametrize("dialect", [STREAMS, RESUMABLE_REQUESTS])
def test_what_our_client_asks_is_what_our_server_reads(dialect: Dialect, after: int | None) -> None:
    resuming, polling = dialect.resuming, dialect.polling
    assert resuming is not None
    assert polling is not None
    is_named = dialect is STREAMS
    stream = "s" if is_named else None
    resume = resuming.read(raw(resuming.ask("s", "t", after)))
    assert resume == Resume(stream, "t", after)
    poll = polling.read(raw(polling.ask("s", "t", "r", after)))
    assert poll == Poll(stream, "t", after, None if is_named else "r")


def test_a_client_without_a_token_asks_without_one() -> None:
    assert STREAMS.resuming is not None
    assert STREAMS.resuming.ask("s", "", None) == {"streamId": "s"}


def test_only_one_way_to_resume_stands_in_for_the_call() -> None:
    takes_over = {method: word.takes_over for method, word in dialects.resumings().items()}
    assert takes_over == {"stream/resume": False, "requests/resume": True}


def test_who_uses_a_method_speaks_its_dialect() -> None:
    assert dialects.speakers_of("stream/resume") == (STREAMS,)
    assert dialects.speakers_of("requests/resume") == (RESUMABLE_REQUESTS,)
    assert dialects.speakers_of("tools/call") == dialects.speakers_of("stream/poll") == ()


# Answers to a client


def announcement(**more: Any) -> Announcement:
    known: dict[str, Any] = {"request_id": 1, "min_s": 0.5, "max_s": 3600.0}
    return Announcement(stream="s", token="t", **(known | more))


@pytest.mark.parametrize("request_id", [1, "1"])
def test_an_announcement_says_how_to_come_back(request_id: int | str) -> None:
    line = STREAMS.announce(announcement(request_id=request_id))
    assert read(line) == {
        "jsonrpc": "2.0",
        "method": "notifications/stream/create",
        "params": {
            "stream": {
                "streamId": "s",
                "requestId": request_id,
                "resumeInterval": {"min": 0.5, "max": 3600},
                "resumeToken": "t",
            }
        },
    }
    assert b"3600.0" not in line  # as the page prints it


@pytest.mark.parametrize("request_id", [1, "1"])
def test_a_policy_says_how_to_come_back(request_id: int | str) -> None:
    line = RESUMABLE_REQUESTS.announce(announcement(request_id=request_id))
    assert read(line) == {
        "jsonrpc": "2.0",
        "method": "notifications/requests/resumePolicy",
        "params": {"requestId": request_id, "resumeToken": "t", "minWait": 0.5, "maxWait": 3600},
    }
    assert b"3600.0" not in line


@pytest.mark.parametrize("dialect", [STREAMS, RESUMABLE_REQUESTS])
def test_our_client_hears_what_our_server_announces(dialect: Dialect) -> None:
    assert dialect.announcing is not None
    made = announcement(request_id="1")
    heard = dialect.announcing.hear(raw(dialect.announcing.tell(made)))
    expected = made if dialect is STREAMS else announcement(request_id="1", max_s=3600.0)
    assert heard.stream == ("s" if dialect.announcing.names_stream else "")
    assert msgspec.structs.replace(heard, stream="s") == expected


@pytest.mark.parametrize(
    ("dialect", "params", "heard"),
    [
        (
            STREAMS,
            {"streamId": "s", "requestId": 1, "resumeInterval": {"min": 2}},
            Announcement("s", "", 1, 2.0, None),
        ),
        (
            STREAMS,
            {"stream": {"streamId": "s", "requestId": "1"}},
            Announcement("s", "", "1", 0.0, None),
        ),
        (  # the page's own
            STREAMS,
            {"stream": {"streamId": "s", "resumeInterval": {"min": 5, "max": 3600}}},
            Announcement("s", "", None, 5.0, 3600.0),
        ),
        (
            STREAMS,
            {"streamId": "s", "requestId": None, "resumeInterval": None, "resumeToken": None},
            Announcement("s", "", None, 0.0, None),
        ),
        (
            RESUMABLE_REQUESTS,
            {"resumeToken": "t", "minWait": None},
            Announcement("", "t", None, 0.0, None),
        ),
        (
            RESUMABLE_REQUESTS,
            {"requestId": 1, "resumeToken": "t"},
            Announcement("", "t", 1, 0.0, None),
        ),
    ],
)
def test_other_servers_may_say_less(dialect: Dialect, params: Any, heard: Announcement) -> None:
    assert dialect.announcing is not None
    assert dialect.announcing.hear(raw(params)) == heard


@pytest.mark.parametrize("dialect", [STREAMS, RESUMABLE_REQUESTS])
def test_an_announcement_without_what_it_takes_is_none(dialect: Dialect) -> None:
    assert dialect.announcing is not None
    bad_id = {"requestId": 1.5, "resumeToken": "t", "streamId": "s"}
    empty = {"requestId": 1, "resumeToken": "", "streamId": ""}
    bad_times = {"resumeToken": "t", "streamId": "s", "resumeInterval": "5", "minWait": "5"}
    for params in (
        {},
        {"requestId": 1},
        {"requestId": 1, "resumeToken": 5},
        bad_id,
        empty,
        bad_times,
        [],
        {"stream": 5},
    ):
        with pytest.raises(ValueError, match=r"required|Expected"):
            dialect.announcing.hear(raw(params))


def test_a_stream_ends_with_its_id_where_there_is_a_word_for_it() -> None:
    assert read(STREAMS.end("s")) == {
        "jsonrpc": "2.0",
        "method": "notifications/stream/end",
        "params": {"streamId": "s"},
    }
    assert RESUMABLE_REQUESTS.end("s") == RESUME_TOKENS.end("s") == b""
    assert RESUME_TOKENS.announce(announcement()) == b""


def report(**more: Any) -> Report:
    names = ("is_live", "has_failed", "has_pending", "has_request", "has_error")
    flags = dict.fromkeys(names, False)
    return Report(**({"stream": "s", "request_id": 1} | flags | more))


def polling(dialect: Dialect) -> Polling:
    assert dialect.polling is not None
    return dialect.polling


def test_a_status_has_all_that_the_page_requires() -> None:
    status = told(polling(STREAMS).tell(report(is_live=True, has_pending=True)))
    assert status == {
        "streamId": "s",
        "status": "live",
        "pendingMessages": True,
        "hasRequest": False,
        "hasError": False,
    }
    failed = told(polling(STREAMS).tell(report(has_failed=True, has_error=True)))
    assert (failed["status"], failed["hasError"]) == ("completed", True)


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        ({"is_live": True}, "processing"),
        ({"is_live": True, "has_failed": True}, "processing"),  # not durable: it may not be so
        ({"has_failed": True}, "failed"),
        ({"has_error": True}, "completed"),  # a result that says isError
        ({}, "completed"),
    ],
)
def test_a_status_of_a_request_is_one_of_three(flags: dict[str, bool], status: str) -> None:
    assert told(polling(RESUMABLE_REQUESTS).tell(report(**flags))) == {
        "requestId": 1,
        "status": status,
        "hasPendingMessage": False,
        "hasInputRequest": False,
    }


@pytest.mark.parametrize("dialect", [STREAMS, RESUMABLE_REQUESTS])
@pytest.mark.parametrize("flag", ["is_live", "has_pending", "has_request"])
def test_our_client_hears_how_a_stream_stands(dialect: Dialect, flag: str) -> None:
    word = polling(dialect)
    heard = word.hear(raw(word.tell(report(**{flag: True}))))
    assert heard == Standing(
        stream_id="s" if dialect is STREAMS else "",
        status="live" if flag == "is_live" else "completed",
        pending_messages=flag == "has_pending",
        has_request=flag == "has_request",
        has_error=False,
    )


def test_our_client_hears_of_a_failure() -> None:
    word = polling(RESUMABLE_REQUESTS)
    assert word.hear(raw(word.tell(report(has_failed=True)))).has_error


def test_a_list_of_streams_has_a_cursor_where_there_are_more() -> None:
    word = dialects.questions()["stream/poll/all"]
    assert isinstance(word, Listing)
    assert told(word.tell([], None)) == {"statuses": []}
    page = told(word.tell([report(), report(stream="t")], "c"))
    assert [status["streamId"] for status in page["statuses"]] == ["s", "t"]
    assert page["nextCursor"] == "c"


# Pages

IN_META = "mcp-streams/resumeToken"


@pytest.mark.parametrize(
    ("params", "token"),
    [
        ({}, None),
        ({"resumeToken": "a"}, "a"),
        ({"_meta": {IN_META: "b"}}, "b"),
        ({"resumeToken": "a", "_meta": {IN_META: "b"}}, "a"),
        ({"resumeToken": None, "_meta": {IN_META: "b"}}, "b"),
        ({"resumeToken": "", "_meta": {IN_META: "b"}}, ""),  # a token, if a bad one
        ({"_meta": None}, None),
        ({"_meta": {"progressToken": 1}, "nextResumeToken": "x"}, None),
    ],
)
def test_a_call_may_name_its_page_in_two_places(params: Any, token: str | None) -> None:
    assert dialects.page_token(raw({"name": "rows"} | params)) == token


@pytest.mark.parametrize("params", [{"resumeToken": 5}, {"_meta": {IN_META: ["a"]}}])
def test_a_token_that_is_no_text_is_refused(params: Any) -> None:
    with pytest.raises(Refusal, match="Bad params") as refused:
        dialects.page_token(raw(params))
    assert refused.value.code == -32602


@pytest.mark.parametrize(
    ("given", "token", "left"),
    [
        ({"a": 1}, None, {"a": 1}),
        ({"a": 1, "resumeToken": "t"}, "t", {"a": 1}),
        ({"a": 1, "resumeToken": None}, None, {"a": 1}),
        ({"resumeToken": ""}, "", {}),
        ({"a": {"resumeToken": "t"}}, None, {"a": {"resumeToken": "t"}}),
        (["resumeToken"], None, ["resumeToken"]),
        ("resumeToken", None, "resumeToken"),
    ],
)
def test_a_token_may_stand_among_the_arguments(given: Any, token: str | None, left: Any) -> None:
    found, arguments = dialects.split_arguments(raw(given), lambda name: name == "a")
    assert (found, msgspec.json.decode(arguments)) == (token, left)


@pytest.mark.parametrize("token", [b"5", b"1e400", b"9" * 5000])
def test_an_argument_of_that_name_is_the_tools_own(token: bytes) -> None:
    given = msgspec.Raw(b'{"resumeToken":%s}' % token)
    assert dialects.split_arguments(given, lambda name: name == "resumeToken") == (None, given)
    with pytest.raises(Refusal, match="must be a string"):
        dialects.split_arguments(given, lambda name: False)


def test_a_result_leads_on_in_two_places_and_keeps_what_it_had() -> None:
    result = {"content": [1.0, "ü"], "structuredContent": {"a": None}, "_meta": {"own": 1}}
    assert told(dialects.leading_on(raw(result), "t", 3600.0)) == {
        **result,
        "nextResumeToken": "t",
        "_meta": {"own": 1, "mcp-streams/nextResumeToken": "t", "mcp-streams/resumeTtl": 3600},
    }
    assert "_meta" in dialects.leading_on(raw({}), "t", 1.0)


def test_our_client_asks_and_hears_in_both_places() -> None:
    paging = RESUME_TOKENS.paging
    assert paging is not None
    in_params, in_meta = paging.ask("t"), paging.ask_in_meta("t")
    for params in (in_params, {"_meta": in_meta}, in_params | {"_meta": in_meta}):
        assert paging.read(raw(params)) == "t"
    in_result, in_meta = paging.tell("t", 5.0)
    for result in (in_result, in_result | {"_meta": in_meta}):
        assert paging.hear(result) == Lead("t")
    assert paging.hear({"_meta": in_meta}) == Lead("t", is_in_meta=True)
    assert paging.hear({"content": []}) is None
    assert paging.hear({"content": [], "_meta": {"own": 1}}) is None


# Where all this is known

FIELDS = {
    "resumeToken",
    "nextResumeToken",
    "resumeInterval",
    "minWait",
    "maxWait",
    "hasInputRequest",
    "pendingMessages",
}


def test_only_the_tables_know_the_words_of_the_proposals() -> None:
    words = [
        word
        for dialect in dialects.DIALECTS.values()
        for word in (dialect.announcing, dialect.resuming, dialect.polling, dialect.listing)
    ]
    methods = {word.method for word in words if word is not None}
    assert len(methods) == 7
    methods |= {"stream/", "notifications/stream/end", "resumePolicy", "requests/"}
    ours = {"notifications/stream/position", "notifications/stream/ack"}  # our own extension
    knowing = set()
    for path in [*ROOT.glob("streams/**/*.py"), *ROOT.glob("transports/**/*.py")]:
        text = path.read_text()
        for word in ours:
            text = text.replace(word, "")
        literals = {node.value for node in ast.walk(ast.parse(text)) if is_text(node)}
        if any(method in text for method in methods) or literals & FIELDS:
            knowing.add(path.name)
    assert knowing == {"dialects.py"}


def is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@pytest.mark.parametrize(
    ("params", "token"),
    [
        (b'{"resumeToken":"t"}', "t"),
        (b'{"_meta":{"mcp-streams/resumeToken":"t"}}', "t"),
        (b'{"resume\\u0054oken":"t"}', "t"),
        (b'{"_meta":{"mcp-streams/\\u0072esumeToken":"t"}}', "t"),
        (b'{"arguments":{"resumeToken":"t"}}', None),
        (b'{"name":"resumeToken"}', None),
        (b'{"name":"x"}', None),
    ],
)
def test_a_page_token_is_found_however_its_name_is_written(
    params: bytes, token: str | None
) -> None:
    assert dialects.page_token(msgspec.Raw(params)) == token
