"""JSON Web Tokens: whose are taken, and that all others get one and the same answer."""

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Callable
from typing import Any

import jwt
import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from structlog.testing import capture_logs

from streams import messages
from streams.auth.bearer import LOG_EVERY_S, RECHECK_S, Authenticator
from streams.auth.jwks import REFRESH_S, RETRY_S, KeySet
from streams.auth.jwt import ALGORITHMS, LEEWAY_S, JwtVerifier
from streams.exchange import Caller, Head, HttpError
from tests.rigs.jwts import (
    AUDIENCE,
    EC,
    ED,
    ISSUER,
    KEYS,
    NOW,
    RSA,
    STRANGER,
    Issuer,
    claims,
    jwk,
    signed,
)


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


async def taker(
    nursery: trio.Nursery,
    *keys: dict[str, Any],
    clock: Callable[[], float] = lambda: NOW,
    **settings: Any,
) -> JwtVerifier:
    known = KeySet(Issuer(*(keys or KEYS)))
    await nursery.start(known.run)
    usual = {"issuer": ISSUER, "audience": AUDIENCE, "algorithms": list(ALGORITHMS)}
    return JwtVerifier(known, clock=clock, **(usual | settings))


async def answer(door: Authenticator, authorization: str | None) -> Caller | HttpError:
    headers = {} if authorization is None else {"authorization": authorization}
    try:
        caller = await door.admit(Head("POST", "/mcp", headers))
    except HttpError as denied:
        return denied
    assert caller is not None
    return caller


@pytest.mark.parametrize(
    ("key", "algorithm", "kid"),
    [
        (RSA, "RS256", "rsa"),
        (RSA, "PS512", "rsa"),
        (EC, "ES256", "ec"),
        (ED, "EdDSA", "ed"),
        (EC, "ES256", None),  # the only key that may have signed so
    ],
)
async def test_who_is_signed_for_is_let_in(
    nursery: trio.Nursery, key: Any, algorithm: str, kid: str | None
) -> None:
    verifier = await taker(nursery)
    caller = await verifier.verify(signed(key, algorithm, kid))
    assert caller.principal == f"bearer({ISSUER}, ada)"
    assert caller.holds_for_s() == RECHECK_S


def unsigned(**other: Any) -> str:
    return jwt.encode(claims(**other), None, "none")  # type: ignore[arg-type]


def by_public_key() -> str:
    """Signed with what everybody knows, as if it were a secret."""
    public = RSA.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hmac_signed(public)


def hmac_signed(secret: bytes) -> str:
    head = part({"alg": "HS256", "typ": "JWT", "kid": "rsa"})
    text = f"{head}.{part(claims())}"
    return f"{text}.{encoded(hmac.digest(secret, text.encode(), hashlib.sha256))}"


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def part(content: Any) -> str:
    return encoded(json.dumps(content).encode())


def altered(token: str) -> str:
    head, _, signature = token.split(".")
    return f"{head}.{part(claims(sub='eve'))}.{signature}"


REFUSED: dict[str, Callable[[], str | None]] = {
    "no token": lambda: None,
    "another scheme": lambda: "Basic YTpi",
    "no scheme": signed,
    "a scheme alone": lambda: "Bearer",
    "two of them": lambda: f"Bearer {signed()}, Bearer {signed()}",
    "garbage": lambda: "Bearer a.b.c",
    "no JWT": lambda: "Bearer mcps_abc",
    "bytes that are none": lambda: "Bearer \x00\xff",
    "expired": lambda: f"Bearer {signed(exp=NOW - LEEWAY_S - 1)}",
    "not yet": lambda: f"Bearer {signed(nbf=NOW + LEEWAY_S + 1)}",
    "no expiry": lambda: f"Bearer {signed(exp=None)}",
    "an expiry that is no number": lambda: f"Bearer {signed(exp='tomorrow')}",
    "an expiry that is no time": lambda: f"Bearer {signed(exp=float('nan'))}",
    "another audience": lambda: f"Bearer {signed(aud='https://elsewhere.example.com')}",
    "no audience": lambda: f"Bearer {signed(aud=None)}",
    "another issuer": lambda: f"Bearer {signed(iss='https://elsewhere.example.com')}",
    "no issuer": lambda: f"Bearer {signed(iss=None)}",
    "no subject": lambda: f"Bearer {signed(sub=None)}",
    "an empty subject": lambda: f"Bearer {signed(sub='')}",
    "a subject with a newline": lambda: "Bearer " + signed(sub="a\nb"),
    "a subject that is too long": lambda: f"Bearer {signed(sub='a' * 256)}",
    "no signature": lambda: f"Bearer {unsigned()}",
    "the public key for a secret": lambda: f"Bearer {by_public_key()}",
    "an empty secret": lambda: f"Bearer {hmac_signed(b'')}",
    "a stranger's key": lambda: f"Bearer {signed(STRANGER)}",
    "an unknown key": lambda: f"Bearer {signed(STRANGER, kid='other')}",
    "another key's name": lambda: f"Bearer {signed(EC, 'ES256', kid='rsa')}",
    "altered": lambda: f"Bearer {altered(signed())}",
    "a critical header": lambda: (
        "Bearer "
        + jwt.encode(claims(), RSA, "RS256", headers={"kid": "rsa", "crit": ["x"], "x": 1})
    ),
    "deep": lambda: f"Bearer {encoded(b'[' * 5000)}.e30.AA",
    "huge": lambda: f"Bearer {signed(padding='x' * 8192)}",
}


async def test_all_others_get_the_one_answer(nursery: trio.Nursery) -> None:
    door = Authenticator([await taker(nursery)])
    bodies, challenges = set(), set()
    for what, make in REFUSED.items():
        given = make()
        denied = await answer(door, given)
        assert isinstance(denied, HttpError), what
        has_token = given is not None and given.startswith("Bearer ")
        ((name, challenge),) = denied.headers
        assert (denied.status, name) == (401, "www-authenticate"), what
        if has_token:
            assert re.fullmatch(
                r'Bearer error="invalid_token", error_description="[ !#-[\]-~]+"', challenge
            )
            challenges.add(challenge)
            bodies.add(messages.error(None, denied.refusal))
        else:
            assert challenge == "Bearer", what
            assert b"needs authentication" in messages.error(None, denied.refusal), what
    assert len(bodies) == len(challenges) == 1


@pytest.mark.parametrize(
    ("claimed", "scopes"),
    [
        ({}, set()),
        ({"scope": "reports.read reports.write"}, {"reports.read", "reports.write"}),
        ({"scope": ["reports.read", "reports.write"]}, {"reports.read", "reports.write"}),
        ({"scp": "reports.read"}, {"reports.read"}),
        ({"scp": ["reports.read"], "scope": "openid"}, {"reports.read", "openid"}),
        ({"scope": "  reports.read   x "}, {"reports.read", "x"}),
        ({"scope": ""}, set()),
        ({"scope": 7, "scp": {"a": 1}}, set()),
        ({"scp": [7, None, ["a"], "reports.read"]}, {"reports.read"}),
    ],
)
async def test_scopes_are_in_either_claim(
    nursery: trio.Nursery, claimed: dict[str, Any], scopes: set[str]
) -> None:
    """RFC 9068, 2.2.3: `scope` is a string of words; issuers have `scp`, and lists, as well. Any
    other value grants nothing."""
    caller = await answer(Authenticator([await taker(nursery)]), f"Bearer {signed(**claimed)}")
    assert isinstance(caller, Caller)
    assert caller.scopes == scopes


async def test_strangers_do_not_fill_the_log(autojump_clock: trio.testing.MockClock) -> None:
    door = Authenticator([])
    with capture_logs() as logs:
        for _ in range(3):
            for _ in range(100):
                await answer(door, "Bearer mcps_none")
            await trio.sleep(LOG_EVERY_S)
    assert [entry["times"] for entry in logs] == [1, 100, 100]


async def test_only_the_algorithms_that_were_named_are_taken(nursery: trio.Nursery) -> None:
    door = Authenticator([await taker(nursery, algorithms=["ES256"])])
    assert isinstance(await answer(door, f"Bearer {signed()}"), HttpError)
    assert isinstance(await answer(door, f"Bearer {signed(EC, 'ES256', 'ec')}"), Caller)
    for unsafe in ("HS256", "none", "RS1"):
        with pytest.raises(ValueError, match="is not one of"):
            await taker(nursery, algorithms=[unsafe])


@pytest.mark.parametrize(
    "key",
    [
        jwk(RSA, "rsa", use="enc"),
        jwk(RSA, "rsa", alg="PS256"),
        jwk(RSA, "rsa", key_ops=["encrypt"]),
        jwk(rsa.generate_private_key(public_exponent=65537, key_size=1024), "rsa"),
        {"kty": "oct", "k": encoded(b"secret" * 8), "kid": "rsa"},
        {"kty": "RSA", "n": 7, "e": [], "kid": "rsa"},
        {"kid": "rsa"},
    ],
)
async def test_a_key_that_is_there_for_something_else_lets_nobody_in(
    nursery: trio.Nursery, key: dict[str, Any]
) -> None:
    door = Authenticator([await taker(nursery, key)])
    assert isinstance(await answer(door, f"Bearer {signed()}"), HttpError)
    assert isinstance(await answer(door, f"Bearer {hmac_signed(b'secret' * 8)}"), HttpError)


async def test_a_token_holds_until_it_expires(nursery: trio.Nursery) -> None:
    clock = Clock()
    verifier = await taker(nursery, clock=clock)
    caller = await verifier.verify(signed())
    clock.now = NOW + 3600 + LEEWAY_S - 1
    assert caller.holds_for_s() == 1
    clock.now += 1
    assert caller.holds_for_s() <= 0
    assert isinstance(await answer(Authenticator([verifier]), f"Bearer {signed()}"), HttpError)


# The key set. `MockClock` would jump while the thread runs that reads it: nothing is read in one.


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(function: Callable[[], bytes], **_: Any) -> bytes:
        await trio.lowlevel.checkpoint()
        return function()

    monkeypatch.setattr(trio.to_thread, "run_sync", run)


@pytest.mark.usefixtures("inline")
async def test_a_new_key_is_found_and_an_old_one_ends_what_it_opened(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    issuer = Issuer(jwk(RSA, "old"))
    keys = KeySet(issuer)
    await nursery.start(keys.run)
    verifier = JwtVerifier(
        keys, issuer=ISSUER, audience=AUDIENCE, algorithms=["RS256"], clock=Clock()
    )
    caller = await verifier.verify(signed(kid="old"))
    issuer.keys = [jwk(STRANGER, "new")]
    await trio.sleep(RETRY_S)
    await verifier.verify(signed(STRANGER, kid="new"))
    assert caller.holds_for_s() <= 0


@pytest.mark.usefixtures("inline")
async def test_unknown_keys_are_not_asked_for_more_than_once_in_a_while(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    issuer = Issuer(*KEYS)
    keys = KeySet(issuer)
    await nursery.start(keys.run)
    verifier = JwtVerifier(
        keys, issuer=ISSUER, audience=AUDIENCE, algorithms=["RS256"], clock=Clock()
    )
    door = Authenticator([verifier])

    async def guess(kid: str) -> None:
        assert isinstance(await answer(door, f"Bearer {signed(STRANGER, kid=kid)}"), HttpError)

    for _ in range(3):
        async with trio.open_nursery() as guessing:
            for number in range(20):
                guessing.start_soon(guess, f"k{number}")
        await trio.sleep(RETRY_S)
    assert issuer.asked == 3  # one of them when it began


@pytest.mark.usefixtures("inline")
async def test_an_issuer_that_is_away_turns_nobody_away(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    issuer = Issuer(*KEYS)
    keys = KeySet(issuer)
    await nursery.start(keys.run)
    verifier = JwtVerifier(
        keys, issuer=ISSUER, audience=AUDIENCE, algorithms=["RS256"], clock=Clock()
    )
    issuer.is_away = True
    await trio.sleep(10 * REFRESH_S)
    assert issuer.asked > 5
    assert isinstance(await answer(Authenticator([verifier]), f"Bearer {signed()}"), Caller)


@pytest.mark.usefixtures("inline")
async def test_before_the_keys_are_known_nobody_is_told_that_their_token_is_bad(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    issuer = Issuer(*KEYS)
    issuer.is_away = True
    keys = KeySet(issuer)
    await nursery.start(keys.run)
    verifier = JwtVerifier(
        keys, issuer=ISSUER, audience=AUDIENCE, algorithms=["RS256"], clock=Clock()
    )
    denied = await answer(Authenticator([verifier]), f"Bearer {signed()}")
    assert isinstance(denied, HttpError)
    assert denied.status == 503
    assert dict(denied.headers)["retry-after"]
    issuer.is_away = False
    await trio.sleep(2 * RETRY_S)
    assert isinstance(await answer(Authenticator([verifier]), f"Bearer {signed()}"), Caller)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b'{"keys": []}', b'{"keys": [1]}', b" " * 300_000, b"\xff"]
)
async def test_what_is_no_key_set_leaves_the_former_one(
    nursery: trio.Nursery, text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = Issuer(*KEYS)
    told = [issuer(), text]
    keys = KeySet(lambda: told.pop(0))
    await nursery.start(keys.run)
    monkeypatch.setattr("streams.auth.jwks.RETRY_S", 0)
    assert await keys.find("none", lambda key: True) is None
    assert not told
    assert await keys.find("rsa", lambda key: True) is not None
