"""A webhook goes to listed URLs and public addresses, and to no other."""

import socket
from typing import Any

import pytest
import trio

from streams.webhooks.receivers import (
    NotPublic,
    Receivers,
    addresses_of,
    is_public,
    origin,
    receiver,
)

LISTED = ["hooks.example.com", "internal.example.com:8443", "https://shared.example.com/team/"]


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.com",
        "https://hooks.example.com/",
        "https://hooks.example.com/a?b=c",
        "https://HOOKS.example.com:443/a",
        "https://internal.example.com:8443/a",
        "https://shared.example.com/team",
        "https://shared.example.com/team/",
        "https://shared.example.com/team/x?y",
    ],
)
def test_a_listed_url_is_allowed(url: str) -> None:
    assert Receivers(LISTED, is_private_allowed=False).allow(url)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "hooks.example.com",
        "http://hooks.example.com/",
        "ftp://hooks.example.com/",
        "https://hooks.example.com:444/",
        "https://hooks.example.com.evil.example/",
        "https://evil.example/hooks.example.com",
        "https://evil.example/#https://hooks.example.com/",
        "https://hooks.example.com@evil.example/",
        "https://evil.example@hooks.example.com/",
        "https://evil.example\\@hooks.example.com/",
        "https://hooks.example.com\\.evil.example/",
        "https://internal.example.com/",
        "https://shared.example.com/",
        "https://shared.example.com/teams/",
        "https://shared.example.com/team/../other/",
        "https://shared.example.com/team/%2e%2e/other/",
        "https://shared.example.com/team/%2E%2E%5Cother/",
        "https://shared.example.com:8443/team/",
        "https://hooks.example.com/ a",
        "https://hooks.example.com/\r\nHost: evil",
        "https://hooks.example.com:99999/",
        "https://hooks.example.com/" + "a" * 3000,
        "https://[::1]/",
    ],
)
def test_any_other_url_is_not(url: str) -> None:
    assert not Receivers(LISTED, is_private_allowed=False).allow(url)


def test_plain_http_needs_the_permission_for_private_addresses() -> None:
    assert Receivers(["a.example"], is_private_allowed=True).allow("http://a.example/")
    assert not Receivers(["a.example:80"], is_private_allowed=False).allow("http://a.example/")


@pytest.mark.parametrize(
    "rule", ["", "a/b", "ftp://a", "https://", "u@a", "http://a.example/", "https://a/b?team=1"]
)
def test_a_rule_that_is_none_is_refused(rule: str) -> None:
    with pytest.raises(ValueError, match="write"):
        Receivers([rule], is_private_allowed=False)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
        *("100.64.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "240.0.0.1"),
        *("::1", "::", "fe80::1", "fc00::1", "ff02::1", "2001:db8::1", "fe80::1%1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001::1"),
        *("fec0::1", "64:ff9b:1::7f00:1", "::7f00:1", "::ffff:0:7f00:1", "2001:0:a00:1::1"),
        *("5f00::1", "3fff::1", "192.88.99.1", "192.0.0.9", "100::1", "4000::1", "2001:20::1"),
    ],
)
def test_an_address_that_is_not_public_is_known(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "2001:4860::8888", "::ffff:8.8.8.8"]
)
def test_so_is_a_public_one(address: str) -> None:
    assert is_public(address)


class Names(trio.abc.HostnameResolver):
    """Knows the addresses that a test gives to one name."""

    def __init__(self, *addresses: str) -> None:
        self._addresses = addresses

    async def getaddrinfo(self, host: Any, port: Any, *_: Any, **__: Any) -> list[Any]:
        await trio.lowlevel.checkpoint()
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in self._addresses
        ]

    async def getnameinfo(self, *_: Any) -> Any:
        raise NotImplementedError


async def test_one_private_address_among_public_ones_is_enough() -> None:
    """The next look at the name may bring that one alone."""
    trio.socket.set_custom_hostname_resolver(Names("8.8.8.8", "10.0.0.1"))
    with pytest.raises(NotPublic, match=r"10\.0\.0\.1"):
        await addresses_of("https://rebound.example/", is_private_allowed=False)
    allowed = await addresses_of("https://rebound.example/", is_private_allowed=True)
    assert allowed == ["8.8.8.8", "10.0.0.1"]


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "2130706433", "0x7f.1", "localhost"])
async def test_names_and_odd_forms_of_loopback_are_refused(host: str) -> None:
    with pytest.raises(NotPublic, match="not public"):
        await addresses_of(f"https://{host}/", is_private_allowed=False)


def test_a_log_gets_host_and_port_alone() -> None:
    assert receiver("https://a.example:8443/SECRET?token=x") == "a.example:8443"


def test_an_origin_is_the_same_for_all_ways_to_write_it() -> None:
    forms = ["https://a.example", "https://A.example.:443/x?y", "HTTPS://u@a.EXAMPLE/z"]
    assert {origin(form) for form in forms} == {"https://a.example:443"}
    assert origin("http://a.example/") != origin("https://a.example/")
    assert origin("https://a.example:8443/") != origin("https://a.example/")
    assert origin("http://[x") == "http://[x"
