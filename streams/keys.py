"""Secrets: resume tokens, and everything that nobody may guess.

A resume token is a keyed hash of its stream's id, so nothing of it is stored: it is made again
whenever it is needed. So is the token of a page, which has three parts: where to find the stream,
the seq that the page begins behind, and a keyed hash of both and of the call.

So is the name under which a call is found by its idempotency key: who has a copy of the journal can
neither read that key in it nor try one out.

The keys are in a file of their own beside the journal, so that a copy of the journal opens nobody's
stream. The file has one key a line, url-safe base64 of 256 bits, the newest first: tokens are made
under the first and honoured under all. To change the key, put a line on top.
"""

import base64
import contextlib
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from streams.errors import JournalUnusable, UnsafeFile
from streams.files import write_whole
from streams.permissions import read_secret

BEARER_PREFIX: Final = "mcps_"  # by which those who look for leaked secrets know one of ours

_KEY_BYTES: Final = 32
_NAME_BYTES: Final = 16
_SEQ_BYTES: Final = 6  # with the rest a multiple of 3: every bit of the base64 counts
_PAGE_TOKEN_LETTERS: Final = 72
_KEY: Final = re.compile(rb"[A-Za-z0-9_-]{43}=?")  # 32 bytes, padded or not
FILE_BYTES_MAX: Final = 64 * 1024  # 1,400 keys; whatever is longer is something else


def new_id() -> str:
    """256 random bits, url-safe: a stream's id, or anything else that must not be guessed.

    None begins with a dash: on a command line it would be an option.
    """
    while (drawn := secrets.token_urlsafe(32)).startswith("-"):
        pass
    return drawn


def new_bearer() -> str:
    """A bearer token: 256 random bits, and what it is known by."""
    return BEARER_PREFIX + new_id()


def hashed(secret: str) -> str:
    """What may be stored of an id that nobody may guess."""
    return hashlib.sha256(_bytes(secret)).hexdigest()


def new_request_id() -> str:
    """An id for a request to the client: unique, also across restarts on one journal."""
    return secrets.token_urlsafe(12)


class Keyring:
    """The keys under which tokens are made and checked."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not keys:
            raise ValueError("a keyring needs a key")
        self._keys = tuple(keys)

    @classmethod
    def load(cls, path: Path | None) -> "Keyring":
        """The keys in the file at `path`, which is made with a new key where there is none.

        None stands for a key in memory, whose tokens end with the process. Raises
        `JournalUnusable` where the file cannot be had, is open to other users, or holds no keys.
        """
        if path is None:
            return cls([secrets.token_bytes(_KEY_BYTES)])
        try:
            try:
                content = read_secret(path, FILE_BYTES_MAX, follows_links=False)
            except FileNotFoundError:
                _create(path)
                content = read_secret(path, FILE_BYTES_MAX, follows_links=False)
        except UnsafeFile as error:
            raise JournalUnusable(f"{error}.") from error
        except OSError as error:
            raise JournalUnusable(f"The keys in {path} cannot be used: {error}.") from error
        return cls(_parse(path, content))

    def token(self, stream_id: str) -> str:
        """The resume token of a stream: url-safe base64 of 256 bits, without padding."""
        return _hash(self._keys[0], stream_id).decode()

    def event_keys(self, stream_id: str) -> list[str]:
        """What the ids of a stream's events begin with, and may have begun with under older keys:
        its names, in hex.
        """
        return [name.hex() for name in self.names(stream_id)]

    def names(self, stream_id: str) -> list[bytes]:
        """What a stream is found by where only a token is given, under each of the keys.

        128 bits, unrelated to the stream's id for who has no key, and no secret.
        """
        return [name_of(_hash(key, stream_id).decode()) for key in self._keys]

    def call_names(self, scope: str, key: str) -> list[bytes]:
        """What the call with an idempotency key is found by, under each of the keys here.

        The same key in another scope is another one.
        """
        whose = _bytes(scope)
        what = b"call:%d:" % len(whose) + whose + _bytes(key)
        return [hmac.digest(each, what, "sha256")[:_NAME_BYTES] for each in self._keys]

    @property
    def identity(self) -> str:
        """What tells these keys from any others, and says nothing else of them.

        It stays when a new key is put on top.
        """
        return _hash(self._keys[-1], "identity").decode()

    def page_token(self, stream_id: str, seq: int, call: bytes) -> str:
        """The token of the page behind `seq`, for who makes the same `call` (32 bytes)."""
        return _page_token(self._keys[0], stream_id, seq, call).decode()

    def is_page_token_of(self, stream_id: str, seq: int, call: bytes, token: str) -> bool:
        """Whether `token` is that of this page; as for `is_token_of`."""
        given = _bytes(token)
        is_match = False
        for key in self._keys:
            is_match |= hmac.compare_digest(_page_token(key, stream_id, seq, call), given)
        return is_match

    def is_token_of(self, stream_id: str, token: str) -> bool:
        """Whether `token` is the stream's, under any of the keys.

        Both may be whatever a client sent. The time it takes says nothing about the keys.
        """
        given = _bytes(token)
        is_match = False
        for key in self._keys:
            is_match |= hmac.compare_digest(_hash(key, stream_id), given)
        return is_match


def name_of(token: str) -> bytes:
    """Where to look for the stream of a token; tells nothing of the token itself."""
    return hashlib.sha256(_bytes(token)).digest()[:_NAME_BYTES]


def place_of(page_token: str) -> tuple[bytes, int] | None:
    """The stream's name in the token of a page, and the seq; None for what is no such token."""
    if len(page_token) != _PAGE_TOKEN_LETTERS:
        return None
    try:
        parts = base64.b64decode(_bytes(page_token), b"-_", validate=True)
    except ValueError:
        return None
    return parts[:_NAME_BYTES], int.from_bytes(parts[_NAME_BYTES:][:_SEQ_BYTES], "big")


def _page_token(key: bytes, stream_id: str, seq: int, call: bytes) -> bytes:
    place = seq.to_bytes(_SEQ_BYTES, "big")
    proof = hmac.digest(key, b"page:" + place + call + _bytes(stream_id), "sha256")
    name = name_of(_hash(key, stream_id).decode())
    return base64.urlsafe_b64encode(name + place + proof)


def _hash(key: bytes, stream_id: str) -> bytes:
    return base64.urlsafe_b64encode(hmac.digest(key, _bytes(stream_id), "sha256")).rstrip(b"=")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # JSON can smuggle in lone surrogates


def _create(path: Path) -> None:
    """Make the file with one new key, and never over another one."""
    key = base64.urlsafe_b64encode(secrets.token_bytes(_KEY_BYTES)) + b"\n"
    write_whole(path, key, _link)


def _link(temporary: str, path: Path) -> None:
    with contextlib.suppress(FileExistsError):  # somebody was faster; their key is as good
        os.link(temporary, path)


def _parse(path: Path, content: bytes) -> Sequence[bytes]:
    lines = content.split()
    if not lines or len(content) > FILE_BYTES_MAX or not all(map(_KEY.fullmatch, lines)):
        raise JournalUnusable(
            f"{path} does not hold keys, one a line, each 256 bits as url-safe base64: restore it, "
            "or delete it, which voids all tokens."
        )
    return [base64.urlsafe_b64decode(line.rstrip(b"=") + b"=") for line in lines]
