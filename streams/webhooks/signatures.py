"""Secrets of webhooks, and the headers that they sign.

`standardwebhooks`, the reference library of Standard Webhooks, makes and checks the signatures.
"""

import base64
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from standardwebhooks import Webhook, WebhookVerificationError

from streams.files import write_whole
from streams.keys import new_webhook_secret
from streams.permissions import read_secret

PREFIX: Final = "whsec_"
FILE_BYTES_MAX: Final = 4096
# "between 24 bytes (192 bits) and 64 bytes (512 bits)"
SECRET_BYTES_MIN: Final = 24
SECRET_BYTES_MAX: Final = 64


class Forged(Exception):
    """A message whose signature, or whose time, does not fit."""


class Signer:
    """Signs with each of some secrets, and accepts the signature of any.

    With two secrets, receivers can change from one to the other while both are in use.
    """

    def __init__(self, secrets: Sequence[str]) -> None:
        """Raises `ValueError` for a text that is no secret."""
        if not secrets:
            raise ValueError("there is no secret")
        self._keys = [Webhook(_checked(secret)) for secret in secrets]

    def headers(self, message_id: str, at: float, body: bytes) -> dict[str, str]:
        """The headers of one attempt, which is made at this wall time."""
        # A receiver refuses old messages, so each attempt has its own time. The library takes
        # whole seconds of it.
        time = datetime.fromtimestamp(int(at), UTC)
        signatures = (key.sign(message_id, time, body.decode()) for key in self._keys)
        return {
            "webhook-id": message_id,
            "webhook-timestamp": str(int(at)),
            "webhook-signature": " ".join(signatures),
        }

    def verify(self, headers: Mapping[str, str], body: bytes) -> None:
        """Raise `Forged` unless the message was signed with one of the secrets, minutes ago."""
        why: Exception = WebhookVerificationError()
        for key in self._keys:
            try:
                key.verify(body, dict(headers), json_parse=False)
            except (WebhookVerificationError, ValueError) as error:  # no base64, or no text
                why = error
            else:
                return
        raise Forged(str(why) or type(why).__name__) from why


def _checked(secret: str) -> str:
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except ValueError:
        key = b""
    if not (secret.startswith(PREFIX) and SECRET_BYTES_MIN <= len(key) <= SECRET_BYTES_MAX):
        raise ValueError(
            f"a secret of webhooks is {PREFIX} and {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes "
            "in base64"
        )
    return secret


def read_signer(path: Path) -> Signer:
    """A signer with the secrets in a file, one a line. Raises `ValueError`, or an `OSError`."""
    content = read_secret(path, FILE_BYTES_MAX)
    try:
        return Signer(content.decode("ascii").split() if len(content) <= FILE_BYTES_MAX else ())
    except ValueError as error:
        raise ValueError(f"{path} has no secrets of webhooks, one a line: {error}") from None


def make_secret(path: Path) -> bool:
    """Make a file with a new secret, for its owner alone; False if there is one.

    Raises `OSError`.
    """
    if path.exists():
        return False

    def link(temporary: str, path: Path) -> None:
        with suppress(FileExistsError):  # another process was faster: its secret is used
            os.link(temporary, path)

    write_whole(path, f"{new_webhook_secret()}\n".encode(), link)
    return True
