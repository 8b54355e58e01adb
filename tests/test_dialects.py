"""The proposals as tables: what clients may say, and what they are told."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from streams import dialects
from streams.dialects import (
    DIALECTS,
    QUESTIONS,
    RESUMES,
    STREAMS,
    Announcement,
    Poll,
    PollAll,
    Resume,
    Settings,
    Standing,
    settings_of,
)
from streams.errors import Refusal
from streams.messages import Run


def raw(params: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(params))


def read(line: bytes) -> Any:
    assert line.endswith(b"\n")
    return msgspec.json.decode(line)


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
    ],
)
def test_what_a_client_asks_becomes_an_intent(
    method: str, params: Mapping[str, Any], intent: Any
) -> None:
    assert (RESUMES | QUESTIONS)[method](raw(params)) == intent


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
    ],
)
def test_bad_params_are_refused_with_what_is_wrong(method: str, params: Any, what: str) -> None:
    with pytest.raises(Refusal, match=what) as refused:
        (RESUMES | QUESTIONS)[method](raw(params))
    assert refused.value.code == -32602


def test_a_client_that_says_nothing_opted_in_to_nothing() -> None:
    assert settings_of({}) == settings_of({"roots": {}, "experimental": {"x": 1}}) == Settings()


EXTENSION = "mcp-streams/v1"


@pytest.mark.parametrize(
    ("capabilities", "settings"),
    [
        ({"streams": {}}, Settings((STREAMS,))),
        ({"experimental": {EXTENSION: {}}}, Settings((STREAMS,))),
        ({"extensions": {EXTENSION: {}}}, Settings((STREAMS,))),
        ({"extensions": {EXTENSION: {"positions": True}}}, Settings((STREAMS,), True)),
        ({"extensions": {EXTENSION: {"dialects": []}}}, Settings()),
        ({"extensions": {EXTENSION: {"dialects": ["one to come"]}}}, Settings()),
        (
            {"streams": {}, "extensions": {EXTENSION: {"dialects": [], "positions": True}}},
            Settings((STREAMS,), True),
        ),
    ],
)
def test_a_client_opts_in(capabilities: dict[str, Any], settings: Settings) -> None:
    assert settings_of(capabilities) == settings


@pytest.mark.parametrize("bad", [{"positions": "yes"}, {"dialects": "streams"}, 5, None])
def test_settings_that_do_not_fit_are_refused(bad: Any) -> None:
    with pytest.raises(Refusal, match=r"capabilities\.extensions"):
        settings_of({"extensions": {EXTENSION: bad}})


@pytest.mark.parametrize("request_id", [1, "1"])
def test_an_announcement_says_how_to_come_back(request_id: int | str) -> None:
    made = Announcement(stream="s", token="t", request_id=request_id, min_s=0.5, max_s=3600.0)
    line = STREAMS.announce(made)
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


def test_a_stream_ends_with_its_id() -> None:
    assert read(STREAMS.end("s")) == {
        "jsonrpc": "2.0",
        "method": "notifications/stream/end",
        "params": {"streamId": "s"},
    }


def test_a_resume_is_answered_with_why_it_is_over() -> None:
    assert read(dialects.resumed("r", "released"))["result"] == {
        "_meta": {"mcp-streams/ended": "released"}
    }


def test_a_run_is_headed_by_its_position() -> None:
    assert read(dialects.position("s", Run(5, 2, b"{}\n{}\n"))) == {
        "jsonrpc": "2.0",
        "method": "notifications/stream/position",
        "params": {"streamId": "s", "seq": 5, "count": 2},
    }


def test_a_status_has_all_that_the_page_requires() -> None:
    standing = Standing("s", "live", pending_messages=True, has_request=False, has_error=False)
    assert msgspec.to_builtins(standing) == {
        "streamId": "s",
        "status": "live",
        "pendingMessages": True,
        "hasRequest": False,
        "hasError": False,
    }


def test_an_ack_names_a_stream_and_a_number() -> None:
    assert dialects.ack(raw({"streamId": "s", "seq": 4})) == dialects.Ack("s", 4)
    with pytest.raises(Refusal, match="seq"):
        dialects.ack(raw({"streamId": "s"}))


def test_who_uses_a_method_speaks_its_dialect() -> None:
    assert dialects.speakers_of("stream/resume") == (STREAMS,)
    assert dialects.speakers_of("tools/call") == ()


def test_the_server_says_what_it_speaks() -> None:
    assert dialects.advertisement() == {EXTENSION: {"dialects": list(DIALECTS), "positions": True}}
