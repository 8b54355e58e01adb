"""Bearer tokens that this server has made, in a file of their hashes.

Each line of the file is a JSON object: a name, the SHA-256 of a token, and when it was made and
expires, in seconds since 1970. A token has 256 random bits, so that a plain hash keeps it secret,
and the time of a lookup by the hash leaks nothing. A name may have several tokens, so that a new
one can be handed out before the old one is revoked; all of them have the same subject.

The server checks for changes of the file at each request, so that added and revoked tokens take
effect at once. If the file cannot be used, no token of it is valid.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from streams.auth.bearer import RECHECK_S, InvalidToken, principal_of
from streams.clock import wall
from streams.errors import StreamsError, UnsafeFile
from streams.exchange import Caller, checked_scopes
from streams.files import write_whole
from streams.keys import BEARER_PREFIX, hashed, new_bearer
from streams.logs import log
from streams.permissions import check_folder, open_safe, real_path

ISSUER: Final = "tokens"  # never the issuer of a JWT, which is a URL
FILE_BYTES_MAX: Final = 4 * 1024 * 1024  # 25,000 tokens; a longer file is not one of tokens
ID_LETTERS: Final = 8

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}", re.ASCII)
_ID: Final = re.compile(rf"[0-9a-f]{{{ID_LETTERS}}}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")

_Seen = tuple[int, int, int, int]


class TokensUnusable(StreamsError):
    """The file cannot be used. The message says why, and what to do."""


class Token(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A token as the file keeps it. Times are seconds since 1970."""

    name: str
    sha256: str
    created_at: float
    expires_at: float | None = None
    scopes: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Identifies the token among others of the same name."""
        return self.sha256[:ID_LETTERS]

    def left_s(self, now: float) -> float:
        """The seconds until it expires; negative after that."""
        return float("inf") if self.expires_at is None else self.expires_at - now


_DECODER: Final = msgspec.json.Decoder(Token)


# For the server


class TokenFile:
    """A `Verifier` for the tokens of a file."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = wall) -> None:
        """Raises `TokensUnusable`."""
        self._path = path
        self._clock = clock
        self._seen: _Seen | None = None  # identifies the file's content when it was read
        self._tokens: dict[str, Token] = {}  # by their hashes
        self._problem = ""
        if problem := self._reload_if_changed():
            raise TokensUnusable(problem)

    async def reload(self) -> None:
        """Read the file again, whether it has changed or not."""
        self._seen, self._problem = None, ""
        self._refresh()

    def recognizes(self, token: str) -> bool:
        return token.startswith(BEARER_PREFIX)

    async def verify(self, token: str) -> Caller:
        key = hashed(token)
        left_s = self._left_s(key)
        if left_s <= 0:
            raise InvalidToken(f"a token that is unknown, revoked or expired ({key[:ID_LETTERS]})")
        found = self._tokens[key]

        def holds_for_s() -> float:
            return min(self._left_s(key, found.scopes), RECHECK_S)

        return Caller(principal_of(ISSUER, found.name), holds_for_s, frozenset(found.scopes))

    def _left_s(self, key: str, scopes: tuple[str, ...] | None = None) -> float:
        """The seconds for which the token with this hash is still valid; 0 if it is unknown.

        If `scopes` are given, it is 0 as well once the token has other scopes.
        """
        self._refresh()
        token = self._tokens.get(key)
        if token is None or scopes not in (None, token.scopes):
            return 0.0
        return token.left_s(self._clock())

    def _refresh(self) -> None:
        """Read the file again if it has changed; a problem is logged once."""
        problem = self._reload_if_changed()
        if problem and problem != self._problem:
            log.error("the file of tokens cannot be used; all its tokens are refused", why=problem)
        self._problem = problem

    def _reload_if_changed(self) -> str:
        """Returns why the file cannot be used; an empty text if it can."""
        try:
            status = self._path.stat()
            seen = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
            if seen != self._seen:
                self._tokens = {token.sha256: token for token in read(self._path)}
                self._seen = seen
        except TokensUnusable as error:
            self._tokens, self._seen = {}, None
            return str(error)
        except OSError as error:
            self._tokens, self._seen = {}, None
            mend = ""
            if isinstance(error, FileNotFoundError):
                mend = f" Make it with mcp-streams token new NAME --file {self._path}."
            return f"The tokens in {self._path} cannot be read: {error.strerror}.{mend}"
        return ""


def read(path: Path) -> Sequence[Token]:
    """The tokens in a file. Raises `TokensUnusable` or `OSError`."""
    with _opened(path, os.O_RDONLY) as (_, descriptor):
        return _parse(path, os.pread(descriptor, FILE_BYTES_MAX + 1, 0))


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[tuple[Path, int]]:
    """The real path of the file and its descriptor, if the file and its folder are safe to use."""
    try:
        path = real_path(path)
        check_folder(path.parent)
        descriptor = open_safe(path, flags)
    except UnsafeFile as error:
        raise TokensUnusable(f"{error}.") from error
    try:
        yield path, descriptor
    finally:
        os.close(descriptor)


def _parse(path: Path, content: bytes) -> Sequence[Token]:
    try:
        tokens = _DECODER.decode_lines(content)
    except ValueError as error:  # includes msgspec's errors
        why = str(error)
    else:
        wrong = [token.name for token in tokens if not _is_sound(token)]
        if not wrong and len(content) <= FILE_BYTES_MAX:
            return tokens
        why = f"the name or the hash of {wrong[0][:64]!r} is invalid" if wrong else "it is too long"
    raise TokensUnusable(
        f"{path} does not hold tokens, one JSON object a line ({why}): restore it, or make a new "
        "one with mcp-streams token new."
    )


def _is_sound(token: Token) -> bool:
    return bool(_NAME.fullmatch(token.name) and _HASH.fullmatch(token.sha256))


# For the commands that make and revoke tokens


def add(
    path: Path, name: str, lifetime_s: float | None = None, scopes: Iterable[str] = ()
) -> tuple[str, Token]:
    """Make a token, and the file if it does not exist. The returned secret is stored nowhere.

    Raises `ValueError` for an invalid name or scope, `TokensUnusable`, or `OSError`.
    """
    secret, token = _made(name, lifetime_s, scopes)
    _keep(path, token)
    return secret, token


def _made(name: str, lifetime_s: float | None, scopes: Iterable[str]) -> tuple[str, Token]:
    if not _NAME.fullmatch(name) or _ID.fullmatch(name):
        raise ValueError(
            f"{name[:80]!r} is not a name for a token: use up to 64 letters, digits and ._@+-, and "
            f"not just {ID_LETTERS} hexadecimal digits"
        )
    secret, now = new_bearer(), wall()
    expires_at = None if lifetime_s is None else now + lifetime_s
    return secret, Token(
        name=name,
        sha256=hashed(secret),
        created_at=now,
        expires_at=expires_at,
        scopes=checked_scopes(scopes),
    )


def _keep(path: Path, token: Token) -> None:
    with _locked(path) as (file, tokens):
        _write(file, [*tokens, token])


def add_to(
    to: Path,
    path: Path,
    name: str,
    lifetime_s: float | None = None,
    scopes: Iterable[str] = (),
) -> Token:
    """Make a token as `add` does, and write the secret to a new file of mode 0600.

    Raises as `add` does, and `TokensUnusable` if the new file cannot be written; then neither the
    token nor the file exists.
    """
    secret, token = _made(name, lifetime_s, scopes)
    if os.path.realpath(to) == os.path.realpath(path):
        raise TokensUnusable(f"{to} is the file of hashes: name another file for the token.")
    try:
        write_whole(to, f"{secret}\n".encode(), os.link)  # never replaces a file
    except FileExistsError:
        what = "is a directory" if os.path.isdir(to) else "exists already"
        raise TokensUnusable(f"{to} {what}: name a new file.") from None
    except UnsafeFile as error:
        raise TokensUnusable(f"{error}.") from error
    except OSError as error:
        raise TokensUnusable(f"{to} cannot be written: {error}.") from error
    try:
        _keep(path, token)
    except BaseException:
        to.unlink(missing_ok=True)
        raise
    return token


def revoke(path: Path, what: str) -> Sequence[Token]:
    """Revoke the tokens with this name, or the token with this id, and return them.

    Raises `TokensUnusable` or `OSError`.
    """
    with _locked(path, is_made=False) as (file, tokens):
        gone = [token for token in tokens if what in (token.name, token.id)]
        if gone:
            _write(file, [token for token in tokens if token not in gone])
    return gone


@contextlib.contextmanager
def _locked(path: Path, *, is_made: bool = True) -> Iterator[tuple[Path, Sequence[Token]]]:
    """The real path of the file and its tokens, locked against changes by other processes."""
    flags = os.O_RDWR | (os.O_CREAT if is_made else 0)
    while True:
        with _opened(path, flags) as (file, descriptor):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not os.path.samestat(os.fstat(descriptor), file.stat()):
                continue  # another process has replaced it while we waited for the lock
            yield file, _parse(path, os.pread(descriptor, FILE_BYTES_MAX + 1, 0))
            return


def _write(path: Path, tokens: Sequence[Token]) -> None:
    write_whole(path, msgspec.json.Encoder().encode_lines(tokens), os.replace)
