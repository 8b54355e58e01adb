"""The URLs of stores."""

from pathlib import Path
from typing import Any

import pytest

from streams.errors import JournalUnusable
from streams.journal.redis.addresses import Address, parse


def fields(url: str, **how: str) -> dict[str, Any]:
    """The fields of a parsed URL that differ from those of the shortest one."""
    usual, found = parse("redis://h"), parse(url, **how)
    return {
        name: value
        for name in Address.__struct_fields__
        if (value := getattr(found, name)) != getattr(usual, name) and name != "url"
    }


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h:7000", {"hosts": (("h", 7000),)}),
        ("valkey://h/3", {"db": 3}),
        ("redis://h?db=4", {"db": 4}),
        ("redis://[::1]:7000", {"hosts": (("::1", 7000),)}),
        ("redis://:p%40%2Fss@h", {"password": "p@/ss"}),
        ("redis://user:p@h", {"user": "user", "password": "p"}),
        ("redis://user@h", {"user": "user"}),
        ("redis://h?prefix=other", {"prefix": "other"}),
        ("rediss://h", {"is_tls": True}),
        ("valkeys://h", {"is_tls": True}),
        ("redis://h?cluster=1", {"kind": "cluster"}),
        ("redis://h?cluster=0", {}),
        ("redis+cluster://a,b:7001", {"kind": "cluster", "hosts": (("a", 6379), ("b", 7001))}),
        (
            "rediss+cluster://a",
            {"kind": "cluster", "hosts": (("a", 6379),), "is_tls": True},
        ),
        (
            "redis+sentinel://u:p@a:1,b/main/2?sentinel_password=q",
            {
                "kind": "sentinel",
                "hosts": (("a", 1), ("b", 26379)),
                "service": "main",
                "db": 2,
                "user": "u",
                "password": "p",
                "sentinel_password": "q",
            },
        ),
        (
            "unix:///run/store.sock?db=1",
            {"kind": "unix", "hosts": (), "path": "/run/store.sock", "db": 1},
        ),
    ],
)
def test_a_url_says_where_the_store_is(url: str, expected: dict[str, Any]) -> None:
    assert fields(url) == expected


def test_the_prefix_of_a_url_comes_before_another() -> None:
    assert parse("redis://h").prefix == "mcp-streams"
    assert parse("redis://h", prefix="a").prefix == "a"
    assert parse("redis://h?prefix=b", prefix="a").prefix == "b"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://h", "its scheme is 'http'"),
        ("redis://", "a host is missing"),
        ("redis://h:notaport", "port of a host"),
        ("redis://h:99999", "port of a host"),
        ("redis://h/name", "one number"),
        ("redis://h/1/2", "one number"),
        ("redis://h?color=red", "it has color="),
        ("redis://h?prefix=a{b}", "no braces"),
        ("redis://h?prefix=" + "x" * 101, "1 to 100 letters"),
        ("redis://a,b", "several hosts"),
        ("redis+sentinel://a", "the service is missing"),
        ("redis+cluster://a/1", "the database 0 only"),
        ("redis://h?ca=/x", "ca= is for TLS"),
        ("rediss://h?ca=/no/such", "no file /no/such"),
        ("redis://u:a/b@h:1/0", "write / as %2F"),
        ("redis://u:a#b@h:1/0", "write / as %2F"),
        ("redis://u:a?b@h:1/0", "write / as %2F"),
    ],
)
def test_a_wrong_url_is_refused_with_the_reason(url: str, why: str) -> None:
    with pytest.raises(JournalUnusable, match=why):
        parse(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hidden@h?color=red",
        "redis://user:hidden@h/name",
        "redis://:hid/den@h",
        "redis://user:hid/den@h",
        "redis://user:pass?hid=den@h",
        "redis+sentinel://a?sentinel_password=hidden",
    ],
)
def test_an_error_does_not_show_the_password(url: str) -> None:
    with pytest.raises(JournalUnusable) as caught:
        parse(url)
    assert "hid" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_file_that_is_no_certificate_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(JournalUnusable, match="PEM"):
        parse(f"rediss://h?ca={tmp_path / 'ca.pem'}").tls()
