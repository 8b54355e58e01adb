"""Signatures are those of Standard Webhooks' own library, and nothing else is accepted."""

import os
from pathlib import Path

import pytest
from standardwebhooks import Webhook

from streams.clock import wall
from streams.keys import new_webhook_secret
from streams.webhooks.signatures import Forged, Signer, make_secret, read_signer
from tests.rigs.webhooks import OTHER_SECRET, SECRET

DAY_S = 86_400.0
BODY = '{"type":"call.completed","data":{"tool":"büro"}}'.encode()


def signed(at: float | None = None, secret: str = SECRET, body: bytes = BODY) -> dict[str, str]:
    return Signer([secret]).headers("msg_1", wall() if at is None else at, body)


def test_the_library_accepts_a_signature() -> None:
    assert Webhook(SECRET).verify(BODY, signed())["type"] == "call.completed"


def test_the_example_of_the_specification_has_its_signature() -> None:
    """From the tests of the reference libraries."""
    signer = Signer(["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"])
    headers = signer.headers("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330.9, b'{"test": 2432232314}')
    expected = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert headers["webhook-signature"] == expected
    assert headers["webhook-timestamp"] == "1614265330"


@pytest.mark.parametrize(
    "forged",
    [
        {},
        signed(secret=OTHER_SECRET),
        signed(at=wall() - DAY_S),
        signed(at=wall() + DAY_S),
        signed(body=BODY + b" "),
        signed() | {"webhook-id": "msg_2"},
        signed() | {"webhook-timestamp": str(int(wall()) + 1)},
        signed() | {"webhook-signature": "v1,"},
        signed() | {"webhook-signature": "v1"},
        signed() | {"webhook-signature": "v1,\xff"},
        signed() | {"webhook-signature": signed()["webhook-signature"].replace("v1,", "v2,")},
        signed() | {"webhook-timestamp": "soon"},
    ],
)
def test_a_forged_message_is_rejected(forged: dict[str, str]) -> None:
    with pytest.raises(Forged):
        Signer([SECRET]).verify(forged, BODY)


def test_a_body_that_is_no_text_is_rejected() -> None:
    with pytest.raises(Forged):
        Signer([SECRET]).verify(signed(), b"\xff")


def test_receivers_can_change_from_one_secret_to_the_other() -> None:
    headers = Signer([SECRET, OTHER_SECRET]).headers("msg_1", wall(), BODY)
    both = Signer([OTHER_SECRET, SECRET])
    for secret, other in ((SECRET, OTHER_SECRET), (OTHER_SECRET, SECRET)):
        assert Webhook(secret).verify(BODY, headers)["type"] == "call.completed"
        both.verify(signed(secret=secret), BODY)
        with pytest.raises(Forged):
            Signer([other]).verify(signed(secret=secret), BODY)
    assert len(headers["webhook-signature"].split()) == 2


def test_a_made_secret_is_private_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    assert make_secret(path)
    content = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert not make_secret(path)
    assert path.read_text() == content
    Webhook(content.strip()).verify(BODY, read_signer(path).headers("msg_1", wall(), BODY))


def test_no_secret_is_made_twice() -> None:
    assert new_webhook_secret() != new_webhook_secret()


@pytest.mark.parametrize(
    "content",
    ["", "secret", "whsec_", "whsec_c2hvcnQ=", f"{SECRET}\nMDEy", "whsec_!!!!", "\xff", "a" * 9999],
)
def test_a_file_without_secrets_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content.encode("latin-1"))
    path.chmod(0o600)
    with pytest.raises(ValueError, match="has no secrets of webhooks") as caught:
        read_signer(path)
    assert SECRET not in str(caught.value)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    os.chmod(path, 0o644)
    with pytest.raises(OSError, match="read"):
        read_signer(path)
