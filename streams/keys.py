"""Secrets: resume tokens, page tokens, and all that must not be guessed.

A resume token is a keyed hash of its stream's id. It is computed when it is needed and never
stored. So is a page token, which has three parts: where to find the stream, the seq before the
page, and a keyed hash of both and of the call. So is the name by which a call is found by its
idempotency key: a copy of the journal does not reveal that key, nor allow to test a guess.

The keys are in a file of their own beside the journal, so that a copy of the journal gives access
to no stream. The file has one key a line, url-safe base64 of 256 bits, the newest first: tokens are
made with the first key and accepted with any. To change the key, add a line on top. Replicas of one
server share their keys, in a file or in the store of their journal.
"""

import base64
import contextlib
import functools
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

from streams.errors import JournalUnusable, UnsafeFile
from streams.forks import in_child

BEARER_PREFIX: Final = "mcps_"  # scanners for leaked secrets recognize our tokens by it

# Of a streamId, for operators: 42 random bits behind the time. The others stay secret: with all of
# them, the stream of an anonymous caller can be resumed.
SHOWN_LETTERS: Final = 12

_KEY_BYTES: Final = 32
_ID_TIMES: Final = 2**29  # begin anew after 17 years, which does no harm
_ID_RANDOM: Final = 2**227
_DRAWN_AT_ONCE: Final = 64  # a system call takes as long as all else that an id takes
_NAME_BYTES: Final = 16
_SEQ_BYTES: Final = 6  # with the rest a multiple of 3: every bit of the base64 counts
_PAGE_TOKEN_LETTERS: Final = 72
_KEY: Final = re.compile(rb"[A-Za-z0-9_-]{43}=?")  # 32 bytes, padded or not
FILE_BYTES_MAX: Final = 64 * 1024  # 1,400 keys; a longer file is not a key file


_drawn: Final[list[bytes]] = []
in_child(_drawn.clear)  # else it would make the same ids as its parent


def new_stream_id(now: float) -> str:
    """227 random bits behind 29 bits of the time in seconds, url-safe.

    Ids of about the same time lie together in an index, however large it is. Ids at random places
    of it make a commit write a page for each new stream. The first bit is 0, so no id begins with a
    dash.
    """
    random = int.from_bytes(_random_key()) % _ID_RANDOM
    drawn = int(now) % _ID_TIMES * _ID_RANDOM + random
    return base64.urlsafe_b64encode(drawn.to_bytes(_KEY_BYTES))[:-1].decode()


def _random_key() -> bytes:
    """Random bytes for one id. The system is asked for those of many ids at once."""
    if not _drawn:
        drawn = os.urandom(_KEY_BYTES * _DRAWN_AT_ONCE)
        _drawn.extend(drawn[at : at + _KEY_BYTES] for at in range(0, len(drawn), _KEY_BYTES))
    return _drawn.pop()


def new_id() -> str:
    """256 random bits, url-safe: a session's id, or another value that must not be guessed.

    It never begins with a dash, which would be an option on a command line.
    """
    while (drawn := secrets.token_urlsafe(32)).startswith("-"):
        pass
    return drawn


def new_bearer() -> str:
    """A bearer token: 256 random bits behind our prefix."""
    return BEARER_PREFIX + new_id()


@functools.lru_cache(maxsize=1024)  # a client sends the id of its session with each request
def hashed(secret: str) -> str:
    """A hash of an id that must not be guessed; the hash may be stored."""
    return hashlib.sha256(_bytes(secret)).hexdigest()


def new_webhook_secret() -> str:
    """A secret that signs webhooks, as Standard Webhooks writes it."""
    return f"whsec_{base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode()}"


def new_request_id() -> str:
    """An id for a request to the client: unique, even across restarts on one journal."""
    return secrets.token_urlsafe(12)


def new_name(count: int = 8) -> str:
    """Random bytes in hex: a name that no other replica, or program, chooses."""
    return secrets.token_hex(count)


class Keyring:
    """The keys with which tokens are made and checked."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not keys:
            raise ValueError("a keyring needs a key")
        self._keys = tuple(keys)

    @classmethod
    def load(cls, path: Path | None) -> "Keyring":
        """The keys in the file at `path`. A missing file is created, with a new key.

        None stands for a key in memory, whose tokens end with the process. Raises
        `JournalUnusable` where the file cannot be read, is open to other users, or holds no keys.
        """
        if path is None:
            return cls([secrets.token_bytes(_KEY_BYTES)])
        try:
            content = _read(path, follows_links=False)
            if content is None:
                _create(path)
                content = _read(path, follows_links=False)
        except OSError as error:
            raise JournalUnusable(f"The keys in {path} cannot be used: {error}.") from error
        return cls.parse(content or b"", str(path))

    @classmethod
    def existing(cls, path: Path, *, follows_links: bool = True) -> "Keyring":
        """The keys in a file that is not made if it is missing: each replica would make another.

        Raises `JournalUnusable` as `load` does, and for a missing file.
        """
        content = _read(path, follows_links=follows_links)
        if content is None:
            raise JournalUnusable(
                f"{path}: there is no such file of keys: make it once, with 32 random bytes as "
                "url-safe base64, and give it to all replicas."
            )
        return cls.parse(content, str(path))

    @classmethod
    def parse(cls, content: bytes, where: str, mend: str = "or delete it") -> "Keyring":
        """The keys in the content of a file. Raises `JournalUnusable`, which says `where`, and how
        to `mend` it.
        """
        return cls(_parse(where, content, mend))

    def change_to(self, other: "Keyring") -> None:
        """Have the keys of another keyring from now on."""
        self._keys = other._keys
        self.__dict__.pop("identity", None)  # which is cached

    @property
    def fingerprints(self) -> list[str]:
        """The first 8 hex digits of the SHA-256 of each key, which reveal nothing of it."""
        return [hashlib.sha256(key).hexdigest()[:8] for key in self._keys]

    def token(self, stream_id: str) -> str:
        """The resume token of a stream: url-safe base64 of 256 bits, without padding."""
        return _hash(self._keys[0], stream_id).decode()

    def event_keys(self, stream_id: str) -> list[str]:
        """The prefixes of a stream's event ids, with each of the keys: its names, in hex."""
        return [name.hex() for name in self.names(stream_id)]

    def names(self, stream_id: str) -> tuple[bytes, ...]:
        """The names by which a stream is found by its token alone, one with each of the keys.

        A name has 128 bits and is not secret. Without a key, it reveals nothing of the stream's id.
        """
        return _names(self._keys, stream_id)

    def call_names(self, scope: str, key: str) -> list[bytes]:
        """The names by which the call with an idempotency key is found, one with each of the keys.

        The same idempotency key in another scope has other names.
        """
        whose = _bytes(scope)
        what = b"call:%d:" % len(whose) + whose + _bytes(key)
        return [hmac.digest(each, what, "sha256")[:_NAME_BYTES] for each in self._keys]

    @cached_property
    def identity(self) -> str:
        """A value that differs for other keys and reveals nothing of these.

        It does not change when a new key is added on top.
        """
        return _hash(self._keys[-1], "identity").decode()

    def page_token(self, stream_id: str, seq: int, call: bytes) -> str:
        """The page token of the page behind `seq`, for this `call` (a digest of 32 bytes)."""
        return _page_token(self._keys[0], stream_id, seq, call).decode()

    def is_page_token_of(self, stream_id: str, seq: int, call: bytes, token: str) -> bool:
        """Whether `token` is the page token of this page; as for `is_token_of`."""
        given = _bytes(token)
        is_match = False
        for key in self._keys:
            is_match |= hmac.compare_digest(_page_token(key, stream_id, seq, call), given)
        return is_match

    def is_token_of(self, stream_id: str, token: str) -> bool:
        """Whether `token` is the stream's resume token, with any of the keys.

        Both may be anything that a client sent. The time it takes reveals nothing about the keys.
        """
        given = _bytes(token)
        is_match = False
        for key in self._keys:
            is_match |= hmac.compare_digest(_hash(key, stream_id), given)
        return is_match


@functools.lru_cache(maxsize=1024)  # a call with event ids needs them twice
def _names(keys: tuple[bytes, ...], stream_id: str) -> tuple[bytes, ...]:
    return tuple(name_of(_hash(key, stream_id).decode()) for key in keys)


def name_of(token: str) -> bytes:
    """The name of the stream of a resume token; reveals nothing of the token."""
    return hashlib.sha256(_bytes(token)).digest()[:_NAME_BYTES]


def place_of(page_token: str) -> tuple[bytes, int] | None:
    """The stream's name and the seq in a page token; None for anything else."""
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
    return text.encode("utf-8", "surrogatepass")  # JSON can contain lone surrogates


def new_keys() -> bytes:
    """The content of a new file of keys: one key."""
    return base64.urlsafe_b64encode(secrets.token_bytes(_KEY_BYTES)) + b"\n"


def _read(path: Path, *, follows_links: bool) -> bytes | None:
    """The content of a file of keys; None if there is no such file. Raises `JournalUnusable`."""
    # Imported here (PLC0415): it needs POSIX, which a client may not have, and that needs only ids.
    from streams.permissions import read_secret  # noqa: PLC0415

    try:
        return read_secret(path, FILE_BYTES_MAX, follows_links=follows_links)
    except FileNotFoundError:
        return None
    except UnsafeFile as error:
        raise JournalUnusable(f"{error}.") from error
    except OSError as error:
        raise JournalUnusable(f"The keys in {path} cannot be used: {error}.") from error


def _create(path: Path) -> None:
    """Create the file with one new key; never replace a file."""
    from streams.files import write_whole  # noqa: PLC0415 (as in `_read`)

    write_whole(path, new_keys(), _link)


def _link(temporary: str, path: Path) -> None:
    with contextlib.suppress(FileExistsError):  # another process was faster: its key is used
        os.link(temporary, path)


def _parse(where: str, content: bytes, mend: str) -> Sequence[bytes]:
    lines = content.split()
    if not lines or len(content) > FILE_BYTES_MAX or not all(map(_KEY.fullmatch, lines)):
        raise JournalUnusable(
            f"{where} does not hold keys, with a blank or a line between two, each 256 bits as "
            f"url-safe base64: restore it, {mend}, which voids all tokens."
        )
    return [base64.urlsafe_b64decode(line.rstrip(b"=") + b"=") for line in lines]
