"""Authenticates requests by their bearer tokens, and refuses those without a valid one.

An `Authenticator` looks at the head of a request before the rest is read, and returns its caller.
The principal is `bearer(issuer, subject)`, the same over every transport and every connection. The
log says why a token was refused; all clients get the same answer.
"""

import re
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import trio

from streams.errors import INTERNAL_ERROR, Refusal, refusal
from streams.exchange import Caller, Head, HttpError
from streams.logs import log

TOKEN_BYTES_MAX: Final = 8 * 1024  # some issuers make tokens of several kilobytes
SUBJECT_LETTERS_MAX: Final = 255  # OpenID Connect, section 2, has the same

# A connection checks its token again after this time at the latest, so that a revoked token closes
# the connection.
RECHECK_S: Final = 30.0

# `Retry-After` of the answer while tokens cannot be checked.
RETRY_AFTER_S: Final = 15

LOG_EVERY_S: Final = 1.0

# The same answer for every invalid token, so that it tells nothing about other tokens.
_INVALID: Final = "The token is unknown, expired or revoked, or is not meant for this server."

_NOT_ACCEPTED: Final = (
    "This server does not accept the bearer token: send one that is not expired or revoked, and is "
    "meant for this server."
)

# RFC 6750, 2.1, and RFC 9110, 11.1: the name of a scheme has no case.
_BEARER: Final = re.compile(r"bearer +([-A-Za-z0-9._~+/]+=*)", re.IGNORECASE | re.ASCII)


class InvalidToken(Exception):
    """The token is missing or not valid. The text is for the log."""


class CannotVerify(Exception):
    """The token cannot be checked now. The text is for the log."""


class Verifier(Protocol):
    """Verifies one kind of bearer token."""

    def recognizes(self, token: str) -> bool:
        """Whether the token has the form of this kind."""

    async def verify(self, token: str) -> Caller:
        """The caller that the token belongs to. Raises `InvalidToken` or `CannotVerify`."""

    async def reload(self) -> None:
        """Read the tokens or keys again. If they cannot be used, the log says so."""


class Authenticator:
    """Authenticates the requests of a listener: `admit` is its `streams.exchange.Admit`.

    Requests that `is_public` need no token. `metadata_url` gives the URL at which a refused client
    reads how to get a token, or None. `scopes` are those that the tools need.
    """

    def __init__(
        self,
        verifiers: Sequence[Verifier],
        *,
        is_public: Callable[[Head], bool] = lambda head: False,
        metadata_url: Callable[[Head], str | None] = lambda head: None,
        scopes: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._verifiers = tuple(verifiers)
        self._logged_at = -float("inf")
        self._unlogged = 0
        self._is_open_to = is_public
        self._metadata_url = metadata_url
        self._scopes = scopes

    async def admit(self, head: Head) -> Caller | None:
        """The caller of the request; None if the request is public. Raises `HttpError`."""
        if self._is_open_to(head):
            return None
        given = head.headers.get("authorization", "")
        try:
            return await self._verify(given)
        except InvalidToken as error:
            self._log_refusal(head, str(error))
            raise self._denied(head, has_token=given[:7].lower() == "bearer ") from None
        except CannotVerify as error:
            log.warning("tokens cannot be checked now", why=str(error))
            busy = Refusal(INTERNAL_ERROR, "Tokens cannot be checked now: try again later.")
            raise HttpError(503, busy, (("retry-after", f"{RETRY_AFTER_S}"),)) from None

    def _log_refusal(self, head: Head, why: str) -> None:
        """Log at most once in `LOG_EVERY_S`, so that strangers cannot fill the log."""
        now = trio.current_time()
        self._unlogged += 1
        if now - self._logged_at >= LOG_EVERY_S:
            log.info("request refused", why=why, path=head.path[:200], times=self._unlogged)
            self._logged_at, self._unlogged = now, 0

    async def _verify(self, given: str) -> Caller:
        if not given:
            raise InvalidToken("no token")
        match = _BEARER.fullmatch(given)
        if match is None or len(match[1]) > TOKEN_BYTES_MAX:
            raise InvalidToken("not a bearer token, or too long")
        token = match[1]
        for verifier in self._verifiers:
            if verifier.recognizes(token):
                return await verifier.verify(token)
        raise InvalidToken("no verifier knows this kind of token")

    def _denied(self, head: Head, *, has_token: bool) -> HttpError:
        """RFC 6750, 3: a request without a token gets a challenge without an error."""
        error, why = ("invalid_token", _INVALID) if has_token else (None, None)
        url = self._metadata_url(head)
        header = challenge(error, why, scopes=self._scopes(), metadata_url=url)
        refused = refusal("unauthorized")
        return HttpError(401, refused.saying(_NOT_ACCEPTED) if has_token else refused, (header,))


def challenge(
    error: str | None,
    description: str | None,
    *,
    scopes: Sequence[str],
    metadata_url: str | None,
) -> tuple[str, str]:
    """The header that says which token is required: RFC 6750, 3, and RFC 9728, 5.1.

    The arguments must contain no quotes and no backslashes, since nothing is escaped.
    """
    told = {
        "error": error,
        "scope": " ".join(scopes),
        "resource_metadata": metadata_url,
        "error_description": description,
    }
    said = ", ".join(f'{name}="{value}"' for name, value in told.items() if value)
    return "www-authenticate", f"Bearer {said}".rstrip()


def principal_of(issuer: str, subject: str) -> str:
    """The principal of a token's subject. Raises `InvalidToken` if the subject is not usable."""
    if not (0 < len(subject) <= SUBJECT_LETTERS_MAX and subject.isprintable()):
        raise InvalidToken("the subject is empty, too long, or cannot be printed")
    return f"bearer({issuer}, {subject})"
