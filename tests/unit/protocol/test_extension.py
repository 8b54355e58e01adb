"""Our own extension: what a client opts in to, numbers, acks, and why a delivery is over."""

from typing import Any

import msgspec
import pytest

from streams.errors import Refusal
from streams.messages import Run
from streams.protocol import extension
from streams.protocol.dialects import RESUMABLE_REQUESTS, STREAMS
from streams.protocol.extension import EXTENSION, Settings, settings_of, understood
from streams.protocol.vocabulary import Ack


def raw(params: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(params))


def read(line: bytes) -> Any:
    assert line.endswith(b"\n")
    return msgspec.json.decode(line)


def test_a_client_that_says_nothing_opted_in_to_nothing() -> None:
    assert settings_of({}) == settings_of({"roots": {}, "experimental": {"x": 1}}) == Settings()


BOTH = (STREAMS, RESUMABLE_REQUESTS)


@pytest.mark.parametrize(
    ("capabilities", "settings"),
    [
        ({"streams": {}}, Settings((STREAMS,), replay_response=True)),
        ({"resumableRequests": {}}, Settings((RESUMABLE_REQUESTS,))),
        ({"resumableRequests": {}, "streams": {}}, Settings(BOTH, replay_response=True)),
        (
            {"streams": {}, "extensions": {EXTENSION: {"replayResponse": False}}},
            Settings((STREAMS,)),
        ),
        (
            {"streams": {}, "experimental": {EXTENSION: {"replayResponse": True}}},
            Settings((STREAMS,), replay_response=True),
        ),
        ({"experimental": {EXTENSION: {}}}, Settings((STREAMS,))),
        ({"extensions": {EXTENSION: {}}}, Settings((STREAMS,))),
        ({"extensions": {EXTENSION: {"positions": True}}}, Settings((STREAMS,), True)),
        (
            {"extensions": {EXTENSION: {"replayResponse": True}}},
            Settings((STREAMS,), False, True),
        ),
        ({"extensions": {EXTENSION: {"dialects": []}}}, Settings()),
        ({"extensions": {EXTENSION: {"dialects": ["one to come"]}}}, Settings()),
        (
            {"streams": {}, "extensions": {EXTENSION: {"dialects": [], "positions": True}}},
            Settings((STREAMS,), True),
        ),
        (
            {"extensions": {EXTENSION: {"dialects": ["resumableRequests"]}}},
            Settings((RESUMABLE_REQUESTS,)),
        ),
        (
            {"extensions": {EXTENSION: {"dialects": ["resumableRequests", "streams"]}}},
            Settings(BOTH),
        ),
        (
            {"resumableRequests": {}, "experimental": {EXTENSION: {}}},
            Settings(BOTH),
        ),
    ],
)
def test_a_client_opts_in(capabilities: dict[str, Any], settings: Settings) -> None:
    assert settings_of(capabilities) == settings


def test_the_name_of_a_dialect_without_a_capability_opts_in_to_nothing() -> None:
    assert settings_of({"resumeTokens": {}}) == Settings()
    for place in ("extensions", "experimental"):
        listed = {place: {EXTENSION: {"dialects": ["resumeTokens"]}}}
        assert settings_of(listed) == Settings()
    both = {"extensions": {EXTENSION: {"dialects": ["resumeTokens", "streams"]}}}
    assert settings_of(both) == Settings((STREAMS,))


@pytest.mark.parametrize("bad", [{"positions": "yes"}, {"dialects": "streams"}, 5, None])
def test_settings_that_do_not_fit_are_refused(bad: Any) -> None:
    with pytest.raises(Refusal, match=r"capabilities\.extensions"):
        settings_of({"extensions": {EXTENSION: bad}})


def test_the_server_says_what_it_speaks() -> None:
    assert extension.advertisement("a memory") == {
        EXTENSION: {
            "dialects": ["streams", "resumableRequests", "resumeTokens"],
            "positions": True,
            "idempotencyKeys": "a memory",
        }
    }


def test_a_resume_is_answered_with_why_it_is_over() -> None:
    assert read(extension.resumed("r", "released"))["result"] == {
        "_meta": {"mcp-streams/ended": "released"}
    }


def test_the_response_may_be_inside_the_answer_to_a_resume() -> None:
    inside = b'{"jsonrpc":"2.0","id":1,"result":{"n":1.0}}\n'
    answer = extension.resumed("r", "completed", inside)
    assert read(answer)["result"]["_meta"]["mcp-streams/response"] == read(inside)
    assert b'{"n":1.0}' in answer  # as it was
    assert answer.count(b"\n") == 1


def test_a_run_is_headed_by_its_position() -> None:
    assert read(extension.position("s", Run(5, 2, b"{}\n{}\n"))) == {
        "jsonrpc": "2.0",
        "method": "notifications/stream/position",
        "params": {"streamId": "s", "seq": 5, "count": 2},
    }


def test_an_ack_names_a_stream_and_a_number() -> None:
    assert extension.ack(raw({"streamId": "s", "seq": 4})) == Ack("s", 4)
    with pytest.raises(Refusal, match="seq"):
        extension.ack(raw({"streamId": "s"}))


@pytest.mark.parametrize(
    "capabilities",
    [
        {},
        {"streams": {}},
        {"streams": {}, "resumableRequests": {}},
        {"extensions": {EXTENSION: {}}},
        {"extensions": {EXTENSION: {"dialects": ["streams"], "positions": True}}},
        {"experimental": {EXTENSION: {"dialects": ["resumableRequests"]}}, "streams": {}},
        {"extensions": {EXTENSION: {"dialects": [], "replayResponse": True}}},
        {"extensions": 3, "experimental": {EXTENSION: {"positions": True}}},
    ],
)
def test_what_is_kept_of_capabilities_is_what_is_understood(capabilities: Any) -> None:
    """WIRE §8: "Of a client's capabilities what is understood is kept, up to 16 KiB"."""
    much = {"x" * 1000: ["y" * 1_000_000]}
    given = much | {"streams": much} if "streams" in capabilities else much
    given = {**capabilities, **given}
    for place in ("experimental", "extensions"):
        if isinstance(capabilities.get(place), dict):
            chosen = capabilities[place][EXTENSION]
            named = (
                {"dialects": [*chosen["dialects"], *["z"] * 100_000]}
                if "dialects" in chosen
                else {}
            )
            given[place] = {**much, EXTENSION: {**chosen, **named, "more": much}}
    kept = understood(given)
    assert len(msgspec.json.encode(kept)) < 1024
    assert settings_of(kept) == settings_of(given) == settings_of(capabilities)
    assert understood(kept) == kept


@pytest.mark.parametrize("given", [b"[]", b"null", b"5", b'{"mcp-streams/v1":{"a":"\\x"}}'])
def test_of_capabilities_that_cannot_be_read_the_names_are_known(given: bytes) -> None:
    capabilities = {"streams": msgspec.Raw(b"[[]]"), "experimental": msgspec.Raw(given)}
    assert extension.known_of(capabilities) == {"streams": {}, "experimental": {}}


def test_of_capabilities_our_settings_are_decoded() -> None:
    given = {"mcp-streams/v1": {"positions": True}, "other/v1": {"much": [{}]}}
    capabilities = {"extensions": msgspec.Raw(msgspec.json.encode(given))}
    assert extension.known_of(capabilities) == {
        "extensions": {"mcp-streams/v1": {"positions": True}}
    }


def test_what_many_clients_declare_is_read_once_unless_it_is_long() -> None:
    extension._declared.cache_clear()
    short = {"extensions": msgspec.Raw(b'{"mcp-streams/v1":{"positions":true}}')}
    for capabilities in (short, dict(short), {**short, "roots": msgspec.Raw(b"{}")}):
        settings, kept = extension.declared(capabilities)
        assert settings == settings_of(kept) == Settings((STREAMS,), positions=True)
    long = short | {"roots": msgspec.Raw(b" " * extension.DECLARED_BYTES_MAX + b"{}")}
    assert extension.declared(long)[0] == settings
    info = extension._declared.cache_info()
    assert (info.hits, info.misses) == (1, 2)


@pytest.mark.parametrize("odd", [b"[]", b"null", b"7", b'"text"', b"true"])
def test_capabilities_of_a_backend_that_are_no_object_count_as_none(odd: bytes) -> None:
    ours = {EXTENSION: {}}
    both = {"extensions": ours, "experimental": ours}
    assert extension.merged(msgspec.Raw(odd), ours) == both
    assert extension.merged(msgspec.json.decode(odd), ours) == both
    for place in both:
        assert extension.merged({place: msgspec.Raw(odd)}, ours) == both
        assert extension.merged({place: msgspec.json.decode(odd)}, ours) == both
        assert extension.merged(msgspec.Raw(b'{"%s":%s}' % (place.encode(), odd)), ours) == both
